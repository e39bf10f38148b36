"""YAML text to plain data, with the place of every node and a bound on everything.

Scalars follow the core schema of YAML 1.2, so `1e-4` is a number and `no`, `off` and `yes` are text; in addition a
whole number may hold underscores (131_072). Refused, each with its place: anchors and aliases (a small file could
stand for a huge one), tags beyond the core ones, duplicate keys, numbers that are not finite, a second document.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from pagestorm.errors import ScenarioError
from pagestorm.scenario.places import Path, Places
from pagestorm.scenario.words import shown

MAX_FILE_BYTES = 4 * 2**20
MAX_NODES = 200_000
MAX_DEPTH = 32
MAX_NUMBER_LENGTH = 100

INTEGER = re.compile(r"[-+]?(?:[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+)")
FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
WORDS: dict[str, object] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}

_CORE = "tag:yaml.org,2002:"
_SCALAR_TAGS = {"!", *(_CORE + name for name in ("str", "int", "float", "bool", "null"))}
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(slots=True)
class _Open:
    """A mapping or list that is being read; `key` is set between a key and its value."""

    node: dict[str, object] | list[object]
    path: Path
    key: str | None = None

    @property
    def wants_key(self) -> bool:
        return isinstance(self.node, dict) and self.key is None

    def next_path(self) -> Path:
        last = self.key if isinstance(self.node, dict) else len(self.node)
        assert last is not None
        return (*self.path, last)

    def add(self, value: object) -> None:
        if isinstance(self.node, dict):
            assert self.key is not None
            self.node[self.key] = value
            self.key = None
        else:
            self.node.append(value)


def read_tree(text: str, file: str | None = None) -> tuple[object, Places]:
    """The data in `text` (dicts, lists, str, int, float, bool, None) and its places. Raises `ScenarioError`."""
    places = Places(file)
    root: list[object] = []
    stack: list[_Open] = [_Open(root, ())]
    nodes = 0
    for event in _events(text, file):
        mark: Any = event.start_mark
        here = mark.line + 1, mark.column + 1
        if isinstance(event, yaml.DocumentStartEvent) and root:
            raise ScenarioError("a second document starts here; a scenario is one document", **_at(file, here))
        if isinstance(event, yaml.CollectionEndEvent):
            stack.pop()
            continue
        if not isinstance(event, yaml.NodeEvent):
            continue
        nodes += 1
        top = stack[-1]
        _refuse(event, top, nodes, len(stack), _at(file, here))
        if top.wants_key:
            _take_key(event, top, places, here)
            continue
        path = top.next_path() if len(stack) > 1 else ()
        places.values[path] = here
        if isinstance(event, yaml.ScalarEvent):
            top.add(_scalar(event, path, places))
        else:
            opened = _Open({} if isinstance(event, yaml.MappingStartEvent) else [], path)
            top.add(opened.node)
            stack.append(opened)
    if not root:
        raise ScenarioError("nothing is written here; a scenario has name, engine and workload", **_at(file, (1, 1)))
    return root[0], places


def _at(file: str | None, place: tuple[int, int]) -> dict[str, Any]:
    return {"file": file, "line": place[0], "column": place[1]}


def _events(text: str, file: str | None) -> Iterator[yaml.Event]:
    try:
        yield from yaml.parse(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        what = ", ".join(part for part in (error.context, error.problem) if part)
        cut = "; the file ends here: is it truncated?" if mark and _at_end(text, mark) else ""
        raise ScenarioError(f"not valid YAML: {what}{cut}", **_at(file, place)) from None
    except yaml.reader.ReaderError as error:
        raise ScenarioError(
            f"a character that YAML does not allow ({error.reason}); remove it",
            **_at(file, _place_of(text, error.position)),
        ) from None


def _at_end(text: str, mark: yaml.Mark) -> bool:
    lines = text.rstrip().split("\n")
    return (mark.line, mark.column) >= (len(lines) - 1, len(lines[-1]))


def _place_of(text: str, position: int) -> tuple[int, int]:
    before = text[:position]
    return before.count("\n") + 1, position - (before.rfind("\n") + 1) + 1


def _refuse(event: yaml.NodeEvent, top: _Open, nodes: int, depth: int, at: dict[str, Any]) -> None:
    if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
        sign = "*" if isinstance(event, yaml.AliasEvent) else "&"
        raise ScenarioError(
            f"anchors and aliases ({sign}{event.anchor}) are refused: write the value out where it is used", **at
        )
    if nodes > MAX_NODES:
        raise ScenarioError(f"more than {MAX_NODES} keys and values; put long lists into a trace file", **at)
    if depth > MAX_DEPTH:
        raise ScenarioError(f"nested deeper than {MAX_DEPTH} levels; no scenario needs that", **at)
    tag = getattr(event, "tag", None)
    if tag is None:
        return
    allowed = (
        _SCALAR_TAGS
        if isinstance(event, yaml.ScalarEvent)
        else {_CORE + ("map" if isinstance(event, yaml.MappingStartEvent) else "seq")}
    )
    if tag not in allowed:
        raise ScenarioError(f"the tag {shown(tag)} is refused; leave it out", **at)


def _take_key(event: yaml.NodeEvent, top: _Open, places: Places, here: tuple[int, int]) -> None:
    at = _at(places.file, here)
    if not isinstance(event, yaml.ScalarEvent):
        raise ScenarioError("a key must be a word, not a list or a mapping", **at)
    key = event.value
    path = (*top.path, key)
    if path in places.keys:
        line, column = places.keys[path]
        raise ScenarioError(
            f"the key {shown(key)} is here twice (first in line {line}, column {column}); keep one", **at
        )
    places.keys[path] = here
    top.key = key


def _scalar(event: yaml.ScalarEvent, path: Path, places: Places) -> object:
    text, tag = event.value, event.tag
    if tag in ("!", _CORE + "str") or (tag is None and not event.implicit[0]):
        return text
    value = _plain(text, path, places)
    if tag is None:
        return value
    kind = tag.removeprefix(_CORE)
    if kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value).__name__ != {"null": "NoneType"}.get(kind, kind):
        raise places.error(path, f"{shown(text)} is not what its tag !!{kind} says; leave the tag out")
    return value


def _plain(text: str, path: Path, places: Places) -> object:
    if text in WORDS:
        return WORDS[text]
    if NOT_FINITE.fullmatch(text):
        raise places.error(path, f"{text} is refused: give a finite number")
    whole = INTEGER.fullmatch(text)
    if not whole and not FLOAT.fullmatch(text):
        return text
    if len(text) > MAX_NUMBER_LENGTH:
        raise places.error(path, f"a number of {len(text)} characters; no key needs more than {MAX_NUMBER_LENGTH}")
    if whole:
        return _whole(text, path, places)
    number = float(text)
    if not math.isfinite(number):
        raise places.error(path, f"{text} is too large for a number")
    return number


def _whole(text: str, path: Path, places: Places) -> int:
    digits = text.lstrip("+-")
    if digits[:2] in ("0o", "0x"):
        return int(text, 0)
    if len(digits) > 1 and digits[0] == "0":
        raise places.error(path, f"{text} could be octal or decimal; write it without leading zeros, or quote it")
    return int(text.replace("_", ""))
