"""The paged ledger: page ids in pure Python, on any page allocator.

It is the plain statement of who holds which page, and the one that other pools are compared with.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from pagestorm.errors import PoolCorruption
from pagestorm.memory.allocator import PageAllocator, PageIds
from pagestorm.memory.ledger import FULL, Ints
from pagestorm.memory.ranges import Ranges, add, overlaps

NO_PAGE = -1
"""What a page table shows where the page was dropped."""


@runtime_checkable
class ListsFreePages(Protocol):
    """An allocator that can show its free list; an audit then looks at each page instead of at their number only."""

    def free_ids(self) -> PageIds:
        """The free list, front first."""


class FreeList:
    """The page allocator in pure Python: a deque of page ids.

    A group that comes back goes in front when a page holds several tokens and behind when a page is one token
    (sglang 0.5.23, `mem_cache/allocator/paged.py` `_release_page_ids`, `token.py` `free`).
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self._free = deque(range(1, pages + 1))
        self._out = bytearray(pages + 1)  # 1: handed out; page 0 never is
        self._returns_to_front = page_size > 1

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def take(self, n: int) -> PageIds | None:
        if n > len(self._free):
            return None
        front = self._free.popleft
        pages = [front() for _ in range(n)]
        for page in pages:
            self._out[page] = 1
        return np.array(pages, dtype=np.int64)

    def give(self, ids: PageIds) -> None:
        pages = ids.tolist()
        self._check_out(pages)
        for page in pages:
            self._out[page] = 0
        if self._returns_to_front:
            self._free.extendleft(reversed(pages))
        else:
            self._free.extend(pages)

    def free_ids(self) -> PageIds:
        return np.array(self._free, dtype=np.int64)

    def _check_out(self, pages: list[int]) -> None:
        for page in pages:
            if not 0 < page < len(self._out):
                raise PoolCorruption(f"page {page} given back to a pool of pages 1..{len(self._out) - 1}")
            if not self._out[page]:
                raise PoolCorruption(f"page {page} given back while it is free")
        if len(set(pages)) != len(pages):
            twice = next(page for page in pages if pages.count(page) > 1)
            raise PoolCorruption(f"page {twice} given back twice in one group")


