"""The kinds of ledger and allocator that the contract is checked on."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest

from pagestorm.memory.allocator import PageAllocator
from pagestorm.memory.counting import CountingLedger
from pagestorm.memory.ledger import Ledger
from pagestorm.memory.paged import FreeList, PagedLedger
from pagestorm.memory.twin import TwinPool

MakeLedger = Callable[[int, int, int], Ledger]
"""(pages, page_size, owners) -> ledger"""
MakeAllocator = Callable[[int, int], PageAllocator]
"""(pages, page_size) -> allocator"""

LEDGERS = ["counting", "paged", "paged-on-torch", "torch-cpu", "torch-cpu-full", "torch-cuda", "twin"]
WITH_IDS = [kind for kind in LEDGERS if kind != "counting"]
ALLOCATORS = ["free-list", "torch-cpu", "torch-cuda"]
LONGEST_TOKENS = 4096


def skip_where_absent(kind: str) -> None:
    """Skip the test where this machine cannot make such a pool."""
    if not ("torch" in kind or kind == "twin"):
        return
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed: pip install 'pagestorm[torch]'")
    if kind.endswith("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip(f"torch {torch.__version__} sees no CUDA device")


def make_ledger(kind: str, pages: int, page_size: int, owners: int) -> Ledger:
    if kind == "counting":
        return CountingLedger(pages, page_size, owners)
    if kind == "paged":
        return PagedLedger(pages, page_size, owners)
    if kind == "paged-on-torch":
        return PagedLedger(pages, page_size, owners, make_allocator("torch-cpu", pages, page_size))
    if kind == "twin":
        return TwinPool([make_ledger(part, pages, page_size, owners) for part in ("paged", "counting", "torch-cpu")])
    from pagestorm_real import Payload, TorchLedger

    payload = Payload("full", layers=2, head_dim=16) if kind.endswith("full") else Payload()
    device = "cuda" if "cuda" in kind else "cpu"
    return TorchLedger(pages, page_size, owners, LONGEST_TOKENS, device, payload)


def make_allocator(kind: str, pages: int, page_size: int) -> PageAllocator:
    if kind == "free-list":
        return FreeList(pages, page_size)
    from pagestorm_real import TorchPool

    return TorchPool(pages, page_size, kind.removeprefix("torch-"))
