"""The compiled modules give the same record as the sources that they were made from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagestorm import compiled

ROOT = Path(__file__).resolve().parents[1]

DIGESTS = """
import json, sys
import pagestorm as ps
from pagestorm import compiled
found = {}
for name in sys.argv[1:]:
    try:
        scenario = ps.load(name)
    except ps.ScenarioError:
        continue
    for step in (False, True):
        found[f"{name} {step}"] = ps.run(scenario, ["sim"], step=step).summary["events_digest"]
print(json.dumps({"compiled": compiled.in_use(), "digests": found}))
"""


def answer(*names: str) -> dict[str, object]:
    paths = os.pathsep.join(str(ROOT / part) for part in ("sim", "real"))
    environment = {key: value for key, value in os.environ.items() if key != "PAGESTORM_PURE"}
    done = subprocess.run(
        [sys.executable, "-c", DIGESTS, *names],
        env={**environment, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_every_shipped_scenario_has_its_golden_record_when_compiled() -> None:
    golden = json.loads((ROOT / "tests" / "golden.json").read_text(encoding="utf-8"))
    found = answer(*golden)
    if not found["compiled"]:
        pytest.skip("the hot modules are not compiled from these sources; make fast compiles them")
    digests = found["digests"]
    assert isinstance(digests, dict)
    assert len(digests) >= 2 * 10
    for name, digest in digests.items():
        assert digest == golden[name.split()[0]], name


def test_what_was_made_from_other_sources_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGESTORM_PURE")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(compiled, "FOLDER", str(tmp_path))
    monkeypatch.setattr(compiled, "MANIFEST", str(tmp_path / "MANIFEST"))
    assert not compiled.use()
    stamps = [compiled.stamp(module) for module in compiled.MODULES]
    python = " ".join(sys.version.split())
    (tmp_path / "MANIFEST").write_text("\n".join([python, *stamps[:-1], "edited 1 2"]), encoding="utf-8")
    assert not compiled.use()
    (tmp_path / "MANIFEST").write_text("\n".join(["another python", *stamps]), encoding="utf-8")
    assert not compiled.use()
    (tmp_path / "MANIFEST").write_text("\n".join([python, *stamps]), encoding="utf-8")
    assert compiled.use()


def test_every_compiled_module_is_one_of_ours() -> None:
    for module in compiled.MODULES:
        assert Path(compiled.source_of(module)).is_file()
