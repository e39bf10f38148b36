"""Shows in the list of skips that the tests of the torch pool were left out."""

from __future__ import annotations

import pytest


def test_torch_is_here_or_the_tests_of_the_torch_pool_are_left_out() -> None:
    pytest.importorskip("torch", reason="torch is not installed: pip install 'pagestorm[torch]'")
