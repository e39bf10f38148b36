"""What SGLang decides, as functions from a view of the state to a decision: no clock, no mutation.

Source: sglang 0.5.23, `srt/managers/scheduler.py`, `schedule_policy.py`, `schedule_batch.py`,
`mem_cache/prefill_budget.py`, `scheduler_components/new_token_ratio_tracker.py`; the function that a decision follows
is named at each. Prefix cache off.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from pagestorm.engine.batch import RunningBatch
from pagestorm.engine.request import Request

CLIP_NEW_TOKENS = 4096
"""Most output tokens that admission reserves for one request (SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION)."""
RETRACT_DECODE_STEPS = 20
"""Tokens a request that SGLang counts on top of those generated when it estimates the ratio after a retraction."""
RATIO_INIT = 0.7
"""SGLANG_INIT_NEW_TOKEN_RATIO; the two below are SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR and _DECAY_STEPS."""
RATIO_FLOOR_FACTOR = 0.14
RATIO_DECAY_STEPS = 600
IGNORE_EOS_RESERVE_TOKENS = 1
INPUT_MARGIN_TOKENS = 6
"""A prompt of max_req_len - 5 or more is refused; max_req_len is itself one less than the capacity."""

ABORT_LAST = "Out of memory even after retracting all other requests in the decode batch. Aborting the last request."
QUEUE_FULL = "The request queue is full."


def ceil_pages(tokens: int, page_size: int) -> int:
    """`tokens` rounded up to whole pages, in tokens."""
    return -(-tokens // page_size) * page_size


# --- arrival ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Capacity:
    """What bounds a single request: the pool and the context, in tokens."""

    pool_tokens: int
    context_length: int
    page_size: int
    clips_output: bool = True
    """False emulates an engine that trusts max_new_tokens, so that one request can outgrow the pool."""

    @property
    def longest_input_tokens(self) -> int:
        """Prompts must be shorter than this (`tp_worker.py`: max_req_len - 5)."""
        return min(self.context_length, self.pool_tokens) - INPUT_MARGIN_TOKENS

    def clip(self, input_tokens: int, asked_tokens: int) -> int:
        """max_new_tokens after `init_req_max_new_tokens` and the allocator's `max_new_tokens_for_memory`."""
        if not self.clips_output:
            return asked_tokens
        by_length = min(self.context_length, self.pool_tokens) - 1 - input_tokens - 1
        by_pages = self.pool_tokens - ceil_pages(input_tokens, self.page_size) - self.page_size - 1
        return max(0, min(asked_tokens, by_length, by_pages))

    def refusal(self, input_tokens: int) -> str:
        """The engine's answer to a prompt that is too long, or an empty string (`validate_input_length`)."""
        if input_tokens < self.longest_input_tokens:
            return ""
        return (
            f"Input length ({input_tokens} tokens) exceeds the maximum allowed length "
            f"({self.longest_input_tokens} tokens). Use a shorter input or enable --allow-auto-truncate."
        )


# --- the new-token ratio ---------------------------------------------------------------------------------------


class NewTokenRatio:
    """The share of max_new_tokens that admission still expects running requests to generate.

    Kept as the float that the engine keeps and moved by the same operations in the same order: floor and decay are
    computed once, each decode step subtracts, so a product would differ in the last bits.
    """

    __slots__ = ("current", "decay", "floor", "init")

    def __init__(
        self,
        conservativeness: float,
        init: float = RATIO_INIT,
        floor_factor: float = RATIO_FLOOR_FACTOR,
        decay_steps: int = RATIO_DECAY_STEPS,
    ) -> None:
        self.init = min(init * conservativeness, 1.0)
        self.floor = min(self.init * floor_factor, 1.0)
        self.decay = (self.init - self.floor) / decay_steps
        self.current = self.init

    def decay_steps(self, steps: int) -> None:
        """`steps` decode steps that passed their memory check."""
        current, decay, floor = self.current, self.decay, self.floor
        for _ in range(steps):
            current -= decay
            if current <= floor:
                current = floor
                break
        self.current = current

    def reset(self) -> None:
        """The engine is fully idle."""
        self.current = self.init


