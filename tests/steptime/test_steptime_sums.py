"""Whatever the model, runs are exact sums, starts are counted as a loop counts them, and nothing gets shorter."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pagestorm import catalog
from pagestorm.scenario.schema import Linear
from pagestorm.steptime import LinearStepTime, RooflineStepTime, StepTime

FULL_ATTENTION = [
    model
    for model in catalog.models()
    if model.full_attention_only and model.computed_params_total and model.computed_weight_bytes
]
COMPLETE_GPUS = [gpu for gpu in catalog.gpus() if gpu.bf16_dense_flops and gpu.hbm_bytes_per_s]


@st.composite
def linear_models(draw: st.DrawFn) -> StepTime:
    seconds = st.floats(0, 1, allow_nan=False)
    settings_ = Linear(
        base_s=draw(st.floats(1e-9, 1)),
        per_request_s=draw(seconds),
        per_context_token_s=draw(seconds),
        per_prefill_token_s=draw(seconds),
    )
    return LinearStepTime(settings_)


@st.composite
def roofline_models(draw: st.DrawFn) -> StepTime:
    model = draw(st.sampled_from(FULL_ATTENTION))
    step_time = RooflineStepTime(model, draw(st.sampled_from(COMPLETE_GPUS)), draw(st.sampled_from([1, 2])))
    if draw(st.booleans()):
        # Real models rarely cross between memory and arithmetic in a short run; these coefficients do.
        small = st.integers(0, 50)
        step_time.kv_token_fs = draw(small)
        step_time.decode_pair_fs = draw(small)
        step_time.token_fs = draw(st.integers(0, 500))
        step_time.head_fs = 0
        step_time.dense_weights_fs = draw(st.integers(0, 5000))
        step_time.all_weights_fs = step_time.dense_weights_fs
        step_time.overhead_fs = draw(st.integers(1, 1000))
    return step_time


step_times = linear_models() | roofline_models()
batches = st.integers(1, 300)
contexts = st.integers(1, 500_000)


@settings(deadline=None, max_examples=200)
@given(step_times, batches, contexts, st.integers(0, 200))
def test_a_run_takes_exactly_as_long_as_its_passes(model: StepTime, batch: int, context: int, steps: int) -> None:
    passes = [model.decode_fs(batch, context + batch * done) for done in range(steps)]
    assert model.decode_run_fs(batch, context, steps) == sum(passes)


@settings(deadline=None, max_examples=200)
@given(step_times, batches, contexts, st.integers(0, 60), st.floats(0, 80), st.integers(-2, 2))
def test_starts_are_counted_as_a_loop_counts_them(
    model: StepTime, batch: int, context: int, most: int, passes: float, off_by_fs: int
) -> None:
    limit_fs = int(passes * model.decode_fs(batch, context)) + off_by_fs
    start_fs, counted = 0, 0
    while counted < most and start_fs < limit_fs:
        start_fs += model.decode_fs(batch, context + batch * counted)
        counted += 1
    assert model.steps_within(batch, context, limit_fs, most) == counted


@settings(deadline=None, max_examples=100)
@given(step_times, batches, contexts, st.integers(1, 200))
def test_a_limit_at_the_start_of_a_pass_leaves_that_pass_out(
    model: StepTime, batch: int, context: int, steps: int
) -> None:
    start_fs = model.decode_run_fs(batch, context, steps)
    assert model.steps_within(batch, context, start_fs, steps + 5) == steps
    assert model.steps_within(batch, context, start_fs + 1, steps + 5) == steps + 1


@settings(deadline=None, max_examples=100)
@given(step_times, batches, contexts, st.integers(0, 50), st.integers(0, 5000))
def test_more_requests_and_more_context_never_take_less(
    model: StepTime, batch: int, context: int, more_requests: int, more_context: int
) -> None:
    assert model.decode_fs(batch + more_requests, context + more_context) >= model.decode_fs(batch, context)


@settings(deadline=None, max_examples=100)
@given(step_times, st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 9000)), min_size=1, max_size=6))
def test_a_prefill_of_more_requests_takes_longer_and_their_order_does_not_matter(
    model: StepTime, requests: list[tuple[int, int]]
) -> None:
    def prefill_fs(chosen: list[tuple[int, int]]) -> int:
        return model.prefill_fs([new for new, _ in chosen], [prefix for _, prefix in chosen])

    assert prefill_fs(requests) == prefill_fs(requests[::-1])
    assume(len(requests) > 1)
    assert prefill_fs(requests) >= prefill_fs(requests[1:])


def test_the_crossing_inside_a_run_is_seen_from_both_sides() -> None:
    """Memory first and then arithmetic, and the other way round, with the crossing on a pass and between two."""
    model = RooflineStepTime(catalog.model("Llama-3.1-8B"), catalog.gpu("H100"), 1)
    for kv_fs, pair_fs, weights_fs, token_fs in ((1, 7, 600, 0), (7, 1, 0, 600), (1, 7, 601, 0), (7, 1, 0, 601)):
        model.overhead_fs, model.head_fs = 1, 0
        model.dense_weights_fs = model.all_weights_fs = weights_fs
        model.kv_token_fs, model.decode_pair_fs, model.token_fs = kv_fs, pair_fs, token_fs
        memory_first = model.decode_fs(1, 1) == 1 + weights_fs + kv_fs
        memory_last = model.decode_fs(1, 300) == 1 + weights_fs + kv_fs * 300
        assert memory_first != memory_last, "no crossing: the test tests nothing"
        for steps in range(300):
            assert model.decode_run_fs(1, 1, steps) == sum(model.decode_fs(1, 1 + done) for done in range(steps))
