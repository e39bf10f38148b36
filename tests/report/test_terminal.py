"""The verdict on a terminal: within its width, in its encoding, in its colours, whatever a name contains."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagestorm.report.terminal import say, speaks_unicode, verdict_text, wants_colour
from tests.report.cases import CASES, diagnosis, result

ANSI = re.compile("\x1b\\[[0-9;]*m")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("width", [10, 40, 80, 300])
def test_no_line_is_wider_than_the_terminal_and_none_wider_than_is_readable(name: str, width: int) -> None:
    text = verdict_text(result(name).summary, diagnosis(name), width, colour=False)
    assert max(len(line) for line in text.splitlines()) <= max(40, min(width, 100))
    assert not [line for line in text.splitlines() if line != line.rstrip()]


@pytest.mark.parametrize("name", CASES)
def test_colours_change_nothing_but_the_colours(name: str) -> None:
    plain = verdict_text(result(name).summary, diagnosis(name), 80, colour=False)
    painted = verdict_text(result(name).summary, diagnosis(name), 80, colour=True)
    assert ANSI.sub("", painted) == plain
    assert "\x1b" not in plain
    assert "\x1b[" in painted


@pytest.mark.parametrize("name", CASES)
def test_a_terminal_without_unicode_gets_plain_ascii(name: str) -> None:
    text = verdict_text(result(name).summary, diagnosis(name), 80, colour=False, unicode=False)
    assert text.isascii()
    assert text[0] in "+!x"


def test_the_law_stands_in_the_verdict_with_its_numbers() -> None:
    text = " ".join(verdict_text(result("crashed").summary, diagnosis("crashed"), 80, colour=False).split())
    assert "Token check: 38 tokens asked <= 64 tokens free, but 2 sequences open a page in the same step" in text
    assert "finished 65 of 200 requests" in text
    assert "says Decode out of memory." in text
    assert "next - Guard the decode step by pages" in text


def test_ten_figures_stand_in_two_columns_where_there_is_room() -> None:
    one = verdict_text(result("calm").summary, diagnosis("calm"), 60, colour=False)
    two = verdict_text(result("calm").summary, diagnosis("calm"), 100, colour=False)
    assert len(one.splitlines()) == len(two.splitlines()) + 5


@given(name=st.text(min_size=1, max_size=120))
@settings(deadline=None, max_examples=60)
def test_no_name_can_move_the_cursor_or_break_the_line(name: str) -> None:
    text = verdict_text({**result("calm").summary, "name": name}, diagnosis("calm"), 80, colour=False)
    assert all(line.isprintable() for line in text.splitlines())
    assert len(text.splitlines()) == len(
        verdict_text(result("calm").summary, diagnosis("calm"), 80, False).splitlines()
    )


def stream(encoding: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding)


@pytest.mark.parametrize(("encoding", "speaks"), [("utf-8", True), ("ascii", False), ("latin-1", False)])
def test_the_stream_says_whether_it_speaks_unicode_and_gets_what_it_can_take(encoding: str, speaks: bool) -> None:
    to = stream(encoding)
    assert speaks_unicode(to) == speaks
    say(result("evil"), Path("out"), stream=to)
    to.flush()
    buffer = to.buffer
    assert isinstance(buffer, io.BytesIO)
    text = buffer.getvalue().decode(encoding)
    assert text.endswith("\nreport: out/report.html\n")
    assert text.startswith("\N{CHECK MARK} HELD" if speaks else "+ HELD")


def test_without_a_folder_it_says_how_to_get_one() -> None:
    to = io.StringIO()
    say(result("calm"), stream=to, diagnosis=diagnosis("calm"))
    assert to.getvalue().endswith("\nfor tables, pictures and a report add: --out DIR\n")


def test_colour_is_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert wants_colour(Terminal())
    assert not wants_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_colour(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_colour(Terminal())
