"""The workload of a whole run, read from what the client sent: every default filled in, every mistake named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagestorm_real.reference.serving import BadPayload
from pagestorm_real.reference.step_clock import PassTimes

MAX_PREFILL_TOKENS = 16384
MAX_STEPS = 200_000
REPORTS = ("free", "ratio", "starts")
DECODE_CHECKS = ("pages", "tokens", "none")
FIRST_PROMPT_TOKEN = 3
PROMPT_STRIDE = 1_000_003
LAST_PROMPT_START = 1 << 30


@dataclass(frozen=True)
class Window:
    """Sliding-window attention: `window` tokens, and a pool of its own of `ratio` times the full one."""

    window: int
    ratio: float


@dataclass(frozen=True)
class Speculation:
    """EAGLE; verify pass n of request r commits `accept_lengths[(r + n) % len]` tokens."""

    steps: int
    topk: int
    draft: int
    accept_lengths: tuple[int, ...]

    def arguments(self) -> dict[str, object]:
        """The engine's own flags."""
        return {
            "speculative_algorithm": "EAGLE",
            "speculative_num_steps": self.steps,
            "speculative_eagle_topk": self.topk,
            "speculative_num_draft_tokens": self.draft,
        }


@dataclass(frozen=True)
class Planned:
    """A request: its prompt, the tokens it really generates, the tokens it asks for, its arrival."""

    prompt: Sequence[int]
    out: int
    max_new: int
    ignore_eos: bool
    arrive: int


@dataclass(frozen=True)
class Workload:
    """A server's limits and the requests that it gets; `read` fills it from a message."""

    page_size: int
    pool_tokens: int
    max_running: int
    chunk_tokens: int | None
    max_prefill_tokens: int
    conservativeness: float
    overlap: bool
    context: int
    max_queued: int | None
    requests: tuple[Planned, ...]
    concurrency: int | None
    times: PassTimes | None
    max_steps: int
    report: frozenset[str]
    radix: bool
    tree_core: str | None
    window: Window | None
    spec: Speculation | None
    decode_check: str
    clips_output: bool

    @property
    def swa_pool_tokens(self) -> int:
        """Size of the window pool."""
        if self.window is None:
            return 0
        return int(self.pool_tokens * self.window.ratio) // self.page_size * self.page_size

    @property
    def longest_tokens(self) -> int:
        """No request can become longer than this."""
        longest = max((len(r.prompt) + max(r.out, r.max_new) for r in self.requests), default=0)
        return min(longest, self.pool_tokens) + self.page_size

    def arguments(self) -> dict[str, object]:
        """Server arguments that the engine's classes read."""
        return {
            "page_size": self.page_size,
            "disable_radix_cache": not self.radix,
            "max_running_requests": self.max_running,
            "pp_max_micro_batch_size": self.max_running,
            "chunked_prefill_size": -1 if self.chunk_tokens is None else self.chunk_tokens,
            "max_prefill_tokens": self.max_prefill_tokens,
            "schedule_conservativeness": self.conservativeness,
            "disable_overlap_schedule": not self.overlap,
            **(self.spec.arguments() if self.spec else {}),
        }


