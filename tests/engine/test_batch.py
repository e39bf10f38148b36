"""The batch's clocks and ordered structures against sums over its members."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pagestorm.engine.batch import RunningBatch
from pagestorm.engine.request import Request
from pagestorm.engine.sglang import decode_fits, decode_horizon, pages_to_open

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=20)


def batch_of(lengths: list[int], page_size: int, overlap: bool = False) -> RunningBatch:
    batch = RunningBatch(page_size, leaves_early=overlap)
    batch.launched = 37
    requests = [Request(i, 0, n, 500, 500, max_new_tokens=500, target=500, row=i + 1) for i, n in enumerate(lengths)]
    batch.join(requests, lengths, pending=0)
    return batch


def steps_by_hand(check: str, lengths: list[int], page_size: int, free: int) -> int:
    """Take one step after another until the guard says no or a page is missing."""
    steps = 0
    while True:
        opening = sum(1 for n in lengths if n % page_size == 0)
        if not decode_fits(check, len(lengths), opening, page_size, free) or opening > free:
            return steps
        free -= opening
        lengths = [n + 1 for n in lengths]
        steps += 1


@settings(deadline=None)
@given(LENGTHS, st.sampled_from([1, 2, 16, 64]), st.integers(0, 60), st.integers(0, 40))
def test_pages_last_exactly_as_long_as_stepping_says(lengths: list[int], page_size: int, free: int, ahead: int) -> None:
    batch = batch_of(lengths, page_size)
    batch.launched += ahead
    assert batch.page_steps(free) == steps_by_hand("none", [n + ahead for n in lengths], page_size, free)


@settings(deadline=None)
@given(LENGTHS, st.sampled_from([1, 2, 16, 64]), st.integers(0, 60), st.sampled_from(["pages", "tokens", "none"]))
def test_horizon_is_the_last_step_before_the_guard_or_the_pool_says_no(
    lengths: list[int], page_size: int, free: int, check: str
) -> None:
    batch = batch_of(lengths, page_size)
    assert decode_horizon(check, batch, page_size, free) == steps_by_hand(check, lengths, page_size, free)


@settings(deadline=None)
@given(st.data(), st.sampled_from([1, 4, 16]))
def test_lengths_and_openings_survive_joins_and_leaves(data: st.DataObject, page_size: int) -> None:
    batch = RunningBatch(page_size, leaves_early=False)
    lengths: dict[int, int] = {}
    number = 0
    for _ in range(data.draw(st.integers(1, 12))):
        if batch.requests and data.draw(st.booleans()):
            leaving = data.draw(st.lists(st.sampled_from(batch.requests), unique_by=id, min_size=1))
            batch.leave(leaving)
            for request in leaving:
                del lengths[request.number]
        else:
            joining = data.draw(st.lists(st.integers(1, 100), min_size=1, max_size=4))
            requests = [
                Request(number + i, 0, n, 500, 500, max_new_tokens=500, target=500) for i, n in enumerate(joining)
            ]
            batch.join(requests, joining, pending=0)
            lengths.update((r.number, n) for r, n in zip(requests, joining, strict=True))
            number += len(joining)
        steps = data.draw(st.integers(0, 40))
        batch.launched += steps
        batch.known += steps
        lengths = {n: length + steps for n, length in lengths.items()}
        assert {r.number: batch.committed(r) for r in batch.requests} == lengths
        assert batch.context_tokens == sum(lengths.values())
        assert batch.opening() == pages_to_open(list(lengths.values()), page_size)


def test_a_member_that_ends_by_length_is_left_out_one_result_early_with_overlap() -> None:
    batch = RunningBatch(1, leaves_early=True)
    by_length = Request(0, 0, 5, 10, 10, max_new_tokens=10, target=10)
    by_stop = Request(1, 0, 5, 10, 99, max_new_tokens=99, target=10)
    batch.join([by_length, by_stop], [5, 5], pending=0)
    assert batch.uneventful_passes() == 9
    batch.known += 9
    assert batch.ending_by_length() == [by_length]
    assert batch.ended() == []
    batch.leave([by_length])
    batch.known += 1
    assert batch.ended() == [by_stop]
