"""Named substreams: who draws what depends on the seed and the name only."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from pagestorm.workload import substream
from pagestorm.workload.streams import values

DIGEST = """
import hashlib
from pagestorm.scenario.schema import Gamma, Lognormal, Scenario, SglangFlags, Workload, Zipf
from pagestorm.workload import stream
scenario = Scenario(
    name="digest", seed=11, engine=SglangFlags(max_total_tokens=1000),
    workload=Workload(num_requests=2000, arrivals=Gamma(rate_per_s=3, cv=2), input_tokens=Lognormal(mean=300, sigma=1),
                      output_tokens=Zipf(alpha=1.2, high=10**6)),
)
print(hashlib.sha256(repr(list(stream(scenario).drafts())).encode()).hexdigest())
"""


def first(seed: int, name: str, n: int = 20) -> list[float]:
    return list(substream(seed, name).random(n))


def test_a_seed_and_a_name_give_the_same_numbers_again() -> None:
    assert first(7, "arrivals") == first(7, "arrivals")


@pytest.mark.parametrize(
    ("seed", "name"), [(8, "arrivals"), (7, "input_tokens"), (7, "arrival"), (7, ""), (2**63 - 1, "arrivals")]
)
def test_another_seed_or_name_gives_other_numbers(seed: int, name: str) -> None:
    assert not set(first(7, "arrivals")) & set(first(seed, name))


def test_a_name_is_not_another_seed_in_disguise() -> None:
    # Were the bytes of the name simply appended to the words of the seed, these two would be one stream.
    assert first(ord("a") << 32, "b") != first(0, "ab")


def test_streams_of_one_seed_are_uncorrelated() -> None:
    a, b = (substream(3, name).random(20_000) for name in ("input_tokens", "output_tokens"))
    assert abs(float(np.corrcoef(a, b)[0, 1])) < 4 / 20_000**0.5


def test_values_are_the_same_whatever_the_block() -> None:
    def head(block: int) -> list[int]:
        rng = substream(1, "x")
        return list(islice(values(lambda n: rng.integers(0, 10**6, n), block), 500))

    assert head(1) == head(7) == head(4096)


def test_the_hash_seed_of_the_process_changes_nothing(root: Path) -> None:
    digests = set()
    for hash_seed in ("0", "1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root / "sim")}
        done = subprocess.run(
            [sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True, check=True
        )
        digests.add(done.stdout)
    assert len(digests) == 1
