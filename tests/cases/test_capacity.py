"""Public reports on capacity. Threads are named in shared/cases/public.yaml and in each test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pagestorm as ps
from pagestorm.sizing import vllm
from pagestorm.sizing.account import GIB
from tests.cases.canary import Broken, must_fail, off_by
from tests.cases.public import cases


@pytest.fixture
def case(request: pytest.FixtureRequest, shared: Path) -> dict[str, Any]:
    """The case that a test names with `named`."""
    return cases(shared, "capacity")[request.param]


def named(case_id: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [case_id], indirect=True)


def gib(size: float) -> str:
    """To the digits of the reports."""
    return f"{size / GIB:.2f}"


def rows(sizing: ps.Sizing) -> dict[str, float]:
    """Bytes of the usable tokens of each pool, without the page that is never handed out."""
    return {pool.name: pool.tokens * pool.bytes_per_token for pool in sizing.pools}


@named("dsv32-kv-and-index")
def test_index_keys_of_a_sparse_model_come_on_top_of_its_kv(case: dict[str, Any]) -> None:
    """sgl-project/sglang PR 11309."""
    given, expect = case["given"], case["expect"]
    for tokens, printed in zip(given["tokens"], expect["kv_and_index_gib"], strict=True):
        sized = ps.size(model="DeepSeek-V3.2", gpu="H200", kv_cache_dtype="fp8_e4m3", max_total_tokens=tokens, **ROOMY)
        assert sized.pool_tokens == tokens
        assert [pool.layers for pool in sized.pools] == [given["layers"]] * 2
        assert [pool.bytes_per_token // pool.layers for pool in sized.pools] == [
            given["kv_row_bytes"],
            given["indexer_bytes"],
        ]
        assert gib(sum(rows(sized).values())) == f"{printed:.2f}"
    assert gib(rows(sized)["kv"]) == f"{expect['kv_only_gib_of_second']:.2f}"


ROOMY: dict[str, Any] = {"tp_size": 8, "free_memory_bytes": 1 << 40, "weights_bytes_per_rank": 1 << 30}


@named("qwen3-235b")
def test_keys_and_values_of_a_rank_are_alike(case: dict[str, Any]) -> None:
    """vllm-project/vllm#21348."""
    given, expect = case["given"], case["expect"]
    sized = ps.size(
        model=given["model"],
        tp_size=given["tp_size"],
        kv_cache_dtype=given["kv_dtype"],
        max_total_tokens=given["tokens"],
    )
    half = sum(rows(sized).values()) / 2
    assert [gib(half), gib(half)] == [f"{expect[name]:.2f}" for name in ("k_gib", "v_gib")]


def blocks(given: dict[str, Any], count: int, longest: int) -> ps.Sizing:
    """vLLM on the card of the report, with the blocks that its log names."""
    return ps.size(
        model=given["model"],
        engine="vllm",
        gpu="RTX 3090",
        block_size=given["block_size"],
        max_model_len=longest,
        num_gpu_blocks_override=count,
    )


@named("llama31-8b-vllm-3090")
def test_blocks_of_a_small_card_and_the_length_that_it_refuses(case: dict[str, Any]) -> None:
    """vllm-project/vllm#10517."""
    given, expect = case["given"], case["expect"]
    first, second = (
        blocks(given, count, longest) for count, longest in zip(expect["blocks"], given["max_model_len"], strict=True)
    )
    for sized, count, printed, concurrency in zip(
        (first, second), expect["blocks"], given["kv_gib"], expect["concurrency"], strict=True
    ):
        assert sized.kv_bytes_per_token is not None
        assert sized.max_concurrency is not None
        assert gib(count * given["block_size"] * sized.kv_bytes_per_token) == f"{printed:.2f}"
        assert f"{sized.max_concurrency:.2f}" == f"{concurrency:.2f}"
        assert sized.pool_tokens == count * given["block_size"]
    assert first.verdict == "fits"
    assert (second.verdict == "refused") == expect["second_refused"]
    assert second.pool_tokens == expect["tokens_of_second"]
    assert second.error is not None
    assert second.error.startswith("To serve at least one request with the model's max seq len (29000)")


@named("llama31-8b-vllm-3090")
def test_the_printed_memory_gives_the_blocks_within_a_percent(case: dict[str, Any]) -> None:
    """vllm-project/vllm#10517, from the two digits of its log."""
    given, expect = case["given"], case["expect"]
    for size, count, longest in zip(given["kv_gib"], expect["blocks"], given["max_model_len"], strict=True):
        sized = ps.size(
            model=given["model"],
            engine="vllm",
            gpu="RTX 3090",
            max_model_len=longest,
            kv_cache_memory_bytes=int(size * GIB),
        )
        assert sized.pool_tokens == pytest.approx(count * given["block_size"], rel=0.01)


