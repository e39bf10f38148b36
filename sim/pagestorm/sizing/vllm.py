"""A whole vLLM server sized: weights, what is left for the KV cache, blocks, groups, maximum concurrency.

Rules: vllm 0.33.0. Peak activations, CUDA graphs and memory outside torch are measured by the engine at start; here
they are estimated, and the measured figures may be given instead.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from pagestorm.catalog import Gpu, Model, Shape, shape, usable
from pagestorm.catalog.shape import CHUNKED, LINEAR, NO_ATTENTION, SLIDING
from pagestorm.errors import ScenarioError
from pagestorm.sizing import groups, kv, reserves, state
from pagestorm.sizing.account import BYTES, COUNT, GIB, MIB, RATIO, TOKENS, Account, Refused, both
from pagestorm.sizing.flags import AUTO
from pagestorm.sizing.groups import Group, Limits, Spec
from pagestorm.sizing.options import Options
from pagestorm.sizing.ranks import Ranks, Stage, vllm_ranks
from pagestorm.sizing.result import DEVICE, REFUSED, Pool, Sizing
from pagestorm.sizing.weights import most_loaded, note_weights, weight_format

WORKER = "vllm 0.33.0 v1/worker/gpu_worker.py"
PLANNING = "vllm 0.33.0 v1/core/kv_cache_planning.py"
ARGS = "vllm 0.33.0 engine/arg_utils.py"
UTILIZATION = 0.92
BLOCK_TOKENS, LATENT_BLOCK_TOKENS, HYBRID_LATENT_ALIGNMENT = 16, 64, 128
LARGE_CARD, BIG_CARD = 160 * GIB, 70 * GIB
KV_DTYPES = {
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1, "bfloat16": 2, "float16": 2, "half": 2, "float32": 4,
}  # fmt: skip
DSA_PACKED_ROW = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
MORE_HELP = "See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."


class Setting(NamedTuple):
    """Everything that was decided before memory is divided."""

    options: Options
    shape: Shape
    gpu: Gpu | None
    ranks: Ranks
    max_model_len: int
    batched_tokens: int
    max_seqs: int
    in_flight: int
    kv_bytes: float
    packed_row: int | None

    @property
    def limits(self) -> Limits:
        return Limits(self.max_model_len, self.in_flight)


def size_vllm(options: Options, model: Model | None, gpu: Gpu | None, sizing: Sizing, account: Account) -> None:
    """Fill `sizing`. A refusal of the engine is a verdict, not an exception; raises `ScenarioError` for bad input."""
    if model is None:
        raise ScenarioError("missing; name one of `pagestorm catalog models` or the path of a config.json", key="model")
    sizing.model, sizing.gpu = model.name, gpu.name if gpu is not None else None
    try:
        _size(options, shape(model), gpu, sizing, account)
    except Refused as refusal:
        sizing.verdict, sizing.error = REFUSED, refusal.message
        sizing.missing_bytes, sizing.remedy = refusal.missing_bytes, refusal.remedy or sizing.remedy


def _size(options: Options, model: Shape, gpu: Gpu | None, sizing: Sizing, account: Account) -> None:
    if model.compress_ratios:
        raise ScenarioError(f"{model.name} (compressed KV) is sized for --engine sglang only so far", key="model")
    setting = _setting(options, model, gpu, account)
    stages = setting.ranks.stages
    made = [group_layers(setting, stage, account) for stage in stages]
    grouped = max(made, key=groups.pool_block_bytes)
    sizing.page_size = _token_block(grouped)
    sizing.kv_cache_groups = len(grouped)
    block_bytes = groups.pool_block_bytes(grouped)
    account.note("block_bytes", block_bytes, BYTES, _group_formula(grouped), PLANNING)
    sizing.kv_bytes_per_token = _token_bytes(grouped)
    available, blocks = _blocks(setting, block_bytes, sizing, account)
    setting = _check(setting, grouped, available, blocks, block_bytes, sizing, account)
    if blocks < 1:
        raise Refused(_no_memory(), block_bytes - available)
    concurrency = groups.max_concurrency(blocks, grouped, setting.limits)
    each = " + ".join(str(group.blocks(setting.limits)) for group in grouped)
    sizing.max_concurrency = account.note(
        "max_concurrency",
        round(concurrency, 6),
        RATIO,
        f"{blocks:,} blocks / ({each}) a request of {setting.max_model_len:,} tokens",
        PLANNING,
    )
    sizing.pool_pages = blocks
    sizing.pool_tokens = account.note(
        "pool_tokens",
        groups.pool_tokens(blocks, grouped),
        TOKENS,
        f"{blocks:,} blocks // {len(grouped)} groups x {sizing.page_size}",
        PLANNING,
    )
    account.note(
        "kv_cache_size_tokens",
        groups.capacity_tokens(concurrency, setting.max_model_len),
        TOKENS,
        f"int({concurrency:.4f} x {setting.max_model_len:,})",
        "vllm 0.33.0 v1/core/kv_cache_utils.py",
    )
    sizing.full_length_requests = sizing.max_concurrency
    sizing.max_running_requests = setting.max_seqs
    sizing.kv_pool_bytes = blocks * block_bytes
    for number, group in enumerate(grouped):
        per_token = 0.0 if group.spec.kind == groups.STATE else group.block_bytes / group.spec.block_size
        sizing.pools.append(
            Pool(
                f"group {number} ({group.spec.kind})",
                DEVICE,
                len(group.specs),
                per_token,
                blocks * group.spec.block_size,
                blocks * group.block_bytes,
            )
        )
    if len(grouped) > 1:
        account.warn("all groups draw their blocks from one pool: the sizes of the groups are not added up")


def _setting(options: Options, model: Shape, gpu: Gpu | None, account: Account) -> Setting:
    ranks = vllm_ranks(options, model)
    longest = model.context_tokens
    asked = options.maybe("max_model_len")
    if asked is not None and asked != AUTO and asked < 1:
        raise ScenarioError(f"{asked} makes no sense; give 1 or more, or auto", key="--max-model-len")
    length = asked if asked not in (None, AUTO) else longest
    if length is None:
        raise ScenarioError(f"missing; the context length of {model.name} is not known", key="--max-model-len")
    if longest is not None and length > longest and not options.variable_switch("VLLM_ALLOW_LONG_MAX_MODEL_LEN"):
        raise Refused(
            f"User-specified max_model_len ({length}) is greater than the derived max_model_len "
            f"(max_position_embeddings={longest} or model_max_length=None in model's config.json). To allow overriding "
            f"this maximum, set the env var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1.",
            remedy=f"use --max-model-len {longest} or less",
        )
    tokens, seqs = _batch_defaults(options, gpu, length, account)
    overlapped = options.switch("async_scheduling", True)
    batches = ranks.pp + 1 if overlapped else ranks.pp
    dtype = options.text("kv_cache_dtype", "auto")
    kv_bytes, packed = _kv_bytes(dtype, model)
    return Setting(options, model, gpu, ranks, length, tokens, seqs, batches * tokens, kv_bytes, packed)


def _batch_defaults(options: Options, gpu: Gpu | None, length: int, account: Account) -> tuple[int, int]:
    """`max_num_batched_tokens` and `max_num_seqs`, by the card where they are not given."""
    memory = usable(gpu).cuda_bytes if gpu is not None else 0
    if memory >= LARGE_CARD:
        tokens, seqs = 16384, 1024
    elif memory >= BIG_CARD and gpu is not None and not gpu.name.startswith("A100"):
        tokens, seqs = 8192, 1024
    else:
        tokens, seqs = 2048, 256
    given_tokens, given_seqs = options.maybe("max_num_batched_tokens"), options.maybe("max_num_seqs")
    seqs = seqs if given_seqs is None else given_seqs
    if given_tokens is None:
        if not options.switch("enable_chunked_prefill", True):
            tokens = max(tokens, length)
        tokens = min(seqs * length, tokens)
    else:
        tokens = given_tokens
    if given_seqs is None:
        seqs = min(seqs, tokens)
    if tokens < 1 or seqs < 1:
        raise ScenarioError("give 1 or more", key="--max-num-batched-tokens" if tokens < 1 else "--max-num-seqs")
    account.note("max_num_batched_tokens", tokens, TOKENS, "given" if given_tokens else "by GPU memory", ARGS)
    account.note("max_num_seqs", seqs, COUNT, "given" if given_seqs else "by GPU memory", ARGS)
    return tokens, seqs


def _kv_bytes(dtype: str, model: Shape) -> tuple[float, int | None]:
    if dtype in DSA_PACKED_ROW:
        return 1.0, DSA_PACKED_ROW[dtype]
    if dtype == "auto":
        return 4.0 if model.dtype == "float32" else 2.0, None
    if dtype not in KV_DTYPES:
        raise ScenarioError(
            f"{dtype!r} is none of auto, {', '.join((*KV_DTYPES, *DSA_PACKED_ROW))}", key="--kv-cache-dtype"
        )
    if model.indexer is not None and dtype.startswith("fp8"):
        return 1.0, DSA_PACKED_ROW["fp8_ds_mla"]
    return float(KV_DTYPES[dtype]), None


def group_layers(setting: Setting, stage: Stage, account: Account) -> tuple[Group, ...]:
    """The KV cache groups of one pipeline stage."""
    specs = layer_specs(setting, stage, account)
    if not specs:
        raise ScenarioError(f"{setting.shape.name} keeps no KV in layers {stage.start} to {stage.end - 1}", key="model")
    return groups.group_layers(specs, hybrid=not setting.options.switch("disable_hybrid_kv_cache_manager"))


def layer_specs(setting: Setting, stage: Stage, account: Account) -> list[Spec]:
    """The cache of each layer of a stage, index keys as layers of their own."""
    model, ranks = setting.shape, setting.ranks
    block = _block_size(setting, account)
    padded = block * _row_bytes(setting) if LINEAR in model.layers else None
    specs: list[Spec] = []
    for layer in range(stage.start, stage.end):
        kind = model.layers[layer]
        if kind == NO_ATTENTION:
            continue
        if kind == LINEAR:
            specs.append(_state_spec(setting, block, padded))
        elif model.latent is not None:
            specs.append(Spec(groups.FULL, block, block * _row_bytes(setting)))
            if model.indexer is not None and model.indexer.owning[layer]:
                specs.append(Spec(groups.FULL, block, block * kv.index_key_bytes(model.indexer.head_dim)))
        else:
            heads = model.window if kind == SLIDING else model.full
            each = kv.heads_per_rank(heads.kv_heads, ranks.attn_tp)
            page = int(block * each * (heads.k_dim + heads.v_dim) * setting.kv_bytes)
            name = {SLIDING: groups.SLIDING, CHUNKED: groups.CHUNKED}.get(kind, groups.FULL)
            specs.append(Spec(name, block, page, model.window_tokens or 0 if name != groups.FULL else 0))
    return specs


def _row_bytes(setting: Setting) -> int:
    """Bytes of a token in one full-attention layer of a rank."""
    model = setting.shape
    if model.latent is not None:
        return setting.packed_row or int(model.latent.row * setting.kv_bytes)
    heads = kv.heads_per_rank(model.full.kv_heads, setting.ranks.attn_tp)
    return int(heads * (model.full.k_dim + model.full.v_dim) * setting.kv_bytes)


def _block_size(setting: Setting, account: Account) -> int:
    """Tokens in a block: given, else the backend's; with state layers, enough for a page to hold a state."""
    given, model = setting.options.maybe("block_size"), setting.shape
    if given is not None and given < 1:
        raise ScenarioError(f"{given} makes no sense; give 1 or more", key="--block-size")
    default = LATENT_BLOCK_TOKENS if model.latent is not None else BLOCK_TOKENS
    block = default if given is None else given
    if LINEAR not in model.layers:
        return block
    unit = HYBRID_LATENT_ALIGNMENT if model.latent is not None else BLOCK_TOKENS
    block = groups.hybrid_block_size(block, unit, _state_bytes(setting), _row_bytes(setting))
    formula = f"a page must hold a state of {_state_bytes(setting):,} bytes at {_row_bytes(setting):,} bytes a token"
    account.note("block_size", block, TOKENS, formula, "vllm 0.33.0 platforms/interface.py")
    return block


