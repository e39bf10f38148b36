"""Where each part of a scenario was written, so that an error can point at it."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagestorm.errors import ScenarioError
from pagestorm.scenario.words import shown

Path = tuple[str | int, ...]
"""A way from the top of a scenario: ("workload", "requests", 0, "at_s")."""

OVERRIDE = "--set"
"""What stands for the file where a key was overridden."""


def dotted(path: Path) -> str:
    """The way `--set` spells a path: workload.requests.0.at_s. What a terminal would obey is escaped."""
    return ".".join(str(part) if str(part).isprintable() and len(str(part)) <= 80 else shown(part) for part in path)


def undotted(key: str) -> Path:
    """The path that `dotted` spells; whole numbers become list positions."""
    return tuple(int(part) if part.isdecimal() else part for part in key.split("."))


@dataclass(slots=True)
class Places:
    """Lines and columns, from 1, of the keys and values of one file; which paths were overridden."""

    file: str | None = None
    keys: dict[Path, tuple[int, int]] = field(default_factory=dict)
    values: dict[Path, tuple[int, int]] = field(default_factory=dict)
    overridden: list[Path] = field(default_factory=list)

    def error(self, path: Path, message: str, *, at_key: bool = False) -> ScenarioError:
        """An error about the value (or the key) at `path`, placed there or at the nearest part around it."""
        key = dotted(path) or None
        if any(path[: len(over)] == over for over in self.overridden):
            return ScenarioError(message, file=OVERRIDE, key=key)
        line, column = self._nearest(path, at_key) or (None, None)
        return ScenarioError(message, file=self.file, line=line, column=column, key=key)

    def placed(self, error: ScenarioError) -> ScenarioError:
        """`error`, which names a key and no place, with the place of that key."""
        if error.line is not None or error.file is not None:
            return error
        return self.error(undotted(error.key) if error.key else (), error.message)

    def _nearest(self, path: Path, at_key: bool) -> tuple[int, int] | None:
        if at_key and path in self.keys:
            return self.keys[path]
        for end in range(len(path), -1, -1):
            around = path[:end]
            # A key that is missing inside a mapping is best looked for where the mapping is named.
            table = self.values if end == len(path) else self.keys
            place = table.get(around) or self.values.get(around)
            if place:
                return place
        return None
