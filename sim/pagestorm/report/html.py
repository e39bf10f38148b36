"""report.html: one file that opens without a network. Verdict first, then why, pictures, tables, how to run it again.

Whatever comes from a scenario or an engine goes through `escape`; the page loads nothing, and its policy allows
no script but the two that draw the timeline, by their hashes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
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
from pagestorm.report.holders import holders_figure, told_in_words, worst_moment
from pagestorm.report.interactive import interactive_html, script_policy, style_sheet
from pagestorm.report.latency import HEADS, latency_rows
from pagestorm.report.ledger import RecomputeCost, ledger_total
from pagestorm.report.plots import NARROW_IN, WIDE_IN, Plots
from pagestorm.report.settings import settings
from pagestorm.report.style import CSS
from pagestorm.report.theme import data_url, svg
from pagestorm.report.verdict import Verdict, taken_back, verdict
from pagestorm.report.versions import versions
from pagestorm.report.words import duration, printable, sentence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pagestorm.runs import Result
    from pagestorm.scenario import Scenario

CAPTIONS = {
    "timeline": "Pages of the pool by kind, requests running and waiting, and the new-token ratio over simulated time.",
    "lengths": "How many requests had a prompt, and how many finished ones an output, of what length.",
    "latency": "Share of finished requests that had their first token, and their whole answer, within a time.",
}
LAW, HELD = "law", "most held (pages)"
RECOMPUTE = "to compute again"
_CLASSES = {LAW: " class=words", HELD: " class=left"}
"""Columns that are not numbers."""
ABOVE = ("name", "about")
"""Keys that the head of the page has shown."""
ROWS_SHOWN = 12
"""A longer table of incidents is folded away."""
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
    cost = RecomputeCost(result.scenario)
    plots = Plots(result, found)
    parts = [
        _banner(name, about, told, result.interrupted),
        _why(told, _holders(result, found) if pictures else ""),
        _figures(result.summary, found),
        _timeline(result, found, plots) if pictures else "",
        *(_incidents(result.summary, found, kind, title, cost) for kind, title in EVENTS_SHOWN),
        _latency(result, plots) if pictures else "",
        _lengths(plots) if pictures else "",
        _again(command, tables),
        _versions(result.summary["engine"]),
        _scenario(result.scenario, to_yaml(result.scenario)),
        _summary(result.summary),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        f"style-src 'unsafe-inline'; script-src {script_policy()}\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_text(told.word)}: {_text(name)}</title>\n<style>{style_sheet()}{CSS}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n<footer>Made by Pagestorm, a simulation: times follow the step-time model of the scenario.</footer>"
        "\n</body>\n</html>\n"
    )


def _text(value: object) -> str:
    return escape(printable(str(value)))


# --- verdict ---------------------------------------------------------------------------------------------------


def _banner(name: str, about: str, told: Verdict, interrupted: bool) -> str:
    stopped = "<p>The run was interrupted; everything here covers it up to that moment.</p>" if interrupted else ""
    return (
        f"<header><h1>{_text(name)}</h1>{f'<p class=about>{_text(about)}</p>' if about else ''}</header>\n"
        f'<section class="verdict {told.level}"><span class="badge">{_text(told.word)}</span>'
        f"<p class=headline>{_text(told.headline)}</p>{stopped}</section>"
    )


def _why(told: Verdict, picture: str) -> str:
    parts = []
    if told.law or told.context:
        law = f"<p class=law>{_text(sentence(told.law))}</p>" if told.law else ""
        parts.append(f"<h2>Why</h2>{law}{_list(told.context)}{picture}")
    elif picture:
        parts.append(f"<h2>The fullest moment</h2>{picture}")
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


def _picture(draw: Callable[[float], Figure], alt: str, caption: str) -> str:
    """An SVG in two widths, of which a screen takes the one that it has room for."""
    return (
        f'<figure><picture><source media="(max-width: 620px)" srcset="{data_url(svg(draw(NARROW_IN)))}">'
        f'<img src="{data_url(svg(draw(WIDE_IN)))}" alt="{_text(alt)}"></picture>'
        f"<figcaption>{_text(caption)}</figcaption></figure>"
    )


def _holders(result: Result, diagnosis: Diagnosis) -> str:
    moment = worst_moment(result.summary, diagnosis, result.timeline_rows)
    caption = (
        "Who held the memory at the moment that decided."
        if moment and moment.shortage
        else ("Who held the memory when the pool was at its fullest.")
    )
    return _picture(lambda width_in: holders_figure(moment, width_in), f"{told_in_words(moment)} {caption}", caption)


def _timeline(result: Result, diagnosis: Diagnosis, plots: Plots) -> str:
    title, caption = plots.titles["timeline"], CAPTIONS["timeline"]
    still = _picture(plots.timeline, f"{title}. {caption}", caption)
    moving = interactive_html(result, diagnosis)
    shown = f"<p>{_text(sentence(title))}</p>{moving}<noscript>{still}</noscript>" if moving else still
    return f"<section><h2>Timeline</h2>{shown}</section>"


def _latency(result: Result, plots: Plots) -> str:
    title, caption = plots.titles["latency"], CAPTIONS["latency"]
    rows = latency_rows(result)
    head = "".join(f"<th scope=col>{_text(each)}</th>" for each in HEADS)
    body = "".join(
        f"<tr><th scope=row>{_text(row[0])}</th>{''.join(f'<td>{_text(each)}</td>' for each in row[1:])}</tr>"
        for row in rows
    )
    table = (
        f"<div class=scroll tabindex=0><table class=latency><thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
        "</table></div>"
        if rows
        else ""
    )
    return (
        f"<section><h2>Latency</h2><p>{_text(sentence(title))}</p>{table}"
        f"{_picture(plots.latency, f'{title}. {caption}', caption)}</section>"
    )


def _lengths(plots: Plots) -> str:
    title, caption = plots.titles["lengths"], CAPTIONS["lengths"]
    return f"<section><h2>Lengths</h2>{_picture(plots.lengths, f'{title}. {caption}', caption)}</section>"


# --- tables ----------------------------------------------------------------------------------------------------


def _incidents(summary: Mapping[str, Any], diagnosis: Diagnosis, kind: str, title: str, cost: RecomputeCost) -> str:
    count = diagnosis.counts[kind]
    if not count:
        return ""
    first = diagnosis.first[kind]
    blocks = [f"<p>{_text(ledger_total(summary, diagnosis, cost))}</p>"] if kind == RETRACTION else []
    if kind == RETRACTION and count > len(diagnosis.worst_bursts):
        worst = diagnosis.worst_bursts
        blocks.append(f"<h3>The {len(worst)} that threw away most</h3>{_table(worst, kind, cost)}")
        shown = f"The first {len(first)}" if count > len(first) else f"All {len(first)}"
        blocks.append(f"<details><summary>{shown}, in order</summary>{_table(first, kind, cost)}</details>")
    else:
        shown = f"<p>The first {KEPT_FIRST:,} of {count:,}.</p>" if count > len(first) else ""
        table = _table(first, kind, cost)
        many = len(first) > ROWS_SHOWN
        blocks.append(shown + (f"<details><summary>All that are kept</summary>{table}</details>" if many else table))
    noun = taken_back(summary)[0].capitalize()
    title = f"{noun} bursts" if kind == RETRACTION else title
    return f"<section><h2>{_text(title)} ({count:,})</h2>{''.join(blocks)}</section>"


def _table(incidents: Sequence[Incident], kind: str, cost: RecomputeCost) -> str:
    columns = [
        (title, (lambda i: duration(cost.seconds(i.lost_tokens, i.victims))) if title == RECOMPUTE else value)
        for title, value in _COLUMNS[kind]
    ]
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
        (RECOMPUTE, str),
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
        f"<tr><th scope=row>{_text(key).replace('_', '_<wbr>')}</th><td>{_text(_value(value))}</td></tr>"
        for key, value in summary.items()
    )
    return (
        "<section><h2>Summary</h2><details><summary>Every key of summary.json</summary>"
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


def _versions(engine: str) -> str:
    rows = "".join(
        f"<tr><th scope=row>{_text(what)}</th><td>{_text(which)}</td></tr>" for what, which in versions(engine)
    )
    return (
        f"<section><h2>Versions</h2><div class=scroll tabindex=0><table class=keys><tbody>{rows}</tbody></table></div>"
        "</section>"
    )


def _scenario(scenario: Scenario, yaml: str) -> str:
    rows = "".join(
        f"<tr{' class=default' if each.default else ''}><th scope=row>{_text(each.key).replace('_', '_<wbr>')}</th>"
        f"<td>{_text(each.value)}{' <em>(default)</em>' if each.default else ''}</td></tr>"
        for each in settings(scenario)
        if each.key not in ABOVE
    )
    shown = " open" if yaml.count("\n") <= LINES_SHOWN else ""
    return (
        "<section><h2>Scenario</h2><p>A value marked <em>(default)</em> is what the key has when it is left out.</p>"
        f"<div class=scroll tabindex=0><table class=keys><tbody>{rows}</tbody></table></div>"
        f"<details{shown}><summary>As YAML, with every default filled in</summary>"
        f"<pre>{chr(10).join(_text(line) for line in yaml.splitlines())}</pre></details></section>"
    )