def _state_bytes(setting: Setting) -> int:
    model, options = setting.shape, setting.options
    assert model.state is not None
    conv = options.text("mamba_cache_dtype", "auto")
    ssm = options.text("mamba_ssm_cache_dtype", "auto")
    conv = ("float32" if model.dtype == "float32" else "bfloat16") if conv == "auto" else conv
    if ssm == "auto":
        ssm = model.state.ssm_dtype or ("float32" if model.state.kind in ("kda", "mamba2") else conv)
    # Draft tokens widen the convolution window.
    window = model.state._replace(conv_kernel=model.state.conv_kernel + _draft_tokens(options))
    return state.layer_state_bytes(window, setting.ranks.attn_tp, state.state_format(conv, ssm))


def _draft_tokens(options: Options) -> int:
    tokens = options.mapping("speculative_config").get("num_speculative_tokens", 0)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
        raise ScenarioError(f"{tokens!r} is no number of tokens", key="--speculative-config.num_speculative_tokens")
    return tokens


def _state_spec(setting: Setting, block: int, padded: int | None) -> Spec:
    caching = setting.options.switch("enable_prefix_caching", True)
    align = caching or setting.options.text("mamba_cache_mode") == "align"
    held = (2 if align and caching else 1) + _draft_tokens(setting.options)
    size = _state_bytes(setting)
    return Spec(groups.STATE, block, max(size, padded or 0), state_blocks=held)


