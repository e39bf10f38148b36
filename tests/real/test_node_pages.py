"""Nodes of a prefix tree in the torch ledger: pages of any number without a row of the request table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from pagestorm.errors import Divergence, PoolCorruption
from pagestorm.memory.ledger import Ints
from pagestorm_real import TorchLedger
from pagestorm_real.nodes import NodePages
from tests.memory.prefix_moves import Moves
from tests.memory.prefix_sides import ROWS, Simulated, replay


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)


def three_pages_in_a_node() -> TorchLedger:
    """Row 0 has four pages of four tokens; node 2 owns the first three of them."""
    ledger = TorchLedger(8, 4, 2, 16, nodes=8)
    ledger.extend(ints(0), ints(14))
    ledger.move(0, 0, 12, 2)
    return ledger


def table(ledger: TorchLedger, owner: int) -> list[int]:
    pages = ledger.page_table(owner)
    assert pages is not None
    return [int(page) for page in pages]


def test_a_node_keeps_what_was_moved_to_it_when_the_row_is_gone() -> None:
    ledger = three_pages_in_a_node()
    assert ledger.release_many(ints(0)) == 1
    ledger.alias(1, 2, 0, 12)
    ledger.split(2, 4, 3)
    assert (table(ledger, 1), table(ledger, 2), table(ledger, 3)) == ([1, 2, 3], [2, 3], [1])
    ledger.verify(ints(1, 2, 3))
    ledger.audit()
    assert ledger.release_many(ints(1)) == 0
    assert ledger.release_many(ints(2, 3)) == 3
    ledger.audit()
    assert ledger.free_pages() == 8


def test_a_node_is_read_back_token_by_token() -> None:
    ledger = three_pages_in_a_node()
    assert ledger._buffers is not None
    ledger._buffers.words[..., 2 * 4 + 1, :] = 0
    with pytest.raises(PoolCorruption, match=r"owner 2 position 5: slot 9 .* should say stay 1 position 5"):
        ledger.verify(ints(2))


def test_a_node_grows_by_what_is_moved_to_it_and_no_other_way() -> None:
    ledger = three_pages_in_a_node()
    calls: list[Callable[[], object]] = [
        lambda: ledger.extend(ints(2), ints(4)),
        lambda: ledger.decode(ints(0, 2), 1),
        lambda: ledger.alias(2, 0, 0, 4),
        lambda: ledger.drop(2, 0, 4),
        lambda: ledger.move(2, 0, 4, 3),
        lambda: ledger.replace(2, 0, 4, 0, 0),
        lambda: ledger.split(2, 4, 1),
    ]
    for call in calls:
        with pytest.raises(PoolCorruption):
            call()
    ledger.audit()
    ledger.verify(ints(0, 2))


def test_rows_cost_the_same_however_many_nodes_there_are() -> None:
    few, many = (TorchLedger(64, 4, 2, 16, nodes=nodes) for nodes in (1, 1000))
    sizes = [sum(tensor.numel() for tensor in ledger.tensors()) for ledger in (few, many)]
    assert sizes[0] == sizes[1]


def look_for_a_fault() -> None:
    for seed in range(20):
        moves = Moves(seed, page_size=2).run(60)
        pages = moves.setup.pages
        torch_ledger = TorchLedger(pages, 2, ROWS, pages * 2, nodes=pages)
        replay(Simulated(moves.setup, others=[torch_ledger]), moves.operations)


def test_a_node_that_is_cut_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = NodePages.cut

    def turned_round(self: NodePages, place: int) -> Any:
        head, rest = cut(self, place)
        return NodePages(head.ids.flip(0), head.origin), rest

    monkeypatch.setattr(NodePages, "cut", turned_round)
    with pytest.raises((PoolCorruption, Divergence)):
        look_for_a_fault()
