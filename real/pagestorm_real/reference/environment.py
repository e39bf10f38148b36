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
from dataclasses import dataclass
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
