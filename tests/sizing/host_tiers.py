"""Launches with a host tier, made up from a number: what the product is asked, and what the engine is told instead.

The engine is told the geometry of the device pools; it sizes, rounds, books and refuses by itself.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from pagestorm.catalog import Shape, model, shape
from pagestorm.sizing import Sizing, size
from pagestorm.sizing.budget import RESERVE_BYTES

HEADS = ("Llama-3.1-8B", "Qwen2.5-7B", "Qwen3-235B-A22B", "GLM-4.5", "MiMo-7B", "Phi-4")
LATENT = ("DeepSeek-V3", "DeepSeek-V2-Lite", "Kimi-K2-Instruct")
INDEXED = ("DeepSeek-V3.2", "GLM-5", "GLM-5.2")
WINDOWED = ("MiMo-V2-Flash", "gpt-oss-120b", "Gemma-3-27B", "Step-3.7-Flash")
LINEAR = ("Qwen3-Next-80B-A3B", "Qwen3.5-397B-A17B", "Qwen3.5-27B", "Kimi-K3", "Nemotron-3-Nano-30B-A3B")
FAMILIES = (HEADS, LATENT, INDEXED, WINDOWED, LINEAR)
LAYOUTS = ("page_first", "page_first", "page_first_direct", "layer_first", "page_head", "page_first_kv_split")
TORCH_NAMES = {"bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
ROOM = 1 << 46


class Launch(NamedTuple):
    """What `ps.size` is asked, and the engine's payload for the same server."""

    arguments: dict[str, Any]
    payload: dict[str, Any]


def launch(seed: int) -> Launch:
    """The launch of a number."""
    rng = random.Random(seed)
    name = rng.choice(rng.choice(FAMILIES))
    form = shape(model(name))
    arguments: dict[str, Any] = {
        "model": name,
        "gpu": "H200",
        "tp_size": rng.choice(_possible(form)),
        "nnodes": rng.choice((1, 1, 2)),
        "page_size": 64 if form.indexer is not None else rng.choice((1, 16, 64, 128)),
        "max_total_tokens": rng.randint(1000, 3_000_000),
        "kv_cache_dtype": rng.choice(
            ("bf16", "fp8_e4m3", "fp8_e5m2") if form.indexer is None else ("bf16", "fp8_e4m3")
        ),
        "attention_backend": None if form.latent is not None else "triton",
        "mem_fraction_static": 0.9,
        "chunked_prefill_size": 8192,
        "free_memory_bytes": ROOM,
        "weights_bytes_per_rank": 1 << 30,
        "enable_hierarchical_cache": True,
        "hicache_mem_layout": rng.choice(LAYOUTS),
    }
    if arguments["nnodes"] > arguments["tp_size"]:
        arguments["nnodes"] = 1
    if form.state is not None:
        arguments["max_mamba_cache_size"] = rng.randint(8, 2000)
        arguments["page_size"] = 1
    if form.context_tokens is None:
        arguments["context_length"] = 32768
    if form.draft_layers and rng.random() < 0.5:
        arguments["speculative_algorithm"] = "EAGLE"
    chosen = rng.choice(("ratio", "size", "automatic"))
    if chosen == "ratio":
        arguments["hicache_ratio"] = rng.choice((0.01, 0.5, 1.0, 1.5, 2.0, 3.7))
    elif chosen == "size":
        arguments["hicache_size"] = rng.choice((1, 7, 20, 150, 270))
    arguments = {key: value for key, value in arguments.items() if value is not None}
    sized = size(**arguments)
    arguments["host_memory_bytes"] = _memory(rng, sized)
    return Launch(arguments, _payload(arguments, form, sized))


