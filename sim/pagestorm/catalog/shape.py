"""The shape of a model: what each layer keeps of a token, and what its weights consist of.

One reader for both sources: a Hugging Face `config.json`, and a row of models.csv written out with the same keys
(`pagestorm.catalog.rows`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from pagestorm.errors import ScenarioError

FULL, SLIDING, CHUNKED, LINEAR, LATENT_WINDOW, NO_ATTENTION = "F", "S", "C", "L", "W", "-"
"""What a layer keeps: every token, a window, a chunk, a state; a window of latents beside compressed ones; nothing."""

KIND_NAMES = {
    FULL: "full attention",
    SLIDING: "sliding window",
    CHUNKED: "chunked attention",
    LINEAR: "linear attention (state)",
    LATENT_WINDOW: "latent window with compressed KV",
    NO_ATTENTION: "no attention",
}


class Heads(NamedTuple):
    """KV heads of a layer, over all ranks, and the elements of one K and one V row."""

    kv_heads: int
    k_dim: int
    v_dim: int


class Latent(NamedTuple):
    """Multi-head latent attention: one row of `kv_rank + rope` elements a token. `q_rank` None: no query latent."""

    kv_rank: int
    rope: int
    nope: int
    v_dim: int
    q_rank: int | None

    @property
    def row(self) -> int:
        """Elements of a token's row."""
        return self.kv_rank + self.rope


class Indexer(NamedTuple):
    """Index keys of sparse attention (DSA): which layers own some, and the elements of a key."""

    head_dim: int
    heads: int
    topk: int
    kpool: int
    owning: tuple[bool, ...]


class BlockIndex(NamedTuple):
    """Index keys of block-sparse attention (MiniMax-M3): which layers keep a key, which a value beside it."""

    dim: int
    keys: tuple[bool, ...]
    values: tuple[bool, ...]


class State(NamedTuple):
    """The recurrent state of a linear-attention layer, over all ranks: a convolution window and a matrix a head.

    Mamba-2, gated delta net and KDA in one form: `heads` matrices of `head_dim` x `state_dim`, and a window of
    `conv_kernel - 1` rows of `heads x head_dim + 2 x groups x state_dim` channels. `ssm_dtype` is the checkpoint's.
    """

    kind: str
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    conv_kernel: int
    ssm_dtype: str | None


class Experts(NamedTuple):
    """A mixture of experts; `hidden` is the width the routed experts work in, `shared` the width of all shared ones."""

    total: int
    chosen: int
    hidden: int
    intermediate: int
    shared: int
    layers: tuple[bool, ...]


class Vision(NamedTuple):
    """What the engine's memory heuristic reads of a vision tower; None where the config does not say."""

    layers: int | None
    hidden: int | None


class Shape(Struct, frozen=True, kw_only=True):
    """Facts of one model that memory depends on. Counts are over all ranks; `layers` has a letter for each layer."""

    name: str
    source: str
    architecture: str
    model_type: str
    layers: str
    hidden_size: int
    vocab_size: int
    tied_embeddings: bool
    dtype: str
    context_tokens: int | None
    query_heads: int
    full: Heads
    window: Heads
    window_tokens: int | None
    latent: Latent | None
    indexer: Indexer | None
    block_index: BlockIndex | None
    compress_ratios: tuple[int, ...]
    index_dim: int | None
    state: State | None
    experts: Experts | None
    dense_intermediate: int | None
    mlp_matrices: int
    output_gate: bool
    query_rank: int | None
    output_groups: int
    output_rank: int | None
    draft_layers: int | None
    weight_format: str
    vision: Vision | None

    @property
    def layer_count(self) -> int:
        """Hidden layers, those without attention included."""
        return len(self.layers)

    def count(self, kinds: str, start: int = 0, end: int | None = None) -> int:
        """Layers of these kinds among layers `start` to `end`."""
        part = self.layers[start:end]
        return sum(part.count(kind) for kind in kinds)


