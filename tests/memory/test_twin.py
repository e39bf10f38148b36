"""What a twin says when its ledgers differ, and that it says nothing when they do not."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pagestorm.errors import Divergence, PoolCorruption
from pagestorm.memory.counting import CountingLedger
from pagestorm.memory.paged import PagedLedger
from pagestorm.memory.twin import NO_IDS, TwinPool
from tests.memory.canaries import (
    DecodesRequestByRequest,
    GrowsOneByOne,
    ReadsOnAfterADrop,
    RefusesTheLastPage,
    TurnsGroupsRound,
)
from tests.memory.test_ledger_contract import ints


def test_page_ids_that_differ_are_shown_with_the_call() -> None:
    turned = PagedLedger(8, 4, 3, TurnsGroupsRound(8, 4))
    twin = TwinPool([PagedLedger(8, 4, 3), CountingLedger(8, 4, 3), turned])
    twin.extend(ints(0), ints(12))
    twin.release_many(ints(0))
    with pytest.raises(Divergence) as caught:
        twin.extend(ints(1, 2), ints(4, 5))
    error = caught.value
    assert error.call == "call 2: extend(owners=[1, 2], tokens=[4, 5])"
    assert error.answers == {"paged": [1, 2, 3], "counting": NO_IDS, "paged#2": [3, 2, 1]}
    assert "page ids differ" in str(error)
    assert error.call in str(error)


def test_right_pages_in_the_wrong_rows_are_seen_at_once() -> None:
    twin = TwinPool([PagedLedger(8, 4, 3), CountingLedger(8, 4, 3), DecodesRequestByRequest(8, 4, 3)])
    twin.extend(ints(0, 1), ints(3, 4))
    with pytest.raises(Divergence) as caught:
        twin.decode(ints(0, 1), 6)
    assert caught.value.call == "call 1: decode(owners=[0, 1], steps=6, tokens_per_step=1)"
    assert caught.value.answers == {"paged": [2, 3, 5], "counting": NO_IDS, "paged#2": [2, 5, 6]}
    assert "pages of owner 1 differ" in str(caught.value)


def test_a_different_verdict_is_shown_for_each_ledger() -> None:
    twin = TwinPool([PagedLedger(2, 4, 2), RefusesTheLastPage(2, 4, 2)])
    with pytest.raises(Divergence) as caught:
        twin.extend(ints(0), ints(8))
    assert caught.value.answers == {"paged": 2, "counting": None}
    assert "verdict differ: paged 2; counting None" in str(caught.value)


def test_a_refusal_that_took_pages_shows_as_different_free_pages() -> None:
    twin = TwinPool([PagedLedger(3, 4, 2), GrowsOneByOne(3, 4, 2)])
    with pytest.raises(Divergence, match="free pages differ: paged 3; paged#2 1"):
        twin.extend(ints(0, 1), ints(8, 8))


def test_corruption_that_only_one_ledger_reports_is_a_divergence() -> None:
    twin = TwinPool([ReadsOnAfterADrop(8, 4, 3), PagedLedger(8, 4, 3)])
    twin.extend(ints(0), ints(12))
    twin.drop(0, 0, 4)
    with pytest.raises(Divergence) as caught:
        twin.alias(1, 0, 0, 4)
    assert caught.value.answers["paged"] is None
    assert str(caught.value.answers["paged#2"]).startswith("PoolCorruption: positions 0..4 of owner 0 were dropped")


def test_corruption_that_all_report_is_raised_as_it_is_and_the_twin_goes_on() -> None:
    twin = TwinPool([PagedLedger(8, 4, 3), CountingLedger(8, 4, 3)])
    twin.extend(ints(0), ints(12))
    with pytest.raises(PoolCorruption, match="are not whole pages"):
        twin.drop(0, 1, 4)
    assert twin.release_many(ints(0)) == 3


def test_after_a_divergence_every_call_says_the_same_again() -> None:
    twin = TwinPool([PagedLedger(2, 4, 2), RefusesTheLastPage(2, 4, 2)])
    with pytest.raises(Divergence) as first:
        twin.extend(ints(0), ints(8))
    with pytest.raises(Divergence) as second:
        twin.release_many(ints(0))
    assert second.value is first.value
    assert len(twin.calls) == 1


def test_the_audit_compares_page_tables() -> None:
    one, other = PagedLedger(8, 4, 3), PagedLedger(8, 4, 3)
    twin = TwinPool([one, other])
    twin.extend(ints(0, 1), ints(4, 4))
    other.release_many(ints(1, 0))  # behind the twin's back
    other.extend(ints(0, 1), ints(4, 4))
    with pytest.raises(Divergence, match=r"pages of owner 0 differ: paged \[1\]; paged#2 \[2\]"):
        twin.audit()


def test_the_calls_kept_play_again_to_the_same_state() -> None:
    twin = TwinPool([PagedLedger(16, 4, 4), CountingLedger(16, 4, 4)])
    owners = ints(0, 1)
    twin.extend(owners, ints(9, 4))
    owners[:] = 3  # the caller's array, used again
    twin.decode(ints(0, 1), 3)
    twin.move(0, 0, 8, to=2)
    twin.alias(3, 2, 0, 4)
    twin.drop(2, 4, 8)
    twin.release_many(ints(1))
    again = PagedLedger(16, 4, 4)
    for call in json.loads(json.dumps(twin.calls)):
        del call["number"]
        method = getattr(again, call.pop("call"))
        method(**{key: np.array(value) if isinstance(value, list) else value for key, value in call.items()})
    for owner in range(4):
        ours, theirs = twin.page_table(owner), again.page_table(owner)
        assert ours is not None
        assert theirs is not None
        assert ours.tolist() == theirs.tolist()
    assert [call["number"] for call in twin.calls] == [0, 1, 2, 3, 4, 5]


def test_only_the_last_calls_are_kept_and_all_are_counted() -> None:
    twin = TwinPool([PagedLedger(16, 4, 4)], keep_calls=3)
    twin.extend(ints(0), ints(4))
    for _ in range(9):
        twin.decode(ints(0), 1)
    assert twin.compared == 10
    assert [call["number"] for call in twin.calls] == [7, 8, 9]


def test_ledgers_of_different_shape_cannot_be_twins() -> None:
    with pytest.raises(ValueError, match="same page size and number of pages"):
        TwinPool([PagedLedger(8, 4, 3), PagedLedger(9, 4, 3)])
    with pytest.raises(ValueError, match="at least one"):
        TwinPool([])
