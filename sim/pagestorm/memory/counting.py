"""The counting ledger: lengths and a number of free pages, no page ids. The fast one, and the reference for counts."""

from __future__ import annotations

import numpy as np

from pagestorm.errors import PoolCorruption
from pagestorm.memory.allocator import PageIds
from pagestorm.memory.ledger import FULL, Ints
from pagestorm.memory.ranges import Ranges, add, overlaps

FEW = 40
"""Up to this many owners are looked at one by one."""


class CountingLedger:
    """Numbers only. `owners` bounds the owner ids (0..owners-1); the arrays have one entry an owner."""

    name = "counting"

    def __init__(self, pages: int, page_size: int, owners: int) -> None:
        self.page_size = page_size
        self._total = pages
        self._free = pages
        # Per owner: allocated length in tokens, and how many of its pages somebody else gives back or already has.
        self._length = np.zeros(owners, dtype=np.int64)
        self._foreign = np.zeros(owners, dtype=np.int64)
        # The same lengths, one at a time: a memoryview is several times faster there than the array itself.
        self._each = memoryview(self._length)  # type: ignore[arg-type]  # an array has a buffer
        # Pages that an owner only reads (aliased, moved away), and those it gave back; most owners have neither.
        self._lent: Ranges = {}
        self._dropped: Ranges = {}
        # Owners that end inside a page which is not theirs: a token more would be written into a stranger's page.
        self._sealed: set[int] = set()
        self._waiting: int | None = None

    def total_pages(self, pool: str = FULL) -> int:
        _check_pool(pool)
        return self._total

    def free_pages(self, pool: str = FULL) -> int:
        _check_pool(pool)
        return self._free

    def length(self, owner: int) -> int:
        return int(self._length[owner])

    def extend(self, owners: Ints, tokens: Ints) -> int | None:
        if len(owners) <= FEW:
            return self._grow_few(owners.tolist(), tokens.tolist())
        old = self._length.take(owners)
        return self._take(owners, old + tokens, self._opened(old, tokens))

    def decode(self, owners: Ints, steps: int, tokens_per_step: int = 1) -> int | None:
        more = steps * tokens_per_step
        if self.page_size > 1 and len(owners) <= FEW:
            return self._grow_few(owners.tolist(), [more] * len(owners))
        old = self._length.take(owners)
        opened = more * len(owners) if self.page_size == 1 else self._opened(old, more)
        return self._take(owners, old + more, opened)

    def _opened(self, old: Ints, more: Ints | int) -> int:
        """Pages that reach from the old lengths to those with `more` tokens."""
        p = self.page_size
        ends = old + (p - 1)
        return int(np.add.reduce((ends + more) // p - ends // p))

    def _grow_few(self, owners: list[int], tokens: list[int]) -> int | None:
        """The same for a handful of owners, where a loop beats numpy's fixed cost for each operation."""
        lengths, p = self._each, self.page_size
        old = [lengths[owner] for owner in owners]
        if p == 1:
            pages = sum(tokens)
        else:
            pages = 0
            for length, more in zip(old, tokens, strict=True):
                pages += -length // p - -(length + more) // p
        self._check_growth(owners)
        if not self._has(pages):
            return None
        self._free -= pages
        for owner, length, more in zip(owners, old, tokens, strict=True):
            lengths[owner] = length + more
        return pages

    def _take(self, owners: Ints, new: Ints, pages: int) -> int | None:
        self._check_growth(owners)
        if not self._has(pages):
            return None
        self._free -= pages
        self._length[owners] = new
        return pages

    def _has(self, pages: int) -> bool:
        return pages <= self._free

    def _check_growth(self, owners: Ints | list[int]) -> None:
        if self._sealed and not self._sealed.isdisjoint(list(owners)):
            raise PoolCorruption(f"one of the owners {list(owners)} ends inside a page that is not its own")

    def move(self, owner: int, a: int, b: int, to: int) -> None:
        first, last = self._owned_pages(owner, a, b)
        self._check_appendable(to, owner)
        self._length[to] += b - a
        self._disown(self._lent, owner, first, last, b)

    def alias(self, owner: int, source: int, a: int, b: int) -> None:
        first, last = self._pages_between(source, a, b)
        if overlaps(self._dropped, source, first, last):
            raise PoolCorruption(f"positions {a}..{b} of owner {source} were dropped; they cannot be aliased")
        self._check_appendable(owner, source)
        start = self.length(owner) // self.page_size
        self._length[owner] += b - a
        self._disown(self._lent, owner, start, start + last - first, self.length(owner))

    def replace(self, owner: int, a: int, b: int, source: int, at: int) -> int:
        first, last = self._owned_pages(owner, a, b)
        self._check_replaceable(owner, b, source, at, at + b - a)
        self._disown(self._lent, owner, first, last, b)
        self._give(last - first)
        return last - first

    def split(self, owner: int, at: int, head: int) -> None:
        if head == owner or self._length[head] or not 0 < at < self._length[owner]:
            raise PoolCorruption(f"owner {owner} (length {self.length(owner)}) cannot be split at {at} for {head}")
        self._owned_pages(owner, 0, at)
        self._owned_pages(owner, at, self.length(owner))
        self._length[head] = at
        self._length[owner] -= at

    def drop(self, owner: int, a: int, b: int, pool: str = FULL) -> int:
        _check_pool(pool)
        first, last = self._owned_pages(owner, a, b)
        self._disown(self._dropped, owner, first, last, b)
        self._give(last - first)
        return last - first

    def release_many(self, owners: Ints) -> int:
        if len(owners) <= FEW and not self._lent and not self._dropped:
            return self._release_few(owners.tolist())
        pages = int(self._owned(owners).sum())
        self._give(pages)
        self._length[owners] = 0
        if self._lent or self._dropped:
            self._foreign[owners] = 0
            for owner in owners.tolist():
                self._lent.pop(owner, None)
                self._dropped.pop(owner, None)
                self._sealed.discard(owner)
        return pages

    def begin_group(self) -> None:
        if self._waiting is not None:
            raise PoolCorruption("a group of pages is waiting already")
        self._waiting = 0

    def end_group(self) -> int:
        if self._waiting is None:
            raise PoolCorruption("no group of pages is waiting")
        pages, self._waiting = self._waiting, None
        self._give(pages)
        return pages

    def _release_few(self, owners: list[int]) -> int:
        lengths, p = self._each, self.page_size
        pages = 0
        for owner in owners:
            pages -= -lengths[owner] // p
            lengths[owner] = 0
        self._give(pages)
        return pages

    def last_ids(self) -> PageIds | None:
        return None

    def page_table(self, owner: int) -> PageIds | None:
        return None

    def audit(self) -> None:
        held = int(self._owned(slice(None)).sum()) + (self._waiting or 0)
        if held + self._free != self._total:
            raise PoolCorruption(f"{held} pages held + {self._free} free is not the pool of {self._total} pages")
        told = np.zeros_like(self._foreign)
        for ranges_of in (self._lent, self._dropped):
            for owner, ranges in ranges_of.items():
                told[owner] += sum(last - first for first, last in ranges)
        if not np.array_equal(told, self._foreign):
            owner = int(np.flatnonzero(told != self._foreign)[0])
            raise PoolCorruption(
                f"owner {owner} has {self._foreign[owner]} foreign pages; its ranges say {told[owner]}"
            )

    def verify(self, owners: Ints) -> None:
        """Nothing is written, so there is nothing to read back."""

    def _pages_between(self, owner: int, a: int, b: int) -> tuple[int, int]:
        p, length = self.page_size, self.length(owner)
        if not (0 <= a <= b <= length) or a % p or (b % p and b != length):
            raise PoolCorruption(f"positions {a}..{b} of owner {owner} (length {length}) are not whole pages")
        return a // p, -(-b // p)

    def _owned_pages(self, owner: int, a: int, b: int) -> tuple[int, int]:
        first, last = self._pages_between(owner, a, b)
        if overlaps(self._lent, owner, first, last) or overlaps(self._dropped, owner, first, last):
            raise PoolCorruption(f"positions {a}..{b} of owner {owner} are not all its own to give")
        return first, last

    def _owned(self, owners: Ints | slice) -> Ints:
        """Pages that each of them will give back."""
        p = self.page_size
        return (self._length[owners] + (p - 1)) // p - self._foreign[owners]

    def _check_appendable(self, owner: int, source: int) -> None:
        if owner == source:
            raise PoolCorruption(f"owner {owner} cannot take pages from itself")
        if self._length[owner] % self.page_size:
            raise PoolCorruption(f"owner {owner} ends inside a page; nothing can be appended behind it")

    def _check_replaceable(self, owner: int, b: int, source: int, at: int, end: int) -> None:
        if owner == source or b % self.page_size or end % self.page_size:
            raise PoolCorruption(f"owner {owner} cannot read {source} up to {end} at its positions up to {b}")
        first, last = self._pages_between(source, at, end)
        if overlaps(self._dropped, source, first, last):
            raise PoolCorruption(f"positions {at}..{end} of owner {source} were dropped; they cannot be read")

    def _disown(self, ranges: Ranges, owner: int, first: int, last: int, b: int) -> None:
        """From now on the owner does not own pages first..last-1, which end at its position `b`."""
        if first == last:
            return
        self._foreign[owner] += last - first
        add(ranges, owner, first, last)
        if b % self.page_size:
            self._sealed.add(owner)

    def _give(self, pages: int) -> None:
        if self._waiting is not None:
            self._waiting += pages
            return
        self._free += pages
        if self._free > self._total:
            raise PoolCorruption(f"{self._free} pages free in a pool of {self._total}")


def _check_pool(pool: str) -> None:
    if pool != FULL:
        raise KeyError(f"no pool {pool!r}; this ledger has one, {FULL!r}")
