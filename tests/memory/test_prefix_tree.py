"""The prefix tree in small cases that a reader can check in the head."""

from __future__ import annotations

import pytest

from pagestorm.errors import PoolCorruption
from pagestorm.memory.eviction import POLICIES, policy_of
from pagestorm.memory.prefix import Node, PrefixTree
from pagestorm.memory.text import Text

SYSTEM = (1, 0, 8)
A, B, C, D = ((10, 0, 8), (11, 0, 8), (12, 0, 8), (13, 0, 8))


def text(*spans: tuple[int, int, int]) -> Text:
    return spans


def shape(tree: PrefixTree) -> list[tuple[int, int]]:
    """(depth, tokens) of each node, sorted."""
    return sorted((node.depth, node.length) for node in tree.walk())


def evicted(tree: PrefixTree, tokens: int) -> list[int]:
    """The sources that go."""
    return [node.key[0][0] for node in tree.evict(tokens)]


def leaves(policy: str, tuning: dict[str, float] | None = None) -> PrefixTree:
    """A, B and C of 8 tokens each, inserted in this order, used in the order B, A, C; B inserted twice, A with rank."""
    tree = PrefixTree(4, policy, tuning)
    for span, priority in ((A, 5), (B, 0), (C, 1)):
        tree.insert(text(span), priority=priority)
    tree.insert(text(B), protected=8)
    for span in (B, A, C):
        tree.match(text(span))
    return tree


def test_what_was_inserted_is_matched_in_whole_pages() -> None:
    tree = PrefixTree(4)
    assert tree.insert(text((1, 0, 11))).length == 8
    assert tree.match(text((1, 0, 11))).length == 8
    assert tree.match(text((1, 0, 7))).length == 4
    assert tree.match(text((1, 0, 8)), 7).length == 4
    assert tree.match(text((1, 0, 3))).length == tree.match(text((2, 0, 8))).length == 0
    assert tree.match(text((1, 1, 8))).length == 0


def test_a_match_inside_an_edge_splits_it() -> None:
    tree = PrefixTree(4)
    long = tree.insert(text((1, 0, 12))).node
    match = tree.match(text((1, 0, 6), (2, 0, 9)))
    assert match.split is not None
    assert (match.length, match.split.at, match.split.node, match.split.head) == (4, 4, long, match.node)
    assert shape(tree) == [(4, 4), (12, 8)]
    assert long.parent is match.node
    assert tree.match(text((1, 0, 12))).node is long


def test_an_insert_tells_duplicates_from_what_is_new() -> None:
    tree = PrefixTree(4)
    tree.insert(text(SYSTEM, A))
    done = tree.insert(text(SYSTEM, B), protected=4)
    assert (done.length, done.matched) == (16, 8)
    assert [(d.a, d.b, d.at) for d in done.duplicates] == [(4, 8, 4)]
    assert done.leaf is done.node
    again = tree.insert(text(SYSTEM, B), protected=16)
    assert (again.matched, again.duplicates, again.leaf, again.node) == (16, [], None, done.node)


def test_a_lock_protects_the_path_to_the_root_and_nothing_else() -> None:
    tree = PrefixTree(4)
    tree.insert(text(SYSTEM, A))
    tree.insert(text(SYSTEM, B))
    node = tree.match(text(SYSTEM, A)).node
    tree.lock(node)
    assert (tree.evictable, tree.protected) == (8, 16)
    assert evicted(tree, 100) == [11]
    tree.unlock(node)
    assert (tree.evictable, tree.protected) == (16, 0)
    with pytest.raises(PoolCorruption, match="more often"):
        tree.unlock(node)


def test_a_split_below_a_lock_stays_locked() -> None:
    tree = PrefixTree(4)
    node = tree.insert(text((1, 0, 12))).node
    tree.lock(node)
    tree.match(text((1, 0, 4)))
    assert (tree.evictable, tree.protected) == (0, 12)
    tree.unlock(node)
    assert (tree.evictable, tree.protected) == (12, 0)
    tree.audit()


def test_whole_leaves_go_until_it_is_enough_and_parents_become_leaves() -> None:
    tree = PrefixTree(4)
    tree.insert(text(SYSTEM, A))
    tree.insert(text(SYSTEM, B))
    assert [node.length for node in tree.evict(1)] == [8]
    assert shape(tree) == [(8, 8), (16, 8)]
    assert [node.length for node in tree.evict(9)] == [8, 8]
    assert (tree.evict(1), tree.nodes, tree.evictable) == ([], 0, 0)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", [11, 10, 12]),
        ("mru", [12, 10, 11]),
        ("fifo", [10, 11, 12]),
        ("filo", [12, 11, 10]),
        ("lfu", [10, 12, 11]),
        ("priority", [11, 12, 10]),
        ("slru", [10, 12, 11]),
        ("tlru", [11, 10, 12]),
    ],
)
def test_each_policy_has_its_own_order(policy: str, order: list[int]) -> None:
    assert evicted(leaves(policy), 24) == order


def test_the_thresholds_of_slru_and_tlru_count() -> None:
    assert evicted(leaves("slru", {"protected_threshold": 1}), 24) == [11, 10, 12]
    # Of a history of 16 tokens 16 + 4 - 12 are needed: what begins behind them goes before all that is older.
    tree = PrefixTree(4, "tlru", {"threshold": 12, "next_prompt_estimate": 4})
    tree.insert(text(C, D))
    tree.insert(text(SYSTEM))
    tree.insert(text(SYSTEM, A))
    assert evicted(tree, 32) == [10, 12, 1]


def test_a_policy_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(ValueError, match=r"no eviction policy is called 'rlu'; there are lru, lfu, fifo, mru"):
        policy_of("rlu")
    for policy in POLICIES:
        with pytest.raises(ValueError, match=f"eviction policy {policy} has no tuning"):
            policy_of(policy, {"window": 3})


def test_bigram_keys_have_a_place_less_than_tokens() -> None:
    tree = PrefixTree(4, bigram=True)
    assert tree.insert(text((1, 0, 8))).length == 4
    assert tree.insert(text((1, 0, 9))).length == 8
    assert tree.match(text((1, 0, 8), (2, 0, 1))).length == 4
    tree.audit()


def test_owner_ids_are_used_again() -> None:
    tree = PrefixTree(1, first_owner=7)
    seen: list[Node] = []
    for source in range(50):
        seen.append(tree.insert(text((source, 0, 3))).node)
        tree.evict(tree.evictable - 6)
    assert {node.owner for node in seen} == {7, 8, 9}


def test_the_queue_of_leaves_stays_small_when_nothing_is_evicted() -> None:
    tree = PrefixTree(1)
    for source in range(20):
        tree.insert(text((source, 0, 3)))
    for _ in range(500):
        for source in range(20):
            tree.match(text((source, 0, 3)))
    assert tree.leaves == 20
    assert len(tree._leaves._heap) < 200
