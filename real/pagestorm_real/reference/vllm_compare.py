"""Whole runs of the vLLM model and of vLLM's own scheduler, side by side: the same workload, the decisions of both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pagestorm.engine.vllm import VllmLimits
from pagestorm.engine.vllm_request import VllmRequest
from pagestorm.events import RawEvent
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
