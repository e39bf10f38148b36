"""One request as the scheduler sees it, from arrival to its end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Request:
    """Facts of one request and the state it has while it is *not* in the running batch.

    While it runs, its lengths follow from the batch's clocks; `generated` here is up to date only when it
    waits, is being prefilled, or has ended. Times are femtoseconds, -1 while unknown.
    """

    number: int
    arrive_fs: int
    input_tokens: int
    output_tokens: int
    """What the model would generate before it stops by itself."""
    asked_tokens: int
    """max_new_tokens as the client sent it."""
    ignore_eos: bool = False
    max_new_tokens: int = 0
    """What the engine made of `asked_tokens` on arrival."""
    target: int = 0
    """Output length at which it ends: by a stop token below max_new_tokens, by length at it."""
    row: int = 0
    """Row of the request table; 0 means that it holds none."""
    generated: int = 0
    computed: int = 0
    """Tokens whose KV is there: what earlier chunks of a prefill computed, or the length it left the batch with."""
    base_committed: int = 0
    """While it runs: committed length less the batch's `launched` clock."""
    base_generated: int = 0
    """While it runs: output tokens less the batch's `known` clock."""
    pending: int = 0
    """1 while the result of its prefill is in flight and it runs already: `base_generated` counts that token."""
    join: int = 0
    """The how-manieth join of the running batch put it there; 0 outside."""
    retracted: bool = False
    """Retracted, and not prefilled again yet: results still in flight for it are thrown away."""
    retractions: int = 0
    prefilled_tokens: int = 0
    """Tokens computed in prefill over all attempts; what exceeds the first attempt was computed twice."""
    admit_fs: int = -1
    first_token_fs: int = -1
    finish_fs: int = -1
    outcome: str = ""
    reason: str = ""

    @property
    def sequence_tokens(self) -> int:
        """Tokens that a prefill must cover: the prompt and what was generated before a retraction."""
        return self.input_tokens + self.generated
