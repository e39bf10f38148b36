"""vLLM's own scheduler, out of process, beside the model of it: whole runs, step for step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from pagestorm.engine.vllm import VllmLimits, refusal
from pagestorm.memory.block_pool import BlockPool
from pagestorm.steptime import LinearStepTime
from pagestorm_real.reference import environment
from pagestorm_real.reference.client import ReferenceProcess, ReferenceRefused
from pagestorm_real.reference.step_clock import PassTimes
from pagestorm_real.reference.vllm_compare import first_difference, ours, payload, theirs
from tests.cases.public import cases
from tests.engine.drive_vllm import CLOCK, Ask, Drive, Driven, drive, drives
from tests.engine.test_vllm import watermark_drive

STEPS = 300
HUNT = bool(os.environ.get("PAGESTORM_FUZZ"))
RUNS = 2000 if HUNT else 200
LIMITS = VllmLimits(num_blocks=61, block_size=16, max_model_len=900, max_num_seqs=8, max_num_batched_tokens=256)


@pytest.fixture(scope="module")
def vllm() -> Iterator[ReferenceProcess]:
    """One server for all the runs."""
    if problem := environment.problem("vllm"):
        pytest.skip(problem)
    with ReferenceProcess("vllm") as process:
        yield process


def asked(what: Drive, **more: object) -> dict[str, Any]:
    """The same workload and step clock for the reference."""
    clock = LinearStepTime(CLOCK)
    times = PassTimes(clock.base_fs, clock.per_request_fs, clock.per_context_token_fs, clock.per_prefill_token_fs)
    return payload(
        what.limits,
        what.requests(),
        times,
        prefix_caching=what.prefix_caching,
        concurrency=what.concurrency,
        **more,
    )


def difference(driven: Driven, answer: dict[str, Any], max_steps: int | None = None) -> str:
    """Where a run of ours and the reference's part; the times of their ends are compared too."""
    told = first_difference(ours(driven.events, max_steps), theirs(answer))
    engine = driven.engine
    if told or engine.step != answer["steps"] or not engine.idle:
        return told
    ends = [event[0] for event in driven.events if event[3] == "finish"]
    if ends and ends[-1] != answer["end"] // 10**6:
        return f"the last pass ends at {ends[-1]} ns here and at {answer['end'] // 10**6} ns there"
    if engine.counts.generated_tokens != answer["generated"]:
        return f"{engine.counts.generated_tokens} tokens were generated here, {answer['generated']} there"
    least = engine.blocks.total_blocks - engine.counts.peak_used_pages
    if least != answer["least_free"]:
        return f"at least {least} blocks were free here, {answer['least_free']} there"
    if isinstance(engine.blocks, BlockPool) and engine.blocks.queue() != answer["queue"]:
        return f"the free queue is {engine.blocks.queue()} here and {answer['queue']} there"
    return ""


def test_whole_runs_decide_alike_step_for_step(vllm: ReferenceProcess) -> None:
    """Both policies, prefix cache on and off, watermarks, lookahead; a third of the runs at least is under pressure."""
    pressed: list[bool] = []

    @given(drives())
    @settings(max_examples=RUNS, deadline=None, suppress_health_check=list(HealthCheck))
    def one(what: Drive) -> None:
        answer = vllm.request("run", **asked(what, max_steps=STEPS, max_preemptions=1500, report=["queue"]))
        driven = drive(what, max_steps=STEPS)
        assert difference(driven, answer, STEPS) == ""
        if answer["outcome"] != "truncated" and not driven.engine.over:
            assert answer["outcome"] == "completed"
        pressed.append(answer["preemptions"] > 0)

    one()
    assert len(pressed) >= RUNS
    assert sum(pressed) >= len(pressed) / 3


def test_the_decisions_are_the_engines_own(vllm: ReferenceProcess) -> None:
    """The functions of vLLM that a run enters: no loop of ours stands in for theirs."""
    what = Drive([Ask(100, 200, 200, prefix=((1, 64),))] * 8, replace(LIMITS, policy="priority"), prefix_caching=True)
    answer = vllm.request("run", **asked(what, report=["entered"]))
    assert answer["preemptions"] > 0
    core = "vllm.v1.core."
    wanted = {
        "vllm.v1.engine.core:EngineCore.step",
        "vllm.v1.engine.core:EngineCore.add_request",
        "vllm.v1.request:Request.append_output_token_ids",
        "vllm.v1.request:Request.__lt__",
        core + "sched.scheduler:Scheduler.schedule",
        core + "sched.scheduler:Scheduler._preempt_request",
        core + "sched.scheduler:Scheduler.update_from_output",
        core + "sched.utils:check_stop",
        core + "sched.request_queue:PriorityRequestQueue.prepend_request",
        core + "kv_cache_manager:KVCacheManager.get_computed_blocks",
        core + "kv_cache_manager:KVCacheManager.allocate_slots",
        core + "kv_cache_manager:KVCacheManager.free",
        core + "single_type_kv_cache_manager:FullAttentionManager.find_longest_cache_hit",
        core + "block_pool:BlockPool.get_new_blocks",
        core + "block_pool:BlockPool.cache_full_blocks",
        core + "block_pool:BlockPool.touch",
        core + "block_pool:BlockPool.free_blocks",
        core + "block_pool:BlockPool._maybe_evict_cached_block",
        core + "kv_cache_utils:FreeKVCacheBlockQueue.popleft_n",
        core + "kv_cache_utils:FreeKVCacheBlockQueue.prepend_n",
        core + "kv_cache_utils:FreeKVCacheBlockQueue.append_n",
        core + "kv_cache_utils:hash_block_tokens",
    }
    assert wanted <= set(answer["entered"])


