"""The ten numbers that a person asks for first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagestorm.diagnosis import Diagnosis
from pagestorm.report.verdict import taken_back
from pagestorm.report.words import duration, percent, plural


def key_figures(summary: Mapping[str, Any], diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """As (label, value); a value of several parts has commas between them."""
    goodput = summary["goodput_requests_per_s"]
    return [
        ("finished", f"{summary['finished']:,} of {plural(summary['requests'], 'request')}"),
        (f"{taken_back(summary)[0]}s", _retractions(summary)),
        ("computed twice", _recomputed(summary, diagnosis)),
        (
            "peak pool use",
            f"{summary['peak_used_pages']:,} of {plural(summary['pool_pages'], 'page')}, "
            f"{percent(summary['peak_used_pages'], summary['pool_pages'])}",
        ),
        ("running", f"{summary['mean_running']:.1f} on average, {summary['peak_running']:,} at most"),
        ("waiting", f"{summary['peak_waiting']:,} at most"),
        ("first token", _latency(summary, "ttft")),
        ("whole answer", _latency(summary, "e2e")),
        ("throughput", "-" if goodput is None else f"{goodput:,.3g} requests/s"),
        ("simulated", duration(summary["simulated_s"])),
    ]


def _retractions(summary: Mapping[str, Any]) -> str:
    noun, count = taken_back(summary)
    if not count:
        return "none"
    if noun == "preemption":
        return f"{count:,}"
    return f"{summary['retractions']:,}, of {plural(summary['retracted_requests'], 'request')}"


def _recomputed(summary: Mapping[str, Any], diagnosis: Diagnosis) -> str:
    tokens = summary["recomputed_tokens"]
    if not tokens:
        return "nothing"
    share = f", {percent(tokens, diagnosis.prefill_tokens)} of prefill" if diagnosis.prefill_tokens else ""
    return f"{plural(tokens, 'token')}{share}"


def _latency(summary: Mapping[str, Any], which: str) -> str:
    if summary[f"{which}_s_p50"] is None:
        return "-"
    return f"{duration(summary[f'{which}_s_p50'])} p50, {duration(summary[f'{which}_s_p99'])} p99"
