"""--perfetto: valid by the rules of the trace event format, and true to the record."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pagestorm import cli
from pagestorm.errors import ScenarioError
from pagestorm.record import RequestRow
from pagestorm.report.perfetto import INCIDENTS, POOL, REQUESTS, PerfettoTrace
from pagestorm.runs import Result, run
from pagestorm.scenario import from_mapping
from tests.report.cases import CASES, EVIL, burst, result, uniform

REQUIRED = {
    "X": {"ph", "pid", "tid", "name", "ts", "dur", "args"},
    "i": {"ph", "pid", "tid", "name", "ts", "s", "args"},
    "C": {"ph", "pid", "tid", "name", "ts", "args"},
    "M": {"ph", "pid", "tid", "name", "args"},
}


def traced(ran: Result, path: Path) -> list[dict[str, Any]]:
    sink = PerfettoTrace(path, ran.summary["pool_pages"], ran.scenario.name)
    for at in range(0, len(ran.raw_events), 7):
        sink.write(ran.raw_events[at : at + 7])
    sink.close()
    sink.commit(ran.timeline_rows)
    return read(path)


def read(path: Path) -> list[dict[str, Any]]:
    whole = json.loads(path.read_text("ascii"), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert set(whole) == {"traceEvents", "displayTimeUnit"}
    events: list[dict[str, Any]] = whole["traceEvents"]
    return events


def ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def check(entries: list[dict[str, Any]]) -> None:
    """The format's rules: keys, types, slices of a track nested or apart, time on a track never going back."""
    tracks: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for entry in entries:
        assert set(entry) == REQUIRED[entry["ph"]], entry
        assert isinstance(entry["pid"], int)
        assert isinstance(entry["tid"], int)
        assert isinstance(entry["name"], str)
        assert isinstance(entry["args"], dict)
        if entry["ph"] == "M":
            assert entry["name"] in ("process_name", "thread_name", "process_sort_index", "thread_sort_index")
            continue
        assert entry["ts"] >= 0
        if entry["ph"] == "C":
            assert all(isinstance(value, int | float) for value in entry["args"].values())
            tracks["C", entry["pid"], entry["name"]].append(entry)
        else:
            tracks["T", entry["pid"], entry["tid"]].append(entry)
        if entry["ph"] == "i":
            assert entry["s"] in ("t", "p", "g")
    for track in tracks.values():
        times = [ns(entry["ts"]) for entry in track]
        assert times == sorted(times)
        slices = [(ns(each["ts"]), ns(each["ts"]) + ns(each["dur"])) for each in track if each["ph"] == "X"]
        for (start, end), (after, _) in pairwise(slices):
            assert start <= end <= after


@pytest.mark.parametrize("name", CASES)
def test_the_trace_of_every_run_keeps_the_rules_of_the_format(name: str, tmp_path: Path) -> None:
    entries = traced(result(name), tmp_path / "trace.json")
    check(entries)
    named = {entry["tid"] for entry in entries if (entry["pid"], entry["name"]) == (REQUESTS, "thread_name")}
    assert named == {int(number) + 1 for number in result(name).requests.request}
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


@pytest.mark.parametrize("name", ["calm", "retracted"])
def test_phases_begin_and_end_when_the_table_of_requests_says(name: str, tmp_path: Path) -> None:
    ran = result(name)
    entries = traced(ran, tmp_path / "trace.json")
    phases: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for entry in entries:
        if entry["ph"] == "X":
            phases[entry["tid"] - 1].append(entry)
    for row in (RequestRow(*values) for values in ran.requests.itertuples(index=False, name=None)):
        mine = phases[row.request]
        names = [each["name"] for each in mine]
        assert names[:3] == ["waiting", "prefill", "running"]
        assert names.count("prefill") == 1 + row.retractions
        assert ns(mine[0]["ts"]) == row.arrive_ns
        assert ns(mine[1]["ts"]) == row.admit_ns
        assert ns(mine[2]["ts"]) == row.first_token_ns
        assert ns(mine[-1]["ts"]) + ns(mine[-1]["dur"]) == row.finish_ns
        assert mine[-1]["args"]["output_tokens"] == row.output_tokens


def test_a_retraction_is_an_instant_with_a_gap_behind_it(tmp_path: Path) -> None:
    ran = result("retracted")
    entries = traced(ran, tmp_path / "trace.json")
    instants = [each for each in entries if each["ph"] == "i" and each["name"] == "retracted"]
    assert len(instants) == ran.summary["retractions"] > 0
    for instant in instants:
        track = [each for each in entries if each["ph"] == "X" and each["tid"] == instant["tid"]]
        before = [each for each in track if ns(each["ts"]) + ns(each["dur"]) == ns(instant["ts"])]
        after = [each for each in track if each["ts"] > instant["ts"]]
        assert [each["name"] for each in before] == ["running"]
        assert after[0]["name"] == "prefill"
    shared = [each for each in entries if each["ph"] == "i" and each["pid"] == POOL]
    assert [each["name"] for each in shared] == [f"request {each['tid'] - 1} retracted" for each in instants]
    assert shared[0]["args"]["asked_pages"] > shared[0]["args"]["free_pages"]


