"""The hot modules, compiled with mypyc where a C compiler was found: the same source, several times faster.

    make setup, make fast      compile them; needs mypy and a C compiler

They are used when they were made from exactly the sources that lie here; after an edit, without them, or with
PAGESTORM_PURE=1 in the environment, the sources run. Both give the same record, digest for digest; a test says so.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location

HOME = os.path.dirname(__file__)
FOLDER = os.path.join(HOME, "_compiled")
MANIFEST = os.path.join(FOLDER, "MANIFEST")

MODULES = (
    "engine.batch",
    "engine.iteration",
    "engine.machine",
    "engine.request",
    "engine.sglang",
    "engine.vllm",
    "engine.vllm_batch",
    "engine.vllm_iteration",
    "engine.vllm_request",
    "engine.waiting",
    "events",
    "memory.block_pool",
    "memory.blocks",
    "memory.counting",
    "memory.ranges",
    "steptime.linear",
)


def source_of(module: str) -> str:
    """Path of a module's source."""
    return os.path.join(HOME, *module.split(".")) + ".py"


def stamp(module: str) -> str:
    """What a source looked like when it was compiled: name, size and time of change."""
    facts = os.stat(source_of(module))
    return f"{module} {facts.st_size} {facts.st_mtime_ns}"


class CompiledFinder:
    """Finds the compiled modules, and the library that they share, before the import system finds their sources."""

    def __init__(self, files: dict[str, str]) -> None:
        self._files = files

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        file = self._files.get(name)
        if file is None:
            return None
        return spec_from_file_location(name, file, loader=ExtensionFileLoader(name, file))


def in_use() -> bool:
    """Whether the compiled modules are the ones that run."""
    return any(isinstance(finder, CompiledFinder) for finder in sys.meta_path)


def use() -> bool:
    """Run the compiled modules from now on, if they are here and made from these sources."""
    if os.environ.get("PAGESTORM_PURE") or in_use():
        return in_use()
    try:
        with open(MANIFEST, encoding="utf-8") as file:
            told = file.read().splitlines()
        if told[1:] != [stamp(module) for module in MODULES] or told[0] != _python():
            return False
        files = {_name(entry): os.path.join(FOLDER, entry) for entry in os.listdir(FOLDER) if entry != "MANIFEST"}
    except (OSError, IndexError):
        return False
    sys.meta_path.insert(0, CompiledFinder(files))
    return True


def _python() -> str:
    return " ".join(sys.version.split())


def _name(entry: str) -> str:
    return entry.removesuffix(EXTENSION_SUFFIXES[0])


def build() -> str:
    """Compile; returns what was done in words. Raises OSError or subprocess.CalledProcessError where it cannot be."""
    import shutil
    import subprocess
    import tempfile

    with tempfile.TemporaryDirectory() as work:
        shutil.copytree(
            HOME, os.path.join(work, "pagestorm"), ignore=shutil.ignore_patterns("_compiled", "__pycache__", "*.so")
        )
        sources = [os.path.join("pagestorm", *module.split(".")) + ".py" for module in MODULES]
        stamps = [stamp(module) for module in MODULES]
        subprocess.run(
            [sys.executable, "-c", "from mypyc.__main__ import main; main()", *sources],
            cwd=work,
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "MYPYPATH": work},
        )
        made = tempfile.mkdtemp(prefix="_compiled.", dir=HOME)
        for folder, _, names in os.walk(work):
            if os.sep + "build" in folder[len(work) :]:
                continue
            for name in names:
                if name.endswith(EXTENSION_SUFFIXES[0]):
                    package = os.path.relpath(folder, work).replace(os.sep, ".")
                    whole = name if package == "." else f"{package}.{name}"
                    shutil.copy2(os.path.join(folder, name), os.path.join(made, whole))
        with open(os.path.join(made, "MANIFEST"), "w", encoding="utf-8") as file:
            file.write("\n".join([_python(), *stamps]) + "\n")
        shutil.rmtree(FOLDER, ignore_errors=True)
        os.rename(made, FOLDER)
    return f"compiled {len(MODULES)} modules into {FOLDER}"


def main() -> int:
    """Build; 1, with the compiler's words, where it cannot be."""
    import subprocess

    try:
        print(build())
    except subprocess.CalledProcessError as error:
        print(f"not compiled, the sources run instead: {str(error.stdout)[-1500:]}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"not compiled, the sources run instead: {error}", file=sys.stderr)
        return 1
    return 0
