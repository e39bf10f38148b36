"""A pasted launch command, read: which engine, which flags, which environment variables; what is not known is listed.

    MODEL=zai-org/GLM-5 SGLANG_SWA_EVICTION_INTERVAL=256 python -m sglang.launch_server --model-path $MODEL --tp 8
    sglang serve zai-org/GLM-5 --tp-size=8
    vllm serve Qwen/Qwen3-8B -tp 2 --max-model-len 32k

Nothing is run and no file is read.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from msgspec import Struct

from pagestorm.errors import ScenarioError
from pagestorm.sizing.flags import LIST, OPTIONAL, SWITCH, TOGGLE, Flag, FlagTable, Value, table

MAX_CHARACTERS = 1 << 16
OPERATORS = "();<>|&"
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
SGLANG_MODULES = ("sglang.launch_server", "sglang.srt.launch_server", "sglang")
VLLM_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main")
MODEL_FIELDS = {"sglang": ("model_path",), "vllm": ("model", "model_tag")}


class Launch(Struct, frozen=True, kw_only=True):
    """What a launch command says.

    `settings` are the engine's fields that were set, `unknown` the words that its parser does not know (it would not
    start), `environment` the variables that were set before the command.
    """

    engine: str
    model: str | None
    settings: dict[str, Value]
    environment: dict[str, str]
    unknown: tuple[str, ...]


def parse(command: str) -> Launch:
    """The launch of SGLang or vLLM in a command line as it is typed into a shell. Raises `ScenarioError`."""
    words = _words(command)
    environment = dict(_assignments(words))
    start, engine = _start(words)
    arguments = [_expanded(word, environment) for word in _until_operator(words[start:])]
    reader = _Arguments(engine, arguments)
    reader.read()
    return Launch(
        engine=engine,
        model=reader.model,
        settings=reader.settings,
        environment=environment,
        unknown=tuple(reader.unknown),
    )


def read_flags(engine: str, words: list[str]) -> tuple[dict[str, Value], tuple[str, ...]]:
    """The settings in an engine's arguments, and the words that its parser does not know. Raises `ScenarioError`."""
    reader = _Arguments(engine, words)
    reader.read()
    unknown = reader.unknown if reader.model is None else [reader.model, *reader.unknown]
    return reader.settings, tuple(unknown)


def _words(command: str) -> list[str]:
    """The words of a shell command; comments and line continuations are gone."""
    if len(command) > MAX_CHARACTERS:
        raise ScenarioError(f"longer than {MAX_CHARACTERS} characters; this is no launch command", key="command")
    text = re.sub(r"\\\r?\n", " ", command.strip())
    lexer = shlex.shlex(text, posix=True, punctuation_chars=OPERATORS)
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError as error:
        line, column, what = _unclosed(command)
        raise ScenarioError(
            f"the shell quoting is broken ({error}): {what} at line {line}, column {column} has no end; close it",
            line=line,
            column=column,
            key="command",
        ) from None


def _unclosed(command: str) -> tuple[int, int, str]:
    """Line, column and kind of the quote that is never closed."""
    quote, opened, escaped = "", 0, False
    for place, character in enumerate(command):
        if escaped:
            escaped = False
        elif character == "\\" and quote != "'":
            escaped, opened = True, opened if quote else place
        elif quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote, opened = character, place
    before = command[:opened]
    kind = f"the quote {quote}" if quote else "the backslash"
    return before.count("\n") + 1, opened - (before.rfind("\n") + 1) + 1, kind


def _assignments(words: list[str]) -> Iterator[tuple[str, str]]:
    """`NAME=value` before the engine's own arguments, `export`, `env` and a container's `-e` included."""
    seen: dict[str, str] = {}
    for place, word in enumerate(words):
        if _engine_at(words, place) is not None:
            return
        found = ASSIGNMENT.fullmatch(word.removeprefix("--env=").removeprefix("-e"))
        if found:
            seen[found[1]] = _expanded(found[2], seen)
            yield found[1], seen[found[1]]


def _expanded(word: str, environment: dict[str, str]) -> str:
    """`word` with the variables that the command itself sets."""

    def value(match: re.Match[str]) -> str:
        return environment.get(match[1] or match[2], match[0])

    return re.sub(r"\$(?:(\w+)|\{(\w+)\})", value, word)


def _start(words: list[str]) -> tuple[int, str]:
    """Where the engine's arguments begin, and which engine it is."""
    for place in range(len(words)):
        found = _engine_at(words, place)
        if found is not None:
            return found
    raise ScenarioError(
        "neither SGLang nor vLLM is launched here; paste a command such as `python -m sglang.launch_server ...`, "
        "`sglang serve ...` or `vllm serve ...`",
        key="command",
    )


