"""The prefix tree of SGLang's default cache, full attention (sglang 0.5.23, `unified_cache/unified_tree_core.py`).

A radix tree over tokens whose edges are whole pages. A node stands for the tokens of its edge and is the *owner* of
their pages in a ledger; the tree itself knows no pages. Children are told apart by their first page:

    root -- system prompt, 512 -- turn 1, 96 -- output 1, 48
                               `- turn 1', 160                 two requests share the first 512 tokens

A match or an insert that ends inside an edge splits the node: a new head takes the first part of the edge, the node
keeps the rest, its children and its owner id. `PrefixCache` carries what happens here on to a ledger.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pagestorm.errors import PoolCorruption
from pagestorm.memory.eviction import Age, Leaves, policy_of
from pagestorm.memory.text import PageName, Text, advance, common, cut, page_name, tokens_in

_OLDER = 0.00001
"""How much older than its child a node on a matched path becomes; uses are one apart."""


class Node:
    """An edge of the tree and the node at its end."""

    __slots__ = (
        "children",
        "created",
        "depth",
        "entry",
        "history",
        "hits",
        "key",
        "length",
        "locks",
        "owner",
        "page",
        "parent",
        "priority",
        "stamp",
    )

    def __init__(self, owner: int, key: Text, length: int, page: PageName, stamp: float, created: float) -> None:
        self.owner = owner
        self.key = key
        self.length = length
        """Tokens of the edge, whole pages."""
        self.page = page
        self.parent: Node | None = None
        self.children: dict[PageName, Node] = {}
        self.locks = 0
        """How many locks lie on this node or below it."""
        self.stamp = stamp
        self.created = created
        self.hits = 0
        """How many requests inserted it."""
        self.priority = 0
        self.depth = length
        """Tokens from the root to the end of the edge."""
        self.history = length
        """The greatest depth that was ever reached at or below this node."""
        self.entry: tuple[Age, int, Node] | None = None
        """Its place among the leaves that could go, None while it cannot."""

    def path(self) -> list[Node]:
        """The nodes from below the root to this one."""
        nodes = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class Split(NamedTuple):
    """`head` is new and took the first `at` tokens of `node`."""

    node: Node
    head: Node
    at: int


class Match(NamedTuple):
    """What of a text is cached: the first `length` tokens, down to the end of `node` (the root for none)."""

    length: int
    node: Node
    split: Split | None


class Duplicate(NamedTuple):
    """Tokens a..b-1 of an inserted text that `node` had already, from its token `at` on."""

    a: int
    b: int
    node: Node
    at: int


class Insertion(NamedTuple):
    """What an insert did, in the order in which it happened."""

    length: int
    """Tokens of the text that are in the tree now."""
    matched: int
    """How many of them were before; tokens matched..length-1 are those of the new `leaf`."""
    node: Node
    """Where the text ends."""
    split: Split | None
    duplicates: list[Duplicate]
    leaf: Node | None


class PrefixTree:
    """The tree. Owner ids of nodes count from `first_owner` and are used again when a node is gone.

    A node holds a page at least, so there are never more than first_owner + pages of the pool ids.
    `bigram`: keys are pairs of neighbouring tokens, as the engine has them for EAGLE; a text of n tokens then has n - 1
    places. Everything that is called tokens here are such places.
    """

    def __init__(
        self,
        page_size: int,
        policy: str = "lru",
        tuning: Mapping[str, float] | None = None,
        *,
        first_owner: int = 0,
        bigram: bool = False,
    ) -> None:
        self.page_size = page_size
        self.evictable = 0
        """Tokens of unlocked nodes."""
        self.protected = 0
        """Tokens of locked nodes."""
        self.nodes = 0
        self._overlap = int(bigram)
        self._page_tokens = page_size + self._overlap
        self._clock = 0.0
        self._next_owner = first_owner
        self._spare_owners: list[int] = []
        self._leaves = Leaves(policy_of(policy, tuning))
        self.root = Node(-1, (), 0, (), self._tick(), self._tick())

    @property
    def leaves(self) -> int:
        """How many leaves could be evicted."""
        return len(self._leaves)

    def match(self, text: Text, limit: int | None = None) -> Match:
        """The longest prefix that is cached, of the first `limit` tokens of the text, in whole pages.

        All nodes on its path become the most recently used, the deepest one newest.
        """
        most = self._places(text, limit)
        if not most:
            return Match(0, self.root, None)
        node, at, split = self.root, 0, None
        cursor = advance(text, (0, 0), 0)
        while at < most:
            child = node.children.get(page_name(text, cursor, self._page_tokens))
            if child is None:
                break
            n = self._common(child, text, cursor, most - at)
            at += n
            if n < child.length:
                split = self._split(child, n)
                node = split.head
                break
            node = child
            cursor = advance(text, cursor, n)
        self._stamp_path(node)
        return Match(at, node, split)

    def insert(
        self, text: Text, limit: int | None = None, *, priority: int = 0, protected: int = 0, counted: int = 0
    ) -> Insertion:
        """Make the first `limit` tokens of the text a path of the tree, in whole pages.

        `protected`: so many tokens are the tree's already, the rest the inserting request's: where the tree had those
        too they are duplicates. `counted`: nodes that end within so many tokens have counted this request before.
        """
        self.root.stamp = self._tick()
        most = self._places(text, limit)
        node, at, split = self.root, 0, None
        duplicates: list[Duplicate] = []
        cursor = advance(text, (0, 0), 0)
        while at < most:
            child = node.children.get(page_name(text, cursor, self._page_tokens))
            if child is None:
                break
            child.stamp = self._tick()
            n = self._common(child, text, cursor, most - at)
            if n < child.length:
                split = self._split(child, n)
                child = split.head
            child.priority = max(child.priority, priority)
            a = max(at, protected)
            if a < at + n:
                duplicates.append(Duplicate(a, at + n, child, a - at))
            at += n
            child.hits += at > counted
            node = child
            cursor = advance(text, cursor, n)
        leaf = None
        if at < most:
            key = cut(text, cursor, most - at + self._overlap)
            leaf = node = self._grow(node, key, most - at, page_name(text, cursor, self._page_tokens), priority)
            leaf.hits += most > counted
        self._refresh(node)
        return Insertion(most, at, node, split, duplicates, leaf)

    def lock(self, node: Node) -> None:
        """Keep the node and all above it from being evicted, until `unlock`. Locks add up; the root needs none."""
        self._leaves.discard(node)
        while node.parent is not None:
            if not node.locks:
                self.evictable -= node.length
                self.protected += node.length
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Take one lock back that `lock` put on this node. Raises `PoolCorruption` where there is none."""
        at = node
        while at.parent is not None:
            if at.locks < 1:
                raise PoolCorruption(f"node {at.owner} of the prefix tree is unlocked more often than it was locked")
            at.locks -= 1
            if not at.locks:
                self.protected -= at.length
                self.evictable += at.length
            at = at.parent
        self._refresh(node)

    def evict(self, tokens: int) -> list[Node]:
        """Take unlocked leaves out, whole ones, until they are `tokens` or none is left; the first one first.

        A parent that loses its last child becomes a leaf. The next new node may have the owner id of one that went.
        """
        gone = []
        while tokens > 0:
            node = self._leaves.pop()
            if node is None:
                break
            self._remove(node)
            tokens -= node.length
            gone.append(node)
        return gone

    def walk(self) -> Iterator[Node]:
        """Every node but the root, parents before children."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(reversed(node.children.values()))

    def audit(self) -> None:
        """Look at everything that the tree knows twice. Raises `PoolCorruption`."""
        sizes = {True: 0, False: 0}
        nodes = 0
        owners = set()
        for node in self.walk():
            nodes += 1
            owners.add(node.owner)
            sizes[node.locks > 0] += node.length
            self._audit_node(node)
        if (nodes, len(owners)) != (self.nodes, nodes):
            raise PoolCorruption(f"the prefix tree counts {self.nodes} nodes and has {nodes} of {len(owners)} owners")
        if (sizes[False], sizes[True]) != (self.evictable, self.protected):
            raise PoolCorruption(
                f"the prefix tree counts {self.evictable} evictable and {self.protected} protected tokens; its nodes "
                f"have {sizes[False]} and {sizes[True]}"
            )

    def _audit_node(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        wrong = None
        if node.length <= 0 or node.length % self.page_size or tokens_in(node.key) != node.length + self._overlap:
            wrong = f"has {node.length} tokens and a key of {tokens_in(node.key)}"
        elif parent.children.get(node.page) is not node or page_name(node.key, (0, 0), self._page_tokens) != node.page:
            wrong = "is not where its first page says"
        elif node.depth != parent.depth + node.length or node.history < node.depth:
            wrong = f"has depth {node.depth} and history {node.history} below one of depth {parent.depth}"
        elif node.locks < sum(child.locks for child in node.children.values()):
            wrong = f"has {node.locks} locks, fewer than its children"
        elif (node.entry is not None) != (not node.locks and not node.children):
            wrong = "is among the leaves that could go and should not be, or the other way round"
        if wrong:
            raise PoolCorruption(f"node {node.owner} of the prefix tree {wrong}")

    def whole_pages(self, tokens: int) -> int:
        """How many of the first `tokens` tokens of a text can be cached."""
        places = max(tokens - self._overlap, 0)
        return places - places % self.page_size

    def _places(self, text: Text, limit: int | None) -> int:
        tokens = tokens_in(text)
        return self.whole_pages(tokens if limit is None else min(tokens, limit))

    def _common(self, node: Node, text: Text, cursor: tuple[int, int], most: int) -> int:
        n = common(node.key, text, cursor, most + self._overlap) - self._overlap
        return n - n % self.page_size

    def _split(self, node: Node, at: int) -> Split:
        parent = node.parent
        assert parent is not None
        head = self._new(cut(node.key, (0, 0), at + self._overlap), at, node.page)
        head.parent, parent.children[node.page] = parent, head
        head.locks, head.hits, head.priority, head.created = node.locks, node.hits, node.priority, node.created
        head.depth, head.history = parent.depth + at, node.history
        cursor = advance(node.key, (0, 0), at)
        node.key = cut(node.key, cursor, node.length - at + self._overlap)
        node.length -= at
        node.page = page_name(node.key, (0, 0), self._page_tokens)
        node.parent, head.children[node.page] = head, node
        node.stamp = self._tick()
        self._refresh(node)
        return Split(node, head, at)

    def _grow(self, parent: Node, key: Text, length: int, page: PageName, priority: int) -> Node:
        leaf = self._new(key, length, page)
        leaf.parent, parent.children[page] = parent, leaf
        leaf.priority = priority
        leaf.depth = leaf.history = parent.depth + length
        self.evictable += length
        self._leaves.discard(parent)
        above: Node | None = parent
        while above is not None and above.history < leaf.depth:
            above.history = leaf.depth
            above = above.parent
        return leaf

    def _remove(self, node: Node) -> None:
        parent = node.parent
        if parent is None or node.locks or node.children:
            raise PoolCorruption(f"node {node.owner} of the prefix tree is locked or no leaf; it cannot be evicted")
        del parent.children[node.page]
        self.evictable -= node.length
        self.nodes -= 1
        self._spare_owners.append(node.owner)
        self._refresh(parent)

    def _new(self, key: Text, length: int, page: PageName) -> Node:
        if self._spare_owners:
            owner = self._spare_owners.pop()
        else:
            owner = self._next_owner
            self._next_owner += 1
        self.nodes += 1
        return Node(owner, key, length, page, self._tick(), self._tick())

    def _refresh(self, node: Node) -> None:
        """Put the node among the leaves that could go, at its present age, or take it out."""
        if node.locks or node.children or node.parent is None:
            self._leaves.discard(node)
        else:
            self._leaves.put(node)

    def _stamp_path(self, node: Node) -> None:
        stamp = self._tick()
        at: Node | None = node
        while at is not None:
            at.stamp = stamp
            stamp -= _OLDER
            at = at.parent
        self._refresh(node)

    def _tick(self) -> float:
        self._clock += 1.0
        return self._clock
