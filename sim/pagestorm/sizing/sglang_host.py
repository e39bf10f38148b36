"""The host tier of an SGLang server: its pools per rank, and whether the machine has the memory for them."""

from __future__ import annotations

from typing import NamedTuple

from pagestorm.catalog.shape import Heads, Shape
from pagestorm.errors import ScenarioError
from pagestorm.sizing import budget, host, kv
from pagestorm.sizing.account import BYTES, COUNT, RATIO, Account, Refused, both
from pagestorm.sizing.host import HostPool, Kind
from pagestorm.sizing.kv import KvFormat, PoolRow
from pagestorm.sizing.options import Options
from pagestorm.sizing.ranks import Ranks
from pagestorm.sizing.result import FITS, FITS_ONLY_WITH, HOST, REFUSED, Pool, Sizing
from pagestorm.sizing.speculation import Speculation

AUTO_SOURCE = "sglang 0.5.23 mem_cache/hicache_auto_size.py"
BUDGET_SOURCE = "sglang 0.5.23 mem_cache/pool_host/base.py, mem_cache/host_memory.py"
ASSEMBLER = "sglang 0.5.23 mem_cache/hybrid_cache/hybrid_pool_assembler.py"
FP8_REMEDY = "use --kv-cache-dtype fp8_e4m3"
CHOICES = {
    "hicache_write_policy": ("write_back", "write_through", "write_through_selective"),
    "hicache_mem_layout": host.LAYOUTS,
    "hicache_io_backend": ("direct", "kernel", "kernel_ascend"),
}


class HostMachine(NamedTuple):
    """Host memory that is available now, the container's headroom (None: no limit), and what was wrong with reading it.

    `available_bytes` None: nothing is known, so the pools are sized and not checked.
    """

    available_bytes: int | None = None
    headroom_bytes: int | None = None
    problem: str | None = None
    source: str = "--host-memory-bytes"


class _Tier(NamedTuple):
    """What the pools of the tier are made from."""

    options: Options
    shape: Shape
    ranks: Ranks
    page_size: int
    form: KvFormat
    spec: Speculation | None
    rows: list[tuple[PoolRow, int]]
    states: list[Pool]
    layout: str

    @property
    def packed_layers(self) -> int:
        return self.spec.kv_layers if self.spec is not None and self.spec.packed else 0

    def tokens(self, name: str) -> int:
        return next((tokens for row, tokens in self.rows if row.name == name), 0)

    def row(self, name: str) -> PoolRow | None:
        return next((row for row, _ in self.rows if row.name == name and row.layers), None)


def size_host_tier(
    options: Options,
    shape: Shape,
    ranks: Ranks,
    page_size: int,
    form: KvFormat,
    spec: Speculation | None,
    rows: list[tuple[PoolRow, int]],
    states: list[Pool],
    machine: HostMachine,
    sizing: Sizing,
    account: Account,
) -> None:
    """Add the host pools to `sizing`; raises `Refused` where every rank is refused."""
    for name, choices in CHOICES.items():
        chosen = options.text(name)
        if chosen and chosen not in choices:
            raise ScenarioError(f"{chosen!r} is none of {', '.join(choices)}", key=options.shown(name))
    layout, _ = host.resolve_layout(
        options.text("hicache_mem_layout", "page_first"),
        options.text("hicache_io_backend", "kernel"),
        options.text("hicache_storage_backend"),
    )
    tier = _Tier(options, shape, ranks, page_size, form, spec, rows, states, layout)
    sizing.ranks_per_host = ranks.per_host
    size_gb = options.whole("hicache_size", 0)
    if size_gb < 0:
        raise ScenarioError(f"{size_gb} is below 0; give gigabytes", key="--hicache-size")
    given = options.fraction("hicache_ratio")
    allowed = _budget(tier, machine, automatic=size_gb == 0 and given is None, account=account)
    ratio = _ratio(tier, size_gb, given, allowed, account)
    pools = host_pools(tier, ratio, size_gb, account)
    _report(tier, pools, sizing, account)
    if allowed is None or machine.available_bytes is None:
        account.warn(
            "the host's memory is not known, so the host pools are sized and not checked; give --host-memory-bytes "
            "or --this-host"
        )
        for pool in pools:
            host.check_layout(pool, layout)
        return
    sizing.host_budget_bytes = allowed
    if size_gb == 0 and given is None:
        _check_snapshot(pools, int(allowed * _fraction(options)), layout, sizing)
    else:
        _check_order(tier, pools, machine, sizing, account)


