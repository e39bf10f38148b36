"""A whole run decided by SGLang's own scheduler: its event loop, with every decision and every page that it moves.

The engine's: `event_loop_normal` or `event_loop_overlap`, and all that they call but what is named here. Ours: who has
arrived (`ingest_requests`), the forward pass (`run_batch`), how long it takes, and the notes taken on the way.

Runs inside the reference environment. The workload and the answer are described at `run`.
"""

from __future__ import annotations

from dataclasses import dataclass
from traceback import walk_tb
from types import SimpleNamespace
from typing import Any

from pagestorm_real.reference.serving import BadPayload
from pagestorm_real.reference.sglang_engine import (
    PLAIN_TOKEN,
    STOP_TOKEN,
    Engine,
    Pools,
    Shape,
    model,
    prompt_of_length,
)
from pagestorm_real.reference.step_clock import Arrivals, PassTimes, StepClock

MAX_PREFILL_TOKENS = 16384
MAX_STEPS = 200_000
INPUT_MARGIN_TOKENS = 5
"""A prompt must be shorter than max_req_len less this (the engine's `tp_worker.py`)."""
LONG_AGO = float("inf")
"""A time that no wall-clock interval of the engine has passed since."""


class RunOver(Exception):
    """Leaves the engine's endless loop: nothing can happen any more, or enough steps were made."""


@dataclass(frozen=True)
class Speculation:
    """EAGLE; verify pass n of request r commits `accept_lengths[(r + n) % len]` tokens."""

    steps: int
    topk: int
    draft: int
    accept_lengths: tuple[int, ...]

    def arguments(self) -> dict[str, object]:
        return {
            "speculative_algorithm": "EAGLE",
            "speculative_num_steps": self.steps,
            "speculative_eagle_topk": self.topk,
            "speculative_num_draft_tokens": self.draft,
        }


@dataclass(frozen=True)
class Planned:
    """A request of the workload."""

    tokens: Any
    out: int
    max_new: int
    ignore_eos: bool


class Workload:
    """A workload as `run` describes it, checked and with every default filled in."""

    def __init__(self, w: dict[str, Any]) -> None:
        known = set(
            ["page_size", "max_total_tokens", "max_running_requests", "chunked_prefill_size", "max_prefill_tokens", "conservativeness", "overlap", "radix", "tree_core", "swa", "spec", "context", "max_queued", "requests", "concurrency", "clock", "max_steps", "report"]
        )
        if unknown := sorted(set(w) - known):
            raise BadPayload(f"unknown workload keys {unknown}; there are {sorted(known)}")
        try:
            self._read(w)
        except KeyError as error:
            raise BadPayload(f"the workload needs {error}") from error

    def _read(self, w: dict[str, Any]) -> None:
        self.page_size = int(w["page_size"])
        self.pool_tokens = int(w["max_total_tokens"]) // self.page_size * self.page_size
        self.max_running = int(w["max_running_requests"])
        chunk = w.get("chunked_prefill_size")
        self.chunk_tokens = None if chunk is None or chunk <= 0 else int(chunk)
        self.max_prefill_tokens = int(w.get("max_prefill_tokens", MAX_PREFILL_TOKENS))
        self.conservativeness = float(w.get("conservativeness", 1.0))
        self.overlap = bool(w.get("overlap", False))
        self.radix = bool(w.get("radix", False))
        self.tree_core = w.get("tree_core")
        self.context = int(w.get("context") or self.pool_tokens)
        self.max_queued = w.get("max_queued")
        self.window: dict[str, Any] | None = w.get("swa")
        self.spec = (
            Speculation(**{**w["spec"], "accept_lengths": tuple(w["spec"]["accept_lengths"])})
            if w.get("spec")
            else None
        )
        self.times = PassTimes(**w["clock"]) if w.get("clock") else None
        self.max_steps = int(w.get("max_steps", MAX_STEPS))
        self.report = frozenset(w.get("report", ()))
        self.requests = [self._planned(number, r) for number, r in enumerate(w["requests"])]
        self.concurrency = w.get("concurrency")
        self.arrive = [int(r.get("arrive", 0)) for r in w["requests"]]
        if self.concurrency is not None and any("arrive" in r for r in w["requests"]):
            raise BadPayload("a closed loop (concurrency) has no arrival times (arrive)")

    @staticmethod
    def _planned(number: int, r: dict[str, Any]) -> Planned:
        tokens = r["prompt"] if "prompt" in r else prompt_of_length(number, r["input"])
        return Planned(tokens, r["out"], r.get("max_new", r["out"]), bool(r.get("ignore_eos", False)))

    def shape(self) -> Shape:
        """The pools; request rows are as wide as the longest request can become."""
        p, window = self.page_size, self.window
        draft = 0
        if self.spec is not None:
            draft = 4 * (max(self.spec.steps * self.spec.topk, self.spec.draft) + p * self.spec.topk)
        longest = max((len(r.tokens) + max(r.out, r.max_new) for r in self.requests), default=0)
        swa = 0 if window is None else int(self.pool_tokens * window["ratio"]) // p * p
        return Shape(
            page_size=p,
            pool_tokens=self.pool_tokens,
            max_running=self.max_running,
            row_tokens=min(longest, self.context, self.pool_tokens) + draft + p + 8,
            radix=self.radix,
            tree_core=self.tree_core,
            window_tokens=None if window is None else int(window["window"]),
            swa_pool_tokens=swa,
        )

    def arguments(self) -> dict[str, object]:
        """Server arguments that the engine's classes read."""
        return {
            "page_size": self.page_size,
            "disable_radix_cache": not self.radix,
            "max_running_requests": self.max_running,
            "pp_max_micro_batch_size": self.max_running,
            "chunked_prefill_size": -1 if self.chunk_tokens is None else self.chunk_tokens,
            "max_prefill_tokens": self.max_prefill_tokens,
            "schedule_conservativeness": self.conservativeness,
            "disable_overlap_schedule": not self.overlap,
            **(self.spec.arguments() if self.spec else {}),
        }


