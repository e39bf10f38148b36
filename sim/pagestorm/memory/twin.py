"""Several ledgers in lockstep: every call goes to all of them and their answers are compared."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from pagestorm.errors import Divergence, PoolCorruption
from pagestorm.memory.allocator import PageIds
from pagestorm.memory.ledger import FULL, Ints, Ledger

Answer = TypeVar("Answer")
Arguments = dict[str, int | str | Ints]

NO_IDS = "has no page ids"
"""The answer of a ledger without page ids; it agrees with anything."""

_MESSAGE_CHARACTERS = 400


class _Call(NamedTuple):
    number: int
    method: str
    arguments: Arguments

    def as_json(self) -> dict[str, object]:
        """As JSON knows it: `{"number": 3, "call": "extend", "owners": [0, 1], "tokens": [5, 9]}`."""
        plain = {key: v.tolist() if isinstance(v, np.ndarray) else v for key, v in self.arguments.items()}
        return {"number": self.number, "call": self.method, **plain}

    def __str__(self) -> str:
        values = ((key, v.tolist() if isinstance(v, np.ndarray) else v) for key, v in self.arguments.items())
        return f"call {self.number}: {self.method}({', '.join(f'{key}={value!r}' for key, value in values)})"


class TwinPool:
    """A ledger that is several ledgers. After every call: same verdict, same pages, same free count, same ids.

    Page tables are compared one owner a call, in turn, and all of them in `audit`.
    The ledgers must have the same page size and number of pages. `calls` keeps the last `keep_calls` calls with their
    arguments (`calls[0]["number"]` is 0 while nothing fell off) and `compared` counts all of them. A difference raises
    `Divergence`; the ledgers are then no longer in lockstep and the twin refuses further calls with the same error.
    """

    def __init__(self, ledgers: Sequence[Ledger], keep_calls: int = 10_000) -> None:
        if not ledgers:
            raise ValueError("a twin needs at least one ledger")
        shapes = [(ledger.name, ledger.page_size, ledger.total_pages()) for ledger in ledgers]
        if len({shape[1:] for shape in shapes}) > 1:
            raise ValueError(f"ledgers in lockstep need the same page size and number of pages: {shapes}")
        self.ledgers = tuple(ledgers)
        self.names = _distinct([ledger.name for ledger in ledgers])
        self.page_size = ledgers[0].page_size
        self.name = f"twin({', '.join(self.names)})"
        self.compared = 0
        self._calls: deque[_Call] = deque(maxlen=keep_calls)
        self._touched: set[int] = set()
        self._diverged: Divergence | None = None

    @property
    def calls(self) -> list[dict[str, object]]:
        """The calls kept, oldest first, JSON-able; the last one is the one that diverged, if one did."""
        return [call.as_json() for call in self._calls]

    def total_pages(self, pool: str = FULL) -> int:
        return self.ledgers[0].total_pages(pool)

    def free_pages(self, pool: str = FULL) -> int:
        return self.ledgers[0].free_pages(pool)

    def length(self, owner: int) -> int:
        return self.ledgers[0].length(owner)

    def extend(self, owners: Ints, tokens: Ints) -> int | None:
        return self._grow("extend", {"owners": owners, "tokens": tokens}, lambda x: x.extend(owners, tokens))

    def decode(self, owners: Ints, steps: int, tokens_per_step: int = 1) -> int | None:
        arguments: Arguments = {"owners": owners, "steps": steps, "tokens_per_step": tokens_per_step}
        return self._grow("decode", arguments, lambda x: x.decode(owners, steps, tokens_per_step))

    def move(self, owner: int, a: int, b: int, to: int) -> None:
        call = self._log("move", {"owner": owner, "a": a, "b": b, "to": to})
        self._ask(call, lambda ledger: ledger.move(owner, a, b, to))
        self._compare_owners(call, (owner, to))

    def alias(self, owner: int, source: int, a: int, b: int) -> None:
        call = self._log("alias", {"owner": owner, "source": source, "a": a, "b": b})
        self._ask(call, lambda ledger: ledger.alias(owner, source, a, b))
        self._compare_owners(call, (owner, source))

    def replace(self, owner: int, a: int, b: int, source: int, at: int) -> int:
        call = self._log("replace", {"owner": owner, "a": a, "b": b, "source": source, "at": at})
        pages = self._ask(call, lambda ledger: ledger.replace(owner, a, b, source, at))
        self._compare_ids(call)
        return pages

    def split(self, owner: int, at: int, head: int) -> None:
        call = self._log("split", {"owner": owner, "at": at, "head": head})
        self._ask(call, lambda ledger: ledger.split(owner, at, head))
        self._compare_owners(call, (owner, head))

    def drop(self, owner: int, a: int, b: int, pool: str = FULL) -> int:
        call = self._log("drop", {"owner": owner, "a": a, "b": b, "pool": pool})
        pages = self._ask(call, lambda ledger: ledger.drop(owner, a, b, pool))
        self._compare_ids(call)
        return pages

    def release_many(self, owners: Ints) -> int:
        call = self._log("release_many", {"owners": owners})
        pages = self._ask(call, lambda ledger: ledger.release_many(owners))
        self._compare_ids(call)
        self._touched.difference_update(owners.tolist())
        return pages

    def begin_group(self) -> None:
        self._ask(self._log("begin_group", {}), lambda ledger: ledger.begin_group())

    def end_group(self) -> int:
        call = self._log("end_group", {})
        pages = self._ask(call, lambda ledger: ledger.end_group())
        self._compare_ids(call)
        return pages

    def last_ids(self) -> PageIds | None:
        return next((ids for ids in (ledger.last_ids() for ledger in self.ledgers) if ids is not None), None)

    def page_table(self, owner: int) -> PageIds | None:
        return next((ids for ids in (ledger.page_table(owner) for ledger in self.ledgers) if ids is not None), None)

    def audit(self) -> None:
        """Each ledger looks at itself; then lengths and page tables of all owners that hold something are compared."""
        call = _Call(self.compared, "audit", {})
        self._ask(call, lambda ledger: ledger.audit())
        for owner in sorted(self._touched):
            self._compare(call, [ledger.length(owner) for ledger in self.ledgers], f"length of owner {owner}")
            self._compare_pages(call, owner)

    def verify(self, owners: Ints) -> None:
        self._ask(_Call(self.compared, "verify", {"owners": owners}), lambda ledger: ledger.verify(owners))

    def _grow(self, method: str, arguments: Arguments, answer: Callable[[Ledger], int | None]) -> int | None:
        call = self._log(method, arguments)
        pages = self._ask(call, answer)
        owners = arguments["owners"]
        if pages is not None and isinstance(owners, np.ndarray) and len(owners):
            self._compare_ids(call)
            self._touched.update(owners.tolist())
            # Right pages in the wrong rows: one row a call is cheap, and each has its turn. The audit looks at all.
            self._compare_pages(call, int(owners[call.number % len(owners)]))
        return pages

    def _log(self, method: str, arguments: Arguments) -> _Call:
        if self._diverged is not None:
            raise self._diverged
        # The caller may reuse its arrays.
        kept = {key: value.copy() if isinstance(value, np.ndarray) else value for key, value in arguments.items()}
        call = _Call(self.compared, method, kept)
        self.compared += 1
        self._calls.append(call)
        return call

    def _ask(self, call: _Call, answer: Callable[[Ledger], Answer]) -> Answer:
        """What all ledgers answer; corruption that all of them report is raised as it is."""
        answers: list[Answer] = []
        errors: list[PoolCorruption] = []
        said: list[object] = []
        for ledger in self.ledgers:
            try:
                answers.append(answer(ledger))
                said.append(answers[-1])
            except PoolCorruption as error:
                errors.append(error)
                said.append(f"PoolCorruption: {error}")
        if errors and answers:
            self._diverge(call, said, "verdict")
        if errors:
            raise errors[0]
        self._compare(call, said, "verdict")
        self._compare(call, [ledger.free_pages() for ledger in self.ledgers], "free pages")
        return answers[0]

    def _compare_ids(self, call: _Call) -> None:
        self._compare(call, [_listed(ledger.last_ids()) for ledger in self.ledgers], "page ids")

    def _compare_owners(self, call: _Call, owners: tuple[int, ...]) -> None:
        self._touched.update(owners)
        for owner in owners:
            self._compare(call, [ledger.length(owner) for ledger in self.ledgers], f"length of owner {owner}")

    def _compare_pages(self, call: _Call, owner: int) -> None:
        tables = [ledger.page_table(owner) for ledger in self.ledgers]
        known = [table for table in tables if table is not None]
        if not all(np.array_equal(table, known[0]) for table in known[1:]):
            self._diverge(call, [_listed(table) for table in tables], f"pages of owner {owner}")

    def _compare(self, call: _Call, answers: Sequence[object], what: str) -> None:
        known = [answer for answer in answers if answer is not NO_IDS]
        if any(answer != known[0] for answer in known):
            self._diverge(call, answers, what)

    def _diverge(self, call: _Call, answers: Sequence[object], what: str) -> None:
        by_name: dict[str, object] = dict(zip(self.names, answers, strict=True))
        said = "; ".join(f"{name} {_short(str(answer))}" for name, answer in by_name.items())
        self._diverged = Divergence(f"{_short(str(call))}: {what} differ: {said}", call=str(call), answers=by_name)
        raise self._diverged


def _listed(ids: PageIds | None) -> object:
    return NO_IDS if ids is None else ids.tolist()


def _short(text: str) -> str:
    return text if len(text) <= _MESSAGE_CHARACTERS else f"{text[:_MESSAGE_CHARACTERS]} ..."


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Names with `#2`, `#3` behind the ones that come again."""
    return tuple(
        name if names[:place].count(name) == 0 else f"{name}#{names[:place].count(name) + 1}"
        for place, name in enumerate(names)
    )
