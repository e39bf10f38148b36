"""What is left out gets the engine's own default, every one of them visible."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagestorm import catalog
from pagestorm.errors import ScenarioError
from pagestorm.scenario.defaults import default_chunk_tokens, resolve
from pagestorm.scenario.loading import from_mapping
from pagestorm.scenario.schema import Linear, Roofline, Scenario, TraceArrivals, TraceLengths, VllmFlags, kind_of


def scenario(engine: dict[str, object] | None = None, **parts: object) -> Scenario:
    plain: dict[str, object] = {
        "name": "t",
        "engine": {"max_total_tokens": 10_000, "disable_radix_cache": True} | (engine or {}),
        "workload": {"num_requests": 1, "arrivals": {"process": "burst"}, "input_tokens": 5, "output_tokens": 5},
    }
    return resolve(from_mapping(plain | parts))


def test_without_model_and_hardware_the_documented_defaults_hold() -> None:
    resolved = scenario()
    engine = resolved.engine
    assert kind_of(engine) == "sglang"
    assert (engine.page_size, engine.chunked_prefill_size, engine.max_prefill_tokens) == (1, 8192, 16384)
    assert (engine.context_length, engine.max_running_requests) == (10_000, 2048)
    assert (engine.schedule_policy, engine.decode_check, engine.emulate) == ("fcfs", "pages", ())
    assert resolved.steptime == Linear(
        base_s=0.01, per_request_s=1e-4, per_context_token_s=2e-7, per_prefill_token_s=2e-5
    )
    assert (resolved.seed, resolved.pools, resolved.expect) == (0, ("sim",), {})


@pytest.mark.parametrize(
    ("pool", "page", "context", "asked", "rows"),
    [
        (10_000, 1, None, None, 2048),
        (1000, 1, None, None, 500),
        (1_000_000, 1, 8192, None, 4096),
        (50_000, 1, 8192, None, 3125),
        (1000, 64, None, None, 480),
        (1000, 1, None, 10, 10),
        (1000, 1, None, 900, 500),
    ],
)
def test_running_requests_are_capped_as_the_engine_does(
    pool: int, page: int, context: int | None, asked: int | None, rows: int
) -> None:
    resolved = scenario(
        {"max_total_tokens": pool, "page_size": page, "context_length": context, "max_running_requests": asked}
    )
    assert resolved.engine.max_running_requests == rows


def test_the_pool_is_whole_pages() -> None:
    engine = scenario({"max_total_tokens": 1000, "page_size": 64}).engine
    assert (engine.pool_pages, engine.pool_tokens, engine.context_length) == (15, 960, 960)


@pytest.mark.parametrize(
    ("gpu", "chunk"),
    [
        ("A10G", 4096),
        ("RTX 4090", 4096),
        ("RTX 5090", 4096),
        ("A100-40GB", 4096),
        ("L40S", 4096),
        ("H100", 8192),
        ("H20", 8192),
        ("H200", 8192),
        ("B200", 16384),
        ("MI300X", 16384),
        ("TPU v5e", 2048),
    ],
)
def test_chunks_follow_the_memory_of_the_gpu_as_in_the_engine(gpu: str, chunk: int) -> None:
    assert default_chunk_tokens(catalog.gpu(gpu)) == chunk
    assert scenario(hardware={"gpu": gpu}).engine.chunked_prefill_size == chunk
    assert scenario({"chunked_prefill_size": -1}, hardware={"gpu": gpu}).engine.chunked_prefill_size == -1


def test_the_memory_classes_are_those_of_the_engine_source() -> None:
    """By class: below 20, 35, 60, 90, 160 GiB and above (sglang 0.5.23, arg_groups/memory_hook.py)."""
    gib = [(19, 2048), (20, 4096), (34, 4096), (35, 4096), (59, 4096), (60, 8192), (89, 8192), (90, 8192), (159, 8192)]
    for memory, chunk in [*gib, (160, 16384), (300, 16384)]:
        gpu = catalog.Gpu(name="x", source="", memory_bytes=memory << 30)
        assert default_chunk_tokens(gpu) == chunk
    assert default_chunk_tokens(catalog.Gpu(name="x", source="")) == 4096


def test_model_and_gpu_give_names_context_and_roofline() -> None:
    resolved = scenario(model="llama 3.1 8b", hardware={"gpu": "h100"})
    assert resolved.model == "Llama-3.1-8B"
    assert resolved.hardware is not None
    assert (resolved.hardware.gpu, resolved.hardware.tp_size) == ("H100-80GB SXM", 1)
    assert (resolved.engine.context_length, resolved.steptime) == (131072, Roofline())
    assert scenario(model="Llama-3.1-8B").steptime == Linear()


def test_requests_take_what_the_workload_says_unless_they_say_it_themselves() -> None:
    listed = [
        {"at_s": 0, "input_tokens": 1, "output_tokens": 2},
        {"at_s": 0, "input_tokens": 1, "output_tokens": 2, "max_new_tokens": 9, "ignore_eos": False},
        {"at_s": 0, "input_tokens": 1, "output_tokens": 2, "max_new_tokens": "engine"},
    ]
    workload = scenario(workload={"requests": listed, "ignore_eos": True, "max_new_tokens": 7}).workload
    assert workload.num_requests == 3
    assert [(each.max_new_tokens, each.ignore_eos) for each in workload.requests or ()] == [
        (7, True),
        (9, False),
        (128, True),
    ]
    own = scenario(workload={"requests": listed[:1]}).workload
    assert own.requests is not None
    assert own.requests[0].max_new_tokens is None, "None is the request's own output_tokens"


def test_a_trace_gives_whatever_is_not_given_otherwise(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,1,2\n")
    trace = {"format": "azure", "path": str(tmp_path / "t.csv")}
    workload = scenario(workload={"trace": trace, "output_tokens": 7}).workload
    assert (workload.arrivals, workload.input_tokens, workload.output_tokens) == (TraceArrivals(), TraceLengths(), 7)


def test_the_engine_default_of_max_new_tokens_is_spelled_out() -> None:
    plain = {"num_requests": 1, "arrivals": {"process": "burst"}, "input_tokens": 5, "output_tokens": 5}
    assert scenario(workload=plain | {"max_new_tokens": "engine"}).workload.max_new_tokens == 128


def test_an_unknown_name_has_a_key_when_there_is_no_file() -> None:
    with pytest.raises(ScenarioError, match="unknown model") as caught:
        scenario(model="nobody")
    assert caught.value.key == "model"
    with pytest.raises(ScenarioError, match="unknown GPU") as caught:
        scenario(hardware={"gpu": "nothing"})
    assert caught.value.key == "hardware.gpu"


@settings(deadline=None, max_examples=60)
@given(
    st.integers(2, 10**6),
    st.sampled_from([1, 2, 16, 64]),
    st.none() | st.integers(1, 10**6),
    st.none() | st.sampled_from(["H100", "B200", "L4"]),
    st.none() | st.sampled_from(["Llama-3.1-8B", "DeepSeek-V3"]),
)
def test_resolving_twice_changes_nothing(
    pool: int, page: int, rows: int | None, gpu: str | None, model: str | None
) -> None:
    engine: dict[str, object] = {"max_total_tokens": max(pool, page * 2), "page_size": page}
    hardware = {"gpu": gpu} if gpu else None
    resolved = scenario(engine | {"max_running_requests": rows}, hardware=hardware, model=model)
    assert resolve(resolved) == resolved


class TestVllm:
    """Defaults of vLLM's server (vllm 0.33.0, `engine/arg_utils.py`)."""

    @staticmethod
    def resolved(engine: dict[str, object] | None = None, **more: object) -> VllmFlags:
        found = resolve(
            from_mapping(
                {
                    "name": "vllm",
                    "engine": {"kind": "vllm", "num_gpu_blocks_override": 20_000, **(engine or {})},
                    "workload": {
                        "num_requests": 1,
                        "arrivals": {"process": "burst"},
                        "input_tokens": 1,
                        "output_tokens": 1,
                    },
                    **more,
                }
            )
        ).engine
        assert isinstance(found, VllmFlags)
        return found

    def test_without_hardware_the_small_tier_holds(self) -> None:
        flags = self.resolved()
        assert (flags.max_num_seqs, flags.max_num_batched_tokens, flags.block_size) == (256, 2048, 16)
        assert flags.enable_prefix_caching
        assert flags.max_model_len == 19_999 * 16

    @pytest.mark.parametrize(
        ("gpu", "seqs", "tokens"), [("H100-80GB", 1024, 8192), ("A100-80GB", 256, 2048), ("B200", 1024, 16384)]
    )
    def test_by_gpu_memory(self, gpu: str, seqs: int, tokens: int) -> None:
        flags = self.resolved(hardware={"gpu": gpu})
        assert (flags.max_num_seqs, flags.max_num_batched_tokens) == (seqs, tokens)

    @pytest.mark.parametrize(
        ("engine", "key"),
        [
            ({"max_num_batched_tokens": 8}, "engine.max_num_batched_tokens"),
            ({"max_model_len": 10**6}, "engine.max_model_len"),
            ({"async_scheduling": True}, "engine.async_scheduling"),
            ({"page_size": 16}, "engine.page_size"),
        ],
    )
    def test_what_the_engine_would_refuse_names_the_flag(self, engine: dict[str, object], key: str) -> None:
        with pytest.raises(ScenarioError) as caught:
            self.resolved(engine)
        assert caught.value.key == key

    def test_page_ids_cannot_follow_its_prefix_cache(self) -> None:
        with pytest.raises(ScenarioError) as caught:
            self.resolved(pools=["sim", "torch"])
        assert "enable_prefix_caching" in caught.value.message
        self.resolved({"enable_prefix_caching": False}, pools=["sim", "torch"])
