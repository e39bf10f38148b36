"""Notebooks from their sources: `python notebooks/build.py [NAME ...]` runs them and writes NAME.ipynb beside NAME.py.

The sources are plain Python in the percent form, so that a change can be read. With --check nothing is written: each
notebook is run again and must hold the same cells and the same text; pictures may differ in a pixel between versions of
the drawing library and are not compared.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbclient
import nbformat

HERE = Path(__file__).parent
NAMES = sorted(path.stem for path in HERE.glob("*.py") if path != Path(__file__))
TEXTS = ("text/markdown", "text/plain")
TIMEOUT_S = 120


def run(name: str) -> Any:
    """The notebook of a source, executed in this interpreter's kernel, without anything that changes from run to run."""
    notebook = jupytext.read(HERE / f"{name}.py")
    nbclient.NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=TIMEOUT_S,
        resources={"metadata": {"path": str(HERE)}},
        extra_arguments=["--IPKernelApp.log_level=ERROR"],
    ).execute()
    return plain(notebook)


def plain(notebook: Any) -> Any:
    """Ids by position; no times, no versions."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02}"
        cell.metadata = {}
    nbformat.validate(notebook)
    return notebook


def texts(notebook: Any) -> list[tuple[str, list[str]]]:
    """Source and text outputs of each cell."""
    cells = []
    for cell in notebook.cells:
        said: list[str] = []
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" not in data:
                said += ["".join(data[kind]) for kind in TEXTS if kind in data]
            said += ["".join(output["text"])] if "text" in output else []
        cells.append((cell.source, said))
    return cells


def differences(name: str) -> list[str]:
    """What a fresh run says otherwise than the notebook in the tree."""
    path = HERE / f"{name}.ipynb"
    if not path.is_file():
        return [f"{path.name} is missing"]
    kept, fresh = texts(nbformat.read(path, as_version=4)), texts(run(name))
    if len(kept) != len(fresh):
        return [f"{path.name} has {len(kept)} cells, its source {len(fresh)}"]
    return [
        f"{path.name}, cell {number}: {old!r} is now {new!r}"
        for number, (old, new) in enumerate(zip(kept, fresh, strict=True))
        if old != new
    ]


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--check", action="store_true", help="compare with a fresh run instead of writing")
    asked = parser.parse_args()
    if unknown := set(asked.names) - set(NAMES):
        parser.error(f"no notebook is called {unknown.pop()}")
    found: list[str] = []
    for name in asked.names or NAMES:
        if asked.check:
            found += differences(name)
        else:
            nbformat.write(run(name), HERE / f"{name}.ipynb")
    for difference in found:
        print(difference, file=sys.stderr)
    if found:
        print("write them anew with: python notebooks/build.py", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
