"""Ledgers and allocators by kind."""

from __future__ import annotations

from functools import partial

import pytest

from tests.memory.kinds import (
    ALLOCATORS,
    LEDGERS,
    WITH_IDS,
    MakeAllocator,
    MakeLedger,
    make_allocator,
    make_ledger,
    skip_where_absent,
)


@pytest.fixture(params=LEDGERS)
def ledger_of(request: pytest.FixtureRequest) -> MakeLedger:
    """Makes a ledger of each kind."""
    skip_where_absent(request.param)
    return partial(make_ledger, request.param)


@pytest.fixture(params=WITH_IDS)
def ledger_with_ids(request: pytest.FixtureRequest) -> MakeLedger:
    """Makes a ledger of each kind that has page ids."""
    skip_where_absent(request.param)
    return partial(make_ledger, request.param)


@pytest.fixture(params=ALLOCATORS)
def allocator_of(request: pytest.FixtureRequest) -> MakeAllocator:
    """Makes a page allocator of each kind."""
    skip_where_absent(request.param)
    return partial(make_allocator, request.param)
