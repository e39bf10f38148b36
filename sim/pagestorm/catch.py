"""What a hunt saw: how many runs, which corners they reached, histograms; and the same as text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import takewhile

from pagestorm.corners import Seen, corners_of
from pagestorm.scenario import Scenario, to_yaml

BINS = (0, 1, 2, 4, 8, 16, 64)
"""Lower ends of the bins of a histogram of counts."""
BAR_CHARACTERS = 40
COUNTED = {"retractions": "retractions", "preemptions": "preemptions", "evicted tokens": "evicted_tokens"}
"""Histogram -> key of the summary. One that no run has above 0 is not shown."""


@dataclass(frozen=True)
class Found:
    """A scenario of written-out requests on which the two sides part, as small as it could be made."""

    scenario: Scenario
    error: Exception

    @property
    def requests(self) -> int:
        """How many requests it has."""
        return len(self.scenario.workload.requests or ())

    def size(self) -> tuple[int, int]:
        """What a smaller finding has less of: requests, then characters."""
        return self.requests, len(to_yaml(self.scenario))


@dataclass
class Catch:
    """Histograms are label -> runs; corners are counted in runs too."""

    against: str
    engine: str
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
        self.corners.update(name for name, reached in corners_of(self.engine).items() if reached(seen))
        self._count("page size", str(seen.page_size))
        self._count("peak use", _tenth(seen.peak_use))
        self._count("chunked prompts", _bin(seen.chunked))
        for name, key in COUNTED.items():
            self._count(name, _bin(seen.counted(key)))

    @property
    def missed(self) -> list[str]:
        """Corners that no run reached."""
        return [name for name in corners_of(self.engine) if not self.corners[name]]

    def _count(self, histogram: str, label: str) -> None:
        self.histograms.setdefault(histogram, Counter())[label] += 1


def as_text(catch: Catch) -> str:
    """For a person: how much was compared, histograms, corners."""
    end = "they part" if catch.found else "stopped before the end" if catch.interrupted else "no difference"
    lines = [
        f"{catch.examples} scenarios of {catch.engine} against {catch.against}, {catch.engine_steps} passes, "
        f"{catch.under_pressure} runs under pressure (retraction, preemption or out of memory): {end}"
    ]
    for name, counts in catch.histograms.items():
        if name in COUNTED and set(counts) == {"0"}:
            continue
        most = max(counts.values())
        lines += ["", f"{name}, in runs"]
        for label in sorted(counts, key=_first_number):
            lines.append(f"  {label:>8} {counts[label]:7} {'#' * -(-BAR_CHARACTERS * counts[label] // most)}")
    lines += ["", "corners, in runs"]
    lines += [f"  {name:<30} {catch.corners[name] or 'not reached':>7}" for name in corners_of(catch.engine)]
    return "\n".join(lines)


def _first_number(label: str) -> int:
    return int("".join(takewhile(str.isdigit, label)))


def _tenth(share: float) -> str:
    """The tenth of 1 in which a share lies; all of it is a bin of its own."""
    low = int(share * 10) * 10
    return "100%" if share >= 1 else f"{low}-{low + 10}%"


def _bin(count: int) -> str:
    """The bin of a small count: 0, 1, 2-3, 4-7, ..."""
    low = max(bound for bound in BINS if bound <= count)
    high = next((bound - 1 for bound in BINS if bound > low), None)
    return f"{low}+" if high is None else str(low) if high == low else f"{low}-{high}"
