"""The folder that a run leaves: it appears whole, and where it exists already its files do."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from pagestorm.errors import ScenarioError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Tell what the operating system refused as a `ScenarioError` about --out."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise ScenarioError(
            f"cannot write {path}: {why}; name a folder that can be written, on a disk with room", key="--out"
        ) from error


class OutputFolder:
    """Where files are gathered until all of them are there; `commit` puts them into `out`, `discard` forgets them.

    Files are written to `path(name)`. A new `out` is one rename; into one that exists each file is renamed, and what
    an earlier run left under a name of `known` is removed. Used in a `with` block it is discarded unless committed.
    Raises `ScenarioError` where nothing can be written.
    """

    def __init__(self, out: Path, known: tuple[str, ...] = ()) -> None:
        self.out = out
        self._known = known
        self._made: list[Path] = []
        with writing(out):
            if out.exists() and not out.is_dir():
                raise NotADirectoryError(0, "it is a file, not a folder")
            self._new = not out.exists()
            home = out.absolute().parent if self._new else out
            self._make_parents(home)
            self._staging = Path(tempfile.mkdtemp(prefix=f".{out.absolute().name}.", dir=home))

    def _make_parents(self, folder: Path) -> None:
        missing = []
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        for each in reversed(missing):
            each.mkdir()
            self._made.append(each)

    def path(self, name: str) -> Path:
        """Where to write the file that will be `out / name`; its folder is made."""
        path = self._staging / name
        with writing(self.out / name):
            path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def has(self, name: str) -> bool:
        """Whether that file was written."""
        return (self._staging / name).exists()

    def commit(self) -> list[Path]:
        """Put everything into place; returns the files in alphabetical order."""
        names = sorted(str(p.relative_to(self._staging)) for p in self._staging.rglob("*") if p.is_file())
        with writing(self.out):
            if self._new and self._rename_whole():
                return [self.out / name for name in names]
            for name in self._known:
                if name not in names:
                    (self.out / name).unlink(missing_ok=True)
            for name in names:
                (self.out / name).parent.mkdir(exist_ok=True)
                (self._staging / name).replace(self.out / name)
        shutil.rmtree(self._staging, ignore_errors=True)
        return [self.out / name for name in names]

    def _rename_whole(self) -> bool:
        """False when somebody made the folder in the meantime."""
        mask = os.umask(0)
        os.umask(mask)
        self._staging.chmod(0o777 & ~mask)
        if self.out.exists():
            return False
        self._staging.rename(self.out)
        return True

    def discard(self) -> None:
        """Leave nothing behind, the parent folders that were made for it included."""
        shutil.rmtree(self._staging, ignore_errors=True)
        for each in reversed(self._made):
            try:
                each.rmdir()
            except OSError:
                return

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._staging.exists():
            self.discard()
