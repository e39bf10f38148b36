"""A whole SGLang server sized: weights, fraction, device pools, limits, what is left beside them; then the host tier.

Formulas: sglang 0.5.23; each recorded figure names the module it is from.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from pagestorm.catalog import Gpu, Model, Shape, shape, usable
from pagestorm.catalog.shape import CHUNKED, FULL, LINEAR, SLIDING
from pagestorm.errors import ScenarioError
from pagestorm.sizing import kv, reserves, state, windows
from pagestorm.sizing.account import BYTES, COUNT, GIB, RATIO, TOKENS, Account, Refused, both
from pagestorm.sizing.kv import KvFormat, PoolRow
from pagestorm.sizing.options import Options
from pagestorm.sizing.platform import (
    Backends,
    Graphs,
    backends,
    graphs,
    kv_dtype_name,
    multimodal,
    page_size,
    platform_of,
    window_pool,
)
from pagestorm.sizing.ranks import Ranks, Stage, sglang_ranks
from pagestorm.sizing.result import DEVICE, FITS_ONLY_WITH, REFUSED, Pool, Sizing
from pagestorm.sizing.sglang_host import HostMachine, size_host_tier
from pagestorm.sizing.speculation import RUNNING_WITH_SPECULATION, Speculation, speculation
from pagestorm.sizing.weights import most_loaded, note_weights, weight_format

CONFIGURATOR = "sglang 0.5.23 model_executor/pool_configurator.py"
PROFILE = "sglang 0.5.23 mem_cache/kv_cache_configurator.py"
MIB = 1 << 20
RUNNING_LEAST, RUNNING_MOST, RUNNING_FACTOR = 2048, 4096, 512
SEARCH_STEP = 0.001


class Setting(NamedTuple):
    """Everything that was decided before memory is divided."""

    options: Options
    shape: Shape
    gpu: Gpu | None
    ranks: Ranks
    form: KvFormat
    backends: Backends
    page_size: int
    spec: Speculation | None
    batches: reserves.Batches
    graphs: Graphs
    context_tokens: int
    windowed: bool

    @property
    def draft_kv_layers(self) -> int:
        return self.spec.kv_layers if self.spec else 0

    @property
    def chunk_per_group(self) -> int:
        """Tokens of a chunk in one attention group."""
        chunk = self.batches.chunk
        return chunk // self.ranks.attn_dp if chunk > 0 else chunk

    @property
    def asked_running(self) -> int | None:
        """`--max-running-requests` of one attention group; 48 by default where speculation is on."""
        asked = self.options.maybe("max_running_requests")
        if asked is None and self.spec is not None:
            asked = RUNNING_WITH_SPECULATION
        return None if asked is None else max(1, asked // self.ranks.attn_dp)


class DevicePools(NamedTuple):
    """Capacity of the pools of a rank: `rows` with the tokens of each, the cell that divided the budget."""

    tokens: int
    window_tokens: int | None
    cell: float
    rows: list[tuple[PoolRow, int]]
    extra_rows: list[Pool]


def size_sglang(
    options: Options, model: Model | None, gpu: Gpu | None, machine: HostMachine, sizing: Sizing, account: Account
) -> None:
    """Fill `sizing`. A refusal of the engine is a verdict, not an exception; raises `ScenarioError` for bad input."""
    if model is None:
        raise ScenarioError("missing; name one of `pagestorm catalog models` or the path of a config.json", key="model")
    sizing.model, sizing.gpu = model.name, gpu.name if gpu is not None else None
    try:
        setting = _setting(options, shape(model), gpu, account)
        sizing.page_size = setting.page_size
        _check_flags(setting)
        pools = _device(setting, sizing, account)
        if options.switch("enable_hierarchical_cache"):
            device = [(row, tokens) for row, tokens in pools.rows]
            size_host_tier(
                options,
                setting.shape,
                setting.ranks,
                setting.page_size,
                setting.form,
                setting.spec,
                device,
                pools.extra_rows,
                machine,
                sizing,
                account,
            )
    except Refused as refusal:
        sizing.verdict, sizing.error = REFUSED, refusal.message
        sizing.missing_bytes = refusal.missing_bytes
        sizing.remedy = refusal.remedy or sizing.remedy


def _setting(options: Options, model: Shape, gpu: Gpu | None, account: Account) -> Setting:
    platform = platform_of(gpu)
    ranks = sglang_ranks(options, model)
    dtype = kv_dtype_name(options, model, platform)
    chosen = backends(options, model, platform, dtype)
    form = kv.kv_format(dtype, model.dtype, chosen.dsa_prefill, chosen.dsa_decode)
    size, why = page_size(options, model, platform, chosen)
    if size < 1:
        raise ScenarioError(f"{size} makes no sense; give 1 or more", key="--page-size")
    account.note("page_size", size, TOKENS, why, "sglang 0.5.23 arg_groups/overrides.py")
    asked = options.maybe("page_size")
    if asked is not None and asked != size:
        account.warn(f"the engine changes --page-size {asked} to {size}: {why}")
    gpu_mib = usable(gpu).driver_bytes // MIB if gpu is not None else None
    batches = reserves.default_batches(options, gpu_mib, ranks.tp, account)
    captured = graphs(options, model, platform, batches.decode_batch, batches.chunk, ranks.pp)
    spec = speculation(options, model, account)
    return Setting(
        options,
        model,
        gpu,
        ranks,
        form,
        chosen,
        size,
        spec,
        batches,
        captured,
        _context(options, model),
        window_pool(options, model),
    )


def _context(options: Options, model: Shape) -> int:
    longest, asked = model.context_tokens, options.maybe("context_length")
    if asked is None and longest is None:
        raise ScenarioError(f"missing; the context length of {model.name} is not known", key="--context-length")
    allowed = options.variable_switch("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN")
    if asked is not None and longest is not None and asked > longest and not allowed:
        raise Refused(
            f"Warning: User-specified context_length ({asked}) is greater than the derived context_length "
            f"({longest}). This may lead to incorrect model outputs or CUDA errors. To allow overriding this maximum, "
            "set the env var SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1",
            remedy=f"use --context-length {longest} or less",
        )
    return asked or longest or 1


def _check_flags(setting: Setting) -> None:
    """Raises `Refused` where the engine refuses the flags by themselves, `ScenarioError` where they contradict."""
    options, chunk = setting.options, setting.chunk_per_group
    if options.given("hicache_size") and options.given("hicache_ratio") and options.whole("hicache_size", 0) > 0:
        raise ScenarioError(
            f"--hicache-size {options.whole('hicache_size', 0)} and --hicache-ratio "
            f"{options.fraction('hicache_ratio')} are both given, and the engine drops the ratio; leave one out",
            key="--hicache-size",
        )
    if options.switch("enable_hierarchical_cache") and options.switch("disable_radix_cache"):
        raise Refused(
            "The arguments enable-hierarchical-cache and disable-radix-cache are mutually exclusive and cannot be "
            "used at "
            "the same time. Please use only one of them.",
            remedy="leave --disable-radix-cache out",
        )
    decode_server = options.text("disaggregation_mode", "null") == "decode"
    if chunk > 0 and not decode_server and chunk % setting.page_size:
        nearest = chunk // setting.page_size * setting.page_size * setting.ranks.attn_dp
        raise Refused(
            "chunked_prefill_size must be divisible by page_size", remedy=f"use --chunked-prefill-size {nearest}"
        )
    ratio = options.fraction("swa_full_tokens_ratio")
    if ratio is not None and not 0 < ratio <= 1:
        raise Refused("--swa-full-tokens-ratio should be in range (0, 1.0].", remedy="give a ratio above 0 and up to 1")
    fraction = options.fraction("mem_fraction_static")
    if fraction is not None and not 0 < fraction < 1:
        raise ScenarioError(
            f"{fraction} is no share of memory; give a number between 0 and 1", key="--mem-fraction-static"
        )


def _device(setting: Setting, sizing: Sizing, account: Account) -> DevicePools:
    """Divide a rank's memory; without a GPU, take the pool as `--max-total-tokens` gives it."""
    options = setting.options
    weights = _weights(setting, sizing, account)
    before = _free_before_load(setting, account)
    if before is None:
        cap = options.maybe("max_total_tokens")
        if cap is None:
            raise ScenarioError(
                "missing; name a GPU of `pagestorm catalog gpus`, or give --max-total-tokens", key="gpu"
            )
        account.warn(
            "no GPU is named: the pool is taken as --max-total-tokens gives it, and nothing is checked against a card"
        )
        pools = _capped(setting, cap, account)
        running = _running(setting, pools.tokens, None, account)
        _fill(setting, sizing, pools, running, account)
        return pools
    fraction = _fraction(setting, account)
    sizing.mem_fraction_static = fraction
    slack_gib = before / GIB * (1 - fraction)
    rest_gib = _rest(setting, before, weights, slack_gib, account)
    slots: state.StatePool | None = None
    if setting.shape.state is not None and LINEAR in setting.shape.layers:
        tokens = setting.spec.draft_tokens if setting.spec else None
        slots, rest_gib = state.size_state_pool(
            options,
            setting.shape,
            setting.ranks,
            rest_gib,
            setting.asked_running,
            tokens,
            setting.page_size,
            account,
        )
        sizing.state_slots = slots.slots
    _check_rest(rest_gib, before, weights, fraction)
    budget = account.note("kv_budget_bytes", int(rest_gib * GIB), BYTES, f"int({rest_gib:.4f} GiB)", PROFILE)
    pools = _pools(setting, budget, fraction, account)
    running = _running(setting, pools.tokens, slots, account)
    _fill(setting, sizing, pools, running, account, slots)
    _check_beside(setting, sizing, before, fraction, running, account)
    return pools


