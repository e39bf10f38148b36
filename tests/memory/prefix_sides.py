"""The prefix cache under test behind the operations of the reference server's `prefix`, and replays of sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagestorm.memory.ledger import Ledger
from pagestorm.memory.paged import FreeList, PagedLedger
from pagestorm.memory.prefix import Node, PrefixTree
from pagestorm.memory.prefix_cache import Lease, PrefixCache
from pagestorm.memory.text import Text, tokens_in
from pagestorm.memory.twin import TwinPool
from tests.memory.prefix_naive import Operation, Setup, State

ROWS = 40
"""Owner ids of requests; those of nodes follow."""
MakeTree = Callable[..., PrefixTree]
MakeCache = Callable[[PrefixTree, Ledger], PrefixCache]


@dataclass
class Request:
    prompt: Text
    source: int
    priority: int
    row: int
    outputs: int = 0
    committed: int = 0
    extended: int = 0
    lease: Lease | None = None

    @property
    def text(self) -> Text:
        return (*self.prompt, (self.source, 0, self.outputs))

    @property
    def leased(self) -> Lease:
        assert self.lease is not None
        return self.lease


class Simulated:
    """`PrefixCache` over a paged ledger, with others in lockstep; `make_tree` and `make_cache` break it."""

    def __init__(
        self,
        setup: Setup,
        make_tree: MakeTree = PrefixTree,
        make_cache: MakeCache = PrefixCache,
        others: Sequence[Ledger] = (),
    ) -> None:
        self.pages = FreeList(setup.pages, setup.page_size)
        paged = PagedLedger(setup.pages, setup.page_size, ROWS + setup.pages, self.pages)
        self.ledger: Ledger = TwinPool([paged, *others]) if others else paged
        tree = make_tree(setup.page_size, setup.policy, setup.tuning, first_owner=ROWS, bigram=setup.bigram)
        self.cache = make_cache(tree, self.ledger)
        self.requests: dict[int, Request] = {}
        self.held: dict[str, Node] = {}
        self.grouping = False

    def operate(self, name: str, *values: Any) -> int | None:
        operation: Callable[..., int | None] = getattr(self, name)
        return operation(*values)

    def match(self, text: Text, limit: int | None) -> int:
        return self.cache.match(text, limit).length

    def touch(self, text: Text) -> None:
        self.cache.match(text)

    def hold(self, name: str, text: Text, limit: int | None) -> int:
        match = self.cache.match(text, limit)
        self.cache.tree.lock(match.node)
        self.held[name] = match.node
        return match.length

    def unhold(self, name: str) -> None:
        self.cache.tree.unlock(self.held.pop(name))

    def admit(self, request: int, prompt: Text, source: int, priority: int) -> int:
        rows = {req.row for req in self.requests.values() if req.lease}
        free = next(row for row in range(ROWS) if row not in rows)
        req = self.requests.setdefault(request, Request(prompt, source, priority, free))
        req.row = free
        match = self.cache.match(req.text, tokens_in(req.text) - 1)
        req.lease = self.cache.admit(free, match, priority)
        req.committed = req.extended = match.length
        return match.length

    def extend(self, request: int, tokens: int) -> None:
        req = self.requests[request]
        self._allocate(req, tokens)
        req.committed = req.extended = self.ledger.length(req.row)

    def decode(self, request: int, tokens: int, committed: int) -> None:
        req = self.requests[request]
        self._allocate(req, tokens)
        req.outputs += committed
        req.committed += committed

    def _allocate(self, req: Request, tokens: int) -> None:
        pages = self.ledger.extend(np.array([req.row]), np.array([tokens]))
        assert pages is not None, f"{tokens} tokens are not available"

    def checkpoint(self, request: int) -> None:
        req = self.requests[request]
        self.cache.checkpoint(req.leased, req.text, req.extended, tokens_in(req.prompt))

    def finish(self, request: int, beyond: int) -> None:
        req = self.requests.pop(request)
        self.cache.finish(req.leased, req.text, req.committed - beyond, tokens_in(req.prompt))

    def retract(self, request: int) -> None:
        req = self.requests[request]
        self.cache.release(req.leased, req.committed)
        req.lease = None

    def evict(self, tokens: int) -> int:
        return self.cache.evict(tokens)

    def make_room(self, tokens: int) -> int:
        return self.cache.make_room(tokens)

    def group_begin(self) -> None:
        self.ledger.begin_group()
        self.grouping = True

    def group_end(self) -> None:
        self.ledger.end_group()
        self.grouping = False

    def audit(self) -> None:
        """The cache's own audit, where it says anything: no lock but those of leases, no group open."""
        self.ledger.audit()
        rows = [req.row for req in self.requests.values() if req.lease]
        self.ledger.verify(np.array(rows + [node.owner for node in self.cache.tree.walk()], dtype=np.int64))
        if not self.held and not self.grouping:
            self.cache.audit()
        else:
            self.cache.tree.audit()

    def state(self) -> State:
        """As `Naive.state`."""
        cache = self.cache
        return {
            "available": cache.available,
            "evictable": cache.evictable,
            "protected": cache.protected,
            "free": self.pages.free_ids().tolist(),
            "tree": sorted((self._node(node) for node in cache.tree.walk()), key=lambda row: row[2]),
            "rows": [[n, *self._pages(req.row)] for n, req in sorted(self.requests.items()) if req.lease],
        }

    def _node(self, node: Node) -> list[int]:
        above = node.parent
        first = self._pages(above.owner)[0] if above and above.parent else 0
        return [first, node.locks, *self._pages(node.owner)]

    def _pages(self, owner: int) -> list[int]:
        table = self.ledger.page_table(owner)
        assert table is not None
        return [int(page) for page in table]


def replay(side: Simulated, operations: Sequence[Operation]) -> list[State]:
    """The states after each operation, `result` included; looks at everything in between."""
    states = []
    for name, *values in operations:
        result = side.operate(name, *values)
        side.audit()
        states.append({"result": result, **side.state()})
    return states


def first_difference(operations: Sequence[Operation], wanted: Sequence[State], got: Sequence[State]) -> str | None:
    """Where two replays part, in words; None when they agree."""
    for number, (operation, one, other) in enumerate(zip(operations, wanted, got, strict=False)):
        for key, value in one.items():
            if other[key] != value:
                return f"operation {number} {operation}: {key} is {other[key]}, not {value}"
    if len(wanted) != len(got):
        return f"{len(got)} states, not {len(wanted)}"
    return None
