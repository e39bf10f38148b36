"""SGLang's host pools: what its own budget answers for a given machine, and what its DSA indexer pool refuses.

Runs inside the reference environment.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from pagestorm_real.reference.sglang_engine import SRT, Engine
from pagestorm_real.reference.sglang_workload import Fields

KV_LORA_RANK = 512
ROPE_HEAD_DIM = 64
KV_ROW_BYTES = 576
INDEX_HEAD_DIM = 128
DEVICE_PAGES = 32


def host_budget(engine: Engine, payload: dict[str, Any]) -> dict[str, Any]:
    """What one rank may claim of the host's memory.

    Payload: `available_bytes`, what the machine has to give. Answers with `budget_bytes`.
    """
    fields = Fields("host_budget", payload)
    available_bytes = fields.whole("available_bytes", 0)
    fields.done()
    base = import_module(SRT + "mem_cache.pool_host.base")
    with engine.configured(), patch.object(base, "available_host_memory_bytes", lambda **_: available_bytes):
        return {"budget_bytes": base.host_memory_budget_bytes()}


def host_headroom(engine: Engine, payload: dict[str, Any]) -> dict[str, Any]:
    """What the memory cgroups of a made-up machine leave.

    Payload: `proc`, the folder that stands for /proc; the mounts in its `self/mountinfo` are read as they stand there.
    Answers with `headroom_bytes` (null: no limit), or the `failed` text where the engine cannot tell.
    """
    fields = Fields("host_headroom", payload)
    proc = Path(str(fields.take("proc")))
    fields.done()
    memory = import_module(SRT + "mem_cache.host_memory")
    try:
        return {"headroom_bytes": memory._cgroup_memory_headroom(proc), "failed": None}
    except (OSError, RuntimeError, ValueError) as error:
        return {"headroom_bytes": None, "failed": str(error)}


def host_indexer(engine: Engine, payload: dict[str, Any]) -> dict[str, Any]:
    """The host pool of a DSA indexer beside an anchor pool, built within a budget.

    Payload: `page_size`, `layers`, `pages` (of the anchor), `budget_bytes`. Answers with `bytes_per_token_per_layer`,
    and `built_bytes`, or the `refused` text.
    """
    fields = Fields("host_indexer", payload)
    page_size, layers, pages = (fields.whole(name, 1) for name in ("page_size", "layers", "pages"))
    budget_bytes = fields.whole("budget_bytes", 0)
    fields.done()
    base = import_module(SRT + "mem_cache.pool_host.base")
    dsa = import_module(SRT + "mem_cache.pool_host.dsa")
    with engine.configured(page_size=page_size):
        declared = dsa.make_dsa_indexer_pool_decl(_device_pool(engine, page_size, layers))
        answer = {"bytes_per_token_per_layer": declared.storage_info.bytes_per_token_per_layer}
        anchor = SimpleNamespace(page_size=page_size, layout="layer_first", size=page_size * pages, page_num=pages)
        with base.host_memory_budget_scope(budget_bytes):
            try:
                pool = dsa.DSAIndexerPoolHost(declared, anchor, pin_memory=False)
            except ValueError as error:
                return {**answer, "built_bytes": None, "refused": str(error)}
        return {**answer, "built_bytes": pool.index_k_with_scale_buffer.numel(), "refused": None}


def _device_pool(engine: Engine, page_size: int, layers: int) -> Any:
    """The device pool whose indexer is to be copied, a few pages of it."""
    return import_module(SRT + "mem_cache.memory_pool").DSATokenToKVPool(
        size=page_size * DEVICE_PAGES,
        page_size=page_size,
        kv_lora_rank=KV_LORA_RANK,
        dtype=engine.torch.bfloat16,
        qk_rope_head_dim=ROPE_HEAD_DIM,
        layer_num=layers,
        device="cpu",
        index_head_dim=INDEX_HEAD_DIM,
        enable_memory_saver=False,
        kv_cache_dim=KV_ROW_BYTES,
    )
