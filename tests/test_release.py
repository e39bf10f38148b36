"""What is released: wheel and sdist hold everything, and an installation without the tree works and is typed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", reason="building a wheel without a network needs setuptools here (extra `dev`)")

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("sim", "real", "scenarios")
FILES = ("pyproject.toml", "README.md", "LICENSE")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
UNSHIPPED = shutil.ignore_patterns("__pycache__", "_compiled*", "*.egg-info", ".*")

USER = """\
import pagestorm as ps

scenario: ps.Scenario = ps.load("first-retraction", ["seed=3"])
result: ps.Result = ps.run(scenario, pools=["sim"])
rows: int = len(result.timeline.free_pages)
refused: int = ps.load(5)
"""


def ran(*words: str | Path, cwd: Path, code: int | None = 0) -> str:
    """Standard output of a command that knows nothing of this tree."""
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PAGESTORM", "PIP"))
    }
    answer = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert code is None or answer.returncode == code, answer.stdout + answer.stderr
    return answer.stdout


def files(root: Path, folder: str) -> set[str]:
    """Names below a folder, relative to root, without what tools leave behind."""
    found = (path.relative_to(root) for path in (root / folder).rglob("*") if path.is_file())
    left = ("__pycache__", "_compiled", ".")
    return {path.as_posix() for path in found if not any(p.startswith(left) or ".egg-info" in p for p in path.parts)}


def built(kind: str, tree: Path, out: Path) -> Path:
    """A wheel or an sdist of a tree, without an index and without touching the checkout."""
    out.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta as b; print(b.build_{kind}({str(out)!r}))"
    return out / ran(sys.executable, "-c", code, cwd=tree).split()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release")
    tree = folder / "tree"
    for part in PARTS:
        shutil.copytree(ROOT / part, tree / part, ignore=UNSHIPPED)
    for file in FILES:
        shutil.copy(ROOT / file, tree / file)
    return built("sdist", tree, folder / "dist")


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """Built from the sdist, as an installer would that finds nothing else."""
    with tarfile.open(sdist) as archive:
        archive.extractall(sdist.parent, filter="data")
    return built("wheel", sdist.parent / sdist.name.removesuffix(".tar.gz"), sdist.parent)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that has the wheel, and the dependencies of this one by a path entry."""
    home = tmp_path_factory.mktemp("installed") / "env"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    ran(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=home)
    site = Path(ran(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return home / "bin"


def test_the_wheel_holds_every_module_and_data_file(wheel: Path) -> None:
    shipped = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"pagestorm/{name}" for name in files(ROOT, "scenarios") if not name.endswith(".py")}
    for part in (ROOT / "sim", ROOT / "real"):
        expected |= files(part, ".")
    assert expected - shipped == set()
    assert {"pagestorm/py.typed", "pagestorm_real/py.typed"} <= shipped


def test_name_and_version_come_from_pyproject_alone(sdist: Path, wheel: Path, installed: Path, tmp_path: Path) -> None:
    assert sdist.name == f"pagestorm-{VERSION}.tar.gz"
    assert wheel.name == f"pagestorm-{VERSION}-py3-none-any.whl"
    assert ran(installed / "pagestorm", "--version", cwd=tmp_path) == f"pagestorm {VERSION}\n"


def test_an_installation_runs_a_shipped_scenario_from_any_folder(installed: Path, tmp_path: Path) -> None:
    where = ran(installed / "python", "-c", "import pagestorm; print(pagestorm.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(installed.parent)
    summary = json.loads(ran(installed / "pagestorm", "run", "first-retraction", "--json", cwd=tmp_path))
    golden = json.loads((ROOT / "tests" / "golden.json").read_text(encoding="utf-8"))
    assert summary["events_digest"] == golden["first-retraction"]


def test_the_shipped_trace_and_the_report_are_found_too(installed: Path, tmp_path: Path) -> None:
    ran(installed / "pagestorm", "run", "bursty-azure", "--quiet", "--out", "out", cwd=tmp_path)
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000


def test_a_user_sees_the_types(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="checking types needs mypy (extra `dev`)")
    (tmp_path / "user.py").write_text(USER, encoding="utf-8")
    told = ran(
        *(sys.executable, "-m", "mypy", "--strict", "--cache-dir", os.devnull),
        *("--python-executable", installed / "python", "user.py"),
        cwd=tmp_path,
        code=1,
    )
    assert 'Argument 1 to "load" has incompatible type "int"' in told
    assert 'has type "Scenario"' in told or "expression has type" in told
    assert {line.split(":")[1] for line in told.splitlines() if ": error:" in line} == {"6"}
