"""Texts by reference: what a request's tokens are, without a Python object per token.

A text is a sequence of spans (source, start, length): tokens start..start+length-1 of a source. A source is whatever
tokens come from: a shared system prompt, a block of a trace, one request's own prompt, one request's output. Tokens
are the same when source and offset are the same, and only then.

    a request in a group            ((7, 0, 300), (1041, 0, 55))         source 7 is the group's prompt
    its next turn                   ((7, 0, 300), (1041, 0, 55), (1042, 0, 80), (1043, 0, 12))
    two blocks of a hashed trace    ((46, 0, 512), (47, 0, 512))

A cursor is a place in a text: the number of a span and how many of its tokens lie before the place.
"""

from __future__ import annotations

Span = tuple[int, int, int]
"""(source, start, length), lengths in tokens."""
Text = tuple[Span, ...]
Cursor = tuple[int, int]
PageName = tuple[int, int] | Text
"""Names the tokens of one page: (source, start) when they are one span, else the spans, neighbours joined."""


def tokens_in(text: Text) -> int:
    """Length of the text in tokens."""
    return sum(length for _, _, length in text)


def advance(text: Text, cursor: Cursor, tokens: int) -> Cursor:
    """The cursor that many tokens further on, at the start of a span rather than at the end of the one before."""
    i, skip = cursor
    skip += tokens
    last = len(text)
    while i < last and skip >= text[i][2]:
        skip -= text[i][2]
        i += 1
    return i, skip


def cut(text: Text, cursor: Cursor, tokens: int) -> Text:
    """The text of that many tokens from the cursor on; the text must be that long."""
    i, skip = cursor
    parts: list[Span] = []
    while tokens:
        span = text[i]
        source, start, length = span
        n = min(length - skip, tokens)
        if n:
            parts.append(span if n == length else (source, start + skip, n))
        tokens -= n
        skip = 0
        i += 1
    return tuple(parts)


def common(key: Text, text: Text, cursor: Cursor, most: int) -> int:
    """How many tokens `key` and the text from the cursor on have in common, at most `most`."""
    i, skip = cursor
    found = 0
    last = len(text)
    for span in key:
        source, start, length = span
        while length:
            if i == last:
                return min(found, most)
            here = text[i]
            if skip == 0 and here == span:
                # The usual case: both were cut from the same trace.
                n = length
            else:
                if here[0] != source or here[1] + skip != start:
                    if here[2] > skip:
                        return min(found, most)
                    n = 0
                else:
                    n = min(here[2] - skip, length)
            found += n
            if found >= most:
                return most
            length -= n
            start += n
            skip += n
            if skip >= here[2]:
                skip = 0
                i += 1
    return min(found, most)


def page_name(text: Text, cursor: Cursor, tokens: int) -> PageName:
    """Name of the `tokens` tokens at the cursor: equal for equal tokens, however they are cut into spans."""
    i, skip = cursor
    source, start, length = text[i]
    if skip + tokens <= length:
        return source, start + skip
    joined: list[Span] = []
    for source, start, length in cut(text, cursor, tokens):
        if joined and joined[-1][0] == source and joined[-1][1] + joined[-1][2] == start:
            joined[-1] = (source, joined[-1][1], joined[-1][2] + length)
        else:
            joined.append((source, start, length))
    return joined[0][:2] if len(joined) == 1 else tuple(joined)
