"""Public reports on paging, plain decode. Threads are named in shared/cases/public.yaml and in each test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagestorm as ps
from pagestorm.engine.sglang import decode_fits, pages_to_open
from pagestorm.memory.counting import CountingLedger
from pagestorm.scenario import from_mapping
from tests.cases.public import cases
from tests.engine.drive import Ask, Drive, drive


@pytest.fixture
def case(request: pytest.FixtureRequest, shared: Path) -> dict[str, Any]:
    """The case that a test names with `@pytest.mark.case`."""
    return cases(shared, "paging")[request.param]


def named(case_id: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [case_id], indirect=True)


def pool_pages(tokens: int, page_size: int) -> int:
    """Whole pages in that many tokens, as a scenario's pool has them."""
    scenario = from_mapping(
        {
            "schema": 1,
            "name": "pool",
            "engine": {
                "kind": "sglang",
                "page_size": page_size,
                "max_total_tokens": tokens,
                "chunked_prefill_size": -1,
                "disable_radix_cache": True,
            },
            "workload": {"num_requests": 1, "arrivals": {"process": "burst"}, "input_tokens": 1, "output_tokens": 1},
        }
    )
    return scenario.engine.pool_pages


def most_openings_served(running: int, page_size: int, free_pages: int) -> int:
    """The largest number of requests that can open a page in one decode step of a pool with that many free pages."""
    served = -1
    for opening in range(running + 1):
        ledger = CountingLedger(running + free_pages, page_size, running + 1)
        owners = np.arange(1, running + 1)
        lengths = np.where(np.arange(running) < opening, page_size, page_size - 1)
        assert ledger.extend(owners, lengths) == running
        if ledger.decode(owners, 1) is None:
            break
        served = opening
    return served


@named("token-check-page-64")
def test_the_token_check_says_yes_to_what_the_pool_cannot_serve(case: dict[str, Any]) -> None:
    """sgl-project/sglang#4602."""
    given, expect = case["given"], case["expect"]
    free = pool_pages(given["free_tokens"], given["page_size"])
    assert free == expect["free_pages"]
    asked = (given["running"], given["running"], given["page_size"], free)
    assert decode_fits("tokens", *asked) == (expect["decode_check_tokens_says"] == "fits")
    limit = expect["decode_fails_iff_requests_opening_a_page_exceed"]
    assert most_openings_served(given["running"], given["page_size"], free) == limit
    assert decode_fits("pages", given["running"], limit, given["page_size"], free)
    assert not decode_fits("pages", given["running"], limit + 1, given["page_size"], free)


@named("retraction-must-repeat")
def test_one_retraction_may_not_be_enough(case: dict[str, Any]) -> None:
    """sgl-project/sglang PR 6731."""
    given, expect = case["given"], case["expect"]
    for page_size in given["page_size"]:
        before = pages_to_open([n - 1 for n in given["lengths_after_this_step"]], page_size)
        after = pages_to_open([n - 1 for n in given["lengths_left"]], page_size)
        assert before == expect["pages_needed_before"]
        assert after == expect["pages_needed_after_first_retraction"]
        again = not decode_fits("pages", len(given["lengths_left"]), after, page_size, given["free_pages"])
        assert again == expect["must_retract_again"]


@named("off-by-one-kv-length")
@pytest.mark.parametrize("mode", ["no_overlap", "overlap"])
def test_a_page_opens_where_the_stored_length_is_full(case: dict[str, Any], mode: str) -> None:
    """sgl-project/sglang#7411. The known length leads the stored one by a token without overlap, by none with it."""
    page_size = case["given"]["page_size"]
    lead = {"no_overlap": 1, "overlap": 0}[mode]
    for name, opens in case["expect"][mode].items():
        known = int(name.removeprefix("seq_len_").removesuffix("_opens_page"))
        # A prompt whose first decode step is planned at that known length.
        prompt = known - lead
        driven = drive(
            Drive([Ask(prompt, 3, 3)], page_size=page_size, pages=10, overlap=mode == "overlap"), step_only=True
        )
        first = next(e for e in driven.events if e[3] == "leap")
        assert (first[6] == 1) == opens, (mode, known)


@named("tpu-127")
def test_a_tpu_pool_of_2012_pages(case: dict[str, Any]) -> None:
    """sgl-project/sglang-jax#113."""
    given, expect = case["given"], case["expect"]
    assert pool_pages(given["max_total_tokens"], given["page_size"]) == expect["pool_pages"]
    free = pool_pages(given["free_tokens"], given["page_size"])
    assert free == expect["free_pages"]
    limit = expect["fails_iff_requests_opening_a_page_exceed"]
    assert most_openings_served(given["running"], given["page_size"], free) == limit


@named("page-size-ab")
@pytest.mark.parametrize("page_size", [16, 32])
def test_the_same_tokens_fail_at_page_32_and_hold_at_page_16(case: dict[str, Any], page_size: int) -> None:
    """marin-community/marin#1838, by hand and as the shipped scenarios."""
    given, expect = case["given"], case["expect"][f"page_{page_size}"]
    free = pool_pages(given["free_tokens"], page_size)
    assert free == expect["free_pages"]
    fits = decode_fits("pages", given["running"], given["running"], page_size, free)
    assert fits != expect["can_fail"]
    summary = ps.run(ps.load(f"page-{page_size}"), ["sim"]).summary
    assert (summary["retractions"] > 0) == expect["can_fail"]


@named("prefill-slack")
def test_prompts_take_up_to_a_page_less_one_slot_more_than_their_tokens(case: dict[str, Any]) -> None:
    """sgl-project/sglang#7353."""
    given, expect = case["given"], case["expect"]
    ledger = CountingLedger(1000, given["page_size"], given["sequences"])
    tokens = np.full(given["sequences"], given["page_size"] + 1)
    pages = ledger.extend(np.arange(given["sequences"]), tokens)
    assert pages is not None
    assert pages * given["page_size"] - int(tokens.sum()) == expect["slots_beyond_token_count_up_to"]


@pytest.mark.parametrize("case", ["token-check-page-64", "tpu-127"], indirect=True)
def test_an_off_by_one_in_the_product_fails_the_exact_cases(
    case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The canary of the cases: a ledger that opens its pages one slot late serves another number of openings."""

    def late(self: CountingLedger, old: Any, more: Any) -> int:
        ends = old + (self.page_size - 2)
        return int(((ends + more) // self.page_size - ends // self.page_size).sum())

    monkeypatch.setattr(CountingLedger, "_opened", late)
    given, expect = case["given"], case["expect"]
    limit = next(value for key, value in expect.items() if "requests_opening_a_page_exceed" in key)
    free = pool_pages(given["free_tokens"], given["page_size"])
    with pytest.raises(AssertionError):
        assert most_openings_served(given["running"], given["page_size"], free) == limit
