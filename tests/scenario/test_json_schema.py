"""The JSON Schema says what loading accepts, with a description for every key."""

from __future__ import annotations

import json
import typing
from typing import Any

import msgspec
import pytest

from pagestorm.scenario import schema
from pagestorm.scenario.jsonschema import json_schema
from pagestorm.summary import SUMMARY_KEYS

PARTS = [
    each
    for each in vars(schema).values()
    if isinstance(each, type) and issubclass(each, schema.Part) and each is not schema.Part
]


def definitions() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json_schema()["$defs"]
    return found


def test_it_names_its_draft_and_is_plain_json() -> None:
    whole = json_schema()
    assert whole["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert json.loads(json.dumps(whole)) == whole


def test_every_reference_leads_somewhere() -> None:
    def references(node: object) -> set[str]:
        if isinstance(node, dict):
            own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
            return own.union(*map(references, node.values()))
        return set().union(*map(references, node)) if isinstance(node, list) else set()

    names = {f"#/$defs/{name}" for name in definitions()}
    assert references(json_schema()) == names


def test_every_mapping_and_every_key_is_described_and_closed() -> None:
    for name, part in definitions().items():
        assert part["description"], name
        assert part["additionalProperties"] is False
        for key, node in part["properties"].items():
            tag = list(node) == ["enum"]
            assert tag or "description" in node or "$ref" in json.dumps(node), f"{name}.{key} has no description"


def test_historical_faults_are_listed_and_described() -> None:
    emulate = definitions()["SglangFlags"]["properties"]["emulate"]
    assert sorted(emulate["items"]["enum"]) == sorted(schema.FAULTS)
    assert all(name in emulate["description"] for name in schema.FAULTS)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_every_example_is_itself_valid(part: type[schema.Part]) -> None:
    hints = typing.get_type_hints(part, include_extras=True)
    properties = definitions()[part.__name__]["properties"]
    for key, node in properties.items():
        for example in node.get("examples", []):
            msgspec.convert(example, hints[key])


def test_bounds_are_on_every_number_and_list() -> None:
    def unbounded(node: object, path: str) -> list[str]:
        if isinstance(node, list):
            return [each for inner in node for each in unbounded(inner, path)]
        if not isinstance(node, dict):
            return []
        limits = {
            "integer": {"maximum"},
            "number": {"maximum"},
            "array": {"maxItems"},
            "string": {"maxLength"},
        }.get(str(node.get("type")), set())
        own = [f"{path}: {limits}"] if limits - node.keys() else []
        return own + [each for key, inner in node.items() for each in unbounded(inner, f"{path}.{key}")]

    free = [each for name, part in definitions().items() for each in unbounded(part["properties"], name)]
    # What is expected of a summary needs no bound: it is only compared.
    assert [each for each in free if not each.startswith(("Bounds.", "Scenario.expect."))] == []


def test_summary_keys_are_those_of_the_interface() -> None:
    assert len(SUMMARY_KEYS) == len(set(SUMMARY_KEYS)) == 46
    assert SUMMARY_KEYS[:5] == ("name", "seed", "engine", "outcome", "error")


def test_summary_keys_are_in_the_interface_document(shared: Any) -> None:
    text = (shared / "design/INTERFACE.md").read_text()
    section = text[text.index("summary.json, flat: ") : text.index("A key that does not apply is null")]
    words = "".join(char if char.isalnum() or char == "_" else " " for char in section).split()
    places = [words.index(key) for key in SUMMARY_KEYS]
    assert places == sorted(places)
