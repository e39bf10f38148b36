"""A whole run decided by SGLang's own scheduler: its event loop, with every decision and every page that it moves.

The engine's: `event_loop_normal` or `event_loop_overlap` and all that they call, but for what `OURS` names: who has
arrived, the forward pass and how long it takes, and the notes taken on the way (`sglang_recorder.py`).

Runs inside the reference environment.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from types import SimpleNamespace
from typing import Any

from pagestorm_real.reference.sglang_engine import Engine, Pools, Shape, model
from pagestorm_real.reference.sglang_recorder import Recorder, RunOver
from pagestorm_real.reference.sglang_workload import Workload, read

INPUT_MARGIN_TOKENS = 5
"""A prompt must be shorter than max_req_len less this (the engine's `tp_worker.py`)."""
LONG_AGO = float("inf")
"""A time of the wall clock since which no interval has passed."""
OURS = [
    "ingest_requests",
    "run_batch",
    "process_batch_result",
    "update_running_batch",
    "_add_request_to_queue",
    "send_abort_output",
    "on_idle",
]
"""Methods of the scheduler that lead here; the last five call the engine's own or only take a note."""
SILENT = ["publish_load_snapshot", "maybe_send_health_check_signal", "maybe_sleep_on_idle", "_record_step_counters"]
"""Methods for other listeners: load, health, sleep, wall-clock metrics."""


def run(engine: Engine, scheduler_class: Any, payload: dict[str, Any]) -> dict[str, Any]:
    """The operation `run`: a whole run of one workload, of which `sglang_workload.read` says what it is made of.

    Answers with `outcome` (completed | crashed | stalled | truncated), the `events` in the order in which they
    happened, how often what happened, the pools at the end, and one list a name in `report`: per pass its start, the
    new-token ratio and the free tokens after its allocation.

        [step, "prefill", request, new tokens, is the prompt incomplete after it, tokens there before]
        [step, "retract", request]
        [step, "abort", request, message]
        [step, "finish", request, tokens generated]      step: the pass that made the last one
        [step, "reject", request, message]               step: the last pass launched, -1 before any
        [step, "oom", null, message, "prefill" or "decode"]
        [step, "stall", null]
    """
    workload = read(payload)
    with engine.configured(**workload.arguments()), wrong_on_purpose(engine, workload):
        scheduler = build(engine, scheduler_class, workload)
        recorder: Recorder = scheduler.recorder
        outcome = _loop(scheduler)
        return {
            "outcome": outcome,
            "events": recorder.events,
            "steps": recorder.clock.steps,
            **recorder.counts,
            **_pools(recorder.pools, workload),
            **recorder.reports,
        }


def _loop(scheduler: Any) -> str:
    """The engine's event loop until it is left: how the run ended."""
    recorder: Recorder = scheduler.recorder
    step = recorder.clock
    try:
        (scheduler.event_loop_overlap if scheduler.enable_overlap else scheduler.event_loop_normal)()
    except RunOver:
        if step.steps >= recorder.workload.max_steps:
            return "truncated"
        if scheduler.is_fully_idle():
            return "completed"
        recorder.note(step.steps, "stall", None)
        return "stalled"
    except RuntimeError as error:
        if "out of memory" not in str(error).lower():
            raise
        recorder.note(step.steps, "oom", None, str(error), _phase(error))
        return "crashed"
    raise AssertionError("the event loop has no other end")


def _phase(error: BaseException) -> str:
    """What the engine was allocating for when it gave up."""
    functions = {frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__)}
    return "prefill" if "prepare_for_extend" in functions else "decode"


def _pools(pools: Pools, workload: Workload) -> dict[str, Any]:
    kv, tree = pools.kv, pools.tree
    sizes = {
        "pool": workload.pool_tokens,
        "available": kv.available_size(),
        "evictable": tree.evictable_size(),
        "tree_core": tree._tree_core_backend,
    }
    if workload.window is not None:
        sizes |= {
            "full_available": kv.full_available_size(),
            "full_evictable": tree.full_evictable_size(),
            "swa_pool": workload.swa_pool_tokens,
            "swa_available": kv.swa_available_size(),
            "swa_evictable": tree.swa_evictable_size(),
        }
    return sizes


# --- the engine's scheduler, and what it finds around it -----------------------------------------------------------


