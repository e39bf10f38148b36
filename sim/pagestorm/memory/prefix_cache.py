"""The prefix cache: the tree, and what happens in it carried on to a ledger.

What SGLang does with a request's row of the request table (sglang 0.5.23, `mem_cache/unified_radix_cache.py` and
`mem_cache/common.py`), in terms of owners: the pages of a cached prefix belong to nodes of the tree and the row reads
them; what the row has beyond that is its own.

    row      |...... protected ......|........ its own ........|
    reads     node 7 | node 9         its own pages             partial last page: always its own

Frees go out in the order and the groups of the engine. Where the engine collects them (while it processes the results
of a pass) put `begin_group` and `end_group` of the ledger around the calls.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagestorm.errors import PoolCorruption
from pagestorm.memory.ledger import Ledger
from pagestorm.memory.prefix import Insertion, Match, Node, PrefixTree
from pagestorm.memory.text import Text


@dataclass(slots=True, eq=False)
class Lease:
    """What one admitted request has to do with the cache."""

    row: int
    """Its owner id in the ledger."""
    node: Node
    """Where its prefix ends; locked until the lease ends."""
    protected: int
    """So many of its first tokens are in nodes of the tree, matched or inserted; whole pages."""
    inserted: int = 0
    """So many of its first tokens it has inserted itself."""
    priority: int = 0


class PrefixCache:
    """A prefix tree over a ledger. Owner ids of the tree's nodes must be none of the rows'."""

    def __init__(self, tree: PrefixTree, ledger: Ledger) -> None:
        if tree.page_size != ledger.page_size:
            raise ValueError(f"a tree of pages of {tree.page_size} over a ledger of pages of {ledger.page_size} tokens")
        self.tree = tree
        self.ledger = ledger
        self._leases: dict[int, Lease] = {}

    @property
    def available(self) -> int:
        """Tokens of free pages."""
        return self.ledger.free_pages() * self.tree.page_size

    @property
    def evictable(self) -> int:
        """Cached tokens that nobody keeps from being evicted."""
        return self.tree.evictable

    @property
    def protected(self) -> int:
        """Cached tokens that requests have locked."""
        return self.tree.protected

    @property
    def uncached(self) -> int:
        """Tokens, in whole pages, that rows with a lease hold beyond their protected prefix."""
        p, length = self.tree.page_size, self.ledger.length
        return sum(-(-length(lease.row) // p) * p - lease.protected for lease in self._leases.values())

    def match(self, text: Text, limit: int | None = None) -> Match:
        """The longest cached prefix of the first `limit` tokens; makes it the most recently used, and may split a node.

        Valid until the next call: lock the node or admit at once. A request that is to be computed matches at most one
        token less than it has; the refresh of those that wait matches all.
        """
        match = self.tree.match(text, limit)
        if match.split is not None:
            self.ledger.split(match.split.node.owner, match.split.at, match.split.head.owner)
        return match

    def admit(self, row: int, match: Match, priority: int = 0) -> Lease:
        """Let a row that holds nothing read the match; its prefix stays locked until the lease ends."""
        for node in match.node.path():
            self.ledger.alias(row, node.owner, 0, node.length)
        self.tree.lock(match.node)
        lease = self._leases[row] = Lease(row, match.node, match.length, priority=priority)
        return lease

    def checkpoint(self, lease: Lease, text: Text, tokens: int, prompt: int) -> Insertion:
        """Put the first `tokens` tokens of a request that goes on into the tree: after a chunk, after the prefill.

        What the row owned of them becomes a node's; where the tree had them already, the row's pages are given back, a
        group a node, and it reads the tree's. The lock moves on. `prompt`: length of the prompt within the text; a
        node that would reach beyond it is split there.
        """
        done = self._insert(lease, text, tokens, goes_on=True)
        self._split_off_output(lease, text, done.length, prompt)
        self.tree.unlock(lease.node)
        self.tree.lock(done.node)
        lease.node, lease.protected = done.node, done.length
        lease.inserted = max(lease.inserted, done.length)
        return done

    def finish(self, lease: Lease, text: Text, tokens: int, prompt: int) -> Insertion:
        """Put the first `tokens` tokens, all that are computed and wanted, into the tree; end the lease and the row."""
        done = self._insert(lease, text, tokens, goes_on=False)
        self._split_off_output(lease, text, done.length, prompt)
        self._end(lease, done.length, tokens)
        return done

    def release(self, lease: Lease, tokens: int) -> None:
        """End the lease and the row of a request that is retracted: its prefix stays cached, the rest is given back.

        `tokens`: its committed length; pages behind it come back as a second group.
        """
        self._end(lease, lease.protected, tokens)

    def evict(self, tokens: int) -> int:
        """Evict whole leaves, a group each, until `tokens` are free; returns how many came free."""
        evicted = 0
        for node in self.tree.evict(tokens):
            evicted += node.length
            self.ledger.release_many(np.array([node.owner], dtype=np.int64))
        return evicted

    def make_room(self, tokens: int) -> int:
        """Evict what is missing for `tokens` to be available, as far as it goes; returns how many came free."""
        missing = tokens - self.available
        return self.evict(missing) if missing > 0 else 0

    def audit(self) -> None:
        """Tree, ledger and leases agree, and every token is somewhere. Raises `PoolCorruption`."""
        self.tree.audit()
        self._audit_locks()
        for node in self.tree.walk():
            if self.ledger.length(node.owner) != node.length:
                held = self.ledger.length(node.owner)
                raise PoolCorruption(f"node {node.owner} has {node.length} tokens; the ledger says {held}")
        pool = self.ledger.total_pages() * self.tree.page_size
        known = self.available + self.evictable + self.protected + self.uncached
        if known != pool:
            raise PoolCorruption(
                f"available {self.available} + evictable {self.evictable} + protected {self.protected} + uncached "
                f"{self.uncached} = {known}, not the pool of {pool} tokens"
            )

    def _audit_locks(self) -> None:
        wanted: dict[Node, int] = {}
        for lease in self._leases.values():
            for node in lease.node.path():
                wanted[node] = wanted.get(node, 0) + 1
        for node in self.tree.walk():
            if node.locks != wanted.pop(node, 0):
                raise PoolCorruption(f"node {node.owner} has {node.locks} locks; leases ask for another number")
        if wanted:
            raise PoolCorruption(f"node {next(iter(wanted)).owner} is leased and no longer in the tree")

    def _insert(self, lease: Lease, text: Text, tokens: int, *, goes_on: bool) -> Insertion:
        done = self.tree.insert(
            text, tokens, priority=lease.priority, protected=lease.protected, counted=lease.inserted
        )
        row, ledger = lease.row, self.ledger
        if done.split is not None:
            ledger.split(done.split.node.owner, done.split.at, done.split.head.owner)
        for a, b, node, at in done.duplicates:
            if goes_on:
                ledger.replace(row, a, b, node.owner, at)
            else:
                ledger.drop(row, a, b)
        if done.leaf is not None:
            ledger.move(row, done.matched, done.length, done.leaf.owner)
        return done

    def _split_off_output(self, lease: Lease, text: Text, length: int, prompt: int) -> None:
        """Insert the prompt again where the text goes on behind it, so that the output can be evicted alone."""
        priority = lease.priority + 1
        shorter = self.tree.whole_pages(prompt)
        if 0 < shorter < length:
            again = self.tree.insert(text, prompt, priority=priority, protected=shorter, counted=shorter)
            if again.split is not None:
                self.ledger.split(again.split.node.owner, again.split.at, again.split.head.owner)

    def _end(self, lease: Lease, protected: int, tokens: int) -> None:
        """Give back what the row has beyond its protected prefix, unlock, and forget the row."""
        p, row, ledger = self.tree.page_size, lease.row, self.ledger
        allocated = ledger.length(row)
        committed = min(-(-tokens // p) * p, allocated)
        if protected < committed < allocated:
            ledger.drop(row, protected, committed)
        self.tree.unlock(lease.node)
        ledger.release_many(np.array([row], dtype=np.int64))
        del self._leases[row]
