"""Random sequences of operations that make sense, from a seed: shared prefixes, sessions, duplicates, pressure."""

from __future__ import annotations

import random
from collections.abc import Callable

from pagestorm.memory.eviction import POLICIES
from pagestorm.memory.text import Span, Text, cut, tokens_in
from tests.memory.prefix_naive import Naive, Operation, Request, Setup, State

PAGE_SIZES = (1, 2, 16, 64)
SHARED_SOURCES = 3
MOST_REQUESTS = 12


def setup_of(rng: random.Random, page_size: int | None = None, policy: str | None = None) -> Setup:
    """Some cache under pressure."""
    policy = policy or rng.choice(("lru", "lru", *POLICIES))
    p = page_size or rng.choice(PAGE_SIZES)
    tuning: dict[str, float] | None = None
    if policy == "slru" and rng.random() < 0.7:
        tuning = {"protected_threshold": rng.randint(1, 4)}
    if policy == "tlru" and rng.random() < 0.9:
        tuning = {"threshold": rng.randint(0, 20) * p, "next_prompt_estimate": rng.randint(0, 8) * p}
    return Setup(p, rng.randint(12, 60), policy, tuning, bigram=rng.random() < 0.2)


class Moves:
    """Picks an operation, does it on the naive cache, remembers both."""

    def __init__(self, seed: int, page_size: int | None = None, policy: str | None = None) -> None:
        self.rng = random.Random(seed)
        self.setup = setup_of(self.rng, page_size, policy)
        self.naive = Naive(self.setup)
        self.operations: list[Operation] = []
        self.states: list[State] = []
        self.texts: list[Text] = []
        self.prompts: dict[int, tuple[Text, int, int]] = {}
        self.source = SHARED_SOURCES

    def run(self, steps: int) -> Moves:
        moves: list[tuple[int, Callable[[], None]]] = [
            (6, self._admit),
            (6, self._prefill),
            (6, self._decode),
            (3, self._finish),
            (1, self._retract),
            (4, self._look),
            (1, self._hold),
            (1, self._evict),
            (1, self._group),
        ]
        weights, choices = [weight for weight, _ in moves], [move for _, move in moves]
        while len(self.operations) < steps:
            self.rng.choices(choices, weights)[0]()
        self._wind_down()
        return self

    def _do(self, name: str, *values: object) -> int | None:
        result = self.naive.operate(name, *values)
        self.operations.append([name, *values])
        self.states.append({"result": result, **self.naive.state()})
        return result

    # Texts

    def _tokens(self, pages: float) -> int:
        """Some tokens, about so many pages; often a whole number of them."""
        p, tokens = self.setup.page_size, self.rng.randint(1, max(1, int(pages * self.setup.page_size)))
        return tokens if self.rng.random() < 0.6 else max(p, tokens // p * p)

    def _own(self, pages: float) -> Span:
        self.source += 1
        return (self.source, 0, self._tokens(pages))

    def _text(self) -> Text:
        """A prompt: something shared or said before, or a part of it, with something new behind."""
        rng = self.rng
        before: Text = ()
        if self.texts and rng.random() < 0.6:
            before = rng.choice(self.texts[-12:])
        elif rng.random() < 0.8:
            before = ((rng.randint(1, SHARED_SOURCES), 0, self._tokens(6)),)
        if before and rng.random() < 0.5:
            before = cut(before, (0, 0), rng.randint(1, tokens_in(before)))
        text: Text = (*before, self._own(4)) if not before or rng.random() < 0.7 else before
        return self._chopped(text)

    def _chopped(self, text: Text) -> Text:
        """The same tokens in other spans."""
        if self.rng.random() < 0.7:
            return text
        pieces: list[Span] = []
        for source, start, length in text:
            at = self.rng.randint(0, length)
            pieces += [(source, start, at), (source, start + at, length - at)]
        return tuple(pieces)

    # Moves

    def _running(self, *, prefilled: bool | None = None) -> list[int]:
        found = []
        for n, req in self.naive.requests.items():
            done = req.committed >= len(req.tokens)
            if req.row is not None and (prefilled is None or done == prefilled):
                found.append(n)
        return found

    def _holding(self) -> list[int]:
        """Those that have something to give back; the engine admits nobody without tokens."""
        return [n for n in self._running() if self.naive.requests[n].allocated]

    def _admit(self) -> None:
        retracted = [n for n, req in self.naive.requests.items() if req.row is None]
        if retracted and self.rng.random() < 0.5:
            request = self.rng.choice(retracted)
        elif len(self.naive.requests) < MOST_REQUESTS:
            request = len(self.prompts)
            self.source += 1
            prompt = self._text()
            self.texts.append(prompt)
            self.prompts[request] = (prompt, self.source, self.rng.choice([0, 0, 0, 1, 2, -1]))
        else:
            return
        self._do("admit", request, *self.prompts[request])
        if self.rng.random() < 0.8:
            self._extend(request)

    def _prefill(self) -> None:
        if unfinished := self._running(prefilled=False):
            self._extend(self.rng.choice(unfinished))

    def _extend(self, request: int) -> None:
        req = self.naive.requests[request]
        left = len(req.tokens) - req.committed
        if req.allocated > req.committed:
            return
        tokens = left
        if self.rng.random() < 0.4:
            p = self.setup.page_size
            tokens = min(left, self.rng.randint(1, 4) * p - req.committed % p)
        if tokens and self._room(req, tokens):
            self._do("extend", request, tokens)
            if req.committed >= len(req.tokens) and self.rng.random() < 0.2:
                self._step(request)
            if self.rng.random() < 0.8:
                self._do("checkpoint", request)

    def _decode(self) -> None:
        for request in self.rng.sample(running := self._running(prefilled=True), min(2, len(running))):
            self._step(request)

    def _step(self, request: int) -> None:
        req = self.naive.requests[request]
        committed = self._tokens(1.5)
        spare = req.allocated - req.committed
        ahead = self.rng.randint(0, 2 * self.setup.page_size) if self.setup.bigram else 0
        tokens = max(0, committed + ahead - spare)
        if self._room(req, tokens):
            self._do("decode", request, tokens, committed)

    def _room(self, req: Request, tokens: int) -> bool:
        """Make room for a growth as far as it goes; whether it is enough."""
        p = self.setup.page_size
        pages = -(-(req.allocated + tokens) // p) + -req.allocated // p
        if pages > len(self.naive.free) and self.naive.waiting is None:
            self._do("make_room", tokens + self.rng.choice([0, p, 3 * p]))
        return pages <= len(self.naive.free)

    def _finish(self) -> None:
        running = self._running(prefilled=True)
        if not running:
            return
        request = self.rng.choice(running)
        req = self.naive.requests[request]
        said: Text = (*self.prompts[request][0], (req.source, 0, req.outputs))
        beyond = 0
        if req.committed > req.extended and self.rng.random() < 0.2:
            # The stop is among what was decoded since the last prefill.
            beyond = self.rng.randint(1, req.committed - req.extended)
        self._do("finish", request, beyond)
        self.texts.append(said)

    def _retract(self) -> None:
        if running := self._holding():
            self._do("retract", self.rng.choice(running))

    def _look(self) -> None:
        if self.rng.random() < 0.5:
            self._do("touch", self._text())
        else:
            self._do("match", self._text(), self.rng.choice([None, self._tokens(5)]))

    def _hold(self) -> None:
        if self.naive.held and self.rng.random() < 0.6:
            self._do("unhold", self.rng.choice(list(self.naive.held)))
        elif len(self.naive.held) < 2:
            self._do("hold", f"hold {len(self.operations)}", self._text(), None)

    def _evict(self) -> None:
        self._do("evict", self._tokens(8))

    def _group(self) -> None:
        """The results of a pass: frees are collected."""
        self._do("group_begin")
        for _ in range(self.rng.randint(1, 3)):
            self.rng.choice([self._finish, self._finish, self._prefill, self._retract])()
        self._do("group_end")

    def _wind_down(self) -> None:
        """End everything, then evict leaf by leaf: that shows the order in which they go."""
        for request in self._holding():
            self._do("retract", request)
        for name in list(self.naive.held):
            self._do("unhold", name)
        while self._do("evict", 1):
            pass
