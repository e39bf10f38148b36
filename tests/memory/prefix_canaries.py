"""Prefix caches that are broken on purpose, one fault each. The checks must find every one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagestorm.errors import PoolCorruption
from pagestorm.memory.prefix import Insertion, Match, Node, PrefixTree, Split
from pagestorm.memory.prefix_cache import Lease, PrefixCache
from pagestorm.memory.text import Text
from tests.memory.prefix_sides import MakeCache, MakeTree


class NeverUnlocks(PrefixTree):
    def unlock(self, node: Node) -> None:
        pass


class LocksOnlyTheDeepestNode(PrefixTree):
    def lock(self, node: Node) -> None:
        super().lock(node)
        for above in node.path()[:-1]:
            above.locks -= 1
            if not above.locks:
                self.protected -= above.length
                self.evictable += above.length

    def unlock(self, node: Node) -> None:
        for above in node.path()[:-1]:
            if not above.locks:
                self.protected += above.length
                self.evictable -= above.length
            above.locks += 1
        super().unlock(node)


class EvictsLockedNodes(PrefixTree):
    def evict(self, tokens: int) -> list[Node]:
        gone = super().evict(tokens)
        if not gone and tokens > 0:
            for node in [node for node in self.walk() if node.locks and not node.children][:1]:
                assert node.parent is not None
                del node.parent.children[node.page]
                self.protected -= node.length
                self.nodes -= 1
                gone.append(node)
        return gone


class SplitsAPageTooEarly(PrefixTree):
    def _split(self, node: Node, at: int) -> Split:
        return super()._split(node, max(self.page_size, at - self.page_size))


class SplitsAPageTooLate(PrefixTree):
    def _split(self, node: Node, at: int) -> Split:
        return super()._split(node, min(node.length - self.page_size, at + self.page_size))


class DoesNotStampAMatch(PrefixTree):
    def _stamp_path(self, node: Node) -> None:
        pass


class StampsTheDeepestNodeOnly(PrefixTree):
    def _stamp_path(self, node: Node) -> None:
        node.stamp = self._tick()
        self._refresh(node)


class EvictsTheNewestOfTwo(PrefixTree):
    """The age of a leaf is not brought up to date when it is used again."""

    def match(self, text: Text, limit: int | None = None) -> Match:
        before = {node: node.entry for node in self.walk() if node.entry is not None}
        match = super().match(text, limit)
        if match.split is None and match.node in before:
            match.node.entry = before[match.node]
        return match


class StopsOneLeafEarly(PrefixTree):
    def evict(self, tokens: int) -> list[Node]:
        return super().evict(tokens - self.page_size)


class CountsARequestEveryTime(PrefixTree):
    def insert(self, text: Text, limit: int | None = None, **more: Any) -> Insertion:
        return super().insert(text, limit, **{**more, "counted": 0})


class ForgetsPriorities(PrefixTree):
    def insert(self, text: Text, limit: int | None = None, **more: Any) -> Insertion:
        return super().insert(text, limit, **{**more, "priority": 0})


class KeepsDuplicates(PrefixCache):
    """The request keeps its own copy of what the tree has too."""

    def _insert(self, lease: Lease, text: Text, tokens: int, *, goes_on: bool) -> Insertion:
        lease.protected = tokens
        return super()._insert(lease, text, tokens, goes_on=goes_on)


class LetsTheOutputStickToThePrompt(PrefixCache):
    def _split_off_output(self, lease: Lease, text: Text, length: int, prompt: int) -> None:
        pass


class MatchesTheLastTokenToo(PrefixCache):
    def match(self, text: Text, limit: int | None = None) -> Match:
        return super().match(text, None if limit is None else limit + 1)


class LeavesTheLockBehind(PrefixCache):
    """After a checkpoint the lock stays on the shorter prefix."""

    def checkpoint(self, lease: Lease, text: Text, tokens: int, prompt: int) -> Insertion:
        node = lease.node
        done = super().checkpoint(lease, text, tokens, prompt)
        self.tree.unlock(lease.node)
        self.tree.lock(node)
        lease.node = node
        return done


class FreesThePrefixOfTheRetracted(PrefixCache):
    def release(self, lease: Lease, tokens: int) -> None:
        node = lease.node
        super().release(lease, tokens)
        if node.parent is not None and not node.locks and not node.children:
            self.evict(node.length)


@dataclass(frozen=True)
class Canary:
    """A broken cache, whether its own audit can see the fault, and a policy under which it shows."""

    tree: MakeTree = PrefixTree
    cache: MakeCache = PrefixCache
    audit_sees_it: bool = False
    policy: str = "lru"


CANARIES: dict[str, Canary] = {
    "lock never released": Canary(NeverUnlocks, audit_sees_it=True),
    "lock on the deepest node only": Canary(LocksOnlyTheDeepestNode, audit_sees_it=True),
    "locked node evicted": Canary(EvictsLockedNodes, audit_sees_it=True),
    "split a page too early": Canary(SplitsAPageTooEarly),
    "split a page too late": Canary(SplitsAPageTooLate),
    "match without a stamp": Canary(DoesNotStampAMatch),
    "stamp on the deepest node only": Canary(StampsTheDeepestNodeOnly, policy="mru"),
    "stale stamp in the queue": Canary(EvictsTheNewestOfTwo),
    "one leaf too few": Canary(StopsOneLeafEarly),
    "hits counted twice": Canary(CountsARequestEveryTime, policy="lfu"),
    "priorities forgotten": Canary(ForgetsPriorities, policy="priority"),
    "duplicate not freed": Canary(cache=KeepsDuplicates, audit_sees_it=True),
    "prompt and output in one node": Canary(cache=LetsTheOutputStickToThePrompt),
    "last token matched": Canary(cache=MatchesTheLastTokenToo),
    "lock left behind": Canary(cache=LeavesTheLockBehind),
    "prefix freed at retraction": Canary(cache=FreesThePrefixOfTheRetracted),
}

FOUND = (AssertionError, PoolCorruption, KeyError)
