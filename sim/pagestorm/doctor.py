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
