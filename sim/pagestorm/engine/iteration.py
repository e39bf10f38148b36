"""The machine that carries the decisions out: one planning round after another, leaping where nothing happens.

A round plans one forward pass at the time `now`. Without overlap the pass's result is processed at its end, and that
is the time of the next round. With overlap the next pass is planned while this one runs, so a result, and the
memory it frees, lags one pass behind:

    without    plan 0 [pass 0] result 0, plan 1 [pass 1] result 1, plan 2 ...
    with       plan 0 [pass 0           ][pass 1           ][pass 2 ...
               plan 1   result 0, plan 2   result 1, plan 3

Decode passes between two events that matter are launched as one leap of k; a step is a leap of one. Times are
integer femtoseconds.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from pagestorm.engine.batch import RunningBatch
from pagestorm.engine.machine import FOREVER_FS, Counts, Levels, Machine, Timeline
from pagestorm.engine.request import Request
from pagestorm.engine.sglang import (
    ABORT_LAST,
    QUEUE_FULL,
    RATIO_DECAY_STEPS,
    RATIO_FLOOR_FACTOR,
    RATIO_INIT,
    Admission,
    AdmissionView,
    Capacity,
    NewTokenRatio,
    admit,
    decode_fits,
    decode_horizon,
    out_of_memory_text,
    ratio_after_retraction,
    retract,
)
from pagestorm.events import FS_PER_NS, EventLog
from pagestorm.memory.ledger import FULL, Ledger
from pagestorm.steptime import StepTime

FRUITLESS_RETRACTIONS = 1000
"""Retractions in a row without one output token after which the run counts as livelocked."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the flags resolved to."""

    capacity: Capacity
    max_running: int
    chunk_tokens: int | None
    max_prefill_tokens: int
    conservativeness: float
    overlap: bool
    decode_check: str
    max_queued: int | None = None
    ratio_init: float = RATIO_INIT
    ratio_floor_factor: float = RATIO_FLOOR_FACTOR
    ratio_decay_steps: int = RATIO_DECAY_STEPS
    late_check: bool = False
    """Emulates a release whose decode check took lengths one token short with overlap (sgl-project/sglang#7411)."""


@dataclass(slots=True)
class Pass:
    """A forward pass that was launched and whose result is still to be processed."""

    step: int
    start_fs: int
    end_fs: int
    members: list[Request]
    """Requests that get a token from it, in batch order; those retracted since are passed over."""
    chosen: list[tuple[Request, int]] = field(default_factory=list)
    """Prefill: the requests and their new tokens; empty for a decode pass."""
    cut: Request | None = None
    """Prefill: the request whose prompt goes on in a later pass."""
    leaving: list[Request] = field(default_factory=list)
    """Requests that this result ends by length and that the next decode pass therefore left out."""


@dataclass(slots=True)
class SglangCounts(Counts):
    """What a run of SGLang counts."""

    retractions: int = 0
    retracted_requests: int = 0
    max_retractions_per_request: int = 0
    decode_oom: int = 0
    prefill_oom: int = 0
    ratio_min: float = 1.0
    ratio_max: float = 0.0


