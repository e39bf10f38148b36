"""From a scenario to its requests."""

from __future__ import annotations

import tracemalloc
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pagestorm.errors import ScenarioError
from pagestorm.scenario.schema import (
    Burst,
    ClosedLoop,
    Constant,
    ExplicitRequest,
    Gamma,
    Histogram,
    Lognormal,
    Poisson,
    Scenario,
    SglangFlags,
    Trace,
    TraceArrivals,
    TraceLengths,
    Uniform,
    Workload,
    Zipf,
)
from pagestorm.workload import Draft, stream

ARRIVALS = (Burst(), Constant(rate_per_s=20), Poisson(rate_per_s=20), Gamma(rate_per_s=20, cv=3))
LENGTHS = (
    7,
    Uniform(low=1, high=500),
    Lognormal(median=100, sigma=1),
    Zipf(alpha=1.1, high=10**6),
    Histogram(values=(1, 10, 100)),
)


def scenario(seed: int = 7, **workload: Any) -> Scenario:
    parts: dict[str, Any] = {"num_requests": 300, "arrivals": ARRIVALS[2]}
    parts |= {"input_tokens": LENGTHS[1], "output_tokens": LENGTHS[2]}
    return Scenario(
        name="x", seed=seed, engine=SglangFlags(max_total_tokens=1000), workload=Workload(**parts | workload)
    )


def written(*requests: ExplicitRequest, **workload: Any) -> Scenario:
    parts = {"num_requests": None, "arrivals": None, "input_tokens": None, "output_tokens": None}
    return scenario(**(parts | workload), requests=requests)


def traced(path: Path, **workload: Any) -> Scenario:
    parts = {"num_requests": None, "arrivals": None, "input_tokens": None, "output_tokens": None}
    return scenario(**(parts | workload), trace=Trace(format="azure", path=str(path)))


def drafts(asked: Scenario) -> list[Draft]:
    return list(stream(asked).drafts())


def column(asked: Scenario, name: str) -> list[Any]:
    return [getattr(draft, name) for draft in stream(asked).drafts()]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    rows = (f"2023-11-16 18:17:{second:02d}.5,{10 + second},{20 + second}\n" for second in range(5))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows))
    return path


@pytest.mark.parametrize("arrivals", ARRIVALS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_generated_workload_is_numbered_in_order_of_arrival(arrivals: Any, lengths: Any) -> None:
    asked = scenario(arrivals=arrivals, output_tokens=lengths)
    workload = stream(asked)
    made = list(workload.drafts())
    assert (workload.count, workload.concurrency) == (300, None)
    assert [draft.number for draft in made] == list(range(300))
    times = [draft.at_fs for draft in made if draft.at_fs is not None]
    assert len(times) == 300
    assert times == sorted(times)
    assert all(type(time) is int and time % 10**6 == 0 for time in times)
    assert all(type(length) is int for draft in made for length in (draft.input_tokens, draft.output_tokens))
    assert list(workload.drafts()) == made


def test_a_femtosecond_is_a_millionth_of_a_nanosecond() -> None:
    assert column(scenario(num_requests=3, arrivals=Constant(rate_per_s=4)), "at_fs") == [0, 25 * 10**13, 50 * 10**13]


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(ARRIVALS), st.sampled_from(LENGTHS), st.sampled_from(LENGTHS), st.integers(1, 300))
def test_more_requests_do_not_change_the_first_ones(arrivals: Any, prompts: Any, outputs: Any, fewer: int) -> None:
    asked = scenario(arrivals=arrivals, input_tokens=prompts, output_tokens=outputs)
    shorter = replace(asked, workload=replace(asked.workload, num_requests=fewer))
    assert drafts(shorter) == drafts(asked)[:fewer]


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        *(("arrivals", "at_fs"), ("input_tokens", "input_tokens"), ("output_tokens", "output_tokens")),
        *(("max_new_tokens", "max_new_tokens"), ("ignore_eos", "ignore_eos")),
    ],
)
def test_changing_one_part_moves_no_other(changed: str, field: str) -> None:
    other: dict[str, Any] = {
        "arrivals": ARRIVALS[3],
        "input_tokens": LENGTHS[3],
        "output_tokens": LENGTHS[4],
        "max_new_tokens": 9,
        "ignore_eos": True,
    }
    before, after = scenario(), scenario(**{changed: other[changed]})
    for name in Draft._fields:
        assert (column(before, name) == column(after, name)) == (name != field)


