"""Model facts (models.csv), the shape of a model's KV rows, and the parameters that a token touches."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from pagestorm.catalog.table import Facts, plain_name, read, suggestion
from pagestorm.errors import ScenarioError

KV_ELEMENT_BYTES = 2
"""Bytes of one stored K or V element: the engine keeps the KV cache in bf16 unless told otherwise."""


class KvShape(NamedTuple):
    """What one token keeps in the layers that keep every token, over all ranks.

    K and V are alike: `layers` layers of `heads` rows of `head_dim` elements each. A latent (MLA) row, which is K and V
    in one, counts as two halves of a single head.
    """

    layers: int
    heads: int
    head_dim: int
    element_bytes: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token."""
        return 2 * self.layers * self.heads * self.head_dim * self.element_bytes


class Model(Facts, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model. Counts of parameters, bytes of weights and of KV are those of the table; None where unknown."""

    model: str
    hf_id: str
    architecture: str = ""
    attention: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int | None = None
    moe_intermediate_size: int | None = None
    num_experts: int | None = None
    experts_per_token: int | None = None
    n_shared_experts: int | None = None
    first_k_dense: int | None = None
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    qk_nope_head_dim: int | None = None
    sliding_window: int | None = None
    n_full_attn_layers: int | None = None
    n_sliding_layers: int | None = None
    n_chunked_layers: int | None = None
    n_linear_layers: int | None = None
    layer_pattern: str = ""
    swa_num_kv_heads: int | None = None
    swa_head_dim: int | None = None
    swa_v_head_dim: int | None = None
    global_num_kv_heads: int | None = None
    global_head_dim: int | None = None
    attention_chunk_size: int | None = None
    linear_num_key_heads: int | None = None
    linear_num_value_heads: int | None = None
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_conv_kernel: int | None = None
    index_head_dim: int | None = None
    index_n_heads: int | None = None
    index_topk: int | None = None
    compress_ratios: str = ""
    max_position_embeddings: int | None = None
    vocab_size: int | None = None
    tie_word_embeddings: bool | None = None
    torch_dtype: str = ""
    native_weight_format: str = ""
    num_nextn_layers: int | None = None
    computed_params_total: int | None = None
    computed_params_active: int | None = None
    computed_weight_bytes: int | None = None
    computed_kv_bytes_per_token_full_layers_bf16: int | None = None
    computed_kv_bytes_per_token_sliding_layers_bf16: int | None = None
    computed_kv_bytes_per_token_chunked_layers_bf16: int | None = None
    computed_indexer_bytes_per_token: int | None = None
    computed_linear_state_elements_per_seq: int | None = None
    source: str
    notes: str = ""
    config: str | None = None
    """The JSON text of the config.json that it was read from; None for a row of the table."""

    def as_dict(self) -> dict[str, Any]:
        """Every column of the table by its name; None where the cell is empty."""
        columns = super().as_dict()
        del columns["config"]
        return columns

    @property
    def name(self) -> str:
        """What a scenario calls it."""
        return self.model

    def line(self) -> str:
        """The model in one line: name, attention, layers, parameters, context length."""
        billions = "?" if self.computed_params_total is None else f"{self.computed_params_total / 1e9:.1f}"
        context = "?" if self.max_position_embeddings is None else f"{self.max_position_embeddings}"
        return (
            f"{self.model:<24} {self.attention:<20.20} {self.num_hidden_layers:>4} layers {billions:>7} B parameters "
            f"{context:>9} context tokens"
        )

    @property
    def is_latent(self) -> bool:
        """Whether a token's KV is one latent row a layer (MLA)."""
        return self.kv_lora_rank is not None

    @property
    def full_attention_only(self) -> bool:
        """Whether every layer keeps every token, uncompressed, and reads all of it."""
        return self.attention in ("GQA", "MLA") and self.n_full_attn_layers == self.num_hidden_layers

    @property
    def kv_shape(self) -> KvShape:
        """Layers, KV heads, head dimension, bytes an element. Exact for the models that `full_attention_only` names."""
        layers = self.n_full_attn_layers or 0
        if self.kv_lora_rank is not None:
            return KvShape(layers, 1, (self.kv_lora_rank + (self.qk_rope_head_dim or 0)) // 2, KV_ELEMENT_BYTES)
        heads = self.global_num_kv_heads or self.num_key_value_heads or 0
        return KvShape(layers, heads, self.global_head_dim or self.head_dim or 0, KV_ELEMENT_BYTES)

    def kv_bytes_per_token(self, tp_size: int = 1) -> int:
        """Bytes of one token's KV on one of `tp_size` ranks, in the layers that keep every token.

        KV heads are divided among the ranks, or repeated where there are fewer heads than ranks; a latent row is on
        every rank. Raises `ScenarioError` for a `tp_size` that the model cannot be divided by.
        """
        self.check_tp_size(tp_size)
        layers, heads, k_dim, element_bytes = self.kv_shape
        if self.is_latent:
            return self.kv_shape.bytes_per_token
        v_dim = self.global_head_dim or self.v_head_dim or k_dim
        return layers * max(1, heads // tp_size) * (k_dim + v_dim) * element_bytes

    def check_tp_size(self, tp_size: int) -> None:
        """Raises `ScenarioError` where the engine would refuse (sglang 0.5.23, `models/llama.py`)."""
        kv_heads = 1 if self.is_latent else (self.num_key_value_heads or 1)
        uneven = kv_heads % tp_size if kv_heads >= tp_size else tp_size % kv_heads
        if self.num_attention_heads % tp_size == 0 and not uneven:
            return
        possible = [n for n in (1, 2, 4, 8, 16, 32, 64) if self._divides(n, kv_heads)]
        raise ScenarioError(
            f"{self.num_attention_heads} attention heads and {kv_heads} KV heads of {self.model} cannot be divided "
            f"among {tp_size} ranks; possible: {', '.join(map(str, possible))}"
        )

    def _divides(self, n: int, kv_heads: int) -> bool:
        return self.num_attention_heads % n == 0 and (kv_heads % n == 0 if kv_heads >= n else n % kv_heads == 0)


@cache
def models() -> tuple[Model, ...]:
    """Every model, in the order of the table."""
    return read("models.csv", Model)


def model(name: str) -> Model:
    """The model of that name or Hugging Face id, whatever its case, spaces and hyphens; or, for the path of a
    config.json (or of the folder around it), the model that it describes. Raises `ScenarioError`."""
    # Imported here: most runs name a model of the table.
    from pagestorm.catalog import huggingface

    if huggingface.is_path(name):
        return huggingface.read_model(name)
    asked = plain_name(name)
    for each in models():
        if asked in (plain_name(each.model), plain_name(each.hf_id)):
            return each
    names = [each.model for each in models()]
    raise ScenarioError(f"unknown model {name!r}; {suggestion(name, names, 'pagestorm catalog models')}")