def _blocks(setting: Setting, block_bytes: int, sizing: Sizing, account: Account) -> tuple[int, int]:
    """Bytes for the KV cache and the blocks made of them."""
    options = setting.options
    weights = _weights(setting, sizing, account)
    override = options.maybe("num_gpu_blocks_override")
    if override is not None:
        if override < 1:
            raise ScenarioError(f"{override} makes no sense; give 1 or more", key="--num-gpu-blocks-override")
        blocks = account.note("num_gpu_blocks", override, COUNT, "given", "--num-gpu-blocks-override")
        return override * block_bytes, blocks
    given = options.maybe("kv_cache_memory_bytes")
    if given is not None:
        available = account.note("kv_cache_memory_bytes", given, BYTES, "given", "--kv-cache-memory-bytes")
    else:
        available = _available(setting, weights, sizing, account)
    if available <= 0:
        raise Refused(
            _no_memory(), block_bytes - available, "raise --gpu-memory-utilization, or use more or larger GPUs"
        )
    return available, account.note(
        "num_gpu_blocks", available // block_bytes, COUNT, f"{available:,} // {block_bytes:,}", PLANNING
    )


def _weights(setting: Setting, sizing: Sizing, account: Account) -> int:
    options = setting.options
    form = weight_format(setting.shape, options.text("dtype", "auto"), options.text("quantization"))
    drafts = 1 if options.mapping("speculative_config").get("method") in ("mtp", "deepseek_mtp", "eagle") else 0
    stage, weights = max(most_loaded(setting.shape, form, setting.ranks, drafts), key=lambda each: each[1].total_bytes)
    measured = options.measured.get("weights_bytes_per_rank")
    size = note_weights(account, weights, form, setting.ranks, stage, measured)
    offloaded = int((options.fraction("cpu_offload_gb", 0.0) or 0.0) * GIB)
    sizing.weights_bytes_per_rank = max(0, size - offloaded)
    return sizing.weights_bytes_per_rank


