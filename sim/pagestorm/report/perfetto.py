"""A run as a trace that ui.perfetto.dev and chrome://tracing open: requests as tracks, the pool as counters.

Chrome's trace event format: one JSON object whose `traceEvents` are complete slices (X), instants (i), counters (C) and
names (M); `ts` and `dur` in microseconds, of simulated time.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagestorm.errors import ScenarioError
from pagestorm.events import RawEvent

if TYPE_CHECKING:
    from pagestorm.record import TimelineRow

REQUESTS, POOL = 1, 2
"""Processes, which is how the format groups tracks."""
INCIDENTS = 1
"""The pool's own track."""
WAITING, PREFILL, RUNNING = "waiting", "prefill", "running"
FLUSH_CHARACTERS = 1 << 16
OUT_OF_MEMORY = {"decode_oom": "out of memory in decode", "prefill_oom": "out of memory in prefill", "crash": "crash"}
PLANNED = ("admit", "prefill", "leap", "retract", "preempt", "decode_oom", "prefill_oom")
"""Events at the start of a pass: whatever was computed in an earlier one is there by then."""


class PerfettoTrace:
    """A sink that writes the trace while a run goes on; its memory is a few words for each request that is there.

    A request's track shows waiting, prefill and running; between a retraction, which is an instant, and the next
    prefill it is empty. The file has its name only after `commit`; `discard` forgets it. Raises `ScenarioError` about
    --perfetto.

    The engine plans a pass before it looks at what came in during the one before, so a few events are recorded
    slightly late; on the tracks of the pool such a one stands at the time of the event in front of it.
    """

    def __init__(self, path: Path, pool_pages: int, name: str) -> None:
        self._path = path
        self._pool_pages = pool_pages
        self._phases: dict[int, list[Any]] = {}
        """Request to [phase, since_ns, arguments]."""
        self._computing: dict[int, int] = {}
        """Request to the pass in which its prompt becomes complete."""
        self._levels: dict[str, int] = {}
        self._pool_ns = 0
        self._last_ns = 0
        self._pending: list[str] = []
        self._characters = 0
        with self._writing():
            handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.absolute().parent)
            self._temporary = Path(temporary)
            self._file = os.fdopen(handle, "w", encoding="ascii")
        self._first = True
        self._name(REQUESTS, f"requests of {name}", 1)
        self._name(POOL, "KV-cache pool", 0)
        self._put({"ph": "M", "pid": POOL, "tid": INCIDENTS, "name": "thread_name", "args": {"name": "incidents"}})

    # --- the record --------------------------------------------------------------------------------------------

    def write(self, events: Sequence[RawEvent]) -> None:
        """Take a chunk of the record."""
        for event in events:
            self._take(event)

    def close(self) -> None:
        """The record is complete: what is still open ends at its last moment."""
        for request in list(self._phases):
            self._phases[request][2]["unfinished"] = True
            self._end(request, self._last_ns)

    def commit(self, rows: Iterable[TimelineRow] = ()) -> None:
        """Add the new-token ratio, which only the timeline knows, and give the file its name."""
        last_ns = 0
        for row in rows:
            if row.new_token_ratio == row.new_token_ratio:
                last_ns = max(last_ns, row.time_ns)
                self._counter("new-token ratio", last_ns, round(row.new_token_ratio, 6))
        self._flush()
        with self._writing():
            self._file.write('\n],"displayTimeUnit":"ms"}\n')
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            mask = os.umask(0)
            os.umask(mask)
            self._temporary.chmod(0o666 & ~mask)
            self._temporary.replace(self._path)

    def discard(self) -> None:
        """Forget the file, unless it has its name already."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    # --- one event at a time -----------------------------------------------------------------------------------

    def _take(self, event: RawEvent) -> None:
        time_ns, _, step, kind, request = event[:5]
        self._last_ns = max(self._last_ns, time_ns)
        if kind in PLANNED and self._computing:
            self._computed(time_ns, step)
        if kind == "arrive":
            self._arrive(event)
        elif kind == "admit":
            self._begin(request, PREFILL, time_ns, {"tokens": event[5]})
        elif kind == "prefill":
            if not event[12]:
                self._computing[request] = step
        elif kind in ("retract", "preempt"):
            self._taken_back(event)
        elif kind == "finish":
            self._end(request, time_ns, output_tokens=event[5])
        elif kind in ("abort", "reject", "timeout"):
            self._lost(event)
        elif kind in OUT_OF_MEMORY:
            self._incident(OUT_OF_MEMORY[kind], time_ns, _arguments(event[12]), "g")
        self._count(event)

    def _arrive(self, event: RawEvent) -> None:
        time_ns, request, tokens = event[0], event[4], event[5]
        thread = {"ph": "M", "pid": REQUESTS, "tid": request + 1}
        self._put({**thread, "name": "thread_name", "args": {"name": f"request {request}"}})
        self._put({**thread, "name": "thread_sort_index", "args": {"sort_index": request}})
        self._phases[request] = [WAITING, time_ns, {"prompt_tokens": tokens}]

    def _computed(self, time_ns: int, step: int) -> None:
        """Prompts that an earlier pass completed: their requests decode from here on."""
        for request in [request for request, done in self._computing.items() if done < step]:
            self._begin(request, RUNNING, time_ns, {})

    def _begin(self, request: int, phase: str, time_ns: int, arguments: dict[str, Any]) -> None:
        self._end(request, time_ns)
        self._phases[request] = [phase, time_ns, arguments]

    def _end(self, request: int, time_ns: int, **more: Any) -> None:
        self._computing.pop(request, None)
        open_phase = self._phases.pop(request, None)
        if open_phase is None:
            return
        phase, since_ns, arguments = open_phase
        self._put(
            {
                "ph": "X",
                "pid": REQUESTS,
                "tid": request + 1,
                "name": phase,
                "ts": since_ns / 1000,
                "dur": max(0, time_ns - since_ns) / 1000,
                "args": {**arguments, **more},
            }
        )

    def _taken_back(self, event: RawEvent) -> None:
        time_ns, kind, request = event[0], event[3], event[4]
        self._end(request, time_ns)
        word = "retracted" if kind == "retract" else "preempted"
        told = {"request": request, "tokens": event[5], "pages": event[6]}
        self._instant(REQUESTS, request + 1, word, time_ns, told, "t")
        self._incident(f"request {request} {word}", time_ns, {**told, **_arguments(event[12])}, "p")

    def _lost(self, event: RawEvent) -> None:
        time_ns, kind, request = event[0], event[3], event[4]
        self._end(request, time_ns)
        word = {"abort": "aborted", "reject": "refused", "timeout": "timed out"}[kind]
        self._instant(REQUESTS, request + 1, word, time_ns, {"tokens": event[5]}, "t")
        self._incident(f"request {request} {word}", time_ns, _arguments(event[12]), "p")

    def _count(self, event: RawEvent) -> None:
        free, evictable, running, waiting = event[7:11]
        levels = {
            "used (pages)": self._pool_pages - free - evictable,
            "free (pages)": free,
            "evictable (pages)": evictable,
            "running (requests)": running,
            "waiting (requests)": waiting,
        }
        self._pool_ns = max(self._pool_ns, event[0])
        for name, level in levels.items():
            if self._levels.get(name) != level:
                self._levels[name] = level
                self._counter(name, self._pool_ns, level)

    # --- writing -----------------------------------------------------------------------------------------------

    def _name(self, process: int, name: str, place: int) -> None:
        self._put({"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}})
        self._put({"ph": "M", "pid": process, "tid": 0, "name": "process_sort_index", "args": {"sort_index": place}})

    def _counter(self, name: str, time_ns: int, value: float) -> None:
        self._put({"ph": "C", "pid": POOL, "tid": 0, "name": name, "ts": time_ns / 1000, "args": {"value": value}})

    def _incident(self, name: str, time_ns: int, arguments: dict[str, Any], scope: str) -> None:
        self._pool_ns = max(self._pool_ns, time_ns)
        self._instant(POOL, INCIDENTS, name, self._pool_ns, arguments, scope)

    def _instant(
        self, process: int, track: int, name: str, time_ns: int, arguments: dict[str, Any], scope: str
    ) -> None:
        self._put(
            {
                "ph": "i",
                "pid": process,
                "tid": track,
                "name": name,
                "ts": time_ns / 1000,
                "s": scope,
                "args": arguments,
            }
        )

    def _put(self, entry: dict[str, Any]) -> None:
        text = json.dumps(entry, separators=(",", ":"), allow_nan=False)
        self._pending.append(('{"traceEvents":[\n' if self._first else ",\n") + text)
        self._first = False
        self._characters += len(text)
        if self._characters >= FLUSH_CHARACTERS:
            self._flush()

    def _flush(self) -> None:
        with self._writing():
            self._file.write("".join(self._pending))
        self._pending, self._characters = [], 0

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = error.strerror or str(error)
            raise ScenarioError(
                f"cannot write {self._path}: {why}; name a file in a folder that can be written, on a disk with room",
                key="--perfetto",
            ) from error


def _arguments(detail: str) -> dict[str, Any]:
    """What an event tells beside its columns, in a form that the viewer lists."""
    found: dict[str, Any] = json.loads(detail) if detail else {}
    return {key: value for key, value in found.items() if value is not None}
