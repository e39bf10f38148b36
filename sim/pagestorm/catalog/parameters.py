"""The parameters of a model by part: how many, how a rank shares them, what they are stored in.

Counted from the shape: projections, experts, embeddings; biases and norms are left out (under 0.1 %). Where
models.csv has a count of its own, a test compares them.
"""

from __future__ import annotations

from typing import NamedTuple

from pagestorm.catalog.shape import CHUNKED, FULL, LATENT_WINDOW, LINEAR, NO_ATTENTION, SLIDING, Shape

ATTENTION, KV, DENSE, EXPERT, SHARED, VOCABULARY, WHOLE = (
    "attention",
    "kv",
    "dense",
    "expert",
    "shared",
    "vocabulary",
    "whole",
)
"""How ranks share a part: by the attention group, by KV heads, by the tensor group, by experts, not at all."""

LINEAR_LAYER, ROUTED, KEPT = "linear", "routed", "kept"
"""What a part is stored in: the format of linear layers, of routed experts, or the unquantized type."""


class Part(NamedTuple):
    """Parameters of one kind in one layer (or, for the vocabulary, in all of the model)."""

    name: str
    parameters: int
    shared_by: str
    stored_as: str
    kv_heads: int = 0


def layer_parts(shape: Shape, layer: int) -> tuple[Part, ...]:
    """The parts of one hidden layer."""
    kind = shape.layers[layer]
    return (*_mixer(shape, kind, layer), *_mlp(shape, layer))


def draft_parts(shape: Shape) -> tuple[Part, ...]:
    """One multi-token-prediction layer: a layer like the last one, and the projection that joins two hidden states.

    It shares embedding and head with the model.
    """
    last = max((n for n, kind in enumerate(shape.layers) if kind != NO_ATTENTION), default=0)
    full = next((n for n in range(last, -1, -1) if shape.layers[n] not in (LINEAR, NO_ATTENTION)), last)
    join = Part("draft projection", 2 * shape.hidden_size**2, WHOLE, KEPT)
    return (*layer_parts(shape, full), join)


def vocabulary_parts(shape: Shape) -> tuple[Part, Part | None]:
    """The input embedding, and the head unless it is the same."""
    embedding = Part("embedding", shape.vocab_size * shape.hidden_size, VOCABULARY, KEPT)
    return embedding, None if shape.tied_embeddings else embedding._replace(name="head")


def total(shape: Shape) -> int:
    """All parameters but draft layers and a vision tower."""
    inside = sum(part.parameters for layer in range(shape.layer_count) for part in layer_parts(shape, layer))
    return inside + sum(part.parameters for part in vocabulary_parts(shape) if part is not None)


def active(shape: Shape) -> int:
    """Parameters that a token touches, without the input embedding unless it is the head too."""
    inside = 0
    for layer in range(shape.layer_count):
        for part in layer_parts(shape, layer):
            experts = shape.experts
            routed = part.stored_as == ROUTED and experts is not None
            inside += part.parameters * experts.chosen // experts.total if routed and experts else part.parameters
    return inside + shape.vocab_size * shape.hidden_size


def _mixer(shape: Shape, kind: str, layer: int) -> tuple[Part, ...]:
    if kind == NO_ATTENTION:
        return ()
    if kind == LINEAR:
        return _linear(shape)
    if kind == LATENT_WINDOW:
        return _compressed(shape, layer)
    if shape.latent is not None:
        return _latent(shape, layer)
    return _heads(shape, kind, layer)


def _heads(shape: Shape, kind: str, layer: int) -> tuple[Part, ...]:
    heads = shape.window if kind == SLIDING else shape.full
    assert kind in (FULL, SLIDING, CHUNKED)
    queries = shape.query_heads * heads.k_dim * (2 if shape.output_gate else 1)
    parts = [
        Part("queries", shape.hidden_size * queries, ATTENTION, LINEAR_LAYER),
        Part("output", shape.query_heads * heads.v_dim * shape.hidden_size, ATTENTION, LINEAR_LAYER),
        Part(
            "keys and values",
            shape.hidden_size * heads.kv_heads * (heads.k_dim + heads.v_dim),
            KV,
            LINEAR_LAYER,
            heads.kv_heads,
        ),
    ]
    return tuple(parts)


