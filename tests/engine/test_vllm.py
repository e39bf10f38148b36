"""vLLM's decisions, its block pool and its machine. Whether vLLM agrees: tests/reference/test_vllm_server.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagestorm.engine.vllm import (
    RunningView,
    VllmLimits,
    block_steps,
    blocks_to_open,
    clip,
    first_tokens,
    fits,
    refusal,
    schedule_running,
    startup_refusal,
    stays_out,
)
from pagestorm.engine.vllm_request import VllmRequest
from pagestorm.engine.waiting import ArrivalQueue, PriorityQueue
from pagestorm.errors import PoolCorruption
from pagestorm.memory.block_pool import BlockPool
from pagestorm.memory.blocks import NO_HIT, Hit
from pagestorm.memory.paged import PagedLedger
from tests.cases.public import cases
from tests.engine.drive_vllm import Ask, Drive, drive, drives

LIMITS = VllmLimits(num_blocks=101, block_size=16, max_model_len=1600, max_num_seqs=8, max_num_batched_tokens=512)


def running(
    limits: VllmLimits,
    computed: list[int],
    wanted: list[int],
    free_blocks: int,
    *,
    budget: int = 512,
    ranks: list[tuple[int, int]] | None = None,
) -> RunningView:
    """A view in which every request owns its blocks alone."""
    return RunningView(
        limits=limits,
        computed=computed,
        wanted=wanted,
        budget=budget,
        free_blocks=free_blocks,
        rank=lambda place: ranks[place] if ranks else (0, place),
        give=lambda place: limits.blocks(limits.room(computed[place])),
    )


# --- the running requests --------------------------------------------------------------------------------------


def test_requests_take_from_one_budget_in_running_order() -> None:
    plan = schedule_running(running(LIMITS, [16, 100, 32], [1, 300, 300], 100, budget=400))
    assert plan.granted == {0: 1, 1: 300, 2: 99}
    assert not plan.preempted


def test_the_last_admitted_goes_first_and_the_one_in_need_keeps_its_place() -> None:
    plan = schedule_running(running(LIMITS, [16, 32, 48], [1, 1, 1], 0))
    assert plan.preempted == [2]
    assert plan.granted == {0: 1, 1: 1}
    assert plan.actions == [(2, 0), (0, 1), (1, 1)]


def test_a_request_alone_without_blocks_preempts_itself() -> None:
    plan = schedule_running(running(LIMITS, [16], [1], 0))
    assert plan.preempted == [0]
    assert not plan.granted


def test_preemption_goes_on_until_the_request_fits() -> None:
    plan = schedule_running(running(LIMITS, [16, 16, 16], [30, 1, 1], 0))
    assert plan.preempted == [2, 1]
    assert plan.granted == {0: 30}


def test_under_priority_the_largest_priority_and_arrival_goes_wherever_it_is() -> None:
    limits = replace(LIMITS, policy="priority")
    plan = schedule_running(running(limits, [15, 32, 40], [1, 1, 1], 0, ranks=[(5, 0), (0, 1), (0, 2)]))
    assert plan.preempted == [0]
    assert plan.granted == {1: 1, 2: 1}, "request 0 had its token already and lost it; its block went to request 1"


def test_a_victim_gives_its_tokens_back_to_the_budget() -> None:
    limits = replace(LIMITS, policy="priority")
    view = running(limits, [1, 160, 17], [14, 1, 10], 0, budget=16, ranks=[(9, 0), (0, 1), (0, 2)])
    plan = schedule_running(view)
    assert plan.actions == [(0, 14), (0, 0), (1, 1), (2, 10)]
    assert plan.preempted == [0]
    assert plan.granted == {1: 1, 2: 10}


def test_the_first_of_equal_victims_goes() -> None:
    limits = replace(LIMITS, policy="priority")
    plan = schedule_running(running(limits, [16, 16, 16], [1, 1, 1], 0, ranks=[(1, 7), (1, 7), (0, 7)]))
    assert plan.preempted[0] == 0


# --- admission -------------------------------------------------------------------------------------------------


def test_the_whole_sequence_must_fit_unless_only_the_first_chunk_is_asked_for() -> None:
    assert not fits(LIMITS, 1000, NO_HIT, 512, free_blocks=62, running=0)
    assert fits(LIMITS, 1000, NO_HIT, 512, free_blocks=63, running=0)
    assert fits(replace(LIMITS, reserve_full_sequence=False), 1000, NO_HIT, 512, free_blocks=32, running=0)


def test_the_watermark_stays_free_only_while_something_runs() -> None:
    limits = replace(LIMITS, watermark=0.1)
    assert limits.watermark_blocks == 10
    assert replace(limits, num_blocks=100).watermark_blocks == 10, "the null block counts"
    assert fits(limits, 160, NO_HIT, 160, free_blocks=10, running=0)
    assert not fits(limits, 160, NO_HIT, 160, free_blocks=19, running=1)
    assert fits(limits, 160, NO_HIT, 160, free_blocks=20, running=1)


def test_blocks_of_a_hit_that_nobody_holds_are_needed_too() -> None:
    held, unheld = Hit(64, (1, 2, 3, 4), 0), Hit(64, (1, 2, 3, 4), 4)
    assert fits(LIMITS, 160, held, 96, free_blocks=6, running=1)
    assert not fits(LIMITS, 160, unheld, 96, free_blocks=9, running=1)
    assert fits(LIMITS, 160, unheld, 96, free_blocks=10, running=1)
    assert not fits(LIMITS, 160, unheld, 16, free_blocks=9, running=1), "the whole sequence, not just this chunk"


def test_the_drafters_room_counts_and_ends_at_the_context() -> None:
    limits = replace(LIMITS, lookahead_tokens=3, max_model_len=160)
    assert not fits(limits, 160 - 18, NO_HIT, 160 - 18, free_blocks=9, running=0)
    assert fits(limits, 160 - 3, NO_HIT, 160 - 3, free_blocks=10, running=0)
    assert limits.room(159) == 160


def test_long_prompts_are_capped_only_beside_others() -> None:
    limits = replace(LIMITS, long_prefill_token_threshold=100)
    assert limits.prefill_cap(1) == 0
    assert limits.prefill_cap(2) == 100
    assert replace(limits, long_prefill_token_threshold_adaptive=True).prefill_cap(2) == 256
    assert first_tokens(limits, 300, 0, 512, limits.prefill_cap(2)) == 100


def test_without_chunked_prefill_a_prompt_enters_whole_or_not_at_all() -> None:
    limits = replace(LIMITS, enable_chunked_prefill=False)
    assert first_tokens(limits, 300, 0, 299, 0) == 0
    assert first_tokens(limits, 300, 16, 299, 0) == 284
    assert first_tokens(LIMITS, 300, 0, 299, 0) == 299


@given(
    st.integers(1, 60),
    st.integers(0, 12),
    st.integers(0, 12),
    st.integers(0, 30),
    st.integers(0, 30),
    st.sampled_from([0.0, 0.1]),
)
def test_what_stays_out_is_not_admitted_however_much_running_requests_take_and_evict(
    sequence: int, hit_blocks: int, unheld: int, free: int, taken: int, watermark: float
) -> None:
    limits = replace(LIMITS, block_size=4, watermark=watermark)
    hit_blocks = min(hit_blocks, (sequence - 1) // 4)
    unheld = min(unheld, hit_blocks)
    hit = Hit(4 * hit_blocks, tuple(range(hit_blocks)), unheld)
    if not stays_out(limits, sequence, hit, free):
        return
    taken = min(taken, free)
    for evicted in range(min(taken, unheld) + 1):
        # The evicted ones come from the tail of the hit: it gets shorter, and fewer of its blocks are unheld.
        left = Hit(hit.tokens - 4 * evicted, hit.blocks[: hit_blocks - evicted], unheld - evicted)
        tokens = first_tokens(limits, sequence, left.tokens, 512, 0)
        assert not fits(limits, sequence, left, tokens, free - taken, running=1)


# --- arrival and start -------------------------------------------------------------------------------------------


def test_a_prompt_as_long_as_the_context_is_refused_and_a_shorter_one_is_clipped() -> None:
    assert refusal(99, 50, 100) == ""
    assert clip(99, 50, 100) == 1
    assert "must be at least 1, got 0" in refusal(100, 50, 100)
    assert "maximum context length is 100 tokens" in refusal(101, 50, 100)
    assert "max_tokens=101 cannot be greater than max_model_len=100" in refusal(10, 101, 100)
    assert "must be at least 1, got 0" in refusal(10, 0, 100)


def test_the_engine_starts_only_when_one_longest_request_fits_beside_the_null_block() -> None:
    assert startup_refusal(1600, 101, 16) == ""
    told = startup_refusal(1601, 101, 16, block_bytes=1 << 20)
    assert "max seq len (1601)" in told
    assert "estimated maximum model length is 1600" in told
    assert startup_refusal(1, 1, 16) != ""


# --- queues ------------------------------------------------------------------------------------------------------


def queued(number: int, arrive_fs: int, priority: int) -> VllmRequest:
    return VllmRequest(number, arrive_fs, 1, 1, 1, priority=priority)


def test_the_preempted_go_to_the_front_of_arrivals_and_to_their_place_by_priority() -> None:
    requests = [queued(0, 5, 1), queued(1, 6, 0), queued(2, 6, 1), queued(3, 6, 1)]
    arrivals, priorities = ArrivalQueue(), PriorityQueue()
    for queue in (arrivals, priorities):
        for request in requests[:3]:
            queue.push(request)
        queue.put_back(requests[3])
        assert len(queue) == 4
    assert [r.number for r in arrivals] == [3, 0, 1, 2]
    assert [r.number for r in priorities] == [1, 0, 2, 3]
    assert [priorities.pop().number for _ in range(4)] == [1, 0, 2, 3]
    assert arrivals.pop() is requests[3]
    assert arrivals.head is requests[0]


# --- the block pool ----------------------------------------------------------------------------------------------


def take(pool: BlockPool, row: int, tokens: int, *, number: int | None = None, prefix: Any = ()) -> Hit:
    """A request of `tokens` tokens is looked up, adopted and computed whole."""
    text = pool.text(row if number is None else number, prefix, tokens)
    hit = pool.lookup(text, tokens)
    pool.adopt(row, text, hit)
    pool.take(*np.array([[row], [hit.tokens], [tokens], [tokens]]))
    pool.audit()
    return hit


def test_block_zero_is_never_handed_out_and_blocks_go_out_in_order() -> None:
    pool = BlockPool(6, 16)
    assert pool.free_blocks == pool.total_blocks == 5
    take(pool, 1, 40)
    assert pool.table(1) == [1, 2, 3]


def test_whole_blocks_go_to_the_back_last_first_and_the_partial_one_to_the_front() -> None:
    pool = BlockPool(8, 16)
    take(pool, 1, 40)
    assert pool.give([1]) == 3
    assert pool.queue() == [3, 4, 5, 6, 7, 2, 1]
    assert pool.cached_blocks == 2


def test_a_hit_leaves_one_token_to_compute() -> None:
    pool = BlockPool(12, 16)
    take(pool, 1, 64, prefix=[(0, 64)])
    assert take(pool, 2, 64, prefix=[(0, 64)]).tokens == 48
    assert pool.table(2)[:3] == [1, 2, 3]
    assert take(pool, 3, 65, prefix=[(0, 64)]).tokens == 64


def test_of_equal_blocks_the_oldest_is_hit_until_it_is_reused() -> None:
    pool = BlockPool(5, 16)
    take(pool, 1, 16, prefix=[(0, 16)])
    take(pool, 2, 16, prefix=[(0, 16)])
    text = pool.text(3, [(0, 17)], 17)
    assert list(pool.lookup(text, 17).blocks) == [1]
    pool.give([1])
    take(pool, 3, 48)
    assert pool.evicted_blocks == 1
    assert list(pool.lookup(text, 17).blocks) == [2]


def test_a_preempted_request_hits_its_own_blocks_until_they_are_reused() -> None:
    pool = BlockPool(6, 16)
    take(pool, 1, 50, number=7)
    pool.give([1])
    text = pool.text(7, (), 50)
    assert pool.lookup(text, 51).tokens == 48
    take(pool, 2, 48)
    assert pool.lookup(text, 51).tokens == 32, "the tail of the chain goes first"


def test_a_preview_counts_what_two_victims_share_with_the_second() -> None:
    pool = BlockPool(12, 16)
    take(pool, 1, 40, prefix=[(0, 32)])
    take(pool, 2, 40, prefix=[(0, 32)])
    preview = pool.preview()
    assert [preview.give(2), preview.give(1)] == [1, 3]
    assert [pool.give([2]), pool.give([1])] == [1, 3]


def test_misuse_of_the_pool_is_corruption() -> None:
    pool = BlockPool(3, 16)
    take(pool, 1, 20)
    with pytest.raises(PoolCorruption, match="row 1 holds blocks already"):
        pool.adopt(1, pool.text(1, (), 1), NO_HIT)
    with pytest.raises(PoolCorruption, match="more blocks"):
        take(pool, 2, 16)


def tokens_of(number: int, prefix: list[tuple[int, int]], length: int) -> list[tuple[str, int, int]]:
    """The text itself, token by token."""
    text = [("group", group, i) for group, run in prefix for i in range(run)][:length]
    return text + [("own", number, i) for i in range(len(text), length)]


@given(
    st.lists(
        st.tuples(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9)), max_size=3), st.integers(1, 24)),
        min_size=2,
        max_size=4,
    )
)
def test_blocks_have_equal_keys_exactly_when_all_tokens_up_to_their_end_are_equal(prompts: Any) -> None:
    pool = BlockPool(10, 4)
    entries = []
    for number, (prefix, length) in enumerate(prompts):
        text, tokens = pool.text(number, prefix, length), tokens_of(number, prefix, length)
        entries += [(text.key(j), tuple(tokens[: 4 * (j + 1)])) for j in range(length // 4)]
    for key, start in entries:
        for other_key, other_start in entries:
            assert (key == other_key) == (start == other_start)


# --- leaping -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 200), min_size=1, max_size=12), st.sampled_from([1, 2, 16, 64]), st.integers(0, 40))
def test_the_horizon_is_the_last_step_that_the_free_blocks_serve(lengths: list[int], size: int, free: int) -> None:
    limits = replace(LIMITS, block_size=size, max_model_len=10**6)
    room = np.array(lengths, dtype=np.int64)
    steps, left = 0, free
    while (need := blocks_to_open(limits, room + steps)) <= left:
        left -= need
        steps += 1
    assert block_steps(room, size, free) == steps


@given(drives())
@settings(max_examples=150, deadline=None)
def test_leaping_equals_stepping(what: Drive) -> None:
    leapt, stepped = drive(what, max_steps=3000), drive(what, step_only=True, max_steps=3000)
    if leapt.engine.step == stepped.engine.step:
        assert leapt.digest == stepped.digest
        assert leapt.engine.now_fs == stepped.engine.now_fs
        assert leapt.engine.counts.generated_tokens == stepped.engine.counts.generated_tokens
        assert leapt.engine.counts.peak_used_pages == stepped.engine.counts.peak_used_pages
        assert leapt.engine.counts.running_fs == stepped.engine.counts.running_fs
    else:
        assert not leapt.engine.idle, "only a run that was cut may stop at different steps"


@given(drives().filter(lambda what: not what.prefix_caching))
@settings(max_examples=40, deadline=None)
def test_a_ledger_with_ids_serves_the_same_run_and_leaps_to_the_same_ids(what: Drive) -> None:
    def ledger() -> PagedLedger:
        return PagedLedger(what.limits.num_blocks - 1, what.limits.block_size, what.limits.max_num_seqs + 1)

    leapt = drive(what, ledger=ledger(), max_steps=500)
    stepped = drive(what, ledger=ledger(), step_only=True, max_steps=500)
    counted = drive(what, max_steps=500)
    assert leapt.digest == counted.digest
    if leapt.engine.step == stepped.engine.step:
        assert leapt.digest == stepped.digest


@given(drives())
@settings(max_examples=80, deadline=None)
def test_the_record_accounts_for_every_block(what: Drive) -> None:
    """What passes take and endings give back is what the events say is free; at the end nothing is held."""
    driven = drive(what, max_steps=1000)
    total, held, at = what.limits.num_blocks - 1, 0, 0
    events = [event for event in driven.events if event[3] not in ("arrive", "reject", "admit")]
    while at < len(events):
        kind, step = events[at][3], events[at][2]
        end = at + 1
        while end < len(events) and events[end][2] == step and (events[end][3] == "finish") == (kind == "finish"):
            end += 1
        for event in events[at:end]:
            held += event[6] * (-1 if event[3] in ("finish", "preempt") else 1)
        last = events[end - 1]
        assert last[7] + last[8] == total - held
        assert 0 <= held <= total
        at = end
    if driven.engine.idle:
        assert held == 0
        assert driven.engine.blocks.free_blocks == total


def test_decode_leaps_over_everything_uneventful() -> None:
    driven = drive(Drive([Ask(100, 1000, 1000)] * 4, replace(LIMITS, num_blocks=1001, max_model_len=2000)))
    assert driven.engine.step == 1000
    assert driven.engine.counts.leaps == 1


# --- whole runs --------------------------------------------------------------------------------------------------


def test_preemption_recomputes_and_nothing_is_lost() -> None:
    limits = replace(LIMITS, num_blocks=21, max_model_len=300)
    driven = drive(Drive([Ask(32, 150, 150) for _ in range(4)], limits))
    counts = driven.engine.counts
    assert counts.finished == 4
    assert counts.generated_tokens == 600
    assert counts.preemptions == len(driven.kinds("preempt")) > 0
    assert counts.recomputed_tokens == sum(tokens for *_, tokens in driven.kinds("preempt"))
    first = driven.kinds("preempt")[0]
    assert first[2] == 3, "the last admitted goes first"


def test_none_is_admitted_in_a_pass_that_preempted() -> None:
    """Preempting the large request makes room for the small one that waits; it enters in the pass after."""
    limits = replace(LIMITS, num_blocks=21, max_model_len=300, policy="priority")
    asks = [Ask(150, 100, 100, priority=1), Ask(150, 100, 100, priority=9), Ask(16, 5, 5, at_fs=1)]
    driven = drive(Drive(asks, limits))
    (at, _, victim, _) = driven.kinds("preempt")[0]
    assert victim == 1
    assert driven.kinds("admit")[:3] == [(0, "admit", 0, 150), (0, "admit", 1, 150), (at + 1, "admit", 2, 16)]


def test_what_was_preempted_enters_before_what_waited_longer() -> None:
    limits = replace(LIMITS, num_blocks=21, max_model_len=300, max_num_seqs=4)
    driven = drive(Drive([Ask(32, 150, 150) for _ in range(6)], limits))
    entered = driven.kinds("admit")[4:]
    victims = [request for step, _, request, _ in driven.kinds("preempt") if step < entered[0][0]]
    assert len(victims) > 1
    assert [request for *_, request, _ in entered[: len(victims)]] == victims[::-1], "the last preempted is in front"
    assert entered[len(victims)][2] == 4


def test_the_prefix_cache_spares_what_it_holds_and_counts_it() -> None:
    limits = replace(LIMITS, num_blocks=41, max_model_len=400)
    asks = [Ask(112, 40, 40, prefix=((0, 96),)) for _ in range(6)]
    cold, warm = drive(Drive(asks, limits)), drive(Drive(asks, limits, prefix_caching=True))
    assert warm.engine.counts.cached_tokens >= 5 * 96
    assert warm.engine.counts.preemptions < cold.engine.counts.preemptions


def test_a_stop_token_a_length_and_the_context_end_a_request() -> None:
    asks = [Ask(10, 5, 20), Ask(10, 20, 20), Ask(10, 5, 20, ignore_eos=True), Ask(10, 500, 500)]
    driven = drive(Drive(asks, replace(LIMITS, max_model_len=510)))
    assert {r: tokens for _, _, r, tokens in driven.kinds("finish")} == {0: 5, 1: 20, 2: 20, 3: 500}
    clipped = drive(Drive([Ask(500, 400, 400)], replace(LIMITS, max_model_len=510)))
    assert clipped.kinds("finish") == [(9, "finish", 0, 10)]


def test_a_head_that_no_pool_can_hold_stalls_the_queue_and_says_so() -> None:
    limits = replace(LIMITS, num_blocks=11, max_model_len=1000)
    driven = drive(Drive([Ask(200, 5, 5), Ask(10, 5, 5)], limits))
    assert driven.engine.outcome == "stalled"
    assert "request 0 can never be scheduled" in driven.engine.error
    assert [r.number for r in driven.engine.unserved()] == [0, 1]


def test_a_prompt_cut_into_chunks_that_never_completes_is_a_livelock() -> None:
    limits = replace(LIMITS, num_blocks=11, max_model_len=1000, max_num_batched_tokens=64, reserve_full_sequence=False)
    driven = drive(Drive([Ask(200, 5, 5)], limits))
    assert driven.engine.outcome == "livelocked"
    assert "preemptions in a row without one output token" in driven.engine.error


# --- public cases --------------------------------------------------------------------------------------------------


@pytest.fixture
def case(request: pytest.FixtureRequest, shared: Path) -> dict[str, Any]:
    return cases(shared, "vllm")[request.param]


def named(case_id: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [case_id], indirect=True)


def watermark_drive(given: dict[str, Any], seed: int, watermark: float) -> Drive:
    """Lengths uniform around the thread's means, drawn anew for each seed."""
    spread = given["range_ratio"]
    rng = np.random.default_rng(seed)
    inputs = rng.integers(round(1000 * (1 - spread)), round(1000 * (1 + spread)) + 1, given["requests"]).tolist()
    outputs = rng.integers(round(5000 * (1 - spread)), round(5000 * (1 + spread)) + 1, given["requests"]).tolist()
    limits = VllmLimits(
        num_blocks=given["pool_tokens"] // given["block_size"],
        block_size=given["block_size"],
        max_model_len=8192,
        max_num_seqs=given["concurrency"],
        max_num_batched_tokens=8192,
        watermark=watermark,
    )
    asks = [Ask(n, out, out) for n, out in zip(inputs, outputs, strict=True)]
    return Drive(asks, limits, given["prefix_caching"], given["concurrency"])


