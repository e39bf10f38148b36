"""report.html as a file: offline, escaped, complete, in the order in which a person reads."""

from __future__ import annotations

import re
from functools import cache
from html.parser import HTMLParser

import pytest
import yaml

from pagestorm.diagnosis import Diagnosis
from pagestorm.report.html import report_html
from pagestorm.runs import run
from pagestorm.scenario import from_mapping
from tests.report.cases import CASES, EVIL, diagnosis, result, scenario

VOID = {"meta", "img", "source", "br"}


class Page(HTMLParser):
    """Tags, attributes and visible text; a tag that is not closed in order fails."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []
        self.pre: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], "every tag is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)
        if tag == "pre":
            self.pre.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text.append(data)
        if "pre" in self._open:
            self.pre[-1] += data

    @property
    def words(self) -> str:
        return " ".join("".join(self.text).split())


@cache
def html(name: str) -> str:
    return report_html(result(name), command=f"pagestorm run '{EVIL}' --out x", diagnosis=diagnosis(name))


@pytest.mark.parametrize("name", CASES)
def test_every_run_has_a_whole_page_that_needs_no_network(name: str) -> None:
    page = Page(html(name))
    assert not {"script", "link", "iframe", "object", "embed", "base", "form", "b"} & set(page.tags)
    addresses = [value for _, attribute, value in page.attributes if attribute in ("src", "srcset", "href")]
    assert addresses
    assert all(value.startswith("data:image/svg+xml;base64,") for value in addresses)
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert "http://" not in html(name)
    assert "https://" not in html(name)
    assert ("meta", "content", "default-src 'none'; img-src data:; style-src 'unsafe-inline'") in page.attributes


@pytest.mark.parametrize("name", CASES)
def test_every_picture_says_in_words_what_it_shows(name: str) -> None:
    page = Page(html(name))
    alts = [value for tag, attribute, value in page.attributes if (tag, attribute) == ("img", "alt")]
    assert len(alts) == page.tags.count("img") == 3
    assert all(len(alt) > 40 for alt in alts)


def test_the_verdict_comes_first_then_why_pictures_tables_and_how_to_run_again() -> None:
    words = Page(html("crashed")).words
    order = [
        "The server would crash 9.7 s into the run",
        "Token check: 38 tokens asked <= 64 tokens free, but 2 sequences open a page in the same step",
        "Decode out of memory. Try to lower your batch size.",
        "What to try next",
        "Figures",
        "Pictures",
        "Retraction bursts (1)",
        "Out of memory in decode (1)",
        "pagestorm run scenario.yaml --out again",
        "Every key of summary.json",
        "With every default filled in",
    ]
    places = [words.find(each) for each in order]
    assert -1 not in places
    assert places == sorted(places)


def test_whatever_a_scenario_says_is_shown_and_not_obeyed() -> None:
    page = Page(html("evil"))
    assert "<script" not in html("evil")
    assert EVIL.replace("/", "|") in page.words
    assert f"pagestorm run '{EVIL}' --out x" in page.words
    assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in html("evil")


def test_every_default_is_on_the_page() -> None:
    page = Page(html("calm"))
    shown = yaml.safe_load(page.pre[-1])
    assert shown["engine"]["schedule_conservativeness"] == 1.0
    assert shown["steptime"] == {
        "kind": "linear",
        "base_s": 0.01,
        "per_request_s": 1e-4,
        "per_context_token_s": 2e-7,
        "per_prefill_token_s": 2e-5,
    }
    assert from_mapping(shown).engine == result("calm").scenario.engine


def test_the_figures_of_a_burst_are_in_its_table() -> None:
    words = Page(html("retracted")).words
    burst = diagnosis("retracted").worst_bursts[0]
    pressure = burst.pressure
    assert burst.law in words
    for number in (burst.lost_tokens, pressure.rounding_tokens, pressure.uncached_pages, pressure.asked_tokens):
        assert f"{number:,}" in words
    request, pages = pressure.held[0]
    assert f"request {request}: {pages}" in words


def test_a_long_storm_shows_the_worst_bursts_and_counts_the_rest() -> None:
    storm = Diagnosis.of(result("retracted").scenario)
    (burst,) = [e for e in result("retracted").raw_events if e[3] == "retract" and e[2] == 551]
    for step in range(1200):
        storm.write([(step * 10**6, step, step, "retract", 1, 100 + step * 37 % 1200, 7, *burst[7:])])
    storm.close()
    page = Page(report_html(result("retracted"), command="pagestorm run storm", diagnosis=storm))
    assert "Retraction bursts (1,200)" in page.words
    assert "The 10 that threw away most" in page.words
    assert page.words.count("page check: ") == 60
    assert "The first 50, in order" in page.words


def test_a_run_that_kept_no_events_has_a_page_without_pictures() -> None:
    ran = run(scenario("crashed"), tables=False, events=False)
    page = Page(report_html(ran, command="pagestorm run x", pictures=False, tables=False))
    assert "img" not in page.tags
    assert "--events none" in page.words
    assert "The server would crash" in page.words
    assert "The events of this run were not read" in page.words


def test_an_interrupted_run_says_so() -> None:
    ran = run(scenario("calm"))
    ran.interrupted = True
    assert "The run was interrupted" in Page(report_html(ran, command="pagestorm run x")).words


def test_the_page_is_made_for_narrow_screens_and_dark_ones() -> None:
    text = html("calm")
    assert re.search(r'name="viewport" content="width=device-width', text)
    assert "@media(prefers-color-scheme:dark)" in text
    assert 'media="(max-width: 620px)"' in text
