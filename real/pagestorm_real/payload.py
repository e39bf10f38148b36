"""What the real pool writes into its K/V buffers, and the shape of a slot.

A slot is the room of one token: per layer one K row and one V row of kv_heads x head_dim elements. What is written
names the *stay* that wrote it (an owner's time between two releases, numbered from 1) and the position of the token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["stamp", "full", "none"]

WORD_BYTES = 8
STAMP_WORDS = 2
PATTERN_WORDS_AT_ONCE = 1 << 20
"""Words of the `full` pattern that are worked out in one piece."""


@dataclass(frozen=True)
class Payload:
    """What is written to a slot, and the shape of one.

    kind: `stamp`, 16 bytes (stay, position) in the K row of the first and the V row of the last layer; `full`, a
    pattern of stay, position, layer and K or V over the whole slot in every layer; `none`, no buffers at all.
    A row is padded to whole 8-byte words, and to 16 bytes.
    """

    kind: Kind = "stamp"
    layers: int = 1
    kv_heads: int = 1
    head_dim: int = 8
    dtype_bytes: int = 2

    def __post_init__(self) -> None:
        if self.kind not in ("stamp", "full", "none"):
            raise ValueError(f"payload kind {self.kind!r}; known: stamp, full, none")
        for name in ("layers", "kv_heads", "head_dim", "dtype_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"payload {name} is {getattr(self, name)}; it must be at least 1")

    @property
    def row_words(self) -> int:
        """8-byte words of a K or V row."""
        return max(STAMP_WORDS, -(-self.kv_heads * self.head_dim * self.dtype_bytes // WORD_BYTES))

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot over all layers, K and V."""
        return 0 if self.kind == "none" else self.layers * 2 * self.row_words * WORD_BYTES

    @property
    def scratch_bytes(self) -> int:
        """Memory that writing and checking needs for a moment: the pattern, what was found, and what they differ in."""
        return 4 * PATTERN_WORDS_AT_ONCE * WORD_BYTES if self.kind == "full" else 0


DEFAULT_PAYLOAD = Payload()
