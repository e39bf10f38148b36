"""A scenario as YAML that loads as the same scenario: `to_yaml`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml
from msgspec import Struct
from msgspec.structs import fields, replace

from pagestorm.scenario.schema import Against, Reproduces, Scenario
from pagestorm.scenario.tree import FLOAT, INTEGER, NOT_FINITE

MAX_MESSAGE = 10_000

_BASE: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Dumper(_BASE):  # type: ignore[misc]  # the C dumper has no types
    """Quotes text that either YAML 1.1 or our own reader would take for something else."""


# A dumper quotes text whose resolved tag is not `str`, and each class has resolvers of its own.
for _pattern, _tag in ((INTEGER, "int"), (FLOAT, "float"), (NOT_FINITE, "float")):
    _whole = re.compile(f"^(?:{_pattern.pattern})$")
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _whole, list("-+.0123456789"))


def to_yaml(scenario: Scenario) -> str:
    """`scenario` as text: keys in the order of the schema, what is None left out, trace paths as they were loaded."""
    return str(
        yaml.dump(
            plain(scenario),
            Dumper=_Dumper,
            sort_keys=False,
            default_flow_style=None,
            allow_unicode=True,
            width=120,
        )
    )


def with_reproduces(
    scenario: Scenario,
    *,
    kind: str,
    message: str,
    pools: Sequence[str],
    step: bool = False,
    against: Against | None = None,
) -> Scenario:
    """`scenario` marked as a reproducer of a fault, as `pagestorm replay` reads it."""
    mark = Reproduces(kind=kind, message=message[:MAX_MESSAGE], pools=tuple(pools), step=step, against=against)
    return replace(scenario, reproduces=mark)


def plain(value: object) -> Any:
    """Plain data (dict, list and scalars) for a part of a scenario, without the fields that are None."""
    if isinstance(value, Struct):
        config = value.__struct_config__
        tagged: dict[str, Any] = {config.tag_field: config.tag} if config.tag_field else {}
        pairs = ((each.encode_name, getattr(value, each.name)) for each in fields(value))
        return tagged | {name: plain(part) for name, part in pairs if part is not None}
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return [plain(part) for part in value]
    return value
