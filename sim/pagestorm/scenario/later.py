"""Keys and values that belong to a scenario and are not built yet: an error about them says so.

Written without list positions: `workload.requests.prefix` is the key `prefix` of any request.
"""

from __future__ import annotations

from pagestorm.scenario.places import Path

_SGLANG_FLAGS = (
    "attention_backend chunked_prefix_cache command default_priority_value disable_hybrid_swa_memory "
    "dp_size dtype enable_dp_attention enable_dynamic_chunking enable_hierarchical_cache "
    "enable_mixed_chunk enable_priority_scheduling kv_cache_dtype max_mamba_cache_size "
    "mem_fraction_static num_continuous_decode_steps pp_size prefill_max_requests "
    "priority_scheduling_preemption_threshold quantization radix_eviction_policy "
    "schedule_low_priority_values_first sliding_window_size swa_full_tokens_ratio"
)
_VLLM_FLAGS = "cpu_offload_gb gpu_memory_utilization swap_space"

KEYS: dict[str, frozenset[str]] = {
    "": frozenset(("client", "speculation")),
    "engine": frozenset((*_SGLANG_FLAGS.split(), *_VLLM_FLAGS.split())),
    "steptime": frozenset(("path",)),
    "workload": frozenset(("prefix", "sessions")),
    "workload.requests": frozenset(("session",)),
}
KEY_PREFIXES: dict[str, tuple[str, ...]] = {"engine": ("speculative_", "hicache_", "mamba_", "disaggregation_")}

ELSEWHERE: dict[str, str] = {
    "engine.gpu": "hardware.gpu",
    "engine.model": "model",
    "engine.model_path": "model",
    "engine.tp_size": "hardware.tp_size",
    "workload.seed": "seed",
}
"""Keys that a person may look for in another place than theirs."""

VALUES: dict[str, frozenset[object]] = {
    "engine.async_scheduling": frozenset((True,)),
    "engine.schedule_policy": frozenset(
        ("lpm", "random", "dfs-weight", "lof", "priority", "routing-key", "hrrn", "shortest-prefill-first")
    ),
    "engine.retraction_policy": frozenset(("priority",)),
    "pools": frozenset(("sglang", "vllm")),
    "steptime.kind": frozenset(("aic", "table")),
    "workload.trace.format": frozenset(("burstgpt", "servegen", "sharegpt", "jsonl")),
}


def _place(path: Path) -> str:
    return ".".join(part for part in path if isinstance(part, str))


def is_later_key(path: Path, key: str) -> bool:
    """Whether `key` in the mapping at `path` is one of the names that come later."""
    place = _place(path)
    return key in KEYS.get(place, ()) or key.startswith(KEY_PREFIXES.get(place, ("\0",)))


def elsewhere(path: Path, key: str) -> str | None:
    """Where `key`, written in the mapping at `path`, belongs."""
    return ELSEWHERE.get(f"{_place(path)}.{key}")


def is_later_value(path: Path, value: object) -> bool:
    """Whether `value` at `path` is one of the values that come later."""
    return isinstance(value, str) and value in VALUES.get(_place(path), ())
