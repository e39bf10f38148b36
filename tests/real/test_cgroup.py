"""What the memory cgroups leave, on fake trees of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagestorm_real import cgroup
from tests.real.trees import NONE_V1, Tree, version_1, version_2

MINE = "/sys/fs/cgroup/jobs/mine"
MINE_V1 = "/sys/fs/cgroup/memory/jobs/mine"


def headroom(root: Path) -> int | None:
    tightest = cgroup.read(root).tightest
    return None if tightest is None else tightest.headroom_bytes


def test_version_2_file_pages_count_as_free(tmp_path: Path) -> None:
    stat = "anon 500\nactive_file 120\ninactive_file 30\nshmem 7"
    version_2(tmp_path).files(MINE, memory_max=1000, memory_current=700, memory_stat=stat)
    found = cgroup.read(tmp_path)
    (level,) = found.levels
    assert (level.path, level.version, level.limit_bytes) == (MINE, 2, 1000)
    assert (level.used_bytes, level.file_bytes, level.headroom_bytes) == (550, 150, 450)
    assert found.problem is None


def test_version_2_high_binds_below_max(tmp_path: Path) -> None:
    version_2(tmp_path).files(MINE, memory_max=1000, memory_high=800, memory_current=700, memory_stat="active_file 0")
    assert headroom(tmp_path) == 100
    version_2_max = tmp_path / "sys/fs/cgroup/jobs/mine/memory.high"
    version_2_max.write_text("max\n")
    assert headroom(tmp_path) == 300


def test_no_limit_is_no_level(tmp_path: Path) -> None:
    version_2(tmp_path).files(MINE, memory_max="max", memory_high="max", memory_current=700)
    assert cgroup.read(tmp_path) == cgroup.Cgroups()
    version_1(tmp_path / "one").files(MINE_V1, memory_limit_in_bytes=NONE_V1, memory_usage_in_bytes=5)
    assert cgroup.read(tmp_path / "one") == cgroup.Cgroups()


@pytest.mark.parametrize("tight", ["own", "parent", "root"])
def test_the_tightest_of_all_levels_binds(tmp_path: Path, tight: str) -> None:
    tree = version_2(tmp_path)
    directories = {"own": MINE, "parent": "/sys/fs/cgroup/jobs", "root": "/sys/fs/cgroup"}
    for name, directory in directories.items():
        tree.files(directory, memory_max=5000 if name == tight else 9000, memory_current=1000, memory_stat="")
    found = cgroup.read(tmp_path)
    assert len(found.levels) == 3
    assert found.tightest is not None
    assert (found.tightest.path, found.tightest.headroom_bytes) == (directories[tight], 4000)


def test_a_limit_that_is_overrun_leaves_nothing(tmp_path: Path) -> None:
    version_2(tmp_path).files(MINE, memory_max=1000, memory_current=1700, memory_stat="inactive_file 100")
    assert headroom(tmp_path) == 0


def test_version_2_protected_memory_of_a_descendant_cancels_the_file_credit(tmp_path: Path) -> None:
    stat = "active_file 120\ninactive_file 30"
    tree = version_2(tmp_path).files(MINE, memory_max=1000, memory_current=700, memory_stat=stat, memory_min=50)
    assert headroom(tmp_path) == 450, "its own memory.min does not keep it from reclaiming its own pages"
    tree.files(f"{MINE}/child", memory_min=0)
    assert headroom(tmp_path) == 450
    tree.files(f"{MINE}/child/deep", memory_min=4096)
    assert headroom(tmp_path) == 300
    (tmp_path / MINE.lstrip("/") / "child/deep/memory.min").unlink()
    assert headroom(tmp_path) == 300, "unreadable counts as protected"


def test_version_1_counts_descendants_as_its_usage_does(tmp_path: Path) -> None:
    stat = "active_file 1\ninactive_file 2\ntotal_active_file 100\ntotal_inactive_file 200"
    tree = version_1(tmp_path)
    tree.files(MINE_V1, memory_limit_in_bytes=2000, memory_usage_in_bytes=900, memory_stat=stat)
    (level,) = cgroup.read(tmp_path).levels
    assert (level.version, level.file_bytes, level.headroom_bytes) == (1, 300, 1400)
    tree.files("/sys/fs/cgroup/memory/jobs", memory_limit_in_bytes=1500, memory_usage_in_bytes=1400, memory_stat="")
    assert headroom(tmp_path) == 100


def test_a_use_that_cannot_be_read_counts_as_all_of_the_limit(tmp_path: Path) -> None:
    version_2(tmp_path).files(MINE, memory_max=1000)
    assert headroom(tmp_path) == 0


def test_a_limit_that_cannot_be_understood_is_a_problem(tmp_path: Path) -> None:
    version_2(tmp_path).files(MINE, memory_max="plenty", memory_current=1)
    found = cgroup.read(tmp_path)
    assert found.levels == ()
    assert found.problem is not None
    assert MINE in found.problem


def test_a_namespace_that_hides_the_way_down_shows_its_limit_at_the_mount(tmp_path: Path) -> None:
    tree = Tree(tmp_path).member("0::/").mount("/sys/fs/cgroup", "cgroup2", mount_root="/docker/abc")
    tree.files("/sys/fs/cgroup", memory_max=3000, memory_current=1000, memory_stat="")
    assert headroom(tmp_path) == 2000


def test_a_container_that_sees_the_hosts_path_finds_itself_at_the_mount(tmp_path: Path) -> None:
    tree = Tree(tmp_path).member("0::/docker/abc").mount("/sys/fs/cgroup", "cgroup2", mount_root="/docker/abc")
    tree.files("/sys/fs/cgroup", memory_max=3000, memory_current=1000, memory_stat="")
    assert headroom(tmp_path) == 2000
    other = Tree(tmp_path / "two").member("0::/docker/abc/inner").mount("/cg", "cgroup2", mount_root="/docker/abc")
    other.files("/cg", memory_max=3000, memory_current=0).files("/cg/inner", memory_max=500, memory_current=100)
    assert headroom(tmp_path / "two") == 400


def test_a_mount_point_with_a_space_is_found(tmp_path: Path) -> None:
    tree = Tree(tmp_path).member("0::/").mount("/sys/fs/c\\040group", "cgroup2")
    tree.files("/sys/fs/c group", memory_max=3000, memory_current=1000, memory_stat="")
    assert headroom(tmp_path) == 2000


def test_a_path_that_climbs_out_is_not_followed(tmp_path: Path) -> None:
    tree = Tree(tmp_path).member("0::/../../elsewhere").mount("/sys/fs/cgroup", "cgroup2")
    tree.files("/sys/elsewhere", memory_max=1, memory_current=1)
    tree.files("/sys/fs/cgroup", memory_max=3000, memory_current=1000, memory_stat="")
    assert headroom(tmp_path) == 2000


def test_a_member_whose_hierarchy_is_not_mounted_is_a_problem(tmp_path: Path) -> None:
    Tree(tmp_path).member("0::/jobs/mine")
    problem = cgroup.read(tmp_path).problem
    assert problem is not None
    assert "no mounted cgroup filesystem" in problem


def test_a_system_without_cgroups_says_that_it_knows_the_host_only(tmp_path: Path) -> None:
    problem = cgroup.read(tmp_path / "empty").problem
    assert problem is not None
    assert "not readable" in problem


def test_this_machine_can_be_read() -> None:
    for level in cgroup.read().levels:
        assert 0 <= level.headroom_bytes <= level.limit_bytes