def ratio_after_retraction(generated: Sequence[int], max_new: Sequence[int]) -> float:
    """New ratio over the requests that stay (`estimate_new_token_ratio_after_retract`); 0 when none does."""
    return min(1.0, (sum(generated) + RETRACT_DECODE_STEPS * len(generated)) / (sum(max_new) + 1))


# --- admission -------------------------------------------------------------------------------------------------


class Verdict(Enum):
    """Why a pass stopped taking requests."""

    CONTINUE = "continue"
    NO_TOKEN = "no_token"
    OTHER = "other"


Decoding = tuple[int, int, bool, int]
"""(max_new_tokens, generated, ignore_eos, input_tokens) of a running request."""


@dataclass(slots=True)
class AdmissionView:
    """All that the choice of a prefill batch depends on (`_get_new_batch_prefill_raw`). Nobody changes one; it is not
    frozen because one is made for every admission that is tried, and freezing costs more than the rest of it."""

    waiting: Iterable[Request]
    chunked: Request | None
    """The one request whose prompt is cut and not finished."""
    available_tokens: int
    """Free plus evictable tokens of the pool."""
    ratio: float
    page_size: int
    chunk_tokens: int | None
    """chunked_prefill_size, None when chunking is off."""
    max_prefill_tokens: int
    free_rows: int
    max_running: int
    full: bool
    decoding: Sequence[Decoding]
    """The running batch, in order."""


@dataclass(slots=True)
class Admission:
    """The prefill batch of one pass: (request, new tokens), the continued chunk first."""

    chosen: list[tuple[Request, int]] = field(default_factory=list)
    chunked: Request | None = None
    """The request whose prompt stays cut after this pass."""
    full: bool = False
    admitted: int = 0
    """How many of `chosen` come from the waiting queue, from its head."""
    short_tokens: float | None = None
    """What the first refused candidate asked beyond what was left, in tokens."""
    asked_tokens: int = 0


def running_reserve(decoding: Sequence[Decoding], ratio: float) -> float:
    """Tokens reserved for what running requests will still generate (`_get_running_request_total_token_offset`).

    Summed one by one in batch order, as the engine does on Python 3.11: the comparisons that use it are exact.
    """
    total = 0.0
    for max_new, generated, fixed, _ in decoding:
        left = max_new - generated
        total += (left if left < CLIP_NEW_TOKENS else CLIP_NEW_TOKENS) * (1.0 if fixed else ratio)
    return total


