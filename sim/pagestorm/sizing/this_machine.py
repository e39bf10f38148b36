"""This machine's memory and cgroup headroom, as the host pools are checked against it."""

from __future__ import annotations

import importlib
from pathlib import Path

import psutil

from pagestorm.sizing.sglang_host import HostMachine


def read(root: Path = Path("/")) -> HostMachine:
    """Read the machine now; torch is not needed for it. `root` is the root of the filesystem (for tests)."""
    found = importlib.import_module("pagestorm_real.cgroup").read(root)
    tightest = found.tightest
    source = "this machine (psutil, cgroups)" if tightest is None else f"this machine (psutil, cgroup {tightest.path})"
    headroom = None if tightest is None else int(tightest.headroom_bytes)
    return HostMachine(int(psutil.virtual_memory().available), headroom, found.problem, source)
