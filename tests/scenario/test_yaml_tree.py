"""YAML to plain data: what scalars mean, what is refused, and that nothing but a ScenarioError ever comes out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagestorm.errors import ScenarioError
from pagestorm.scenario.files import read_text
from pagestorm.scenario.loading import load
from pagestorm.scenario.tree import MAX_DEPTH, MAX_FILE_BYTES, MAX_NODES, read_tree


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("2E3", 2000.0),
        ("-1.5e+2", -150.0),
        (".5", 0.5),
        ("3.", 3.0),
        ("131_072", 131072),
        ("0x1F", 31),
        ("0o17", 15),
        ("+7", 7),
        ("0", 0),
        ("0.0", 0.0),
        ("yes", "yes"),
        ("off", "off"),
        ("NO", "NO"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("", None),
        ("'1e-4'", "1e-4"),
        ('"true"', "true"),
        ("!!str 12", "12"),
        ("!!float 3", 3.0),
        ("1e", "1e"),
        ("e5", "e5"),
        ("1.2.3", "1.2.3"),
        ("|-\n    1", "1"),
    ],
)
def test_scalars_follow_the_core_schema(text: str, value: object) -> None:
    data, _ = read_tree(f"a: {text}\n")
    assert isinstance(data, dict)
    assert (type(data["a"]), data["a"]) == (type(value), value)


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        ("a: 1\nb: .nan\n", 2, 4, "finite"),
        ("a: [1, -.inf]\n", 1, 8, "finite"),
        ("a: 1e999\n", 1, 4, "too large"),
        ("a: 010\n", 1, 4, "leading zeros"),
        ("a: " + "9" * 5000 + "\n", 1, 4, "5000 characters"),
        ("a: &x 1\n", 1, 4, "anchors and aliases"),
        ("a: 1\nb: *x\n", 2, 4, "anchors and aliases"),
        ("a: !!python/object:os.system x\n", 1, 4, "tag"),
        ("a: !custom {b: 1}\n", 1, 4, "tag"),
        ("a: !!int x\n", 1, 4, "tag"),
        ("a: !!binary aGk=\n", 1, 4, "tag"),
        ("a: 1\nb: 2\na: 3\n", 3, 1, "first in line 1"),
        ("? [1, 2]\n: 3\n", 1, 3, "a key must be a word"),
        ("a: 1\n---\nb: 2\n", 2, 1, "second document"),
        ("", 1, 1, "nothing is written"),
        ("# only a comment\n", 1, 1, "nothing is written"),
        ("a: {b: 1\n", 2, 1, "truncated"),
        ("a: 'b\n", 2, 1, "truncated"),
        ("a: b: c\nd: 1\n", 1, 5, "not valid YAML"),
        ("a:\n\tb: 1\n", 2, 1, "not valid YAML"),
        ("a: \x01\n", 1, 4, "does not allow"),
        ("[" * 200, 1, MAX_DEPTH + 1, "nested deeper"),
        ("- " * 200, 1, 2 * MAX_DEPTH + 1, "nested deeper"),
        ("[" * 1_000_000, 1, 1001, "nesting depth"),
        ("- x\n" * (MAX_NODES + 1), MAX_NODES, 3, "trace file"),
    ],
)
def test_what_a_scenario_never_needs_is_refused_where_it_stands(text: str, line: int, column: int, words: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        read_tree(text, "f.yaml")
    error = caught.value
    assert words in error.message
    assert (error.file, error.line, error.column) == ("f.yaml", line, column)


def test_a_billion_laughs_are_refused_before_they_are_expanded() -> None:
    lines = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    with pytest.raises(ScenarioError, match="anchors and aliases"):
        read_tree("\n".join(lines))


def test_places_count_characters_from_one() -> None:
    _, places = read_tree("é: {ü: [1, 22, 333]}\n")
    assert places.values[("é", "ü", 2)] == (1, 16)
    assert places.keys[("é", "ü")] == (1, 5)


@settings(deadline=None, max_examples=200)
@given(st.text(st.characters(codec="utf-8"), max_size=60) | st.text("ab:-{}[],#&*!|>'\"%@\n\t 01.e~<?", max_size=40))
@example("a: !!set {b}")
@example("!!omap [a: 1]")
@example("<<: {a: 1}")
@example("%YAML 9.9\n--- a")
@example("%TAG ! x:\n--- !y a")
def test_any_text_gives_data_or_a_scenario_error(text: str) -> None:
    data: object = None
    refusal: ScenarioError | None = None
    try:
        data, _ = read_tree(text, "f.yaml")
    except ScenarioError as error:
        refusal = error
    if refusal is None:
        assert isinstance(data, dict | list | str | int | float | None)
    else:
        assert refusal.line is not None
        assert refusal.column is not None
        assert min(refusal.line, refusal.column) >= 1


@settings(deadline=None, max_examples=100)
@given(st.recursive(st.text("abc", min_size=1) | st.integers(-999, 999), lambda inner: st.lists(inner, max_size=3)))
def test_what_pyyaml_writes_is_read_back(value: object) -> None:
    data, _ = read_tree(yaml.safe_dump({"value": value}))
    assert data == {"value": value}


def test_a_file_that_is_not_utf8_is_refused_at_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("name: x\nabout: gr\u00fc\u00df".encode() + b" \xfc\n")
    with pytest.raises(ScenarioError, match="0xfc") as caught:
        load(path)
    assert (caught.value.file, caught.value.line, caught.value.column) == (str(path), 2, 13)


def test_a_byte_order_mark_does_no_harm(tmp_path: Path, plain: str) -> None:
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + plain.encode())
    assert load(path).name == "plain"


def test_a_file_that_is_too_large_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    with path.open("wb") as stream:
        stream.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(ScenarioError, match="larger than 4194304 bytes"):
        read_text(path)


def test_a_folder_and_a_missing_file_are_called_that(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="folder"):
        load(tmp_path)
    with pytest.raises(ScenarioError, match="no such file") as caught:
        load(tmp_path / "none.yaml")
    assert caught.value.file == str(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("fault", "words"), [(PermissionError(), "no permission"), (OSError(5, "Input/output error"), "Input/output")]
)
def test_a_file_that_cannot_be_read_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: OSError, words: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise fault

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(ScenarioError, match=words):
        read_text(tmp_path / "s.yaml")


def test_a_truncated_file_is_refused_wherever_it_is_cut(plain: str, write: Callable[[str], Path]) -> None:
    """A cut that leaves a whole scenario is none: only the last line may go."""
    complete = plain.index("  output_tokens: 1") + len("  output_tokens: 1")
    for length in range(complete):
        with pytest.raises(ScenarioError):
            load(write(plain[:length]))
