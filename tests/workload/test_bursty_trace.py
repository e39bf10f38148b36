"""The trace that ships: made by its script, and bursty."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from pagestorm.scenario.schema import Trace
from pagestorm.workload.traces import Row, rows


@pytest.fixture
def shipped(root: Path) -> Path:
    return root / "scenarios" / "data" / "bursty-azure.csv"


@pytest.fixture
def trace(shipped: Path) -> list[Row]:
    return list(rows(Trace(format="azure", path=str(shipped))))


def test_the_script_makes_the_shipped_trace_byte_for_byte(shipped: Path) -> None:
    made = runpy.run_path(str(shipped.with_name("make_bursty_azure.py")))["trace"]()
    assert made.encode("ascii") == shipped.read_bytes()


def test_the_shipped_trace_is_a_valid_one_of_a_few_minutes(trace: list[Row]) -> None:
    assert 350 <= len(trace) <= 450
    assert trace[0].time_ns == 0
    assert 120 * 10**9 < trace[-1].time_ns < 300 * 10**9


def test_its_arrivals_are_far_from_poisson(trace: list[Row]) -> None:
    in_second = [0] * (trace[-1].time_ns // 10**9 + 1)
    for row in trace:
        in_second[row.time_ns // 10**9] += 1
    mean = sum(in_second) / len(in_second)
    variance = sum((count - mean) ** 2 for count in in_second) / len(in_second)
    # Index of dispersion: 1 for Poisson arrivals.
    assert variance / mean > 10
