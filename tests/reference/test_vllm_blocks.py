"""vLLM's own block manager beside ours, operation by operation and block by block."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagestorm.engine.vllm import VllmLimits, fits
from pagestorm.memory.block_pool import BlockPool
from pagestorm_real.reference import environment
from pagestorm_real.reference.client import ReferenceProcess

CASES = 20_000 if os.environ.get("PAGESTORM_FUZZ") else 400
BATCH = 25
"""Cases in one message."""

Op = tuple[Any, ...]


@dataclass
class Case:
    """A pool and what is done to it."""

    limits: VllmLimits
    ops: list[Op]

    def told(self) -> dict[str, Any]:
        limits = self.limits
        return {
            "block_size": limits.block_size,
            "num_blocks": limits.num_blocks,
            "max_model_len": limits.max_model_len,
            "prefix_caching": True,
            "watermark": limits.watermark,
            "lookahead": limits.lookahead_tokens,
            "ops": self.ops,
        }


@dataclass
class Ours:
    """The same operations on our pool, decided by our functions."""

    limits: VllmLimits
    pool: BlockPool = field(init=False)
    known: dict[int, int] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.limits.num_blocks, self.limits.block_size)

    def enter(self, number: int, input_tokens: int, prefix: Any, tokens: int, running: bool) -> Any:
        limits, pool = self.limits, self.pool
        sequence = self.known.setdefault(number, input_tokens)
        text = pool.text(number, prefix, input_tokens)
        hit = pool.lookup(text, sequence)
        tokens = min(tokens, sequence - hit.tokens)
        if not fits(limits, sequence, hit, tokens, pool.free_blocks, int(running)):
            return None
        pool.adopt(number, text, hit)
        self._take(number, hit.tokens, hit.tokens + tokens, fresh=True)
        return [hit.tokens, pool.table(number)]

    def grow(self, number: int, tokens: int) -> Any:
        limits, pool, computed = self.limits, self.pool, self.computed[number]
        tokens = min(tokens, self.known[number] - computed)
        held = len(pool.table(number))
        if limits.blocks(limits.room(computed + tokens)) - held > pool.free_blocks:
            return None
        self._take(number, computed, computed + tokens)
        return pool.table(number)[held:]

    def give(self, number: int) -> Any:
        self.pool.give([number])
        del self.computed[number]
        return self.pool.queue()

    def _take(self, number: int, old: int, new: int, fresh: bool = False) -> None:
        limits = self.limits
        old_room = old if fresh else limits.room(old)
        self.pool.take(*np.array([[number], [old_room], [limits.room(new)], [new]]))
        self.computed[number] = new
        if new == self.known[number]:
            self.known[number] = new + 1


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Operations that make sense one after another, as far as can be told without running them."""
    size = draw(st.sampled_from([1, 2, 4, 16]))
    blocks = draw(st.integers(2, 24))
    longest = (blocks - 1) * size
    limits = VllmLimits(
        num_blocks=blocks,
        block_size=size,
        max_model_len=longest,
        max_num_seqs=64,
        max_num_batched_tokens=longest,
        watermark=draw(st.sampled_from([0.0, 0.0, 0.1, 0.3])),
        lookahead_tokens=draw(st.sampled_from([0, 0, 3])),
    )
    # Our own answers say who holds blocks: an operation on a request that holds none makes no sense.
    ours, ops = Ours(limits), list[Op]()
    inputs: dict[int, tuple[int, list[list[int]]]] = {}
    for _ in range(draw(st.integers(4, 30))):
        holding = sorted(ours.computed)
        kind = draw(st.sampled_from(["enter", "enter", "grow", "grow", "grow", "give"] if holding else ["enter"]))
        if kind == "enter":
            number = draw(st.integers(0, 7))
            if number in ours.computed or ours.known.get(number, 0) > longest:
                continue
            if number not in inputs:
                run = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3 * size + 1)).map(list), max_size=2)
                inputs[number] = (draw(st.integers(1, max(1, longest - 1))), draw(run))
            op: Op = ("enter", number, *inputs[number], draw(st.integers(1, longest)), draw(st.booleans()))
        elif kind == "grow":
            number = draw(st.sampled_from(holding))
            if ours.known[number] > longest:
                continue
            op = ("grow", number, draw(st.sampled_from([1, 1, size, longest])))
        else:
            op = ("give", draw(st.sampled_from(holding)))
        ops.append(op)
        getattr(ours, op[0])(*op[1:])
    return Case(limits, ops)


@pytest.fixture(scope="module")
def vllm() -> Iterator[ReferenceProcess]:
    if problem := environment.problem("vllm"):
        pytest.skip(problem)
    with ReferenceProcess("vllm") as process:
        yield process


def test_every_block_and_every_refusal_is_vllms_own(vllm: ReferenceProcess) -> None:
    """Hits, admissions with and without the watermark, growth, evictions, the order of the free queue."""
    seen = {"refused": 0, "hit": 0, "operations": 0, "cases": 0}

    @given(st.lists(cases(), min_size=BATCH, max_size=BATCH))
    @settings(max_examples=CASES // BATCH, deadline=None, suppress_health_check=list(HealthCheck))
    def one(batch: list[Case]) -> None:
        answers = vllm.request("blocks", cases=[case.told() for case in batch])["answers"]
        for case, answer in zip(batch, answers, strict=True):
            ours = Ours(case.limits)
            for op, (given_there, free) in zip(case.ops, answer, strict=True):
                given_here = getattr(ours, op[0])(*op[1:])
                assert (op, given_here, ours.pool.free_blocks) == (op, given_there, free)
                seen["refused"] += given_here is None
                seen["hit"] += op[0] == "enter" and bool(given_here) and given_here[0] > 0
                seen["operations"] += 1
            ours.pool.audit()
            seen["cases"] += 1

    one()
    assert seen["cases"] >= CASES
    assert seen["refused"] > seen["cases"] / 10, seen
    assert seen["hit"] > seen["cases"] / 10, seen