@named("qwen25-7b-planner")
def test_a_request_of_3072_tokens(case: dict[str, Any]) -> None:
    """vllm-project/vllm#22291."""
    given, expect = case["given"], case["expect"]
    sized = ps.size(model=given["model"], kv_cache_dtype=given["kv_dtype"], max_total_tokens=given["tokens"])
    assert sized.kv_bytes_per_token == expect["bytes_per_token"]
    assert f"{sum(rows(sized).values()) / GIB:.3f}" == f"{expect['request_gib']:.3f}"


@named("qwen35-hybrid")
def test_groups_of_a_hybrid_model_share_the_blocks(case: dict[str, Any]) -> None:
    """vllm-project/vllm#40691, on the hybrid model whose state makes blocks of that size."""
    given, expect = case["given"], case["expect"]
    sized = ps.size(
        model="Qwen3.5-27B",
        engine="vllm",
        gpu="H100",
        enable_prefix_caching=False,
        max_model_len=given["max_model_len"],
        num_gpu_blocks_override=given["blocks"],
    )
    assert sized.kv_cache_groups == given["groups"]
    assert sum("state" in pool.name for pool in sized.pools) == given["state_groups"]
    assert sized.page_size == given["block_size"]
    assert sized.pool_tokens == expect["tokens"]
    assert sized.max_concurrency is not None
    assert f"{sized.max_concurrency:.2f}" == f"{expect['concurrency']:.2f}"


@named("mla-replicated")
def test_a_latent_row_is_replicated_by_tensor_parallelism_and_divided_by_data_parallelism(case: dict[str, Any]) -> None:
    """vllm-project/recipes#762."""
    given = case["given"]
    assert case["expect"]["law"] == "MLA KV is replicated under tensor parallelism"
    wide = {"model": "DeepSeek-R1", "engine": "vllm", "gpu": "B200", "max_model_len": 131072}
    tensor = ps.size(**wide, tensor_parallel_size=8)
    data = ps.size(**wide, data_parallel_size=8, enable_expert_parallel=True)
    assert tensor.kv_bytes_per_token == data.kv_bytes_per_token
    assert tensor.max_concurrency is not None
    assert data.max_concurrency is not None
    told = given["concurrency_dp8"] / given["concurrency_tp8"]
    assert 7 < told < 8
    # Eight copies of the attention weights cost what keeps it below eight.
    assert 6.5 < 8 * data.max_concurrency / tensor.max_concurrency < 8


@named("no-room")
def test_a_card_that_the_weights_and_activations_overfill(case: dict[str, Any]) -> None:
    """vllm-project/vllm#13882."""
    given, expect = case["given"], case["expect"]
    sizes = {name: int(given[f"{name}_gib"] * GIB) for name in ("weights", "non_torch", "activations")}
    asked = int(given["gpu_gib"] * GIB) * given["utilization"]
    left = vllm.kv_memory(asked, sizes["weights"], sizes["non_torch"], sizes["activations"])
    assert gib(left) == f"{expect['kv_gib']:.2f}"
    sized = ps.size(
        model="Qwen2.5-7B",
        engine="vllm",
        gpu_memory_bytes=int(given["gpu_gib"] * GIB),
        gpu_memory_utilization=given["utilization"],
        weights_bytes_per_rank=sizes["weights"],
        non_torch_bytes=sizes["non_torch"],
        activation_bytes=sizes["activations"],
        enforce_eager=True,
    )
    assert sized.verdict == expect["verdict"]
    assert sized.error is not None
    assert sized.error.startswith("No available memory for the cache blocks.")


@named("oversubscribed")
def test_requests_of_full_length_that_a_pool_holds(case: dict[str, Any]) -> None:
    """sgl-project/sglang#29575."""
    given, expect = case["given"], case["expect"]
    sized = ps.size(
        model="GLM-5",
        gpu="B200",
        max_total_tokens=given["tokens"] // 64 * 64,
        context_length=min(given["context_length"], 202752),
        max_running_requests=given["max_running_requests"],
        **ROOMY,
    )
    assert sized.max_running_requests == given["max_running_requests"]
    assert sized.pool_tokens is not None
    assert f"{vllm_free_length(given):.2f}" == f"{expect['full_length_requests']:.2f}"
    assert sized.full_length_requests is not None
    assert sized.full_length_requests < given["max_running_requests"]


def vllm_free_length(given: dict[str, Any]) -> float:
    """The same pool under a model whose context is as long as the report's."""
    sized = ps.size(model="Qwen3.5-27B", max_total_tokens=given["tokens"], context_length=given["context_length"])
    assert sized.full_length_requests is not None
    return sized.full_length_requests