def kv_memory(requested: float, weights: float, non_torch: float, activations: float, graphs: float = 0) -> float:
    """What is left for the KV cache of what the engine may take; may be below zero. Any unit."""
    return requested - weights - non_torch - activations - graphs


def _available(setting: Setting, weights: int, sizing: Sizing, account: Account) -> int:
    """The KV cache's share of the card, as the engine's profile would find it."""
    options, measured = setting.options, setting.options.measured
    total = measured.get("gpu_memory_bytes")
    if total is None and setting.gpu is None:
        raise ScenarioError(
            "missing; name a GPU of `pagestorm catalog gpus`, or give --kv-cache-memory-bytes or "
            "--num-gpu-blocks-override",
            key="gpu",
        )
    source = "--gpu-memory-bytes"
    if total is None:
        facts = usable(setting.gpu)  # type: ignore[arg-type]  # one of the two is there
        total, source = facts.cuda_bytes, facts.source
    account.note("gpu_memory_bytes", total, BYTES, "total that CUDA reports", source)
    share = options.fraction("gpu_memory_utilization", UTILIZATION) or UTILIZATION
    if not 0 < share <= 1:
        raise ScenarioError(
            f"{share} is no share of memory; give a number above 0, up to 1", key="--gpu-memory-utilization"
        )
    requested = account.note(
        "requested_memory_bytes", math.ceil(total * share), BYTES, f"ceil({total:,} x {share})", WORKER
    )
    sizing.mem_fraction_static = share
    free = measured.get("free_memory_bytes", total - reserves.CONTEXT_BYTES)
    if free < requested:
        raise Refused(
            f"Free memory on device cuda:0 ({free / GIB:.2f}/{total / GIB:.2f} GiB) on startup is less than desired "
            "GPU "
            f"memory utilization ({share}, {requested / GIB:.2f} GiB). Decrease GPU memory utilization or reduce GPU "
            "memory "
            f"used by other processes.",
            requested - free,
            f"use --gpu-memory-utilization {int(free / total * 100) / 100} or less",
        )
    activations = measured.get("activation_bytes")
    if activations is None:
        rows = min(setting.max_seqs, setting.batched_tokens)
        peak = reserves.activation_bytes(setting.shape, setting.batched_tokens, setting.ranks)
        logits = rows * setting.shape.vocab_size * 6
        activations = account.note(
            "activation_bytes",
            peak + logits,
            BYTES,
            f"{setting.batched_tokens} tokens x the widest layer + {rows} rows of logits",
            "estimate; give --activation-bytes from the engine's profile",
        )
    shared = reserves.COLLECTIVE_BYTES if setting.ranks.world > 1 else 0
    non_torch = measured.get("non_torch_bytes", reserves.CONTEXT_BYTES + shared)
    account.note(
        "non_torch_bytes",
        non_torch,
        BYTES,
        "CUDA context" + (" and collectives" if shared else ""),
        "assumption; give --non-torch-bytes from the engine's profile",
    )
    graph = _graphs(setting, account)
    left = int(kv_memory(requested, weights, non_torch, activations, graph))
    formula = (
        f"{both(requested)} - weights {both(weights)} - {both(non_torch)} - activations {both(activations)} "
        f"- graphs {both(graph)}"
    )
    return account.note("kv_cache_memory_bytes", left, BYTES, formula, WORKER)


