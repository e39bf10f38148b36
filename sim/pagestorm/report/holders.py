"""Who held the memory at the worst moment: the picture beside the law."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagestorm.diagnosis import ABORT, QUEUE_LIMIT, REJECTION, STALL, Diagnosis, Incident
from pagestorm.report import theme
from pagestorm.report.plots import headline, whole_numbers
from pagestorm.report.words import duration, percent, plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pagestorm.record import TimelineRow

LEGEND_BELOW_IN = 0.5
"""Room for the axis below a bar."""
LABELS_IN = 1.0
"""What the names of holders take from the width."""

Bar = tuple[str, float, str]
"""What it is, how many pages, in which colour."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The pool at one moment, in three pictures, each of which may be empty."""

    title: str
    pool: list[Bar]
    """Adds up to the whole pool."""
    holders: list[Bar]
    shortage: list[Bar]
    """What was asked, and what was there."""


def worst_moment(summary: Mapping[str, Any], diagnosis: Diagnosis, rows: Sequence[TimelineRow] = ()) -> Moment | None:
    """The incident that decided, else the fullest moment that `rows` (of the timeline) know; None without either."""
    incident = _decisive(summary, diagnosis)
    if incident is not None:
        return _of_incident(incident, diagnosis.page_size)
    if not rows:
        return None
    return _of_row(min(rows, key=lambda row: row.free_pages))


