"""Pages that nodes of a prefix tree own: per node its page ids on the device, and who filled each of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pagestorm.memory.ledger import Ints


@dataclass(slots=True)
class NodePages:
    """The pages of one node, in order. A row of the request table would be as long for the shortest of them."""

    ids: torch.Tensor
    """Page ids, int32, shape (pages,), on the device."""
    origin: Ints
    """Stay and page number there of whoever filled each page, on the host, shape (pages,)."""

    def grown(self, ids: torch.Tensor, origin: Ints) -> NodePages:
        """With more pages behind."""
        return NodePages(torch.cat((self.ids, ids)), np.concatenate((self.origin, origin)))

    def cut(self, place: int) -> tuple[NodePages, NodePages]:
        """The first `place` pages and the rest."""
        head = NodePages(self.ids[:place].clone(), self.origin[:place].copy())
        return head, NodePages(self.ids[place:].clone(), self.origin[place:].copy())
