"""Who a run is put beside: another way to take the same steps, another pool, or the engine itself.

A referee runs a scenario and raises when the two sides part: `Divergence`, or `PoolCorruption` and `InvariantBroken`
when one side finds itself wrong.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pagestorm.errors import (
    Divergence,
    InvariantBroken,
    PoolCorruption,
    ReferenceUnavailable,
    ScenarioError,
)
from pagestorm.events import RawEvent
from pagestorm.runs import Result, run
from pagestorm.scenario import Scenario

FAULTS: tuple[type[Exception], ...] = (
    Divergence,
    InvariantBroken,
    PoolCorruption,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a referee raises when Pagestorm is wrong: the first three, or an error that nobody meant to raise."""

REFEREES = ("step", "torch", "sglang", "vllm")
"""Names that `open_referee` takes."""
MOST_STEPS = 20_000
"""Passes of a real engine that are compared in one run."""
REQUEST_S = 120.0

Referee = Callable[[Scenario], Result]
"""Runs a scenario and compares. Returns the model's own run, events and requests kept."""


@contextmanager
def open_referee(against: str, *, max_steps: int = MOST_STEPS) -> Iterator[Referee]:
    """The referee of that name, for as many scenarios as one likes.

    Raises `ReferenceUnavailable` when an engine's environment or process is not to be had (here, or from a call), and
    `ScenarioError` for an unknown name, for a scenario that it cannot be put to, and where torch is not installed.
    """
    match against:
        case "step":
            yield by_steps
        case "torch":
            yield by_pools
        case "sglang" | "vllm":
            with _reference(against, max_steps) as referee:
                yield referee
        case _:
            raise ScenarioError(f"nobody to compare with is called {against!r}; there are {', '.join(REFEREES)}")


# --- ourselves -------------------------------------------------------------------------------------------------


def by_steps(scenario: Scenario) -> Result:
    """Leaping beside stepping: the same record and the same summary."""
    leapt, stepped = run(scenario), run(scenario, step=True)
    if leapt.summary["events_digest"] != stepped.summary["events_digest"]:
        difference = _first_other(leapt.raw_events, stepped.raw_events)
        raise Divergence(difference, call="run", answers={"leap": len(leapt.raw_events), "step": stepped.raw_events})
    for key, value in leapt.summary.items():
        if key not in ("leaps", "wall_s") and value != stepped.summary[key]:
            raise Divergence(
                f"{key}: leaping says {value}, stepping {stepped.summary[key]}",
                call="run",
                answers={"leap": value, "step": stepped.summary[key]},
            )
    return leapt


def by_pools(scenario: Scenario) -> Result:
    """The pure-Python pool and the torch pool in lockstep, page by page."""
    return run(scenario, ["paged", "torch"], device="cpu")


def _first_other(leapt: Sequence[RawEvent], stepped: Sequence[RawEvent]) -> str:
    """Where two records part; `leap` is no part of them."""
    one, other = ([event for event in events if event[1] >= 0] for events in (leapt, stepped))
    for a, b in zip(one, other, strict=False):
        if a != b:
            return f"event {a[1]}: leaping gives {a}, stepping {b}"
    return f"leaping gives {len(one)} events, stepping {len(other)}"


# --- the engines -----------------------------------------------------------------------------------------------


@contextmanager
def _reference(engine: str, max_steps: int) -> Iterator[Referee]:
    """The engine's own scheduler in its own process. Loaded by name: this side never imports the other by itself."""
    client: Any = importlib.import_module("pagestorm_real.reference.client")
    compared: Any = importlib.import_module(f"pagestorm_real.reference.{engine}_compare")

    def referee(scenario: Scenario) -> Result:
        result = run(scenario)
        with _unavailable(client):
            compared.compare(process, result, max_steps)
        return result

    process = client.ReferenceProcess(engine, request_s=REQUEST_S)
    with _unavailable(client):
        process.start()
    try:
        yield referee
    finally:
        process.close()


@contextmanager
def _unavailable(client: Any) -> Iterator[None]:
    """The client's own errors as one that the command line knows."""
    try:
        yield
    except client.ReferenceMissing as error:
        raise ReferenceUnavailable(str(error), missing=True) from error
    except (client.ReferenceBroken, client.ReferenceRefused) as error:
        raise ReferenceUnavailable(str(error), missing=False) from error
