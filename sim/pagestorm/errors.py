"""The exceptions of Pagestorm. Running out of memory is a result and none of these."""

from __future__ import annotations


class PagestormError(Exception):
    """Base of every exception that Pagestorm raises on purpose."""


class ScenarioError(PagestormError):
    """Something senseless was asked: says where (file, line, column, key) and what to do instead.

    `line` and `column` count from 1 and are None where the place is not a file (a `--set`, a Python call).
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        line: int | None = None,
        column: int | None = None,
        key: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.file = file
        self.line = line
        self.column = column
        self.key = key

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)
        named = f"{self.key}: " if self.key else ""
        return f"{place}: {named}{self.message}" if place else f"{named}{self.message}"


class MemoryRefused(PagestormError):
    """The real memory that a torch pool would take is not on this machine.

    `needed_bytes` and `budget_bytes` are for the whole pool; `remedy` says what would fit.
    """

    def __init__(self, message: str, *, needed_bytes: int, budget_bytes: int, remedy: str) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes
        self.remedy = remedy


class PoolCorruption(PagestormError):
    """A pool broke its own rules: a page given back twice, owned twice, lost, or overwritten."""


class Divergence(PagestormError):
    """Two pools driven in lockstep answered differently: `call` names the call, `answers` what each one said."""

    def __init__(self, message: str, *, call: str, answers: dict[str, object]) -> None:
        super().__init__(message)
        self.call = call
        self.answers = answers


class InvariantBroken(PagestormError):
    """A check over the event record failed (`pagestorm.checks`)."""


class ReferenceUnavailable(PagestormError):
    """The real engine to compare with is not there (`missing`), or its environment or process is broken."""

    def __init__(self, message: str, *, missing: bool) -> None:
        super().__init__(message)
        self.missing = missing
