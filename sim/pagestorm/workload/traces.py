"""Recorded workloads, streamed row by row: Azure's CSV and Mooncake's JSON lines.

azure: header TIMESTAMP,ContextTokens,GeneratedTokens, in any order among other columns. The timestamp is a wall clock
(`2023-11-16 18:17:03.9799600`, up to nine digits after the point, `T` for the space and a UTC offset accepted).
mooncake: one object a line with timestamp (whole milliseconds), input_length, output_length and, if it is there,
hash_ids with one id a block of 512 prompt tokens; the ids are checked and not used yet.

An output of 0 tokens is read as 1: a prefill yields a token even when none is asked for. A prompt of 0 is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date
from functools import lru_cache
from typing import Annotated, NamedTuple

import msgspec

from pagestorm.errors import ScenarioError
from pagestorm.scenario.schema import MAX_SECONDS, MAX_TOKENS, Trace
from pagestorm.workload.arrivals import MAX_NS, NS_PER_S
from pagestorm.workload.files import Line, Record, TextFile, whole_number

HASH_BLOCK_TOKENS = 512
NS_PER_MS = 10**6

_CLOCK = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?",
    re.ASCII,
)


class Row(NamedTuple):
    """One request of a trace. `time_ns` counts from the first row; lengths are in tokens, both >= 1."""

    time_ns: int
    input_tokens: int
    output_tokens: int


class _Stamped(NamedTuple):
    """A row as it stands in the file: `clock_ns` counts from the file's own origin, output may be 0."""

    line: Line
    clock_ns: int
    input_tokens: int
    output_tokens: int


class _Mooncake(msgspec.Struct, frozen=True, gc=False):
    timestamp: Annotated[int, msgspec.Meta(ge=0, le=MAX_NS // NS_PER_MS)]
    input_length: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0)]] | None = None


def rows(trace: Trace, most: int | None = None) -> Iterator[Row]:
    """The first `most` rows of a trace, or all of them, one at a time.

    Raises ScenarioError, with the line and the field, on a row that does not fit its format or goes back in time, and
    when there are fewer rows than `most`, or none.
    """
    file = TextFile(trace.path, "workload.trace.path")
    start_ns = last_ns = None
    read = 0
    for line, clock_ns, input_tokens, output_tokens in _stamped(file, trace.format):
        if start_ns is None or last_ns is None:
            start_ns = last_ns = clock_ns
        if clock_ns < last_ns:
            raise file.mistake("the time is before that of the row above; sort the rows by time", line=line)
        if clock_ns - start_ns > MAX_NS:
            raise file.mistake(
                f"the time is more than {MAX_SECONDS:g} s after the first row; correct it or cut the trace", line=line
            )
        last_ns = clock_ns
        yield Row(clock_ns - start_ns, input_tokens, output_tokens or 1)
        read += 1
        if read == most:
            return
    if not read:
        raise file.mistake("the trace has no rows; it needs at least one")
    if most is not None:
        raise file.mistake(
            f"the trace has {read:,} rows, fewer than the {most:,} requests asked for; ask for at most {read}",
            key="workload.num_requests",
        )


def _stamped(file: TextFile, trace_format: str) -> Iterator[_Stamped]:
    if trace_format == "azure":
        records = file.records(("TIMESTAMP",), ("ContextTokens",), ("GeneratedTokens",))
        return (_azure(file, record) for record in records)
    return (_mooncake(file, line) for line in file.lines())


def _azure(file: TextFile, record: Record) -> _Stamped:
    line, (clock, prompt, output), columns = record
    clock_ns = clock_time_ns(clock)
    if clock_ns is None:
        raise file.mistake(
            f"TIMESTAMP {clock[:40]!r} is not a time such as 2023-11-16 18:17:03.9799600; correct or remove the row",
            line=line,
            column=columns[0],
        )
    input_tokens = whole_number(prompt, MAX_TOKENS)
    if input_tokens == 0:
        input_tokens = "is 0, and an empty prompt cannot be served"
    if isinstance(input_tokens, str):
        raise _bad_count(file, line, "ContextTokens", input_tokens, columns[1])
    output_tokens = whole_number(output, MAX_TOKENS)
    if isinstance(output_tokens, str):
        raise _bad_count(file, line, "GeneratedTokens", output_tokens, columns[2])
    return _Stamped(line, clock_ns, input_tokens, output_tokens)


def _bad_count(file: TextFile, line: Line, field: str, why: str, column: int) -> ScenarioError:
    return file.mistake(f"{field} {why}; correct or remove the row", line=line, column=column)


def clock_time_ns(text: str) -> int | None:
    """Nanoseconds from year 1 to a wall clock time, exactly; UTC where it names no offset; None if it is no time."""
    match = _CLOCK.fullmatch(text)
    if match is None:
        return None
    day, hour, minute, second, fraction, offset = match.groups()
    days = _days(day)
    if days is None or int(hour) > 23 or int(minute) > 59 or int(second) > 59:
        return None
    seconds = ((days * 24 + int(hour)) * 60 + int(minute)) * 60 + int(second) - _offset_s(offset)
    return seconds * NS_PER_S + int((fraction or "0").ljust(9, "0"))


@lru_cache(maxsize=64)
def _days(day: str) -> int | None:
    try:
        return date.fromisoformat(day).toordinal()
    except ValueError:
        return None


def _offset_s(offset: str | None) -> int:
    if offset is None or offset == "Z":
        return 0
    return int(offset[0] + "60") * (int(offset[1:3]) * 60 + int(offset[4:6]))


_decode = msgspec.json.Decoder(_Mooncake).decode


def _mooncake(file: TextFile, line: Line) -> _Stamped:
    try:
        row = _decode(line.text)
    except msgspec.ValidationError as error:
        # msgspec says "Expected `int`, got `str` - at `$.input_length`".
        why, _, where = str(error).partition(" - at `$.")
        field = where.rstrip("`") + ": " if where else ""
        raise file.mistake(f"{field}{why}; correct or remove the row", line=line) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise file.mistake(f"not a JSON object: {error}; correct or remove the row", line=line) from error
    blocks = -(-row.input_length // HASH_BLOCK_TOKENS)
    if row.hash_ids is not None and len(row.hash_ids) != blocks:
        raise file.mistake(
            f"hash_ids has {len(row.hash_ids)} ids; input_length {row.input_length} takes {blocks}, one every "
            f"{HASH_BLOCK_TOKENS} tokens; correct or remove the row",
            line=line,
        )
    return _Stamped(line, row.timestamp * NS_PER_MS, row.input_length, row.output_length)
