"""The real pool: free list, request table and K/V buffers as tensors on one device.

It shares no allocation code with the pure-Python pool, so that the two can be compared. Lengths and page counts are
kept on the host, where the calls come from; page ids are only ever on the device. Nothing loops over tokens or
requests, and no call waits for the device more than a fixed number of times.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pagestorm.errors import PoolCorruption, ScenarioError
from pagestorm.memory.allocator import PageIds
from pagestorm.memory.ledger import FULL, Ints
from pagestorm_real import budget
from pagestorm_real.budget import TOKENS_AT_ONCE
from pagestorm_real.buffers import KvBuffers
from pagestorm_real.nodes import NodePages
from pagestorm_real.payload import DEFAULT_PAYLOAD, Kind, Payload

if TYPE_CHECKING:
    from pagestorm.memory.pools import PoolSpec

_OWNED, _READ_ONLY, _DROPPED = 0, 1, 2
_NO_PAGE = -1
# A page that came from another owner is remembered as (stay << 24 | page number there) of whoever filled it.
_ORIGIN_BITS = 24


class TorchPool:
    """The page allocator as tensors: a ring of page ids; taking and giving touch the pages concerned, no others.

    Frees go in front of the ring when a page holds several tokens, behind when a page is one token. `take` and `give`
    speak numpy as `PageAllocator` says; `take_tensor` and `give_tensor` stay on the device.
    """

    def __init__(self, pages: int, page_size: int, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)
        self._pages = pages
        self._returns_to_front = page_size > 1
        self._ring = torch.arange(1, pages + 1, dtype=torch.int64, device=self.device)
        self._head = 0
        self._free = pages
        self._out = torch.zeros(pages + 1, dtype=torch.bool, device=self.device)
        # Scratch: each page of a group that comes back writes its place here; one that reads another's came twice.
        self._place = torch.zeros(pages + 1, dtype=torch.int64, device=self.device)

    @property
    def free_pages(self) -> int:
        return self._free

    def take(self, n: int) -> PageIds | None:
        ids = self.take_tensor(n)
        return None if ids is None else ids.cpu().numpy()

    def give(self, ids: PageIds) -> None:
        self.give_tensor(torch.tensor(ids, dtype=torch.int64, device=self.device))

    def free_ids(self) -> PageIds:
        """The free list, front first."""
        return self._read(self._head, self._free).cpu().numpy()

    def take_tensor(self, n: int) -> torch.Tensor | None:
        """The first n pages of the free list, int64, shape (n,), or None with nothing taken."""
        if n > self._free:
            return None
        ids = self._read(self._head, n)
        if n:
            self._out.index_fill_(0, ids, True)
            self._head = (self._head + n) % self._pages
            self._free -= n
        return ids

    def give_tensor(self, ids: torch.Tensor) -> None:
        """Take `ids` back as one group. Waits for the device once, to know that each of them was out."""
        n = len(ids)
        if not n:
            return
        self._check_out(ids)
        self._out.index_fill_(0, ids, False)
        if self._returns_to_front:
            self._head = (self._head - n) % self._pages
            self._write(self._head, ids)
        else:
            self._write((self._head + self._free) % self._pages, ids)
        self._free += n

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor that the pool keeps."""
        return [self._ring, self._out, self._place]

    def audit(self) -> None:
        """The free list is the pages that are not out, each once. Raises `PoolCorruption`."""
        times = torch.bincount(self._read(self._head, self._free), minlength=self._pages + 1)
        if not torch.equal(times[1:], (~self._out[1:]).to(times.dtype)) or int(times[0]) or bool(self._out[0]):
            raise PoolCorruption("the free list is not the pages that are not out")

    def _check_out(self, ids: torch.Tensor) -> None:
        known = ids.clamp(0, self._pages)
        place = torch.arange(len(ids), device=self.device)
        self._place[known] = place
        good = (known == ids) & self._out[known] & (self._place[known] == place)
        if not bool(good.all()):
            page = int(ids[~good][0])
            if not 0 < page <= self._pages:
                raise PoolCorruption(f"page {page} given back to a pool of pages 1..{self._pages}")
            again = "twice in one group" if bool(self._out[page]) else "while it is free"
            raise PoolCorruption(f"page {page} given back {again}")

    def _read(self, start: int, n: int) -> torch.Tensor:
        """A copy of n entries of the ring from `start` on."""
        behind = self._pages - start
        if n <= behind:
            return self._ring[start : start + n].clone()
        return torch.cat((self._ring[start:], self._ring[: n - behind]))

    def _write(self, start: int, ids: torch.Tensor) -> None:
        behind = self._pages - start
        if len(ids) <= behind:
            self._ring[start : start + len(ids)] = ids
        else:
            self._ring[start:] = ids[:behind]
            self._ring[: len(ids) - behind] = ids[behind:]