def _weights(setting: Setting, sizing: Sizing, account: Account) -> int:
    """Weights of the most loaded rank."""
    options, ranks = setting.options, setting.ranks
    measured = options.measured.get("weights_bytes_per_rank")
    form = weight_format(setting.shape, options.text("dtype", "auto"), options.text("quantization"))
    drafts = setting.spec.weight_layers if setting.spec else 0
    stage, weights = max(most_loaded(setting.shape, form, ranks, drafts), key=lambda each: each[1].total_bytes)
    offloaded = options.whole("cpu_offload_gb", 0) * GIB
    size = note_weights(account, weights, form, ranks, stage, measured)
    if offloaded:
        size = account.note(
            "weights_bytes_on_device",
            max(0, size - offloaded),
            BYTES,
            f"{both(size)} - {both(offloaded)}",
            "--cpu-offload-gb",
        )
    sizing.weights_bytes_per_rank = size
    return size


def _free_before_load(setting: Setting, account: Account) -> int | None:
    """Free memory of a card when the weights are about to be loaded (`pre_model_load_memory`)."""
    measured = setting.options.measured
    if "free_memory_bytes" in measured:
        return account.note("free_memory_bytes", measured["free_memory_bytes"], BYTES, "given", "--free-memory-bytes")
    if "gpu_memory_bytes" in measured:
        total, source = measured["gpu_memory_bytes"], "--gpu-memory-bytes"
    elif setting.gpu is not None:
        facts = usable(setting.gpu)
        total, source = facts.cuda_bytes, facts.source
    else:
        return None
    account.note("gpu_memory_bytes", total, BYTES, "total that CUDA reports", source)
    shared = reserves.COLLECTIVE_BYTES if setting.ranks.world > 1 else 0
    taken = reserves.CONTEXT_BYTES + shared
    formula = f"{both(total)} - {both(reserves.CONTEXT_BYTES)} for the CUDA context"
    formula += f" - {both(shared)} for collectives" if shared else ""
    return account.note(
        "free_memory_bytes",
        total - taken,
        BYTES,
        formula,
        "assumption; give --free-memory-bytes from the log line `Load weight begin. avail mem`",
    )