def _budget(tier: _Tier, machine: HostMachine, automatic: bool, account: Account) -> int | None:
    """What one rank may claim before any pool is made."""
    if machine.available_bytes is None:
        return None
    if machine.problem is not None and automatic:
        raise ScenarioError(
            f"{machine.problem}; here the engine stops with: {budget.CANNOT_SIZE} Or say what is free with "
            "--host-memory-bytes",
            key="--this-host",
        )
    if machine.problem is not None:
        account.warn(
            f"{machine.problem}; the pools are checked against the host's available memory alone, as the engine does"
        )
    available = budget.available_bytes(machine.available_bytes, machine.headroom_bytes)
    limit = "" if machine.headroom_bytes is None else f", cgroup headroom {both(machine.headroom_bytes)}"
    account.note(
        "host_available_bytes", available, BYTES, f"host {both(machine.available_bytes)}{limit}", machine.source
    )
    per_host = tier.ranks.per_host
    formula = f"({available:,} - {budget.RESERVE_BYTES:,}) // {per_host} ranks on the host"
    return account.note("host_budget_bytes", budget.budget_bytes(available, per_host), BYTES, formula, BUDGET_SOURCE)


def _fraction(options: Options) -> float:
    fraction = options.fraction("hicache_host_memory_fraction", host.DEFAULT_FRACTION) or host.DEFAULT_FRACTION
    if not 0 < fraction <= 1:
        raise Refused("--hicache-host-memory-fraction must be in (0, 1].")
    return fraction


def _ratio(tier: _Tier, size_gb: int, given: float | None, allowed: int | None, account: Account) -> float:
    if given is not None:
        if given <= 0:
            raise ScenarioError(f"{given} makes no sense; give a ratio above 0", key="--hicache-ratio")
        return given
    requested = (
        host.BUFFER_RATIO if tier.options.text("hicache_host_memory_mode") == "buffer_only" else host.DEFAULT_RATIO
    )
    if size_gb > 0 or allowed is None:
        return requested
    device = sum(int((tokens + tier.page_size) * row.bytes_per_token) for row, tokens in tier.rows)
    device += sum(pool.bytes for pool in tier.states)
    fraction = _fraction(tier.options)
    ratio = host.auto_ratio(allowed, device, requested, fraction)
    formula = f"min({requested}, {allowed:,} x {fraction} x {1 - host.SLACK} / {device:,} device bytes)"
    return account.note("hicache_ratio", ratio, RATIO, formula, AUTO_SOURCE)


def host_pools(tier: _Tier, ratio: float, size_gb: float, account: Account) -> list[HostPool]:
    """The host pools of a rank, in the order in which the engine makes them."""
    if tier.shape.compress_ratios:
        return _compressed_pools(tier, ratio, size_gb)
    anchor_row, window = tier.row("kv"), tier.row("window")
    shares = _shares(tier, size_gb, anchor_row, window, account)
    pools: list[HostPool] = []
    if anchor_row is not None:
        anchor = _anchor(tier, anchor_row, ratio, shares[0])
        pools.append(anchor)
        pools += _index_pools(tier, anchor)
        pools += _sidecars(tier, anchor)
    if window is not None:
        kind, parts = _parts(tier, tier.shape.window, window.layers)
        tokens = tier.tokens("window")
        pools.append(
            host.anchor_pool(
                "host window",
                kind,
                tokens,
                parts,
                tier.page_size,
                ratio=ratio,
                size_gb=shares[1],
                layers=window.layers,
            )
        )
    for number, states in enumerate(tier.states):
        parts = (int(states.bytes_per_token),)
        share = shares[2 + number]
        pools.append(
            host.anchor_pool(
                "host state",
                host.STATE,
                states.tokens,
                parts,
                1,
                ratio=ratio,
                size_gb=share,
                layers=states.layers,
            )
        )
    return pools


def _parts(tier: _Tier, heads: Heads, layers: int) -> tuple[Kind, tuple[int, ...]]:
    """The class of a host pool, and the bytes of a token in each of its buffers."""
    shape, form = tier.shape, tier.form
    if shape.latent is not None:
        if form.name in kv.FP4:
            raise Refused(
                "MLA host cache does not support target FP4 KV: packed payload and separate block scales cannot be "
                "restored",
                remedy=FP8_REMEDY,
            )
        return host.LATENT, (kv.latent_row_bytes(shape, form) * layers,)
    if form.name in kv.FP4:
        raise Refused("kv: MHA host transfers do not support KV scale layout 'token'.", remedy=FP8_REMEDY)
    mine = kv.heads_per_rank(heads.kv_heads, tier.ranks.attn_tp, tier.ranks.dcp)
    if form.name == "mxfp8":
        if tier.packed_layers:
            raise Refused("MXFP8 KV host pool does not pack MTP draft KV layers.", remedy=FP8_REMEDY)
        return host.SCALED_HEADS, (kv.head_bytes(mine, heads.k_dim, heads.v_dim, form, 1) * layers,)
    kind = host.HEADS if heads.k_dim == heads.v_dim else host.UNEVEN_HEADS
    return kind, host.mha_parts(heads.k_dim, heads.v_dim, mine, layers, form.torch_bytes)


