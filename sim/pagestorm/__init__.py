"""Pagestorm: will the KV-cache memory of an LLM server hold, what gives way first, why, and what fixes it?

    import pagestorm as ps

    result = ps.run(ps.load("first-retraction"))
    result.summary["retractions"], result.timeline, result.plot.timeline()

Names are loaded when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pagestorm import compiled

if TYPE_CHECKING:
    from pagestorm.errors import (
        Divergence,
        InvariantBroken,
        MemoryRefused,
        PagestormError,
        PoolCorruption,
        ScenarioError,
    )
    from pagestorm.memory.allocator import PageAllocator
    from pagestorm.memory.ledger import Ledger
    from pagestorm.runs import Result, run
    from pagestorm.scenario import Scenario, from_mapping, load
    from pagestorm.sizing import Sizing, size

compiled.use()

__all__ = [
    "Divergence",
    "InvariantBroken",
    "Ledger",
    "MemoryRefused",
    "PageAllocator",
    "PagestormError",
    "PoolCorruption",
    "Result",
    "Scenario",
    "ScenarioError",
    "Sizing",
    "from_mapping",
    "load",
    "run",
    "size",
]

_HOME = {
    "Divergence": "errors",
    "InvariantBroken": "errors",
    "Ledger": "memory.ledger",
    "MemoryRefused": "errors",
    "PageAllocator": "memory.allocator",
    "PagestormError": "errors",
    "PoolCorruption": "errors",
    "Result": "runs",
    "Scenario": "scenario",
    "ScenarioError": "errors",
    "from_mapping": "scenario",
    "load": "scenario",
    "Sizing": "sizing",
    "run": "runs",
    "size": "sizing",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pagestorm' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pagestorm.{_HOME[name]}"), name)
