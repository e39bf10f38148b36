"""Bytes that one token takes in the pools of SGLang, by pool and kind of layer.

Formulas: sglang 0.5.23, `model_executor/pool_configurator.py` and `mem_cache/kv_cache_configurator.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from pagestorm.catalog.shape import CHUNKED, FULL, LATENT_WINDOW, SLIDING, Shape
from pagestorm.errors import ScenarioError

KV_DTYPES = {
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "mxfp8": 1.0,
    "bf16": 2.0,
    "bfloat16": 2.0,
    "nvfp4": 0.5,
    "fp4_mx_block16": 0.5,
}
"""Bytes of one stored element, without scales."""
FP4 = ("nvfp4", "fp4_mx_block16")
FP4_BLOCK, MX_BLOCK = 16, 32
DSA_QUANT_BLOCK = 128
"""Elements of an index key, and of a DSA row's latent, that share one fp32 scale."""
SCALE_BYTES = 4
RAW_DSA_BACKENDS = ("trtllm", "tilelang")


class PoolRow(NamedTuple):
    """A pool: how many layers it has, and the bytes of one token in all of them."""

    name: str
    layers: int
    bytes_per_token: float

    @property
    def bytes_per_token_per_layer(self) -> float:
        return self.bytes_per_token / self.layers if self.layers else 0.0


class KvFormat(NamedTuple):
    """How KV is stored: the flag's name, bytes of an element, and whether a DSA row carries its scales (`packed`)."""

    name: str
    element_bytes: float
    packed_dsa: bool

    @property
    def torch_bytes(self) -> int:
        """Bytes of the torch element: a pair of fp4 numbers is one byte."""
        return max(1, int(self.element_bytes))


def kv_format(name: str, model_dtype: str, dsa_prefill: str = "", dsa_decode: str = "") -> KvFormat:
    """The format that `--kv-cache-dtype` means; `auto` is the model's own. Raises `ScenarioError`."""
    if name == "auto":
        return KvFormat(model_dtype, 4.0 if model_dtype == "float32" else 2.0, False)
    if name not in KV_DTYPES:
        raise ScenarioError(f"{name!r} is none of auto, {', '.join(KV_DTYPES)}", key="--kv-cache-dtype")
    trtllm = "trtllm" in (dsa_prefill, dsa_decode)
    tilelang = dsa_prefill == dsa_decode == "tilelang"
    packed = name == "fp8_e4m3" and not trtllm and not tilelang
    return KvFormat(name, KV_DTYPES[name], packed)


def heads_per_rank(kv_heads: int, attn_tp: int, dcp: int = 1) -> int:
    """KV heads that a rank keeps: its share, one at least."""
    return max(1, kv_heads // (attn_tp // dcp))


def head_bytes(kv_heads: int, k_dim: int, v_dim: int, form: KvFormat, layers: int) -> int:
    """K and V of one token in `layers` layers of a rank, block scales included."""
    if form.name in FP4:
        return _fp4_bytes(kv_heads, k_dim, layers, form.name)
    plain = int(kv_heads * (k_dim + v_dim) * layers * form.element_bytes)
    if form.name == "mxfp8":
        plain += kv_heads * (k_dim + v_dim) * layers // MX_BLOCK
    return plain


def _fp4_bytes(kv_heads: int, k_dim: int, layers: int, name: str) -> int:
    """FP4 keys and values, their scales, and one layer's fp8 copy that prefill reads (the FP8-prefill recipe)."""
    numbers = kv_heads * (k_dim // 2) * layers * 2
    scales = (kv_heads * (k_dim // FP4_BLOCK) if name == "nvfp4" else kv_heads * k_dim // FP4_BLOCK) * layers * 2
    return numbers + scales + kv_heads * k_dim * 2


def latent_row_bytes(shape: Shape, form: KvFormat) -> int:
    """One token's latent row in one layer, in bytes: 656 for a packed DSA row, 576 for a raw one."""
    latent = shape.latent
    assert latent is not None
    if shape.indexer is not None and form.packed_dsa:
        return latent.kv_rank + latent.kv_rank // DSA_QUANT_BLOCK * SCALE_BYTES + latent.rope * 2
    if form.name in FP4:
        return latent.row // 2 + latent.row // FP4_BLOCK
    return int(latent.row * form.element_bytes)


def index_key_bytes(head_dim: int, kpool: int = 1) -> int:
    """One DSA index key with its scales: 132 for 128 elements. `kpool` tokens share one."""
    return -(-(head_dim + head_dim // DSA_QUANT_BLOCK * SCALE_BYTES) // kpool)


def attention_layers(shape: Shape, start: int, end: int) -> int:
    """Layers of a stage that keep KV."""
    return shape.count(FULL + SLIDING + CHUNKED + LATENT_WINDOW, start, end)


def target_rows(
    shape: Shape, form: KvFormat, attn_tp: int, dcp: int, start: int, end: int, all_indexed: bool = False
) -> list[PoolRow]:
    """The pools of a model whose layers all keep every token: KV, and index keys where there are some.

    `all_indexed`: layers that share another's index keys keep some of their own too (HiSparse, some platforms).
    """
    layers = attention_layers(shape, start, end)
    if shape.latent is not None:
        rows = [PoolRow("kv", layers, latent_row_bytes(shape, form) * layers)]
        if shape.indexer is not None:
            owning = sum(shape.indexer.owning[start:end]) if not all_indexed else layers
            key = index_key_bytes(shape.indexer.head_dim, shape.indexer.kpool)
            rows.append(PoolRow("indexer", owning, key * owning * dcp))
        return rows
    heads = heads_per_rank(shape.full.kv_heads, attn_tp, dcp)
    rows = [PoolRow("kv", layers, head_bytes(heads, shape.full.k_dim, shape.full.v_dim, form, layers))]
    if shape.block_index is not None:
        keys, values = (sum(part[start:end]) for part in (shape.block_index.keys, shape.block_index.values))
        rows.append(PoolRow("index keys", keys, (keys + values) * shape.block_index.dim * 2))
    return rows


def draft_rows(shape: Shape, rows: list[PoolRow], form: KvFormat, draft_layers: int, dcp: int = 1) -> list[PoolRow]:
    """KV of multi-token-prediction layers: each counts like one of the target's (EAGLE, NEXTN, STANDALONE)."""
    if not draft_layers:
        return []
    kv = rows[0]
    whole = kv.bytes_per_token if shape.indexer is not None else sum(row.bytes_per_token for row in rows)
    drafts = [PoolRow("draft kv", draft_layers, int(whole * draft_layers / kv.layers) * dcp)]
    if shape.indexer is not None:
        key = index_key_bytes(shape.indexer.head_dim, shape.indexer.kpool)
        drafts.append(PoolRow("draft indexer", draft_layers, key * draft_layers * dcp))
    return drafts
