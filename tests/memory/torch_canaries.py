"""Torch pools that are broken on purpose; apart from the others because they need torch."""

from __future__ import annotations

import torch

from pagestorm.memory.ledger import Ints
from pagestorm_real.pool import TorchLedger, TorchPool


class WritesTheSlotBeforeToo(TorchLedger):
    """A kernel that writes the K/V of a decoded token into the slot before its own as well."""

    def _write_one_token_each(self, owners: Ints, old: Ints) -> None:
        super()._write_one_token_each(owners, old)
        assert self._buffers is not None
        where, in_page, stay, position = self._send(
            owners * self._width + old // self.page_size, old % self.page_size, self._stay[owners], old
        )
        slots = self._flat[where].to(torch.int64) * self.page_size + in_page
        self._buffers.write(slots - 1, stay, position)


class ForgetsToWrite(TorchLedger):
    """Whatever comes behind the first 8 tokens of a call is not written."""

    def _write_tokens(self, owners: Ints, old: Ints, new: Ints, looked_up: bool) -> None:
        super()._write_tokens(owners, old, new.clip(max=old + 8), looked_up)


class EntersIntoTheNextRow(TorchLedger):
    """The page of the last owner of a batch is entered one place too far in the request table."""

    def _enter(self, owners: Ints, places: Ints, ids: torch.Tensor) -> None:
        places = places.copy()
        places[-1] += 1
        super()._enter(owners, places, ids)


class _WraplessPool(TorchPool):
    """What would go behind the end of the ring is written over its last entries."""

    def _write(self, start: int, ids: torch.Tensor) -> None:
        super()._write(min(start, self._pages - len(ids)), ids)


class LosesTheWrap(TorchLedger):
    def __init__(self, pages: int, page_size: int, owners: int, max_length: int) -> None:
        super().__init__(pages, page_size, owners, max_length)
        self._pool = _WraplessPool(pages, page_size)
