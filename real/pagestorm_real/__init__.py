"""Real memory behind the pools of Pagestorm: torch tensors, and what this machine lets them take.

Names that need torch are loaded when they are first used, so that the budget can be asked about without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestorm_real.budget import Budget, PoolBytes, check, check_pool, cpu_budget, cuda_budget, examine, pool_bytes
    from pagestorm_real.payload import Payload
    from pagestorm_real.pool import TorchLedger, TorchPool, open_ledger

__all__ = [
    "Budget",
    "Payload",
    "PoolBytes",
    "TorchLedger",
    "TorchPool",
    "check",
    "check_pool",
    "cpu_budget",
    "cuda_budget",
    "examine",
    "open_ledger",
    "pool_bytes",
]

_HOME = {
    "Budget": "budget",
    "Payload": "payload",
    "PoolBytes": "budget",
    "TorchLedger": "pool",
    "TorchPool": "pool",
    "check": "budget",
    "check_pool": "budget",
    "cpu_budget": "budget",
    "cuda_budget": "budget",
    "examine": "budget",
    "open_ledger": "pool",
    "pool_bytes": "budget",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
