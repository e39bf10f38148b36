"""Scenarios: what a file may say (`schema`), reading one (`load`), its defaults (`resolve`), writing it (`to_yaml`)."""

from __future__ import annotations

from pagestorm.scenario.dump import to_yaml, with_reproduces
from pagestorm.scenario.expect import check
from pagestorm.scenario.jsonschema import json_schema
from pagestorm.scenario.loading import from_mapping, load, resolve, shipped
from pagestorm.scenario.schema import Scenario

__all__ = [
    "Scenario",
    "check",
    "from_mapping",
    "json_schema",
    "load",
    "resolve",
    "shipped",
    "to_yaml",
    "with_reproduces",
]
