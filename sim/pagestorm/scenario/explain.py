"""From a validation error of msgspec to our own words: where, what, and what to write instead."""

from __future__ import annotations

import re

import msgspec

from pagestorm.errors import ScenarioError
from pagestorm.scenario.later import elsewhere, is_later_key, is_later_value
from pagestorm.scenario.places import Path, Places
from pagestorm.scenario.schema import Expectation
from pagestorm.scenario.shape import example_at, keys_at, tags_at, value_at, words_at
from pagestorm.scenario.words import did_you_mean, shown

_ERROR = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?", re.DOTALL)
_STEP = re.compile(r"\.([A-Za-z_]\w*)|\[(\d+|\.\.\.)\]")
_BOUND = re.compile(r"Expected `(\w+)`(?: of length)? (>=|<=|>|<) (\S+)")
_KIND = re.compile(r"Expected `(?P<wanted>[^`]+)`, got `(?P<got>\w+)`")
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "object": "a mapping",
    "array": "a list",
}
_YES = {"yes", "on", "y"}
_NO = {"no", "off", "n"}


def explained(error: msgspec.ValidationError, data: object, places: Places) -> ScenarioError:
    """What `error` says about `data`, in our words and with its place."""
    match = _ERROR.fullmatch(str(error))
    assert match is not None
    what = match["what"]
    path = _path(match["path"] or "", data)
    if name := re.search(r"unknown field `(.*)`", what, re.DOTALL):
        return _unknown_key(path, name[1], data, places)
    if name := re.search(r"missing required field `(.*)`", what):
        return _missing_key(path, name[1], data, places)
    value = value_at(data, path)
    if what.startswith("Invalid"):
        return _unknown_value(path, value, data, places)
    if path[:1] == ("expect",) and len(path) == 2:
        return places.error(path, f"expected a number, text, true, false or {{min, max}}, got {shown(value)}")
    if kind := _KIND.fullmatch(what):
        return places.error(path, _wrong_kind(path, kind["wanted"], value, data))
    if bound := _BOUND.fullmatch(what):
        return places.error(path, _out_of_bounds(bound[1], bound[2], bound[3], value))
    if "regex" in what:
        return places.error(path, f"{shown(value)} does not do; start with a letter or digit and use no slash")
    return places.error(path, f"{shown(value)} is not valid here: {what}")


def _path(text: str, data: object) -> Path:
    """msgspec's path as ours. It writes [...] for the key of a plain dict, which only `expect` is."""
    path: Path = ()
    for step in _STEP.finditer(text):
        if step[1]:
            path = (*path, step[1])
        elif step[2] == "...":
            path = (*path, _bad_expectation(value_at(data, path)))
        else:
            path = (*path, int(step[2]))
    return path


def _bad_expectation(entries: object) -> str:
    for key, value in entries.items() if isinstance(entries, dict) else ():
        try:
            msgspec.convert(value, Expectation)
        except msgspec.ValidationError:
            return str(key)
    return "..."


def _unknown_key(path: Path, key: str, data: object, places: Places) -> ScenarioError:
    whole = (*path, key)
    if is_later_key(path, key):
        return places.error(whole, "known, but not supported yet; leave it out", at_key=True)
    if home := elsewhere(path, key):
        return places.error(whole, f"unknown key here; write it as {home}", at_key=True)
    return places.error(whole, f"unknown key; {did_you_mean(key, keys_at(path, data), 'keys')}", at_key=True)


def _missing_key(path: Path, key: str, data: object, places: Places) -> ScenarioError:
    whole = (*path, key)
    if key not in keys_at(path, data) and (tags := tags_at(path, data)):
        return places.error(whole, f"missing; say which one with {key}: {' or '.join(tags)}")
    why = "; sizing the pool from model and hardware is not supported yet" if key == "max_total_tokens" else ""
    example = example_at(whole, data)
    return places.error(whole, f"missing{why}{f'; for example {key}: {example}' if example else ''}")


def _unknown_value(path: Path, value: object, data: object, places: Places) -> ScenarioError:
    if path == ("schema",):
        return places.error(path, f"{shown(value)} is a format that this release does not read; it reads schema: 1")
    words = words_at(path, data)
    if is_later_value(path, value):
        return places.error(path, f"{shown(value)} is known, but not supported yet; use {' or '.join(words)}")
    remedy = did_you_mean(value, words, "values") if isinstance(value, str) else f"use {' or '.join(words)}"
    return places.error(path, f"unknown value {shown(value)}; {remedy}")


def _wrong_kind(path: Path, wanted: str, value: object, data: object) -> str:
    kinds = [kind for kind in wanted.split(" | ") if kind != "null"]
    words = " or ".join(_WORDS.get(kind, kind) for kind in kinds)
    remedy = _remedy(kinds, value) or (f"for example {example}" if (example := example_at(path, data)) else "")
    return f"expected {words}, got {shown(value)}{f'; {remedy}' if remedy else ''}"


def _remedy(kinds: list[str], value: object) -> str:
    if isinstance(value, str):
        if "bool" in kinds and value.casefold() in _YES | _NO:
            return f"write {'true' if value.casefold() in _YES else 'false'}"
        if ("int" in kinds or "float" in kinds) and re.fullmatch(r"[-+]?[\d_.]+([eE][-+]?\d+)?", value):
            return "write it without quotes"
    if isinstance(value, float) and kinds == ["int"] and value.is_integer():
        return f"write {int(value)}"
    if "str" in kinds and isinstance(value, int | float):
        return "put it in quotes"
    if "array" in kinds and isinstance(value, str):
        return f"write [{', '.join(part.strip() for part in value.split(','))}]"
    return ""


def _out_of_bounds(kind: str, sign: str, bound: str, value: object) -> str:
    nearest = bound.removesuffix(".0")
    if kind in ("str", "array", "object"):
        unit = "characters" if kind == "str" else "entries"
        if sign == ">=" and nearest == "1":
            return "empty; give at least one" if kind != "str" else "empty; give at least one character"
        return f"too long; at most {nearest} {unit}" if sign == "<=" else f"too short; at least {nearest} {unit}"
    words = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}[sign]
    return f"{shown(value)} is out of range; it must be {words} {nearest}"
