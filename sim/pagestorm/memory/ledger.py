"""The second contract: who holds which tokens. It is all that the engine sees; it never sees a page id.

An *owner* is a small integer: the row of the request table that a request holds, or a node of the prefix tree. An
owner's tokens are positions 0..length-1, and position t lies in the owner's page t // page_size:

    page_size 4, length 10        0 1 2 3 | 4 5 6 7 | 8 9 . .
                                  page 0    page 1    page 2: two slots of the last page are rounding

Every call is all or nothing. Batches are numpy int64 arrays in batch order; an owner appears once in a batch.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from pagestorm.memory.allocator import PageIds

Ints = npt.NDArray[np.int64]
FULL = "full"
"""Name of the pool for layers that keep every token."""


class Ledger(Protocol):
    """What each owner holds in the named pools. One pool, `full`, until window and compressed pools exist."""

    @property
    def page_size(self) -> int:
        """Tokens in a page."""

    @property
    def name(self) -> str:
        """The resolved name of this kind of pool: counting, paged, torch, ..."""

    def total_pages(self, pool: str = FULL) -> int:
        """Pages of the pool, page 0 left out."""

    def free_pages(self, pool: str = FULL) -> int:
        """Pages that could be taken now."""

    def length(self, owner: int) -> int:
        """Allocated length of `owner`, in tokens; 0 for an owner that holds nothing."""

    def extend(self, owners: Ints, tokens: Ints) -> int | None:
        """Grow each owner by its number of tokens (prefill).

        Pages go out in batch order: sum(ceil(new/p) - ceil(old/p)) of them. Returns how many, or None, with
        nothing changed, when fewer are free.
        """

    def decode(self, owners: Ints, steps: int, tokens_per_step: int = 1) -> int | None:
        """Grow every owner by `tokens_per_step`, `steps` times.

        Pages go out in (step, batch position) order, so one call of k steps equals k calls of one, ids included.
        Returns the number of pages, or None, with nothing changed, when the pool cannot serve all the steps.
        """

    def move(self, owner: int, a: int, b: int, to: int) -> None:
        """Make `to` the owner of the pages that hold positions a..b-1 of `owner`, appended after what `to` holds.

        `owner` still reads them at its own positions but no longer gives them back. a is a page start; b is one too
        or the owner's length; `to` holds whole pages.
        """

    def alias(self, owner: int, source: int, a: int, b: int) -> None:
        """Append positions a..b-1 of `source` to `owner`, shared: `owner` reads them and never gives them back.

        a and b are page starts (b may be the source's length) and `owner` holds whole pages so far.
        """

    def replace(self, owner: int, a: int, b: int, source: int, at: int) -> int:
        """Give back the pages of positions a..b-1 of `owner`, which then reads `source` from `at` on there instead.

        That is what happens to a duplicate: what is shared stays, the owner's copy goes, in one group. Returns pages.
        a, b and at are page starts and `source` reads all of at..at+b-a-1.
        """

    def split(self, owner: int, at: int, head: int) -> None:
        """Make `head`, which holds nothing, the owner of positions 0..at-1; those of `owner` count from 0 again.

        at is a page start inside `owner`, which owns all its pages. Who reads them reads on.
        """

    def drop(self, owner: int, a: int, b: int, pool: str = FULL) -> int:
        """Give back the pages of positions a..b-1 in one group; the positions can no longer be read. Returns pages."""

    def release_many(self, owners: Ints) -> int:
        """Give back all that the owners still own, as one group in batch order, and forget them. Returns pages."""

    def begin_group(self) -> None:
        """From now on pages that are given back wait: they are neither free nor anybody's. Groups do not nest."""

    def end_group(self) -> int:
        """Give back all that waits as one group, in the order of the calls. Returns pages."""

    def last_ids(self) -> PageIds | None:
        """Page ids of the last call that took or gave back pages, in order; None for a ledger without ids."""

    def page_table(self, owner: int) -> PageIds | None:
        """Page ids under the owner's positions, -1 where dropped; None for a ledger that has no ids."""

    def audit(self) -> None:
        """Look at everything: each page free, or owned once; lengths match pages. Raises `PoolCorruption`."""

    def verify(self, owners: Ints) -> None:
        """Read back what was written to the owners' slots, where something was. Raises `PoolCorruption`."""
