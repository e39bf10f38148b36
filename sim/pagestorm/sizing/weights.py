"""Weights of one rank: parameters by part, each in what it is stored in, divided as the engine divides it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pagestorm.catalog import parameters
from pagestorm.catalog.parameters import (
    ATTENTION,
    DENSE,
    EXPERT,
    KEPT,
    KV,
    ROUTED,
    SHARED,
    VOCABULARY,
    WHOLE,
    Part,
)
from pagestorm.catalog.shape import Shape
from pagestorm.errors import ScenarioError
from pagestorm.sizing.account import BYTES, Account, both
from pagestorm.sizing.ranks import Ranks, Stage

DTYPE_BYTES = {
    "auto": 2,
    "bfloat16": 2,
    "bf16": 2,
    "float16": 2,
    "half": 2,
    "fp16": 2,
    "float32": 4,
    "float": 4,
    "fp32": 4,
}


class Format(NamedTuple):
    """Bytes of one parameter of a linear layer, of a routed expert, and of what is never quantized; scales included."""

    linear: float
    routed: float
    kept: float
    name: str


BLOCK_SCALE = 4 / 128**2
"""One fp32 scale a block of 128 x 128."""
FORMATS: dict[str, tuple[float | None, float]] = {
    # None: as the unquantized type.
    "fp8": (1 + BLOCK_SCALE, 1 + BLOCK_SCALE),
    "w8a8": (1.0, 1.0),
    "int8": (1.0, 1.0),
    "compressed-tensors": (1.0, 1.0),
    "modelopt": (1.0, 1.0),
    "mixed_precision": (1.0, 0.5 + 1 / 16),
    "nvfp4": (0.5 + 1 / 16, 0.5 + 1 / 16),
    "mxfp4": (None, 0.5 + 1 / 32),
    "int4 group-32": (None, 0.5 + 2 / 32),
    "int4": (None, 0.5 + 2 / 128),
    "awq": (0.5 + 2.5 / 128, 0.5 + 2.5 / 128),
    "gptq": (0.5 + 2.5 / 128, 0.5 + 2.5 / 128),
}
"""Bytes of one quantized parameter, of linear layers and of routed experts, with its share of the scales."""


def weight_format(shape: Shape, dtype: str, quantization: str) -> Format:
    """What the weights are stored in: the checkpoint's own format, unless the engine is told to quantize.

    `dtype` and `quantization` are the engine's flags. Raises `ScenarioError` for a format that is not known.
    """
    kept = DTYPE_BYTES.get(dtype if dtype != "auto" else shape.dtype)
    if kept is None:
        raise ScenarioError(
            f"{dtype if dtype != 'auto' else shape.dtype!r} is no type of weights; known: {', '.join(DTYPE_BYTES)}",
            key="--dtype",
        )
    own = shape.weight_format.lower()
    if own.startswith("fp8 dense + fp4"):
        return Format(1 + BLOCK_SCALE, 0.5 + 1 / 32, kept, own)
    name = own if not _plain(own) or not quantization else quantization.lower()
    if _plain(name):
        return Format(kept, kept, kept, name or "bf16")
    best = max((key for key in FORMATS if _is(name, key)), key=len, default=None)
    if best is None:
        raise ScenarioError(
            f"weights in {name!r} are not known; give the figure that the engine logs with --weights-bytes-per-rank",
            key="--quantization",
        )
    linear, routed = FORMATS[best]
    return Format(kept if linear is None else linear, routed, kept, name)


def _plain(name: str) -> bool:
    return name in ("", "bf16", "bfloat16", "float16", "float32", "none", "auto")


def _is(name: str, key: str) -> bool:
    normal = re.sub(r"modelopt_fp4|modelopt_nvfp4|fp4$", "nvfp4", name).replace("modelopt_fp8", "fp8")
    return key in normal


class Weights(NamedTuple):
    """Bytes of one rank, by what they are."""

    by_part: Mapping[str, float]

    @property
    def total_bytes(self) -> int:
        return round(sum(self.by_part.values()))


def rank_weights(
    shape: Shape, form: Format, ranks: Ranks, stage: Stage, draft_layers: int, dp_shares_vocabulary: bool = True
) -> Weights:
    """Weights of a rank of one stage. Draft layers and the head belong to the last stage, the embedding to the first.

    `dp_shares_vocabulary`: with attention data parallelism the embedding is divided by the attention group only.
    """
    parts: list[Part] = []
    for layer in range(stage.start, stage.end):
        parts += parameters.layer_parts(shape, layer)
    embedding, head = parameters.vocabulary_parts(shape)
    if stage.first or (stage.last and head is None):
        parts.append(embedding)
    if stage.last and head is not None:
        parts.append(head)
    by_part: dict[str, float] = defaultdict(float)
    for part in parts:
        by_part[part.name] += _bytes(part, form, ranks, dp_shares_vocabulary)
    if stage.last and draft_layers:
        draft = [_bytes(part, form, ranks, dp_shares_vocabulary) for part in parameters.draft_parts(shape)]
        by_part["draft layers"] += draft_layers * sum(draft)
    return Weights(dict(by_part))


def _bytes(part: Part, form: Format, ranks: Ranks, dp_shares_vocabulary: bool) -> float:
    each = {KEPT: form.kept, ROUTED: form.routed}.get(part.stored_as, form.linear)
    return part.parameters * each / _shared_by(part, ranks, dp_shares_vocabulary)


def _shared_by(part: Part, ranks: Ranks, dp_shares_vocabulary: bool) -> float:
    match part.shared_by:
        case str(kind) if kind == ATTENTION:
            return ranks.attn_tp
        case str(kind) if kind == KV:
            return min(ranks.attn_tp, part.kv_heads)
        case str(kind) if kind in (DENSE, SHARED):
            return ranks.tp
        case str(kind) if kind == EXPERT:
            return ranks.tp * (ranks.replicas if ranks.ep > ranks.tp else 1)
        case str(kind) if kind == VOCABULARY:
            return ranks.attn_tp if dp_shares_vocabulary else ranks.tp
        case _:
            assert part.shared_by == WHOLE
            return 1


def note_weights(
    account: Account, weights: Weights, form: Format, ranks: Ranks, stage: Stage, measured: int | None
) -> int:
    """Record the weights of a rank; returns their bytes."""
    where = f"layers {stage.start} to {stage.end - 1}" if ranks.pp > 1 else "all layers"
    if measured is not None:
        return account.note("weights_bytes_per_rank", measured, BYTES, "given", "--weights-bytes-per-rank")
    largest = sorted(weights.by_part.items(), key=lambda item: -item[1])
    formula = " + ".join(f"{name} {both(size)}" for name, size in largest) or "no weights"
    shares = f"tp {ranks.tp}" + (f", attention group {ranks.attn_tp}" if ranks.attn_tp != ranks.tp else "")
    return account.note(
        "weights_bytes_per_rank",
        weights.total_bytes,
        BYTES,
        f"{formula}; {where}, {shares}, stored as {form.name}",
        "parameters counted from the shape (catalog/parameters.py); biases and norms are left out",
    )


def most_loaded(shape: Shape, form: Format, ranks: Ranks, draft_layers: int) -> Iterable[tuple[Stage, Weights]]:
    """Every stage with the weights of its ranks."""
    for stage in ranks.stages:
        yield stage, rank_weights(shape, form, ranks, stage, draft_layers)
