"""Drive the SGLang engine without SimPy: arrivals from a list, results as plain tuples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from pagestorm.engine.iteration import EngineLimits, SglangEngine
from pagestorm.engine.machine import FOREVER_FS
from pagestorm.engine.request import Request
from pagestorm.engine.sglang import Capacity
from pagestorm.events import EventLog, KeepEvents, RawEvent, Sink
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


@dataclass(frozen=True)
class Drive:
    """A server and its requests."""

    asks: Sequence[Ask]
    page_size: int = 16
    pages: int = 100
    max_running: int = 64
    chunk_tokens: int | None = 8192
    max_prefill_tokens: int = 16384
    conservativeness: float = 1.0
    overlap: bool = False
    decode_check: str = "pages"
    context_length: int | None = None
    clips_output: bool = True
    max_queued: int | None = None


@dataclass
class Driven:
    """What came of it."""

    engine: SglangEngine
    events: list[RawEvent] = field(repr=False)

    @property
    def digest(self) -> str:
        return self.engine.log.digest

    def kinds(self, *kinds: str) -> list[tuple[int, str, int, int]]:
        """(step, kind, request, tokens) of the events of these kinds, in order."""
        return [(e[2], e[3], e[4], e[5]) for e in self.events if e[3] in kinds]


def limits_of(what: Drive) -> EngineLimits:
    pool = what.pages * what.page_size
    return EngineLimits(
        capacity=Capacity(pool, what.context_length or pool, what.page_size, what.clips_output),
        max_running=what.max_running,
        chunk_tokens=what.chunk_tokens,
        max_prefill_tokens=what.max_prefill_tokens,
        conservativeness=what.conservativeness,
        overlap=what.overlap,
        decode_check=what.decode_check,
        max_queued=what.max_queued,
    )


def drive(
    what: Drive,
    *,
    step_only: bool = False,
    ledger: Ledger | None = None,
    sinks: Sequence[Sink] = (),
    engine_class: type[SglangEngine] = SglangEngine,
) -> Driven:
    """Run to the end: every ask arrives at its time, the engine leaps from one arrival to the next."""
    kept = KeepEvents()
    ledger = ledger or CountingLedger(what.pages, what.page_size, what.max_running + 1)
    engine = engine_class(limits_of(what), ledger, LinearStepTime(CLOCK), EventLog([kept, *sinks]), step_only=step_only)
    asks = sorted(enumerate(what.asks), key=lambda pair: pair[1].at_fs)
    while not engine.over:
        now = asks[0][1].at_fs if asks else None
        while asks and asks[0][1].at_fs == now:
            number, ask = asks.pop(0)
            engine.submit(Request(number, ask.at_fs, ask.input, ask.out, ask.max_new, ask.ignore_eos), ask.at_fs)
        until_fs = asks[0][1].at_fs if asks else FOREVER_FS
        while engine.now_fs < until_fs and not engine.blocked and not engine.over:
            engine.ended.clear()
            engine.advance(until_fs)
        engine.ended.clear()
        if not asks and engine.blocked:
            break
    engine.give_up()
    engine.log.close()
    return Driven(engine, kept.events)


@st.composite
def drives(draw: st.DrawFn, pressure: bool = False) -> Drive:
    """Servers and workloads that reach the corners; with `pressure` pools are small for what is asked of them."""
    page_size = draw(st.sampled_from([1, 2, 4, 16, 64]))
    pages = draw(st.integers(8, 40)) if page_size > 1 else draw(st.integers(32, 400))
    pool = pages * page_size
    longest = max(1, pool // draw(st.sampled_from([2, 4, 8] if pressure else [4, 16, 64])))
    length = st.integers(1, longest)
    in_phase = st.integers(0, max(0, longest // page_size - 1)).map(lambda n: max(1, n * page_size))
    generated = st.integers(1, max(2, pool // (2 if pressure else 8)))
    span_fs = draw(st.sampled_from([0, 10**14, 10**16]))
    ask = st.builds(
        lambda n, out, slack, fixed, at: Ask(n, out, out + slack, fixed, at),
        st.one_of(length, in_phase),
        generated,
        st.sampled_from([0, 0, 1, 50]),
        st.sampled_from([False, False, False, True]),
        st.integers(0, span_fs),
    )
    return Drive(
        asks=draw(st.lists(ask, min_size=1, max_size=40 if pressure else 12)),
        page_size=page_size,
        pages=pages,
        max_running=draw(st.sampled_from([1, 2, 4, 16, 64])),
        chunk_tokens=draw(st.sampled_from([page_size, 2 * page_size, 8 * page_size, 8192, None])),
        max_prefill_tokens=draw(st.sampled_from([16384, 4 * page_size])),
        conservativeness=draw(st.sampled_from([0.01, 0.1, 0.5, 1.0])),
        overlap=draw(st.booleans()),
        decode_check=draw(st.sampled_from(["pages", "pages", "tokens", "none"])),
        max_queued=draw(st.sampled_from([None, None, None, 4])),
    )
