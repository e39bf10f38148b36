"""The Hypothesis state machine: any ledger beside the naive model, everything compared after every call."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagestorm.errors import PoolCorruption
from tests.memory.kinds import MakeLedger
from tests.memory.model import Model

OWNERS = 3
LONGEST_TOKENS = 200
NOT_CALLS = ("start", "teardown", "everything_agrees", "the_ledger_finds_itself_whole")

Owner = st.integers(0, OWNERS - 1)
Rarely = st.integers(0, 7).map(lambda n: n == 5)
Owners = st.lists(Owner, min_size=1, max_size=OWNERS, unique=True)


def search(examples: int, steps: int) -> settings:
    """Settings under which a run is the same every time."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


class LedgerMachine(RuleBasedStateMachine):
    """`make` builds the ledger under test. Calls that make no sense must raise and change nothing."""

    make: MakeLedger

    @initialize(pages=st.integers(3, 16), page_size=st.sampled_from([2, 1, 3, 4]))
    def start(self, pages: int, page_size: int) -> None:
        self.model = Model(pages, page_size, OWNERS)
        self.ledger = type(self).make(pages, page_size, OWNERS)

    @rule(owners=Owners, tokens=st.lists(st.integers(0, 9), min_size=OWNERS, max_size=OWNERS), fill=st.booleans())
    def extend(self, owners: list[int], tokens: list[int], fill: bool) -> None:
        """With `fill`, each owner ends at the end of a page: only then can something be appended behind it."""
        owners = self._growing(owners)
        p = self.model.page_size
        more = [n + (-(self.model.held[o].tokens + n) % p if fill else 0) for o, n in zip(owners, tokens, strict=False)]
        batch = list(zip(owners, more, strict=True))
        got = self.ledger.extend(_ints(owners), _ints([n for _, n in batch]))
        assert got == self.model.extend(batch)

    @rule(owners=Owners, steps=st.integers(1, 9), tokens_per_step=st.sampled_from([1, 1, 2, 5]))
    def decode(self, owners: list[int], steps: int, tokens_per_step: int) -> None:
        owners = self._growing(owners)
        got = self.ledger.decode(_ints(owners), steps, tokens_per_step)
        assert got == self.model.decode(owners, steps, tokens_per_step)

    @rule(owners=Owners)
    def release(self, owners: list[int]) -> None:
        if self.model.read_by_others(owners):
            return
        assert self.ledger.release_many(_ints(owners)) == self.model.release(owners)

    @rule(owner=Owner, to=Owner, first=st.integers(0, 3), pages=st.integers(0, 3), cut=Rarely)
    def move(self, owner: int, to: int, first: int, pages: int, cut: bool) -> None:
        a, b = self._positions(owner, first, pages, cut)
        if self.model.owns(owner, a, b) and self.model.appendable(to, owner):
            self.ledger.move(owner, a, b, to)
            self.model.move(owner, a, b, to)
        else:
            with pytest.raises(PoolCorruption):
                self.ledger.move(owner, a, b, to)

    @rule(owner=Owner, source=Owner, first=st.integers(0, 3), pages=st.integers(0, 3), cut=Rarely)
    def alias(self, owner: int, source: int, first: int, pages: int, cut: bool) -> None:
        a, b = self._positions(source, first, pages, cut)
        if self.model.reads(source, a, b) and self.model.appendable(owner, source):
            self.ledger.alias(owner, source, a, b)
            self.model.alias(owner, source, a, b)
        else:
            with pytest.raises(PoolCorruption):
                self.ledger.alias(owner, source, a, b)

    @rule(owner=Owner, first=st.integers(0, 3), pages=st.integers(0, 3), cut=Rarely)
    def drop(self, owner: int, first: int, pages: int, cut: bool) -> None:
        a, b = self._positions(owner, first, pages, cut)
        if not self.model.owns(owner, a, b):
            with pytest.raises(PoolCorruption):
                self.ledger.drop(owner, a, b)
        elif not self.model.read_by_others([owner]):
            assert self.ledger.drop(owner, a, b) == self.model.drop(owner, a, b)

    @rule(
        owner=Owner,
        source=Owner,
        first=st.integers(0, 3),
        at=st.integers(0, 3),
        pages=st.integers(0, 3),
        cut=Rarely,
    )
    def replace(self, owner: int, source: int, first: int, at: int, pages: int, cut: bool) -> None:
        model, p = self.model, self.model.page_size
        a, b = self._positions(owner, first, pages, cut)
        start = self._positions(source, at, 0, False)[0]
        whole = b % p == 0 and (start + b - a) % p == 0
        if owner != source and whole and model.owns(owner, a, b) and model.reads(source, start, start + b - a):
            if not model.read_by_others([owner]):
                assert self.ledger.replace(owner, a, b, source, start) == model.replace(owner, a, b, source, start)
        else:
            with pytest.raises(PoolCorruption):
                self.ledger.replace(owner, a, b, source, start)

    @rule(owner=Owner, head=Owner, first=st.integers(0, 3), cut=Rarely)
    def split(self, owner: int, head: int, first: int, cut: bool) -> None:
        tokens = self.model.held[owner].tokens
        at, _ = self._positions(owner, first, 0, cut)
        fits = owner != head and not self.model.held[head].tokens and 0 < at < tokens
        if fits and self.model.owns(owner, 0, at) and self.model.owns(owner, at, tokens):
            self.ledger.split(owner, at, head)
            self.model.split(owner, at, head)
        else:
            with pytest.raises(PoolCorruption):
                self.ledger.split(owner, at, head)

    @rule(wrongly=Rarely, begin=Rarely)
    def group(self, wrongly: bool, begin: bool) -> None:
        """Seldom: while a group is open, nothing comes back."""
        waits = self.model.waiting is not None
        if wrongly:
            with pytest.raises(PoolCorruption):
                self.ledger.begin_group() if waits else self.ledger.end_group()
        elif waits:
            assert self.ledger.end_group() == self.model.end_group()
        elif begin:
            self.ledger.begin_group()
            self.model.begin_group()

    @invariant()
    def everything_agrees(self) -> None:
        assert self.ledger.free_pages() == len(self.model.free)
        for owner, holding in enumerate(self.model.held):
            assert self.ledger.length(owner) == holding.tokens
            table = self.ledger.page_table(owner)
            assert table is None or table.tolist() == self.model.table(owner)
        last = self.ledger.last_ids()
        assert last is None or last.tolist() == self.model.last

    @invariant()
    def the_ledger_finds_itself_whole(self) -> None:
        self.ledger.audit()
        self.ledger.verify(np.arange(OWNERS))

    def _growing(self, owners: list[int]) -> list[int]:
        """Those that may grow, short enough to keep the example small."""
        refused = [owner for owner in owners if self.model.ends_in_strange_page(owner)]
        for owner in refused:
            with pytest.raises(PoolCorruption):
                self.ledger.decode(_ints([owner]), 1)
        return [o for o in owners if o not in refused and self.model.held[o].tokens < LONGEST_TOKENS]

    def _positions(self, owner: int, first: int, pages: int, cut: bool) -> tuple[int, int]:
        """Pages of the owner as positions; with `cut`, they may begin inside a page or end behind the owner's end."""
        p, holding = self.model.page_size, self.model.held[owner]
        a = first % (len(holding.places) + 1) * p
        b = min(a + pages * p, max(a, holding.tokens))
        return (a + 1, b + 1) if cut else (a, b)


def machine(make: MakeLedger) -> type[LedgerMachine]:
    """The machine for ledgers made by `make`."""
    return type("Machine", (LedgerMachine,), {"make": staticmethod(make)})


def reproducer(error: BaseException) -> list[str]:
    """The calls of the shrunk example that Hypothesis attached to an error."""
    return list(_calls(error))


def _calls(error: BaseException) -> Iterator[str]:
    for note in getattr(error, "__notes__", []):
        for line in note.splitlines():
            call = line.strip()
            if call.startswith("state.") and call.partition("(")[0].removeprefix("state.") not in NOT_CALLS:
                yield call


def _ints(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)