def _engine_at(words: list[str], place: int) -> tuple[int, str] | None:
    word = words[place].rsplit("/", 1)[-1]
    following = words[place + 1] if place + 1 < len(words) else ""
    if word in ("sglang", "vllm") and following == "serve":
        return place + 2, word
    if place and words[place - 1] == "-m":
        if word in VLLM_MODULES:
            return place + 1, "vllm"
        if word in SGLANG_MODULES:
            return place + (2 if following == "serve" else 1), "sglang"
    if word == "launch_server.py":
        return place + 1, "sglang"
    return None


def _until_operator(words: list[str]) -> list[str]:
    """Words before the first `|`, `>`, `&&`, `;` of the shell; a file descriptor before `>` is no argument."""
    for place, word in enumerate(words):
        if word and all(character in OPERATORS for character in word):
            redirected = word.startswith((">", "<")) and place and words[place - 1] in ("1", "2")
            return words[: place - 1 if redirected else place]
    return words


class _Set(NamedTuple):
    spelling: str
    value: Value


class _Arguments:
    """Reads an engine's arguments as its parser does."""

    def __init__(self, engine: str, words: list[str]) -> None:
        self.engine = engine
        self.table: FlagTable = table(engine)
        self.words = words
        self.place = 0
        self.settings: dict[str, Value] = {}
        self.unknown: list[str] = []
        self.model: str | None = None

    def read(self) -> None:
        while self.place < len(self.words):
            word = self.words[self.place]
            self.place += 1
            if not _is_flag(word):
                self.positional(word)
                continue
            name, equals, attached = word.partition("=")
            if "." in name and self.nested(name, attached if equals else None):
                continue
            found = self.table.find(name)
            if found is None:
                self.unknown.append(self.with_value(word, equals))
            else:
                self.flag(*found, attached if equals else None)
        for field in MODEL_FIELDS[self.engine]:
            value = self.settings.pop(field, None)
            if self.model is None and isinstance(value, str):
                self.model = value

    def positional(self, word: str) -> None:
        if self.model is None and not self.settings and not self.unknown:
            self.model = word
        else:
            self.unknown.append(word)

    def flag(self, spelling: str, flag: Flag, attached: str | None) -> None:
        if flag.kind in (SWITCH, TOGGLE):
            if attached is not None:
                raise ScenarioError(f"takes no value, but {attached!r} is given", key=spelling)
            self.settings[flag.field] = spelling not in flag.negative
            return
        values = [attached] if attached is not None else self.values(flag)
        if not values:
            if flag.kind == OPTIONAL:
                return
            raise ScenarioError("has no value; write one behind it", key=spelling)
        converted = [self.table.convert(flag, each, spelling) for each in values]
        self.settings[flag.field] = list(converted) if flag.kind == LIST else converted[0]

    def values(self, flag: Flag) -> list[str]:
        """The words that belong to a flag."""
        taken: list[str] = []
        while self.place < len(self.words) and not _is_flag(self.words[self.place]):
            taken.append(self.words[self.place])
            self.place += 1
            if flag.kind != LIST:
                break
        return taken

    def nested(self, name: str, attached: str | None) -> bool:
        """vLLM's `--speculative-config.method eagle3`: a key inside a JSON flag."""
        head, *keys = name.rstrip("+").split(".")
        found = self.table.find(head) if self.engine == "vllm" else None
        if found is None:
            return False
        values = [attached] if attached is not None else self.values(found[1])[:1]
        if not values:
            raise ScenarioError("has no value; write one behind it", key=name)
        try:
            value = json.loads(values[0])
        except json.JSONDecodeError:
            value = values[0]
        inner: object = self.settings.setdefault(found[1].field, {})
        for key in keys[:-1]:
            inner = inner.setdefault(key, {}) if isinstance(inner, dict) else {}
        if isinstance(inner, dict):
            inner[keys[-1]] = value
        return True

    def with_value(self, word: str, equals: str) -> str:
        """An unknown flag as it stands, with the word behind it if that looks like its value."""
        near = difflib.get_close_matches(word.partition("=")[0], self.table.by_spelling, n=1, cutoff=0.75)
        hint = f" (did you mean {near[0]}?)" if near else ""
        if not equals and self.place < len(self.words) and not _is_flag(self.words[self.place]):
            word += f" {self.words[self.place]}"
            self.place += 1
        return word + hint


def _is_flag(word: str) -> bool:
    """`-tp`, `--tp-size`; not `-1`, not `-0.5`."""
    return len(word) > 1 and word[0] == "-" and not re.fullmatch(r"-\.?\d[\d.]*", word)
