"""The waiting requests of an engine that takes back what it preempted.

Source: vllm 0.33.0, `v1/core/sched/request_queue.py`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from pagestorm.engine.vllm_request import VllmRequest


class WaitingQueue(Protocol):
    """Requests in the order in which they will be tried."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[VllmRequest]: ...

    @property
    def head(self) -> VllmRequest:
        """The next to be tried."""

    def push(self, request: VllmRequest) -> None:
        """A request arrived."""

    def put_back(self, request: VllmRequest) -> None:
        """A running request was preempted."""

    def pop(self) -> VllmRequest:
        """The head is admitted."""


class ArrivalQueue:
    """First come, first served; what was preempted goes to the front."""

    def __init__(self) -> None:
        self._queue: deque[VllmRequest] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[VllmRequest]:
        return iter(self._queue)

    @property
    def head(self) -> VllmRequest:
        return self._queue[0]

    def push(self, request: VllmRequest) -> None:
        self._queue.append(request)

    def put_back(self, request: VllmRequest) -> None:
        self._queue.appendleft(request)

    def pop(self) -> VllmRequest:
        return self._queue.popleft()


class PriorityQueue:
    """Smallest (priority, arrival, number) first, whether it ran before or not."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, VllmRequest]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[VllmRequest]:
        return (entry[3] for entry in sorted(self._heap, key=lambda entry: entry[:3]))

    @property
    def head(self) -> VllmRequest:
        return self._heap[0][3]

    def push(self, request: VllmRequest) -> None:
        heapq.heappush(self._heap, (request.priority, request.arrive_fs, request.number, request))

    def put_back(self, request: VllmRequest) -> None:
        self.push(request)

    def pop(self) -> VllmRequest:
        return heapq.heappop(self._heap)[3]
