"""Memory that SGLang leaves beside weights and pools: the default fraction, and what has to fit beside the pool.

Formulas: sglang 0.5.23, `arg_groups/memory_hook.py` (the fraction), `mem_cache/memory_pool.py` (the request table).
The activation peak is an estimate of ours from the shape; the engine's own reserve is coarser and larger.
"""

from __future__ import annotations

from typing import NamedTuple

from pagestorm.catalog.shape import LINEAR, Shape
from pagestorm.sizing.account import BYTES, COUNT, GIB, MIB, RATIO, TOKENS, Account
from pagestorm.sizing.options import Options
from pagestorm.sizing.platform import Graphs
from pagestorm.sizing.ranks import Ranks

SOURCE = "sglang 0.5.23 arg_groups/memory_hook.py"
CHUNK_AND_BATCH = (
    # Below this many MiB: chunk tokens, decode batch with fewer than 4 ranks, with 4 and more.
    (20 << 10, 2048, 8, 8),
    (35 << 10, 4096, 48, 160),
    (60 << 10, 4096, 32, 160),
    (90 << 10, 8192, 256, 512),
    (160 << 10, 8192, 256, 512),
)
LARGEST_CHUNK, LARGEST_BATCH = 16384, 512
UNKNOWN_CHUNK, UNKNOWN_BATCH = 4096, 160
META_MIB, LEAST_TOKENS, MIB_PER_TOKEN, MIB_PER_RANK = 512, 2048, 1.5, 128
BIG_GPU_MIB, BIG_RESERVE_MIB = 60 << 10, 10 << 10
DECODE_MIB, DP_MIB, DP_LARGE_MIB, DP_LARGE_BATCH = 2, 3, 1.5, 300
PREFILL_MIB, LATENT_PREFILL_MIB, DEEPEP_PREFILL_MIB, DEEPEP_MIB = 8, 1536, 1024, 2048
CONTEXT_BYTES = 6 * GIB // 10
"""CUDA context, libraries and kernels of one process before weights are loaded: an assumption (H100 logs say 0.6)."""
COLLECTIVE_BYTES = 19 * GIB // 10
"""NCCL and custom all-reduce of a rank among several: an assumption (H200 x 8 logs say 1.8 to 2.0)."""
VISION_BASE, VISION_SENSITIVITY, VISION_LEAST, VISION_MOST = 0.95, 0.1, 0.8, 1.05
VISION_LAYERS, VISION_HIDDEN = 24, 1024


class Batches(NamedTuple):
    """Tokens of a prefill chunk (-1: not chunked) and the largest decode batch that is captured."""

    chunk: int
    decode_batch: int


def default_batches(options: Options, gpu_mib: int | None, tp: int, account: Account) -> Batches:
    """`chunked_prefill_size` and the decode graph's batch, by GPU memory where they are not given."""
    chunk, small, large = UNKNOWN_CHUNK, UNKNOWN_BATCH, UNKNOWN_BATCH
    if gpu_mib is not None:
        chunk, small, large = next(
            (row[1:] for row in CHUNK_AND_BATCH if gpu_mib < row[0]), (LARGEST_CHUNK, LARGEST_BATCH, LARGEST_BATCH)
        )
    given = options.maybe("chunked_prefill_size")
    batch = options.maybe("cuda_graph_max_bs_decode")
    if batch is None:
        batch = small if tp < 4 else large
        batch = min(batch, options.maybe("max_running_requests") or batch)
    where = f"by GPU memory of {gpu_mib:,} MiB" if gpu_mib is not None else "GPU memory unknown"
    account.note("chunked_prefill_size", chunk if given is None else given, TOKENS, "given" if given else where, SOURCE)
    account.note("cuda_graph_max_bs", batch, COUNT, f"{where}, tp {tp}", SOURCE)
    return Batches(chunk if given is None else given, batch)


def mem_fraction_static(
    options: Options,
    shape: Shape,
    ranks: Ranks,
    batches: Batches,
    graphs: Graphs,
    gpu_mib: int,
    vision: bool,
    account: Account,
) -> float:
    """The share of memory for weights and pools: `--mem-fraction-static`, else the engine's heuristic."""
    given = options.fraction("mem_fraction_static")
    if given is not None:
        return account.note("mem_fraction_static", given, RATIO, "given", "--mem-fraction-static")
    tokens = _activation_tokens(options, batches, graphs)
    graph = graph_reserve_mib(options, shape, ranks, graphs)
    deepep = DEEPEP_MIB if graphs.decode and options.text("moe_a2a_backend", "none") == "deepep" else 0
    reserved = META_MIB + tokens * MIB_PER_TOKEN + ranks.tp * ranks.pp * MIB_PER_RANK + graph
    formula = (
        f"reserved {META_MIB} + {MIB_PER_TOKEN} x {tokens} tokens + {MIB_PER_RANK} x {ranks.tp * ranks.pp} ranks + "
        f"graphs {graph:g} = {reserved:g} MiB"
    )
    if gpu_mib > BIG_GPU_MIB and reserved < BIG_RESERVE_MIB:
        reserved = BIG_RESERVE_MIB
        formula += f", raised to {BIG_RESERVE_MIB} above 60 GiB"
    reserved += deepep
    fraction = round((gpu_mib - reserved) / gpu_mib, 3)
    formula += f"; round(({gpu_mib} - {reserved:g}) / {gpu_mib}, 3)"
    if vision:
        factor = vision_factor(shape)
        formula += f" x {factor:.4g} for the vision tower"
        fraction *= factor
    return account.note("mem_fraction_static", fraction, RATIO, formula, SOURCE)


