"""The diagnosis against a recount of the same record by other means, and its laws word for word."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from pagestorm import diagnosis as diagnosing
from pagestorm.diagnosis import Diagnosis, Incident, Marks, diagnose
from pagestorm.events import RawEvent
from pagestorm.runs import Result, run
from pagestorm.scenario import from_mapping
from tests.recount import Moment, Recount


def simulate(engine: Mapping[str, Any], workload: Mapping[str, Any]) -> Result:
    return run(
        from_mapping(
            {
                "schema": 1,
                "name": "case",
                "engine": {"disable_radix_cache": True, **engine},
                "workload": {"arrivals": {"process": "burst"}, **workload},
            }
        )
    )


def uniform(low: int, high: int) -> dict[str, Any]:
    return {"dist": "uniform", "low": low, "high": high}


CROWDED = {
    "num_requests": 200,
    "input_tokens": uniform(50, 600),
    "output_tokens": uniform(10, 450),
    "max_new_tokens": 512,
}
IN_PHASE = {"num_requests": 300, "input_tokens": 256, "output_tokens": 200, "max_new_tokens": 400}
TIGHT = {"page_size": 64, "max_total_tokens": 64 * 300, "schedule_conservativeness": 0.1}
ROOMY = {**TIGHT, "max_total_tokens": 64 * 400}


def read(result: Result) -> Diagnosis:
    return diagnose(result.raw_events, result.summary, result.scenario)


def recount(result: Result) -> Recount:
    table = result.request_table.columns()
    numbers: Any = table["request"]
    limits: Any = table["max_new_tokens"]
    max_new = dict(zip(numbers.tolist(), limits.tolist(), strict=True))
    engine = result.scenario.engine
    return Recount(engine.page_size, engine.pool_pages, max_new).play(result.raw_events)


def same_moment(incident: Incident, moment: Moment) -> None:
    pressure = incident.pressure
    assert pressure.evictable_pages == pressure.protected_pages == 0
    assert (
        Moment(
            pressure.asked_tokens,
            pressure.asked_pages,
            pressure.free_pages,
            pressure.uncached_pages,
            pressure.rounding_tokens,
            pressure.batch,
            pressure.held,
        )
        == moment
    )


def same_as_recount(result: Result) -> Recount:
    """Every figure of the diagnosis, against the recount."""
    found, counted = read(result), recount(result)
    assert found.counts[diagnosing.RETRACTION] == len(counted.bursts)
    for incident, burst in zip(found.first[diagnosing.RETRACTION], counted.bursts, strict=False):
        assert (incident.time_ns, incident.step) == (burst.time_ns, burst.step)
        assert (incident.victims, incident.first_victims) == (len(burst.victims), tuple(burst.victims[:8]))
        assert (incident.freed_pages, incident.lost_tokens) == (burst.freed_pages, burst.lost_tokens)
        same_moment(incident, burst.before)
    worst = sorted(counted.bursts, key=lambda b: (-b.lost_tokens, b.step))[:10]
    assert [i.step for i in found.worst_bursts] == [b.step for b in worst]
    assert found.victims == sum(len(b.victims) for b in counted.bursts) == result.summary["retractions"]
    assert found.lost_tokens == sum(b.lost_tokens for b in counted.bursts)
    assert sum(found.marks.victims) == found.victims
    ooms = found.first[diagnosing.DECODE_OOM]
    assert len(ooms) == len(counted.out_of_memory) == result.summary["decode_oom"]
    for incident, (happened, moment) in zip(ooms, counted.out_of_memory, strict=True):
        assert incident.step == happened[2]
        same_moment(incident, moment)
    for kind, told in ((diagnosing.ABORT, counted.aborts), (diagnosing.REJECTION, counted.rejections)):
        assert found.counts[kind] == len(told)
        assert sum(t.count for name, t in found.tallies.items() if name.startswith(kind)) == len(told)
        for incident, (happened, moment) in zip(found.first[kind], told, strict=False):
            assert (incident.request, incident.step) == (happened[4], happened[2])
            same_moment(incident, moment)
    assert found.prefill_tokens == counted.prefill_tokens
    assert found.longest_output_tokens == counted.longest_output_tokens
    assert result.summary["recomputed_tokens"] == counted.recomputed_tokens
    if result.summary["outcome"] == "stalled":
        assert found.stall().request == counted.queue[0]
    return counted


# --- every figure ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_every_figure_of_a_retraction_burst_is_in_the_plain_events(overlap: bool) -> None:
    counted = same_as_recount(simulate({**TIGHT, "disable_overlap_schedule": not overlap}, CROWDED))
    assert counted.bursts


@pytest.mark.parametrize("check", ["tokens", "none"])
@pytest.mark.parametrize("overlap", [True, False])
def test_every_figure_of_a_crash_is_in_the_plain_events(check: str, overlap: bool) -> None:
    engine = {**ROOMY, "decode_check": check, "disable_overlap_schedule": not overlap}
    assert same_as_recount(simulate(engine, IN_PHASE)).out_of_memory


def test_every_figure_of_a_rejection_is_in_the_plain_events() -> None:
    result = simulate(
        {"page_size": 16, "max_total_tokens": 3200}, {**CROWDED, "input_tokens": uniform(50, 4000), "num_requests": 40}
    )
    assert same_as_recount(result).rejections


def test_every_figure_of_an_abort_is_in_the_plain_events() -> None:
    outgrown = {"page_size": 16, "max_total_tokens": 6400, "emulate": ["no_output_clip"], "context_length": 100_000}
    one = {"num_requests": 1, "input_tokens": 100, "output_tokens": 30_000, "max_new_tokens": 20_000}
    assert same_as_recount(simulate(outgrown, one)).aborts
    three = simulate({**outgrown, "schedule_conservativeness": 0.01}, {**one, "num_requests": 3})
    assert same_as_recount(three).aborts


def test_a_retracted_request_that_a_full_queue_turns_away_is_an_abort_by_the_queue_limit() -> None:
    result = simulate(
        {**TIGHT, "max_queued_requests": 4},
        {**CROWDED, "arrivals": {"process": "poisson", "rate_per_s": 25}, "num_requests": 400},
    )
    counted = same_as_recount(result)
    assert counted.aborts
    assert counted.rejections
    assert set(read(result).tallies) == {"abort: queue limit", "rejection: queue limit"}


prompts = st.one_of(st.integers(1, 120), st.sampled_from([16, 63, 64, 65, 128]))
outputs = st.integers(60, 250)
more = st.integers(0, 300)
askers = st.tuples(prompts, outputs, more, st.booleans())


@given(
    page=st.sampled_from([1, 2, 16, 64]),
    pool_tokens=st.integers(300, 1200),
    check=st.sampled_from(["pages", "pages", "tokens", "none"]),
    overlap=st.booleans(),
    conservativeness=st.sampled_from([0.01, 0.1, 0.3]),
    chunk_pages=st.sampled_from([1, 3, 64]),
    queued=st.sampled_from([None, 3]),
    requests=st.lists(askers, min_size=3, max_size=25),
)
@settings(deadline=None, max_examples=150)
def test_every_figure_is_in_the_plain_events_of_any_small_run(
    page: int,
    pool_tokens: int,
    check: str,
    overlap: bool,
    conservativeness: float,
    chunk_pages: int,
    queued: int | None,
    requests: list[tuple[int, int, int, bool]],
) -> None:
    engine = {
        "page_size": page,
        "max_total_tokens": pool_tokens,
        "decode_check": check,
        "disable_overlap_schedule": not overlap,
        "schedule_conservativeness": conservativeness,
        "chunked_prefill_size": page * chunk_pages,
    }
    if queued is not None:
        engine["max_queued_requests"] = queued
    explicit = [
        {
            "at_s": 0.01 * i if spread else 0.0,
            "input_tokens": tokens,
            "output_tokens": output,
            "max_new_tokens": output + more,
        }
        for i, (tokens, output, more, spread) in enumerate(requests)
    ]
    explicit.sort(key=lambda r: r["at_s"])
    result = run(
        from_mapping(
            {
                "schema": 1,
                "name": "any",
                "engine": {"disable_radix_cache": True, **engine},
                "workload": {"requests": explicit},
            }
        )
    )
    counted = same_as_recount(result)
    event(f"{result.summary['outcome']}, {'retracts' if counted.bursts else 'calm'}")


# --- laws ------------------------------------------------------------------------------------------------------


def test_the_page_check_is_told_with_the_openings_and_the_free_pages() -> None:
    burst = read(simulate(ROOMY, IN_PHASE)).worst_bursts[0]
    assert burst.law == "page check: 54 sequences open a page in the same step, 22 pages are free"
    assert burst.victims == 4


def test_the_token_check_is_told_with_what_it_overlooked() -> None:
    oom = read(simulate({**TIGHT, "decode_check": "tokens"}, CROWDED)).first[diagnosing.DECODE_OOM][0]
    asked, free = oom.pressure.asked_tokens, oom.pressure.free_pages
    assert asked <= free * 64
    assert oom.pressure.asked_pages > free
    assert oom.law == (
        f"token check: {asked} tokens asked <= {free * 64} tokens free, but {oom.pressure.asked_pages} sequences open "
        f"a page in the same step and only {free} page{'' if free == 1 else 's'} {'is' if free == 1 else 'are'} free"
    )


def test_a_check_that_comes_a_step_late_is_told_as_such() -> None:
    result = simulate({**ROOMY, "emulate": ["kv_length_off_by_one"]}, IN_PHASE)
    assert same_as_recount(result).out_of_memory
    needless = read(result).first[diagnosing.RETRACTION][0]
    assert needless.law.endswith("of the step before; 0 sequences open a page in the same step now, 22 pages are free")
    oom = read(result).first[diagnosing.DECODE_OOM][0]
    assert oom.pressure.asked_pages > oom.pressure.free_pages
    assert oom.law == (
        "page check, a step late: it looked for the pages of the step before, but 53 sequences open a page in the same "
        "step and only 29 pages are free"
    )


def test_the_prompt_limit_names_what_sets_it() -> None:
    long = {"num_requests": 1, "input_tokens": 5000, "output_tokens": 5}
    by_pool = read(simulate({"page_size": 16, "max_total_tokens": 1024}, long)).first[diagnosing.REJECTION][0]
    assert by_pool.law == (
        "prompt limit: request 0 has 5,000 prompt tokens (313 pages); a prompt must be shorter than 1,018 (the pool's "
        "1,024 tokens less 6)"
    )
    by_context = read(simulate({"page_size": 16, "max_total_tokens": 8192, "context_length": 2048}, long))
    assert by_context.first[diagnosing.REJECTION][0].law.endswith("shorter than 2,042 (context_length 2,048 less 6)")


def test_a_stall_names_the_head_of_the_queue() -> None:
    result = simulate(
        {"page_size": 16, "max_total_tokens": 1024}, {"num_requests": 3, "input_tokens": 1012, "output_tokens": 5}
    )
    assert result.summary["outcome"] == "stalled"
    stall = read(result).stall()
    assert (stall.request, stall.pressure.asked_tokens, stall.pressure.asked_pages) == (0, 1012, 64)
    assert stall.pressure.free_pages == 64
    assert stall.law.startswith("admission: request 0 must prefill 1,012 tokens (64 pages)")


PRESSURE = {
    "phase": "prefill",
    "check": "pages",
    "asked_tokens": 512,
    "asked_pages": 32,
    "free_pages": 10,
    "evictable_pages": 3,
    "protected_pages": 0,
    "uncached_pages": 87,
    "rounding_tokens": 5,
    "batch": 4,
    "ratio": 0.5,
    "held": [[1, 40]],
}


def record(
    kind: str, step: int, request: int = -1, tokens: int = -1, pages: int = -1, detail: object = None
) -> RawEvent:
    text = json.dumps(detail) if detail else ""
    return (step * 1000, step, step, kind, request, tokens, pages, 10, 3, 4, 7, "full", text)


def test_a_prefill_that_the_allocator_cannot_serve_is_told_with_the_prompt_that_was_being_continued() -> None:
    found = Diagnosis(page_size=16, pool_pages=100)
    found.write([record("prefill", 1, 8, 512, 32, {"chunk": True}), record("prefill_oom", 2, detail=PRESSURE)])
    found.close()
    law = found.first[diagnosing.PREFILL_OOM][0].law
    assert law.startswith(
        "prefill allocation: 512 tokens asked, which take 32 pages, and only 10 pages are free and 3 evictable; "
        "request 8 is in the middle of its prompt"
    )


# --- bounds ----------------------------------------------------------------------------------------------------


def test_a_long_storm_is_counted_whole_and_kept_in_part() -> None:
    found = Diagnosis(page_size=16, pool_pages=100)
    detail = {**PRESSURE, "phase": "decode"}
    for step in range(1000):
        lost = (step * 37) % 1000
        found.write([record("retract", step, 1, lost, 1, detail), record("retract", step, 2, 5, 1)])
    found.close()
    assert found.counts[diagnosing.RETRACTION] == 1000
    assert found.victims == 2000
    assert found.lost_tokens == sum(range(1000)) + 5000
    assert [i.step for i in found.first[diagnosing.RETRACTION]] == list(range(50))
    assert [i.lost_tokens for i in found.worst_bursts] == [n + 5 for n in range(999, 989, -1)]
    assert found.last_burst is not None
    assert found.last_burst.step == 999


def test_a_million_requests_would_not_fill_memory() -> None:
    found = Diagnosis(page_size=16, pool_pages=100)

    def feed(start: int, stop: int) -> None:
        for n in range(start, stop):
            kinds = (("arrive", 100), ("admit", 100), ("prefill", 100), ("finish", 20))
            found.write([record(kind, n, n, tokens, 7) for kind, tokens in kinds])

    feed(0, 10_000)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    feed(10_000, 30_000)
    grown_bytes = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown_bytes < 200_000
    assert found.prefill_tokens == 3_000_000


def test_the_chunks_in_which_a_record_is_fed_make_no_difference() -> None:
    result = simulate(TIGHT, CROWDED)
    whole = read(result)
    pieces = Diagnosis.of(result.scenario)
    for one in result.raw_events:
        pieces.write([one])
    pieces.close()
    assert pieces.first == whole.first
    assert pieces.worst_bursts == whole.worst_bursts
    assert (pieces.victims, pieces.lost_tokens, pieces.prefill_tokens) == (
        whole.victims,
        whole.lost_tokens,
        whole.prefill_tokens,
    )


@given(st.lists(st.integers(1, 9), max_size=100))
@settings(deadline=None, max_examples=20)
def test_thinned_marks_lose_no_retraction(victims: list[int]) -> None:
    marks = Marks()
    for i in range(diagnosing.KEPT_MARKS - 50):
        marks.add(i, 1)
    for i, n in enumerate(victims):
        marks.add(diagnosing.KEPT_MARKS + i, n)
    assert sum(marks.victims) == diagnosing.KEPT_MARKS - 50 + sum(victims)
    assert len(marks.victims) == len(marks.time_ns) < diagnosing.KEPT_MARKS
    assert marks.time_ns == sorted(marks.time_ns)
