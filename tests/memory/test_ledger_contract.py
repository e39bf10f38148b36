"""What every ledger must do, whatever it is made of."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagestorm.errors import Divergence, PoolCorruption
from pagestorm.memory.ledger import Ints, Ledger
from tests.memory.kinds import MakeLedger

PAGE_SIZES = [1, 4, 6]


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)


def state(ledger: Ledger, owners: int = 4) -> tuple[object, ...]:
    """All that can be seen of a ledger."""
    last = ledger.last_ids()
    tables = [ledger.page_table(owner) for owner in range(owners)]
    return (
        ledger.free_pages(),
        [ledger.length(owner) for owner in range(owners)],
        None if last is None else last.tolist(),
        [None if table is None else table.tolist() for table in tables],
    )


@pytest.mark.parametrize("p", PAGE_SIZES)
def test_a_fresh_ledger_has_every_page_free_and_nothing_held(ledger_of: MakeLedger, p: int) -> None:
    ledger = ledger_of(7, p, 4)
    assert (ledger.total_pages(), ledger.free_pages(), ledger.page_size) == (7, 7, p)
    assert [ledger.length(owner) for owner in range(4)] == [0, 0, 0, 0]
    ledger.audit()


def test_growing_takes_the_pages_that_rounding_up_says(ledger_of: MakeLedger) -> None:
    ledger = ledger_of(20, 4, 4)
    assert ledger.extend(ints(0, 1, 2), ints(4, 5, 1)) == 1 + 2 + 1
    assert ledger.extend(ints(0, 1), ints(1, 3)) == 1 + 0
    assert ledger.decode(ints(0, 1, 2), 3) == 0 + 1 + 0
    assert ledger.free_pages() == 20 - 6
    assert [ledger.length(owner) for owner in range(3)] == [8, 11, 4]
    ledger.audit()


def test_at_page_size_one_every_token_is_a_page(ledger_of: MakeLedger) -> None:
    ledger = ledger_of(20, 1, 4)
    assert ledger.extend(ints(2, 0), ints(3, 4)) == 7
    assert ledger.decode(ints(0, 2), 2, 3) == 12
    assert ledger.free_pages() == 1
    ledger.audit()


@pytest.mark.parametrize("p", PAGE_SIZES)
def test_the_last_page_can_be_taken_and_it_is_not_page_zero(ledger_of: MakeLedger, p: int) -> None:
    ledger = ledger_of(6, p, 4)
    assert ledger.extend(ints(3, 1), ints(2 * p, 4 * p)) == 6
    assert ledger.free_pages() == 0
    tables = [ledger.page_table(owner) for owner in (3, 1)]
    if tables[0] is not None and tables[1] is not None:
        assert sorted([*tables[0], *tables[1]]) == [1, 2, 3, 4, 5, 6]
    ledger.audit()


Call = Callable[[Ledger], int | None]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.extend(ints(2), ints(9)),
        lambda x: x.extend(ints(2, 3), ints(8, 1)),
        lambda x: x.extend(ints(1, 2), ints(1, 9)),
        lambda x: x.decode(ints(0, 1), 6),
        lambda x: x.decode(ints(0, 1, 2), 2, 4),
    ],
    ids=["one too long", "the second too much", "the first would fit", "some steps would fit", "several a step"],
)
def test_a_growth_that_does_not_fit_changes_nothing(ledger_of: MakeLedger, call: Call) -> None:
    ledger = ledger_of(5, 4, 4)
    ledger.extend(ints(0, 1), ints(4, 7))
    before = state(ledger)
    assert call(ledger) is None
    assert state(ledger) == before
    ledger.audit()
    ledger.verify(np.arange(4))


def test_an_empty_batch_changes_nothing(ledger_of: MakeLedger) -> None:
    ledger = ledger_of(5, 4, 4)
    ledger.extend(ints(0), ints(4))
    assert ledger.extend(ints(), ints()) == 0
    assert ledger.decode(ints(), 3) == 0
    assert ledger.decode(ints(0), 0) == 0
    assert ledger.extend(ints(0, 1), ints(0, 0)) == 0
    assert ledger.release_many(ints()) == 0
    assert ledger.release_many(ints(3)) == 0
    assert (ledger.free_pages(), ledger.length(0), ledger.length(1)) == (4, 4, 0)
    ledger.audit()


@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    steps=st.integers(1, 12),
    tokens_per_step=st.integers(1, 5),
    p=st.sampled_from([1, 2, 3, 4, 16]),
)
def test_decode_of_k_steps_is_k_decodes_of_one_step_ids_included(
    ledger_of: MakeLedger, lengths: list[int], steps: int, tokens_per_step: int, p: int
) -> None:
    leaping, stepping = ledger_of(400, p, 4), ledger_of(400, p, 4)
    owners = np.arange(len(lengths))[::-1].copy()
    for ledger in (leaping, stepping):
        ledger.extend(owners, ints(*lengths))
    pages = leaping.decode(owners, steps, tokens_per_step)
    parts: list[int | None] = []
    ids: list[int] = []
    for _ in range(steps):
        parts.append(stepping.decode(owners, 1, tokens_per_step))
        last = stepping.last_ids()
        ids += [] if last is None else last.tolist()
    assert pages == sum(part for part in parts if part is not None)
    last = leaping.last_ids()
    assert last is None or last.tolist() == ids
    assert state(leaping)[:2] == state(stepping)[:2]
    assert state(leaping)[3] == state(stepping)[3]


def test_a_release_gives_back_everything_and_the_owner_starts_anew(ledger_of: MakeLedger) -> None:
    ledger = ledger_of(9, 4, 4)
    ledger.extend(ints(0, 1, 2), ints(4, 7, 9))
    assert ledger.release_many(ints(2, 0)) == 3 + 1
    assert (ledger.free_pages(), ledger.length(0), ledger.length(1), ledger.length(2)) == (7, 0, 7, 0)
    assert ledger.extend(ints(2), ints(28)) == 7
    assert ledger.release_many(ints(1, 2)) == 9
    assert ledger.free_pages() == 9
    ledger.audit()


def test_moved_pages_are_read_by_both_and_given_back_by_the_new_owner(ledger_of: MakeLedger) -> None:
    ledger = ledger_of(9, 4, 4)
    ledger.extend(ints(0, 1), ints(14, 4))
    ledger.move(0, 4, 12, to=1)
    assert (ledger.length(0), ledger.length(1), ledger.free_pages()) == (14, 12, 4)
    table, moved = ledger.page_table(0), ledger.page_table(1)
    if table is not None and moved is not None:
        assert table[1:3].tolist() == moved[1:3].tolist()
    ledger.audit()
    ledger.verify(ints(0, 1))
    assert ledger.decode(ints(0), 4) == 1
    assert ledger.release_many(ints(0)) == 3
    assert ledger.release_many(ints(1)) == 3
    assert ledger.free_pages() == 9
    ledger.audit()


def test_a_moved_tail_is_filled_up_by_its_new_owner_only(ledger_of: MakeLedger) -> None:
    ledger = ledger_of(9, 4, 4)
    ledger.extend(ints(0), ints(6))
    ledger.move(0, 4, 6, to=1)
    with pytest.raises(PoolCorruption, match="ends inside a page that is not its own"):
        ledger.decode(ints(1, 0), 1)
    assert ledger.decode(ints(1), 3) == 1
    ledger.verify(ints(0, 1))
    assert ledger.release_many(ints(0)) == 1
    assert ledger.decode(ints(1), 4) == 1
    ledger.verify(ints(1))
    assert ledger.release_many(ints(1)) == 3
    ledger.audit()


def test_aliased_pages_are_read_and_never_given_back(ledger_of: MakeLedger) -> None:
    ledger = ledger_of(9, 4, 4)
    ledger.extend(ints(0), ints(12))
    ledger.alias(1, 0, 0, 8)
    ledger.alias(2, 1, 4, 8)
    assert (ledger.length(1), ledger.length(2), ledger.free_pages()) == (8, 4, 6)
    source, reader = ledger.page_table(0), ledger.page_table(2)
    if source is not None and reader is not None:
        assert reader.tolist() == source[1:2].tolist()
    assert ledger.extend(ints(1, 2), ints(5, 1)) == 3
    ledger.audit()
    ledger.verify(ints(0, 1, 2))
    assert ledger.release_many(ints(1, 2)) == 3
    assert ledger.release_many(ints(0)) == 3
    ledger.audit()


def test_a_drop_gives_pages_back_while_the_owner_goes_on(ledger_of: MakeLedger) -> None:
    ledger = ledger_of(5, 4, 4)
    ledger.extend(ints(0), ints(18))
    assert ledger.drop(0, 4, 12) == 2
    assert (ledger.length(0), ledger.free_pages()) == (18, 2)
    table = ledger.page_table(0)
    assert table is None or table.tolist() == [1, -1, -1, 4, 5]
    ledger.audit()
    ledger.verify(ints(0))
    assert ledger.extend(ints(1), ints(8)) == 2
    ledger.verify(ints(0, 1))
    assert ledger.release_many(ints(0)) == 3
    assert ledger.release_many(ints(1)) == 2
    assert ledger.free_pages() == 5
    ledger.audit()


def test_an_empty_range_may_lie_where_pages_are_not_the_owners(ledger_of: MakeLedger) -> None:
    ledger = ledger_of(9, 2, 4)
    ledger.extend(ints(0), ints(8))
    ledger.move(0, 0, 4, to=1)
    before = state(ledger)
    ledger.move(0, 2, 2, to=1)
    ledger.alias(2, 0, 2, 2)
    assert ledger.drop(0, 2, 2) == 0
    assert state(ledger)[:2] == before[:2]
    ledger.audit()


Senseless = Callable[[Ledger], object]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.move(0, 2, 8, 3),
        lambda x: x.move(0, 4, 7, 3),
        lambda x: x.move(0, 8, 4, 3),
        lambda x: x.move(0, 4, 12, 3),
        lambda x: x.move(0, 4, 8, 1),
        lambda x: x.move(0, 4, 8, 0),
        lambda x: x.move(0, 0, 8, 3),
        lambda x: x.move(2, 0, 4, 3),
        lambda x: x.alias(1, 0, 0, 4),
        lambda x: x.alias(3, 0, 1, 4),
        lambda x: x.alias(2, 2, 0, 4),
        lambda x: x.alias(3, 0, 8, 12),
        lambda x: x.drop(0, 0, 4),
        lambda x: x.drop(0, 0, 8),
        lambda x: x.drop(2, 0, 4),
        lambda x: x.drop(0, 4, 6),
        lambda x: x.drop(0, -4, 4),
        lambda x: x.decode(ints(1, 3, 2), 1),
        lambda x: x.extend(ints(3, 2), ints(4, 1)),
    ],
    ids=[
        "move from inside a page",
        "move to inside a page",
        "move backwards",
        "move beyond the end",
        "move behind half a page",
        "move to itself",
        "move what was dropped",
        "move what is aliased",
        "alias behind half a page",
        "alias from inside a page",
        "alias itself",
        "alias beyond the end",
        "drop again",
        "drop partly again",
        "drop what is aliased",
        "drop to inside a page",
        "drop before the start",
        "decode into a stranger's page",
        "extend into a stranger's page",
    ],
)
def test_a_senseless_call_is_refused_and_changes_nothing(ledger_of: MakeLedger, call: Senseless) -> None:
    ledger = ledger_of(9, 4, 4)
    ledger.extend(ints(0, 1), ints(8, 6))
    ledger.alias(2, 1, 0, 6)
    ledger.drop(0, 0, 4)
    before = state(ledger)
    with pytest.raises(PoolCorruption):
        call(ledger)
    assert state(ledger) == before
    ledger.audit()


def test_dropped_positions_cannot_be_aliased(ledger_of: MakeLedger) -> None:
    ledger = ledger_of(9, 4, 4)
    ledger.extend(ints(0), ints(8))
    ledger.drop(0, 0, 4)
    with pytest.raises(PoolCorruption, match="were dropped"):
        ledger.alias(1, 0, 0, 8)
    ledger.alias(1, 0, 4, 8)
    ledger.audit()


def test_an_unknown_pool_is_named(ledger_of: MakeLedger) -> None:
    ledger = ledger_of(9, 4, 4)
    for ask in (ledger.free_pages, ledger.total_pages, lambda pool: ledger.drop(0, 0, 0, pool)):
        with pytest.raises(KeyError, match="window"):
            ask("window")


def test_pages_freed_under_a_reader_are_found_by_the_audit(ledger_with_ids: MakeLedger) -> None:
    ledger = ledger_with_ids(9, 4, 4)
    ledger.extend(ints(0), ints(8))
    ledger.alias(1, 0, 0, 8)
    ledger.release_many(ints(0))
    # In a twin the counting ledger sees nothing wrong: that too is said.
    with pytest.raises((PoolCorruption, Divergence), match="nobody owns"):
        ledger.audit()