class SglangEngine(Machine):
    """SGLang's scheduler over a `Ledger`."""

    def __init__(
        self,
        limits: EngineLimits,
        ledger: Ledger,
        steptime: StepTime,
        log: EventLog,
        *,
        step_only: bool = False,
        timeline: Timeline | None = None,
    ) -> None:
        super().__init__(steptime, log, step_only=step_only, timeline=timeline)
        self.limits = limits
        self.ledger = ledger
        self._counts = SglangCounts()
        self.ratio = NewTokenRatio(
            limits.conservativeness, limits.ratio_init, limits.ratio_floor_factor, limits.ratio_decay_steps
        )
        self.waiting: deque[Request] = deque()
        self.running = RunningBatch(limits.capacity.page_size, leaves_early=limits.overlap)
        self.chunked: Request | None = None
        self._flight: Pass | None = None
        self._unmerged: Pass | None = None
        self._row_count = limits.max_running
        self._rows = list(range(1, limits.max_running + 1))
        self._page = limits.capacity.page_size
        self._longest_input = limits.capacity.longest_input_tokens
        self._pool_pages = ledger.total_pages()
        self._free = ledger.free_pages()
        self._fruitless = 0
        self._quiet = False
        """The round before this one launched nothing either."""
        self._stored: dict[int, int] = {}
        self._note_ratio()

    # --- outside ---------------------------------------------------------------------------------------------

    @property
    def counts(self) -> SglangCounts:
        return self._counts

    @property
    def idle(self) -> bool:
        return self.blocked and not self.waiting and not self.running and self.chunked is None

    @property
    def rows_used(self) -> int:
        return self._row_count - len(self._rows)

    def _refusal(self, request: Request) -> tuple[str, int]:
        longest = self._longest_input
        if request.input_tokens >= longest:
            return self.limits.capacity.refusal(request.input_tokens), longest
        return QUEUE_FULL if self._queue_is_full() else "", longest

    def _enqueue(self, request: Request) -> int:
        request.max_new_tokens = self.limits.capacity.clip(request.input_tokens, request.asked_tokens)
        # A request that ignores the stop token runs to its limit; a limit of 0 still yields one token.
        natural = request.max_new_tokens if request.ignore_eos else request.output_tokens
        request.target = max(1, min(natural, request.max_new_tokens))
        self.waiting.append(request)
        return len(self.waiting)

    def _emit(
        self,
        kind: str,
        time_fs: int,
        step: int,
        request: int = -1,
        tokens: int = -1,
        pages: int = -1,
        detail: str = "",
    ) -> None:
        # As the base class tells it, without the detour over `Levels`: this is called several times a request.
        seq = -1
        if kind != "leap":
            seq = self._seq
            self._seq = seq + 1
        running, waiting = self._row_count - len(self._rows), len(self.waiting)
        self.log.append(
            (
                time_fs // FS_PER_NS,
                seq,
                step,
                kind,
                request,
                tokens,
                pages,
                self._free,
                0,
                running,
                waiting,
                FULL,
                detail,
            )
        )

    def _levels(self) -> Levels:
        return Levels(self._free, 0, self._row_count - len(self._rows), len(self.waiting))

    @property
    def total_pages(self) -> int:
        return self._pool_pages

    def audit(self) -> None:
        self.ledger.audit()

    def unserved(self) -> list[Request]:
        for request in self.running.requests:
            request.generated = self.running.generated(request)
        there = {r.number: r for r in (*self.waiting, *self.running.requests)}
        for result in (self._flight, self._unmerged):
            if result is not None:
                there.update((r.number, r) for r, _ in result.chosen)
                there.update((r.number, r) for r in result.leaving)
        if self.chunked is not None:
            there[self.chunked.number] = self.chunked
        return sorted((r for r in there.values() if not r.outcome), key=lambda r: r.number)

    def give_up(self) -> None:
        if self.waiting and not self.outcome:
            self.outcome = "stalled"
            head = self.waiting[0]
            view = self._view()
            self.error = (
                f"request {head.number} can never be admitted: it needs more than "
                f"{head.sequence_tokens + self._page} tokens with what it may generate, and an idle pool offers "
                f"{view.available_tokens}"
            )

    # --- one round -------------------------------------------------------------------------------------------

    def _round(self, until_fs: int) -> None:
        self._merge_prefill()
        running = self.running
        if not running.requests:
            running.full = False
        if self.chunked is not None or (self.waiting and not running.full):
            admission = admit(self._view())
            running.full = admission.full
            if admission.chosen:
                self._launch_prefill(admission)
                return
        if running.requests and self._decode(until_fs):
            return
        if self.outcome:
            return
        self._settle()

    def _merge_prefill(self) -> None:
        """The requests whose prompts are complete join the running batch."""
        last, running = self._unmerged, self.running
        if last is None:
            return
        self._unmerged = None
        joining = [r for r, _ in last.chosen if r is not last.cut and r.finish_fs < 0]
        if len(joining) < len(last.chosen):
            running.full = False
        if joining:
            if not running.requests:
                # The engine makes the prefill batch the running batch, and its flag with it.
                running.full = False
            # Without overlap the token of the prefill itself is known by now, and has no KV yet.
            pending = int(self.limits.overlap)
            running.join(joining, [r.sequence_tokens + pending - 1 for r in joining], pending)

    def _settle(self) -> None:
        """A round that launched nothing: the result in flight is processed, or there is nothing to do."""
        flight = self._flight
        if flight is not None:
            self._flight = None
            self._process(flight)
            self.now_fs = flight.end_fs
            return
        if self.waiting and not self._quiet:
            # The round itself may have made room (an abort): the engine plans again at once.
            self._quiet = True
            return
        self.blocked = True
        if not self.waiting and not self.running.requests and self.chunked is None:
            self.ratio.reset()
            self._note_ratio()

    def _view(self) -> AdmissionView:
        running, limits = self.running, self.limits
        known = running.known
        return AdmissionView(
            waiting=self.waiting,
            chunked=self.chunked,
            available_tokens=self._free * self._page,
            ratio=self.ratio.current,
            page_size=self._page,
            chunk_tokens=limits.chunk_tokens,
            max_prefill_tokens=limits.max_prefill_tokens,
            free_rows=len(self._rows),
            max_running=limits.max_running,
            full=running.full,
            decoding=[
                (r.max_new_tokens, r.base_generated + known - r.pending, r.ignore_eos, r.input_tokens)
                for r in running.requests
            ],
        )

    # --- prefill ---------------------------------------------------------------------------------------------

    def _launch_prefill(self, admission: Admission) -> None:
        chosen, flight = admission.chosen, self._flight
        start_fs = max(self.now_fs, flight.end_fs) if flight else self.now_fs
        new = [r for r, _ in chosen if r.row == 0]
        rows = self._rows[len(self._rows) - len(new) :]
        del self._rows[len(self._rows) - len(new) :]
        for request, row in zip(new, rows, strict=True):
            request.row = row
        for _ in range(admission.admitted):
            self.waiting.popleft()
        self.chunked = admission.chunked
        tokens = [n for _, n in chosen]
        if self.timeline is not None:
            self._mark(start_fs)
        taken = self.ledger.extend(
            np.array([r.row for r, _ in chosen], dtype=np.int64), np.array(tokens, dtype=np.int64)
        )
        if taken is None:
            self._die("prefill", start_fs, sum(tokens), self._pages_of(chosen))
            return
        self._took(taken)
        self._tell_prefill(chosen, start_fs)
        end_fs = start_fs + self.steptime.prefill_fs(tokens, [r.computed for r, _ in chosen])
        for request, n in chosen:
            request.retracted = False
            request.computed += n
        launched = Pass(
            step=self.step,
            start_fs=start_fs,
            end_fs=end_fs,
            members=[r for r, _ in chosen if r is not self.chunked],
            chosen=chosen,
            cut=self.chunked,
        )
        self.counts.prefill_batches += 1
        self._launched(1, start_fs, end_fs)
        if self.timeline is not None:
            self._mark(end_fs)
        self._unmerged = launched
        self._hand_over(launched, launched.end_fs)

    def _pages_of(self, chosen: list[tuple[Request, int]]) -> int:
        p = self._page
        return sum(-(-(r.computed + n) // p) - -(-r.computed // p) for r, n in chosen)

    def _tell_prefill(self, chosen: list[tuple[Request, int]], start_fs: int) -> None:
        p = self._page
        for request, n in chosen:
            done = request.computed + n
            if request.computed == 0:
                if request.admit_fs < 0:
                    request.admit_fs = start_fs
                self._emit("admit", start_fs, self.step, request.number, request.sequence_tokens)
            request.prefilled_tokens += n
            if request.retractions:
                stored = self._stored.get(request.number, 0)
                self.counts.recomputed_tokens += max(0, min(n, stored - request.computed))
            detail = '{"chunk":true}' if request is self.chunked else ""
            pages = -(-done // p) - -(-request.computed // p)
            self._emit("prefill", start_fs, self.step, request.number, n, pages, detail)

    # --- decode ----------------------------------------------------------------------------------------------

    def _decode(self, until_fs: int) -> bool:
        """Plan a decode pass, or a leap of them; False when none is launched."""
        running, check = self.running, self.limits.decode_check
        before = len(running)
        leaving = self._leave_out_ending()
        if not running.requests:
            running.full = False
            return False
        fits = decode_fits(check, len(running), self._checked_opening(), self._page, self._free)
        if not fits and leaving:
            # The result in flight frees their memory: neither decode nor retract this round.
            running.full = False
            return False
        steps = 1
        if not fits:
            self._retract()
        elif not leaving:
            steps = self._horizon(until_fs)
        if len(running) < before:
            running.full = False
        if not running.requests or self.outcome:
            return False
        return self._launch_decode(steps, decays=fits)

    def _checked_opening(self) -> int:
        """Openings as the guard counts them."""
        return self.running.opening(self.limits.late_check and self.limits.overlap)

    def _leave_out_ending(self) -> bool:
        """With overlap, requests that the result in flight ends by length take no part in the next decode pass."""
        flight, running = self._flight, self.running
        if flight is None:
            return False
        if flight.chosen:
            ending = [r for r in flight.members if r.join and r.max_new_tokens - running.generated(r) <= 1]
        else:
            ending = running.ending_by_length()
        if not ending:
            return False
        flight.leaving = ending
        running.leave(ending)
        return True

    def _horizon(self, until_fs: int) -> int:
        """How many decode passes from here on are uneventful, this one included."""
        running, flight, limits = self.running, self._flight, self.limits
        if self._step_only or limits.late_check or self.chunked is not None or (self.waiting and not running.full):
            return 1
        steps = running.uneventful_passes()
        if limits.overlap:
            if flight is None or (flight.chosen and self._ends_one(flight)):
                return 1
            # The first result to come is the prefill's own: the clock of decode results starts one pass later.
            steps += bool(flight.chosen)
        if steps <= 1:
            return 1
        steps = min(steps, decode_horizon(limits.decode_check, running, self._page, self._free))
        if steps <= 1:
            return 1
        if until_fs < FOREVER_FS:
            batch = len(running)
            context = running.context_tokens + batch
            if flight is None:
                steps = self.steptime.steps_within(batch, context, until_fs - self.now_fs, steps)
            else:
                # Round 0 is at `now`; round j > 0 is at the start of pass j - 1, the first after the one in flight.
                left_fs = until_fs - flight.end_fs
                more = self.steptime.steps_within(batch, context, left_fs, steps - 1) if left_fs > 0 else 0
                steps = 1 + more
        return max(1, steps)

    def _ends_one(self, prefill: Pass) -> bool:
        """Whether the result of a prefill in flight ends a request that has joined the running batch."""
        known = self.running.known
        return any(r.join and r.base_generated + known >= r.target for r in prefill.members)

    def _launch_decode(self, steps: int, decays: bool) -> bool:
        running, flight = self.running, self._flight
        batch = len(running)
        start_fs = max(self.now_fs, flight.end_fs) if flight else self.now_fs
        if self.timeline is not None:
            self._mark(start_fs)
        taken = self.ledger.decode(running.rows, steps, 1)
        if taken is None:
            self._die("decode", start_fs, batch, running.opening())
            return False
        self._took(taken)
        if decays:
            self.ratio.decay_steps(steps)
            self._note_ratio()
        run_fs = self.steptime.decode_run_fs
        context = running.context_tokens + batch
        end_fs = start_fs + run_fs(batch, context, steps)
        last_fs = start_fs if steps == 1 else start_fs + run_fs(batch, context, steps - 1)
        running.launched += steps
        if self.timeline is not None:
            # Before any result gives memory back: this is where the pool is fullest.
            self._mark(end_fs)
        self.counts.decode_steps += steps
        self.counts.leaps += 1
        if self.log.wants_leaps:
            self._emit("leap", start_fs, self.step, tokens=steps, pages=taken)
        self._launched(steps, start_fs, end_fs)
        if steps > 1:
            # All results but the one that is due at the end of the leap are uneventful.
            decoded = steps - 1
            if flight is not None:
                if flight.chosen:
                    self._process(flight)
                    decoded -= 1
                self._flight = Pass(self.step - 2, start_fs, last_fs, running.requests)
            running.known += decoded
            self._gained(decoded * batch)
        self._hand_over(Pass(self.step - 1, last_fs, end_fs, running.requests), end_fs)
        return True

    # --- retraction ------------------------------------------------------------------------------------------

    def _retract(self) -> None:
        running, limits = self.running, self.limits
        flight = self._flight
        start_fs = max(self.now_fs, flight.end_fs) if flight else self.now_fs
        generated, committed = running.all_generated(), running.all_committed()
        decision = retract(
            limits.decode_check,
            generated,
            [r.input_tokens for r in running.requests],
            committed,
            self._page,
            self._free,
        )
        detail = self._pressure("decode", len(running), running.opening())
        members = running.requests
        victims = [members[i] for i in decision.victims]
        aborted = None if decision.aborted is None else members[decision.aborted]
        kept = [members[i] for i in decision.kept]
        running.leave(victims if aborted is None else [*victims, aborted])
        running.order(kept)
        for request, i in zip(victims, decision.victims, strict=True):
            self._retract_one(request, committed[i], start_fs, detail)
            detail = ""
        if aborted is not None and decision.aborted is not None:
            self._abort_last(aborted, committed[decision.aborted], start_fs, detail)
        self.ratio.current = ratio_after_retraction(
            [generated[i] for i in decision.kept], [r.max_new_tokens for r in kept]
        )
        self._note_ratio()
        for request in victims:
            if self._queue_is_full():
                self._abort_retracted(request, start_fs)
            else:
                self.waiting.append(request)
        self.counts.peak_waiting = max(self.counts.peak_waiting, len(self.waiting))
        if self._fruitless > FRUITLESS_RETRACTIONS:
            self.outcome = "livelocked"
            self.error = (
                f"{self._fruitless} retractions in a row without one output token; "
                f"the last one took request {victims[-1].number}"
            )

    def _retract_one(self, request: Request, committed: int, start_fs: int, detail: str) -> None:
        counts = self.counts
        request.retracted = True
        request.computed = 0
        request.retractions += 1
        counts.retractions += 1
        counts.retracted_requests += request.retractions == 1
        counts.max_retractions_per_request = max(counts.max_retractions_per_request, request.retractions)
        self._stored[request.number] = committed
        self._fruitless += 1
        pages = self._give_back([request])
        self._emit("retract", start_fs, self.step, request.number, committed, pages, detail)

    def _abort_last(self, request: Request, committed: int, start_fs: int, detail: str) -> None:
        request.retracted = True
        pages = self._give_back([request])
        self.counts.aborted += 1
        told = {"reason": ABORT_LAST, **(json.loads(detail) if detail else {})}
        self._emit("abort", start_fs, self.step, request.number, committed, pages, _compact(told))
        self._end(request, "aborted", ABORT_LAST, start_fs)

    def _abort_retracted(self, request: Request, start_fs: int) -> None:
        self.counts.aborted += 1
        self._emit("abort", start_fs, self.step, request.number, 0, 0, _compact({"reason": QUEUE_FULL}))
        self._end(request, "aborted", QUEUE_FULL, start_fs)

    def _queue_is_full(self) -> bool:
        limit = self.limits.max_queued
        return limit is not None and len(self.waiting) + 1 > limit

    # --- results ---------------------------------------------------------------------------------------------

    def _hand_over(self, launched: Pass, end_fs: int) -> None:
        """Process the result that is due now: this pass's own, or with overlap the one before it."""
        if not self.limits.overlap:
            self._process(launched)
            self.now_fs = end_fs
            return
        due, self._flight = self._flight, launched
        if due is not None:
            self._process(due)
            self.now_fs = due.end_fs

    def _process(self, result: Pass) -> None:
        """Each request of the pass has one more token; those that reach their end give everything back."""
        if result.chosen:
            finished = self._process_prefill(result)
        else:
            finished = self._process_decode(result)
        if finished:
            self._finish(finished, result)

    def _process_prefill(self, result: Pass) -> list[Request]:
        """The members have joined the running batch with overlap (some may have left it again), else they wait to."""
        running = self.running
        finished = []
        for request in result.members:
            if request.retracted:
                continue
            if request.first_token_fs < 0:
                request.first_token_fs = result.end_fs
            self._gained(1)
            if request.join:
                request.pending = 0
                done = request.base_generated + running.known >= request.target
            else:
                request.generated += 1
                done = request.generated >= request.target
            if done:
                finished.append(request)
        ended = [r for r in finished if r.join]
        if ended:
            running.leave(ended)
            running.full = False
        return finished

    def _process_decode(self, result: Pass) -> list[Request]:
        """Every member of the running batch was in the last decode pass: whoever joined since was prefilled in a pass
        behind it, and joins only after this result."""
        running = self.running
        running.known += 1
        self._gained(len(running) + len(result.leaving))
        finished = running.ended()
        if finished:
            running.leave(finished)
            running.full = False
        for request in result.leaving:
            request.generated += 1
        if result.leaving or len(finished) > 1:
            # Memory goes back in the order of the batch.
            ending = {id(r) for r in (*finished, *result.leaving)}
            finished = [r for r in result.members if id(r) in ending]
        return finished

    def _gained(self, tokens: int) -> None:
        self.counts.generated_tokens += tokens
        self._fruitless = 0

    def _finish(self, finished: list[Request], result: Pass) -> None:
        p = self._page
        self._give_back(finished)
        self.counts.finished += len(finished)
        for request in finished:
            pages = -(-request.computed // p)
            self._emit("finish", result.end_fs, result.step, request.number, request.generated, pages)
            reason = "length" if request.generated >= request.max_new_tokens else "stop"
            self._end(request, "finished", reason, result.end_fs)

    def _end(self, request: Request, outcome: str, reason: str, time_fs: int) -> None:
        self._stored.pop(request.number, None)
        super()._end(request, outcome, reason, time_fs)

    # --- bookkeeping -----------------------------------------------------------------------------------------

    def _give_back(self, requests: list[Request]) -> int:
        """Free everything of these requests as one group, and their rows; returns the pages."""
        rows = [r.row for r in requests]
        pages = self.ledger.release_many(np.array(rows, dtype=np.int64))
        self._rows.extend(rows)
        for request in requests:
            request.row = 0
        self._free = self.ledger.free_pages()
        return pages

    def _took(self, pages: int) -> None:
        self._free -= pages
        self.counts.peak_used_pages = max(self.counts.peak_used_pages, self._pool_pages - self._free)

    def _launched(self, steps: int, start_fs: int, end_fs: int) -> None:
        used = self.rows_used
        self._quiet = False
        self.step += steps
        self.counts.peak_running = max(self.counts.peak_running, used)
        self.counts.running_fs += used * (end_fs - start_fs)

    def _note_ratio(self) -> None:
        ratio, counts = self.ratio.current, self.counts
        counts.ratio_min = min(counts.ratio_min, ratio)
        counts.ratio_max = max(counts.ratio_max, ratio)

    def _mark(self, time_fs: int) -> None:
        assert self.timeline is not None
        self.timeline.row(
            time_fs, self.step, self._free, self._pool_pages, self.rows_used, len(self.waiting), self.ratio.current
        )

    def _die(self, phase: str, start_fs: int, asked_tokens: int, asked_pages: int) -> None:
        """The allocator came up short behind the guard's back: the engine raises and its process ends."""
        text = out_of_memory_text(phase, self._page, asked_tokens, self._free * self._page)
        if phase == "decode":
            self.counts.decode_oom += 1
        else:
            self.counts.prefill_oom += 1
        detail = self._pressure(phase, asked_tokens, asked_pages)
        self._emit(f"{phase}_oom", start_fs, self.step, -1, asked_tokens, asked_pages, detail)
        self._emit("crash", start_fs, self.step, detail=_compact({"error": text}))
        self.now_fs = start_fs
        self.outcome = "crashed"
        self.error = text

    def _pressure(self, phase: str, asked_tokens: int, asked_pages: int) -> str:
        """What the diagnosis needs of this moment: what was asked, what there was, who held it."""
        p, running = self._page, self.running
        lengths = running.all_committed()
        held = sorted((-n // p, r.number) for n, r in zip(lengths, running.requests, strict=True))[:3]
        return _compact(
            {
                "phase": phase,
                "check": self.limits.decode_check,
                "asked_tokens": asked_tokens,
                "asked_pages": asked_pages,
                "free_pages": self._free,
                "evictable_pages": 0,
                "protected_pages": 0,
                "uncached_pages": self._pool_pages - self._free,
                "rounding_tokens": sum(-n % p for n in lengths),
                "batch": len(running),
                "ratio": self.ratio.current,
                "held": [[number, -less] for less, number in held],
            }
        )


def _compact(value: dict[str, object]) -> str:
    return json.dumps(value, separators=(",", ":"))
