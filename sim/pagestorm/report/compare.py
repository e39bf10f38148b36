"""Two output folders side by side: what differs first, and what else."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagestorm.errors import ScenarioError
from pagestorm.events import Event
from pagestorm.report.words import duration, printable

if TYPE_CHECKING:
    import pandas as pd

UNTOLD = ("wall_s",)
"""Keys of the summary that differ between two runs of the same."""
CONTEXT_EVENTS = 3
UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a damaged file makes the reader of tables raise; which one depends on where the damage is."""
WIDEST_VALUE = 34
ABSENT = "-"
Pairs = dict[str, tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Where two records part: the events before it, and what follows in each; None where a record has ended."""

    before: list[Event]
    a: Event | None
    b: Event | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs between two runs. Empty when nothing does but how long they took."""

    event: FirstDifference | None
    events_compared: bool
    """False where a folder keeps no events; their digests were compared then."""
    scenario: Pairs
    summary: Pairs

    @property
    def equal(self) -> bool:
        return self.event is None and not self.scenario and not self.summary

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for --json."""
        event = None
        if self.event is not None:
            one, other = ((each._asdict() if each else None) for each in (self.event.a, self.event.b))
            event = {"a": one, "b": other, "before": [each._asdict() for each in self.event.before]}
        return {**asdict(self), "equal": self.equal, "event": event}


def compare_runs(a: Path, b: Path) -> Comparison:
    """Compare what two runs left. Raises `ScenarioError` for a folder that no run has left."""
    summaries = _summary(a), _summary(b)
    scenarios = _scenario(a), _scenario(b)
    kept = [(folder / "events.parquet").exists() for folder in (a, b)]
    event = _first_difference(a, b) if all(kept) else None
    summary = _differing(*summaries)
    for key in UNTOLD:
        summary.pop(key, None)
    return Comparison(event, all(kept), _differing(*scenarios), summary)


def compared_text(found: Comparison, a: Path, b: Path, width: int) -> str:
    """The comparison for a person, in lines of at most `width` columns."""
    lines = [f"A  {a}", f"B  {b}", ""]
    if found.equal:
        what = "scenario, events and summary" if found.events_compared else "scenario, event digest and summary"
        lines.append(f"equal: {what} (wall-clock time aside)")
    if found.event is not None:
        lines += [f"differs first: {_place(found.event)}", *_events(found.event), ""]
    elif not found.events_compared and not found.equal:
        lines += ["events: not kept by both, so where they part is not known", ""]
    for title, pairs in (("scenario", found.scenario), ("summary", found.summary)):
        if pairs:
            lines += [
                f"{title}: {len(pairs)} key{'' if len(pairs) == 1 else 's'} differ{'s' if len(pairs) == 1 else ''}"
            ]
            lines += [*_table(pairs), ""]
    shown = [printable(line) for line in lines]
    return "\n".join(line if len(line) <= width else line[: width - 3] + "..." for line in shown).rstrip() + "\n"


# --- reading ---------------------------------------------------------------------------------------------------


def _summary(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise _no_run(folder, path, error) from error
    if not isinstance(found, dict) or "events_digest" not in found:
        raise _no_run(folder, path, "it is no summary of a run")
    return found


def _scenario(folder: Path) -> dict[str, Any]:
    from pagestorm.scenario.files import read_text
    from pagestorm.scenario.tree import read_tree

    path = folder / "scenario.yaml"
    if not path.is_file():
        raise _no_run(folder, path, "it is not there")
    return dict(_flat("", read_tree(read_text(path), str(path))[0]))


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _flat(f"{key}.{name}" if key else str(name), part)
    elif isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        for i, part in enumerate(value):
            yield from _flat(f"{key}.{i}", part)
    else:
        yield key, value


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> Pairs:
    """Keys in the order of the first, then those that only the second has."""
    keys = [*a, *(key for key in b if key not in a)]
    return {key: (a.get(key), b.get(key)) for key in keys if a.get(key) != b.get(key)}


def _first_difference(a: Path, b: Path) -> FirstDifference | None:
    with _Record(a) as ours, _Record(b) as theirs:
        return _part(ours, theirs)


def _part(ours: _Record, theirs: _Record) -> FirstDifference | None:
    before: list[Event] = []
    while n := min(ours.ready(), theirs.ready()):
        one, other = ours.take(n), theirs.take(n)
        differs = (one.to_numpy() != other.to_numpy()).any(axis=1)
        if differs.any():
            at = int(differs.argmax())
            before += _rows(one.iloc[max(0, at - CONTEXT_EVENTS) : at])
            (a,), (b,) = (_rows(each.iloc[at : at + 1]) for each in (one, other))
            return FirstDifference(before[-CONTEXT_EVENTS:], a, b)
        before = (before + _rows(one.tail(CONTEXT_EVENTS)))[-CONTEXT_EVENTS:]
    rest = [_rows(each.take(1))[0] if each.ready() else None for each in (ours, theirs)]
    return FirstDifference(before, rest[0], rest[1]) if any(rest) else None


class _Record:
    """Events of a folder in the order of `seq`, leaps left out, a row group at a time. Open while in a `with` block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "events.parquet"
        self._frames = self._read()
        self._frame: pd.DataFrame | None = None

    def __enter__(self) -> _Record:
        return self

    def __exit__(self, *_: object) -> None:
        self._frames.close()

    def ready(self) -> int:
        """How many events can be taken; 0 at the end."""
        while self._frame is None or not len(self._frame):
            self._frame = next(self._frames, None)
            if self._frame is None:
                return 0
        return len(self._frame)

    def take(self, n: int) -> pd.DataFrame:
        """The next `n`, which must be ready."""
        assert self._frame is not None
        taken, self._frame = self._frame.iloc[:n], self._frame.iloc[n:]
        return taken

    def _read(self) -> Generator[pd.DataFrame, None, None]:
        import fastparquet
        from fastparquet.util import ParquetException

        try:
            with self._path.open("rb") as file:
                table = fastparquet.ParquetFile(file)
                for group in table.row_groups:
                    frame = table.read_row_group_file(group, list(Event._fields), [], index=False)
                    yield frame[frame["seq"] >= 0]
        except (*UNREADABLE, ParquetException) as error:
            raise _no_run(self._folder, self._path, error) from error


def _rows(frame: pd.DataFrame) -> list[Event]:
    rows: list[list[Any]] = frame.to_numpy().tolist()
    return [Event(*row) for row in rows]


def _no_run(folder: Path, path: Path, why: object) -> ScenarioError:
    reason = why.strerror or str(why) if isinstance(why, OSError) else str(why) or type(why).__name__
    return ScenarioError(
        f"{folder} is no folder that `pagestorm run --out` has left whole: {path.name}: {reason}", file=str(path)
    )


# --- telling ---------------------------------------------------------------------------------------------------


def _place(event: FirstDifference) -> str:
    either = event.a or event.b
    assert either is not None
    return f"event {either.seq:,}, {duration(either.time_ns / 1e9)} into the run, pass {either.step:,}"


def _events(event: FirstDifference) -> list[str]:
    lines = [f"  =  {_words(each)}" for each in event.before]
    for sign, each in (("A", event.a), ("B", event.b)):
        lines.append(f"  {sign}  {_words(each) if each else 'the record has ended'}")
    if event.a and event.b:
        names = [name for name in Event._fields if getattr(event.a, name) != getattr(event.b, name)]
        lines.append(f"     differs in {', '.join(names)}")
        if "detail" in names:
            lines += [f"  {sign}  {each.detail or ABSENT}" for sign, each in (("A", event.a), ("B", event.b))]
    return lines


def _words(event: Event) -> str:
    who = f" request {event.request}" if event.request >= 0 else ""
    moved = "".join(
        f", {count:,} {noun}" for count, noun in ((event.tokens, "tokens"), (event.pages, "pages")) if count >= 0
    )
    return (
        f"{event.seq:,} {event.kind}{who} at {event.time_ns:,} ns, pass {event.step:,}{moved}; "
        f"free {event.free_pages:,}, running {event.running:,}, waiting {event.waiting:,}"
    )


def _table(pairs: Pairs) -> list[str]:
    rows = [(key, *(_value(each) for each in both)) for key, both in pairs.items()]
    rows.insert(0, ("", "A", "B"))
    key_width, a_width = (max(len(row[i]) for row in rows) for i in (0, 1))
    return [f"  {key:<{key_width}}  {a:<{a_width}}  {b}".rstrip() for key, a, b in rows]


def _value(value: Any) -> str:
    if value is None:
        return ABSENT
    text = printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return text if len(text) <= WIDEST_VALUE else text[: WIDEST_VALUE - 3] + "..."