def _shares(
    tier: _Tier, size_gb: float, anchor: PoolRow | None, window: PoolRow | None, account: Account
) -> list[float]:
    """`--hicache-size` of each pool: all of it for one pool, by device bytes for several."""
    device = [
        0.0 if row is None else (tier.tokens(row.name) + tier.page_size) * row.bytes_per_token
        for row in (anchor, window)
    ]
    device += [float(states.bytes) for states in tier.states]
    if size_gb <= 0 or sum(each > 0 for each in device) < 2:
        return [size_gb if each > 0 else 0.0 for each in device]
    shares = host.split_size(size_gb, device)
    account.note(
        "hicache_size of the anchor",
        shares[0],
        RATIO,
        f"{size_gb} GB x {device[0]:,.0f} / {sum(device):,.0f}",
        ASSEMBLER,
    )
    return shares


def _anchor(tier: _Tier, row: PoolRow, ratio: float, size_gb: float) -> HostPool:
    layers = row.layers + tier.packed_layers
    kind, parts = _parts(tier, tier.shape.full, layers)
    return host.anchor_pool(
        "host kv", kind, tier.tokens("kv"), parts, tier.page_size, ratio=ratio, size_gb=size_gb, layers=layers
    )


def _index_pools(tier: _Tier, anchor: HostPool) -> list[HostPool]:
    row, indexer = tier.row("indexer"), tier.shape.indexer
    if row is None or indexer is None:
        return []
    key = kv.index_key_bytes(indexer.head_dim, indexer.kpool)
    return [host.index_pool(anchor, row.layers + tier.packed_layers, key, "host indexer")]


def _sidecars(tier: _Tier, anchor: HostPool) -> list[HostPool]:
    row = tier.row("draft kv")
    if row is None or tier.packed_layers:
        return []
    tokens = max(1, tier.tokens("draft kv"))
    parts = (int(row.bytes_per_token),)
    return [host.sidecar_pool("host draft kv", anchor.kind, anchor, parts, tokens, row.layers)]


