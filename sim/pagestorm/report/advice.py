"""What to try next: flags in the engine's own spelling, and the direction that helps.

Only what follows from the rules that decided is said here. How far a flag must be moved is found by simulating.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pagestorm.diagnosis import (
    ABORT,
    DECODE_OOM,
    LAST_REQUEST,
    PREFILL_OOM,
    PROMPT_LIMIT,
    QUEUE_LIMIT,
    REJECTION,
    Diagnosis,
    Incident,
    Pressure,
)
from pagestorm.engine.sglang import CLIP_NEW_TOKENS, INPUT_MARGIN_TOKENS, ceil_pages

if TYPE_CHECKING:
    from pagestorm.scenario.schema import SglangFlags


def next_steps(summary: Mapping[str, Any], diagnosis: Diagnosis) -> list[str]:
    """What to change, the most direct first; empty when nothing gave way."""
    steps: list[str] = []
    if diagnosis.first[DECODE_OOM]:
        steps += _after_decode_oom(diagnosis, diagnosis.first[DECODE_OOM][0].pressure)
    if diagnosis.first[PREFILL_OOM]:
        steps += _after_prefill_oom(diagnosis, diagnosis.first[PREFILL_OOM][0].pressure)
    if summary["outcome"] == "stalled" and diagnosis.events_read:
        steps += _after_stall(diagnosis, diagnosis.stall())
    if f"{ABORT}: {LAST_REQUEST}" in diagnosis.tallies:
        steps += _after_lone_abort(diagnosis)
    if summary["retractions"]:
        steps += _after_retraction(summary, diagnosis)
    if summary["preemptions"]:
        steps += _after_preemption(summary)
    steps += _after_refusals(diagnosis)
    return list(dict.fromkeys(steps))


def fits_at_page_size_1(pressure: Pressure, page_size: int) -> bool:
    """Whether the decode step that was short of pages would have found its slots with nothing rounded up."""
    spare = (pressure.free_pages + pressure.evictable_pages) * page_size + pressure.rounding_tokens
    return page_size > 1 and pressure.phase == "decode" and pressure.asked_tokens <= spare


def _after_decode_oom(diagnosis: Diagnosis, pressure: Pressure) -> list[str]:
    steps = []
    if pressure.check != "pages":
        steps.append(
            "Guard the decode step by pages: an engine release whose check counts pages, here "
            "--set engine.decode_check=pages. The same moment is then a retraction instead of a crash."
        )
    if diagnosis.late_check:
        steps.append(
            "Leave out emulate: kv_length_off_by_one; releases that fixed sgl-project/sglang#7411 count in time."
        )
    if pressure.check == "tokens" and diagnosis.page_size > 1:
        steps.append("Until then --page-size 1: there a token is a page, and the token check is right.")
    return steps


def _after_prefill_oom(diagnosis: Diagnosis, pressure: Pressure) -> list[str]:
    engine = diagnosis.sglang
    now = f" (now {engine.chunked_prefill_size:,})" if engine and engine.chunked_prefill_size else ""
    free = (pressure.free_pages + pressure.evictable_pages) * diagnosis.page_size
    return [
        f"A smaller --chunked-prefill-size{now}: this pass asked {pressure.asked_tokens:,} tokens, {free:,} were free."
    ]


def _after_stall(diagnosis: Diagnosis, stall: Incident) -> list[str]:
    page, tokens = diagnosis.page_size, stall.pressure.asked_tokens
    if tokens + page >= diagnosis.pool_pages * page:
        least = smallest_pool_tokens(tokens, page)
        return [
            f"A pool of at least {least:,} tokens (--max-total-tokens, --mem-fraction-static), or refuse prompts as "
            f"long as this before they reach the server: it blocks everybody behind it."
        ]
    steps = [f"A smaller max_new_tokens for request {stall.request}, or a larger pool (--mem-fraction-static)."]
    if _emulates(diagnosis, "no_output_clip"):
        steps.insert(
            0, "Leave out emulate: no_output_clip; the engine then cuts max_new_tokens to what the pool holds."
        )
    return steps


def smallest_pool_tokens(input_tokens: int, page_size: int) -> int:
    """The smallest pool, in whole pages, that accepts a prompt on arrival and admits it when idle, without a prefix
    hit: input < pool - 6 and input + page_size < pool."""
    return ceil_pages(input_tokens + max(page_size, INPUT_MARGIN_TOKENS) + 1, page_size)


def _after_lone_abort(diagnosis: Diagnosis) -> list[str]:
    steps = ["Ask for fewer tokens (max_new_tokens), or a larger pool (--mem-fraction-static)."]
    if _emulates(diagnosis, "no_output_clip"):
        steps.insert(
            0, "Leave out emulate: no_output_clip; the engine then cuts max_new_tokens to what the pool holds."
        )
    return steps


def _after_retraction(summary: Mapping[str, Any], diagnosis: Diagnosis) -> list[str]:
    steps = []
    scenario = diagnosis.scenario
    fixed = scenario is not None and scenario.workload.ignore_eos
    if not fixed:
        steps += _reserve_more(diagnosis.sglang)
    if summary["peak_running"] > 1:
        steps.append(
            f"Lower --max-running-requests below {summary['peak_running']:,}, the most that ran at once: fewer "
            f"requests grow at the same time."
        )
    if diagnosis.longest_output_tokens > CLIP_NEW_TOKENS:
        steps.append(
            f"Raise SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION: outputs reached {diagnosis.longest_output_tokens:,} tokens, "
            f"and admission never reserves more than {CLIP_NEW_TOKENS:,} for one request."
        )
    worst = diagnosis.worst_bursts
    if worst and fits_at_page_size_1(worst[0].pressure, diagnosis.page_size):
        steps.append("A smaller --page-size: at 1 the worst of these steps would have fitted.")
    steps.append("A larger pool: raise --mem-fraction-static, or --max-total-tokens where it is set.")
    return steps


def _after_preemption(summary: Mapping[str, Any]) -> list[str]:
    steps = [
        "Raise --watermark (a share of the blocks, 0.02 to 0.1): it keeps blocks free when something is admitted "
        "beside running requests, so that they can grow."
    ]
    if summary["peak_running"] > 1:
        steps.append(f"Lower --max-num-seqs below {summary['peak_running']:,}, the most that ran at once.")
    return [*steps, "A larger pool: raise --gpu-memory-utilization, or --num-gpu-blocks-override where it is set."]


def _reserve_more(engine: SglangFlags | None) -> list[str]:
    """The initial new-token ratio is min(init x conservativeness, 1): from 1 on, raising the flag changes nothing."""
    why = "admission then reserves more for what running requests will still generate."
    if engine is None:
        return [f"Raise --schedule-conservativeness: {why}"]
    init, now = engine.init_new_token_ratio, engine.schedule_conservativeness
    if init <= 0 or now * init >= 1:
        return []
    return [f"Raise --schedule-conservativeness (now {now:g}; from {1 / init:.2f} on it changes nothing): {why}"]


def _after_refusals(diagnosis: Diagnosis) -> list[str]:
    steps = []
    prompts = diagnosis.tallies.get(f"{REJECTION}: {PROMPT_LIMIT}")
    if prompts is not None:
        longest, page = prompts.most_tokens, diagnosis.page_size
        if prompts.limit_tokens + INPUT_MARGIN_TOKENS == diagnosis.pool_pages * page:
            steps.append(
                f"To accept the longest refused prompt ({longest:,} tokens): a pool of at least "
                f"{smallest_pool_tokens(longest, page):,} tokens (--max-total-tokens, --mem-fraction-static)."
            )
        else:
            steps.append(
                f"To accept the longest refused prompt ({longest:,} tokens): --context-length "
                f"{longest + INPUT_MARGIN_TOKENS + 1} or more, if the model and the pool can take it."
            )
    if any(f"{kind}: {QUEUE_LIMIT}" in diagnosis.tallies for kind in (REJECTION, ABORT)):
        limit = diagnosis.sglang.max_queued_requests if diagnosis.sglang else None
        now = f" (now {limit:,})" if limit is not None else ""
        steps.append(f"Raise --max-queued-requests{now}, or send less: the server is slower than what arrives.")
    return steps


def _emulates(diagnosis: Diagnosis, fault: str) -> bool:
    return diagnosis.sglang is not None and fault in diagnosis.sglang.emulate
