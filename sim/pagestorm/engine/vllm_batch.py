"""vLLM's running requests: one column of integers for each fact, in the order in which they were admitted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pagestorm.engine.vllm_request import VllmRequest
from pagestorm.memory.ledger import Ints

_ROW, _COMPUTED, _TOKENS, _END, _PREFILL = range(5)
_COLUMNS = 5

Bools = npt.NDArray[np.bool_]


class VllmBatch:
    """Requests that hold blocks. A request decodes when all its tokens but the newest are computed."""

    __slots__ = ("_state", "prefilling", "requests")

    def __init__(self) -> None:
        self.requests: list[VllmRequest] = []
        self.prefilling = 0
        """How many of them have not computed their last known token yet since they were admitted."""
        self._state = np.empty((_COLUMNS, 0), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.requests)

    def _column(self, field: int) -> Ints:
        column: Ints = self._state[field]
        return column

    @property
    def rows(self) -> Ints:
        return self._column(_ROW)

    @property
    def computed(self) -> Ints:
        """Tokens whose KV is there."""
        return self._column(_COMPUTED)

    @property
    def tokens(self) -> Ints:
        """Tokens that are known: prompt and output."""
        return self._column(_TOKENS)

    @property
    def end(self) -> Ints:
        """Number of tokens at which the request ends."""
        return self._column(_END)

    @property
    def prefill(self) -> Bools:
        """Whether a request still computes tokens that are known already, admission or recompute."""
        where: Bools = self._column(_PREFILL) != 0
        return where

    def join(self, requests: Sequence[VllmRequest], computed: Sequence[int]) -> None:
        """Admit requests, with what prefix hits have computed for them."""
        joined = np.array(
            [
                (r.row, c, r.sequence_tokens, r.input_tokens + r.target, 1)
                for r, c in zip(requests, computed, strict=True)
            ],
            dtype=np.int64,
        ).T
        self._state = np.concatenate((self._state, joined), axis=1)
        self.requests = [*self.requests, *requests]
        self.prefilling += len(requests)

    def leave(self, places: Sequence[int]) -> None:
        """The requests at these places go, with `generated` written back."""
        for place in places:
            request = self.requests[place]
            request.generated = int(self._state[_TOKENS, place]) - request.input_tokens
        self.prefilling -= int(self._state[_PREFILL, places].sum())
        self._state = np.delete(self._state, places, axis=1)
        gone = set(places)
        self.requests = [r for place, r in enumerate(self.requests) if place not in gone]

    def decode(self, steps: int) -> None:
        """Every member computes its newest token and samples the next, `steps` times."""
        self._state[_COMPUTED : _TOKENS + 1] += steps

    def compute(self, tokens: Ints) -> Bools:
        """Each member computes this many tokens; those that have computed all they know sample the next one.

        Returns who sampled.
        """
        state = self._state
        state[_COMPUTED] += tokens
        sampled: Bools = (tokens > 0) & (state[_COMPUTED] == state[_TOKENS])
        state[_TOKENS] += sampled
        self.prefilling -= int(state[_PREFILL, sampled].sum())
        state[_PREFILL, sampled] = 0
        return sampled