@pytest.mark.parametrize(
    ("input_tokens", "max_new"), [(899, 1), (899, 500), (900, 1), (901, 1), (950, 1), (10, 900), (10, 901), (10, 0)]
)
def test_arrivals_are_refused_in_the_servers_own_words(vllm: ReferenceProcess, input_tokens: int, max_new: int) -> None:
    answer = vllm.request("run", **asked(Drive([Ask(input_tokens, 5, max_new)], LIMITS)))
    told = [event[3] for event in answer["events"] if event[1] == "reject"]
    mine = refusal(input_tokens, max_new, LIMITS.max_model_len)
    assert told == ([mine] if mine else [])


def test_many_runs_leave_nothing_behind_in_the_process(vllm: ReferenceProcess) -> None:
    what = Drive([Ask(60, 100, 100, prefix=((0, 48),))] * 6, replace(LIMITS, num_blocks=31), prefix_caching=True)
    first, second = (vllm.request("run", **asked(what, report=["queue"])) for _ in range(2))
    assert first == second
    assert first["free"] == 30


def test_a_sliding_window_gives_blocks_back_while_it_runs(vllm: ReferenceProcess) -> None:
    what = Drive([Ask(200, 400, 400)] * 2, replace(LIMITS, num_blocks=200))
    full = vllm.request("run", **asked(what))
    window = vllm.request("run", **asked(what, sliding_window=64))
    assert full["outcome"] == window["outcome"] == "completed"
    assert full["free"] == window["free"] == 199
    assert window["least_free"] > full["least_free"]


def test_a_run_is_cut_where_it_was_asked_to_be(vllm: ReferenceProcess) -> None:
    answer = vllm.request("run", **asked(Drive([Ask(10, 100, 100)], LIMITS), max_steps=7))
    assert (answer["outcome"], answer["steps"], answer["generated"]) == ("truncated", 7, 7)


def test_a_stall_is_told_with_the_head_of_the_queue(vllm: ReferenceProcess) -> None:
    answer = vllm.request("run", **asked(Drive([Ask(700, 5, 5)], replace(LIMITS, num_blocks=20))))
    assert answer["outcome"] == "stalled"
    assert answer["events"] == [[0, "stall", 0]]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"blocks": 5}, "unknown workload keys"),
        ({"max_num_seqs": 512}, "the engine refuses these flags"),
        ({"watermark": 1.5}, "the engine refuses these flags"),
        ({"report": ["weather"]}, "unknown reports"),
        ({"concurrency": 2}, "has no arrival times"),
    ],
)
def test_a_workload_without_sense_is_refused_and_the_server_lives_on(
    vllm: ReferenceProcess, wrong: dict[str, Any], why: str
) -> None:
    sound = asked(Drive([Ask(10, 5, 5)], LIMITS))
    with pytest.raises(ReferenceRefused, match=why):
        vllm.request("run", **{**sound, **wrong})
    assert vllm.request("run", **sound)["finished"] == 1


def test_a_workload_that_lacks_something_is_told_what(vllm: ReferenceProcess) -> None:
    sound = asked(Drive([Ask(10, 5, 5)], LIMITS))
    del sound["max_num_seqs"]
    with pytest.raises(ReferenceRefused, match="max_num_seqs"):
        vllm.request("run", **sound)


@pytest.mark.skipif(not HUNT, reason="takes vLLM's scheduler two minutes a draw: make fuzz")
@pytest.mark.parametrize("seed", range(5))
def test_the_watermark_workload_preempts_alike_on_the_same_draw(
    vllm: ReferenceProcess, shared: Path, seed: int
) -> None:
    """vllm-project/vllm PR 44594, its 450 requests and some 30,000 passes."""
    what = watermark_drive(cases(shared, "vllm")["watermark-table"]["given"], seed, 0.0)
    answer = vllm.request("run", timeout_s=1800, **asked(what))
    driven = drive(what)
    assert driven.engine.counts.preemptions == answer["preemptions"]
    assert difference(driven, answer) == ""
