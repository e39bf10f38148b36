"""Split, replace and groups of frees, on every kind of ledger; page order where there are ids."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pagestorm.errors import PoolCorruption
from pagestorm.memory.ledger import Ints, Ledger
from tests.memory.kinds import MakeLedger


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)


def pages(ledger: Ledger, owner: int) -> list[int]:
    table = ledger.page_table(owner)
    assert table is not None
    return [int(page) for page in table]


def taken(ledger: Ledger, n: int) -> list[int]:
    """The next n pages of the free list."""
    assert ledger.extend(ints(5), ints(n * ledger.page_size)) == n
    ids = ledger.last_ids()
    assert ids is not None
    return [int(page) for page in ids]


def test_frees_of_a_group_wait_and_come_back_in_the_order_of_the_calls(ledger_with_ids: MakeLedger) -> None:
    ledger = ledger_with_ids(12, 4, 6)
    ledger.extend(ints(0, 1, 2), ints(8, 8, 8))
    ledger.begin_group()
    assert ledger.drop(1, 4, 8) == 1
    assert ledger.release_many(ints(2)) == 2
    assert ledger.free_pages() == 6
    ledger.audit()
    assert ledger.drop(0, 0, 4) == 1
    assert ledger.end_group() == 4
    assert ledger.free_pages() == 10
    assert taken(ledger, 6) == [4, 5, 6, 1, 7, 8]
    ledger.audit()


def test_the_same_frees_one_by_one_come_back_last_first(ledger_with_ids: MakeLedger) -> None:
    ledger = ledger_with_ids(12, 4, 6)
    ledger.extend(ints(0, 1, 2), ints(8, 8, 8))
    ledger.drop(1, 4, 8)
    ledger.release_many(ints(2))
    ledger.drop(0, 0, 4)
    assert taken(ledger, 6) == [1, 5, 6, 4, 7, 8]


def test_with_pages_of_one_token_a_group_goes_behind(ledger_with_ids: MakeLedger) -> None:
    ledger = ledger_with_ids(6, 1, 6)
    ledger.extend(ints(0, 1), ints(2, 2))
    ledger.begin_group()
    ledger.release_many(ints(1))
    ledger.release_many(ints(0))
    ledger.end_group()
    assert taken(ledger, 6) == [5, 6, 3, 4, 1, 2]


def test_groups_do_not_nest(ledger_of: MakeLedger) -> None:
    ledger = ledger_of(4, 2, 6)
    with pytest.raises(PoolCorruption, match="no group"):
        ledger.end_group()
    ledger.begin_group()
    with pytest.raises(PoolCorruption, match="already"):
        ledger.begin_group()
    assert ledger.end_group() == 0


def test_a_duplicate_goes_and_the_owner_reads_the_other_copy(ledger_with_ids: MakeLedger) -> None:
    ledger = ledger_with_ids(12, 4, 6)
    ledger.extend(ints(0, 1), ints(12, 10))
    assert ledger.replace(1, 0, 8, 0, 4) == 2
    assert pages(ledger, 1) == [2, 3, 6]
    assert ledger.decode(ints(1), 2) == 0
    ledger.verify(ints(0, 1))
    ledger.audit()
    assert ledger.release_many(ints(1)) == 1
    assert taken(ledger, 4) == [6, 4, 5, 7]


def test_what_is_split_is_still_read_where_it_was(ledger_of: MakeLedger) -> None:
    ledger = ledger_of(8, 4, 6)
    ledger.extend(ints(0), ints(14))
    ledger.alias(1, 0, 0, 12)
    ledger.split(0, 8, 2)
    assert [ledger.length(owner) for owner in (0, 1, 2)] == [6, 12, 8]
    assert ledger.decode(ints(0), 3) == 1
    ledger.verify(ints(0, 1, 2))
    ledger.audit()
    assert ledger.release_many(ints(1)) == 0
    assert ledger.release_many(ints(2, 0)) == 5
    assert ledger.free_pages() == 8


def test_senseless_splits_and_replacements_change_nothing(ledger_of: MakeLedger) -> None:
    ledger = ledger_of(8, 4, 6)
    ledger.extend(ints(0, 1), ints(12, 6))
    ledger.alias(2, 0, 0, 4)
    calls: list[Callable[[], object]] = [
        lambda: ledger.split(0, 6, 3),
        lambda: ledger.split(0, 0, 3),
        lambda: ledger.split(0, 12, 3),
        lambda: ledger.split(0, 4, 1),
        lambda: ledger.split(0, 4, 0),
        lambda: ledger.split(2, 4, 3),
        lambda: ledger.replace(1, 0, 6, 0, 0),
        lambda: ledger.replace(1, 0, 4, 1, 4),
        lambda: ledger.replace(1, 0, 4, 0, 12),
        lambda: ledger.replace(2, 0, 4, 0, 4),
    ]
    for call in calls:
        with pytest.raises(PoolCorruption):
            call()
    ledger.audit()
    assert [ledger.length(owner) for owner in range(4)] == [12, 6, 4, 0]
    assert ledger.free_pages() == 3
