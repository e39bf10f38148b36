"""The torch pool beyond the contract: what it writes and reads back, that it is vectorised, that it stands alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from pagestorm.errors import PoolCorruption, ScenarioError
from pagestorm.memory.pools import KvShape, PoolSpec
from pagestorm_real import Payload, TorchLedger, TorchPool, open_ledger, pool_bytes
from pagestorm_real.pool import resolve_device
from tests.memory.test_ledger_contract import ints
from tests.real.watch import watching

STAMP = Payload("stamp", layers=3, kv_heads=2, head_dim=8)
FULL = Payload("full", layers=3, kv_heads=2, head_dim=8)
K, V = 0, 1


def filled(payload: Payload, page_size: int = 4) -> TorchLedger:
    """Owner 0 holds 10 tokens and owner 1 holds 7, some of them decoded."""
    ledger = TorchLedger(12, page_size, 4, 64, payload=payload)
    ledger.extend(ints(0, 1), ints(7, 5))
    ledger.decode(ints(1, 0), 2)
    ledger.decode(ints(0), 1)
    return ledger


def words(ledger: TorchLedger) -> torch.Tensor:
    """K/V words, shape [layers, K or V, slots, words of a row]."""
    assert ledger._buffers is not None
    return ledger._buffers.words


def slot(ledger: TorchLedger, owner: int, position: int) -> int:
    table = ledger.page_table(owner)
    assert table is not None
    return int(table[position // ledger.page_size]) * ledger.page_size + position % ledger.page_size


@pytest.mark.parametrize("payload", [STAMP, FULL], ids=["stamp", "full"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_every_slot_of_an_owner_says_its_stay_and_position(payload: Payload, page_size: int) -> None:
    ledger = TorchLedger(60, page_size, 4, 64, payload=payload)
    ledger.extend(ints(0, 1), ints(7, 5))
    ledger.decode(ints(1, 0), 2)
    ledger.decode(ints(0, 1), 1, 3)
    for owner, tokens in ((0, 12), (1, 10)):
        found = [words(ledger)[0, K, slot(ledger, owner, position), :2].tolist() for position in range(tokens)]
        assert found == [[owner + 1, position] for position in range(tokens)]
    ledger.release_many(ints(0))
    ledger.extend(ints(0), ints(1))
    assert words(ledger)[0, K, slot(ledger, 0, 0), 0] == 5, "a new stay has a new number"


def test_the_stamp_lies_in_the_first_k_and_the_last_v_and_nowhere_else() -> None:
    ledger = filled(STAMP)
    held = words(ledger)[:, :, slot(ledger, 1, 6)]
    assert held[0, K].tolist() == [2, 6, 0, 0]
    assert held[2, V].tolist() == [2, 6, 0, 0]
    assert not held[0, V].any()
    assert not held[1].any()
    assert not held[2, K].any()


def test_slots_behind_the_last_token_of_a_page_are_not_written() -> None:
    ledger = filled(FULL)
    last = slot(ledger, 0, 9)
    assert words(ledger)[:, :, last].all(dim=-1).any()
    assert not words(ledger)[:, :, last + 1 : last + 3].any()
    assert not words(ledger)[:, :, :4].any(), "page 0 is padding"


@pytest.mark.parametrize(
    ("payload", "layer", "side", "word"),
    [(STAMP, 0, K, 0), (STAMP, 0, K, 1), (STAMP, 2, V, 0), (STAMP, 2, V, 1)]
    + [(FULL, layer, side, word) for layer in range(3) for side in (K, V) for word in range(4)],
)
@pytest.mark.parametrize("position", [0, 6, 9])
def test_one_wrong_bit_in_what_was_written_is_found_at_release(
    payload: Payload, layer: int, side: int, word: int, position: int
) -> None:
    ledger = filled(payload)
    where = slot(ledger, 0, position)
    words(ledger)[layer, side, where, word] ^= 1 << 17
    before = (ledger.free_pages(), ledger.length(0))
    with pytest.raises(PoolCorruption) as caught:
        ledger.release_many(ints(1, 0))
    told = str(caught.value)
    assert f"owner 0 position {position}: slot {where} layer {layer} {'KV'[side]} word {word} " in told
    assert f"should say stay 1 position {position}" in told
    if word == 0:
        assert f"found stay {1 ^ 1 << 17} position {position}" in told
    assert (ledger.free_pages(), ledger.length(0)) == before, "nothing is given back before it was read"
    words(ledger)[layer, side, where, word] ^= 1 << 17
    assert ledger.release_many(ints(1, 0)) == 5


@pytest.mark.parametrize("payload", [STAMP, FULL], ids=["stamp", "full"])
def test_a_slot_written_by_another_owner_names_that_owner(payload: Payload) -> None:
    ledger = filled(payload)
    words(ledger)[:, :, slot(ledger, 0, 3)] = words(ledger)[:, :, slot(ledger, 1, 2)]
    with pytest.raises(PoolCorruption, match=r"should say stay 1 position 3, found stay 2 \(owner 1 now\) position 2"):
        ledger.verify(ints(0))
    ledger.verify(ints(1))


def test_full_tells_k_from_v_and_layer_from_layer() -> None:
    for source, target in (((0, K), (0, V)), ((0, K), (1, K)), ((2, V), (1, V))):
        ledger = filled(FULL)
        where = slot(ledger, 0, 3)
        words(ledger)[(*target, where)] = words(ledger)[(*source, where)]
        with pytest.raises(PoolCorruption, match=f"layer {target[0]} {'KV'[target[1]]}"):
            ledger.verify(ints(0))


def test_a_drop_reads_back_what_it_gives_back() -> None:
    ledger = filled(STAMP)
    words(ledger)[0, K, slot(ledger, 0, 5), 1] = 77
    with pytest.raises(PoolCorruption, match="owner 0 position 5"):
        ledger.drop(0, 4, 8)
    assert ledger.drop(0, 0, 4) == 1


def test_shared_pages_are_read_back_as_whoever_filled_them_wrote_them() -> None:
    ledger = filled(FULL)
    ledger.move(0, 4, 8, to=2)
    ledger.alias(3, 2, 0, 4)
    ledger.release_many(ints(0))
    ledger.verify(ints(2, 3))
    words(ledger)[1, V, slot(ledger, 3, 2), 3] += 1
    with pytest.raises(PoolCorruption, match=r"owner 3 position 2: .* should say stay 1 position 6"):
        ledger.verify(ints(3))
    with pytest.raises(PoolCorruption, match=r"owner 2 position 2: .* should say stay 1 position 6"):
        ledger.release_many(ints(2))


def test_a_page_freed_under_a_reader_and_taken_again_is_found_by_what_is_written_there() -> None:
    ledger = filled(STAMP)
    ledger.alias(2, 0, 0, 8)
    ledger.release_many(ints(0))
    ledger.extend(ints(3), ints(8))
    with pytest.raises(PoolCorruption, match=r"owner 2 position 0: .* stay 1 position 0, found stay 4 \(owner 3 now\)"):
        ledger.verify(ints(2))


def test_without_a_payload_there_are_no_buffers() -> None:
    ledger = filled(Payload("none"))
    ledger.verify(ints(0, 1))
    assert ledger.release_many(ints(0, 1)) == 5
    assert pool_bytes(12, 4, 4, 64, Payload("none")).kv_bytes == 0


@pytest.mark.parametrize("payload", [Payload(), STAMP, FULL, Payload("none"), Payload("full", 2, 1, 3, 1)])
@pytest.mark.parametrize(
    ("pages", "page_size", "owners", "max_length"), [(12, 4, 4, 64), (100, 1, 7, 33), (9, 64, 1, 65)]
)
def test_the_memory_that_is_announced_is_the_memory_that_is_kept(
    payload: Payload, pages: int, page_size: int, owners: int, max_length: int
) -> None:
    ledger = TorchLedger(pages, page_size, owners, max_length, payload=payload)
    tensors = {value.data_ptr(): value for value in reachable_tensors(ledger) if value.numel()}
    listed = {tensor.data_ptr() for tensor in ledger.tensors()}
    assert listed >= set(tensors), "a tensor is kept that `tensors` does not list"
    announced = pool_bytes(pages, page_size, owners, max_length, payload)
    assert announced.kept_device_bytes == sum(tensor.nbytes for tensor in ledger.tensors())


def reachable_tensors(thing: object) -> list[torch.Tensor]:
    """Storage-owning tensors among the attributes of an object of ours, and of the objects that it has."""
    found = []
    for value in vars(thing).values():
        if isinstance(value, torch.Tensor) and value._base is None:
            found.append(value)
        elif type(value).__module__.startswith("pagestorm_real"):
            found += reachable_tensors(value) if hasattr(value, "__dict__") else []
    return found


def operations(batch: int, payload: Payload, sharing: bool) -> dict[str, tuple[int, int]]:
    """Torch operations, and waits among them, of each call for a batch of this size."""
    ledger = TorchLedger(40 * batch, 4, 2 * batch, 128, payload=payload)
    owners, others = np.arange(batch), np.arange(batch, 2 * batch)
    ledger.extend(others, np.full(batch, 8))
    if sharing:
        for owner, other in zip(owners, others, strict=True):
            ledger.alias(int(owner), int(other), 0, 8)
    tokens = 5 + np.arange(batch) % 7
    calls: dict[str, Callable[[], object]] = {
        "extend": lambda: ledger.extend(owners, tokens),
        "decode one": lambda: ledger.decode(owners, 1),
        "decode many": lambda: ledger.decode(owners, 9),
        "decode several": lambda: ledger.decode(owners, 3, 4),
        "verify": lambda: ledger.verify(owners),
        "release": lambda: ledger.release_many(owners),
    }
    counts = {}
    for name, call in calls.items():
        with watching() as seen:
            assert call() != 0
        counts[name] = (len(seen), sum(operation.waits for operation in seen))
    return counts


@pytest.mark.parametrize("payload", [Payload(), FULL], ids=["stamp", "full"])
@pytest.mark.parametrize("sharing", [False, True], ids=["alone", "aliased"])
def test_the_number_of_torch_operations_does_not_depend_on_the_batch(payload: Payload, sharing: bool) -> None:
    small, large = operations(8, payload, sharing), operations(64, payload, sharing)
    assert small == large
    for name, (_, waits) in large.items():
        growing = name.startswith(("extend", "decode"))
        assert waits == 0 if growing else waits <= 3, (name, waits)


def test_one_token_a_request_costs_few_operations() -> None:
    assert operations(64, Payload(), sharing=False)["decode one"][0] <= 24


def test_an_owner_that_outgrows_its_row_is_told_so_and_nothing_is_taken() -> None:
    ledger = TorchLedger(12, 4, 4, 10)
    ledger.extend(ints(0, 1), ints(9, 4))
    before = ledger.free_pages()
    calls: list[Callable[[], object]] = [
        lambda: ledger.decode(ints(1, 0), 2),
        lambda: ledger.extend(ints(1), ints(7)),
        lambda: ledger.alias(1, 0, 0, 8),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="has room for 10"):
            call()
    assert (ledger.free_pages(), ledger.length(0), ledger.length(1)) == (before, 9, 4)
    ledger.audit()


def test_a_row_with_more_pages_than_can_be_remembered_is_refused() -> None:
    with pytest.raises(ValueError, match="is more than"):
        TorchLedger(1, 1, 1, 1 << 24, payload=Payload("none"))


@pytest.mark.parametrize("argument", ["layers", "kv_heads", "head_dim", "dtype_bytes"])
def test_a_payload_of_nothing_is_refused(argument: str) -> None:
    with pytest.raises(ValueError, match=argument):
        Payload(**{argument: 0})  # type: ignore[arg-type]  # the point of the test


def test_a_pool_spec_becomes_a_ledger_of_its_shape() -> None:
    spec = PoolSpec(6, 4, 3, 24, KvShape(2, 1, 16, 2), device="cpu", payload="full")
    ledger = open_ledger(spec)
    assert (ledger.total_pages(), ledger.page_size, ledger.payload) == (6, 4, Payload("full", 2, 1, 16, 2))
    assert words(ledger).shape == (2, 2, 7 * 4, 4)


def test_a_device_that_is_not_here_is_bad_input() -> None:
    assert resolve_device("cpu") == "cpu"
    assert resolve_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ScenarioError, match="'tpu' is not here"):
        resolve_device("tpu")
    with pytest.raises(ScenarioError, match="is not here"):
        resolve_device("cuda:99")
    if not torch.cuda.is_available():
        with pytest.raises(ScenarioError, match="sees no CUDA device"):
            resolve_device("cuda")


def test_taking_and_giving_cost_no_more_in_a_large_pool() -> None:
    """Not time, but the size of what is made: nothing is as long as the pool."""
    for page_size in (1, 16):
        pool = TorchPool(100_000, page_size)
        with watching() as seen:
            for _ in range(3):
                ids = pool.take_tensor(50)
                assert ids is not None
                pool.give_tensor(ids)
        assert max(operation.elements for operation in seen) == 50


def test_the_torch_pool_does_its_work_without_the_pure_python_pool(root: Path) -> None:
    """Two pools that share their allocation code would agree on its bugs."""
    script = """
import sys
sys.modules["pagestorm.memory.paged"] = None
sys.modules["pagestorm.memory.counting"] = None
import numpy as np
from pagestorm_real.pool import TorchLedger
ledger = TorchLedger(8, 4, 3, 64)
assert ledger.extend(np.array([0, 1]), np.array([5, 3])) == 3
assert ledger.decode(np.array([0, 1]), 9) == 4
assert ledger.release_many(np.array([1, 0])) == 7
ledger.audit()
loaded = sorted(name for name in sys.modules if name.startswith("pagestorm.") and sys.modules[name] is not None)
print(" ".join(loaded))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": f"{root / 'sim'}:{root / 'real'}", "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {
        "pagestorm.compiled",
        "pagestorm.errors",
        "pagestorm.memory",
        "pagestorm.memory.allocator",
        "pagestorm.memory.ledger",
    }