def holders_figure(moment: Moment | None, width_in: float) -> Figure:
    """The pool as one bar, and below it who holds most and what the step asked for, in pages."""
    parts = _parts(moment)
    heights = [1.0, *(0.45 + 0.32 * len(part) for _, part in parts)]
    legend_in = 0.22 * -(-len(moment.pool) // _columns(width_in)) if moment else 0.0
    figure = theme.new_figure(width_in, 1.4 + legend_in + sum(heights) + 0.35 * len(parts))
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _draw_pool(figure, axes[0], moment, width_in)
    for each, (title, part) in zip(axes[1:], parts, strict=True):
        _draw_bars(each, title, part)
    return figure


def _columns(width_in: float) -> int:
    return 1 if width_in < 6 else 3


def _parts(moment: Moment | None) -> list[tuple[str, list[Bar]]]:
    if moment is None:
        return []
    both = [("who holds most (pages)", moment.holders), ("asked for, and to be had (pages)", moment.shortage)]
    return [(title, bars) for title, bars in both if bars]


def told_in_words(moment: Moment | None) -> str:
    """The picture in words."""
    if moment is None:
        return "Nothing was running, so nobody held memory."
    parts = [
        ", ".join(f"{label}: {pages:,.0f}" for label, pages, _ in bars)
        for bars in (moment.pool, moment.holders, moment.shortage)
        if bars
    ]
    return f"{moment.title}. In pages: {'; '.join(parts)}."


def _decisive(summary: Mapping[str, Any], diagnosis: Diagnosis) -> Incident | None:
    if not diagnosis.events_read:
        return None
    if summary["outcome"] == "stalled":
        return diagnosis.stall()
    gravest = diagnosis.gravest
    # A limit turned those away; the memory need not have been short at that moment.
    by_limit = gravest is not None and (gravest.kind == REJECTION or gravest.reason == QUEUE_LIMIT)
    return None if by_limit else gravest


def _of_incident(incident: Incident, page_size: int) -> Moment:
    pressure = incident.pressure
    empty = min(pressure.rounding_tokens / page_size, pressure.uncached_pages)
    pool = [
        ("held, written", pressure.uncached_pages - empty, theme.BLUE),
        ("held, ends of pages still empty", empty, theme.PURPLE),
        ("cached, in use", float(pressure.protected_pages), theme.GREEN),
        ("cached, evictable", float(pressure.evictable_pages), theme.ORANGE),
        ("free", float(pressure.free_pages), theme.EMPTY),
    ]
    holders: list[Bar] = [(f"request {request}", float(pages), theme.BLUE) for request, pages in pressure.held]
    others = pressure.batch - len(holders)
    rest = pressure.uncached_pages + pressure.protected_pages - sum(pages for _, pages, _ in holders)
    if holders and others > 0 and rest > 0:
        holders.append((f"average of {others:,} other{'' if others == 1 else 's'}", rest / others, theme.MUTED))
    there = pressure.free_pages + pressure.evictable_pages
    asked = _asks(incident)
    shortage: list[Bar] = [
        (asked, float(pressure.asked_pages), theme.VERMILLION),
        ("free" if not pressure.evictable_pages else "free or evictable", float(there), theme.MUTED),
    ]
    when = f"{duration(incident.time_ns / 1e9)} into the run"
    return Moment(
        f"The pool {when}: {_share(pool)}",
        [bar for bar in pool if bar[1] > 0],
        holders,
        shortage if pressure.asked_pages else [],
    )


def _asks(incident: Incident) -> str:
    if incident.kind in (ABORT, STALL):
        return f"request {incident.request}"
    return f"the {incident.pressure.phase} step"


def _of_row(row: TimelineRow) -> Moment:
    pool = [
        (f"held by {plural(row.running, 'running request')}", float(row.uncached_pages), theme.BLUE),
        ("cached, in use", float(row.protected_pages), theme.GREEN),
        ("cached, evictable", float(row.evictable_pages), theme.ORANGE),
        ("free", float(row.free_pages), theme.EMPTY),
    ]
    when = f"{duration(row.time_ns / 1e9)} into the run"
    return Moment(f"The pool at its fullest, {when}: {_share(pool)}", [bar for bar in pool if bar[1] > 0], [], [])


def _share(pool: list[Bar]) -> str:
    whole = sum(pages for _, pages, _ in pool)
    free = sum(pages for label, pages, _ in pool if label in ("free", "cached, evictable"))
    return f"{percent(whole - free, whole)} of {plural(round(whole), 'page')} in use"


def _draw_pool(figure: Figure, axes: Axes, moment: Moment | None, width_in: float) -> None:
    from matplotlib.transforms import ScaledTranslation

    theme.dress(axes, "", "pages")
    axes.grid(False)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    if moment is None:
        theme.say(axes, told_in_words(None))
        return
    headline(axes, moment.title, width_in - LABELS_IN)
    start = 0.0
    for label, pages, colour in moment.pool:
        axes.barh([0], [pages], left=[start], color=colour, label=f"{label}: {pages:,.0f}", height=0.8)
        start += pages
    axes.set_xlim(0, start)
    whole_numbers(axes, x=True)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(0, 0),
        bbox_transform=axes.transAxes + ScaledTranslation(0, -LEGEND_BELOW_IN, figure.dpi_scale_trans),
        ncols=_columns(width_in),
        frameon=False,
        fontsize=9,
        labelcolor=theme.INK,
        borderpad=0,
        handlelength=1.2,
    )


def _draw_bars(axes: Axes, title: str, bars: list[Bar]) -> None:
    theme.dress(axes, "")
    axes.grid(False)
    axes.set_title(title, loc="left", fontsize=10, color=theme.INK, pad=8)
    axes.spines["bottom"].set_visible(False)
    axes.set_xticks([])
    places = list(range(len(bars)))[::-1]
    axes.barh(places, [pages for _, pages, _ in bars], color=[colour for _, _, colour in bars], height=0.7)
    axes.set_yticks(places, [label for label, _, _ in bars], color=theme.INK)
    most = max(pages for _, pages, _ in bars) or 1.0
    axes.set_xlim(0, most * 1.18)
    for place, (_, pages, _) in zip(places, bars, strict=True):
        text = f"{pages:,.0f}" if pages >= 10 or pages == int(pages) else f"{pages:,.1f}"
        axes.text(pages + most * 0.01, place, text, va="center", fontsize=9, color=theme.INK)
