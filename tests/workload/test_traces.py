"""Azure and Mooncake traces: what they hold, and what is said about broken ones."""

from __future__ import annotations

import json
import os
import tracemalloc
from datetime import datetime
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagestorm.errors import ScenarioError
from pagestorm.scenario.schema import Trace
from pagestorm.workload.files import MAX_LINE_BYTES
from pagestorm.workload.traces import Row, clock_time_ns, rows

Format = Literal["azure", "mooncake"]

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
FIRST = "2023-11-16 18:17:03.9799600,4808,10\r\n"
OBJECT = '{"timestamp": 27, "input_length": 600, "output_length": 500, "hash_ids": [0, 1]}\n'


def read(tmp_path: Path, form: Format, text: str | bytes, most: int | None = None) -> list[Row]:
    path = tmp_path / "trace"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return list(rows(Trace(format=form, path=str(path)), most))


@pytest.mark.parametrize(
    ("form", "name", "count"),
    [
        ("azure", "azure2023_conv.csv", 19_366),
        ("azure", "azure2023_code.csv", 8_819),
        ("mooncake", "mooncake_fast25_conversation.jsonl", 12_031),
        ("mooncake", "mooncake_fast25_synthetic.jsonl", 3_993),
    ],
)
def test_a_public_trace_reads_as_pandas_reads_it(shared: Path, form: Format, name: str, count: int) -> None:
    import pandas as pd

    path = shared / "data" / "traces" / name
    found = list(rows(Trace(format=form, path=str(path))))
    if form == "azure":
        table = pd.read_csv(path, parse_dates=["TIMESTAMP"])
        prompt, output = table["ContextTokens"], table["GeneratedTokens"]
        times_ns = (table["TIMESTAMP"] - table["TIMESTAMP"][0]) // pd.Timedelta(1, "ns")
    else:
        table = pd.DataFrame([json.loads(line) for line in path.read_text().splitlines()])
        prompt, output = table["input_length"], table["output_length"]
        times_ns = (table["timestamp"] - table["timestamp"][0]) * 10**6
    assert len(found) == count == len(table)
    assert found[0].time_ns == 0
    assert sum(row.input_tokens for row in found) == prompt.sum()
    assert sum(row.output_tokens for row in found) == output.sum()
    assert [row.time_ns for row in found] == times_ns.tolist()


def test_azure_times_are_exact_to_100_ns(tmp_path: Path) -> None:
    text = HEADER + FIRST + "2023-11-16 18:17:04.0319601,3180,8\r\n" + "2023-11-17 00:00:00,110,27"
    assert read(tmp_path, "azure", text) == [
        Row(0, 4808, 10),
        Row(52_000_100, 3180, 8),
        Row(20_576_020_040_000, 110, 27),
    ]


def test_mooncake_times_count_from_the_first_row(tmp_path: Path) -> None:
    later = OBJECT.replace("27", "30")
    assert read(tmp_path, "mooncake", OBJECT + later) == [Row(0, 600, 500), Row(3_000_000, 600, 500)]


@settings(deadline=None, max_examples=100)
@given(st.datetimes(), st.integers(0, 10**9 - 1), st.integers(1, 9))
def test_a_clock_time_is_read_exactly(moment: datetime, nanos: int, digits: int) -> None:
    moment = moment.replace(microsecond=0)
    fraction = f"{nanos:09d}"[:digits]
    elapsed = moment - datetime(1, 1, 1)
    expected = (elapsed.days + 1) * 86_400 * 10**9 + elapsed.seconds * 10**9 + int(fraction.ljust(9, "0"))
    assert clock_time_ns(f"{moment.isoformat(' ')}.{fraction}") == expected


def test_a_utc_offset_is_taken_off() -> None:
    here = clock_time_ns("2024-05-10 02:00:00.009930+02:00")
    assert here == clock_time_ns("2024-05-10T00:00:00.00993Z") == clock_time_ns("2024-05-10 00:00:00.009930")
    assert here == clock_time_ns("2024-05-09 18:30:00.009930-05:30")


def test_azure_columns_may_stand_in_any_order_with_a_byte_order_mark_and_quotes(tmp_path: Path) -> None:
    text = b'\xef\xbb\xbf"GeneratedTokens",Region, TIMESTAMP ,ContextTokens\n7,"a,b",2023-11-16 18:17:03, 8\n\n'
    assert read(tmp_path, "azure", text) == [Row(0, 8, 7)]


