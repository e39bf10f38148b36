"""Why memory ran short: a reader of the event record that keeps the moments of pressure and forgets the rest.

It can be fed while the record grows: what it keeps is bounded by the number of incidents it shows and by the length of
the waiting queue, not by the number of requests.
"""

from __future__ import annotations

import heapq
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagestorm.engine.sglang import ABORT_LAST, INPUT_MARGIN_TOKENS, QUEUE_FULL, ceil_pages
from pagestorm.events import RawEvent

if TYPE_CHECKING:
    from pagestorm.scenario.schema import Scenario, SglangFlags

KEPT_FIRST = 50
"""Incidents of a kind that are kept in the order in which they came; the rest is counted."""
KEPT_WORST = 10
"""Retraction bursts that are kept because they threw away most."""
KEPT_VICTIMS = 8
"""Request numbers that a burst names."""
KEPT_MARKS = 4096
"""Moments of retraction kept for a picture; beyond that neighbours are merged."""

RETRACTION = "retraction"
DECODE_OOM = "decode_oom"
PREFILL_OOM = "prefill_oom"
ABORT = "abort"
REJECTION = "rejection"
STALL = "stall"
INCIDENT_KINDS = (RETRACTION, DECODE_OOM, PREFILL_OOM, ABORT, REJECTION, STALL)

PROMPT_LIMIT = "prompt limit"
QUEUE_LIMIT = "queue limit"
LAST_REQUEST = "last request"
BLOCKS = "blocks"
"""What guards a pass of vLLM: the blocks that its running requests need must be there."""
LATE_CHECK = "page check, a step late: it looked for the pages of the step before"


@dataclass(frozen=True, slots=True)
class Pressure:
    """The pool at the moment of an incident: free + evictable + protected + uncached pages are the whole pool.

    For a decode step `asked_pages` is also how many sequences open a page in that step. `rounding_tokens` are slots of
    pages that the batch holds and has not filled. `held` is (request, pages) of those who hold most. `ratio` is the
    new-token ratio, and None where no admission or decode was being planned.
    """

    phase: str
    """decode, prefill or arrival."""
    check: str
    """What guarded the step: pages, tokens or none for decode, else the law of admission that said no."""
    asked_tokens: int
    asked_pages: int
    free_pages: int
    evictable_pages: int
    protected_pages: int
    uncached_pages: int
    rounding_tokens: int
    batch: int
    """Requests in the running batch."""
    ratio: float | None
    held: tuple[tuple[int, int], ...]

    @classmethod
    def told(cls, detail: Mapping[str, Any]) -> Pressure:
        """From the `detail` object of an event."""
        return cls(
            phase=detail["phase"],
            check=detail.get("check", BLOCKS),
            asked_tokens=detail["asked_tokens"],
            asked_pages=detail["asked_pages"],
            free_pages=detail["free_pages"],
            evictable_pages=detail["evictable_pages"],
            protected_pages=detail["protected_pages"],
            uncached_pages=detail["uncached_pages"],
            rounding_tokens=detail["rounding_tokens"],
            batch=detail["batch"],
            ratio=detail.get("ratio"),
            held=tuple((request, pages) for request, pages in detail["held"]),
        )


@dataclass(frozen=True, slots=True)
class Incident:
    """One moment in which memory, or a limit that protects it, said no."""

    kind: str
    time_ns: int
    step: int
    """The pass being planned; for a rejection the last one launched."""
    law: str
    """The rule that decided, in words and numbers."""
    pressure: Pressure
    request: int = -1
    """The one request that it is about; -1 for a burst or an out-of-memory, which are about a batch."""
    reason: str = ""
    """Rejections and aborts: `prompt limit`, `queue limit` or `last request`."""
    victims: int = 0
    first_victims: tuple[int, ...] = ()
    freed_pages: int = 0
    lost_tokens: int = 0
    """Tokens of KV that were thrown away."""


@dataclass(slots=True)
class Tally:
    """All incidents that share a reason, kept or not."""

    count: int = 0
    most_tokens: int = 0
    """Longest prompt among the rejected, longest sequence among the aborted."""
    limit_tokens: int = 0
    """Prompt limit: a prompt must be shorter than this."""


