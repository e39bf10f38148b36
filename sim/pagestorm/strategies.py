"""Hypothesis strategies: scenarios, workloads and pool operations that reach the corners.

    from hypothesis import given
    import pagestorm as ps

    @given(ps.strategies.scenarios(pressure=True))
    def test_mine(data):
        result = ps.run(ps.strategies.scenario(data))

Scenarios are plain mappings, as a scenario file is read, so that a failing example prints as one and can be saved.
They are small: a run takes milliseconds. Lengths are in tokens, times in seconds. Needs Hypothesis
(`pip install 'pagestorm[test]'`); nothing else of Pagestorm does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from pagestorm.scenario import Scenario, from_mapping

__all__ = [
    "PAGE_SIZES",
    "Decode",
    "Extend",
    "Give",
    "LedgerOperation",
    "Mapped",
    "PoolOperation",
    "Release",
    "Take",
    "engines",
    "ledger_operations",
    "pool_operations",
    "scenario",
    "scenarios",
    "steptimes",
    "workloads",
]

Mapped = dict[str, Any]
"""A part of a scenario as plain data."""

PAGE_SIZES = (1, 2, 16, 64, 128, 256)
"""Page sizes that scenarios are drawn with, in tokens."""
LONGEST_OUTPUT = 250
TICK_S = 0.01
"""The base time of a pass with the plain step time: arrivals at multiples of it fall on planning rounds."""
MOST_REQUESTS = 32
"""Requests of a drawn scenario, unless asked for fewer."""
CROWDS = (3, 6, 10, 16)
OUTGROWN_POOL_TOKENS = 5120
"""A pool that a lone request can outgrow: admission reserves 4096 tokens at most for what it may generate."""


def scenario(data: Mapping[str, object]) -> Scenario:
    """The checked scenario in a drawn mapping."""
    return from_mapping(data)


# --- scenarios -------------------------------------------------------------------------------------------------


@st.composite
def scenarios(
    draw: st.DrawFn,
    engine: str = "sglang",
    pressure: bool | None = None,
    prefix_caching: bool | None = None,
    most_requests: int = MOST_REQUESTS,
) -> Mapped:
    """Whole scenarios of an engine (sglang or vllm), accepted by `pagestorm.scenario.from_mapping`.

    `pressure`: True asks for more than the pool has, so that many runs retract or preempt; False keeps to what fits
    easily; None draws either. `prefix_caching`: whether vLLM's cache is on; None draws either.

    Between them they reach every page size of `PAGE_SIZES`, prompts that end in the same phase of a page, prompts and
    outputs of one token, exactly full pools, chunks of one page, bursts and closed loops, arrivals at the instant of a
    planning round, long decodes, endings by stop token and by length, ignored stop tokens, prompts that are too long;
    for SGLang also queue limits, wrong decode checks and a lone request that outgrows the pool; for vLLM priorities,
    shared prefixes, watermarks and room for drafts. Raises ValueError for any other engine.
    """
    pressed = draw(st.sampled_from((False, True, True, True, True))) if pressure is None else pressure
    server = draw(engines(engine, pressed, prefix_caching))
    return {
        "name": "drawn",
        "engine": server,
        "steptime": draw(steptimes()),
        "workload": draw(workloads(server, pressed, most_requests)),
    }


def steptimes() -> st.SearchStrategy[Mapped]:
    """Linear step times: the plain one, under which passes end on multiples of `TICK_S`, and the default one."""
    plain = {"kind": "linear", "base_s": TICK_S, "per_request_s": 0, "per_context_token_s": 0, "per_prefill_token_s": 0}
    kinds: tuple[Mapped, Mapped] = (plain, {"kind": "linear"})
    return st.sampled_from(kinds).map(lambda facts: {**facts})


def engines(
    engine: str = "sglang", pressure: bool = True, prefix_caching: bool | None = None
) -> st.SearchStrategy[Mapped]:
    """Flags of a server with a small pool, the `engine` part of a scenario; arguments as for `scenarios`."""
    match engine:
        case "sglang":
            return _sglang_flags(pressure)
        case "vllm":
            return _vllm_flags(prefix_caching)
        case _:
            raise ValueError(f"no strategies for the engine {engine!r}; there are some for sglang and vllm")


@st.composite
def _sglang_flags(draw: st.DrawFn, pressure: bool) -> Mapped:
    page = draw(st.sampled_from(PAGE_SIZES))
    oddity = draw(_seldom("small batch", "queue", "queue", "context", "check", "check", "tiny pool", "no clip"))
    outgrown = oddity == "no clip" and draw(_one_in(3))
    pages = OUTGROWN_POOL_TOKENS // page if outgrown else draw(_pages(page, oddity == "tiny pool"))
    flags: Mapped = {
        "kind": "sglang",
        "page_size": page,
        "max_total_tokens": page * pages,
        "max_running_requests": draw(st.sampled_from((1, 2, 4) if oddity == "small batch" else (64, 32, 16))),
        "chunked_prefill_size": draw(st.sampled_from((-1, 8192, page, 2 * page, 3 * page, 8 * page))),
        "schedule_conservativeness": draw(st.sampled_from((0.0, 0.02, 0.1) if pressure else (1.0, 0.3))),
        "disable_radix_cache": True,
        "disable_overlap_schedule": not draw(st.booleans()),
    }
    if draw(_one_in(3)):
        flags["max_prefill_tokens"] = 4 * page
    match oddity:
        case "queue":
            flags["max_queued_requests"] = draw(st.integers(1, 6))
        case "context":
            flags["context_length"] = draw(st.integers(8, max(8, page * pages)))
        case "check":
            flags["decode_check"] = draw(st.sampled_from(("tokens", "none")))
        case "no clip":
            flags["emulate"] = ["no_output_clip"]
    return flags


@st.composite
def _vllm_flags(draw: st.DrawFn, prefix_caching: bool | None) -> Mapped:
    size = draw(st.sampled_from(PAGE_SIZES))
    oddity = draw(_seldom("small batch", "context", "context", "tiny pool", "drafts", "long prompts", "first chunk"))
    usable = draw(_pages(size, oddity == "tiny pool"))
    seqs = draw(st.sampled_from((1, 2, 4) if oddity == "small batch" else (64, 32, 16)))
    longest = draw(st.integers(2, usable * size)) if oddity == "context" else usable * size
    batched = max(seqs, draw(st.sampled_from((2048, 8192, size, 2 * size, 8 * size, seqs + 5))))
    flags: Mapped = {
        "kind": "vllm",
        "block_size": size,
        "num_gpu_blocks_override": usable + 1,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": batched,
        "max_model_len": longest,
        "enable_prefix_caching": draw(st.booleans()) if prefix_caching is None else prefix_caching,
        "watermark": draw(st.sampled_from((0.0, 0.0, 0.02, 0.1, 0.3))),
        "scheduling_policy": draw(st.sampled_from(("fcfs", "fcfs", "priority"))),
    }
    if batched >= longest:
        flags["enable_chunked_prefill"] = draw(st.booleans())
    match oddity:
        case "drafts":
            flags["num_lookahead_tokens"] = draw(st.integers(1, 5))
        case "long prompts":
            flags["long_prefill_token_threshold"] = draw(st.sampled_from((1, 7, size)))
        case "first chunk":
            flags["scheduler_reserve_full_isl"] = False
    return flags


def _pages(page: int, tiny: bool) -> st.SearchStrategy[int]:
    """Pages of the pool: few enough to be filled within some hundred steps."""
    if tiny:
        return st.integers(2 + 2 * (page <= 2), 12)
    return st.integers(40, 600) if page <= 2 else st.integers(12, 48)


@st.composite
def workloads(
    draw: st.DrawFn, engine: Mapping[str, Any], pressure: bool = True, most_requests: int = MOST_REQUESTS
) -> Mapped:
    """Requests written out for a server with these flags, the `workload` part of a scenario."""
    page, pool = _pool_of(engine)
    requests = draw(_requests(page, pool, pressure, most_requests))
    if engine["kind"] == "vllm":
        requests = [request | draw(_identity(page)) for request in requests]
    if draw(_one_in(8)):
        concurrency = draw(st.integers(1, max(1, len(requests))))
        return {"arrivals": {"process": "closed_loop", "concurrency": concurrency}, "requests": requests}
    spread = draw(st.sampled_from((0, 8, 40, 200)))
    tick_s = draw(st.sampled_from((TICK_S, 0.0013)))
    arrivals = draw(st.lists(st.integers(0, spread), min_size=len(requests), max_size=len(requests)))
    timed = [{"at_s": round(at * tick_s, 9), **request} for at, request in zip(arrivals, requests, strict=True)]
    if pool == OUTGROWN_POOL_TOKENS:
        timed.append({"at_s": 0.0, "input_tokens": pool // 16, "output_tokens": pool})
    return {"requests": timed}


def _pool_of(engine: Mapping[str, Any]) -> tuple[int, int]:
    """Page size and pool, in tokens."""
    if engine["kind"] == "vllm":
        return int(engine["block_size"]), int(engine["block_size"]) * (int(engine["num_gpu_blocks_override"]) - 1)
    return int(engine["page_size"]), int(engine["max_total_tokens"])


@st.composite
def _requests(draw: st.DrawFn, page: int, pool: int, pressure: bool, most_requests: int) -> list[Mapped]:
    """Requests without arrivals. About `crowd` of them fill the pool by the time they end."""
    oddity = draw(_seldom("giants", "brief", "ignored", "some ignored", "slack"))
    crowd = draw(st.sampled_from(CROWDS)) if pressure else 64
    share = max(1, pool // crowd)
    inputs = draw(_inputs(page, max(1, share // draw(st.sampled_from((1, 2, 4))))))
    longest = min(LONGEST_OUTPUT, 3 * share, *((8,) if oddity == "brief" else ()))
    request = st.builds(
        _request,
        st.one_of(inputs, inputs, inputs, st.sampled_from((1, pool // 2, pool))) if oddity == "giants" else inputs,
        st.one_of(st.integers((longest + 1) // 2, longest), st.integers(1, longest), st.just(longest)),
        st.sampled_from((0, 1, 50, 300)) if oddity == "slack" else st.sampled_from((0, 0, 0, 1, 20)),
        st.booleans() if oddity == "some ignored" else st.just(oddity == "ignored"),
    )
    # A number of its own, so that an example can lose requests without becoming another one.
    fewest = min(most_requests, draw(st.sampled_from((1, crowd, crowd, crowd)))) if pressure else 1
    return draw(st.lists(request, min_size=fewest, max_size=most_requests))


@st.composite
def _inputs(draw: st.DrawFn, page: int, longest: int) -> st.SearchStrategy[int]:
    """Prompt lengths: any, in phase with each other, or all the same."""
    anywhere = st.integers(1, longest)
    near_end = st.integers(0, min(8, page - 1)).map(lambda n: -n % page)
    phase = draw(st.one_of(st.just(0), near_end, st.integers(0, page - 1)))
    in_phase = st.integers(0, max(0, (longest - phase) // page)).map(lambda n: max(1, n * page + phase))
    kind = draw(st.sampled_from(("anywhere", "in phase", "mixed", "same")))
    if kind == "anywhere":
        return anywhere
    if kind == "in phase":
        return in_phase
    if kind == "mixed":
        return st.one_of(anywhere, in_phase, in_phase.map(lambda n: n + 1))
    return st.just(draw(anywhere))


def _request(input_tokens: int, output_tokens: int, slack: int, ignore_eos: bool) -> Mapped:
    """With slack a stop token ends it, unless that is ignored."""
    request: Mapped = {"input_tokens": input_tokens, "output_tokens": output_tokens}
    if slack:
        request["max_new_tokens"] = output_tokens + slack
    if ignore_eos:
        request["ignore_eos"] = True
    return request


def _identity(page: int) -> st.SearchStrategy[Mapped]:
    """What only vLLM looks at: the priority, and whose text the prompt starts with."""
    run = st.tuples(st.integers(0, 2), st.sampled_from((page, 2 * page, 3 * page + 1))).map(list)
    priorities = st.integers(0, 2).map(lambda n: {"priority": n} if n else {})
    prefixes = st.lists(run, max_size=2).map(lambda runs: {"prefix": runs} if runs else {})
    return st.builds(lambda priority, prefix: priority | prefix, priorities, prefixes)


def _seldom(*names: str) -> st.SearchStrategy[str]:
    """One of these names half of the time, else none: several at once would hide each other."""
    return st.sampled_from(("",) * len(names) + names)


def _one_in(n: int) -> st.SearchStrategy[bool]:
    """True once in `n` draws; False is the simple case."""
    return st.integers(0, n - 1).map(lambda k: k == n - 1)


# --- what a pool is asked ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Take:
    """Take `pages` pages: one group, in the order in which they are handed out."""

    pages: int


@dataclass(frozen=True, slots=True)
class Give:
    """Give back some of the groups that are out: those at these places, counted modulo their number, each group whole,
    or its second half when `half`."""

    places: tuple[int, ...]
    half: bool = False


PoolOperation = Take | Give


@dataclass(frozen=True, slots=True)
class Extend:
    """Prefill: (owner, new tokens) in batch order; an owner appears once."""

    batch: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Decode:
    """`steps` tokens more for each of these owners that holds something, in batch order."""

    owners: tuple[int, ...]
    steps: int


@dataclass(frozen=True, slots=True)
class Release:
    """Give back all that these owners hold, as one group in this order."""

    owners: tuple[int, ...]


LedgerOperation = Extend | Decode | Release


def pool_operations(pages: int, most: int = 30) -> st.SearchStrategy[list[PoolOperation]]:
    """Calls for a `PageAllocator` of `pages` pages, too many of them to be served among them."""
    few = st.integers(0, min(4, pages + 1))
    takes = st.one_of(few, st.integers(0, pages + 1), st.just(pages)).map(Take)
    gives = st.builds(Give, st.lists(st.integers(0, 7), min_size=1, max_size=3, unique=True).map(tuple), st.booleans())
    return st.lists(st.one_of(takes, gives), max_size=most)


def ledger_operations(
    pages: int, page_size: int, owners: int, most: int = 30
) -> st.SearchStrategy[list[LedgerOperation]]:
    """Calls for a `Ledger` of `pages` pages and owners 0..owners-1."""
    owner = st.integers(0, owners - 1)
    some = st.lists(owner, min_size=1, max_size=owners, unique=True)
    pool = pages * page_size
    longest = max(1, pool // 2)
    tokens = st.one_of(
        st.integers(1, min(longest, 3 * page_size)),
        st.integers(0, max(1, pages // 2)).map(lambda n: max(1, n * page_size)),
        st.integers(1, longest),
    )
    extends = some.flatmap(
        lambda batch: st.lists(tokens, min_size=len(batch), max_size=len(batch)).map(
            lambda new: Extend(tuple(zip(batch, new, strict=True)))
        )
    )
    decodes = st.builds(Decode, some.map(tuple), st.one_of(st.just(1), st.integers(1, 2 * page_size + 1)))
    releases = some.map(tuple).map(Release)
    return st.lists(st.one_of(extends, decodes, releases), max_size=most)
