"""When a pass starts, when a round is planned, who has arrived by then: Pagestorm's rule, the same for each engine.

Times are integers, femtoseconds by custom. A pass starts at the later of its planning round and the end of the pass
before it. Without overlap the next round is at the end of the pass; with overlap it is at the end of the pass
before, when that pass's result has been processed, so right away when there was none in flight. A round at time t
sees the requests that arrived by t. A round that launches nothing with nothing in flight waits for the next arrival.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PassTimes:
    """How long a pass takes, four integer coefficients.

    decode   base + per_request x batch    + per_context x KV tokens read, the slots written in the pass included
    prefill  base + per_request x requests + per_context x (prefix + new tokens) + per_prefill x new tokens
    """

    base: int
    per_request: int
    per_context: int
    per_prefill: int

    def decode(self, batch: int, context_tokens: int) -> int:
        return self.base + self.per_request * batch + self.per_context * context_tokens

    def prefill(self, requests: int, new_tokens: int, prefix_tokens: int) -> int:
        context = self.per_context * (new_tokens + prefix_tokens)
        return self.base + self.per_request * requests + context + self.per_prefill * new_tokens


class StepClock:
    """The time of rounds and passes. With `times` None it counts passes: the round that plans pass n is at time n."""

    def __init__(self, times: PassTimes | None) -> None:
        self.times = times
        self.steps = 0
        """Passes launched so far, and so the number of the pass being planned."""
        self.round = 0
        """Time of the round being planned."""
        self.pass_end = 0
        """End of the pass launched last."""

    @property
    def pass_start(self) -> int:
        """When a pass that this round launches would start."""
        return max(self.round, self.pass_end)

    def begin_round(self) -> int:
        """The next round starts: its time."""
        if self.times is None:
            self.round = max(self.round, self.steps)
        return self.round

    def launch(self, duration: int) -> tuple[int, int]:
        """A pass is launched: its number and its end."""
        step = self.steps
        self.steps += 1
        self.pass_end = self.pass_start + duration
        return step, self.pass_end

    def processed(self, end: int) -> None:
        """The result of the pass that ended then has been processed."""
        self.round = max(self.round, end)

    def wait_until(self, time: int) -> None:
        """Nothing to do before `time`."""
        self.round = max(self.round, time)


class Arrivals:
    """Requests still to come, by time, then in the order in which they became known.

    `times` has one arrival a request. With a `concurrency` only their number counts: so many requests arrive at 0,
    and each end brings the next one.
    """

    def __init__(self, times: Sequence[int], concurrency: int | None = None) -> None:
        self._coming: list[tuple[int, int, int]] = []
        self._known = 0
        self._held = iter(range(len(times)))
        self._closed = concurrency is not None
        if concurrency is None:
            for number in self._held:
                self._push(times[number], number)
        else:
            for _ in range(concurrency):
                self.ended(0)

    def ended(self, time: int) -> None:
        """A request ended then: in a closed loop the next one arrives at that instant."""
        if self._closed:
            number = next(self._held, None)
            if number is not None:
                self._push(time, number)

    def take(self, by: int) -> tuple[int, int] | None:
        """The next request that has arrived by then, with its arrival; None when there is none."""
        if not self._coming or self._coming[0][0] > by:
            return None
        time, _, number = heapq.heappop(self._coming)
        return number, time

    def next_time(self) -> int | None:
        """The next arrival, None when none is known of."""
        return self._coming[0][0] if self._coming else None

    def _push(self, time: int, number: int) -> None:
        heapq.heappush(self._coming, (time, self._known, number))
        self._known += 1
