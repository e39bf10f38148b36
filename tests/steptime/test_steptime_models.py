"""What the step-time models say: their formulas, their facts, and how near the roofline is to published figures."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from statistics import median

import pytest

from pagestorm import catalog
from pagestorm.errors import ScenarioError
from pagestorm.scenario.defaults import resolve
from pagestorm.scenario.loading import from_mapping
from pagestorm.scenario.schema import Linear, Scenario
from pagestorm.steptime import FS_PER_S, LinearStepTime, RooflineStepTime, build

SYSTEMS = {"a100_sxm": "A100-80GB SXM", "h100_sxm": "H100-80GB SXM", "h200_sxm": "H200 SXM", "b200_sxm": "B200 SXM"}


def scenario(**parts: object) -> Scenario:
    plain: dict[str, object] = {
        "name": "t",
        "engine": {"max_total_tokens": 10_000, "disable_radix_cache": True},
        "workload": {"num_requests": 1, "arrivals": {"process": "burst"}, "input_tokens": 5, "output_tokens": 5},
    }
    return resolve(from_mapping(plain | parts))


def test_the_default_is_the_linear_model_of_the_documentation_to_the_femtosecond() -> None:
    model = build(scenario())
    assert isinstance(model, LinearStepTime)
    assert model.decode_fs(3, 1000) == 10 * 10**12 + 3 * 10**11 + 1000 * 2 * 10**8
    assert model.prefill_fs([10, 20], [100, 0]) == 10 * 10**12 + 2 * 10**11 + 130 * 2 * 10**8 + 30 * 2 * 10**10


def test_coefficients_are_rounded_to_the_femtosecond_once() -> None:
    model = LinearStepTime(Linear(base_s=1 / 3, per_request_s=0, per_context_token_s=1.4e-15, per_prefill_token_s=0))
    assert model.decode_fs(1, 1000) == 333_333_333_333_333 + 1000
    assert FS_PER_S == 10**15


def test_model_and_hardware_together_mean_roofline() -> None:
    built = build(scenario(model="Llama-3.1-8B", hardware={"gpu": "H100"}))
    assert isinstance(built, RooflineStepTime)


def test_a_small_decode_reads_all_weights_but_the_input_embedding_once() -> None:
    model, gpu = catalog.model("Llama-3.1-8B"), catalog.gpu("H100")
    assert model.computed_params_active is not None
    assert gpu.hbm_bytes_per_s is not None
    read_s = (2 * model.computed_params_active + 131072) / (gpu.hbm_bytes_per_s * 0.85)
    step_s = RooflineStepTime(model, gpu, 1).decode_fs(1, 1) / FS_PER_S
    assert step_s == pytest.approx(0.5e-3 + 32 * 30e-6 + read_s, rel=1e-9)


def test_a_long_prompt_is_arithmetic_with_a_quadratic_part() -> None:
    model, gpu = catalog.model("Llama-3.1-8B"), catalog.gpu("H100")
    assert model.computed_params_active is not None
    assert gpu.bf16_dense_flops is not None
    n, head = 8192, 128256 * 4096
    flop = 2 * (model.computed_params_active - head) * n + 2 * head + 4 * 32 * 128 * 32 * n * (n + 1) // 2
    step_s = RooflineStepTime(model, gpu, 1).prefill_fs([n], [0]) / FS_PER_S
    assert step_s == pytest.approx(0.5e-3 + 32 * 30e-6 + flop / (gpu.bf16_dense_flops * 0.6), rel=1e-6)


def test_a_prefix_costs_attention_but_no_arithmetic_of_its_own() -> None:
    model = RooflineStepTime(catalog.model("Llama-3.1-8B"), catalog.gpu("H100"), 1)
    whole, tail = model.prefill_fs([8192], [0]), model.prefill_fs([4096], [4096])
    head = model.prefill_fs([4096], [0])
    assert head < tail < whole
    pairs = 4096 * 4096
    assert tail - head == model.prefill_pair_fs * pairs


def test_a_mixture_of_experts_reads_more_experts_for_more_tokens_until_it_reads_all() -> None:
    model = RooflineStepTime(catalog.model("Qwen3-30B-A3B"), catalog.gpu("H100"), 1)
    step = [model.decode_fs(batch, 1) for batch in (1, 2, 16, 17)]
    assert step[1] - step[0] > model.expert_weights_fs * 0.99
    assert step[3] - step[2] < model.expert_weights_fs / 100, "128 experts, 8 a token: 16 tokens read them all"


def test_ranks_share_weights_and_arithmetic_and_repeat_latent_rows() -> None:
    model, gpu = catalog.model("DeepSeek-V3"), catalog.gpu("H200")
    one, eight = RooflineStepTime(model, gpu, 1), RooflineStepTime(model, gpu, 8)
    assert eight.all_weights_fs == pytest.approx(one.all_weights_fs / 8, rel=1e-9)
    assert eight.prefill_pair_fs == pytest.approx(one.prefill_pair_fs / 8, rel=1e-6)
    assert eight.kv_token_fs == one.kv_token_fs
    dense = catalog.model("Llama-3.1-70B")
    assert RooflineStepTime(dense, gpu, 8).kv_token_fs == pytest.approx(
        RooflineStepTime(dense, gpu, 1).kv_token_fs / 8, rel=1e-6
    )


def test_fp8_weights_use_the_fp8_rate_where_there_is_one() -> None:
    model = catalog.model("DeepSeek-V3")
    h100, a100 = (RooflineStepTime(model, catalog.gpu(name), 8) for name in ("H100", "A100-80GB"))
    assert a100.token_fs / h100.token_fs == pytest.approx(1978 / 312, rel=1e-6)


@pytest.mark.parametrize(
    ("model", "gpu", "key"),
    [("DeepSeek-V4-Pro", "H100", "model"), ("Llama-3.1-8B", "A10G", "hardware.gpu")],
)
def test_a_missing_fact_is_named_with_the_way_out(model: str, gpu: str, key: str) -> None:
    with pytest.raises(ScenarioError, match="linear") as caught:
        RooflineStepTime(catalog.model(model), catalog.gpu(gpu), 1)
    assert caught.value.key == key


def test_an_unresolved_scenario_is_refused() -> None:
    plain: dict[str, object] = {
        "name": "t",
        "engine": {"max_total_tokens": 10_000, "disable_radix_cache": True},
        "workload": {"num_requests": 1, "arrivals": {"process": "burst"}, "input_tokens": 5, "output_tokens": 5},
    }
    with pytest.raises(ScenarioError, match="resolve"):
        build(from_mapping(plain))


def test_roofline_is_as_near_the_published_step_times_as_its_documentation_says(shared: Path) -> None:
    ratios: dict[tuple[str, str], list[float]] = {}
    with (shared / "data/steptime/aic_0.12.0_step_grid.csv").open() as stream:
        for row in csv.DictReader(stream):
            if row["backend"] == "sglang" and row["system"] in SYSTEMS and row["kind"] in ("decode", "prefill"):
                measured_fs = float(row["step_ms"]) / 1e3 * FS_PER_S
                ratios.setdefault((row["system"], row["kind"]), []).append(_predicted_fs(row) / measured_fs)
    every = [ratio for each in ratios.values() for ratio in each]
    assert len(every) > 600
    assert median(abs(math.log(ratio)) for ratio in every) < math.log(1.10)
    assert 0.65 < median(ratios["a100_sxm", "decode"]) < 0.8
    for system in ("h100_sxm", "h200_sxm", "b200_sxm"):
        assert 0.9 < median(ratios[system, "decode"]) < 1.1


def _predicted_fs(row: dict[str, str]) -> int:
    name = row["model"].removeprefix("meta-llama/Meta-")
    model = RooflineStepTime(catalog.model(name), catalog.gpu(SYSTEMS[row["system"]]), int(row["tp"]))
    if row["kind"] == "decode":
        return model.decode_fs(int(row["num_decode"]), int(row["sum_decode_kv_tokens"]))
    return model.prefill_fs([int(row["prefill_tokens"])], [int(row["prefill_cached_tokens"])])
