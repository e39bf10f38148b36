"""Rows of models.csv, written out with the keys of a Hugging Face config, and the facts beside them (shapes.json)."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from pagestorm.catalog.models import Model
from pagestorm.catalog.shape import Shape, shape_of

LETTER_TYPES = {
    "F": "full_attention",
    "S": "sliding_attention",
    "C": "chunked_attention",
    "L": "linear_attention",
}
RATIO_LETTERS = {"W": 0, "C": 4, "H": 128}
ROW_KEYS = {
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "n_shared_experts": "n_shared_experts",
    "first_k_dense": "first_k_dense_replace",
    "global_num_kv_heads": "num_global_key_value_heads",
    "swa_num_kv_heads": "swa_num_key_value_heads",
    "linear_conv_kernel": "linear_conv_kernel_dim",
    "num_nextn_layers": "num_nextn_predict_layers",
}
"""Columns that a Hugging Face config calls by another name."""


@cache
def shape(model: Model) -> Shape:
    """The shape of a model of the catalog, or of one read from a config.json. Raises `ScenarioError`."""
    if model.config is not None:
        return shape_of(json.loads(model.config), name=model.name, source=model.source)
    facts = _beside().get(model.name, {})
    source = model.source if not facts.get("source") else f"{model.source}; {facts['source']}"
    return shape_of({**_config(model), **facts.get("config", {})}, name=model.name, source=source)


@cache
def _beside() -> dict[str, dict[str, Any]]:
    """Facts that the table has no column for, by model, each with its source."""
    found: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf-8"))
    return found


def _config(row: Model) -> dict[str, Any]:
    plain = {ROW_KEYS.get(key, key): value for key, value in row.as_dict().items() if value is not None}
    for key in ("model", "source", "notes", "layer_pattern", "compress_ratios", "architecture"):
        plain.pop(key, None)
    plain["architectures"] = [row.architecture] if row.architecture else []
    letters = layer_letters(row.layer_pattern, row.num_hidden_layers)
    if letters is not None:
        plain["layer_types"] = [LETTER_TYPES[letter] for letter in letters]
    if row.compress_ratios:
        pattern = row.compress_ratios.split(":", 1)[1].split(" where ")[0]
        plain["compress_ratios"] = [RATIO_LETTERS[letter] for letter in _spelled(pattern)]
    if row.sliding_window is None:
        plain["use_sliding_window"] = False
    return plain


def layer_letters(pattern: str, layers: int) -> str | None:
    """`(3L 1F)x12`, `32S`, `(5S 1F)x10 then 2S` or `all full` as a letter a layer; None where it points elsewhere."""
    if pattern == "all full":
        return "F" * layers
    if pattern.startswith("see"):
        return None
    return _spelled(pattern)


def _spelled(pattern: str) -> str:
    letters = ""
    for part in pattern.split(" then "):
        repeated = re.fullmatch(r"\s*\((.*)\)x(\d+)\s*", part)
        body, times = (repeated[1], int(repeated[2])) if repeated else (part, 1)
        letters += "".join(letter * int(count) for count, letter in re.findall(r"(\d+)([A-Z])", body)) * times
    return letters