def test_mooncake_keys_that_are_not_used_and_missing_hash_ids_are_fine(tmp_path: Path) -> None:
    text = '{"timestamp": 0, "input_length": 600, "output_length": 5, "session": {"id": [1]}}\n'
    assert read(tmp_path, "mooncake", text) == [Row(0, 600, 5)]


def test_an_output_of_no_tokens_is_one_token(tmp_path: Path) -> None:
    assert read(tmp_path, "azure", HEADER + FIRST.replace(",10", ",0")) == [Row(0, 4808, 1)]
    assert read(tmp_path, "mooncake", OBJECT.replace("500", "0")) == [Row(0, 600, 1)]


def test_only_the_rows_that_are_asked_for_are_read(tmp_path: Path) -> None:
    assert read(tmp_path, "azure", HEADER + FIRST + FIRST + "rubbish", most=2) == [Row(0, 4808, 10)] * 2


@pytest.mark.parametrize(("form", "text"), [("azure", HEADER + FIRST), ("mooncake", OBJECT)])
def test_more_rows_than_the_trace_has_are_an_error(form: Format, text: str, tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"has 1 rows, fewer than the 2 requests.*at most 1") as caught:
        read(tmp_path, form, text, most=2)
    assert caught.value.key == "workload.num_requests"


BAD_AZURE: list[tuple[str | bytes, int | None, int | None, str]] = [
    ("", None, None, "empty"),
    (HEADER, None, None, "no rows"),
    ("\n \n", None, None, "empty"),
    (FIRST, 1, None, "no column TIMESTAMP"),
    (HEADER.replace("Context", "context") + FIRST, 1, None, "no column ContextTokens.*contextTokens"),
    (HEADER + FIRST + "2023-11-16 18:17:04,5\r\n", 3, None, "2 fields"),
    (HEADER + FIRST + "2023-11-16 18:17:04,5,6,7\r\n", 3, None, "4 fields"),
    (HEADER + FIRST + "2023-11-16 18:1", 3, None, "1 fields.*cut off"),
    (HEADER + FIRST + "2023-11-16 18:17:04.1,5,", 3, 25, "GeneratedTokens is empty.*cut off"),
    (HEADER + "\n" + FIRST.replace("4808", "-5"), 3, 29, "ContextTokens is negative"),
    (HEADER + FIRST.replace("4808", "5.0"), 2, 29, "ContextTokens is not a whole number"),
    (HEADER + FIRST.replace("4808", "five"), 2, 29, "ContextTokens is not a whole number"),
    (HEADER + FIRST.replace("4808", "٤"), 2, 29, "ContextTokens is not a whole number"),
    (HEADER + FIRST.replace("4808", "0"), 2, 29, "ContextTokens is 0"),
    (HEADER + FIRST.replace("4808", "9" * 5000), 2, 29, "ContextTokens is larger"),
    (HEADER + FIRST.replace(",10", ",-1"), 2, 34, "GeneratedTokens is negative"),
    (HEADER + FIRST.replace("2023-11-16", "2023-13-16"), 2, 1, "TIMESTAMP .* is not a time"),
    (HEADER + FIRST.replace("18:17", "24:17"), 2, 1, "TIMESTAMP .* is not a time"),
    (HEADER + FIRST.replace("2023-11-16 18:17:03.9799600", "1700158623"), 2, 1, "TIMESTAMP .* is not a time"),
    (HEADER + FIRST + FIRST.replace(":03.", ":02."), 3, None, "before that of the row above; sort"),
    (HEADER + FIRST + FIRST.replace(":03.", ":05.") + FIRST.replace(":03.", ":04."), 4, None, "before that of the row"),
    (HEADER + FIRST + FIRST.replace("2023", "2123"), 3, None, "more than 1e.09 s after"),
    (HEADER + FIRST.replace("4808", '"4808'), 2, None, "not a CSV row"),
    (HEADER + FIRST.replace("\r\n", "\r") * 2, 2, None, "not a CSV row"),
    ((HEADER + FIRST).encode() + b"2023-11-16 18:17:0\xff,1,1\n", 3, 19, "byte 0xff is not UTF-8"),
    ((HEADER + FIRST).encode("utf-16"), 1, 1, "not UTF-8"),
    (b"\x1f\x8b\x08\x00", None, None, "compressed; unpack"),
    (HEADER + "x" * (MAX_LINE_BYTES + 1), 2, None, "longer than"),
]

