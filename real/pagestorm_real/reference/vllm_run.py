"""A whole run decided by vLLM's own scheduler: its engine core's step, with every decision and every block it moves.

The engine's: `EngineCore.step` and all that it calls, `Scheduler` and `KVCacheManager` (or `SlidingWindowManager`)
first of all, and its server's checks on arrival. Ours: who has arrived, the forward pass (`Recorder.execute`), how long
it takes, and the notes taken on the way.

Runs inside the reference environment. The workload and the answer are described at `run`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagestorm_real.reference.entered import functions_entered
from pagestorm_real.reference.serving import BadPayload
from pagestorm_real.reference.step_clock import Arrivals, PassTimes
from pagestorm_real.reference.vllm_engine import PLAIN_TOKEN, STOP_TOKEN, Engine, Flags, own_token, prompt

MAX_STEPS = 200_000
MAX_PREEMPTIONS = 1_000_000
SCHEDULER_FLAGS = {
    "max_num_seqs": "max_num_seqs",
    "watermark": "watermark",
    "policy": "policy",
    "long_prefill_token_threshold": "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive": "long_prefill_token_threshold_adaptive",
    "enable_chunked_prefill": "enable_chunked_prefill",
    "reserve_full_sequence": "scheduler_reserve_full_isl",
}
"""Key of a workload -> field of the engine's SchedulerConfig; what is left out keeps the engine's default."""
OTHER_KEYS = frozenset(
    {
        "block_size",
        "num_blocks",
        "max_model_len",
        "max_num_batched_tokens",
        "prefix_caching",
        "lookahead",
        "sliding_window",
        "requests",
        "concurrency",
        "clock",
        "max_steps",
        "max_preemptions",
        "report",
    }
)
REPORTS = ("starts", "free_blocks", "queue", "entered")


@dataclass(frozen=True)
class Planned:
    """A request of the workload."""

    input: int
    prefix: list[list[int]]
    tokens: list[int] | None
    out: int
    max_new: int
    ignore_eos: bool
    priority: int
    arrive: int


class Workload:
    """A workload as `run` describes it, checked and with every default filled in."""

    def __init__(self, w: dict[str, Any]) -> None:
        known = OTHER_KEYS.union(SCHEDULER_FLAGS)
        if unknown := sorted(set(w) - known):
            raise BadPayload(f"unknown workload keys {unknown}; there are {sorted(known)}")
        try:
            self._read(w)
        except KeyError as error:
            raise BadPayload(f"the workload needs {error}") from error

    def _read(self, w: dict[str, Any]) -> None:
        self.flags = Flags(
            block_size=int(w["block_size"]),
            num_blocks=int(w["num_blocks"]),
            max_model_len=int(w["max_model_len"]),
            max_num_batched_tokens=int(w["max_num_batched_tokens"]),
            prefix_caching=bool(w.get("prefix_caching", False)),
            lookahead=int(w.get("lookahead", 0)),
            sliding_window=w.get("sliding_window"),
            scheduler={name: w[key] for key, name in SCHEDULER_FLAGS.items() if key in w},
        )
        if "max_num_seqs" not in w:
            raise KeyError("max_num_seqs")
        self.times = PassTimes(**w["clock"]) if w.get("clock") else PassTimes(1, 0, 0, 0)
        self.max_steps = int(w.get("max_steps", MAX_STEPS))
        self.max_preemptions = int(w.get("max_preemptions", MAX_PREEMPTIONS))
        self.report = frozenset(w.get("report", ()))
        if strange := sorted(self.report - set(REPORTS)):
            raise BadPayload(f"unknown reports {strange}; there are {', '.join(REPORTS)}")
        self.requests = [self._planned(r) for r in w["requests"]]
        self.concurrency = w.get("concurrency")
        if self.concurrency is not None and any("arrive" in r for r in w["requests"]):
            raise BadPayload("a closed loop (concurrency) has no arrival times (arrive)")

    @staticmethod
    def _planned(r: dict[str, Any]) -> Planned:
        tokens = r.get("prompt")
        return Planned(
            input=len(tokens) if tokens is not None else int(r["input"]),
            prefix=r.get("prefix", []),
            tokens=tokens,
            out=int(r["out"]),
            max_new=int(r.get("max_new", r["out"])),
            ignore_eos=bool(r.get("ignore_eos", False)),
            priority=int(r.get("priority", 0)),
            arrive=int(r.get("arrive", 0)),
        )

    def text(self, number: int) -> list[int]:
        """The prompt; without a prefix cache only its length matters."""
        planned = self.requests[number]
        if planned.tokens is not None:
            return planned.tokens
        if not self.flags.prefix_caching:
            return [PLAIN_TOKEN] * planned.input
        return prompt(number, planned.input, planned.prefix)


class Recorder:
    """One run as it goes: the time, who is still to come, what was seen."""

    def __init__(self, engine: Engine, workload: Workload) -> None:
        self.engine = engine
        self.workload = workload
        self.core: Any = None
        self.hasher = engine.hasher(workload.flags)
        self.arrivals = Arrivals([r.arrive for r in workload.requests], workload.concurrency)
        self.now = 0
        """Time of the round being planned, which is the end of the pass before it."""
        self.steps = 0
        self.end = 0
        """End of the pass launched last."""
        self.events: list[list[Any]] = []
        self.counts = dict.fromkeys(("finished", "rejected", "preemptions", "generated"), 0)
        self.stops_at: dict[str, int] = {}
        self.prefilling: set[str] = set()
        self.starts: list[int] = []
        self.free: list[int] = []
        self.least_free = workload.flags.num_blocks - 1

    def note(self, step: int, kind: str, request: int | None, *more: object) -> None:
        self.events.append([step, kind, request, *more])

    # --- a round ---------------------------------------------------------------------------------------------

    def rounds(self) -> str:
        """All of them; returns the outcome."""
        outcome = ""
        while not outcome:
            outcome = self._round()
        return outcome

    def _round(self) -> str:
        """Let in who has arrived and run the engine's step; returns an outcome when the run is over, else nothing."""
        scheduler = self.core.scheduler
        if self.steps >= self.workload.max_steps or self.counts["preemptions"] > self.workload.max_preemptions:
            return "truncated"
        while (arrival := self.arrivals.take(self.now)) is not None:
            self._arrive(*arrival)
        coming = self.arrivals.next_time()
        if scheduler.get_num_unfinished_requests():
            steps, preemptions = self.steps, self.counts["preemptions"]
            self.core.step()
            if self.steps > steps or self.counts["preemptions"] > preemptions:
                return ""
            if coming is None:
                self.note(self.steps, "stall", int(scheduler.waiting.peek_request().request_id))
                return "stalled"
        elif coming is None:
            return "completed"
        # A round that neither ran nor preempted anything changed nothing, so only an arrival can.
        self.now = coming
        return ""

    def _arrive(self, number: int, time: int) -> None:
        engine, flags, planned = self.engine, self.workload.flags, self.workload.requests[number]
        refusal = engine.refusal(planned.input, planned.max_new, flags.max_model_len)
        if refusal:
            self.counts["rejected"] += 1
            self.note(self.steps - 1, "reject", number, refusal)
            self.arrivals.ended(time)
            return
        most = engine.max_tokens(flags.max_model_len, planned.max_new, planned.input, {})
        # The engine breaks ties by the id, as text.
        name = f"{number:012d}"
        self.stops_at[name] = planned.out if planned.out < most else 0
        sampling = engine.sampling(max_tokens=most, ignore_eos=planned.ignore_eos)
        sampling.update_from_generation_config({}, STOP_TOKEN)
        self.core.add_request(
            engine.request_class(
                request_id=name,
                prompt_token_ids=self.workload.text(number),
                sampling_params=sampling,
                pooling_params=None,
                arrival_time=time,
                priority=planned.priority,
                block_hasher=self.hasher,
            )
        )

    # --- a pass ----------------------------------------------------------------------------------------------

    def execute(self, output: Any) -> Any:
        """The forward pass: how long it takes, and one token for each request whose known tokens are all computed."""
        scheduled: dict[str, int] = output.num_scheduled_tokens
        scheduler = self.core.scheduler
        names, sampled = list(scheduled), []
        context = prompts = 0
        self.prefilling.update(new.req_id for new in output.scheduled_new_reqs)
        self.prefilling.update(output.scheduled_cached_reqs.resumed_req_ids)
        for name, tokens in scheduled.items():
            request = scheduler.requests[name]
            context += request.num_computed_tokens
            if name in self.prefilling:
                prompts += tokens
                self.note(self.steps, "prefill", int(name), tokens)
            sampled.append(self._sample(request))
        if scheduled:
            self._pass(len(scheduled), context, prompts)
            self.steps += 1
        return self.engine.outputs(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def _sample(self, request: Any) -> list[int]:
        name = request.request_id
        if request.num_computed_tokens < request.num_tokens:
            return []
        self.prefilling.discard(name)
        self.counts["generated"] += 1
        if request.num_output_tokens + 1 == self.stops_at[name]:
            return [STOP_TOKEN]
        # With a prefix cache the text of an answer must be as much its own as that of a prompt.
        return [own_token(int(name), request.num_tokens) if self.hasher else PLAIN_TOKEN]

    def _pass(self, requests: int, context: int, prompts: int) -> None:
        free = self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        self.least_free = min(self.least_free, free)
        if "starts" in self.workload.report:
            self.starts.append(self.now)
        if "free_blocks" in self.workload.report:
            self.free.append(free)
        times = self.workload.times
        self.now += times.decode(requests, context) + times.per_prefill * prompts
        self.end = self.now

    # --- what the scheduler did to a request ------------------------------------------------------------------

    def preempted(self, request: Any) -> None:
        self.counts["preemptions"] += 1
        self.note(self.steps, "preempt", int(request.request_id), request.num_computed_tokens)

    def freed(self, request: Any) -> None:
        self.counts["finished"] += 1
        reason = str(request.get_finished_reason())
        self.note(self.steps - 1, "finish", int(request.request_id), request.num_output_tokens, reason)
        self.arrivals.ended(self.end)


def scheduler_class(engine: Engine) -> Any:
    """The engine's `Scheduler`; what it does to a request is noted, in its order."""
    base = engine.scheduler

    def preempt(scheduler: Any, request: Any, *more: Any, **named: Any) -> Any:
        scheduler.recorder.preempted(request)
        return base._preempt_request(scheduler, request, *more, **named)

    def free(scheduler: Any, request: Any, *more: Any, **named: Any) -> Any:
        scheduler.recorder.freed(request)
        return base._free_request(scheduler, request, *more, **named)

    return type("Scheduler", (base,), {"_preempt_request": preempt, "_free_request": free})


# --- the operation -------------------------------------------------------------------------------------------------


def run(engine: Engine, kind: Any, payload: dict[str, Any]) -> dict[str, Any]:
    """A whole run.

    The workload: `block_size, num_blocks` (null block included), `max_model_len, max_num_seqs,
    max_num_batched_tokens`; left out they keep the engine's defaults: `watermark, policy` (fcfs | priority),
    `long_prefill_token_threshold, long_prefill_token_threshold_adaptive, enable_chunked_prefill,
    reserve_full_sequence`; `prefix_caching` (False), `lookahead` (0), `sliding_window` (None);
    `requests`: [{`input` with `prefix` [[group, tokens], ...], or `prompt` tokens; `out` tokens after which the model
    stops, `max_new` tokens asked for (out), `ignore_eos, priority, arrive`}]; `concurrency` (None: arrivals by time);
    `clock` {base, per_request, per_context, per_prefill} (None: a pass takes 1); `max_steps, max_preemptions`;
    `report`: any of `starts` (of each pass), `free_blocks` (after each was planned), `queue` (ids of the free blocks at
    the end, in their order), `entered` (the engine's functions that the run entered).

    A pass takes base + per_request x requests + per_context x tokens computed after it, over all its requests +
    per_prefill x tokens computed for requests that have not sampled since they were admitted.

    The answer: `outcome` (completed | stalled | truncated), `events` in order: [step, "prefill", request, tokens],
    [step, "preempt", request, tokens computed so far], [step, "finish", request, tokens generated, reason],
    [step of the last pass, "reject", request, message], [step, "stall", head of the queue]; `steps`, counts,
    `end` of the last pass, `free` blocks at the end, `least_free`, and what `report` asked for.
    """
    workload = Workload(payload)
    recorder = Recorder(engine, workload)
    try:
        recorder.core = engine.build(kind, workload.flags, recorder.execute)
    except (ValueError, AssertionError) as error:
        raise BadPayload(f"the engine refuses these flags: {error}") from error
    recorder.core.scheduler.recorder = recorder
    names: list[str] = []
    if "entered" in workload.report:
        outcome, names = functions_entered(recorder.rounds, ("vllm",))
    else:
        outcome = recorder.rounds()
    pool = recorder.core.scheduler.kv_cache_manager.block_pool
    answer = {
        "outcome": outcome,
        "events": recorder.events,
        "steps": recorder.steps,
        **recorder.counts,
        "end": recorder.end,
        "free": pool.get_num_free_blocks(),
        "least_free": recorder.least_free,
    }
    told: dict[str, Any] = {"starts": recorder.starts, "free_blocks": recorder.free, "entered": names}
    if "queue" in workload.report:
        told["queue"] = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    return answer | {name: told[name] for name in sorted(workload.report)}
