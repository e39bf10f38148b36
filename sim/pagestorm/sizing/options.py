"""The settings that a sizing reads, out of flags, scenario keys or a launch command, in the engine's own names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from pagestorm.errors import ScenarioError
from pagestorm.sizing.flags import FlagTable, Value, table

MEASURED: dict[str, str] = {
    "gpu_memory_bytes": "what CUDA reports as the total of one card, instead of the catalog's figure",
    "free_memory_bytes": "free memory of one card just before the weights are loaded",
    "weights_bytes_per_rank": "weights of one rank as the engine logs them, instead of a count of parameters",
    "activation_bytes": "peak of activations (vLLM's profile), instead of an estimate",
    "non_torch_bytes": "memory of one card taken outside torch's allocator (vLLM's profile)",
    "cuda_graph_bytes": "memory of CUDA graphs (vLLM's profile), instead of an estimate",
}
"""Figures of a real server that may be given; they are no flags of an engine."""


class Options:
    """Settings of one engine, by field; remembers which were read."""

    def __init__(self, engine: str, settings: Mapping[str, object], environment: Mapping[str, str]) -> None:
        self.engine = engine
        self.flags: FlagTable = table(engine)
        self.values: dict[str, Value] = {}
        self.measured: dict[str, int] = {}
        for name, value in settings.items():
            if name in MEASURED:
                self.measured[name] = _bytes(name, value)
            else:
                self.values[name] = self.flags.checked(self.flags.field(name), value)
        self.environment = dict(environment)
        self.read: set[str] = set()
        self.variables_read: set[str] = set()

    def given(self, name: str) -> bool:
        """Whether a field was set."""
        self.read.add(name)
        return self.values.get(name) is not None

    def whole(self, name: str, default: int) -> int:
        """A whole number."""
        value = self.maybe(name)
        return default if value is None else value

    def maybe(self, name: str) -> int | None:
        """A whole number, None where it was not set."""
        self.read.add(name)
        return cast("int | None", self.values.get(name))

    def positive(self, name: str, default: int) -> int:
        """A whole number above zero."""
        value = self.whole(name, default)
        if value < 1:
            raise ScenarioError(f"{value} makes no sense; give 1 or more", key=self.shown(name))
        return value

    def fraction(self, name: str, default: float | None = None) -> float | None:
        """A number."""
        self.read.add(name)
        value = self.values.get(name)
        return default if value is None else float(cast("float", value))

    def text(self, name: str, default: str = "") -> str:
        """A word."""
        self.read.add(name)
        value = self.values.get(name)
        return default if value is None else str(value)

    def switch(self, name: str, default: bool = False) -> bool:
        """A switch."""
        self.read.add(name)
        value = self.values.get(name)
        return default if value is None else bool(value)

    def mapping(self, name: str) -> Mapping[str, object]:
        """A JSON object; empty where it was not set."""
        self.read.add(name)
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise ScenarioError(f"{value!r} is no JSON object", key=self.shown(name))
        return value or {}

    def variable(self, name: str, default: str = "") -> str:
        """An environment variable of the launch."""
        self.variables_read.add(name)
        return self.environment.get(name, default)

    def variable_number(self, name: str, default: int) -> int:
        """An environment variable that is a whole number."""
        text = self.variable(name)
        try:
            return int(text) if text else default
        except ValueError:
            raise ScenarioError(f"{text!r} is no whole number", key=name) from None

    def variable_switch(self, name: str) -> bool:
        """An environment variable that turns something on."""
        return self.variable(name).strip().lower() in ("1", "true", "yes", "on")

    def shown(self, name: str) -> str:
        """A field as it is spelled on the command line."""
        flag = self.flags.by_field.get(name)
        return flag.name if flag else name

    def ignored(self) -> list[str]:
        """Settings and variables that were given and have no part in the sizing."""
        fields = [self.shown(name) for name in self.values if name not in self.read]
        return fields + [name for name in self.environment if name not in self.variables_read]


def _bytes(name: str, value: object) -> int:
    try:
        size = int(value) if isinstance(value, str) else int(cast("float", value))
    except (TypeError, ValueError):
        raise ScenarioError(f"{value!r} is no number of bytes", key=name) from None
    if size < 0:
        raise ScenarioError(f"{size} is below 0; give a number of bytes", key=name)
    return size
