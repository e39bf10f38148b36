"""Which accelerator a name means."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagestorm import catalog
from pagestorm.errors import ScenarioError


@settings(deadline=None)
@given(st.sampled_from(catalog.gpus()))
def test_case_spaces_and_hyphens_do_not_matter(gpu: catalog.Gpu) -> None:
    shuffled = gpu.name.swapcase().replace(" ", "-").replace("-", " - ")
    assert catalog.gpu(gpu.name) is catalog.gpu(shuffled) is gpu
    assert catalog.gpu(gpu.name.replace(" ", "").replace("-", "")) is gpu


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("H100-80GB", "H100-80GB SXM"),
        ("h100", "H100-80GB SXM"),
        ("H100 PCIe", "H100-80GB PCIe"),
        ("A100-80GB", "A100-80GB SXM"),
        ("A100 40GB", "A100-40GB SXM"),
        ("H200", "H200 SXM"),
        ("H20", "H20"),
        ("B200", "B200 SXM"),
        ("GB200", "GB200"),
        ("L4", "L4"),
        ("RTX PRO 6000", "RTX PRO 6000 Server"),
    ],
)
def test_no_form_factor_means_sxm_and_one_match_needs_no_memory_size(name: str, meant: str) -> None:
    assert catalog.gpu(name).name == meant


@pytest.mark.parametrize(
    ("name", "candidates"),
    [
        ("A100", ["A100-40GB SXM", "A100-80GB SXM"]),
        ("RTX", ["RTX PRO 6000 Server", "RTX 4090", "RTX 5090", "RTX 3090"]),
    ],
)
def test_what_stays_ambiguous_is_refused_with_the_candidates(name: str, candidates: list[str]) -> None:
    with pytest.raises(ScenarioError) as caught:
        catalog.gpu(name)
    assert str(caught.value).endswith(f"write one of: {', '.join(candidates)}")


@pytest.mark.parametrize(("name", "nearest"), [("H200 SMX", "H200 SXM"), ("4090", "RTX 4090"), ("L40", "L40S")])
def test_an_unknown_name_gets_the_nearest_ones(name: str, nearest: str) -> None:
    with pytest.raises(ScenarioError, match="unknown GPU") as caught:
        catalog.gpu(name)
    assert nearest in str(caught.value)


def test_a_name_like_nothing_else_points_at_the_list() -> None:
    with pytest.raises(ScenarioError, match="pagestorm catalog gpus"):
        catalog.gpu("???")


@pytest.mark.parametrize(("name", "mib"), [("H100", 81920), ("A100-40GB", 40960), ("H20", 98304), ("RTX 4090", 24080)])
def test_memory_is_known_in_mib_even_where_only_its_class_is(name: str, mib: int) -> None:
    assert catalog.gpu(name).memory_mib == mib