def open_ledger(spec: PoolSpec) -> TorchLedger:
    """The torch ledger that a `PoolSpec` describes; `auto` is the GPU where there is one.

    Raises `ScenarioError` for a device that is not here and `MemoryRefused` where the memory is not.
    """
    shape = spec.shape
    kind: Kind = "full" if spec.payload == "full" else "none" if spec.payload == "none" else "stamp"
    payload = Payload(kind, shape.layers, shape.heads, shape.head_dim, shape.element_bytes)
    device = resolve_device(spec.device)
    return TorchLedger(spec.pages, spec.page_size, spec.owners, spec.max_tokens, device, payload, spec.nodes)


def resolve_device(name: str) -> str:
    """`auto`, `cpu`, `cuda` or `cuda:N` as a device that is here."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return "cuda" if gpus else "cpu"
    known = ["cpu", *(["cuda", *(f"cuda:{place}" for place in range(gpus))] if gpus else [])]
    if name not in known:
        why = "" if gpus else f" (torch {torch.__version__} sees no CUDA device)"
        raise ScenarioError(f"device {name!r} is not here{why}; there is {', '.join(known)}", key="device")
    return name


class _Tokens(NamedTuple):
    """Some tokens of a batch, tensors of shape (tokens,) on the device."""

    row: torch.Tensor  # batch position of the owner
    position: torch.Tensor  # position in the owner
    slot: torch.Tensor  # page id x page size + place in the page
    stay: torch.Tensor  # what the slot says when nothing went wrong: who filled it, and at which position
    written_at: torch.Tensor
    readable: torch.Tensor | None  # False where the page was dropped; None when none was


class TorchLedger:
    """Who holds which page, on `device`: request table [owners, ceil(max_length / page_size)] of page ids, int32.

    Raises `MemoryRefused` when its tensors are not to be had on this machine, before it takes them. `max_length` is in
    tokens; an owner that would outgrow it is a ValueError.

    The next `nodes` owner ids are nodes of a prefix tree. They have no row in the table, of whatever length, and get
    pages by `move` and `split` only.
    """

    name = "torch"

    def __init__(
        self,
        pages: int,
        page_size: int,
        owners: int,
        max_length: int,
        device: str | torch.device = "cpu",
        payload: Payload = DEFAULT_PAYLOAD,
        nodes: int = 0,
    ) -> None:
        needed = budget.pool_bytes(pages, page_size, owners, max_length, payload)
        budget.check_pool(needed, str(device))
        if needed.pages_per_owner >= 1 << _ORIGIN_BITS:
            raise ValueError(f"max_length {max_length} is more than {1 << _ORIGIN_BITS} pages of {page_size} tokens")
        self.device = torch.device(device)
        self.page_size = page_size
        self.payload = payload
        self._total = pages
        self._max_length = max_length
        self._width = needed.pages_per_owner
        self._rows = owners
        self._length: Ints = np.zeros(owners + nodes, dtype=np.int64)
        self._stay: Ints = np.arange(1, owners + 1, dtype=np.int64)
        self._next_stay = owners + 1
        # Made when the first page is aliased, moved or dropped: per owner and page, what it may do with the page and
        # who filled it (0: itself). `_marked` says for which owners these differ from zero.
        self._state: npt.NDArray[np.uint8] | None = None
        self._origin: Ints | None = None
        self._marked = np.zeros(owners, dtype=np.bool_)
        # Owners that end inside a page that is not theirs, and inside one that is theirs but was filled by another.
        self._sealed: set[int] = set()
        self._grafted: set[int] = set()
        self._nodes: dict[int, NodePages] = {}
        self._waiting: list[torch.Tensor] | None = None
        with budget.taking(needed, str(device)):
            self._pool = TorchPool(pages, page_size, self.device)
            self._table = _zeros((owners, self._width), self.device)
            self._buffers = self._make_buffers()
        self._flat = self._table.view(-1)
        self._last = torch.empty(0, dtype=torch.int64, device=self.device)

    def total_pages(self, pool: str = FULL) -> int:
        _check_pool(pool)
        return self._total

    def free_pages(self, pool: str = FULL) -> int:
        _check_pool(pool)
        return self._pool.free_pages

    def length(self, owner: int) -> int:
        return int(self._length[owner])

    def extend(self, owners: Ints, tokens: Ints) -> int | None:
        old = self._length[owners]
        new = old + tokens
        held = self._pages(old)
        opened = self._pages(new) - held
        ids = self._take(owners, new, int(opened.sum()))
        if ids is None:
            return None
        if len(ids):
            place, nth = _spread(opened)
            self._enter(owners[place], held[place] + nth, ids)
        return self._grown(owners, old, new, ids)

    def decode(self, owners: Ints, steps: int, tokens_per_step: int = 1) -> int | None:
        old = self._length[owners]
        new = old + steps * tokens_per_step
        held = self._pages(old)
        opened = self._pages(new) - held
        ids = self._take(owners, new, int(opened.sum()))
        if ids is None:
            return None
        if len(ids):
            place, nth = self._opening_order(old, opened, steps, tokens_per_step)
            self._enter(owners[place], held[place] + nth, ids)
        return self._grown(owners, old, new, ids)

    def move(self, owner: int, a: int, b: int, to: int) -> None:
        first, last = self._owned_places(owner, a, b)
        start = self._append_place(to, owner)
        if a == b:
            return
        self._check_row(owner)
        if to < self._rows:
            self._check_room(to, self.length(to) + b - a)
            self._copy_pages(owner, first, last, to, start)
        else:
            ids = self._table[owner, first:last].clone()
            origin = self._origins(owner, first, last)
            known = self._nodes.get(to)
            self._nodes[to] = NodePages(ids, origin) if known is None else known.grown(ids, origin)
        self._mark(owner, first, last, b, _READ_ONLY)
        self._length[to] += b - a
        if self._length[to] % self.page_size and to < self._rows:
            self._grafted.add(to)

    def alias(self, owner: int, source: int, a: int, b: int) -> None:
        first, last = self._readable_places(source, a, b)
        start = self._append_place(owner, source)
        if a == b:
            return
        self._check_row(owner)
        self._check_room(owner, self.length(owner) + b - a)
        self._copy_pages(source, first, last, owner, start)
        self._length[owner] += b - a
        self._mark(owner, start, start + last - first, self.length(owner), _READ_ONLY)

    def replace(self, owner: int, a: int, b: int, source: int, at: int) -> int:
        first, last = self._owned_places(owner, a, b)
        if owner == source or b % self.page_size or (at + b - a) % self.page_size:
            raise PoolCorruption(f"owner {owner} cannot read {source} up to {at + b - a} at its positions up to {b}")
        there = self._readable_places(source, at, at + b - a)
        if a == b:
            self._last = self._last[:0]
            return 0
        self._check_row(owner)
        self._read_back(np.array([owner]), np.array([a]), np.array([b]))
        self._last = self._table[owner, first:last].to(torch.int64)
        self._copy_pages(source, *there, owner, first)
        self._mark(owner, first, last, b, _READ_ONLY)
        self._give(self._last)
        return last - first

    def split(self, owner: int, at: int, head: int) -> None:
        length = self.length(owner)
        if head == owner or self.length(head) or not 0 < at < length or (head < self._rows) != (owner < self._rows):
            raise PoolCorruption(f"owner {owner} (length {length}) cannot be split at {at} for {head}")
        self._owned_places(owner, at, length)
        _, place = self._owned_places(owner, 0, at)
        if owner >= self._rows:
            self._nodes[head], self._nodes[owner] = self._nodes[owner].cut(place)
        else:
            self._split_row(owner, place, self._pages_of(owner), head)
        self._length[head], self._length[owner] = at, length - at

    def drop(self, owner: int, a: int, b: int, pool: str = FULL) -> int:
        _check_pool(pool)
        first, last = self._owned_places(owner, a, b)
        self._check_row(owner)
        self._read_back(np.array([owner]), np.array([a]), np.array([b]))
        row = self._table[owner, first:last]
        self._last = row.to(torch.int64)
        row.fill_(_NO_PAGE)
        if a != b:
            self._mark(owner, first, last, b, _DROPPED)
        self._give(self._last)
        return last - first

    def release_many(self, owners: Ints) -> int:
        self.verify(owners)
        self._last = self._owned_ids(owners)
        self._give(self._last)
        self._forget(owners)
        return len(self._last)

    def begin_group(self) -> None:
        if self._waiting is not None:
            raise PoolCorruption("a group of pages is waiting already")
        self._waiting = []

    def end_group(self) -> int:
        if self._waiting is None:
            raise PoolCorruption("no group of pages is waiting")
        self._last = torch.cat((self._last[:0], *self._waiting))
        self._waiting = None
        self._give(self._last)
        return len(self._last)

    def last_ids(self) -> PageIds | None:
        return self._last.cpu().numpy().copy()

    def page_table(self, owner: int) -> PageIds | None:
        return self._ids_of(owner, 0, self._pages_of(owner)).to(torch.int64).cpu().numpy()

    def verify(self, owners: Ints) -> None:
        self._read_back(owners, np.zeros(len(owners), dtype=np.int64), self._length[owners])

    def audit(self) -> None:
        self._pool.audit()
        everyone = np.flatnonzero(self._length)
        rows, nodes = everyone[everyone < self._rows], everyone[everyone >= self._rows]
        of_nodes = self._owned_ids(nodes)
        owned, read = torch.cat((self._owned_ids(rows), of_nodes)), torch.cat((self._readable_ids(rows), of_nodes))
        if len(read) and not (int(read.min()) > 0 and int(read.max()) <= self._total):
            raise PoolCorruption(f"a page outside 1..{self._total} is in the request table")
        times = torch.bincount(owned, minlength=self._total + 1)
        if int(times.max()) > 1:
            raise PoolCorruption(f"page {int(times.argmax())} is owned {int(times.max())} times")
        waiting = torch.cat((owned[:0], *(self._waiting or ())))
        held = len(owned) + len(waiting)
        if held + self._pool.free_pages != self._total:
            raise PoolCorruption(
                f"{held} pages held + {self._pool.free_pages} free is not the pool of {self._total} pages"
            )
        if len(waiting) and int((times + torch.bincount(waiting, minlength=self._total + 1)).max()) > 1:
            raise PoolCorruption("a page was given back and is owned, or given back twice")
        if not bool((times[read] > 0).all()):
            raise PoolCorruption(f"page {int(read[times[read] == 0][0])} is still read, but nobody owns it any more")

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor that the ledger keeps."""
        return [*self._pool.tensors(), self._table, *(self._buffers.tensors() if self._buffers else [])]

    # Growing

    def _take(self, owners: Ints, new: Ints, n: int) -> torch.Tensor | None:
        if self._sealed and not self._sealed.isdisjoint(owners.tolist()):
            sealed = sorted(self._sealed.intersection(owners.tolist()))
            raise PoolCorruption(f"owner {sealed[0]} ends inside a page that is not its own; it cannot grow there")
        if self._rows < len(self._length) and len(owners):
            self._check_row(int(owners.max()))
        if n > self._pool.free_pages:
            return None
        if len(new) and new.max() > self._max_length:
            self._check_room(int(owners[new.argmax()]), int(new.max()))
        return self._pool.take_tensor(n)

    def _opening_order(self, old: Ints, opened: Ints, steps: int, tokens_per_step: int) -> tuple[Ints, Ints]:
        """(batch position, nth page it opens here) of each page, sorted by step, then batch position.

        With one token a step an owner opens a page every page_size steps from its own phase (-old mod page_size) on:
        rounds of one page each, within a round by phase. With more the order is sorted out page by page.
        """
        p = self.page_size
        phase = -old % p
        if steps == 1:
            return _spread(opened)
        if tokens_per_step == 1:
            by_phase = np.argsort(phase, kind="stable")
            rounds = np.arange(int(opened.max()))[:, None]
            nth, rank = np.nonzero(phase[by_phase][None, :] + p * rounds < steps)
            return by_phase[rank], nth
        place, nth = _spread(opened)
        order = np.lexsort((nth, place, (phase[place] + nth * p) // tokens_per_step))
        return place[order], nth[order]

    def _enter(self, owners: Ints, places: Ints, ids: torch.Tensor) -> None:
        """Write page ids into the request table."""
        (where,) = self._send(owners * self._width + places)
        self._flat.index_copy_(0, where, ids.to(torch.int32))

    def _grown(self, owners: Ints, old: Ints, new: Ints, ids: torch.Tensor) -> int:
        self._length[owners] = new
        self._last = ids
        if self._buffers is None:
            return len(ids)
        if self._grafted and not self._grafted.isdisjoint(owners.tolist()):
            self._write_tokens(owners, old, new, looked_up=True)
        elif len(owners) and int((new - old).max()) == int((new - old).min()) == 1:
            self._write_one_token_each(owners, old)
        else:
            self._write_tokens(owners, old, new, looked_up=False)
        return len(ids)

    def _write_one_token_each(self, owners: Ints, old: Ints) -> None:
        assert self._buffers is not None
        p = self.page_size
        where, in_page, stay, position = self._send(owners * self._width + old // p, old % p, self._stay[owners], old)
        slots = self._flat.index_select(0, where).to(torch.int64).mul_(p).add_(in_page)
        self._buffers.write(slots, stay, position)

    def _write_tokens(self, owners: Ints, old: Ints, new: Ints, looked_up: bool) -> None:
        assert self._buffers is not None
        for tokens in self._tokens(owners, old, new, looked_up):
            self._buffers.write(tokens.slot, tokens.stay, tokens.written_at)

    # Reading back

    def _read_back(self, owners: Ints, first: Ints, last: Ints) -> None:
        """Compare the slots of positions first..last-1 of each owner with what was written there."""
        if self._buffers is None:
            return
        nodes = owners >= self._rows
        if nodes.any():
            for owner, start, end in zip(
                owners[nodes].tolist(), first[nodes].tolist(), last[nodes].tolist(), strict=True
            ):
                self._compare(np.array([owner]), self._node_tokens(owner, start, end))
            owners, first, last = owners[~nodes], first[~nodes], last[~nodes]
        self._compare(owners, self._tokens(owners, first, last, looked_up=bool(self._marked[owners].any())))

    def _compare(self, owners: Ints, pieces: Iterator[_Tokens]) -> None:
        assert self._buffers is not None
        for tokens in pieces:
            bad = self._buffers.mismatched(tokens.slot, tokens.stay, tokens.written_at)
            if tokens.readable is not None:
                bad &= tokens.readable
            if bool(bad.any()):
                self._report(owners, tokens, int(bad.nonzero()[0]))

    def _report(self, owners: Ints, tokens: _Tokens, place: int) -> None:
        assert self._buffers is not None
        slot, stay, written_at = (int(x[place]) for x in (tokens.slot, tokens.stay, tokens.written_at))
        found_stay, found_position, where = self._buffers.describe(slot, stay, written_at)
        writer = np.flatnonzero(self._stay == found_stay)
        whose = f" (owner {writer[0]} now)" if len(writer) else ""
        raise PoolCorruption(
            f"owner {owners[int(tokens.row[place])]} position {int(tokens.position[place])}: slot {slot} {where} "
            f"should say stay {stay} position {written_at}, found stay {found_stay}{whose} position {found_position}"
        )

    def _tokens(self, owners: Ints, first: Ints, last: Ints, looked_up: bool) -> Iterator[_Tokens]:
        """Positions first..last-1 of each owner in batch order, a bounded number at a time.

        `looked_up`: some pages may be dropped or filled by another owner, so the marks are consulted.
        """
        ends = np.cumsum(last - first)
        total = int(ends[-1]) if len(ends) else 0
        base, shift, stays = self._send(owners * self._width, last - ends, self._stay[owners])
        marks = self._marks(owners, last) if looked_up and total else None
        for start in range(0, total, TOKENS_AT_ONCE):
            nth = torch.arange(start, min(start + TOKENS_AT_ONCE, total), device=self.device)
            # On the host: on a CPU torch's own search wakes all its threads, milliseconds for a few thousand tokens.
            row = torch.from_numpy(np.searchsorted(ends, np.arange(start, start + len(nth)), side="right"))
            row = row.to(self.device)
            position = nth + shift[row]
            number = position // self.page_size
            in_page = position - number * self.page_size
            slot = self._flat[base[row] + number].to(torch.int64) * self.page_size + in_page
            if marks is None:
                yield _Tokens(row, position, slot, stays[row], position, None)
                continue
            state, origin = (mark[row, number] for mark in marks)
            own = origin == 0
            stay = torch.where(own, stays[row], origin >> _ORIGIN_BITS)
            written = (origin & ((1 << _ORIGIN_BITS) - 1)) * self.page_size + in_page
            readable = state != _DROPPED
            yield _Tokens(row, position, slot * readable, stay, torch.where(own, position, written), readable)

    def _node_tokens(self, node: int, first: int, last: int) -> Iterator[_Tokens]:
        """The same for one node, all of whose pages were filled by others."""
        pages = self._nodes[node]
        for start in range(first, last, TOKENS_AT_ONCE):
            position = torch.arange(start, min(start + TOKENS_AT_ONCE, last), device=self.device)
            number = position // self.page_size
            in_page = position - number * self.page_size
            slot = pages.ids[number].to(torch.int64) * self.page_size + in_page
            origin = torch.from_numpy(pages.origin).to(self.device)[number]
            written = (origin & ((1 << _ORIGIN_BITS) - 1)) * self.page_size + in_page
            yield _Tokens(torch.zeros_like(position), position, slot, origin >> _ORIGIN_BITS, written, None)

    def _marks(self, owners: Ints, lengths: Ints) -> tuple[torch.Tensor, torch.Tensor]:
        """State and origin of the owners' pages, each [batch, pages of the longest], on the device."""
        width = int(self._pages(lengths).max())
        if self._state is None or self._origin is None:
            raise PoolCorruption("an owner is marked before anything was moved, aliased or dropped")
        state = torch.from_numpy(self._state[owners, :width]).to(self.device)
        return state, torch.from_numpy(self._origin[owners, :width]).to(self.device)

    # Giving back

    def _give(self, ids: torch.Tensor) -> None:
        if self._waiting is None:
            self._pool.give_tensor(ids)
        else:
            self._waiting.append(ids)

    def _owned_ids(self, owners: Ints) -> torch.Tensor:
        """Page ids that the owners own, in batch order, each owner's in row order."""
        if not len(owners) or owners.max() < self._rows:
            return self._ids(owners, (_OWNED,))
        parts = [
            self._nodes[owner].ids.to(torch.int64) if owner in self._nodes else self._ids(np.array([owner]), (_OWNED,))
            for owner in owners.tolist()
        ]
        return torch.cat(parts)

    def _readable_ids(self, owners: Ints) -> torch.Tensor:
        return self._ids(owners, (_OWNED, _READ_ONLY))

    def _ids(self, owners: Ints, states: tuple[int, ...]) -> torch.Tensor:
        places = self._pages(self._length[owners])
        ends = np.cumsum(places)
        total = int(ends[-1]) if len(ends) else 0
        shift, until = self._send(owners * self._width + places - ends, ends)
        wanted = self._wanted(owners, places, states) if total and self._marked[owners].any() else None
        parts = [self._last[:0]]
        for start in range(0, total, TOKENS_AT_ONCE):
            nth = torch.arange(start, min(start + TOKENS_AT_ONCE, total), device=self.device)
            ids = self._flat[nth + shift[torch.searchsorted(until, nth, right=True)]].to(torch.int64)
            parts.append(ids if wanted is None else ids[wanted[start : start + TOKENS_AT_ONCE]])
        return torch.cat(parts)

    def _wanted(self, owners: Ints, places: Ints, states: tuple[int, ...]) -> torch.Tensor:
        """For each page of the batch, whether its state is one of `states`; bool on the device."""
        assert self._state is not None
        place, nth = _spread(places)
        return torch.from_numpy(np.isin(self._state[owners[place], nth], states)).to(self.device)

    def _forget(self, owners: Ints) -> None:
        nodes = owners >= self._rows
        if nodes.any():
            for owner in owners[nodes].tolist():
                self._nodes.pop(owner, None)
            self._length[owners[nodes]] = 0
            owners = owners[~nodes]
        marked = owners[self._marked[owners]]
        if len(marked) and self._state is not None and self._origin is not None:
            width = int(self._pages(self._length[marked]).max())
            self._state[marked, :width] = _OWNED
            self._origin[marked, :width] = 0
            self._marked[marked] = False
            self._sealed.difference_update(marked.tolist())
            self._grafted.difference_update(marked.tolist())
        self._length[owners] = 0
        self._stay[owners] = np.arange(self._next_stay, self._next_stay + len(owners))
        self._next_stay += len(owners)

    # Sharing

    def _copy_pages(self, source: int, first: int, last: int, to: int, start: int) -> None:
        """Let the row `to` read the source's pages first..last-1 at its own pages from `start` on."""
        state, origin = self._sharing()
        n = last - first
        self._table[to, start : start + n] = self._ids_of(source, first, last)
        origin[to, start : start + n] = self._origins(source, first, last)
        state[to, start : start + n] = _OWNED
        self._marked[to] = True

    def _ids_of(self, owner: int, first: int, last: int) -> torch.Tensor:
        """Ids of the owner's pages first..last-1, int32."""
        if owner >= self._rows:
            return self._nodes[owner].ids[first:last] if owner in self._nodes else self._table[0, :0]
        return self._table[owner, first:last]

    def _origins(self, owner: int, first: int, last: int) -> Ints:
        """Who filled each of them, and as which page."""
        if owner >= self._rows:
            return self._nodes[owner].origin[first:last]
        _, origin = self._sharing()
        filled_here = (self._stay[owner] << _ORIGIN_BITS) + np.arange(first, last)
        known = origin[owner, first:last]
        return np.where(known == 0, filled_here, known)

    def _split_row(self, owner: int, place: int, pages: int, head: int) -> None:
        """Copy the first `place` pages of a row to another and move the rest of them forward."""
        self._copy_pages(owner, 0, place, head, 0)
        state, origin = self._sharing()
        rest = self._origins(owner, place, pages)
        self._table[owner, : pages - place] = self._table[owner, place:pages].clone()
        origin[owner, :pages] = 0
        origin[owner, : len(rest)] = rest
        state[owner, :pages] = _OWNED
        self._marked[owner] = True
        if self._length[owner] % self.page_size:
            self._grafted.add(owner)

    def _mark(self, owner: int, first: int, last: int, b: int, state: int) -> None:
        """The owner no longer owns its pages first..last-1, which end at its position `b`."""
        states, _ = self._sharing()
        states[owner, first:last] = state
        self._marked[owner] = True
        if b % self.page_size:
            self._sealed.add(owner)

    def _sharing(self) -> tuple[npt.NDArray[np.uint8], Ints]:
        if self._state is None or self._origin is None:
            shape = (self._rows, self._width)
            budget.check(budget.sharing_bytes(*shape), "cpu")
            self._state = np.zeros(shape, dtype=np.uint8)
            self._origin = np.zeros(shape, dtype=np.int64)
        return self._state, self._origin

    # Small things

    def _pages(self, tokens: Ints) -> Ints:
        return -(-tokens // self.page_size)

    def _places(self, owner: int, a: int, b: int) -> tuple[int, int]:
        p, length = self.page_size, self.length(owner)
        if not (0 <= a <= b <= length) or a % p or (b % p and b != length):
            raise PoolCorruption(f"positions {a}..{b} of owner {owner} (length {length}) are not whole pages")
        return a // p, -(-b // p)

    def _pages_of(self, owner: int) -> int:
        return -(-self.length(owner) // self.page_size)

    def _readable_places(self, source: int, a: int, b: int) -> tuple[int, int]:
        first, last = self._places(source, a, b)
        if self._state is not None and source < self._rows and (self._state[source, first:last] == _DROPPED).any():
            raise PoolCorruption(f"positions {a}..{b} of owner {source} were dropped; they cannot be read")
        return first, last

    def _owned_places(self, owner: int, a: int, b: int) -> tuple[int, int]:
        first, last = self._places(owner, a, b)
        if self._state is not None and owner < self._rows and self._state[owner, first:last].any():
            raise PoolCorruption(f"positions {a}..{b} of owner {owner} are not all its own to give")
        return first, last

    def _append_place(self, owner: int, source: int) -> int:
        if owner == source:
            raise PoolCorruption(f"owner {owner} cannot take pages from itself")
        if self._length[owner] % self.page_size:
            raise PoolCorruption(f"owner {owner} ends inside a page; nothing can be appended behind it")
        return self.length(owner) // self.page_size

    def _check_row(self, owner: int) -> None:
        if owner >= self._rows:
            raise PoolCorruption(f"owner {owner} is a node of the prefix tree; it is only moved to, split and released")

    def _check_room(self, owner: int, tokens: int) -> None:
        if tokens > self._max_length:
            raise ValueError(f"owner {owner} would hold {tokens} tokens; its row has room for {self._max_length}")

    def _make_buffers(self) -> KvBuffers | None:
        if self.payload.kind == "none":
            return None
        buffers = KvBuffers((self._total + 1) * self.page_size, self.payload, self.device)
        budget.touch(buffers.words)
        return buffers

    def _send(self, *columns: Ints) -> tuple[torch.Tensor, ...]:
        """Host arrays of one length to the device, in one transfer."""
        if self.device.type == "cpu":
            return tuple(torch.from_numpy(column) for column in columns)
        return torch.from_numpy(np.stack(columns)).to(self.device, non_blocking=True).unbind()


def _zeros(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """int32 zeros; on the CPU memory that is not touched before it is used: most rows never are."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, dtype=np.int32))
    return torch.zeros(shape, dtype=torch.int32, device=device)


def _spread(counts: Ints) -> tuple[Ints, Ints]:
    """(place, nth): place i comes counts[i] times, with nth = 0, 1, ... within it."""
    if int(counts.max()) == 1:
        (place,) = counts.nonzero()
        return place, np.zeros_like(place)
    place = np.repeat(np.arange(len(counts)), counts)
    return place, np.arange(len(place)) - (np.cumsum(counts) - counts)[place]


def _check_pool(pool: str) -> None:
    if pool != FULL:
        raise KeyError(f"no pool {pool!r}; this ledger has one, {FULL!r}")
