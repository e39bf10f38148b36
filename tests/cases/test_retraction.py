"""Public reports on retraction. Threads are named in shared/cases/public.yaml and in each test."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import pytest

import pagestorm as ps
from pagestorm.engine.sglang import NewTokenRatio
from pagestorm.scenario import from_mapping
from tests.cases.public import cases


def decays(ratio: NewTokenRatio, start: float, end: float) -> int:
    """Decode steps until the ratio prints as `end`, to the four digits of the engine's log."""
    ratio.current = start
    steps = 0
    while f"{ratio.current:.4f}" != f"{end:.4f}" and ratio.current > ratio.floor:
        ratio.decay_steps(1)
        steps += 1
    return steps


def test_the_ratio_falls_as_the_log_shows(shared: Path) -> None:
    """sgl-project/sglang#4184."""
    case = cases(shared, "retraction")["ratio-law"]
    ratio = NewTokenRatio(1.0)
    assert ratio.init == case["given"]["init"]
    assert f"{ratio.floor:.3f}" == str(case["expect"]["floor"])
    assert decays(ratio, 0.1919, 0.1207) == case["expect"]["steps_from_0_1919_to_0_1207"]
    assert decays(ratio, ratio.init, ratio.floor) == case["given"]["decay_steps"]


def test_another_decay_would_fail_the_exact_case(shared: Path) -> None:
    """The canary of the case above."""
    ratio = NewTokenRatio(1.0)
    ratio.decay *= 601 / 600
    expect = cases(shared, "retraction")["ratio-law"]["expect"]
    assert decays(ratio, 0.1919, 0.1207) != expect["steps_from_0_1919_to_0_1207"] or decays(ratio, 0.7, 0.098) != 600


def test_saturation_retracts_about_every_600_steps(shared: Path) -> None:
    """sgl-project/sglang PR 20729: outputs near max_new_tokens and a queue that never empties."""
    assert "every 600 decode steps" in cases(shared, "retraction")["ratio-period"]["expect"]["behaviour"]
    result = ps.run(ps.load("retraction-sawtooth"), ["sim"])
    steps = sorted(set(result.events[result.events.kind == "retract"].step))
    bursts = [step for i, step in enumerate(steps) if i == 0 or step - steps[i - 1] > 100]
    periods = [b - a for a, b in itertools.pairwise(bursts)]
    assert len(periods) >= 10
    assert 500 <= statistics.median(periods) <= 700


def test_a_ratio_kept_at_one_retracts_nobody(shared: Path) -> None:
    """The other half of the same report: what admission reserves is what the requests may generate."""
    held = ps.load(
        "retraction-sawtooth", ["engine.schedule_conservativeness=1.5", "engine.min_new_token_ratio_factor=1.0"]
    )
    summary = ps.run(held, ["sim"]).summary
    assert summary["new_token_ratio_min"] == summary["new_token_ratio_max"] == 1.0
    assert summary["retractions"] == 0


@pytest.mark.parametrize("max_queued", [1, 5, 40])
def test_the_queue_keeps_its_cap(shared: Path, max_queued: int) -> None:
    """sgl-project/sglang PR 37260: queue length <= max queued + max running."""
    assert cases(shared, "retraction")["queue-cap"]["expect"]["law"] == "queue length <= max queued + max running"
    scenario = from_mapping(
        {
            "schema": 1,
            "name": "queue",
            "engine": {
                "kind": "sglang",
                "page_size": 16,
                "max_total_tokens": 8192,
                "max_running_requests": 32,
                "schedule_conservativeness": 0.05,
                "max_queued_requests": max_queued,
                "disable_radix_cache": True,
            },
            "workload": {
                "num_requests": 200,
                "arrivals": {"process": "poisson", "rate_per_s": 20},
                "input_tokens": {"dist": "uniform", "low": 50, "high": 400},
                "output_tokens": {"dist": "uniform", "low": 50, "high": 400},
                "max_new_tokens": 500,
            },
        }
    )
    result = ps.run(scenario)
    assert result.summary["retractions"] > 0
    assert result.summary["rejected"] > 0
    assert (result.events.waiting + result.events.running).max() <= max_queued + 32


def test_every_retracted_request_is_resumed_or_aborted(shared: Path) -> None:
    """sgl-project/sglang#6857."""
    assert cases(shared, "retraction")["prealloc-requeue"]["expect"]["law"].startswith("every retracted request")
    events = ps.run(ps.load("first-retraction"), ["sim"]).events
    last = events[events.request >= 0].groupby("request").kind.last()
    assert set(last) <= {"finish", "abort", "reject"}
    for retract in events[events.kind == "retract"].itertuples():
        after = events[(events.request == retract.request) & (events.seq > retract.seq)].kind
        assert after.iloc[0] in ("admit", "abort")
