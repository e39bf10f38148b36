"""The JSON Schema of scenario files, for editors and other programs."""

from __future__ import annotations

from typing import Any

import msgspec

from pagestorm.scenario.schema import Scenario

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """Keys, types, bounds, defaults and descriptions of a scenario, as JSON Schema (draft 2020-12).

    What depends on several keys at once, or on the catalog, only loading checks.
    """
    schema: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(msgspec.json.schema(Scenario)))
    return {"$schema": DRAFT, "title": "Pagestorm scenario", **schema}
