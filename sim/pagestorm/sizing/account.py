"""Every figure of a sizing with where it comes from: what `--explain` prints."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

MIB, GIB = 1 << 20, 1 << 30
BYTES, TOKENS, COUNT, RATIO = "bytes", "tokens", "count", "ratio"
Number = TypeVar("Number", int, float)


class Line(NamedTuple):
    """One figure: its value, the formula with the values in it, and the source of the formula or of the fact."""

    name: str
    value: int | float
    unit: str
    formula: str
    source: str

    def text(self) -> str:
        """The figure for a person, in one paragraph."""
        return f"{self.name} = {shown(self.value, self.unit)}\n    = {self.formula}\n    from {self.source}"


class Account:
    """Figures in the order in which they were worked out, and what a person should know beside them."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.warnings: list[str] = []

    def note(self, name: str, value: Number, unit: str, formula: str, source: str) -> Number:
        """Record a figure and return it."""
        self.lines.append(Line(name, value, unit, formula, source))
        return value

    def warn(self, text: str) -> None:
        """Record a warning once."""
        if text not in self.warnings:
            self.warnings.append(text)


class Refused(Exception):
    """The engine would not start: its own message, and how many bytes are missing where that is what is missing."""

    def __init__(self, message: str, missing_bytes: int | None = None, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.missing_bytes = missing_bytes
        self.remedy = remedy


def both(size_bytes: float) -> str:
    """A size in GiB (2^30) and GB (10^9); small ones in MiB and bytes."""
    if abs(size_bytes) < 10 * MIB:
        return f"{size_bytes:,.0f} bytes"
    return f"{size_bytes / GIB:,.2f} GiB ({size_bytes / 1e9:,.2f} GB)"


def shown(value: float, unit: str) -> str:
    """A value with its unit."""
    if unit == BYTES:
        return both(value)
    if unit == RATIO:
        return f"{value:.4g}"
    return f"{value:,} {unit}" if unit != COUNT else f"{value:,}"
