"""Pool use over time in one line of text, and the reader of the record that it is drawn from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from pagestorm.events import RawEvent

if TYPE_CHECKING:
    from pagestorm.record import TimelineRow

BLOCKS = "".join(chr(0x2581 + i) for i in range(8))
"""Lower one eighth block to full block."""
ASCII = "_.:-=+*#"
BUCKETS = 512
"""Stretches of time that are kept while a run goes on; when they are full two become one."""
FIRST_BUCKET_NS = 1_000_000


class PoolUse:
    """A sink that keeps the most pages in use in each of at most `BUCKETS` equal stretches of simulated time."""

    def __init__(self, pool_pages: int) -> None:
        self.pool_pages = pool_pages
        self.last_ns = 0
        self._width_ns = FIRST_BUCKET_NS
        self._most: list[int] = []
        self._start = 0
        """In use at the latest time."""
        self._level = 0
        """In use by the next one, steadily more until then."""

    def write(self, events: Sequence[RawEvent]) -> None:
        """Take a chunk of the record."""
        pages = self.pool_pages
        for event in events:
            used = pages - event[7] - event[8]
            # A leap is told at its start with the pages that it has taken by its end.
            self.add(event[0], self._level if event[3] == "leap" else used)
            self._level = used

    def close(self) -> None:
        """Nothing is held open."""

    def add(self, time_ns: int, used_pages: int) -> None:
        """At `time_ns` so many pages are in use. A time before the latest one counts as the latest."""
        most, width_ns = self._most, self._width_ns
        self.last_ns = max(self.last_ns, time_ns)
        while self.last_ns // width_ns >= BUCKETS:
            padded = [*most, *most[-1:]] if len(most) % 2 else most
            self._most = most = [max(pair) for pair in zip(padded[::2], padded[1::2], strict=True)]
            self._width_ns = width_ns = 2 * width_ns
        at = self.last_ns // width_ns
        begun = len(most)
        if begun <= at:
            start, gain = self._start, self._level - self._start
            most.extend(start + gain * (i + 1) // (at + 1 - begun) for i in range(at + 1 - begun))
        most[at] = max(most[at], self._level, used_pages)
        self._start = self._level = used_pages

    def shares(self, columns: int) -> list[float]:
        """The most in use, as a share of the pool, in each of `columns` equal stretches; empty before anything came."""
        most = self._most
        if not most or columns < 1:
            return []
        edges = [column * len(most) // columns for column in range(columns + 1)]
        return [max(most[a : max(b, a + 1)]) / self.pool_pages for a, b in pairwise(edges)]


def pool_use(rows: Iterable[TimelineRow]) -> PoolUse | None:
    """The same from a timeline; None where it is empty."""
    use: PoolUse | None = None
    for row in rows:
        use = use or PoolUse(row.pool_pages)
        use.add(row.time_ns, row.pool_pages - row.free_pages - row.evictable_pages)
    return use


def sparkline(shares: Sequence[float], *, unicode: bool = True) -> str:
    """One character a share; only a pool without a free page gets the highest one."""
    signs = BLOCKS if unicode else ASCII
    last = len(signs) - 1
    return "".join(signs[last if share >= 1 else min(last - 1, int(share * last))] for share in shares)
