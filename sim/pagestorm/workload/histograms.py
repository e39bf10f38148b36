"""Length histograms kept in a CSV file: a column `tokens` (or `value`) and a column `weight`."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pagestorm.scenario.schema import MAX_TOKENS
from pagestorm.workload.files import Record, TextFile, whole_number

MAX_BINS = 2**20
MAX_WEIGHT = 1e18


def read_histogram(file: TextFile) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Lengths in tokens, each >= 1, and their weights, each >= 0, both of the shape (bins,).

    Raises ScenarioError with the line and column of what is wrong.
    """
    lengths: list[int] = []
    weights: list[float] = []
    for record in file.records(("tokens", "value"), ("weight",)):
        if len(lengths) == MAX_BINS:
            raise file.mistake(f"more than {MAX_BINS:,} bins; merge some", line=record.line)
        lengths.append(_length(file, record))
        weights.append(_weight(file, record))
    if not lengths:
        raise file.mistake("has a header but no rows; add at least one")
    return np.array(lengths, dtype=np.int64), np.array(weights, dtype=np.float64)


def _length(file: TextFile, record: Record) -> int:
    length = whole_number(record.cells[0], MAX_TOKENS)
    if length == 0:
        length = "is 0"
    if isinstance(length, str):
        raise file.mistake(
            f"the length {length}; write whole tokens from 1", line=record.line, column=record.columns[0]
        )
    return length


def _weight(file: TextFile, record: Record) -> float:
    text = record.cells[1]
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 <= weight <= MAX_WEIGHT:
        raise file.mistake(
            f"the weight {text[:40]!r} is not a number from 0 to {MAX_WEIGHT:g}; correct it",
            line=record.line,
            column=record.columns[1],
        )
    return weight
