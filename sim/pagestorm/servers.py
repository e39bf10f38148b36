"""From a resolved scenario to the engine that it names, over the pools that it names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagestorm.engine.iteration import EngineLimits, SglangCounts, SglangEngine
from pagestorm.engine.machine import Counts, Machine, Timeline
from pagestorm.engine.sglang import Capacity
from pagestorm.engine.vllm import VllmLimits
from pagestorm.engine.vllm_iteration import VllmCounts, VllmEngine
from pagestorm.errors import ScenarioError
from pagestorm.events import EventLog
from pagestorm.memory.block_pool import BlockPool
from pagestorm.memory.blocks import Blocks, CountedBlocks
from pagestorm.memory.ledger import Ledger
from pagestorm.memory.pools import PoolSpec, open_ledger
from pagestorm.memory.twin import TwinPool
from pagestorm.scenario import Scenario
from pagestorm.scenario.schema import Engine, SglangFlags, VllmFlags
from pagestorm.steptime import StepTime


def open_engine(
    scenario: Scenario,
    pools: Sequence[str],
    steptime: StepTime,
    log: EventLog,
    *,
    device: str = "auto",
    payload: str = "stamp",
    step: bool = False,
    timeline: Timeline | None = None,
) -> Machine:
    """The engine of a resolved scenario; `pools` are resolved names, several of which run in lockstep."""
    flags = scenario.engine
    spec = PoolSpec.of(scenario, device=device, payload=payload)
    if isinstance(flags, SglangFlags):
        ledger = _ledger(pools, spec)
        return SglangEngine(sglang_limits(flags), ledger, steptime, log, step_only=step, timeline=timeline)
    blocks = _blocks(flags, pools, spec)
    return VllmEngine(vllm_limits(flags), blocks, steptime, log, step_only=step, timeline=timeline)


def shares_pages(flags: Engine) -> bool:
    """Whether a page can have several holders, so that what events took and gave does not add up to the pool."""
    return isinstance(flags, VllmFlags) and flags.enable_prefix_caching


def _ledger(pools: Sequence[str], spec: PoolSpec) -> Ledger:
    ledgers = [open_ledger(name, spec) for name in pools]
    return ledgers[0] if len(ledgers) == 1 else TwinPool(ledgers)


def _blocks(flags: VllmFlags, pools: Sequence[str], spec: PoolSpec) -> Blocks:
    if not flags.enable_prefix_caching:
        return CountedBlocks(_ledger(pools, spec))
    if list(pools) != ["counting"]:
        raise ScenarioError(
            "a pool with page ids cannot follow vLLM's prefix cache yet: use --pools sim, "
            "or --set engine.enable_prefix_caching=false",
            key="pools",
        )
    return BlockPool(flags.num_gpu_blocks_override, flags.block_size)


def sglang_limits(flags: SglangFlags) -> EngineLimits:
    """What SGLang's flags come to in a resolved scenario."""
    assert flags.context_length is not None
    assert flags.max_running_requests is not None
    assert flags.chunked_prefill_size is not None
    return EngineLimits(
        capacity=Capacity(
            pool_tokens=flags.pool_tokens,
            context_length=flags.context_length,
            page_size=flags.page_size,
            clips_output="no_output_clip" not in flags.emulate,
        ),
        max_running=flags.max_running_requests,
        chunk_tokens=flags.chunked_prefill_size if flags.chunked_prefill_size > 0 else None,
        max_prefill_tokens=flags.max_prefill_tokens,
        conservativeness=flags.schedule_conservativeness,
        overlap=not flags.disable_overlap_schedule,
        decode_check=flags.decode_check,
        max_queued=flags.max_queued_requests,
        ratio_init=flags.init_new_token_ratio,
        ratio_floor_factor=flags.min_new_token_ratio_factor,
        ratio_decay_steps=flags.new_token_ratio_decay_steps,
        late_check="kv_length_off_by_one" in flags.emulate,
    )


def vllm_limits(flags: VllmFlags) -> VllmLimits:
    """What vLLM's flags come to in a resolved scenario."""
    assert flags.max_model_len is not None
    assert flags.max_num_seqs is not None
    assert flags.max_num_batched_tokens is not None
    return VllmLimits(
        num_blocks=flags.num_gpu_blocks_override,
        block_size=flags.block_size,
        max_model_len=flags.max_model_len,
        max_num_seqs=flags.max_num_seqs,
        max_num_batched_tokens=flags.max_num_batched_tokens,
        policy=flags.scheduling_policy,
        watermark=flags.watermark,
        lookahead_tokens=flags.num_lookahead_tokens,
        long_prefill_token_threshold=flags.long_prefill_token_threshold,
        enable_chunked_prefill=flags.enable_chunked_prefill,
        reserve_full_sequence=flags.scheduler_reserve_full_isl,
    )


def own_figures(counts: Counts) -> dict[str, Any]:
    """Keys of the summary that one kind of engine has and the other leaves null."""
    if isinstance(counts, SglangCounts):
        return {
            "retractions": counts.retractions,
            "retracted_requests": counts.retracted_requests,
            "max_retractions_per_request": counts.max_retractions_per_request,
            "decode_oom": counts.decode_oom,
            "prefill_oom": counts.prefill_oom,
            "new_token_ratio_min": counts.ratio_min,
            "new_token_ratio_max": counts.ratio_max,
        }
    assert isinstance(counts, VllmCounts)
    return {"preemptions": counts.preemptions, "cached_tokens": counts.cached_tokens, "retractions": 0}
