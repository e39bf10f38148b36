"""The pool recounted from the plain columns of the record: no `detail`, no code shared with engine or diagnosis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pagestorm.events import RawEvent


@dataclass
class Moment:
    """The state in front of an incident."""

    asked_tokens: int
    asked_pages: int
    free_pages: int
    uncached_pages: int
    rounding_tokens: int
    batch: int
    held: tuple[tuple[int, int], ...]


@dataclass
class Burst:
    """All retractions of one step."""

    time_ns: int
    step: int
    before: Moment
    victims: list[int] = field(default_factory=list)
    freed_pages: int = 0
    lost_tokens: int = 0


class Recount:
    """Plays the record: who holds how many tokens, and so who opens a page next.

    `max_new_tokens` is what requests.parquet says. With overlap a request that has all its tokens sits out the next
    pass although its end is told later; everybody else whose end was not told decodes.
    """

    def __init__(self, page_size: int, pool_pages: int, max_new_tokens: Mapping[int, int]) -> None:
        self.page = page_size
        self.pool = pool_pages
        self.max_new = max_new_tokens
        self.input: dict[int, int] = {}
        self.goal: dict[int, int] = {}
        self.prefilling: dict[int, int] = {}
        self.running: dict[int, int] = {}
        self.used_pages = 0
        self.bursts: list[Burst] = []
        self.out_of_memory: list[tuple[RawEvent, Moment]] = []
        self.aborts: list[tuple[RawEvent, Moment]] = []
        self.rejections: list[tuple[RawEvent, Moment]] = []
        self.queue: list[int] = []
        self.prefill_tokens = 0
        self.recomputed_tokens = 0
        self.longest_output_tokens = 0
        self._stored: dict[int, int] = {}

    def play(self, events: Sequence[RawEvent]) -> Recount:
        for event in events:
            getattr(self, f"_{event[3]}", self._other)(event)
        return self

    def pages(self, tokens: int) -> int:
        return (tokens + self.page - 1) // self.page

    def decoding(self) -> dict[int, int]:
        return {n: c for n, c in self.running.items() if c - self.input[n] + 1 < self.max_new[n]}

    def moment(self) -> Moment:
        batch = self.decoding()
        holders = sorted(batch, key=lambda n: (-self.pages(batch[n]), n))[:3]
        return Moment(
            asked_tokens=len(batch),
            asked_pages=sum(c % self.page == 0 for c in batch.values()),
            free_pages=self.pool - self.used_pages,
            uncached_pages=self.used_pages,
            rounding_tokens=sum(self.pages(c) * self.page - c for c in batch.values()),
            batch=len(batch),
            held=tuple((n, self.pages(batch[n])) for n in holders),
        )

    def _other(self, event: RawEvent) -> None:
        raise AssertionError(f"this recount does not know {event[3]}")

    def _arrive(self, event: RawEvent) -> None:
        self.input[event[4]] = event[5]
        self.queue.append(event[4])

    def _reject(self, event: RawEvent) -> None:
        self.queue.remove(event[4])
        free = self.pool - self.used_pages
        self.rejections.append((event, Moment(event[5], self.pages(event[5]), free, self.used_pages, 0, event[9], ())))

    def _admit(self, event: RawEvent) -> None:
        assert self.queue.pop(0) == event[4], "first come, first served"
        self.goal[event[4]] = event[5]
        self.prefilling[event[4]] = 0

    def _prefill(self, event: RawEvent) -> None:
        request, tokens = event[4], event[5]
        before = self.prefilling[request]
        self.prefill_tokens += tokens
        self.recomputed_tokens += max(0, min(tokens, self._stored.get(request, 0) - before))
        self.used_pages += self.pages(before + tokens) - self.pages(before)
        self.prefilling[request] = before + tokens
        if before + tokens == self.goal[request]:
            self.running[request] = self.prefilling.pop(request)

    def _leap(self, event: RawEvent) -> None:
        for request, tokens in self.decoding().items():
            self.running[request] = tokens + event[5]
            self.used_pages += self.pages(tokens + event[5]) - self.pages(tokens)

    def _finish(self, event: RawEvent) -> None:
        self.used_pages -= self.pages(self.running.pop(event[4]))
        self.longest_output_tokens = max(self.longest_output_tokens, event[5])

    def _retract(self, event: RawEvent) -> None:
        if not self.bursts or self.bursts[-1].step != event[2]:
            self.bursts.append(Burst(event[0], event[2], self.moment()))
        burst = self.bursts[-1]
        tokens = self.running.pop(event[4])
        self.used_pages -= self.pages(tokens)
        burst.victims.append(event[4])
        burst.lost_tokens += tokens
        burst.freed_pages += self.pages(tokens)
        self._stored[event[4]] = tokens
        self.queue.append(event[4])

    def _abort(self, event: RawEvent) -> None:
        if event[4] in self.running:
            self.aborts.append((event, self.moment()))
            self.used_pages -= self.pages(self.running.pop(event[4]))
        else:
            self.queue.remove(event[4])
            self.aborts.append((event, Moment(0, 0, self.pool - self.used_pages, self.used_pages, 0, event[9], ())))

    def _decode_oom(self, event: RawEvent) -> None:
        self.out_of_memory.append((event, self.moment()))

    def _crash(self, event: RawEvent) -> None:
        pass
