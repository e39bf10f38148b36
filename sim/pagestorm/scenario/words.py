"""Pieces of messages: a value in one harmless line, and the known word that an unknown one may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def shown(value: object) -> str:
    """`value` for a message: one short line, nothing in it that a terminal would obey."""
    match value:
        case None:
            return "nothing (null)"
        case bool():
            return "true" if value else "false"
        case dict():
            return "a mapping"
        case list() | tuple():
            return "a list"
        case str():
            text = value if len(value) <= 60 else value[:57] + "..."
            return repr(text)
        case _:
            text = repr(value)
            return text if len(text) <= 60 else text[:57] + "..."


def did_you_mean(word: str, known: Iterable[str], what: str) -> str:
    """The end of a message about an unknown word: the nearest known one, or all of them."""
    names = list(dict.fromkeys(known))
    near = difflib.get_close_matches(word[:100], names, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"the {what} here are: {', '.join(names)}"
