"""The prefix cache beside the naive one, beside SGLang's own with both its cores, on every kind of ledger."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from pagestorm.errors import PoolCorruption
from pagestorm.memory.counting import CountingLedger
from pagestorm.memory.eviction import POLICIES
from pagestorm.memory.ledger import Ledger
from pagestorm.memory.prefix import Insertion, Match, PrefixTree
from pagestorm.memory.prefix_cache import Lease, PrefixCache
from pagestorm.memory.text import Text, tokens_in
from pagestorm_real.reference import environment
from pagestorm_real.reference.client import ReferenceProcess
from tests.memory.kinds import skip_where_absent
from tests.memory.prefix_canaries import CANARIES, FOUND, Canary
from tests.memory.prefix_moves import PAGE_SIZES, Moves
from tests.memory.prefix_sides import ROWS, Simulated, first_difference, replay

HUNT = bool(os.environ.get("PAGESTORM_FUZZ"))
STEPS = 60
BLOCK_TOKENS = 512


@pytest.fixture(scope="module")
def sglang() -> Iterator[ReferenceProcess]:
    """One server for all the sequences."""
    if problem := environment.problem("sglang"):
        pytest.skip(problem)
    with ReferenceProcess("sglang") as process:
        yield process


# --- beside the naive cache --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_any_sequence_leaves_the_cache_where_the_naive_one_is(page_size: int, policy: str) -> None:
    for seed in range(100 if HUNT else 6):
        moves = Moves(seed, page_size, policy).run(STEPS)
        difference = first_difference(moves.operations, moves.states, replay(Simulated(moves.setup), moves.operations))
        assert difference is None, (seed, moves.setup, difference)


class Tally(PrefixCache):
    """Counts what it does."""

    counts: ClassVar[Counter[str]] = Counter()

    def match(self, text: Text, limit: int | None = None) -> Match:
        match = super().match(text, limit)
        self.counts.update(hit=match.length > 0, split=match.split is not None)
        return match

    def checkpoint(self, lease: Lease, text: Text, tokens: int, prompt: int) -> Insertion:
        done = super().checkpoint(lease, text, tokens, prompt)
        self.counts.update(split=done.split is not None, duplicate=len(done.duplicates), leaf=done.leaf is not None)
        return done

    def evict(self, tokens: int) -> int:
        evicted = super().evict(tokens)
        self.counts.update(evicted=evicted > 0)
        return evicted


def test_the_sequences_reach_what_they_are_for() -> None:
    Tally.counts.clear()
    for seed in range(40):
        moves = Moves(seed).run(STEPS)
        replay(Simulated(moves.setup, make_cache=Tally), moves.operations)
    wanted = {"hit": 250, "split": 60, "duplicate": 25, "leaf": 150, "evicted": 300}
    assert {name: Tally.counts[name] for name in wanted if Tally.counts[name] < wanted[name]} == {}


def look_for(canary: Canary) -> None:
    """Raises when a sequence shows that the cache is broken."""
    for seed in range(60):
        moves = Moves(seed, policy=canary.policy).run(STEPS)
        got = replay(Simulated(moves.setup, canary.tree, canary.cache), moves.operations)
        difference = first_difference(moves.operations, moves.states, got)
        assert difference is None, difference


@pytest.mark.parametrize("canary", CANARIES.values(), ids=CANARIES)
def test_a_broken_cache_is_found_beside_the_naive_one(canary: Canary) -> None:
    with pytest.raises(FOUND):
        look_for(canary)


@pytest.mark.parametrize("canary", CANARIES.values(), ids=CANARIES)
def test_its_own_audit_finds_it_where_it_can(canary: Canary) -> None:
    """Orders and counts that are wrong everywhere are only wrong beside another cache."""
    found = False
    for seed in range(60):
        moves = Moves(seed, policy=canary.policy).run(STEPS)
        try:
            replay(Simulated(moves.setup, canary.tree, canary.cache), moves.operations)
        except PoolCorruption:
            found = True
        except FOUND:
            # It stumbled before the audit: the sequence was made for a cache that works.
            continue
    assert found or not canary.audit_sees_it


# --- beside the engine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("core", ["rust", "python"])
def test_the_engine_s_own_cache_goes_the_same_way(sglang: ReferenceProcess, core: str) -> None:
    """Matched and evicted tokens, sizes, tree, locks, rows and the free list after each operation."""
    for seed in range(10_000 if HUNT else 250):
        moves = Moves(seed if core == "rust" else -1 - seed).run(STEPS)
        setup = moves.setup
        answer = sglang.request(
            "prefix",
            page_size=setup.page_size,
            pool_tokens=setup.pages * setup.page_size,
            rows=ROWS,
            core=core,
            policy=setup.policy,
            tuning=setup.tuning,
            bigram=setup.bigram,
            operations=moves.operations,
        )
        assert answer["error"] is None, (seed, setup, answer["error"])
        ours = replay(Simulated(setup), moves.operations)
        difference = first_difference(moves.operations, answer["states"], ours)
        assert difference is None, (seed, setup, difference)


# --- on other ledgers --------------------------------------------------------------------------------------------


def test_every_kind_of_ledger_follows_the_tree() -> None:
    """Counting, paged and torch in lockstep, with everything that was written read back on the way."""
    skip_where_absent("torch-cpu")
    from pagestorm_real import TorchLedger

    for seed in range(60 if HUNT else 20):
        moves = Moves(seed).run(STEPS)
        pages, p = moves.setup.pages, moves.setup.page_size
        others: list[Ledger] = [
            CountingLedger(pages, p, ROWS + pages),
            TorchLedger(pages, p, ROWS, pages * p, nodes=pages),
        ]
        side = Simulated(moves.setup, others=others)
        difference = first_difference(moves.operations, moves.states, replay(side, moves.operations))
        assert difference is None, (seed, moves.setup, difference)


# --- by reference ------------------------------------------------------------------------------------------------


def mooncake(shared: Path) -> list[tuple[Text, int]]:
    """(prompt, output tokens) of each request of the public conversation trace, a source for each hashed block."""
    requests = []
    with (shared / "data/traces/mooncake_fast25_conversation.jsonl").open() as lines:
        for line in lines:
            row = json.loads(line)
            n = row["input_length"]
            blocks = enumerate(row["hash_ids"])
            spans = [(block, 0, min(BLOCK_TOKENS, n - place * BLOCK_TOKENS)) for place, block in blocks]
            requests.append((tuple(spans), row["output_length"]))
    return requests


@pytest.mark.parametrize("page_size", [1, 64])
def test_a_trace_of_145_million_tokens_costs_a_handful_of_objects_a_request(shared: Path, page_size: int) -> None:
    requests = mooncake(shared)
    pages = 1_000_000 // page_size
    ledger = CountingLedger(pages, page_size, 2 + pages)
    cache = PrefixCache(PrefixTree(page_size, first_owner=2), ledger)
    hit = most = 0
    for number, (prompt, out) in enumerate(requests):
        n = tokens_in(prompt)
        match = cache.match(prompt, n - 1)
        lease = cache.admit(1, match)
        cache.make_room(n + out - match.length + page_size)
        assert ledger.extend(np.array([1]), np.array([n + out - match.length])) is not None
        cache.finish(lease, (*prompt, (-1 - number, 0, out)), n + out, n)
        hit += match.length
        if number % 500 == 0:
            most = max(most, sum(len(node.key) for node in cache.tree.walk()))
    cache.audit()
    assert sum(tokens_in(prompt) for prompt, _ in requests) > 144_000_000
    assert most < 4 * 1_000_000 / BLOCK_TOKENS
    assert 0.04 < hit / sum(tokens_in(prompt) for prompt, _ in requests) < 0.5


def test_a_cache_and_its_ledger_have_pages_of_one_size() -> None:
    with pytest.raises(ValueError, match="a tree of pages of 4 over a ledger of pages of 2 tokens"):
        PrefixCache(PrefixTree(4), CountingLedger(8, 2, 16))


def test_sizes_add_up_to_the_pool_while_requests_come_and_go() -> None:
    rng = random.Random(5)
    pages, p = 64, 4
    ledger = CountingLedger(pages, p, 12 + pages)
    cache = PrefixCache(PrefixTree(p, first_owner=12), ledger)
    leases: dict[int, tuple[Lease, Text, int]] = {}
    for number in range(300):
        row = rng.randrange(12)
        if row in leases:
            lease, text, prompt = leases.pop(row)
            if rng.random() < 0.7:
                cache.finish(lease, text, ledger.length(row), prompt)
            else:
                cache.release(lease, ledger.length(row))
        else:
            text = ((rng.randrange(3), 0, rng.randint(1, 30)), (100 + number, 0, rng.randint(1, 20)))
            n = tokens_in(text)
            lease = cache.admit(row, match := cache.match(text, n - 1))
            cache.make_room(n - match.length + p)
            if ledger.extend(np.array([row]), np.array([n - match.length])) is None:
                cache.release(lease, match.length)
                continue
            cache.checkpoint(lease, text, n, n)
            leases[row] = lease, text, n
        total = cache.available + cache.evictable + cache.protected + cache.uncached
        assert total == pages * p
        cache.audit()
