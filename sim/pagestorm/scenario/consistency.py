"""What the schema cannot say: whether the parts of a scenario make sense together.

Each check raises `ScenarioError` with a dotted key and no place; `load` adds the place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from pagestorm import catalog
from pagestorm.engine.vllm import startup_refusal
from pagestorm.errors import ScenarioError
from pagestorm.scenario.schema import (
    Bounds,
    ClosedLoop,
    Constant,
    Expectation,
    Gamma,
    Histogram,
    Lengths,
    Linear,
    Lognormal,
    Poisson,
    Scenario,
    SglangFlags,
    TraceArrivals,
    TraceLengths,
    Uniform,
    VllmFlags,
    Workload,
    Zipf,
)
from pagestorm.scenario.words import did_you_mean, shown
from pagestorm.summary import SUMMARY_KEYS

OUTCOMES = ("completed", "crashed", "livelocked", "stalled", "refused")
MIN_PASS_S = 1e-12


def check(scenario: Scenario) -> None:
    """Raises `ScenarioError` for what makes no sense in a resolved scenario."""
    engine = scenario.engine
    if isinstance(engine, VllmFlags):
        _check_vllm(engine)
        _check_vllm_pools(engine, scenario.pools)
    else:
        _check_pool(engine)
        _check_chunks(engine)
        _check_prefix_cache(engine)
        _check_plain_requests(scenario.workload)
    _check_model(scenario)
    _check_steptime(scenario)
    _check_workload(scenario.workload)
    _check_pools(scenario.pools)
    check_expectations(scenario.expect)


def _wrong(key: str, message: str) -> ScenarioError:
    return ScenarioError(message, key=key)


def _check_pool(engine: SglangFlags) -> None:
    if engine.pool_pages < 1:
        raise _wrong(
            "engine.page_size",
            f"a page of {engine.page_size} tokens is larger than the pool of {engine.max_total_tokens}; "
            f"make it at most {engine.max_total_tokens}, or the pool larger",
        )
    if engine.pool_tokens < 2:
        raise _wrong("engine.max_total_tokens", "the engine runs half as many requests as tokens; give at least 2")


def _check_chunks(engine: SglangFlags) -> None:
    chunk, page = engine.chunked_prefill_size, engine.page_size
    if chunk is None or chunk <= 0 or chunk % page == 0:
        return
    below = chunk // page * page
    nearest = f"{below} or {below + page}" if below else f"{page}"
    raise _wrong(
        "engine.chunked_prefill_size",
        f"{chunk} is not a multiple of page_size {page}, and the engine refuses to start; use {nearest}, or -1",
    )


def _check_prefix_cache(engine: SglangFlags) -> None:
    if not engine.disable_radix_cache:
        raise _wrong(
            "engine.disable_radix_cache",
            "must be true for now: the prefix cache is not built yet; write disable_radix_cache: true",
        )


def _check_vllm(engine: VllmFlags) -> None:
    seqs, batched, longest = engine.max_num_seqs, engine.max_num_batched_tokens, engine.max_model_len
    assert seqs is not None
    assert batched is not None
    assert longest is not None
    if batched < seqs:
        raise _wrong(
            "engine.max_num_batched_tokens",
            f"{batched} is less than max_num_seqs {seqs}, and the engine refuses to start; use at least {seqs}",
        )
    if batched < longest and not engine.enable_chunked_prefill:
        raise _wrong(
            "engine.max_num_batched_tokens",
            f"{batched} is less than max_model_len {longest} without chunked prefill, and the engine refuses to start",
        )
    if refusal := startup_refusal(longest, engine.num_gpu_blocks_override, engine.block_size):
        raise _wrong("engine.max_model_len", f"the engine refuses to start: {refusal}")


def _check_vllm_pools(engine: VllmFlags, pools: tuple[str, ...]) -> None:
    if engine.enable_prefix_caching and any(name not in ("sim", "counting") for name in pools):
        raise _wrong(
            "pools",
            "a pool with page ids cannot follow vLLM's prefix cache yet; use [sim], or enable_prefix_caching: false",
        )


def _check_plain_requests(workload: Workload) -> None:
    for number, request in enumerate(workload.requests or ()):
        if request.prefix:
            raise _wrong(
                f"workload.requests.{number}.prefix",
                "known, but not supported yet for sglang: its prefix cache is not built; leave it out",
            )
        if request.priority:
            raise _wrong(
                f"workload.requests.{number}.priority", "known, but not supported yet for sglang; leave it out"
            )


def _check_model(scenario: Scenario) -> None:
    if scenario.model is None:
        return
    model = catalog.model(scenario.model)
    if not model.full_attention_only:
        raise _wrong(
            "model",
            f"{model.name} ({model.attention}) is known, but not supported yet: so far every layer must keep every "
            f"token; use a plain GQA or MLA model such as Llama-3.1-8B",
        )
    if scenario.hardware is not None:
        try:
            model.check_tp_size(scenario.hardware.tp_size)
        except ScenarioError as error:
            raise _wrong("hardware.tp_size", error.message) from None
    engine = scenario.engine
    vllm = isinstance(engine, VllmFlags)
    longest = model.max_position_embeddings
    asked = engine.max_model_len if isinstance(engine, VllmFlags) else engine.context_length
    if longest is not None and asked is not None and asked > longest:
        raise _wrong(
            f"engine.{'max_model_len' if vllm else 'context_length'}",
            f"{asked} is longer than the {longest} tokens of {model.name}, and the engine refuses to start; "
            f"use at most {longest}",
        )


def _check_steptime(scenario: Scenario) -> None:
    # Imported here: `steptime` is built on the schema.
    from pagestorm.steptime import build

    settings = scenario.steptime
    if isinstance(settings, Linear) and settings.base_s + settings.per_request_s < MIN_PASS_S:
        raise _wrong("steptime.base_s", "a pass would take no time; make base_s or per_request_s at least 1e-12")
    build(scenario)


def _check_workload(workload: Workload) -> None:
    if workload.requests is not None:
        _check_requests(workload)
    else:
        _check_generators(workload)


def _check_requests(workload: Workload) -> None:
    requests = workload.requests or ()
    for key in ("input_tokens", "output_tokens", "trace"):
        if getattr(workload, key) is not None:
            raise _wrong(f"workload.{key}", "requests are written out, so this has no use; leave one of them out")
    if workload.arrivals is not None and not isinstance(workload.arrivals, ClosedLoop):
        raise _wrong("workload.arrivals", "requests are written out with their own at_s; leave arrivals out")
    if workload.num_requests is not None and workload.num_requests > len(requests):
        raise _wrong(
            "workload.num_requests", f"{workload.num_requests} is more than the {len(requests)} requests listed"
        )
    closed = workload.arrivals is not None
    for number, request in enumerate(requests):
        key = f"workload.requests.{number}.at_s"
        if closed and request.at_s is not None:
            raise _wrong(key, "in a closed loop a request arrives when another finishes; leave at_s out")
        if not closed and request.at_s is None:
            raise _wrong(key, "missing; say when it arrives, in seconds; for example at_s: 0.0")


def _check_generators(workload: Workload) -> None:
    if workload.num_requests is None and workload.trace is None:
        raise _wrong("workload.num_requests", "missing; the workload is empty; for example num_requests: 100")
    for key, example in (("arrivals", "{process: burst}"), ("input_tokens", "512"), ("output_tokens", "128")):
        if getattr(workload, key) is None:
            raise _wrong(f"workload.{key}", f"missing; for example {key}: {example}")
    _check_trace(workload)
    _check_span(workload)
    for key, lengths in (("input_tokens", workload.input_tokens), ("output_tokens", workload.output_tokens)):
        _check_lengths(f"workload.{key}", lengths)


def _check_span(workload: Workload) -> None:
    # Imported here: `workload` is built on the schema.
    from pagestorm.workload.arrivals import check_span

    if workload.num_requests is not None and isinstance(workload.arrivals, Constant | Poisson | Gamma):
        check_span(workload.arrivals, workload.num_requests)


def _check_trace(workload: Workload) -> None:
    parts = {
        "arrivals": isinstance(workload.arrivals, TraceArrivals),
        "input_tokens": isinstance(workload.input_tokens, TraceLengths),
        "output_tokens": isinstance(workload.output_tokens, TraceLengths),
    }
    if workload.trace is None:
        for key, traced in parts.items():
            if traced:
                raise _wrong(f"workload.{key}", "no trace is given; add trace: {format: azure, path: trace.csv}")
        return
    if not any(parts.values()):
        raise _wrong("workload.trace", "nothing is taken from it; leave it out, or write {dist: trace} where it counts")
    check_file("workload.trace.path", workload.trace.path)


def check_file(key: str, path: str) -> None:
    """Raises `ScenarioError` unless `path` is a file that can be opened."""
    try:
        with Path(path).open("rb"):
            return
    except FileNotFoundError:
        reason = "no such file"
    except IsADirectoryError:
        reason = "this is a folder, not a file"
    except PermissionError:
        reason = "no permission to read it"
    except (OSError, ValueError) as error:
        reason = str(error)
    raise _wrong(key, f"{reason}: {path!r}; a relative path starts at the scenario file")


def _check_lengths(key: str, lengths: Lengths | None) -> None:
    for kind, checked in _LENGTH_CHECKS.items():
        if isinstance(lengths, kind):
            checked(key, lengths)


def _check_order(key: str, lengths: Uniform | Zipf | Lognormal) -> None:
    if lengths.high is not None and lengths.low > lengths.high:
        raise _wrong(f"{key}.low", f"{lengths.low} is above high {lengths.high}; swap them")


def _check_lognormal(key: str, lengths: Lognormal) -> None:
    _check_order(key, lengths)
    if (lengths.median is None) == (lengths.mean is None):
        both = "median and mean are both given" if lengths.median is not None else "missing"
        raise _wrong(f"{key}.median", f"{both}; give one of median and mean")


def _check_histogram(key: str, lengths: Histogram) -> None:
    if (lengths.values is None) == (lengths.path is None):
        both = "values and path are both given" if lengths.path is not None else "missing"
        raise _wrong(f"{key}.values", f"{both}; give one of values and path")
    if lengths.path is not None:
        check_file(f"{key}.path", lengths.path)
    if lengths.weights is None:
        return
    if lengths.values is None:
        raise _wrong(f"{key}.weights", "the file has the weights; leave this out")
    if len(lengths.weights) != len(lengths.values):
        raise _wrong(
            f"{key}.weights", f"{len(lengths.weights)} weights for {len(lengths.values)} values; give one each"
        )
    if sum(lengths.weights) <= 0:
        raise _wrong(f"{key}.weights", "all weights are 0; one at least must be above")


_LENGTH_CHECKS: dict[type, Callable[..., None]] = {
    Uniform: _check_order,
    Zipf: _check_order,
    Lognormal: _check_lognormal,
    Histogram: _check_histogram,
}


def _check_pools(pools: tuple[str, ...]) -> None:
    for position, name in enumerate(pools):
        if name in pools[:position]:
            raise _wrong(f"pools.{position}", f"{name} is named twice; name each pool once")


def check_expectations(expect: Mapping[str, Expectation]) -> None:
    """Raises `ScenarioError` for an expectation that no summary could meet."""
    for key, wanted in expect.items():
        if key not in SUMMARY_KEYS:
            remedy = did_you_mean(key, SUMMARY_KEYS, "keys")
            raise _wrong(f"expect.{key}", f"no key of summary.json; {remedy}")
        if key == "outcome" and wanted not in OUTCOMES:
            remedy = did_you_mean(str(wanted), OUTCOMES, "outcomes")
            raise _wrong(f"expect.{key}", f"{shown(wanted)} is no outcome; {remedy}")
        if isinstance(wanted, Bounds):
            _check_bounds(f"expect.{key}", wanted)


def _check_bounds(key: str, bounds: Bounds) -> None:
    if bounds.min is None and bounds.max is None:
        raise _wrong(key, "empty; give min, max or both")
    if bounds.min is not None and bounds.max is not None and bounds.min > bounds.max:
        raise _wrong(f"{key}.min", f"{bounds.min} is above max {bounds.max}; swap them")
