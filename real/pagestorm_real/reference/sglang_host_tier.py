"""SGLang's host tier, built by its own pools and its own assembler for a server of any size.

Runs inside the reference environment. Device and host buffers are made on torch's meta device: shapes and bytes are
the engine's, no memory is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from pagestorm_real.reference.sglang_engine import SRT, Engine
from pagestorm_real.reference.sglang_workload import Fields

MEMORY = SRT + "mem_cache."
META = "meta"
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "uint8")
PAGE_BYTES = 4096


def host_tier(engine: Engine, payload: dict[str, Any]) -> dict[str, Any]:
    """The host pools of each rank of one machine, one rank after the other.

    Payload: `available_bytes` of the machine; `ranks`; `page_size`; `layout`; one of `ratio` and `size_gb`, else the
    engine sizes by itself with `fraction`; and the device pools of a rank: `full` and `window` (`kind` mha with `heads,
    head_dim, v_head_dim`, or mla with `lora, rope, row`; both with `tokens, layers, dtype`), `index_owned` (a flag a
    layer), `state` (`slots, layers, tp, kind, inner, groups, heads, head_dim, state_dim, kernel, conv, ssm, verified,
    draft_tokens`: the last two where speculation verifies so many requests at once), `drafts` (packed draft layers).

    Answers with `device_bytes` of those pools, the `ratio` used, `ranks`: for each the pools that were made (`name,
    tokens, pages, bytes_per_token, buffer_bytes`), and `refused`: the engine's message from the first rank that was
    not built.
    """
    tier = _Tier.read(payload)
    base = import_module(MEMORY + "pool_host.base")
    machine = _Machine(tier.available_bytes)
    with (
        engine.configured(**tier.arguments()),
        _without_memory(engine, machine),
        patch.object(base, "available_host_memory_bytes", lambda **_: machine.left),
        patch.object(base, "ranks_per_host", lambda: tier.ranks),
    ):
        device = _DevicePools.make(engine, tier)
        answer: dict[str, Any] = {"device_bytes": device.sizes(), "ratio": tier.ratio, "ranks": [], "refused": None}
        for _ in range(1 if tier.automatic else tier.ranks):
            built: list[dict[str, Any]] = []
            answer["ranks"].append(built)
            try:
                with _sized_by_itself(device) if tier.automatic else nullcontext():
                    answer["ratio"] = import_module(SRT + "runtime_context").get_memory().hicache_ratio
                    for made in device.host_pools(tier):
                        built.append(made)
            except (ValueError, AssertionError, NotImplementedError, AttributeError) as error:
                answer["refused"] = str(error)
                break
    return answer


@dataclass
class _Machine:
    """Host memory that is left."""

    left: int

    def map(self, size: int) -> None:
        self.left -= math.ceil(size / PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True)
class _Tier:
    """A message, read."""

    available_bytes: int
    ranks: int
    page_size: int
    layout: str
    ratio: float | None
    size_gb: int
    fraction: float
    drafts: int
    full: dict[str, Any]
    window: dict[str, Any] | None
    state: dict[str, Any] | None
    index_owned: list[bool] = field(default_factory=list)

    @classmethod
    def read(cls, payload: dict[str, Any]) -> _Tier:
        fields = Fields("host_tier", payload)
        ratio = fields.number("ratio", 0.0) or None
        tier = cls(
            available_bytes=fields.whole("available_bytes", 0),
            ranks=fields.whole("ranks", 1, 1),
            page_size=fields.whole("page_size", 1),
            layout=str(fields.take("layout")),
            ratio=ratio,
            size_gb=fields.whole("size_gb", 0, 0),
            fraction=fields.number("fraction", 0.8),
            drafts=fields.whole("drafts", 0, 0),
            full=dict(fields.take("full")),
            window=fields.maybe("window"),
            state=fields.maybe("state"),
            index_owned=list(fields.maybe("index_owned") or []),
        )
        fields.done()
        return tier

    @property
    def automatic(self) -> bool:
        return self.ratio is None and self.size_gb == 0

    def arguments(self) -> dict[str, Any]:
        """The server arguments as the engine would have resolved them."""
        return {
            "page_size": self.page_size,
            "hicache_ratio": self.ratio or 2.0,
            "hicache_size": self.size_gb,
            "hicache_mem_layout": self.layout,
            "hicache_host_memory_fraction": self.fraction if self.automatic else None,
        }


@contextmanager
def _without_memory(engine: Engine, machine: _Machine) -> Iterator[None]:
    """Host buffers are counted and not taken; there is no module for the meta device, nor is one needed."""
    torch, common = engine.torch, import_module(MEMORY + "pool_host.common")

    def map_nothing(dims: tuple[int, ...], *, dtype: Any, **_: object) -> Any:
        machine.map(math.prod(dims) * dtype.itemsize)
        return torch.empty(dims, dtype=dtype, device=META)

    with (
        patch.object(torch, "get_device_module", lambda *_: torch.cpu),
        patch.dict(common.ALLOC_MEMORY_FUNCS, {META: map_nothing}),
    ):
        yield


@dataclass
class _DevicePools:
    """The engine's device pools of a rank, and the drafts whose layers are packed beside the full pool's."""

    full: Any
    window: Any
    both: Any
    state: Any
    drafts: tuple[Any, ...]

    @classmethod
    def make(cls, engine: Engine, tier: _Tier) -> _DevicePools:
        both = _window_pools(engine, tier) if tier.window is not None else None
        full = both.full_kv_pool if both is not None else _pool(engine, tier, tier.full, tier.index_owned)
        one = {**tier.full, "layers": 1}
        drafts = tuple(_pool(engine, tier, one, tier.index_owned and [True]) for _ in range(tier.drafts))
        state = _state_pool(engine, tier.state) if tier.state is not None else None
        return cls(full, both.swa_kv_pool if both is not None else None, both, state, drafts)

    def sizes(self) -> dict[str, int]:
        """Bytes of each pool on the device."""
        pools = {"full": self.full, "window": self.window, "state": self.state}
        return {name: _bytes(pool) for name, pool in pools.items() if pool is not None}

    def host_pools(self, tier: _Tier) -> Iterator[dict[str, Any]]:
        """The pools in the order in which the engine's assembler makes them."""
        assembler = import_module(MEMORY + "hybrid_cache.hybrid_pool_assembler")
        others = [pool for pool in (self.window, self.state) if pool is not None]
        shares: tuple[Any, ...] = (None, 0)
        if tier.size_gb > 0 and others:
            shares = assembler._split_hicache_size(tier.size_gb, (self.full, *others))
        full = assembler.build_kv_host_pool(
            kv_pool=self.full, page_size=tier.page_size, host_size=shares[0], mtp_draft_device_pools=self.drafts
        )
        yield _described("kv", full)
        if tier.index_owned:
            yield _described("indexer", self._indexer(full))
        if self.window is not None:
            share = shares[1] if tier.size_gb > 0 else None
            window = assembler.build_kv_host_pool(kv_pool=self.window, page_size=tier.page_size, host_size=share)
            yield _described("window", window)
        if self.state is not None:
            (info,) = self.state.get_device_pool_infos()
            layout = "page_first_direct" if tier.layout == "page_first_kv_split" else tier.layout
            share = shares[1] if tier.size_gb > 0 else 0
            states = assembler.build_mamba_host_pool(self.state, info, host_size=share, layout=layout)
            yield _described("state", states)

    def _indexer(self, anchor: Any) -> Any:
        dsa = import_module(MEMORY + "pool_host.dsa")
        declared = dsa.make_dsa_indexer_pool_decl(self.full)
        return declared.host_pool_builder.build(
            decl=declared, anchor_host=anchor, allocator_type="default", packed_draft_device_pools=self.drafts
        )


