"""Length distributions against their theory."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagestorm.errors import ScenarioError
from pagestorm.scenario.schema import MAX_TOKENS, Histogram, Lognormal, Uniform, Zipf
from pagestorm.workload import substream
from pagestorm.workload.lengths import ZIPF_TABLE, Distribution, tokens

N = 40_000
KEY = "workload.input_tokens"

spans = st.tuples(st.integers(1, MAX_TOKENS), st.integers(1, MAX_TOKENS)).map(sorted)
distributions = st.one_of(
    st.integers(1, MAX_TOKENS),
    spans.map(lambda span: Uniform(low=span[0], high=span[1])),
    st.builds(Lognormal, median=st.floats(1, 1e6), sigma=st.floats(0, 10), high=st.just(10**6)),
    st.builds(Lognormal, mean=st.floats(1, 1e6), sigma=st.floats(0, 10)),
    st.builds(
        lambda alpha, span: Zipf(alpha=alpha, low=span[0], high=span[1]),
        st.sampled_from([0.0, 0.5, 1.0, 1.1, 20.0]),
        spans,
    ),
    st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=9).map(lambda bins: Histogram(values=tuple(bins))),
)


def drawn(lengths: Distribution, n: int = N, seed: int = 1, block: int = 4096) -> NDArray[np.int64]:
    return np.fromiter(islice(tokens(lengths, substream(seed, "x"), KEY, block), n), dtype=np.int64, count=n)


def assert_follows(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> None:
    """Chi-square, six standard deviations above its mean: a right sampler fails less than once in 10,000 seeds."""
    expected = counts.sum() * probabilities / probabilities.sum()
    assert expected.min() >= 5, "bins too thin for the test"
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) - 1
    assert chi_square < freedom + 6 * math.sqrt(2 * freedom)


class Grid:
    """Stands in for a generator: uniforms at equal distances instead of random ones."""

    def random(self, n: int) -> NDArray[np.float64]:
        return (np.arange(n) + 0.5) / n


@settings(deadline=None, max_examples=60)
@given(distributions, st.integers(1, 300), st.integers(0, 2**63 - 1))
def test_lengths_do_not_depend_on_the_block_and_are_whole_tokens(lengths: Distribution, block: int, seed: int) -> None:
    whole = list(islice(tokens(lengths, substream(seed, "x"), KEY), 400))
    assert list(islice(tokens(lengths, substream(seed, "x"), KEY, block), 400)) == whole
    assert all(type(length) is int and 1 <= length <= MAX_TOKENS for length in whole)


def test_a_number_is_itself() -> None:
    assert set(drawn(922).tolist()) == {922}


@pytest.mark.parametrize(("low", "high"), [(200, 219), (5, 5), (1, 2)])
def test_uniform_takes_every_value_alike_both_ends_included(low: int, high: int) -> None:
    lengths = drawn(Uniform(low=low, high=high))
    assert (lengths.min(), lengths.max()) == (low, high)
    if high > low:
        assert_follows(np.bincount(lengths - low), np.ones(high - low + 1))


@pytest.mark.parametrize("sigma", [0.3, 1.0])
def test_lognormal_has_the_median_and_the_spread_that_were_asked_for(sigma: float) -> None:
    logs = np.log(drawn(Lognormal(median=50_000, sigma=sigma)))
    assert abs(float(np.median(logs)) - math.log(50_000)) < 4 * 1.2533 * sigma / math.sqrt(N)
    assert abs(float(logs.std()) - sigma) < 4 * sigma / math.sqrt(2 * N)
    third = float(((logs - logs.mean()) ** 3).mean()) / sigma**3
    assert abs(third) < 4 * math.sqrt(6 / N)


@pytest.mark.parametrize("sigma", [0.3, 1.0])
def test_lognormal_has_the_mean_that_was_asked_for(sigma: float) -> None:
    lengths = drawn(Lognormal(mean=50_000, sigma=sigma))
    spread = math.sqrt(math.expm1(sigma**2))
    assert abs(float(lengths.mean()) / 50_000 - 1) < 5 * spread / math.sqrt(N)


def test_lognormal_without_spread_is_its_median() -> None:
    assert set(drawn(Lognormal(median=400.4, sigma=0)).tolist()) == {400}


def test_lognormal_clips_to_its_ends_and_keeps_what_is_between() -> None:
    free, clipped = drawn(Lognormal(median=400, sigma=1)), drawn(Lognormal(median=400, sigma=1, low=100, high=1000))
    assert np.array_equal(clipped, np.clip(free, 100, 1000))
    assert free.min() < 100
    assert free.max() > 1000


def test_lognormal_far_outside_what_tokens_can_count_is_clipped() -> None:
    assert drawn(Lognormal(median=MAX_TOKENS, sigma=10)).max() == MAX_TOKENS


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 1.2, 3.0])
def test_zipf_probabilities_fall_as_a_power_of_the_rank(alpha: float) -> None:
    ranks = np.arange(1, 13)
    lengths = drawn(Zipf(alpha=alpha, low=100, high=111))
    assert (lengths.min(), lengths.max()) == (100, 111)
    counts = np.bincount(lengths - 100, minlength=12)
    weights = ranks ** (-alpha)
    thick = N * weights / weights.sum() >= 5
    assert_follows(counts[thick], weights[thick])


def test_zipf_ratios_are_those_of_the_formula() -> None:
    counts = np.bincount(drawn(Zipf(alpha=1.0, high=1000), n=400_000))
    for rank in (2, 3, 5, 10):
        assert counts[1] / counts[rank] == pytest.approx(rank, rel=0.05)


@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.0, 1.0001, 1.3])
def test_zipf_beyond_its_table_agrees_with_the_sum_written_out(alpha: float) -> None:
    ranks = 4 * ZIPF_TABLE
    cumulative = np.cumsum(np.arange(1, ranks + 1, dtype=np.float64) ** -alpha)
    grid = Grid().random(50_000)
    expected = np.searchsorted(cumulative, grid * cumulative[-1], side="right") + 1
    source = cast(np.random.Generator, Grid())
    found = np.array(list(islice(tokens(Zipf(alpha=alpha, high=ranks), source, KEY, len(grid)), len(grid))))
    assert expected.max() > 2 * ZIPF_TABLE
    # A uniform within rounding of an edge may fall to either side of it.
    assert np.abs(found - expected).max() <= 1
    assert (found != expected).mean() < 1e-3


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 1.5, 20.0])
def test_zipf_reaches_the_largest_supports(alpha: float) -> None:
    lengths = drawn(Zipf(alpha=alpha, high=MAX_TOKENS))
    assert lengths.min() >= 1
    assert lengths.max() <= MAX_TOKENS
    if alpha == 0:
        assert float(lengths.mean()) == pytest.approx(MAX_TOKENS / 2, rel=0.02)


def test_a_histogram_follows_its_weights() -> None:
    values, weights = (100, 7, 4096, 1), (3.0, 1.0, 0.0, 0.5)
    lengths = drawn(Histogram(values=values, weights=weights))
    counts = np.array([(lengths == value).sum() for value in values])
    assert counts[2] == 0
    assert_follows(counts[[0, 1, 3]], np.array([3.0, 1.0, 0.5]))


def test_a_histogram_of_the_tiniest_weights_follows_them() -> None:
    lengths = drawn(Histogram(values=(10, 20, 30), weights=(5e-324, 1e-323, 0.0)))
    assert_follows(np.array([(lengths == value).sum() for value in (10, 20)]), np.array([1.0, 2.0]))


def test_a_histogram_without_weights_is_flat() -> None:
    lengths = drawn(Histogram(values=(10, 20, 30)))
    assert_follows(np.array([(lengths == value).sum() for value in (10, 20, 30)]), np.ones(3))


@pytest.mark.parametrize(("last", "weight"), [("5", "1"), ("6", "0")])
def test_a_histogram_ends_at_its_last_bin_that_holds_something(last: str, weight: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(f"tokens,weight\n3,1\n{last},{weight}\n")

    class Ones:
        def random(self, n: int) -> NDArray[np.float64]:
            return np.full(n, 1 - 2**-53)

    source = cast(np.random.Generator, Ones())
    assert next(tokens(Histogram(path=str(path)), source, KEY)) == (5 if weight == "1" else 3)


@pytest.mark.parametrize("header", ["tokens,weight", "value,weight", "kind,weight,tokens"])
def test_a_histogram_file_gives_what_the_same_bins_written_out_give(header: str, tmp_path: Path) -> None:
    bins = {100: 3.0, 7: 1.0, 4096: 1e-3}
    path = tmp_path / "lengths.csv"
    order = header.split(",")
    rows = ({"kind": "x", "tokens": value, "value": value, "weight": weight} for value, weight in bins.items())
    path.write_text("\n".join([header, *(",".join(str(row[name]) for name in order) for row in rows)]))
    written = Histogram(values=tuple(bins), weights=tuple(bins.values()))
    assert np.array_equal(drawn(Histogram(path=str(path))), drawn(written))


@pytest.mark.parametrize(
    ("text", "line", "column", "says"),
    [
        ("", None, None, "empty"),
        ("tokens,weight\n", None, None, "no rows"),
        ("tokens,share\n1,1\n", 1, None, "no column weight"),
        ("tokens,weight\n1\n", 2, None, "1 fields"),
        ("tokens,weight\n1,1\n0,1\n", 3, 1, "is 0"),
        ("tokens,weight\n1,1\n-4,1\n", 3, 1, "negative"),
        ("tokens,weight\n1.5,1\n", 2, 1, "not a whole number"),
        ("tokens,weight\n5,-1\n", 2, 3, "not a number from 0"),
        ("tokens,weight\n5,nan\n", 2, 3, "not a number from 0"),
        ("tokens,weight\n5,inf\n", 2, 3, "not a number from 0"),
        ("tokens,weight\n5,many\n", 2, 3, "not a number from 0"),
        ("tokens,weight\n5,0\n6,0\n", None, None, "every weight is 0"),
    ],
)
def test_a_bad_histogram_file_is_an_error_that_names_the_place(
    text: str, line: int | None, column: int | None, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(ScenarioError, match=says) as caught:
        tokens(Histogram(path=str(path)), substream(1, "x"), KEY)
    assert (caught.value.line, caught.value.column) == (line, column)
    assert caught.value.key is not None
    assert caught.value.key.startswith(KEY)


@pytest.mark.parametrize(
    "lengths",
    [
        Uniform(low=5, high=4),
        Zipf(alpha=1, low=5, high=4),
        Lognormal(median=5, sigma=1, low=5, high=4),
        Lognormal(sigma=1),
        Lognormal(median=5, mean=5, sigma=1),
        Histogram(),
        Histogram(values=(1,), path="x"),
        Histogram(values=(1, 2), weights=(1.0,)),
        Histogram(values=(1, 2), weights=(0.0, 0.0)),
    ],
)
def test_a_distribution_that_contradicts_itself_is_an_error(lengths: Distribution) -> None:
    with pytest.raises(ScenarioError) as caught:
        tokens(lengths, substream(1, "x"), KEY)
    assert caught.value.key is not None
    assert caught.value.key.startswith(KEY)
