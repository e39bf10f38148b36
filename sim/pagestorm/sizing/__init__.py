"""From a model, a GPU and a launch command to bytes: `size(...)`.

import pagestorm as ps

ps.size(model="Llama-3.1-8B", gpu="H100").pool_tokens
ps.size(command="vllm serve Qwen/Qwen3-8B -tp 2", gpu="H100").text(explain=True)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from pagestorm.catalog import Gpu, Model
from pagestorm.catalog import gpu as find_gpu
from pagestorm.catalog import model as find_model
from pagestorm.errors import ScenarioError
from pagestorm.sizing.account import Account
from pagestorm.sizing.options import Options
from pagestorm.sizing.result import Pool, Sizing
from pagestorm.sizing.sglang_host import HostMachine

__all__ = ["HostMachine", "Pool", "Sizing", "size"]

Row = TypeVar("Row", Gpu, Model)


def size(
    *,
    model: str | None = None,
    gpu: str | None = None,
    engine: str | None = None,
    command: str | None = None,
    host_memory_bytes: int | None = None,
    machine: HostMachine | None = None,
    environment: Mapping[str, str] | None = None,
    **settings: object,
) -> Sizing:
    """Every pool that the engine will make, per rank, and whether it fits.

    `model` is a name of the catalog or the path of a config.json; `gpu` a name of the catalog. `command` is a launch
    command as it is typed into a shell; `settings` are the engine's own fields (`tp_size=8`, `block_size=16`) and go
    before the command's. `host_memory_bytes` is what the host has available. Measured figures may be given instead of
    estimates: see `pagestorm.sizing.options.MEASURED`. What the engine would refuse is a verdict with its own message;
    raises `ScenarioError` for what makes no sense.
    """
    merged: dict[str, object] = {}
    variables: dict[str, str] = {}
    unknown: tuple[str, ...] = ()
    if command is not None:
        from pagestorm.sizing.command import parse

        launch = parse(command)
        if engine is not None and engine != launch.engine:
            raise ScenarioError(f"the command launches {launch.engine}, not {engine}; leave one out", key="engine")
        engine, unknown = launch.engine, launch.unknown
        model = model or launch.model
        merged, variables = dict(launch.settings), dict(launch.environment)
    merged.update({name: value for name, value in settings.items() if value is not None})
    variables.update(environment or {})
    engine = engine or "sglang"
    if engine not in ("sglang", "vllm"):
        raise ScenarioError(f"{engine!r} is none of sglang, vllm", key="engine")
    options, account = Options(engine, merged, variables), Account()
    machine = machine or HostMachine(host_memory_bytes)
    sizing = Sizing(engine=engine, unknown_flags=list(unknown))
    _size(engine, options, _model(model), _gpu(gpu), machine, sizing, account)
    sizing.warnings, sizing.lines, sizing.ignored_flags = account.warnings, account.lines, options.ignored()
    return sizing


def _size(
    engine: str,
    options: Options,
    model: Model | None,
    gpu: Gpu | None,
    machine: HostMachine,
    sizing: Sizing,
    account: Account,
) -> None:
    # Imported here: one engine is sized at a time.
    if engine == "sglang":
        from pagestorm.sizing.sglang import size_sglang

        size_sglang(options, model, gpu, machine, sizing, account)
    else:
        from pagestorm.sizing.vllm import size_vllm

        size_vllm(options, model, gpu, sizing, account)


def _model(name: str | None) -> Model | None:
    return None if name is None else _keyed("model", find_model, name)


def _gpu(name: str | None) -> Gpu | None:
    return None if name is None else _keyed("gpu", find_gpu, name)


def _keyed(key: str, find: Callable[[str], Row], name: str) -> Row:
    """What a name finds; an error says which option it is about."""
    try:
        return find(name)
    except ScenarioError as error:
        if error.key is not None:
            raise
        raise ScenarioError(error.message, key=key) from None
