"""What may be taken before it is taken, and what a refusal says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pagestorm.errors import MemoryRefused
from pagestorm_real import Payload, TorchLedger, budget, check, check_pool, cpu_budget, examine, pool_bytes
from pagestorm_real.budget import CPU_RESERVE_BYTES, CUDA_RESERVE_BYTES, GIB, PoolBytes, amount
from tests.real.trees import Tree, version_1, version_2

MINE = "/sys/fs/cgroup/jobs/mine"
LLAMA = Payload("stamp", 32, 8, 128, 2)


@pytest.fixture
def free(tmp_path: Path) -> Tree:
    """A machine whose cgroups set no limit."""
    return version_2(tmp_path)


def test_without_a_cgroup_limit_the_hosts_memory_less_the_reserve_may_be_taken(free: Tree) -> None:
    allowed = cpu_budget(free.machine(8 * GIB))
    assert (allowed.available_bytes, allowed.reserve_bytes) == (8 * GIB, CPU_RESERVE_BYTES)
    assert allowed.allowed_bytes == 7 * GIB
    assert allowed.reason == "host memory: 8.00 GiB (8.59 GB) available, 1.00 GiB (1.07 GB) kept in reserve"
    assert allowed.warning is None


def test_on_a_large_machine_the_reserve_is_a_fraction(free: Tree) -> None:
    allowed = cpu_budget(free.machine(100 * GIB))
    assert allowed.reserve_bytes == 5 * GIB
    assert allowed.allowed_bytes == 95 * GIB


def test_less_than_the_reserve_is_nothing(free: Tree) -> None:
    assert cpu_budget(free.machine(GIB // 2)).allowed_bytes == 0


@pytest.mark.parametrize("version", [1, 2])
def test_the_cgroup_binds_where_it_is_tighter_than_the_host(tmp_path: Path, version: int) -> None:
    if version == 2:
        tree = version_2(tmp_path).files(MINE, memory_max=6 * GIB, memory_current=2 * GIB, memory_stat="")
    else:
        tree = version_1(tmp_path).files(
            "/sys/fs/cgroup/memory/jobs/mine", memory_limit_in_bytes=6 * GIB, memory_usage_in_bytes=2 * GIB
        )
    allowed = cpu_budget(tree.machine(64 * GIB))
    assert allowed.allowed_bytes == 3 * GIB
    assert "jobs/mine (limit 6.00 GiB (6.44 GB))" in allowed.bound
    assert cpu_budget(tree.machine(2 * GIB)).bound == "host memory"


def test_where_the_cgroup_cannot_be_read_half_of_the_host_may_be_taken(tmp_path: Path) -> None:
    allowed = cpu_budget(Tree(tmp_path).member("0::/jobs/mine").machine(16 * GIB))
    assert allowed.available_bytes == 8 * GIB
    assert allowed.warning is not None
    assert allowed.bound.startswith("half of host memory")


def test_where_there_are_no_cgroups_the_host_counts_in_full(tmp_path: Path) -> None:
    machine = replace(Tree(tmp_path / "unused").machine(16 * GIB), root=tmp_path / "nothing")
    allowed = cpu_budget(machine)
    assert allowed.available_bytes == 16 * GIB
    assert allowed.warning is not None


def test_exactly_the_budget_passes_and_one_byte_more_is_refused(free: Tree) -> None:
    machine = free.machine(8 * GIB, cuda_free_bytes=80 * GIB)
    check(7 * GIB, "cpu", machine)
    check(80 * GIB - CUDA_RESERVE_BYTES, "cuda", machine)
    for device, most in (("cpu", 7 * GIB), ("cuda:0", 80 * GIB - CUDA_RESERVE_BYTES)):
        with pytest.raises(MemoryRefused) as caught:
            check(most + 1, device, machine)
        assert (caught.value.needed_bytes, caught.value.budget_bytes) == (most + 1, most)


def test_a_refusal_says_how_much_is_missing_in_both_units_and_why(free: Tree) -> None:
    with pytest.raises(MemoryRefused) as caught:
        check(10 * GIB, "cpu", free.machine(8 * GIB))
    assert str(caught.value) == (
        "10.00 GiB (10.74 GB) needed on cpu, 7.00 GiB (7.52 GB) may be taken: 3.00 GiB (3.22 GB) short "
        "(host memory: 8.00 GiB (8.59 GB) available, 1.00 GiB (1.07 GB) kept in reserve)"
    )
    assert caught.value.remedy


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("page_size", [1, 64])
def test_what_is_said_to_fit_fits_and_one_page_more_does_not(free: Tree, device: str, page_size: int) -> None:
    machine = free.machine(8 * GIB, cuda_free_bytes=8 * GIB)

    def pool(pages: int) -> PoolBytes:
        return pool_bytes(pages, page_size, 64, 8192, LLAMA)

    with pytest.raises(MemoryRefused) as caught:
        check_pool(pool(10_000_000 // page_size), device, machine)
    said = re.search(r"at most (\d+) pages of \d+ \((\d+) tokens\)", caught.value.remedy)
    assert said is not None
    pages = int(said[1])
    assert int(said[2]) == pages * page_size
    assert 40_000 < pages * page_size < 70_000, "131,072 bytes a token in 7 to 7.5 GiB"
    check_pool(pool(pages), device, machine)
    # The scratch of a call is smaller for a small pool, so a few pages more may fit; a percent more never does.
    with pytest.raises(MemoryRefused):
        check_pool(pool(pages + pages // 100 + 200 // page_size), device, machine)


def test_when_the_request_table_alone_is_too_large_that_is_what_is_said(free: Tree) -> None:
    with pytest.raises(MemoryRefused) as caught:
        check_pool(pool_bytes(100, 1, 100_000, 1_000_000, Payload()), "cpu", free.machine(8 * GIB))
    assert "request table" in caught.value.remedy


def test_a_gpu_pool_needs_its_host_part_on_the_host(free: Tree) -> None:
    pool = pool_bytes(1000, 16, 4096, 131072, Payload(), sharing=True)
    check_pool(pool, "cuda", free.machine(8 * GIB))
    with pytest.raises(MemoryRefused, match="needed on cpu"):
        check_pool(pool, "cuda", free.machine(GIB + 1000))


def test_a_ledger_is_refused_before_it_takes_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("memory was taken before the budget was asked")

    for name in ("empty", "zeros", "arange"):
        monkeypatch.setattr(torch, name, never)
    with pytest.raises(MemoryRefused, match="needed on cpu"):
        TorchLedger(1 << 30, 64, 4, 64, payload=LLAMA)


def test_an_allocation_that_fails_after_all_is_a_refusal(free: Tree) -> None:
    pool = pool_bytes(100, 16, 4, 64, Payload())
    for failure in (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"),
    ):
        with pytest.raises(MemoryRefused, match="torch could not take") as caught, budget.taking(pool, "cpu"):
            raise failure
        assert caught.value.needed_bytes == pool.total_bytes
        assert caught.value.__cause__ is failure
    with pytest.raises(RuntimeError, match="something else"), budget.taking(pool, "cpu"):
        raise RuntimeError("something else")


def test_a_real_failed_allocation_is_a_refusal_and_the_memory_comes_back() -> None:
    pool = pool_bytes(100, 16, 4, 64, Payload())
    with pytest.raises(MemoryRefused), budget.taking(pool, "cpu"):
        torch.empty(1 << 50, dtype=torch.int64)


def test_touching_stops_before_the_reserve_is_used(free: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "_TOUCHED_AT_ONCE_BYTES", 1024)
    left = [CPU_RESERVE_BYTES + 3 * 1024]

    def available() -> int:
        left[0] -= 1024
        return left[0] + 1024

    tensor = torch.ones(1024, dtype=torch.int64)
    with pytest.raises(MemoryRefused, match="needed on cpu") as caught:
        budget.touch(tensor, replace(free.machine(), available_bytes=available))
    assert "meanwhile" in caught.value.remedy
    assert int(tensor.sum()) == 1024 - 3 * 128, "three pieces were there, the fourth was not"


def test_touching_fills_with_zeros() -> None:
    tensor = torch.ones((3, 5, 7), dtype=torch.int64)
    budget.touch(tensor)
    assert not tensor.any()


@pytest.mark.parametrize("argument", ["pages", "page_size", "owners", "max_length"])
def test_a_pool_of_nothing_is_refused(argument: str) -> None:
    size = {"pages": 8, "page_size": 4, "owners": 2, "max_length": 64, argument: 0}
    with pytest.raises(ValueError, match=f"{argument} is 0"):
        pool_bytes(size["pages"], size["page_size"], size["owners"], size["max_length"], Payload())


def test_the_kv_part_is_the_models(free: Tree) -> None:
    pool = pool_bytes(1000, 64, 4, 64, LLAMA)
    assert LLAMA.slot_bytes == 131_072, "32 layers x (K, V) x 8 heads x 128 x 2 bytes"
    assert pool.kv_bytes - LLAMA.row_words * 8 == 1001 * 64 * 131_072, "page 0 is padding and takes room too"


def test_the_examination_of_a_machine_is_plain_json(tmp_path: Path) -> None:
    tree = version_2(tmp_path).files(MINE, memory_max=6 * GIB, memory_current=2 * GIB, memory_stat="")
    found = json.loads(json.dumps(examine(tree.machine(64 * GIB))))
    assert found["torch"] == torch.__version__
    assert found["cuda_available"] is torch.cuda.is_available()
    assert len(found["cuda"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert found["host_available_bytes"] == 64 * GIB
    assert found["cgroup_headroom_bytes"] == 4 * GIB
    assert found["cpu_budget_bytes"] == 3 * GIB
    assert [level["path"] for level in found["cgroups"]] == [MINE]
    assert found["host_total_bytes"] > 0


def test_this_machine_may_take_no_more_than_it_has_available() -> None:
    found = examine()
    allowed, available = found["cpu_budget_bytes"], found["host_available_bytes"]
    assert isinstance(allowed, int)
    assert isinstance(available, int)
    assert allowed < available


def test_amounts_show_both_units() -> None:
    assert amount(24 * GIB) == "24.00 GiB (25.77 GB)"


def test_the_budget_can_be_asked_without_torch(root: Path) -> None:
    script = """
import sys
sys.modules["torch"] = None
import pagestorm_real
from pagestorm_real import Payload, cpu_budget, pool_bytes
assert cpu_budget().available_bytes > 0
assert pool_bytes(8, 4, 2, 64, Payload()).kv_bytes > 0
try:
    pagestorm_real.examine()
except ModuleNotFoundError as error:
    print(error.name)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": f"{root / 'sim'}:{root / 'real'}", "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "torch", "which is how the doctor knows that there are no real pools"


def test_every_name_of_the_package_is_there() -> None:
    import pagestorm_real

    for name in pagestorm_real.__all__:
        assert getattr(pagestorm_real, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        pagestorm_real.nothing_of_this_name  # noqa: B018 - reading it is the test
