"""Which torch operations a piece of code calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Operation:
    name: str
    elements: int
    """Of a tensor that it made; 0 for a view and for work in place."""

    @property
    def waits(self) -> bool:
        """Whether the host has to wait for the device to know the result."""
        return any(name in self.name for name in ("_local_scalar_dense", "nonzero", "item"))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives its modes no types
    def __init__(self, seen: list[Operation]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = isinstance(result, torch.Tensor) and not func.is_view and result is not args[0]
        self.seen.append(Operation(str(func), result.numel() if made else 0))
        return result


@contextmanager
def watching() -> Iterator[list[Operation]]:
    """The operations called inside the block, in order."""
    seen: list[Operation] = []
    with _Watch(seen):
        yield seen
