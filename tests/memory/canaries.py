"""Pools that are broken on purpose, one fault each. Whoever checks pools must find every one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pagestorm.errors import PoolCorruption
from pagestorm.memory.allocator import PageIds
from pagestorm.memory.counting import CountingLedger
from pagestorm.memory.ledger import FULL, Ints, Ledger
from pagestorm.memory.paged import FreeList, PagedLedger

# Allocators


class LosesTheLastOfAGroup(FreeList):
    """A leak: of each group of two or more, the last page never comes back."""

    def give(self, ids: PageIds) -> None:
        super().give(ids if len(ids) < 2 else ids[:-1])


class FreesTwice(FreeList):
    """A double free that nobody checks: the first page of a group goes on the list again."""

    def give(self, ids: PageIds) -> None:
        super().give(ids)
        self._free.append(int(ids[0]))


class HandsAPageOutTwice(FreeList):
    """An alias: the first page taken stays on the list."""

    def take(self, n: int) -> PageIds | None:
        ids = super().take(n)
        if ids is not None and len(ids) > 1:
            self._free.append(int(ids[0]))
        return ids


class HandsOutPageZero(FreeList):
    """Pages 0..N-1 instead of 1..N."""

    def take(self, n: int) -> PageIds | None:
        ids = super().take(n)
        return None if ids is None else ids - 1

    def give(self, ids: PageIds) -> None:
        super().give(ids + 1)


class PutsGroupsAtTheWrongEnd(FreeList):
    """Front for pages of one token, back for the others."""

    def __init__(self, pages: int, page_size: int) -> None:
        super().__init__(pages, page_size)
        self._returns_to_front = page_size == 1


class TurnsGroupsRound(FreeList):
    """A group comes back last page first."""

    def give(self, ids: PageIds) -> None:
        super().give(ids[::-1])


class KeepsWhatItCouldTake(FreeList):
    """Not all or nothing: a call that finds too few pages loses those it found."""

    def take(self, n: int) -> PageIds | None:
        if n > self.free_pages:
            super().take(self.free_pages)
            return None
        return super().take(n)


# Ledgers


class OpensPagesLate(PagedLedger):
    """Off by one page: the token that opens a page is thought to fit in the last one."""

    def _pages(self, tokens: Ints) -> Ints:
        p = self.page_size
        return tokens if p == 1 else np.where(tokens == 0, 0, (tokens + p - 2) // p)


class ForgetsTheTail(PagedLedger):
    """A release gives back whole pages only; the partly used last page leaks."""

    def _owned_pages(self, owner: int) -> list[int]:
        pages = super()._owned_pages(owner)
        return pages[:-1] if self._length[owner] % self.page_size else pages


class GrowsOneByOne(PagedLedger):
    """An extend that fails half-way keeps the requests that it had already served."""

    def extend(self, owners: Ints, tokens: Ints) -> int | None:
        pages, ids = 0, []
        for place in range(len(owners)):
            taken = super().extend(owners[place : place + 1], tokens[place : place + 1])
            if taken is None:
                return None
            pages += taken
            ids.append(self._last)
        self._last = np.concatenate(ids) if ids else self._last[:0]
        return pages


class GivesBackWhatItOnlyReads(PagedLedger):
    """A release that does not ask whether the pages are its own."""

    def release_many(self, owners: Ints) -> int:
        for owner in owners.tolist():
            self._not_owned.pop(owner, None)
        return super().release_many(owners)


class ReadsOnAfterADrop(PagedLedger):
    """A window release that forgets to empty the table."""

    def drop(self, owner: int, a: int, b: int, pool: str = FULL) -> int:
        before = list(self._tables[owner])
        pages = super().drop(owner, a, b, pool)
        self._tables[owner] = before
        return pages


class DecodesRequestByRequest(PagedLedger):
    """Many steps at once hand pages out request by request instead of step by step."""

    def decode(self, owners: Ints, steps: int, tokens_per_step: int = 1) -> int | None:
        return self.extend(owners, np.full(len(owners), steps * tokens_per_step))


class RefusesTheLastPage(CountingLedger):
    """Full one page too early. Says so without ids: only the count shows it."""

    def _has(self, pages: int) -> bool:
        return super()._has(pages) and not (pages and pages == self._free)


@dataclass(frozen=True)
class Canary:
    """A broken pool: how to make it, and whether its own audit can see the fault."""

    make: Callable[[int, int, int], Ledger]
    audit_sees_it: bool
    seen_with_pages_of: int = 4
    """A page size at which the fault shows."""


def _on(allocator: type[FreeList]) -> Callable[[int, int, int], Ledger]:
    return lambda pages, page_size, owners: PagedLedger(pages, page_size, owners, allocator(pages, page_size))


def _on_torch(fault: str) -> Callable[[int, int, int], Ledger]:
    def make(pages: int, page_size: int, owners: int) -> Ledger:
        from tests.memory import torch_canaries

        ledger: Ledger = getattr(torch_canaries, fault)(pages, page_size, owners, 4096)
        return ledger

    return make


CANARIES: dict[str, Canary] = {
    "leak": Canary(_on(LosesTheLastOfAGroup), audit_sees_it=True),
    "double free": Canary(_on(FreesTwice), audit_sees_it=True),
    "alias handed out twice": Canary(_on(HandsAPageOutTwice), audit_sees_it=True),
    "page 0 handed out": Canary(_on(HandsOutPageZero), audit_sees_it=True),
    "wrong end of the list": Canary(_on(PutsGroupsAtTheWrongEnd), audit_sees_it=False),
    "group turned round": Canary(_on(TurnsGroupsRound), audit_sees_it=False),
    "allocator not all or nothing": Canary(_on(KeepsWhatItCouldTake), audit_sees_it=True),
    "off by one page": Canary(OpensPagesLate, audit_sees_it=False),
    "tail forgotten": Canary(ForgetsTheTail, audit_sees_it=True),
    "extend not all or nothing": Canary(GrowsOneByOne, audit_sees_it=False),
    "gives back what it only reads": Canary(GivesBackWhatItOnlyReads, audit_sees_it=True),
    "reads on after a drop": Canary(ReadsOnAfterADrop, audit_sees_it=True),
    "decode request by request": Canary(DecodesRequestByRequest, audit_sees_it=False),
    "refuses the last page": Canary(RefusesTheLastPage, audit_sees_it=False),
    "stamp overwritten (torch)": Canary(_on_torch("WritesTheSlotBeforeToo"), audit_sees_it=True),
    "stamp never written (torch)": Canary(_on_torch("ForgetsToWrite"), audit_sees_it=True),
    "table entry of another (torch)": Canary(_on_torch("EntersIntoTheNextRow"), audit_sees_it=True),
    "ring that does not go round (torch)": Canary(_on_torch("LosesTheWrap"), audit_sees_it=True, seen_with_pages_of=1),
}

FOUND = (AssertionError, PoolCorruption)
