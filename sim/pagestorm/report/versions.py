"""What made a report, so that the same can be made again."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

MODELLED = {"sglang": "SGLang 0.5.23", "vllm": "vLLM 0.33.0"}
"""Releases whose scheduler and allocator are modelled."""
USED = ("pagestorm", "numpy", "simpy", "msgspec", "matplotlib", "fastparquet")


def versions(engine: str) -> list[tuple[str, str]]:
    """As (what, version)."""
    found = [("engine that is modelled", MODELLED.get(engine, engine)), ("Python", platform.python_version())]
    return found + [(name, _version(name)) for name in USED if _version(name)]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