BAD_MOONCAKE: list[tuple[str | bytes, int | None, int | None, str]] = [
    ("", None, None, "no rows"),
    (OBJECT + OBJECT[:40], 2, None, "not a JSON object.*truncated.*cut off"),
    (OBJECT + "[1]\n", 2, None, "Expected `object`, got `array`"),
    (OBJECT + "timestamp\n", 2, None, "not a JSON object"),
    (OBJECT.replace('"output_length": 500, ', ""), 1, None, "missing required field `output_length`"),
    (OBJECT.replace("600", "-6"), 1, None, "input_length: Expected `int` >= 1"),
    (OBJECT.replace("600", "0"), 1, None, "input_length: Expected `int` >= 1"),
    (OBJECT.replace("600", "600.5"), 1, None, "input_length: Expected `int`, got `float`"),
    (OBJECT.replace("500", "true"), 1, None, "output_length: Expected `int`, got `bool`"),
    (OBJECT.replace("500", "-1"), 1, None, "output_length: Expected `int` >= 0"),
    (OBJECT.replace("500", "9" * 30), 1, None, "output_length: "),
    (OBJECT.replace("27", "-1"), 1, None, "timestamp: Expected `int` >= 0"),
    (OBJECT.replace("27", '"27"'), 1, None, "timestamp: Expected `int`, got `str`"),
    (OBJECT.replace("27", "NaN"), 1, None, "not a JSON object"),
    (OBJECT.replace("[0, 1]", "[0]"), 1, None, "hash_ids has 1 ids; input_length 600 takes 2"),
    (OBJECT.replace("[0, 1]", "[0, -1]"), 1, None, r"hash_ids\[1\]: Expected `int` >= 0"),
    (OBJECT.replace("[0, 1]", '[0, 1], "x": ' + "[" * 9000 + "]" * 9000), 1, None, "not a JSON object"),
    (OBJECT + OBJECT.replace("27", "26"), 2, None, "before that of the row above"),
    (OBJECT.encode() + b'{"\xff"', 2, 3, "byte 0xff is not UTF-8"),
]


@pytest.mark.parametrize(
    ("form", "text", "line", "column", "says"),
    [("azure", *case) for case in BAD_AZURE] + [("mooncake", *case) for case in BAD_MOONCAKE],
)
def test_a_bad_trace_is_an_error_that_names_file_line_and_field(
    form: Format, text: str | bytes, line: int | None, column: int | None, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ScenarioError, match=says) as caught:
        read(tmp_path, form, text)
    error = caught.value
    assert error.file == str(tmp_path / "trace")
    assert (error.line, error.column) == (line, column)
    assert error.key == "workload.trace.path"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("trace.cvs", "no such file; did you mean trace.csv?"),
        ("other", "no such file; correct"),
        ("nowhere/trace.csv", "there is no folder"),
        ("", "is a folder"),
        ("fifo", "not a regular file"),
        ("x" * 5000, "cannot be read"),
        ("a\0b", "no such file"),
    ],
)
def test_a_trace_that_is_not_a_file_is_an_error_that_says_so(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(HEADER + FIRST)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ScenarioError, match=says.replace("?", r"\?")) as caught:
        list(rows(Trace(format="azure", path=str(tmp_path / name))))
    assert caught.value.key == "workload.trace.path"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_trace_without_permission_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + FIRST)
    path.chmod(0)
    with pytest.raises(ScenarioError, match="Permission denied"):
        list(rows(Trace(format="azure", path=str(path))))


def test_a_trace_is_read_row_by_row(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + FIRST * 20_000)
    tracemalloc.start()
    try:
        assert sum(1 for _ in rows(Trace(format="azure", path=str(path)))) == 20_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < path.stat().st_size / 2


def test_a_line_without_end_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    with path.open("wb") as stream:
        stream.truncate(64 * MAX_LINE_BYTES)
    tracemalloc.start()
    try:
        with pytest.raises(ScenarioError, match="longer than"):
            list(rows(Trace(format="azure", path=str(path))))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * MAX_LINE_BYTES