def test_prompts_and_outputs_of_one_distribution_are_drawn_apart() -> None:
    asked = scenario(input_tokens=LENGTHS[1], output_tokens=LENGTHS[1])
    assert column(asked, "input_tokens") != column(asked, "output_tokens")


@pytest.mark.parametrize("field", ["at_fs", "input_tokens", "output_tokens"])
def test_another_seed_changes_every_stream(field: str) -> None:
    assert column(scenario(seed=7), field) == column(scenario(seed=7), field) != column(scenario(seed=8), field)


def test_a_closed_loop_has_no_times_and_says_how_many_are_out_at_once() -> None:
    workload = stream(scenario(arrivals=ClosedLoop(concurrency=128)))
    assert (workload.count, workload.concurrency) == (300, 128)
    assert {draft.at_fs for draft in workload.drafts()} == {None}


def test_what_a_request_asks_for_is_the_number_the_engines_default_or_left_open() -> None:
    assert set(column(scenario(max_new_tokens=5), "max_new_tokens")) == {5}
    assert set(column(scenario(max_new_tokens="engine"), "max_new_tokens")) == {128}
    assert set(column(scenario(), "max_new_tokens")) == {None}


def test_output_tokens_stay_as_drawn_above_what_is_asked_for() -> None:
    free, asked = scenario(), scenario(max_new_tokens=5)
    assert max(column(asked, "output_tokens")) > 5
    assert column(asked, "output_tokens") == column(free, "output_tokens")


def test_a_million_requests_are_never_a_list() -> None:
    tracemalloc.start()
    try:
        made = stream(scenario(num_requests=10**9, arrivals=Burst())).drafts()
        assert sum(1 for _ in islice(made, 60_000)) == 60_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * 2**20


def test_listed_requests_keep_their_numbers_and_come_by_time() -> None:
    asked = written(
        ExplicitRequest(at_s=0.3, input_tokens=10, output_tokens=20),
        ExplicitRequest(at_s=0.1, input_tokens=11, output_tokens=21, max_new_tokens=5, ignore_eos=True),
        ExplicitRequest(at_s=0.1, input_tokens=12, output_tokens=22, max_new_tokens="engine"),
    )
    workload = stream(asked)
    assert (workload.count, workload.concurrency) == (3, None)
    assert list(workload.drafts()) == [
        Draft(1, 10**14, 11, 21, 5, True),
        Draft(2, 10**14, 12, 22, 128, False),
        Draft(0, 3 * 10**14, 10, 20, None, False),
    ]
    assert list(workload.drafts()) == list(workload.drafts())


def test_listed_requests_take_what_they_do_not_say_from_the_workload() -> None:
    plain = ExplicitRequest(at_s=0, input_tokens=10, output_tokens=20)
    own = ExplicitRequest(at_s=0, input_tokens=10, output_tokens=20, max_new_tokens=0, ignore_eos=False)
    made = drafts(written(plain, own, max_new_tokens=64, ignore_eos=True))
    assert [(draft.max_new_tokens, draft.ignore_eos) for draft in made] == [(64, True), (0, False)]


def test_listed_requests_may_wait_for_each_other_in_a_closed_loop() -> None:
    requests = [ExplicitRequest(input_tokens=length, output_tokens=20) for length in (10, 11, 12)]
    workload = stream(written(*requests, arrivals=ClosedLoop(concurrency=2)))
    assert workload.concurrency == 2
    assert [(draft.number, draft.at_fs, draft.input_tokens) for draft in workload.drafts()] == [
        (0, None, 10),
        (1, None, 11),
        (2, None, 12),
    ]


def test_num_requests_takes_the_first_listed_requests() -> None:
    requests = [ExplicitRequest(at_s=9 - number, input_tokens=number + 1, output_tokens=1) for number in range(4)]
    assert sorted(column(written(*requests, num_requests=2), "number")) == [0, 1]
    with pytest.raises(ScenarioError, match="5 requests are asked for and 4 are listed") as caught:
        stream(written(*requests, num_requests=5))
    assert caught.value.key == "workload.num_requests"


