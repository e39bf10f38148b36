"""The tables on disk: complete, typed, whole or absent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fastparquet
import numpy as np
import pandas as pd
import pytest

from pagestorm.errors import ScenarioError
from pagestorm.events import RawEvent
from pagestorm.report import tables
from pagestorm.report.tables import (
    ParquetEvents,
    summary_text,
    write_events,
    write_requests,
    write_summary,
    write_timeline,
)
from pagestorm.runs import run
from pagestorm.summary import SUMMARY_KEYS
from tests.report.cases import CASES, result, scenario


@pytest.mark.parametrize("name", CASES)
def test_every_table_reads_back_as_the_run_has_it(name: str, tmp_path: Path) -> None:
    ran = result(name)
    events = pd.read_parquet(write_events(ran.raw_events, tmp_path / "events.parquet"))
    requests = pd.read_parquet(write_requests(ran, tmp_path / "requests.parquet"))
    timeline = pd.read_parquet(write_timeline(ran, tmp_path / "timeline.parquet"))
    assert list(events.itertuples(index=False, name=None)) == ran.raw_events
    as_kept = requests.astype({"outcome": "str", "reason": "str"})
    assert as_kept.equals(ran.requests[list(requests.columns)])
    assert list(timeline.itertuples(index=False, name=None)) == [tuple(row) for row in ran.timeline_rows]
    assert events.dtypes["time_ns"] == np.int64
    assert timeline.dtypes["new_token_ratio"] == np.float64
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"events.parquet", "requests.parquet", "timeline.parquet"}


def test_the_summary_is_plain_ascii_with_every_key(tmp_path: Path) -> None:
    path = write_summary(result("evil").summary, tmp_path / "summary.json")
    text = path.read_text(encoding="ascii")
    assert text == summary_text(result("evil").summary)
    assert json.loads(text) == result("evil").summary
    assert set(SUMMARY_KEYS) <= set(json.loads(text))


def test_events_streamed_by_a_run_are_the_events_that_it_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROW_GROUP_EVENTS", 100)
    path = tmp_path / "events.parquet"
    ran = run(scenario("retracted"), sinks=[ParquetEvents(path)])
    assert list(pd.read_parquet(path).itertuples(index=False, name=None)) == ran.raw_events
    assert len(fastparquet.ParquetFile(str(path)).row_groups) > 1


def test_a_stream_has_no_name_until_it_is_closed_and_leaves_nothing_when_it_is_discarded(tmp_path: Path) -> None:
    event: RawEvent = (0, 0, -1, "arrive", 0, 5, -1, 10, 0, 0, 1, "full", "")
    path = tmp_path / "events.parquet"
    sink = ParquetEvents(path)
    sink.write([event] * 10)
    assert not path.exists()
    sink.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_table_replaces_an_older_one_and_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    path = tmp_path / "events.parquet"
    path.write_text("older")
    write_events(result("calm").raw_events, path)
    plain = tmp_path / "plain"
    plain.touch()
    assert pd.read_parquet(path).shape[0] == len(result("calm").raw_events)
    assert path.stat().st_mode == plain.stat().st_mode


def test_a_folder_that_is_not_there_is_an_error_about_out(tmp_path: Path) -> None:
    gone = tmp_path / "gone" / "events.parquet"
    with pytest.raises(ScenarioError, match="No such file") as caught:
        ParquetEvents(gone)
    assert caught.value.key == "--out"
    with pytest.raises(ScenarioError, match="cannot write"):
        write_requests(result("calm"), gone)


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from pagestorm.errors import ScenarioError
from pagestorm.report.tables import ParquetEvents, write_summary
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
folder = Path(sys.argv[1])
sink = ParquetEvents(folder / "events.parquet")
try:
    for i in range(300_000):
        sink.write([(i * 7919 % 10**9, i, i, "arrive", i, i * 31 % 977, -1, i % 613, 0, 0, 1, "full", str(i * i))])
    sink.close()
except ScenarioError as error:
    print(error.key, error)
try:
    write_summary({"name": "x" * 5000}, folder / "summary.json")
except ScenarioError as error:
    print(error.key, error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits are a POSIX matter")
def test_a_disk_that_refuses_more_leaves_nothing_half_written(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    lines = done.stdout.splitlines()
    assert [line.split(" ")[0] for line in lines] == ["--out", "--out"]
    assert all("File too large" in line and str(tmp_path) in line for line in lines)
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []
