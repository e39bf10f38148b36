"""The verdict in words: what happened, why, what it cost, what to try next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagestorm.diagnosis import (
    ABORT,
    BLOCKS,
    DECODE_OOM,
    LAST_REQUEST,
    PREFILL_OOM,
    REJECTION,
    RETRACTION,
    Diagnosis,
    Incident,
    Pressure,
)
from pagestorm.engine.sglang import CLIP_NEW_TOKENS
from pagestorm.report.advice import fits_at_page_size_1, next_steps
from pagestorm.report.words import duration, percent, plural, sentence, times

GOOD, WARNING, BAD = "good", "warning", "bad"
NOT_KEPT = "The events of this run were not read, so the rule that decided is not shown; --out DIR keeps them."


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a person reads first, in this order."""

    level: str
    """good, warning or bad."""
    word: str
    """One or two words for a badge: held, retracted, crashed."""
    headline: str
    law: str
    """The rule that decided, with its numbers; empty when nothing gave way or the record was not kept."""
    context: list[str]
    """Facts around the law, each a sentence."""
    cost: str
    """What it cost; empty when it cost nothing."""
    next_steps: list[str]
    engine_says: str
    """The message with which the engine died, word for word and in one line, for those who search their logs for it."""


def verdict(summary: Mapping[str, Any], diagnosis: Diagnosis, *, interrupted: bool = False) -> Verdict:
    """Of a run, from its summary and the diagnosis of its record; `interrupted` when it was stopped before its end."""
    outcome = summary["outcome"]
    if outcome == "completed":
        level, word, headline = _completed(summary, diagnosis, interrupted)
    else:
        level = BAD
        word = outcome
        headline = _broke_off(summary, diagnosis)
    decisive = _decisive(summary, diagnosis)
    if decisive is not None:
        law = decisive.law
    else:
        law = summary["error"] if outcome in ("refused", "livelocked", "stalled") else ""
    return Verdict(
        level=level,
        word=word,
        headline=headline,
        law=law or "",
        context=_context(summary, diagnosis, decisive),
        cost=_cost(summary, diagnosis),
        next_steps=next_steps(summary, diagnosis),
        engine_says=" ".join(summary["error"].split()) if outcome == "crashed" and summary["error"] else "",
    )


# --- the headline ----------------------------------------------------------------------------------------------


def _completed(summary: Mapping[str, Any], diagnosis: Diagnosis, interrupted: bool) -> tuple[str, str, str]:
    aborted, rejected = summary["aborted"], summary["rejected"]
    noun, retractions = taken_back(summary)
    verb = noun.removesuffix("ion") + "ed"
    ending = _ending(summary)
    if aborted:
        return BAD, "aborted", f"{plural(aborted, 'request')} lost: the server gave up on {_them(aborted)}. {ending}"
    if interrupted or summary["unserved"]:
        so_far = f" {plural(retractions, noun)} so far." if retractions else ""
        return WARNING, "stopped", f"The run was stopped {duration(summary['simulated_s'])} in. {ending}{so_far}"
    if rejected:
        short = f" Memory also ran short: {plural(retractions, noun)}." if retractions else ""
        return WARNING, "rejected", f"{_refused(summary)}{short}"
    if retractions:
        bursts = diagnosis.counts[RETRACTION]
        often = f" {times(bursts)}" if bursts else ""
        hit = (
            "its only request"
            if summary["requests"] == 1
            else "some requests"
            if summary["retracted_requests"] is None
            else f"{summary['retracted_requests']:,} of {plural(summary['requests'], 'request')}"
        )
        return (
            WARNING,
            verb,
            f"Memory ran short{often}, and the server coped: {plural(retractions, noun)} hit {hit}. {ending}",
        )
    return GOOD, "held", f"Memory held: {_peak(summary)}, and nothing was {noun.removesuffix('ion')}ed. {ending}"


def taken_back(summary: Mapping[str, Any]) -> tuple[str, int]:
    """What the engine calls taking memory back from a running request, and how often it did."""
    if summary["engine"] == "vllm":
        return "preemption", summary["preemptions"] or 0
    return "retraction", summary["retractions"] or 0


def _broke_off(summary: Mapping[str, Any], diagnosis: Diagnosis) -> str:
    outcome, when = summary["outcome"], duration(summary["simulated_s"])
    if outcome == "crashed":
        ooms = diagnosis.first[DECODE_OOM] or diagnosis.first[PREFILL_OOM]
        what = "the allocator came up short"
        if ooms:
            pressure = ooms[0].pressure
            free = pressure.free_pages + pressure.evictable_pages
            what = (
                f"the {pressure.phase} pass needs {plural(pressure.asked_pages, 'page')} and "
                f"{free:,} {'is' if free == 1 else 'are'} free"
            )
        return f"The server would crash {when} into the run: {what}. {_ending(summary)}"
    if outcome == "stalled":
        who = f"request {diagnosis.stall().request}" if diagnosis.events_read else "the first in the queue"
        behind = summary["unserved"] - 1
        wait = f", and {behind:,} more wait{'s' if behind == 1 else ''} behind it" if behind else ""
        return f"The server would hang {when} into the run: {who} can never be admitted{wait}. {_ending(summary)}"
    if outcome == "livelocked":
        return (
            f"The server would go round in circles {when} into the run: it retracts and prefills the same requests "
            f"and no token comes out. {_ending(summary)}"
        )
    return f"The server would refuse to start: {summary['error']}"


def _ending(summary: Mapping[str, Any]) -> str:
    """Who finished."""
    requests, finished, unserved = summary["requests"], summary["finished"], summary["unserved"]
    left = f", {unserved:,} {'was' if unserved == 1 else 'were'} still waiting or running" if unserved else ""
    if requests == 0:
        return "No request had arrived."
    if requests == 1:
        return "The only request finished." if finished else "The only request did not finish."
    if finished == requests:
        return f"All {requests:,} requests finished."
    return f"{finished:,} of {requests:,} requests finished{left}." if finished else f"No request finished{left}."


def _refused(summary: Mapping[str, Any]) -> str:
    """Who was turned away on arrival, and what became of the others."""
    requests, rejected, finished = summary["requests"], summary["rejected"], summary["finished"]
    if rejected == requests:
        return (
            "The only request was refused." if requests == 1 else f"All {requests:,} requests were refused on arrival."
        )
    who = f"{rejected:,} of {requests:,} requests {'was' if rejected == 1 else 'were'} refused on arrival"
    if finished + rejected == requests:
        return f"{who}; the other {finished:,} finished." if finished > 1 else f"{who}; the other one finished."
    return f"{who}. {_ending(summary)}"


def _them(count: int) -> str:
    return "it" if count == 1 else "them"


def _peak(summary: Mapping[str, Any]) -> str:
    peak, pool = summary["peak_used_pages"], summary["pool_pages"]
    return f"at most {peak:,} of {plural(pool, 'page')} ({percent(peak, pool)}) were in use"


# --- why -------------------------------------------------------------------------------------------------------


def _decisive(summary: Mapping[str, Any], diagnosis: Diagnosis) -> Incident | None:
    """The incident whose law explains the headline."""
    if not diagnosis.events_read:
        return None
    outcome = summary["outcome"]
    if outcome == "stalled":
        return diagnosis.stall()
    if outcome == "livelocked":
        return diagnosis.last_burst
    if outcome == "completed" and not summary["aborted"] and summary["rejected"]:
        return diagnosis.first[REJECTION][0]
    return diagnosis.gravest


def _context(summary: Mapping[str, Any], diagnosis: Diagnosis, decisive: Incident | None) -> list[str]:
    if decisive is None:
        gave_way = taken_back(summary)[1] or summary["aborted"] or summary["rejected"] or summary["error"]
        return [] if diagnosis.events_read or not gave_way else [NOT_KEPT]
    pressure, page = decisive.pressure, diagnosis.page_size
    facts = []
    if pressure.phase == "decode" and pressure.held and decisive.kind != ABORT:
        facts += _phase(pressure, page) + _rounding(pressure, page)
    if pressure.ratio is not None:
        facts += _reserve(pressure, diagnosis)
    if pressure.held:
        facts.append(_holders(pressure))
    if decisive.kind == RETRACTION:
        facts.insert(0, _burst(decisive, diagnosis))
    if decisive.kind in (REJECTION, ABORT):
        facts += _refusals(diagnosis)
    return facts


