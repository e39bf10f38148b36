"""The tables of a run as files: summary.json, events.parquet, requests.parquet, timeline.parquet.

Each appears whole or not at all, and what the operating system refuses is a `ScenarioError` about --out.
"""

from __future__ import annotations

import contextlib
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
    import pyarrow as pa

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
    return _write_table(_table(result.request_table.columns()), path)


def write_timeline(result: Result, path: Path) -> Path:
    """The pool over time (`pagestorm.record.TimelineRow`)."""
    return _write_table(_table(_columns(result.timeline_rows, TimelineRow._fields)), path)


class ParquetEvents:
    """A sink that writes events.parquet in row groups, so that a long record never lies in memory.

    The file has its name only once `close` was called; `discard` forgets it. Raises `ScenarioError` when the disk
    refuses, with nothing left behind.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet as pq

        self._path = path
        self._pending: list[RawEvent] = []
        with writing(path):
            handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        self._temporary = Path(name)
        self._file = os.fdopen(handle, "wb")
        self._writer: Any = pq.ParquetWriter(self._file, _schema(Event._fields), compression="zstd")

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
        if self._pending:
            self._write_group(self._pending)
        try:
            with writing(self._path):
                self._writer.close()
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
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
        # Its destructor would write the footer, into a file that is gone or onto a disk that is full.
        self._writer.is_open = False
        with contextlib.suppress(OSError):
            self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _write_group(self, events: list[RawEvent]) -> None:
        try:
            with writing(self._path):
                self._writer.write_table(_table(_columns(events, Event._fields)))
        except BaseException:
            self.discard()
            raise


def _columns(rows: Sequence[tuple[Any, ...]], names: Sequence[str]) -> dict[str, Any]:
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(names)
    return dict(zip(names, columns, strict=True))


def _schema(names: Sequence[str]) -> pa.Schema:
    import pyarrow as pa

    def kind(name: str) -> pa.DataType:
        if name in TEXT_COLUMNS:
            return pa.string()
        return pa.float64() if name in FLOAT_COLUMNS else pa.int64()

    return pa.schema([(name, kind(name)) for name in names])


def _table(columns: Mapping[str, Any]) -> pa.Table:
    import pyarrow as pa

    schema = _schema(list(columns))
    return pa.table([pa.array(columns[field.name], type=field.type) for field in schema], schema=schema)


def _write_table(table: pa.Table, path: Path) -> Path:
    import pyarrow.parquet as pq

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            pq.write_table(table, file, compression="zstd")

    with writing(path):
        return write_whole(path, write)
