"""From a file, a name or plain data to a checked `Scenario`. Every mistake is a `ScenarioError` with its place."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from pagestorm.errors import ScenarioError
from pagestorm.scenario import overrides as given
from pagestorm.scenario.consistency import check
from pagestorm.scenario.defaults import resolve
from pagestorm.scenario.dump import to_yaml
from pagestorm.scenario.files import find, read_text, shipped
from pagestorm.scenario.places import Path, Places
from pagestorm.scenario.schema import Histogram, Lengths, Scenario, Workload
from pagestorm.scenario.tree import MAX_DEPTH, MAX_NODES, read_tree
from pagestorm.scenario.words import shown

__all__ = ["from_mapping", "load", "resolve", "shipped", "to_yaml"]

MAX_INTEGER = 10**100
LengthsOrNone = TypeVar("LengthsOrNone", bound=Lengths | None)


def load(path_or_name: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Scenario:
    """The scenario in a file, or the shipped one of that name; `overrides` are `key=value` as `--set` takes them.

    Defaults that depend on something else are left open: see `resolve`. Raises `ScenarioError`.
    """
    path = find(path_or_name)
    data, places = read_tree(read_text(path), str(path))
    return _scenario(data, places, overrides)


def from_mapping(data: Mapping[str, object], overrides: Sequence[str] = (), file: str | None = None) -> Scenario:
    """The scenario in plain data (mappings, lists, str, int, float, bool, None), which is not changed.

    `file` is named in errors, and paths in the scenario are relative to its folder. Raises `ScenarioError`.
    """
    places = Places(file)
    return _scenario(_Copy(places).of(data, ()), places, overrides)


def _scenario(data: object, places: Places, overrides: Sequence[str]) -> Scenario:
    if not isinstance(data, dict):
        raise places.error((), f"a scenario is a mapping with name, engine and workload, not {shown(data)}")
    given.apply(data, overrides, places)
    if isinstance(engine := data.get("engine"), dict):
        engine.setdefault("kind", "sglang")
    try:
        scenario = msgspec.convert(data, Scenario)
    except msgspec.ValidationError as error:
        # Imported here: only a mistake needs the types of the schema.
        from pagestorm.scenario.explain import explained

        raise explained(error, data, places) from None
    folder = FilePath(places.file).parent if places.file else FilePath()
    scenario = replace(scenario, workload=_with_absolute_paths(scenario.workload, folder))
    try:
        check(resolve(scenario))
    except ScenarioError as error:
        raise places.placed(error) from None
    return scenario


def _with_absolute_paths(workload: Workload, folder: FilePath) -> Workload:
    trace = workload.trace
    return replace(
        workload,
        trace=trace and replace(trace, path=_absolute(trace.path, folder)),
        input_tokens=_lengths(workload.input_tokens, folder),
        output_tokens=_lengths(workload.output_tokens, folder),
    )


def _lengths(lengths: LengthsOrNone, folder: FilePath) -> LengthsOrNone:
    if isinstance(lengths, Histogram) and lengths.path is not None:
        return replace(lengths, path=_absolute(lengths.path, folder))
    return lengths


def _absolute(path: str, folder: FilePath) -> str:
    return os.path.normpath(FilePath.cwd() / folder / path)


class _Copy:
    """Plain data copied within the bounds of a scenario file."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.nodes = 0

    def of(self, value: object, path: Path) -> object:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise self.places.error(path, f"more than {MAX_NODES} keys and values; put long lists into a trace file")
        if len(path) >= MAX_DEPTH:
            raise self.places.error(path[:3], f"nested deeper than {MAX_DEPTH} levels; no scenario needs that")
        match value:
            case Mapping():
                return {self.key(key, path): self.of(part, (*path, key)) for key, part in value.items()}
            case list() | tuple():
                return [self.of(part, (*path, number)) for number, part in enumerate(value)]
            case _:
                return self.scalar(value, path)

    def key(self, key: object, path: Path) -> str:
        if not isinstance(key, str):
            raise self.places.error(path, f"a key must be text, not {shown(key)}")
        return self.text(key, path)

    def scalar(self, value: object, path: Path) -> object:
        match value:
            case None | bool():
                return value
            case str():
                return self.text(value, path)
            case int() if abs(value) < MAX_INTEGER:
                return int(value)
            case float() if math.isfinite(value):
                return float(value)
            case int() | float():
                raise self.places.error(path, f"{shown(value)} is out of range; give a finite number")
            case _:
                raise self.places.error(path, f"a {type(value).__name__} is not plain data; give a number or text")

    def text(self, text: str, path: Path) -> str:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise self.places.error(path, f"{shown(text)} is not valid Unicode text") from None
        return str(text)
