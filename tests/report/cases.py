"""Small runs with every kind of ending, each simulated once."""

from __future__ import annotations

from functools import cache
from typing import Any

from pagestorm.diagnosis import Diagnosis, diagnose
from pagestorm.runs import Result, run
from pagestorm.scenario import Scenario, from_mapping

EVIL = "<script>alert('1')</script> & \"$x$\" \N{PILE OF POO}"


def uniform(low: int, high: int) -> dict[str, Any]:
    return {"dist": "uniform", "low": low, "high": high}


def burst(num_requests: int, input_tokens: Any, output_tokens: Any, **more: Any) -> dict[str, Any]:
    return {
        "num_requests": num_requests,
        "arrivals": {"process": "burst"},
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        **more,
    }


TIGHT = {"page_size": 64, "max_total_tokens": 64 * 300, "schedule_conservativeness": 0.1}
SMALL = {"page_size": 16, "max_total_tokens": 16 * 64}
OUTGROWN = {"page_size": 16, "max_total_tokens": 6400, "emulate": ["no_output_clip"], "context_length": 100_000}
CROWD = burst(200, uniform(50, 600), uniform(10, 450), max_new_tokens=512)

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "calm": ({"page_size": 16, "max_total_tokens": 64_000}, burst(50, uniform(50, 600), uniform(10, 300)), {}),
    "retracted": (TIGHT, CROWD, {}),
    "crashed": ({**TIGHT, "decode_check": "tokens"}, CROWD, {}),
    "rejected": ({**SMALL, "context_length": 900}, burst(40, uniform(50, 2000), 20), {}),
    "queued out": ({**SMALL, "max_queued_requests": 5}, burst(20, 100, 20), {}),
    "stalled": (SMALL, burst(3, 1012, 5), {}),
    "aborted": (OUTGROWN, burst(1, 100, 30_000, max_new_tokens=20_000), {}),
    "one token": (SMALL, burst(1, 100, 1), {}),
    "none served": (SMALL, burst(3, 5000, 5), {}),
    "evil": (SMALL, burst(2, 100, 4), {"name": EVIL.replace("/", "|"), "about": EVIL + "\N{RIGHT-TO-LEFT OVERRIDE}"}),
}


def scenario(name: str) -> Scenario:
    engine, workload, more = CASES[name]
    return from_mapping(
        {
            "schema": 1,
            "name": name.replace(" ", "-"),
            "engine": {"disable_radix_cache": True, **engine},
            "workload": workload,
            **more,
        }
    )


@cache
def result(name: str) -> Result:
    return run(scenario(name))


@cache
def diagnosis(name: str) -> Diagnosis:
    found = result(name)
    return diagnose(found.raw_events, found.summary, found.scenario)