class Recorder:
    """One run as it goes: the clock, who is still to come, what was seen."""

    def __init__(self, engine: Engine, workload: Workload, pools: Pools) -> None:
        self.engine = engine
        self.workload = workload
        self.pools = pools
        self.clock = StepClock(workload.times)
        self.arrivals = Arrivals(workload.arrive, workload.concurrency)
        self.events: list[list[Any]] = []
        self.counts = dict.fromkeys(("finished", "aborted", "rejected", "retractions"), 0)
        self.verified = [0] * len(workload.requests)
        self.starts: list[int] = []
        self.ratios: list[float] = []
        self.free: list[int] = []
        self.idle = False
        self.seen = 0
        """Events noted before this round."""

    def note(self, step: int, kind: str, request: int | None, *more: object) -> None:
        self.events.append([step, kind, request, *more])

    # --- a round ---------------------------------------------------------------------------------------------

    def begin_round(self, scheduler: Any) -> None:
        """Wait when there is nothing to do, then let in who has arrived."""
        clock = self.clock
        if clock.steps >= self.workload.max_steps:
            raise RunOver
        if self.idle:
            self._wait()
        self.seen = len(self.events)
        now = clock.begin_round()
        while (arrival := self.arrivals.take(now)) is not None:
            self._arrive(scheduler, *arrival)

    def _wait(self) -> None:
        """A round without events changed nothing, so only an arrival can."""
        self.idle = False
        if len(self.events) > self.seen:
            return
        coming = self.arrivals.next_time()
        if coming is None:
            raise RunOver
        self.clock.wait_until(coming)

    def _arrive(self, scheduler: Any, number: int, time: int) -> None:
        planned = self.workload.requests[number]
        req = self.engine.request(number, planned.tokens, planned.max_new, planned.ignore_eos)
        scheduler.init_req_max_new_tokens(req)
        message = self.engine.manager_utils.validate_input_length(req, scheduler.max_req_input_len, False)
        if message is None and req.to_finish is not None:
            message = req.to_finish.message
        if message is not None:
            self.rejected(number, time, message)
            return
        req.pagestorm_over = False
        req.pagestorm_arrival = time
        scheduler._add_request_to_queue(req)
        req.pagestorm_arrival = None

    def rejected(self, number: int, time: int, message: str) -> None:
        self.counts["rejected"] += 1
        self.note(self.clock.steps - 1, "reject", number, message)
        self.arrivals.ended(time)

    def turned_away(self, req: Any, message: str) -> None:
        """The scheduler itself ended a request with an error."""
        number = int(req.rid)
        if req.pagestorm_arrival is not None:
            self.rejected(number, req.pagestorm_arrival, message)
            return
        req.pagestorm_over = True
        self.counts["aborted"] += 1
        self.note(self.clock.steps, "abort", number, message)
        self.arrivals.ended(self.clock.pass_start)

    def retracted(self, req: Any) -> None:
        self.counts["retractions"] += 1
        self.note(self.clock.steps, "retract", int(req.rid))

    def in_order(self, first: int) -> None:
        """The scheduler tells of an abort before it queues the victims that were chosen before: put that right."""
        tail = self.events[first:]
        self.events[first:] = sorted(tail, key=lambda event: str(event[1]) != "retract")

    # --- a pass ----------------------------------------------------------------------------------------------

    def launch(self, scheduler: Any, batch: Any) -> Any:
        """The forward pass: how long it takes, and the tokens that come out of it."""
        extend = batch.forward_mode.is_extend()
        start = self.clock.pass_start
        step, end = self.clock.launch(self._duration(batch, extend))
        if extend:
            for req in batch.reqs:
                tokens = req.extend_end - req.prefix_len
                self.note(step, "prefill", int(req.rid), tokens, req is scheduler.chunked_req, req.prefix_len)
        if "starts" in self.workload.report:
            self.starts.append(start)
        if "ratio" in self.workload.report:
            self.ratios.append(scheduler.new_token_ratio_tracker.current)
        if "free" in self.workload.report:
            self.free.append(self.pools.kv.available_size())
        result = self.engine.manager_utils.GenerationBatchResult()
        result.pagestorm_step, result.pagestorm_end = step, end
        return result

    def _duration(self, batch: Any, extend: bool) -> int:
        times = self.workload.times
        if times is None:
            return 0
        reqs = batch.reqs
        if extend:
            prefix = sum(req.prefix_len for req in reqs)
            return times.prefill(len(reqs), sum(req.extend_end for req in reqs) - prefix, prefix)
        return times.decode(len(reqs), sum(req.kv.kv_committed_len for req in reqs))

    def sample(self, batch: Any, result: Any) -> None:
        """The tokens of a pass. With overlap they are only known when its result is processed: the pass before may
        still have had one to give."""
        torch, spec = self.engine.torch, self.workload.spec
        if spec is None or batch.forward_mode.is_extend():
            result.next_token_ids = torch.tensor([self._token(req, 1) for req in batch.reqs])
            return
        width = result.speculative_output_stride = max(spec.accept_lengths)
        result.accept_lens = torch.tensor([self._accepted(req, spec) for req in batch.reqs])
        tokens = [self._token(req, 1 + j) for req in batch.reqs for j in range(width)]
        result.next_token_ids = torch.tensor(tokens)

    def _token(self, req: Any, further: int) -> int:
        out = self.workload.requests[int(req.rid)].out
        return STOP_TOKEN if len(req.output_ids) + further >= out else PLAIN_TOKEN

    def _accepted(self, req: Any, spec: Speculation) -> int:
        number = int(req.rid)
        lengths = spec.accept_lengths
        accepted = lengths[(number + self.verified[number]) % len(lengths)]
        self.verified[number] += not (req.finished() or req.is_retracted)
        return accepted

    def finished(self, reqs: list[Any], result: Any) -> None:
        """A result was processed: who reached the end with it."""
        for req in reqs:
            if req.finished() and not req.pagestorm_over:
                req.pagestorm_over = True
                self.counts["finished"] += 1
                self.note(result.pagestorm_step, "finish", int(req.rid), len(req.output_ids_through_stop))
                self.arrivals.ended(result.pagestorm_end)


