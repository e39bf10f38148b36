"""The K/V buffers of the real pool: what is written to a slot and how it is read back."""

from __future__ import annotations

import torch

from pagestorm_real.payload import PATTERN_WORDS_AT_ONCE, STAMP_WORDS, Payload

# Odd 64-bit constants with well-spread bits, as signed integers; products wrap around.
_MIX_STAY, _MIX_POSITION, _MIX_SIDE, _MIX_WORD = (
    -0x61C8864680B583EB,
    -0x3D4D51C2D82B14B1,
    0x165667B19E3779F9,
    -0x4B47D0C5A1A6A0F3,
)
_SIDE_SHIFT = 40


class KvBuffers:
    """K and V rows of `slots` slots, as 8-byte words: shape [layers, 2 (K, V), slots, row_words], int64."""

    def __init__(self, slots: int, payload: Payload, device: torch.device) -> None:
        self.payload = payload
        shape = (payload.layers, 2, slots, payload.row_words)
        self.words = torch.empty(shape, dtype=torch.int64, device=device)
        self._stamped = [self.words[layer, side, :, :STAMP_WORDS] for layer, side in self._sides()[:2]]
        self._word = torch.arange(payload.row_words, dtype=torch.int64, device=device) * _MIX_WORD

    def write(self, slots: torch.Tensor, stay: torch.Tensor, position: torch.Tensor) -> None:
        """Write the payload of token (stay, position) to each slot. All three have shape (tokens,), int64."""
        if self.payload.kind == "stamp":
            stamp = torch.stack((stay, position), dim=1)
            for rows in self._stamped:
                rows.index_copy_(0, slots, stamp)
            return
        for part in self._parts(len(slots)):
            for layer, side in self._sides():
                pattern = self._pattern(stay[part], position[part], 2 * layer + side)
                self.words[layer, side].index_copy_(0, slots[part], pattern)

    def mismatched(self, slots: torch.Tensor, stay: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Which slots do not hold the payload of token (stay, position): bool, shape (tokens,)."""
        if self.payload.kind == "stamp":
            stamp = torch.stack((stay, position), dim=1)
            wrong = [(rows.index_select(0, slots) != stamp).any(dim=1) for rows in self._stamped]
            return wrong[0] | wrong[1]
        bad = torch.zeros(len(slots), dtype=torch.bool, device=slots.device)
        for part in self._parts(len(slots)):
            for layer, side in self._sides():
                pattern = self._pattern(stay[part], position[part], 2 * layer + side)
                bad[part] |= (self.words[layer, side].index_select(0, slots[part]) != pattern).any(dim=1)
        return bad

    def describe(self, slot: int, stay: int, position: int) -> tuple[int, int, str]:
        """(stay, position) found in the first row of `slot` that is wrong, and which word of which row is."""
        stays, positions = (torch.tensor([value], device=self.words.device) for value in (stay, position))
        words = STAMP_WORDS if self.payload.kind == "stamp" else self.payload.row_words
        for layer, side in self._sides():
            row = self.words[layer, side, slot]
            number = 0 if self.payload.kind == "stamp" else 2 * layer + side
            wrong = (row != self._pattern(stays, positions, number)[0])[:words].nonzero()
            if len(wrong):
                place = f"layer {layer} {'KV'[side]} word {int(wrong[0])}"
                return int(row[0]), int(row[1]) - (number << _SIDE_SHIFT), place
        raise ValueError(f"slot {slot} holds what it should")

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor that is kept."""
        return [self.words, self._word]

    def _sides(self) -> list[tuple[int, int]]:
        """(layer, 0 for K or 1 for V) of the rows that are written."""
        if self.payload.kind == "stamp":
            return [(0, 0), (self.payload.layers - 1, 1)]
        return [(layer, side) for layer in range(self.payload.layers) for side in (0, 1)]

    def _parts(self, tokens: int) -> list[slice]:
        """The tokens in pieces whose pattern is of a bounded size."""
        step = max(1, PATTERN_WORDS_AT_ONCE // self.payload.row_words)
        return [slice(start, min(start + step, tokens)) for start in range(0, tokens, step)]

    def _pattern(self, stay: torch.Tensor, position: torch.Tensor, side: int) -> torch.Tensor:
        """Words of one row a token, shape (tokens, row_words): stay, position with the side above it, then a mix."""
        mixed = stay * _MIX_STAY + position * _MIX_POSITION + _signed(side * _MIX_SIDE)
        pattern = mixed.unsqueeze(1) ^ self._word
        pattern ^= pattern >> 29
        pattern[:, 0] = stay
        pattern[:, 1] = position + (side << _SIDE_SHIFT)
        return pattern


def _signed(value: int) -> int:
    """`value` modulo 2^64, as a signed 64-bit integer."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
