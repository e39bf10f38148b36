"""vLLM's own classes, loaded without a model and without a GPU, and the configuration that its scheduler reads.

Runs inside the reference environment. The engine's modules are loaded by name, after the stand-ins for what its
scheduling and memory code never uses.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from pagestorm_real.reference import stand_ins

ABSENT = [
    "fastapi",
    "llguidance",
    "orjson",
    "partial_json_parser",
    "prometheus_client",
    "starlette",
    "uvicorn",
    "xgrammar",
]
"""Packages that the engine imports and that its scheduling code never calls."""
STOP_TOKEN = 1
"""The model's end of text: it ends a request before its max_tokens."""
PLAIN_TOKEN = 2
_OWN_TOKENS = 1 << 50
_STRIDE = 1 << 25
"""Longest text of a group or a request, in tokens."""


def version() -> str:
    """Version of the installed engine."""
    return metadata.version("vllm")


class Unset:
    """Named values; what is not named is None, so that everything off by default is off."""

    def __init__(self, **values: object) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@dataclass(frozen=True)
class Flags:
    """The engine's flags that decide over memory; `scheduler` has those of its `SchedulerConfig` that were given."""

    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    prefix_caching: bool
    lookahead: int
    sliding_window: int | None
    scheduler: dict[str, object]


class Engine:
    """The modules in use, by short names."""

    def __init__(self) -> None:
        stand_ins.install(ABSENT)
        self.torch: Any = import_module("torch")
        self.torch.set_num_threads(1)
        self.config: Any = import_module("vllm.config")
        self.scheduler: Any = import_module("vllm.v1.core.sched.scheduler").Scheduler
        self.core: Any = import_module("vllm.v1.engine.core").EngineCore
        self.request_class: Any = import_module("vllm.v1.request").Request
        self.status: Any = import_module("vllm.v1.request").RequestStatus
        self.outputs: Any = import_module("vllm.v1.outputs").ModelRunnerOutput
        self.kv: Any = import_module("vllm.v1.kv_cache_interface")
        self.cache_utils: Any = import_module("vllm.v1.core.kv_cache_utils")
        self.sampling: Any = import_module("vllm.sampling_params").SamplingParams
        self.tokenize: Any = import_module("vllm.renderers.params").TokenizeParams
        self.input_processor: Any = import_module("vllm.v1.engine.input_processor").InputProcessor
        self.max_tokens: Any = import_module("vllm.entrypoints.serve.utils.api_utils").get_max_tokens
        self.refused: Any = import_module("vllm.exceptions").VLLMValidationError
        self.sha256: Any = import_module("vllm.utils.hashing").sha256
        self.cache_utils.init_none_hash(self.sha256)
        logging.disable(logging.CRITICAL)

    # --- what a run is made of -------------------------------------------------------------------------------

    def build(self, kind: Any, flags: Flags, execute: Callable[[Any], Any]) -> Any:
        """An `EngineCore` as its constructor would leave it, its scheduler a `kind`, its model `execute`."""
        config = self._config(flags)
        structured = MagicMock()
        scheduler = kind(
            vllm_config=config,
            kv_cache_config=self._kv_cache(flags),
            structured_output_manager=structured,
            block_size=flags.block_size,
            log_stats=False,
        )

        def execute_model(output: Any, non_block: bool) -> SimpleNamespace:
            answer = execute(output)
            return SimpleNamespace(result=lambda: answer)

        core = self.core.__new__(self.core)
        core.__dict__.update(
            scheduler=scheduler,
            vllm_config=config,
            structured_output_manager=structured,
            model_executor=SimpleNamespace(execute_model=execute_model),
            log_stats=False,
            aborts_queue=queue.Queue(),
            _weight_version=None,
        )
        return core

    def _config(self, flags: Flags) -> Unset:
        model = Unset(
            max_model_len=flags.max_model_len,
            runner_type="generate",
            dtype=self.torch.float16,
            uses_mrope=False,
            is_encoder_decoder=False,
            is_diffusion=False,
            is_multimodal_model=False,
            supports_multimodal_inputs=False,
        )
        schedule = self.config.SchedulerConfig(
            max_model_len=flags.max_model_len,
            max_num_batched_tokens=flags.max_num_batched_tokens,
            is_encoder_decoder=False,
            async_scheduling=False,
            **flags.scheduler,
        )
        cache = self.config.CacheConfig(block_size=flags.block_size, enable_prefix_caching=flags.prefix_caching)
        cache.num_gpu_blocks = flags.num_blocks
        return Unset(
            model_config=model,
            scheduler_config=schedule,
            cache_config=cache,
            parallel_config=self.config.ParallelConfig(),
            observability_config=self.config.ObservabilityConfig(),
            num_speculative_tokens=0,
            num_lookahead_tokens=flags.lookahead,
            num_prefill_lookahead_tokens=0,
            num_hash_lookahead_tokens=0,
            max_concurrent_batches=1,
            max_in_flight_tokens=flags.max_num_batched_tokens,
            use_v2_model_runner=False,
            is_mm_encoder_only=False,
            ec_manager_config=Unset(get_encoder_cache_manager_obj=lambda: None),
            aux_output_config=Unset(enabled=False),
        )

    def _kv_cache(self, flags: Flags) -> Any:
        tiny = {"block_size": flags.block_size, "num_kv_heads": 1, "head_size": 1, "dtype": self.torch.float32}
        if flags.sliding_window is None:
            spec = self.kv.FullAttentionSpec(**tiny)
        else:
            spec = self.kv.SlidingWindowSpec(sliding_window=flags.sliding_window, **tiny)
        group = self.kv.KVCacheGroupSpec(["layer"], spec)
        return self.kv.KVCacheConfig(num_blocks=flags.num_blocks, kv_cache_tensors=[], kv_cache_groups=[group])

    def hasher(self, flags: Flags) -> Any:
        """What computes block hashes for a request; None without a prefix cache."""
        return (
            self.cache_utils.get_request_block_hasher(flags.block_size, self.sha256) if flags.prefix_caching else None
        )

    def refusal(self, input_tokens: int, asked_tokens: int, max_model_len: int) -> str:
        """What the HTTP server answers to a request that it turns away, by its own checks in their order."""
        model = SimpleNamespace(max_model_len=max_model_len, runner_type="generate")
        processor = SimpleNamespace(skip_prompt_length_check=False, supports_mm_inputs=False, model_config=model)
        try:
            self.tokenize(
                max_total_tokens=max_model_len,
                max_output_tokens=asked_tokens,
                max_total_tokens_param="max_model_len",
                max_output_tokens_param="max_tokens",
            )._token_len_check(None, range(input_tokens))
            self.sampling(max_tokens=self.max_tokens(max_model_len, asked_tokens, input_tokens, {}))
            self.input_processor._validate_prompt_len(processor, input_tokens, "decoder")
        except (self.refused, ValueError) as error:
            return str(error)
        return ""


# --- tokens ------------------------------------------------------------------------------------------------------


def own_token(number: int, position: int) -> int:
    """The token at a position of request `number` that no other request has at any."""
    return _OWN_TOKENS + number * _STRIDE + position


def prompt(number: int, input_tokens: int, prefix: Sequence[Sequence[int]]) -> list[int]:
    """Runs of shared text (group, tokens), then text of the request's own."""
    tokens = [2 + group * _STRIDE + i for group, length in prefix for i in range(length)][:input_tokens]
    return tokens + [own_token(number, i) for i in range(len(tokens), input_tokens)]