class Diagnosis:
    """A sink that explains each out-of-memory, retraction burst, abort, rejection and stall.

    A burst is all retractions of one planning round. Kept are the first `KEPT_FIRST` incidents of each kind, the
    `KEPT_WORST` bursts by tokens thrown away, and the last burst; everything is counted. `close` ends the last burst.
    """

    def __init__(self, page_size: int, pool_pages: int, scenario: Scenario | None = None) -> None:
        self.page_size = page_size
        self.pool_pages = pool_pages
        self.scenario = scenario
        """Resolved; only advice needs it, because a flag's present value is not in the record."""
        self.events_read = 0
        """Leaps included; 0 when the record was not kept, and then nothing here explains anything."""
        self.counts: dict[str, int] = dict.fromkeys(INCIDENT_KINDS, 0)
        self.first: dict[str, list[Incident]] = {kind: [] for kind in INCIDENT_KINDS}
        self.last_burst: Incident | None = None
        self.tallies: dict[str, Tally] = {}
        """Rejections and aborts by reason."""
        self.victims = 0
        """Retractions, over all bursts."""
        self.lost_tokens = 0
        """Tokens of KV that retraction threw away."""
        self.prefill_tokens = 0
        """Tokens computed in prefill, recomputation included."""
        self.longest_output_tokens = 0
        """Of the requests that finished."""
        self.marks = Marks()
        self._worst: list[tuple[int, int, Incident]] = []
        self._burst: _Burst | None = None
        self._cut = -1
        self._queue = _Queue()
        self._readers = {
            "arrive": self._arrive,
            "admit": self._admit,
            "prefill": self._prefill,
            "finish": self._finish,
            "reject": self._reject,
            "retract": self._retract,
            "preempt": self._retract,
            "abort": self._abort,
            "decode_oom": self._out_of_memory,
            "prefill_oom": self._out_of_memory,
        }

    @classmethod
    def of(cls, scenario: Scenario) -> Diagnosis:
        """For a run of a resolved scenario."""
        engine = scenario.engine
        return cls(engine.page_size, engine.pool_pages, scenario)

    @property
    def late_check(self) -> bool:
        """Whether the decode check took lengths one token short, a fault that is emulated."""
        flags = self.sglang
        return flags is not None and "kv_length_off_by_one" in flags.emulate and not flags.disable_overlap_schedule

    @property
    def sglang(self) -> SglangFlags | None:
        """The flags of an SGLang server; None for another engine or where the scenario is not known."""
        from pagestorm.scenario.schema import SglangFlags

        engine = self.scenario.engine if self.scenario is not None else None
        return engine if isinstance(engine, SglangFlags) else None

    # --- the record --------------------------------------------------------------------------------------------

    def write(self, events: Sequence[RawEvent]) -> None:
        """Read a chunk of the record."""
        readers = self._readers
        self.events_read += len(events)
        for event in events:
            read = readers.get(event[3])
            if read is not None:
                read(event)

    def close(self) -> None:
        """The record is complete."""
        self._end_burst()

    # --- what was found ----------------------------------------------------------------------------------------

    @property
    def worst_bursts(self) -> list[Incident]:
        """Those that threw away most tokens, the worst first, the earlier first among equals."""
        return [incident for _, _, incident in sorted(self._worst, reverse=True)]

    @property
    def gravest(self) -> Incident | None:
        """The one incident that a verdict should begin with, stalls apart."""
        for kind in (DECODE_OOM, PREFILL_OOM, ABORT):
            if self.first[kind]:
                return self.first[kind][0]
        worst = self.worst_bursts
        if worst:
            return worst[0]
        return self.first[REJECTION][0] if self.first[REJECTION] else None

    def stall(self) -> Incident:
        """Why nothing moves, for a run whose outcome is `stalled`: the pool is idle and the head of the queue waits.

        `asked_tokens` is what its prefill must cover, without what it may still generate; a request that was retracted
        may ask one more than that.
        """
        request, tokens, time_ns, step = self._queue.head()
        pages = -(-tokens // self.page_size)
        law = (
            f"admission: request {request} must prefill {tokens:,} tokens ({_pages(pages)}); with what it may still "
            f"generate and a page to spare it must stay below the pool's {self.pool_pages * self.page_size:,} tokens, "
            f"and it does not although the pool is empty"
        )
        pressure = self._plain("prefill", "admission", tokens, pages, self.pool_pages, 0, 0)
        return Incident(STALL, time_ns, step, law, pressure, request)

    # --- one event at a time -----------------------------------------------------------------------------------

    def _arrive(self, event: RawEvent) -> None:
        self._queue.push(event)

    def _admit(self, event: RawEvent) -> None:
        self._queue.pop()

    def _prefill(self, event: RawEvent) -> None:
        self.prefill_tokens += event[5]
        if event[12]:
            self._cut = event[4]
        elif event[4] == self._cut:
            self._cut = -1

    def _finish(self, event: RawEvent) -> None:
        if event[5] > self.longest_output_tokens:
            self.longest_output_tokens = event[5]

    def _reject(self, event: RawEvent) -> None:
        self._queue.take_back(event[4])
        told = json.loads(event[12])
        tokens, page = event[5], self.page_size
        pages = -(-tokens // page)
        pressure = self._plain("arrival", "", tokens, pages, event[7], event[8], event[9])
        if told["reason"] == QUEUE_FULL:
            self._refused(REJECTION, QUEUE_LIMIT, event, self._queue_law(event), pressure)
            return
        limit = told["limit_tokens"]
        pool = self.pool_pages * page
        by_pool = limit + INPUT_MARGIN_TOKENS == pool
        source = f"the pool's {pool:,} tokens" if by_pool else f"context_length {limit + INPUT_MARGIN_TOKENS:,}"
        law = (
            f"prompt limit: request {event[4]} has {tokens:,} prompt tokens ({_pages(pages)}); a prompt must be "
            f"shorter than {limit:,} ({source} less {INPUT_MARGIN_TOKENS})"
        )
        self._refused(REJECTION, PROMPT_LIMIT, event, law, pressure, limit)

    def _retract(self, event: RawEvent) -> None:
        burst = self._burst
        if burst is None or burst.step != event[2] or event[12]:
            self._end_burst()
            burst = self._burst = _Burst(event)
        burst.add(event)
        self._queue.push(event)

    def _abort(self, event: RawEvent) -> None:
        told = json.loads(event[12])
        if told["reason"] == QUEUE_FULL:
            self._queue.take_back(event[4])
            pressure = self._plain("decode", "", 0, 0, event[7], event[8], event[9])
            self._refused(ABORT, QUEUE_LIMIT, event, self._queue_law(event), pressure)
            return
        if "asked_pages" in told:
            pressure = Pressure.told(told)
        else:
            pressure = self._alone(event)
        wants = "the token check wants one free token" if pressure.check == "tokens" else "needs another page"
        law = (
            f"{LAST_REQUEST}: request {event[4]} alone holds {event[6]:,} of {_pages(self.pool_pages)} "
            f"({event[5]:,} tokens) and {wants}; {_free(pressure)}, and nobody is left to retract"
        )
        reason = LAST_REQUEST if told["reason"] == ABORT_LAST else told["reason"]
        self._refused(ABORT, reason, event, law, pressure)

    def _out_of_memory(self, event: RawEvent) -> None:
        self._end_burst()
        pressure = Pressure.told(json.loads(event[12]))
        kind = event[3]
        law = self._prefill_law(pressure) if kind == PREFILL_OOM else self._decode_law(pressure)
        self._keep(Incident(kind, event[0], event[2], law, pressure))

    # --- laws --------------------------------------------------------------------------------------------------

    def _retraction_law(self, pressure: Pressure) -> str:
        """Why the guard of a decode step said no."""
        if pressure.check == BLOCKS:
            n = pressure.asked_pages
            return f"block pool: running requests need {n:,} more block{_s(n)} in this pass, {_free(pressure)}"
        if pressure.check == "tokens":
            free = (pressure.free_pages + pressure.evictable_pages) * self.page_size
            return f"token check: {pressure.asked_tokens:,} tokens asked, {free:,} tokens are free"
        if self.late_check:
            return f"{LATE_CHECK}; {self._opens(pressure)} now, {_free(pressure)}"
        return f"page check: {self._opens(pressure)}, {_free(pressure)}"

    def _decode_law(self, pressure: Pressure) -> str:
        """Why the guard of a decode step said yes although the allocator could not deliver."""
        shortage = f"{self._opens(pressure)} and only {_free(pressure)}"
        if pressure.check == "tokens":
            free = (pressure.free_pages + pressure.evictable_pages) * self.page_size
            return f"token check: {pressure.asked_tokens:,} tokens asked <= {free:,} tokens free, but {shortage}"
        if pressure.check == "none":
            return f"no check: nothing guards the decode step; {shortage}"
        if self.late_check:
            return f"{LATE_CHECK}, but {shortage}"
        return f"page check passed, but {shortage}"

    def _prefill_law(self, pressure: Pressure) -> str:
        """Why a prefill was launched that the allocator could not serve."""
        law = (
            f"prefill allocation: {pressure.asked_tokens:,} tokens asked, which take {_pages(pressure.asked_pages)}, "
            f"and only {_free(pressure)}"
        )
        if self._cut >= 0:
            law += (
                f"; request {self._cut} is in the middle of its prompt, and a prompt that was begun goes on with a "
                f"whole chunk when nothing is left in the budget"
            )
        return law

    def _queue_law(self, event: RawEvent) -> str:
        limit = self.sglang.max_queued_requests if self.sglang else None
        allowed = f"max_queued_requests allows {limit:,}" if limit is not None else "max_queued_requests allows no more"
        return f"{QUEUE_LIMIT}: request {event[4]} found {event[10]:,} requests waiting, and {allowed}"

    def _opens(self, pressure: Pressure) -> str:
        n = pressure.asked_pages
        if self.page_size == 1:
            return f"{n:,} sequence{_s(n)} need{'s' if n == 1 else ''} a slot in the same step"
        return f"{n:,} sequence{_s(n)} open{'s' if n == 1 else ''} a page in the same step"

    # --- keeping -----------------------------------------------------------------------------------------------

    def _end_burst(self) -> None:
        burst, self._burst = self._burst, None
        if burst is None:
            return
        pressure = Pressure.told(json.loads(burst.detail))
        incident = Incident(
            RETRACTION,
            burst.time_ns,
            burst.step,
            self._retraction_law(pressure),
            pressure,
            victims=burst.victims,
            first_victims=tuple(burst.first_victims),
            freed_pages=burst.freed_pages,
            lost_tokens=burst.lost_tokens,
        )
        self.victims += burst.victims
        self.lost_tokens += burst.lost_tokens
        self.last_burst = incident
        self.marks.add(burst.time_ns, burst.victims)
        number = self._keep(incident)
        entry = (incident.lost_tokens, -number, incident)
        if len(self._worst) < KEPT_WORST:
            heapq.heappush(self._worst, entry)
        else:
            heapq.heappushpop(self._worst, entry)

    def _keep(self, incident: Incident) -> int:
        """Count it, keep it if it is among the first; returns how many of its kind came before."""
        number = self.counts[incident.kind]
        self.counts[incident.kind] = number + 1
        if number < KEPT_FIRST:
            self.first[incident.kind].append(incident)
        return number

    def _refused(
        self, kind: str, reason: str, event: RawEvent, law: str, pressure: Pressure, limit_tokens: int = 0
    ) -> None:
        tally = self.tallies.setdefault(f"{kind}: {reason}", Tally())
        tally.count += 1
        tally.most_tokens = max(tally.most_tokens, event[5])
        tally.limit_tokens = limit_tokens
        lost = event[5] if kind == ABORT else 0
        freed = event[6] if kind == ABORT else 0
        self._keep(
            Incident(
                kind, event[0], event[2], law, pressure, event[4], reason, freed_pages=max(0, freed), lost_tokens=lost
            )
        )

    def _plain(
        self, phase: str, check: str, tokens: int, pages: int, free_pages: int, evictable_pages: int, running: int
    ) -> Pressure:
        """The state as an event's own columns tell it."""
        return Pressure(
            phase=phase,
            check=check,
            asked_tokens=tokens,
            asked_pages=pages,
            free_pages=free_pages,
            evictable_pages=evictable_pages,
            protected_pages=0,
            uncached_pages=self.pool_pages - free_pages - evictable_pages,
            rounding_tokens=0,
            batch=running,
            ratio=None,
            held=(),
        )

    def _alone(self, event: RawEvent) -> Pressure:
        """The last of a batch whose others were retracted in the same round, before its own pages came back."""
        assert self._burst is not None, "the first event of a round carries the pressure"
        burst = Pressure.told(json.loads(self._burst.detail))
        tokens, pages, free = event[5], event[6], event[7] - event[6]
        return Pressure(
            phase="decode",
            check=burst.check,
            asked_tokens=1,
            asked_pages=int(tokens % self.page_size == 0),
            free_pages=free,
            evictable_pages=event[8],
            protected_pages=0,
            uncached_pages=self.pool_pages - free - event[8],
            rounding_tokens=ceil_pages(tokens, self.page_size) - tokens,
            batch=1,
            ratio=burst.ratio,
            held=((event[4], pages),),
        )


def diagnose(events: Iterable[RawEvent], summary: Mapping[str, Any], scenario: Scenario | None = None) -> Diagnosis:
    """Read a whole record; `summary` says how large the pool was, `scenario` (resolved) makes advice concrete."""
    pages = summary["pool_pages"]
    diagnosis = Diagnosis(summary["pool_tokens"] // pages, pages, scenario)
    diagnosis.write(list(events))
    diagnosis.close()
    return diagnosis


class _Burst:
    """Retractions of one planning round while they come in."""

    __slots__ = ("detail", "first_victims", "freed_pages", "lost_tokens", "step", "time_ns", "victims")

    def __init__(self, event: RawEvent) -> None:
        self.time_ns = event[0]
        self.step = event[2]
        self.detail = event[12]
        self.victims = 0
        self.first_victims: list[int] = []
        self.freed_pages = 0
        self.lost_tokens = 0

    def add(self, event: RawEvent) -> None:
        self.victims += 1
        if len(self.first_victims) < KEPT_VICTIMS:
            self.first_victims.append(event[4])
        self.lost_tokens += event[5]
        self.freed_pages += event[6]


class Marks:
    """When requests were retracted, for a picture: (time, victims), at most `KEPT_MARKS` of them.

    Beyond that two neighbours become one, at the time of the earlier, so that no retraction is lost.
    """

    def __init__(self) -> None:
        self.time_ns: list[int] = []
        self.victims: list[int] = []

    def add(self, time_ns: int, victims: int) -> None:
        """A burst."""
        self.time_ns.append(time_ns)
        self.victims.append(victims)
        if len(self.time_ns) >= KEPT_MARKS:
            self.time_ns = self.time_ns[::2]
            self.victims = [a + b for a, b in zip(self.victims[::2], self.victims[1::2], strict=True)]


class _Queue:
    """The waiting queue as the record tells it, first come first served: 16 bytes a waiting request."""

    def __init__(self) -> None:
        self._numbers = array("q")
        self._tokens = array("q")
        self._head = 0
        self._time_ns = 0
        self._step = -1

    def push(self, event: RawEvent) -> None:
        """To the back: an arrival or a retraction."""
        self._numbers.append(event[4])
        self._tokens.append(event[5])
        self._time_ns, self._step = event[0], event[2]

    def pop(self) -> None:
        """The head was admitted."""
        self._head += 1
        if self._head >= 4096 and self._head * 2 >= len(self._numbers):
            del self._numbers[: self._head]
            del self._tokens[: self._head]
            self._head = 0

    def take_back(self, request: int) -> None:
        """A request that had just been put at the back was turned away instead."""
        for i in range(len(self._numbers) - 1, self._head - 1, -1):
            if self._numbers[i] == request:
                del self._numbers[i]
                del self._tokens[i]
                return

    def head(self) -> tuple[int, int, int, int]:
        """Request and tokens of the head, and time and step of the last arrival or retraction."""
        return self._numbers[self._head], self._tokens[self._head], self._time_ns, self._step


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _pages(count: int) -> str:
    return f"{count:,} page{_s(count)}"


def _free(pressure: Pressure) -> str:
    free, evictable = pressure.free_pages, pressure.evictable_pages
    text = f"{_pages(free)} {'is' if free == 1 else 'are'} free"
    return f"{text} and {evictable:,} evictable" if evictable else text
