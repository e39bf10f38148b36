"""Writes bursty-azure.csv, a made-up trace in the form of the Azure LLM inference traces: a quiet stream of requests
with bursts on top. The same bytes every time.

Run it with plain Python: python scenarios/data/make_bursty_azure.py
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

Draw = Callable[[], float]

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
START = datetime(2024, 1, 15, 9, 0, 0)
SPAN_S = 240.0
QUIET_RATE_PER_S = 0.6
BURSTS = 6
BURST_REQUESTS = 45
BURST_RATE_PER_S = 60.0
TICKS_PER_S = 10**7
"""The traces tell time in units of 100 ns."""


def main() -> None:
    """Write the trace beside this file."""
    Path(__file__).with_name("bursty-azure.csv").write_text(trace(), encoding="ascii", newline="\n")


def trace() -> str:
    """The whole file: a header and about 400 rows in order of time."""
    # random() is the one method whose numbers are promised to stay; everything else is derived from it here.
    draw = random.Random(20240115).random
    times_s = [0.0, *arrivals_s(draw, 0.0, SPAN_S, QUIET_RATE_PER_S)]
    for burst in range(BURSTS):
        begin_s = (burst + draw()) * SPAN_S / BURSTS
        times_s += arrivals_s(draw, begin_s, math.inf, BURST_RATE_PER_S, BURST_REQUESTS)
    rows = (f"{clock(time_s)},{skewed(draw, 60, 3000)},{skewed(draw, 10, 700)}" for time_s in sorted(times_s))
    return "\n".join((HEADER, *rows)) + "\n"


def arrivals_s(draw: Draw, begin_s: float, end_s: float, rate_per_s: float, most: int = 10**6) -> list[float]:
    """Poisson arrivals in begin_s..end_s, at most that many."""
    times_s: list[float] = []
    while len(times_s) < most and (begin_s := begin_s - math.log(1.0 - draw()) / rate_per_s) < end_s:
        times_s.append(begin_s)
    return times_s


def skewed(draw: Draw, low: int, high: int) -> int:
    """A length whose logarithm is uniform: many short ones, a few long ones."""
    return int(low * (high / low) ** draw())


def clock(time_s: float) -> str:
    """The wall clock at time_s seconds after the start, to 100 ns."""
    seconds, ticks = divmod(round(time_s * TICKS_PER_S), TICKS_PER_S)
    return f"{START + timedelta(seconds=seconds)}.{ticks:07d}"


if __name__ == "__main__":
    main()
