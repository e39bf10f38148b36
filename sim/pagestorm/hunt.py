"""The hunt for disagreement: Hypothesis draws scenarios and steers them towards pressure, a referee compares.

What it finds is shrunk by Hypothesis to the smallest scenario that still shows it. The same seed hunts through the same
scenarios. Needs Hypothesis (`pip install 'pagestorm[test]'`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings, target
from hypothesis.strategies import SearchStrategy

from pagestorm.catch import Catch, Found
from pagestorm.corners import Seen
from pagestorm.errors import PagestormError
from pagestorm.referees import FAULTS, Referee
from pagestorm.scenario import Scenario
from pagestorm.strategies import Mapped, scenario, scenarios

ROUND_EXAMPLES = 100
"""Steering spends the second half of a round around what it found in the first: many short rounds see more corners."""
MOST_ROUNDS = 1 << 20
ENOUGH_SHORTAGES = 8
"""More shortages in one run are no better."""
FEW_REQUESTS = 10
"""What is found shall have no more requests than this; `SMALLER_EXAMPLES` scenarios are spent on it where it has."""
SMALLER_EXAMPLES = 500
SHRINKING_COMPARISONS = 1000


class _Stop(BaseException):
    """Leaves Hypothesis at once with an error that is no finding: nothing that it would try to shrink."""

    def __init__(self, error: PagestormError) -> None:
        super().__init__(str(error))
        self.error = error


class _Enough(BaseException):
    """Leaves Hypothesis because as many scenarios were compared as were asked for."""


class _Parted(Exception):
    """What Hypothesis sees of a finding: the same error from the same line, whatever was found."""


def hunt(
    against: str,
    referee: Referee,
    *,
    examples: int,
    start: int = 0,
    engine: str = "sglang",
    progress: Callable[[int], None] | None = None,
    on_found: Callable[[Found], None] | None = None,
) -> Catch:
    """Compare `examples` different scenarios, drawn from the seed `start`; stop at the first that parts the two sides.

    `progress` is told how many were compared, `on_found` of the first finding, before it is shrunk. Ctrl-C ends the
    hunt with what it has. Raises what a referee raises when
    it cannot compare at all (`ReferenceUnavailable`, `ScenarioError`, `MemoryRefused`).
    """
    # A pool with page ids cannot follow a prefix cache yet.
    drawn = partial(scenarios, engine, prefix_caching=False if against == "torch" else None)
    trail = _Trail(Catch(against, engine), referee, examples, progress, on_found)
    smaller = _Trail(Catch(against, engine), referee, SMALLER_EXAMPLES)
    try:
        _rounds(trail, start, drawn())
        if trail.best is not None and trail.best.requests > FEW_REQUESTS:
            # Some differences hang on a sum over many requests and do not shrink one by one.
            _rounds(smaller, start, drawn(most_requests=FEW_REQUESTS))
    except _Stop as stop:
        raise stop.error from None
    except KeyboardInterrupt:
        trail.catch.interrupted = True
    trail.catch.found = smaller.best or trail.best
    return trail.catch


def _rounds(trail: _Trail, start: int, drawn: SearchStrategy[Mapped]) -> None:
    """One round after another until something is found or enough scenarios were compared."""
    with suppress(_Enough):
        for number in range(MOST_ROUNDS):
            _round(trail, min(trail.examples, ROUND_EXAMPLES), start * MOST_ROUNDS + number, drawn)
            if trail.best is not None:
                return


def _round(trail: _Trail, examples: int, start: int, drawn: SearchStrategy[Mapped]) -> None:
    """Draw, steer, and shrink what parted the two sides: one run of Hypothesis."""

    @seed(start)
    @settings(
        max_examples=examples,
        database=None,
        derandomize=False,
        deadline=None,
        print_blob=False,
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
        phases=(Phase.generate, Phase.target, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn)
    def probe(data: Mapped) -> None:
        if not trail.follow(data):
            raise _Parted

    with suppress(_Parted):
        probe()


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What came of one scenario."""

    found: Found | None
    peak_use: float = 0.0
    shortages: int = 0


class _Trail:
    """The scenarios tried so far. Each is run once and counted once, however often it is drawn."""

    def __init__(
        self,
        catch: Catch,
        referee: Referee,
        examples: int,
        progress: Callable[[int], None] | None = None,
        on_found: Callable[[Found], None] | None = None,
    ) -> None:
        self.catch = catch
        self.examples = examples
        self.best: Found | None = None
        """The smallest finding."""
        self._referee = referee
        self._progress = progress
        self._on_found = on_found
        self._shrunk = 0
        self._verdicts: dict[int, _Verdict] = {}

    def follow(self, data: Mapped) -> bool:
        """Whether the two sides agree on a drawn scenario."""
        key = hash(repr(data))
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = self._compare(scenario(data))
        if verdict.found is not None:
            self.best = min(self.best or verdict.found, verdict.found, key=Found.size)
            return False
        target(verdict.peak_use, label="peak use")
        target(float(min(verdict.shortages, ENOUGH_SHORTAGES)), label="shortages")
        return True

    def _compare(self, drawn: Scenario) -> _Verdict:
        if self.best is not None:
            self._shrunk += 1
            if self._shrunk > SHRINKING_COMPARISONS:
                raise _Enough
        try:
            seen = Seen(self._referee(drawn))
        except FAULTS as error:
            found = Found(drawn, error)
            if self.best is None and self._on_found is not None:
                self._on_found(found)
            return _Verdict(found)
        except PagestormError as error:
            raise _Stop(error) from error
        if self.best is None:
            self.catch.add(seen)
            if self._progress is not None:
                self._progress(self.catch.examples)
            if self.catch.examples >= self.examples:
                raise _Enough
        return _Verdict(None, seen.peak_use, seen.shortages)
