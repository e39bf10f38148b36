"""Rows of a fact table as typed records."""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec


class Facts(msgspec.Struct, frozen=True):
    """One row of a table."""

    def as_dict(self) -> dict[str, Any]:
        """Every column by its name; None where the cell is empty."""
        return {key: None if cell == "" else cell for key, cell in msgspec.structs.asdict(self).items()}


Record = TypeVar("Record", bound=Facts)


def read(file: str, kind: type[Record]) -> tuple[Record, ...]:
    """Every row of `file` (a CSV beside this module) as a `kind`; an empty cell is None (or the field's default)."""
    with Path(__file__).with_name(file).open(encoding="utf-8", newline="") as stream:
        rows = [{key: cell for key, cell in row.items() if cell} for row in csv.DictReader(stream)]
    return tuple(msgspec.convert(rows, list[kind], strict=False))  # type: ignore[valid-type]  # a type held in a variable


def plain_name(name: str) -> str:
    """`name` as it is compared: no case, spaces, hyphens or underscores."""
    return re.sub(r"[\s_-]+", "", name).casefold()


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """Up to three of `names` that look like `name`, best first."""
    by_plain = {plain_name(each): each for each in names}
    return [by_plain[plain] for plain in difflib.get_close_matches(plain_name(name), by_plain, n=3, cutoff=0.4)]


def suggestion(name: str, names: Iterable[str], listing: str) -> str:
    """What to try instead of `name`, as the end of a message."""
    near = nearest(name, names)
    return f"did you mean {' or '.join(near)}?" if near else f"`{listing}` lists what is known"
