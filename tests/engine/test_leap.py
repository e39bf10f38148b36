"""Leaping is stepping: the same record, event for event, with and without pressure, with and without overlap."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given, settings

from pagestorm.checks import Conservation, check_drained
from tests.engine.drive import Ask, Drive, Driven, drive, drives


def both(what: Drive) -> tuple[Driven, Driven]:
    leapt = drive(what, sinks=[Conservation(what.pages, what.page_size)])
    stepped = drive(what, step_only=True, sinks=[Conservation(what.pages, what.page_size)])
    return leapt, stepped


def assert_same(what: Drive) -> Driven:
    leapt, stepped = both(what)
    assert leapt.digest == stepped.digest
    counted, by_step = asdict(leapt.engine.counts), asdict(stepped.engine.counts)
    assert counted.pop("leaps") <= by_step.pop("leaps")
    assert counted == by_step
    assert leapt.engine.outcome == stepped.engine.outcome
    check_drained(leapt.engine)
    return leapt


@settings(deadline=None, max_examples=200)
@given(drives())
def test_without_pressure(what: Drive) -> None:
    assert_same(what)


@settings(deadline=None, max_examples=200)
@given(drives(pressure=True))
def test_under_pressure(what: Drive) -> None:
    assert_same(what)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_hunt_reaches_retraction_crash_and_abort(overlap: bool) -> None:
    """The generated drives would prove nothing if none of them came under pressure."""
    retracting = Drive([Ask(60, 150, 200) for _ in range(12)], pages=40, conservativeness=0.01, overlap=overlap)
    assert assert_same(retracting).engine.counts.retractions > 0
    crashing = Drive([Ask(64, 150, 200)] * 12, pages=60, conservativeness=0.01, overlap=overlap, decode_check="none")
    assert assert_same(crashing).engine.outcome == "crashed"
    lone = Drive([Ask(60, 6000, 6000)], pages=300, overlap=overlap, clips_output=False)
    assert assert_same(lone).engine.counts.aborted == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_a_long_decode_takes_few_leaps(overlap: bool) -> None:
    driven = drive(Drive([Ask(100, 3000, 3000) for _ in range(8)], pages=4000, overlap=overlap))
    assert driven.engine.counts.finished == 8
    assert driven.engine.counts.leaps <= 0.05 * driven.engine.step


def test_two_ends_of_one_step_come_in_batch_order_with_overlap() -> None:
    """One ends by length and was left out, the other by a stop token and was not: both by the same result."""
    driven = drive(Drive([Ask(10, 20, 99), Ask(10, 20, 20)], overlap=True))
    assert [e[2] for e in driven.kinds("finish")] == [0, 1]
    assert [e[0] for e in driven.kinds("finish")] == [19, 19]


@pytest.mark.parametrize("overlap", [False, True])
def test_those_who_wait_are_served_after_the_last_one_was_aborted(overlap: bool) -> None:
    lone = Drive(
        [Ask(10, 9000, 9000), Ask(4, 400, 400, at_fs=3 * 10**16)],
        pages=288,
        max_running=1,
        overlap=overlap,
        clips_output=False,
    )
    driven = assert_same(lone)
    assert [k[1:3] for k in driven.kinds("abort", "finish")] == [("abort", 0), ("finish", 1)]
