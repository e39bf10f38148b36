"""Canaries of the exact cases: an off-by-one in the product, under which a case must fail."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

Broken = Callable[[Callable[..., Any]], Callable[..., Any]]
"""From a function of the product to the same function, broken."""


def off_by(amount: float) -> Broken:
    """What it answers, and `amount` more; each member of a list or tuple of numbers."""

    def broken(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*args: Any, **kwargs: Any) -> Any:
            answer = function(*args, **kwargs)
            if isinstance(answer, list):
                return [each + amount for each in answer]
            return answer + amount

        return wrong

    return broken


def field_off_by(name: str, amount: int) -> Broken:
    """A named tuple that it answers, with one field off."""

    def broken(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*args: Any, **kwargs: Any) -> Any:
            answer = function(*args, **kwargs)
            return answer._replace(**{name: getattr(answer, name) + amount})

        return wrong

    return broken


def instead(answer: Any) -> Broken:
    """Always the same answer."""
    return lambda function: lambda *args, **kwargs: answer


def must_fail(
    monkeypatch: pytest.MonkeyPatch, place: str, broken: Broken, check: Callable[[dict[str, Any]], None], case: Any
) -> None:
    """`check(case)` passes, and fails once `module:function` of the product is broken."""
    check(case)
    module_name, _, name = place.partition(":")
    module = importlib.import_module(f"pagestorm.{module_name}")
    monkeypatch.setattr(module, name, broken(getattr(module, name)))
    with pytest.raises(AssertionError):
        check(case)
