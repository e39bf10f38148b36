"""How a model is divided among ranks: tensor, pipeline, data and expert parallelism."""

from __future__ import annotations

from typing import NamedTuple

from pagestorm.catalog.shape import LINEAR, Shape
from pagestorm.errors import ScenarioError
from pagestorm.sizing.options import Options


class Stage(NamedTuple):
    """Hidden layers `start` to `end` (not included) of one pipeline stage."""

    start: int
    end: int
    first: bool
    last: bool


class Ranks(NamedTuple):
    """One server: `tp` ranks in a stage, of which `attn_tp` share attention; `attn_dp` attention groups side by side;
    `replicas` whole copies; `dcp` ranks that share the KV of a head."""

    tp: int
    pp: int
    attn_dp: int
    attn_tp: int
    replicas: int
    ep: int
    dcp: int
    nodes: int
    stages: tuple[Stage, ...]

    @property
    def world(self) -> int:
        """Ranks of one copy of the model."""
        return self.tp * self.pp

    @property
    def per_host(self) -> int:
        """Ranks on one host, at least one."""
        return max(1, self.world // self.nodes)


def sglang_ranks(options: Options, shape: Shape) -> Ranks:
    """The division that SGLang makes (0.5.23, `arg_groups/parallel_hook.py`, `runtime_context.py`)."""
    tp, pp = options.positive("tp_size", 1), options.positive("pp_size", 1)
    replicas, attn_dp = options.positive("dp_size", 1), options.positive("attn_dp_size", 1)
    if options.switch("enable_dp_attention") and attn_dp == 1:
        attn_dp, replicas = replicas, 1
    if attn_dp > 1 and replicas > 1:
        raise ScenarioError(
            f"{replicas} replicas together with {attn_dp} attention groups are not supported by the engine; leave "
            f"--dp-size out",
            key="--dp-size",
        )
    attn_cp, dcp = options.positive("attn_cp_size", 1), options.positive("dcp_size", 1)
    _divides(tp, attn_dp * attn_cp, "--attn-dp-size", "--tp-size")
    attn_tp = tp // attn_dp // attn_cp
    _divides(attn_tp, dcp, "--dcp-size", "the attention ranks")
    ep = options.positive("ep_size", 1)
    if shape.experts is None and ep > 1:
        raise ScenarioError(f"{shape.name} has no experts; leave it out", key="--ep-size")
    _divides(tp, ep, "--ep-size", "--tp-size")
    nodes = options.positive("nnodes", 1)
    check_heads(shape, attn_tp, "--tp-size")
    stages = sglang_stages(shape.layer_count, pp, options.variable("SGLANG_PP_LAYER_PARTITION"))
    return Ranks(tp, pp, attn_dp, attn_tp, replicas, ep, dcp, nodes, stages)


def vllm_ranks(options: Options, shape: Shape) -> Ranks:
    """The division that vLLM makes: attention is always divided by the tensor ranks, data ranks are copies of it."""
    tp, pp = options.positive("tensor_parallel_size", 1), options.positive("pipeline_parallel_size", 1)
    replicas = options.positive("data_parallel_size", 1)
    dcp = options.positive("decode_context_parallel_size", 1)
    _divides(tp, dcp, "--decode-context-parallel-size", "--tensor-parallel-size")
    check_heads(shape, tp, "--tensor-parallel-size")
    ep = tp * replicas if options.switch("enable_expert_parallel") and shape.experts is not None else 1
    stages = vllm_stages(shape.layer_count, pp, options.variable("VLLM_PP_LAYER_PARTITION"))
    return Ranks(tp, pp, 1, tp, replicas, ep, dcp, options.positive("nnodes", 1), stages)


def _divides(whole: int, part: int, flag: str, of: str) -> None:
    if whole % part:
        possible = ", ".join(str(n) for n in range(1, whole + 1) if whole % n == 0)
        raise ScenarioError(f"{part} does not divide {whole} ({of}); possible: {possible}", key=flag)


def check_heads(shape: Shape, attn_tp: int, flag: str) -> None:
    """Raises `ScenarioError` where heads cannot be divided among the attention ranks (the engines stop there too)."""
    kv_heads = 1 if shape.latent is not None or shape.compress_ratios else shape.full.kv_heads
    state_heads = shape.state.heads if shape.state is not None and LINEAR in shape.layers else attn_tp
    possible = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if _even(shape.query_heads, kv_heads, shape, n)]
    if _even(shape.query_heads, kv_heads, shape, attn_tp):
        return
    kv = "a KV row that every rank keeps" if kv_heads == 1 else f"{kv_heads} KV heads"
    state = f" and {state_heads} state heads" if shape.state is not None else ""
    raise ScenarioError(
        f"{shape.query_heads} attention heads, {kv}{state} of {shape.name} cannot be divided among {attn_tp} ranks; "
        f"possible: {', '.join(map(str, possible))}",
        key=flag,
    )


def _even(query_heads: int, kv_heads: int, shape: Shape, n: int) -> bool:
    shared = kv_heads % n == 0 if kv_heads >= n else n % kv_heads == 0
    state = shape.state is None or shape.state.heads % n == 0
    return query_heads % n == 0 and shared and state


def sglang_stages(layers: int, pp: int, partition: str) -> tuple[Stage, ...]:
    """Layers of each stage: what is left over goes to the last ones (sglang 0.5.23, `distributed/utils.py`)."""
    if partition and pp > 1:
        return _partitioned(partition, layers, pp, "SGLANG_PP_LAYER_PARTITION")
    if pp > layers:
        raise ScenarioError(f"{pp} stages are more than the {layers} layers", key="--pp-size")
    base, rest = divmod(layers, pp)
    return _staged([base + (stage >= pp - rest) for stage in range(pp)])


def vllm_stages(layers: int, pp: int, partition: str) -> tuple[Stage, ...]:
    """Layers of each stage: what is left over goes to those before the last (vllm 0.33.0, `distributed/utils.py`)."""
    if partition and pp > 1:
        return _partitioned(partition, layers, pp, "VLLM_PP_LAYER_PARTITION")
    if pp > layers:
        raise ScenarioError(f"{pp} stages are more than the {layers} layers", key="--pipeline-parallel-size")
    base, rest = divmod(layers, pp)
    counts = [base] * pp
    for back in range(2, rest + 2):
        counts[-back] += 1
    return _staged(counts)


def _partitioned(partition: str, layers: int, pp: int, variable: str) -> tuple[Stage, ...]:
    try:
        counts = [int(part) for part in partition.split(",")]
    except ValueError:
        raise ScenarioError(f"{partition!r} is no list of layer counts such as 20,21,20", key=variable) from None
    if len(counts) != pp or sum(counts) != layers or min(counts) < 0:
        raise ScenarioError(
            f"{partition} gives {len(counts)} stages of {sum(counts)} layers; {pp} stages of {layers} are asked",
            key=variable,
        )
    return _staged(counts)


def _staged(counts: list[int]) -> tuple[Stage, ...]:
    stages, start = [], 0
    for place, count in enumerate(counts):
        stages.append(Stage(start, start + count, place == 0, place == len(counts) - 1))
        start += count
    return tuple(stages)
