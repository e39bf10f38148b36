"""The flat event record: the only output of the engine. Everything else reads it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec

FS_PER_NS = 1_000_000
FS_PER_S = 1_000_000_000_000_000
CHUNK_EVENTS = 4096


class Event(NamedTuple):
    """One thing that happened. -1 stands where a number does not apply.

    `step` is a forward pass, from 0; `tokens` and `pages` are what the event moved (computed, freed, asked);
    `free_pages`, `evictable_pages`, `running` (requests that hold a row) and `waiting` are the state after it.
    `detail` is a JSON object or empty. `leap` events carry no `seq` and are left out of the digest: how far the
    engine leapt is not something that happened.
    """

    time_ns: int
    seq: int
    step: int
    kind: str
    request: int
    tokens: int
    pages: int
    free_pages: int
    evictable_pages: int
    running: int
    waiting: int
    pool: str
    detail: str


KINDS = (
    "arrive",
    "reject",
    "admit",
    "prefill",
    "finish",
    "abort",
    "retract",
    "preempt",
    "evict",
    "window_release",
    "decode_oom",
    "prefill_oom",
    "load_back",
    "write_back",
    "host_evict",
    "retry",
    "timeout",
    "leap",
    "crash",
)

RawEvent = tuple[int, int, int, str, int, int, int, int, int, int, int, str, str]
"""An `Event` before it has names: what the engine makes, tens of thousands a second."""


class Sink(Protocol):
    """A reader of the record, fed in chunks as it grows."""

    def write(self, events: Sequence[RawEvent]) -> None: ...

    def close(self) -> None: ...


class EventLog:
    """Takes events one by one, keeps the digest of what happened and feeds the sinks.

    The digest is SHA-256 over the events in the order of `seq`, each as a MessagePack array, leaps left out.
    """

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self.sinks = list(sinks)
        self._buffer: list[RawEvent] = []
        self.append = self._buffer.append
        self._hash = hashlib.sha256()
        self._encode = msgspec.msgpack.Encoder().encode
        self.count = 0

    @property
    def wants_leaps(self) -> bool:
        """Whether anybody reads leaps; they are not in the digest."""
        return bool(self.sinks)

    @property
    def full(self) -> bool:
        """Whether `flush` is due."""
        return len(self._buffer) >= CHUNK_EVENTS

    def flush(self) -> None:
        """Hand what has come to the digest and the sinks."""
        events = self._buffer
        if not events:
            return
        told = [self._encode(event) for event in events if event[1] >= 0]
        self.count += len(told)
        self._hash.update(b"".join(told))
        for sink in self.sinks:
            sink.write(events)
        self._buffer = []
        self.append = self._buffer.append

    def close(self) -> None:
        """Flush, and close the sinks."""
        self.flush()
        for sink in self.sinks:
            sink.close()

    @property
    def digest(self) -> str:
        """SHA-256 of what was flushed, in hexadecimal."""
        return self._hash.hexdigest()


class KeepEvents:
    """A sink that keeps every event in memory."""

    def __init__(self) -> None:
        self.events: list[RawEvent] = []

    def write(self, events: Sequence[RawEvent]) -> None:
        self.events.extend(events)

    def close(self) -> None:
        """Nothing is held open."""
