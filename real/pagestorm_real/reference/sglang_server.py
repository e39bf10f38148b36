"""SGLang as a referee: started by `client.py` with the interpreter of the reference environment.

Nothing of Pagestorm is installed there. The packages are registered as bare folders, so that the few files which that
side needs can be imported by name and no `__init__` of ours runs.
"""

from __future__ import annotations

import sys
import types
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent


def adopt(name: str, folder: Path) -> None:
    """Make `folder` importable as the package `name` without executing it."""
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package


def main(parent: int) -> None:
    """Serve the process `parent` until it closes the pipe or ends."""
    from pagestorm_real.reference.serving import Operation, die_with_parent, serve, take_over_pipes

    pipes = take_over_pipes()
    die_with_parent(pipes[0], parent)
    from pagestorm_real.reference import (
        sglang_engine,
        sglang_host,
        sglang_host_tier,
        sglang_prefix,
        sglang_run,
        sglang_single,
    )
    from pagestorm_real.reference.entered import functions_entered

    engine = sglang_engine.Engine()
    run = partial(sglang_run.run, engine, sglang_run.scheduler_class(engine))

    def entered(payload: dict[str, object]) -> dict[str, object]:
        answer, functions = functions_entered(partial(run, payload), ("sglang", "pagestorm_real"))
        return {**answer, "functions": functions}

    operations: dict[str, Operation] = {
        "run": run,
        "functions_entered": entered,
        "clip": partial(sglang_single.clip, engine, sglang_run.scheduler_class(engine)),
    }
    for operation in (
        sglang_single.allocator,
        sglang_single.decode_need,
        sglang_single.decode_oom,
        sglang_single.ratio,
        sglang_single.retraction_order,
        sglang_single.spec_sizing,
        sglang_host.host_budget,
        sglang_host.host_headroom,
        sglang_host.host_indexer,
        sglang_host_tier.host_tier,
        sglang_prefix.prefix,
    ):
        operations[operation.__name__] = partial(operation, engine)
    serve(pipes, "sglang", sglang_engine.version(), operations)


if __name__ == "__main__":
    adopt("pagestorm_real", HERE.parent)
    adopt("pagestorm_real.reference", HERE)
    main(int(sys.argv[1]))
