"""The command-line flags of the engines: what each is called, how many values it takes, what it sets.

The tables (sglang.tsv, vllm.tsv) were read off the engines' own parsers; a test compares them where the reference
environments are installed.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pagestorm.catalog.table import nearest
from pagestorm.errors import ScenarioError

ENGINES = ("sglang", "vllm")
SWITCH, TOGGLE, VALUE, LIST, OPTIONAL = "switch", "toggle", "value", "list", "optional"
SI = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
IEC = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
VLLM_SI = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
VLLM_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
AUTO = -1
MOST_LISTED = 6

Value = bool | int | float | str | list[object] | dict[str, object] | None


class Flag(NamedTuple):
    """One flag. `negative` are the spellings that set the field to false."""

    field: str
    kind: str
    type: str
    spellings: tuple[str, ...]
    negative: frozenset[str]

    @property
    def name(self) -> str:
        """The spelling to show."""
        return self.spellings[0]


class FlagTable:
    """Every flag of one engine, found by spelling or by field."""

    def __init__(self, engine: str, flags: tuple[Flag, ...]) -> None:
        self.engine = engine
        self.by_field = {flag.field: flag for flag in flags}
        self.by_spelling = {spelling: flag for flag in flags for spelling in flag.spellings}

    def find(self, word: str) -> tuple[str, Flag] | None:
        """The flag that `word` (`--tp`, `--tp-size`) means and its full spelling; None for none.

        As the engines' parsers do: a unique beginning is enough, vLLM takes underscores for hyphens. Raises
        `ScenarioError` where several flags begin so.
        """
        if self.engine == "vllm" and word.startswith("--"):
            head, dot, rest = word.partition(".")
            word = head.replace("_", "-") + dot + rest
        if word in self.by_spelling:
            return word, self.by_spelling[word]
        if not word.startswith("--"):
            return None
        longer = [spelling for spelling in self.by_spelling if spelling.startswith(word)]
        fields = {self.by_spelling[spelling].field for spelling in longer}
        if len(fields) > 1:
            listed = ", ".join(sorted(longer)[:MOST_LISTED]) + (", ..." if len(longer) > MOST_LISTED else "")
            raise ScenarioError(f"the flag is ambiguous; write one of: {listed}", key=word)
        return (longer[0], self.by_spelling[longer[0]]) if longer else None

    def field(self, name: str) -> Flag:
        """The flag of a field. Raises `ScenarioError` with the nearest names."""
        flag = self.by_field.get(name)
        if flag is not None:
            return flag
        near = nearest(name, self.by_field)
        hint = f"did you mean {' or '.join(near)}?" if near else f"`{self.engine} --help` lists its flags"
        raise ScenarioError(f"{self.engine} has no flag for it; {hint}", key=name)

    def convert(self, flag: Flag, text: str, shown: str | None = None) -> Value:
        """A value as it is written on a command line, in the flag's type. Raises `ScenarioError`."""
        shown = shown or flag.name
        if "$" in text and re.search(r"\$[\w{(]", text):
            raise ScenarioError(f"{text!r} is a shell variable that is not set here; write its value", key=shown)
        try:
            return _CONVERTERS[flag.type](text, self.engine)
        except (ValueError, ArithmeticError):
            raise ScenarioError(f"{text!r} is no {_WANTED[flag.type]}", key=shown) from None

    def checked(self, flag: Flag, value: object) -> Value:
        """A value given from Python or YAML, of the flag's type. Raises `ScenarioError`."""
        if value is None or flag.kind == LIST:
            return value  # type: ignore[return-value]  # lists are not read by the sizing
        if flag.kind in (SWITCH, TOGGLE):
            if isinstance(value, bool):
                return value
            raise ScenarioError(f"{value!r} is neither true nor false", key=flag.field)
        if isinstance(value, str):
            return self.convert(flag, value, flag.field)
        if isinstance(value, dict) and flag.type == "json":
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ScenarioError(f"{value!r} is no {_WANTED[flag.type]}", key=flag.field)
        if flag.type in ("int", "human") and value != int(value):
            raise ScenarioError(f"{value!r} is no whole number", key=flag.field)
        return int(value) if flag.type in ("int", "human") else value


@cache
def table(engine: str) -> FlagTable:
    """The flags of `sglang` or `vllm`."""
    lines = Path(__file__).with_name(f"{engine}.tsv").read_text(encoding="utf-8").splitlines()
    return FlagTable(engine, tuple(_flag(line) for line in lines if line and not line.startswith("#")))


def _flag(line: str) -> Flag:
    field, kind, value_type, spellings = line.split("\t")
    words = spellings.split(" ")
    negative = frozenset(word[1:] for word in words if word.startswith("!"))
    return Flag(field, kind, value_type, tuple(word.removeprefix("!") for word in words), negative)


def _whole(text: str, engine: str) -> Value:
    return int(text)


def _decimal(text: str, engine: str) -> Value:
    return float(text)


def _text(text: str, engine: str) -> Value:
    return text


def _json(text: str, engine: str) -> Value:
    found: Value = json.loads(text)
    return found


def _human(text: str, engine: str) -> Value:
    """`1k`, `25.6k`, `1Ki` (SGLang) or `1K` (vLLM): as the engines read a count."""
    text = text.strip()
    if engine == "vllm" and text.lower() in ("auto", "-1"):
        return AUTO
    units, binary = (VLLM_SI, VLLM_BINARY) if engine == "vllm" else (SI, IEC)
    for unit, factor in binary.items():
        if text.endswith(unit):
            return int(text.removesuffix(unit)) * factor
    for unit, factor in units.items():
        if text.endswith(unit):
            return int(Decimal(text.removesuffix(unit)) * factor)
    return int(text)


_CONVERTERS = {"int": _whole, "float": _decimal, "text": _text, "json": _json, "human": _human}
_WANTED = {
    "int": "whole number",
    "float": "number",
    "text": "text",
    "json": "JSON",
    "human": "whole number (1k and 1Ki are understood)",
}