def _fraction(setting: Setting, account: Account) -> float:
    gpu_mib = _gpu_mib(setting)
    vision = (
        multimodal(setting.options, setting.shape) and setting.options.text("disaggregation_mode", "null") != "decode"
    )
    if setting.options.variable_switch("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"):
        account.warn(
            "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING sizes the pool from what is free after graph capture, which cannot "
            "be known beforehand; the sizing before capture is shown"
        )
    return reserves.mem_fraction_static(
        setting.options, setting.shape, setting.ranks, setting.batches, setting.graphs, gpu_mib, vision, account
    )


def _gpu_mib(setting: Setting) -> int:
    if setting.gpu is not None:
        return usable(setting.gpu).driver_bytes // MIB
    measured = setting.options.measured
    return measured.get("gpu_memory_bytes", measured.get("free_memory_bytes", 0)) // MIB


def _rest(setting: Setting, before: int, weights: int, slack_gib: float, account: Account) -> float:
    """Memory for pools in GiB: what is free after the weights, less the slack and what a vision model takes later."""
    after_gib = (before - weights) / GIB
    vision_gib = 0.0
    if multimodal(setting.options, setting.shape):
        mib = setting.options.variable_number("SGLANG_VLM_CACHE_SIZE_MB", 100)
        if setting.options.text("mm_feature_transport") in ("cuda_ipc", "cuda_vmm"):
            mib += setting.options.variable_number("SGLANG_MM_FEATURE_CACHE_MB", 1024)
        vision_gib = mib / 1024
    rest = after_gib - slack_gib - vision_gib
    formula = f"{before / GIB:.3f} - {weights / GIB:.3f} (weights) - {slack_gib:.3f} (1 - fraction)"
    formula += f" - {vision_gib:.3f} (multimodal)" if vision_gib else ""
    account.note("memory_for_pools_bytes", int(rest * GIB), BYTES, f"{formula} GiB", PROFILE)
    return rest


