"""What this machine has, for `pagestorm doctor`: works with and without torch."""

from __future__ import annotations

import importlib
import platform
from typing import Any

import psutil

from pagestorm import compiled

GIB = 1 << 30


def examine() -> dict[str, Any]:
    """Facts of this machine, JSON-able. The `real` part is null where torch is not installed."""
    memory = psutil.virtual_memory()
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "compiled": compiled.in_use(),
        "cpu_cores": psutil.cpu_count(logical=True),
        "host_memory_bytes": memory.total,
        "host_available_bytes": memory.available,
        "hicache_budget_bytes": hicache_budget_bytes(),
        "torch": None,
        "real": None,
    }
    try:
        budget = importlib.import_module("pagestorm_real.budget")
        found["real"] = budget.examine()
        found["torch"] = found["real"]["torch"]
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "pagestorm_real"):
            raise
    return found


def hicache_budget_bytes() -> int | None:
    """What SGLang, as one rank on this machine, may claim for its host pools now; None where a limit is unreadable."""
    from pagestorm.sizing import budget, this_machine

    machine = this_machine.read()
    if machine.problem is not None or machine.available_bytes is None:
        return None
    return max(0, budget.budget_bytes(budget.available_bytes(machine.available_bytes, machine.headroom_bytes)))


def both(size_bytes: int) -> str:
    """A size in GiB (2^30) and GB (10^9)."""
    return f"{size_bytes / GIB:.2f} GiB ({size_bytes / 1e9:.2f} GB)"


def as_text(found: dict[str, Any]) -> str:
    """For a person."""
    lines = [
        f"python     {found['python']} on {found['system']}, {found['cpu_cores']} cores",
        f"engine     {'compiled' if found['compiled'] else 'pure Python (make fast compiles it)'}",
        f"memory     {both(found['host_available_bytes'])} available of {both(found['host_memory_bytes'])}",
    ]
    claim = found["hicache_budget_bytes"]
    shown = "an unknown amount" if claim is None else both(claim)
    lines.append(f"hicache    one rank may claim {shown} for host pools")
    real = found["real"]
    if real is None:
        lines.append("torch      not installed: runs are simulated; for real pools pip install 'pagestorm[torch]'")
        return "\n".join(lines)
    lines.append(f"torch      {real['torch']}")
    lines.append(f"cpu pool   may take {both(real['cpu_budget_bytes'])}: {real['cpu_budget_reason']}")
    for device in real["cuda"]:
        lines.append(
            f"{device['device']:10s} {device['name']}: {both(device['free_bytes'])} free of "
            f"{both(device['total_bytes'])}, a pool may take {both(device['budget_bytes'])}"
        )
    if not real["cuda"]:
        lines.append("cuda       none: --device cuda is refused here")
    return "\n".join(lines)
