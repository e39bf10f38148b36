"""Where the engines' environments are, and that nothing but the right one is ever used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagestorm_real.reference import environment
from pagestorm_real.reference.client import ReferenceProcess
from pagestorm_real.reference.environment import ReferenceBroken, ReferenceMissing

PINNED = [engine for engine in environment.ENGINES if (environment.HERE / f"{engine}.txt").is_file()]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(environment.DIRECTORY_VARIABLE, str(tmp_path))
    return tmp_path


def pretend(root: Path, **stamped: str) -> Path:
    """A folder that looks like a finished environment of SGLang."""
    where = root / "sglang"
    (where / "bin").mkdir(parents=True)
    (where / "bin" / "python").symlink_to(sys.executable)
    (where / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.11.7\n")
    version = environment.engine_version("sglang")
    (where / "lib" / "python3.11" / "site-packages" / f"sglang-{version}.dist-info").mkdir(parents=True)
    pins = environment._hash(environment.pins_file("sglang"))
    (where / environment.STAMP).write_text(json.dumps({"pins": pins, "python": "3.11.7", **stamped}))
    return where


# --- the pins ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", PINNED)
def test_every_package_is_pinned_to_one_version_and_none_brings_cuda(engine: str) -> None:
    lines = [line for line in environment.pins_file(engine).read_text().splitlines() if line and line[0] != "#"]
    assert all(line.count("==") == 1 and not set(line) & set("<>~;[ ") for line in lines)
    pins = environment.pins(engine)
    assert len(pins) == len(lines)
    assert pins["torch"].endswith("+cpu")
    environment.check_packages(engine, pins)


def test_the_pinned_engine_is_the_one_that_the_facts_were_read_from() -> None:
    assert environment.engine_version("sglang") == "0.5.23"


@pytest.mark.parametrize("engine", ["", "../sglang", "tensorrt"])
def test_an_engine_without_pins_is_missing(engine: str) -> None:
    with pytest.raises(ReferenceMissing, match="there is one for sglang"):
        environment.require(engine)


# --- is it right? -----------------------------------------------------------------------------------------------


def test_the_environments_are_where_the_variable_says_else_in_the_checkout(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert environment.folder("sglang") == root / "sglang"
    monkeypatch.delenv(environment.DIRECTORY_VARIABLE)
    assert environment.folder("sglang") == Path(__file__).resolve().parents[2] / ".reference" / "sglang"


def test_a_finished_environment_of_these_pins_is_right(root: Path) -> None:
    pretend(root)
    environment.require("sglang")
    assert environment.problem("sglang") == ""
    command = environment.server_command("sglang")
    assert command[0] == str(root / "sglang" / "bin" / "python")
    assert command[-1].endswith("sglang_server.py")


def test_without_an_environment_the_message_says_how_to_build_it(root: Path) -> None:
    with pytest.raises(ReferenceMissing, match="make reference"):
        environment.require("sglang")
    with pytest.raises(ReferenceMissing, match="make reference"):
        ReferenceProcess("sglang").start()


def spoil_stamp(where: Path) -> None:
    (where / environment.STAMP).write_text("{")


def spoil_pins(where: Path) -> None:
    (where / environment.STAMP).write_text(json.dumps({"pins": "0", "python": "3.11.7"}))


def spoil_python(where: Path) -> None:
    (where / "pyvenv.cfg").write_text("version = 3.13.0\n")


def spoil_interpreter(where: Path) -> None:
    (where / "bin" / "python").unlink()


def spoil_engine(where: Path) -> None:
    packages = where / "lib" / "python3.11" / "site-packages"
    (packages / "sglang-0.5.23.dist-info").rename(packages / "sglang-0.5.24.dist-info")


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (spoil_stamp, "never finished"),
        (spoil_pins, "other pins"),
        (spoil_python, "lost its Python"),
        (spoil_interpreter, "lost its Python"),
        (spoil_engine, "lacks sglang 0.5.23"),
    ],
)
def test_an_environment_that_is_not_right_is_never_used(root: Path, spoil: Any, told: str) -> None:
    spoil(pretend(root))
    with pytest.raises(ReferenceBroken, match=told) as caught:
        ReferenceProcess("sglang").start()
    assert "make reference" in str(caught.value)


# --- what came along --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"nvidia-cublas-cu13": "1"}, "brought along nvidia-cublas-cu13"),
        ({"cuda-bindings": "13.0"}, "brought along cuda-bindings"),
        ({"torchvision": "0.28.0+cpu"}, "brought along torchvision"),
        ({"torch": "2.13.0"}, "torch 2.13.0, not a CPU build"),
        ({"torch": "2.13.0+cu130"}, "not a CPU build"),
        ({"torch": ""}, "torch missing"),
        ({"sglang": "0.5.24"}, "sglang 0.5.24"),
        ({"numpy": None}, "numpy missing"),
    ],
)
def test_a_package_that_is_unwanted_or_another_version_is_found(change: dict[str, str | None], told: str) -> None:
    found = {name: version for name, version in {**environment.pins("sglang"), **change}.items() if version is not None}
    with pytest.raises(ReferenceBroken, match=told):
        environment.check_packages("sglang", found)


def test_the_environment_built_here_holds_the_pins_and_nothing_of_cuda() -> None:
    if problem := environment.problem("sglang"):
        pytest.skip(problem)
    environment.check_packages("sglang", environment.installed(environment.folder("sglang")))


# --- building ---------------------------------------------------------------------------------------------------


def test_what_is_right_is_not_built_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(root)
    monkeypatch.setattr(environment, "_run", lambda *_: pytest.fail("something was run"))
    assert environment.build("sglang") is False


def test_a_build_that_fails_leaves_nothing_that_could_pass_for_right(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = pretend(root, pins="of another time")

    def fail(*_: object) -> None:
        raise ReferenceBroken("no index has it")

    monkeypatch.setattr(environment, "_install", fail)
    assert environment.main(["build", "sglang"]) == 4
    assert "no index has it" in capsys.readouterr().err
    assert "never finished" in environment.problem("sglang")
    assert (where / "bin" / "python").exists()


def test_what_came_along_is_checked_before_the_stamp_is_written(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_install", lambda *_: None)
    monkeypatch.setattr(environment, "installed", lambda _: {**environment.pins("sglang"), "nvidia-nccl-cu13": "2"})
    with pytest.raises(ReferenceBroken, match="nvidia-nccl-cu13"):
        environment.build("sglang")
    assert "never finished" in environment.problem("sglang")


def test_pip_failing_is_told_with_what_pip_said(tmp_path: Path) -> None:
    with pytest.raises(ReferenceBroken, match=r"(?s)could not be had:\nno such thing"):
        environment._run([sys.executable, "-c", "import sys; sys.exit('no such thing')"], "could not be had")


def test_a_folder_that_is_no_environment_is_never_removed(root: Path) -> None:
    kept = root / "sglang" / "thesis.tex"
    kept.parent.mkdir()
    kept.write_text("years of work")
    with pytest.raises(ReferenceBroken, match="no virtual environment"):
        environment.build("sglang")
    assert kept.read_text() == "years of work"


@pytest.mark.parametrize("arguments", [[], ["build"], ["build", "tensorrt"], ["destroy", "sglang"]])
def test_the_command_says_how_it_is_used(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert environment.main(arguments) == 2
    assert "build sglang|vllm" in capsys.readouterr().err


def test_two_builds_of_one_environment_wait_for_each_other(root: Path) -> None:
    script = (
        "import sys; from pagestorm_real.reference import environment\n"
        "with environment._alone('sglang'): print('in', flush=True); sys.stdin.read()\n"
    )
    sources = [str(Path(__file__).resolve().parents[2] / source) for source in ("sim", "real")]
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sources!r}\n{script}"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as first:
        assert first.stdout is not None
        assert first.stdin is not None
        assert first.stdout.readline() == b"in\n"
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe) as second:
            assert second.stdout is not None
            with pytest.raises(subprocess.TimeoutExpired):
                second.wait(1.0)
            first.stdin.close()
            assert second.stdout.readline() == b"in\n"
