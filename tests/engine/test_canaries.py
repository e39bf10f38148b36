"""Engines broken on purpose. Each must be caught by a check that the healthy engine passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagestorm.checks import Conservation, check_drained
from pagestorm.engine import iteration, machine
from pagestorm.engine.batch import RunningBatch
from pagestorm.engine.iteration import SglangEngine
from pagestorm.engine.request import Request
from pagestorm.errors import InvariantBroken, PoolCorruption
from tests.engine.drive import Ask, Drive, drive

DRIVES = [
    Drive(
        [Ask(40 + 7 * i, 150 + 11 * i, 150 + 11 * i + 9 * (i % 3), at_fs=i * 3 * 10**14) for i in range(14)],
        pages=60,
        conservativeness=0.05,
        overlap=overlap,
        chunk_tokens=64,
    )
    for overlap in (False, True)
]


class HorizonOneStepTooLong(SglangEngine):
    """Leaps over the step at which something happens."""

    def _horizon(self, until_fs: int) -> int:
        steps = super()._horizon(until_fs)
        return steps + 1 if steps > 1 else steps


class LeapsPastArrivals(SglangEngine):
    """Does not look at the time of the next arrival."""

    def _horizon(self, until_fs: int) -> int:
        return super()._horizon(machine.FOREVER_FS)


class ForgetsTheRatio(SglangEngine):
    """Decays once a leap instead of once a step."""

    def _launch_decode(self, steps: int, decays: bool) -> bool:
        before = self.ratio.current
        launched = super()._launch_decode(steps, decays)
        if decays and steps > 1:
            self.ratio.current = before
            self.ratio.decay_steps(1)
        return launched


class LosesTheTail(SglangEngine):
    """Forgets to give back one page of a retracted request."""

    def _give_back(self, requests: list[Request]) -> int:
        if any(r.retracted for r in requests):
            self.ledger._free -= 1  # type: ignore[attr-defined]  # a leak, from inside
        return super()._give_back(requests)


class GivesBackTwice(SglangEngine):
    """Counts the pages of a finished request free twice."""

    def _give_back(self, requests: list[Request]) -> int:
        pages = super()._give_back(requests)
        if not any(r.retracted for r in requests):
            self.ledger._free += 1  # type: ignore[attr-defined]  # a double free, from inside
            self._free += 1
        return pages


class EndsTwice(SglangEngine):
    """Tells the end of a request a second time."""

    def _finish(self, finished: list[Request], result: iteration.Pass) -> None:
        super()._finish(finished, result)
        if finished[0].number == 3:
            self._emit("finish", result.end_fs, result.step, 3, 0, 0)


class SkipsTheQueue(SglangEngine):
    """Takes the retracted back at the head of the queue, as another engine does."""

    def _retract(self) -> None:
        before = len(self.waiting)
        super()._retract()
        self.waiting.rotate(len(self.waiting) - before)


class BooksOnePageShort(SglangEngine):
    """Tells one page less than a prefill took."""

    def _emit(
        self, kind: str, time_fs: int, step: int, request: int = -1, tokens: int = -1, pages: int = -1, detail: str = ""
    ) -> None:
        super()._emit(kind, time_fs, step, request, tokens, pages - (kind == "prefill" and request == 2), detail)


def leaps_as_it_steps(engine: type[SglangEngine], what: Drive) -> None:
    leapt = drive(what, engine_class=engine)
    stepped = drive(what, engine_class=engine, step_only=True)
    assert leapt.digest == stepped.digest


def keeps_its_books(engine: type[SglangEngine], what: Drive) -> None:
    driven = drive(what, engine_class=engine, sinks=[Conservation(what.pages, what.page_size)])
    check_drained(driven.engine)


def decides_as_the_healthy_one(engine: type[SglangEngine], what: Drive) -> None:
    assert drive(what, engine_class=engine).digest == drive(what).digest


CANARIES: list[tuple[type[SglangEngine], Callable[[type[SglangEngine], Drive], None]]] = [
    (HorizonOneStepTooLong, leaps_as_it_steps),
    (LeapsPastArrivals, leaps_as_it_steps),
    (ForgetsTheRatio, leaps_as_it_steps),
    (LosesTheTail, keeps_its_books),
    (GivesBackTwice, keeps_its_books),
    (EndsTwice, keeps_its_books),
    (BooksOnePageShort, keeps_its_books),
    (SkipsTheQueue, decides_as_the_healthy_one),
]


@pytest.mark.parametrize("what", DRIVES, ids=["plain", "overlap"])
@pytest.mark.parametrize(("broken", "check"), CANARIES, ids=[c.__name__ for c, _ in CANARIES])
def test_a_broken_engine_is_caught(
    broken: type[SglangEngine], check: Callable[[type[SglangEngine], Drive], None], what: Drive
) -> None:
    check(SglangEngine, what)
    with pytest.raises((AssertionError, InvariantBroken, PoolCorruption, ValueError, IndexError, TypeError)):
        check(broken, what)


def test_the_healthy_drives_are_under_pressure() -> None:
    for what in DRIVES:
        driven = drive(what)
        assert driven.engine.counts.retractions > 0
        assert driven.engine.counts.finished == len(what.asks)


def test_a_page_law_off_by_one_phase_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old convention that opened a page one token late: the decode check then asks at the wrong step."""
    healthy = RunningBatch.opening

    def late(self: RunningBatch, late: bool = False) -> int:
        return healthy(self, late=True)

    monkeypatch.setattr(RunningBatch, "opening", late)
    broken = [drive(what) for what in DRIVES]
    assert [b.engine.outcome for b in broken] == ["crashed"] * len(DRIVES)
