"""What a scheduler of blocks (vLLM's) asks of its memory, and the plain answer to it: numbers over a `Ledger`.

A *row* is the small integer under which a running request holds its blocks. A row that holds room for t tokens has
ceil(t / block_size) blocks. Block 0 is never handed out and belongs to nobody's count.

The caller asks for room only after it has seen that it is there (`free_blocks`); asking for more is its own fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pagestorm.errors import PoolCorruption
from pagestorm.memory.ledger import Ints, Ledger


class Text:
    """What a request's tokens are, as far as sharing goes: the keys of its blocks.

    `shared` are the keys of leading blocks that hold nothing but shared text; block j beyond them has the key
    `own + j`, which no other request has.
    """

    __slots__ = ("own", "shared")

    def __init__(self, shared: Sequence[int], own: int) -> None:
        self.shared = shared
        self.own = own

    def key(self, block: int) -> int:
        """Key of the request's block number `block`: equal keys mean equal tokens from the start of the prompt on."""
        return self.shared[block] if block < len(self.shared) else self.own + block


@dataclass(frozen=True, slots=True)
class Hit:
    """Blocks that hold the start of a request already."""

    tokens: int
    blocks: Sequence[int]
    free: int
    """How many of them nobody holds: adopting the hit takes these out of the free blocks."""


NO_HIT = Hit(0, (), 0)


class Preview(Protocol):
    """Answers for rows given up one after another, without giving them up."""

    def give(self, row: int) -> int:
        """Blocks that become free when `row` goes too."""


class Blocks(Protocol):
    """Blocks by row. Batches are numpy int64 arrays in batch order; a row appears once in a batch."""

    @property
    def block_size(self) -> int:
        """Tokens in a block."""

    @property
    def total_blocks(self) -> int:
        """Blocks that can be handed out; the engine's number of blocks is one more."""

    @property
    def free_blocks(self) -> int:
        """Blocks that could be taken now, those that still hold cached tokens included."""

    @property
    def cached_blocks(self) -> int:
        """Free blocks that a later prompt could hit."""

    @property
    def evicted_blocks(self) -> int:
        """Cached blocks that were handed out for other tokens so far."""

    def text(self, number: int, prefix: Sequence[tuple[int, int]], input_tokens: int) -> Text | None:
        """Keys for the prompt of request `number`; None where nothing is cached.

        `prefix` are runs (group, tokens): the prompt starts with the first tokens of each group's text, one run
        after the other, then comes text that is its own.
        """

    def lookup(self, text: Text | None, tokens: int) -> Hit:
        """The longest cached start of a sequence of `tokens` tokens, whole blocks, at most tokens - 1."""

    def adopt(self, row: int, text: Text | None, hit: Hit) -> None:
        """Row `row`, which holds nothing, becomes the holder of the hit's blocks for that text."""

    def take(self, rows: Ints, old: Ints, new: Ints, known: Ints) -> int:
        """Grow each row's room from `old` to `new` tokens, in this order; returns the blocks taken.

        `known` tokens of each row are computed or are about to be: whole blocks of them can be hit from now on.
        """

    def decode(self, rows: Ints, room: Ints, known: Ints, steps: int) -> int:
        """`steps` times: grow every row by one token of room from `room`, in this order; returns the blocks taken."""

    def give(self, rows: Sequence[int]) -> int:
        """The rows give back all they hold, one after another, each with its last block first; returns how many
        blocks became free."""

    def preview(self) -> Preview:
        """See what giving up rows would free."""

    def audit(self) -> None:
        """Look at everything. Raises `PoolCorruption`."""


class CountedBlocks:
    """No prefix cache: a request's blocks are its own, so numbers suffice. The numbers are a ledger's."""

    cached_blocks = 0
    evicted_blocks = 0

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.block_size = ledger.page_size
        self.total_blocks = ledger.total_pages()
        self.free_blocks = ledger.free_pages()

    def text(self, number: int, prefix: Sequence[tuple[int, int]], input_tokens: int) -> Text | None:
        return None

    def lookup(self, text: Text | None, tokens: int) -> Hit:
        return NO_HIT

    def adopt(self, row: int, text: Text | None, hit: Hit) -> None:
        """There is nothing to adopt."""

    def take(self, rows: Ints, old: Ints, new: Ints, known: Ints) -> int:
        return self._took(self.ledger.extend(rows, new - old))

    def decode(self, rows: Ints, room: Ints, known: Ints, steps: int) -> int:
        return self._took(self.ledger.decode(rows, steps, 1))

    def _took(self, blocks: int | None) -> int:
        if blocks is None:
            raise PoolCorruption(f"more blocks were asked for than the {self.free_blocks} that are free")
        self.free_blocks -= blocks
        return blocks

    def give(self, rows: Sequence[int]) -> int:
        blocks = self.ledger.release_many(np.array(rows, dtype=np.int64))
        self.free_blocks += blocks
        return blocks

    def preview(self) -> Preview:
        return _LengthPreview(self.ledger)

    def audit(self) -> None:
        self.ledger.audit()
        if self.free_blocks != self.ledger.free_pages():
            raise PoolCorruption(f"{self.free_blocks} blocks counted free, the ledger has {self.ledger.free_pages()}")


class _LengthPreview:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def give(self, row: int) -> int:
        return -(-self._ledger.length(row) // self._ledger.page_size)
