"""What must hold in every run, read from the event record as it grows and from the pools at the end.

A check that fails means that Pagestorm itself is wrong: it raises `InvariantBroken` and the command exits 3. Stalls and
livelocks are results of the simulated engine; it finds them itself (`engine.iteration`) and the summary says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagestorm.engine.machine import Machine
from pagestorm.errors import InvariantBroken
from pagestorm.events import RawEvent

_TAKES = {"prefill", "leap"}
_GIVES = {"finish", "retract", "preempt", "abort"}
_PLANNED = {"admit", "prefill", "preempt"}
"""Events of one planned pass: all of them show the state after it was planned."""
_TERMINAL = {"finish", "abort", "reject"}


class Conservation:
    """A sink that recounts the pool from the events alone.

    - Conservation: free pages after an event equal the pool, less what prefills and leaps took, plus what finishes,
      retractions and aborts gave back, and lie between 0 and the pool.
    - Single ends: a request arrives once, ends once, and nothing happens to it afterwards.
    - Bounded retraction: each retraction follows a prefill of the same request; nobody is retracted twice in a row.
    - Order: `seq` counts up by one; `step` never goes back by more than the pass in flight.
    """

    def __init__(self, pool_pages: int, page_size: int) -> None:
        self._pool = pool_pages
        self._page = page_size
        self._free = pool_pages
        self._seq = 0
        self._state: dict[int, str] = {}

    def write(self, events: Sequence[RawEvent]) -> None:
        """Check a chunk of the record."""
        i = 0
        while i < len(events):
            i = self._group(events, i)

    def close(self) -> None:
        """Nothing is held open."""

    def _group(self, events: Sequence[RawEvent], i: int) -> int:
        """Events of one batch are told after all of it was done, so the count is compared behind the last of them."""
        kind, step = events[i][3], events[i][2]
        grouped = kind == "finish" or kind in _PLANNED
        end = i + 1
        while grouped and end < len(events) and self._same(events[end], kind, step):
            end += 1
        for event in events[i:end]:
            self._one(event)
        if events[end - 1][7] != self._free or not 0 <= self._free <= self._pool:
            raise InvariantBroken(
                f"conservation: event seq {events[end - 1][1]} ({kind}, step {step}) says {events[end - 1][7]} pages "
                f"are free, the events so far leave {self._free} of {self._pool}"
            )
        return end

    @staticmethod
    def _same(event: RawEvent, kind: str, step: int) -> bool:
        if event[2] != step:
            return False
        return event[3] == kind if kind == "finish" else event[3] in (*_PLANNED, "leap")

    def _one(self, event: RawEvent) -> None:
        _, seq, step, kind, request, tokens, pages = event[:7]
        if kind in _TAKES:
            self._free -= pages
        elif kind in _GIVES:
            self._free += pages
        if kind != "leap":
            if seq != self._seq:
                raise InvariantBroken(f"order: event {seq} ({kind}) follows event {self._seq - 1}")
            self._seq += 1
        if request >= 0:
            self._lives(kind, request, step, tokens, pages)

    def _lives(self, kind: str, request: int, step: int, tokens: int, pages: int) -> None:
        state = self._state.get(request)
        if (kind == "arrive") != (state is None):
            raise InvariantBroken(f"single ends: {kind} of request {request} at step {step}, which is {state}")
        if kind == "retract":
            if state != "prefill":
                raise InvariantBroken(
                    f"bounded retraction: request {request} is retracted at step {step} while {state}"
                )
            if pages != -(-tokens // self._page):
                raise InvariantBroken(
                    f"rounding: request {request} gives back {pages} pages for {tokens} tokens at step {step}"
                )
        if state == "ended":
            raise InvariantBroken(f"single ends: {kind} of request {request} at step {step}, after its end")
        self._state[request] = "ended" if kind in _TERMINAL else kind


def check_drained(engine: Machine) -> None:
    """No leak at drain: with nothing left to serve every page is free again, and the pool's own books agree."""
    engine.audit()
    free, total = engine.free_pages, engine.total_pages
    if engine.idle and free != total:
        raise InvariantBroken(f"leak at drain: {total - free} of {total} pages are held by nobody")
