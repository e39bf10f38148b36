"""Pools of window and compressed models in SGLang: full and window tokens, and when the engine refuses to start.

Formulas: sglang 0.5.23, `model_executor/pool_configurator.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from pagestorm.sizing.account import GIB, Refused

SOURCE = "sglang 0.5.23 model_executor/pool_configurator.py"
DEFAULT_RATIO, COMPRESSED_RATIO = 0.8, 0.1
EVICTION_INTERVAL = 128
COMPRESSED_PAGE = 256
V4_ROW_BYTES, V4_PAGE_ALIGN = 584, 576
"""A DeepSeek-V4 latent: 448 fp8 + 64 bf16 values, 7 scales and a pad; a page is padded to rows of 576 bytes."""


class WindowPools(NamedTuple):
    """Tokens of the full and of the window pool."""

    full_tokens: int
    window_tokens: int


def floor_page(tokens: float, page_size: int) -> int:
    """Whole pages, in tokens."""
    return int(tokens) // page_size * page_size


def ceil_page(tokens: int, page_size: int) -> int:
    """Pages that hold so many tokens, in tokens."""
    return -(-tokens // page_size) * page_size


def window_tokens(full_tokens: int, ratio: float, page_size: int) -> int:
    """Tokens of the window pool beside a full pool of so many."""
    return floor_page(int(full_tokens * ratio), page_size)


def admission_floor(window: int, page_size: int) -> int:
    """Window tokens below which no prompt is ever admitted: the pool must be larger."""
    return window + page_size


def check_window_pool(tokens: int, window: int | None, page_size: int) -> None:
    """Raises `Refused`, with the engine's message, for a window pool that could not admit a single request."""
    if window is None or admission_floor(window, page_size) < tokens:
        return
    raise Refused(
        f"SWA pool ({tokens} tokens) cannot hold even one request: the prefill admission floor is sliding_window_size "
        f"({window}) + page_size ({page_size}). Increase --swa-full-tokens-ratio or the total KV budget."
    )


def smallest_full_tokens(window: int, ratio: float, page_size: int) -> int:
    """The smallest full pool beside which the window pool is accepted."""
    pages = admission_floor(window, page_size) // page_size + 1
    tokens = ceil_page(max(1, int(pages * page_size / ratio) - page_size), page_size)
    while window_tokens(tokens, ratio, page_size) <= admission_floor(window, page_size):
        tokens += page_size
    return tokens


def request_cap(
    *,
    window: int,
    page_size: int,
    running: int,
    chunk: int,
    draft_tokens: int | None,
    alloc_len: int,
    overlap: bool,
    interval: int = EVICTION_INTERVAL,
    decode_slots: int | None = None,
) -> int:
    """Window tokens that so many requests hold at the worst, before page rounding (`compute_swa_request_cap`).

    `alloc_len` is what one speculative decode step may allocate; `decode_slots` the extra slots of a decode server,
    None on any other.
    """
    trailing = window + max(1, interval) * (draft_tokens or 1) + page_size
    if draft_tokens is None:
        decode = page_size
    else:
        decode = alloc_len * (2 if overlap else 1)
    total = (trailing + decode) * running
    if decode_slots is not None:
        return total + (window + page_size) * decode_slots
    return total + (2 if overlap else 1) * chunk + page_size


def split_by_ratio(
    budget_bytes: int, full_bytes: float, window_bytes: float, ratio: float, draft_bytes: float, page_size: int
) -> WindowPools:
    """Full and window tokens that share a budget: window = ratio x full. All-window models have no full pool."""
    if full_bytes == 0:
        return WindowPools(0, floor_page(budget_bytes // (window_bytes + draft_bytes), page_size))
    full = floor_page(budget_bytes // (full_bytes + ratio * window_bytes + draft_bytes), page_size)
    return WindowPools(full, window_tokens(full, ratio, page_size))


def split_by_cap(
    budget_bytes: int, full_bytes: float, window_bytes: float, cap_tokens: int, draft_bytes: float, page_size: int
) -> WindowPools:
    """The window pool is sized by the requests; the rest of the budget is the full pool. Raises `Refused`."""
    window = ceil_page(cap_tokens, page_size)
    fixed = window * window_bytes
    full = floor_page((budget_bytes - fixed) // (full_bytes + draft_bytes), page_size)
    if full <= 0:
        raise Refused(
            f"SWA pool cap ({window} tokens, {fixed / GIB:.2f} GiB) leaves no room for the full KV pool within the "
            f"available {budget_bytes / GIB:.2f} GiB. Reduce --max-running-requests, lower "
            "SGLANG_SWA_EVICTION_INTERVAL, "
            f"or increase --mem-fraction-static.",
            int(fixed + (full_bytes + draft_bytes) * page_size - budget_bytes),
        )
    return WindowPools(full, window)


class CompressedPools(NamedTuple):
    """DeepSeek-V4: tokens of each pool, for a full capacity of `full_tokens`."""

    full_tokens: int
    window_tokens: int
    c4_tokens: int
    c128_tokens: int
    c4_state_rows: int


def compressed_pools(
    full_tokens: int, ratio: float, page_size: int, ring: int = 8, window: int | None = None, cap: int | None = None
) -> CompressedPools:
    """The pools of a compressed model. `cap`: window tokens by request count instead of by ratio.

    Raises `Refused` where the window pool could not admit a request.
    """
    full = floor_page(full_tokens, page_size)
    tokens = window_tokens(full, ratio, page_size) if cap is None else cap
    if cap is None:
        check_window_pool(tokens, window, page_size)
    return CompressedPools(full, tokens, full // 4, full // 128, tokens // page_size * ring)


def tails(tokens: int, tail_tokens: int) -> int:
    """Cached prefix tails (a window and a page each) that a window pool keeps."""
    return tokens // tail_tokens


def v4_slot_bytes(page_size: int) -> float:
    """Bytes of one latent slot, with its share of the padding of a page of so many slots."""
    raw = page_size * V4_ROW_BYTES
    return -(-raw // V4_PAGE_ALIGN) * V4_PAGE_ALIGN / page_size