def _compressed_pools(tier: _Tier, ratio: float, size_gb: float) -> list[HostPool]:
    """DeepSeek-V4: whole device pages times the ratio; a size is refused."""
    if size_gb > 0:
        raise Refused(
            "DeepSeek V4 HiCache currently does not support --hicache-size; use --hicache-ratio instead.",
            remedy=f"leave --hicache-size out and give --hicache-ratio {host.DEFAULT_RATIO}",
        )
    pools = []
    for row, tokens in tier.rows:
        per_page = {"c4": 4, "c4 indexer": 4, "c128": 128}.get(row.name, 1)
        page = tier.page_size // per_page
        if row.name == "c4 state" or not row.layers:
            continue
        pages = int(-(-tokens // page) * ratio)
        asked = pages * page * int(row.bytes_per_token)
        each = int(row.bytes_per_token)
        pools.append(HostPool(f"host {row.name}", host.LATENT, row.layers, each, page, pages, asked, (asked,)))
    return pools


def _report(tier: _Tier, pools: list[HostPool], sizing: Sizing, account: Account) -> None:
    hugepage = tier.options.variable("SGLANG_HUGEPAGE_SIZE")
    for pool in pools:
        mapped = pool.mapped_bytes(hugepage)
        source = host.INDEXER_SOURCE if pool.name.endswith("indexer") else host.SOURCE
        formula = f"{pool.pages:,} pages x {pool.page_size} x {pool.bytes_per_token:,} bytes ({pool.layers} layers)"
        account.note(f"{pool.name} bytes", pool.asked_bytes, BYTES, formula, source)
        if mapped > pool.asked_bytes:
            account.note(
                f"{pool.name} mapped", mapped, BYTES, f"buffer of {sum(pool.buffers):,}, up to whole pages", source
            )
        sizing.pools.append(Pool(pool.name, HOST, pool.layers, pool.bytes_per_token, pool.tokens, pool.asked_bytes))
    sizing.host_pool_bytes = sum(pool.asked_bytes for pool in pools)
    index = [pool for pool in pools if pool.name.endswith("indexer")]
    sizing.host_indexer_bytes = sum(pool.asked_bytes for pool in index) if index else None
    for pool in index:
        _smaller_indexer(pool, account)
    smaller = [pool.name for pool in pools if pool.tokens <= _device_tokens(tier, pool.name)]
    if smaller:
        account.warn(
            f"{', '.join(smaller)}: smaller than the device pool, so little of what leaves the device is still on "
            "the host"
        )


def _smaller_indexer(pool: HostPool, account: Account) -> None:
    """What index keys of 4 bits would save: half a byte an element and a scale byte for each 32."""
    each = pool.bytes_per_token // pool.layers
    elements = each * kv.DSA_QUANT_BLOCK // (kv.DSA_QUANT_BLOCK + kv.SCALE_BYTES)
    small = elements // 2 + elements // kv.MX_BLOCK
    saved = pool.pages * pool.page_size * pool.layers * (each - small)
    account.note(
        "indexer bytes saved by fp4 keys",
        saved,
        BYTES,
        f"{each} -> {small} bytes a key; the engine stores DSA keys as fp8 on a host",
        host.INDEXER_SOURCE,
    )


def _device_tokens(tier: _Tier, name: str) -> int:
    if name == "host state":
        return max((pool.tokens for pool in tier.states), default=0)
    return tier.tokens(name.removeprefix("host "))


def _check_snapshot(pools: list[HostPool], allowed: int, layout: str, sizing: Sizing) -> None:
    """Automatic sizing books every pool on one reading of the machine."""
    snapshot = budget.Snapshot(allowed)
    for pool in pools:
        host.check_pool(pool, snapshot.book(pool.asked_bytes), layout)
    sizing.host_budgets_bytes = [allowed]


def _check_order(tier: _Tier, pools: list[HostPool], machine: HostMachine, sizing: Sizing, account: Account) -> None:
    """Explicit sizes: each rank reads the machine again for each pool, so what its peers pinned before counts."""
    hugepage = tier.options.variable("SGLANG_HUGEPAGE_SIZE")
    per_host, each = tier.ranks.per_host, sum(pool.mapped_bytes(hugepage) for pool in pools)
    available = budget.available_bytes(machine.available_bytes or 0, machine.headroom_bytes)
    sizing.host_budgets_bytes = budget.budgets_after_peers(available, per_host, each)
    refused_at: int | None = None
    for peers in range(per_host):
        left, problem = available - peers * each, None
        for pool in pools:
            try:
                host.check_pool(pool, budget.budget_bytes(left, per_host), tier.layout)
            except Refused as refusal:
                problem = refusal
                break
            left -= pool.mapped_bytes(hugepage)
        if problem is not None:
            problem.remedy = problem.remedy or _fitting(tier, pools, available)
            if peers == 0:
                raise problem
            refused_at, sizing.error, sizing.remedy, sizing.missing_bytes = (
                peers,
                problem.message,
                problem.remedy,
                problem.missing_bytes,
            )
            break
    if refused_at is None:
        _check_touch(tier, each * per_host, available, sizing)
        return
    account.note(
        "peers that refuse a rank",
        refused_at,
        COUNT,
        f"a rank is refused once {refused_at} of its {per_host - 1} peers have pinned {both(each)}",
        BUDGET_SOURCE,
    )
    if sizing.verdict != REFUSED:
        sizing.verdict = FITS_ONLY_WITH
        sizing.error = (
            f"{sizing.error} So says a rank that starts after {refused_at} peers; the order of start decides."
        )


def _check_touch(tier: _Tier, all_ranks: int, available: int, sizing: Sizing) -> None:
    """All ranks together against the machine: what passes each check can still be killed when it is touched."""
    if all_ranks <= available:
        return
    sizing.missing_bytes = all_ranks - available
    if sizing.verdict == FITS:
        sizing.verdict = FITS_ONLY_WITH
    sizing.error = (
        f"each rank's check passes, but all {tier.ranks.per_host} ranks take {both(all_ranks)} of {both(available)}: "
        "the "
        f"kernel kills one of them when the pages are touched"
    )
    sizing.remedy = _fitting(tier, [], available, all_ranks)


def _fitting(tier: _Tier, pools: list[HostPool], available: int, all_ranks: int = 0) -> str:
    """The size or ratio that fits for every order of start."""
    each = sum(pool.asked_bytes for pool in pools) or all_ranks // tier.ranks.per_host
    room = budget.budget_bytes(available, tier.ranks.per_host)
    if room <= 0 or each <= 0:
        reserve_gib = budget.RESERVE_BYTES >> 30
        return f"nothing is left beyond the {reserve_gib} GiB reserve; leave --enable-hierarchical-cache out"
    # The last rank must fit into what its peers leave: size <= (available - reserve - (n - 1) x size) / n.
    n = tier.ranks.per_host
    most = (available - budget.RESERVE_BYTES) / (2 * n - 1)
    share = most / each
    size_gb = tier.options.whole("hicache_size", 0)
    if size_gb > 0 and size_gb * share < 1:
        return "less than 1 GB a rank would fit; leave --enable-hierarchical-cache out, or use --hicache-ratio"
    if size_gb > 0:
        return f"use --hicache-size {int(size_gb * share)} or less, which fits whatever the order of start"
    ratio = tier.options.fraction("hicache_ratio", host.DEFAULT_RATIO) or host.DEFAULT_RATIO
    return f"use --hicache-ratio {int(ratio * share * 100) / 100} or less, which fits whatever the order of start"
