"""Drive the vLLM engine without SimPy: arrivals from a list or a closed loop, results as plain tuples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from pagestorm.engine.machine import FOREVER_FS
from pagestorm.engine.vllm import VllmLimits
from pagestorm.engine.vllm_iteration import VllmEngine
from pagestorm.engine.vllm_request import VllmRequest
from pagestorm.events import EventLog, KeepEvents, RawEvent
from pagestorm.memory.block_pool import BlockPool
from pagestorm.memory.blocks import Blocks, CountedBlocks
from pagestorm.memory.counting import CountingLedger
from pagestorm.memory.ledger import Ledger
from pagestorm.scenario.schema import Linear
from pagestorm.steptime import LinearStepTime

CLOCK = Linear(base_s=0.01, per_request_s=1e-4, per_context_token_s=2e-7, per_prefill_token_s=2e-5)


@dataclass(frozen=True)
class Ask:
    """One request of a drive: lengths in tokens, arrival in femtoseconds."""

    input: int
    out: int
    max_new: int
    ignore_eos: bool = False
    at_fs: int = 0
    priority: int = 0
    prefix: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Drive:
    """A server and its requests, in the order of their arrivals."""

    asks: Sequence[Ask]
    limits: VllmLimits
    prefix_caching: bool = False
    concurrency: int | None = None

    def requests(self) -> list[VllmRequest]:
        """Fresh requests, numbered in order; in a closed loop their arrivals are still to be set."""
        return [
            VllmRequest(
                number,
                ask.at_fs,
                ask.input,
                ask.out,
                ask.max_new,
                ask.ignore_eos,
                priority=ask.priority,
                prefix=ask.prefix,
            )
            for number, ask in enumerate(self.asks)
        ]


@dataclass
class Driven:
    """What came of it."""

    engine: VllmEngine
    events: list[RawEvent] = field(repr=False)

    @property
    def digest(self) -> str:
        return self.engine.log.digest

    def kinds(self, *kinds: str) -> list[tuple[int, str, int, int]]:
        """(step, kind, request, tokens) of the events of these kinds, in order."""
        return [(e[2], e[3], e[4], e[5]) for e in self.events if e[3] in kinds]


def blocks_of(what: Drive, ledger: Ledger | None = None) -> Blocks:
    limits = what.limits
    if what.prefix_caching:
        return BlockPool(limits.num_blocks, limits.block_size)
    return CountedBlocks(ledger or CountingLedger(limits.num_blocks - 1, limits.block_size, limits.max_num_seqs + 1))


def drive(
    what: Drive,
    *,
    step_only: bool = False,
    ledger: Ledger | None = None,
    max_steps: int | None = None,
    engine_class: type[VllmEngine] = VllmEngine,
) -> Driven:
    """Run to the end, or until `max_steps` passes were made: the engine leaps from one arrival to the next."""
    kept = KeepEvents()
    blocks = blocks_of(what, ledger)
    engine = engine_class(what.limits, blocks, LinearStepTime(CLOCK), EventLog([kept]), step_only=step_only)
    coming = what.requests()
    if what.concurrency is not None:
        _arrive(engine, coming, what.concurrency, 0)
    while not engine.over and (max_steps is None or engine.step < max_steps):
        ended, engine.ended = engine.ended, []
        if what.concurrency is not None:
            for _, time_fs in ended:
                _arrive(engine, coming, 1, time_fs)
            if engine.ended:
                continue
        elif coming and (engine.blocked or coming[0].arrive_fs <= engine.now_fs):
            now = coming[0].arrive_fs
            while coming and coming[0].arrive_fs == now:
                _arrive(engine, coming, 1, now)
            continue
        if engine.blocked:
            break
        engine.advance(coming[0].arrive_fs if coming and what.concurrency is None else FOREVER_FS)
    if engine.blocked:
        engine.give_up()
    engine.log.close()
    blocks.audit()
    return Driven(engine, kept.events)


def _arrive(engine: VllmEngine, coming: list[VllmRequest], count: int, time_fs: int) -> None:
    for request in coming[:count]:
        request.arrive_fs = time_fs
        engine.submit(request, time_fs)
    del coming[:count]


@st.composite
def drives(draw: st.DrawFn) -> Drive:
    """Servers and workloads with too few blocks for what is asked of them."""
    size = draw(st.sampled_from([1, 2, 4, 16, 64]))
    seqs = draw(st.sampled_from([2, 3, 4, 8, 16]))
    longest_input, longest_output = draw(st.sampled_from([(3, 40), (20, 60), (60, 30), (100, 100)]))
    one = -(-(longest_input + longest_output) // size)
    usable = draw(st.integers(one, max(one, one * seqs // 3)))
    roomy = draw(st.sampled_from([False, False, False, True]))
    max_model_len = usable * size + (draw(st.integers(1, 2 * size)) if roomy else 0)
    batched = max(seqs, draw(st.sampled_from([seqs, seqs + 5, 32, 256, 4096])))
    prefix_caching = draw(st.booleans())
    limits = VllmLimits(
        num_blocks=usable + 1,
        block_size=size,
        max_model_len=max_model_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.02, 0.1, 0.3])),
        lookahead_tokens=draw(st.sampled_from([0, 0, 3])),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 0, 1, 7])),
        long_prefill_token_threshold_adaptive=draw(st.booleans()),
        enable_chunked_prefill=batched < max_model_len or draw(st.booleans()),
        reserve_full_sequence=draw(st.sampled_from([True, True, True, False])),
    )
    concurrency = draw(st.sampled_from([None, None, 1, seqs, 2 * seqs]))
    span_fs = 0 if concurrency else draw(st.sampled_from([0, 10**14, 10**15]))
    run = st.tuples(st.integers(0, 2), st.sampled_from([0, size, 2 * size, 3 * size + 1, longest_input]))
    ask = st.builds(
        lambda n, out, slack, fixed, at, priority, prefix: Ask(n, out, out + slack, fixed, at, priority, prefix),
        st.one_of(st.integers(1, longest_input), st.just(longest_input)),
        st.one_of(st.integers(longest_output // 2, longest_output), st.integers(1, longest_output)),
        st.sampled_from([0] * 20 + [5] * 9 + [10**6]),
        st.sampled_from([False, False, False, True]),
        st.integers(0, span_fs),
        st.integers(0, 2),
        st.lists(run, max_size=2).map(tuple),
    )
    asks = draw(st.lists(ask, min_size=seqs, max_size=24))
    return Drive(sorted(asks, key=lambda a: a.at_fs), limits, prefix_caching, concurrency)