def scheduler_class(engine: Engine) -> Any:
    """The engine's `Scheduler` with our side of a run in the places that `OURS` and `SILENT` name."""
    base = engine.scheduler

    def ingest_requests(scheduler: Any, stop_at_pause: bool = False) -> list[Any]:
        scheduler.recorder.begin_round(scheduler)
        return []

    def run_batch(scheduler: Any, batch: Any, pp_proxy_tensors: Any = None) -> Any:
        return scheduler.recorder.launch(scheduler, batch)

    def process_batch_result(scheduler: Any, batch: Any, result: Any) -> None:
        scheduler.recorder.sample(batch, result)
        base.process_batch_result(scheduler, batch, result)
        scheduler.recorder.processed(batch, result)

    def update_running_batch(scheduler: Any, batch: Any) -> Any:
        first = len(scheduler.recorder.events)
        updated = base.update_running_batch(scheduler, batch)
        scheduler.recorder.victims_first(first)
        return updated

    def add_request_to_queue(scheduler: Any, req: Any, is_retracted: bool = False) -> None:
        if is_retracted:
            scheduler.recorder.retracted(req)
        base._add_request_to_queue(scheduler, req, is_retracted)

    def send_abort_output(scheduler: Any, abort: Any, req: Any) -> None:
        scheduler.recorder.turned_away(req, abort.finished_reason["message"])

    def on_idle(scheduler: Any) -> None:
        base.on_idle(scheduler)
        scheduler.recorder.idle()

    ours = (
        ingest_requests,
        run_batch,
        process_batch_result,
        update_running_batch,
        add_request_to_queue,
        send_abort_output,
        on_idle,
    )
    methods: dict[str, Any] = {"__getattr__": _unset, **dict.fromkeys(SILENT, _nothing)}
    return type("Scheduler", (base,), methods | dict(zip(OURS, ours, strict=True)))


def build(engine: Engine, scheduler_class: Any, workload: Workload) -> Any:
    """A scheduler of that class with pools of its own, as its constructor would leave it without a model.

    Call it inside `Engine.configured`.
    """
    shape = Shape(
        page_size=workload.page_size,
        pool_tokens=workload.pool_tokens,
        rows=workload.max_running,
        longest_tokens=workload.longest_tokens,
        radix=workload.radix,
        tree_core=workload.tree_core,
        window_tokens=workload.window.window if workload.window else None,
        swa_pool_tokens=workload.swa_pool_tokens,
    )
    pools = engine.pools(shape)
    scheduler = scheduler_class.__new__(scheduler_class)
    scheduler.__dict__.update(
        _surroundings(),
        **_limits(workload),
        recorder=Recorder(engine, workload, pools),
        scheduler_stage_metrics=engine.stage_metrics(enabled=False),
        tree_cache=pools.tree,
        token_to_kv_pool_allocator=pools.kv,
        req_to_token_pool=pools.rows,
        sliding_window_size=shape.window_tokens,
        is_hybrid_swa=shape.window_tokens is not None,
        disaggregation_mode=engine.disaggregation.NULL,
        spec_algorithm=engine.speculation.EAGLE if workload.spec else engine.speculation.NONE,
        running_batch=engine.batch(reqs=[], batch_is_full=False),
        new_token_ratio_tracker=engine.ratio.from_config(),
        policy=engine.policy("fcfs", pools.tree, False, False, False),
    )
    scheduler.init_pool_stats_observer()
    scheduler.init_invariant_checker()
    scheduler.init_batch_result_processor()
    return scheduler


def _limits(workload: Workload) -> dict[str, Any]:
    """What the flags come down to."""
    max_req_len = min(workload.context, workload.pool_tokens) - 1
    return {
        "page_size": workload.page_size,
        "max_total_num_tokens": workload.pool_tokens,
        "full_tokens_per_layer": workload.pool_tokens,
        "swa_tokens_per_layer": workload.swa_pool_tokens,
        "max_req_len": max_req_len,
        "max_req_input_len": max_req_len - INPUT_MARGIN_TOKENS,
        "max_running_requests": workload.max_running,
        "max_prefill_tokens": workload.max_prefill_tokens,
        "max_queued_requests": workload.max_queued,
        "chunked_prefill_size": workload.chunk_tokens,
        "enable_overlap": workload.overlap,
        "model_config": model(workload.context),
    }


def _surroundings() -> dict[str, Any]:
    """Attributes that are the same in each run: nothing runs yet, and there is no one to report to."""
    reporter = SimpleNamespace(num_retracted_reqs=0, enable_metrics=False, num_generated_tokens=0, forward_ct_decode=0)
    for name in [
        "_maybe_log_idle_metrics",
        "log_batch_result_stats",
        "record_scheduler_active",
        "record_scheduler_idle",
        "report_decode_stats",
        "report_prefill_stats",
        "snapshot_spec_decode_metrics",
        "update_device_timer",
        "update_spec_metrics",
    ]:
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


def _unset(scheduler: Any, name: str) -> None:
    """What the paths in use do not set is off."""
    if name.startswith("__"):
        raise AttributeError(name)


def _nothing(*_: Any, **__: Any) -> None:
    """Said to no one."""


@contextmanager
def wrong_on_purpose(engine: Engine, workload: Workload) -> Iterator[None]:
    """The guard of a decode step as the workload wants it; `pages` leaves the engine's own.

    `tokens` asks for one token a request, as the engine did before its PR 4913; `none` asks for nothing.
    """
    if workload.decode_check == "pages":
        yield
        return
    name = "new_tokens_required_next_decode"
    own = getattr(engine.batch, name)
    each = int(workload.decode_check == "tokens")

    def required(batch: Any, selected_indices: list[int] | None = None) -> int:
        return each * len(batch.reqs if selected_indices is None else selected_indices)

    setattr(engine.batch, name, required)
    try:
        yield
    finally:
        setattr(engine.batch, name, own)
