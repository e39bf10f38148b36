"""What an accelerator offers in fact, apart from its nominal size (usable.csv): two figures, from two places.

The driver (`nvidia-smi`) reports a little less than the nominal size, and the engines' memory heuristics read that
one. CUDA reports less again, and what is free of that is what an engine divides up.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from pagestorm.catalog.gpus import Gpu
from pagestorm.catalog.table import Facts, read
from pagestorm.errors import ScenarioError

MIB, GIB = 1 << 20, 1 << 30
CUDA_SHARE = 0.9935
"""CUDA's total over the driver's where nobody measured it: that of H100, H200, B200 and L40S is 0.987 to 0.995."""


class UsableRow(Facts, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accelerator: MiB that the driver reports, GiB that CUDA reports as its total, to the digit printed."""

    name: str
    driver_mib: int | None = None
    cuda_gib: float | None = None
    source: str


class Usable(NamedTuple):
    """Memory of one card: what the driver reports, what CUDA offers, and where the figures come from."""

    driver_bytes: int
    cuda_bytes: int
    source: str


@cache
def _rows() -> dict[str, UsableRow]:
    return {row.name: row for row in read("usable.csv", UsableRow)}


def usable(gpu: Gpu) -> Usable:
    """What one card offers. Where a figure was not seen it is estimated, and `source` says so."""
    row = _rows().get(gpu.name)
    driver_mib = row.driver_mib if row is not None else None
    cuda_gib = row.cuda_gib if row is not None else None
    sources = [row.source] if row is not None else []
    if driver_mib is None:
        driver_mib = gpu.memory_mib
        sources.append("the driver's figure is the nominal size")
    if driver_mib is None:
        raise ScenarioError(f"the catalog has no memory size for {gpu.name}; give --gpu-memory-bytes", key="gpu")
    if cuda_gib is None:
        cuda_bytes = int(driver_mib * MIB * CUDA_SHARE)
        sources.append(f"CUDA's total is estimated as {CUDA_SHARE:.2%} of the driver's")
    else:
        cuda_bytes = round(cuda_gib * GIB)
    return Usable(driver_mib * MIB, cuda_bytes, "; ".join(sources))
