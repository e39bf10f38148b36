"""The tables of a run as files: summary.json, events.parquet, requests.parquet, timeline.parquet.

Each appears whole or not at all, and what the operating system refuses is a `ScenarioError` about --out.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagestorm.events import Event, RawEvent
from pagestorm.record import TimelineRow
from pagestorm.report.output import writing
from pagestorm.wholefile import write_whole

if TYPE_CHECKING:
    from pagestorm.runs import Result

ROW_GROUP_EVENTS = 65_536
TEXT_COLUMNS = {"kind", "pool", "detail", "outcome", "reason"}
FLOAT_COLUMNS = {"new_token_ratio"}


def summary_text(summary: Mapping[str, Any]) -> str:
    """summary.json, as `--json` prints it too: plain ASCII, so that any terminal and any locale can take it."""
    return json.dumps(summary, indent=2, allow_nan=False) + "\n"


def write_summary(summary: Mapping[str, Any], path: Path) -> Path:
    """Every key of the summary, null where it does not apply."""
    with writing(path):
        return write_whole(path, summary_text(summary))


def write_events(events: Sequence[RawEvent], path: Path) -> Path:
    """Events that were kept in memory; `ParquetEvents` writes them while a run goes on."""
    sink = ParquetEvents(path)
    sink.write(events)
    sink.close()
    return path


def write_requests(result: Result, path: Path) -> Path:
    """One row a request that arrived (`pagestorm.record.RequestRow`)."""
    return _write_table(result.request_table.columns(), path)


def write_timeline(result: Result, path: Path) -> Path:
    """The pool over time (`pagestorm.record.TimelineRow`)."""
    return _write_table(_columns(result.timeline_rows, TimelineRow._fields), path)


class ParquetEvents:
    """A sink that writes events.parquet in row groups, so that a long record never lies in memory.

    The file has its name only once `close` was called; `discard` forgets it. Raises `ScenarioError` when the disk
    refuses, with nothing left behind.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: list[RawEvent] = []
        self._begun = False
        with writing(path):
            handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            os.close(handle)
        self._temporary = Path(name)

    def write(self, events: Sequence[RawEvent]) -> None:
        """Take a chunk of the record."""
        pending = self._pending
        pending.extend(events)
        whole = len(pending) // ROW_GROUP_EVENTS * ROW_GROUP_EVENTS
        for at in range(0, whole, ROW_GROUP_EVENTS):
            self._write_group(pending[at : at + ROW_GROUP_EVENTS])
        del pending[:whole]

    def close(self) -> None:
        """Write what is pending and give the file its name."""
        if self._pending or not self._begun:
            self._write_group(self._pending)
        try:
            with writing(self._path):
                with self._temporary.open("rb") as written:
                    os.fsync(written.fileno())
                mask = os.umask(0)
                os.umask(mask)
                self._temporary.chmod(0o666 & ~mask)
                self._temporary.replace(self._path)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Forget the file."""
        self._pending = []
        self._temporary.unlink(missing_ok=True)

    def _write_group(self, events: list[RawEvent]) -> None:
        try:
            with writing(self._path):
                _write_frame(_columns(events, Event._fields), self._temporary, append=self._begun)
        except BaseException:
            self.discard()
            raise
        self._begun = True


def _columns(rows: Sequence[tuple[Any, ...]], names: Sequence[str]) -> dict[str, Any]:
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(names)
    return dict(zip(names, columns, strict=True))


def _write_frame(columns: Mapping[str, Any], path: Path, *, append: bool = False) -> None:
    """One row group. Text is UTF-8; everything else whole numbers or floats of 64 bits, without nulls."""
    import fastparquet
    import pandas as pd

    def kind(name: str) -> str:
        if name in TEXT_COLUMNS:
            return "object"
        return "float64" if name in FLOAT_COLUMNS else "int64"

    frame = pd.DataFrame({name: pd.Series(list(values), dtype=kind(name)) for name, values in columns.items()})
    fastparquet.write(
        str(path),
        frame,
        compression="ZSTD",
        write_index=False,
        has_nulls=False,
        object_encoding={name: "utf8" for name in columns if name in TEXT_COLUMNS},
        append=append,
    )


def _write_table(columns: Mapping[str, Any], path: Path) -> Path:
    with writing(path):
        return write_whole(path, lambda temporary: _write_frame(columns, temporary))