class PagedLedger:
    """Who holds which page: a Python list of page ids an owner. `owners` bounds the owner ids (0..owners-1).

    Whatever the allocator hands out is checked at once: ids in range, none that is already held.
    """

    name = "paged"

    def __init__(self, pages: int, page_size: int, owners: int, allocator: PageAllocator | None = None) -> None:
        self.page_size = page_size
        self._total = pages
        self._allocator = FreeList(pages, page_size) if allocator is None else allocator
        self._length = np.zeros(owners, dtype=np.int64)
        self._tables: defaultdict[int, list[int]] = defaultdict(list)
        # Places in an owner's table whose page it does not own: aliased, moved away or dropped. Most owners have none.
        self._not_owned: Ranges = {}
        # Owners that end inside a page which is not theirs: a token more would be written into a stranger's page.
        self._sealed: set[int] = set()
        self._held = np.zeros(pages + 1, dtype=np.bool_)
        self._last = _no_pages()
        self._waiting: list[PageIds] | None = None

    def total_pages(self, pool: str = FULL) -> int:
        _check_pool(pool)
        return self._total

    def free_pages(self, pool: str = FULL) -> int:
        _check_pool(pool)
        return self._allocator.free_pages

    def length(self, owner: int) -> int:
        return int(self._length[owner])

    def extend(self, owners: Ints, tokens: Ints) -> int | None:
        old = self._length[owners]
        new = old + tokens
        opened = self._pages(new) - self._pages(old)
        ids = self._open(owners, int(opened.sum()))
        if ids is None:
            return None
        pages, start = ids.tolist(), 0
        for owner, n in zip(owners.tolist(), opened.tolist(), strict=True):
            self._tables[owner].extend(pages[start : start + n])
            start += n
        self._length[owners] = new
        return len(ids)

    def decode(self, owners: Ints, steps: int, tokens_per_step: int = 1) -> int | None:
        old = self._length[owners]
        new = old + steps * tokens_per_step
        opened = self._pages(new) - self._pages(old)
        ids = self._open(owners, int(opened.sum()))
        if ids is None:
            return None
        if not len(ids):
            pass
        elif self.page_size == 1:
            self._append_columns(owners, ids, steps, tokens_per_step)
        else:
            openers = owners[self._openers(old, opened, steps, tokens_per_step)]
            for owner, page in zip(openers.tolist(), ids.tolist(), strict=True):
                self._tables[owner].append(page)
        self._length[owners] = new
        return len(ids)

    def move(self, owner: int, a: int, b: int, to: int) -> None:
        first, last = self._owned_places(owner, a, b)
        self._check_appendable(to, owner)
        self._tables[to].extend(self._tables[owner][first:last])
        self._length[to] += b - a
        self._disown(owner, first, last, b)

    def alias(self, owner: int, source: int, a: int, b: int) -> None:
        first, last = self._places(source, a, b)
        pages = self._tables[source][first:last]
        if NO_PAGE in pages:
            raise PoolCorruption(f"positions {a}..{b} of owner {source} were dropped; they cannot be aliased")
        self._check_appendable(owner, source)
        table = self._tables[owner]
        start = len(table)
        table.extend(pages)
        self._length[owner] += b - a
        self._disown(owner, start, len(table), int(self._length[owner]))

    def replace(self, owner: int, a: int, b: int, source: int, at: int) -> int:
        first, last = self._owned_places(owner, a, b)
        shared = self._replacement(owner, b, source, at, at + b - a)
        table = self._tables[owner]
        pages = table[first:last]
        table[first:last] = shared
        self._disown(owner, first, last, b)
        return self._give(pages)

    def split(self, owner: int, at: int, head: int) -> None:
        length = self.length(owner)
        if head == owner or self._length[head] or not 0 < at < length:
            raise PoolCorruption(f"owner {owner} (length {length}) cannot be split at {at} for {head}")
        self._owned_places(owner, at, length)
        _, place = self._owned_places(owner, 0, at)
        table = self._tables[owner]
        self._tables[head], self._tables[owner] = table[:place], table[place:]
        self._length[head], self._length[owner] = at, length - at

    def drop(self, owner: int, a: int, b: int, pool: str = FULL) -> int:
        _check_pool(pool)
        first, last = self._owned_places(owner, a, b)
        table = self._tables[owner]
        pages = table[first:last]
        table[first:last] = [NO_PAGE] * len(pages)
        self._disown(owner, first, last, b)
        return self._give(pages)

    def release_many(self, owners: Ints) -> int:
        pages: list[int] = []
        for owner in owners.tolist():
            pages.extend(self._owned_pages(owner))
            self._tables.pop(owner, None)
            self._not_owned.pop(owner, None)
            self._sealed.discard(owner)
        self._length[owners] = 0
        return self._give(pages)

    def begin_group(self) -> None:
        if self._waiting is not None:
            raise PoolCorruption("a group of pages is waiting already")
        self._waiting = []

    def end_group(self) -> int:
        if self._waiting is None:
            raise PoolCorruption("no group of pages is waiting")
        ids = np.concatenate((_no_pages(), *self._waiting))
        self._waiting = None
        self._give_back(ids)
        return len(ids)

    def last_ids(self) -> PageIds | None:
        return self._last

    def page_table(self, owner: int) -> PageIds | None:
        return np.array(self._tables.get(owner, ()), dtype=np.int64)

    def audit(self) -> None:
        for owner in {*self._tables, *np.flatnonzero(self._length).tolist()}:
            pages = len(self._tables.get(owner, ()))
            if pages != self._pages(self._length[owner]):
                raise PoolCorruption(f"owner {owner} has {pages} pages for {self.length(owner)} tokens")
        owned = np.array([page for owner in self._tables for page in self._owned_pages(owner)], np.int64)
        if len(owned) and not (0 < owned.min() <= owned.max() <= self._total):
            raise PoolCorruption(f"a page outside 1..{self._total} is owned")
        times = np.bincount(owned, minlength=self._total + 1)
        if times.max(initial=0) > 1:
            page = int(times.argmax())
            raise PoolCorruption(f"page {page} is owned more than once, by owners {self._owners_of(page)}")
        self._audit_readers(times > 0)
        if self._waiting:
            times += np.bincount(np.concatenate(self._waiting), minlength=self._total + 1)
            if times.max() > 1:
                raise PoolCorruption(f"page {int(times.argmax())} was given back and is owned, or given back twice")
        self._audit_free(times > 0)

    def verify(self, owners: Ints) -> None:
        """Ids only: nothing is written, so there is nothing to read back."""

    def _pages(self, tokens: Ints) -> Ints:
        return (tokens + (self.page_size - 1)) // self.page_size

    def _open(self, owners: Ints, n: int) -> PageIds | None:
        """Take `n` pages for a growth of `owners`, check them, and keep them as the last ids."""
        if self._sealed and not self._sealed.isdisjoint(owners.tolist()):
            sealed = sorted(self._sealed.intersection(owners.tolist()))
            raise PoolCorruption(f"owner {sealed[0]} ends inside a page that is not its own; it cannot grow there")
        ids = self._allocator.take(n) if n else _no_pages()
        if ids is None:
            return None
        self._check_handed_out(ids, n)
        self._held[ids] = True
        self._last = ids
        return ids

    def _check_handed_out(self, ids: PageIds, n: int) -> None:
        if len(ids) != n:
            raise PoolCorruption(f"the allocator was asked for {n} pages and gave {len(ids)}")
        if n and (ids.min() < 1 or ids.max() > self._total):
            wrong = ids[(ids < 1) | (ids > self._total)]
            raise PoolCorruption(f"the allocator handed out page {wrong[0]}; pages are 1..{self._total}")
        if self._held[ids].any():
            raise PoolCorruption(f"the allocator handed out page {ids[self._held[ids]][0]}, which is already held")
        if len(set(ids.tolist())) != n:
            raise PoolCorruption(f"the allocator handed out one page twice in a call: {ids.tolist()}")

    def _append_columns(self, owners: Ints, ids: PageIds, steps: int, tokens_per_step: int) -> None:
        """Page size 1: every token is a page, so the ids are a (step, batch position, token) block."""
        columns = ids.reshape(steps, len(owners), tokens_per_step).transpose(1, 0, 2).reshape(len(owners), -1)
        for owner, pages in zip(owners.tolist(), columns.tolist(), strict=True):
            self._tables[owner].extend(pages)

    def _openers(self, old: Ints, opened: Ints, steps: int, tokens_per_step: int) -> Ints:
        """Batch position that opens each page, in (step, batch position) order.

        The nth page an owner opens holds its new token number (-old mod p) + n p, counted from 0; that token is
        made in step number token // tokens_per_step.
        """
        position = np.repeat(np.arange(len(old)), opened)
        if steps == 1:
            return position
        nth = np.arange(len(position)) - np.repeat(np.cumsum(opened) - opened, opened)
        step = ((-old % self.page_size)[position] + nth * self.page_size) // tokens_per_step
        return position[np.argsort(step, kind="stable")]

    def _give(self, pages: list[int]) -> int:
        ids = np.array(pages, dtype=np.int64)
        if self._waiting is None:
            self._give_back(ids)
        else:
            self._waiting.append(ids)
            self._last = ids
        return len(ids)

    def _give_back(self, ids: PageIds) -> None:
        if len(ids):
            self._allocator.give(ids)
            self._held[ids] = False
        self._last = ids

    def _owned_pages(self, owner: int) -> list[int]:
        table, not_owned = self._tables[owner], self._not_owned.get(owner)
        if not_owned is None:
            return table
        pages: list[int] = []
        start = 0
        for first, last in sorted(not_owned):
            pages.extend(table[start:first])
            start = last
        pages.extend(table[start:])
        return pages

    def _places(self, owner: int, a: int, b: int) -> tuple[int, int]:
        """Places in the table of the pages that hold positions a..b-1, which must be whole pages of the owner."""
        p, length = self.page_size, self.length(owner)
        if not (0 <= a <= b <= length) or a % p or (b % p and b != length):
            raise PoolCorruption(f"positions {a}..{b} of owner {owner} (length {length}) are not whole pages")
        return a // p, -(-b // p)

    def _owned_places(self, owner: int, a: int, b: int) -> tuple[int, int]:
        first, last = self._places(owner, a, b)
        if overlaps(self._not_owned, owner, first, last):
            raise PoolCorruption(f"positions {a}..{b} of owner {owner} are not all its own to give")
        return first, last

    def _replacement(self, owner: int, b: int, source: int, at: int, end: int) -> list[int]:
        """The pages under positions at..end-1 of `source`, for positions of `owner` up to b."""
        if owner == source or b % self.page_size or end % self.page_size:
            raise PoolCorruption(f"owner {owner} cannot read {source} up to {end} at its positions up to {b}")
        first, last = self._places(source, at, end)
        pages = self._tables[source][first:last]
        if NO_PAGE in pages:
            raise PoolCorruption(f"positions {at}..{end} of owner {source} were dropped; they cannot be read")
        return pages

    def _check_appendable(self, owner: int, source: int) -> None:
        if owner == source:
            raise PoolCorruption(f"owner {owner} cannot take pages from itself")
        if self._length[owner] % self.page_size:
            raise PoolCorruption(f"owner {owner} ends inside a page; nothing can be appended behind it")

    def _disown(self, owner: int, first: int, last: int, b: int) -> None:
        """From now on the owner only reads the pages at places first..last-1, which end at its position `b`."""
        if first < last:
            add(self._not_owned, owner, first, last)
            if b % self.page_size:
                self._sealed.add(owner)

    def _owners_of(self, page: int) -> list[int]:
        return [owner for owner in sorted(self._tables) for held in self._owned_pages(owner) if held == page]

    def _audit_readers(self, owned: npt.NDArray[np.bool_]) -> None:
        for owner, ranges in self._not_owned.items():
            for page in (page for first, last in ranges for page in self._tables[owner][first:last]):
                if page != NO_PAGE and not owned[page]:
                    raise PoolCorruption(f"owner {owner} still reads page {page}, which nobody owns any more")

    def _audit_free(self, owned: npt.NDArray[np.bool_]) -> None:
        held, free = int(owned.sum()), self._allocator.free_pages
        if held + free != self._total:
            raise PoolCorruption(f"{held} pages held + {free} free is not the pool of {self._total} pages")
        if isinstance(self._allocator, ListsFreePages):
            listed = np.sort(self._allocator.free_ids())
            if not np.array_equal(listed, np.flatnonzero(~owned[1:]) + 1):
                raise PoolCorruption("the free list is not the pages that nobody holds")


def _no_pages() -> PageIds:
    return np.empty(0, dtype=np.int64)


def _check_pool(pool: str) -> None:
    if pool != FULL:
        raise KeyError(f"no pool {pool!r}; this ledger has one, {FULL!r}")
