"""Texts by reference: everything that is done with spans is what would be done with the tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagestorm.memory.text import Text, advance, common, cut, page_name, tokens_in
from tests.memory.prefix_naive import tokens_of

Spans = st.lists(st.tuples(st.integers(1, 2), st.integers(0, 3), st.integers(0, 4)), max_size=6).map(tuple)


@st.composite
def chopped(draw: st.DrawFn, text: Text) -> Text:
    """The same tokens in other spans."""
    pieces = []
    for source, start, length in text:
        at = draw(st.integers(0, length))
        pieces += [(source, start, at), (source, start + at, length - at)]
    return tuple(pieces)


@given(Spans, st.data())
def test_a_cut_is_the_tokens_from_the_cursor_on(text: Text, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, tokens_in(text)))
    tokens = data.draw(st.integers(0, tokens_in(text) - start))
    part = cut(text, advance(text, (0, 0), start), tokens)
    assert tokens_of(part) == tokens_of(text)[start : start + tokens]
    assert all(length > 0 for _, _, length in part)


@given(Spans, st.data())
def test_a_cursor_can_be_moved_in_steps(text: Text, data: st.DataObject) -> None:
    one = data.draw(st.integers(0, tokens_in(text)))
    two = data.draw(st.integers(0, tokens_in(text) - one))
    assert advance(text, advance(text, (0, 0), one), two) == advance(text, (0, 0), one + two)


@given(Spans, Spans, st.data())
def test_what_two_texts_have_in_common_is_counted_in_tokens(key: Text, text: Text, data: st.DataObject) -> None:
    if data.draw(st.booleans()):
        text = (*data.draw(chopped(key)), *text)
    skip = data.draw(st.integers(0, tokens_in(text)))
    most = data.draw(st.integers(0, tokens_in(key)))
    pairs = zip(tokens_of(key), tokens_of(text)[skip:], strict=False)
    n = next((n for n, (a, b) in enumerate(pairs) if a != b), min(tokens_in(key), tokens_in(text) - skip))
    assert common(key, text, advance(text, (0, 0), skip), most) == min(n, most)


@given(Spans, Spans, st.integers(1, 5), st.data())
def test_pages_have_the_same_name_when_they_have_the_same_tokens(
    one: Text, other: Text, page_size: int, data: st.DataObject
) -> None:
    if data.draw(st.booleans()):
        other = (*data.draw(chopped(one)), *other)
    names, pages = [], []
    for text in (one, other):
        for start in range(tokens_in(text) - page_size + 1):
            names.append(page_name(text, advance(text, (0, 0), start), page_size))
            pages.append(tuple(tokens_of(text)[start : start + page_size]))
    assert [[a == b for b in names] for a in names] == [[a == b for b in pages] for a in pages]
