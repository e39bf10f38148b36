"""The verdict in words: the right sentence for every ending, and advice that holds when it is followed."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagestorm.diagnosis import Diagnosis, diagnose
from pagestorm.report.advice import smallest_pool_tokens
from pagestorm.report.verdict import BAD, GOOD, NOT_KEPT, WARNING, Verdict, verdict
from pagestorm.report.words import duration, percent, plural, printable, sentence, times
from pagestorm.runs import Result, run
from pagestorm.scenario import from_mapping
from tests.report.cases import CASES, CROWD, OUTGROWN, SMALL, TIGHT, burst, diagnosis, result, uniform


def judge(name: str) -> Verdict:
    return verdict(result(name).summary, diagnosis(name))


def simulate(engine: Mapping[str, object], workload: Mapping[str, object]) -> Result:
    return run(
        from_mapping(
            {
                "schema": 1,
                "name": "again",
                "engine": {"disable_radix_cache": True, **engine},
                "workload": workload,
            }
        )
    )


HEADLINES = {
    "calm": (GOOD, "held", "Memory held: at most 1,057 of 4,000 pages (26 %) were in use, and nothing was retracted."),
    "retracted": (
        WARNING,
        "retracted",
        "Memory ran short twice, and the server coped: 2 retractions hit 2 of 200 requests. All 200 requests finished.",
    ),
    "crashed": (
        BAD,
        "crashed",
        "The server would crash 9.7 s into the run: the decode pass needs 2 pages and 1 is free. 65 of 200 requests "
        "finished, 135 were still waiting or running.",
    ),
    "rejected": (WARNING, "rejected", "20 of 40 requests were refused on arrival; the other 20 finished."),
    "queued out": (WARNING, "rejected", "15 of 20 requests were refused on arrival; the other 5 finished."),
    "stalled": (
        BAD,
        "stalled",
        "The server would hang 0 s into the run: request 0 can never be admitted, and 2 more wait behind it. "
        "No request finished, 3 were still waiting or running.",
    ),
    "aborted": (BAD, "aborted", "1 request lost: the server gave up on it. The only request did not finish."),
    "one token": (GOOD, "held", "Memory held: at most 7 of 64 pages (11 %) were in use, and nothing was retracted."),
    "none served": (WARNING, "rejected", "All 3 requests were refused on arrival."),
}


@pytest.mark.parametrize("name", HEADLINES)
def test_every_ending_has_its_sentence(name: str) -> None:
    level, word, headline = HEADLINES[name]
    told = judge(name)
    assert (told.level, told.word) == (level, word)
    assert told.headline.startswith(headline)


@pytest.mark.parametrize("name", CASES)
def test_whatever_gave_way_is_explained_and_comes_with_advice(name: str) -> None:
    told = judge(name)
    assert bool(told.law) == bool(told.next_steps) == (told.level != GOOD)


def test_a_livelock_is_explained_by_its_last_burst() -> None:
    summary = {**result("retracted").summary, "outcome": "livelocked", "error": "1001 retractions in a row"}
    told = verdict(summary, diagnosis("retracted"))
    assert told.level == BAD
    assert "round in circles" in told.headline
    burst = diagnosis("retracted").last_burst
    assert burst is not None
    assert told.law == burst.law
    assert told.context[0].startswith("That was the worst of 2 bursts")


def test_a_refusal_to_start_is_told_in_the_engines_words() -> None:
    told = verdict({**result("calm").summary, "outcome": "refused", "error": "Not enough memory."}, diagnosis("calm"))
    assert told.headline == "The server would refuse to start: Not enough memory."
    assert told.level == BAD


def test_an_interrupted_run_is_no_success() -> None:
    told = verdict({**result("calm").summary, "unserved": 10, "finished": 40}, diagnosis("calm"))
    assert (told.level, told.word) == (WARNING, "stopped")
    assert "40 of 50 requests finished, 10 were still waiting or running." in told.headline


def test_a_run_that_was_stopped_between_two_requests_is_no_success_either() -> None:
    told = verdict(result("calm").summary, diagnosis("calm"), interrupted=True)
    assert (told.level, told.word) == (WARNING, "stopped")


def test_a_crash_keeps_the_message_that_operators_search_for() -> None:
    assert judge("crashed").engine_says == " ".join(str(result("crashed").summary["error"]).split())
    assert judge("crashed").engine_says.startswith("Decode out of memory. Try to lower your batch size.")


def test_what_it_cost_is_a_share_of_the_prefill_work() -> None:
    computed = sum(event[5] for event in result("retracted").raw_events if event[3] == "prefill")
    recomputed = result("retracted").summary["recomputed_tokens"]
    share = percent(recomputed, computed)
    assert (
        judge("retracted").cost
        == f"{recomputed:,} tokens computed twice, {share} of the {computed:,} tokens prefilled."
    )


def test_without_the_record_the_verdict_still_stands_and_says_what_is_missing() -> None:
    for name in CASES:
        told = verdict(result(name).summary, Diagnosis.of(result(name).scenario))
        assert told.level == judge(name).level
        if told.level != GOOD:
            assert NOT_KEPT in told.context


# --- advice that is followed -----------------------------------------------------------------------------------


def test_guarding_by_pages_turns_the_crash_into_a_retraction() -> None:
    assert "--set engine.decode_check=pages" in judge("crashed").next_steps[0]
    guarded = simulate({**TIGHT, "decode_check": "pages"}, CROWD)
    assert guarded.summary["outcome"] == "completed"
    assert guarded.summary["retractions"] >= 1


def test_page_size_1_cannot_fall_for_the_token_check() -> None:
    assert "--page-size 1:" in judge("crashed").next_steps[1]
    assert simulate({**TIGHT, "page_size": 1, "decode_check": "tokens"}, CROWD).summary["decode_oom"] == 0


def test_raising_conservativeness_where_it_is_advised_retracts_less() -> None:
    assert "(now 0.1; from 1.43 on it changes nothing)" in judge("retracted").next_steps[0]
    reserved = simulate({**TIGHT, "schedule_conservativeness": 1.43}, CROWD)
    assert reserved.summary["retractions"] < result("retracted").summary["retractions"]
    beyond = simulate({**TIGHT, "schedule_conservativeness": 50.0}, CROWD)
    same = simulate({**TIGHT, "schedule_conservativeness": 1 / 0.7}, CROWD)
    assert beyond.summary["events_digest"] == same.summary["events_digest"]
    told = verdict(beyond.summary | {"retractions": 1}, diagnose(beyond.raw_events, beyond.summary, beyond.scenario))
    assert not any("conservativeness" in step for step in told.next_steps)


def test_conservativeness_is_no_advice_where_the_output_length_is_known() -> None:
    known = run(
        from_mapping(
            {
                "schema": 1,
                "name": "known",
                "engine": {"disable_radix_cache": True, **TIGHT},
                "workload": {**CROWD, "ignore_eos": True},
            }
        )
    )
    told = verdict(known.summary | {"retractions": 1}, diagnose(known.raw_events, known.summary, known.scenario))
    assert told.next_steps
    assert not any("conservativeness" in step for step in told.next_steps)


def test_the_clip_of_admission_is_named_where_outputs_passed_it() -> None:
    long = simulate(
        {"page_size": 16, "max_total_tokens": 19_200, "context_length": 100_000},
        burst(6, 100, uniform(4000, 9000), max_new_tokens=9000),
    )
    found = diagnose(long.raw_events, long.summary, long.scenario)
    told = verdict(long.summary, found)
    assert long.summary["retractions"]
    assert any(fact.startswith("Admission clip: it counts at most 4,096") for fact in told.context)
    assert any("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION" in step for step in told.next_steps)


@given(page=st.sampled_from([1, 2, 5, 16, 64]), tokens=st.integers(1, 700))
@settings(deadline=None, max_examples=40)
def test_the_pool_that_is_advised_for_a_prompt_is_the_smallest_that_serves_it(page: int, tokens: int) -> None:
    pool = smallest_pool_tokens(tokens, page)

    def serves(pool_tokens: int) -> bool:
        engine = {"page_size": page, "max_total_tokens": pool_tokens, "chunked_prefill_size": -1}
        return bool(simulate(engine, burst(1, tokens, 1)).summary["finished"])

    assert serves(pool)
    if pool - page >= page and (pool - page) // 2 >= 1:
        assert not serves(pool - page)


def test_the_pool_that_is_advised_ends_a_stall() -> None:
    advised = [step for step in judge("stalled").next_steps if "pool of at least 1,040 tokens" in step]
    assert advised
    assert simulate({**SMALL, "max_total_tokens": 1040}, burst(3, 1012, 5)).summary["finished"] == 3


def test_the_context_that_is_advised_accepts_the_longest_refused_prompt() -> None:
    longest = diagnosis("rejected").tallies["rejection: prompt limit"].most_tokens
    told = judge("rejected").next_steps[0]
    assert f"--context-length {longest + 7} or more" in told
    room = {**SMALL, "max_total_tokens": 64_000}
    for context, rejected in ((longest + 7, 0), (longest + 6, 1)):
        assert simulate({**room, "context_length": context}, burst(1, longest, 1)).summary["rejected"] == rejected


def test_the_clip_that_is_advised_saves_the_lone_request() -> None:
    assert "Leave out emulate: no_output_clip" in judge("aborted").next_steps[0]
    clipped = simulate({**OUTGROWN, "emulate": []}, burst(1, 100, 30_000, max_new_tokens=20_000))
    assert clipped.summary["finished"] == 1


# --- words -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (0, 10, "0 %"),
        (10, 10, "100 %"),
        (1999, 2000, "99.9 %"),
        (1, 10**6, "< 0.01 %"),
        (1, 60, "1.7 %"),
        (1, 3, "33 %"),
        (0, 0, "0 %"),
    ],
)
def test_a_share_never_rounds_something_to_nothing_or_to_all(part: int, whole: int, text: str) -> None:
    assert percent(part, whole) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0, "0 s"),
        (2.5e-5, "25 us"),
        (0.0121, "12.1 ms"),
        (9.7, "9.7 s"),
        (2096.6, "34 min 57 s"),
        (7384, "2 h 03 min 04 s"),
        (864_000, "10 days"),
    ],
)
def test_times_read_as_people_say_them(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_counts_agree_with_their_nouns() -> None:
    assert [plural(n, "page") for n in (0, 1, 1200)] == ["0 pages", "1 page", "1,200 pages"]
    assert [times(n) for n in (1, 2, 1400)] == ["once", "twice", "1,400 times"]
    assert sentence("page check: no") == "Page check: no."


def test_control_characters_are_not_printed() -> None:
    assert printable("a\x1b[31mb\n\u202ec") == "a\N{REPLACEMENT CHARACTER}[31mb \N{REPLACEMENT CHARACTER}c"
