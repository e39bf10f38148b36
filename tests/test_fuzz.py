"""The hunt: it reaches pressure, finds an engine that was broken on purpose, and shrinks what it found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pagestorm as ps
from pagestorm import cli
from pagestorm.engine.iteration import SglangEngine

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("seed", ["0", "7"])
def test_leaping_agrees_with_stepping_on_a_small_hunt(
    seed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.invoke(["fuzz", "--against", "step", "--examples", "60", "--seed", seed]) == 0
    assert "retraction" in capsys.readouterr().out


def test_a_hunt_that_finds_nothing_leaves_nothing_behind(tmp_path: Path) -> None:
    paths = os.pathsep.join(str(ROOT / part) for part in ("sim", "real"))
    words = ["-m", "pagestorm", "fuzz", "--against", "step", "--examples", "20", "--seed", "0", "--quiet"]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        check=False,
        timeout=200,
    )
    assert done.returncode in (0, 1)
    assert list(tmp_path.iterdir()) == []


def test_the_torch_pool_agrees_on_a_small_hunt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="the torch pool needs torch")
    monkeypatch.chdir(tmp_path)
    assert cli.invoke(["fuzz", "--against", "torch", "--examples", "25", "--seed", "3"]) in (0, 1)
    capsys.readouterr()


def test_a_horizon_one_step_too_long_is_found_shrunk_saved_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    healthy = SglangEngine._horizon

    def too_long(self: SglangEngine, until_fs: int) -> int:
        steps = healthy(self, until_fs)
        return steps + 1 if steps > 1 else steps

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SglangEngine, "_horizon", too_long)
    words = ["fuzz", "--against", "step", "--examples", "100", "--seed", "1", "--out", str(tmp_path)]
    assert cli.invoke(words) == 3
    saved = Path(capsys.readouterr().out.strip().splitlines()[-1])
    requests = ps.load(saved).workload.requests
    assert requests is not None
    assert 1 <= len(requests) <= 10
    assert cli.invoke(["replay", str(saved)]) == 3
    monkeypatch.setattr(SglangEngine, "_horizon", healthy)
    capsys.readouterr()
    assert cli.invoke(["replay", str(saved)]) == 0