def _possible(form: Shape) -> list[int]:
    kv_heads = 1 if form.latent is not None else form.full.kv_heads
    fitting = [n for n in (1, 2, 4, 8, 16) if form.query_heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    return [n for n in fitting if form.state is None or form.state.heads % n == 0]


def _memory(rng: random.Random, sized: Sizing) -> int:
    """What the machine has: often the very byte at which a pool of some rank is refused."""
    ranks = sized.ranks_per_host
    pools = [pool.bytes for pool in sized.pools if pool.where == "host"]
    if rng.random() < 0.2 or not pools:
        return rng.randint(0, 40 * sum(pools) + RESERVE_BYTES)
    place = rng.randrange(len(pools))
    before = sum(pools[:place]) + rng.randrange(ranks) * sum(pools)
    return max(0, RESERVE_BYTES + before + ranks * pools[place] + rng.choice((-1, 0, 0, 1, 5000, -5000)))


def _payload(arguments: dict[str, Any], form: Shape, sized: Sizing) -> dict[str, Any]:
    device = {pool.name: pool for pool in sized.pools if pool.where == "device"}
    tp, dtype = arguments["tp_size"], TORCH_NAMES[arguments["kv_cache_dtype"]]
    speculative = "speculative_algorithm" in arguments
    packed = 0
    if speculative and not form.architecture.startswith(("Qwen3_5", "MiniMaxM2")):
        packed = form.draft_layers or 0
    payload: dict[str, Any] = {
        "available_bytes": arguments["host_memory_bytes"],
        "ranks": max(1, tp // arguments["nnodes"]),
        "page_size": arguments["page_size"],
        "layout": arguments["hicache_mem_layout"],
        "drafts": packed,
        "size_gb": arguments.get("hicache_size", 0),
    }
    if "hicache_ratio" in arguments:
        payload["ratio"] = arguments["hicache_ratio"]
    apart = "window" in device
    kept = sum(form.layers.count(letter) for letter in ("F" if apart else "FSC"))
    full = {"tokens": device["kv"].tokens, "layers": kept, "dtype": dtype}
    if form.latent is not None:
        row = 656 if form.indexer is not None and dtype == "float8_e4m3fn" else form.latent.row
        full |= {"kind": "mla", "lora": form.latent.kv_rank, "rope": form.latent.rope, "row": row}
    else:
        full |= _heads(form.full.kv_heads, form.full.k_dim, form.full.v_dim, tp)
    payload["full"] = full
    if form.indexer is not None:
        payload["index_owned"] = list(form.indexer.owning)
    if apart:
        window = {"tokens": device["window"].tokens, "layers": form.layers.count("S"), "dtype": dtype}
        payload["window"] = window | _heads(form.window.kv_heads, form.window.k_dim, form.window.v_dim, tp)
    if form.state is not None:
        payload["state"] = _state(arguments, form, sized, speculative)
    return payload


def _heads(heads: int, k_dim: int, v_dim: int, tp: int) -> dict[str, Any]:
    return {"kind": "mha", "heads": max(1, heads // tp), "head_dim": k_dim, "v_head_dim": v_dim}


def _state(arguments: dict[str, Any], form: Shape, sized: Sizing, speculative: bool) -> dict[str, Any]:
    state = form.state
    assert state is not None
    return {
        "slots": sized.state_slots,
        "layers": form.layers.count("L"),
        "tp": arguments["tp_size"],
        "kind": state.kind,
        "inner": state.heads * state.head_dim,
        "groups": state.groups,
        "heads": state.heads,
        "head_dim": state.head_dim,
        "state_dim": state.state_dim,
        "kernel": state.conv_kernel,
        "conv": "bfloat16",
        "ssm": state.ssm_dtype or "float32",
        "verified": sized.max_running_requests,
        "draft_tokens": 4 if speculative else None,
    }


def divergences(arguments: dict[str, Any], answer: dict[str, Any]) -> list[str]:
    """Where the product and the engine differ on one launch."""
    ours = size(**arguments)
    found: list[str] = []
    device = {pool.name: pool.bytes for pool in ours.pools if pool.where == "device"}
    mine = {
        "full": device["kv"] + device.get("indexer", 0),
        "window": device.get("window"),
        "state": device["state"] + device.get("draft states", 0) if "state" in device else None,
    }
    for name, theirs in answer["device_bytes"].items():
        if mine[name] != theirs:
            found.append(f"{name} on the device: {mine[name]} bytes, the engine's has {theirs}")
    host = [pool for pool in ours.pools if pool.where == "host"]
    for rank in answer["ranks"]:
        for pool, theirs in zip(host, rank, strict=False):
            wanted = (f"host {theirs['name']}", theirs["tokens"], theirs["tokens"] * theirs["bytes_per_token"])
            if (pool.name, pool.tokens, pool.bytes) != wanted:
                found.append(f"{pool.name}: {pool.tokens} tokens, {pool.bytes} bytes; the engine made {wanted}")
    if answer["refused"] is None and len(host) != len(answer["ranks"][0]):
        found.append(f"{[pool.name for pool in host]} against {[pool['name'] for pool in answer['ranks'][0]]}")
    found += _verdict(ours, answer)
    return found


def _verdict(ours: Sizing, answer: dict[str, Any]) -> list[str]:
    """Refused, by which rank, and in which words."""
    refused, at = answer["refused"], len(answer["ranks"]) - 1
    if refused is None:
        # What the machine lacks for all ranks together is our own finding: the engine does not look at it.
        told = ours.verdict == "refused" or "the order of start decides" in (ours.error or "")
        return [f"the engine builds; ours: {ours.verdict}, {ours.error}"] if told else []
    if at == 0:
        same = (ours.verdict, ours.error) == ("refused", refused)
    else:
        same = ours.verdict == "fits_only_with" and (ours.error or "").startswith(refused)
        same = same and f"after {at} peers" in (ours.error or "")
    return [] if same else [f"rank {at} of the engine: {refused!r}; ours: {ours.verdict}, {ours.error!r}"]
