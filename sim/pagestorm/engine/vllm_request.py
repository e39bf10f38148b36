"""A request as vLLM sees it: what every engine knows, its priority and text, and how often it was preempted."""

from __future__ import annotations

from dataclasses import dataclass

from pagestorm.engine.request import Request
from pagestorm.memory.blocks import Text


@dataclass(slots=True, eq=False)
class VllmRequest(Request):
    """While it runs, its lengths live in the columns of `VllmBatch`; `generated` is up to date outside."""

    priority: int = 0
    """Smaller is served earlier."""
    prefix: tuple[tuple[int, int], ...] = ()
    """Runs (group, tokens) with which the prompt starts; the rest of it is its own."""
    text: Text | None = None
    preemptions: int = 0
    cached_tokens: int = 0
    """Tokens that prefix hits spared it, over all attempts."""
    stored_tokens: int = 0
    """Tokens that had been computed when it was last preempted; computing them again is waste."""
