"""A deliberately naive ledger: lists, one token at a time, nothing clever. What the real ones are compared with."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field


@dataclass
class Place:
    """A page in an owner's table."""

    page: int | None  # None: dropped
    owned: bool


@dataclass
class Holding:
    tokens: int = 0
    places: list[Place] = field(default_factory=list)


class Model:
    def __init__(self, pages: int, page_size: int, owners: int) -> None:
        self.page_size = page_size
        self.free = list(range(1, pages + 1))
        self.held = [Holding() for _ in range(owners)]
        self.last: list[int] = []
        self.waiting: list[int] | None = None

    def extend(self, batch: list[tuple[int, int]]) -> int | None:
        return self._grow([owner for owner, tokens in batch for _ in range(tokens)])

    def decode(self, owners: list[int], steps: int, tokens_per_step: int) -> int | None:
        return self._grow([o for _ in range(steps) for o in owners for _ in range(tokens_per_step)])

    def _grow(self, order: list[int]) -> int | None:
        """One more token for each owner in `order`; all or nothing."""
        before = deepcopy((self.free, self.held))
        taken = []
        for owner in order:
            holding = self.held[owner]
            if holding.tokens % self.page_size == 0:
                if not self.free:
                    self.free, self.held = before
                    return None
                taken.append(self.free.pop(0))
                holding.places.append(Place(taken[-1], owned=True))
            holding.tokens += 1
        self.last = taken
        return len(taken)

    def release(self, owners: list[int]) -> int:
        group = [place for owner in owners for place in self.held[owner].places]
        for owner in owners:
            self.held[owner] = Holding()
        return self._give(group)

    def drop(self, owner: int, a: int, b: int) -> int:
        group = self._range(owner, a, b)
        pages = self._give(group)
        for place in group:
            place.page, place.owned = None, False
        return pages

    def _give(self, group: list[Place]) -> int:
        pages = [place.page for place in group if place.owned and place.page is not None]
        if self.waiting is None:
            self._put_back(pages)
        else:
            self.waiting += pages
        self.last = pages
        return len(pages)

    def _put_back(self, pages: list[int]) -> None:
        self.free = self.free + pages if self.page_size == 1 else pages + self.free

    def begin_group(self) -> None:
        self.waiting = []

    def end_group(self) -> int:
        assert self.waiting is not None
        self.last, self.waiting = self.waiting, None
        self._put_back(self.last)
        return len(self.last)

    def move(self, owner: int, a: int, b: int, to: int) -> None:
        for place in self._range(owner, a, b):
            self.held[to].places.append(Place(place.page, owned=True))
            place.owned = False
        self.held[to].tokens += b - a

    def alias(self, owner: int, source: int, a: int, b: int) -> None:
        for place in self._range(source, a, b):
            self.held[owner].places.append(Place(place.page, owned=False))
        self.held[owner].tokens += b - a

    def replace(self, owner: int, a: int, b: int, source: int, at: int) -> int:
        group = self._range(owner, a, b)
        pages = self._give(group)
        for place, other in zip(group, self._range(source, at, at + b - a), strict=True):
            place.page, place.owned = other.page, False
        return pages

    def split(self, owner: int, at: int, head: int) -> None:
        whole = self.held[owner]
        pages = at // self.page_size
        self.held[head] = Holding(at, whole.places[:pages])
        self.held[owner] = Holding(whole.tokens - at, whole.places[pages:])

    # What makes sense

    def ends_in_strange_page(self, owner: int) -> bool:
        holding = self.held[owner]
        return holding.tokens % self.page_size != 0 and not holding.places[-1].owned

    def whole_pages(self, owner: int, a: int, b: int) -> bool:
        tokens, p = self.held[owner].tokens, self.page_size
        return 0 <= a <= b <= tokens and a % p == 0 and (b % p == 0 or b == tokens)

    def owns(self, owner: int, a: int, b: int) -> bool:
        return self.whole_pages(owner, a, b) and all(place.owned for place in self._range(owner, a, b))

    def reads(self, owner: int, a: int, b: int) -> bool:
        return self.whole_pages(owner, a, b) and all(p.page is not None for p in self._range(owner, a, b))

    def appendable(self, owner: int, other: int) -> bool:
        return owner != other and self.held[owner].tokens % self.page_size == 0

    def read_by_others(self, owners: list[int]) -> bool:
        """Whether somebody else reads pages that these owners own: a tree lock would keep them from being freed."""
        owned = {place.page for owner in owners for place in self.held[owner].places if place.owned}
        others = (h for owner, h in enumerate(self.held) if owner not in owners)
        return any(place.page in owned for holding in others for place in holding.places)

    def table(self, owner: int) -> list[int]:
        return [-1 if place.page is None else place.page for place in self.held[owner].places]

    def _range(self, owner: int, a: int, b: int) -> list[Place]:
        return self.held[owner].places[a // self.page_size : -(-b // self.page_size)]