def _sized_by_itself(device: _DevicePools) -> Any:
    """The engine's own reduction of the ratio, around the building of the pools."""
    sizing = import_module(MEMORY + "hicache_auto_size")
    rows = None
    pool = device.both if device.both is not None else device.full
    if device.state is not None:
        rows = object.__new__(import_module(MEMORY + "memory_pool").HybridReqToTokenPool)
        rows.mamba_pool = device.state
    parameters = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        req_to_token_pool=rows,
        mtp_draft_device_pools=device.drafts,
    )
    return sizing.auto_size_hicache(parameters, None, enabled=True)


def _pool(engine: Engine, tier: _Tier, wanted: dict[str, Any], index_owned: list[bool]) -> Any:
    memory = import_module(MEMORY + "memory_pool")
    common = {
        "size": wanted["tokens"],
        "page_size": tier.page_size,
        "dtype": getattr(engine.torch, wanted["dtype"]),
        "layer_num": wanted["layers"],
        "device": META,
        "enable_memory_saver": False,
    }
    if wanted["kind"] == "mha":
        return memory.MHATokenToKVPool(
            **common, head_num=wanted["heads"], head_dim=wanted["head_dim"], v_head_dim=wanted["v_head_dim"]
        )
    latent = {"kv_lora_rank": wanted["lora"], "qk_rope_head_dim": wanted["rope"]}
    if not index_owned:
        return memory.MLATokenToKVPool(**common, **latent)
    return memory.DSATokenToKVPool(
        **common,
        **latent,
        kv_cache_dim=wanted["row"],
        index_head_dim=128,
        skip_topk_layers=[not owned for owned in index_owned],
    )


