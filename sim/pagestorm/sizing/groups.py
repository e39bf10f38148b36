"""vLLM's KV cache groups: which layers share a block table, what a block weighs, how many blocks a request takes.

Rules: vllm 0.33.0, `v1/core/kv_cache_planning.py` and `v1/kv_cache_interface.py`, for the layer-outer layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

FULL, SLIDING, CHUNKED, STATE = "full", "sliding", "chunked", "state"
GROUP_PADDING_FACTOR = 1.5


class Spec(NamedTuple):
    """One layer's cache: its kind, tokens in a block, bytes of a block. `window` of a sliding or chunked layer.

    `state_blocks` of a state layer are what a request holds. Equal specs can share a group.
    """

    kind: str
    block_size: int
    page_bytes: int
    window: int = 0
    state_blocks: int = 0


class Limits(NamedTuple):
    """What a request's blocks depend on: longest sequence, tokens scheduled and not yet settled."""

    max_model_len: int
    in_flight_tokens: int


class Group(NamedTuple):
    """Layers that share a block table; `specs` has an entry for each layer."""

    specs: tuple[Spec, ...]

    @property
    def spec(self) -> Spec:
        return self.specs[0]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers of the group."""
        return sum(spec.page_bytes for spec in self.specs)

    def blocks(self, limits: Limits) -> int:
        """Blocks of this group that a request of full length holds."""
        return max(request_blocks(spec, limits) for spec in set(self.specs))


def request_blocks(spec: Spec, limits: Limits) -> int:
    """Blocks of one layer that a request of full length holds at the worst."""
    if spec.kind == STATE:
        return spec.state_blocks
    if spec.kind == SLIDING:
        held = min(spec.window - 1 + limits.in_flight_tokens, limits.max_model_len)
        return -(-held // spec.block_size) + 1
    if spec.kind == CHUNKED:
        return -(-min(spec.window + limits.in_flight_tokens, limits.max_model_len) // spec.block_size)
    return -(-limits.max_model_len // spec.block_size)


def group_layers(specs: Sequence[Spec], hybrid: bool = True) -> tuple[Group, ...]:
    """The groups of a model's layers. `hybrid` False: window and chunked layers keep every token."""
    if not hybrid:
        specs = promoted(specs)
    if len(set(specs)) == 1 or _uniform(specs):
        return (Group(tuple(specs)),)
    unified = unify_pages(specs)
    buckets: dict[Spec, list[Spec]] = {}
    for spec in unified:
        buckets.setdefault(spec, []).append(spec)
    size = _group_size([len(bucket) for bucket in buckets.values()])
    groups = []
    for bucket in buckets.values():
        count = -(-len(bucket) // size)
        groups += [Group(tuple(bucket[place::count])) for place in range(count)]
    return tuple(groups)


def _uniform(specs: Sequence[Spec]) -> bool:
    """Whether all layers keep the same tokens, whatever their width: one group then."""
    return len({(spec.kind, spec.block_size, spec.window, spec.state_blocks) for spec in specs}) == 1 and (
        specs[0].kind != STATE or len({spec.page_bytes for spec in specs}) == 1
    )


def _group_size(counts: list[int]) -> int:
    least, most = min(counts), max(counts)
    return most if most < least * GROUP_PADDING_FACTOR else least


def promoted(specs: Sequence[Spec]) -> list[Spec]:
    """Window and chunked layers taken as full ones, where there are full ones."""
    if not any(spec.kind == FULL for spec in specs):
        return list(specs)
    return [spec._replace(kind=FULL, window=0) if spec.kind in (SLIDING, CHUNKED) else spec for spec in specs]


def unify_pages(specs: Sequence[Spec]) -> list[Spec]:
    """One block weight for all layers: larger blocks where that is a whole multiple, padding elsewhere."""
    most = max(spec.page_bytes for spec in specs)
    unified = []
    for spec in specs:
        if spec.kind != STATE and most % spec.page_bytes == 0:
            spec = spec._replace(block_size=spec.block_size * (most // spec.page_bytes))
        unified.append(spec._replace(page_bytes=most))
    return unified


def pool_block_bytes(groups: Sequence[Group]) -> int:
    """Bytes that one block id takes in the shared pool: those of the widest group."""
    return max(group.block_bytes for group in groups)


def request_total_blocks(groups: Sequence[Group], limits: Limits) -> int:
    """Blocks that a request of full length takes, over all groups: each draws its own from the shared pool."""
    return sum(group.blocks(limits) for group in groups)


def max_concurrency(blocks: int, groups: Sequence[Group], limits: Limits) -> float:
    """vLLM's "Maximum concurrency": requests of full length that the pool holds."""
    return blocks / request_total_blocks(groups, limits)


def pool_tokens(blocks: int, groups: Sequence[Group]) -> int:
    """Tokens that the pool holds: its blocks shared out to the groups, times the smallest block.

    With one group this is blocks times block size. Releases up to 2026 print it as "GPU KV cache size"; 0.33 prints
    `capacity_tokens`.
    """
    sizes = [spec.block_size for group in groups for spec in group.specs if spec.kind != STATE]
    return blocks // len(groups) * min(sizes or [group.spec.block_size for group in groups])


def capacity_tokens(concurrency: float, max_model_len: int) -> int:
    """What vLLM 0.33 prints as "GPU KV cache size"."""
    return int(concurrency * max_model_len)


def longest_that_fits(fits: Callable[[int], bool], most: int) -> int:
    """The largest length up to `most` that fits, by bisection; 0 for none (`estimate_max_model_len`)."""
    if not fits(1):
        return 0
    left, right, found = 1, most, 1
    while left <= right:
        middle = (left + right) // 2
        if fits(middle):
            found, left = middle, middle + 1
        else:
            right = middle - 1
    return found


def hybrid_block_size(block_size: int, alignment: int, state_page_bytes: int, token_bytes: int) -> int:
    """Tokens of a block of an attention layer beside state layers: enough for its page to hold a state.

    vllm 0.33.0 `platforms/interface.py` (`_align_hybrid_block_size`).
    """
    unit = max(alignment, block_size)
    return max(block_size, unit * -(-state_page_bytes // (unit * token_bytes)))
