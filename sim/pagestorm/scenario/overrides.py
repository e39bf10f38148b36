"""`--set a.b.0.c=value`: parts of a scenario replaced before it is checked."""

from __future__ import annotations

from collections.abc import Sequence

from pagestorm.errors import ScenarioError
from pagestorm.scenario.places import OVERRIDE, Path, Places, dotted, undotted
from pagestorm.scenario.tree import read_tree
from pagestorm.scenario.words import shown


def apply(data: dict[str, object], overrides: Sequence[str], places: Places) -> None:
    """Write each `key=value` into `data`, in order, and note its path in `places`. Raises `ScenarioError`."""
    for text in overrides:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not all(part for part in key.split(".")):
            raise ScenarioError(f"{shown(text)} is not key=value; write it like engine.page_size=32", file=OVERRIDE)
        path = undotted(key)
        _write(data, path, _value(value, key))
        places.overridden.append(path)


def _value(text: str, key: str) -> object:
    if not text.strip():
        return None
    try:
        return read_tree(text)[0]
    except ScenarioError as error:
        raise ScenarioError(f"cannot read {shown(text)}: {error.message}", file=OVERRIDE, key=key) from None


def _write(data: dict[str, object], path: Path, value: object) -> None:
    node: object = data
    for depth, part in enumerate(path[:-1], start=1):
        node = _step(node, part, path, depth)
    last = path[-1]
    if isinstance(node, dict):
        node[str(last)] = value
    else:
        _check_position(node, last, path)
        node[int(last)] = value  # type: ignore[index]  # _check_position left only lists


def _step(node: object, part: str | int, path: Path, depth: int) -> object:
    """What lies at `part` of `node`, which is path[depth - 1]; a mapping that is left out is made."""
    if not isinstance(node, dict):
        _check_position(node, part, path[:depth])
        return node[int(part)]  # type: ignore[index]  # _check_position left only lists
    if node.get(str(part)) is None:
        if isinstance(path[depth], int):
            around = dotted(path[:depth])
            raise ScenarioError(
                f"{around} is left out, so it has no position {path[depth]}; set the list itself: {around}=[...]",
                file=OVERRIDE,
                key=dotted(path),
            )
        node[str(part)] = {}
    return node[str(part)]


def _check_position(node: object, part: str | int, path: Path) -> None:
    around = dotted(path[:-1])
    if not isinstance(node, list):
        raise ScenarioError(
            f"{around} is {shown(node)}, so nothing can be set inside it", file=OVERRIDE, key=dotted(path)
        )
    if not isinstance(part, int) or part >= len(node):
        raise ScenarioError(
            f"{around} has {len(node)} entries; give a position from 0 to {len(node) - 1}"
            if node
            else f"{around} is an empty list",
            file=OVERRIDE,
            key=dotted(path),
        )
