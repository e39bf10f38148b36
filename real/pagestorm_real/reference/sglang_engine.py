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

ABSENT = ["IPython", "anthropic", "av", "blobfile", "compressed_tensors", "decord2", "gguf", "grpc", "interegular", "llguidance", "modelscope", "openai", "outlines", "partial_json_parser", "scipy", "sentencepiece", "smg_grpc_proto", "soundfile", "tiktoken", "torchao", "torchvision", "xgrammar"]
"""Packages that the engine imports and that its memory code never calls."""
SEES_ABSENCE = ("transformers.image_transforms", "transformers.image_utils")
VOCABULARY = 1 << 31
STOP_TOKEN = 1
"""The token that ends a request before its max_new_tokens."""
PLAIN_TOKEN = 2
FIRST_PROMPT_TOKEN = 3
PROMPT_STRIDE = 1_000_003
"""Prompts given by length start at different tokens, so that no two share a page."""


def version() -> str:
    """Version of the installed engine."""
    return metadata.version("sglang")


class Engine:
    """The modules in use, by short names."""

    def __init__(self) -> None:
        stand_ins.install(ABSENT, after=SEES_ABSENCE)
        self.torch: Any = import_module("torch")
        self.torch.set_num_threads(1)
        self.context: Any = import_module("sglang.srt.runtime_context").get_context()
        with self.configured(page_size=1):
            self._load()
        self._move_indices_in_torch()
        logging.disable(logging.CRITICAL)

    def _load(self) -> None:
        srt = "sglang.srt."
        self.scheduler: Any = import_module(srt + "managers.scheduler")
        self.schedule_batch: Any = import_module(srt + "managers.schedule_batch")
        self.schedule_policy: Any = import_module(srt + "managers.schedule_policy")
        self.manager_utils: Any = import_module(srt + "managers.utils")
        components = srt + "managers.scheduler_components."
        self.ratio: Any = import_module(components + "new_token_ratio_tracker").NewTokenRatioTracker
        self.results: Any = import_module(components + "batch_result_processor").SchedulerBatchResultProcessor
        self.pool_stats: Any = import_module(components + "pool_stats_observer").SchedulerPoolStatsObserver
        self.invariants: Any = import_module(components + "invariant_checker").SchedulerInvariantChecker
        stage_metrics = import_module(srt + "observability.scheduler_stage_metrics")
        self.stage_metrics: Any = stage_metrics.SchedulerStageMetricsRecorder
        self.disaggregation: Any = import_module(srt + "disaggregation.utils").DisaggregationMode
        self.allocator: Any = import_module(srt + "mem_cache.allocator")
        self.swa_allocator: Any = import_module(srt + "mem_cache.allocator.swa").SWATokenToKVPoolAllocator
        self.swa_pool: Any = import_module(srt + "mem_cache.swa_memory_pool").SWAKVPool
        self.allocation: Any = import_module(srt + "mem_cache.allocation")
        self.rows: Any = import_module(srt + "mem_cache.memory_pool").ReqToTokenPool
        self.cache_params: Any = import_module(srt + "mem_cache.cache_init_params").CacheInitParams
        self.component: Any = import_module(srt + "mem_cache.unified_cache.component_type").ComponentType
        self.cache: Any = import_module(srt + "mem_cache.unified_radix_cache").UnifiedRadixCache
        self.sampling: Any = import_module(srt + "sampling.sampling_params").SamplingParams
        self.speculation: Any = import_module(srt + "speculative.spec_info").SpeculativeAlgorithm

    @contextmanager
    def configured(self, **arguments: object) -> Iterator[None]:
        """Server arguments published as the engine's classes read them, until the block ends."""
        with self.context.override_server_args(device="cpu", **arguments):
            yield

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

    # --- what a run is made of -------------------------------------------------------------------------------

    def pools(self, shape: Shape) -> Pools:
        """Allocator, request table and prefix cache of one server."""
        p, size, float16 = shape.page_size, shape.pool_tokens, self.torch.float16
        if shape.window_tokens is not None:
            tiny = dict(head_num=1, head_dim=8, swa_attention_layer_ids=[0], full_attention_layer_ids=[1])
            buffers = self.swa_pool(
                size=size, size_swa=shape.swa_pool_tokens, page_size=p, dtype=float16, device="cpu", **tiny
            )
            kv = self.swa_allocator(size, shape.swa_pool_tokens, p, float16, "cpu", buffers, False)
        elif p == 1:
            kv = self.allocator.TokenToKVPoolAllocator(size, float16, "cpu", None, False)
        else:
            kv = self.allocator.PagedTokenToKVPoolAllocator(size, p, float16, "cpu", None, False)
        rows = self.rows(
            size=shape.max_running, max_context_len=shape.row_tokens, device="cpu", enable_memory_saver=False
        )
        full, swa = self.component.FULL, self.component.SWA
        tree = self.cache(
            self.cache_params(
                disable=not shape.radix,
                req_to_token_pool=rows,
                token_to_kv_pool_allocator=kv,
                page_size=p,
                tree_components=(full,) if shape.window_tokens is None else (full, swa),
                sliding_window_size=shape.window_tokens,
                tree_core_backend=shape.tree_core,
            )
        )
        return Pools(kv, rows, tree)

    def request(self, number: int, prompt: Sequence[int], max_new: int, ignore_eos: bool) -> Any:
        """A request as the engine keeps it; it ends early at `STOP_TOKEN`."""
        sampling = self.sampling(max_new_tokens=max_new, stop_token_ids=[STOP_TOKEN], ignore_eos=ignore_eos)
        sampling.normalize(None)
        return self.schedule_batch.Req(str(number), "", array("q", prompt), sampling, vocab_size=VOCABULARY)


@dataclass(frozen=True)
class Shape:
    """What the pools of one server are sized by, in tokens; `pool_tokens` is a whole number of pages."""

    page_size: int
    pool_tokens: int
    max_running: int
    row_tokens: int
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


def prompt_of_length(number: int, tokens: int) -> range:
    """A prompt that shares nothing with that of any other request."""
    first = FIRST_PROMPT_TOKEN + number * PROMPT_STRIDE % (VOCABULARY >> 1)
    return range(first, first + tokens)


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
