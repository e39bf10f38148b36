"""The first contract: who hands out page ids and takes them back.

A page allocator knows pages and nothing else: no owners, no lengths, no tokens. It is what differs between
pools, and what a stranger brings to be tested (`pagestorm.testing`).
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

PageIds = npt.NDArray[np.int64]
"""Page ids, shape (pages,). Ids run from 1 to the number of pages; page 0 is padding and never handed out."""


@runtime_checkable
class PageAllocator(Protocol):
    """All or nothing, in an order that is part of the contract.

    At the start the free list is 1, 2, ..., N and pages are taken from its front. A group of pages that comes back
    keeps its own order; it goes to the *front* of the list when a page holds several tokens and to the *back* when
    a page is one token (sglang 0.5.23, `mem_cache/allocator/paged.py` and `token.py`).
    """

    @property
    def free_pages(self) -> int:
        """How many pages could be taken now."""

    def take(self, n: int) -> PageIds | None:
        """The first `n` pages of the free list, or None, with nothing taken, when fewer are free."""

    def give(self, ids: PageIds) -> None:
        """Take `ids` back as one group, in the order given. Raises `PoolCorruption` for a page that is not out."""