@named("watermark-table")
def test_preemptions_fall_with_the_watermark_as_the_public_table_says(case: dict[str, Any]) -> None:
    """vllm-project/vllm PR 44594: the mean of five draws is within a quarter of the table's one draw."""
    means = []
    for watermark, public in case["expect"]["preemptions_by_watermark"].items():
        runs = [drive(watermark_drive(case["given"], seed, watermark)).engine for seed in range(5)]
        assert all(engine.counts.finished == case["given"]["requests"] for engine in runs)
        means.append(sum(engine.counts.preemptions for engine in runs) / len(runs))
        assert abs(means[-1] - public) <= 0.25 * public, f"watermark {watermark}: {means[-1]} where {public} is public"
    assert means == sorted(means, reverse=True)


@named("first-chunk-livelock")
def test_admission_on_the_first_chunk_alone_preempts_the_last_prompt_over_and_over(case: dict[str, Any]) -> None:
    """vllm-project/vllm PR 37307, #25538."""
    given = case["given"]
    blocks = int(4.4 * given["input_tokens"] / 16)
    limits = replace(LIMITS, num_blocks=blocks + 1, max_model_len=131072, max_num_batched_tokens=8192)
    what = Drive([Ask(given["input_tokens"], 1000, 1000)] * given["requests"], limits)
    whole = drive(what).engine.counts
    chunk = drive(replace(what, limits=replace(limits, reserve_full_sequence=False))).engine.counts
    assert whole.preemptions == 0
    assert whole.recomputed_tokens == 0
    assert chunk.max_preemptions_per_request > 100
    assert chunk.recomputed_tokens > 10 * given["requests"] * given["input_tokens"]


