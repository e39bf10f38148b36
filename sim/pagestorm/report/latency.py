"""Latency as numbers: percentiles of finished requests, those that lost their memory once apart from the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pagestorm.report.words import duration

if TYPE_CHECKING:
    from pagestorm.runs import Result

PERCENTILES = (50, 90, 99, 100)
HEADS = ("", "requests", "median", "90 %", "99 %", "longest")

Seconds = npt.NDArray[np.float64]
Chosen = npt.NDArray[np.bool_]


def latency_rows(result: Result) -> list[tuple[str, ...]]:
    """Rows under `HEADS`, times in words; empty when no request finished."""
    columns: dict[str, Any] = result.request_table.columns()
    finished = np.array([outcome == "finished" for outcome in columns["outcome"]], dtype=bool)
    if not finished.any():
        return []
    arrive, admit, first, end = (
        np.asarray(columns[f"{name}_ns"], dtype=np.float64) / 1e9
        for name in ("arrive", "admit", "first_token", "finish")
    )
    tokens = np.asarray(columns["output_tokens"], dtype=np.float64)
    taken = (np.asarray(columns["retractions"]) + np.asarray(columns["preemptions"])) > 0
    several = finished & (tokens > 1)
    rows = [
        _row("wait until admitted", (admit - arrive)[finished]),
        _row("first token", (first - arrive)[finished]),
        _row("between tokens, on average", ((end - first)[several] / (tokens - 1)[several])),
        _row("whole answer", (end - arrive)[finished]),
    ]
    if (finished & taken).any() and (finished & ~taken).any():
        rows.append(_row("whole answer, never taken back", (end - arrive)[finished & ~taken]))
        rows.append(_row("whole answer, taken back at least once", (end - arrive)[finished & taken]))
    return [row for row in rows if row]


def _row(title: str, seconds: Seconds) -> tuple[str, ...]:
    if not len(seconds):
        return ()
    return title, f"{len(seconds):,}", *(duration(float(np.percentile(seconds, share))) for share in PERCENTILES)
