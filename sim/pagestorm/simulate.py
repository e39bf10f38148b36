"""Arrivals, clients and servers on one SimPy clock. The only module that imports SimPy.

The clock counts integer femtoseconds: arrivals fall on whole nanoseconds, passes end where their exact durations sum
to. There is no SimPy event for a decode step: the engine is told when the next outside input comes and runs up to it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import simpy

from pagestorm.engine.machine import FOREVER_FS, Machine
from pagestorm.engine.request import Request
from pagestorm.engine.vllm_request import VllmRequest
from pagestorm.errors import PagestormError
from pagestorm.workload import Draft, Workload

Process = Generator[simpy.Event, Any, None]
OnEnd = Callable[[Request], None]


class Simulation:
    """One server and its clients. `run` returns when every request has ended or nothing can move any more."""

    def __init__(self, engine: Machine, workload: Workload, on_end: OnEnd, on_tick: Callable[[], None]) -> None:
        self.env = simpy.Environment()
        self.engine = engine
        self._drafts = workload.drafts()
        self._on_end = on_end
        self._on_tick = on_tick
        self._arrived = self.env.event()
        if workload.concurrency is None:
            self._start(self._open_loop(self._drafts))
        else:
            for draft in _take(self._drafts, workload.concurrency):
                self._start(self._client(draft))
        self._start(self._server())

    def run(self) -> None:
        """Run to the end."""
        try:
            self.env.run()
        except _Fault as fault:
            raise fault.error from None
        self.engine.give_up()

    def _start(self, process: Process) -> None:
        self.env.process(_guarded(process))

    def _open_loop(self, drafts: Iterator[Draft]) -> Process:
        """Requests arrive at their own times, whatever the server does."""
        env = self.env
        for draft in drafts:
            assert draft.at_fs is not None, "an open loop has arrival times"
            if draft.at_fs > env.now:
                yield env.timeout(draft.at_fs - env.now)
            if self.engine.over:
                return
            self._submit(draft, None)

    def _client(self, draft: Draft | None) -> Process:
        """One of a closed loop's clients: sends its next request at the instant the previous one ends."""
        while draft is not None and not self.engine.over:
            done = self.env.event()
            self._submit(draft, done)
            yield done
            draft = next(self._drafts, None)

    def _submit(self, draft: Draft, done: simpy.Event | None) -> None:
        asked = draft.output_tokens if draft.max_new_tokens is None else draft.max_new_tokens
        now = int(self.env.now)
        request = self.engine.request_class(
            draft.number, now, draft.input_tokens, draft.output_tokens, asked, draft.ignore_eos, client=done
        )
        if isinstance(request, VllmRequest):
            request.priority = draft.priority
            request.prefix = draft.prefix
        self.engine.submit(request, now)
        if not self._arrived.triggered:
            self._arrived.succeed()

    def _server(self) -> Process:
        env, engine = self.env, self.engine
        while True:
            # Whatever else happens at this instant comes first: a round sees all that has arrived by its time.
            while env.peek() <= env.now:
                yield env.timeout(0)
            for request, time_fs in self._take_ended():
                if time_fs > env.now:
                    yield env.timeout(time_fs - env.now)
                self._on_end(request)
                done = request.client
                if isinstance(done, simpy.Event):
                    done.succeed()
            if env.peek() <= env.now:
                continue
            if engine.over:
                return
            if engine.blocked:
                self._arrived = env.event()
                yield self._arrived
                continue
            coming = env.peek()
            engine.advance(FOREVER_FS if coming == float("inf") else int(coming))
            self._on_tick()
            if not engine.ended and not engine.blocked and not engine.over:
                yield env.timeout(int(coming) - env.now)

    def _take_ended(self) -> list[tuple[Request, int]]:
        ended, self.engine.ended = self.engine.ended, []
        return ended


class _Fault(Exception):
    """Carries an error out of SimPy, which makes a new one of the same type from its positional arguments."""

    def __init__(self, error: PagestormError) -> None:
        super().__init__(error)
        self.error = error


def _guarded(process: Process) -> Process:
    try:
        yield from process
    except PagestormError as error:
        raise _Fault(error) from error


def _take(drafts: Iterator[Draft], most: int) -> Iterator[Draft]:
    for _ in range(most):
        draft = next(drafts, None)
        if draft is None:
            return
        yield draft
