"""Our side of a whole SGLang run: who has arrived, what a pass takes and yields, and what was seen of it.

Nothing is decided here. Runs inside the reference environment.
"""

from __future__ import annotations

from typing import Any

from pagestorm_real.reference.sglang_engine import PLAIN_TOKEN, STOP_TOKEN, Engine, Pools
from pagestorm_real.reference.sglang_workload import Speculation, Workload
from pagestorm_real.reference.step_clock import Arrivals, StepClock


class RunOver(Exception):
    """Leaves the engine's endless loop: nothing can happen any more, or enough passes were launched."""


def clip(engine: Engine, scheduler: Any, req: Any) -> str:
    """The engine's checks of a new request: its max_new_tokens clipped, or why it is refused."""
    scheduler.init_req_max_new_tokens(req)
    refusal = engine.refusal(req, scheduler.max_req_input_len, False)
    if refusal is None and req.to_finish is not None:
        refusal = req.to_finish.message
    return refusal or ""


class Recorder:
    """One run as it goes: the clock, who is still to come, the events so far."""

    def __init__(self, engine: Engine, workload: Workload, pools: Pools) -> None:
        self.engine = engine
        self.workload = workload
        self.pools = pools
        self.clock = StepClock(workload.times)
        self.arrivals = Arrivals([r.arrive for r in workload.requests], workload.concurrency)
        self.events: list[list[object]] = []
        self.counts = dict.fromkeys(("finished", "aborted", "rejected", "retractions"), 0)
        self.reports: dict[str, list[object]] = {name: [] for name in sorted(workload.report)}
        self._verified = [0] * len(workload.requests)
        self._idle = False
        self._seen = 0
        """Events noted before this round."""

    def note(self, step: int, kind: str, request: int | None, *more: object) -> None:
        """One more event."""
        self.events.append([step, kind, request, *more])

    # --- a round ---------------------------------------------------------------------------------------------

    def begin_round(self, scheduler: Any) -> None:
        """Wait when there is nothing to do, then let in who has arrived. Raises `RunOver`."""
        if self.clock.steps >= self.workload.max_steps:
            raise RunOver
        if self._idle:
            self._wait()
        self._seen = len(self.events)
        now = self.clock.begin_round()
        while (arrival := self.arrivals.take(now)) is not None:
            self._arrive(scheduler, *arrival)

    def idle(self) -> None:
        """This round launched nothing and nothing is in flight."""
        self._idle = True

    def _wait(self) -> None:
        """A round that did nothing would do nothing again before an arrival; one that aborted somebody might."""
        self._idle = False
        if len(self.events) > self._seen:
            return
        coming = self.arrivals.next_time()
        if coming is None:
            raise RunOver
        self.clock.wait_until(coming)

    def _arrive(self, scheduler: Any, number: int, time: int) -> None:
        """What the engine does with a new request, but that a prompt it refuses is not queued as one token."""
        planned = self.workload.requests[number]
        req = self.engine.request(number, planned.prompt, planned.max_new, planned.ignore_eos)
        refusal = clip(self.engine, scheduler, req)
        if refusal:
            self._rejected(number, time, refusal)
            return
        if not self.workload.clips_output:
            req.sampling_params.max_new_tokens = planned.max_new
        req.pagestorm_over = False
        req.pagestorm_arrival = time
        scheduler._add_request_to_queue(req)
        req.pagestorm_arrival = None

    def _rejected(self, number: int, time: int, message: str) -> None:
        self.counts["rejected"] += 1
        self.note(self.clock.steps - 1, "reject", number, message)
        self.arrivals.ended(time)

    def turned_away(self, req: Any, message: str) -> None:
        """The scheduler ended a request with an error: a new one that the full queue refused, or an old one."""
        number = int(req.rid)
        if req.pagestorm_arrival is not None:
            self._rejected(number, req.pagestorm_arrival, message)
            return
        req.pagestorm_over = True
        self.counts["aborted"] += 1
        self.note(self.clock.steps, "abort", number, message)
        self.arrivals.ended(self.clock.pass_start)

    def retracted(self, req: Any) -> None:
        """The scheduler queues a request again."""
        self.counts["retractions"] += 1
        self.note(self.clock.steps, "retract", int(req.rid))

    def victims_first(self, first: int) -> None:
        """The scheduler tells of an abort before it queues the victims that it chose earlier: put that right."""
        self.events[first:] = sorted(self.events[first:], key=lambda event: event[1] != "retract")

    # --- a pass ----------------------------------------------------------------------------------------------

    def launch(self, scheduler: Any, batch: Any) -> Any:
        """A forward pass starts: how long it takes; its tokens follow with its result."""
        extend = batch.forward_mode.is_extend()
        start = self.clock.pass_start
        step, end = self.clock.launch(self._duration(batch, extend))
        if extend:
            for req in batch.reqs:
                self.note(step, "prefill", int(req.rid), req.extend_len, req is scheduler.chunked_req, req.prefix_len)
        self._report(scheduler, start)
        result = self.engine.result()
        result.pagestorm_step, result.pagestorm_end = step, end
        return result

    def _report(self, scheduler: Any, start: int) -> None:
        reports = self.reports
        if "starts" in reports:
            reports["starts"].append(start)
        if "ratio" in reports:
            reports["ratio"].append(scheduler.new_token_ratio_tracker.current)
        if "free" in reports:
            reports["free"].append(self.pools.kv.available_size())

    def _duration(self, batch: Any, extend: bool) -> int:
        times, reqs = self.workload.times, batch.reqs
        if times is None:
            return 0
        if extend:
            return times.prefill(len(reqs), sum(r.extend_len for r in reqs), sum(r.prefix_len for r in reqs))
        return times.decode(len(reqs), sum(r.kv.kv_committed_len for r in reqs))

    def sample(self, batch: Any, result: Any) -> None:
        """The tokens of a pass. With overlap they are only known when its result is processed: the pass before may
        still have had one to give."""
        self.clock.processed(result.pagestorm_end)
        tensor, spec = self.engine.torch.tensor, self.workload.spec
        if spec is None or batch.forward_mode.is_extend():
            result.next_token_ids = tensor([self._token(req, 1) for req in batch.reqs])
            return
        width = result.speculative_output_stride = max(spec.accept_lengths)
        result.accept_lens = tensor([self._accepted(req, spec) for req in batch.reqs])
        result.next_token_ids = tensor([self._token(req, 1 + j) for req in batch.reqs for j in range(width)])

    def _token(self, req: Any, further: int) -> int:
        out = self.workload.requests[int(req.rid)].out
        return STOP_TOKEN if len(req.output_ids) + further >= out else PLAIN_TOKEN

    def _accepted(self, req: Any, spec: Speculation) -> int:
        number = int(req.rid)
        accepted = spec.accept_lengths[(number + self._verified[number]) % len(spec.accept_lengths)]
        self._verified[number] += not (req.finished() or req.is_retracted)
        return accepted

    def processed(self, batch: Any, result: Any) -> None:
        """The engine has processed a result: who reached the end with it."""
        for req in batch.reqs:
            if req.finished() and not req.pagestorm_over:
                req.pagestorm_over = True
                self.counts["finished"] += 1
                self.note(result.pagestorm_step, "finish", int(req.rid), len(req.output_ids_through_stop))
                self.arrivals.ended(result.pagestorm_end)
