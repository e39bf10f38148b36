"""Named random streams of one seed: what one of them gives does not depend on who draws from the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import numpy as np
from numpy.typing import NDArray

BLOCK = 4096
"""How many values are drawn at once; it changes the speed and nothing else."""

Draw = Callable[[int], NDArray[np.int64]]
"""Called with n, gives the next n values of a stream; n calls with 1 give the same ones."""


def substream(seed: int, name: str) -> np.random.Generator:
    """The generator of the stream `name` under `seed` (>= 0): the same numbers in every process and in any order.

    The name goes in as numpy's spawn key, its UTF-8 bytes, so no seed of one name is a seed of another.
    """
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=tuple(name.encode()))))


def values(draw: Draw, block: int = BLOCK) -> Iterator[int]:
    """The endless stream of `draw` as Python ints."""
    return chain.from_iterable(_blocks(draw, block))


def _blocks(draw: Draw, block: int) -> Iterator[list[int]]:
    while True:
        yield draw(block).tolist()
