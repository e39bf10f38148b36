"""A scenario key by key, with a mark at what nobody had to write."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from msgspec import NODEFAULT, Struct
from msgspec.structs import fields, replace

from pagestorm.errors import ScenarioError
from pagestorm.scenario import Scenario, resolve
from pagestorm.scenario.dump import plain

LISTED = 12
"""A longer list is counted instead of shown."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One line: dotted key, value in words, and whether leaving the key out gives the same run."""

    key: str
    value: str
    default: bool


def settings(scenario: Scenario) -> list[Setting]:
    """Every key of a resolved scenario that has a value, in the order of the schema."""
    lines: list[Setting] = []
    for part in fields(scenario):
        value = getattr(scenario, part.name)
        if value is None or (part.name == "expect" and not value):
            continue
        if isinstance(value, Struct):
            lines += _part(scenario, part.encode_name, part.name, value)
        else:
            lines.append(Setting(part.encode_name, _words(value), _left_out(scenario, part) == scenario))
    return lines


def _part(scenario: Scenario, key: str, name: str, part: Struct) -> Iterator[Setting]:
    whole = _resolved(scenario, **{name: None}) if name in ("steptime", "hardware") else None
    implied = whole == scenario
    config = part.__struct_config__
    if config.tag_field:
        kind_default = implied or (name == "engine" and config.tag == "sglang")
        yield Setting(f"{key}.{config.tag_field}", str(config.tag), kind_default)
    for each in fields(part):
        value = getattr(part, each.name)
        if value is None:
            continue
        default = implied
        if not implied and (start := _start(each)) is not NODEFAULT:
            default = _resolved(scenario, **{name: replace(part, **{each.name: start})}) == scenario
        yield Setting(f"{key}.{each.encode_name}", _words(value), default)


def _left_out(scenario: Scenario, each: Any) -> Scenario | None:
    start = _start(each)
    return None if start is NODEFAULT else _resolved(scenario, **{each.name: start})


def _start(each: Any) -> Any:
    """What a field is before anything is filled in."""
    if each.default is not NODEFAULT:
        return each.default
    return each.default_factory() if each.default_factory is not NODEFAULT else NODEFAULT


def _resolved(scenario: Scenario, **change: Any) -> Scenario | None:
    """The scenario with a part changed; None where it cannot be without it."""
    try:
        return resolve(replace(scenario, **change))
    except (ScenarioError, AssertionError, TypeError, ValueError):
        return None


def _words(value: Any) -> str:
    flat = plain(value)
    if isinstance(flat, list):
        if len(flat) > LISTED:
            return f"{len(flat):,} entries, written out in scenario.yaml"
        return ", ".join(_words(each) for each in flat) or "none"
    if isinstance(flat, dict):
        return ", ".join(f"{key} {_words(each)}" for key, each in flat.items())
    if isinstance(flat, bool):
        return "true" if flat else "false"
    return f"{flat:,}" if isinstance(flat, int) and abs(flat) >= 10_000 else str(flat)
