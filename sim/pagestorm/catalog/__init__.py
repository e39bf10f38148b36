"""Facts about models and accelerators, each with its source: `model(name)`, `gpu(name)`, `models()`, `gpus()`.

The tables (models.csv, accelerators.csv) are read when they are first asked for.
"""

from __future__ import annotations

from pagestorm.catalog.gpus import Gpu, gpu, gpus
from pagestorm.catalog.models import KvShape, Model, model, models

__all__ = ["Gpu", "KvShape", "Model", "gpu", "gpus", "model", "models"]
