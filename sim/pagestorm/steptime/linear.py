"""Step time as a sum of four terms.

    decode   base + per_request x batch    + per_context_token x context
    prefill  base + per_request x requests + per_context_token x (new + prefix) + per_prefill_token x new

A user's own coefficients, or the defaults of a scenario: round numbers in the range of one mid-size model on one
data-centre GPU, not measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagestorm.scenario.schema import Linear
from pagestorm.steptime.contract import FS_PER_S, count_starts


class LinearStepTime:
    """Four coefficients in femtoseconds."""

    __slots__ = ("base_fs", "per_context_token_fs", "per_prefill_token_fs", "per_request_fs")

    def __init__(self, settings: Linear) -> None:
        self.base_fs = round(settings.base_s * FS_PER_S)
        self.per_request_fs = round(settings.per_request_s * FS_PER_S)
        self.per_context_token_fs = round(settings.per_context_token_s * FS_PER_S)
        self.per_prefill_token_fs = round(settings.per_prefill_token_s * FS_PER_S)

    def decode_fs(self, batch: int, context_tokens: int) -> int:
        return self.base_fs + self.per_request_fs * batch + self.per_context_token_fs * context_tokens

    def decode_run_fs(self, batch: int, context_tokens: int, steps: int) -> int:
        # Context over the run: context, context + batch, ..., an arithmetic series.
        read_tokens = steps * context_tokens + batch * (steps * (steps - 1) // 2)
        return steps * (self.base_fs + self.per_request_fs * batch) + self.per_context_token_fs * read_tokens

    def steps_within(self, batch: int, context_tokens: int, limit_fs: int, most: int) -> int:
        return count_starts(self, batch, context_tokens, limit_fs, most)

    def prefill_fs(self, tokens: Sequence[int], prefixes: Sequence[int]) -> int:
        new = sum(tokens)
        return (
            self.base_fs
            + self.per_request_fs * len(tokens)
            + self.per_context_token_fs * (new + sum(prefixes))
            + self.per_prefill_token_fs * new
        )