def _window_pools(engine: Engine, tier: _Tier) -> Any:
    full, window = tier.full, tier.window or {}
    return engine.swa_buffers(
        size=full["tokens"],
        size_swa=window["tokens"],
        page_size=tier.page_size,
        dtype=getattr(engine.torch, full["dtype"]),
        head_num=full["heads"],
        head_dim=full["head_dim"],
        v_head_dim=full["v_head_dim"],
        swa_head_num=window["heads"],
        swa_head_dim=window["head_dim"],
        swa_v_head_dim=window["v_head_dim"],
        swa_attention_layer_ids=list(range(window["layers"])),
        full_attention_layer_ids=list(range(window["layers"], window["layers"] + full["layers"])),
        device=META,
    )


def _state_pool(engine: Engine, wanted: dict[str, Any]) -> Any:
    configs = import_module(SRT + "configs.mamba_utils")
    dtypes = configs.Mamba2StateDType(
        conv=getattr(engine.torch, wanted["conv"]), temporal=getattr(engine.torch, wanted["ssm"])
    )
    layers = list(range(wanted["layers"]))
    if wanted["kind"] == "kda":
        shape = configs.KimiLinearStateShape.create(
            tp_world_size=wanted["tp"],
            num_heads=wanted["heads"],
            head_dim=wanted["head_dim"],
            conv_kernel_size=wanted["kernel"],
        )
        parameters = configs.KimiLinearCacheParams(shape=shape, layers=layers, dtype=dtypes)
    else:
        shape = configs.Mamba2StateShape.create(
            tp_world_size=wanted["tp"],
            intermediate_size=wanted["inner"],
            n_groups=wanted["groups"],
            num_heads=wanted["heads"],
            head_dim=wanted["head_dim"],
            state_size=wanted["state_dim"],
            conv_kernel=wanted["kernel"],
        )
        parameters = configs.Mamba2CacheParams(shape=shape, layers=layers, dtype=dtypes)
    return import_module(MEMORY + "memory_pool").MambaPool(
        size=wanted["slots"],
        spec_state_size=wanted["verified"],
        speculative_num_draft_tokens=wanted["draft_tokens"],
        cache_params=parameters,
        mamba_layer_ids=layers,
        device=META,
    )


def _bytes(pool: Any) -> int:
    size = pool.get_kv_size_bytes()
    return int(sum(size) if isinstance(size, tuple) else size)


def _described(name: str, pool: Any) -> dict[str, Any]:
    """What was made of a host pool."""
    return {
        "name": name,
        "tokens": int(pool.size),
        "pages": int(pool.page_num),
        "bytes_per_token": int(pool.size_per_token),
        "buffer_bytes": sum(tensor.numel() * tensor.element_size() for tensor in _buffers(name, pool)),
    }


def _buffers(name: str, pool: Any) -> list[Any]:
    if name == "indexer":
        return [pool.index_k_with_scale_buffer]
    if name == "state":
        return [pool.temporal_buffer, *pool.conv_buffer]
    return list(pool.kv_buffer) if isinstance(pool.kv_buffer, tuple | list) else [pool.kv_buffer]
