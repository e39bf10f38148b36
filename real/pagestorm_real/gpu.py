"""`make gpu`: the checks that need an NVIDIA GPU, in at most five minutes and without a network.

    python -m pagestorm_real.gpu      JSON on stdout, a verdict for each check; exit 1 when one failed

A check is `passed`, `failed` or `skipped` (with the reason). Without CUDA all are skipped, and the exit code is 0.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from pagestorm.engine.iteration import EngineLimits, SglangEngine
from pagestorm.engine.machine import FOREVER_FS
from pagestorm.engine.request import Request
from pagestorm.engine.sglang import Capacity
from pagestorm.errors import MemoryRefused
from pagestorm.events import EventLog
from pagestorm.memory.ledger import Ledger
from pagestorm.memory.paged import PagedLedger
from pagestorm.memory.twin import TwinPool
from pagestorm.scenario.schema import Linear
from pagestorm.steptime import LinearStepTime
from pagestorm_real import budget
from pagestorm_real.payload import Payload
from pagestorm_real.pool import TorchLedger

PAGE = 64
MODEL = Payload("stamp", 32, 8, 128, 2)
"""K and V of Llama-3.1-8B in bf16: 32 layers x 8 heads x 128, 131,072 bytes a token."""
FILLED = 0.9
TOO_MUCH = 1.1
DRAWS = 400
LAUNCHES = 200

Figures = dict[str, Any]


class SkippedError(Exception):
    """A check that cannot be made here, with the reason."""


def contract_suite(device: str) -> Figures:
    """The tests of the ledger contract on CUDA, with pytest, from a checkout."""
    tests = Path(__file__).resolve().parents[2] / "tests" / "memory"
    if not tests.is_dir():
        raise SkippedError("the tests are not here: run it from a checkout")
    try:
        import pytest  # noqa: F401
    except ModuleNotFoundError:
        raise SkippedError("pytest is not installed") from None
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", device, str(tests)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
    if done.returncode not in (0, 5):
        raise AssertionError(f"pytest: {last}: {done.stdout[-1500:]}")
    if done.returncode == 5:
        raise SkippedError("no test of the suite is for this device")
    return {"pytest": last}


def random_lockstep(device: str) -> Figures:
    """Drawn calls on the paged ledger and the torch one; every call is compared."""
    draw = np.random.default_rng(11)
    calls = 0
    for page_size in (1, 16, 64):
        twin = TwinPool(
            [PagedLedger(400, page_size, 33), TorchLedger(400, page_size, 33, 400 * page_size, device, Payload())]
        )
        held: set[int] = set()
        for _ in range(DRAWS):
            calls += _drawn_call(twin, draw, held, page_size)
        twin.audit()
        twin.release_many(np.array(sorted(held), dtype=np.int64))
        assert twin.free_pages() == 400, "pages were lost"
    return {"calls": calls}


def _drawn_call(twin: Ledger, draw: np.random.Generator, held: set[int], page_size: int) -> int:
    kind = draw.integers(0, 3)
    if kind == 0 or not held:
        new = [o for o in range(1, 33) if o not in held][:4]
        if new and twin.extend(np.array(new), draw.integers(1, 6 * page_size + 2, len(new))) is not None:
            held.update(new)
    elif kind == 1:
        twin.decode(np.array(sorted(held), dtype=np.int64), int(draw.integers(1, 2 * page_size + 2)))
    else:
        gone = sorted(held)[: int(draw.integers(1, 3))]
        twin.release_many(np.array(gone, dtype=np.int64))
        held.difference_update(gone)
    return 1


def real_size(device: str) -> Figures:
    """A server at real model size on nine tenths of the free memory, paged and torch in lockstep, under pressure."""
    room = int(budget.of(device).allowed_bytes * FILLED)
    pages = room // (budget.pool_bytes(1000, PAGE, 257, 1000 * PAGE, MODEL).device_bytes // 1000)
    while budget.pool_bytes(pages, PAGE, 257, 16384, MODEL).device_bytes > room:
        pages -= max(1, pages // 200)
    twin = TwinPool([PagedLedger(pages, PAGE, 257), TorchLedger(pages, PAGE, 257, 16384, device, MODEL)])
    each = pages * PAGE // 120
    engine = SglangEngine(
        EngineLimits(Capacity(pages * PAGE, 16384, PAGE), 256, 8192, 16384, 0.05, True, "pages"),
        twin,
        LinearStepTime(Linear()),
        EventLog(),
    )
    for number in range(200):
        length = min(15000, each // 2 + 37 * (number % 50))
        engine.submit(Request(number, 0, length, min(1200, each), min(1300, each + 100)), 0)
    started = time.perf_counter()
    while not engine.blocked and not engine.over:
        engine.ended.clear()
        engine.advance(FOREVER_FS)
    twin.audit()
    assert not engine.outcome, engine.error
    assert twin.free_pages() == pages, "pages were lost"
    counts = engine.counts
    return {
        "pool_pages": pages,
        "kv_bytes": pages * PAGE * MODEL.slot_bytes,
        "peak_used_pages": counts.peak_used_pages,
        "finished": counts.finished,
        "retractions": counts.retractions,
        "decode_steps": counts.decode_steps,
        "wall_s": round(time.perf_counter() - started, 2),
    }


def allocation_times(device: str) -> Figures:
    """One decode step of 256 requests at page 16, on the device and on the CPU, each waited for."""
    times = {}
    for place in (device, "cpu"):
        ledger = TorchLedger(8192, 16, 257, 16 * 8192, place, Payload("none"))
        owners = np.arange(1, 257)
        assert ledger.extend(owners, 100 + owners % 16) is not None
        spent = []
        for _ in range(LAUNCHES):
            if place != "cpu":
                torch.cuda.synchronize(place)
            started = time.perf_counter_ns()
            assert ledger.decode(owners, 1) is not None
            if place != "cpu":
                torch.cuda.synchronize(place)
            spent.append(time.perf_counter_ns() - started)
        times[place] = median(spent[20:]) / 1000
    return {f"{place}_us": round(us, 1) for place, us in times.items()} | {
        "device_over_cpu": round(times[device] / times["cpu"], 2)
    }


def pinned_host_memory(device: str) -> Figures:
    """Pinned host memory is taken within the budget, touched, copied to the device and back, and given back."""
    size = min(1 << 30, budget.of("cpu").allowed_bytes // 4)
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    buffer.random_(generator=torch.Generator().manual_seed(5))
    started = time.perf_counter()
    there = buffer.to(device, non_blocking=True)
    torch.cuda.synchronize(device)
    copy_s = time.perf_counter() - started
    assert torch.equal(there.cpu(), buffer), "the copy differs"
    return {"pinned_bytes": size, "host_to_device_bytes_per_s": int(size / copy_s)}


def refusal(device: str) -> Figures:
    """A pool of 110 % of the free memory is refused before anything is taken."""
    before = torch.cuda.mem_get_info(device)[0]
    pages = int(before * TOO_MUCH) // (PAGE * MODEL.slot_bytes)
    try:
        TorchLedger(pages, PAGE, 257, 16384, device, MODEL)
    except MemoryRefused as refused:
        taken = before - torch.cuda.mem_get_info(device)[0]
        assert taken < 64 << 20, f"{taken} bytes were taken all the same"
        return {"asked_pages": pages, "answer": str(refused), "remedy": refused.remedy}
    raise AssertionError("a pool larger than the memory was not refused")


def real_out_of_memory(device: str) -> Figures:
    """A torch out-of-memory that the budget could not foresee is caught and reported, and the memory comes back."""
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info(device)[0]
    asked = int(before * TOO_MUCH)
    try:
        torch.empty(asked, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        told = str(error).splitlines()[0]
    else:
        raise AssertionError("more than the free memory was given")
    torch.cuda.empty_cache()
    after = torch.cuda.mem_get_info(device)[0]
    assert before - after < 64 << 20, f"{before - after} bytes did not come back"
    probe = TorchLedger(64, PAGE, 9, 64 * PAGE, device, Payload())
    assert probe.extend(np.array([1]), np.array([100])) == 2, "the device is unusable afterwards"
    return {"asked_bytes": asked, "answer": told, "not_returned_bytes": max(0, before - after)}


def frees_beside_a_kernel(device: str) -> Figures:
    """Pages are given back and handed out again while a long kernel runs on another stream; stamps stay right."""
    ledger = TorchLedger(1024, 16, 65, 16 * 1024, device, Payload())
    matrix = torch.randn(4096, 4096, device=device)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch gives it no types
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(200):
            matrix = matrix @ matrix
            matrix = matrix / matrix.norm()
    running = not side.query()
    rounds = 0
    for shift in range(50):
        owners = np.arange(1, 33) + 32 * (shift % 2)
        assert ledger.extend(owners, np.full(32, 100 + shift)) is not None
        assert ledger.decode(owners, 20) is not None
        ledger.release_many(owners)
        rounds += 1
    still = not side.query()
    torch.cuda.synchronize(device)
    ledger.audit()
    assert ledger.free_pages() == 1024, "pages were lost"
    return {"rounds": rounds, "kernel_ran_at_start": running, "kernel_ran_at_end": still}


CHECKS: tuple[Callable[[str], Figures], ...] = (
    random_lockstep,
    allocation_times,
    pinned_host_memory,
    refusal,
    real_out_of_memory,
    frees_beside_a_kernel,
    real_size,
    contract_suite,
)


def examine(device: str | None) -> list[Figures]:
    """Run every check on `device`; None skips them all."""
    found = []
    for check in CHECKS:
        started = time.perf_counter()
        row: Figures = {"check": check.__name__, "about": (check.__doc__ or "").splitlines()[0]}
        if device is None:
            row |= {"verdict": "skipped", "reason": "no CUDA device here"}
        else:
            row |= _verdict(check, device)
            torch.cuda.empty_cache()
        row["seconds"] = round(time.perf_counter() - started, 2)
        found.append(row)
    return found


def _verdict(check: Callable[[str], Figures], device: str) -> Figures:
    try:
        return {"verdict": "passed", **check(device)}
    except SkippedError as reason:
        return {"verdict": "skipped", "reason": str(reason)}
    except Exception as error:
        # Whatever a check meets is its verdict: the checks after it must still run.
        return {"verdict": "failed", "reason": f"{type(error).__name__}: {error}"}


def main() -> int:
    """Print the verdicts; 1 when a check failed."""
    device = "cuda" if torch.cuda.is_available() else None
    rows = examine(device)
    print(
        json.dumps(
            {
                "torch": torch.__version__,
                "device": torch.cuda.get_device_name(0) if device else None,
                "checks": rows,
                "passed": sum(row["verdict"] == "passed" for row in rows),
                "failed": sum(row["verdict"] == "failed" for row in rows),
                "skipped": sum(row["verdict"] == "skipped" for row in rows),
            },
            indent=2,
        )
    )
    return int(any(row["verdict"] == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
