"""Pictures of a run, each a matplotlib figure that belongs to the caller: `result.plot.timeline()` and others."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pagestorm.diagnosis import DECODE_OOM, PREFILL_OOM, PROMPT_LIMIT, REJECTION, Diagnosis, diagnose
from pagestorm.report import theme
from pagestorm.report.verdict import taken_back
from pagestorm.report.words import duration, percent, plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pagestorm.record import TimelineRow
    from pagestorm.runs import Result

WIDE_IN = 9.0
NARROW_IN = 4.4
MOST_COLUMNS = 600
"""Columns in which a long series is drawn, each with its first, lowest and highest value."""
MOST_MARKS = 400
ECDF_POINTS = 500
TITLE_CHARACTER_IN = 0.094

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

KINDS_OF_PAGES = (
    ("uncached", "held by requests", theme.BLUE),
    ("protected", "cached, in use", theme.GREEN),
    ("evictable", "cached, evictable", theme.ORANGE),
    ("free", "free", theme.EMPTY),
)


class Plots:
    """`timeline`, `lengths` and `latency`; each says in its title what is seen and draws whatever there is to see.

    `diagnosis` saves reading the events again, and is needed for the marks where they were not kept.
    """

    def __init__(self, result: Result, diagnosis: Diagnosis | None = None) -> None:
        self._result = result
        self._diagnosis = diagnosis or diagnose(result.raw_events, result.summary, result.scenario)

    @property
    def figures(self) -> dict[str, Callable[[float], Figure]]:
        """Name to the method that draws it in a width in inches."""
        return {"timeline": self.timeline, "lengths": self.lengths, "latency": self.latency}

    @property
    def titles(self) -> dict[str, str]:
        """Name to what is seen in it."""
        return {
            "timeline": self._seen_in_time(),
            "lengths": self._seen_in_lengths(),
            "latency": self._seen_in_latency(),
        }

    def save(self, folder: Path) -> list[Path]:
        """Every figure as a PNG named after it."""
        paths = []
        for name, draw in self.figures.items():
            path = folder / f"{name}.png"
            path.write_bytes(theme.png(draw(WIDE_IN)))
            paths.append(path)
        return paths

    # --- the pool over time ------------------------------------------------------------------------------------

    def timeline(self, width_in: float = WIDE_IN) -> Figure:
        """Pages by kind, running and waiting requests and the new-token ratio over simulated time, with marks where
        requests were retracted and where memory ran out."""
        rows = self._result.timeline_rows
        if not rows:
            return self._nothing_in_time(width_in)
        lines = [("running", "running\n(requests)", theme.BLUE), ("waiting", "waiting\n(requests)", theme.ORANGE)]
        if not np.isnan(_column(rows, "new_token_ratio")).all():
            lines.append(("new_token_ratio", "new-token\nratio", theme.GREEN))
        figure = theme.new_figure(width_in, 4.0 + len(lines))
        pool, *below = figure.subplots(1 + len(lines), 1, sharex=True, height_ratios=[3.4, *[1] * len(lines)])
        scale_ns, unit = time_unit(rows[-1].time_ns)
        theme.dress(pool, "pages")
        headline(pool, self._seen_in_time(), width_in)
        time = np.array([row.time_ns for row in rows], dtype=np.float64) / scale_ns
        self._draw_pages(pool, time)
        for axes, (name, label, colour) in zip(below, lines, strict=True):
            theme.dress(axes, label, f"simulated time ({unit})" if axes is below[-1] else "")
            values = _column(rows, name)
            kept = thin(time, values, MOST_COLUMNS)
            # Requests come and go at an instant; the ratio creeps down and jumps up.
            jumps = np.diff(values[kept]) > 0 if name == "new_token_ratio" else np.diff(values[kept]) != 0
            axes.plot(*hold(time[kept], jumps, values[kept]), color=colour, linewidth=1.3)
            axes.set_ylim(0, (float(values.max()) or 1.0) * 1.15)
        whole_numbers(*below[:2])
        last = max(float(time[-1]), self._result.summary["simulated_s"] * 1e9 / scale_ns)
        pool.set_xlim(0.0, last if last > 0 else 1.0)
        self._draw_marks([pool, *below], scale_ns)
        _legend(figure, pool, 2 if width_in < 6 else 4)
        return figure

    def _nothing_in_time(self, width_in: float) -> Figure:
        figure = theme.new_figure(width_in, 2.2)
        axes = figure.subplots()
        theme.dress(axes, "pages", "simulated time")
        headline(axes, self._seen_in_time(), width_in)
        theme.say(axes, "no decode pass was launched")
        return figure

    def _draw_pages(self, axes: Axes, time: Floats) -> None:
        rows = self._result.timeline_rows
        kept = thin(time, _column(rows, "free_pages"), MOST_COLUMNS)
        columns = {name: _column(rows, f"{name}_pages")[kept] for name, _, _ in KINDS_OF_PAGES}
        shown = [kind for kind in KINDS_OF_PAGES if columns[kind[0]].any()]
        # Decoding takes pages one by one; a request that ends gives all of its own back at once.
        freed = np.diff(columns["free"]) > 0
        moments, *heights = hold(time[kept], freed, *(columns[name] for name, _, _ in shown))
        axes.stackplot(
            moments,
            heights,
            labels=[f"{label} (pages)" for _, label, _ in shown],
            colors=[colour for _, _, colour in shown],
            linewidth=0,
        )
        pages = rows[0].pool_pages
        axes.set_ylim(0, pages)
        whole_numbers(axes)
        axes.set_yticks([*(tick for tick in axes.get_yticks() if 0 <= tick < 0.91 * pages), pages])

    def _draw_marks(self, axes: list[Axes], scale_ns: float) -> None:
        found = self._diagnosis
        pool = axes[0]
        if found.victims:
            times = np.array(found.marks.time_ns, dtype=np.float64) / scale_ns
            every = -(-len(times) // MOST_MARKS)
            pool.plot(
                times[::every],
                np.full(len(times[::every]), 1.0),
                transform=pool.get_xaxis_transform(),
                linestyle="none",
                marker="v",
                markersize=7,
                color=theme.VERMILLION,
                markeredgecolor="white",
                markeredgewidth=0.6,
                clip_on=False,
                zorder=5,
                label=f"{taken_back(self._result.summary)[0]} ({found.victims:,})",
            )
        for oom in found.first[DECODE_OOM] + found.first[PREFILL_OOM]:
            at = oom.time_ns / scale_ns
            for each in axes:
                each.axvline(at, color=theme.INK, linewidth=1.2, linestyle=(0, (4, 2)), zorder=4)
            pool.plot(
                [at],
                [1.0],
                transform=pool.get_xaxis_transform(),
                linestyle="none",
                marker="X",
                markersize=11,
                color=theme.INK,
                markeredgecolor="white",
                clip_on=False,
                zorder=6,
                label="out of memory",
            )

    def _seen_in_time(self) -> str:
        summary, found = self._result.summary, self._diagnosis
        peak, pages = summary["peak_used_pages"], summary["pool_pages"]
        for oom in found.first[DECODE_OOM] + found.first[PREFILL_OOM]:
            return f"Out of memory {duration(oom.time_ns / 1e9)} into the run"
        share = percent(peak, pages)
        most = f"at most {share} of {plural(pages, 'page')} in use"
        noun, count = taken_back(summary)
        return f"{plural(count, noun)}, {most}" if count else f"No {noun}, {most}"

    # --- lengths -----------------------------------------------------------------------------------------------

    def lengths(self, width_in: float = WIDE_IN) -> Figure:
        """How long prompts and outputs are, in tokens."""
        narrow = width_in < 6
        figure = theme.new_figure(width_in, 6.0 if narrow else 3.4)
        prompts, outputs = figure.subplots(*((2, 1) if narrow else (1, 2)))
        prompt_tokens, output_tokens = self._prompts(), self._outputs()
        theme.dress(prompts, "requests", "prompt (tokens)")
        theme.dress(outputs, "requests", "output (tokens)")
        headline(prompts, _spread("Prompts", prompt_tokens), width_in)
        headline(outputs, _spread("Outputs", output_tokens), width_in)
        refused = self._diagnosis.tallies.get(f"{REJECTION}: {PROMPT_LIMIT}")
        limit = [refused.limit_tokens] if refused is not None else []
        _histogram(prompts, prompt_tokens, theme.BLUE, "no request arrived", in_view=limit)
        _histogram(outputs, output_tokens, theme.ORANGE, "no request finished")
        if refused is not None:
            _draw_limit(prompts, refused.limit_tokens)
        return figure

    def _prompts(self) -> Indices:
        return _ints(self._result.request_table.columns()["input_tokens"])

    def _outputs(self) -> Indices:
        columns = self._result.request_table.columns()
        return _ints(columns["output_tokens"])[self._finished(columns)]

    @staticmethod
    def _finished(columns: dict[str, Any]) -> npt.NDArray[np.bool_]:
        return np.array([outcome == "finished" for outcome in columns["outcome"]], dtype=bool)

    def _seen_in_lengths(self) -> str:
        return f"{_spread('Prompts', self._prompts())}; {_spread('outputs', self._outputs())} tokens"

    # --- latency -----------------------------------------------------------------------------------------------

    def latency(self, width_in: float = WIDE_IN) -> Figure:
        """How many finished requests had their first token, and all of their tokens, within a time."""
        figure = theme.new_figure(width_in, 3.8)
        axes = figure.subplots()
        theme.dress(axes, "share of finished requests (%)", "time since arrival (s)")
        headline(axes, self._seen_in_latency(), width_in)
        columns: dict[str, Any] = self._result.request_table.columns()
        finished = self._finished(columns)
        if not finished.any():
            theme.say(axes, "no request finished")
            return figure
        arrive = _ints(columns["arrive_ns"])[finished]
        first = (_ints(columns["first_token_ns"])[finished] - arrive) / 1e9
        whole = (_ints(columns["finish_ns"])[finished] - arrive) / 1e9
        low, high = min(first.min(), whole.min()), max(first.max(), whole.max())
        if low > 0 and high / low > 20:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
            axes.xaxis.set_minor_formatter(lambda *_: "")
            room = (high / low) ** (0.9 / width_in)
            axes.set_xlim(low / room, high * room)
        else:
            room_s = (high - low or max(high, 1e-3)) * 1.6 / width_in
            axes.set_xlim(max(0.0, low - room_s), high + room_s)
        _share_within(axes, first, "first token", theme.BLUE, left=True)
        _share_within(axes, whole, "whole answer", theme.ORANGE, left=False)
        axes.set_ylim(0, 108)
        _legend(figure, axes, 2)
        return figure

    def _seen_in_latency(self) -> str:
        summary = self._result.summary
        if summary["ttft_s_p50"] is None:
            return "No request finished, so there is no latency to show"
        half, most = duration(summary["ttft_s_p50"]), duration(summary["ttft_s_p99"])
        return f"First token: half of the requests within {half}, 99 % within {most}"


def thin(time: Floats, values: Floats, columns: int) -> Indices:
    """Which points to draw: all of a short series, else the first, lowest and highest of each of `columns` equal
    stretches of time, and the last, so that no spike is lost."""
    n = len(time)
    if n <= 3 * columns:
        return np.arange(n)
    edges = np.searchsorted(time, np.linspace(time[0], time[-1], columns + 1)[1:-1])
    kept = [0, n - 1]
    for start, stop in zip([0, *edges], [*edges, n], strict=True):
        if stop > start:
            part = values[start:stop]
            kept += [start, start + int(part.argmin()), start + int(part.argmax())]
    return np.unique(np.array(kept, dtype=np.int64))


def hold(time: Floats, jumps: npt.NDArray[np.bool_], *series: Floats) -> tuple[Floats, ...]:
    """Time and series with a vertical edge, instead of a slope, in front of each point whose entry in `jumps` (one
    shorter than `time`) is true: the value before it holds until then."""
    at = np.flatnonzero(jumps) + 1
    return np.insert(time, at, time[at]), *(np.insert(values, at, values[at - 1]) for values in series)


def _share_within(axes: Axes, seconds: Floats, label: str, colour: str, *, left: bool) -> None:
    """An empirical distribution function with its median and 99th percentile marked, on the left of it or right."""
    shares = np.linspace(0, 100, min(ECDF_POINTS, len(seconds)) + 1)
    ordered = np.sort(seconds)
    times = ordered[np.clip(np.ceil(shares / 100 * len(seconds)).astype(int) - 1, 0, None)]
    axes.step(times, shares, where="post", color=colour, linewidth=1.6, label=label)
    # The empty side of the earlier curve is its left, that of the later one its right.
    for share in (50, 99):
        at = float(np.percentile(seconds, share))
        axes.plot([at], [share], marker="o", markersize=5, color=colour)
        axes.annotate(
            f"p{share} {duration(at)}",
            (at, share),
            textcoords="offset points",
            xytext=(-6, 2) if left else (6, -3),
            ha="right" if left else "left",
            va="bottom" if left else "top",
            fontsize=8.5,
            color=theme.INK,
        )


def _histogram(axes: Axes, tokens: Indices, colour: str, empty: str, in_view: Sequence[int] = ()) -> None:
    if not len(tokens):
        theme.say(axes, empty)
        return
    low, high = min([int(tokens.min()), *in_view]), max([int(tokens.max()), *in_view])
    if high - low < 40:
        edges = np.arange(low, high + 2) - 0.5
    elif low > 0 and high / low > 200:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.xaxis.set_minor_formatter(lambda *_: "")
        edges = np.geomspace(low, high + 1, 41)
    else:
        edges = np.linspace(low, high + 1, 41)
    axes.hist(tokens, bins=list(edges), color=colour, edgecolor="white", linewidth=0.4)
    if high - low < 4:
        middle = (low + high) / 2
        axes.set_xlim(max(-0.5, middle - 4), middle + 4)
    if axes.get_xscale() == "linear":
        whole_numbers(axes, x=True)
    whole_numbers(axes)


def _draw_limit(axes: Axes, tokens: int) -> None:
    """Prompts from here on are refused."""
    low, high = axes.get_xlim()
    room = 0.03 * (high - low)
    axes.set_xlim(min(low, tokens - room), max(high, tokens + room))
    axes.set_ylim(0, axes.get_ylim()[1] * 1.12)
    axes.axvline(tokens, color=theme.INK, linewidth=1.2, linestyle=(0, (4, 2)))
    axes.text(
        tokens,
        1.0,
        f" refused from {tokens:,} on ",
        transform=axes.get_xaxis_transform(),
        va="top",
        ha="left" if tokens < sum(axes.get_xlim()) / 2 else "right",
        fontsize=9,
        color=theme.INK,
    ).set_in_layout(False)


def _spread(what: str, tokens: Indices) -> str:
    if not len(tokens):
        return f"{what}: none"
    return f"{what}: median {np.median(tokens):,.0f}, longest {tokens.max():,}"


def _legend(figure: Figure, axes: Axes, columns: int) -> None:
    """Below everything, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=columns,
            frameon=False,
            fontsize=9,
            labelcolor=theme.INK,
        )


