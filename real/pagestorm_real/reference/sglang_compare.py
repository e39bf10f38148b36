"""Whole runs of the SGLang model and of SGLang's own scheduler, side by side: the same scenario, the decisions of both.

A decision is (step, kind, request, ...): prefill with its tokens, whether the prompt is incomplete after it, the start
of the pass in nanoseconds and the tokens free behind it; retract; abort and reject with the engine's words; finish
with the tokens generated; oom with the engine's words; stall.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from msgspec.structs import fields

from pagestorm import workload as workloads
from pagestorm.errors import Divergence, ScenarioError
from pagestorm.runs import Result
from pagestorm.scenario import Scenario
from pagestorm.scenario.schema import Linear, SglangFlags
from pagestorm.steptime import LinearStepTime
from pagestorm_real.reference.client import ReferenceProcess, ReferenceRefused

Decision = tuple[object, ...]

FS_PER_NS = 10**6
UNTOLD = ("init_new_token_ratio", "min_new_token_ratio_factor", "new_token_ratio_decay_steps")
"""Flags that the reference takes from the engine's environment only."""
SPARE_STEPS = 8
"""Passes that the reference may launch beyond what the model needed before it is stopped."""


def compare(reference: ReferenceProcess, result: Result, max_steps: int) -> None:
    """Put the scenario of a result to the engine and raise `Divergence` at the first decision that differs.

    `result` keeps its events. Not more than `max_steps` passes of the engine are looked at.
    """
    scenario, summary = result.scenario, result.summary
    asked = payload(scenario, min(max_steps, summary["engine_steps"] + SPARE_STEPS))
    try:
        answer = reference.request("run", **asked)
    except ReferenceRefused as error:
        if not error.traceback:
            raise
        raise Divergence(
            f"the engine raised: {error}", call="run", answers={"sglang": error.traceback, "pagestorm": "no error"}
        ) from error
    cut_at = answer["steps"] if answer["outcome"] == "truncated" else None
    difference = first_difference(ours(result), theirs(answer), cut_at)
    if difference:
        raise Divergence(difference, call="run", answers={"sglang": answer["outcome"], "pagestorm": summary["outcome"]})


def payload(scenario: Scenario, max_steps: int) -> dict[str, Any]:
    """What `sglang_run.run` is asked for a resolved scenario. Raises `ScenarioError` for what it cannot be asked."""
    engine, steptime = scenario.engine, scenario.steptime
    if not isinstance(engine, SglangFlags):
        raise ScenarioError("only a scenario of its own kind can be put to SGLang", key="engine.kind")
    for flag in UNTOLD:
        default = next(field.default for field in fields(engine) if field.name == flag)
        if getattr(engine, flag) != default:
            raise ScenarioError(f"the reference cannot be told of it; leave it at {default}", key=f"engine.{flag}")
    if "kv_length_off_by_one" in engine.emulate:
        raise ScenarioError("the pinned engine does not have this fault; leave it out", key="engine.emulate")
    if not isinstance(steptime, Linear):
        raise ScenarioError("the reference knows the linear step time only", key="steptime.kind")
    times = LinearStepTime(steptime)
    load = workloads.stream(scenario)
    drafts = sorted(load.drafts(), key=lambda draft: draft.number)
    return {
        "page_size": engine.page_size,
        "max_total_tokens": engine.pool_tokens,
        "max_running_requests": engine.max_running_requests,
        "chunked_prefill_size": engine.chunked_prefill_size,
        "max_prefill_tokens": engine.max_prefill_tokens,
        "conservativeness": engine.schedule_conservativeness,
        "overlap": not engine.disable_overlap_schedule,
        "context": engine.context_length,
        "max_queued": engine.max_queued_requests,
        "decode_check": engine.decode_check,
        "no_output_clip": "no_output_clip" in engine.emulate,
        "concurrency": load.concurrency,
        "requests": [_request(draft) for draft in drafts],
        "clock": {
            "base": times.base_fs,
            "per_request": times.per_request_fs,
            "per_context": times.per_context_token_fs,
            "per_prefill": times.per_prefill_token_fs,
        },
        "report": ["free", "starts"],
        "max_steps": max(1, max_steps),
    }


def _request(draft: workloads.Draft) -> dict[str, Any]:
    told: dict[str, Any] = {
        "input": draft.input_tokens,
        "out": draft.output_tokens,
        "max_new": draft.output_tokens if draft.max_new_tokens is None else draft.max_new_tokens,
        "ignore_eos": draft.ignore_eos,
    }
    if draft.at_fs is not None:
        told["arrive"] = draft.at_fs
    return told


def ours(result: Result) -> list[Decision]:
    """The model's decisions, in the order of its record."""
    found: list[Decision] = []
    page_size, error = result.scenario.engine.page_size, result.summary["error"]
    for time_ns, _, step, kind, request, tokens, _, free_pages, _, _, _, _, detail in result.raw_events:
        match kind:
            case "prefill":
                found.append((step, kind, request, tokens, bool(detail), time_ns, free_pages * page_size))
            case "retract":
                found.append((step, kind, request))
            case "abort" | "reject":
                found.append((step, kind, request, _reason(detail)))
            case "finish":
                found.append((step, kind, request, tokens))
            case "decode_oom" | "prefill_oom":
                found.append((step, "oom", kind.removesuffix("_oom"), error))
    if result.summary["outcome"] == "stalled":
        found.append((result.summary["engine_steps"], "stall"))
    return found


def _reason(detail: str) -> object:
    return json.loads(detail)["reason"]


def theirs(answer: dict[str, Any]) -> list[Decision]:
    """The engine's decisions, from the reference's answer."""
    found: list[Decision] = []
    for step, kind, request, *more in answer["events"]:
        match kind:
            case "prefill":
                start_ns, free = answer["starts"][step] // FS_PER_NS, answer["free"][step]
                found.append((step, kind, request, more[0], more[1], start_ns, free))
            case "oom":
                found.append((step, kind, more[1], more[0]))
            case "finish":
                # With max_new_tokens 0 the engine computes a token that it does not show.
                found.append((step, kind, request, max(1, more[0])))
            case "stall":
                found.append((step, kind))
            case _:
                found.append((step, kind, request, *more))
    return found


def first_difference(model: Sequence[Decision], engine: Sequence[Decision], cut_at: int | None = None) -> str:
    """Where two runs part, in words; an empty string when they do not.

    With `cut_at` the engine was stopped after so many passes: what the model does from the result of the last of them
    on has no counterpart.
    """
    for place, (a, b) in enumerate(zip(model, engine, strict=False)):
        if a != b:
            return f"decision {place}: pagestorm says {a}, SGLang says {b}"
    both = min(len(model), len(engine))
    if len(engine) > both:
        return f"decision {both}: SGLang goes on alone with {engine[both]}"
    left = [d for d in model[both:] if cut_at is None or (isinstance(d[0], int) and d[0] < cut_at - 1)]
    return f"decision {both}: pagestorm goes on alone with {left[0]}" if left else ""
