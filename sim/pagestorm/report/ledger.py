"""What retraction cost: tokens thrown away and the time to compute them again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pagestorm.diagnosis import Diagnosis
from pagestorm.report.words import duration, percent, plural, sentence
from pagestorm.steptime import FS_PER_S, build

if TYPE_CHECKING:
    from pagestorm.scenario import Scenario


class RecomputeCost:
    """Prefill time of tokens that were thrown away, by the step-time model of a resolved scenario.

    A burst's tokens count as one prefill pass of their own, with sequences as long as its average victim; the run
    itself may have packed them with others.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._model = build(scenario)

    def seconds(self, tokens: int, victims: int) -> float:
        """Of one burst."""
        if tokens <= 0 or victims <= 0:
            return 0.0
        length, longer = divmod(tokens, victims)
        lengths = [length + 1] * longer + [length] * (victims - longer if length else 0)
        return self._model.prefill_fs(lengths, [0] * len(lengths)) / FS_PER_S


def ledger_total(summary: Mapping[str, Any], diagnosis: Diagnosis, cost: RecomputeCost) -> str:
    """The whole ledger in one sentence."""
    seconds = sum(cost.seconds(each.lost_tokens, each.victims) for each in diagnosis.first["retraction"])
    bursts, shown = diagnosis.counts["retraction"], len(diagnosis.first["retraction"])
    if bursts > shown:
        # The bursts that are not kept cost what their tokens do, all at the rate of those that are.
        kept = sum(each.lost_tokens for each in diagnosis.first["retraction"])
        seconds *= diagnosis.lost_tokens / kept if kept else 1.0
    about = "about " if bursts > shown else ""
    return sentence(
        f"{plural(diagnosis.victims, 'request')} taken back in {plural(bursts, 'burst')} threw away "
        f"{plural(diagnosis.lost_tokens, 'token')} of KV; computing as much again is {about}{duration(seconds)} of "
        f"prefill by the step-time model, {percent(seconds, summary['simulated_s'])} of the simulated time"
    )
