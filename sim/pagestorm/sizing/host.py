"""Host pools of SGLang's hierarchical cache: tokens, pages, bytes, and when the engine refuses them.

Formulas: sglang 0.5.23, `mem_cache/pool_host/{base,mha,mla,dsa,mamba,host_pool_decl}.py`,
`mem_cache/hybrid_cache/hybrid_pool_assembler.py`, `mem_cache/hicache_auto_size.py`,
`mem_cache/storage/mmap/mmap_allocator.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pagestorm.sizing.account import Refused

SOURCE = "sglang 0.5.23 mem_cache/pool_host/base.py"
INDEXER_SOURCE = "sglang 0.5.23 mem_cache/pool_host/dsa.py"
GB = 10**9
DEFAULT_RATIO, BUFFER_RATIO, BACKUP_RATIO = 2.0, 1.2, 0.2
DEFAULT_FRACTION, SLACK = 0.8, 0.05
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_first_kv_split", "page_head")
PAGE_BYTES = 4096
HUGEPAGES = {"2MB": 2 << 20, "1GB": 1 << 30}


class Kind(NamedTuple):
    """A class of host pools: the layouts that it takes, and what it says to another one."""

    layouts: tuple[str, ...]
    unsupported: str = "Unsupported layout: {layout}"
    layout_first: bool = False


PAGE_FIRST = ("page_first", "page_first_direct")
HEADS = Kind(("layer_first", *PAGE_FIRST, "page_head"))
"""Keys and values of one width, in one buffer."""
UNEVEN_HEADS = Kind(
    PAGE_FIRST,
    "Unsupported layout for models with head_dim != v_head_dim: {layout}; expected 'page_first' or "
    "'page_first_direct'.",
)
SCALED_HEADS = Kind(
    PAGE_FIRST[:1], "MXFP8 KV host pool supports only the page_first layout, got {layout!r}.", layout_first=True
)
LATENT = Kind(("layer_first", *PAGE_FIRST))
INDEX = Kind(("layer_first", *PAGE_FIRST))
STATE = Kind((*PAGE_FIRST, "page_first_kv_split"), layout_first=True)
"""States look at the layout before they look at the memory."""
KV_SPLIT = "page_first_kv_split"
NO_KV_SPLIT = "'NoneType' object has no attribute 'index_layer_indices'"
"""What a latent pool says to the layout of Ascend devices."""


class HostPool(NamedTuple):
    """One host pool. `asked_bytes` is what the engine checks, `buffers` the bytes of each buffer that it then maps."""

    name: str
    kind: Kind
    layers: int
    bytes_per_token: int
    page_size: int
    pages: int
    asked_bytes: int
    buffers: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Capacity in tokens (slots, for a state pool)."""
        return self.pages * self.page_size

    def mapped_bytes(self, hugepage: str = "") -> int:
        """What the buffers take: whole pages, huge ones under `SGLANG_HUGEPAGE_SIZE` (2MB or 1GB; anything else is
        ignored with a warning, as the engine does)."""
        unit = HUGEPAGES.get(hugepage.strip().upper(), PAGE_BYTES)
        return sum(-(-size // unit) * unit for size in self.buffers)


def host_tokens(device_tokens: int, ratio: float, size_gb: float, bytes_per_token: int) -> int:
    """Tokens asked for: by size where one is given, else by ratio to the device pool."""
    if size_gb > 0:
        return int(size_gb * 1e9 // bytes_per_token)
    return int(device_tokens * ratio)


def anchor_pool(
    name: str,
    kind: Kind,
    device_tokens: int,
    parts: Sequence[int],
    page_size: int,
    *,
    ratio: float,
    size_gb: float = 0,
    layers: int = 0,
) -> HostPool:
    """A pool that decides its own size: whole pages and one more, which the padding page takes.

    `parts` are the bytes of a token in each of its buffers, packed draft layers included.
    """
    bytes_per_token = sum(parts)
    pages = host_tokens(device_tokens, ratio, size_gb, bytes_per_token) // page_size + 1
    size = pages * page_size
    buffers = tuple(size * part for part in parts)
    return HostPool(name, kind, layers, bytes_per_token, page_size, pages, size * bytes_per_token, buffers)


def mha_parts(head_dim: int, v_head_dim: int, heads: int, layers: int, element_bytes: int) -> tuple[int, ...]:
    """Bytes of a token of keys and values in so many layers: one buffer, or two where the widths differ."""
    keys, values = (width * heads * layers * element_bytes for width in (head_dim, v_head_dim))
    return (keys + values,) if head_dim == v_head_dim else (keys, values)


def index_pool(anchor: HostPool, layers: int, bytes_per_token_per_layer: int, name: str = "indexer") -> HostPool:
    """Index keys that ride on the anchor's pages: its page count, own bytes.

    `layers` are those that own keys, and one for each packed draft layer. The buffer has a page more than is checked.
    """
    page_size = anchor.page_size
    page_bytes = bytes_per_token_per_layer * page_size * layers
    allocated = (anchor.tokens + page_size + 1) // page_size
    return HostPool(
        name,
        INDEX,
        layers,
        bytes_per_token_per_layer * layers,
        page_size,
        anchor.pages,
        anchor.pages * page_bytes,
        (allocated * page_bytes,),
    )


def sidecar_pool(
    name: str, kind: Kind, anchor: HostPool, parts: Sequence[int], device_tokens: int, layers: int
) -> HostPool:
    """A draft's own host pool, with a slot for each of the anchor's."""
    ratio = anchor.tokens / device_tokens
    return anchor_pool(name, kind, device_tokens, parts, anchor.page_size, ratio=ratio, layers=layers)


def split_size(size_gb: float, device_bytes: Sequence[float]) -> list[float]:
    """`--hicache-size` over the host pools of a hybrid model, by the bytes of their device pools."""
    total = sum(device_bytes)
    return [size_gb * each / total for each in device_bytes]


def auto_ratio(
    budget: int, device_bytes: int, requested: float = DEFAULT_RATIO, fraction: float = DEFAULT_FRACTION
) -> float:
    """The ratio where neither size nor ratio is given: reduced until this machine's pools fit. Raises `Refused`."""
    allowed = int(budget * fraction)
    ratio = min(requested, allowed * (1 - SLACK) / device_bytes)
    if ratio <= 0:
        raise Refused(
            "No host memory is left for HiCache after the 10 GiB reserve; set --hicache-ratio or --hicache-size "
            "explicitly."
        )
    return ratio


def check_layout(pool: HostPool, layout: str) -> None:
    """Raises `Refused` for a layout that the pool's class does not take."""
    if layout in pool.kind.layouts:
        return
    message = pool.kind.unsupported.format(layout=layout)
    if pool.kind is LATENT and layout == KV_SPLIT:
        message = NO_KV_SPLIT
    raise Refused(message, remedy=f"use --hicache-mem-layout {PAGE_FIRST[0]}")


def check_pool(pool: HostPool, available: int, layout: str = PAGE_FIRST[0]) -> None:
    """Raises `Refused`, with the engine's message, for a pool larger than what its rank may claim, or of a layout that
    its class does not take."""
    if pool.kind.layout_first:
        check_layout(pool, layout)
    if pool.asked_bytes > available:
        missing = pool.asked_bytes - available
        figures = f"Requesting {pool.asked_bytes / 1e9:.2f} GB but only have {available / 1e9:.2f} GB free."
        if pool.kind is INDEX:
            raise Refused(f"Not enough host memory for DSA indexer hierarchical cache. {figures}", missing)
        raise Refused(
            f"Not enough host memory available. {figures} Please reduce the size of the hierarchical cache.", missing
        )
    check_layout(pool, layout)


def resolve_layout(layout: str, io_backend: str, storage: str) -> tuple[str, str]:
    """Memory layout and copy backend after the engine's own corrections."""
    if layout == "page_first_direct" and io_backend == "kernel":
        io_backend = "direct"
    if layout == "page_first" and io_backend == "direct":
        layout = "page_first_direct"
    if storage in ("mooncake", "npu_memcache") and layout == "layer_first":
        layout = {"direct": "page_first_direct", "kernel": "page_first"}.get(io_backend, layout)
    return layout, io_backend
