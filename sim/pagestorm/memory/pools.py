"""Pools by name. `torch` lives in the other distribution root and is loaded only when it is asked for."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from pagestorm import catalog
from pagestorm.errors import ScenarioError
from pagestorm.memory.counting import CountingLedger
from pagestorm.memory.ledger import Ledger
from pagestorm.memory.paged import PagedLedger
from pagestorm.scenario.schema import Engine, VllmFlags

if TYPE_CHECKING:
    from pagestorm.scenario import Scenario

POOLS = ("counting", "paged", "torch")


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one token of K (or V) is in every layer of one rank: layers x heads x head_dim elements."""

    layers: int
    heads: int
    head_dim: int
    element_bytes: int

    @property
    def bytes_per_token(self) -> int:
        """K and V, all layers."""
        return 2 * self.layers * self.heads * self.head_dim * self.element_bytes


SMALL_SHAPE = KvShape(1, 1, 8, 2)
"""The payload without a model: small enough for any machine, wide enough for a stamp of 16 bytes."""


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """All that a pool needs to be made."""

    pages: int
    page_size: int
    owners: int
    """Owner ids run from 0 to owners - 1; row 0 is padding, as in the engine's request table."""
    max_tokens: int
    """The longest that one owner can get."""
    shape: KvShape = SMALL_SHAPE
    device: str = "auto"
    payload: str = "stamp"
    nodes: int = 0
    """So many more owner ids, from `owners` on, are nodes of a prefix tree: with one, as many as the pool has pages."""

    @classmethod
    def of(cls, scenario: Scenario, *, device: str = "auto", payload: str = "stamp") -> PoolSpec:
        """The pool of a resolved scenario."""
        engine = scenario.engine
        owners, longest = _bounds(engine)
        return cls(
            pages=engine.pool_pages,
            page_size=engine.page_size,
            owners=owners + 1,
            max_tokens=longest,
            shape=_shape(scenario),
            device=device,
            payload=payload,
        )


def _bounds(engine: Engine) -> tuple[int, int]:
    """Most requests at once, and most tokens that one of them holds."""
    if isinstance(engine, VllmFlags):
        assert engine.max_num_seqs is not None
        assert engine.max_model_len is not None
        return engine.max_num_seqs, engine.max_model_len
    assert engine.max_running_requests is not None
    assert engine.context_length is not None
    clips = "no_output_clip" not in engine.emulate
    longest = min(engine.context_length, engine.pool_tokens) if clips else engine.pool_tokens
    return engine.max_running_requests, longest


def _shape(scenario: Scenario) -> KvShape:
    if scenario.model is None:
        return SMALL_SHAPE
    model = catalog.model(scenario.model)
    tp = scenario.hardware.tp_size if scenario.hardware else 1
    layers, heads, head_dim, element_bytes = model.kv_shape
    return KvShape(layers, max(1, heads // tp), head_dim, element_bytes)


def open_ledger(name: str, spec: PoolSpec) -> Ledger:
    """Make the named pool. Raises `ScenarioError` for an unknown name and `MemoryRefused` when it does not fit."""
    if name == "counting":
        return CountingLedger(spec.pages, spec.page_size, spec.owners + spec.nodes)
    if name == "paged":
        return PagedLedger(spec.pages, spec.page_size, spec.owners + spec.nodes)
    if name == "torch":
        try:
            real = importlib.import_module("pagestorm_real.pool")
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "pagestorm_real"):
                raise
            raise ScenarioError(
                "the torch pool needs torch, which is not installed: pip install 'pagestorm[torch]', "
                "or leave it out with --pools sim",
                key="pools",
            ) from error
        return cast(Ledger, real.open_ledger(spec))
    raise ScenarioError(f"no pool is called {name!r}; there are {', '.join(POOLS)} and sim", key="pools")
