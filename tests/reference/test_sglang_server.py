"""SGLang's own code as a referee: what it answers, and that it is the engine that answers."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagestorm_real.reference import environment
from pagestorm_real.reference.client import ReferenceProcess, ReferenceRefused

CLOCK = {"base": 1000, "per_request": 100, "per_context": 1, "per_prefill": 10}
SPEC = {"steps": 3, "topk": 2, "draft": 4, "accept_lengths": [1, 3, 4, 2]}
LIMITS: dict[str, Any] = {
    "page_size": 16,
    "max_total_tokens": 512,
    "max_running_requests": 8,
    "chunked_prefill_size": 64,
    "conservativeness": 0.3,
}


@pytest.fixture(scope="module")
def sglang() -> Iterator[ReferenceProcess]:
    """One server for all the runs."""
    if problem := environment.problem("sglang"):
        pytest.skip(problem)
    with ReferenceProcess("sglang") as process:
        yield process


def of_kind(answer: dict[str, Any], *kinds: str) -> list[list[Any]]:
    return [event for event in answer["events"] if event[1] in kinds]


def pressing(seed: int, **more: Any) -> dict[str, Any]:
    """A workload that outgrows its pool within some 200 passes, arrivals counted in passes."""
    rng = random.Random(seed)
    asks = [{"input": rng.randint(1, 20), "out": rng.randint(60, 90), "max_new": 90} for _ in range(14)]
    if "concurrency" not in more and "clock" not in more:
        asks = [{**ask, "arrive": 2 * number} for number, ask in enumerate(asks)]
    limits = {**LIMITS, "max_running_requests": 32, "chunked_prefill_size": 32, "conservativeness": 0.1}
    return {**limits, "requests": asks, "max_steps": 2000, **more}


# --- whole runs -------------------------------------------------------------------------------------------------


def test_a_lone_request_is_prefilled_and_then_decoded_token_by_token(sglang: ReferenceProcess) -> None:
    answer = sglang.request("run", **LIMITS, requests=[{"input": 40, "out": 3}])
    assert answer["events"] == [[0, "prefill", 0, 40, False, 0], [2, "finish", 0, 3]]
    assert (answer["outcome"], answer["steps"], answer["available"]) == ("completed", 3, 512)


def test_with_overlap_an_end_by_length_is_foreseen_and_a_stop_token_costs_a_pass(sglang: ReferenceProcess) -> None:
    by_length = sglang.request("run", **LIMITS, overlap=True, requests=[{"input": 40, "out": 3}])
    by_stop = sglang.request("run", **LIMITS, overlap=True, requests=[{"input": 40, "out": 3, "max_new": 9}])
    ignoring = {"input": 40, "out": 3, "max_new": 9, "ignore_eos": True}
    to_the_end = sglang.request("run", **LIMITS, overlap=True, requests=[ignoring])
    assert (by_length["steps"], by_stop["steps"], to_the_end["steps"]) == (3, 4, 9)
    assert by_length["events"][-1] == by_stop["events"][-1] == [2, "finish", 0, 3]
    assert to_the_end["events"][-1] == [8, "finish", 0, 9]


def test_a_long_prompt_is_cut_into_chunks_that_end_on_pages(sglang: ReferenceProcess) -> None:
    asks = [{"input": 40, "out": 2}, {"input": 100, "out": 2}]
    answer = sglang.request("run", **LIMITS, requests=asks)
    assert of_kind(answer, "prefill") == [
        [0, "prefill", 0, 40, False, 0],
        [0, "prefill", 1, 16, True, 0],
        [1, "prefill", 1, 64, True, 16],
        [2, "prefill", 1, 20, False, 80],
    ]


def test_passes_start_when_the_step_clock_says(sglang: ReferenceProcess) -> None:
    asks = [{"input": 40, "out": 3}, {"input": 10, "out": 2, "arrive": 5000}]
    plain = sglang.request("run", **LIMITS, requests=asks, clock=CLOCK, report=["starts"])
    # 1000 + 100 + 40 + 400 for the prefill, 1000 + 100 + 41 and + 42 for the decodes, then idle until 5000.
    assert plain["starts"] == [0, 1540, 2681, 5000, 6210]
    overlapping = sglang.request("run", **LIMITS, overlap=True, requests=asks, clock=CLOCK, report=["starts"])
    assert overlapping["starts"] == plain["starts"]


def test_with_overlap_a_round_sees_those_who_arrived_by_the_end_of_the_pass_before_the_last(
    sglang: ReferenceProcess,
) -> None:
    # The round that plans pass 3 is at the end of pass 1, at 2681; without overlap it would be at the end of pass 2.
    asks = [{"input": 40, "out": 6}, {"input": 10, "out": 2, "arrive": 2681}]
    joins = {"plain": 0, "overlap": 0, "late": 0}
    for name, overlap, arrive in (("plain", False, 2681), ("overlap", True, 2681), ("late", True, 2682)):
        asks[1]["arrive"] = arrive
        answer = sglang.request("run", **LIMITS, overlap=overlap, requests=asks, clock=CLOCK)
        joins[name] = of_kind(answer, "prefill")[1][0]
    assert joins == {"plain": 2, "overlap": 3, "late": 4}


def test_without_a_clock_arrivals_are_counted_in_passes(sglang: ReferenceProcess) -> None:
    asks = [{"input": 40, "out": 9}, {"input": 10, "out": 2, "arrive": 4}, {"input": 10, "out": 1, "arrive": 99}]
    for overlap in (False, True):
        answer = sglang.request("run", **LIMITS, overlap=overlap, requests=asks)
        assert [event[:3] for event in of_kind(answer, "prefill")] == [
            [0, "prefill", 0],
            [4, "prefill", 1],
            [answer["steps"] - 1, "prefill", 2],
        ]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_closed_loop_keeps_so_many_requests_out_and_brings_them_in_order(
    sglang: ReferenceProcess, overlap: bool
) -> None:
    asks = [{"input": 20 + 7 * i, "out": 5 + i % 4} for i in range(12)]
    asks[5]["input"] = 600
    answer = sglang.request("run", **LIMITS, overlap=overlap, requests=asks, clock=CLOCK, concurrency=3)
    assert (answer["finished"], answer["rejected"]) == (11, 1)
    out: set[int] = set()
    came = []
    for event in answer["events"]:
        if event[1] in ("finish", "reject"):
            out.discard(event[2])
        elif event[2] not in came:
            out.add(event[2])
            came.append(event[2])
        assert len(out) <= 3
    assert came == [i for i in range(12) if i != 5]


def test_a_prompt_that_is_too_long_is_refused_in_the_engines_words(sglang: ReferenceProcess) -> None:
    asks = [{"input": 495, "out": 1}, {"input": 506, "out": 1}]
    answer = sglang.request("run", **LIMITS, requests=asks)
    assert [event[:3] for event in answer["events"] if event[1] != "prefill"] == [[-1, "reject", 1], [7, "finish", 0]]
    message = "Input length (506 tokens) exceeds the maximum allowed length (506 tokens)."
    assert answer["events"][0][3].startswith(message)


def test_a_prompt_that_is_let_in_but_leaves_no_page_of_room_is_never_served(sglang: ReferenceProcess) -> None:
    for length, outcome in ((495, "completed"), (496, "stalled"), (505, "stalled")):
        answer = sglang.request("run", **LIMITS, requests=[{"input": length, "out": 1}])
        assert (answer["outcome"], answer["rejected"]) == (outcome, 0)


def test_a_full_queue_refuses_who_arrives(sglang: ReferenceProcess) -> None:
    asks = [{"input": 100, "out": 100} for _ in range(8)]
    answer = sglang.request("run", **LIMITS, requests=asks, max_queued=4)
    assert [event[:3] for event in of_kind(answer, "reject")] == [[-1, "reject", i] for i in range(4, 8)]
    assert {event[3] for event in of_kind(answer, "reject")} == {"The request queue is full."}


def test_a_full_queue_aborts_who_was_retracted(sglang: ReferenceProcess) -> None:
    answer = sglang.request("run", **pressing(1, max_queued=1))
    told = of_kind(answer, "retract", "abort")
    aborted = [event for event in told if event[1] == "abort"]
    assert 0 < len(aborted) == answer["aborted"] <= answer["retractions"]
    for step, _, request, message in aborted:
        assert message == "The request queue is full."
        assert [step, "retract", request] in told
    assert answer["finished"] + answer["aborted"] + answer["rejected"] == 14


def test_a_retraction_takes_victims_until_the_step_fits(sglang: ReferenceProcess) -> None:
    answer = sglang.request("run", **pressing(1), report=["free", "ratio"])
    victims = of_kind(answer, "retract")
    assert answer["retractions"] == len(victims) > 3
    assert (answer["outcome"], answer["finished"], answer["available"]) == ("completed", 14, 512)
    assert len(answer["free"]) == len(answer["ratio"]) == answer["steps"]
    step, ratio = victims[0][0], answer["ratio"]
    # The ratio decays a little each step, and is estimated anew when somebody is retracted.
    assert ratio[step - 2] >= ratio[step - 1]
    assert ratio[step] > 2 * ratio[step - 1]
    # A victim starts again from nothing, with what it had generated.
    again = next(event for event in of_kind(answer, "prefill") if event[0] > step and event[2] == victims[0][2])
    assert again[5] == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_a_lone_request_that_outgrows_the_pool_is_aborted_and_those_who_wait_go_on(
    sglang: ReferenceProcess, overlap: bool
) -> None:
    # Admission reserves 4,096 tokens of output at most, so without the clip the first request gets in.
    asks = [{"input": 10, "out": 9000}, {"input": 4, "out": 400, "arrive": 3900}]
    limits = {**LIMITS, "max_total_tokens": 4608, "conservativeness": 0.0, "overlap": overlap, "requests": asks}
    clipped = sglang.request("run", **limits)
    assert (clipped["finished"], clipped["aborted"]) == (2, 0)
    answer = sglang.request("run", **limits, no_output_clip=True)
    [abort] = of_kind(answer, "abort")
    [retract] = of_kind(answer, "retract")
    assert (abort[2], retract[2]) == (0, 1)
    assert abort[3].startswith("Out of memory even after retracting all other requests in the decode batch.")
    # The round of the abort launches nothing; the next one, at the same time, lets the victim in again.
    again = [event for event in of_kind(answer, "prefill") if event[0] >= retract[0]]
    assert again[0][:3] == [abort[0], "prefill", 1]
    assert answer["events"][-1][1:] == ["finish", 1, 400]


def test_a_request_that_can_never_be_admitted_stalls(sglang: ReferenceProcess) -> None:
    asks = [{"input": 100, "out": 5, "max_new": 900}]
    answer = sglang.request("run", **LIMITS, requests=asks, no_output_clip=True)
    assert (answer["outcome"], answer["events"]) == ("stalled", [[0, "stall", None]])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_decode_check_that_guards_nothing_ends_in_the_engines_own_words(
    sglang: ReferenceProcess, page_size: int, overlap: bool
) -> None:
    guarded = pressing(1, page_size=page_size, overlap=overlap)
    assert sglang.request("run", **guarded)["outcome"] == "completed"
    answer = sglang.request("run", **guarded, decode_check="none")
    assert answer["outcome"] == "crashed"
    step, kind, request, text, phase = answer["events"][-1]
    assert (step, kind, request, phase) == (answer["steps"], "oom", None, "decode")
    opening = "Out of memory." if page_size == 1 else "Decode out of memory."
    assert text.startswith(f"{opening} Try to lower your batch size.\nTry to allocate ")
    # A fault of one run is none of the next.
    assert sglang.request("run", **guarded)["outcome"] == "completed"


def test_the_old_token_granular_check_crashes_at_a_large_page(sglang: ReferenceProcess) -> None:
    asks = [{"input": 63, "out": 100} for _ in range(5)]
    limits = {**LIMITS, "page_size": 64, "conservativeness": 0.1, "requests": asks}
    assert sglang.request("run", **limits)["outcome"] == "completed"
    answer = sglang.request("run", **limits, decode_check="tokens")
    assert answer["outcome"] == "crashed"
    assert answer["events"][-1][3].startswith("Decode out of memory.")


def test_a_run_stops_after_as_many_passes_as_are_allowed(sglang: ReferenceProcess) -> None:
    answer = sglang.request("run", **LIMITS, requests=[{"input": 40, "out": 90}], max_steps=10)
    assert (answer["outcome"], answer["steps"], answer["finished"]) == ("truncated", 10, 0)


# --- what it does not drive itself: cache, windows, speculation -------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_the_prefix_cache_shares_prompts_and_both_of_its_cores_agree(sglang: ReferenceProcess, overlap: bool) -> None:
    rng = random.Random(5)
    shared = [[rng.randint(3, 9) for _ in range(80)] for _ in range(3)]
    asks = [
        {"prompt": rng.choice(shared)[: rng.randint(1, 80)] + [100 + i] * rng.randint(1, 30), "out": rng.randint(2, 60)}
        for i in range(20)
    ]
    limits = {**LIMITS, "conservativeness": 0.1, "overlap": overlap, "requests": asks, "radix": True}
    rust = sglang.request("run", **limits)
    python = sglang.request("run", **limits, tree_core="python")
    assert (rust.pop("tree_core"), python.pop("tree_core")) == ("rust", "python")
    assert rust == python
    assert sum(event[5] for event in of_kind(rust, "prefill") if not event[4]) > 0
    assert rust["available"] + rust["evictable"] == 512


@pytest.mark.parametrize("radix", [False, True])
def test_a_window_pool_is_whole_again_at_the_end(sglang: ReferenceProcess, radix: bool) -> None:
    asks = [{"input": 60, "out": 80} for _ in range(8)]
    answer = sglang.request("run", **LIMITS, swa={"window": 32, "ratio": 0.5}, radix=radix, requests=asks)
    assert (answer["outcome"], answer["finished"]) == ("completed", 8)
    assert answer["swa_pool"] == 256
    assert answer["full_available"] + answer["full_evictable"] == 512
    assert answer["swa_available"] + answer["swa_evictable"] == 256


@pytest.mark.parametrize("overlap", [False, True])
def test_speculation_commits_the_tokens_it_is_told_to(sglang: ReferenceProcess, overlap: bool) -> None:
    answer = sglang.request("run", **LIMITS, overlap=overlap, spec=SPEC, requests=[{"input": 40, "out": 11}])
    # One token from the prefill, then 1, 3, 4 and 2 from the verify passes.
    assert answer["events"] == [[0, "prefill", 0, 40, False, 0], [4, "finish", 0, 11]]
    assert answer["available"] == 512


# --- many runs in one process -----------------------------------------------------------------------------------------


def test_a_run_is_the_same_whatever_ran_before_it(sglang: ReferenceProcess) -> None:
    workload = pressing(1, overlap=True, clock=CLOCK, report=["starts", "free", "ratio"])
    first = sglang.request("run", **workload)
    sglang.request("run", **pressing(2, page_size=1))
    sglang.request("run", **LIMITS, spec=SPEC, radix=True, requests=[{"input": 40, "out": 11}])
    sglang.request("run", **pressing(2, page_size=64, decode_check="none"))
    sglang.request("run", **LIMITS, swa={"window": 32, "ratio": 0.5}, requests=[{"input": 60, "out": 60}])
    assert sglang.request("run", **workload) == first


@pytest.mark.parametrize(
    ("spoilt", "told"),
    [
        ({"page_size": 0}, "page_size is a whole number of at least 1, not 0"),
        ({"requests": [{"input": 3}]}, "request 0: out is missing"),
        ({"requests": [{"input": 3, "out": 1, "outt": 2}]}, "request 0: unknown outt"),
        ({"watermark": 0.1}, "workload: unknown watermark"),
        ({"report": ["mood"]}, "no mood; there are free, ratio, starts"),
        ({"concurrency": 2, "requests": [{"input": 3, "out": 1, "arrive": 4}]}, "no arrival"),
        ({"clock": {"base": 1.5}}, "base is a whole number"),
        ({"decode_check": "bytes"}, "one of pages, tokens, none"),
    ],
)
def test_a_workload_that_makes_no_sense_is_refused_by_name(
    sglang: ReferenceProcess, spoilt: dict[str, Any], told: str
) -> None:
    with pytest.raises(ReferenceRefused, match=told):
        sglang.request("run", **{**LIMITS, "requests": [{"input": 3, "out": 1}], **spoilt})


def test_an_error_inside_the_engine_is_told_and_harms_no_later_run(sglang: ReferenceProcess) -> None:
    twice = [["alloc", 32], ["free_segment", [0] * 32, 5]]
    with pytest.raises(ReferenceRefused, match="not page-aligned") as caught:
        sglang.request("allocator", kind="paged", page_size=16, pool_tokens=64, operations=twice)
    assert "allocator/paged.py" in caught.value.traceback
    test_a_lone_request_is_prefilled_and_then_decoded_token_by_token(sglang)


# --- whose code it is -------------------------------------------------------------------------------------------------

THEIRS = {
    "managers.scheduler": """
        Scheduler.get_next_batch_to_run Scheduler._get_new_batch_prefill_raw Scheduler.get_num_allocatable_reqs
        Scheduler.update_running_batch Scheduler._reqs_finishing_inflight Scheduler._add_request_to_queue
        Scheduler._abort_on_queued_limit Scheduler.init_req_max_new_tokens Scheduler.stash_chunked_request
        Scheduler.process_batch_result Scheduler.on_idle Scheduler.is_fully_idle""",
    "managers.schedule_batch": """
        ScheduleBatch.check_decode_mem ScheduleBatch.new_tokens_required_next_decode ScheduleBatch.retract_decode
        ScheduleBatch._get_decode_retraction_order ScheduleBatch.release_req ScheduleBatch.filter_batch
        ScheduleBatch.merge_batch ScheduleBatch.prepare_for_extend ScheduleBatch.prepare_for_decode
        Req.update_finish_state Req.reset_for_retract Req.init_next_round_input""",
    "managers.schedule_policy": """
        PrefillAdder.add_one_req PrefillAdder.add_chunked_req PrefillAdder.budget_state
        PrefillAdder._get_running_request_total_token_offset SchedulePolicy.calc_priority""",
    "managers.scheduler_components.new_token_ratio_tracker": """
        NewTokenRatioTracker.from_config NewTokenRatioTracker.decay_step NewTokenRatioTracker.reset
        NewTokenRatioTracker.estimate_new_token_ratio_after_retract""",
    "managers.scheduler_components.batch_result_processor": """
        SchedulerBatchResultProcessor.process_batch_result_prefill
        SchedulerBatchResultProcessor.process_batch_result_decode""",
    "managers.scheduler_components.invariant_checker": """
        SchedulerInvariantChecker._check_all_pools SchedulerInvariantChecker._check_req_pool""",
    "managers.utils": "validate_input_length",
    "mem_cache.allocation": "alloc_for_extend alloc_for_decode alloc_for_decode_default alloc_req_slots",
    "mem_cache.allocator.base": """
        BaseTokenToKVPoolAllocator.check_decode_capacity BaseTokenToKVPoolAllocator.max_new_tokens_for_memory
        BaseTokenToKVPoolAllocator.free_group_begin BaseTokenToKVPoolAllocator.free_group_end""",
    "mem_cache.allocator.paged": """
        PagedTokenToKVPoolAllocator.alloc_extend PagedTokenToKVPoolAllocator.alloc_decode
        PagedTokenToKVPoolAllocator.free_segment""",
    "mem_cache.common": "release_kv_cache checkpoint_kv_cache",
}


@pytest.mark.parametrize("overlap", [False, True])
def test_every_decision_of_a_run_is_made_by_the_engines_own_functions(sglang: ReferenceProcess, overlap: bool) -> None:
    answer = sglang.request("functions_entered", **pressing(1, overlap=overlap))
    assert answer["retractions"] > 0
    assert any(event[4] for event in of_kind(answer, "prefill"))
    entered = set(answer.pop("functions"))
    wanted = {f"sglang.srt.{module}:{name}" for module, names in THEIRS.items() for name in names.split()}
    wanted.add(f"sglang.srt.managers.scheduler:Scheduler.event_loop_{'overlap' if overlap else 'normal'}")
    assert wanted - entered == set()
    assert answer == sglang.request("run", **pressing(1, overlap=overlap))


def test_our_own_code_in_a_run_reads_the_workload_keeps_the_clock_and_takes_notes(sglang: ReferenceProcess) -> None:
    entered = sglang.request("functions_entered", **pressing(1, overlap=True))["functions"]
    ours = {name.partition(":")[0].rpartition(".")[2] for name in entered if name.startswith("pagestorm_real")}
    assert ours == {"sglang_engine", "sglang_recorder", "sglang_run", "sglang_workload", "step_clock"}
    prefix = "pagestorm_real.reference.sglang_run:scheduler_class.<locals>."
    hooks = {name.removeprefix(prefix) for name in entered if name.startswith(prefix)}
    assert hooks == {
        "add_request_to_queue",
        "ingest_requests",
        "on_idle",
        "process_batch_result",
        "run_batch",
        "update_running_batch",
    }


def shared_driver(folder: Path, workload: Path) -> dict[str, Any]:
    """What the shared driver prints; it does not know which packages our environment leaves out."""
    script = (
        "import runpy, sys, warnings; warnings.simplefilter('ignore'); sys.dont_write_bytecode = True\n"
        f"sys.path.insert(0, {str(folder)!r}); import stubs; stubs.install(['IPython'])\n"
        f"sys.argv = ['', {str(workload)!r}]; runpy.run_path({str(folder / 'sglang_run.py')!r}, run_name='__main__')"
    )
    command = [str(environment.interpreter("sglang")), "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-1000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_the_shared_driver_of_the_same_scheduler_sees_the_same_run(
    sglang: ReferenceProcess, shared: Path, tmp_path: Path
) -> None:
    rng = random.Random(1)
    starts = range(10_000, 22_000, 1000)
    asks = [{"prompt": list(range(i, i + rng.randint(1, 90))), "out": rng.randint(100, 300)} for i in starts]
    workload = {**LIMITS, "conservativeness": 0.01, "radix": False, "overlap": True, "context": 8192}
    workload["requests"] = [{**ask, "max_new": 300} for ask in asks]
    file = tmp_path / "workload.json"
    file.write_text(json.dumps(workload))
    theirs = shared_driver(shared / "reference", file)
    answer = sglang.request("run", **workload)
    assert theirs["retractions"] > 0
    told = [
        [step, "prefill", int(request), more[1], kind == "chunk", more[0]] if more else [step, kind, int(request)]
        for step, kind, request, *more in theirs["events"]
    ]
    assert [event if event[1] == "prefill" else event[:3] for event in answer["events"]] == told
    assert (answer["steps"], answer["available"]) == (theirs["steps"], theirs["available"])


# --- single decisions -------------------------------------------------------------------------------------------------


def test_freed_pages_go_to_the_front_and_a_group_comes_back_together(sglang: ReferenceProcess) -> None:
    operations: list[list[Any]] = [
        ["alloc_extend", [0, 0], [5, 9], [-1, -1]],
        ["alloc_decode", [6, 10], [8, 20]],
        ["group_begin"],
        ["free", [9, 8, 4, 5, 6, 7]],
        ["free_segment", list(range(12, 22)), 0],
        ["group_end"],
        ["alloc_extend", [0], [33], [-1]],
    ]
    answer = sglang.request("allocator", kind="paged", page_size=4, pool_tokens=32, operations=operations)
    states = answer["states"]
    assert states[0]["slots"] == [4, 5, 6, 7, 8, *range(12, 21)]
    assert states[1]["slots"] == [9, 21]
    assert [state["available"] for state in states] == [12, 12, 12, 12, 12, 32, 32]
    assert states[5]["free"] == [3, 4, 5, 1, 2, 6, 7, 8]
    assert states[6]["slots"] is None


def test_freed_slots_go_to_the_back_when_a_page_is_one_token(sglang: ReferenceProcess) -> None:
    operations: list[list[Any]] = [["alloc", 5], ["free", [3, 2]], ["alloc", 6], ["alloc", 5]]
    states = sglang.request("allocator", kind="token", pool_tokens=8, operations=operations)["states"]
    assert [state.get("slots") for state in states] == [[1, 2, 3, 4, 5], None, None, [6, 7, 8, 3, 2]]
    assert states[1]["free"] == [6, 7, 8, 3, 2]


def test_a_window_allocator_short_in_one_pool_keeps_what_the_other_gave(sglang: ReferenceProcess) -> None:
    operations: list[list[Any]] = [
        ["alloc_extend", [0, 0], [4, 4], [-1, -1]],
        ["alloc_decode", [5], [7]],
        ["free_swa", [4, 5, 6, 7]],
        ["free_full", [4, 5, 6, 7]],
    ]
    states = sglang.request(
        "allocator", kind="swa", page_size=4, pool_tokens=32, swa_pool_tokens=8, operations=operations
    )["states"]
    assert states[0]["slots"] == states[0]["swa_slots"] == list(range(4, 12))
    assert (states[0]["free"], states[0]["swa_free"]) == ([3, 4, 5, 6, 7, 8], [])
    assert states[1]["slots"] is None
    assert states[1]["free"] == [4, 5, 6, 7, 8]
    assert states[2]["swa_free"] == [1]
    assert states[3]["free"] == [1, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("page_size", "lengths", "phase", "text"),
    [
        (16, [16, 16, 16, 16], "decode", "Decode out of memory. Try to lower your batch size.\nTry to allocate 4 "),
        (1, [16, 16, 16, 16], "decode", "Out of memory. Try to lower your batch size.\nTry to allocate 4 tokens."),
        (16, [16, 16, 16, 17], "prefill", "Prefill out of memory. Try to lower your batch size.\nTry to allocate 65 "),
        (16, [15, 15, 15, 15], None, ""),
    ],
)
def test_running_out_is_told_in_the_engines_own_words(
    sglang: ReferenceProcess, page_size: int, lengths: list[int], phase: str | None, text: str
) -> None:
    answer = sglang.request("decode_oom", page_size=page_size, pool_tokens=64, lengths=lengths)
    assert answer["phase"] == phase
    assert (answer["error"] or "").startswith(text)


def test_arrivals_are_clipped_to_what_a_lone_request_can_hold(sglang: ReferenceProcess) -> None:
    asks = [{"input": 40, "out": 1, "max_new": 9999}, {"input": 505, "out": 1}, {"input": 506, "out": 1}]
    clipped = sglang.request("clip", **LIMITS, requests=asks)["requests"]
    assert [(each["max_new"], bool(each["refusal"])) for each in clipped] == [(447, False), (0, False), (None, True)]


def test_the_ratio_decays_resets_and_is_estimated_anew(sglang: ReferenceProcess) -> None:
    operations: list[list[Any]] = [
        ["decay", 2],
        ["retract", [[10, 100], [20, 50]]],
        ["decay", 2000],
        ["reset"],
        ["retract", []],
    ]
    answer = sglang.request("ratio", conservativeness=0.5, operations=operations)
    init, floor, decay = answer["init"], answer["floor"], answer["decay"]
    assert (init, floor, decay) == (0.35, 0.35 * 0.14, (0.35 - 0.35 * 0.14) / 600)
    assert answer["current"] == [init - decay - decay, (30 + 40) / 151, floor, init, 0.0]


def test_the_first_victim_has_the_least_output_then_the_longest_input(sglang: ReferenceProcess) -> None:
    requests = [[1, 10], [1, 11], [1, 11], [5, 3], [0, 1]]
    assert sglang.request("retraction_order", requests=requests)["victims"] == [4, 2, 1, 0, 3]


def test_the_decode_check_asks_whole_pages_and_more_with_speculation(sglang: ReferenceProcess) -> None:
    rows = [[16, 16], [17, 32], [32, 32]]
    assert sglang.request("decode_need", page_size=16, requests=rows)["tokens"] == 32
    sizing = sglang.request("spec_sizing", page_size=16, requests=rows, spec=SPEC)
    # ceil((16 - 1 + 3) / 16) pages of 16 for each of 2 branches.
    assert (sizing["alloc_len"], sizing["reserve"], sizing["extra_context"]) == (64, 128, 143)
    assert (sizing["next"], sizing["needed"]) == ([144, 160, 160], 384)
    assert sglang.request("decode_need", page_size=16, requests=rows, spec=SPEC)["tokens"] == 384


def test_the_host_keeps_ten_gib_and_refuses_an_indexer_pool_at_the_exact_byte(sglang: ReferenceProcess) -> None:
    assert sglang.request("host_budget", available_bytes=30 * 2**30)["budget_bytes"] == 20 * 2**30
    asked = 65 * 3 * 132 * 64
    pool = {"page_size": 64, "layers": 3, "pages": 65}
    refused = sglang.request("host_indexer", **pool, budget_bytes=asked - 1)
    assert "Not enough host memory" in refused["refused"]
    built = sglang.request("host_indexer", **pool, budget_bytes=asked)
    assert (built["bytes_per_token_per_layer"], built["built_bytes"]) == (132, 66 * 3 * 132 * 64)
