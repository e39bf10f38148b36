"""The tables: nothing dropped on the way, and the figures agree with each other."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from pagestorm import catalog
from pagestorm.errors import ScenarioError

ROWS: list[catalog.Model | catalog.Gpu] = [*catalog.models(), *catalog.gpus()]


@pytest.mark.parametrize("table", ["models", "accelerators"])
def test_every_row_and_column_of_the_collected_facts_is_carried(shared: Path, table: str) -> None:
    with (shared / f"data/{table}.csv").open() as stream:
        wanted = list(csv.DictReader(stream))
    carried = {row.name: row.as_dict() for row in (catalog.models() if table == "models" else catalog.gpus())}
    for theirs in wanted:
        ours = carried[theirs["model" if table == "models" else "name"]]
        written = {key: "" if cell is None else str(cell) for key, cell in ours.items()}
        assert {key: written[key] for key in theirs} == theirs


def test_every_row_names_its_source() -> None:
    assert all(row.source for row in ROWS)


@pytest.mark.parametrize("model", catalog.models(), ids=lambda model: model.name)
def test_kv_rows_weigh_what_the_table_says(model: catalog.Model) -> None:
    tabled = model.computed_kv_bytes_per_token_full_layers_bf16
    assert tabled is None or model.kv_bytes_per_token() == tabled
    if model.full_attention_only:
        assert model.kv_shape.bytes_per_token == tabled, "K and V alike: the shape alone gives the bytes"


def test_ranks_share_kv_heads_until_each_has_one() -> None:
    model = catalog.model("Llama-3.1-8B")
    assert [model.kv_bytes_per_token(ranks) for ranks in (1, 2, 8, 16)] == [131072, 65536, 16384, 16384]


def test_a_latent_row_is_on_every_rank() -> None:
    model = catalog.model("DeepSeek-V3")
    assert model.kv_bytes_per_token(8) == model.kv_bytes_per_token(1) == 61 * 576 * 2
    assert model.kv_shape == (61, 1, 288, 2)


@pytest.mark.parametrize("model", catalog.models(), ids=lambda model: model.name)
def test_parameters_divide_into_whole_experts(model: catalog.Model) -> None:
    total, active = model.computed_params_total, model.computed_params_active
    if total is None or active is None or model.vocab_size is None:
        return
    embedding = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    untouched = total - active - embedding
    if model.num_experts and model.experts_per_token:
        assert untouched % (model.num_experts - model.experts_per_token) == 0
        assert untouched > 0
    elif model.tie_word_embeddings is not None:
        assert untouched == 0


def test_a_tensor_parallel_size_that_does_not_divide_is_refused_with_those_that_do() -> None:
    with pytest.raises(ScenarioError, match="possible: 1, 2, 4, 8, 16, 32"):
        catalog.model("Qwen3-8B").kv_bytes_per_token(3)


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "llama 3.1 8b", "LLAMA31-8B".replace("31", "3.1"), "llama_3.1_8b"])
def test_model_names_match_whatever_their_case_spaces_and_hyphens(name: str) -> None:
    assert catalog.model(name).name == "Llama-3.1-8B"


def test_a_hugging_face_id_is_a_model_name_too() -> None:
    assert catalog.model("meta-llama/Meta-Llama-3.1-8B").name == "Llama-3.1-8B"


def test_an_unknown_model_gets_the_nearest_names() -> None:
    with pytest.raises(ScenarioError, match=r"did you mean .*Qwen3-8B"):
        catalog.model("Qwen3-9B")


def test_every_fact_can_be_listed_in_one_line() -> None:
    lines = [row.line() for row in ROWS]
    assert all(line and "\n" not in line and "None" not in line for line in lines)


def test_reading_the_tables_loads_no_table_library() -> None:
    code = "import sys; from pagestorm import catalog; catalog.gpus(); print({'pandas', 'numpy'} & set(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_env())
    assert printed.stdout.strip() == "set()"


def _env() -> dict[str, str]:
    return {"PYTHONPATH": str(Path(catalog.__file__).resolve().parents[2])}
