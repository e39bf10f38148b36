"""A small scenario file to spoil in many ways."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pagestorm.errors import ScenarioError
from pagestorm.scenario.loading import load

PLAIN = """\
schema: 1
name: plain
engine:
  page_size: 64
  max_total_tokens: 131072
  disable_radix_cache: true
workload:
  num_requests: 10
  arrivals: {process: poisson, rate_per_s: 20}
  input_tokens: {dist: uniform, low: 200, high: 1600}
  output_tokens: 128
"""


@pytest.fixture
def plain() -> str:
    """A valid scenario of eleven lines."""
    return PLAIN


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a scenario file and gives its path."""

    def write_text(text: str) -> Path:
        path = tmp_path / "s.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_text


@pytest.fixture
def refused(write: Callable[[str], Path]) -> Callable[..., ScenarioError]:
    """Loads a text that must be refused and gives the error, with the file name cut to its last part."""

    def refuse(text: str, *overrides: str) -> ScenarioError:
        path = write(text)
        with pytest.raises(ScenarioError) as caught:
            load(path, overrides)
        error = caught.value
        assert error.file in (str(path), "--set"), "an error names the file it is about"
        return error

    return refuse
