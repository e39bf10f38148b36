"""report.html: one file that opens without a network. Verdict first, then why, pictures, tables, how to run it again.

Whatever comes from a scenario or an engine goes through `escape`; the page allows no script and loads nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from pagestorm.diagnosis import (
    ABORT,
    DECODE_OOM,
    KEPT_FIRST,
    KEPT_VICTIMS,
    PREFILL_OOM,
    REJECTION,
    RETRACTION,
    Diagnosis,
    Incident,
    diagnose,
)
from pagestorm.report.figures import key_figures
from pagestorm.report.plots import NARROW_IN, WIDE_IN, Plots
from pagestorm.report.style import CSS
from pagestorm.report.theme import data_url, svg
from pagestorm.report.verdict import Verdict, verdict
from pagestorm.report.words import duration, printable, sentence

if TYPE_CHECKING:
    from pagestorm.runs import Result

CAPTIONS = {
    "timeline": "Pages of the pool by kind, requests running and waiting, and the new-token ratio over simulated time.",
    "lengths": "How many requests had a prompt, and how many finished ones an output, of what length.",
    "latency": "Share of finished requests that had their first token, and their whole answer, within a time.",
}
LAW, HELD = "law", "most held (pages)"
_CLASSES = {LAW: " class=words", HELD: " class=left"}
"""Columns that are not numbers."""
LINES_SHOWN = 150
"""A longer scenario, with thousands of explicit requests perhaps, is folded away."""
FLAG = re.compile(r"--[a-z][a-z-]+(?: engine\.[a-z_=0-9.]*[a-z0-9])?")
EVENTS_SHOWN = (
    (RETRACTION, "Retraction bursts"),
    (DECODE_OOM, "Out of memory in decode"),
    (PREFILL_OOM, "Out of memory in prefill"),
    (ABORT, "Aborted requests"),
    (REJECTION, "Refused requests"),
)


def report_html(
    result: Result, *, command: str, diagnosis: Diagnosis | None = None, pictures: bool = True, tables: bool = True
) -> str:
    """The page as text. `pictures` and `tables` say whether the run kept what they are drawn from."""
    from pagestorm.scenario import to_yaml

    found = diagnosis or diagnose(result.raw_events, result.summary, result.scenario)
    told = verdict(result.summary, found, interrupted=result.interrupted)
    name, about = result.scenario.name, result.scenario.about
    parts = [
        _banner(name, about, told, result.interrupted),
        _why(told),
        _figures(result.summary, found),
        _pictures(Plots(result, found)) if pictures else "",
        *(_incidents(found, kind, title) for kind, title in EVENTS_SHOWN),
        _again(command, tables),
        _summary(result.summary),
        _scenario(to_yaml(result.scenario)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_text(told.word)}: {_text(name)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + f"\n<footer>{_text(_maker())}, a simulation: times follow the step-time model of the scenario.</footer>"
        "\n</body>\n</html>\n"
    )


def _text(value: object) -> str:
    return escape(printable(str(value)))


def _maker() -> str:
    try:
        return f"Pagestorm {version('pagestorm')}"
    except PackageNotFoundError:
        return "Pagestorm"


# --- verdict ---------------------------------------------------------------------------------------------------


def _banner(name: str, about: str, told: Verdict, interrupted: bool) -> str:
    stopped = "<p>The run was interrupted; everything here covers it up to that moment.</p>" if interrupted else ""
    return (
        f"<header><h1>{_text(name)}</h1>{f'<p class=about>{_text(about)}</p>' if about else ''}</header>\n"
        f'<section class="verdict {told.level}"><span class="badge">{_text(told.word)}</span>'
        f"<p class=headline>{_text(told.headline)}</p>{stopped}</section>"
    )


def _why(told: Verdict) -> str:
    parts = []
    if told.law or told.context:
        law = f"<p class=law>{_text(sentence(told.law))}</p>" if told.law else ""
        parts.append(f"<h2>Why</h2>{law}{_list(told.context)}")
    if told.engine_says:
        parts.append(f"<p>The engine's own words:</p><pre>{_text(told.engine_says)}</pre>")
    if told.cost:
        parts.append(f"<h2>What it cost</h2><p>{_text(told.cost)}</p>")
    steps = _list(told.next_steps) if told.next_steps else "<p>Nothing has to change.</p>"
    parts.append(f"<h2>What to try next</h2>{steps}")
    return f"<section>{''.join(parts)}</section>"


def _list(sentences: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{_prose(each)}</li>' for each in sentences)}</ul>" if sentences else ""


def _prose(text: str) -> str:
    """Flags in the middle of a sentence stand out."""
    return re.sub(
        r"--[a-z][a-z-]+(?: engine\.[a-z_=0-9.]+[a-z0-9])?", lambda flag: f"<code>{flag[0]}</code>", _text(text)
    )


def _figures(summary: Mapping[str, Any], diagnosis: Diagnosis) -> str:
    tiles = "".join(
        f"<div><dt>{_text(label)}</dt><dd>{'<br>'.join(_text(part) for part in value.split(', '))}</dd></div>"
        for label, value in key_figures(summary, diagnosis)
    )
    return f"<section><h2>Figures</h2><dl class=tiles>{tiles}</dl></section>"


# --- pictures --------------------------------------------------------------------------------------------------


def _pictures(plots: Plots) -> str:
    titles = plots.titles
    figures = []
    for name, draw in plots.figures.items():
        alt = f"{titles[name]}. {CAPTIONS[name]}"
        figures.append(
            f'<figure><picture><source media="(max-width: 620px)" srcset="{data_url(svg(draw(NARROW_IN)))}">'
            f'<img src="{data_url(svg(draw(WIDE_IN)))}" alt="{_text(alt)}"></picture>'
            f"<figcaption>{_text(CAPTIONS[name])}</figcaption></figure>"
        )
    return f"<section><h2>Pictures</h2>{''.join(figures)}</section>"


# --- tables ----------------------------------------------------------------------------------------------------


def _incidents(diagnosis: Diagnosis, kind: str, title: str) -> str:
    count = diagnosis.counts[kind]
    if not count:
        return ""
    first = diagnosis.first[kind]
    blocks = []
    if kind == RETRACTION and count > len(diagnosis.worst_bursts):
        worst = diagnosis.worst_bursts
        blocks.append(f"<h3>The {len(worst)} that threw away most</h3>{_table(worst, kind)}")
        shown = f"The first {len(first)}" if count > len(first) else f"All {len(first)}"
        blocks.append(f"<details><summary>{shown}, in order</summary>{_table(first, kind)}</details>")
    else:
        shown = f"<p>The first {KEPT_FIRST:,} of {count:,}.</p>" if count > len(first) else ""
        blocks.append(shown + _table(first, kind))
    return f"<section><h2>{_text(title)} ({count:,})</h2>{''.join(blocks)}</section>"


def _table(incidents: Sequence[Incident], kind: str) -> str:
    columns = _COLUMNS[kind]
    head = "".join(f"<th scope=col{_CLASSES.get(title, '')}>{_text(title)}</th>" for title, _ in columns)
    rows = "".join(
        f"<tr>{''.join(f'<td{_CLASSES.get(title, str())}>{_text(value(each))}</td>' for title, value in columns)}</tr>"
        for each in incidents
    )
    return f"<div class=scroll tabindex=0><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"


def _held(incident: Incident) -> str:
    return ", ".join(f"request {request}: {pages:,}" for request, pages in incident.pressure.held) or "-"


def _victims(incident: Incident) -> str:
    more = incident.victims - KEPT_VICTIMS
    named = ", ".join(str(number) for number in incident.first_victims)
    return f"{incident.victims:,} ({named}{f' and {more:,} more' if more > 0 else ''})"


_WHEN = (
    ("time", lambda i: duration(i.time_ns / 1e9)),
    ("pass", lambda i: f"{i.step:,}" if i.step >= 0 else "-"),
    (LAW, lambda i: i.law),
)
_POOL = (
    ("asked (tokens)", lambda i: f"{i.pressure.asked_tokens:,}"),
    ("asked (pages)", lambda i: f"{i.pressure.asked_pages:,}"),
    ("free (pages)", lambda i: f"{i.pressure.free_pages:,}"),
    ("evictable (pages)", lambda i: f"{i.pressure.evictable_pages:,}"),
    ("protected (pages)", lambda i: f"{i.pressure.protected_pages:,}"),
    ("held (pages)", lambda i: f"{i.pressure.uncached_pages:,}"),
)
_BATCH = (
    ("rounding (tokens)", lambda i: f"{i.pressure.rounding_tokens:,}"),
    ("batch", lambda i: f"{i.pressure.batch:,}"),
    ("ratio", lambda i: "-" if i.pressure.ratio is None else f"{i.pressure.ratio:.3f}"),
    (HELD, _held),
)
_COLUMNS: dict[str, tuple[tuple[str, Any], ...]] = {
    RETRACTION: (
        *_WHEN,
        ("retracted", _victims),
        ("freed (pages)", lambda i: f"{i.freed_pages:,}"),
        ("thrown away (tokens)", lambda i: f"{i.lost_tokens:,}"),
        *_POOL,
        *_BATCH,
    ),
    DECODE_OOM: (*_WHEN, *_POOL, *_BATCH),
    PREFILL_OOM: (*_WHEN, *_POOL, *_BATCH),
    ABORT: (*_WHEN, ("request", lambda i: str(i.request)), *_POOL),
    REJECTION: (*_WHEN, ("request", lambda i: str(i.request)), *_POOL),
}


def _summary(summary: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th scope=row>{_text(key)}</th><td>{_text(_value(value))}</td></tr>" for key, value in summary.items()
    )
    return (
        "<section><h2>Summary</h2><details open><summary>Every key of summary.json</summary>"
        f"<div class=scroll tabindex=0><table class=keys><tbody>{rows}</tbody></table></div></details></section>"
    )


def _value(value: object) -> str:
    if value is None:
        return "does not apply"
    if isinstance(value, list):
        return ", ".join(str(each) for each in value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


# --- again -----------------------------------------------------------------------------------------------------


def _again(command: str, tables: bool) -> str:
    beside = (
        "<p>The tables beside this page (<code>events.parquet</code>, <code>requests.parquet</code>, "
        "<code>timeline.parquet</code>) open with <code>pandas.read_parquet</code>.</p>"
        if tables
        else "<p>The events were not kept (<code>--events none</code>), so there are no tables beside this page.</p>"
    )
    return (
        "<section><h2>How to run it again</h2>"
        "<p>From the folder of this page, with every default written out:</p>"
        "<pre>pagestorm run scenario.yaml --out again</pre>"
        f"<p>It was made with:</p><pre>{_text(command)}</pre>{beside}</section>"
    )


def _scenario(yaml: str) -> str:
    shown = " open" if yaml.count("\n") <= LINES_SHOWN else ""
    return (
        f"<section><h2>Scenario</h2><details{shown}><summary>With every default filled in</summary>"
        f"<pre>{chr(10).join(_text(line) for line in yaml.splitlines())}</pre></details></section>"
    )