def test_running_out_of_memory_is_marked_for_everybody_and_what_ran_is_left_open(tmp_path: Path) -> None:
    entries = traced(result("crashed"), tmp_path / "trace.json")
    (oom,) = [each for each in entries if each["name"] == "out of memory in decode"]
    assert (oom["s"], oom["pid"], oom["tid"]) == ("g", POOL, INCIDENTS)
    left = [each for each in entries if each["ph"] == "X" and each["args"].get("unfinished")]
    # The one that was retracted and never came back is a gap.
    open_gaps = {each["tid"] for each in entries if each["name"] == "retracted"} - {each["tid"] for each in left}
    assert len(open_gaps) == 1
    assert len(left) + len(open_gaps) == result("crashed").summary["unserved"]


def test_counters_add_up_to_the_pool_and_reach_its_peak(tmp_path: Path) -> None:
    ran = result("retracted")
    levels: dict[str, int] = {}
    peak = 0
    for entry in traced(ran, tmp_path / "trace.json"):
        if entry["ph"] == "C":
            levels[entry["name"]] = entry["args"]["value"]
            if entry["name"] == "evictable (pages)" or "pages" not in entry["name"]:
                continue
            peak = max(peak, levels["used (pages)"])
    assert levels["used (pages)"] + levels["free (pages)"] + levels["evictable (pages)"] == ran.summary["pool_pages"]
    assert peak >= ran.summary["peak_used_pages"] - ran.summary["peak_running"]
    assert "new-token ratio" in levels


def test_preemptions_of_vllm_are_traced_too(tmp_path: Path) -> None:
    ran = run(
        from_mapping(
            {
                "schema": 1,
                "name": "preempted",
                "engine": {
                    "kind": "vllm",
                    "block_size": 16,
                    "num_gpu_blocks_override": 60,
                    "enable_prefix_caching": False,
                },
                "workload": burst(30, uniform(50, 200), uniform(50, 200)),
            }
        )
    )
    entries = traced(ran, tmp_path / "trace.json")
    check(entries)
    assert len([each for each in entries if each["name"] == "preempted"]) == ran.summary["preemptions"] > 0


def test_two_thousand_requests_stay_small(tmp_path: Path) -> None:
    many = from_mapping(
        {
            "schema": 1,
            "name": "many",
            "engine": {"page_size": 16, "max_total_tokens": 32768, "disable_radix_cache": True},
            "workload": burst(2000, uniform(100, 600), uniform(50, 400)),
        }
    )
    path = tmp_path / "trace.json"
    sink = PerfettoTrace(path, many.engine.pool_pages, many.name)
    ran = run(many, events=False, sinks=[sink])
    assert (len(sink._phases), len(sink._computing)) == (0, 0)
    sink.commit(ran.timeline_rows)
    check(read(path))
    assert path.stat().st_size < 50_000_000 / 4


def test_an_evil_name_stays_text_in_the_trace(tmp_path: Path) -> None:
    entries = traced(result("evil"), tmp_path / "trace.json")
    (process,) = [each for each in entries if each["name"] == "process_name" and each["pid"] == REQUESTS]
    assert EVIL.replace("/", "|") in process["args"]["name"]


def test_the_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    sink = PerfettoTrace(path, 10, "x")
    sink.write(result("calm").raw_events)
    assert not path.exists()
    sink.discard()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ScenarioError, match=re.escape("--perfetto")) as caught:
        PerfettoTrace(tmp_path / "missing" / "trace.json", 10, "x")
    assert caught.value.key == "--perfetto"


def test_the_command_line_writes_it_with_and_without_a_folder(tmp_path: Path) -> None:
    for more in ([], ["--out", str(tmp_path / "out")], ["--events", "none"]):
        path = tmp_path / f"trace{len(more)}.json"
        assert (
            cli.invoke(["run", "decode-oom-page-64", "--pools", "sim", "--quiet", "--perfetto", str(path), *more]) == 0
        )
        check(read(path))
    bad = str(tmp_path / "no" / "trace.json")
    assert cli.invoke(["run", "decode-oom-page-64", "--quiet", "--perfetto", bad]) == 2
    assert not (tmp_path / "no").exists()