# --- the engine's scheduler, and what it finds around it -----------------------------------------------------------


def _unset(scheduler: Any, name: str) -> None:
    """What the paths in use do not set is off."""
    if name.startswith("__"):
        raise AttributeError(name)


def _nothing(*_: Any, **__: Any) -> None:
    """Messages to clients, metrics, sleep."""


def scheduler_class(engine: Engine) -> Any:
    """The engine's `Scheduler` with our side of a run in the places named at the top of this file."""
    base = engine.scheduler.Scheduler

    def ingest_requests(scheduler: Any, stop_at_pause: bool = False) -> list[Any]:
        scheduler.recorder.begin_round(scheduler)
        return []

    def run_batch(scheduler: Any, batch: Any, pp_proxy_tensors: Any = None) -> Any:
        return scheduler.recorder.launch(scheduler, batch)

    def process_batch_result(scheduler: Any, batch: Any, result: Any) -> None:
        recorder = scheduler.recorder
        recorder.clock.processed(result.pagestorm_end)
        recorder.sample(batch, result)
        base.process_batch_result(scheduler, batch, result)
        recorder.finished(batch.reqs, result)

    def update_running_batch(scheduler: Any, batch: Any) -> Any:
        first = len(scheduler.recorder.events)
        updated = base.update_running_batch(scheduler, batch)
        scheduler.recorder.in_order(first)
        return updated

    def add_request_to_queue(scheduler: Any, req: Any, is_retracted: bool = False) -> None:
        if is_retracted:
            scheduler.recorder.retracted(req)
        base._add_request_to_queue(scheduler, req, is_retracted)

    def send_abort_output(scheduler: Any, abort: Any, req: Any) -> None:
        scheduler.recorder.turned_away(req, abort.finished_reason["message"])

    def on_idle(scheduler: Any) -> None:
        base.on_idle(scheduler)
        scheduler.recorder.idle = True

    ours: dict[str, Any] = {
        "__getattr__": _unset,
        "ingest_requests": ingest_requests,
        "run_batch": run_batch,
        "process_batch_result": process_batch_result,
        "update_running_batch": update_running_batch,
        "_add_request_to_queue": add_request_to_queue,
        "send_abort_output": send_abort_output,
        "on_idle": on_idle,
    }
    silent = ("publish_load_snapshot", "maybe_send_health_check_signal", "maybe_sleep_on_idle", "_record_step_counters")
    return type("Scheduler", (base,), ours | dict.fromkeys(silent, _nothing))


