"""What the process's memory cgroups leave it, version 1 and 2.

A limit of any ancestor binds as much as the own one, so every level up to the mount is read. File pages on the
active and inactive lists are given back by the kernel before it kills, so they count as free. (Both as the engine
does it: sglang 0.5.23, `mem_cache/host_memory.py`.)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

UNLIMITED_BYTES = 1 << 60
"""A version 1 limit from here on means none: the kernel writes the largest multiple of a page it can count."""


@dataclass(frozen=True)
class Level:
    """One directory of a hierarchy that has a limit; all in bytes, `used` without the file pages in `file_pages`."""

    path: str
    version: int
    limit_bytes: int
    used_bytes: int
    file_bytes: int

    @property
    def headroom_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True)
class Cgroups:
    """The limited levels of the own cgroup, outermost last, and what could not be read, if something could not."""

    levels: tuple[Level, ...] = ()
    problem: str | None = None

    @property
    def tightest(self) -> Level | None:
        return min(self.levels, key=lambda level: level.headroom_bytes, default=None)


@dataclass(frozen=True)
class _Files:
    """What the files of a version are called."""

    version: int
    limits: tuple[str, ...]
    usage: str
    file_pages: tuple[tuple[str, ...], ...]


_V1 = _Files(
    1,
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    # Only the total_ counters include descendants, as the usage does.
    (("total_active_file", "total_inactive_file"), ("active_file", "inactive_file")),
)
_V2 = _Files(2, ("memory.max", "memory.high"), "memory.current", (("active_file", "inactive_file"),))


def read(root: Path = Path("/")) -> Cgroups:
    """The limited levels that hold this process, seen from a filesystem root (`root` is for tests)."""
    try:
        memberships = _memberships((root / "proc/self/cgroup").read_text())
        mounts = (root / "proc/self/mountinfo").read_text()
    except OSError as error:
        return Cgroups(problem=f"cgroups are not readable here ({error.strerror}); only the host's memory is known")
    levels: list[Level] = []
    problem = None
    found = False
    for files, mount, mount_root in _memory_mounts(mounts):
        membership = memberships.get(files.version)
        directory = _directory(root, mount, mount_root, membership) if membership else None
        if directory is None:
            continue
        found = True
        for path in _upwards(directory, root / mount.relative_to("/")):
            try:
                limit = _limit(path, files)
            except (OSError, ValueError) as error:
                problem = f"the memory limit at {path} is unreadable: {error}"
                continue
            if limit is not None:
                levels.append(_level(root, path, files, limit))
    if memberships and not found:
        problem = "the process is in a memory cgroup that no mounted cgroup filesystem shows"
    return Cgroups(tuple(levels), problem)


def _memberships(text: str) -> dict[int, PurePosixPath]:
    """Version -> path of the own memory cgroup, from /proc/self/cgroup."""
    paths: dict[int, PurePosixPath] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths[2] = PurePosixPath(path)
        elif "memory" in controllers.split(","):
            paths[1] = PurePosixPath(path)
    return paths


def _memory_mounts(text: str) -> list[tuple[_Files, PurePosixPath, PurePosixPath]]:
    """(version, mount point, root of the mount within its hierarchy), from /proc/self/mountinfo."""
    mounts = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = [*after.split(), "", "", ""][:3]
        fields = before.split()
        if kind == "cgroup2":
            files = _V2
        elif kind == "cgroup" and "memory" in options.split(","):
            files = _V1
        else:
            continue
        mounts.append((files, PurePosixPath(_unescaped(fields[4])), PurePosixPath(_unescaped(fields[3]))))
    return mounts


def _unescaped(path: str) -> str:
    """mountinfo writes spaces and the like as backslash and three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _directory(root: Path, mount: PurePosixPath, mount_root: PurePosixPath, membership: PurePosixPath) -> Path | None:
    """The own cgroup's directory; the mount itself where a namespace hides the way down to it."""
    base = root / mount.relative_to("/")
    ways = [membership.relative_to("/")]
    if membership.is_relative_to(mount_root):
        ways.insert(0, membership.relative_to(mount_root))
    for way in ways:
        if ".." not in way.parts and (base / way).is_dir():
            return base / way
    return base if base.is_dir() else None


def _upwards(directory: Path, mount: Path) -> list[Path]:
    """The directory and those above it, up to the mount."""
    return [directory, *(path for path in directory.parents if path.is_relative_to(mount))]


def _level(root: Path, directory: Path, files: _Files, limit: int) -> Level:
    """A limit whose use cannot be read counts as used up: anything else could overrun it."""
    try:
        used = int((directory / files.usage).read_text())
    except (OSError, ValueError):
        used, credit = limit, 0
    else:
        credit = min(used, _file_bytes(directory, files))
    return Level("/" + str(directory.relative_to(root)), files.version, limit, used - credit, credit)


def _limit(directory: Path, files: _Files) -> int | None:
    limits = []
    for name in files.limits:
        try:
            text = (directory / name).read_text().strip()
        except FileNotFoundError:
            continue  # the root of a hierarchy has no limit files
        if text != "max" and int(text) < UNLIMITED_BYTES:
            limits.append(int(text))
    return min(limits, default=None)


def _file_bytes(directory: Path, files: _Files) -> int:
    """File pages that the kernel gives back; none where a descendant may protect its own (memory.min)."""
    try:
        pairs = (line.split() for line in (directory / "memory.stat").read_text().splitlines())
        stat = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
    except (OSError, ValueError):
        return 0
    for names in files.file_pages:
        if all(name in stat for name in names):
            credit = sum(stat[name] for name in names)
            return 0 if credit and files.version == 2 and _protects(directory) else credit
    return 0


def _protects(directory: Path) -> bool:
    """Whether a descendant keeps memory of its own from being reclaimed, or might: unreadable counts as yes."""
    pending = [directory]
    try:
        while pending:
            for child in pending.pop().iterdir():
                if child.is_dir():
                    if (child / "memory.min").read_text().strip() != "0":
                        return True
                    pending.append(child)
    except OSError:
        return True
    return False