def _graphs(setting: Setting, account: Account) -> int:
    options = setting.options
    if "cuda_graph_bytes" in options.measured:
        return options.measured["cuda_graph_bytes"]
    if options.switch("enforce_eager") or options.variable("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", "1") == "0":
        return 0
    batch = min(512, 2 * setting.max_seqs)
    return account.note(
        "cuda_graph_bytes",
        batch * 2 * MIB,
        BYTES,
        f"2 MiB x a largest captured batch of {batch}",
        "estimate; give --cuda-graph-bytes from the engine's profile",
    )


def _check(
    setting: Setting,
    grouped: tuple[Group, ...],
    available: int,
    blocks: int,
    block_bytes: int,
    sizing: Sizing,
    account: Account,
) -> Setting:
    """Raises `Refused` unless one request of full length fits beside the null block."""
    usable_bytes = available - block_bytes

    def needed(length: int) -> int:
        return block_bytes * groups.request_total_blocks(grouped, setting.limits._replace(max_model_len=length))

    if setting.options.maybe("max_model_len") == AUTO:
        fitting = groups.longest_that_fits(lambda length: needed(length) <= usable_bytes, setting.max_model_len)
        if fitting <= 0:
            raise Refused(
                "Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single token. Try "
                "increasing `gpu_memory_utilization`."
            )
        account.note(
            "max_model_len", fitting, TOKENS, f"the longest up to {setting.max_model_len:,} that fits", PLANNING
        )
        return setting._replace(max_model_len=fitting)
    if usable_bytes <= 0:
        raise Refused(_no_memory(), block_bytes - usable_bytes)
    wanted = needed(setting.max_model_len)
    if wanted <= usable_bytes:
        return setting
    sizing.pool_pages = blocks
    sizing.pool_tokens = groups.pool_tokens(blocks, grouped)
    sizing.max_concurrency = round(groups.max_concurrency(blocks, grouped, setting.limits), 6)
    fitting = groups.longest_that_fits(lambda length: needed(length) <= usable_bytes, setting.max_model_len)
    estimate = (
        f"Based on the available memory, the estimated maximum model length is {fitting}. " if fitting > 0 else ""
    )
    raise Refused(
        f"To serve at least one request with the model's max seq len ({setting.max_model_len}), ({_gib(wanted)} GiB "
        "KV cache "
        f"is needed, which is larger than the available KV cache memory ({_gib(usable_bytes)} GiB). {estimate}Try "
        "increasing "
        "`gpu_memory_utilization` (which also controls CPU memory on the CPU backend) or decreasing `max_model_len` "
        "when "
        f"initializing the engine. {MORE_HELP}",
        wanted - usable_bytes,
        f"use --max-model-len {fitting} or less" if fitting > 0 else "raise --gpu-memory-utilization, or use more GPUs",
    )


def _gib(size: int) -> str:
    return f"{round(size / GIB, 2)}"


def _no_memory() -> str:
    return (
        "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the "
        "engine "
        f"(this flag also controls CPU memory reservation on the CPU backend, despite its name). {MORE_HELP}"
    )


def _token_block(grouped: tuple[Group, ...]) -> int:
    sizes = [spec.block_size for group in grouped for spec in group.specs if spec.kind != groups.STATE]
    return min(sizes or [grouped[0].spec.block_size])


def _token_bytes(grouped: tuple[Group, ...]) -> int:
    """Bytes that a token of full length takes in the layers that keep tokens."""
    return sum(
        spec.page_bytes // spec.block_size for group in grouped for spec in group.specs if spec.kind != groups.STATE
    )


def _group_formula(grouped: tuple[Group, ...]) -> str:
    parts = [f"{len(group.specs)} {group.spec.kind} layers x {group.spec.page_bytes:,}" for group in grouped]
    return f"the widest of: {'; '.join(parts)}"
