"""The public reports, by id. Numbers come from the file; the product computes; a test only compares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def cases(shared: Path, section: str) -> dict[str, dict[str, Any]]:
    """Cases of one section of `cases/public.yaml`, by id."""
    listed = yaml.safe_load((shared / "cases" / "public.yaml").read_text(encoding="utf-8"))[section]
    return {case["id"]: case for case in listed}