def shape_of(config: Mapping[str, Any], *, name: str, source: str) -> Shape:
    """The shape that a Hugging Face config describes; nested `text_config` included.

    Raises `ScenarioError` naming every field that is missing.
    """
    return _Reader(config, name, source).shape()


ALIASES: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("num_hidden_layers", "num_layers", "n_layer"),
    "hidden_size": ("hidden_size", "d_model", "n_embd"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "intermediate_size": ("intermediate_size", "ffn_hidden_size", "n_inner"),
    "max_position_embeddings": ("max_position_embeddings", "max_sequence_length", "seq_length", "n_positions"),
    "num_experts": ("n_routed_experts", "num_local_experts", "num_experts"),
    "num_experts_per_tok": ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "experts_per_token"),
    "dtype": ("dtype", "torch_dtype"),
    "num_nextn_predict_layers": ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"),
    "shared_experts": ("n_shared_experts", "num_shared_experts"),
}
REQUIRED = ("num_hidden_layers", "hidden_size", "vocab_size")
LATENT_FIELDS = ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
STATE_FIELDS = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
MAMBA_FIELDS = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
LAYER_TYPES = {
    "full_attention": FULL,
    "attention": FULL,
    "sliding_attention": SLIDING,
    "chunked_attention": CHUNKED,
    "linear_attention": LINEAR,
    "deepseek_sparse_attention": FULL,
    "mamba": LINEAR,
    "moe": NO_ATTENTION,
    "mlp": NO_ATTENTION,
}
HYBRID_LETTERS = {"M": LINEAR, "*": FULL, "E": NO_ATTENTION, "-": NO_ATTENTION}
BLOCK_LETTERS = {"mamba": "M", "attention": "*", "moe": "E", "mlp": "-"}
"""How Nemotron-H spells a layer in its pattern."""
LLAMA4_FULL_EVERY = 4
MAX_LAYERS, MAX_WIDTH = 10_000, 1 << 32


