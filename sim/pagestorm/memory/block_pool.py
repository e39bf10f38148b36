"""vLLM's pool of numbered blocks with its prefix cache: block hashes and the free queue that is also the LRU list.

Source: vllm 0.33.0, `v1/core/block_pool.py`, `kv_cache_utils.py` (FreeKVCacheBlockQueue),
`single_type_kv_cache_manager.py` (FullAttentionManager); one group of layers, full attention.

    front  | unhashed blocks, last freed first | hashed blocks, longest unused first |  back
    taken from the front; a hashed block is a hit until it is taken

- Blocks are numbered 0..n-1; block 0 is the null block and never handed out. At the start the queue is 1, 2, ...
- A block of tokens is hashed when it is *scheduled*, not when it is computed, so a second request in the same pass
  can hit it.
- Equal blocks are not merged: a key may have several blocks, the oldest entry is the one that is hit.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from pagestorm.errors import PoolCorruption
from pagestorm.memory.blocks import NO_HIT, Hit, Text
from pagestorm.memory.ledger import Ints

_OWN_BLOCKS = 1 << 32
_NO_KEY = 0


class BlockPool:
    """Blocks with ids, in the engine's order."""

    def __init__(self, blocks: int, block_size: int) -> None:
        """`blocks` is the engine's number of GPU blocks, the null block included."""
        self.block_size = block_size
        self.total_blocks = blocks - 1
        self.cached_blocks = 0
        self.evicted_blocks = 0
        self._queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))
        self._holders = [0] * blocks
        self._key = [_NO_KEY] * blocks
        self._by_key: dict[int, list[int]] = {}
        self._table: dict[int, list[int]] = {}
        self._hashed: dict[int, int] = {}
        self._text: dict[int, Text] = {}
        # Shared text up to some length -> key; keys of shared text are negative, those of a request's own positive.
        self._shared: dict[tuple[tuple[int, int], ...], int] = {}

    @property
    def free_blocks(self) -> int:
        return len(self._queue)

    def queue(self) -> list[int]:
        """Ids of the free blocks in the order in which they will be taken."""
        return list(self._queue)

    def table(self, row: int) -> list[int]:
        """Ids of a row's blocks, by position."""
        return list(self._table.get(row, ()))

    # --- what a prompt is ----------------------------------------------------------------------------------------

    def text(self, number: int, prefix: Sequence[tuple[int, int]], input_tokens: int) -> Text:
        shared = []
        runs = [(group, tokens) for group, tokens in prefix if tokens > 0]
        end = self.block_size
        length = min(input_tokens, sum(tokens for _, tokens in runs))
        while end <= length:
            start_of_text = _clip(runs, end)
            shared.append(self._shared.setdefault(start_of_text, -1 - len(self._shared)))
            end += self.block_size
        return Text(shared, (number + 1) * _OWN_BLOCKS)

    def lookup(self, text: Text | None, tokens: int) -> Hit:
        assert text is not None, "every request of a pool with a prefix cache has a text"
        found: list[int] = []
        by_key = self._by_key
        for block in range((tokens - 1) // self.block_size):
            ids = by_key.get(text.key(block))
            if ids is None:
                break
            found.append(ids[0])
        if not found:
            return NO_HIT
        holders = self._holders
        return Hit(len(found) * self.block_size, found, sum(not holders[i] for i in found))

    # --- taking and giving ---------------------------------------------------------------------------------------

    def adopt(self, row: int, text: Text | None, hit: Hit) -> None:
        assert text is not None, "every request of a pool with a prefix cache has a text"
        if row in self._table:
            raise PoolCorruption(f"row {row} holds blocks already")
        for i in hit.blocks:
            if not self._holders[i]:
                del self._queue[i]
                self.cached_blocks -= 1
            self._holders[i] += 1
        self._table[row] = list(hit.blocks)
        self._hashed[row] = len(hit.blocks)
        self._text[row] = text

    def take(self, rows: Ints, old: Ints, new: Ints, known: Ints) -> int:
        size, taken = self.block_size, 0
        for row, room, tokens in zip(rows.tolist(), new.tolist(), known.tolist(), strict=True):
            table = self._table[row]
            for _ in range(-(-room // size) - len(table)):
                table.append(self._pop())
                taken += 1
            self._hash(row, tokens)
        return taken

    def decode(self, rows: Ints, room: Ints, known: Ints, steps: int) -> int:
        """Blocks go out in (step, row) order; hashing can wait for the end, since nothing is looked up meanwhile."""
        size = self.block_size
        numbered = rows.tolist()
        due: list[tuple[int, int]] = []
        for place, tokens in enumerate(room.tolist()):
            # A row opens a block at the steps s (from 0) at which tokens + s is a multiple of the block size.
            due += [(step, place) for step in range(-tokens % size, steps, size)]
        due.sort()
        for _, place in due:
            self._table[numbered[place]].append(self._pop())
        for row, tokens in zip(numbered, known.tolist(), strict=True):
            self._hash(row, tokens + steps)
        return len(due)

    def _pop(self) -> int:
        if not self._queue:
            raise PoolCorruption("more blocks were asked for than are free")
        block, _ = self._queue.popitem(last=False)
        key = self._key[block]
        if key != _NO_KEY:
            ids = self._by_key[key]
            ids.remove(block)
            if not ids:
                del self._by_key[key]
            self._key[block] = _NO_KEY
            self.cached_blocks -= 1
            self.evicted_blocks += 1
        self._holders[block] = 1
        return block

    def _hash(self, row: int, tokens: int) -> None:
        """Whole blocks among the first `tokens` of the row become known to the cache."""
        first, last = self._hashed[row], tokens // self.block_size
        if first >= last:
            return
        table, text = self._table[row], self._text[row]
        for place in range(first, last):
            key, block = text.key(place), table[place]
            self._key[block] = key
            self._by_key.setdefault(key, []).append(block)
        self._hashed[row] = last

    def give(self, rows: Sequence[int]) -> int:
        before = len(self._queue)
        for row in rows:
            self._give(row)
        return len(self._queue) - before

    def _give(self, row: int) -> None:
        table = self._table.pop(row)
        del self._hashed[row], self._text[row]
        queue, holders, keys = self._queue, self._holders, self._key
        unhashed = []
        for block in reversed(table):
            holders[block] -= 1
            if holders[block]:
                continue
            if keys[block] == _NO_KEY:
                unhashed.append(block)
            else:
                queue[block] = None
                self.cached_blocks += 1
        # The group keeps its order at the front, so its last goes in first.
        for block in reversed(unhashed):
            queue[block] = None
            queue.move_to_end(block, last=False)

    def preview(self) -> _HolderPreview:
        return _HolderPreview(self._table, self._holders)

    def audit(self) -> None:
        held = Counter(block for table in self._table.values() for block in table)
        for block in range(1, self.total_blocks + 1):
            if held[block] != self._holders[block]:
                raise PoolCorruption(f"block {block} has {held[block]} holders, {self._holders[block]} are counted")
            if (block in self._queue) != (held[block] == 0):
                raise PoolCorruption(f"block {block} is held {held[block]} times and free: {block in self._queue}")
            key = self._key[block]
            if key != _NO_KEY and block not in self._by_key.get(key, ()):
                raise PoolCorruption(f"block {block} is hashed but cannot be found")
        if 0 in self._queue or held[0]:
            raise PoolCorruption("the null block was handed out")
        if self.cached_blocks != sum(self._key[block] != _NO_KEY for block in self._queue):
            raise PoolCorruption(
                f"{self.cached_blocks} free cached blocks are counted, which is not what the queue has"
            )


class _HolderPreview:
    """Rows that went already count as gone: what two victims share becomes free with the second."""

    def __init__(self, table: dict[int, list[int]], holders: list[int]) -> None:
        self._table = table
        self._holders = holders
        self._gone: Counter[int] = Counter()

    def give(self, row: int) -> int:
        freed = 0
        for block in self._table[row]:
            self._gone[block] += 1
            freed += self._gone[block] == self._holders[block]
        return freed


def _clip(runs: list[tuple[int, int]], tokens: int) -> tuple[tuple[int, int], ...]:
    """The first `tokens` tokens of the runs."""
    kept = []
    for group, length in runs:
        if tokens <= 0:
            break
        kept.append((group, min(length, tokens)))
        tokens -= length
    return tuple(kept)