def _latent(shape: Shape, layer: int) -> tuple[Part, ...]:
    latent, hidden, heads = shape.latent, shape.hidden_size, shape.query_heads
    assert latent is not None
    query_row = heads * (latent.nope + latent.rope)
    down = hidden * latent.row
    if latent.q_rank is None:
        queries = hidden * query_row
    else:
        queries = latent.q_rank * query_row
        down += hidden * latent.q_rank
    gate = hidden * heads * latent.v_dim if shape.output_gate else 0
    up = latent.kv_rank * heads * (latent.nope + latent.v_dim)
    parts = [
        Part("latent projections", down, WHOLE, LINEAR_LAYER),
        Part("queries", queries + gate, ATTENTION, LINEAR_LAYER),
        Part("latent expansion", up, ATTENTION, LINEAR_LAYER),
        Part("output", heads * latent.v_dim * hidden, ATTENTION, LINEAR_LAYER),
    ]
    if shape.indexer is not None and layer < len(shape.indexer.owning) and shape.indexer.owning[layer]:
        indexer = shape.indexer
        rank = latent.q_rank or hidden
        count = rank * indexer.heads * indexer.head_dim + hidden * (indexer.head_dim + indexer.heads)
        parts.append(Part("indexer", count, WHOLE, LINEAR_LAYER))
    return tuple(parts)


def _compressed(shape: Shape, layer: int) -> tuple[Part, ...]:
    """DeepSeek-V4: one latent KV head, query and output of low rank, compressors on the layers that compress."""
    hidden, heads, dim = shape.hidden_size, shape.query_heads, shape.full.k_dim
    q_rank = shape.query_rank or hidden
    o_rank = shape.output_rank or hidden
    parts = [
        Part("latent projections", hidden * (q_rank + dim), WHOLE, LINEAR_LAYER),
        Part("queries", q_rank * heads * dim, ATTENTION, LINEAR_LAYER),
        Part("output", heads * dim * o_rank + shape.output_groups * o_rank * hidden, ATTENTION, LINEAR_LAYER),
    ]
    ratio = shape.compress_ratios[layer] if layer < len(shape.compress_ratios) else 0
    if ratio:
        parts.append(Part("compressor", 2 * (2 if ratio == 4 else 1) * hidden * dim, WHOLE, KEPT))
    return tuple(parts)


def _linear(shape: Shape) -> tuple[Part, ...]:
    state, hidden = shape.state, shape.hidden_size
    assert state is not None
    inner, keys = state.heads * state.head_dim, state.groups * state.state_dim
    # Gated delta net projects q, k, v, z and two gates a head; Mamba-2 z, x, B, C and dt; KDA q, k, v and its gates.
    gates = {"gdn": inner + 2 * state.heads, "mamba2": inner + state.heads, "kda": 2 * inner + state.heads}[state.kind]
    convolution = (inner + 2 * keys) * state.conv_kernel
    return (
        Part("state projections", hidden * (inner + 2 * keys + gates), ATTENTION, LINEAR_LAYER),
        Part("convolution", convolution, ATTENTION, KEPT),
        Part("output", inner * hidden, ATTENTION, LINEAR_LAYER),
    )


def _mlp(shape: Shape, layer: int) -> tuple[Part, ...]:
    experts, matrices, hidden = shape.experts, shape.mlp_matrices, shape.hidden_size
    if experts is None or not experts.layers[layer]:
        # Nemotron-H: a layer is a mixer or an MLP, never both.
        alternates = NO_ATTENTION in shape.layers
        if shape.dense_intermediate is None or (alternates and shape.layers[layer] != NO_ATTENTION):
            return ()
        return (Part("dense MLP", matrices * hidden * shape.dense_intermediate, DENSE, LINEAR_LAYER),)
    routed = experts.total * matrices * experts.hidden * experts.intermediate
    parts = [Part("routed experts", routed, EXPERT, ROUTED), Part("router", hidden * experts.total, WHOLE, KEPT)]
    if experts.shared:
        parts.append(Part("shared experts", matrices * hidden * experts.shared, SHARED, LINEAR_LAYER))
    if experts.hidden != hidden:
        parts.append(Part("latent expert projections", 2 * hidden * experts.hidden, WHOLE, KEPT))
    return tuple(parts)