def build_scheduler(engine: Engine, kind: Any, workload: Workload, pools: Pools) -> Any:
    """A scheduler of that class around those pools, as its constructor would leave it without a model."""
    scheduler = kind.__new__(kind)
    shape = workload.shape()
    max_req_len = min(workload.context, workload.pool_tokens) - 1
    scheduler.__dict__.update(
        _surroundings(),
        recorder=Recorder(engine, workload, pools),
        scheduler_stage_metrics=engine.stage_metrics(enabled=False),
        page_size=workload.page_size,
        max_total_num_tokens=workload.pool_tokens,
        max_req_len=max_req_len,
        max_req_input_len=max_req_len - INPUT_MARGIN_TOKENS,
        max_running_requests=workload.max_running,
        max_prefill_tokens=workload.max_prefill_tokens,
        max_queued_requests=workload.max_queued,
        chunked_prefill_size=workload.chunk_tokens,
        enable_overlap=workload.overlap,
        sliding_window_size=shape.window_tokens,
        is_hybrid_swa=shape.window_tokens is not None,
        full_tokens_per_layer=workload.pool_tokens,
        swa_tokens_per_layer=shape.swa_pool_tokens,
        tree_cache=pools.tree,
        token_to_kv_pool_allocator=pools.kv,
        req_to_token_pool=pools.rows,
        model_config=model(workload.context),
        disaggregation_mode=engine.disaggregation.NULL,
        spec_algorithm=engine.speculation.EAGLE if workload.spec else engine.speculation.NONE,
        running_batch=engine.schedule_batch.ScheduleBatch(reqs=[], batch_is_full=False),
        new_token_ratio_tracker=engine.ratio.from_config(),
        policy=engine.schedule_policy.SchedulePolicy("fcfs", pools.tree, False, False, False),
    )
    scheduler.init_pool_stats_observer()
    scheduler.init_invariant_checker()
    scheduler.init_batch_result_processor()
    return scheduler


