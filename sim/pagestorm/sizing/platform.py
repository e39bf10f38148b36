"""What SGLang picks by itself from model and GPU: attention backend, page size, KV type, graph backends.

Rules: sglang 0.5.23, `arg_groups/{overrides,model_override_base,model_overrides/*,cuda_graph_hook}.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from pagestorm.catalog.gpus import Gpu
from pagestorm.catalog.shape import CHUNKED, LINEAR, SLIDING, Shape
from pagestorm.sizing.options import Options

HYBRID_WINDOW = frozenset(
    (
        "Llama4ForConditionalGeneration",
        "DeepseekV4ForCausalLM",
        "GptOssForCausalLM",
        "GraniteSWAForCausalLM",
        "GraniteMoeSWAForCausalLM",
        "MiMoV2ForCausalLM",
        "MiMoV2FlashForCausalLM",
        "Step3p5ForCausalLM",
        "Step3p7ForConditionalGeneration",
        "Step3p7FlashForCausalLM",
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
        "LagunaForCausalLM",
        "MellumForCausalLM",
    )
)
"""Architectures whose window layers get a pool of their own; others keep every token in every layer. The config that
PyPI ships for Step-3.7-Flash names the architecture Step3p7FlashForCausalLM."""
MULTIMODAL_OFF = ("Gemma3ForConditionalGeneration", "Llama4ForConditionalGeneration")
"""Vision models that serve text unless `--enable-multimodal` is given."""
BREAKABLE_VISION = frozenset(
    (
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "KimiK3ForConditionalGeneration",
        "KimiK25ForConditionalGeneration",
        "MiniMaxM3SparseForConditionalGeneration",
        "MiniMaxM3SparseForCausalLM",
        "MiniMaxM3ForCausalLM",
    )
)
"""Vision models whose prefill is captured in graphs all the same."""
EXTRA_BUFFER = frozenset(
    (
        "KimiLinearForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3NextForCausalLM",
        "BailingMoeV2_5ForCausalLM",
        "FalconH1ForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "NemotronHForCausalLM",
        "KimiK3ForConditionalGeneration",
    )
)
"""State models that keep tracking slots beside a request's state (`extra_buffer`) where overlap or paging is on."""
TRTLLM_MHA_PAGES, TRTLLM_MLA_PAGES = (16, 32, 64, 128), (32, 64)


class Platform(NamedTuple):
    """Which kernels there are: `generation` is hopper, blackwell (SM100/103), blackwell-rtx (SM120), hip or other."""

    generation: str

    @property
    def hopper(self) -> bool:
        return self.generation == "hopper"

    @property
    def sm100(self) -> bool:
        return self.generation == "blackwell"

    @property
    def hip(self) -> bool:
        return self.generation == "hip"

    @property
    def any_blackwell(self) -> bool:
        return self.generation.startswith("blackwell")


def platform_of(gpu: Gpu | None) -> Platform:
    """The platform of a GPU; hopper where none is named."""
    arch = gpu.sm_arch if gpu is not None else "sm_90"
    if arch.startswith("gfx"):
        return Platform("hip")
    names = {"sm_90": "hopper", "sm_100": "blackwell", "sm_103": "blackwell", "sm_120": "blackwell-rtx"}
    return Platform(names.get(arch, "other"))


class Backends(NamedTuple):
    """Attention backends of prefill and decode, and the backends of a DSA model."""

    prefill: str
    decode: str
    dsa_prefill: str
    dsa_decode: str

    def uses(self, *names: str) -> bool:
        """Whether prefill or decode is one of these."""
        return self.prefill in names or self.decode in names


def backends(options: Options, shape: Shape, platform: Platform, kv_dtype: str) -> Backends:
    """The attention backends: those given, else the engine's choice for model and GPU."""
    common = options.text("attention_backend") or _default_backend(options, shape, platform)
    prefill = options.text("prefill_attention_backend") or common
    decode = options.text("decode_attention_backend") or common
    dsa_prefill = options.text("dsa_prefill_backend")
    dsa_decode = options.text("dsa_decode_backend")
    if shape.indexer is not None:
        fp8 = kv_dtype == "fp8_e4m3"
        if platform.hip:
            default_prefill = default_decode = "triton"
        elif fp8:
            default_prefill = default_decode = "trtllm" if platform.any_blackwell else "flashmla_kv"
        else:
            default_prefill, default_decode = "flashmla_sparse", "trtllm" if platform.any_blackwell else "fa3"
        dsa_prefill, dsa_decode = dsa_prefill or default_prefill, dsa_decode or default_decode
    return Backends(prefill, decode, dsa_prefill, dsa_decode)


def _default_backend(options: Options, shape: Shape, platform: Platform) -> str:
    topk_one = not options.given("speculative_algorithm") or options.whole("speculative_eagle_topk", 1) <= 1
    arch = shape.architecture
    if shape.compress_ratios:
        return "dsv4"
    if arch.startswith(("Gemma4", "GptOss", "Llama4")):
        fallback = "fa3" if platform.hopper and not arch.startswith("Gemma4") else "triton"
        return "trtllm_mha" if platform.sm100 else fallback
    if arch.startswith(("MiMoV2", "Step3p")) and platform.sm100:
        return "fa4"
    if shape.latent is not None:
        if platform.sm100 and shape.indexer is None and arch == "DeepseekV3ForCausalLM":
            return "trtllm_mla"
        return "fa3" if platform.hopper else "flashinfer" if platform.sm100 else "aiter" if platform.hip else "triton"
    if platform.hopper and topk_one:
        return "fa3"
    if platform.sm100 and topk_one:
        return "fa4" if shape.full.k_dim != shape.full.v_dim else "trtllm_mha"
    return "aiter" if platform.hip else "flashinfer"