class _Reader:
    """Reads one config; collects what is missing, so that one error names all of it."""

    def __init__(self, config: Mapping[str, Any], name: str, source: str) -> None:
        text = config.get("text_config")
        self.outer = config
        self.config: Mapping[str, Any] = {**config, **text} if isinstance(text, Mapping) else config
        self.name = name
        self.source = source
        self.missing: list[str] = []

        blocks = self.config.get("layers_block_type") or self.config.get("layer_types") or ()
        self.pattern = str(self.config.get("hybrid_override_pattern") or "")
        if not self.pattern and blocks and all(each in BLOCK_LETTERS for each in blocks):
            self.pattern = "".join(BLOCK_LETTERS[each] for each in blocks)

    def get(self, key: str) -> Any:
        """The value of a key under any of its names; None where it is absent or null."""
        for each in ALIASES.get(key, (key,)):
            if self.config.get(each) is not None:
                return self.config[each]
        return None

    def number(self, key: str, default: int | None = None) -> int:
        """A whole number above zero. A missing one is noted and counts as 1 until the reader gives up."""
        value = self.get(key)
        if value is None:
            if default is None:
                self.missing.append(key)
                return 1
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_WIDTH:
            raise self.wrong(key, f"is {value!r}, not a whole number above 0")
        return value

    def wrong(self, key: str, what: str) -> ScenarioError:
        return ScenarioError(f"{key} {what}; this is no config.json of a language model that can be sized", key="model")

    def shape(self) -> Shape:
        if self.get("encoder_layers") is not None and self.get("num_hidden_layers") is None:
            raise ScenarioError("an encoder-decoder model has no KV pool that can be sized", key="model")
        for key in REQUIRED[bool(self.pattern) :]:
            self.number(key)
        layer_count = len(self.pattern) or self.number("num_hidden_layers")
        if layer_count > MAX_LAYERS:
            raise self.wrong("num_hidden_layers", f"is {layer_count}, more than {MAX_LAYERS}")
        heads = self.number("num_attention_heads")
        latent = self.latent()
        layers = self.layers(layer_count)
        shape = Shape(
            name=self.name,
            source=self.source,
            architecture=self.architecture(),
            model_type=str(self.outer.get("model_type") or ""),
            layers=layers,
            hidden_size=self.number("hidden_size"),
            vocab_size=self.number("vocab_size"),
            tied_embeddings=bool(self.get("tie_word_embeddings")),
            dtype=str(self.get("dtype") or "bfloat16").removeprefix("torch."),
            context_tokens=self.get("max_position_embeddings") and self.number("max_position_embeddings"),
            query_heads=heads,
            full=self.full_heads(heads),
            window=self.window_heads(heads),
            window_tokens=self.window_tokens(layers),
            latent=latent,
            indexer=self.indexer(len(layers)),
            block_index=self.block_index(len(layers)),
            compress_ratios=self.compress_ratios(len(layers)),
            index_dim=self.get("index_head_dim"),
            state=self.state() if LINEAR in layers else None,
            experts=self.experts(len(layers)),
            dense_intermediate=self.dense_intermediate(),
            mlp_matrices=2 if str(self.get("mlp_hidden_act") or "").startswith("relu2") else 3,
            output_gate=bool(self.get("attn_output_gate") or self.get("mla_use_output_gate")),
            query_rank=self.get("q_lora_rank"),
            output_groups=self.number("o_groups", 1),
            output_rank=self.get("o_lora_rank"),
            draft_layers=self.get("num_nextn_predict_layers"),
            weight_format=self.weight_format(),
            vision=self.vision(),
        )
        if self.missing:
            names = ", ".join(dict.fromkeys(self.missing))
            known = self.architecture() or "no architecture named"
            raise ScenarioError(
                f"{self.source}: {known}; missing for sizing: {names}; is this the config.json of a language model?",
                key="model",
            )
        return shape

    def architecture(self) -> str:
        listed = self.outer.get("architectures") or self.config.get("architectures") or ()
        return str(listed[0]) if isinstance(listed, list | tuple) and listed else ""

    def full_heads(self, query_heads: int) -> Heads:
        """Heads of the layers that keep every token; Gemma-4 has its own for those."""
        default = self.head_dim(query_heads)
        k_dim = self.number("global_head_dim", default)
        v_dim = k_dim if self.get("kv_lora_rank") is not None else self.number("v_head_dim", k_dim)
        kv_heads = self.number("num_key_value_heads", query_heads)
        return Heads(self.number("num_global_key_value_heads", kv_heads), k_dim, v_dim)

    def window_heads(self, query_heads: int) -> Heads:
        """Heads of the layers that keep a window."""
        k_dim = self.number("swa_head_dim", self.head_dim(query_heads))
        v_default = k_dim if self.get("swa_head_dim") or not self.get("v_head_dim") else self.number("v_head_dim")
        kv_heads = self.number("num_key_value_heads", query_heads)
        return Heads(self.number("swa_num_key_value_heads", kv_heads), k_dim, self.number("swa_v_head_dim", v_default))

    def head_dim(self, query_heads: int) -> int:
        return self.number("head_dim", max(1, self.number("hidden_size") // query_heads))

    def latent(self) -> Latent | None:
        if self.get("kv_lora_rank") is None:
            return None
        rope, nope, v_dim = (self.number(key) for key in LATENT_FIELDS)
        return Latent(self.number("kv_lora_rank"), rope, nope, v_dim, self.get("q_lora_rank"))

    def layers(self, count: int) -> str:
        """A letter for each layer, from whichever of the families' ways to say it is there."""
        if self.pattern:
            return self.letters(self.pattern, HYBRID_LETTERS, "hybrid_override_pattern")
        if self.get("compress_ratios") is not None:
            return LATENT_WINDOW * count
        linear = self.get("linear_attn_config")
        if isinstance(linear, Mapping) and linear.get("kda_layers"):
            recurrent = set(linear["kda_layers"])  # counted from 1
            return "".join(LINEAR if n + 1 in recurrent else FULL for n in range(count))
        if types := self.get("layer_types"):
            return self.letters(types[:count], LAYER_TYPES, "layer_types")
        if types := self.get("hybrid_layer_pattern"):
            return self.letters(types[:count], {0: FULL, 1: SLIDING}, "hybrid_layer_pattern")
        if self.get("attention_chunk_size") and self.architecture().startswith("Llama4"):
            every = LLAMA4_FULL_EVERY
            return "".join(FULL if (n + 1) % every == 0 else CHUNKED for n in range(count))
        if (every := self.get("full_attention_interval")) and self.get("linear_num_value_heads"):
            return "".join(FULL if (n + 1) % every == 0 else LINEAR for n in range(count))
        if self.slides():
            every = self.get("sliding_window_pattern")
            return "".join(FULL if every and (n + 1) % every == 0 else SLIDING for n in range(count))
        return FULL * count

    def slides(self) -> bool:
        return bool(self.get("sliding_window")) and self.config.get("use_sliding_window") is not False

    def letters(self, kinds: Sequence[object], known: Mapping[Any, str], key: str) -> str:
        for kind in kinds:
            if kind not in known:
                raise self.wrong(key, f"has {kind!r}, which is none of {', '.join(map(str, known))}")
        return "".join(known[kind] for kind in kinds)

    def window_tokens(self, layers: str) -> int | None:
        if CHUNKED in layers:
            return self.number("attention_chunk_size")
        if SLIDING in layers or LATENT_WINDOW in layers:
            return self.number("sliding_window")
        return None

    def indexer(self, layers: int) -> Indexer | None:
        if self.get("index_topk") is None or self.get("kv_lora_rank") is None:
            return None
        return Indexer(
            self.number("index_head_dim"),
            self.number("index_n_heads"),
            self.number("index_topk"),
            self.number("index_kpool", 1),
            tuple(not self.shares_index(layer) for layer in range(layers)),
        )

    def shares_index(self, layer: int) -> bool:
        """Whether a layer reuses the keys of one before it (sglang 0.5.23, `configs/model_config.py`)."""
        types = self.get("indexer_types")
        if types is not None:
            return bool(layer < len(types) and types[layer] == "shared")
        factor = self.number("cli_factor", 1)
        if factor > 1:
            return layer % factor != 0
        pattern = self.get("index_topk_pattern")
        if pattern is not None:
            return bool(layer < len(pattern) and pattern[layer] == "S")
        every = self.number("index_topk_freq", 1)
        offset = self.number("index_skip_topk_offset", 2)
        return max(layer - offset + 1, 0) % every != 0

    def block_index(self, layers: int) -> BlockIndex | None:
        sparse = self.get("sparse_attention_config")
        if not isinstance(sparse, Mapping) or not sparse.get("sparse_attention_freq"):
            return None
        keys = tuple(each != 0 for each in sparse["sparse_attention_freq"][:layers])
        disabled = sparse.get("sparse_disable_index_value") or [0] * layers
        values = tuple(key and not off for key, off in zip(keys, disabled, strict=False))
        return BlockIndex(int(sparse.get("sparse_index_dim") or 0), keys, values)

    def compress_ratios(self, layers: int) -> tuple[int, ...]:
        """One for each layer; the list of the config goes on with the draft layers."""
        ratios = tuple(self.get("compress_ratios") or ())[:layers]
        if ratios and (len(ratios) < layers or any(r not in (0, 4, 128) for r in ratios)):
            raise self.wrong("compress_ratios", "must name 0, 4 or 128 for each layer")
        return ratios

    def state(self) -> State:
        dtype = self.get("mamba_ssm_dtype")
        linear = self.get("linear_attn_config")
        if isinstance(linear, Mapping):
            heads, dim = linear.get("num_heads"), linear.get("head_dim")
            if not heads or not dim:
                self.missing.append("linear_attn_config.num_heads, linear_attn_config.head_dim")
                heads = dim = 1
            return State("kda", heads, dim, heads, dim, linear.get("short_conv_kernel_size") or 4, dtype)
        if self.pattern or self.get("mamba_num_heads"):
            heads, dim, groups, state, conv = (self.number(key) for key in MAMBA_FIELDS)
            return State("mamba2", heads, dim, groups, state, conv, dtype)
        key_heads, heads, key_dim, dim, conv = (self.number(key) for key in STATE_FIELDS)
        return State("gdn", heads, dim, key_heads, key_dim, conv, dtype)

    def experts(self, layers: int) -> Experts | None:
        if self.get("num_experts") is None:
            return None
        hidden = self.number("hidden_size")
        for key in ("routed_expert_hidden_size", "moe_latent_size"):
            hidden = self.number(key, hidden)
        width = "moe_intermediate_size" if self.get("moe_intermediate_size") else "intermediate_size"
        intermediate = self.number(width)
        return Experts(
            self.number("num_experts"),
            self.number("num_experts_per_tok"),
            hidden,
            intermediate,
            self.shared_width(intermediate),
            tuple(self.is_sparse(layer) for layer in range(layers)),
        )

    def shared_width(self, intermediate: int) -> int:
        for key in ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "share_expert_dim"):
            if self.get(key):
                return self.number(key)
        if self.architecture().startswith("Llama4"):
            return intermediate
        return (self.get("shared_experts") or 0) * intermediate

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts."""
        if self.pattern:
            return bool(self.pattern[layer] == "E")
        if types := self.get("mlp_layer_types"):
            return bool(types[layer] == "sparse")
        frequency = self.get("moe_layer_freq")
        if isinstance(frequency, list):
            return bool(frequency[layer])
        if (step := self.get("interleave_moe_layer_step")) is not None:
            return bool((layer + 1) % step == 0)
        if layer < (self.get("first_k_dense_replace") or 0) or layer in (self.get("mlp_only_layers") or ()):
            return False
        return (layer + 1) % (self.get("decoder_sparse_step") or 1) == 0

    def dense_intermediate(self) -> int | None:
        for key in ("intermediate_size_mlp", "dense_intermediate_size", "intermediate_size"):
            if self.get(key):
                return self.number(key)
        if self.get("num_experts") is None:
            self.missing.append("intermediate_size")
        return None

    def weight_format(self) -> str:
        if stated := self.get("native_weight_format"):
            return str(stated)
        quantized = self.outer.get("quantization_config") or self.config.get("quantization_config")
        if not isinstance(quantized, Mapping):
            return str(self.get("dtype") or "bfloat16")
        method = str(quantized.get("quant_method") or quantized.get("quant_algo") or "unknown")
        if self.get("expert_dtype") == "fp4":
            return "fp8 dense + fp4 experts"
        if method in ("compressed-tensors", "modelopt"):
            return _packed_format(quantized, method)
        return method

    def vision(self) -> Vision | None:
        tower = self.outer.get("vision_config")
        if not isinstance(tower, Mapping):
            return None
        return Vision(tower.get("num_hidden_layers"), tower.get("hidden_size"))


def _packed_format(quantized: Mapping[str, Any], method: str) -> str:
    """The format of the weights that a compressed-tensors or modelopt config packs."""
    algorithm = str(quantized.get("quant_algo") or "").lower()
    if algorithm:
        return algorithm
    groups = quantized.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") or {}
        kind, bits = weights.get("type"), weights.get("num_bits")
        if bits == 4:
            size = weights.get("group_size") or 32
            return (
                f"{'mxfp4' if kind == 'float' and size == 32 else 'nvfp4' if kind == 'float' else 'int4'} group-{size}"
            )
        if bits == 8:
            return "fp8" if kind == "float" else "int8"
    return method
