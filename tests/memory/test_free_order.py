"""Which page comes next: values derived by hand from the engine's rules (sglang 0.5.23, `mem_cache/allocator`).

More than one token a page: `_release_page_ids` puts the group in front, in its own order. One token a page: `free`
puts it behind. Frees of one result are one group, requests in batch order, each from its first page to its last.
"""

from __future__ import annotations

import numpy as np
import pytest

from pagestorm.errors import PoolCorruption
from pagestorm.memory.allocator import PageAllocator
from pagestorm.memory.ledger import Ledger
from tests.memory.kinds import MakeAllocator, MakeLedger
from tests.memory.test_ledger_contract import ints


def ids(ledger: Ledger) -> list[int]:
    last = ledger.last_ids()
    assert last is not None
    return [int(page) for page in last]


def test_extend_takes_from_the_front_request_by_request(ledger_with_ids: MakeLedger) -> None:
    ledger = ledger_with_ids(8, 4, 4)
    ledger.extend(ints(2, 0, 1), ints(5, 4, 9))
    assert ids(ledger) == [1, 2, 3, 4, 5, 6]
    tables = [ledger.page_table(owner) for owner in (2, 0, 1)]
    assert [table.tolist() for table in tables if table is not None] == [[1, 2], [3], [4, 5, 6]]


def test_pages_go_back_to_the_front_in_batch_order_each_request_in_row_order(ledger_with_ids: MakeLedger) -> None:
    ledger = ledger_with_ids(8, 4, 4)
    ledger.extend(ints(0, 1, 2), ints(5, 3, 8))  # 0: 1 2, 1: 3, 2: 4 5
    ledger.release_many(ints(2, 0))
    assert ids(ledger) == [4, 5, 1, 2]
    ledger.extend(ints(3), ints(24))
    assert ids(ledger) == [4, 5, 1, 2, 6, 7]


def test_retracting_one_by_one_puts_the_last_victim_in_front(ledger_with_ids: MakeLedger) -> None:
    ledger = ledger_with_ids(8, 4, 4)
    ledger.extend(ints(0, 1, 2), ints(5, 3, 8))
    ledger.release_many(ints(2))
    ledger.release_many(ints(0))
    ledger.extend(ints(3), ints(24))
    assert ids(ledger) == [1, 2, 4, 5, 6, 7]


def test_slots_of_one_token_go_to_the_back(ledger_with_ids: MakeLedger) -> None:
    ledger = ledger_with_ids(8, 1, 4)
    ledger.extend(ints(0, 1, 2), ints(2, 1, 2))  # 0: 1 2, 1: 3, 2: 4 5
    ledger.release_many(ints(2, 0))
    assert ids(ledger) == [4, 5, 1, 2]
    ledger.extend(ints(3), ints(7))
    assert ids(ledger) == [6, 7, 8, 4, 5, 1, 2]


def test_the_back_order_holds_when_the_list_has_gone_round(ledger_with_ids: MakeLedger) -> None:
    ledger = ledger_with_ids(5, 1, 4)
    for _ in range(7):
        ledger.extend(ints(0, 1), ints(2, 1))
        ledger.release_many(ints(1, 0))
    # Three slots go round each time: 1 2 3 4 5 -> 4 5 3 1 2 -> 1 2 3 4 5 (3 given before 4 5) and so on.
    ledger.extend(ints(2), ints(5))
    assert ids(ledger) == [4, 5, 3, 1, 2]


def test_decode_opens_pages_by_step_then_batch_position(ledger_with_ids: MakeLedger) -> None:
    ledger = ledger_with_ids(12, 4, 4)
    ledger.extend(ints(0, 1, 2), ints(3, 4, 2))  # pages 1, 2, 3; next token opens a page in 1, 0, 2 tokens
    ledger.decode(ints(0, 1, 2), 6)
    assert ids(ledger) == [4, 5, 6, 7, 8]
    # step 0: owner 1; 1: owner 0; 2: owner 2; 4: owner 1; 5: owner 0
    tables = [ledger.page_table(owner) for owner in (0, 1, 2)]
    assert [table.tolist() for table in tables if table is not None] == [[1, 5, 8], [2, 4, 7], [3, 6]]


def test_decode_at_page_size_one_goes_round_the_batch(ledger_with_ids: MakeLedger) -> None:
    ledger = ledger_with_ids(12, 1, 4)
    ledger.decode(ints(2, 0), 2, 2)
    tables = [ledger.page_table(owner) for owner in (2, 0)]
    assert [table.tolist() for table in tables if table is not None] == [[1, 2, 5, 6], [3, 4, 7, 8]]


