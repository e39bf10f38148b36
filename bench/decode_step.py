"""Allocation for one decode step of 256 requests at page 16: our ledgers, and SGLang's own allocator beside them.

The engine's figure is taken inside its environment (`make reference`), in a process of its own, with as many
repetitions. Medians in microseconds.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from statistics import median

import numpy as np

from bench.table import Row
from pagestorm.memory.counting import CountingLedger
from pagestorm.memory.ledger import Ledger
from pagestorm.memory.paged import PagedLedger

BATCH, PAGE, PAGES, STEPS = 256, 16, 16_384, 400

THEIRS = f"""
import statistics, sys, time, types
for name in ("pagestorm_real", "pagestorm_real.reference"):
    package = types.ModuleType(name)
    package.__path__ = [sys.argv[1] + "/" + name.replace(".", "/")]
    sys.modules[name] = package
from pagestorm_real.reference import sglang_engine
sglang_engine.Engine()
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
pool = PagedTokenToKVPoolAllocator({PAGES * PAGE}, {PAGE}, torch.float16, "cpu", None, False)
start = torch.tensor([100 + i % {PAGE} for i in range({BATCH})])
zero = torch.zeros({BATCH}, dtype=torch.int64)
out = pool.alloc_extend(zero, zero, start, start, torch.full(({BATCH},), -1), int(start.sum()))
last = out[torch.cumsum(start, 0) - 1]
lens, spent = start, []
for _ in range({STEPS}):
    lens = lens + 1
    at = time.perf_counter_ns()
    last = pool.alloc_decode(lens, lens, last)
    spent.append(time.perf_counter_ns() - at)
print(statistics.median(spent[20:]) / 1000)
"""


def _ours(ledger: Ledger) -> float:
    owners = np.arange(1, BATCH + 1)
    assert ledger.extend(owners, 100 + np.arange(BATCH) % PAGE) is not None
    spent = []
    for _ in range(STEPS):
        started = time.perf_counter_ns()
        assert ledger.decode(owners, 1) is not None
        spent.append(time.perf_counter_ns() - started)
    return median(spent[20:]) / 1000


def _ledgers() -> dict[str, Ledger]:
    found: dict[str, Ledger] = {
        "counting": CountingLedger(PAGES, PAGE, BATCH + 1),
        "paged": PagedLedger(PAGES, PAGE, BATCH + 1),
    }
    try:
        from pagestorm_real.payload import Payload
        from pagestorm_real.pool import TorchLedger
    except ModuleNotFoundError:
        return found
    for kind in ("none", "stamp"):
        found[f"torch, payload {kind}"] = TorchLedger(PAGES, PAGE, BATCH + 1, 4096, "cpu", Payload(kind))
    return found


def _theirs() -> float | None:
    """None where the engine's environment is not here."""
    from pagestorm_real.reference import environment

    try:
        environment.require("sglang")
    except environment.ReferenceMissing:
        return None
    root = Path(environment.__file__).resolve().parents[2]
    done = subprocess.run(
        [str(environment.interpreter("sglang")), "-W", "ignore", "-c", THEIRS, str(root)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if done.returncode:
        raise SystemExit(f"the engine's side failed: {done.stderr[-2000:]}")
    return float(done.stdout.strip().splitlines()[-1])


def rows() -> list[Row]:
    """Microseconds for one step, and how many of them the engine's allocator takes."""
    theirs = _theirs()
    found: list[Row] = []
    for name, ledger in _ledgers().items():
        us = _ours(ledger)
        found.append({"ledger": name, "us": us, "sglang_over_ours": theirs / us if theirs else None})
    found.append({"ledger": "sglang alloc_decode", "us": theirs, "sglang_over_ours": None})
    return found