class PrefillBudget:
    """What one prefill pass may still take (`PrefillAdder` over `PrefillBudget`): four counters, all in tokens."""

    __slots__ = (
        "_available",
        "_chunk",
        "_current_offset",
        "_page",
        "_states",
        "_total_offset",
        "_view",
        "input_left",
    )

    def __init__(self, view: AdmissionView) -> None:
        self._view = view
        self._page = view.page_size
        self._available = view.available_tokens
        self._total_offset = running_reserve(view.decoding, view.ratio)
        self._current_offset = 0
        self._chunk = view.chunk_tokens
        self.input_left = view.max_prefill_tokens
        self._states: list[tuple[float, int]] | None = None

    @property
    def remaining_total(self) -> float:
        return self._available - self._total_offset

    @property
    def remaining_current(self) -> int:
        return self._available - self._current_offset

    def verdict(self) -> Verdict:
        """Whether another candidate may be tried (`budget_state`)."""
        if not (self.remaining_total > 0 and self.remaining_current > 0):
            return Verdict.NO_TOKEN
        if self.input_left <= 0 or (self._chunk is not None and self._chunk <= 0):
            return Verdict.OTHER
        return Verdict.CONTINUE

    def _charge(self, tokens: int, reserve_tokens: int) -> None:
        paged = ceil_pages(tokens, self._page)
        self._total_offset += paged + self._page + reserve_tokens
        self._current_offset += paged + self._page
        self.input_left -= paged
        if self._chunk is not None:
            self._chunk -= paged

    def continue_chunk(self, request: Request) -> tuple[int, bool]:
        """New tokens of the request that was cut before, and whether it stays cut (`add_chunked_req`).

        It must make progress to give its memory back one day: with nothing left it takes a whole chunk.
        """
        assert self._chunk is not None, "a prompt is cut only when chunking is on"
        limit = min(self._chunk, int(self.remaining_total))
        if limit <= 0:
            limit = self._chunk
        extend = request.sequence_tokens - request.computed
        cut = extend > limit
        tokens = min(extend, limit)
        self._charge(tokens, 0 if cut else min(request.max_new_tokens, CLIP_NEW_TOKENS))
        return tokens, cut

    def try_request(self, request: Request, chosen: Sequence[tuple[Request, int]]) -> tuple[int, bool] | Verdict:
        """New tokens for a waiting request and whether its prompt is cut, or why it is refused (`add_one_req`)."""
        if request.ignore_eos:
            return self._try_fixed(request, chosen)
        page, chunk = self._page, self._chunk
        extend = request.sequence_tokens
        left = min(max(request.max_new_tokens - request.generated, 0), CLIP_NEW_TOKENS)
        if not extend + left + page < self.remaining_total:
            return Verdict.NO_TOKEN
        paged = ceil_pages(extend, page)
        if chunk is None:
            if chosen and paged >= self.input_left:
                return Verdict.OTHER
        elif paged > chunk:
            tokens = chunk // page * page
            if tokens <= 0:
                return Verdict.OTHER
            self._charge(tokens, 0)
            return tokens, True
        self._charge(extend, min(request.max_new_tokens, CLIP_NEW_TOKENS))
        return extend, False

    def _try_fixed(self, request: Request, chosen: Sequence[tuple[Request, int]]) -> tuple[int, bool] | Verdict:
        """With the output length known and no prefix cache SGLang plays the completions forward
        (`add_one_req_ignore_eos`): whenever the next request ends, there must be room until then."""
        extend = request.sequence_tokens
        paged = ceil_pages(extend, self._page) + self._page
        if not paged <= min(self.remaining_current, self.remaining_total):
            return Verdict.NO_TOKEN
        self._enter_states(request, chosen)
        assert self._states is not None
        room = self.remaining_current - paged
        freed = 0
        for i, (left, occupied) in enumerate(self._states):
            batch = len(self._states) - i
            if room + freed - left * batch <= IGNORE_EOS_RESERVE_TOKENS * batch:
                return Verdict.NO_TOKEN
            freed += occupied
        chunk = self._chunk
        if chunk is None or extend <= chunk:
            self._charge(extend, min(request.max_new_tokens, CLIP_NEW_TOKENS))
            return extend, False
        if chunk <= 0:
            return Verdict.OTHER
        # Not floored to a page here, unlike the other path.
        self._charge(chunk, 0)
        return chunk, True

    def _enter_states(self, request: Request, chosen: Sequence[tuple[Request, int]]) -> None:
        """(tokens left, tokens occupied) of all that would run, by tokens left."""
        if self._states is None:
            states = [self._state(request.max_new_tokens, request.generated, True, request.input_tokens)]
            states += [self._state(*row) for row in self._view.decoding]
            states += [self._state(r.max_new_tokens, r.generated, r.ignore_eos, r.input_tokens) for r, _ in chosen]
            self._states = sorted((s for s in states if s[0] > 0), key=lambda s: s[0])
            return
        new = self._state(request.max_new_tokens, request.generated, True, request.input_tokens)
        if new[0] <= 0:
            return
        # The engine's search leaves the index on the last entry when none is larger, so a largest newcomer
        # lands before it instead of behind.
        at = 0
        for at, other in enumerate(self._states):  # noqa: B007
            if new[0] <= other[0]:
                break
        self._states.insert(at, new)

    def _state(self, max_new: int, generated: int, fixed: bool, input_tokens: int) -> tuple[float, int]:
        ratio = 1.0 if fixed else self._view.ratio
        return max_new * ratio - generated, input_tokens + generated


