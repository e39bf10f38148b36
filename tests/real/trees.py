"""Fake filesystem roots with cgroups in them."""

from __future__ import annotations

from pathlib import Path

from pagestorm_real.budget import GIB, Machine

NONE_V1 = 9223372036854771712
"""What a version 1 hierarchy shows when there is no limit."""


class Tree:
    """A filesystem root under construction."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mounts: list[str] = ["22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw"]
        self.memberships: list[str] = []
        (root / "proc/self").mkdir(parents=True)
        self._save()

    def member(self, line: str) -> Tree:
        """A line of /proc/self/cgroup."""
        self.memberships.append(line)
        self._save()
        return self

    def mount(self, at: str, kind: str, options: str = "rw", mount_root: str = "/") -> Tree:
        self.mounts.append(f"35 22 0:32 {mount_root} {at} rw,nosuid shared:9 - {kind} cgroup {options}")
        self._save()
        return self

    def files(self, directory: str, **files: int | str) -> Tree:
        """Files of a cgroup directory; `memory_max=...` writes memory.max."""
        path = self.root / directory.lstrip("/")
        path.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (path / name.replace("memory_", "memory.")).write_text(f"{content}\n")
        return self

    def machine(self, available_bytes: int = 64 * GIB, cuda_free_bytes: int = 80 * GIB) -> Machine:
        return Machine(self.root, lambda: available_bytes, lambda device: cuda_free_bytes)

    def _save(self) -> None:
        (self.root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in self.memberships))
        (self.root / "proc/self/mountinfo").write_text("".join(f"{line}\n" for line in self.mounts))


def version_2(root: Path) -> Tree:
    """A unified hierarchy, the process in /jobs/mine."""
    tree = Tree(root).member("0::/jobs/mine").mount("/sys/fs/cgroup", "cgroup2")
    return tree.files("/sys/fs/cgroup").files("/sys/fs/cgroup/jobs/mine")


def version_1(root: Path) -> Tree:
    """A memory hierarchy of version 1, the process in /jobs/mine."""
    tree = Tree(root).member("9:name=systemd:/").member("4:cpu,memory:/jobs/mine").member("0::/")
    tree.mount("/sys/fs/cgroup/cpu", "cgroup", "rw,cpu").mount("/sys/fs/cgroup/memory", "cgroup", "rw,memory")
    tree.mount("/sys/fs/cgroup/unified", "cgroup2").files("/sys/fs/cgroup/unified", cgroup_procs="1")
    return tree.files("/sys/fs/cgroup/memory/jobs/mine")
