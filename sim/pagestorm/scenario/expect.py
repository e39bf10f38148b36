"""Whether a summary says what a scenario expects of it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pagestorm.scenario.schema import Bounds, Expectation
from pagestorm.scenario.words import shown

RELATIVE_TOLERANCE = 1e-9


def check(expect: Mapping[str, Expectation], summary: Mapping[str, object]) -> list[str]:
    """Each expectation that `summary` does not meet, as a sentence; empty when all hold.

    Whole numbers must be equal, others within a relative 1e-9; bounds are inclusive; null means that the key does not
    apply. A list in the summary is compared as its entries joined by commas.
    """
    failures = []
    for key, wanted in expect.items():
        found = summary.get(key)
        found = ",".join(map(str, found)) if isinstance(found, list | tuple) else found
        if not _holds(wanted, found):
            failures.append(f"{key} should be {_said(wanted)}, but is {shown(found)}.")
    return failures


def _holds(wanted: Expectation, found: object) -> bool:
    if isinstance(wanted, Bounds):
        return _within(wanted, found)
    if wanted is None or isinstance(wanted, bool | str) or isinstance(found, bool):
        return type(wanted) is type(found) and wanted == found
    if isinstance(wanted, int) and isinstance(found, int):
        return wanted == found
    return isinstance(found, int | float) and math.isclose(wanted, found, rel_tol=RELATIVE_TOLERANCE)


def _within(bounds: Bounds, found: object) -> bool:
    if isinstance(found, bool) or not isinstance(found, int | float):
        return False
    return (bounds.min is None or found >= bounds.min) and (bounds.max is None or found <= bounds.max)


def _said(wanted: Expectation) -> str:
    if not isinstance(wanted, Bounds):
        return shown(wanted)
    if wanted.min is None or wanted.max is None:
        return f"at least {wanted.min}" if wanted.min is not None else f"at most {wanted.max}"
    return f"from {wanted.min} to {wanted.max}"