def _check_rest(rest_gib: float, before: int, weights: int, fraction: float) -> None:
    if rest_gib > 0:
        return
    least = 1 - (before - weights) / before
    suggested = math.ceil(least * 1000) / 1000
    remedy = (
        f"use --mem-fraction-static {suggested + SEARCH_STEP:.3f} or more" if least < 1 else "use more or larger GPUs"
    )
    raise Refused(
        f"Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static={fraction}. Raise "
        f"--mem-fraction-static above {suggested:.3f} (minimum viable = 1 - available/pre = {least:.4f}). If using "
        f"speculative decoding, draft weights are now counted.",
        int(-rest_gib * GIB),
        remedy,
    )


def _pools(setting: Setting, budget: int, fraction: float, account: Account) -> DevicePools:
    """The pools that a budget of bytes makes; the smallest pipeline stage decides."""
    candidates = [_stage_pools(setting, stage, budget, account) for stage in setting.ranks.stages]
    pools = min(candidates, key=lambda each: each.tokens)
    if pools.tokens <= 0:
        raise Refused(
            f"Not enough memory. Please try to increase --mem-fraction-static. Current value: "
            f"mem_fraction_static={fraction}",
            int(pools.cell * setting.page_size) - budget,
        )
    cap = setting.options.maybe("max_total_tokens")
    if cap is not None and cap > pools.tokens:
        account.warn(
            f"max_total_tokens={cap} is larger than the profiled value {pools.tokens}. Use the profiled value instead."
        )
    if cap is None or cap >= pools.tokens:
        return pools
    return _capped(setting, cap, account)


def _stage_pools(setting: Setting, stage: Stage, budget: int, account: Account) -> DevicePools:
    if setting.shape.compress_ratios:
        return _compressed(setting, stage, budget, None, account)
    if setting.windowed:
        return _windowed(setting, stage, budget, None, account)
    return _plain(setting, stage, budget, None, account)


def _capped(setting: Setting, cap: int, account: Account) -> DevicePools:
    """The pools for a number of tokens instead of a budget."""
    if cap < 1:
        raise ScenarioError(f"{cap} makes no sense; give 1 or more", key="--max-total-tokens")
    stage = max(setting.ranks.stages, key=lambda each: each.end - each.start)
    build = _compressed if setting.shape.compress_ratios else _windowed if setting.windowed else _plain
    pools = build(setting, stage, None, cap, account)
    if pools.tokens <= 0:
        raise Refused("Not enough memory. Please try to increase --mem-fraction-static.")
    return pools


