"""report.html as a file: offline, escaped, complete, in the order in which a person reads."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from html.parser import HTMLParser
from importlib import resources

import pytest
import yaml

from pagestorm.diagnosis import Diagnosis
from pagestorm.report import interactive
from pagestorm.report.holders import worst_moment
from pagestorm.report.html import report_html
from pagestorm.report.latency import latency_rows
from pagestorm.report.ledger import RecomputeCost
from pagestorm.report.settings import settings
from pagestorm.report.words import duration
from pagestorm.runs import Result, run
from pagestorm.scenario import from_mapping, resolve
from tests.report.cases import CASES, EVIL, diagnosis, result, scenario

VOID = {"meta", "img", "source", "br", "wbr"}


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
        if not {"style", "script"} & set(self._open):
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
    assert not {"link", "iframe", "object", "embed", "base", "form", "b"} & set(page.tags)
    assert not [name for tag, name, _ in page.attributes if tag == "script" and name == "src"]
    addresses = [value for _, attribute, value in page.attributes if attribute in ("src", "srcset", "href")]
    assert addresses
    assert all(value.startswith("data:image/svg+xml;base64,") for value in addresses)
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert "http://" not in html(name).replace("http://www.w3.org/", "")
    assert "https://" not in html(name).replace("https://github.com/leeoniya/uPlot", "", 1)


@pytest.mark.parametrize("name", CASES)
def test_the_policy_allows_no_network_and_exactly_the_scripts_that_are_there(name: str) -> None:
    (policy,) = [v for tag, a, v in Page(html(name)).attributes if tag == "meta" and v.startswith("default-src")]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    assert set(rules) == {"default-src", "img-src", "style-src", "script-src"}
    scripts = re.findall(r"<script>(.*?)</script>", html(name), re.DOTALL)
    hashes = {f"'sha256-{b64encode(sha256(each.encode()).digest()).decode()}'" for each in scripts}
    assert len(scripts) == (2 if result(name).timeline_rows else 0)
    assert hashes <= set(rules["script-src"].split())
    assert "unsafe" not in rules["script-src"]


@pytest.mark.parametrize("name", CASES)
def test_every_picture_says_in_words_what_it_shows(name: str) -> None:
    page = Page(html(name))
    alts = [value for tag, attribute, value in page.attributes if (tag, attribute) == ("img", "alt")]
    assert len(alts) == page.tags.count("img") == 4
    assert all(len(alt) > 40 for alt in alts)


def test_the_verdict_comes_first_then_why_pictures_tables_and_how_to_run_again() -> None:
    words = Page(html("crashed")).words
    order = [
        "The server would crash 9.7 s into the run",
        "Token check: 38 tokens asked <= 64 tokens free, but 2 sequences open a page in the same step",
        "Decode out of memory. Try to lower your batch size.",
        "What to try next",
        "Figures",
        "Timeline",
        "Retraction bursts (1)",
        "Out of memory in decode (1)",
        "Latency",
        "pagestorm run scenario.yaml --out again",
        "SGLang 0.5.23",
        "As YAML, with every default filled in",
        "Every key of summary.json",
    ]
    places = [words.find(each) for each in order]
    assert -1 not in places
    assert places == sorted(places)


def test_whatever_a_scenario_says_is_shown_and_not_obeyed() -> None:
    page = Page(html("evil"))
    assert "<script>alert" not in html("evil")
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


def test_every_burst_says_what_computing_it_again_takes() -> None:
    ran = result("retracted")
    words = Page(html("retracted")).words
    assert "to compute again" in words
    burst = diagnosis("retracted").worst_bursts[0]
    # The linear model's defaults: 10 ms a pass, 0.1 ms a request, 20.2 us a token.
    seconds = 0.01 + 1e-4 * burst.victims + (2e-5 + 2e-7) * burst.lost_tokens
    assert duration(seconds) in words
    assert RecomputeCost(ran.scenario).seconds(burst.lost_tokens, burst.victims) == pytest.approx(seconds)
    assert f"threw away {diagnosis('retracted').lost_tokens:,} tokens of KV" in words


def test_latency_is_told_in_numbers_and_those_who_were_taken_back_apart() -> None:
    rows = {row[0]: row for row in latency_rows(result("retracted"))}
    first = rows["first token"]
    summary = result("retracted").summary
    assert (first[2], first[4]) == (duration(summary["ttft_s_p50"]), duration(summary["ttft_s_p99"]))
    counted = [int(rows[f"whole answer, {which}"][1]) for which in ("never taken back", "taken back at least once")]
    assert sum(counted) == summary["finished"]
    assert counted[1] == summary["retracted_requests"]
    assert latency_rows(result("crashed"))[0][0] == "wait until admitted"
    assert latency_rows(result("none served")) == []


def test_a_setting_is_a_default_exactly_when_leaving_it_out_changes_nothing() -> None:
    told = {each.key: each for each in settings(result("calm").scenario)}
    assert not told["engine.page_size"].default
    assert not told["engine.disable_radix_cache"].default
    assert not told["workload.num_requests"].default
    for key in ("engine.kind", "engine.schedule_conservativeness", "engine.max_running_requests", "steptime.base_s"):
        assert told[key].default, key
    again = {each.key: each for each in settings(resolve(scenario("calm")))}
    assert again == told
    other = from_mapping(
        {"schema": 1, "name": "x", "seed": 3, "steptime": {"kind": "linear", "base_s": 0.5}, **_parts("calm")}
    )
    changed = {each.key: each.default for each in settings(resolve(other))}
    assert not changed["steptime.base_s"]
    assert changed["steptime.per_request_s"]
    assert not changed["seed"]


def _parts(name: str) -> dict[str, object]:
    engine, workload, _ = CASES[name]
    return {"engine": {"disable_radix_cache": True, **engine}, "workload": workload}


@pytest.mark.parametrize("name", CASES)
def test_the_bar_of_the_worst_moment_is_the_whole_pool(name: str) -> None:
    ran = result(name)
    moment = worst_moment(ran.summary, diagnosis(name), ran.timeline_rows)
    if name == "none served":
        assert moment is None
        return
    assert moment is not None
    assert sum(pages for _, pages, _ in moment.pool) == pytest.approx(ran.summary["pool_pages"])


def test_the_picture_of_the_worst_moment_has_the_numbers_of_the_law() -> None:
    moment = worst_moment(result("crashed").summary, diagnosis("crashed"))
    assert moment is not None
    pressure = diagnosis("crashed").first["decode_oom"][0].pressure
    assert [pages for _, pages, _ in moment.shortage] == [2, pressure.free_pages]
    assert [(f"request {r}", p) for r, p in pressure.held] == [(label, p) for label, p, _ in moment.holders[:3]]
    spread = sum(p for _, p, _ in moment.holders[:3]) + moment.holders[3][1] * (pressure.batch - 3)
    assert spread == pytest.approx(pressure.uncached_pages)


def test_a_long_timeline_is_thinned_says_so_and_keeps_the_fullest_moment() -> None:
    ran = result("retracted")
    few = interactive.timeline_data(ran, diagnosis("retracted"))
    assert few["moments"] == few["rows"] == len(ran.timeline_rows)
    row, pages = ran.timeline_rows[0], ran.timeline_rows[0].pool_pages
    many = [row._replace(time_ns=i * 10**6, free_pages=pages - i % 97, uncached_pages=i % 97) for i in range(19_000)]
    many[7_777] = many[7_777]._replace(free_pages=0, uncached_pages=pages)
    long = Result(ran.scenario, ran.summary, timeline_rows=many, timeline_every=4)
    page = interactive.interactive_html(long, diagnosis("retracted"))
    words = Page(page).words
    assert "of 19,000 moments are drawn" in words
    assert "one moment of 4" in words
    assert len(page) < 600_000
    data = interactive.timeline_data(long, diagnosis("retracted"))
    assert sum(data["time_ns"][: data["worst"] + 1]) == 7_777 * 10**6
    shown = {kind["name"]: kind["values"] for kind in data["pages"]}
    assert all(a + b == pages for a, b in zip(shown["uncached"], shown["free"], strict=True))


def test_data_in_a_script_element_cannot_end_it() -> None:
    text = interactive._inert({"name": "</script><script>alert(1)</script>"})
    assert "<" not in text
    assert json.loads(text) == {"name": "</script><script>alert(1)</script>"}


def test_the_library_in_the_page_is_the_one_whose_source_is_written_down() -> None:
    page = html("calm")
    assert "uPlot (v1.6.32)" in page
    assert "uPlot 1.6.32" in (resources.files("pagestorm.report") / "vendor" / "uplot" / "SOURCE").read_text()
    assert "The MIT License" in page