def _activation_tokens(options: Options, batches: Batches, graphs: Graphs) -> int:
    if options.text("disaggregation_mode", "null") == "decode":
        running = options.maybe("max_running_requests") or graphs.max_batch or 1
        return max(running * (options.maybe("speculative_num_draft_tokens") or 1), LEAST_TOKENS)
    chunk = batches.chunk if batches.chunk > 0 else options.whole("max_prefill_tokens", 16384)
    return max(chunk, LEAST_TOKENS)


def graph_reserve_mib(options: Options, shape: Shape, ranks: Ranks, graphs: Graphs) -> float:
    """MiB that the engine sets aside for CUDA graphs."""
    role, reserved = options.text("disaggregation_mode", "null"), 0.0
    if graphs.decode and role != "prefill":
        reserved += graphs.max_batch * DECODE_MIB
    if ranks.attn_dp > 1 and role != "prefill":
        reserved += graphs.max_batch * ranks.attn_dp * DP_MIB
        if graphs.max_batch > DP_LARGE_BATCH:
            reserved += graphs.max_batch * ranks.attn_dp * DP_LARGE_MIB
    if graphs.prefill and role != "decode":
        reserved += LATENT_PREFILL_MIB if shape.latent is not None else len(graphs.prefill_sizes) * PREFILL_MIB
        if options.text("moe_a2a_backend", "none") == "deepep":
            reserved += DEEPEP_PREFILL_MIB
    return reserved


def vision_factor(shape: Shape) -> float:
    """What the fraction of a multimodal model is multiplied by, from the size of its vision tower."""
    if shape.vision is None:
        return 1.0
    layers = 24 if shape.vision.layers is None else shape.vision.layers
    hidden = 1024 if shape.vision.hidden is None else shape.vision.hidden
    complexity = layers * hidden**2 / (VISION_LAYERS * VISION_HIDDEN**2)
    factor = 1.0 - VISION_SENSITIVITY * (complexity - 1.0)
    return VISION_BASE * max(VISION_LEAST, min(VISION_MOST, factor))


class Beside(NamedTuple):
    """What has to fit beside weights and pools, in bytes."""

    activations: int
    logits: int
    graphs: int
    request_table: int

    @property
    def total(self) -> int:
        return self.activations + self.logits + self.graphs + self.request_table


def beside_the_pool(
    options: Options,
    shape: Shape,
    ranks: Ranks,
    batches: Batches,
    graphs: Graphs,
    max_running: int,
    context_tokens: int,
    account: Account,
) -> Beside:
    """Estimate of what is taken after the pools are made."""
    tokens = _activation_tokens(options, batches._replace(chunk=_per_group(batches.chunk, ranks)), graphs)
    activations = account.note(
        "activation_bytes",
        activation_bytes(shape, tokens, ranks),
        BYTES,
        f"{tokens} tokens x the widest layer of a rank, in bf16",
        "estimate from the shape: hidden states, projections and the MLP's inner activations of one layer",
    )
    rows = min(max_running, max(graphs.max_batch, 1))
    logits = account.note(
        "logits_bytes",
        rows * shape.vocab_size * 6,
        BYTES,
        f"{rows} rows x {shape.vocab_size:,} words x (2 + 4)",
        "estimate: bf16 logits and their fp32 copy for the sampler",
    )
    reserved = graph_reserve_mib(options, shape, ranks, graphs)
    graph = account.note("graph_bytes", int(reserved * MIB), BYTES, f"{reserved:g} MiB", SOURCE)
    width = context_tokens + request_row_extra(options)
    table = account.note(
        "request_table_bytes",
        (max_running + 1) * width * 4,
        BYTES,
        f"({max_running} + 1) rows x ({context_tokens:,} + {width - context_tokens}) tokens x 4",
        "sglang 0.5.23 mem_cache/memory_pool.py (request to token table)",
    )
    return Beside(activations, logits, graph, table)


def _per_group(chunk: int, ranks: Ranks) -> int:
    return chunk // ranks.attn_dp if chunk > 0 else chunk


def request_row_extra(options: Options) -> int:
    """Tokens of a request's row beyond the context length."""
    return 4 + (options.maybe("speculative_num_draft_tokens") or 0)


def activation_bytes(shape: Shape, tokens: int, ranks: Ranks) -> int:
    """Peak of one layer's activations, in bytes: a lower bound of what a forward pass takes."""
    hidden = 4 * shape.hidden_size
    queries = shape.query_heads // ranks.attn_tp * max(shape.full.k_dim, shape.full.v_dim)
    heads = 3 * queries + 2 * max(1, shape.full.kv_heads // ranks.attn_tp) * shape.full.k_dim
    if shape.latent is not None:
        wide = shape.latent.nope + shape.latent.rope + shape.latent.v_dim
        heads = 2 * shape.query_heads // ranks.attn_tp * wide
    if shape.state is not None and LINEAR in shape.layers:
        heads = max(heads, 4 * shape.state.heads * shape.state.head_dim // ranks.attn_tp)
    inner = 3 * (shape.dense_intermediate or 0) // ranks.tp
    if shape.experts is not None:
        experts = shape.experts
        width = 3 * experts.intermediate // max(1, ranks.tp // ranks.ep)
        inner = max(inner, experts.chosen * (width + experts.hidden) // ranks.ep)
    return 2 * tokens * (hidden + max(heads, inner))
