"""DIR after `run --out DIR`: whole, or as it was."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pandas as pd
import pytest

from pagestorm.diagnosis import Diagnosis
from pagestorm.errors import ScenarioError
from pagestorm.report import folder
from pagestorm.report.folder import EVENTS, FILES, open_folder, prepare, write_folder
from pagestorm.report.tables import ParquetEvents
from pagestorm.runs import run
from pagestorm.scenario import load, resolve
from tests.report.cases import result, scenario

COMMAND = "pagestorm run calm --out x"


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_new_folder_has_every_file_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "first"
    written = write_folder(result("calm"), out, command=COMMAND)
    assert sorted(written) == sorted(out / name for name in FILES)
    assert tree(out) == sorted([*FILES, "plots"])
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["first"]
    assert json.loads((out / "summary.json").read_text()) == result("calm").summary


def test_the_scenario_written_runs_again_to_the_same_digest(tmp_path: Path) -> None:
    write_folder(result("retracted"), tmp_path / "out", command=COMMAND)
    again = run(load(tmp_path / "out" / "scenario.yaml"))
    assert again.summary["events_digest"] == result("retracted").summary["events_digest"]


def test_a_folder_that_exists_keeps_what_is_not_ours_and_loses_what_is_stale(tmp_path: Path) -> None:
    write_folder(result("calm"), tmp_path, command=COMMAND)
    (tmp_path / "notes.txt").write_text("mine")
    ran = run(scenario("retracted"), tables=False, events=False)
    written = write_folder(ran, tmp_path, command=COMMAND, tables=False)
    assert sorted(path.name for path in written) == ["report.html", "scenario.yaml", "summary.json"]
    assert tree(tmp_path) == ["notes.txt", "plots", "report.html", "scenario.yaml", "summary.json"]
    assert json.loads((tmp_path / "summary.json").read_text())["name"] == "retracted"


def test_a_folder_has_the_permissions_of_any_new_folder(tmp_path: Path) -> None:
    write_folder(result("one token"), tmp_path / "out", command=COMMAND)
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_events_can_be_streamed_before_the_rest_is_written(tmp_path: Path) -> None:
    wanted = resolve(scenario("retracted"))
    found = Diagnosis.of(wanted)
    place = open_folder(tmp_path / "out")
    ran = run(wanted, sinks=[ParquetEvents(place.path(EVENTS)), found])
    kept, ran.raw_events = ran.raw_events, []
    write_folder(ran, tmp_path / "out", command=COMMAND, diagnosis=found, folder=place)
    events = pd.read_parquet(tmp_path / "out" / EVENTS)
    assert list(events.itertuples(index=False, name=None)) == kept
    assert found.worst_bursts[0].law in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize("existing", [True, False])
def test_a_failure_in_the_middle_leaves_everything_as_it_was(
    existing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "deep" / "out"
    if existing:
        write_folder(result("calm"), out, command=COMMAND)
    before = tree(tmp_path)

    def full(*_: object, **__: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(folder, "report_html", full)
    with pytest.raises(KeyboardInterrupt):
        write_folder(result("retracted"), out, command=COMMAND)
    assert tree(tmp_path) == before
    if existing:
        assert json.loads((out / "summary.json").read_text())["name"] == "calm"


def test_a_file_in_the_way_is_an_error_about_out_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ScenarioError, match="cannot write") as caught:
            prepare(out)
        assert caught.value.key == "--out"
    assert tree(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_an_error_about_out(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    with pytest.raises(ScenarioError, match="Permission denied"):
        prepare(locked / "out")


def test_preparing_leaves_nothing_behind(tmp_path: Path) -> None:
    prepare(tmp_path / "a" / "b")
    prepare(tmp_path)
    assert tree(tmp_path) == []
