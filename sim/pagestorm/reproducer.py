"""Reproducers: one YAML file that shows a fault again. `pagestorm replay` reads it."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pagestorm.errors import ScenarioError
from pagestorm.scenario import Scenario, load, resolve, to_yaml, with_reproduces
from pagestorm.scenario.schema import Against
from pagestorm.wholefile import write_whole


@dataclass(frozen=True, slots=True)
class Reproducer:
    """A scenario, the pools that ran it in lockstep or whom it was compared with, and what went wrong."""

    scenario: Scenario
    pools: tuple[str, ...]
    step: bool
    kind: str
    message: str
    against: Against | None = None


def write_reproducer(
    scenario: Scenario,
    pools: Sequence[str],
    step: bool,
    error: Exception,
    *,
    against: Against | None = None,
    folder: Path | None = None,
) -> Path:
    """Save it in `folder` or the working folder, or where that cannot be written in the one for temporary files."""
    marked = with_reproduces(
        resolve(scenario), kind=type(error).__name__, message=str(error), pools=pools, step=step, against=against
    )
    text = to_yaml(marked)
    name = f"pagestorm-{type(error).__name__.lower()}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.yaml"
    first = folder or Path.cwd()
    for place in (first, Path(tempfile.gettempdir())):
        try:
            return write_whole(place / name, text)
        except OSError:
            continue
    raise ScenarioError(f"no folder to save the reproducer in: neither {first} nor {tempfile.gettempdir()}")


def read_reproducer(path: Path) -> Reproducer:
    """Raises `ScenarioError` for a file that is a plain scenario, or none at all."""
    scenario = load(path)
    found = scenario.reproduces
    if found is None:
        raise ScenarioError(
            "is a plain scenario, not a saved reproducer; run it with: pagestorm run", file=str(path), key="reproduces"
        )
    return Reproducer(scenario, found.pools, found.step, found.kind, found.message, found.against)
