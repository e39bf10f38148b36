"""The timeline of report.html that one can zoom and hover: uPlot and its data inside the page, nothing loaded."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pagestorm.diagnosis import DECODE_OOM, PREFILL_OOM, Diagnosis
from pagestorm.report.plots import hold, thin, time_unit
from pagestorm.report.verdict import taken_back
from pagestorm.report.words import plural

if TYPE_CHECKING:
    from pagestorm.runs import Result

COLUMNS = 1500
"""Stretches of time that keep their first moment and their emptiest and fullest one each."""

PAGES = (
    ("uncached", "held by requests", "blue"),
    ("protected", "cached, in use", "green"),
    ("evictable", "cached, evictable", "orange"),
    ("free", "free", "empty"),
)
LINES = (
    ("running", "running (requests)", "running", "blue"),
    ("waiting", "waiting (requests)", "waiting", "orange"),
    ("new_token_ratio", "new-token ratio", "new-token ratio", "green"),
)
KEYS = (
    "Drag across the picture to zoom in, double-click for the whole run. With the keyboard: arrow keys move through "
    "the moments, + and - zoom, Page Up and Page Down shift, w goes to the fullest moment, 0 shows the whole run."
)
BUTTONS = (
    ("in", "Zoom in"),
    ("out", "Zoom out"),
    ("left", "Earlier"),
    ("right", "Later"),
    ("worst", "Fullest moment"),
    ("whole", "Whole run"),
)

Numbers = npt.NDArray[np.float64]


def timeline_data(result: Result, diagnosis: Diagnosis) -> dict[str, Any]:
    """What the script draws. `time_ns` holds the gaps between moments; pages, requests and the ratio are as measured.

    A moment at which pages came back, or the ratio jumped, stands twice: before it and after it.
    """
    rows = result.timeline_rows
    series = {name: _column(result, f"{name}_pages") for name, _, _ in PAGES}
    series |= {name: _column(result, name) for name, _, _, _ in LINES}
    time = _column(result, "time_ns")
    kept = np.union1d(thin(time, series["free"], COLUMNS), thin(time, series["waiting"], COLUMNS // 3))
    rises = (np.diff(series["free"][kept]) > 0) | (np.diff(series["new_token_ratio"][kept]) > 0)
    moments, *held = hold(time[kept], rises, *(values[kept] for values in series.values()))
    drawn = dict(zip(series, held, strict=True))
    end_ns = max(float(time[-1]), result.summary["simulated_s"] * 1e9)
    unit_ns, unit = time_unit(end_ns)
    has_ratio = not np.isnan(series["new_token_ratio"]).all()
    return {
        "unit": unit,
        "unit_ns": unit_ns,
        "end_ns": end_ns or 1.0,
        "noun": taken_back(result.summary)[0],
        "pool_pages": rows[0].pool_pages,
        "rows": len(rows),
        "moments": len(kept),
        "worst": int(np.argmin(drawn["free"])),
        "time_ns": np.diff(moments, prepend=0.0).astype(np.int64).tolist(),
        "pages": [
            {"name": name, "label": label, "colour": colour, "values": drawn[name].astype(np.int64).tolist()}
            for name, label, colour in PAGES
            if name in ("uncached", "free") or drawn[name].any()
        ],
        "lines": [
            {
                "name": name,
                "title": title,
                "label": label,
                "colour": colour,
                "smooth": name == "new_token_ratio",
                "values": np.round(drawn[name], 4).tolist()
                if name == "new_token_ratio"
                else drawn[name].astype(np.int64).tolist(),
            }
            for name, title, label, colour in LINES
            if has_ratio or name != "new_token_ratio"
        ],
        "marks": list(zip(diagnosis.marks.time_ns, diagnosis.marks.victims, strict=True)),
        "ooms": [each.time_ns for each in diagnosis.first[DECODE_OOM] + diagnosis.first[PREFILL_OOM]],
    }


def interactive_html(result: Result, diagnosis: Diagnosis) -> str:
    """The panels, what stands under them and the scripts; empty where there is no timeline."""
    if not result.timeline_rows:
        return ""
    data = timeline_data(result, diagnosis)
    readout = [("when", "time", "")]
    readout += [(each["name"], f"{each['label']} (pages)", each["colour"]) for each in data["pages"]]
    readout += [(each["name"], each["label"], each["colour"]) for each in data["lines"]]
    values = "".join(
        f"<div><dt>{f'<i class={colour}></i>' if colour else ''}{escape(label)}</dt><dd id=timeline-{name}>-</dd></div>"
        for name, label, colour in readout
    )
    buttons = "".join(f'<button type="button" id="timeline-{name}">{label}</button>' for name, label in BUTTONS)
    return (
        f"<div id=timeline hidden><div class=buttons role=toolbar aria-label=Timeline>{buttons}</div>"
        "<div id=timeline-panels tabindex=0 role=group aria-describedby=timeline-keys "
        'aria-label="Pages by kind, requests and the new-token ratio over simulated time"></div>'
        f"<p id=timeline-view class=note></p><dl id=timeline-readout class=readout>{values}</dl>"
        f"<p id=timeline-keys class=note>{escape(KEYS)}</p>"
        f"<p class=note>{_legend(data)} {_thinned(result, data)}</p>"
        "<p id=timeline-said class=unseen aria-live=polite></p></div>\n"
        f'<script type="application/json" id="timeline-data">{_inert(data)}</script>\n'
        + "\n".join(f"<script>{each}</script>" for each in _scripts())
    )


def style_sheet() -> str:
    """What the library's own parts look like."""
    return _resource("vendor/uplot/uPlot.min.css")


def script_policy() -> str:
    """The content security policy's words for exactly the scripts of `interactive_html`."""
    return " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()}'" for each in _scripts()
    )


@cache
def _scripts() -> tuple[str, str]:
    licence = _resource("vendor/uplot/LICENSE")
    return f"/*! {licence.strip()} */\n{_resource('vendor/uplot/uPlot.iife.min.js')}", _resource("interactive.js")


@cache
def _resource(name: str) -> str:
    return files("pagestorm.report").joinpath(name).read_text("utf-8")


def _inert(data: dict[str, Any]) -> str:
    """JSON in which nothing ends the script element around it."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _legend(data: dict[str, Any]) -> str:
    marks = f"A triangle is a {data['noun']}." if data["marks"] else ""
    return f"{marks} {'A dashed line is where memory ran out.' if data['ooms'] else ''}".strip()


def _thinned(result: Result, data: dict[str, Any]) -> str:
    parts = []
    if data["moments"] < data["rows"]:
        parts.append(
            f"Thinned: {data['moments']:,} of {plural(data['rows'], 'moment')} are drawn; each of {COLUMNS:,} equal "
            f"stretches of time keeps its first, its emptiest and its fullest pool, so no peak among them is lost."
        )
    if result.timeline_every > 1:
        parts.append(f"The run itself kept one moment of {result.timeline_every:,}.")
    return " ".join(parts)


def _column(result: Result, name: str) -> Numbers:
    return np.array([getattr(row, name) for row in result.timeline_rows], dtype=np.float64)
