"""The hunt for disagreement: Hypothesis draws scenarios and steers them towards pressure, a referee compares.

What it finds is shrunk by Hypothesis to the smallest scenario that still shows it. The same seed hunts through the same
scenarios. Needs Hypothesis (`pip install 'pagestorm[test]'`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings, target

from pagestorm.corners import CORNERS, Seen
from pagestorm.errors import PagestormError
from pagestorm.referees import FAULTS, Referee
from pagestorm.scenario import Scenario
from pagestorm.strategies import Mapped, scenario, scenarios

BINS = (0, 1, 2, 4, 8, 16, 64)
"""Lower ends of the bins of a histogram of counts."""
ROUND_EXAMPLES = 100
"""Steering spends the second half of a round around what it found in the first: many short rounds see more corners."""
MOST_ROUNDS = 1 << 20
ENOUGH_SHORTAGES = 8
COUNTED = {"retractions": "retractions", "preemptions": "preemptions", "evicted tokens": "evicted_tokens"}
"""Histogram -> key of the summary; one that does not apply is left out."""


@dataclass
class Found:
    """A scenario on which the two sides part, as small as it could be made."""

    scenario: Scenario
    error: Exception


@dataclass
class Catch:
    """What a hunt saw. Histograms are label -> runs; corners are counted in runs too."""

    against: str
    examples: int = 0
    """Different scenarios that were compared, those of shrinking left out."""
    under_pressure: int = 0
    """How many of them retracted, preempted or ran out of memory."""
    engine_steps: int = 0
    histograms: dict[str, Counter[str]] = field(default_factory=dict)
    corners: Counter[str] = field(default_factory=Counter)
    found: Found | None = None
    interrupted: bool = False

    def add(self, seen: Seen) -> None:
        """Count one run in."""
        self.examples += 1
        self.under_pressure += seen.shortages > 0
        self.engine_steps += seen.counted("engine_steps")
        self.corners.update(name for name, reached in CORNERS.items() if reached(seen))
        self._count("page size", str(seen.page_size))
        self._count("peak use", _tenth(seen.peak_use))
        self._count("chunked prompts", _bin(seen.chunked))
        for name, key in COUNTED.items():
            if seen.result.summary.get(key) is not None:
                self._count(name, _bin(seen.counted(key)))

    @property
    def missed(self) -> list[str]:
        """Corners that no run reached."""
        return [name for name in CORNERS if not self.corners[name]]

    def _count(self, histogram: str, label: str) -> None:
        self.histograms.setdefault(histogram, Counter())[label] += 1


class _Stop(BaseException):
    """Leaves Hypothesis at once with an error that is no finding: nothing that it would try to shrink."""

    def __init__(self, error: PagestormError) -> None:
        super().__init__(str(error))
        self.error = error


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
) -> Catch:
    """Compare `examples` different scenarios, drawn from the seed `start`; stop at the first that parts the two sides.

    `progress` is told how many were compared. Ctrl-C ends the hunt with what it has. Raises what a referee raises when
    it cannot compare at all (`ReferenceUnavailable`, `ScenarioError`, `MemoryRefused`).
    """
    trail = _Trail(Catch(against), referee, progress)
    try:
        for number in range(MOST_ROUNDS):
            left = examples - trail.catch.examples
            if not left or trail.last is not None:
                break
            _round(trail, min(left, ROUND_EXAMPLES), start * MOST_ROUNDS + number, engine)
    except _Stop as stop:
        raise stop.error from None
    except KeyboardInterrupt:
        trail.catch.interrupted = True
    trail.catch.found = trail.last
    return trail.catch


def _round(trail: _Trail, examples: int, start: int, engine: str) -> None:
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
    @given(scenarios(engine))
    def probe(data: Mapped) -> None:
        if not trail.follow(data):
            raise _Parted

    # Hypothesis runs the smallest example last.
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

    def __init__(self, catch: Catch, referee: Referee, progress: Callable[[int], None] | None) -> None:
        self.catch = catch
        self.last: Found | None = None
        """The finding that was tried last."""
        self._referee = referee
        self._progress = progress
        self._verdicts: dict[int, _Verdict] = {}

    def follow(self, data: Mapped) -> bool:
        """Whether the two sides agree on a drawn scenario."""
        key = hash(repr(data))
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = self._compare(scenario(data))
        if verdict.found is not None:
            self.last = verdict.found
            return False
        target(verdict.peak_use, label="peak use")
        target(float(min(verdict.shortages, ENOUGH_SHORTAGES)), label="shortages")
        return True

    def _compare(self, drawn: Scenario) -> _Verdict:
        try:
            seen = Seen(self._referee(drawn))
        except FAULTS as error:
            return _Verdict(Found(drawn, error))
        except PagestormError as error:
            raise _Stop(error) from error
        if self.last is None:
            self.catch.add(seen)
            if self._progress is not None:
                self._progress(self.catch.examples)
        return _Verdict(None, seen.peak_use, seen.shortages)


def _tenth(share: float) -> str:
    """The tenth of 1 in which a share lies; all of it is a bin of its own."""
    return "100%" if share >= 1 else f"{int(share * 10) * 10}-{int(share * 10) * 10 + 10}%"


def _bin(count: int) -> str:
    """The bin of a small count: 0, 1, 2-3, 4-7, ..."""
    low = max(bound for bound in BINS if bound <= count)
    high = next((bound - 1 for bound in BINS if bound > low), None)
    return f"{low}+" if high is None else str(low) if high == low else f"{low}-{high}"
