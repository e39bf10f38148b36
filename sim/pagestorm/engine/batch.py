"""The running batch, kept so that a leap of any length costs the same.

All members decode together, so two clocks are enough to know every length: `launched` counts the decode passes
launched, `known` those whose result was processed. A member remembers its lengths less the clocks at the time it
joined; its committed length is `base_committed + launched`, its known output `base_generated + known`. A decode pass
touches no member. What a horizon asks is ready in two ordered structures:

- `_ends`, a heap of the value of `known` at which each member stops being uneventful;
- `_phases`, the sorted values of -base_committed modulo the page size: the member opens a page at the next pass iff its
  phase equals `launched` modulo the page size, and over a cycle of page_size passes every member opens exactly one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from pagestorm.engine.request import Request
from pagestorm.memory.ledger import Ints


class RunningBatch:
    """Requests that decode together, in batch order.

    `full` is the engine's `batch_is_full`: no admission is tried while it is set. With `leaves_early` (overlap) a
    request that ends by length leaves one result before its last token is known.
    """

    __slots__ = (
        "_ends",
        "_joins",
        "_page",
        "_phases",
        "_rows",
        "context_base",
        "full",
        "known",
        "launched",
        "leaves_early",
        "requests",
    )

    def __init__(self, page_size: int, leaves_early: bool) -> None:
        self.requests: list[Request] = []
        self.full = False
        self.launched = 0
        self.known = 0
        self.leaves_early = leaves_early
        self.context_base = 0
        """Sum of base_committed over the members."""
        self._page = page_size
        self._joins = 0
        self._rows: Ints | None = None
        self._ends: list[tuple[int, int, Request]] = []
        self._phases: list[int] = []

    def __len__(self) -> int:
        return len(self.requests)

    # --- lengths ---------------------------------------------------------------------------------------------

    def generated(self, request: Request) -> int:
        """Output tokens of a member that the scheduler knows of."""
        return request.base_generated + self.known - request.pending

    def committed(self, request: Request) -> int:
        """KV length of a member: slots taken so far, the one of a pass in flight included."""
        return request.base_committed + self.launched

    def all_generated(self) -> list[int]:
        known = self.known
        return [r.base_generated + known - r.pending for r in self.requests]

    def all_committed(self) -> list[int]:
        launched = self.launched
        return [r.base_committed + launched for r in self.requests]

    @property
    def context_tokens(self) -> int:
        """KV length of all members together."""
        return self.context_base + len(self.requests) * self.launched

    @property
    def rows(self) -> Ints:
        """Rows of the request table, in batch order."""
        if self._rows is None:
            self._rows = np.array([r.row for r in self.requests], dtype=np.int64)
        return self._rows

    # --- what a horizon asks ---------------------------------------------------------------------------------

    def opening(self, late: bool = False) -> int:
        """How many members open a page at the next decode pass; `late` asks about the pass before it."""
        if self._page == 1:
            return len(self.requests)
        phases, now = self._phases, (self.launched - late) % self._page
        return bisect_right(phases, now) - bisect_left(phases, now)

    def page_steps(self, free_pages: int) -> int:
        """For how many decode passes in a row `free_pages` suffice: the largest number whose openings fit.

        Whole cycles first; then the phases, read from the present one onwards around the circle, tell when the
        first page that is not there would be opened.
        """
        phases, page = self._phases, self._page
        cycles, more = divmod(free_pages, len(self.requests))
        if page == 1:
            return cycles
        now = self.launched % page
        at = bisect_left(phases, now) + more
        phase = phases[at] if at < len(phases) else phases[at - len(phases)]
        return cycles * page + (phase - now) % page

    def uneventful_passes(self) -> int:
        """Passes that can be launched before a member ends or must be left out; the last may end one."""
        return self._first_end() - self.known

    def _first_end(self) -> int:
        ends = self._ends
        while ends[0][2].join != ends[0][1]:
            heappop(ends)
        return ends[0][0]

    # --- members ---------------------------------------------------------------------------------------------

    def join(self, requests: Sequence[Request], committed: Sequence[int], pending: int) -> None:
        """Append freshly prefilled requests with their KV lengths; `pending` is 1 while their prefill's own result
        is still in flight (overlap)."""
        page, launched, known = self._page, self.launched, self.known
        for request, tokens in zip(requests, committed, strict=True):
            self._joins += 1
            request.join = self._joins
            request.pending = pending
            request.base_committed = base = tokens - launched
            request.base_generated = request.generated + pending - known
            self.context_base += base
            if page > 1:
                insort(self._phases, -base % page)
            # The value of `known` at which its last token is known, or, where it leaves early, the one before.
            last = request.target - request.base_generated
            early = self.leaves_early and request.target >= request.max_new_tokens
            heappush(self._ends, (last - early, request.join, request))
        self.requests = [*self.requests, *requests]
        self._rows = None

    def leave(self, leaving: Collection[Request]) -> None:
        """These members go, with `generated` and `computed`, their KV length, written back."""
        page, phases, launched, known = self._page, self._phases, self.launched, self.known
        for request in leaving:
            base = request.base_committed
            request.generated = request.base_generated + known - request.pending
            request.computed = base + launched
            self.context_base -= base
            if page > 1:
                del phases[bisect_left(phases, -base % page)]
            request.join = 0
        if len(leaving) == len(self.requests):
            self.requests = []
            self._ends = []
        else:
            self.requests = [r for r in self.requests if r.join]
            if len(self._ends) > 64 + 4 * len(self.requests):
                self._ends = [end for end in self._ends if end[2].join == end[1]]
                heapify(self._ends)
        self._rows = None

    def order(self, requests: list[Request]) -> None:
        """The same members in another order: that of the engine's sort after a retraction."""
        self.requests = requests
        self._rows = None

    def ended(self) -> list[Request]:
        """Members whose last token is known, in batch order."""
        known = self.known
        if not self.requests or self._first_end() > known:
            return []
        return [r for r in self.requests if r.target - r.base_generated <= known]

    def ending_by_length(self) -> list[Request]:
        """Members that one more token ends by length, in batch order."""
        known = self.known
        if not self.requests or self._first_end() > known:
            return []
        return [r for r in self.requests if r.max_new_tokens - (r.base_generated + known - r.pending) <= 1]
