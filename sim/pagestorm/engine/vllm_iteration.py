"""The machine that carries vLLM's decisions out: one planning round after another, leaping where nothing happens.

A round plans one pass over running and newly admitted requests at the time `now`; its result is processed at its end,
and that is the time of the next round (the synchronous `Scheduler`; `AsyncScheduler` plans one pass ahead). A pass in
which everybody decodes and nobody can be admitted repeats until a request ends, blocks run short or somebody arrives:
such passes are launched as one leap, and a step is a leap of one.

While everybody decodes the free blocks only become fewer, so the head of the queue that does not fit keeps not fitting
(`stays_out` says what the prefix cache changes about that).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from pagestorm.engine.machine import FOREVER_FS, Counts, Levels, Machine, Timeline
from pagestorm.engine.request import Request
from pagestorm.engine.vllm import (
    RunningPlan,
    RunningView,
    VllmLimits,
    block_steps,
    blocks_to_open,
    clip,
    first_tokens,
    fits,
    refusal,
    schedule_running,
    stays_out,
)
from pagestorm.engine.vllm_batch import Bools, VllmBatch
from pagestorm.engine.vllm_request import VllmRequest
from pagestorm.engine.waiting import ArrivalQueue, PriorityQueue, WaitingQueue
from pagestorm.events import EventLog
from pagestorm.memory.blocks import Blocks, Hit
from pagestorm.memory.ledger import Ints
from pagestorm.steptime.contract import StepTime

FRUITLESS_PREEMPTIONS = 1000
"""Preemptions in a row without one output token after which the run counts as livelocked."""


@dataclass(slots=True)
class VllmCounts(Counts):
    """What a run of vLLM counts."""

    preemptions: int = 0
    preempted_requests: int = 0
    max_preemptions_per_request: int = 0
    cached_tokens: int = 0
    """Tokens that prefix hits spared, recomputes included."""


class Entry(NamedTuple):
    """A waiting request that enters a pass."""

    request: VllmRequest
    tokens: int
    hit: Hit
    blocks: int
    """Blocks that it takes out of the free ones, those of its hit that nobody held included."""


class VllmEngine(Machine):
    """vLLM's scheduler over `Blocks`."""

    request_class: ClassVar[type[Request]] = VllmRequest

    def __init__(
        self,
        limits: VllmLimits,
        blocks: Blocks,
        steptime: StepTime,
        log: EventLog,
        *,
        step_only: bool = False,
        timeline: Timeline | None = None,
    ) -> None:
        super().__init__(steptime, log, step_only=step_only, timeline=timeline)
        self.limits = limits
        self.blocks = blocks
        self.waiting: WaitingQueue = ArrivalQueue() if limits.policy == "fcfs" else PriorityQueue()
        self.running = VllmBatch()
        self._counts = VllmCounts()
        self._rows = list(range(limits.max_num_seqs, 0, -1))
        self._fruitless = 0
        # The fixed cost of a pass is in both halves of one that prefills and decodes.
        self._empty_pass_fs = steptime.decode_fs(0, 0)

    # --- outside -----------------------------------------------------------------------------------------------

    @property
    def counts(self) -> VllmCounts:
        return self._counts

    @property
    def idle(self) -> bool:
        return self.blocked and not len(self.waiting) and not len(self.running)

    @property
    def evicted_tokens(self) -> int:
        """Tokens that the prefix cache lost because their blocks were needed."""
        return self.blocks.evicted_blocks * self.limits.block_size

    @property
    def total_pages(self) -> int:
        return self.blocks.total_blocks

    def audit(self) -> None:
        self.blocks.audit()

    def unserved(self) -> list[Request]:
        for request, tokens in zip(self.running.requests, self.running.tokens.tolist(), strict=True):
            request.generated = tokens - request.input_tokens
        return sorted((*self.waiting, *self.running.requests), key=lambda r: r.number)

    def give_up(self) -> None:
        if len(self.waiting) and not self.outcome:
            self.outcome = "stalled"
            head, limits = self.waiting.head, self.limits
            need = limits.blocks(limits.room(head.sequence_tokens))
            self.error = (
                f"request {head.number} can never be scheduled: its {head.sequence_tokens} tokens need {need} blocks "
                f"of {limits.block_size}, and {self.blocks.free_blocks} of {self.blocks.total_blocks} are free"
            )

    def _refusal(self, request: Request) -> tuple[str, int]:
        limit = self.limits.max_model_len
        return refusal(request.input_tokens, request.asked_tokens, limit), limit

    def _enqueue(self, request: Request) -> int:
        assert isinstance(request, VllmRequest), "this engine schedules requests with a priority and a text"
        request.max_new_tokens = clip(request.input_tokens, request.asked_tokens, self.limits.max_model_len)
        natural = request.max_new_tokens if request.ignore_eos else request.output_tokens
        request.target = max(1, min(natural, request.max_new_tokens))
        request.text = self.blocks.text(request.number, request.prefix, request.input_tokens)
        self.waiting.push(request)
        return len(self.waiting)

    def _levels(self) -> Levels:
        blocks = self.blocks
        cached = blocks.cached_blocks
        return Levels(blocks.free_blocks - cached, cached, len(self.running), len(self.waiting))

    # --- one round ---------------------------------------------------------------------------------------------

    def _round(self, until_fs: int) -> None:
        running, limits = self.running, self.limits
        if len(running) and not running.prefilling:
            need = blocks_to_open(limits, running.computed)
            if need <= self.blocks.free_blocks and not self._somebody_may_enter(need):
                self._decode(until_fs)
                return
        self._step()

    def _cap(self) -> int:
        return self.limits.prefill_cap(len(self.running) + len(self.waiting))

    def _somebody_may_enter(self, need: int) -> bool:
        """False when it is certain that nobody is admitted in a pass in which all decode and take `need` blocks."""
        running, limits, blocks = len(self.running), self.limits, self.blocks
        budget = limits.max_num_batched_tokens - running
        if not len(self.waiting) or running >= limits.max_num_seqs or budget <= 0:
            return False
        head = self.waiting.head
        hit = blocks.lookup(head.text, head.sequence_tokens)
        tokens = first_tokens(limits, head.sequence_tokens, hit.tokens, budget, self._cap())
        if not tokens:
            return False
        if head.text is None:
            return fits(limits, head.sequence_tokens, hit, tokens, blocks.free_blocks - need, running)
        return not stays_out(limits, head.sequence_tokens, hit, blocks.free_blocks)

    # --- everybody decodes -------------------------------------------------------------------------------------

    def _decode(self, until_fs: int) -> None:
        """A pass in which all decode, or a leap of them."""
        running, limits = self.running, self.limits
        batch = len(running)
        context = int(running.computed.sum()) + batch
        room = self._room()
        steps = self._horizon(room, batch, context, until_fs)
        start_fs = self.now_fs
        if self.timeline is not None:
            self._mark(start_fs)
        if limits.lookahead_tokens and int(room.max()) + steps > limits.max_model_len:
            # The drafter's room ends at the context's end: some rows take less than a token.
            steps = 1
            grown = np.minimum(room + 1, limits.max_model_len)
            taken = self.blocks.take(running.rows, room, grown, running.computed + 1)
        else:
            taken = self.blocks.decode(running.rows, room, running.computed, steps)
        running.decode(steps)
        end_fs = start_fs + self.steptime.decode_run_fs(batch, context, steps)
        counts = self._counts
        counts.decode_steps += steps
        counts.generated_tokens += steps * batch
        self._fruitless = 0
        self._tell_leap(start_fs, steps, taken)
        self._passed(steps, start_fs, end_fs)
        ended = np.flatnonzero(running.tokens >= running.end)
        if len(ended):
            self._finish(ended.tolist(), end_fs)
        if self.timeline is not None:
            self._mark(end_fs)

    def _room(self) -> Ints:
        """Slots that each running request holds."""
        limits, computed = self.limits, self.running.computed
        if not limits.lookahead_tokens:
            return computed
        return np.minimum(computed + limits.lookahead_tokens, limits.max_model_len)

    def _horizon(self, room: Ints, batch: int, context: int, until_fs: int) -> int:
        """For how many passes from here on nothing happens but decoding, this one included."""
        if self._step_only:
            return 1
        limits, running = self.limits, self.running
        steps = int((running.end - running.tokens).min())
        if steps > 1:
            steps = min(steps, block_steps(room, limits.block_size, self.blocks.free_blocks))
        if limits.lookahead_tokens:
            steps = min(steps, limits.max_model_len - int(room.max()))
        if steps <= 1:
            return 1
        if until_fs < FOREVER_FS:
            steps = self.steptime.steps_within(batch, context, until_fs - self.now_fs, steps)
        return max(1, steps)

    # --- a pass in which something else happens ------------------------------------------------------------------

    def _step(self) -> None:
        """One pass: tokens for the running requests, preemption for want of blocks, admission."""
        running, limits = self.running, self.limits
        start_fs = self.now_fs
        cap = self._cap()
        granted = np.zeros(len(running), dtype=np.int64)
        blocks = granted.copy()
        preempted = 0
        if len(running):
            plan, granted = self._plan(cap)
            if plan is None:
                blocks = self._grant(granted)
            else:
                preempted = len(plan.preempted)
                granted, blocks = self._carry_out(plan, start_fs)
        entered: list[Entry] = []
        if not preempted:
            entered = self._admit(limits.max_num_batched_tokens - int(granted.sum()), cap)
            granted = np.append(granted, [entry.tokens for entry in entered]).astype(np.int64)
            blocks = np.append(blocks, [entry.blocks for entry in entered]).astype(np.int64)
        if not granted.any():
            # What preempted itself is tried again at once; otherwise only an arrival can change anything.
            self.blocked = not preempted
            return
        self._launch(start_fs, granted, blocks, entered)

    def _plan(self, cap: int) -> tuple[RunningPlan | None, Ints]:
        """Tokens for the running requests; with a plan of who goes when the blocks do not suffice."""
        running, limits = self.running, self.limits
        wanted = running.tokens - running.computed
        if cap:
            wanted = np.minimum(wanted, cap)
        budget = limits.max_num_batched_tokens
        granted = np.clip(budget - (np.cumsum(wanted) - wanted), 0, wanted)
        if int(self._new_blocks(granted).sum()) <= self.blocks.free_blocks:
            return None, granted
        rows, requests = running.rows.tolist(), running.requests
        preview = self.blocks.preview()
        plan = schedule_running(
            RunningView(
                limits=limits,
                computed=running.computed.tolist(),
                wanted=wanted.tolist(),
                budget=budget,
                free_blocks=self.blocks.free_blocks,
                rank=lambda place: (requests[place].priority, requests[place].arrive_fs),
                give=lambda place: preview.give(rows[place]),
            )
        )
        return plan, granted

    def _new_blocks(self, granted: Ints) -> Ints:
        """Blocks that each running request takes for its tokens."""
        limits, computed, size = self.limits, self.running.computed, self.limits.block_size
        if not limits.lookahead_tokens:
            return -(-(computed + granted) // size) - -(-computed // size)
        grown = np.minimum(computed + granted + limits.lookahead_tokens, limits.max_model_len)
        return np.where(granted > 0, -(-grown // size) - -(-self._room() // size), 0)

    def _grant(self, granted: Ints, places: Sequence[int] | None = None) -> Ints:
        """Take the blocks for these tokens, in running order (or for these places alone); returns blocks by place."""
        running, limits = self.running, self.limits
        blocks = self._new_blocks(granted)
        where = np.flatnonzero(granted) if places is None else np.array(places, dtype=np.int64)
        if len(where):
            computed = (running.computed + granted)[where]
            old = self._room()[where]
            new = computed
            if limits.lookahead_tokens:
                new = np.minimum(computed + limits.lookahead_tokens, limits.max_model_len)
            self.blocks.take(running.rows[where], old, new, computed)
        return blocks

    # --- preemption ----------------------------------------------------------------------------------------------

    def _carry_out(self, plan: RunningPlan, start_fs: int) -> tuple[Ints, Ints]:
        """Take and give blocks in the engine's order; returns tokens and blocks of those that still run."""
        running = self.running
        given = np.zeros(len(running), dtype=np.int64)
        for place, tokens in plan.actions:
            given[place] = max(given[place], tokens)
        blocks = self._new_blocks(given)
        detail = self._pressure(int(blocks.sum()), int(given.sum()))
        freed: dict[int, int] = {}
        pending: list[int] = []
        for place, tokens in plan.actions:
            if tokens:
                pending.append(place)
                continue
            self._grant(given, pending)
            pending = []
            net = self.blocks.give([int(running.rows[place])])
            freed[place] = net - (int(blocks[place]) if given[place] else 0)
        self._grant(given, pending)
        requests = running.requests
        for place in plan.preempted:
            self._preempt(requests[place], int(running.computed[place]))
        running.leave(sorted(plan.preempted))
        for place in plan.preempted:
            request = requests[place]
            self.waiting.put_back(request)
        self._counts.peak_waiting = max(self._counts.peak_waiting, len(self.waiting))
        for place in plan.preempted:
            request = requests[place]
            self._emit("preempt", start_fs, self.step, request.number, request.stored_tokens, freed[place], detail)
            detail = ""
        if self._fruitless > FRUITLESS_PREEMPTIONS:
            self.outcome = "livelocked"
            self.error = (
                f"{self._fruitless} preemptions in a row without one output token; "
                f"the last one took request {requests[plan.preempted[-1]].number}"
            )
        granted = np.zeros_like(given)
        for place, tokens in plan.granted.items():
            granted[place] = tokens
        return np.delete(granted, plan.preempted), np.delete(blocks, plan.preempted)

    def _preempt(self, request: VllmRequest, computed: int) -> None:
        counts = self._counts
        self._rows.append(request.row)
        request.row = 0
        request.stored_tokens = computed
        request.preemptions += 1
        counts.preemptions += 1
        counts.preempted_requests += request.preemptions == 1
        counts.max_preemptions_per_request = max(counts.max_preemptions_per_request, request.preemptions)
        self._fruitless += 1

    # --- admission -----------------------------------------------------------------------------------------------

    def _admit(self, budget: int, cap: int) -> list[Entry]:
        """Waiting requests that enter this pass, in the queue's order until one does not fit."""
        limits, waiting, blocks = self.limits, self.waiting, self.blocks
        entered: list[Entry] = []
        running = len(self.running)
        while budget > 0 and len(waiting) and running < limits.max_num_seqs:
            request = waiting.head
            hit = blocks.lookup(request.text, request.sequence_tokens)
            tokens = first_tokens(limits, request.sequence_tokens, hit.tokens, budget, cap)
            if not tokens or not fits(limits, request.sequence_tokens, hit, tokens, blocks.free_blocks, running):
                break
            waiting.pop()
            entered.append(self._enter(request, tokens, hit))
            running += 1
            budget -= tokens
        if entered:
            self.running.join([entry.request for entry in entered], [entry.hit.tokens for entry in entered])
        return entered

    def _enter(self, request: VllmRequest, tokens: int, hit: Hit) -> Entry:
        """Row and blocks for an admitted request."""
        blocks, known = self.blocks, hit.tokens + tokens
        request.row = self._rows.pop()
        before = blocks.free_blocks
        blocks.adopt(request.row, request.text, hit)
        row, old, new, computed = np.array([[request.row], [hit.tokens], [self.limits.room(known)], [known]])
        blocks.take(row, old, new, computed)
        return Entry(request, tokens, hit, before - blocks.free_blocks)

    # --- launch and result ---------------------------------------------------------------------------------------

    def _launch(self, start_fs: int, granted: Ints, blocks: Ints, entered: Sequence[Entry]) -> None:
        running, counts = self.running, self._counts
        if self.timeline is not None:
            self._mark(start_fs)
        prefill = running.prefill & (granted > 0)
        self._tell(start_fs, granted, blocks, prefill, entered)
        end_fs = start_fs + self._pass_fs(granted, prefill)
        counts.prefill_batches += bool(prefill.any())
        counts.decode_steps += not prefill.any()
        sampled = running.compute(granted)
        gained = int(np.count_nonzero(sampled))
        counts.generated_tokens += gained
        if gained:
            self._fruitless = 0
        self._passed(1, start_fs, end_fs)
        for place in np.flatnonzero(sampled & prefill).tolist():
            request = running.requests[place]
            if request.first_token_fs < 0:
                request.first_token_fs = end_fs
        ended = np.flatnonzero(sampled & (running.tokens >= running.end))
        if len(ended):
            self._finish(ended.tolist(), end_fs)
        if self.timeline is not None:
            self._mark(end_fs)

    def _pass_fs(self, granted: Ints, prefill: Bools) -> int:
        """Duration of a pass: its prompts, its decode steps, or both at the fixed cost of one."""
        computed = self.running.computed
        decode = (granted > 0) & ~prefill
        batch = int(np.count_nonzero(decode))
        context = int((computed[decode]).sum()) + batch
        if not prefill.any():
            return self.steptime.decode_fs(batch, context)
        prefill_fs = self.steptime.prefill_fs(granted[prefill].tolist(), computed[prefill].tolist())
        return prefill_fs + self.steptime.decode_fs(batch, context) - self._empty_pass_fs if batch else prefill_fs

    def _finish(self, places: list[int], end_fs: int) -> None:
        running = self.running
        finished = [running.requests[place] for place in places]
        rows = [r.row for r in finished]
        freed = [self.blocks.give([row]) for row in rows]
        self._rows.extend(rows)
        running.leave(places)
        self._counts.finished += len(finished)
        for request, blocks in zip(finished, freed, strict=True):
            request.row = 0
            self._emit("finish", end_fs, self.step - 1, request.number, request.generated, blocks)
            reason = "length" if request.generated >= request.max_new_tokens else "stop"
            self._end(request, "finished", reason, end_fs)

    # --- the record ----------------------------------------------------------------------------------------------

    def _tell(self, start_fs: int, granted: Ints, blocks: Ints, prefill: Bools, entered: Sequence[Entry]) -> None:
        """Events of a planned pass, all with the state after it was planned."""
        running, counts = self.running, self._counts
        first = len(running) - len(entered)
        computed, tokens = running.computed.tolist(), running.tokens.tolist()
        for place in np.flatnonzero(prefill).tolist():
            request, start, n = running.requests[place], computed[place], int(granted[place])
            if place >= first:
                hit = entered[place - first].hit
                if request.admit_fs < 0:
                    request.admit_fs = start_fs
                request.cached_tokens += hit.tokens
                counts.cached_tokens += hit.tokens
                detail = f'{{"cached_tokens":{hit.tokens}}}' if hit.tokens else ""
                self._emit("admit", start_fs, self.step, request.number, tokens[place], detail=detail)
            request.prefilled_tokens += n
            counts.recomputed_tokens += max(0, min(n, request.stored_tokens - start))
            detail = '{"chunk":true}' if start + n < tokens[place] else ""
            self._emit("prefill", start_fs, self.step, request.number, n, int(blocks[place]), detail)
        decoding = (granted > 0) & ~prefill
        if decoding.any():
            self._tell_leap(start_fs, 1, int(blocks[decoding].sum()))

    def _tell_leap(self, start_fs: int, steps: int, taken: int) -> None:
        self._counts.leaps += 1
        if self.log.wants_leaps:
            self._emit("leap", start_fs, self.step, tokens=steps, pages=taken)

    def _passed(self, steps: int, start_fs: int, end_fs: int) -> None:
        counts, running = self._counts, len(self.running)
        self.step += steps
        self.now_fs = end_fs
        counts.peak_running = max(counts.peak_running, running)
        counts.peak_used_pages = max(counts.peak_used_pages, self.blocks.total_blocks - self.blocks.free_blocks)
        counts.running_fs += running * (end_fs - start_fs)

    def _mark(self, time_fs: int) -> None:
        assert self.timeline is not None
        free = self.blocks.free_blocks
        total = self.blocks.total_blocks
        self.timeline.row(time_fs, self.step, free, total, len(self.running), len(self.waiting), math.nan)

    def _pressure(self, asked_blocks: int, asked_tokens: int) -> str:
        """What the diagnosis needs of the moment before a preemption: what was asked, what there was, who held it."""
        running, limits, blocks = self.running, self.limits, self.blocks
        room = self._room()
        pages = -(-room // limits.block_size)
        held = sorted((-n, r.number) for n, r in zip(pages.tolist(), running.requests, strict=True))[:3]
        free, cached = blocks.free_blocks, blocks.cached_blocks
        told = {
            "phase": "prefill" if running.prefilling else "decode",
            "asked_tokens": asked_tokens,
            "asked_pages": asked_blocks,
            "free_pages": free - cached,
            "evictable_pages": cached,
            "protected_pages": 0,
            "uncached_pages": blocks.total_blocks - free,
            "rounding_tokens": int((pages * limits.block_size - running.computed).sum()),
            "batch": len(running),
            "held": [[number, -negative] for negative, number in held],
        }
        return json.dumps(told, separators=(",", ":"))
