"""Single decisions, against figures derived by hand from the engine's rules."""

from __future__ import annotations

import pytest

from pagestorm.engine.request import Request
from pagestorm.engine.sglang import (
    AdmissionView,
    Capacity,
    NewTokenRatio,
    admit,
    out_of_memory_text,
    ratio_after_retraction,
    retract,
)


def waiting(number: int, input_tokens: int, max_new: int, **more: int | bool) -> Request:
    return Request(number, 0, input_tokens, max_new, max_new, max_new_tokens=max_new, target=max_new, **more)  # type: ignore[arg-type]  # keywords of one type each


def view(*requests: Request, **change: object) -> AdmissionView:
    facts: dict[str, object] = {
        "waiting": requests,
        "chunked": None,
        "available_tokens": 1000,
        "ratio": 0.5,
        "page_size": 10,
        "chunk_tokens": 400,
        "max_prefill_tokens": 16384,
        "free_rows": 8,
        "max_running": 8,
        "full": False,
        "decoding": [],
    }
    return AdmissionView(**{**facts, **change})  # type: ignore[arg-type]  # a test's shorthand


class TestArrival:
    def test_a_prompt_at_the_limit_is_refused_and_one_below_is_not(self) -> None:
        capacity = Capacity(pool_tokens=1600, context_length=8192, page_size=16)
        # max_req_len = 1599, so prompts of 1594 tokens and more are refused.
        assert capacity.refusal(1593) == ""
        assert "Input length (1594 tokens) exceeds the maximum allowed length (1594 tokens)" in capacity.refusal(1594)

    @pytest.mark.parametrize(
        ("input_tokens", "asked", "clipped"),
        [
            (100, 50, 50),
            (100, 5000, 1471),  # 1600 - ceil_16(100) - 16 - 1
            (112, 5000, 1471),
            (113, 5000, 1455),
            (1593, 50, 0),
        ],
    )
    def test_the_output_is_clipped_to_what_the_pool_can_hold(self, input_tokens: int, asked: int, clipped: int) -> None:
        assert Capacity(1600, 8192, 16).clip(input_tokens, asked) == clipped

    def test_the_context_clips_too(self) -> None:
        assert Capacity(10_000, 500, 1).clip(100, 5000) == 500 - 1 - 100 - 1

    def test_the_emulated_engine_trusts_the_client(self) -> None:
        assert Capacity(1600, 8192, 16, clips_output=False).clip(100, 5000) == 5000


class TestRatio:
    def test_it_falls_by_repeated_subtraction_to_its_floor(self) -> None:
        ratio = NewTokenRatio(1.0)
        expected = ratio.init
        for _ in range(599):
            expected = expected - ratio.decay
        ratio.decay_steps(599)
        assert ratio.current == expected
        ratio.decay_steps(10)
        assert ratio.current == ratio.floor == 0.7 * 0.14

    def test_leaping_and_stepping_give_the_same_float(self) -> None:
        leapt, stepped = NewTokenRatio(0.37), NewTokenRatio(0.37)
        leapt.decay_steps(431)
        for _ in range(431):
            stepped.decay_steps(1)
        assert leapt.current == stepped.current

    def test_conservativeness_scales_the_start_up_to_one(self) -> None:
        assert NewTokenRatio(0.5).init == 0.35
        assert NewTokenRatio(2.0).init == 1.0
        assert NewTokenRatio(2.0).floor == 0.14

    def test_after_a_retraction_it_counts_what_was_generated(self) -> None:
        assert ratio_after_retraction([10, 30], [100, 100]) == (40 + 40) / 201
        assert ratio_after_retraction([500], [100]) == 1.0
        assert ratio_after_retraction([], []) == 0.0


