"""vLLM as a referee: started by `client.py` with the interpreter of the reference environment.

Nothing of Pagestorm is installed there. The packages are registered as bare folders, so that the few files which that
side needs can be imported by name and no `__init__` of ours runs.
"""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent
OFFLINE = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_TARGET_DEVICE": "cpu"}
"""The engine reports its use and looks for models unless told otherwise."""


def adopt(name: str, folder: Path) -> None:
    """Make `folder` importable as the package `name` without executing it."""
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package


def main(parent: int) -> None:
    """Serve the process `parent` until it closes the pipe or ends."""
    from pagestorm_real.reference.serving import die_with_parent, serve, take_over_pipes

    pipes = take_over_pipes()
    die_with_parent(pipes[0], parent)
    os.environ.update(OFFLINE)
    from pagestorm_real.reference import vllm_blocks, vllm_engine, vllm_run

    engine = vllm_engine.Engine()
    scheduler = vllm_run.scheduler_class(engine)
    serve(
        pipes,
        "vllm",
        vllm_engine.version(),
        {
            "run": lambda payload: vllm_run.run(engine, scheduler, payload),
            "blocks": lambda payload: vllm_blocks.run(engine, payload),
        },
    )


if __name__ == "__main__":
    adopt("pagestorm_real", HERE.parent)
    adopt("pagestorm_real.reference", HERE)
    main(int(sys.argv[1]))
