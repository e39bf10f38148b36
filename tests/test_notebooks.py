"""The notebooks: run again they say what they say in the tree, and they stay within what a user has."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pagestorm as ps

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
MOST_BYTES = 300_000


def cells(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return found


def code(name: str) -> str:
    return "\n".join("".join(cell["source"]) for cell in cells(name) if cell["cell_type"] == "code")


def test_there_is_one_for_capacity_page_size_and_retraction() -> None:
    assert NAMES == ["capacity_of_a_pool", "page_size_and_rounding", "retraction_dynamics"]


@pytest.mark.parametrize("name", NAMES)
def test_running_it_again_gives_the_same_text(name: str) -> None:
    for module in ("jupytext", "nbclient", "ipykernel"):
        pytest.importorskip(module, reason="running notebooks needs the extra `notebooks`")
    paths = os.pathsep.join(str(ROOT / part) for part in ("sim", "real"))
    answer = subprocess.run(
        [sys.executable, NOTEBOOKS / "build.py", "--check", name],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize("name", NAMES)
def test_it_is_small_and_ends_with_a_conclusion_that_has_numbers(name: str) -> None:
    assert (NOTEBOOKS / f"{name}.ipynb").stat().st_size < MOST_BYTES
    (output,) = cells(name)[-1]["outputs"]
    words = "".join(output["data"]["text/markdown"])
    assert words.strip().startswith("## Conclusion")
    assert len(re.findall(r"\d", words)) > 20


@pytest.mark.parametrize("name", NAMES)
def test_it_uses_only_the_public_names(name: str) -> None:
    text = code(name)
    assert re.findall(r"^(?:import|from) pagestorm.*$", text, re.MULTILINE) == ["import pagestorm as ps"]
    assert set(re.findall(r"\bps\.(\w+)", text)) <= set(ps.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_every_picture_names_its_axes_and_their_units(name: str) -> None:
    text = code(name)
    pictures = sum("image/png" in output.get("data", {}) for cell in cells(name) for output in cell.get("outputs", ()))
    assert pictures == text.count("plt.show()")
    assert text.count("ylabel=") >= pictures
    assert 'style.use("print.mplstyle")' in text
