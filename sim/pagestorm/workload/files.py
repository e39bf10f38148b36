"""Text files from anywhere, read line by line: every fault is a ScenarioError that names the place and a remedy."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import IO, NamedTuple

from pagestorm.errors import ScenarioError

MAX_LINE_BYTES = 2**20
GZIP_MAGIC = b"\x1f\x8b"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Line(NamedTuple):
    """`number` counts from 1; `ended` tells whether an end of line follows (the last one may have none)."""

    number: int
    text: str
    ended: bool


class Record(NamedTuple):
    """One line of a CSV file: the cells of the columns that were asked for, in that order, without outer spaces."""

    line: Line
    cells: list[str]
    columns: list[int]
    """The character, from 1, at which each cell starts."""


@dataclass(frozen=True, slots=True)
class TextFile:
    """A UTF-8 file that the scenario names under `key`."""

    path: str
    key: str

    def mistake(
        self, message: str, *, line: Line | None = None, column: int | None = None, key: str | None = None
    ) -> ScenarioError:
        """The error to raise for something in this file."""
        if line is not None and not line.ended:
            message += " (the last line has no end: the file may be cut off, fetch it again)"
        number = None if line is None else line.number
        return ScenarioError(message, file=self.path, line=number, column=column, key=key or self.key)

    def lines(self) -> Iterator[Line]:
        """The lines that hold something. Raises ScenarioError: no such file, not a plain text file, a line over
        `MAX_LINE_BYTES`."""
        try:
            path = Path(self.path)
            if not path.is_file():
                raise self._absent(path)
            with path.open("rb") as stream:
                yield from self._lines(stream)
        except OSError as error:
            raise self.mistake(f"cannot be read: {error.strerror or error}") from error

    def records(self, *columns: Sequence[str]) -> Iterator[Record]:
        """The rows of a CSV file with a header, one a line. Each of `columns` is the names that a column may have.

        Other columns are passed over. Raises ScenarioError: no header, a column missing, a row of another width.
        """
        lines = self.lines()
        top = next(lines, None)
        if top is None:
            raise self.mistake(f"the file is empty; it needs a header with {_listed(columns)}")
        header = [name.strip() for name in self._cells(top)]
        places = [self._place(header, names, top, columns) for names in columns]
        for line in lines:
            cells = self._cells(line)
            if len(cells) != len(header):
                raise self.mistake(
                    f"the row has {len(cells)} fields, the header has {len(header)}; correct or remove it", line=line
                )
            starts = [sum(map(len, cells[:place])) + place + 1 for place in places]
            yield Record(line, [cells[place].strip() for place in places], starts)

    def _lines(self, stream: IO[bytes]) -> Iterator[Line]:
        number = 0
        while raw := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            if number == 1:
                if raw.startswith(GZIP_MAGIC):
                    raise self.mistake("is compressed; unpack it first (gunzip)")
                raw = raw.removeprefix(BYTE_ORDER_MARK)
            line = self._decoded(number, raw)
            if line.text and not line.text.isspace():
                yield line

    def _decoded(self, number: int, raw: bytes) -> Line:
        if len(raw) > MAX_LINE_BYTES:
            raise self.mistake(
                f"the line is longer than {MAX_LINE_BYTES:,} bytes; is this the right file?",
                line=Line(number, "", True),
            )
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise self.mistake(
                f"byte 0x{raw[error.start]:02x} is not UTF-8; save the file as UTF-8 text",
                line=Line(number, "", True),
                column=len(raw[: error.start].decode()) + 1,
            ) from error
        return Line(number, text.rstrip("\r\n"), text.endswith("\n"))

    def _cells(self, line: Line) -> list[str]:
        try:
            return next(csv.reader((line.text,), strict=True))
        except csv.Error as error:
            raise self.mistake(f"not a CSV row: {error}; correct or remove it", line=line) from error

    def _place(self, header: list[str], names: Sequence[str], top: Line, columns: Sequence[Sequence[str]]) -> int:
        for name in names:
            if name in header:
                return header.index(name)
        shown = ", ".join(header)
        shown = shown if len(shown) <= 200 else shown[:200] + "..."
        raise self.mistake(
            f"the header has no column {' or '.join(names)} (it has: {shown}); it needs {_listed(columns)}", line=top
        )

    def _absent(self, path: Path) -> ScenarioError:
        if path.is_dir():
            return self.mistake("is a folder; name a file")
        if path.exists():
            return self.mistake("is not a regular file; save it to one")
        if not path.parent.is_dir():
            return self.mistake(f"no such file: there is no folder {path.parent}; correct the path")
        near = get_close_matches(path.name, sorted(other.name for other in path.parent.iterdir()), n=1)
        return self.mistake(f"no such file; did you mean {near[0]}?" if near else "no such file; correct the path")


def whole_number(text: str, most: int) -> int | str:
    """The number that `text` (ASCII digits) writes, at most `most`; else what is wrong with it."""
    if text.isascii() and text.isdigit():
        if len(text.lstrip("0")) > len(str(most)) or (number := int(text)) > most:
            return f"is larger than {most:,}"
        return number
    if not text:
        return "is empty"
    if text.startswith("-"):
        return f"is negative: {text[:40]!r}"
    return f"is not a whole number: {text[:40]!r}"


def _listed(columns: Sequence[Sequence[str]]) -> str:
    return ",".join(names[0] for names in columns)
