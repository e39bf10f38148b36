"""Ranges of an owner's page numbers, for the owners that have any."""

from __future__ import annotations

Ranges = dict[int, list[tuple[int, int]]]
"""Owner -> disjoint ranges [first, last) of its page numbers, in no order."""


def overlaps(ranges: Ranges, owner: int, first: int, last: int) -> bool:
    """Whether one of the owner's ranges has a page of [first, last)."""
    return first < last and any(start < last and first < end for start, end in ranges.get(owner, ()))


def add(ranges: Ranges, owner: int, first: int, last: int) -> None:
    """Add [first, last), which overlaps none; grown onto the range that was added last where the two meet."""
    own = ranges.setdefault(owner, [])
    if own and own[-1][1] == first:
        own[-1] = (own[-1][0], last)
    else:
        own.append((first, last))
