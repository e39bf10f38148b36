"""A scenario written out loads as the same scenario, resolved or not, from anywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagestorm.errors import ScenarioError
from pagestorm.scenario import files
from pagestorm.scenario.dump import with_reproduces
from pagestorm.scenario.loading import from_mapping, load, resolve, to_yaml
from pagestorm.scenario.schema import Trace
from pagestorm.scenario.tree import read_tree

tokens = st.integers(1, 2**40)
positive = st.floats(1e-3, 1e6, allow_nan=False)
texts = st.text(st.characters(codec="utf-8"), max_size=30)
names = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9 ._:+-]{0,20}\Z") | st.sampled_from(
    [
        "1e-4",
        "null",
        "yes",
        "0x10",
        "010",
        "089",
        "0o17",
        "1:30",
        "~a",
        "1_0",
        "-5",
        "é ü",
        "true",
        "=",
        "<<",
        "2024-01-01",
    ]
)


def span(name: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(tokens, tokens).map(lambda ends: {"dist": name, "low": min(ends), "high": max(ends)})


lengths = st.one_of(
    tokens,
    span("uniform"),
    st.builds(lambda ends, alpha: ends | {"alpha": alpha}, span("zipf"), st.floats(0, 20)),
    st.fixed_dictionaries({"dist": st.just("lognormal"), "median": positive, "sigma": st.floats(0, 5)}),
    st.lists(tokens, min_size=1, max_size=4).map(lambda values: {"dist": "histogram", "values": values}),
)
arrivals = st.one_of(
    st.just({"process": "burst"}),
    st.fixed_dictionaries({"process": st.sampled_from(["constant", "poisson"]), "rate_per_s": positive}),
    st.fixed_dictionaries({"process": st.just("gamma"), "rate_per_s": positive, "cv": st.floats(0.01, 100)}),
    st.fixed_dictionaries({"process": st.just("closed_loop"), "concurrency": st.integers(1, 1000)}),
)
asked = st.none() | st.just("engine") | st.integers(0, 2**40)
drawn = st.fixed_dictionaries(
    {
        "num_requests": st.integers(1, 1000),
        "arrivals": arrivals,
        "input_tokens": lengths,
        "output_tokens": lengths,
        "max_new_tokens": asked,
        "ignore_eos": st.booleans(),
    }
)
listed = st.fixed_dictionaries(
    {"at_s": st.floats(0, 1e9), "input_tokens": tokens, "output_tokens": tokens, "max_new_tokens": asked},
    optional={"ignore_eos": st.booleans()},
)
workloads = drawn | st.lists(listed, min_size=1, max_size=4).map(lambda requests: {"requests": requests})
expectations = st.fixed_dictionaries(
    {},
    optional={
        "outcome": st.sampled_from(["completed", "crashed"]),
        "retractions": st.integers(0, 9) | st.fixed_dictionaries({"min": st.integers(0, 9)}),
        "simulated_s": st.fixed_dictionaries({"max": positive}),
        "host_pool_bytes": st.none(),
        "error": texts,
    },
)
scenarios = st.fixed_dictionaries(
    {
        "name": names,
        "about": texts,
        "seed": st.integers(0, 2**63 - 1),
        "engine": st.fixed_dictionaries(
            {
                "max_total_tokens": st.integers(128, 2**40),
                "page_size": st.sampled_from([1, 16, 64]),
                "disable_radix_cache": st.just(True),
                "schedule_conservativeness": st.floats(0, 10),
                "decode_check": st.sampled_from(["pages", "tokens", "none"]),
                "emulate": st.sampled_from([[], ["no_output_clip"]]),
            }
        ),
        "workload": workloads,
        "pools": st.sampled_from([["sim"], ["paged", "torch"]]),
        "expect": expectations,
    },
    optional={
        "model": st.sampled_from(["Llama-3.1-8B", "qwen3-8b"]),
        "hardware": st.just({"gpu": "h100", "tp_size": 2}),
        "steptime": st.fixed_dictionaries({"kind": st.just("linear"), "base_s": st.floats(1e-9, 1)}),
    },
)


@settings(deadline=None, max_examples=150)
@given(scenarios)
def test_what_is_written_loads_as_the_same_scenario(data: dict[str, Any]) -> None:
    scenario = from_mapping(data)
    for written in (scenario, resolve(scenario)):
        tree, _ = read_tree(to_yaml(written))
        assert isinstance(tree, dict)
        assert from_mapping(tree) == written


@pytest.mark.parametrize(
    "text",
    [
        "1e-4",
        "0o17",
        "0x1F",
        "089",
        "1_000",
        "+7",
        ".nan",
        "-.inf",
        "null",
        "~",
        "",
        "yes",
        "1:30",
        "a: b",
        "- a",
        "# a",
    ],
)
def test_text_that_looks_like_something_else_stays_text(text: str, plain: str, write: Callable[[str], Path]) -> None:
    scenario = load(write(plain + f"about: '{text}'\n"))
    assert scenario.about == text
    assert load(write(to_yaml(scenario))) == scenario


def test_a_relative_trace_path_still_leads_there_from_another_folder(
    tmp_path: Path, plain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here/traces").mkdir(parents=True)
    (tmp_path / "there").mkdir()
    (tmp_path / "here/traces/t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    source = tmp_path / "here/s.yaml"
    source.write_text(plain.replace("output_tokens: 128", "trace: {format: azure, path: traces/t.csv}"))
    monkeypatch.chdir(tmp_path)
    scenario = load("here/s.yaml")
    assert scenario.workload.trace == Trace(format="azure", path=str(tmp_path / "here/traces/t.csv"))
    copy = tmp_path / "there/scenario.yaml"
    copy.write_text(to_yaml(resolve(scenario)))
    monkeypatch.chdir("/")
    assert load(copy) == resolve(scenario)


def test_a_mapping_is_taken_as_it_is_from_python(plain: str) -> None:
    tree, _ = read_tree(plain)
    assert isinstance(tree, dict)
    assert from_mapping(tree | {"pools": ("sim", "torch")}).pools == ("sim", "torch")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"seed": float("nan")}, "finite"),
        ({"seed": 10**200}, "out of range"),
        ({"about": "\ud800"}, "not valid Unicode"),
        ({"about": object()}, "not plain data"),
        ({"expect": {1: 2}}, "a key must be text"),
    ],
)
def test_what_is_no_plain_data_is_refused(plain: str, part: dict[str, object], words: str) -> None:
    tree, _ = read_tree(plain)
    assert isinstance(tree, dict)
    with pytest.raises(ScenarioError, match=words) as caught:
        from_mapping(tree | part, file="made.yaml")
    assert (caught.value.file, caught.value.line) == ("made.yaml", None)


def test_data_that_holds_itself_is_refused(plain: str) -> None:
    tree, _ = read_tree(plain)
    assert isinstance(tree, dict)
    tree["expect"] = tree
    with pytest.raises(ScenarioError, match="nested deeper"):
        from_mapping(tree)


def test_a_reproducer_carries_what_it_reproduces(plain: str, write: Callable[[str], Path]) -> None:
    marked = with_reproduces(
        load(write(plain)), kind="Divergence", message="page 3: is\nnot 'page 4'" * 999, pools=["paged"], step=True
    )
    loaded = load(write(to_yaml(marked)))
    assert loaded == marked
    assert loaded.reproduces is not None
    assert (loaded.reproduces.kind, loaded.reproduces.pools, loaded.reproduces.step) == ("Divergence", ("paged",), True)


@pytest.mark.parametrize("home", ["checkout", "wheel"])
def test_a_shipped_scenario_is_found_by_its_name(
    home: str, tmp_path: Path, plain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / ("sim" if home == "checkout" else "site-packages") / "pagestorm"
    folder = (tmp_path if home == "checkout" else package) / "scenarios"
    folder.mkdir(parents=True)
    (folder / "first-retraction.yaml").write_text(plain)
    monkeypatch.setattr(files, "_PACKAGE", package)
    monkeypatch.chdir(tmp_path)
    assert load("first-retraction").name == "plain"
    with pytest.raises(ScenarioError, match="did you mean first-retraction"):
        load("first-retractoin")
    (tmp_path / "first-retraction").write_text(plain.replace("name: plain", "name: mine"))
    assert load("first-retraction").name == "mine", "a file of that name comes first"


@pytest.mark.parametrize("name", sorted(files.shipped()))
def test_every_shipped_scenario_loads_and_survives_being_written(
    name: str, write: Callable[[str], Path], request: pytest.FixtureRequest
) -> None:
    if "shared/" in files.shipped()[name].read_text():
        request.getfixturevalue("shared")
    scenario = load(name)
    assert scenario.name == name
    assert load(write(to_yaml(resolve(scenario)))) == resolve(scenario)
