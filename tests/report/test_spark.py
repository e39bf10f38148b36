"""The sparkline: true to the record, in one line, in the characters that a terminal has."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagestorm.events import RawEvent
from pagestorm.report.spark import ASCII, BLOCKS, BUCKETS, PoolUse, pool_use, sparkline
from pagestorm.report.terminal import verdict_text
from tests.report.cases import CASES, diagnosis, result


def use_of(name: str) -> PoolUse:
    use = PoolUse(result(name).summary["pool_pages"])
    events = result(name).raw_events
    for at in range(0, len(events), 5):
        use.write(events[at : at + 5])
    use.close()
    return use


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("columns", [1, 72, 192, 2000])
def test_its_highest_point_is_the_peak_of_the_summary(name: str, columns: int) -> None:
    summary = result(name).summary
    shares = use_of(name).shares(columns)
    assert len(shares) == columns
    # Pages of the very last pass are in no event when everything ends with it.
    short = summary["peak_used_pages"] - max(shares) * summary["pool_pages"]
    assert 0 <= round(short) <= summary["peak_running"]


@given(
    steps=st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 50)), min_size=1, max_size=80),
    columns=st.integers(1, 90),
)
@settings(deadline=None, max_examples=80)
def test_no_peak_is_lost_however_long_it_goes_on_and_its_memory_is_bounded(
    steps: list[tuple[int, int]], columns: int
) -> None:
    use, now = PoolUse(50), 0
    for gap, used in steps:
        now += gap
        use.add(now, used)
        assert len(use._most) <= BUCKETS
    assert use.last_ns == now
    assert max(use.shares(columns)) == max(used for _, used in steps) / 50


def test_a_leap_is_a_ramp_and_what_is_given_back_a_cliff() -> None:
    def event(time_ms: int, kind: str, free: int) -> RawEvent:
        return (time_ms * 10**6, 0, 0, kind, 0, 1, 1, free, 0, 1, 0, "full", "")

    use = PoolUse(100)
    use.write([event(0, "admit", 100), event(0, "leap", 20), event(80, "finish", 100), event(100, "arrive", 100)])
    shares = use.shares(101)
    assert shares[0] == 0
    assert shares[40] == pytest.approx(0.4, abs=0.02)
    assert shares[80] == 0.8
    assert shares[82:] == [0] * 19


def test_a_timeline_gives_the_same_as_the_record() -> None:
    use = pool_use(result("retracted").timeline_rows)
    assert use is not None
    assert max(use.shares(60)) == max(use_of("retracted").shares(60)) == 1
    assert pool_use([]) is None


def test_only_a_full_pool_reaches_the_top() -> None:
    assert sparkline([0, 0.5, 0.999, 1]) == BLOCKS[0] + BLOCKS[3] + BLOCKS[6] + BLOCKS[7]
    assert sparkline([0, 0.5, 0.999, 1], unicode=False) == ASCII[0] + ASCII[3] + ASCII[6] + ASCII[7]
    assert sparkline([]) == ""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("unicode", [True, False])
def test_it_fits_the_terminal_and_speaks_its_characters(name: str, width: int, unicode: bool) -> None:
    text = verdict_text(result(name).summary, diagnosis(name), width, colour=False, unicode=unicode, use=use_of(name))
    (line,) = [line for line in text.splitlines() if line.startswith("  pool  ")]
    assert set(line[8:]) <= set(BLOCKS if unicode else ASCII)
    assert len(line) == min(width, 100)
    assert max(len(each) for each in text.splitlines()) <= min(width, 100)
    assert unicode or text.isascii()
