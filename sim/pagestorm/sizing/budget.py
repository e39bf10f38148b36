"""How much host memory a rank may claim for its HiCache pools, from the machine's figures.

Formulas: sglang 0.5.23, `mem_cache/host_memory.py` and `mem_cache/pool_host/base.py`. Pure: who reads the machine
(`pagestorm_real.cgroup`) passes its figures in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

GIB = 1 << 30
RESERVE_BYTES = 10 * GIB
"""Host memory that the engine leaves to everything else."""
CANNOT_SIZE = (
    "Cannot automatically size HiCache host memory; set --hicache-size explicitly (GB per rank), leaving room for "
    "other memory use within the container limit."
)


class CgroupLevel(NamedTuple):
    """One directory of a memory cgroup hierarchy that has a limit; all in bytes.

    `usage` and the file pages are those of the directory and all below it. `protected`: a descendant of a version 2
    directory keeps memory for itself (`memory.min`), or might.
    """

    limit: int
    usage: int
    active_file: int = 0
    inactive_file: int = 0
    protected: bool = False

    @property
    def headroom(self) -> int:
        """What the level leaves: file pages count as free, since the kernel gives them back first."""
        credit = 0 if self.protected else self.active_file + self.inactive_file
        return max(0, self.limit - max(0, self.usage - credit))


def cgroup_headroom(levels: Iterable[CgroupLevel]) -> int | None:
    """The tightest level; None where nothing limits."""
    return min((level.headroom for level in levels), default=None)


def available_bytes(host_available: int, headroom: int | None) -> int:
    """Allocatable host memory: what the system has, within the container's limit."""
    return host_available if headroom is None else min(host_available, headroom)


def budget_bytes(available: int, ranks_per_host: int = 1) -> int:
    """What one rank may claim: its share of what is available beyond the reserve. May be below zero."""
    return (available - RESERVE_BYTES) // ranks_per_host


def budgets_after_peers(available: int, ranks_per_host: int, asked_bytes: int) -> list[int]:
    """The budget that a rank sees when 0, 1, ... of its peers have already pinned `asked_bytes` each.

    Explicit sizes: each rank reads the machine when it arrives, so the order of start decides.
    """
    return [budget_bytes(available - peers * asked_bytes, ranks_per_host) for peers in range(ranks_per_host)]


def first_refused(budgets: Sequence[int], asked_bytes: int) -> int | None:
    """With how many peers before it a rank is refused first; None if never."""
    return next((peers for peers, budget in enumerate(budgets) if asked_bytes > budget), None)


class Snapshot:
    """A budget read once, from which every pool of a rank is booked (automatic sizing)."""

    def __init__(self, budget: int) -> None:
        self.left = budget

    def book(self, asked: int) -> int:
        """What is allowed before this pool; the pool is booked if it fits."""
        allowed = self.left
        if asked <= allowed:
            self.left = allowed - asked
        return allowed
