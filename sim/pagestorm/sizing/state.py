"""Recurrent state of linear-attention models in SGLang: bytes of a slot, how many slots, how many requests they carry.

Formulas: sglang 0.5.23, `configs/mamba_utils.py` and `mem_cache/kv_cache_configurator.py`
(`_handle_max_mamba_cache`, `_calculate_mamba_ratio`, `resolve_max_num_reqs`).
"""

from __future__ import annotations

from typing import NamedTuple

from pagestorm.catalog.shape import LINEAR, Shape, State
from pagestorm.errors import ScenarioError
from pagestorm.sizing.account import BYTES, COUNT, GIB, MIB, Account, Refused
from pagestorm.sizing.options import Options
from pagestorm.sizing.platform import EXTRA_BUFFER
from pagestorm.sizing.ranks import Ranks

SOURCE = "sglang 0.5.23 mem_cache/kv_cache_configurator.py"
STATE_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
DEFAULT_MEMORY_RATIO = 0.9
PADDING_SLOTS = 1
"""Each pool keeps one slot for padding."""
SLOTS_WITHOUT_CACHE, BASE_SLOTS = 1, 3


class StateFormat(NamedTuple):
    """Bytes of an element of the convolution window and of the recurrent matrix."""

    conv_bytes: int
    ssm_bytes: int


def state_format(conv: str, ssm: str | None) -> StateFormat:
    """The format of a state; the matrix is fp32 unless the checkpoint or the launch says otherwise."""
    for key, name in (("conv dtype", conv), ("--mamba-ssm-dtype", ssm or "float32")):
        if name not in STATE_DTYPES:
            raise ScenarioError(f"{name!r} is none of {', '.join(STATE_DTYPES)}", key=key)
    return StateFormat(STATE_DTYPES[conv], STATE_DTYPES[ssm or "float32"])


def layer_state_bytes(state: State, attn_tp: int, form: StateFormat) -> int:
    """One request's state in one layer of a rank: convolution window and recurrent matrices."""
    groups = state.groups
    if groups % attn_tp:
        groups += attn_tp - groups
    channels = (state.heads * state.head_dim + 2 * groups * state.state_dim) // attn_tp
    window = channels * (state.conv_kernel - 1) * form.conv_bytes
    return window + state.heads // attn_tp * state.head_dim * state.state_dim * form.ssm_bytes


def slot_bytes(shape: Shape, attn_tp: int, form: StateFormat) -> int:
    """One request's state in all layers of the model, on one rank."""
    return layer_state_bytes(shape.state, attn_tp, form) * shape.count(LINEAR) if shape.state is not None else 0


def slots_per_request(
    *, radix_cache: bool, extra_buffer: bool, lazy: bool = False, overlap: bool = True, skip_decode_lock: bool = False
) -> int:
    """State slots that one running request may need at once: 1 without prefix cache, else 3, 4 or 5."""
    if not radix_cache:
        return SLOTS_WITHOUT_CACHE
    base = BASE_SLOTS - skip_decode_lock
    if not extra_buffer:
        return base + skip_decode_lock
    return base + (1 if lazy or not overlap else 2)


def most_running(usable_slots: int, slots_each: int) -> int:
    """Requests that fit in so many state slots."""
    return usable_slots // slots_each


def state_pool_bytes(usable_slots: int, slot: float) -> float:
    """The pool of states: usable slots and the one for padding."""
    return (usable_slots + PADDING_SLOTS) * slot


def intermediate_bytes(running: int, draft_tokens: int, slot: float) -> float:
    """States that verification keeps for each draft token of each request (and of the padding one)."""
    return (running + PADDING_SLOTS) * draft_tokens * slot


class StatePool(NamedTuple):
    """Usable slots, bytes of one on a rank, slots a request may need, and the bytes of the pools made of them."""

    slots: int
    slot_bytes: int
    slots_each: int
    pool_bytes: int
    intermediate_bytes: int

    @property
    def most_running(self) -> int:
        return most_running(self.slots, self.slots_each)


def strategy(options: Options, shape: Shape, page_size_given: bool) -> tuple[str, bool]:
    """`--mamba-radix-cache-strategy` with `auto` decided, and whether overlap scheduling stays on."""
    overlap = not options.switch("disable_overlap_schedule")
    name = options.text("mamba_radix_cache_strategy", "auto")
    if options.switch("disable_radix_cache") or name != "auto":
        return name if name != "auto" else "no_buffer", overlap
    if (overlap or page_size_given) and shape.architecture in EXTRA_BUFFER:
        return "extra_buffer", overlap
    return "no_buffer", False


