"""What a sizing answers: the verdict first, then every pool."""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec import Struct, field

from pagestorm.sizing.account import Line, both, shown

FITS, FITS_ONLY_WITH, REFUSED = "fits", "fits_only_with", "refused"
HOST, DEVICE = "host", "device"


class Pool(NamedTuple):
    """One pool of a rank. `tokens` of a state pool are slots."""

    name: str
    where: str
    layers: int
    bytes_per_token: float
    tokens: int
    bytes: int


class Sizing(Struct, kw_only=True):
    """Every figure of one rank, in the engine's own terms. None: does not apply, or could not be worked out."""

    engine: str
    model: str | None = None
    gpu: str | None = None
    verdict: str = FITS
    error: str | None = None
    remedy: str | None = None
    missing_bytes: int | None = None
    weights_bytes_per_rank: int | None = None
    kv_bytes_per_token: int | None = None
    kv_pool_bytes: int | None = None
    pool_tokens: int | None = None
    pool_pages: int | None = None
    page_size: int | None = None
    swa_pool_tokens: int | None = None
    state_slots: int | None = None
    max_running_requests: int | None = None
    max_concurrency: float | None = None
    kv_cache_groups: int | None = None
    full_length_requests: float | None = None
    mem_fraction_static: float | None = None
    beside_pool_bytes: int | None = None
    needed_beside_pool_bytes: int | None = None
    host_pool_bytes: int | None = None
    host_indexer_bytes: int | None = None
    host_budget_bytes: int | None = None
    ranks_per_host: int = 1
    host_budgets_bytes: list[int] = field(default_factory=list)
    pools: list[Pool] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unknown_flags: list[str] = field(default_factory=list)
    ignored_flags: list[str] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)

    def as_dict(self, explain: bool = False) -> dict[str, Any]:
        """Flat, JSON-able. `explain` adds every figure with its formula and source."""
        plain = {name: getattr(self, name) for name in self.__struct_fields__ if name not in ("pools", "lines")}
        plain["pools"] = [pool._asdict() for pool in self.pools]
        if explain:
            plain["explain"] = [line._asdict() for line in self.lines]
        return plain

    def text(self, explain: bool = False) -> str:
        """For a person: the verdict, the pools, the limits."""
        parts = [self._verdict(), self._pools(), self._limits(), self._notes()]
        if explain:
            parts.append("\n".join(line.text() for line in self.lines))
        return "\n\n".join(part for part in parts if part)

    def _verdict(self) -> str:
        head = {FITS: "fits", FITS_ONLY_WITH: "fits only with changes", REFUSED: "refused"}[self.verdict]
        on = f" on {self.gpu}" if self.gpu else ""
        lines = [f"{head}: {self.model or 'no model'}{on}, {self.engine}"]
        lines += [part for part in (self.error, self.remedy) if part]
        if self.missing_bytes and self.missing_bytes > 0:
            lines.append(f"missing: {both(self.missing_bytes)}")
        return "\n".join(lines)

    def _pools(self) -> str:
        if not self.pools:
            return ""
        rows = [("pool", "where", "layers", "bytes/token", "tokens", "size")]
        for pool in self.pools:
            each = f"{pool.bytes_per_token:,.10g}"
            rows.append((pool.name, pool.where, str(pool.layers), each, f"{pool.tokens:,}", both(pool.bytes)))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )

    def _limits(self) -> str:
        figures = (
            ("weights per rank", self.weights_bytes_per_rank, "bytes"),
            ("KV per token", self.kv_bytes_per_token, "bytes"),
            ("pool", self.pool_tokens, "tokens"),
            ("window pool", self.swa_pool_tokens, "tokens"),
            ("page", self.page_size, "tokens"),
            ("state slots", self.state_slots, "slots"),
            ("max running requests", self.max_running_requests, "requests"),
            ("maximum concurrency", self.max_concurrency, "ratio"),
            ("requests of full length", self.full_length_requests, "ratio"),
            ("mem_fraction_static", self.mem_fraction_static, "ratio"),
            ("left beside the pool", self.beside_pool_bytes, "bytes"),
            ("needed beside the pool", self.needed_beside_pool_bytes, "bytes"),
            ("host pools per rank", self.host_pool_bytes, "bytes"),
            ("of that, the indexer", self.host_indexer_bytes, "bytes"),
            ("host budget per rank", self.host_budget_bytes, "bytes"),
        )
        width = max(len(label) for label, _, _ in figures)
        return "\n".join(
            f"{label:<{width}}  {shown(value, unit)}" for label, value, unit in figures if value is not None
        )

    def _notes(self) -> str:
        notes = [f"note: {warning}" for warning in self.warnings]
        notes += [f"unknown to {self.engine}: {flag}" for flag in self.unknown_flags]
        if self.ignored_flags:
            notes.append(f"no part in sizing: {', '.join(self.ignored_flags)}")
        return "\n".join(notes)
