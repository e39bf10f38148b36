"""Accelerator facts (accelerators.csv, accelerators_more.csv) and the rules by which a name finds its row."""

from __future__ import annotations

import re
from functools import cache
from itertools import combinations

from pagestorm.catalog.table import Facts, nearest, plain_name, read
from pagestorm.errors import ScenarioError

FORM_FACTORS = ("sxm", "pcie")


class Gpu(Facts, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accelerator. None where no source was found; `source` names where each row comes from."""

    name: str
    memory_bytes: int | None = None
    memory_bytes_note: str = ""
    hbm_bytes_per_s: int | None = None
    bf16_dense_flops: int | None = None
    fp8_dense_flops: int | None = None
    fp4_dense_flops: int | None = None
    pcie_bytes_per_s_one_dir: int | None = None
    link_bytes_per_s_one_dir: int | None = None
    link: str = ""
    power_w: int | None = None
    sm_arch: str = ""
    source: str
    notes: str = ""

    def line(self) -> str:
        """The accelerator in one line: name, memory, bandwidth, arithmetic."""
        mib, flops, bandwidth = self.memory_mib, self.bf16_dense_flops, self.hbm_bytes_per_s
        gib = "?" if mib is None else f"{mib / 1024:.1f}"
        return (
            f"{self.name:<20} {gib:>6} GiB {'?' if bandwidth is None else f'{bandwidth / 1e12:.2f}':>6} TB/s "
            f"{'?' if flops is None else f'{flops / 1e12:.0f}':>5} dense bf16 TFLOP/s"
        )

    @property
    def memory_mib(self) -> int | None:
        """Memory in MiB, the unit of the engine's memory classes.

        Where the exact bytes are not known, the "N GB" of the note counts as N GiB: the cards report a little less.
        """
        if self.memory_bytes is not None:
            return self.memory_bytes >> 20
        nominal = re.match(r"(\d+) GB", self.memory_bytes_note)
        return int(nominal[1]) << 10 if nominal else None


@cache
def gpus() -> tuple[Gpu, ...]:
    """Every accelerator, in the order of the tables."""
    return read("accelerators.csv", Gpu) + read("accelerators_more.csv", Gpu)


def gpu(name: str) -> Gpu:
    """The accelerator that `name` means, whatever its case, spaces and hyphens.

    Memory size and form factor may be left out where that leaves one row; no form factor means SXM. Raises
    `ScenarioError` with the candidates for a name that stays ambiguous, with the nearest names for an unknown one.
    """
    asked = plain_name(name)
    exact = [each for each in gpus() if plain_name(each.name) == asked]
    found = exact or [each for each in gpus() if asked in _short_names(each.name)]
    if len(found) > 1 and not asked.endswith(FORM_FACTORS):
        found = [each for each in found if plain_name(each.name).endswith("sxm")] or found
    if len(found) == 1:
        return found[0]
    if found:
        candidates = ", ".join(each.name for each in found)
        raise ScenarioError(f"the GPU name {name!r} is ambiguous; write one of: {candidates}")
    near = dict.fromkeys(_of_short_name(each) for each in nearest(name, _all_short_names()))
    if not near:
        raise ScenarioError(f"unknown GPU {name!r}; `pagestorm catalog gpus` lists what is known")
    raise ScenarioError(f"unknown GPU {name!r}; did you mean {' or '.join(near)}?")


def _all_short_names() -> list[str]:
    return [short for each in gpus() for short in sorted(_short_names(each.name))]


def _of_short_name(short: str) -> str:
    return next(each.name for each in gpus() if short in _short_names(each.name))


@cache
def _short_names(name: str) -> frozenset[str]:
    """What `name` can be cut to: its first word with any of the others, in their order."""
    first, *rest = (plain_name(word) for word in re.split(r"[\s-]+", name))
    return frozenset(first + "".join(kept) for n in range(len(rest) + 1) for kept in combinations(rest, n))
