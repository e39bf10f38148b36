"""`pagestorm size`: the command line of the sizing."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from pagestorm.errors import ScenarioError

if TYPE_CHECKING:
    from pagestorm.sizing import Sizing

REFUSED = 4
EPILOG = """\b
Examples:
  pagestorm size --model Llama-3.1-8B --gpu H100
  pagestorm size --model GLM-5 --gpu B200 --tp-size 8 --enable-hierarchical-cache --hicache-size 100 --this-host
  pagestorm size --gpu H200 --explain -- python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 8
  pagestorm size --gpu H100 --command "vllm serve Qwen/Qwen3-8B -tp 2 --max-model-len 32k"
  pagestorm size decode-oom-page-64 --json
"""
LAUNCHERS = ("sglang", "vllm", "python", "python3", "env", "docker")
MEASURED_OPTIONS = (
    "gpu_memory_bytes",
    "free_memory_bytes",
    "weights_bytes_per_rank",
    "activation_bytes",
    "non_torch_bytes",
    "cuda_graph_bytes",
)


@click.command(
    "size",
    epilog=EPILOG,
    context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--model", help="A model of `pagestorm catalog models`, or the path of a config.json.")
@click.option("--gpu", help="A GPU of `pagestorm catalog gpus`.")
@click.option("--engine", type=click.Choice(["sglang", "vllm"]), help="Default: sglang.")
@click.option("--command", "command", help="A launch command, pasted; - reads it from standard input.")
@click.option("--host-memory-bytes", type=int, help="What the host has available, for the host pools.")
@click.option(
    "--this-host", is_flag=True, help="Check the host pools against this machine: its memory and its cgroups."
)
@click.option(
    "--touch", is_flag=True, help="With --this-host: take the host pools for real, page by page, and give them back."
)
@click.option("--explain", is_flag=True, help="Every figure with its formula, the values in it and its source.")
@click.option("--json", "as_json", is_flag=True, help="Every figure as JSON.")
@click.option("--gpu-memory-bytes", type=int, help="Measured: what CUDA reports as the total of a card.")
@click.option("--free-memory-bytes", type=int, help="Measured: what is free before the weights are loaded.")
@click.option("--weights-bytes-per-rank", type=int, help="Measured: the weights of a rank.")
@click.option("--activation-bytes", type=int, help="Measured: the peak of activations (vLLM).")
@click.option("--non-torch-bytes", type=int, help="Measured: memory outside torch (vLLM).")
@click.option("--cuda-graph-bytes", type=int, help="Measured: memory of CUDA graphs (vLLM).")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[SCENARIO] [ENGINE FLAGS]")
def size_command(
    model: str | None,
    gpu: str | None,
    engine: str | None,
    command: str | None,
    host_memory_bytes: int | None,
    this_host: bool,
    touch: bool,
    explain: bool,
    as_json: bool,
    words: tuple[str, ...],
    **measured: int | None,
) -> int:
    """Size every pool that an engine will make, on the device and on the host, and say whether it fits.

    The engine's flags are its own, spelled as on its command line. Exits 4 when the engine would refuse to start.
    """
    from pagestorm.sizing import size

    if touch and not this_host:
        raise ScenarioError("only together with --this-host, whose memory it takes", key="--touch")
    asked = _asked(words, engine, command)
    given = {"model": model, "gpu": gpu, "host_memory_bytes": host_memory_bytes, "engine": engine, **measured}
    merged = {**asked, **{name: value for name, value in given.items() if value is not None}}
    if this_host:
        if host_memory_bytes is not None:
            raise ScenarioError("this machine or a number, not both; leave one out", key="--host-memory-bytes")
        from pagestorm.sizing import this_machine

        merged["machine"] = this_machine.read()
    sizing = size(**merged)
    refused = sizing.verdict == "refused"
    if not as_json:
        _print(sizing, explain, as_json)
    if touch and not refused:
        _touch(sizing, quiet=as_json)
    if as_json:
        _print(sizing, explain, as_json)
    return REFUSED if refused else 0


def _asked(words: tuple[str, ...], engine: str | None, command: str | None) -> dict[str, Any]:
    """What the words behind our own options ask for: a scenario, a launch command, or an engine's flags."""
    if command is not None:
        if words:
            raise ScenarioError(
                f"{words[0]!r} stands beside a launch command; put it into the command", key="--command"
            )
        return {"command": sys.stdin.read() if command == "-" else command}
    if words and words[0].rsplit("/", 1)[-1] in LAUNCHERS:
        return {"command": shlex.join(words)}
    from pagestorm.sizing.command import read_flags

    scenario, rest = (words[0], words[1:]) if words and not words[0].startswith("-") else (None, words)
    asked = _of_scenario(scenario) if scenario is not None else {}
    chosen = engine or asked.get("engine") or "sglang"
    flags, unknown = read_flags(chosen, list(rest))
    if unknown:
        raise ScenarioError(f"{chosen} has no such flag", key=unknown[0])
    return {**asked, **flags}


def _of_scenario(name: str) -> dict[str, Any]:
    """Model, GPU and engine flags of a scenario, in the names of `ps.size`."""
    from msgspec.structs import asdict, fields

    from pagestorm.scenario import load
    from pagestorm.scenario.schema import kind_of
    from pagestorm.sizing.flags import table

    scenario = load(name)
    engine = kind_of(scenario.engine)
    known = table(engine).by_field
    defaults = {field.name: field.default for field in fields(type(scenario.engine))}
    asked: dict[str, Any] = {
        key: value
        for key, value in asdict(scenario.engine).items()
        if key in known and value is not None and value != defaults[key]
    }
    asked.update(engine=engine, model=scenario.model)
    if scenario.hardware is not None:
        asked["gpu"] = scenario.hardware.gpu
        asked["tp_size" if engine == "sglang" else "tensor_parallel_size"] = scenario.hardware.tp_size
        asked["host_memory_bytes"] = scenario.hardware.host_memory_bytes
    return {key: value for key, value in asked.items() if value is not None}


def _touch(sizing: Sizing, quiet: bool) -> None:
    """Take the host pools of all ranks on this host for real; raises `MemoryRefused` where they would not fit."""
    import importlib

    pools = [(pool.name, pool.bytes) for pool in sizing.pools if pool.where == "host"]
    if not pools:
        raise ScenarioError("there is no host pool to take; add --enable-hierarchical-cache", key="--touch")
    taken = importlib.import_module("pagestorm_real.host_touch").touch_pools(
        pools, ranks=sizing.ranks_per_host, quiet=quiet
    )
    if not quiet:
        click.echo(taken.sentence, err=True)


def _print(sizing: Sizing, explain: bool, as_json: bool) -> None:
    if not as_json:
        click.echo(sizing.text(explain))
        return
    plain = sizing.as_dict(explain)
    if sizing.verdict == "refused":
        plain.update(file=None, line=None, key=None)
    click.echo(json.dumps(plain, indent=2))
