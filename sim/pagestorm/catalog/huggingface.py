"""Any Hugging Face `config.json`, read from a path, as a model of the catalog."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pagestorm.catalog import parameters
from pagestorm.catalog.models import Model
from pagestorm.catalog.shape import CHUNKED, FULL, LINEAR, SLIDING, Shape, shape_of
from pagestorm.errors import ScenarioError

CONFIG, QUANTIZED = "config.json", "hf_quant_config.json"
MAX_BYTES = 16 << 20


def is_path(name: str) -> bool:
    """Whether a model is named by a path: a .json file, or a folder that exists."""
    return name.endswith(".json") or Path(name).is_dir()


def read_model(name: str) -> Model:
    """The model whose config.json (or the folder around it) is at this path.

    Raises `ScenarioError` for a file that is absent, cut off, no JSON, or of something that is no language model.
    """
    path = Path(name)
    path = path / CONFIG if path.is_dir() else path
    config = _object(path)
    beside = path.with_name(QUANTIZED)
    if "quantization_config" not in config and beside.is_file():
        config["quantization_config"] = _object(beside).get("quantization") or {}
    named = path.parent.name if path.name == CONFIG else path.name.removesuffix(".json")
    shape = shape_of(config, name=named or str(path), source=str(path))
    return _row(shape, str(path), json.dumps(config))


def _object(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise _unreadable(path, f"larger than {MAX_BYTES >> 20} MiB")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise _unreadable(path, "no such file; give a name of `pagestorm catalog models` or the path of one") from None
    except UnicodeDecodeError:
        raise _unreadable(path, "not text, so no config.json; is this a weights file?") from None
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        cut = error.pos >= len(text.rstrip())
        what = "ends in the middle; it is cut off, download it again" if cut else f"no JSON: {error.msg}"
        raise ScenarioError(what, file=str(path), line=error.lineno, column=error.colno, key="model") from None
    except RecursionError:
        raise _unreadable(path, "nested too deeply to be a config.json") from None
    if not isinstance(config, dict):
        raise _unreadable(path, f"holds a {type(config).__name__}, not the object of a config.json")
    return config


def _unreadable(path: Path, what: str) -> ScenarioError:
    return ScenarioError(what, file=str(path), key="model")


def _row(shape: Shape, path: str, config: str) -> Model:
    """The columns of models.csv that a config answers."""
    heads, experts, latent, state = shape.full, shape.experts, shape.latent, shape.state
    total = parameters.total(shape)
    return Model(
        model=shape.name,
        hf_id=path,
        architecture=shape.architecture,
        attention=_attention(shape),
        num_hidden_layers=shape.layer_count,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.dense_intermediate,
        moe_intermediate_size=experts.intermediate if experts else None,
        num_experts=experts.total if experts else None,
        experts_per_token=experts.chosen if experts else None,
        num_attention_heads=shape.query_heads,
        num_key_value_heads=None if latent else heads.kv_heads,
        head_dim=None if latent else heads.k_dim,
        v_head_dim=latent.v_dim if latent else heads.v_dim if heads.v_dim != heads.k_dim else None,
        kv_lora_rank=latent.kv_rank if latent else None,
        q_lora_rank=latent.q_rank if latent else None,
        qk_rope_head_dim=latent.rope if latent else None,
        qk_nope_head_dim=latent.nope if latent else None,
        sliding_window=shape.window_tokens if shape.count(SLIDING) else None,
        n_full_attn_layers=shape.count(FULL),
        n_sliding_layers=shape.count(SLIDING),
        n_chunked_layers=shape.count(CHUNKED),
        n_linear_layers=shape.count(LINEAR),
        linear_conv_kernel=state.conv_kernel if state else None,
        index_head_dim=shape.indexer.head_dim if shape.indexer else None,
        index_n_heads=shape.indexer.heads if shape.indexer else None,
        index_topk=shape.indexer.topk if shape.indexer else None,
        max_position_embeddings=shape.context_tokens,
        vocab_size=shape.vocab_size,
        tie_word_embeddings=shape.tied_embeddings,
        torch_dtype=shape.dtype,
        native_weight_format=shape.weight_format,
        num_nextn_layers=shape.draft_layers,
        computed_params_total=total,
        computed_params_active=parameters.active(shape),
        computed_weight_bytes=2 * total if shape.weight_format in ("bfloat16", "float16") else None,
        source=path,
        config=config,
    )


def _attention(shape: Shape) -> str:
    kind = "MLA" if shape.latent else "GQA"
    extras = [
        name
        for name, there in (
            ("DSA", shape.indexer is not None),
            ("SWA", SLIDING in shape.layers),
            ("chunked", CHUNKED in shape.layers),
            ("state", LINEAR in shape.layers),
            ("compressed", bool(shape.compress_ratios)),
        )
        if there
    ]
    return "+".join((kind, *extras))
