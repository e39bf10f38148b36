"""Which functions a piece of work really entered, so that no loop of ours stands in for an engine's unnoticed.

Runs inside an engine's environment, with the standard library only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import TypeVar

Answer = TypeVar("Answer")


def functions_entered(work: Callable[[], Answer], packages: tuple[str, ...]) -> tuple[Answer, list[str]]:
    """What `work` answers, and the Python functions of those packages that it entered, as sorted `module:function`.

    Takes the place of any profiler of the thread while it runs. What is compiled is not seen.
    """
    seen: dict[CodeType, str] = {}

    def notice(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code not in seen:
            seen[frame.f_code] = str(frame.f_globals.get("__name__", ""))

    before = sys.getprofile()
    sys.setprofile(notice)
    try:
        answer = work()
    finally:
        sys.setprofile(before)
    inside = (f"{module}:{code.co_qualname}" for code, module in seen.items() if module.partition(".")[0] in packages)
    return answer, sorted(set(inside))
