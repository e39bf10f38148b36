"""Who goes first when the prefix tree must give pages back (sglang 0.5.23, `mem_cache/evict_policy.py`).

Only unlocked leaves can go. Each policy gives a leaf an age; the smallest goes first. A stamp is the time of the last
use, counted in uses, so ages are unique and nothing depends on the order in which leaves are looked at.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestorm.memory.prefix import Node

Age = tuple[float, ...]
Policy = Callable[["Node"], Age]

_COMPACT_ABOVE = 64


def lru(node: Node) -> Age:
    """Least recently used first."""
    return (node.stamp,)


def lfu(node: Node) -> Age:
    """Least often inserted first, among those the least recently used."""
    return (node.hits, node.stamp)


def fifo(node: Node) -> Age:
    """Oldest first."""
    return (node.created,)


def mru(node: Node) -> Age:
    """Most recently used first."""
    return (-node.stamp,)


def filo(node: Node) -> Age:
    """Youngest first."""
    return (-node.created,)


def priority(node: Node) -> Age:
    """Lowest priority first, among those the least recently used."""
    return (node.priority, node.stamp)


def slru(protected_threshold: float = 2) -> Policy:
    """Least recently used first, those inserted `protected_threshold` times only when there are no others."""
    return lambda node: (node.hits >= protected_threshold, node.stamp)


def tlru(threshold: float = 0, next_prompt_estimate: float = 0) -> Policy:
    """Least recently used first, but before all others the tails of conversations that are longer than needed.

    A conversation that was once `history` tokens long needs history + next_prompt_estimate - threshold of them cached
    to answer its next turn in time; a node that starts behind that point is not missed. Both in tokens. With the
    defaults there is no such node and the policy is lru.
    """

    def age(node: Node) -> Age:
        needed = max(node.history + next_prompt_estimate - threshold, 0)
        return (-(node.depth - node.length >= needed), node.stamp)

    return age


_PLAIN: dict[str, Policy] = {"lru": lru, "lfu": lfu, "fifo": fifo, "mru": mru, "filo": filo, "priority": priority}
_TUNED: dict[str, Callable[..., Policy]] = {"slru": slru, "tlru": tlru}
POLICIES = (*_PLAIN, *_TUNED)


def policy_of(name: str, tuning: Mapping[str, float] | None = None) -> Policy:
    """The policy of that name. `tuning`: protected_threshold of slru; threshold and next_prompt_estimate of tlru.

    Raises ValueError for a name or a tuning that does not exist.
    """
    if name in _TUNED:
        try:
            return _TUNED[name](**(tuning or {}))
        except TypeError:
            raise ValueError(f"eviction policy {name} has no tuning {sorted(tuning or ())}") from None
    if name not in _PLAIN:
        raise ValueError(f"no eviction policy is called {name!r}; there are {', '.join(POLICIES)}")
    if tuning:
        raise ValueError(f"eviction policy {name} has no tuning {sorted(tuning)}")
    return _PLAIN[name]


class Leaves:
    """The leaves that could go, the next one first.

    A heap whose entries may be stale: a leaf that was used again gets a new entry and the old one is skipped.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[Age, int, Node]] = []
        self._serial = count()
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def put(self, node: Node) -> None:
        """The node is a leaf that could go; its age may have changed."""
        if node.entry is None:
            self._live += 1
        node.entry = (self._policy(node), next(self._serial), node)
        heapq.heappush(self._heap, node.entry)
        if len(self._heap) > 2 * self._live + _COMPACT_ABOVE:
            self._heap = [entry for entry in self._heap if entry[2].entry is entry]
            heapq.heapify(self._heap)

    def discard(self, node: Node) -> None:
        """The node is no leaf any more, or it is locked."""
        if node.entry is not None:
            node.entry = None
            self._live -= 1

    def pop(self) -> Node | None:
        """Take out the leaf that goes first; None when none is left."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            node = entry[2]
            if node.entry is entry:
                self.discard(node)
                return node
        return None
