"""vLLM's own `KVCacheManager`, one operation after another: which blocks, by id, each request is given or refused.

Runs inside the reference environment. The operations and the answers are described at `run`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagestorm_real.reference.serving import BadPayload
from pagestorm_real.reference.vllm_engine import Engine, Flags, own_token, prompt

Answer = list[Any] | None


class Manager:
    """A manager and the requests that hold or held blocks of it."""

    def __init__(self, engine: Engine, case: dict[str, Any]) -> None:
        flags = Flags(
            block_size=int(case["block_size"]),
            num_blocks=int(case["num_blocks"]),
            max_model_len=int(case["max_model_len"]),
            max_num_batched_tokens=int(case["max_model_len"]),
            prefix_caching=bool(case.get("prefix_caching", False)),
            lookahead=int(case.get("lookahead", 0)),
            sliding_window=None,
            scheduler={"max_num_seqs": 1, "watermark": float(case.get("watermark", 0.0))},
        )
        core = engine.build(engine.scheduler, flags, lambda output: output)
        self.engine = engine
        self.lookahead = flags.lookahead
        self.hasher = engine.hasher(flags)
        self.status: Any = engine.status
        self.manager: Any = core.scheduler.kv_cache_manager
        self.pool: Any = self.manager.block_pool
        self.requests: dict[int, Any] = {}

    def enter(self, number: int, input_tokens: int, prefix: list[list[int]], tokens: int, running: bool) -> Answer:
        """Admission of a new or preempted request: [tokens of the prefix hit, its block ids], or None."""
        if number not in self.requests:
            self.requests[number] = self.engine.request_class(
                request_id=str(number),
                prompt_token_ids=prompt(number, input_tokens, prefix),
                sampling_params=self.engine.sampling(max_tokens=1),
                pooling_params=None,
                block_hasher=self.hasher,
            )
        request = self.requests[number]
        hit_blocks, hit, _ = self.manager.get_computed_blocks(request)
        tokens = min(tokens, request.num_tokens - hit)
        given = self.manager.allocate_slots(
            request,
            tokens,
            num_new_computed_tokens=hit,
            new_computed_blocks=hit_blocks,
            num_lookahead_tokens=self.lookahead,
            full_sequence_must_fit=True,
            has_scheduled_reqs=running,
        )
        if given is None:
            return None
        request.status = self.status.RUNNING
        request.num_computed_tokens = hit + tokens
        self._sample(request)
        return [hit, self.manager.get_block_ids(str(number))[0]]

    def grow(self, number: int, tokens: int) -> Answer:
        """More tokens of a running request: the ids of its new blocks, or None."""
        request = self._running(number)
        tokens = min(tokens, request.num_tokens - request.num_computed_tokens)
        given = self.manager.allocate_slots(request, tokens, num_lookahead_tokens=self.lookahead)
        if given is None:
            return None
        request.num_computed_tokens += tokens
        self._sample(request)
        ids: list[Any] = given.get_block_ids()[0]
        return ids

    def give(self, number: int) -> Answer:
        """Preemption: the free queue after it."""
        request = self._running(number)
        self.manager.free(request)
        request.status = self.status.PREEMPTED
        request.num_computed_tokens = 0
        return [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]

    def _sample(self, request: Any) -> None:
        if request.num_computed_tokens == request.num_tokens:
            request.append_output_token_ids(own_token(int(request.request_id), request.num_tokens))

    def _running(self, number: int) -> Any:
        request = self.requests.get(number)
        if request is None or request.status != self.status.RUNNING:
            raise BadPayload(f"request {number} holds nothing")
        return request


def run(engine: Engine, payload: dict[str, Any]) -> dict[str, Any]:
    """Many cases, each a pool of its own.

    `cases`: [{`block_size, num_blocks, max_model_len, prefix_caching, watermark, lookahead`, `ops`: [
    ["enter", request, input, prefix, tokens, running], ["grow", request, tokens], ["give", request]]}]. A request
    samples a token of its own whenever all it knows is computed. The answer has `answers`: for each case a list of
    [what the operation gave (see `Manager`), free blocks after it].
    """
    answers = []
    for case in payload["cases"]:
        manager = Manager(engine, case)
        called: dict[str, Callable[..., Answer]] = {"enter": manager.enter, "grow": manager.grow, "give": manager.give}
        answer: list[Any] = []
        for name, *arguments in case["ops"]:
            given = called[name](*arguments)
            answer.append([given, manager.pool.get_num_free_blocks()])
        answers.append(answer)
    return {"answers": answers}