@named("servable-ceiling")
def test_a_request_that_outgrows_the_pool_is_preempted_once_and_never_runs_again(case: dict[str, Any]) -> None:
    """vllm-project/vllm PR 52530. 0.33 does not start with a context that the pool cannot hold; past that check the
    request waits for ever, and within it the context ends the request."""
    given = case["given"]
    usable = given["servable_tokens"] // given["block_size"]
    asked = given["input_tokens"] + given["output_tokens"]
    limits = replace(LIMITS, block_size=given["block_size"], num_blocks=usable + 1, max_model_len=asked)
    assert startup_refusal(asked, usable + 1, given["block_size"]) != ""
    ask = Ask(given["input_tokens"], given["output_tokens"], given["output_tokens"])
    beyond = drive(Drive([ask], limits))
    assert beyond.engine.outcome == "stalled"
    assert len(beyond.kinds("preempt")) == 1
    assert [r.generated for r in beyond.engine.unserved()] == [9]
    within = drive(Drive([ask], replace(limits, max_model_len=given["servable_tokens"])))
    assert within.engine.counts.finished == 1
    assert not within.kinds("preempt")


@named("simulator-livelocks")
def test_what_can_never_fit_is_rejected_with_the_reason(case: dict[str, Any]) -> None:
    """inference-sim/inference-sim#297 and others."""
    given = case["given"]
    size = given["block_size"]
    limits = replace(LIMITS, num_blocks=given["blocks"], block_size=size, max_model_len=(given["blocks"] - 1) * size)
    assert given["blocks"] * size == case["expect"]["pool_tokens"]
    driven = drive(Drive([Ask(given["request_needs_blocks"] * size, 5, 5), Ask(16, 5, 5)], limits))
    assert driven.engine.counts.rejected == 1
    assert driven.engine.counts.finished == 1
    assert driven.engine.outcome == ""
    (told,) = [event[12] for event in driven.events if event[3] == "reject"]
    assert "maximum context length" in told


@named("simulator-livelocks")
def test_when_a_few_percent_are_preempted_none_is_preempted_often(case: dict[str, Any]) -> None:
    trace = case["given"]["instrumented_trace"]
    rng = np.random.default_rng(0)
    count = 4000
    arrivals = np.cumsum(rng.exponential(1 / 18, count))
    inputs, outputs = rng.integers(50, 500, count), rng.geometric(1 / 150, count).clip(1, 800)
    asks = [
        Ask(n, out, out, at_fs=round(at * 1e9) * 10**6)
        for at, n, out in zip(arrivals.tolist(), inputs.tolist(), outputs.tolist(), strict=True)
    ]
    limits = replace(LIMITS, num_blocks=2000, max_model_len=4096, max_num_seqs=256, max_num_batched_tokens=2048)
    counts = drive(Drive(asks, limits)).engine.counts
    share = trace["preempted"] / trace["requests"]
    assert share / 3 < counts.preempted_requests / count < 3 * share
    assert counts.finished == count
    assert counts.max_preemptions_per_request <= len(trace["by_count"]) + 1
