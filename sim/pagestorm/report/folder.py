"""Everything that `run --out DIR` leaves in DIR."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pagestorm.diagnosis import Diagnosis, diagnose
from pagestorm.report.html import report_html
from pagestorm.report.output import OutputFolder, writing
from pagestorm.report.plots import Plots
from pagestorm.report.tables import write_events, write_requests, write_summary, write_timeline
from pagestorm.wholefile import write_whole

if TYPE_CHECKING:
    from pagestorm.runs import Result

EVENTS, REQUESTS, TIMELINE = "events.parquet", "requests.parquet", "timeline.parquet"
PICTURES = ("plots/timeline.png", "plots/lengths.png", "plots/latency.png")
FILES = ("summary.json", "scenario.yaml", "report.html", EVENTS, REQUESTS, TIMELINE, *PICTURES)
"""What a run may leave; a file of an earlier run that this one does not write is removed."""


def prepare(out: Path) -> None:
    """Find out before a long run, not after it, that nothing can be written there. Raises `ScenarioError`."""
    open_folder(out).discard()


def open_folder(out: Path) -> OutputFolder:
    """A folder for `write_folder`, opened before the run so that events can be streamed into it."""
    return OutputFolder(out, FILES)


def write_folder(
    result: Result,
    out: Path,
    *,
    command: str,
    diagnosis: Diagnosis | None = None,
    folder: OutputFolder | None = None,
    tables: bool = True,
) -> list[Path]:
    """Write the folder of a run; returns its files.

    A new folder appears whole; in one that exists each file does. `command` is the line that made it. `tables` is
    False for a run that kept summary and digest only: then there are no tables and no pictures. A `folder` from
    `open_folder` may already hold events.parquet, streamed by `ParquetEvents(folder.path(EVENTS))`; `diagnosis` was
    then fed by the same run. Raises `ScenarioError` about --out, with nothing half-written left.
    """
    from pagestorm.scenario import to_yaml

    found = diagnosis or diagnose(result.raw_events, result.summary, result.scenario)
    with folder or open_folder(out) as target:
        write_summary(result.summary, target.path("summary.json"))
        _write_text(target, "scenario.yaml", to_yaml(result.scenario))
        if tables:
            if not target.has(EVENTS):
                write_events(result.raw_events, target.path(EVENTS))
            write_requests(result, target.path(REQUESTS))
            write_timeline(result, target.path(TIMELINE))
            with writing(out / "plots"):
                Plots(result, found).save(target.path(PICTURES[0]).parent)
        page = report_html(result, command=command, diagnosis=found, pictures=tables, tables=tables)
        _write_text(target, "report.html", page)
        return target.commit()


def _write_text(target: OutputFolder, name: str, text: str) -> None:
    with writing(target.out / name):
        write_whole(target.path(name), text.encode("utf-8", "replace"))