def admit(view: AdmissionView) -> Admission:
    """The prefill batch of this pass; an empty one means that the pass decodes."""
    result = Admission(full=view.full)
    rows = min(view.max_running - len(view.decoding), view.free_rows)
    if rows <= 0 and view.chunked is None:
        result.full = True
        return result
    budget = PrefillBudget(view)
    chosen = result.chosen
    held = 0
    if view.chunked is not None:
        tokens, cut = budget.continue_chunk(view.chunked)
        chosen.append((view.chunked, tokens))
        result.chunked = view.chunked if cut else None
        held = 1
        rows = max(min(view.max_running - len(view.decoding), view.free_rows + held), 0)
    # A resumed chunk can spend the pass by itself; behind a candidate the verdict was CONTINUE.
    if budget.verdict() is Verdict.OTHER:
        return result
    for request in view.waiting:
        if len(chosen) >= rows:
            result.full = True
        if result.full:
            break
        answer = budget.try_request(request, chosen)
        if isinstance(answer, Verdict):
            verdict = answer
            result.asked_tokens = request.sequence_tokens
            result.short_tokens = budget.remaining_total
        else:
            tokens, cut = answer
            chosen.append((request, tokens))
            result.admitted += 1
            if cut:
                result.chunked = request
            verdict = budget.verdict()
        if verdict is not Verdict.CONTINUE:
            if verdict is Verdict.NO_TOKEN:
                result.full = bool(chosen) or bool(view.decoding)
            break
    return result


# --- the decode check and retraction ---------------------------------------------------------------------------

CHECKS = ("pages", "tokens", "none")


def pages_to_open(committed: Sequence[int], page_size: int) -> int:
    """Pages that the next decode step of these requests opens (`new_tokens_required_next_decode`, plain decode)."""
    return sum(1 for tokens in committed if tokens % page_size == 0)


def decode_fits(check: str, batch: int, opening: int, page_size: int, free_pages: int) -> bool:
    """The guard of a decode step of `batch` requests of which `opening` open a page.

    `pages` is the engine's own; `tokens` counts one token a request, as the engine did before its PR 4913 (thread
    sgl-project/sglang#4602); `none` guards nothing.
    """
    if check == "pages":
        return opening <= free_pages
    if check == "tokens":
        return batch <= free_pages * page_size
    return True


def decode_horizon(check: str, running: RunningBatch, page_size: int, free_pages: int) -> int:
    """For how many decode steps in a row the guard says yes and the pool delivers."""
    steps = running.page_steps(free_pages)
    if check == "tokens":
        # At a step the guard wants ceil(batch / p) pages free before the step's own openings.
        spare = free_pages + -len(running) // page_size
        steps = min(steps, running.page_steps(spare) + 1) if spare >= 0 else 0
    return steps


@dataclass(frozen=True, slots=True)
class Retraction:
    """Who goes, in order, who stays, in the batch's new order, and whether the last one is aborted instead."""

    victims: list[int]
    kept: list[int]
    aborted: int | None


def retract(
    check: str,
    generated: Sequence[int],
    input_tokens: Sequence[int],
    committed: Sequence[int],
    page_size: int,
    free_pages: int,
) -> Retraction:
    """Victims of a failed decode check, as positions in the batch (`retract_decode`).

    Fewest generated tokens first, then the longest input, among equals the later in the batch; one at least unless
    the batch is a single request, then until the next step fits. A single one that still does not fit is aborted.
    """
    order = sorted(range(len(generated)), key=lambda i: (-generated[i], input_tokens[i]))
    opening = pages_to_open(committed, page_size)
    free = free_pages
    victims: list[int] = []
    while len(order) > 1 and not (victims and decode_fits(check, len(order), opening, page_size, free)):
        victim = order.pop()
        victims.append(victim)
        free += -(-committed[victim] // page_size)
        opening -= committed[victim] % page_size == 0
    alone = len(order) == 1 and not decode_fits(check, 1, opening, page_size, free)
    return Retraction(victims, order, order.pop() if alone else None)


# --- the words operators grep for ------------------------------------------------------------------------------


def out_of_memory_text(phase: str, page_size: int, asked_tokens: int, available_tokens: int) -> str:
    """The message with which the process dies (`mem_cache/allocation.py`); `phase` is decode or prefill."""
    opening = "Out of memory." if page_size == 1 else f"{phase.capitalize()} out of memory."
    return (
        f"{opening} Try to lower your batch size.\n"
        f"Try to allocate {asked_tokens} tokens.\n"
        f"Available full tokens: {available_tokens} "
        f"(full_available_size={available_tokens} + full_evictable_size_=0)\n"
    )
