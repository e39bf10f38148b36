"""What vLLM decides, as functions from a view of the state to a decision: no clock, no mutation.

Source: vllm 0.33.0, `v1/core/sched/scheduler.py` (`Scheduler.schedule`, the synchronous one),
`v1/core/kv_cache_manager.py` (`allocate_slots`), `v1/core/sched/utils.py` (`check_stop`),
`v1/core/kv_cache_planning.py`, `v1/engine/input_processor.py`, `renderers/params.py`; the function that a decision
follows is named at each. One group of full-attention layers, no connector, no drafts but room for them (lookahead).

A pass has one budget of tokens. Running requests take from it first, in the order in which they were admitted, then
waiting ones; prompts and decode steps are not told apart:

    running   | a: 1 | b: 1 | c: 512 of its prompt | d: 1 |
    waiting                                                | e: 300 | f: 1233, cut by the budget |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pagestorm.memory.blocks import Hit
from pagestorm.memory.ledger import Ints

POLICIES = ("fcfs", "priority")

# --- what bounds a run -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VllmLimits:
    """What the flags resolved to; names are the engine's own."""

    num_blocks: int
    """num_gpu_blocks, the null block included."""
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str = "fcfs"
    watermark: float = 0.0
    lookahead_tokens: int = 0
    """Slots held past the scheduled tokens for a drafter (num_lookahead_tokens)."""
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    enable_chunked_prefill: bool = True
    reserve_full_sequence: bool = True
    """scheduler_reserve_full_isl: admit only what fits whole, not just its first chunk."""

    @property
    def watermark_blocks(self) -> int:
        """Blocks kept free when something is admitted beside running requests (`KVCacheManager.__init__`)."""
        return int(self.watermark * self.num_blocks)

    def blocks(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def room(self, computed: int) -> int:
        """Slots that a request with this many computed tokens holds: the drafter's on top, never past the context."""
        return min(computed + self.lookahead_tokens, self.max_model_len)

    def prefill_cap(self, requests: int) -> int:
        """Most tokens of one request in a pass when `requests` run or wait; 0 for no cap."""
        cap = self.long_prefill_token_threshold
        if requests <= 1 or cap <= 0:
            return 0
        return max(cap, self.max_num_batched_tokens // requests) if self.long_prefill_token_threshold_adaptive else cap


def startup_refusal(max_model_len: int, num_blocks: int, block_size: int, block_bytes: int | None = None) -> str:
    """Why the engine does not start, or an empty string: one request of max_model_len must fit in the pool, the null
    block left out (`_check_enough_kv_cache_memory`). `block_bytes` is one block in all layers of a rank."""
    needed = -(-max_model_len // block_size)
    usable = num_blocks - 1
    if usable <= 0:
        return "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`."
    if needed <= usable:
        return ""
    if block_bytes is None:
        size = f"({needed} blocks of KV cache are needed, which is larger than the available {usable} blocks)"
    else:
        size = (
            f"({_gib(needed * block_bytes)} GiB KV cache is needed, which is larger than the available KV cache memory "
            f"({_gib(usable * block_bytes)} GiB)"
        )
    return (
        f"To serve at least one request with the model's max seq len ({max_model_len}), {size}. Based on the available "
        f"memory, the estimated maximum model length is {usable * block_size}. Try increasing "
        "`gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
    )


def _gib(size_bytes: int) -> float:
    return round(size_bytes / (1 << 30), 2)


# --- arrival ---------------------------------------------------------------------------------------------------


def refusal(input_tokens: int, asked_tokens: int, max_model_len: int) -> str:
    """The server's answer to a request that it turns away, or an empty string.

    In the order of the HTTP server's checks: `TokenizeParams`, then `SamplingParams` over the clipped max_tokens; the
    engine's own (`InputProcessor._validate_prompt_len`) comes behind them and finds nothing more.
    """
    if asked_tokens > max_model_len:
        return (
            f"max_tokens={asked_tokens} cannot be greater than max_model_len={max_model_len}. "
            f"Please request fewer output tokens. (parameter=max_tokens, value={asked_tokens})"
        )
    if input_tokens > max_model_len:
        least = "at least " if input_tokens == max_model_len + 1 else ""
        return (
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{least}{input_tokens} input tokens, which exceeds this limit even without any output tokens. "
            f"Please reduce the length of the input prompt. (parameter=input_tokens, value={input_tokens})"
        )
    new_tokens = clip(input_tokens, asked_tokens, max_model_len)
    if new_tokens < 1:
        return f"max_tokens must be at least 1, got {new_tokens}. (parameter=max_tokens, value={new_tokens})"
    return ""


def clip(input_tokens: int, asked_tokens: int, max_model_len: int) -> int:
    """max_tokens as the server passes it on (`get_max_tokens`); `check_stop` ends at max_model_len besides."""
    return min(asked_tokens, max_model_len - input_tokens)


# --- the running requests --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunningView:
    """The running requests, by place, as a pass finds them."""

    limits: VllmLimits
    computed: Sequence[int]
    wanted: Sequence[int]
    """Tokens that each would be given if the budget were endless."""
    budget: int
    free_blocks: int
    rank: Callable[[int], tuple[int, int]]
    """(priority, arrival) of the request at a place; the largest goes first. Asked for the priority policy alone."""
    give: Callable[[int], int]
    """Blocks that become free when the request at a place goes too: called once for each that goes, in order."""


@dataclass(slots=True)
class RunningPlan:
    """What the running requests get. `actions` in the engine's order: (place, tokens); tokens 0 means preempted.

    A request may be preempted after it was given tokens in the same pass; `granted` has those that keep theirs.
    """

    actions: list[tuple[int, int]] = field(default_factory=list)
    granted: dict[int, int] = field(default_factory=dict)
    preempted: list[int] = field(default_factory=list)


def schedule_running(view: RunningView) -> RunningPlan:
    """Tokens for the running requests, and who is preempted for want of blocks (first loop of `schedule`).

    A request that finds no blocks preempts the last of the running ones, or under the priority policy the one with the
    largest (priority, arrival), until it fits or was itself the victim. What a victim was given in this pass goes
    back to the budget.
    """
    limits, plan = view.limits, RunningPlan()
    order = list(range(len(view.computed)))
    taken: dict[int, int] = {}
    budget, free = view.budget, view.free_blocks
    at = 0
    while at < len(order) and budget > 0:
        place = order[at]
        computed = view.computed[place]
        tokens = min(view.wanted[place], budget)
        need = limits.blocks(limits.room(computed + tokens)) - limits.blocks(limits.room(computed))
        gone = False
        while need > free and not gone:
            victim = _victim(limits.policy, order, view.rank)
            if order.index(victim) < at:
                at -= 1
            order.remove(victim)
            budget += plan.granted.pop(victim, 0)
            free += view.give(victim) + taken.pop(victim, 0)
            plan.preempted.append(victim)
            plan.actions.append((victim, 0))
            gone = victim == place
        if gone:
            continue
        plan.granted[place] = tokens
        plan.actions.append((place, tokens))
        taken[place] = need
        budget -= tokens
        free -= need
        at += 1
    return plan


def _victim(policy: str, order: Sequence[int], rank: Callable[[int], tuple[int, int]]) -> int:
    """Who goes: the last admitted, or the least important; the first of equals."""
    return order[-1] if policy == "fcfs" else max(order, key=rank)


# --- admission -------------------------------------------------------------------------------------------------


def first_tokens(limits: VllmLimits, sequence_tokens: int, hit_tokens: int, budget: int, cap: int) -> int:
    """Tokens that a waiting request would be given in its first pass; 0 when it may not be cut and must be."""
    tokens = sequence_tokens - hit_tokens
    if 0 < cap < tokens:
        tokens = cap
    if not limits.enable_chunked_prefill and tokens > budget:
        return 0
    return min(tokens, budget)


def fits(limits: VllmLimits, sequence_tokens: int, hit: Hit, tokens: int, free_blocks: int, running: int) -> bool:
    """Whether a waiting request may have its blocks (`KVCacheManager.allocate_slots`).

    The whole sequence must fit, then what this pass needs with the drafter's room. The watermark stays free while
    anything runs. Blocks of the hit that nobody holds count as needed: adopting them takes them from the free ones.
    """
    spare = free_blocks - (limits.watermark_blocks if running else 0)
    if limits.reserve_full_sequence:
        whole = limits.blocks(min(sequence_tokens, limits.max_model_len))
        if whole - len(hit.blocks) + hit.free > spare:
            return False
    return new_blocks(limits, hit, tokens) + hit.free <= spare


def new_blocks(limits: VllmLimits, hit: Hit, tokens: int) -> int:
    """Blocks that a request takes with its first `tokens` tokens, beyond those of its hit."""
    return max(limits.blocks(limits.room(hit.tokens + tokens)) - len(hit.blocks), 0)


# --- leaping ---------------------------------------------------------------------------------------------------


def blocks_to_open(limits: VllmLimits, computed: Ints) -> int:
    """Blocks that these requests need for one more token each."""
    size = limits.block_size
    if not limits.lookahead_tokens:
        return len(computed) - int(np.count_nonzero(computed % size))
    room = computed + limits.lookahead_tokens
    return int(np.count_nonzero((room % size == 0) & (room < limits.max_model_len)))


def block_steps(room: Ints, block_size: int, free_blocks: int) -> int:
    """For how many decode steps in a row `free_blocks` suffice for requests that hold `room` slots each.

    A request opens a block at the steps s (from 0) with (room + s) % block_size == 0, so over block_size steps each
    opens exactly one; the rest follows from the sorted phases.
    """
    cycles, more = divmod(free_blocks, len(room))
    if block_size == 1:
        return cycles
    phases = np.sort(-room % block_size)
    return cycles * block_size + int(phases[more])


def stays_out(limits: VllmLimits, sequence_tokens: int, hit: Hit, free_blocks: int) -> bool:
    """Whether a waiting request cannot be admitted while running requests only decode, prefix cache and all.

    What they take may evict blocks of the hit, which needs no fewer blocks then; only a copy that somebody holds may
    step in for an evicted one, which spares one block for the one taken. Without the full-sequence test a shorter
    hit can be *easier* to admit, so nothing is certain.
    """
    if not limits.reserve_full_sequence:
        return False
    whole = limits.blocks(min(sequence_tokens, limits.max_model_len))
    return whole - len(hit.blocks) + hit.free + limits.watermark_blocks > free_blocks
