"""Every default that depends on something else, filled in: `resolve`."""

from __future__ import annotations

from msgspec.structs import replace

from pagestorm import catalog
from pagestorm.errors import ScenarioError
from pagestorm.scenario.schema import (
    ENGINE_MAX_NEW_TOKENS,
    Engine,
    ExplicitRequest,
    Linear,
    MaxNewTokens,
    Roofline,
    Scenario,
    SglangFlags,
    TraceArrivals,
    TraceLengths,
    VllmFlags,
    Workload,
)

NO_HARDWARE_CHUNK_TOKENS = 8192
UNKNOWN_MEMORY_CHUNK_TOKENS = 4096
CHUNK_TOKENS_BELOW_MIB = ((20 << 10, 2048), (60 << 10, 4096), (160 << 10, 8192))
LARGEST_CHUNK_TOKENS = 16384
"""Default chunked_prefill_size by GPU memory (sglang 0.5.23, `arg_groups/memory_hook.py`)."""


def resolve(scenario: Scenario) -> Scenario:
    """`scenario` with everything that was left out filled in; catalog names in their full form. Idempotent.

    What stays None has no value: no queue limit, no host memory, no prefix of a trace (its rows are not counted here).
    Raises `ScenarioError`, with a key, for a model or GPU that the catalog does not know.
    """
    model = _model(scenario)
    gpu = _gpu(scenario)
    hardware = scenario.hardware and gpu and replace(scenario.hardware, gpu=gpu.name)
    steptime = scenario.steptime or (Roofline() if model and gpu else Linear())
    return replace(
        scenario,
        engine=_engine(scenario.engine, model, gpu),
        model=model and model.name,
        hardware=hardware,
        steptime=steptime,
        workload=_workload(scenario.workload),
    )


def _model(scenario: Scenario) -> catalog.Model | None:
    if scenario.model is None:
        return None
    if scenario.model.endswith(".json"):
        raise ScenarioError(
            "a config.json as the model is known, but not supported yet; use a name of `pagestorm catalog models`",
            key="model",
        )
    try:
        return catalog.model(scenario.model)
    except ScenarioError as error:
        raise ScenarioError(error.message, key="model") from None


def _gpu(scenario: Scenario) -> catalog.Gpu | None:
    if scenario.hardware is None:
        return None
    try:
        return catalog.gpu(scenario.hardware.gpu)
    except ScenarioError as error:
        raise ScenarioError(error.message, key="hardware.gpu") from None


def _engine(engine: Engine, model: catalog.Model | None, gpu: catalog.Gpu | None) -> Engine:
    if isinstance(engine, VllmFlags):
        return _vllm(engine, model, gpu)
    context_length = engine.context_length or _context_length("context_length", engine.pool_tokens, model)
    chunk = engine.chunked_prefill_size
    return replace(
        engine,
        context_length=context_length,
        max_running_requests=_max_running_requests(engine, context_length),
        chunked_prefill_size=default_chunk_tokens(gpu) if chunk is None else chunk,
    )


def _vllm(engine: VllmFlags, model: catalog.Model | None, gpu: catalog.Gpu | None) -> VllmFlags:
    seqs, batched = default_batch(gpu)
    usable_tokens = engine.pool_pages * engine.block_size
    max_model_len = engine.max_model_len or _context_length("max_model_len", usable_tokens, model)
    if not engine.enable_chunked_prefill:
        batched = max(max_model_len, batched)
    return replace(
        engine,
        max_model_len=max_model_len,
        max_num_seqs=engine.max_num_seqs or seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens or batched,
    )


def default_batch(gpu: catalog.Gpu | None) -> tuple[int, int]:
    """max_num_seqs and max_num_batched_tokens of vLLM's server (vllm 0.33.0, `engine/arg_utils.py`)."""
    memory_mib = gpu.memory_mib if gpu is not None else None
    if gpu is None or memory_mib is None:
        return 256, 2048
    if memory_mib >= 160 << 10:
        return 1024, 16384
    if memory_mib >= 70 << 10 and "a100" not in gpu.name.lower():
        return 1024, 8192
    return 256, 2048


def _context_length(flag: str, pool_tokens: int, model: catalog.Model | None) -> int:
    if model is None:
        return max(1, pool_tokens)
    if model.max_position_embeddings is None:
        raise ScenarioError(
            f"missing; the catalog does not know the context length of {model.name}, so give it",
            key=f"engine.{flag}",
        )
    return model.max_position_embeddings


def _max_running_requests(engine: SglangFlags, context_length: int) -> int:
    """Request rows of the engine (sglang 0.5.23, `mem_cache/kv_cache_configurator.py`)."""
    most = engine.pool_tokens // 2
    if engine.max_running_requests is not None:
        return min(engine.max_running_requests, most)
    estimated = int(engine.pool_tokens / context_length * 512)
    return min(max(min(estimated, 4096), 2048), most)


def default_chunk_tokens(gpu: catalog.Gpu | None) -> int:
    """What the engine takes for chunked_prefill_size on `gpu` when it is not told."""
    if gpu is None:
        return NO_HARDWARE_CHUNK_TOKENS
    memory_mib = gpu.memory_mib
    if memory_mib is None:
        return UNKNOWN_MEMORY_CHUNK_TOKENS
    return next((chunk for below, chunk in CHUNK_TOKENS_BELOW_MIB if memory_mib < below), LARGEST_CHUNK_TOKENS)


def _workload(workload: Workload) -> Workload:
    max_new_tokens = _asked(workload.max_new_tokens)
    if workload.requests is not None:
        return replace(
            workload,
            num_requests=workload.num_requests or len(workload.requests),
            max_new_tokens=max_new_tokens,
            requests=tuple(_request(each, workload, max_new_tokens) for each in workload.requests),
        )
    traced = workload.trace is not None
    return replace(
        workload,
        max_new_tokens=max_new_tokens,
        arrivals=workload.arrivals or (TraceArrivals() if traced else None),
        input_tokens=workload.input_tokens or (TraceLengths() if traced else None),
        output_tokens=workload.output_tokens or (TraceLengths() if traced else None),
    )


def _request(request: ExplicitRequest, workload: Workload, max_new_tokens: int | None) -> ExplicitRequest:
    asked = _asked(request.max_new_tokens)
    return replace(
        request,
        max_new_tokens=max_new_tokens if asked is None else asked,
        ignore_eos=workload.ignore_eos if request.ignore_eos is None else request.ignore_eos,
    )


def _asked(max_new_tokens: MaxNewTokens | None) -> int | None:
    return ENGINE_MAX_NEW_TOKENS if max_new_tokens == "engine" else max_new_tokens
