"""Random sequences of calls on each kind of ledger, beside a naive model."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis.stateful import run_state_machine_as_test

from tests.memory.kinds import LEDGERS, make_ledger, skip_where_absent
from tests.memory.machine import machine, search


@pytest.mark.parametrize("kind", LEDGERS)
def test_any_sequence_of_calls_leaves_a_ledger_where_the_naive_model_is(kind: str) -> None:
    skip_where_absent(kind)
    run_state_machine_as_test(machine(partial(make_ledger, kind)), settings=search(examples=100, steps=25))
