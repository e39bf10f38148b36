"""How long a forward pass takes, in whole femtoseconds: `build(scenario)` gives the model that a scenario names."""

from __future__ import annotations

from pagestorm import catalog
from pagestorm.errors import ScenarioError
from pagestorm.scenario.schema import Linear, Scenario
from pagestorm.steptime.contract import FS_PER_S, StepTime
from pagestorm.steptime.linear import LinearStepTime
from pagestorm.steptime.roofline import RooflineStepTime

__all__ = ["FS_PER_S", "LinearStepTime", "RooflineStepTime", "StepTime", "build"]


def build(scenario: Scenario) -> StepTime:
    """The step-time model of a resolved scenario. Raises `ScenarioError` where a fact that it needs is missing."""
    settings = scenario.steptime
    if settings is None:
        raise ScenarioError("resolve the scenario first: its step time is still open", key="steptime")
    if isinstance(settings, Linear):
        return LinearStepTime(settings)
    if scenario.model is None or scenario.hardware is None:
        raise ScenarioError(
            "roofline needs a model and hardware: give both, or write steptime: {kind: linear}", key="steptime"
        )
    return RooflineStepTime(
        catalog.model(scenario.model), catalog.gpu(scenario.hardware.gpu), scenario.hardware.tp_size
    )