def test_several_pages_opened_by_one_step_stay_together(ledger_with_ids: MakeLedger) -> None:
    ledger = ledger_with_ids(12, 2, 4)
    ledger.extend(ints(0, 1), ints(1, 2))  # pages 1, 2
    ledger.decode(ints(1, 0), 2, 5)
    # step 0: owner 1 tokens 2..6 open three pages, owner 0 tokens 1..5 open two; step 1: owner 1 two, owner 0 three
    tables = [ledger.page_table(owner) for owner in (1, 0)]
    assert [table.tolist() for table in tables if table is not None] == [[2, 3, 4, 5, 8, 9], [1, 6, 7, 10, 11, 12]]


def test_a_drop_is_a_group_of_its_own(ledger_with_ids: MakeLedger) -> None:
    ledger = ledger_with_ids(8, 4, 4)
    ledger.extend(ints(0), ints(16))
    ledger.drop(0, 4, 12)
    assert ids(ledger) == [2, 3]
    ledger.release_many(ints(0))
    assert ids(ledger) == [1, 4]
    ledger.extend(ints(1), ints(20))
    assert ids(ledger) == [1, 4, 2, 3, 5]


def test_moved_and_aliased_pages_come_back_with_their_owner(ledger_with_ids: MakeLedger) -> None:
    ledger = ledger_with_ids(8, 4, 4)
    ledger.extend(ints(0), ints(14))
    ledger.move(0, 4, 8, to=1)
    ledger.alias(2, 1, 0, 4)
    ledger.extend(ints(2), ints(3))
    ledger.release_many(ints(2, 0))
    assert ids(ledger) == [5, 1, 3, 4]
    ledger.release_many(ints(1))
    assert ids(ledger) == [2]


def free_list(allocator: PageAllocator) -> list[int]:
    """The free list, by taking all of it; what is left behind is all out."""
    taken = allocator.take(allocator.free_pages)
    assert taken is not None
    return [int(page) for page in taken]


@pytest.mark.parametrize(("page_size", "expected"), [(16, [5, 2, 1, 4, 7, 8]), (1, [7, 8, 1, 4, 5, 2])])
def test_an_allocator_keeps_each_group_in_its_order(
    allocator_of: MakeAllocator, page_size: int, expected: list[int]
) -> None:
    allocator = allocator_of(8, page_size)
    assert allocator.take(6) is not None
    allocator.give(ints(1, 4))
    allocator.give(ints(5, 2))
    assert free_list(allocator) == expected


def test_an_allocator_gives_all_or_nothing(allocator_of: MakeAllocator) -> None:
    allocator = allocator_of(4, 16)
    assert allocator.take(5) is None
    assert allocator.free_pages == 4
    first = allocator.take(3)
    assert first is not None
    assert first.tolist() == [1, 2, 3]
    assert first.dtype == np.int64
    assert allocator.take(2) is None
    nothing = allocator.take(0)
    assert nothing is not None
    assert len(nothing) == 0
    allocator.give(nothing)
    assert allocator.free_pages == 1
    assert free_list(allocator) == [4]


@pytest.mark.parametrize("page_size", [16, 1])
@pytest.mark.parametrize(
    ("group", "what"),
    [((2, 5), "page 5"), ((0,), "page 0"), ((9,), "page 9"), ((-1,), "page -1"), ((3, 2, 3), "page 3")],
    ids=["free", "padding", "beyond the pool", "negative", "twice in the group"],
)
def test_an_allocator_refuses_pages_that_are_not_out(
    allocator_of: MakeAllocator, page_size: int, group: tuple[int, ...], what: str
) -> None:
    allocator = allocator_of(8, page_size)
    allocator.take(4)
    with pytest.raises(PoolCorruption, match=what):
        allocator.give(ints(*group))
    assert allocator.free_pages == 4
    allocator.give(ints(1))
    with pytest.raises(PoolCorruption, match="page 1"):
        allocator.give(ints(1))
    assert sorted(free_list(allocator)) == [1, 5, 6, 7, 8]


def test_the_arrays_that_an_allocator_hands_out_are_the_callers(allocator_of: MakeAllocator) -> None:
    allocator = allocator_of(6, 16)
    taken = allocator.take(3)
    assert taken is not None
    kept = taken.copy()
    allocator.give(taken[::-1].copy())
    assert taken.tolist() == kept.tolist()
    taken[:] = 0
    assert free_list(allocator) == [3, 2, 1, 4, 5, 6]