def _plain(setting: Setting, stage: Stage, budget: int | None, cap: int | None, account: Account) -> DevicePools:
    """Models whose layers all keep every token (`DefaultPoolConfigurator`)."""
    ranks, shape = setting.ranks, setting.shape
    rows = kv.target_rows(shape, setting.form, ranks.attn_tp, ranks.dcp, stage.start, stage.end)
    rows += kv.draft_rows(shape, rows, setting.form, setting.draft_kv_layers, ranks.dcp)
    cell = sum(row.bytes_per_token for row in rows)
    account.note("kv_bytes_per_token", cell, BYTES, _cell_formula(rows), CONFIGURATOR)
    if cell == 0:
        raise ScenarioError(f"{shape.name} keeps no KV in layers {stage.start} to {stage.end - 1}", key="model")
    tokens = windows.floor_page(budget // cell if budget is not None else cap or 0, setting.page_size)
    if budget is not None:
        account.note(
            "max_total_num_tokens",
            tokens,
            TOKENS,
            f"{budget:,} // {cell:,.10g}, down to pages of {setting.page_size}",
            CONFIGURATOR,
        )
    return DevicePools(tokens, None, cell, [(row, tokens) for row in rows], [])


def _cell_formula(rows: list[PoolRow]) -> str:
    return " + ".join(f"{row.name} {row.layers} layers x {row.bytes_per_token_per_layer:,.10g}" for row in rows)


def _windowed(setting: Setting, stage: Stage, budget: int | None, cap: int | None, account: Account) -> DevicePools:
    """Models with window or chunked layers in a pool of their own (`HybridSWAPoolConfigurator`)."""
    shape, ranks, page = setting.shape, setting.ranks, setting.page_size
    full_layers = shape.count(FULL, stage.start, stage.end)
    window_layers = shape.count(SLIDING + CHUNKED, stage.start, stage.end)
    full_heads, window_heads = (kv.heads_per_rank(each.kv_heads, ranks.attn_tp) for each in (shape.full, shape.window))
    full_each = kv.head_bytes(full_heads, shape.full.k_dim, shape.full.v_dim, setting.form, 1)
    window_each = kv.head_bytes(window_heads, shape.window.k_dim, shape.window.v_dim, setting.form, 1)
    rows = [
        PoolRow("kv", full_layers, full_each * full_layers),
        PoolRow("window", window_layers, window_each * window_layers),
    ]
    draft = PoolRow("draft kv", setting.draft_kv_layers, full_each * setting.draft_kv_layers)
    window = shape.window_tokens
    ratio = setting.options.fraction("swa_full_tokens_ratio", windows.DEFAULT_RATIO) or windows.DEFAULT_RATIO
    full_bytes, window_bytes = rows[0].bytes_per_token + draft.bytes_per_token, rows[1].bytes_per_token
    cell = full_bytes + ratio * window_bytes
    account.note(
        "kv_bytes_per_token",
        cell,
        BYTES,
        f"{_cell_formula([rows[0]])} + {ratio} x ({_cell_formula([rows[1]])})",
        CONFIGURATOR,
    )
    asked = _cap_by_requests(setting, window)
    if asked is not None and full_layers:
        pools = _by_requests(setting, budget, cap, full_bytes, window_bytes, asked)
    elif budget is not None:
        pools = windows.split_by_ratio(budget, full_bytes, window_bytes, ratio, 0, page)
    else:
        full = windows.floor_page(cap or 0, page)
        pools = (
            windows.WindowPools(full, windows.window_tokens(full, ratio, page))
            if full_layers
            else windows.WindowPools(0, full)
        )
    if asked is None and full_layers:
        _check_window(pools, window, page, ratio)
    tokens = pools.full_tokens or pools.window_tokens
    account.note("max_total_num_tokens", tokens, TOKENS, f"full pool, down to pages of {page}", CONFIGURATOR)
    account.note(
        "swa_pool_tokens",
        pools.window_tokens,
        TOKENS,
        f"int({pools.full_tokens} x {ratio}) down to pages"
        if asked is None
        else f"{asked} tokens by requests, up to pages",
        CONFIGURATOR,
    )
    sized = [(rows[0], pools.full_tokens), (rows[1], pools.window_tokens)]
    if draft.layers:
        sized.append((draft, tokens))
    return DevicePools(tokens, pools.window_tokens, cell, sized, [])


def _by_requests(
    setting: Setting, budget: int | None, cap: int | None, full_bytes: float, window_bytes: float, asked: int
) -> windows.WindowPools:
    page = setting.page_size
    if budget is not None:
        return windows.split_by_cap(budget, full_bytes, window_bytes, asked, 0, page)
    total = cap or 0
    return windows.WindowPools(windows.floor_page(total, page), min(windows.ceil_page(asked, page), total))


def _cap_by_requests(setting: Setting, window: int | None) -> int | None:
    """Window tokens by the request cap: prefix cache off, requests given, prefill chunked (`SWARequestCap...`)."""
    options, chunk = setting.options, setting.chunk_per_group
    decode = options.text("disaggregation_mode", "null") == "decode"
    running = setting.asked_running
    if running is None or not options.switch("disable_radix_cache") or window is None or (chunk <= 0 and not decode):
        return None
    return _request_cap(setting, window, running)


def _request_cap(setting: Setting, window: int, running: int) -> int:
    spec, options = setting.spec, setting.options
    decode = options.text("disaggregation_mode", "null") == "decode"
    return windows.request_cap(
        window=window,
        page_size=setting.page_size,
        running=running,
        chunk=max(0, setting.chunk_per_group),
        draft_tokens=spec.draft_tokens if spec else None,
        alloc_len=spec.alloc_len(setting.page_size) if spec else 0,
        overlap=not options.switch("disable_overlap_schedule"),
        interval=options.variable_number("SGLANG_SWA_EVICTION_INTERVAL", windows.EVICTION_INTERVAL),
        decode_slots=options.whole("disaggregation_decode_extra_slots", 0) if decode else None,
    )


def _check_window(pools: windows.WindowPools, window: int | None, page: int, ratio: float) -> None:
    try:
        windows.check_window_pool(pools.window_tokens, window, page)
    except Refused as refusal:
        least = windows.smallest_full_tokens(window or 0, ratio, page)
        refusal.remedy = f"the smallest pool that starts is --max-total-tokens {least}"
        raise


def _compressed(setting: Setting, stage: Stage, budget: int | None, cap: int | None, account: Account) -> DevicePools:
    """DeepSeek-V4 (`DSV4PoolConfigurator`): a window pool in all layers, latents of 4 or 128 tokens in some."""
    shape, page = setting.shape, setting.page_size
    ratios = shape.compress_ratios[stage.start : stage.end]
    layers, c4_layers, c128_layers = len(ratios), ratios.count(4), ratios.count(128)
    raw = setting.backends.uses("trtllm") or setting.options.text("dsv4_attn_backend") == "trtllm"
    slot = {
        size: float(shape.full.k_dim) if raw else windows.v4_slot_bytes(size) for size in (page, page // 4, page // 128)
    }
    state_dtype = 2 if setting.options.variable("SGLANG_DSV4_COMPRESS_STATE_DTYPE", "float32").startswith("b") else 4
    index_dim = shape.index_dim or kv.DSA_QUANT_BLOCK
    ring4, ring128 = (16, 256) if setting.spec else (8, 128)
    c4_state = 4 * (shape.full.k_dim + index_dim) * state_dtype
    window_bytes = slot[page] * layers + ring4 / page * c4_state * c4_layers
    index_bytes = kv.index_key_bytes(index_dim)
    full_bytes = c4_layers * (slot[page // 4] + index_bytes) / 4 + c128_layers * slot[page // 128] / 128
    given = setting.options.fraction("swa_full_tokens_ratio")
    ratio = given if given is not None else windows.COMPRESSED_RATIO
    by_requests = _compressed_cap(setting, given)
    inflation = (layers + 1) / layers if setting.spec else 1.0
    cell = (full_bytes + (0 if by_requests is not None else ratio) * window_bytes) * inflation
    account.note(
        "kv_bytes_per_token",
        cell,
        BYTES,
        f"{c4_layers} layers x ({slot[page // 4]:g} + {index_bytes}) / 4 + {c128_layers} layers x "
        f"{slot[page // 128]:g} / 128 + {0 if by_requests is not None else ratio} x {window_bytes:,.1f} (window, "
        f"{layers} layers)",
        CONFIGURATOR,
    )
    if budget is not None:
        running = setting.asked_running or min(
            _estimated_running(int(budget / cell), setting.context_tokens), int(budget / cell) // 2
        )
        fixed = (
            _c128_state_bytes(shape, c128_layers, running, ring128, state_dtype)
            + (by_requests or 0) * window_bytes * inflation
        )
        full = windows.floor_page(int(max(budget - fixed, 0) / cell), page)
        if full <= 0 and by_requests is not None:
            raise Refused(
                f"The DSV4 SWA pool cap ({by_requests} tokens, {by_requests * window_bytes * inflation / GIB:.2f} "
                "GB) leaves no room "
                f"for the full KV pool within the available {budget / GIB:.2f} GB. Reduce --max-running-requests, "
                "lower "
                f"--swa-prefix-tails or SGLANG_SWA_EVICTION_INTERVAL, or increase --mem-fraction-static."
            )
    else:
        full = cap or 0
    window = shape.window_tokens or 0
    try:
        pools = windows.compressed_pools(full, ratio, page, ring4, window, by_requests)
    except Refused as refusal:
        refusal.remedy = (
            f"the smallest pool that starts is --max-total-tokens {windows.smallest_full_tokens(window, ratio, page)}"
        )
        raise
    account.note(
        "max_total_num_tokens", pools.full_tokens, TOKENS, f"full capacity, down to pages of {page}", CONFIGURATOR
    )
    account.note(
        "swa_pool_tokens",
        pools.window_tokens,
        TOKENS,
        f"int({pools.full_tokens} x {ratio}) down to pages" if by_requests is None else "by requests",
        CONFIGURATOR,
    )
    sized = [
        (PoolRow("window", layers, slot[page] * layers), pools.window_tokens),
        (PoolRow("c4", c4_layers, slot[page // 4] * c4_layers), pools.c4_tokens),
        (PoolRow("c4 indexer", c4_layers, float(index_bytes * c4_layers)), pools.c4_tokens),
        (PoolRow("c128", c128_layers, slot[page // 128] * c128_layers), pools.c128_tokens),
        (PoolRow("c4 state", c4_layers, float(c4_state * c4_layers)), pools.c4_state_rows),
    ]
    return DevicePools(pools.full_tokens, pools.window_tokens, cell, sized, [])


def _compressed_cap(setting: Setting, given: float | None) -> int | None:
    """Window tokens by requests: DeepSeek-V4.1 only, since V4 gets the ratio 0.1 from the engine."""
    if given is not None or setting.shape.model_type != "deepseek_v41" or setting.asked_running is None:
        return None
    running, window, page = setting.asked_running, setting.shape.window_tokens or 0, setting.page_size
    if setting.chunk_per_group <= 0:
        return None
    default = 0 if setting.options.switch("disable_radix_cache") else 4 * running
    kept = setting.options.whole("swa_prefix_tails", default)
    return windows.ceil_page(_request_cap(setting, window, running) + kept * (window + page), page)


def _c128_state_bytes(shape: Shape, layers: int, running: int, ring: int, state_dtype: int) -> int:
    if not layers:
        return 0
    rows = (running + 1) * ring + ring + 1
    return -(-rows // 128) * 128 * 2 * shape.full.k_dim * state_dtype * layers


def _estimated_running(tokens: int, context_tokens: int) -> int:
    return max(min(int(tokens / context_tokens * RUNNING_FACTOR), RUNNING_MOST), RUNNING_LEAST)


def _running(setting: Setting, tokens: int, slots: state.StatePool | None, account: Account) -> int:
    """`max_running_requests` of one attention group, after every cap. Raises `Refused` where it is none."""
    asked = setting.asked_running
    if asked is None:
        estimated = _estimated_running(tokens, setting.context_tokens)
        formula = (
            f"min(clamp(int({tokens:,} / {setting.context_tokens:,} x 512), 2048, 4096) = {estimated}, {tokens:,} // 2)"
        )
        most = min(estimated, tokens // 2)
    else:
        formula = f"min({asked}, {tokens:,} // 2)"
        most = min(asked, tokens // 2)
    if slots is not None:
        formula = f"min({formula}, {slots.slots} slots // {slots.slots_each})"
        if slots.most_running < most:
            account.warn(
                f"max_running_requests is capped to {slots.most_running} by the state slots ({slots.slots} of them, "
                f"{slots.slots_each} a request)"
            )
        most = min(most, slots.most_running)
        if most <= 0:
            raise Refused(
                f"Hybrid (mamba/linear-attention) state cache is too small to serve any requests. max_mamba_cache_size="
                f"{slots.slots}, mamba_ratio={slots.slots_each}, resulting max_num_reqs={most}. Try: (1) reduce "
                f"--max-running-requests, (2) increase --mem-fraction-static, or (3) use GPUs with more memory."
            )
    return account.note("max_running_requests", most, COUNT, formula, PROFILE)


def _fill(
    setting: Setting,
    sizing: Sizing,
    pools: DevicePools,
    running: int,
    account: Account,
    slots: state.StatePool | None = None,
) -> None:
    page = setting.page_size
    sizing.kv_bytes_per_token = int(pools.cell)
    sizing.pool_tokens, sizing.pool_pages = pools.tokens, pools.tokens // page
    sizing.swa_pool_tokens = pools.window_tokens
    sizing.max_running_requests = running
    sizing.full_length_requests = account.note(
        "full_length_requests",
        round(pools.tokens / setting.context_tokens, 4),
        RATIO,
        f"{pools.tokens:,} / {setting.context_tokens:,} tokens of context",
        "pool over context length",
    )
    for row, tokens in pools.rows:
        sizing.pools.append(_pool(row, tokens, page))
    sizing.kv_pool_bytes = sum(pool.bytes for pool in sizing.pools)
    if slots is not None:
        layers, drafts = setting.shape.count(LINEAR), 0
        if slots.intermediate_bytes and setting.spec is not None:
            drafts = int(state.intermediate_bytes(running, setting.spec.draft_tokens, slots.slot_bytes))
        sizing.pools.append(Pool("state", DEVICE, layers, slots.slot_bytes, slots.slots, slots.pool_bytes))
        # The engine counts the states of draft tokens with the pool that its host copy is measured by.
        pools.extra_rows.append(sizing.pools[-1]._replace(bytes=slots.pool_bytes + drafts))
        if drafts:
            sizing.pools.append(Pool("draft states", DEVICE, layers, slots.slot_bytes, 0, drafts))


def _pool(row: PoolRow, tokens: int, page: int) -> Pool:
    """Bytes of a device pool: its tokens, and the page in front that is never handed out."""
    padding = (
        0
        if row.name == "c4 state"
        else {"c4": page // 4, "c4 indexer": page // 4, "c128": page // 128}.get(row.name, page)
    )
    return Pool(
        row.name, DEVICE, row.layers, row.bytes_per_token, tokens, int((tokens + padding) * row.bytes_per_token)
    )


def _check_beside(
    setting: Setting, sizing: Sizing, before: int, fraction: float, running: int, account: Account
) -> None:
    """Whether what is taken after the pools are made fits beside them; if not, which flag to lower."""
    needed = reserves.beside_the_pool(
        setting.options,
        setting.shape,
        setting.ranks,
        setting.batches,
        setting.graphs,
        running,
        setting.context_tokens,
        account,
    )
    left = account.note(
        "beside_pool_bytes", int(before * (1 - fraction)), BYTES, f"{both(before)} x (1 - {fraction})", PROFILE
    )
    sizing.beside_pool_bytes, sizing.needed_beside_pool_bytes = left, needed.total
    if needed.total <= left:
        return
    sizing.verdict = FITS_ONLY_WITH
    lowered = int((1 - needed.total / before) * 1000) / 1000
    sizing.missing_bytes = needed.total - left
    sizing.remedy = _lower(needed, lowered, setting)
    sizing.error = (
        f"beside the pool {both(left)} are left, and about {both(needed.total)} are needed: activations "
        f"{both(needed.activations)}, logits {both(needed.logits)}, CUDA graphs {both(needed.graphs)}, request table "
        f"{both(needed.request_table)}"
    )


def _lower(needed: reserves.Beside, lowered: float, setting: Setting) -> str:
    largest = max(
        zip(
            needed,
            (
                "--chunked-prefill-size",
                "--max-running-requests",
                "--cuda-graph-max-bs-decode",
                "--max-running-requests (or --context-length)",
            ),
            strict=True,
        )
    )[1]
    fraction = f"--mem-fraction-static {lowered:.3f} or less" if lowered > 0 else "a larger GPU"
    return f"use {fraction}, or lower {largest}, which asks for most of it"
