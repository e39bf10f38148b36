"""How large report.html of a 20,000-request run is, and how long headless Chromium takes until it is drawn."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from bench.table import Row
from pagestorm.diagnosis import diagnose
from pagestorm.report.html import report_html
from pagestorm.runs import run
from pagestorm.scenario import load

REQUESTS = 20_000
MOST_BYTES, MOST_S = 3_000_000, 2.0
"""What the report promises."""
DRAWN = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"


def rows() -> list[Row]:
    """One row a screen; seconds are the longest of three, and None where there is no Chromium."""
    ran = run(load("first-retraction", [f"workload.num_requests={REQUESTS}", "expect={}"]))
    started = time.perf_counter()
    page = report_html(ran, command="pagestorm run", diagnosis=diagnose(ran.raw_events, ran.summary, ran.scenario))
    made_s = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        path.write_text(page, "utf-8")
        return [
            {
                "requests": REQUESTS,
                "width_px": width,
                "made_s": made_s,
                "report_bytes": path.stat().st_size,
                "most_bytes": MOST_BYTES,
                "opened_s": _opened_s(path, width),
                "most_s": MOST_S,
            }
            for width in (1200, 390)
        ]


def _opened_s(page: Path, width: int) -> float | None:
    # The tests' browser; imported here because the other timings need none of it.
    from tests.report.browser import browser, chromium

    program = chromium()
    if program is None:
        return None
    seconds = []
    with tempfile.TemporaryDirectory() as home, browser(program, Path(home)) as tab:
        for _ in range(3):
            started = time.perf_counter()
            tab.open(page, width=width)
            tab.ask(DRAWN)
            seconds.append(time.perf_counter() - started)
    return max(seconds)
