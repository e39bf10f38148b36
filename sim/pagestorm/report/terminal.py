"""The verdict on a terminal: short enough to be read at three in the morning."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pagestorm.diagnosis import Diagnosis, diagnose
from pagestorm.report.figures import key_figures
from pagestorm.report.spark import BLOCKS, PoolUse, pool_use, sparkline
from pagestorm.report.verdict import BAD, GOOD, WARNING, Verdict, verdict
from pagestorm.report.words import duration, printable, sentence

if TYPE_CHECKING:
    from pagestorm.runs import Result

NARROWEST, WIDEST = 40, 100
LABEL_COLUMNS = 6
STEPS_SHOWN = 3
SIGNS = {GOOD: ("\N{CHECK MARK}", "+"), WARNING: ("\N{WARNING SIGN}", "!"), BAD: ("\N{BALLOT X}", "x")}
COLOURS = {GOOD: "32", WARNING: "33", BAD: "31"}


def verdict_text(
    result_summary: Mapping[str, Any],
    diagnosis: Diagnosis,
    width: int,
    colour: bool,
    *,
    unicode: bool = True,
    interrupted: bool = False,
    use: PoolUse | None = None,
) -> str:
    """Outcome, the law that decided, what it cost, what to try next, pool use and ten figures; lines of at most `width`
    columns, with ANSI colours if `colour`, in plain ASCII unless `unicode`."""
    told = verdict(result_summary, diagnosis, interrupted=interrupted)
    columns = max(NARROWEST, min(width, WIDEST))
    lines = _headline(result_summary, told, columns, colour, unicode)
    if told.law:
        lines += _labelled("why", sentence(told.law), columns, colour)
    elif told.context:
        lines += _labelled("why", told.context[0], columns, colour)
    if told.engine_says:
        lines += _labelled("says", told.engine_says, columns, colour)
    if told.cost:
        lines += _labelled("cost", told.cost, columns, colour)
    for i, step in enumerate(told.next_steps[:STEPS_SHOWN]):
        lines += _labelled("" if i else "next", f"- {step}", columns, colour)
    if lines[-1]:
        lines.append("")
    if use is not None:
        lines += _pool_use(use, columns, colour, unicode)
    lines += [*_table(key_figures(result_summary, diagnosis), columns, colour)]
    text = "\n".join(lines) + "\n"
    return text if unicode else text.encode("ascii", "replace").decode()


def speaks_unicode(stream: TextIO) -> bool:
    """Whether the signs of a verdict can be written to it."""
    try:
        "".join([*(sign for sign, _ in SIGNS.values()), BLOCKS]).encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def wants_colour(stream: TextIO) -> bool:
    """A terminal that was not asked to stay plain (NO_COLOR, TERM=dumb)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def say(
    result: Result,
    out: Path | None = None,
    *,
    diagnosis: Diagnosis | None = None,
    use: PoolUse | None = None,
    stream: TextIO | None = None,
) -> None:
    """Print the verdict, and where the rest of it is or how to get it."""
    to = stream or sys.stdout
    found = diagnosis or diagnose(result.raw_events, result.summary, result.scenario)
    width = shutil.get_terminal_size((80, 24)).columns
    unicode = speaks_unicode(to)
    text = verdict_text(
        result.summary,
        found,
        width,
        wants_colour(to),
        unicode=unicode,
        interrupted=result.interrupted,
        use=use or pool_use(result.timeline_rows),
    )
    to.write(text)
    place = str(out / "report.html") if out is not None else ""
    hint = f"report: {printable(place)}" if place else "for tables, pictures and a report add: --out DIR"
    to.write(f"\n{hint if unicode else hint.encode('ascii', 'replace').decode()}\n")


def _headline(summary: Mapping[str, Any], told: Verdict, columns: int, colour: bool, unicode: bool) -> list[str]:
    sign = SIGNS[told.level][0 if unicode else 1]
    word = f"{sign} {told.word.upper()}"
    name = printable(str(summary["name"]))
    room = columns - len(word) - 2
    if len(name) > room:
        name = name[: max(0, room - 3)] + "..."
    return [f"{_paint(word, f'1;{COLOURS[told.level]}', colour)}  {name}", *_wrap(told.headline, columns, 2), ""]


def _pool_use(use: PoolUse, columns: int, colour: bool, unicode: bool) -> list[str]:
    """The share of the pool in use over time, and what its ends mean."""
    indent = 2 + LABEL_COLUMNS
    line = sparkline(use.shares(columns - indent), unicode=unicode)
    if not line:
        return []
    start = f"  {'pool':<{LABEL_COLUMNS}}"
    what = f"pages in use over {duration(use.last_ns / 1e9)}; the top is all {use.pool_pages:,} of them"
    return [_paint(start, "1", colour) + line, *_wrap(what, columns, indent), ""]


def _labelled(label: str, text: str, columns: int, colour: bool) -> list[str]:
    indent = 2 + LABEL_COLUMNS
    lines = _wrap(text, columns, indent, hang=2 if text.startswith("- ") else 0)
    start = f"  {label:<{LABEL_COLUMNS}}"
    return [_paint(start, "1", colour and bool(label)) + lines[0][indent:], *lines[1:]]


def _wrap(text: str, columns: int, indent: int, hang: int = 0) -> list[str]:
    return textwrap.wrap(
        printable(text),
        columns,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hang),
        break_on_hyphens=False,
    ) or [" " * indent]


def _table(figures: list[tuple[str, str]], columns: int, colour: bool) -> list[str]:
    """Two figures a line where there is room."""
    label_width = max(len(label) for label, _ in figures)
    value_width = max(len(value) for _, value in figures)
    cell = 2 + label_width + 2 + value_width
    across = 2 if 2 * cell + 1 <= columns else 1
    if across == 1:
        return [line for label, value in figures for line in _row(label, value, label_width, columns, colour)]
    half = -(-len(figures) // 2)
    lines = []
    for i in range(half):
        cells = [
            "  " + _paint(f"{label:<{label_width}}", "2", colour) + f"  {value:<{value_width}}"
            for label, value in figures[i::half]
        ]
        lines.append(" ".join(cells).rstrip())
    return lines


def _row(label: str, value: str, label_width: int, columns: int, colour: bool) -> list[str]:
    """One figure, its value over several lines where it must be."""
    parts = textwrap.wrap(value, columns - label_width - 4)
    start = "  " + _paint(f"{label:<{label_width}}", "2", colour) + "  "
    return [start + parts[0], *(" " * (label_width + 4) + part for part in parts[1:])]


def _paint(text: str, code: str, colour: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if colour else text
