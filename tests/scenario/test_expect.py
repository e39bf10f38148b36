"""What a scenario expects of its summary."""

from __future__ import annotations

from typing import Any

import pytest

from pagestorm.scenario.expect import check
from pagestorm.scenario.schema import Bounds, Expectation

SUMMARY: dict[str, Any] = {
    "outcome": "completed",
    "retractions": 3,
    "mean_running": 2.5,
    "error": None,
    "pools": ["paged", "torch"],
    "divergences": 0,
}


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("outcome", "completed"),
        ("retractions", 3),
        ("retractions", 3.0),
        ("retractions", Bounds(min=3, max=3)),
        ("retractions", Bounds(min=1)),
        ("mean_running", 2.5 * (1 + 1e-12)),
        ("mean_running", Bounds(max=2.5)),
        ("error", None),
        ("pools", "paged,torch"),
    ],
)
def test_it_holds(key: str, wanted: Expectation) -> None:
    assert check({key: wanted}, SUMMARY) == []


@pytest.mark.parametrize(
    ("key", "wanted", "sentence"),
    [
        ("outcome", "crashed", "outcome should be 'crashed', but is 'completed'."),
        ("retractions", 2, "retractions should be 2, but is 3."),
        ("retractions", Bounds(min=4), "retractions should be at least 4, but is 3."),
        ("retractions", Bounds(max=2), "retractions should be at most 2, but is 3."),
        ("retractions", Bounds(min=5, max=9), "retractions should be from 5 to 9, but is 3."),
        ("retractions", None, "retractions should be nothing (null), but is 3."),
        ("retractions", "3", "retractions should be '3', but is 3."),
        ("divergences", False, "divergences should be false, but is 0."),
        ("mean_running", 2.50001, "mean_running should be 2.50001, but is 2.5."),
        ("error", Bounds(min=0), "error should be at least 0, but is nothing (null)."),
        ("error", 0, "error should be 0, but is nothing (null)."),
        ("leaps", 1, "leaps should be 1, but is nothing (null)."),
    ],
)
def test_it_does_not_hold_and_says_so_in_a_sentence(key: str, wanted: Expectation, sentence: str) -> None:
    assert check({key: wanted}, SUMMARY) == [sentence]


def test_every_failure_is_told_in_the_order_of_the_scenario() -> None:
    failures = check({"retractions": 0, "outcome": "completed", "error": "x"}, SUMMARY)
    assert [sentence.split()[0] for sentence in failures] == ["retractions", "error"]
