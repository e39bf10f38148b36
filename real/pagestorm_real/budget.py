"""What may be taken of this machine's memory, before it is taken.

On the CPU: the smaller of what the operating system calls available and what the memory cgroups leave, less a
reserve; so the process is refused by us, never killed by the kernel. On CUDA: what the driver and torch's own cache
report as free, less a reserve. Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from pagestorm.errors import MemoryRefused
from pagestorm_real import cgroup
from pagestorm_real.payload import WORD_BYTES, Payload

if TYPE_CHECKING:
    import torch

GIB = 1 << 30
CPU_RESERVE_BYTES = GIB
"""Left alone on the host, at least; `CPU_RESERVE_FRACTION` of what is available where that is more."""
CPU_RESERVE_FRACTION = 0.05
CUDA_RESERVE_BYTES = 512 << 20
"""Left alone on a GPU: kernels, workspaces and the allocator's rounding."""
UNKNOWN_CGROUP_FRACTION = 0.5
"""Of what the host reports, this part may be taken where the own cgroup limit cannot be read."""

TOKENS_AT_ONCE = 1 << 17
"""Tokens whose slots a torch ledger works out in one piece; bounds the scratch memory of a call."""

_INDEX_BYTES, _ID_BYTES, _FLAG_BYTES = 8, 4, 1
_SCRATCH_BYTES_PER_TOKEN = 128
_TOUCHED_AT_ONCE_BYTES = 256 << 20


def _host_available_bytes() -> int:
    return int(psutil.virtual_memory().available)


@dataclass(frozen=True)
class Machine:
    """Where the facts come from; the defaults are this machine, tests bring their own."""

    root: Path = Path("/")
    available_bytes: Callable[[], int] = _host_available_bytes
    cuda_free_bytes: Callable[[str], int] = field(default=lambda device: _cuda_free_bytes(device))


HERE = Machine()


@dataclass(frozen=True)
class Budget:
    """What may be taken on a device: available less reserve, and what set the bound (all in bytes)."""

    device: str
    available_bytes: int
    reserve_bytes: int
    bound: str
    warning: str | None = None

    @property
    def allowed_bytes(self) -> int:
        return max(0, self.available_bytes - self.reserve_bytes)

    @property
    def reason(self) -> str:
        """What set the bound, as a phrase."""
        return f"{self.bound}: {amount(self.available_bytes)} available, {amount(self.reserve_bytes)} kept in reserve"


@dataclass(frozen=True)
class PoolBytes:
    """Memory of a torch ledger, by part. On the CPU all of it counts against one budget."""

    pages: int
    page_size: int
    pages_per_owner: int
    device_page_bytes: int
    host_page_bytes: int
    kv_bytes: int
    free_list_bytes: int
    request_table_bytes: int
    scratch_bytes: int
    host_bytes: int

    @property
    def kept_device_bytes(self) -> int:
        """Tensors that stay for the life of the ledger."""
        return self.kv_bytes + self.free_list_bytes + self.request_table_bytes

    @property
    def device_bytes(self) -> int:
        return self.kept_device_bytes + self.scratch_bytes

    @property
    def total_bytes(self) -> int:
        return self.device_bytes + self.host_bytes

    def needed_bytes(self, device: str) -> int:
        """What `device` must have: on the CPU the host's part comes on top."""
        return self.total_bytes if device == "cpu" else self.device_bytes


def cpu_budget(machine: Machine = HERE) -> Budget:
    """What may be taken of the host's memory now."""
    available, bound, warning = machine.available_bytes(), "host memory", None
    cgroups = cgroup.read(machine.root)
    tightest = cgroups.tightest
    if tightest is not None and tightest.headroom_bytes < available:
        available = tightest.headroom_bytes
        bound = f"cgroup {tightest.path} (limit {amount(tightest.limit_bytes)})"
    if cgroups.problem is not None:
        warning = cgroups.problem
        if (machine.root / "proc/self/cgroup").exists():
            available = int(available * UNKNOWN_CGROUP_FRACTION)
            bound = f"half of {bound}: {cgroups.problem}"
    reserve = max(CPU_RESERVE_BYTES, int(available * CPU_RESERVE_FRACTION))
    return Budget("cpu", available, reserve, bound, warning)


def cuda_budget(device: str, machine: Machine = HERE) -> Budget:
    """What may be taken of a GPU's memory now."""
    return Budget(device, machine.cuda_free_bytes(device), CUDA_RESERVE_BYTES, "free GPU memory")


def of(device: str, machine: Machine = HERE) -> Budget:
    """The budget of `cpu`, `cuda` or `cuda:N`."""
    return cpu_budget(machine) if device == "cpu" else cuda_budget(device, machine)


def check(needed_bytes: int, device: str, machine: Machine = HERE, remedy: str = "") -> None:
    """Raise `MemoryRefused` unless `needed_bytes` may be taken on `device` now."""
    _check(needed_bytes, of(device, machine), lambda budget_bytes: remedy or "close other programs, or take less")


def check_pool(pool: PoolBytes, device: str, machine: Machine = HERE) -> None:
    """Raise `MemoryRefused`, saying how many pages would fit, unless a ledger's memory may be taken now."""
    _check(pool.needed_bytes(device), of(device, machine), lambda budget_bytes: _fitting(pool, device, budget_bytes))
    if device != "cpu":
        check(pool.host_bytes, "cpu", machine)


