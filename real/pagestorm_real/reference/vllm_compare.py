"""Whole runs of the vLLM model and of vLLM's own scheduler, side by side: the same workload, the decisions of both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pagestorm import workload as workloads
from pagestorm.engine.vllm import VllmLimits
from pagestorm.engine.vllm_request import VllmRequest
from pagestorm.errors import Divergence, ScenarioError
from pagestorm.events import RawEvent
from pagestorm.runs import Result
from pagestorm.scenario.schema import Linear, VllmFlags
from pagestorm.servers import vllm_limits
from pagestorm.steptime import LinearStepTime
from pagestorm_real.reference.client import ReferenceProcess, ReferenceRefused
from pagestorm_real.reference.step_clock import PassTimes

Decision = tuple[int, str, int, int]
"""(step, kind, request, tokens); tokens are those computed (prefill), lost (preempt) or generated (finish), else -1."""

COMPARED = ("prefill", "preempt", "finish", "reject")


def payload(
    limits: VllmLimits,
    requests: Sequence[VllmRequest],
    times: PassTimes,
    *,
    prefix_caching: bool,
    concurrency: int | None = None,
    **more: object,
) -> dict[str, Any]:
    """What `vllm_run.run` is asked for this workload; `more` are further keys of it (max_steps, report, ...)."""
    told = [_request(r, concurrency is None) for r in requests]
    return {
        "block_size": limits.block_size,
        "num_blocks": limits.num_blocks,
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "policy": limits.policy,
        "watermark": limits.watermark,
        "lookahead": limits.lookahead_tokens,
        "long_prefill_token_threshold": limits.long_prefill_token_threshold,
        "long_prefill_token_threshold_adaptive": limits.long_prefill_token_threshold_adaptive,
        "enable_chunked_prefill": limits.enable_chunked_prefill,
        "reserve_full_sequence": limits.reserve_full_sequence,
        "prefix_caching": prefix_caching,
        "requests": told,
        "concurrency": concurrency,
        "clock": {
            "base": times.base,
            "per_request": times.per_request,
            "per_context": times.per_context,
            "per_prefill": times.per_prefill,
        },
        **more,
    }


def _request(request: VllmRequest, timed: bool) -> dict[str, Any]:
    told: dict[str, Any] = {
        "input": request.input_tokens,
        "prefix": [list(run) for run in request.prefix],
        "out": request.output_tokens,
        "max_new": request.asked_tokens,
        "ignore_eos": request.ignore_eos,
        "priority": request.priority,
    }
    if timed:
        told["arrive"] = request.arrive_fs
    return told


def ours(events: Iterable[RawEvent], before_step: int | None = None) -> list[Decision]:
    """The model's decisions, those of passes before `before_step` alone."""
    return [
        (event[2], event[3], event[4], -1 if event[3] == "reject" else event[5])
        for event in events
        if event[3] in COMPARED and (before_step is None or event[2] < before_step)
    ]


def theirs(answer: dict[str, Any]) -> list[Decision]:
    """The reference's decisions, from its answer."""
    return [
        (step, kind, request, -1 if kind == "reject" else more[0])
        for step, kind, request, *more in answer["events"]
        if kind in COMPARED
    ]


def first_difference(mine: Sequence[Decision], others: Sequence[Decision]) -> str:
    """Where two runs part, in words; an empty string when they do not."""
    for place, (a, b) in enumerate(zip(mine, others, strict=False)):
        if a != b:
            return f"decision {place}: the model says {a}, vLLM says {b}"
    if len(mine) == len(others):
        return ""
    longer, who = (mine, "the model") if len(mine) > len(others) else (others, "vLLM")
    return f"{who} goes on alone with {longer[min(len(mine), len(others))]}"


# --- a scenario ------------------------------------------------------------------------------------------------

SPARE_STEPS = 8
"""Passes that the reference may launch beyond what the model needed before it is stopped."""


def compare(reference: ReferenceProcess, result: Result, max_steps: int) -> None:
    """Put the scenario of a result to the engine and raise `Divergence` at the first decision that differs.

    `result` keeps its events. Not more than `max_steps` passes of the engine are looked at.
    """
    scenario, summary = result.scenario, result.summary
    flags, steptime = scenario.engine, scenario.steptime
    if not isinstance(flags, VllmFlags):
        raise ScenarioError("only a scenario of its own kind can be put to vLLM", key="engine.kind")
    if not isinstance(steptime, Linear):
        raise ScenarioError("the reference knows the linear step time only", key="steptime.kind")
    clock = LinearStepTime(steptime)
    load = workloads.stream(scenario)
    cut_at = min(max_steps, summary["engine_steps"] + SPARE_STEPS)
    asked = payload(
        vllm_limits(flags),
        [_as_request(draft) for draft in sorted(load.drafts(), key=lambda draft: draft.number)],
        PassTimes(clock.base_fs, clock.per_request_fs, clock.per_context_token_fs, clock.per_prefill_token_fs),
        prefix_caching=flags.enable_prefix_caching,
        concurrency=load.concurrency,
        max_steps=cut_at,
    )
    try:
        answer = reference.request("run", **asked)
    except ReferenceRefused as error:
        if not error.traceback:
            raise
        answers: dict[str, object] = {"vllm": error.traceback, "pagestorm": "no error"}
        raise Divergence(f"the engine raised: {error}", call="run", answers=answers) from error
    cut = answer["outcome"] == "truncated"
    difference = first_difference(ours(result.raw_events, cut_at if cut else None), theirs(answer))
    if difference:
        raise Divergence(difference, call="run", answers={"vllm": answer["outcome"], "pagestorm": summary["outcome"]})


def _as_request(draft: workloads.Draft) -> VllmRequest:
    asked = draft.output_tokens if draft.max_new_tokens is None else draft.max_new_tokens
    return VllmRequest(
        draft.number,
        draft.at_fs or 0,
        draft.input_tokens,
        draft.output_tokens,
        asked,
        draft.ignore_eos,
        priority=draft.priority,
        prefix=draft.prefix,
    )