def test_a_listed_request_without_a_time_is_an_error() -> None:
    there, missing = (ExplicitRequest(at_s=at_s, input_tokens=1, output_tokens=1) for at_s in (0.0, None))
    with pytest.raises(ScenarioError, match="say when the request arrives") as caught:
        stream(written(there, missing))
    assert caught.value.key == "workload.requests.1.at_s"


@pytest.mark.parametrize(
    "parts", [{}, {"arrivals": TraceArrivals(), "input_tokens": TraceLengths(), "output_tokens": TraceLengths()}]
)
def test_a_trace_gives_arrivals_and_lengths(trace: Path, parts: dict[str, Any]) -> None:
    workload = stream(traced(trace, **parts))
    assert (workload.count, workload.concurrency) == (5, None)
    expected = [Draft(row, row * 10**15, 10 + row, 20 + row, None, False) for row in range(5)]
    assert list(workload.drafts()) == expected == list(workload.drafts())


def test_trace_lengths_go_with_any_arrivals_and_trace_arrivals_with_any_lengths(trace: Path) -> None:
    made = drafts(traced(trace, arrivals=ARRIVALS[2], output_tokens=LENGTHS[1]))
    drawn = drafts(scenario(num_requests=5, output_tokens=LENGTHS[1]))
    assert [draft.at_fs for draft in made] == [draft.at_fs for draft in drawn]
    assert [draft.output_tokens for draft in made] == [draft.output_tokens for draft in drawn]
    assert [draft.input_tokens for draft in made] == [10, 11, 12, 13, 14]
    made = drafts(traced(trace, input_tokens=9, output_tokens=9))
    assert [draft.at_fs for draft in made] == [row * 10**15 for row in range(5)]


def test_trace_lengths_go_into_a_closed_loop(trace: Path) -> None:
    workload = stream(traced(trace, arrivals=ClosedLoop(concurrency=2)))
    assert workload.concurrency == 2
    assert [(draft.at_fs, draft.output_tokens) for draft in workload.drafts()] == [(None, 20 + row) for row in range(5)]


def test_num_requests_limits_the_rows_of_a_trace(trace: Path) -> None:
    assert len(drafts(traced(trace, num_requests=3))) == 3
    with pytest.raises(ScenarioError, match="ask for at most 5") as caught:
        stream(traced(trace, num_requests=6))
    assert caught.value.key == "workload.num_requests"


def test_a_fault_in_a_trace_shows_before_the_run(trace: Path) -> None:
    trace.write_text(trace.read_text() + "2023-11-16 18:17:30,1,x\n")
    with pytest.raises(ScenarioError, match="GeneratedTokens") as caught:
        stream(traced(trace))
    assert (caught.value.file, caught.value.line) == (str(trace), 7)


def test_a_trace_that_shrinks_under_the_run_is_an_error(trace: Path) -> None:
    workload = stream(traced(trace))
    trace.write_text("".join(trace.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(ScenarioError, match="the trace has 4 rows"):
        list(workload.drafts())


@pytest.mark.parametrize(
    ("parts", "key"),
    [
        ({"num_requests": None}, "workload.num_requests"),
        ({"arrivals": None}, "workload.arrivals"),
        ({"input_tokens": None}, "workload.input_tokens"),
        ({"output_tokens": None}, "workload.output_tokens"),
        ({"arrivals": TraceArrivals()}, "workload.arrivals"),
        ({"output_tokens": TraceLengths()}, "workload.output_tokens"),
        ({"output_tokens": Uniform(low=2, high=1)}, "workload.output_tokens.low"),
        ({"input_tokens": Histogram(path="/nowhere/at/all.csv")}, "workload.input_tokens.path"),
        ({"num_requests": 10**9, "arrivals": Poisson(rate_per_s=0.1)}, "workload.arrivals.rate_per_s"),
    ],
)
def test_a_workload_that_cannot_be_made_is_an_error_before_the_run(parts: dict[str, Any], key: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        stream(scenario(**parts))
    assert caught.value.key == key