def pool_bytes(
    pages: int, page_size: int, owners: int, max_length: int, payload: Payload, sharing: bool = False
) -> PoolBytes:
    """Memory of a `TorchLedger` with these arguments.

    `sharing` counts the host tables that exist once pages have been aliased, moved or dropped.
    """
    for name, value in (("pages", pages), ("page_size", page_size), ("owners", owners), ("max_length", max_length)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    pages_per_owner = -(-max_length // page_size)
    buffers = payload.slot_bytes * (pages + 1) * page_size
    index, scratch_tokens = _INDEX_BYTES, min(TOKENS_AT_ONCE, pages * page_size)
    return PoolBytes(
        pages=pages,
        page_size=page_size,
        pages_per_owner=pages_per_owner,
        device_page_bytes=payload.slot_bytes * page_size + (2 + 2) * index + _FLAG_BYTES,
        host_page_bytes=4 * index,
        kv_bytes=buffers + (payload.row_words * WORD_BYTES if buffers else 0),
        # Ring, scratch of the check for pages given twice, and the out flags; the last two have an entry for page 0.
        free_list_bytes=pages * index + (pages + 1) * (index + _FLAG_BYTES),
        request_table_bytes=owners * pages_per_owner * _ID_BYTES,
        # The worst call opens or closes all pages at once.
        scratch_bytes=scratch_tokens * _SCRATCH_BYTES_PER_TOKEN + 2 * pages * index + payload.scratch_bytes,
        host_bytes=3 * owners * index + 4 * pages * index + (sharing_bytes(owners, pages_per_owner) if sharing else 0),
    )


def sharing_bytes(owners: int, pages_per_owner: int) -> int:
    """Host tables of a ledger whose pages are aliased, moved or dropped."""
    return owners * pages_per_owner * (_INDEX_BYTES + _FLAG_BYTES)


@contextmanager
def taking(pool: PoolBytes, device: str) -> Iterator[None]:
    """Turn an allocation that fails after all into `MemoryRefused`; what was taken so far goes back."""
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        failure: Exception = error
    except RuntimeError as error:
        if "allocate memory" not in str(error):  # what torch's CPU allocator says
            raise
        failure = error
    else:
        return
    needed = pool.needed_bytes(device)
    if device != "cpu":
        torch.cuda.empty_cache()
    budget = of(device)
    raise MemoryRefused(
        f"torch could not take {amount(needed)} on {device}, although it looked free before: {failure}",
        needed_bytes=needed,
        budget_bytes=budget.allowed_bytes,
        remedy=_fitting(pool, device, budget.allowed_bytes),
    ) from failure


def touch(tensor: torch.Tensor, machine: Machine = HERE) -> None:
    """Fill with zeros, a piece at a time, so that host memory is really there; stop before the reserve is used."""
    flat = tensor.view(-1)
    step = _TOUCHED_AT_ONCE_BYTES // tensor.element_size()
    for start in range(0, flat.numel(), step):
        piece = flat[start : start + step]
        if tensor.device.type == "cpu" and flat.numel() > step:
            check(piece.numel() * piece.element_size(), "cpu", machine, "another program took memory meanwhile; retry")
        piece.zero_()


def examine(machine: Machine = HERE) -> dict[str, object]:
    """torch, CUDA, host memory, cgroup limits and what the real pools may take. JSON-able; sizes in bytes.

    Raises ModuleNotFoundError where torch is not installed: there are no real pools then.
    """
    import torch

    cgroups = cgroup.read(machine.root)
    cpu = cpu_budget(machine)
    return {
        "torch": str(torch.__version__),
        "cuda_version": torch.version.cuda,
        "cuda_available": torch.cuda.is_available(),
        "cuda": [_gpu_facts(place, machine) for place in range(_gpus())],
        "host_total_bytes": int(psutil.virtual_memory().total),
        "host_available_bytes": machine.available_bytes(),
        "cgroups": [{**asdict(level), "headroom_bytes": level.headroom_bytes} for level in cgroups.levels],
        "cgroup_headroom_bytes": cgroups.tightest.headroom_bytes if cgroups.tightest else None,
        "cpu_budget_bytes": cpu.allowed_bytes,
        "cpu_reserve_bytes": cpu.reserve_bytes,
        "cpu_budget_reason": cpu.reason,
        "warning": cpu.warning,
    }


def amount(n: int) -> str:
    """A number of bytes as people compare them: `12.00 GiB (12.88 GB)`."""
    return f"{n / GIB:.2f} GiB ({n / 1e9:.2f} GB)"


def _check(needed_bytes: int, budget: Budget, remedy: Callable[[int], str]) -> None:
    if needed_bytes <= budget.allowed_bytes:
        return
    short = needed_bytes - budget.allowed_bytes
    raise MemoryRefused(
        f"{amount(needed_bytes)} needed on {budget.device}, {amount(budget.allowed_bytes)} may be taken: "
        f"{amount(short)} short ({budget.reason})",
        needed_bytes=needed_bytes,
        budget_bytes=budget.allowed_bytes,
        remedy=remedy(budget.allowed_bytes),
    )


def _fitting(pool: PoolBytes, device: str, budget_bytes: int) -> str:
    page_bytes = pool.device_page_bytes + (pool.host_page_bytes if device == "cpu" else 0)
    fixed_bytes = pool.needed_bytes(device) - page_bytes * pool.pages
    pages = (budget_bytes - fixed_bytes) // page_bytes
    if pages < 1:
        return "not even one page of this shape fits: lower the request table (owners, max_length) or the payload"
    return f"at most {pages} pages of {pool.page_size} ({pages * pool.page_size} tokens) of this shape would fit"


def _cuda_free_bytes(device: str) -> int:
    """Free on the GPU, and what torch holds without using it."""
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _gpu_facts(place: int, machine: Machine) -> dict[str, object]:
    import torch

    device = f"cuda:{place}"
    free, total = torch.cuda.mem_get_info(device)
    allowed = cuda_budget(device, machine).allowed_bytes
    name = torch.cuda.get_device_name(device)
    return {"device": device, "name": name, "free_bytes": free, "total_bytes": total, "budget_bytes": allowed}
