"""What every engine's machine has: a clock, a step number, counters, and the record that it writes.

A machine is driven from outside: `submit` is an arrival, `advance` plans every round up to the next outside input.
Times are integer femtoseconds.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from pagestorm.engine.request import Request
from pagestorm.events import FS_PER_NS, EventLog
from pagestorm.memory.ledger import FULL
from pagestorm.steptime.contract import StepTime

FOREVER_FS = 1 << 126
"""Later than anything: no outside input is known."""


@dataclass(slots=True)
class Counts:
    """What a run counts, whichever the engine."""

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    rejected: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    leaps: int = 0
    prefill_batches: int = 0
    decode_steps: int = 0
    peak_used_pages: int = 0
    peak_running: int = 0
    peak_waiting: int = 0
    running_fs: int = 0
    """Integral of running requests over time."""


class Timeline(Protocol):
    """Reader of the state at the start and end of each leap (`pagestorm.record`)."""

    def row(
        self, time_fs: int, step: int, free_pages: int, pool_pages: int, running: int, waiting: int, ratio: float
    ) -> None: ...


class Levels(NamedTuple):
    """The state that every event shows."""

    free_pages: int
    evictable_pages: int
    running: int
    waiting: int


class Machine(ABC):
    """One engine. `over` is set when its process would have died or nothing can move any more.

    `ended` collects (request, time) of requests that finished, aborted or were rejected since somebody last took them.
    """

    request_class: ClassVar[type[Request]] = Request
    """What `submit` takes."""

    def __init__(self, steptime: StepTime, log: EventLog, *, step_only: bool, timeline: Timeline | None) -> None:
        self.steptime = steptime
        self.log = log
        self.timeline = timeline
        self.now_fs = 0
        self.step = 0
        self.outcome = ""
        self.error = ""
        self.ended: list[tuple[Request, int]] = []
        self.blocked = True
        """Nothing to do until something arrives."""
        self._step_only = step_only
        self._seq = 0

    # --- what an engine says of itself -------------------------------------------------------------------------

    @property
    @abstractmethod
    def counts(self) -> Counts:
        """What it counted so far."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Nothing runs, waits or is in flight."""

    @property
    @abstractmethod
    def total_pages(self) -> int:
        """Pages that can be handed out."""

    @property
    def evicted_tokens(self) -> int:
        """Tokens that a prefix cache lost because their pages were needed."""
        return 0

    @abstractmethod
    def audit(self) -> None:
        """Have the memory look at its own books. Raises `PoolCorruption`."""

    @abstractmethod
    def unserved(self) -> list[Request]:
        """Requests that arrived and have not ended, by number."""

    @abstractmethod
    def give_up(self) -> None:
        """Nothing will arrive any more: what still waits can never be served."""

    @abstractmethod
    def _refusal(self, request: Request) -> tuple[str, int]:
        """The engine's answer to a request that it turns away, or an empty string, and the limit in tokens."""

    @abstractmethod
    def _enqueue(self, request: Request) -> int:
        """Take an arrival in; returns how many wait now."""

    @abstractmethod
    def _round(self, until_fs: int) -> None:
        """Plan one pass, or a leap of them."""

    @abstractmethod
    def _levels(self) -> Levels:
        """The state after what was done last."""

    # --- outside -----------------------------------------------------------------------------------------------

    @property
    def free_pages(self) -> int:
        """Pages that could be taken now, those that still hold cached tokens included."""
        levels = self._levels()
        return levels.free_pages + levels.evictable_pages

    @property
    def over(self) -> bool:
        return bool(self.outcome)

    def submit(self, request: Request, time_fs: int) -> None:
        """A request arrives; every round before `time_fs` has been planned."""
        counts = self.counts
        counts.requests += 1
        self._emit("arrive", time_fs, self.step - 1, request.number, request.input_tokens)
        refusal, limit_tokens = self._refusal(request)
        if refusal:
            counts.rejected += 1
            detail = json.dumps({"reason": refusal, "limit_tokens": limit_tokens})
            self._emit("reject", time_fs, self.step - 1, request.number, request.input_tokens, detail=detail)
            self._end(request, "rejected", refusal, time_fs)
            return
        counts.peak_waiting = max(counts.peak_waiting, self._enqueue(request))
        if self.blocked:
            self.blocked = False
            self.now_fs = max(self.now_fs, time_fs)

    def advance(self, until_fs: int) -> None:
        """Plan every round before `until_fs`, the time of the next outside input; stop early when something ended."""
        while self.now_fs < until_fs and not (self.blocked or self.ended or self.outcome):
            self._round(until_fs)
            if self.log.full:
                self.log.flush()

    # --- the record --------------------------------------------------------------------------------------------

    def _end(self, request: Request, outcome: str, reason: str, time_fs: int) -> None:
        request.outcome = outcome
        request.reason = reason
        request.finish_fs = time_fs
        self.ended.append((request, time_fs))

    def _emit(
        self,
        kind: str,
        time_fs: int,
        step: int,
        request: int = -1,
        tokens: int = -1,
        pages: int = -1,
        detail: str = "",
    ) -> None:
        seq = -1
        if kind != "leap":
            seq = self._seq
            self._seq = seq + 1
        place = (time_fs // FS_PER_NS, seq, step, kind, request, tokens, pages)
        self.log.append((*place, *self._levels(), FULL, detail))
