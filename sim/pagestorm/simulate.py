"""Arrivals, clients and servers on one SimPy clock. The only module that imports SimPy.

The clock counts integer femtoseconds: arrivals fall on whole nanoseconds, passes end where their exact durations sum
to. There is no SimPy event for a decode step: the engine is told when the next outside input comes and runs up to it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
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
        self._concurrency = workload.concurrency
        if self._concurrency is None:
            self._start(self._open_loop())
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

    # --- clients ---------------------------------------------------------------------------------------------

    def _open_loop(self) -> Process:
        """Requests arrive at their own times, whatever the server does."""
        env = self.env
        for draft in self._drafts:
            assert draft.at_fs is not None, "an open loop has arrival times"
            if draft.at_fs > env.now:
                yield env.timeout(draft.at_fs - env.now)
            if self.engine.over:
                return
            self._submit(draft)
            if not self._arrived.triggered:
                self._arrived.succeed()

    def _next_of_closed_loop(self) -> None:
        """A client of a closed loop sends its next request, at the instant its last one ended."""
        if not self.engine.over:
            draft = next(self._drafts, None)
            if draft is not None:
                self._submit(draft)

    def _submit(self, draft: Draft) -> None:
        engine = self.engine
        asked = draft.output_tokens if draft.max_new_tokens is None else draft.max_new_tokens
        now = int(self.env.now)
        request = engine.request_class(
            draft.number, now, draft.input_tokens, draft.output_tokens, asked, draft.ignore_eos
        )
        if isinstance(request, VllmRequest):
            request.priority = draft.priority
            request.prefix = draft.prefix
        engine.submit(request, now)

    # --- the server ------------------------------------------------------------------------------------------

    def _server(self) -> Process:
        env, engine, closed = self.env, self.engine, self._concurrency is not None
        for _ in range(self._concurrency or 0):
            self._next_of_closed_loop()
        while True:
            # Whatever else happens at this instant comes first: a round sees all that has arrived by its time.
            while env.peek() <= env.now:
                yield env.timeout(0)
            while engine.ended:
                ended, engine.ended = engine.ended, []
                for request, time_fs in ended:
                    if time_fs > env.now:
                        yield env.timeout(time_fs - env.now)
                    self._on_end(request)
                    if closed:
                        self._next_of_closed_loop()
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
