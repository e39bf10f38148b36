"""How far a run is, in one line that fits a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestorm.runs import Progress

BAR_FORMAT = "{percentage:3.0f}% |{bar:4}| {n_fmt}/{total_fmt} req, {remaining} left{postfix}"
"""What tqdm fills in, short enough for 80 columns; the time left comes from the pace of the requests."""


def progress_words(progress: Progress, elapsed_s: float) -> str:
    """Simulated time, and events by second of wall clock."""
    pace = progress.events / elapsed_s if elapsed_s > 0 else 0.0
    return f"{progress.simulated_s:,.0f} s simulated, {pace:,.0f} events/s"
