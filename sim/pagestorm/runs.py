"""One run from a scenario to its result: pools, engine and workload put together, the summary drawn from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from pagestorm import workload as workloads
from pagestorm.checks import Conservation, check_drained
from pagestorm.engine.machine import Machine
from pagestorm.engine.request import Request
from pagestorm.events import FS_PER_S, Event, EventLog, KeepEvents, RawEvent, Sink
from pagestorm.record import Latencies, RequestTable, TimelineRow, TimelineRows
from pagestorm.scenario import Scenario, resolve
from pagestorm.scenario.schema import kind_of
from pagestorm.servers import open_engine, own_figures, shares_pages
from pagestorm.simulate import Simulation
from pagestorm.steptime import build as build_steptime
from pagestorm.summary import SUMMARY_KEYS

if TYPE_CHECKING:
    import pandas as pd

    from pagestorm.report.plots import Plots


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: what a progress bar shows."""

    simulated_s: float
    ended: int
    requests: int
    events: int


class _StopRun(Exception):
    """Leaves the simulation between two rounds."""


@dataclass
class Result:
    """What a run gives. The tables are DataFrames, made when first asked for."""

    scenario: Scenario
    """Every default filled in; running it again gives the same `events_digest`."""
    summary: dict[str, Any]
    raw_events: list[RawEvent] = field(default_factory=list, repr=False)
    request_table: RequestTable = field(default_factory=RequestTable, repr=False)
    timeline_rows: list[TimelineRow] = field(default_factory=list, repr=False)
    timeline_every: int = 1
    interrupted: bool = False

    @cached_property
    def events(self) -> pd.DataFrame:
        """One row an event (`pagestorm.events.Event`)."""
        import pandas as pd

        return pd.DataFrame(self.raw_events, columns=list(Event._fields))

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row a request that arrived (`pagestorm.record.RequestRow`)."""
        import pandas as pd

        return pd.DataFrame(self.request_table.columns())

    @cached_property
    def timeline(self) -> pd.DataFrame:
        """The pool over time (`pagestorm.record.TimelineRow`)."""
        import pandas as pd

        return pd.DataFrame(self.timeline_rows, columns=list(TimelineRow._fields))

    @property
    def plot(self) -> Plots:
        """Pictures of this result: `result.plot.timeline()` and others, each a matplotlib figure."""
        from pagestorm.report.plots import Plots

        return Plots(self)


def pool_names(pools: Sequence[str]) -> list[str]:
    """`sim` means counting when alone and paged beside another."""
    plain = "counting" if len(pools) == 1 else "paged"
    return [plain if name == "sim" else name for name in pools]


def run(
    scenario: Scenario,
    pools: Sequence[str] | None = None,
    *,
    device: str = "auto",
    payload: str = "stamp",
    step: bool = False,
    tables: bool = True,
    events: bool = True,
    sinks: Iterable[Sink] = (),
    progress: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Result:
    """Simulate a scenario.

    `pools` overrides the scenario's; with more than one they run in lockstep and a difference raises `Divergence`.
    `step` forbids leaping. `tables` keeps requests and timeline in memory, `events` the record; with neither only the
    summary and the digest remain, and what `sinks` (readers of the record) made of it. `stop` is asked now and then;
    once it says True the run ends where it is and the result is marked `interrupted`. Raises `ScenarioError`,
    `MemoryRefused`, `Divergence`, `PoolCorruption`, `InvariantBroken`.
    """
    started = time.perf_counter()
    scenario = resolve(scenario)
    names = pool_names(pools or scenario.pools)
    kept = KeepEvents()
    readers: list[Sink] = [*sinks]
    if events:
        readers.append(kept)
    if (readers or len(names) > 1) and not shares_pages(scenario.engine):
        readers.append(Conservation(scenario.engine.pool_pages, scenario.engine.page_size))
    log = EventLog(readers)
    timeline = TimelineRows() if tables else None
    engine = open_engine(
        scenario, names, build_steptime(scenario), log, device=device, payload=payload, step=step, timeline=timeline
    )
    load = workloads.stream(scenario)
    latencies, table = Latencies(), RequestTable()
    ended = 0

    def on_end(request: Request) -> None:
        nonlocal ended
        ended += 1
        latencies.add(request)
        if tables:
            table.add(request)

    def on_tick() -> None:
        if stop is not None and stop():
            raise _StopRun
        if progress is not None:
            progress(Progress(engine.now_fs / FS_PER_S, ended, load.count, log.count))

    simulation = Simulation(engine, load, on_end, on_tick)
    interrupted = False
    try:
        simulation.run()
    except _StopRun:
        interrupted = True
    log.close()
    if not interrupted:
        check_drained(engine)
    if tables:
        for request in engine.unserved():
            table.add(request)
    summary = summarise(scenario, engine, log, latencies, names)
    summary["payload"] = payload if "torch" in names else None
    summary["wall_s"] = time.perf_counter() - started
    return Result(
        scenario,
        summary,
        kept.events,
        table,
        timeline.rows if timeline else [],
        timeline.every if timeline else 1,
        interrupted,
    )


def summarise(
    scenario: Scenario, engine: Machine, log: EventLog, latencies: Latencies, names: list[str]
) -> dict[str, Any]:
    """summary.json, every key of it; null where a key does not apply."""
    counts = engine.counts
    simulated_s = engine.now_fs / FS_PER_S
    ttft, e2e = latencies.ttft_ns, latencies.e2e_ns
    known: dict[str, Any] = {
        "name": scenario.name,
        "seed": scenario.seed,
        "engine": kind_of(scenario.engine),
        "outcome": engine.outcome or "completed",
        "error": engine.error or None,
        "requests": counts.requests,
        "finished": counts.finished,
        "aborted": counts.aborted,
        "rejected": counts.rejected,
        "unserved": counts.requests - counts.finished - counts.aborted - counts.rejected,
        "decode_oom": 0,
        "prefill_oom": 0,
        "evicted_tokens": engine.evicted_tokens,
        "recomputed_tokens": counts.recomputed_tokens,
        "cached_tokens": 0,
        "generated_tokens": counts.generated_tokens,
        "engine_steps": engine.step,
        "leaps": counts.leaps,
        "prefill_batches": counts.prefill_batches,
        "decode_steps": counts.decode_steps,
        "simulated_s": simulated_s,
        "peak_used_pages": counts.peak_used_pages,
        "pool_pages": engine.total_pages,
        "pool_tokens": scenario.engine.pool_tokens,
        "peak_running": counts.peak_running,
        "mean_running": counts.running_fs / engine.now_fs if engine.now_fs else 0.0,
        "peak_waiting": counts.peak_waiting,
        "ttft_s_p50": _percentile_s(ttft, 50),
        "ttft_s_p99": _percentile_s(ttft, 99),
        "e2e_s_p50": _percentile_s(e2e, 50),
        "e2e_s_p99": _percentile_s(e2e, 99),
        "goodput_requests_per_s": counts.finished / simulated_s if simulated_s else None,
        "events_digest": log.digest,
        "pools": names,
        "divergences": 0 if len(names) > 1 else None,
        **own_figures(counts),
    }
    return {key: known.get(key) for key in SUMMARY_KEYS}


def _percentile_s(times_ns: np.ndarray[Any, np.dtype[np.int64]], percent: int) -> float | None:
    """Linear between the neighbouring order statistics, in seconds."""
    return float(np.percentile(times_ns, percent)) / 1e9 if len(times_ns) else None
