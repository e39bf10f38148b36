"""What a run keeps besides its events: one row a request, and the state over time."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagestorm.engine.request import Request
from pagestorm.engine.vllm_request import VllmRequest
from pagestorm.events import FS_PER_NS

TIMELINE_ROWS = 20_000


def to_ns(time_fs: int) -> int:
    """Nanoseconds, floored; -1 stays -1, for a time that never came."""
    return time_fs // FS_PER_NS if time_fs >= 0 else -1


class Latencies:
    """Time to first token and end-to-end time of finished requests, in nanoseconds: 16 bytes a request."""

    def __init__(self) -> None:
        self._ttft = array("q")
        self._e2e = array("q")

    def add(self, request: Request) -> None:
        """A request ended."""
        if request.outcome == "finished":
            self._ttft.append((request.first_token_fs - request.arrive_fs) // FS_PER_NS)
            self._e2e.append((request.finish_fs - request.arrive_fs) // FS_PER_NS)

    @property
    def ttft_ns(self) -> npt.NDArray[np.int64]:
        return np.frombuffer(self._ttft, dtype=np.int64)

    @property
    def e2e_ns(self) -> npt.NDArray[np.int64]:
        return np.frombuffer(self._e2e, dtype=np.int64)


class RequestRow(NamedTuple):
    """One row of requests.parquet. Times in nanoseconds, -1 where the moment never came."""

    request: int
    attempt_of: int
    arrive_ns: int
    admit_ns: int
    first_token_ns: int
    finish_ns: int
    input_tokens: int
    output_tokens: int
    max_new_tokens: int
    cached_tokens: int
    retractions: int
    preemptions: int
    outcome: str
    reason: str


class RequestTable:
    """Rows of the requests that ended, in the order of their ends; `rows` gives them by number."""

    def __init__(self) -> None:
        self._numbers = array("q")
        self._outcomes: list[str] = []
        self._reasons: list[str] = []

    def add(self, request: Request) -> None:
        """A request ended, or the run did while it was still there."""
        preemptions, cached = 0, 0
        if isinstance(request, VllmRequest):
            preemptions, cached = request.preemptions, request.cached_tokens
        self._numbers.extend(
            (
                request.number,
                request.number,
                to_ns(request.arrive_fs),
                to_ns(request.admit_fs),
                to_ns(request.first_token_fs),
                to_ns(request.finish_fs),
                request.input_tokens,
                request.generated,
                request.max_new_tokens,
                cached,
                request.retractions,
                preemptions,
            )
        )
        self._outcomes.append(request.outcome or "unserved")
        self._reasons.append(request.reason)

    def columns(self) -> dict[str, object]:
        """Column name to values, sorted by request number."""
        names = RequestRow._fields[:12]
        table = np.frombuffer(self._numbers, dtype=np.int64).reshape(-1, len(names))
        order = np.argsort(table[:, 0], kind="stable")
        columns: dict[str, object] = {name: table[order, i] for i, name in enumerate(names)}
        columns["outcome"] = [self._outcomes[i] for i in order.tolist()]
        columns["reason"] = [self._reasons[i] for i in order.tolist()]
        return columns


class TimelineRow(NamedTuple):
    """One row of timeline.parquet: a pool at the start or the end of a leap."""

    time_ns: int
    step: int
    pool: str
    free_pages: int
    evictable_pages: int
    protected_pages: int
    uncached_pages: int
    pool_pages: int
    running: int
    waiting: int
    new_token_ratio: float


class TimelineRows:
    """Keeps at most `TIMELINE_ROWS` rows: when they are too many every other one goes, and so on from there."""

    def __init__(self, pool: str = "full") -> None:
        self._rows: list[TimelineRow] = []
        self._last: TimelineRow | None = None
        self._pool = pool
        self._every = 1
        self._seen = 0

    @property
    def every(self) -> int:
        """One row of how many was kept; 1 means that nothing is missing."""
        return self._every

    @property
    def rows(self) -> list[TimelineRow]:
        """What was kept, the last row in any case."""
        if self._last is None or (self._rows and self._rows[-1] is self._last):
            return self._rows
        return [*self._rows, self._last]

    def row(
        self, time_fs: int, step: int, free_pages: int, pool_pages: int, running: int, waiting: int, ratio: float
    ) -> None:
        """The state at one moment."""
        self._seen += 1
        self._last = TimelineRow(
            time_fs // FS_PER_NS,
            step,
            self._pool,
            free_pages,
            0,
            0,
            pool_pages - free_pages,
            pool_pages,
            running,
            waiting,
            ratio,
        )
        if self._seen % self._every:
            return
        self._rows.append(self._last)
        if len(self._rows) >= TIMELINE_ROWS:
            self._rows = self._rows[1::2]
            self._every *= 2
