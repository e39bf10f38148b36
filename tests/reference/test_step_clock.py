"""The step clock and the arrivals that both sides of a comparison follow."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pagestorm.scenario.schema import Linear
from pagestorm.steptime.linear import LinearStepTime
from pagestorm_real.reference.step_clock import Arrivals, PassTimes, StepClock

LENGTHS = st.lists(st.integers(0, 10_000), min_size=1, max_size=8)


@settings(deadline=None)
@given(LENGTHS, st.data())
def test_a_pass_takes_as_long_as_the_linear_step_time_says(new: list[int], data: st.DataObject) -> None:
    prefixes = data.draw(st.lists(st.integers(0, 10_000), min_size=len(new), max_size=len(new)))
    linear = LinearStepTime(Linear())
    times = PassTimes(linear.base_fs, linear.per_request_fs, linear.per_context_token_fs, linear.per_prefill_token_fs)
    assert times.prefill(len(new), sum(new), sum(prefixes)) == linear.prefill_fs(new, prefixes)
    assert times.decode(len(new), sum(prefixes)) == linear.decode_fs(len(new), sum(prefixes))


def test_without_overlap_each_round_is_at_the_end_of_the_pass_before() -> None:
    clock = StepClock(PassTimes(100, 0, 0, 0))
    for number in range(3):
        assert clock.begin_round() == clock.pass_start == 100 * number
        assert clock.launch(100) == (number, 100 * number + 100)
        clock.processed(100 * number + 100)
    clock.wait_until(1000)
    assert (clock.begin_round(), clock.launch(100)) == (1000, (3, 1100))


def test_with_overlap_each_round_is_at_the_end_of_the_pass_before_the_last() -> None:
    clock = StepClock(PassTimes(100, 0, 0, 0))
    rounds, starts = [], []
    for number in range(4):
        rounds.append(clock.begin_round())
        starts.append(clock.pass_start)
        clock.launch(100)
        if number:
            clock.processed(100 * number)
    assert rounds == [0, 0, 100, 200]
    assert starts == [0, 100, 200, 300]


def test_without_times_a_round_is_at_the_number_of_the_pass_that_it_plans() -> None:
    clock = StepClock(None)
    for number in range(3):
        assert clock.begin_round() == number
        clock.launch(0)
        clock.processed(0)
    clock.wait_until(7)
    assert clock.begin_round() == 7
    clock.launch(0)
    assert clock.begin_round() == 7


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), max_size=10))
def test_an_open_loop_arrives_by_time_and_then_by_number(times: list[int]) -> None:
    arrivals = Arrivals(times)
    taken: list[tuple[int, int]] = []
    for now in range(6):
        coming = arrivals.next_time()
        assert coming is None or coming >= now
        while (arrival := arrivals.take(now)) is not None:
            taken.append(arrival)
    assert taken == sorted(enumerate(times), key=lambda each: (each[1], each[0]))
    assert arrivals.next_time() is None


def test_a_closed_loop_brings_the_next_request_when_one_ends() -> None:
    arrivals = Arrivals([0] * 4, concurrency=2)
    assert [arrivals.take(0), arrivals.take(0), arrivals.take(9)] == [(0, 0), (1, 0), None]
    arrivals.ended(7)
    arrivals.ended(5)
    arrivals.ended(6)
    assert [arrivals.take(6), arrivals.take(6), arrivals.take(7)] == [(3, 5), None, (2, 7)]
