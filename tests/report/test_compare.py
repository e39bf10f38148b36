"""compare-runs: equal runs are equal, the first difference is the first, and a bad folder is a usage error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pagestorm import cli
from pagestorm.report import tables
from pagestorm.report.compare import compare_runs, compared_text
from pagestorm.report.tables import write_events, write_summary
from pagestorm.scenario import to_yaml
from tests.report.cases import EVIL, result


def left(name: str, folder: Path) -> Path:
    """What a comparison reads of the folder of a run."""
    folder.mkdir()
    write_summary(result(name).summary, folder / "summary.json")
    write_events(result(name).raw_events, folder / "events.parquet")
    (folder / "scenario.yaml").write_text(to_yaml(result(name).scenario), "utf-8")
    return folder


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return left("retracted", tmp_path / "a"), left("retracted", tmp_path / "b")


def compared(capsys: pytest.CaptureFixture[str], a: Path, b: Path, *more: str) -> tuple[int, str]:
    code = cli.invoke(["compare-runs", str(a), str(b), *more])
    return code, capsys.readouterr().out


def test_the_same_run_twice_is_equal_although_it_took_another_time(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    again = json.loads((pair[1] / "summary.json").read_text())
    again["wall_s"] += 1
    (pair[1] / "summary.json").write_text(json.dumps(again))
    code, out = compared(capsys, *pair)
    assert code == 0
    assert "equal" in out


def test_stepping_leaves_the_same_as_leaping(tmp_path: Path) -> None:
    a = left("retracted", tmp_path / "a")
    assert cli.invoke(["run", str(a / "scenario.yaml"), "--step", "--quiet", "--out", str(tmp_path / "b")]) == 0
    found = compare_runs(a, tmp_path / "b")
    assert found.event is None
    assert set(found.summary) <= {"leaps"}


@pytest.mark.parametrize("at", [0, 1, 57, -1])
def test_the_first_event_that_differs_is_found_with_what_came_before(
    at: int, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events = list(result("retracted").raw_events)
    places = [i for i, event in enumerate(events) if event[1] >= 0]
    for i in {places[at], places[-1]}:
        event = events[i]
        events[i] = (*event[:5], event[5] + 1, *event[6:])
    # Row groups of other sizes on the two sides must not matter.
    monkeypatch.setattr(tables, "ROW_GROUP_EVENTS", 37)
    write_events(events, pair[1] / "events.parquet")
    found = compare_runs(*pair).event
    assert found is not None
    assert found.a is not None
    assert found.b is not None
    assert found.a.seq == found.b.seq == events[places[at]][1]
    assert found.b.tokens == found.a.tokens + 1
    assert [each.seq for each in found.before] == list(range(max(0, found.a.seq - 3), found.a.seq))
    code, out = compared(capsys, *pair)
    assert code == 1
    assert f"differs first: event {found.a.seq:,}," in out
    assert "differs in tokens" in out


def test_a_record_that_ends_early_differs_where_it_ends(pair: tuple[Path, Path]) -> None:
    events = result("retracted").raw_events
    last = max(event[1] for event in events)
    write_events([event for event in events if event[1] < last], pair[1] / "events.parquet")
    found = compare_runs(*pair).event
    assert found is not None
    assert found.b is None
    assert found.a is not None
    assert found.a.seq == last
    assert "the record has ended" in compared_text(compare_runs(*pair), *pair, 100)


def test_keys_of_scenario_and_summary_are_told_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = left("calm", tmp_path / "a"), left("retracted", tmp_path / "b")
    code, out = compared(capsys, a, b)
    assert code == 1
    assert "engine.page_size" in out
    assert "retractions" in out
    code, out = compared(capsys, a, b, "--json")
    told = json.loads(out)
    assert told["equal"] is False
    assert told["scenario"]["engine.page_size"] == [16, 64]
    assert told["summary"]["retractions"] == [0, result("retracted").summary["retractions"]]
    assert told["event"]["a"]["seq"] == told["event"]["b"]["seq"]


def test_without_events_the_digests_are_compared(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    (pair[1] / "events.parquet").unlink()
    code, out = compared(capsys, *pair)
    assert (code, "event digest" in out) == (0, True)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal_whatever_the_name(width: int, tmp_path: Path) -> None:
    a, b = left("calm", tmp_path / "a"), left("evil", tmp_path / "b")
    text = compared_text(compare_runs(a, b), a, b, width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert all(line.isprintable() for line in text.splitlines())
    assert width < 80 or EVIL[:8] in text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("summary.json", None),
        ("summary.json", b"{"),
        ("summary.json", b"[]"),
        ("summary.json", b"\xff\xfe"),
        ("scenario.yaml", None),
        ("scenario.yaml", b"a: [1"),
        ("events.parquet", b"PAR1"),
        ("events.parquet", b"not a table" * 400),
    ],
)
def test_a_damaged_folder_exits_2_and_names_the_file(
    name: str, content: bytes | None, pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (pair[1] / name).unlink()
    if content is not None:
        (pair[1] / name).write_bytes(content)
    for order in (pair, pair[::-1]):
        assert cli.invoke(["compare-runs", *map(str, order)]) == 2
        err = capsys.readouterr().err
        assert name in err
        assert "Traceback" not in err


@pytest.mark.parametrize("cut", [0.1, 0.5, 0.9, 0.999])
def test_a_table_that_was_cut_off_exits_2(
    cut: float, pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = (pair[1] / "events.parquet").read_bytes()
    (pair[1] / "events.parquet").write_bytes(whole[: int(len(whole) * cut)])
    assert cli.invoke(["compare-runs", *map(str, pair)]) == 2
    assert "events.parquet" in capsys.readouterr().err


def test_no_folder_at_all_exits_2(pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    for bad in (tmp_path / "nowhere", tmp_path / "file", tmp_path):
        assert cli.invoke(["compare-runs", str(pair[0]), str(bad)]) == 2
        assert "pagestorm run --out" in capsys.readouterr().err
    shutil.rmtree(pair[0])
    assert cli.invoke(["compare-runs", str(pair[0]), str(pair[1])]) == 2
