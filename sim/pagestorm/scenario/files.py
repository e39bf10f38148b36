"""Scenario files on disk: the text of one, and the ones that are shipped."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from pagestorm.errors import ScenarioError
from pagestorm.scenario.tree import MAX_FILE_BYTES

_PACKAGE = Path(__file__).resolve().parents[1]


def read_text(path: Path) -> str:
    """The text of a scenario file. Raises `ScenarioError` when there is none, or it is too large or not UTF-8."""
    file = str(path)
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ScenarioError("no such file", file=file) from None
    except IsADirectoryError:
        raise ScenarioError("this is a folder; name a scenario file in it", file=file) from None
    except PermissionError:
        raise ScenarioError("no permission to read this file", file=file) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ScenarioError(f"cannot be read: {reason}", file=file) from None
    if len(data) > MAX_FILE_BYTES:
        raise ScenarioError(f"larger than {MAX_FILE_BYTES} bytes; put long lists into a trace file", file=file)
    return _decoded(data, file)


def _decoded(data: bytes, file: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        start = before.rfind(b"\n") + 1
        raise ScenarioError(
            f"not UTF-8 text (byte 0x{data[error.start]:02x}); save the file as UTF-8",
            file=file,
            line=before.count(b"\n") + 1,
            column=len(before[start:].decode("utf-8", "replace")) + 1,
        ) from None


def shipped() -> dict[str, Path]:
    """The scenarios that come with Pagestorm, by name: `scenarios/` of a checkout, or of the installed package."""
    checkout = _PACKAGE.parents[1] / "scenarios"
    folder = checkout if _PACKAGE.parent.name == "sim" and checkout.is_dir() else _PACKAGE / "scenarios"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find(path_or_name: str | os.PathLike[str]) -> Path:
    """The file that is meant: a path, or else the name of a shipped scenario. Raises `ScenarioError`."""
    path = Path(path_or_name)
    name = os.fspath(path_or_name)
    if path.exists() and not path.is_dir():
        return path
    known = shipped()
    if name in known:
        return known[name]
    if path.exists() or path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        return path
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"shipped: {', '.join(known) or 'none'}"
    raise ScenarioError(f"neither a file nor a shipped scenario; {hint}", file=name)
