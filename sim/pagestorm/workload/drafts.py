"""The requests of a scenario before any engine has seen them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, islice, repeat, tee
from operator import attrgetter
from typing import Literal, NamedTuple

from pagestorm.errors import ScenarioError
from pagestorm.scenario import schema
from pagestorm.workload.arrivals import check_span, nearest_ns, times_ns
from pagestorm.workload.lengths import tokens
from pagestorm.workload.streams import substream
from pagestorm.workload.traces import Row, rows

FS_PER_NS = 10**6

Field = Literal["arrivals", "input_tokens", "output_tokens"]
FIELDS: tuple[Field, ...] = ("arrivals", "input_tokens", "output_tokens")
"""What is drawn, each from the substream of its own name."""


Source = schema.Arrivals | schema.Lengths


class Draft(NamedTuple):
    """One request as its client means it. Lengths are in tokens.

    `number` is its place in the order of creation, from 0. `at_fs` is its arrival in femtoseconds, a whole number of
    nanoseconds; None in a closed loop. `output_tokens` is what the model would generate before it stops by itself,
    `max_new_tokens` what the client asks for; None is the request's own output_tokens.
    """

    number: int
    at_fs: int | None
    input_tokens: int
    output_tokens: int
    max_new_tokens: int | None
    ignore_eos: bool
    priority: int = 0
    prefix: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """`count` requests; `concurrency` of them are out at once in a closed loop, None in an open one."""

    count: int
    concurrency: int | None
    _source: Callable[[], Iterator[Draft]]

    def drafts(self) -> Iterator[Draft]:
        """The requests from the first one on, in order of arrival; every call starts over and gives the same ones."""
        return self._source()


def stream(scenario: schema.Scenario) -> Workload:
    """The workload of a scenario that `load` has checked, resolved or not.

    A trace is read through once here, as far as it is used, so that its faults show before the run. The n-th value of
    each substream depends on the seed and on its own distribution, on nothing else. Raises ScenarioError.
    """
    workload = scenario.workload
    if workload.requests is not None:
        return _written(workload, workload.requests)
    sources = {field: _source(workload, field) for field in FIELDS}
    total = _count(workload)
    arrivals = sources["arrivals"]
    if isinstance(arrivals, (schema.Constant, schema.Poisson, schema.Gamma)):
        check_span(arrivals, total)
    drafts = partial(_drawn, scenario, sources, total)
    # What is wrong with a distribution shows now, before the run.
    drafts()
    return Workload(total, _concurrency(arrivals), drafts)


def _source(workload: schema.Workload, field: Field) -> Source:
    given: Source | None = getattr(workload, field)
    if given is None:
        if workload.trace is None:
            raise ScenarioError(
                f"is missing; give {field}, a trace, or the requests themselves", key=f"workload.{field}"
            )
        return schema.TraceArrivals() if field == "arrivals" else schema.TraceLengths()
    if _from_trace(given) and workload.trace is None:
        raise ScenarioError("there is no trace; give workload.trace with format and path", key=f"workload.{field}")
    return given


def _from_trace(source: Source) -> bool:
    return isinstance(source, (schema.TraceArrivals, schema.TraceLengths))


def _count(workload: schema.Workload) -> int:
    if workload.trace is not None:
        return sum(1 for _ in rows(workload.trace, workload.num_requests))
    if workload.num_requests is None:
        raise ScenarioError("is missing; say how many requests arrive", key="workload.num_requests")
    return workload.num_requests


def _drawn(scenario: schema.Scenario, sources: dict[Field, Source], total: int) -> Iterator[Draft]:
    workload, seed = scenario.workload, scenario.seed
    traced = [field for field in FIELDS if _from_trace(sources[field])]
    columns: dict[Field, Iterable[int | None]] = {}
    if workload.trace is not None:
        copies = tee(rows(workload.trace, total), len(traced))
        columns.update({field: _column(copy, field) for field, copy in zip(traced, copies, strict=True)})
    for field, source in sources.items():
        match source:
            case schema.TraceArrivals() | schema.TraceLengths():
                continue
            case schema.ClosedLoop():
                columns[field] = repeat(None)
            case schema.Burst() | schema.Constant() | schema.Poisson() | schema.Gamma():
                columns[field] = (FS_PER_NS * time for time in times_ns(source, substream(seed, field)))
            case lengths:
                columns[field] = tokens(lengths, substream(seed, field), f"workload.{field}")
    asked = repeat(_asked(workload.max_new_tokens))
    return islice(map(Draft, count(), *(columns[field] for field in FIELDS), asked, repeat(workload.ignore_eos)), total)


def _column(trace: Iterator[Row], field: Field) -> Iterator[int]:
    if field == "arrivals":
        return (FS_PER_NS * row.time_ns for row in trace)
    return map(attrgetter(field), trace)


def _asked(max_new_tokens: int | Literal["engine"] | None) -> int | None:
    return schema.ENGINE_MAX_NEW_TOKENS if max_new_tokens == "engine" else max_new_tokens


def _written(workload: schema.Workload, requests: tuple[schema.ExplicitRequest, ...]) -> Workload:
    """The requests that the scenario lists: numbered as listed, sent by time."""
    total = len(requests) if workload.num_requests is None else workload.num_requests
    if not 1 <= total <= len(requests):
        raise ScenarioError(
            f"{total:,} requests are asked for and {len(requests):,} are listed; leave num_requests out",
            key="workload.num_requests",
        )
    concurrency = _concurrency(workload.arrivals)
    closed = concurrency is not None
    drafts = [_draft(workload, number, request, closed) for number, request in enumerate(requests[:total])]
    drafts.sort(key=lambda draft: draft.at_fs or 0)
    return Workload(total, concurrency, partial(iter, tuple(drafts)))


def _concurrency(arrivals: Source | None) -> int | None:
    return arrivals.concurrency if isinstance(arrivals, schema.ClosedLoop) else None


def _draft(workload: schema.Workload, number: int, request: schema.ExplicitRequest, closed: bool) -> Draft:
    at_fs = None
    if not closed:
        if request.at_s is None:
            raise ScenarioError(
                "is missing; say when the request arrives, in seconds", key=f"workload.requests.{number}.at_s"
            )
        at_fs = FS_PER_NS * nearest_ns(request.at_s)
    asked = workload.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
    ignore_eos = workload.ignore_eos if request.ignore_eos is None else request.ignore_eos
    return Draft(
        number,
        at_fs,
        request.input_tokens,
        request.output_tokens,
        _asked(asked),
        ignore_eos,
        request.priority,
        request.prefix,
    )
