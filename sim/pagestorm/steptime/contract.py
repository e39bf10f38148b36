"""How long a forward pass takes: the contract that every step-time model keeps.

All times are whole femtoseconds, so that sums are exact and leaping equals stepping. Pass plain Python ints, never
numpy ones: a numpy int64 would wrap around.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

FS_PER_S = 10**15


class StepTime(Protocol):
    """Times of passes. In a run of decode passes nobody joins or leaves, so the context grows by `batch` each pass."""

    def decode_fs(self, batch: int, context_tokens: int) -> int:
        """One decode pass over `batch` requests.

        `context_tokens` is the sum over the batch of the KV lengths that the pass reads, the slot it writes included.
        """

    def decode_run_fs(self, batch: int, context_tokens: int, steps: int) -> int:
        """`steps` decode passes in a row, the first with `context_tokens`: the exact sum of their `decode_fs`."""

    def steps_within(self, batch: int, context_tokens: int, limit_fs: int, most: int) -> int:
        """How many of the next `most` passes start before `limit_fs` have gone by; the first starts at 0."""

    def prefill_fs(self, tokens: Sequence[int], prefixes: Sequence[int]) -> int:
        """One prefill pass: for each request, new tokens to compute and tokens whose KV is there already."""


def count_starts(model: StepTime, batch: int, context_tokens: int, limit_fs: int, most: int) -> int:
    """`steps_within` by bisection. A pass is never shorter than the one before it, which brackets the answer."""
    if limit_fs <= 0 or most <= 0:
        return 0
    # Pass k starts at decode_run_fs(k); the answer is the smallest k that starts at or after the limit.
    high = min(most, -(-limit_fs // model.decode_fs(batch, context_tokens)))
    if high == 1 or model.decode_run_fs(batch, context_tokens, high - 1) < limit_fs:
        return high
    high -= 1
    longest = model.decode_fs(batch, context_tokens + (high - 1) * batch)
    low = (limit_fs - 1) // longest
    while high - low > 1:
        middle = (low + high) // 2
        if model.decode_run_fs(batch, context_tokens, middle) < limit_fs:
            low = middle
        else:
            high = middle
    return high