def page_size(options: Options, shape: Shape, platform: Platform, chosen: Backends) -> tuple[int, str]:
    """Tokens in a page, after every rule of the engine, and the rule that decided."""
    asked = options.maybe("page_size")
    if shape.compress_ratios:
        return 256, "DeepSeek-V4 always uses pages of 256"
    if shape.indexer is not None:
        return 64 * shape.indexer.kpool, "DSA always uses pages of 64 (times the tokens of a pooled key)"
    size, why = (asked, "given") if asked is not None else (1, "the default")
    if shape.block_index is not None and asked is None:
        size, why = 128, "block-sparse attention uses pages of 128"
    if chosen.uses("flashmla"):
        size, why = 64, "FlashMLA uses pages of 64"
    if chosen.uses("trtllm_mla", "cutedsl_mla") and size not in TRTLLM_MLA_PAGES:
        size, why = 64, "TensorRT-LLM MLA uses pages of 32 or 64"
    if chosen.uses("trtllm_mha") and size not in TRTLLM_MHA_PAGES:
        size, why = 64, "TensorRT-LLM MHA uses pages of 16, 32, 64 or 128"
    if chosen.uses("fa4") and platform.sm100 and shape.latent is None:
        size, why = 128, "FA4 uses pages of 128"
    return size, why


def kv_dtype_name(options: Options, shape: Shape, platform: Platform) -> str:
    """`--kv-cache-dtype` after the engine's rules: DSA on Blackwell and DeepSeek-V4 default to fp8."""
    asked = options.text("kv_cache_dtype", "auto")
    if asked != "auto":
        return "bfloat16" if asked == "bf16" else asked
    if shape.compress_ratios:
        return "fp8_e4m3"
    if shape.indexer is not None:
        return "fp8_e4m3" if platform.any_blackwell else "bfloat16"
    return "auto"


def window_pool(options: Options, shape: Shape) -> bool:
    """Whether the engine gives window (or chunked) layers a pool of their own."""
    if options.switch("disable_hybrid_swa_memory"):
        return False
    if shape.architecture.startswith("Step3p") and options.switch("enable_hierarchical_cache"):
        return False
    if shape.compress_ratios:
        return True
    return shape.architecture in HYBRID_WINDOW and (SLIDING in shape.layers or CHUNKED in shape.layers)


def multimodal(options: Options, shape: Shape) -> bool:
    """Whether the engine serves a model with its vision tower."""
    if shape.vision is None:
        return False
    if shape.architecture in MULTIMODAL_OFF:
        return options.switch("enable_multimodal")
    return not options.switch("language_model_only")


class Graphs(NamedTuple):
    """CUDA graphs: whether decode and prefill are captured, the largest decode batch, the captured prefill sizes."""

    decode: bool
    prefill: bool
    max_batch: int
    prefill_sizes: tuple[int, ...]


def prefill_sizes(most: int) -> tuple[int, ...]:
    """Token counts captured for prefill, up to `most` (`generate_prefill_cuda_graph_batch_sizes`)."""
    steps = (
        range(4, 33, 4),
        range(48, 257, 16),
        range(288, 513, 32),
        range(576, 1025, 64),
        range(1280, 4097, 256),
        range(4608, most + 1, 512),
    )
    return tuple(size for step in steps for size in step if size <= most)


def graphs(options: Options, shape: Shape, platform: Platform, max_batch: int, chunk: int, pp: int) -> Graphs:
    """What is captured when the memory fraction is worked out."""
    off = options.switch("disable_cuda_graph")
    role = options.text("disaggregation_mode", "null")
    decode = not (off or options.switch("disable_decode_cuda_graph") or role == "prefill")
    decode = options.text("cuda_graph_backend_decode", "full" if decode else "disabled") != "disabled"
    explicit = options.text("cuda_graph_backend_prefill")
    if explicit:
        prefill = explicit != "disabled"
    else:
        prefill = not (off or options.switch("disable_prefill_cuda_graph") or role == "decode" or platform.hip)
        prefill = prefill and not _prefill_incompatible(options, shape, pp)
    most = options.maybe("cuda_graph_max_bs_prefill")
    if most is None:
        most = chunk if shape.latent is None else min(8192, chunk)
        most = min(most, options.maybe("max_total_tokens") or most)
    return Graphs(decode, prefill, max_batch, prefill_sizes(most))


def _prefill_incompatible(options: Options, shape: Shape, pp: int) -> bool:
    if pp > 1 or bool(shape.compress_ratios) or options.whole("dcp_size", 1) > 1:
        return True
    if options.switch("enable_two_batch_overlap"):
        return True
    if shape.state is not None and shape.state.kind == "kda" and LINEAR in shape.layers:
        return True
    if options.text("moe_a2a_backend", "none") not in ("none", "deepep", "megamoe", "flashinfer"):
        return True
    return multimodal(options, shape) and shape.architecture not in BREAKABLE_VISION