def headline(axes: Axes, text: str, width_in: float) -> None:
    """Left-aligned, broken into lines where it would not fit, never between a number and its unit."""
    place = axes.get_subplotspec()
    share = 1.0 if place is None else 1.0 / place.get_gridspec().ncols
    most = int((width_in * share - 0.9) / TITLE_CHARACTER_IN)
    together = re.sub(r"(?<=\d) (?=%|(?:us|ms|s|min|h|days)\b)", "\N{NO-BREAK SPACE}", text)
    lines = "\n".join(textwrap.wrap(together, most))
    axes.set_title(lines, loc="left", fontsize=11, color=theme.INK, fontweight="bold", pad=12)


def whole_numbers(*many: Axes, x: bool = False) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for axes in many:
        axis = axes.xaxis if x else axes.yaxis
        axis.set_major_locator(MaxNLocator(nbins=6 if x else "auto", integer=True))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _column(rows: list[TimelineRow], name: str) -> Floats:
    return np.array([getattr(row, name) for row in rows], dtype=np.float64)


def _ints(column: object) -> Indices:
    return np.asarray(column, dtype=np.int64)


def time_unit(end_ns: float) -> tuple[float, str]:
    """Nanoseconds a unit, and its name."""
    seconds = end_ns / 1e9
    if seconds < 1:
        return 1e6, "ms"
    if seconds < 1200:
        return 1e9, "s"
    return (60e9, "min") if seconds < 4 * 3600 else (3600e9, "h")