class Fields:
    """The fields of a message, taken one by one; what is left over at the end was misspelt."""

    def __init__(self, what: str, fields: Mapping[str, Any]) -> None:
        if not isinstance(fields, Mapping):
            raise BadPayload(f"{what} is an object, not {fields!r}")
        self._what = what
        self._left = dict(fields)

    def whole(self, name: str, least: int, default: int | None = None) -> int:
        """A whole number of at least `least`; required without a default."""
        if name not in self._left and default is not None:
            return default
        value = self.take(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise BadPayload(f"{self._what}: {name} is a whole number of at least {least}, not {value!r}")
        return value

    def perhaps(self, name: str, least: int) -> int | None:
        """A whole number, or None for null and for a name left out."""
        if self._left.get(name) is None:
            self._left.pop(name, None)
            return None
        return self.whole(name, least)

    def number(self, name: str, default: float) -> float:
        value = self._left.pop(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
            raise BadPayload(f"{self._what}: {name} is a number of at least 0, not {value!r}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._left.pop(name, False)
        if not isinstance(value, bool):
            raise BadPayload(f"{self._what}: {name} is true or false, not {value!r}")
        return value

    def one_of(self, name: str, names: Sequence[str], default: str) -> str:
        value = self._left.pop(name, default)
        if value not in names:
            raise BadPayload(f"{self._what}: {name} is one of {', '.join(names)}, not {value!r}")
        return str(value)

    def whole_numbers(self, name: str, least: int) -> list[int]:
        """A list of whole numbers."""
        value = self.take(name)
        if not isinstance(value, list) or not all(isinstance(v, int) and v >= least for v in value):
            raise BadPayload(f"{self._what}: {name} is a list of whole numbers of at least {least}")
        return value

    def take(self, name: str) -> Any:
        if name not in self._left:
            raise BadPayload(f"{self._what}: {name} is missing")
        return self._left.pop(name)

    def maybe(self, name: str) -> Any:
        """Whatever stands there, None when nothing does."""
        return self._left.pop(name, None)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def done(self) -> None:
        """Raises `BadPayload` for fields that nobody asked for."""
        if self._left:
            raise BadPayload(f"{self._what}: unknown {', '.join(sorted(self._left))}")


def read(message: Mapping[str, Any]) -> Workload:
    """The workload in a message, as the operation `run` describes it. Raises `BadPayload`."""
    fields = Fields("workload", message)
    page_size = fields.whole("page_size", 1)
    pool_tokens = fields.whole("max_total_tokens", 2 * page_size) // page_size * page_size
    concurrency = fields.perhaps("concurrency", 1)
    workload = Workload(
        page_size=page_size,
        pool_tokens=pool_tokens,
        max_running=fields.whole("max_running_requests", 1),
        chunk_tokens=_chunk(fields),
        max_prefill_tokens=fields.whole("max_prefill_tokens", 1, MAX_PREFILL_TOKENS),
        conservativeness=fields.number("conservativeness", 1.0),
        overlap=fields.flag("overlap"),
        context=fields.perhaps("context", 2) or pool_tokens,
        max_queued=fields.perhaps("max_queued", 0),
        requests=tuple(_requests(fields.take("requests"), closed=concurrency is not None)),
        concurrency=concurrency,
        times=_times(fields.maybe("clock")),
        max_steps=fields.whole("max_steps", 1, MAX_STEPS),
        report=_report(fields.maybe("report")),
        radix=fields.flag("radix"),
        tree_core=fields.maybe("tree_core"),
        window=_window(fields.maybe("swa")),
        spec=speculation(fields.maybe("spec")),
        decode_check=fields.one_of("decode_check", DECODE_CHECKS, "pages"),
        clips_output=not fields.flag("no_output_clip"),
    )
    fields.done()
    return workload


def prompt_of_length(number: int, tokens: int) -> range:
    """A prompt of request `number` that shares no page with that of any other."""
    first = FIRST_PROMPT_TOKEN + number * PROMPT_STRIDE % LAST_PROMPT_START
    return range(first, first + tokens)


def _chunk(fields: Fields) -> int | None:
    size = fields.perhaps("chunked_prefill_size", -1)
    return size if size and size > 0 else None


def _requests(messages: Iterable[Any], *, closed: bool) -> Iterable[Planned]:
    for number, message in enumerate(messages):
        fields = Fields(f"request {number}", message)
        if closed and "arrive" in fields:
            raise BadPayload(f"request {number}: in a closed loop (concurrency) there is no arrival (arrive)")
        prompt: Sequence[int]
        if "prompt" in fields:
            prompt = fields.whole_numbers("prompt", 0)
        else:
            prompt = prompt_of_length(number, fields.whole("input", 1))
        out = fields.whole("out", 1)
        max_new = fields.whole("max_new", 0, out)
        yield Planned(prompt, out, max_new, fields.flag("ignore_eos"), fields.whole("arrive", 0, 0))
        fields.done()


def _times(message: Any) -> PassTimes | None:
    if message is None:
        return None
    fields = Fields("clock", message)
    times = PassTimes(
        base=fields.whole("base", 0),
        per_request=fields.whole("per_request", 0),
        per_context=fields.whole("per_context", 0),
        per_prefill=fields.whole("per_prefill", 0),
    )
    fields.done()
    return times


def _report(names: Any) -> frozenset[str]:
    asked = frozenset(names or ())
    if unknown := sorted(asked.difference(REPORTS)):
        raise BadPayload(f"report: no {', '.join(unknown)}; there are {', '.join(REPORTS)}")
    return asked


def _window(message: Any) -> Window | None:
    if message is None:
        return None
    fields = Fields("swa", message)
    window = Window(fields.whole("window", 1), fields.number("ratio", 0.8))
    fields.done()
    return window


def speculation(message: Any) -> Speculation | None:
    """The `spec` of a message: one token accepted each time unless it says otherwise."""
    if message is None:
        return None
    fields = Fields("spec", message)
    steps, topk, draft = (fields.whole(name, 1) for name in ("steps", "topk", "draft"))
    accept_lengths = fields.whole_numbers("accept_lengths", 1) if "accept_lengths" in fields else [1]
    if not accept_lengths:
        raise BadPayload("spec: accept_lengths has at least one length")
    fields.done()
    return Speculation(steps, topk, draft, tuple(accept_lengths))
