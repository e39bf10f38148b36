"""Host pools taken for real: every page written, on CUDA pinned too, read back, and given back.

A host pool that fits the engine's check is only promised by the kernel; it is there once its pages are written. Here it
is taken piece by piece, and each piece is asked for first, so that a machine too small for it refuses instead of
killing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagestorm.errors import MemoryRefused, PoolCorruption
from pagestorm_real import budget
from pagestorm_real.budget import HERE, Machine, amount

if TYPE_CHECKING:
    import torch

PIECE_BYTES = 256 << 20
PAGE_BYTES = 4096


@dataclass(frozen=True)
class Touched:
    """What was taken and given back."""

    taken_bytes: int
    pieces: int
    ranks: int
    pinned: bool

    @property
    def sentence(self) -> str:
        """For a person."""
        ranks = f"{self.ranks} ranks" if self.ranks > 1 else "1 rank"
        how = "pinned, written and read back" if self.pinned else "written and read back"
        return f"took {amount(self.taken_bytes)} of host memory for {ranks}, every page {how}, and gave it back"


def touch_pools(
    pools: Sequence[tuple[str, int]],
    *,
    ranks: int = 1,
    quiet: bool = False,
    machine: Machine = HERE,
    piece_bytes: int = PIECE_BYTES,
) -> Touched:
    """Take pools of (name, bytes) for each of `ranks` at once, then give them back.

    Raises `MemoryRefused` before a piece that this machine cannot give, `PoolCorruption` where a page does not hold
    what was written to it; what was taken goes back then too.
    """
    import torch

    total = sum(size for _, size in pools) * ranks
    budget.check(total, "cpu", machine, _smaller(total, machine))
    pinned = torch.cuda.is_available()
    held: list[torch.Tensor] = []
    try:
        with _progress(total, quiet) as advance:
            for label, size in _pieces(pools, ranks, piece_bytes):
                held.append(_take(label, size, sum(map(len, held)), pinned, machine))
                advance(size)
        _read_back(held)
        return Touched(total, len(held), ranks, pinned)
    finally:
        _give_back(held, pinned)


def _smaller(total: int, machine: Machine) -> str:
    share = budget.of("cpu", machine).allowed_bytes / max(total, 1)
    return f"take host pools of {share:.0%} of this size at most, or fewer ranks on this machine"


def _pieces(pools: Iterable[tuple[str, int]], ranks: int, most: int) -> Iterator[tuple[str, int]]:
    """(which pool of which rank, bytes) of every piece."""
    named = list(pools)
    for rank in range(ranks):
        for name, size in named:
            for start in range(0, size, most):
                yield f"{name} of rank {rank}", min(most, size - start)


def _take(label: str, size: int, before: int, pinned: bool, machine: Machine) -> torch.Tensor:
    """One piece, with all its pages written."""
    import torch

    remedy = f"{amount(before)} had been taken when {label} asked for more; take smaller host pools"
    budget.check(size, "cpu", machine, remedy)
    try:
        piece = torch.empty(size, dtype=torch.uint8)
    except RuntimeError as error:  # what torch's CPU allocator raises
        if "allocate memory" not in str(error):
            raise
        raise MemoryRefused(
            f"{label}: torch could not take {amount(size)} more, although it looked free before: {error}",
            needed_bytes=size,
            budget_bytes=budget.of("cpu", machine).allowed_bytes,
            remedy=remedy,
        ) from error
    piece.fill_(_stamp(size))
    if pinned:
        _pin(piece)
    return piece


def _stamp(size: int) -> int:
    return size % 251 + 1


def _pin(piece: torch.Tensor) -> None:
    runtime = _cuda_runtime()
    failed = int(runtime.cudaHostRegister(piece.data_ptr(), piece.numel(), 0))
    if failed:
        raise MemoryRefused(
            f"CUDA could not pin {amount(piece.numel())} of host memory (error {failed})",
            needed_bytes=piece.numel(),
            budget_bytes=0,
            remedy="raise the limit of locked memory (ulimit -l), or take smaller host pools",
        )


def _read_back(held: Sequence[torch.Tensor]) -> None:
    """One byte of every page must be what was written; memory that lies is worse than none."""
    for number, piece in enumerate(held):
        wrong = int((piece[::PAGE_BYTES] != _stamp(piece.numel())).sum())
        if wrong:
            raise PoolCorruption(f"piece {number} of the host pools: {wrong} pages do not hold what was written")


def _give_back(held: list[torch.Tensor], pinned: bool) -> None:
    if pinned:
        runtime = _cuda_runtime()
        for piece in held:
            runtime.cudaHostUnregister(piece.data_ptr())
    held.clear()


def _cuda_runtime() -> Any:
    import torch

    cuda: Any = torch.cuda
    return cuda.cudart()


@contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Callable[[int], object]]:
    """A bar on standard error where somebody watches."""
    from tqdm import tqdm

    off = quiet or not sys.stderr.isatty()
    with tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, delay=0.5, leave=False, disable=off) as bar:
        yield bar.update
