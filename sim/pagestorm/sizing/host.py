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


class HostPool(NamedTuple):
    """One host pool. `asked_bytes` is what the engine checks, `buffer_bytes` what it then allocates."""

    name: str
    layers: int
    bytes_per_token: int
    page_size: int
    pages: int
    asked_bytes: int
    buffer_bytes: int

    @property
    def tokens(self) -> int:
        """Capacity in tokens (slots, for a state pool)."""
        return self.pages * self.page_size


def host_tokens(device_tokens: int, ratio: float, size_gb: float, bytes_per_token: int) -> int:
    """Tokens asked for: by size where one is given, else by ratio to the device pool."""
    if size_gb > 0:
        return int(size_gb * 1e9 // bytes_per_token)
    return int(device_tokens * ratio)


def anchor_pool(
    name: str,
    device_tokens: int,
    bytes_per_token: int,
    page_size: int,
    *,
    ratio: float,
    size_gb: float = 0,
    layers: int = 0,
    even_bytes: int | None = None,
) -> HostPool:
    """A pool that decides its own size: whole pages and one more, which the padding page takes.

    `bytes_per_token` has packed draft layers in it. `even_bytes`: the buffer's bytes a token, where they differ from
    what is checked (keys and values of different width share one buffer of the key's width).
    """
    tokens = host_tokens(device_tokens, ratio, size_gb, bytes_per_token)
    pages = tokens // page_size + 1
    size = pages * page_size
    buffer = size * (bytes_per_token if even_bytes is None else even_bytes)
    return HostPool(name, layers, bytes_per_token, page_size, pages, size * bytes_per_token, buffer)


def mha_bytes_per_token(head_dim: int, v_head_dim: int, heads: int, layers: int, element_bytes: int) -> int:
    """What the engine checks for a token of keys and values in so many layers, packed draft layers included."""
    return (head_dim + v_head_dim) * heads * layers * element_bytes


def mha_buffer_bytes_per_token(head_dim: int, heads: int, layers: int, element_bytes: int) -> int:
    """What it allocates: keys and values side by side, both of the key's width."""
    return 2 * head_dim * heads * layers * element_bytes


def mla_bytes_per_token(row_elements: int, layers: int, element_bytes: int) -> int:
    """One latent row in so many layers, packed draft layers included."""
    return row_elements * element_bytes * layers


def index_pool(
    anchor: HostPool, layers: int, bytes_per_token_per_layer: int, layout: str, name: str = "indexer"
) -> HostPool:
    """Index keys that ride on the anchor's pages: its page count, own bytes.

    `layers` are those that own keys, and one for each packed draft layer. The buffer has a page more than is checked.
    """
    page_size = anchor.page_size
    page_bytes = bytes_per_token_per_layer * page_size
    asked = anchor.pages * layers * page_bytes
    if layout not in ("layer_first", "page_first", "page_first_direct"):
        raise Refused(f"Unsupported layout: {layout}")
    allocated = (anchor.tokens + page_size + 1) // page_size
    return HostPool(
        name,
        layers,
        bytes_per_token_per_layer * layers,
        page_size,
        anchor.pages,
        asked,
        allocated * layers * page_bytes,
    )


def sidecar_pool(name: str, anchor: HostPool, bytes_per_token: int, device_tokens: int, layers: int) -> HostPool:
    """A draft's own host pool, with a slot for each of the anchor's."""
    return anchor_pool(
        name, device_tokens, bytes_per_token, anchor.page_size, ratio=anchor.tokens / device_tokens, layers=layers
    )


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


def check_pool(pool: HostPool, available: int) -> None:
    """Raises `Refused`, with the engine's message, for a pool larger than what its rank may claim."""
    if pool.asked_bytes <= available:
        return
    missing = pool.asked_bytes - available
    figures = f"Requesting {pool.asked_bytes / 1e9:.2f} GB but only have {available / 1e9:.2f} GB free."
    if pool.name.endswith("indexer"):
        raise Refused(f"Not enough host memory for DSA indexer hierarchical cache. {figures}", missing)
    raise Refused(
        f"Not enough host memory available. {figures} Please reduce the size of the hierarchical cache.", missing
    )


def mapped_bytes(buffer_bytes: int, hugepage: str = "") -> int:
    """What a buffer takes once mapped: whole pages, huge ones under `SGLANG_HUGEPAGE_SIZE` (2MB or 1GB; anything else
    is ignored with a warning, as the engine does)."""
    unit = HUGEPAGES.get(hugepage.strip().upper(), PAGE_BYTES)
    return -(-buffer_bytes // unit) * unit


def resolve_layout(layout: str, io_backend: str, storage: str) -> tuple[str, str]:
    """Memory layout and copy backend after the engine's own corrections."""
    if layout == "page_first_direct" and io_backend == "kernel":
        io_backend = "direct"
    if layout == "page_first" and io_backend == "direct":
        layout = "page_first_direct"
    if storage in ("mooncake", "npu_memcache") and layout == "layer_first":
        layout = {"direct": "page_first_direct", "kernel": "page_first"}.get(io_backend, layout)
    return layout, io_backend
