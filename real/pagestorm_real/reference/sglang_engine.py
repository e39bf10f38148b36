"""SGLang's own classes, loaded without a model and without a GPU, and the configuration that they read.

Runs inside the reference environment. The engine's modules are loaded by name, after the stand-ins for what its
memory code never uses.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, metadata
from types import SimpleNamespace
from typing import Any

from pagestorm_real.reference import stand_ins

ABSENT = [
    "IPython",
    "anthropic",
    "av",
    "blobfile",
    "compressed_tensors",
    "decord2",
    "gguf",
    "grpc",
    "interegular",
    "llguidance",
    "modelscope",
    "openai",
    "outlines",
    "partial_json_parser",
    "scipy",
    "sentencepiece",
    "smg_grpc_proto",
    "soundfile",
    "tiktoken",
    "torchao",
    "torchvision",
    "xgrammar",
]
"""Packages that the engine imports and that its memory code never calls."""
SEES_ABSENCE = ("transformers.image_transforms", "transformers.image_utils")
SRT = "sglang.srt."
VOCABULARY = 1 << 31
PLAIN_TOKEN = 2
STOP_TOKEN = 1
"""The token that ends a request before its max_new_tokens."""


def version() -> str:
    """Version of the installed engine."""
    return metadata.version("sglang")


@dataclass(frozen=True)
class Shape:
    """What the pools of one server are sized by, in tokens; the pools are whole numbers of pages."""

    page_size: int
    pool_tokens: int
    rows: int
    longest_tokens: int
    radix: bool = False
    tree_core: str | None = None
    window_tokens: int | None = None
    swa_pool_tokens: int = 0


@dataclass(frozen=True)
class Pools:
    """The engine's allocator, request table and prefix cache."""

    kv: Any
    rows: Any
    tree: Any


class Engine:
    """The engine's modules and classes by short names, and what a run is made of."""

    def __init__(self) -> None:
        stand_ins.install(ABSENT, after=SEES_ABSENCE)
        self.torch: Any = import_module("torch")
        self.torch.set_num_threads(1)
        self._context: Any = import_module(SRT + "runtime_context").get_context()
        with self.configured(page_size=1):
            self._load_scheduling()
            self._load_memory()
        self._move_indices_in_torch()
        logging.disable(logging.CRITICAL)

    def _load_scheduling(self) -> None:
        managers, components = SRT + "managers.", SRT + "managers.scheduler_components."
        stage_metrics = import_module(SRT + "observability.scheduler_stage_metrics")
        self.scheduler: Any = import_module(managers + "scheduler").Scheduler
        self.batch: Any = import_module(managers + "schedule_batch").ScheduleBatch
        self.req: Any = import_module(managers + "schedule_batch").Req
        self.policy: Any = import_module(managers + "schedule_policy").SchedulePolicy
        self.result: Any = import_module(managers + "utils").GenerationBatchResult
        self.refusal: Any = import_module(managers + "utils").validate_input_length
        self.ratio: Any = import_module(components + "new_token_ratio_tracker").NewTokenRatioTracker
        self.stage_metrics: Any = stage_metrics.SchedulerStageMetricsRecorder
        self.disaggregation: Any = import_module(SRT + "disaggregation.utils").DisaggregationMode
        self.sampling: Any = import_module(SRT + "sampling.sampling_params").SamplingParams
        self.speculation: Any = import_module(SRT + "speculative.spec_info").SpeculativeAlgorithm

    def _load_memory(self) -> None:
        memory = SRT + "mem_cache."
        self.token_allocator: Any = import_module(memory + "allocator").TokenToKVPoolAllocator
        self.paged_allocator: Any = import_module(memory + "allocator").PagedTokenToKVPoolAllocator
        self.swa_allocator: Any = import_module(memory + "allocator.swa").SWATokenToKVPoolAllocator
        self.swa_buffers: Any = import_module(memory + "swa_memory_pool").SWAKVPool
        self.allocation: Any = import_module(memory + "allocation")
        self.sizing: Any = import_module(memory + "allocation_sizing")
        self.rows: Any = import_module(memory + "memory_pool").ReqToTokenPool
        self.cache_params: Any = import_module(memory + "cache_init_params").CacheInitParams
        self.component: Any = import_module(memory + "unified_cache.component_type").ComponentType
        self.cache: Any = import_module(memory + "unified_radix_cache").UnifiedRadixCache

    def _move_indices_in_torch(self) -> None:
        """Speculation moves indices with two kernels that need a GPU; the same moves in plain torch."""
        torch = self.torch

        def assign(rows: Any, table: Any, start: Any, end: Any, slots: Any, batch: int) -> None:
            at = 0
            for i in range(batch):
                first, last = int(start[i]), int(end[i])
                table[int(rows[i]), first:last] = slots[at : at + last - first].to(torch.int32)
                at += last - first

        self.allocation.assign_req_to_token_pool_func = assign
        self.allocation.get_last_loc = self.allocation.get_last_loc_torch

    @contextmanager
    def configured(self, **arguments: object) -> Iterator[None]:
        """Server arguments published as the engine's classes read them, until the block ends."""
        with self._context.override_server_args(device="cpu", **arguments):
            yield

    def pools(self, shape: Shape) -> Pools:
        """Allocator, request table and prefix cache of one server; call it inside `configured`."""
        kv = self.allocator(shape)
        rows = self.rows(
            size=shape.rows,
            max_context_len=shape.longest_tokens + self.sizing.get_req_to_token_extra_context_len(),
            device="cpu",
            enable_memory_saver=False,
        )
        full, swa = self.component.FULL, self.component.SWA
        tree = self.cache(
            self.cache_params(
                disable=not shape.radix,
                req_to_token_pool=rows,
                token_to_kv_pool_allocator=kv,
                page_size=shape.page_size,
                tree_components=(full,) if shape.window_tokens is None else (full, swa),
                sliding_window_size=shape.window_tokens,
                tree_core_backend=shape.tree_core,
            )
        )
        return Pools(kv, rows, tree)

    def allocator(self, shape: Shape) -> Any:
        """The allocator that the engine picks for such a pool."""
        p, size, kind = shape.page_size, shape.pool_tokens, self.torch.float16
        if shape.window_tokens is not None:
            buffers = self.swa_buffers(
                size=size,
                size_swa=shape.swa_pool_tokens,
                page_size=p,
                dtype=kind,
                head_num=1,
                head_dim=8,
                swa_attention_layer_ids=[0],
                full_attention_layer_ids=[1],
                device="cpu",
            )
            return self.swa_allocator(size, shape.swa_pool_tokens, p, kind, "cpu", buffers, False)
        if p == 1:
            return self.token_allocator(size, kind, "cpu", None, False)
        return self.paged_allocator(size, p, kind, "cpu", None, False)

    def request(self, number: int, prompt: Sequence[int], max_new: int, ignore_eos: bool = False) -> Any:
        """A request as the engine keeps it; it ends early at `STOP_TOKEN`."""
        sampling = self.sampling(max_new_tokens=max_new, stop_token_ids=[STOP_TOKEN], ignore_eos=ignore_eos)
        sampling.normalize(None)
        return self.req(str(number), "", array("q", prompt), sampling, vocab_size=VOCABULARY)


def model(context_length: int) -> SimpleNamespace:
    """What the scheduler asks a model's configuration."""
    return SimpleNamespace(
        is_encoder_decoder=False,
        is_multimodal=False,
        vocab_size=VOCABULARY,
        context_len=context_length,
        self_opened_think_start_ids=None,
        think_end_ids=None,
    )
