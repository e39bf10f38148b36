"""Arrival processes against their theory, and exact to the nanosecond."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagestorm.errors import ScenarioError
from pagestorm.scenario.schema import Burst, Constant, Gamma, Poisson
from pagestorm.workload import substream
from pagestorm.workload.arrivals import MAX_NS, Process, check_span, nearest_ns, times_ns

N = 40_000

processes = st.one_of(
    st.just(Burst()),
    st.builds(Constant, rate_per_s=st.floats(1e-3, 1e6)),
    st.builds(Poisson, rate_per_s=st.floats(1e-3, 1e6)),
    st.builds(Gamma, rate_per_s=st.floats(1e-3, 1e6), cv=st.floats(0.01, 100)),
)


def times(process: Process, n: int, seed: int = 1, block: int = 4096) -> list[int]:
    return list(islice(times_ns(process, substream(seed, "arrivals"), block), n))


def gaps_s(process: Process, n: int = N, seed: int = 1) -> NDArray[np.float64]:
    return np.diff(np.array([0, *times(process, n, seed)], dtype=np.float64) / 1e9)


def test_a_burst_is_all_at_zero() -> None:
    assert times(Burst(), 5) == [0] * 5


@pytest.mark.parametrize("rate", [0.3, 1.0, 3.0, 7.7, 999.9, 3e8])
def test_constant_arrival_i_is_at_i_over_the_rate(rate: float) -> None:
    exact = Fraction(repr(rate))
    for i, time_ns in enumerate(times(Constant(rate_per_s=rate), 2000)):
        assert abs(time_ns - i * 10**9 / exact) <= Fraction(1, 2)


@pytest.mark.parametrize("rate", [0.05, 20.0, 5000.0])
@pytest.mark.parametrize("seed", [1, 2])
def test_poisson_gaps_are_exponential(rate: float, seed: int) -> None:
    gaps = gaps_s(Poisson(rate_per_s=rate), seed=seed)
    assert abs(gaps.mean() * rate - 1) < 4 / math.sqrt(N)
    assert abs(gaps.std() / gaps.mean() - 1) < 0.03
    # Kolmogorov-Smirnov: 2 / sqrt(n) is passed with a probability below 0.001.
    distribution = 1 - np.exp(-np.sort(gaps) * rate)
    steps = np.arange(N + 1) / N
    distance = max(np.abs(distribution - steps[1:]).max(), np.abs(distribution - steps[:-1]).max())
    assert distance < 2 / math.sqrt(N)


def test_poisson_gaps_do_not_remember_the_gap_before() -> None:
    gaps = gaps_s(Poisson(rate_per_s=20))
    assert abs(float(np.corrcoef(gaps[1:], gaps[:-1])[0, 1])) < 4 / math.sqrt(N)


@pytest.mark.parametrize("cv", [0.1, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("seed", [1, 2])
def test_gamma_gaps_have_the_rate_and_the_cv_that_were_asked_for(cv: float, seed: int) -> None:
    gaps = gaps_s(Gamma(rate_per_s=20, cv=cv), seed=seed)
    assert abs(gaps.mean() * 20 - 1) < 4 * cv / math.sqrt(N)
    # The kurtosis of a gamma gives the standard error of its cv.
    error = cv * math.sqrt((2 + 6 * cv**2) / N)
    assert abs(gaps.std() / gaps.mean() - cv) < 4 * error


def test_the_cv_of_a_gamma_is_not_that_of_another() -> None:
    assert gaps_s(Gamma(rate_per_s=20, cv=3)).std() > 2 * gaps_s(Gamma(rate_per_s=20, cv=1)).std()


@settings(deadline=None, max_examples=40)
@given(processes, st.integers(1, 300), st.integers(0, 2**63 - 1))
def test_arrivals_do_not_depend_on_the_block_and_never_go_back(process: Process, block: int, seed: int) -> None:
    whole = times(process, 400, seed)
    assert times(process, 400, seed, block) == whole
    assert whole == sorted(whole)
    assert all(type(time_ns) is int for time_ns in whole)


def test_a_long_stream_adds_up_exactly() -> None:
    rng = substream(1, "arrivals")
    expected = sum(round(float(gap)) for gap in rng.standard_exponential(100_000) * (10**9 / 0.01))
    last = times(Poisson(rate_per_s=0.01), 100_000)[-1]
    assert last == expected > 2**53


def far(process: Process, block: int) -> list[int]:
    reached: list[int] = []
    with pytest.raises(ScenarioError, match="lower num_requests") as caught:
        reached.extend(times_ns(process, substream(1, "arrivals"), block))
    assert caught.value.key == "workload.arrivals.rate_per_s"
    return reached


@pytest.mark.parametrize("process", [Constant(rate_per_s=1e-7), Poisson(rate_per_s=1e-7), Gamma(rate_per_s=1e-7, cv=9)])
def test_arrivals_end_with_an_error_where_the_clock_ends(process: Process) -> None:
    reached = far(process, 4096)
    assert reached == far(process, 1)
    assert 0 < reached[-1] <= MAX_NS


@pytest.mark.parametrize("kind", [Constant, Poisson])
def test_a_rate_too_low_for_the_number_of_requests_is_refused_before_the_run(
    kind: type[Constant] | type[Poisson],
) -> None:
    check_span(kind(rate_per_s=1.0), 10**9)
    check_span(Burst(), 10**9)
    with pytest.raises(ScenarioError, match="raise rate_per_s"):
        check_span(kind(rate_per_s=0.9), 10**9)


def test_one_constant_arrival_needs_no_time() -> None:
    check_span(Constant(rate_per_s=1e-300), 1)


@pytest.mark.parametrize(
    ("seconds", "ns"),
    [(0.0, 0), (0.1, 10**8), (12345.678901234, 12345678901234), (123456789.123456, 123456789123456000)],
)
def test_seconds_become_the_nanoseconds_that_were_written(seconds: float, ns: int) -> None:
    assert nearest_ns(seconds) == ns
