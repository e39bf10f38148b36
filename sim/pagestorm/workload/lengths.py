"""How long prompts and outputs are: endless streams of whole tokens drawn from a distribution."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from pagestorm.errors import ScenarioError
from pagestorm.scenario.schema import MAX_TOKENS, Histogram, Lognormal, Uniform, Zipf
from pagestorm.workload.files import TextFile
from pagestorm.workload.histograms import read_histogram
from pagestorm.workload.streams import BLOCK, Draw, values

Distribution = int | Uniform | Lognormal | Zipf | Histogram

ZIPF_TABLE = 2**16
"""Ranks whose probability is tabulated; see `_zipf`."""


def tokens(lengths: Distribution, rng: np.random.Generator, key: str, block: int = BLOCK) -> Iterator[int]:
    """Lengths in tokens, each >= 1. A plain number draws nothing.

    `key` is the place in the scenario that a ScenarioError names; it is raised here, not while drawing.
    """
    match lengths:
        case Uniform():
            return values(_uniform(lengths, rng, key), block)
        case Lognormal():
            return values(_lognormal(lengths, rng, key), block)
        case Zipf():
            return values(_zipf(lengths, rng, key), block)
        case Histogram():
            return values(_histogram(lengths, rng, key), block)
        case number:
            return repeat(number)


def _uniform(uniform: Uniform, rng: np.random.Generator, key: str) -> Draw:
    low, high = _ordered(uniform.low, uniform.high, key)
    return lambda n: rng.integers(low, high, size=n, endpoint=True)


def _lognormal(lognormal: Lognormal, rng: np.random.Generator, key: str) -> Draw:
    """exp(N(mu, sigma**2)) to the nearest token, then clipped; mu from the median, or the mean before clipping."""
    low, high = _ordered(lognormal.low, lognormal.high or MAX_TOKENS, key)
    sigma = lognormal.sigma
    if (lognormal.median is None) == (lognormal.mean is None):
        raise ScenarioError("give either median or mean", key=key)
    if lognormal.median is not None:
        mu = math.log(lognormal.median)
    else:
        assert lognormal.mean is not None, "one of the two is given"
        mu = math.log(lognormal.mean) - sigma**2 / 2

    def draw(n: int) -> NDArray[np.int64]:
        drawn = np.exp(mu + sigma * rng.standard_normal(n))
        return _whole(drawn, low, high)

    return draw


def _zipf(zipf: Zipf, rng: np.random.Generator, key: str) -> Draw:
    """Ranks 1, 2, ... of low, low + 1, ..., rank k with a probability proportional to k**-alpha; one uniform a value.

    The first `ZIPF_TABLE` ranks come from a table of cumulative weights. The sum over the ranks beyond it is taken as
    the integral of x**-alpha from x0 = ZIPF_TABLE + 1/2 (midpoint rule), which inverts in closed form. A rank k there
    is off by a relative alpha (alpha + 1) / (24 k**2), at most 5e-9.
    """
    low, high = _ordered(zipf.low, zipf.high, key)
    ranks = high - low + 1
    head = min(ranks, ZIPF_TABLE)
    cumulative = np.cumsum(np.arange(1, head + 1, dtype=np.float64) ** -zipf.alpha)
    head_weight = float(cumulative[-1])
    x0, power = head + 0.5, 1.0 - zipf.alpha
    # Integral from x0 to x = unit * expm1(power * log(x / x0)) / power, and log(x / x0) itself where power is 0.
    unit = x0**power
    reach = math.log((ranks + 0.5) / x0)
    tail_weight = unit * (math.expm1(power * reach) / power if power else reach)

    def draw(n: int) -> NDArray[np.int64]:
        mass = rng.random(n) * (head_weight + tail_weight)
        rank: NDArray[np.int64] = np.searchsorted(cumulative, mass, side="right") + 1
        beyond = rank > head
        if beyond.any():
            rank[beyond] = tail(mass[beyond] - head_weight)
        return rank + (low - 1)

    def tail(mass: NDArray[np.float64]) -> NDArray[np.int64]:
        scaled = mass / unit
        if power:
            # The last bit of the last uniform can reach the end of the support, where the logarithm is infinite.
            with np.errstate(divide="ignore", invalid="ignore"):
                scaled = np.log1p(np.maximum(scaled * power, -1.0)) / power
        edge = x0 * np.exp(np.minimum(scaled, reach))
        # Rank k holds the edges from k - 1/2 to k + 1/2.
        return _whole(edge, min(head + 1, ranks), ranks)

    return draw


def _histogram(histogram: Histogram, rng: np.random.Generator, key: str) -> Draw:
    lengths, weights = _bins(histogram, key)
    heaviest = weights.max()
    if not heaviest > 0:
        raise ScenarioError("every weight is 0; at least one must be larger", key=f"{key}.weights")
    # Scaled so that the tiniest weights keep their digits, and a uniform below 1 times the sum stays below the sum.
    cumulative = np.cumsum(weights / heaviest)

    def draw(n: int) -> NDArray[np.int64]:
        bins = np.searchsorted(cumulative, rng.random(n) * cumulative[-1], side="right")
        drawn: NDArray[np.int64] = lengths[bins]
        return drawn

    return draw


def _bins(histogram: Histogram, key: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    if (histogram.values is None) == (histogram.path is None):
        raise ScenarioError("give either values or path", key=key)
    if histogram.path is not None:
        return read_histogram(TextFile(histogram.path, f"{key}.path"))
    assert histogram.values is not None, "one of the two is given"
    weights = histogram.weights or (1.0,) * len(histogram.values)
    if len(weights) != len(histogram.values):
        raise ScenarioError(
            f"{len(histogram.values)} values but {len(weights)} weights; give one weight a value", key=f"{key}.weights"
        )
    return np.array(histogram.values, dtype=np.int64), np.array(weights, dtype=np.float64)


def _whole(numbers: NDArray[np.float64], low: int, high: int) -> NDArray[np.int64]:
    clipped: NDArray[np.float64] = np.clip(np.rint(numbers), low, high)
    return clipped.astype(np.int64)


def _ordered(low: int, high: int, key: str) -> tuple[int, int]:
    if low > high:
        raise ScenarioError(f"low {low} is above high {high}; swap them", key=f"{key}.low")
    return low, high