class TestAdmission:
    def test_the_test_is_strict_and_counts_a_page_of_slack(self) -> None:
        # extend 100 + max_new 40 + page 10 = 150
        assert admit(view(waiting(0, 100, 40), available_tokens=150)).chosen == []
        assert len(admit(view(waiting(0, 100, 40), available_tokens=151)).chosen) == 1

    def test_the_second_sees_what_the_first_was_charged(self) -> None:
        # The first is charged ceil(95) + 10 + 40 = 150; the second asks 95 + 40 + 10 = 145.
        two = waiting(0, 95, 40), waiting(1, 95, 40)
        assert admit(view(*two, available_tokens=295)).admitted == 1
        assert admit(view(*two, available_tokens=296)).admitted == 2

    def test_running_requests_keep_their_share_of_what_is_left_to_generate(self) -> None:
        # 0.5 x (200 - 100) = 50 reserved; 150 asked.
        running = [(200, 100, False, 10)]
        assert admit(view(waiting(0, 100, 40), available_tokens=200, decoding=running)).admitted == 0
        assert admit(view(waiting(0, 100, 40), available_tokens=201, decoding=running)).admitted == 1
        fixed = [(200, 100, True, 10)]
        assert admit(view(waiting(0, 100, 40), available_tokens=201, decoding=fixed)).admitted == 0

    def test_a_refusal_for_tokens_shuts_admission_only_when_something_runs(self) -> None:
        refused = view(waiting(0, 2000, 40))
        assert admit(refused).full is False
        assert admit(view(waiting(0, 2000, 40), decoding=[(10, 1, False, 5)])).full is True

    def test_a_long_prompt_is_cut_at_whole_pages(self) -> None:
        first = admit(view(waiting(0, 500, 10), chunk_tokens=405))
        assert [(r.number, n) for r, n in first.chosen] == [(0, 400)]
        assert first.chunked is first.chosen[0][0]

    def test_a_cut_prompt_goes_first_and_takes_what_is_left_to_it(self) -> None:
        cut = waiting(0, 500, 10, computed=400, row=1)
        result = admit(view(waiting(1, 50, 10), chunked=cut))
        assert [(r.number, n) for r, n in result.chosen] == [(0, 100), (1, 50)]
        assert result.chunked is None
        assert result.admitted == 1

    def test_with_nothing_left_a_cut_prompt_still_takes_a_whole_chunk(self) -> None:
        cut = waiting(0, 2000, 10, computed=400, row=1)
        assert admit(view(chunked=cut, available_tokens=0)).chosen == [(cut, 400)]

    def test_no_more_than_the_rows_allow(self) -> None:
        result = admit(view(*(waiting(i, 10, 1) for i in range(5)), free_rows=3))
        assert result.admitted == 3
        assert result.full

    def test_used_up_chunk_tokens_end_the_batch_without_shutting_admission(self) -> None:
        result = admit(view(waiting(0, 395, 1), waiting(1, 10, 1)))
        assert result.admitted == 1
        assert not result.full

    def test_known_lengths_are_played_forward(self) -> None:
        # Two requests of 100 + 300 in 1000 tokens: at the end of the first 800 + 2 pages are in use.
        ignoring = [waiting(i, 100, 300, ignore_eos=True) for i in range(3)]
        assert admit(view(*ignoring, available_tokens=1000)).admitted == 2


class TestRetraction:
    def test_fewest_generated_goes_first_then_the_longest_input_then_the_later(self) -> None:
        result = retract("pages", [5, 3, 3, 3], [10, 20, 30, 30], [16, 16, 16, 16], 16, 0)
        # Each gives back one page. One victim leaves three that open a page, two leave two: fits.
        assert result.victims == [3, 2]
        assert result.kept == [0, 1]
        assert result.aborted is None

    def test_one_goes_even_if_the_step_would_fit_without(self) -> None:
        assert retract("pages", [5, 3], [10, 20], [17, 17], 16, 5).victims == [1]

    def test_a_single_one_stays_or_is_aborted(self) -> None:
        assert retract("pages", [5], [10], [15], 16, 0).kept == [0]
        assert retract("pages", [5], [10], [16], 16, 0).aborted == 0

    def test_the_old_token_check_stops_retracting_too_early(self) -> None:
        generated, inputs, committed = [9, 8, 7], [16, 16, 16], [32, 32, 32]
        assert retract("tokens", generated, inputs, committed, 16, 0).victims == [2]
        assert retract("pages", generated, inputs, committed, 16, 0).victims == [2]
        many = list(range(40, 0, -1))
        assert len(retract("tokens", many, [16] * 40, [16] * 40, 16, 0).victims) == 3
        assert len(retract("pages", many, [16] * 40, [16] * 40, 16, 0).victims) == 20


def test_the_words_operators_grep_for_are_the_engines_own() -> None:
    assert out_of_memory_text("decode", 64, 148, 2048) == (
        "Decode out of memory. Try to lower your batch size.\n"
        "Try to allocate 148 tokens.\n"
        "Available full tokens: 2048 (full_available_size=2048 + full_evictable_size_=0)\n"
    )
    assert out_of_memory_text("prefill", 64, 1, 0).startswith("Prefill out of memory. Try to lower your batch size.\n")
    assert out_of_memory_text("decode", 1, 1, 0).startswith("Out of memory. Try to lower your batch size.\n")
