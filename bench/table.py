"""Rows of a timing as text, and as JSON for those who plot them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def text(rows: Sequence[Row]) -> str:
    """Columns under their names; a figure that was not measured is a dash."""
    if not rows:
        return "nothing was measured"
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[i]) for line in cells)) for i, name in enumerate(names)]
    lines = [names, *cells]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def save(results: Mapping[str, Sequence[Row]], path: Path) -> None:
    """All timings of a run in one JSON object."""
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
