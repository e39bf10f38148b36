"""Facts about models and accelerators, each with its source: `model(name)`, `gpu(name)`, `models()`, `gpus()`.

`model` also reads any Hugging Face `config.json` from a path. `shape(model)` is what each of its layers keeps and
weighs, `usable(gpu)` what a card really offers, apart from its nominal size. The tables are read when they are first
asked for.
"""

from __future__ import annotations

from pagestorm.catalog.gpus import Gpu, gpu, gpus
from pagestorm.catalog.models import KvShape, Model, model, models
from pagestorm.catalog.rows import shape
from pagestorm.catalog.shape import Shape
from pagestorm.catalog.usable import Usable, usable

__all__ = ["Gpu", "KvShape", "Model", "Shape", "Usable", "gpu", "gpus", "model", "models", "shape", "usable"]
