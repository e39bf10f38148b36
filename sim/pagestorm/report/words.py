"""Numbers as people read them: 1,056 tokens, 1.6 %, 9.70 s."""

from __future__ import annotations

import math


def plural(count: int, noun: str) -> str:
    """`1 request`, `1,200 requests`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def times(count: int) -> str:
    """`once`, `twice`, `14 times`."""
    return {1: "once", 2: "twice"}.get(count, f"{count:,} times")


def percent(part: float, whole: float) -> str:
    """Two digits, never 0 % of something and never 100 % of less than all."""
    if whole <= 0:
        return "0 %"
    share = 100 * part / whole
    if 0 < share < 0.01:
        return "< 0.01 %"
    if 99 <= share < 100:
        return f"{math.floor(share * 10) / 10:.1f} %"
    return f"{share:.0f} %" if share >= 10 or share == 0 else f"{share:.2g} %"


def duration(seconds: float | None) -> str:
    """From microseconds to days, three digits; a dash where there is none."""
    if seconds is None:
        return "-"
    if seconds == 0:
        return "0 s"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 1000:
        return f"{seconds:.3g} s"
    if seconds < 48 * 3600:
        hours, rest = divmod(round(seconds), 3600)
        minutes, left = divmod(rest, 60)
        return f"{hours} h {minutes:02} min {left:02} s" if hours else f"{minutes} min {left:02} s"
    return f"{seconds / 86400:.3g} days"


def sentence(text: str) -> str:
    """With a capital at the start and a full stop at the end."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def printable(text: str) -> str:
    """Without control characters, so that a name cannot move the cursor, turn text around or break a line."""
    return "".join(c if c.isprintable() else " " if c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
