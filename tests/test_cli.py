"""The command line as a person uses it, bad input included."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagestorm import cli

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("sim", "real"))}

GOOD: dict[str, Any] = {
    "schema": 1,
    "name": "tried",
    "engine": {
        "kind": "sglang",
        "page_size": 16,
        "max_total_tokens": 4096,
        "max_running_requests": 16,
        "disable_radix_cache": True,
    },
    "workload": {"num_requests": 20, "arrivals": {"process": "burst"}, "input_tokens": 100, "output_tokens": 30},
}


def changed(**parts: Any) -> dict[str, Any]:
    """GOOD with keys of its parts changed: engine={...} is merged."""
    scenario = json.loads(json.dumps(GOOD))
    for part, change in parts.items():
        if isinstance(change, dict) and isinstance(scenario.get(part), dict):
            scenario[part].update(change)
        else:
            scenario[part] = change
    return scenario


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "tried.yaml"
    path.write_text(yaml.safe_dump(GOOD, sort_keys=False), encoding="utf-8")
    return path


def ran(*words: str | Path) -> int:
    return cli.invoke([str(word) for word in words])


class TestRun:
    def test_json_is_the_summary_and_nothing_else(self, scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert ran("run", scenario, "--json") == 0
        summary = json.loads(capsys.readouterr().out)
        assert summary["finished"] == 20
        assert summary["pools"] == ["counting"]

    def test_quiet_says_nothing(self, scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert ran("run", scenario, "--quiet") == 0
        assert capsys.readouterr() == ("", "")

    def test_without_out_nothing_is_written(
        self, scenario: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        empty = tmp_path / "here"
        empty.mkdir()
        monkeypatch.chdir(empty)
        assert ran("run", scenario) == 0
        assert list(empty.iterdir()) == []
        assert "--out DIR" in capsys.readouterr().out

    def test_out_gets_everything_and_the_scenario_runs_again_the_same(
        self, scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "out"
        assert ran("run", scenario, "--out", out, "--quiet") == 0
        names = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
        assert names >= {
            "summary.json",
            "events.parquet",
            "requests.parquet",
            "timeline.parquet",
            "report.html",
            "scenario.yaml",
            "plots/timeline.png",
        }
        first = json.loads((out / "summary.json").read_text())
        assert ran("run", out / "scenario.yaml", "--json") == 0
        assert json.loads(capsys.readouterr().out)["events_digest"] == first["events_digest"]

    def test_events_none_keeps_the_digest(self, scenario: Path, tmp_path: Path) -> None:
        for events in ("all", "none"):
            assert ran("run", scenario, "--out", tmp_path / events, "--events", events, "--quiet") == 0
        summaries = [json.loads((tmp_path / e / "summary.json").read_text()) for e in ("all", "none")]
        assert summaries[0]["events_digest"] == summaries[1]["events_digest"]
        assert not (tmp_path / "none" / "events.parquet").exists()

    def test_lockstep_with_torch(self, scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
        pytest.importorskip("torch", reason="the torch pool needs torch")
        assert ran("run", scenario, "--pools", "sim,torch", "--json") == 0
        summary = json.loads(capsys.readouterr().out)
        assert summary["pools"] == ["paged", "torch"]
        assert summary["divergences"] == 0
        assert summary["payload"] == "stamp"

    def test_stepping_gives_the_same_digest(self, scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
        digests = []
        for more in ([], ["--step"]):
            assert ran("run", scenario, "--json", *more) == 0
            digests.append(json.loads(capsys.readouterr().out)["events_digest"])
        assert digests[0] == digests[1]

    def test_seed_and_set_change_the_run(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "drawn.yaml"
        drawn = changed(workload={"input_tokens": {"dist": "uniform", "low": 10, "high": 200}})
        path.write_text(yaml.safe_dump(drawn), encoding="utf-8")
        digests = set()
        for more in ([], ["--seed", "9"], ["--set", "engine.page_size=32"]):
            assert ran("run", path, "--json", *more) == 0
            digests.add(json.loads(capsys.readouterr().out)["events_digest"])
        assert len(digests) == 3

    def test_an_expectation_that_fails_exits_1_and_says_which(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "expecting.yaml"
        path.write_text(yaml.safe_dump(changed(expect={"retractions": {"min": 5}})), encoding="utf-8")
        assert ran("run", path, "--quiet") == 1
        assert "retractions" in capsys.readouterr().err


BAD: list[tuple[str, Any, list[str]]] = [
    ("unknown key", changed(engine={"page_sze": 16}), ["page_sze", "page_size"]),
    ("wrong type", changed(engine={"page_size": "many"}), ["page_size"]),
    ("negative size", changed(engine={"max_total_tokens": -5}), ["max_total_tokens"]),
    ("absurd size", changed(engine={"max_total_tokens": 10**30}), ["max_total_tokens"]),
    ("empty workload", changed(workload={"num_requests": 0}), ["num_requests"]),
    ("page larger than the pool", changed(engine={"page_size": 8192}), ["page_size"]),
    ("prefix cache not built", changed(engine={"disable_radix_cache": False}), ["disable_radix_cache"]),
    ("known for later", changed(client={"timeout_s": 5}), ["client"]),
    ("unknown engine", changed(engine={"kind": "sglan"}), ["kind"]),
    ("unknown pool", changed(pools=["sim", "tourch"]), ["pools"]),
]


class TestBadInput:
    @pytest.mark.parametrize(("what", "content", "told"), BAD, ids=[b[0] for b in BAD])
    def test_the_message_names_the_place_and_the_key(
        self, what: str, content: Any, told: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "bad.yaml"
        path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        assert ran("run", path, "--json") == 2
        out, err = capsys.readouterr()
        answer = json.loads(out)
        assert "Traceback" not in err
        for word in told:
            assert word in answer["error"]
        assert answer["file"] == str(path)
        assert answer["line"] >= 1
        assert answer["key"]
        assert f"{path}:{answer['line']}:" in err

    @pytest.mark.parametrize(
        ("what", "content"),
        [
            ("truncated", b"schema: 1\nname: x\nengine: {kind: sglang, page_size: 16"),
            ("not UTF-8", b"schema: 1\nname: caf\xe9\n"),
            ("a tag", b"schema: 1\nname: !!python/object/apply:os.system ['true']\n"),
            ("a bomb", b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\nschema: 1\nname: x\n"),
            ("a list", b"- 1\n- 2\n"),
            ("empty", b""),
        ],
    )
    def test_a_file_that_is_no_scenario(
        self, what: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "broken.yaml"
        path.write_bytes(content)
        assert ran("run", path) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert str(path) in err
        assert "Traceback" not in err

    def test_a_missing_scenario_names_the_nearest(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert ran("run", "first-retractoin") == 2
        assert "first-retraction" in capsys.readouterr().err

    def test_a_bad_trace_row(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        trace = tmp_path / "trace.csv"
        trace.write_text(
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\nlater,1,1\n", encoding="utf-8"
        )
        content = changed(
            workload={
                "num_requests": 2,
                "arrivals": {"process": "trace"},
                "input_tokens": {"dist": "trace"},
                "output_tokens": {"dist": "trace"},
                "trace": {"format": "azure", "path": "trace.csv"},
            }
        )
        path = tmp_path / "traced.yaml"
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        assert ran("run", path) == 2
        assert f"{trace}:3" in capsys.readouterr().err

    def test_a_bad_set_names_it(self, scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert ran("run", scenario, "--set", "engine.page_siz=32") == 2
        err = capsys.readouterr().err
        assert "--set" in err
        assert "did you mean page_size" in err

    def test_an_unwritable_folder_is_told_before_the_run(
        self, scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        occupied = tmp_path / "file"
        occupied.write_text("mine", encoding="utf-8")
        assert ran("run", scenario, "--out", occupied) == 2
        assert "--out" in capsys.readouterr().err
        assert occupied.read_text(encoding="utf-8") == "mine"
        assert ran("run", scenario, "--out", "/proc/pagestorm") == 2

    def test_a_full_disk_leaves_nothing_half_written(
        self, scenario: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        real = os.fsync

        def full(handle: int) -> None:
            full.calls += 1  # type: ignore[attr-defined]  # a counter on the stand-in
            if full.calls == 3:  # type: ignore[attr-defined]
                raise OSError(28, "No space left on device")
            real(handle)

        full.calls = 0  # type: ignore[attr-defined]
        monkeypatch.setattr(os, "fsync", full)
        assert ran("run", scenario, "--out", tmp_path / "out") == 2
        assert "No space left on device" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
        assert [p for p in tmp_path.iterdir() if p != scenario] == []

    def test_cuda_where_there_is_none(self, scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
        torch = pytest.importorskip("torch", reason="the torch pool needs torch")
        if torch.cuda.is_available():
            pytest.skip("this machine has CUDA")
        assert ran("run", scenario, "--pools", "sim,torch", "--device", "cuda") in (2, 4)
        err = capsys.readouterr().err
        assert "cuda" in err.lower()
        assert "Traceback" not in err

    def test_a_pool_that_does_not_fit_this_machine_exits_4_with_what_would(
        self, scenario: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        pytest.importorskip("torch", reason="the torch pool needs torch")
        asked = ["--set", "engine.max_total_tokens=1000000000000"]
        assert ran("run", scenario, "--pools", "torch", "--json", *asked) == 4
        out, err = capsys.readouterr()
        answer = json.loads(out)
        assert answer["needed_bytes"] > answer["budget_bytes"]
        assert "GiB" in err

    def test_an_unknown_command_is_a_usage_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert ran("rum") == 2
        assert "rum" in capsys.readouterr().err


def test_ctrl_c_stops_cleanly_and_exits_130(tmp_path: Path) -> None:
    long = tmp_path / "long.yaml"
    long.write_text(
        yaml.safe_dump(
            changed(
                workload={
                    "num_requests": 5_000_000,
                    "arrivals": {"process": "closed_loop", "concurrency": 8},
                    "output_tokens": 2,
                }
            )
        ),
        encoding="utf-8",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "pagestorm", "run", str(long), "--out", str(tmp_path / "out")],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        time.sleep(4)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "interrupted" in err
    assert "Traceback" not in err
    summary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    assert 0 < summary["finished"] < 5_000_000


@pytest.mark.parametrize("command", ["schema", "catalog models", "catalog gpus --json", "doctor", "doctor --json"])
def test_the_small_commands_answer(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(*command.split()) == 0
    out = capsys.readouterr().out
    assert out
    if "--json" in command or command == "schema":
        assert json.loads(out)


@pytest.mark.parametrize("command", ["", "run", "compare-runs", "replay", "schema", "catalog", "doctor"])
def test_help_shows_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(*command.split(), "--help") == 0
    assert "Example" in capsys.readouterr().out


def test_a_run_without_out_imports_neither_pandas_nor_matplotlib_nor_torch(scenario: Path) -> None:
    code = (
        "import sys\n"
        "from pagestorm import cli\n"
        f"assert cli.invoke(['run', {str(scenario)!r}, '--pools', 'sim']) == 0\n"
        "assert not {'pandas', 'matplotlib', 'fastparquet', 'torch'} & set(sys.modules), sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL, timeout=60)


def test_sim_never_imports_torch() -> None:
    for path in (ROOT / "sim").rglob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            words = line.split()
            if words[:1] in (["import"], ["from"]):
                assert words[1].split(".")[0] not in ("torch", "pagestorm_real"), (path, line)


class TestDivergence:
    """Two pools made to differ: the run stops with a reproducer, and replaying it gives the same verdict."""

    def test_it_is_saved_and_replays(
        self, scenario: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from pagestorm.memory import paged

        healthy = paged.FreeList.give

        def reversed_give(self: paged.FreeList, ids: Any) -> None:
            healthy(self, ids[::-1])

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(paged.FreeList, "give", reversed_give)
        pytest.importorskip("torch", reason="the torch pool needs torch")
        more = ["--set", "workload.num_requests=60"]
        assert ran("run", scenario, "--pools", "sim,torch", *more) == 3
        saved = Path(capsys.readouterr().out.strip().splitlines()[-1])
        assert saved.is_file()
        assert ran("replay", saved) == 3
        assert "same verdict" in capsys.readouterr().out
        monkeypatch.setattr(paged.FreeList, "give", healthy)
        assert ran("replay", saved) == 0
        assert "no longer" in capsys.readouterr().out

    def test_a_plain_scenario_is_no_reproducer(self, scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert ran("replay", scenario) == 2
        assert "pagestorm run" in capsys.readouterr().err
