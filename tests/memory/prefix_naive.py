"""A deliberately naive prefix cache: one Python object a token, page lists, searches over everything.

It says what SGLang's cache does (sglang 0.5.23) as plainly as possible; the real one is compared with it, and it picks
the operations that make sense.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from pagestorm.memory.text import Text

Token = tuple[int, int]
"""(source, place)"""
Unit = tuple[Token, ...]
"""What a key is made of: a token, or for EAGLE two neighbours."""
Operation = list[Any]
State = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """One cache. `tuning` is what the policy takes."""

    page_size: int
    pages: int
    policy: str = "lru"
    tuning: dict[str, float] | None = None
    bigram: bool = False


@dataclass(eq=False)
class Branch:
    units: list[Unit]
    pages: list[int]
    parent: Branch | None = None
    children: list[Branch] = field(default_factory=list)
    locks: int = 0
    last: float = 0
    born: float = 0
    hits: int = 0
    priority: int = 0
    history: int = 0

    @property
    def depth(self) -> int:
        return len(self.units) + (self.parent.depth if self.parent else 0)

    def up(self) -> list[Branch]:
        return [] if self.parent is None else [self, *self.parent.up()]


@dataclass
class Request:
    prompt: list[Token]
    source: int
    priority: int
    outputs: int = 0
    row: list[int] | None = None
    allocated: int = 0
    committed: int = 0
    extended: int = 0
    protected: int = 0
    inserted: int = 0
    node: Branch | None = None

    @property
    def tokens(self) -> list[Token]:
        return self.prompt + [(self.source, n) for n in range(self.outputs)]


def tokens_of(text: Text) -> list[Token]:
    return [(source, start + n) for source, start, length in text for n in range(length)]


class Naive:
    def __init__(self, setup: Setup) -> None:
        self.setup, self.p = setup, setup.page_size
        self.free = list(range(1, setup.pages + 1))
        self.waiting: list[int] | None = None
        self.clock = 0.0
        self.root = Branch([], [])
        self.requests: dict[int, Request] = {}
        self.held: dict[str, Branch] = {}

    def operate(self, name: str, *values: Any) -> int | None:
        operation: Callable[..., int | None] = getattr(self, name)
        return operation(*values)

    # The tree

    def match(self, text: Text, limit: int | None) -> int:
        return self._find(self._units(tokens_of(text)[:limit])).depth

    def touch(self, text: Text) -> None:
        self.match(text, None)

    def hold(self, name: str, text: Text, limit: int | None) -> int:
        node = self.held[name] = self._find(self._units(tokens_of(text)[:limit]))
        self._lock(node, 1)
        return node.depth

    def unhold(self, name: str) -> None:
        self._lock(self.held.pop(name), -1)

    def _units(self, tokens: list[Token]) -> list[Unit]:
        units: list[Unit] = list(pairwise(tokens)) if self.setup.bigram else [(t,) for t in tokens]
        return units[: len(units) // self.p * self.p]

    def _find(self, units: list[Unit]) -> Branch:
        node = self.root
        if not units:
            return node
        while step := self._step(node, units[node.depth :]):
            child, n = step
            node = child if n == len(child.units) else self._cut(child, n)
            if node is not child:
                break
        last = self._now()
        for branch in [*node.up(), self.root]:
            branch.last = last
            last -= 0.00001
        return node

    def _step(self, node: Branch, units: list[Unit]) -> tuple[Branch, int] | None:
        """The child that begins as `units` do, and how many units, whole pages, it has in common with them."""
        for child in node.children:
            n = 0
            while n < min(len(units), len(child.units)) and child.units[n] == units[n]:
                n += 1
            if n >= self.p:
                return child, n // self.p * self.p
        return None

    def _cut(self, node: Branch, n: int) -> Branch:
        assert node.parent is not None
        head = Branch(node.units[:n], node.pages[: n // self.p], node.parent, [node])
        head.locks, head.hits, head.priority, head.history = node.locks, node.hits, node.priority, node.history
        head.last, head.born = self._now(), node.born
        node.parent.children[node.parent.children.index(node)] = head
        node.units, node.pages, node.parent = node.units[n:], node.pages[n // self.p :], head
        node.last = self._now()
        return head

    def _insert(self, units: list[Unit], pages: list[int], priority: int, protected: int, counted: int) -> Branch:
        """`pages` lie under the units; the duplicates among them are given back, a group a node."""
        node = self.root
        while units and (step := self._step(node, units[node.depth :])):
            child, n = step
            child.last = self._now()
            at = node.depth
            node = child if n == len(child.units) else self._cut(child, n)
            node.priority = max(node.priority, priority)
            self._give(pages[max(at, protected) // self.p : (at + n) // self.p])
            node.hits += at + n > counted
        at = node.depth
        if at < len(units):
            leaf = Branch(units[at:], pages[at // self.p :], node, priority=priority, hits=int(len(units) > counted))
            leaf.last, leaf.born = self._now(), self._now()
            node.children.append(leaf)
            node = leaf
            for branch in [*leaf.up(), self.root]:
                branch.history = max(branch.history, leaf.depth)
        return node

    def _lock(self, node: Branch, more: int) -> None:
        for branch in node.up():
            branch.locks += more
            assert branch.locks >= 0

    def _branches(self) -> list[Branch]:
        found = [self.root]
        for branch in found:
            found.extend(branch.children)
        return found[1:]

    # Requests

    def admit(self, request: int, prompt: Text, source: int, priority: int) -> int:
        req = self.requests.setdefault(request, Request(tokens_of(prompt), source, priority))
        req.node = self._find(self._units(req.tokens[:-1]))
        self._lock(req.node, 1)
        req.protected = req.allocated = req.committed = req.extended = req.node.depth
        req.inserted = 0
        req.row = [page for branch in reversed(req.node.up()) for page in branch.pages]
        return req.protected

    def extend(self, request: int, tokens: int) -> None:
        req = self.requests[request]
        self._allocate(req, tokens)
        req.committed = req.extended = req.allocated

    def decode(self, request: int, tokens: int, committed: int) -> None:
        req = self.requests[request]
        self._allocate(req, tokens)
        req.outputs += committed
        req.committed += committed

    def _allocate(self, req: Request, tokens: int) -> None:
        assert req.row is not None
        req.allocated += tokens
        n = -(-req.allocated // self.p) - len(req.row)
        assert n <= len(self.free)
        req.row += self.free[:n]
        self.free = self.free[n:]

    def checkpoint(self, request: int) -> None:
        self._publish(self.requests[request], self.requests[request].extended)

    def _publish(self, req: Request, upto: int) -> None:
        assert req.row is not None
        assert req.node is not None
        units = self._units(req.tokens[:upto])
        node = self._insert(units, req.row[: len(units) // self.p], req.priority, req.protected, req.inserted)
        prompt = self._units(req.prompt)
        if 0 < len(prompt) < len(units):
            self._insert(prompt, req.row[: len(prompt) // self.p], req.priority + 1, len(prompt), len(prompt))
        shared = [page for branch in reversed(node.up()) for page in branch.pages]
        req.row[: len(shared)] = shared
        self._lock(req.node, -1)
        self._lock(node, 1)
        req.node, req.protected, req.inserted = node, len(units), max(req.inserted, len(units))

    def finish(self, request: int, beyond: int) -> None:
        req = self.requests[request]
        owned = req.committed - beyond
        self._publish(req, owned)
        self._end(req, owned)
        del self.requests[request]

    def retract(self, request: int) -> None:
        self._end(self.requests[request], self.requests[request].committed)

    def _end(self, req: Request, owned: int) -> None:
        assert req.row is not None
        assert req.node is not None
        self._give(req.row[req.protected // self.p : -(-owned // self.p)])
        self._give(req.row[-(-owned // self.p) :])
        self._lock(req.node, -1)
        req.row, req.node, req.allocated, req.committed, req.protected = None, None, 0, 0, 0

    # Room

    def evict(self, tokens: int) -> int:
        gone = 0
        while gone < tokens:
            leaves = [branch for branch in self._branches() if not branch.children and not branch.locks]
            if not leaves:
                break
            leaf = min(leaves, key=self._age)
            assert leaf.parent is not None
            leaf.parent.children.remove(leaf)
            self._give(leaf.pages)
            gone += len(leaf.units)
        return gone

    def make_room(self, tokens: int) -> int:
        return self.evict(tokens - len(self.free) * self.p)

    def _age(self, leaf: Branch) -> tuple[float, ...]:
        tuning = self.setup.tuning or {}
        needed = max(leaf.history + tuning.get("next_prompt_estimate", 0) - tuning.get("threshold", 0), 0)
        ages: dict[str, tuple[float, ...]] = {
            "lru": (leaf.last,),
            "lfu": (leaf.hits, leaf.last),
            "fifo": (leaf.born,),
            "mru": (-leaf.last,),
            "filo": (-leaf.born,),
            "priority": (leaf.priority, leaf.last),
            "slru": (leaf.hits >= tuning.get("protected_threshold", 2), leaf.last),
            "tlru": (leaf.depth - len(leaf.units) < needed, leaf.last),
        }
        return ages[self.setup.policy]

    def group_begin(self) -> None:
        self.waiting = []

    def group_end(self) -> None:
        pages, self.waiting = self.waiting or [], None
        self._give(pages)

    def _give(self, pages: list[int]) -> None:
        if self.waiting is not None:
            self.waiting += pages
        else:
            self.free = self.free + pages if self.p == 1 else pages + self.free

    def _now(self) -> float:
        self.clock += 1
        return self.clock

    def state(self) -> State:
        """What is compared after each operation, in the words of the reference server's `prefix`."""
        branches = self._branches()
        return {
            "available": len(self.free) * self.p,
            "evictable": sum(len(branch.units) for branch in branches if not branch.locks),
            "protected": sum(len(branch.units) for branch in branches if branch.locks),
            "free": list(self.free),
            "tree": sorted(
                ([b.parent.pages[0] if b.parent and b.parent.pages else 0, b.locks, *b.pages] for b in branches),
                key=lambda row: row[2],
            ),
            "rows": [[n, *req.row] for n, req in sorted(self.requests.items()) if req.row is not None],
        }
