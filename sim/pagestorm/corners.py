"""What a run reached: corners of the scenario space that a hunt must not miss, and the figures for its histograms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pagestorm.engine.sglang import ABORT_LAST, QUEUE_FULL
from pagestorm.events import RawEvent
from pagestorm.runs import Result
from pagestorm.scenario.schema import ClosedLoop, ExplicitRequest

IN_PHASE_REQUESTS = 4
BURST_REQUESTS = 8
LONG_DECODE_TOKENS = 200


@dataclass(frozen=True)
class Seen:
    """A finished run of written-out requests, events kept."""

    result: Result

    @cached_property
    def kinds(self) -> dict[str, list[RawEvent]]:
        """Events by kind."""
        found: dict[str, list[RawEvent]] = {}
        for event in self.result.raw_events:
            found.setdefault(event[3], []).append(event)
        return found

    @property
    def page_size(self) -> int:
        return self.result.scenario.engine.page_size

    @property
    def requests(self) -> tuple[ExplicitRequest, ...]:
        return self.result.scenario.workload.requests or ()

    def flag(self, name: str) -> Any:
        """A flag of the engine, None where this kind of engine has none of that name."""
        return getattr(self.result.scenario.engine, name, None)

    @cached_property
    def chunked(self) -> int:
        """Prompts that were cut."""
        return len({event[4] for event in self.kinds.get("prefill", ()) if event[12]})

    @cached_property
    def reasons(self) -> set[str]:
        """Why requests ended: length, stop, or the engine's words for a refusal or an abort."""
        return {str(reason) for reason in self.result.requests["reason"]}

    def counted(self, key: str) -> int:
        """A number of the summary, 0 where it does not apply."""
        value = self.result.summary.get(key)
        return int(value) if value is not None else 0

    @property
    def peak_use(self) -> float:
        """Most pages in use over the pages of the pool."""
        return self.counted("peak_used_pages") / max(1, self.counted("pool_pages"))

    @property
    def shortages(self) -> int:
        """Times that memory gave way: retractions, preemptions, out of memory."""
        keys = ("retractions", "preemptions", "decode_oom", "prefill_oom")
        return sum(self.counted(key) for key in keys) + self._aborted_for_memory

    @property
    def _aborted_for_memory(self) -> bool:
        return ABORT_LAST in self.reasons


Corner = Callable[[Seen], bool]
"""Whether a run reached it."""


def _in_phase(seen: Seen) -> bool:
    """Prompts that end at the same place of a page, so that all of them open the next one together."""
    phases = Counter(r.input_tokens % seen.page_size for r in seen.requests)
    return seen.page_size > 1 and len(phases) == 1 and phases.total() >= IN_PHASE_REQUESTS


def _burst(seen: Seen) -> bool:
    return max(Counter(event[0] for event in seen.kinds.get("arrive", ())).values(), default=0) >= BURST_REQUESTS


def _long_decode(seen: Seen) -> bool:
    return any(event[5] >= LONG_DECODE_TOKENS for event in seen.kinds.get("finish", ()))


def _tiny_chunks(seen: Seen) -> bool:
    budget = seen.flag("chunked_prefill_size") or seen.flag("max_num_batched_tokens")
    return budget == max(seen.page_size, int(seen.flag("max_num_seqs") or 0)) and seen.chunked > 0


def _on_a_round(seen: Seen) -> bool:
    """An arrival at the very start of a pass that was not the first."""
    starts = {event[0] for event in seen.kinds.get("prefill", ()) if event[2] > 0}
    return any(event[0] in starts and event[2] >= 0 for event in seen.kinds.get("arrive", ()))


def _ignored(seen: Seen) -> bool:
    ended = {event[4] for event in seen.kinds.get("finish", ())}
    return any(r.ignore_eos for number, r in enumerate(seen.requests) if number in ended)


def _too_long(seen: Seen) -> bool:
    return any(QUEUE_FULL not in event[12] for event in seen.kinds.get("reject", ()))


def _preempted_twice(seen: Seen) -> bool:
    return max(Counter(event[4] for event in seen.kinds.get("preempt", ())).values(), default=0) > 1


def _page(size: int) -> Corner:
    return lambda seen: seen.page_size == size


def _counted(key: str) -> Corner:
    return lambda seen: seen.counted(key) > 0


def _reason(reason: str, kind: str) -> Corner:
    return lambda seen: reason in seen.reasons and kind in seen.kinds


EVERYWHERE: dict[str, Corner] = {
    **{f"page {size}": _page(size) for size in (1, 2, 16, 64, 128, 256)},
    "in-phase lengths": _in_phase,
    "prompt of one token": lambda seen: any(r.input_tokens == 1 for r in seen.requests),
    "output of one token": lambda seen: any(r.output_tokens == 1 for r in seen.requests),
    "exactly full pool": lambda seen: seen.counted("peak_used_pages") == seen.counted("pool_pages"),
    "chunked prompt": lambda seen: seen.chunked > 0,
    "chunks of one page": _tiny_chunks,
    "burst": _burst,
    "arrival on a round": _on_a_round,
    "closed loop": lambda seen: isinstance(seen.result.scenario.workload.arrivals, ClosedLoop),
    "long decode": _long_decode,
    "stop-token ending": _reason("stop", "finish"),
    "length ending": _reason("length", "finish"),
    "stop token ignored": _ignored,
    "prompt too long": _too_long,
}
SGLANG: dict[str, Corner] = {
    "overlap": lambda seen: seen.flag("disable_overlap_schedule") is False,
    "retraction": _counted("retractions"),
    "refused by a full queue": _reason(QUEUE_FULL, "reject"),
    "retracted into a full queue": _reason(QUEUE_FULL, "abort"),
    "decode out of memory": _counted("decode_oom"),
    "last request aborted": _reason(ABORT_LAST, "abort"),
}
VLLM: dict[str, Corner] = {
    "preemption": _counted("preemptions"),
    "two preemptions of one request": _preempted_twice,
    "preemption by priority": lambda seen: seen.flag("scheduling_policy") == "priority" and "preempt" in seen.kinds,
    "hit in the prefix cache": _counted("cached_tokens"),
    "preemption with a watermark": lambda seen: bool(seen.flag("watermark")) and "preempt" in seen.kinds,
    "room for drafts": lambda seen: bool(seen.flag("num_lookahead_tokens")),
}


def corners_of(engine: str) -> dict[str, Corner]:
    """Corners by name. Each is reached at least once in a thousand drawn scenarios of that engine."""
    return EVERYWHERE | (VLLM if engine == "vllm" else SGLANG)
