"""Which types a part of a scenario may have, found by walking the schema along the data."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import inspect

from pagestorm.scenario.places import Path
from pagestorm.scenario.schema import Scenario

Kinds = list[inspect.Type]


def value_at(data: object, path: Path) -> object:
    """What `data` has at `path`, None where it has nothing."""
    for part in path:
        if isinstance(data, dict):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return None
    return data


def keys_at(path: Path, data: object) -> list[str]:
    """The keys that the mapping at `path` may have."""
    return [name for kind in _fitting(path, data) if isinstance(kind, inspect.StructType) for name in _names(kind)]


def tags_at(path: Path, data: object) -> list[str]:
    """The tags among which the mapping at `path` must choose; empty where there is no choice."""
    kinds = _possible(path, data)
    return sorted({str(kind.tag) for kind in kinds if isinstance(kind, inspect.StructType) and kind.tag is not None})


def words_at(path: Path, data: object) -> list[str]:
    """The words that may stand at `path`: literals, or the tags of the mapping around it."""
    literals = {
        str(value) for kind in _fitting(path, data) if isinstance(kind, inspect.LiteralType) for value in kind.values
    }
    return sorted(literals) or (tags_at(path[:-1], data) if path else [])


def example_at(path: Path, data: object) -> str:
    """An example for the value at `path`, as YAML in one line; empty where the schema has none."""
    for kind in _possible(path, data):
        if isinstance(kind, inspect.Metadata) and (examples := (kind.extra_json_schema or {}).get("examples")):
            return _flow(examples[0])
    return next(iter(words_at(path, data)), "")


def _flow(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(each) for each in value) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _names(kind: inspect.StructType) -> list[str]:
    own = [field.encode_name for field in kind.fields]
    return [kind.tag_field, *own] if kind.tag_field else own


def _possible(path: Path, data: object) -> Kinds:
    """The types that may stand at `path`, with the wrappers around them (annotations, unions)."""
    kinds: Kinds = [inspect.type_info(Scenario)]
    for depth, part in enumerate(path):
        fitting = _fitting_of(kinds, value_at(data, path[:depth]))
        kinds = [inner for kind in fitting for inner in _inside(kind, part)]
    return [each for kind in kinds for each in _unwrapped(kind)]


def _fitting(path: Path, data: object) -> Kinds:
    """The types that may stand at `path`; of several tagged mappings the one whose tag the data has."""
    return list(_fitting_of(_possible(path, data), value_at(data, path)))


def _fitting_of(kinds: Kinds, value: object) -> Iterator[inspect.Type]:
    for kind in (each for outer in kinds for each in _unwrapped(outer)):
        if isinstance(kind, inspect.StructType) and kind.tag_field is not None and isinstance(value, dict):
            if value.get(kind.tag_field) == kind.tag:
                yield kind
        else:
            yield kind


def _unwrapped(kind: inspect.Type) -> Iterator[inspect.Type]:
    yield kind
    if isinstance(kind, inspect.Metadata):
        yield from _unwrapped(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from _unwrapped(each)


def _inside(kind: inspect.Type, part: str | int) -> Kinds:
    if isinstance(kind, inspect.StructType):
        return [field.type for field in kind.fields if field.encode_name == part]
    if isinstance(kind, inspect.VarTupleType):
        return [kind.item_type]
    if isinstance(kind, inspect.DictType):
        return [kind.value_type]
    return []
