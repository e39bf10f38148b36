"""Fixtures that several test packages use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# The tests read, patch and extend the sources; what was compiled from them is compared by tests/test_compiled.py.
os.environ["PAGESTORM_PURE"] = "1"

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of public cases, traces and facts beside the checkout; a stranger's clone has none."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs the shared/ folder beside the checkout (traces, cases, facts); CI has it")
    return folder