def size_state_pool(
    options: Options,
    shape: Shape,
    ranks: Ranks,
    rest_gib: float,
    running: int | None,
    draft_tokens: int | None,
    page_size: int,
    account: Account,
) -> tuple[StatePool, float]:
    """Take the state slots out of `rest_gib` of memory; returns them and what is left, in GiB (floats as the engine's).

    `running` are the requests of one attention group that are asked for. Raises `Refused` where no slot fits.
    """
    form = state_format(
        options.variable("SGLANG_MAMBA_CONV_DTYPE", "bfloat16"),
        options.text("mamba_ssm_dtype") or options.variable("SGLANG_MAMBA_SSM_DTYPE") or _own(shape),
    )
    whole = slot_bytes(shape, ranks.attn_tp, form)
    layers = shape.count(LINEAR)
    most_layers = max(shape.count(LINEAR, stage.start, stage.end) for stage in ranks.stages)
    slot = account.note(
        "state_slot_bytes",
        int(whole * (most_layers / max(layers, 1))),
        BYTES,
        f"{most_layers} layers x {layer_state_bytes(shape.state, ranks.attn_tp, form):,}" if shape.state else "",
        "sglang 0.5.23 configs/mamba_utils.py (convolution window + recurrent matrix)",
    )
    name, overlap = strategy(options, shape, page_size > 1)
    each = slots_per_request(
        radix_cache=not options.switch("disable_radix_cache"),
        extra_buffer=name in ("extra_buffer", "extra_buffer_lazy"),
        lazy=name == "extra_buffer_lazy",
        overlap=overlap,
        skip_decode_lock=options.variable_switch("SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK"),
    )
    account.note(
        "state_slots_per_request", each, COUNT, f"strategy {name}, overlap {'on' if overlap else 'off'}", SOURCE
    )
    slots, rest_gib, intermediate = _slots(options, ranks, rest_gib, slot, each, running, draft_tokens, account)
    if slots <= 0:
        raise Refused(
            f"Not enough GPU memory for hybrid (mamba/linear-attention) state cache. Computed max_mamba_cache_size="
            f"{slots} (total_rest_memory={rest_gib:.2f} GB, mamba_cache_per_req={slot / MIB:.2f} MB). Try: (1) reduce "
            f"--max-running-requests, (2) increase --mem-fraction-static, (3) reduce --speculative-num-draft-tokens, "
            f"or (4) use GPUs with more memory."
        )
    pool_gib = state_pool_bytes(slots, slot) / GIB
    pool = StatePool(slots, slot, each, int(state_pool_bytes(slots, slot)), int(intermediate))
    account.note(
        "state_pool_bytes",
        pool.pool_bytes,
        BYTES,
        f"({slots:,} slots + {PADDING_SLOTS} for padding) x {slot:,}",
        SOURCE,
    )
    return pool, rest_gib - pool_gib


def _own(shape: Shape) -> str | None:
    return shape.state.ssm_dtype if shape.state is not None else None


def _slots(
    options: Options,
    ranks: Ranks,
    rest_gib: float,
    slot: int,
    each: int,
    running: int | None,
    draft_tokens: int | None,
    account: Account,
) -> tuple[int, float, float]:
    """Usable slots, the memory left beside intermediate states, and the bytes of those."""
    given = options.maybe("max_mamba_cache_size")
    spec = draft_tokens is not None and options.text("disaggregation_mode", "null") != "prefill"
    if given is not None:
        slots = account.note("state_slots", given // ranks.attn_dp, COUNT, f"{given} // {ranks.attn_dp}", SOURCE)
        held = min(running if running is not None else slots, slots // each)
        extra = intermediate_bytes(held, draft_tokens or 0, slot) if spec else 0
        return slots, rest_gib - extra / GIB, extra
    if options.switch("disable_radix_cache") and running is not None:
        slots = account.note("state_slots", running, COUNT, "as many as may run, prefix cache off", SOURCE)
        extra = intermediate_bytes(slots, draft_tokens or 0, slot) if spec else 0
        return slots, rest_gib - extra / GIB, extra
    ratio = options.fraction("mamba_full_memory_ratio", DEFAULT_MEMORY_RATIO) or DEFAULT_MEMORY_RATIO
    budget = rest_gib * ratio / (1 + ratio) * GIB
    if not spec:
        slots = int((budget - slot) // slot)
        account.note(
            "state_slots",
            slots,
            COUNT,
            f"({rest_gib:.3f} GiB x {ratio} / (1 + {ratio}) - {slot:,}) // {slot:,}",
            SOURCE,
        )
        return slots, rest_gib, 0.0
    tokens = draft_tokens or 0
    slots = int((budget - slot * (1 + tokens)) // (slot * (1 + tokens / each)))
    account.note(
        "state_slots",
        slots,
        COUNT,
        f"({rest_gib:.3f} GiB x {ratio} / (1 + {ratio}) - {slot:,} x (1 + {tokens})) // ({slot:,} x (1 + {tokens} / "
        f"{each}))",
        SOURCE,
    )
    held = min(running if running is not None else slots, max(slots, 0) // each)
    extra = intermediate_bytes(held, tokens, slot)
    return slots, rest_gib - extra / GIB, extra


def shared_buffer_fits(gap_bytes: float, slot: float) -> bool:
    """Whether a shared buffer (`--enable-unified-memory`) takes one more state.

    Tokens and states grow towards each other from its two ends, so what counts is the gap between them, never a share
    of either: both usages may be low and the gap still smaller than one state.
    """
    return gap_bytes >= slot
