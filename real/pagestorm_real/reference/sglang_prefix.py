"""SGLang's own prefix cache, request by request: `UnifiedRadixCache` with either tree core, allocator, request table.

Runs inside the reference environment. A text is a list of spans [source, start, length] as in `pagestorm.memory.text`;
here each becomes tokens, one of its own for each place of each source.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import traceback
from array import array
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from pagestorm_real.reference.serving import BadPayload
from pagestorm_real.reference.sglang_engine import Engine, Shape
from pagestorm_real.reference.sglang_workload import Fields

CORES = ("rust", "python")
POLICIES = ("lru", "lfu", "fifo", "mru", "filo", "priority", "slru", "tlru")
SPECULATION: dict[str, object] = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 1,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 2,
}
SOURCE_TOKENS = 1 << 16
FIRST_TOKEN = 3
LONGEST_TOKENS = 8192
NODE = re.compile(r"^( *)\[(\d+)\] +\d+ +full_lock=(\d+) ", re.MULTILINE)


def prefix(engine: Engine, payload: dict[str, Any]) -> dict[str, Any]:
    """A sequence of operations on one prefix cache.

    Payload: `page_size`, `pool_tokens`, `rows`, `core` (rust | python), `policy`, `tuning` (what the policy takes),
    `bigram` (the keys of EAGLE; requests may then hold more than they committed), and `operations`:

        ["match", text, limit]      of the first `limit` tokens, null for all
        ["touch", text]             as the queue refreshes those that wait
        ["hold", name, text, limit] match and lock            ["unhold", name]
        ["admit", request, prompt, output source, priority]   match all but the last token, lock, read the prefix
        ["extend", request, tokens] prefill a chunk           ["checkpoint", request]   after it
        ["decode", request, tokens, committed]                allocate, and commit so many more
        ["finish", request, beyond] the last `beyond` committed tokens come after its end
        ["retract", request]        it can be admitted again, with prompt and source as before
        ["evict", tokens]           ["make_room", tokens]
        ["group_begin"]             ["group_end"]

    Answers with a list of `states`, one after each operation: its `result` (tokens matched, evicted), `available`,
    `evictable`, `protected`, the `free` page ids in order, the `tree` as [first page of the parent or 0, locks, pages]
    of each node and the `rows` as [request, pages], both sorted; and `error`, where the engine raised.
    """
    fields = Fields("prefix", payload)
    shape = Shape(
        page_size=fields.whole("page_size", 1, 1),
        pool_tokens=fields.whole("pool_tokens", 1),
        rows=fields.whole("rows", 1),
        longest_tokens=LONGEST_TOKENS,
        radix=True,
        tree_core=fields.one_of("core", CORES, "rust"),
    )
    policy, tuning = fields.one_of("policy", POLICIES, "lru"), fields.maybe("tuning")
    bigram = fields.flag("bigram")
    operations = fields.take("operations")
    fields.done()
    states: list[dict[str, Any]] = []
    with engine.configured(page_size=shape.page_size, **(SPECULATION if bigram else {})):
        cache = _Cache(engine, shape, policy, tuning, bigram)
        for operation in operations:
            try:
                result = cache.operate(*operation)
            except BadPayload:
                raise
            except Exception as error:  # the engine's refusal is an answer
                trace = traceback.format_exc()
                return {"states": states, "error": f"{operation}: {type(error).__name__}: {error}", "trace": trace}
            states.append({"result": result, **cache.state()})
    return {"states": states, "error": None, "trace": ""}


class _Cache:
    """One cache and the requests that use it."""

    def __init__(
        self, engine: Engine, shape: Shape, policy: str, tuning: dict[str, float] | None, bigram: bool
    ) -> None:
        memory = "sglang.srt.mem_cache."
        self.common: Any = import_module(memory + "common")
        self.calls: Any = import_module(memory + "base_prefix_cache")
        self.key: Any = import_module(memory + "radix_cache").RadixKey
        self.engine, self.torch, self.page_size = engine, engine.torch, shape.page_size
        self.kv = engine.allocator(shape)
        self.rows = engine.rows(
            size=shape.rows, max_context_len=shape.longest_tokens, device="cpu", enable_memory_saver=False
        )
        self.tree = engine.cache(
            engine.cache_params(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.kv,
                page_size=shape.page_size,
                is_eagle=bigram,
                eviction_policy=policy,
                eviction_policy_config=tuning,
                tree_components=(engine.component.FULL,),
                tree_core_backend=shape.tree_core,
            )
        )
        if self.tree._tree_core_backend != shape.tree_core:
            raise BadPayload(f"prefix: the engine has no {shape.tree_core} core here")
        self.requests: dict[int, Any] = {}
        self.sources: dict[int, int] = {}
        self.held: dict[Any, Any] = {}
        self.operations: dict[str, Callable[..., int | None]] = {
            name: getattr(self, name)
            for name in (
                *("match", "touch", "hold", "unhold", "admit", "extend", "checkpoint", "decode", "finish", "retract"),
                *("evict", "make_room", "group_begin", "group_end"),
            )
        }

    def operate(self, name: str, *values: Any) -> int | None:
        if name not in self.operations:
            raise BadPayload(f"prefix: no operation {name!r}; there are {', '.join(self.operations)}")
        return self.operations[name](*values)

    # What reads

    def match(self, text: list[list[int]], limit: int | None) -> int:
        return int(self._match(text, limit).device_prefix_len)

    def touch(self, text: list[list[int]]) -> None:
        self.tree.touch_prefix(self.key(_tokens(text)))

    def hold(self, name: str, text: list[list[int]], limit: int | None) -> int:
        match = self._match(text, limit)
        self.held[name] = self.tree.lock(match.last_device_node)
        return int(match.device_prefix_len)

    def unhold(self, name: str) -> None:
        self.tree.unlock(self.held.pop(name))

    def _match(self, text: list[list[int]], limit: int | None) -> Any:
        return self.tree.match_prefix(self.calls.MatchPrefixParams(key=self.key(_tokens(text), limit=limit)))

    # A request

    def admit(self, request: int, prompt: list[list[int]], source: int, priority: int) -> int:
        if request not in self.requests:
            req = self.engine.request(request, _tokens(prompt), SOURCE_TOKENS)
            req.priority = priority
            self.requests[request], self.sources[request] = req, source
        req = self.requests[request]
        req.init_next_round_input(self.tree)
        req.lock = self.tree.lock(req.last_node)
        if self.rows.alloc([req]) is None:
            raise BadPayload("prefix: more requests than rows")
        pages = self.tree.prefix_device_indices(req)
        self.rows.write((req.kv.req_pool_idx, slice(0, req.prefix_len)), pages.to(self.torch.int32))
        req.kv.kv_allocated_len = req.kv.kv_committed_len = req.extend_end = int(req.prefix_len)
        return int(req.prefix_len)

    def extend(self, request: int, tokens: int) -> None:
        req = self.requests[request]
        self._allocate(req, tokens)
        req.kv.kv_committed_len = req.extend_end = req.kv.kv_allocated_len

    def checkpoint(self, request: int) -> None:
        self.common.checkpoint_kv_cache(self.requests[request], self.tree)

    def decode(self, request: int, tokens: int, committed: int) -> None:
        req = self.requests[request]
        self._allocate(req, tokens)
        start = len(req.output_ids)
        req.output_ids.extend(_tokens([[self.sources[request], start, committed]]))
        req.kv.kv_committed_len += committed
        if req.kv.kv_committed_len > req.kv.kv_allocated_len:
            raise BadPayload("prefix: a request commits more than it allocated")

    def finish(self, request: int, beyond: int) -> None:
        req = self.requests.pop(request)
        req.finished_reason = SimpleNamespace()
        if beyond:
            req.finished_len = len(req.output_ids) - beyond
        self.common.release_kv_cache(req, self.tree, checkpoint=True)

    def retract(self, request: int) -> None:
        req = self.requests[request]
        self.common.release_kv_cache(req, self.tree, checkpoint=False)
        req.reset_for_retract()

    def _allocate(self, req: Any, tokens: int) -> None:
        """Slots for that many more tokens, as the engine's prefill takes them, written to the request's row."""
        if not tokens:
            return
        start = req.kv.kv_allocated_len
        end = start + tokens
        row = self.rows.req_to_token[req.kv.req_pool_idx]
        if self.page_size == 1:
            slots = self.kv.alloc(tokens)
        else:
            before, after = self.torch.tensor([start]), self.torch.tensor([end])
            last = row[start - 1 : start].to(self.torch.int64) if start else self.torch.tensor([-1])
            slots = self.kv.alloc_extend(before, before, after, after, last, tokens)
        if slots is None:
            raise MemoryError(f"{tokens} tokens are not available")
        self.rows.write((req.kv.req_pool_idx, slice(start, end)), slots.to(self.torch.int32))
        req.kv.kv_allocated_len = end

    # Room

    def evict(self, tokens: int) -> int:
        return int(self.tree.evict(self.calls.EvictParams(num_tokens=tokens)).num_tokens_evicted)

    def make_room(self, tokens: int) -> int:
        before = self.tree.total_size()[0]
        self.kv.evict_to_free_tokens(self.tree, tokens)
        return int(before - self.tree.total_size()[0])

    def group_begin(self) -> None:
        self.kv.free_group_begin()

    def group_end(self) -> None:
        self.kv.free_group_end()

    # What there is

    def state(self) -> dict[str, Any]:
        """As `prefix` describes it."""
        table, p = self.rows.req_to_token, self.page_size
        held = [(n, req.kv) for n, req in sorted(self.requests.items()) if req.kv.holds_kv]
        return {
            "available": int(self.kv.available_size()),
            "evictable": int(self.tree.evictable_size()),
            "protected": int(self.tree.protected_size()),
            "free": self.kv.free_pages.tolist(),
            "tree": self._tree(),
            "rows": [[n, *(table[kv.req_pool_idx, : kv.kv_allocated_len : p] // p).tolist()] for n, kv in held],
        }

    def _tree(self) -> list[list[int]]:
        """The cores share no way to walk the tree but their printed form: indent, node id, length, locks."""
        nodes, parents = [], {-1: 0}
        for indent, node, locks in NODE.findall(_printed(self.tree.pretty_print)):
            depth = len(indent)
            value = self.tree.tree_core.get_component_device_value(int(node), self.engine.component.FULL)
            if value is None or not len(value):
                parents[depth] = 0
                continue
            pages = (value[:: self.page_size] // self.page_size).tolist()
            above = max(d for d in parents if d < depth)
            parents = {d: first for d, first in parents.items() if d < depth} | {depth: pages[0]}
            nodes.append([parents[above], int(locks), *pages])
        return sorted(nodes, key=lambda row: row[2])


def _tokens(text: list[list[int]]) -> Any:
    """The tokens of a text, a number of its own for each place of each source."""
    tokens = array("q")
    for source, start, length in text:
        first = FIRST_TOKEN + source * SOURCE_TOKENS + start
        tokens.extend(range(first, first + length))
    return tokens


def _printed(call: Callable[[], None]) -> str:
    """What `call` prints, from Python or from native code."""
    sys.stdout.flush()
    with tempfile.TemporaryFile() as caught:
        kept = os.dup(1)
        os.dup2(caught.fileno(), 1)
        try:
            call()
            sys.stdout.flush()
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        caught.seek(0)
        return caught.read().decode()