def _surroundings() -> dict[str, Any]:
    """Attributes that are the same in each run: nothing running yet, and no one to report to."""
    reporter = SimpleNamespace(num_retracted_reqs=0, enable_metrics=False, num_generated_tokens=0, forward_ct_decode=0)
    for name in ["_maybe_log_idle_metrics", "log_batch_result_stats", "record_scheduler_active", "record_scheduler_idle", "report_decode_stats", "report_prefill_stats", "snapshot_spec_decode_metrics", "update_device_timer", "update_spec_metrics"]:
        setattr(reporter, name, _nothing)
    return {
        "waiting_queue": [],
        "result_queue": [],
        "chunked_req": None,
        "last_batch": None,
        "is_generation": True,
        "is_mixed_chunk": False,
        "require_mlp_sync": False,
        "device": "cpu",
        "forward_ct": 0,
        "max_prefill_bs": 0,
        "processed_tokens_counter": 0,
        "kv_shard_widening": 1,
        "prefill_decode_interval": 0,
        "_prefill_decode_interval_remaining": 0,
        "_last_stall_publish_ts": LONG_AGO,
        "priority_scheduling_preemption_threshold": 0,
        "metrics_reporter": reporter,
        "metrics_collector": None,
        "load_publisher": SimpleNamespace(publish_load_stat=_nothing),
        "load_inquirer": SimpleNamespace(get_loads=_nothing, _get_num_pending_tokens=lambda chunk_deduct=0: 0),
        "kv_events_publisher": SimpleNamespace(publish_kv_events=_nothing),
        "output_streamer": SimpleNamespace(stream_output=_nothing),
        "model_worker": SimpleNamespace(on_verify_complete_cpu=_nothing),
        "grammar_manager": SimpleNamespace(has_waiting_grammars=lambda: False, grammar_queue=[]),
        "dllm_manager": SimpleNamespace(any_staging_reqs=lambda: False),
        "dp_attn_adapter": SimpleNamespace(
            maybe_prepare_mlp_sync_batch=lambda batch, need_sync=None: batch,
            maybe_convert_decode_to_extend=lambda batch: batch,
            drop_sync_wait_carry=_nothing,
        ),
        "ngram_embedding_manager": SimpleNamespace(prepare_for_forward=lambda batch, **_: batch),
        "tp_worker": SimpleNamespace(model_runner=SimpleNamespace(attn_backend=object(), prefill_aware_swa=False)),
    }


# --- the operation -------------------------------------------------------------------------------------------------


def run(engine: Engine, kind: Any, payload: dict[str, Any]) -> dict[str, Any]:
    """A whole run."""
    workload = Workload(payload)
    with engine.configured(**workload.arguments()):
        pools = engine.pools(workload.shape())
        scheduler = build_scheduler(engine, kind, workload, pools)
        loop = scheduler.event_loop_overlap if workload.overlap else scheduler.event_loop_normal
        recorder = scheduler.recorder
        outcome = "completed"
        try:
            loop()
        except RunOver:
            waiting = scheduler.waiting_queue or scheduler.running_batch.reqs or scheduler.chunked_req
            if recorder.clock.steps >= workload.max_steps:
                outcome = "truncated"
            elif waiting:
                outcome = "stalled"
                recorder.note(recorder.clock.steps, "stall", None)
        except RuntimeError as error:
            if "out of memory" not in str(error).lower():
                raise
            outcome = "crashed"
            recorder.note(recorder.clock.steps, "oom", None, str(error), _phase(error))
        return _answer(recorder, outcome)


def _answer(recorder: Recorder, outcome: str) -> dict[str, Any]:
    pools, workload = recorder.pools, recorder.workload
    lists: dict[str, list[Any]] = {"starts": recorder.starts, "ratio": recorder.ratios, "free": recorder.free}
    return {
        "outcome": outcome,
        "events": recorder.events,
        "steps": recorder.clock.steps,
        **recorder.counts,
        "available": pools.kv.available_size(),
        "evictable": pools.tree.evictable_size(),
        "pool": workload.pool_tokens,
        "tree_core": pools.tree._tree_core_backend,
        **{name: lists[name] for name in sorted(workload.report)},
    }


def _phase(error: BaseException) -> str:
    """What the engine was allocating for when it gave up."""
    functions = {frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__)}
    return "prefill" if "prepare_for_extend" in functions else "decode"
