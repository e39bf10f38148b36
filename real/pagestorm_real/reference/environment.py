"""The environments in which the engines live: where they are, whether they are right, and how they are built.

One virtual environment an engine, `.reference/<engine>` in the checkout or under $PAGESTORM_REFERENCE_DIR. The pins
are `<engine>.txt` beside this file: every package with its exact version, installed with nothing resolved and nothing
else brought along. A stamp, written last, holds what it was built from.

    python -m pagestorm_real.reference.environment build sglang
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path

from pagestorm.errors import PagestormError

ENGINES = ("sglang", "vllm")
DIRECTORY_VARIABLE = "PAGESTORM_REFERENCE_DIR"
STAMP = "pagestorm-stamp.json"
REMEDY = "`make reference` builds it anew"
UNWANTED = ("nvidia-", "cuda", "torchvision", "torchaudio")
"""No package whose name starts so may be in an environment: it would bring a CUDA build or gigabytes along."""
CPU_BUILD = "+cpu"
HERE = Path(__file__).resolve().parent


class ReferenceMissing(PagestormError):
    """There is no environment of that engine."""


class ReferenceBroken(PagestormError):
    """The environment, or the process in it, is not what this version of Pagestorm wants."""


@dataclass(frozen=True)
class Stamp:
    """What an environment was built from."""

    pins: str
    """SHA-256 of the pins file."""
    python: str


# --- where -----------------------------------------------------------------------------------------------------


def root() -> Path:
    """The folder that holds the environments."""
    if named := os.environ.get(DIRECTORY_VARIABLE):
        return Path(named).resolve()
    checkout = HERE.parents[2]
    return (checkout if (checkout / "pyproject.toml").is_file() else Path.cwd()) / ".reference"


def folder(engine: str) -> Path:
    """The environment of an engine, whether it is there or not."""
    return root() / engine


def interpreter(engine: str) -> Path:
    """Its Python."""
    return folder(engine) / "bin" / "python"


def server_command(engine: str) -> list[str]:
    """What starts its server. Raises `ReferenceMissing` or `ReferenceBroken`."""
    require(engine)
    return [str(interpreter(engine)), "-I", "-W", "ignore", str(HERE / f"{engine}_server.py")]


# --- the pins --------------------------------------------------------------------------------------------------


def pins_file(engine: str) -> Path:
    """The pins of an engine. Raises `ReferenceMissing` for an engine that has none."""
    path = HERE / f"{engine}.txt"
    if engine not in ENGINES or not path.is_file():
        built = ", ".join(name for name in ENGINES if (HERE / f"{name}.txt").is_file())
        raise ReferenceMissing(f"no reference environment is known for {engine!r}; there is one for {built}")
    return path


def pins(engine: str) -> dict[str, str]:
    """Version of each package, by normalised name."""
    lines = (line.partition("#")[0].strip() for line in pins_file(engine).read_text().splitlines())
    return {_normal(name): version for name, _, version in (line.partition("==") for line in lines if line)}


def engine_version(engine: str) -> str:
    """The version of the engine itself that is pinned."""
    return pins(engine)[engine]


# --- is it right? ----------------------------------------------------------------------------------------------


def require(engine: str) -> None:
    """Raise `ReferenceMissing` or `ReferenceBroken` unless the environment is there and was built from these pins."""
    wanted, where = _hash(pins_file(engine)), folder(engine)
    if not where.is_dir():
        raise ReferenceMissing(f"there is no {engine} reference environment at {where}; `make reference` builds it")
    stamp = _read_stamp(where)
    if stamp is None:
        raise ReferenceBroken(f"the {engine} reference environment at {where} was never finished; {REMEDY}")
    if stamp.pins != wanted:
        raise ReferenceBroken(f"the {engine} reference environment at {where} has other pins; {REMEDY}")
    pinned = engine_version(engine)
    if not any(where.glob(f"lib/python*/site-packages/{engine}-{pinned}.dist-info")):
        raise ReferenceBroken(f"the {engine} reference environment at {where} lacks {engine} {pinned}; {REMEDY}")
    if stamp.python != _configured_python(where) or not os.access(interpreter(engine), os.X_OK):
        raise ReferenceBroken(f"the {engine} reference environment at {where} lost its Python; {REMEDY}")


def problem(engine: str) -> str:
    """Why the environment cannot be used, or an empty string."""
    try:
        require(engine)
    except (ReferenceMissing, ReferenceBroken) as error:
        return str(error)
    return ""


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read_stamp(where: Path) -> Stamp | None:
    try:
        return Stamp(**json.loads((where / STAMP).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _configured_python(where: Path) -> str:
    """The version that the environment was made with, from its own configuration."""
    try:
        text = (where / "pyvenv.cfg").read_text()
    except OSError:
        return ""
    found = re.search(r"^version\s*=\s*(\S+)", text, re.MULTILINE)
    return found[1] if found else ""


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


# --- building ----------------------------------------------------------------------------------------------------


def build(engine: str) -> bool:
    """Build the environment unless it is right already; True when it was built.

    Raises `ReferenceBroken` when a package cannot be installed or something unwanted came along.
    """
    pins_file(engine)
    with _alone(engine):
        if not problem(engine):
            return False
        where = folder(engine)
        _clear(where)
        _run([sys.executable, "-m", "venv", "--without-pip", str(where)], "could not be made")
        _install(engine, where)
        check_packages(engine, installed(where))
        stamp = Stamp(_hash(pins_file(engine)), _configured_python(where))
        whole = where / f"{STAMP}.part"
        whole.write_text(json.dumps(asdict(stamp), indent=1) + "\n")
        whole.replace(where / STAMP)
    require(engine)
    return True


def check_packages(engine: str, found: Mapping[str, str]) -> None:
    """Raise `ReferenceBroken` unless `found`, version by normalised name, is what the pins say and CUDA-free."""
    unwanted = sorted(name for name in found if name.startswith(UNWANTED))
    if unwanted:
        raise ReferenceBroken(f"the {engine} reference environment brought along {', '.join(unwanted)}")
    torch = found.get("torch", "")
    if not torch.endswith(CPU_BUILD):
        raise ReferenceBroken(f"the {engine} reference environment has torch {torch or 'missing'}, not a CPU build")
    wrong = [f"{name} {found.get(name, 'missing')}" for name, v in pins(engine).items() if found.get(name) != v]
    if wrong:
        raise ReferenceBroken(f"the {engine} reference environment differs from its pins: {', '.join(wrong)}")


def installed(where: Path) -> dict[str, str]:
    """What pip lists in an environment: version by normalised name."""
    listed = _run(_pip(where, "list", "--format=json"), "cannot be listed")
    return {_normal(row["name"]): row["version"] for row in json.loads(listed)}


def _install(engine: str, where: Path) -> None:
    _run(
        _pip(where, "install", "--quiet", "--no-deps", "--only-binary=:all:", "-r", str(pins_file(engine))),
        "could not be installed. Its torch is the CPU build, so pip needs an index that has it "
        "(PIP_EXTRA_INDEX_URL), and the packages need Linux with Python 3.11 or newer",
    )


def _pip(where: Path, *arguments: str) -> list[str]:
    """Pip of the interpreter that runs this, working on the other environment."""
    python = str(where / "bin" / "python")
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, *arguments]


def _run(command: list[str], complaint: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        told = (done.stderr or done.stdout).strip()[-2000:]
        raise ReferenceBroken(f"the reference environment {complaint}:\n{told}")
    return done.stdout


def _clear(where: Path) -> None:
    """Remove an earlier environment. Raises `ReferenceBroken` when the folder holds anything else."""
    if not where.exists():
        return
    if where.is_dir() and ((where / "pyvenv.cfg").is_file() or not any(where.iterdir())):
        shutil.rmtree(where)
        return
    raise ReferenceBroken(f"{where} is no virtual environment: move it away or set {DIRECTORY_VARIABLE}")


@contextmanager
def _alone(engine: str) -> Iterator[None]:
    """Only one process builds an environment at a time; the others wait and find it right."""
    root().mkdir(parents=True, exist_ok=True)
    with (root() / f".{engine}.lock").open("w") as lock:
        flock(lock, LOCK_EX)
        yield


def main(arguments: list[str]) -> int:
    """`build ENGINE...`: exit 0 when each is right, 2 for bad usage, 4 when one cannot be had."""
    if len(arguments) < 2 or arguments[0] != "build" or not set(arguments[1:]) <= set(ENGINES):
        print(f"usage: python -m pagestorm_real.reference.environment build {'|'.join(ENGINES)} ...", file=sys.stderr)
        return 2
    for engine in arguments[1:]:
        try:
            built = build(engine)
        except PagestormError as error:
            print(f"reference: {error}", file=sys.stderr)
            return 4
        print(f"reference: {engine} {engine_version(engine)} {'built' if built else 'is right'} at {folder(engine)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