def _phase(pressure: Pressure, page: int) -> list[str]:
    """Openings beyond twice their even share are no accident."""
    even = pressure.batch / page
    if page == 1 or pressure.asked_pages < 4 or pressure.asked_pages < 2 * even:
        return []
    return [
        f"{pressure.asked_pages:,} of {pressure.batch:,} running sequences reach the end of a page together; spread "
        f"evenly it would be {'less than one' if even < 1 else f'about {even:.0f}'} a step."
    ]


def _rounding(pressure: Pressure, page: int) -> list[str]:
    if page == 1:
        return []
    fits = "would have fitted" if fits_at_page_size_1(pressure, page) else "would not have fitted either"
    return [
        f"Rounding: the step writes {plural(pressure.asked_tokens, 'token')} and takes "
        f"{plural(pressure.asked_pages, 'page')} of {page} slots for it, while {pressure.rounding_tokens:,} slots of "
        f"pages already held are empty ({percent(pressure.rounding_tokens, pressure.uncached_pages * page)} of what "
        f"is in use). At page size 1 this step {fits}."
    ]


def _reserve(pressure: Pressure, diagnosis: Diagnosis) -> list[str]:
    """What admission had counted on; requests that ignore the stop token are reserved in full."""
    assert pressure.ratio is not None
    if diagnosis.scenario is not None and diagnosis.scenario.workload.ignore_eos:
        return []
    facts = [
        f"The new-token ratio stands at {pressure.ratio:.3f}: admission reserves {percent(pressure.ratio, 1)} of what "
        f"running requests may still generate."
    ]
    if diagnosis.longest_output_tokens > CLIP_NEW_TOKENS:
        facts.append(
            f"Admission clip: it counts at most {CLIP_NEW_TOKENS:,} tokens for one request, and outputs reached "
            f"{diagnosis.longest_output_tokens:,}."
        )
    return facts


def _holders(pressure: Pressure) -> str:
    told = [f"request {request} ({plural(pages, 'page')})" for request, pages in pressure.held]
    return sentence(f"most is held by {' and '.join(filter(None, [', '.join(told[:-1]), told[-1]]))}")


def _burst(burst: Incident, diagnosis: Diagnosis) -> str:
    bursts = diagnosis.counts[RETRACTION]
    which = "That was the only burst" if bursts == 1 else f"That was the worst of {bursts:,} bursts"
    if burst is not diagnosis.worst_bursts[0]:
        which = f"That was the last of {bursts:,} bursts"
    verb = "preempted" if burst.pressure.check == BLOCKS else "retracted"
    return (
        f"{which}, {duration(burst.time_ns / 1e9)} into the run: {plural(burst.victims, 'request')} {verb}, "
        f"{plural(burst.freed_pages, 'page')} freed, {plural(burst.lost_tokens, 'token')} of KV thrown away."
    )


def _refusals(diagnosis: Diagnosis) -> list[str]:
    facts = []
    for name, tally in sorted(diagnosis.tallies.items()):
        kind, reason = name.split(": ", 1)
        what = "prompt" if kind == REJECTION else "sequence"
        longest = f"; the longest {what} had {plural(tally.most_tokens, 'token')}" if tally.most_tokens else ""
        verb = "refused on arrival" if kind == REJECTION else "aborted"
        why = "alone in a full pool" if reason == LAST_REQUEST else f"by the {reason}"
        facts.append(f"{plural(tally.count, 'request')} {verb} {why}{longest}.")
    return facts


# --- what it cost ----------------------------------------------------------------------------------------------


def _cost(summary: Mapping[str, Any], diagnosis: Diagnosis) -> str:
    parts = []
    recomputed, most = summary["recomputed_tokens"], summary["max_retractions_per_request"]
    if recomputed:
        share = (
            f", {percent(recomputed, diagnosis.prefill_tokens)} of the {diagnosis.prefill_tokens:,} tokens prefilled"
            if diagnosis.prefill_tokens
            else ""
        )
        parts.append(f"{plural(recomputed, 'token')} computed twice{share}")
    if most is not None and most > 1:
        parts.append(f"one request was retracted {times(most)}")
    if summary["outcome"] == "crashed" and summary["unserved"]:
        parts.append(f"{plural(summary['unserved'], 'request')} lost with the process")
    return sentence("; ".join(parts)) if parts else ""
