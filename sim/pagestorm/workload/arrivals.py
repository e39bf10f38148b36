"""When requests arrive in an open loop: endless streams of whole nanoseconds since the start, never going back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import Decimal
from itertools import chain, count, repeat

import numpy as np
from numpy.typing import NDArray

from pagestorm.errors import ScenarioError
from pagestorm.scenario.schema import MAX_SECONDS, Burst, Constant, Gamma, Poisson
from pagestorm.workload.streams import BLOCK

NS_PER_S = 10**9
MAX_NS = int(MAX_SECONDS) * NS_PER_S
"""No request arrives later than this."""

Process = Burst | Constant | Poisson | Gamma
Gaps = Callable[[int], NDArray[np.float64]]
"""Called with n, gives the next n times between arrivals, in nanoseconds."""

KEY = "workload.arrivals.rate_per_s"


def times_ns(process: Process, rng: np.random.Generator, block: int = BLOCK) -> Iterator[int]:
    """Arrival times of `process`, endless.

    burst: all 0. constant: arrival i at i / rate_per_s, rounded to the nanosecond, from exact fractions. poisson and
    gamma: the first arrival comes one gap after 0; every gap is rounded to whole nanoseconds and the sum is exact.
    Rounding changes the mean rate of a Poisson process by 1 part in 24 m**2, with m the mean gap in nanoseconds.
    Gamma gaps have shape 1 / cv**2 and scale cv**2 / rate_per_s.

    Raises ScenarioError on reaching an arrival later than `MAX_NS`.
    """
    match process:
        case Burst():
            return repeat(0)
        case Constant(rate_per_s=rate):
            return _constant(rate)
        case Poisson(rate_per_s=rate):
            return chain.from_iterable(_sums(_exponential(rng, NS_PER_S / rate), block))
        case Gamma(rate_per_s=rate, cv=cv):
            return chain.from_iterable(_sums(_gamma(rng, NS_PER_S / rate, cv), block))


def check_span(process: Process, arrivals: int) -> None:
    """Raise ScenarioError when that many arrivals take longer than `MAX_NS`, by their mean rate."""
    if isinstance(process, Burst):
        return
    # The first of constant arrivals is at 0.
    gaps = arrivals - isinstance(process, Constant)
    if gaps / process.rate_per_s > MAX_SECONDS:
        raise ScenarioError(
            f"{arrivals:,} requests at {process.rate_per_s:g} a second take more than {MAX_SECONDS:g} s; "
            "raise rate_per_s or lower num_requests",
            key=KEY,
        )


def nearest_ns(seconds: float) -> int:
    """Seconds as a person wrote them, to the nearest nanosecond."""
    return round(Decimal(repr(seconds)) * NS_PER_S)


def _constant(rate_per_s: float) -> Iterator[int]:
    rate, per = Decimal(repr(rate_per_s)).as_integer_ratio()
    gap = NS_PER_S * per
    return (_within((number * gap + rate // 2) // rate) for number in count())


def _exponential(rng: np.random.Generator, mean_ns: float) -> Gaps:
    return lambda n: rng.standard_exponential(n) * mean_ns


def _gamma(rng: np.random.Generator, mean_ns: float, cv: float) -> Gaps:
    shape, scale_ns = 1 / cv**2, mean_ns * cv**2
    return lambda n: rng.standard_gamma(shape, n) * scale_ns


def _sums(gaps: Gaps, block: int) -> Iterator[list[int]]:
    """Running sums of the gaps, in 64-bit integers where they fit."""
    now = 0
    while True:
        gaps_ns = np.rint(gaps(block))
        if now + float(gaps_ns.sum()) > MAX_NS:
            for gap in gaps_ns.tolist():
                now = _within(now + int(min(gap, MAX_NS + 1)))
                yield [now]
            continue
        times = np.cumsum(gaps_ns.astype(np.int64)) + now
        now = int(times[-1])
        yield times.tolist()


def _within(time_ns: int) -> int:
    if time_ns > MAX_NS:
        raise ScenarioError(
            f"a request would arrive after {MAX_SECONDS:g} s; raise rate_per_s or lower num_requests", key=KEY
        )
    return time_ns
