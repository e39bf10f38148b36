"""A checker that cannot fail is a defect: each pool broken on purpose must be found, by each kind of check."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis.stateful import run_state_machine_as_test

from pagestorm.errors import Divergence, PoolCorruption
from pagestorm.memory.ledger import Ledger
from pagestorm.memory.paged import PagedLedger
from pagestorm.memory.twin import TwinPool
from tests.memory.canaries import CANARIES, FOUND, Canary
from tests.memory.kinds import make_ledger, skip_where_absent
from tests.memory.machine import machine, reproducer, search
from tests.memory.test_ledger_contract import ints

PAGES = 24


def play(ledger: Ledger) -> Iterator[None]:
    """A fixed piece of a server's life that uses every call, ends inside pages, fails, and goes round the list."""
    p = ledger.page_size
    single = [lambda: ledger.decode(ints(0, 1), 1)] * p
    calls: list[Callable[[], object]] = [
        lambda: ledger.extend(ints(0, 1), ints(2 * p, 2 * p + p // 2)),
        lambda: ledger.decode(ints(1, 0), p + 2),
        *single,
        lambda: ledger.extend(ints(4, 5), ints(1, PAGES * p)),
        lambda: ledger.move(0, 0, p, to=2),
        lambda: ledger.alias(3, 1, p, 2 * p),
        lambda: ledger.extend(ints(3, 2), ints(2 * p, 1)),
        lambda: ledger.drop(3, p, 2 * p),
        lambda: ledger.extend(ints(5), ints(ledger.free_pages() * p)),
        lambda: ledger.release_many(ints(5, 3)),
        lambda: ledger.release_many(ints(0)),
        lambda: ledger.release_many(ints(2, 1, 4)),
    ]
    for _ in range(3):
        for call in calls:
            call()
            yield


def play_and_look(ledger: Ledger) -> None:
    """Play, and look at everything after every call."""
    for _ in play(ledger):
        ledger.verify(np.arange(6))
        ledger.audit()


def test_the_piece_runs_through_on_pools_that_are_whole() -> None:
    skip_where_absent("twin")
    twin = TwinPool([make_ledger(kind, PAGES, 4, 6) for kind in ("paged", "counting", "torch-cpu", "paged-on-torch")])
    play_and_look(twin)
    assert twin.free_pages() == PAGES
    assert twin.compared == len(twin.calls) == 3 * (11 + 4)


@pytest.fixture(params=CANARIES)
def canary(request: pytest.FixtureRequest) -> Canary:
    skip_where_absent(request.param)
    return CANARIES[request.param]


def test_the_state_machine_finds_it_and_shrinks_it_to_a_few_calls(canary: Canary) -> None:
    with pytest.raises(FOUND) as caught:
        run_state_machine_as_test(machine(canary.make), settings=search(examples=1500, steps=15))
    calls = reproducer(caught.value)
    assert 1 <= len(calls) <= 8, calls


def test_a_twin_finds_it_beside_the_paged_ledger(canary: Canary) -> None:
    p = canary.seen_with_pages_of
    twin = TwinPool([PagedLedger(PAGES, p, 6), canary.make(PAGES, p, 6)])
    with pytest.raises((Divergence, PoolCorruption)):
        play_and_look(twin)


def test_its_own_audit_finds_it_where_it_can(canary: Canary) -> None:
    ledger = canary.make(PAGES, canary.seen_with_pages_of, 6)
    if canary.audit_sees_it:
        with pytest.raises(PoolCorruption):
            play_and_look(ledger)
    else:
        # An order or a count that is consistently wrong is only wrong beside another pool.
        play_and_look(ledger)
