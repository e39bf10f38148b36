"""`--set` replaces parts of a scenario before it is checked, and its mistakes are laid at its door."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pagestorm.errors import ScenarioError
from pagestorm.scenario.loading import from_mapping, load
from pagestorm.scenario.schema import Burst, Linear

Refuse = Callable[..., ScenarioError]


def test_a_dotted_path_reaches_every_part(plain: str, write: Callable[[str], Path]) -> None:
    scenario = load(
        write(plain),
        [
            "engine.page_size=32",
            "workload.input_tokens.high=5_000",
            "workload.arrivals={process: burst}",
            "steptime.kind=linear",
            "steptime.base_s=1e-3",
            "pools=[sim, torch]",
            "pools.1=paged",
            "name=a=b",
        ],
    )
    assert scenario.engine.page_size == 32
    assert scenario.workload.arrivals == Burst()
    assert scenario.steptime == Linear(base_s=0.001)
    assert (scenario.pools, scenario.name) == (("sim", "paged"), "a=b")


def test_a_request_is_reached_by_its_number() -> None:
    request: dict[str, object] = {"at_s": 0, "input_tokens": 3, "output_tokens": 4}
    data: dict[str, object] = {
        "name": "x",
        "engine": {"max_total_tokens": 100, "disable_radix_cache": True},
        "workload": {"requests": [request, request]},
    }
    scenario = from_mapping(data, ["workload.requests.1.input_tokens=5"])
    assert [each.input_tokens for each in scenario.workload.requests or ()] == [3, 5]
    assert request["input_tokens"] == 3, "what was passed in is not changed"


def test_a_later_override_wins_and_an_empty_value_takes_the_default(plain: str, write: Callable[[str], Path]) -> None:
    scenario = load(write(plain), ["engine.max_running_requests=3", "engine.max_running_requests=", "seed=1", "seed=2"])
    assert scenario.engine.max_running_requests is None
    assert scenario.seed == 2


@pytest.mark.parametrize(
    ("override", "key", "words"),
    [
        ("engine.page_size=0", "engine.page_size", "at least 1"),
        ("engine.page_sise=32", "engine.page_sise", "did you mean page_size?"),
        ("workload.input_tokens.low=1601", "workload.input_tokens.low", "above high"),
        ("engine.max_total_tokens=yes", "engine.max_total_tokens", "a whole number"),
        ("engine.page_size", None, "not key=value"),
        ("engine..page_size=1", None, "not key=value"),
        ("=1", None, "not key=value"),
        ("workload.output_tokens.low=1", "workload.output_tokens.low", "is 128, so nothing can be set inside"),
        ("workload.requests.0.at_s=1", "workload.requests.0.at_s", "is left out"),
        ("name=[", "name", "cannot read"),
        ("name=&a b", "name", "anchors"),
        ("hardware.gpu=H300", "hardware.gpu", "unknown GPU"),
        ("expect.retractoins=1", "expect.retractoins", "did you mean retractions?"),
    ],
)
def test_a_mistake_in_an_override_names_set_and_the_key(
    plain: str, refused: Refuse, override: str, key: str | None, words: str
) -> None:
    error = refused(plain, override)
    assert (error.file, error.line, error.key) == ("--set", None, key)
    assert words in error.message
    assert str(error).startswith("--set: ")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("pools.2=sim", "give a position from 0 to 1"),
        ("pools.x=sim", "give a position from 0 to 1"),
        ("engine.emulate.0=x", "an empty list"),
    ],
)
def test_a_position_outside_a_list_is_refused(plain: str, refused: Refuse, override: str, words: str) -> None:
    text = plain.replace("page_size: 64", "emulate: []") + "pools: [sim, torch]\n"
    assert words in refused(text, override).message


def test_a_mistake_in_the_file_keeps_its_place_beside_overrides(plain: str, refused: Refuse) -> None:
    error = refused(plain.replace("page_size: 64", "page_size: -1"), "engine.context_length=100")
    assert (error.line, error.key) == (4, "engine.page_size")
