"""report.html in a real browser: it opens offline without complaint, fits, answers mouse and keys, obeys no name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pagestorm.report.html import report_html
from tests.report.browser import Tab, browser, chromium
from tests.report.cases import CASES, EVIL, diagnosis, result

pytestmark = pytest.mark.skipif(
    chromium() is None, reason="no Chromium on this machine: apt-get install chromium runs these tests"
)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    program = chromium()
    assert program is not None
    with browser(program, tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture
def report(tmp_path: Path) -> Path:
    return written("retracted", tmp_path)


def written(name: str, folder: Path) -> Path:
    path = folder / "report.html"
    path.write_text(report_html(result(name), command=f"pagestorm run '{EVIL}'", diagnosis=diagnosis(name)), "utf-8")
    return path


def text(tab: Tab, part: str) -> str:
    found = tab.ask(f"document.getElementById('timeline-{part}').textContent")
    assert isinstance(found, str)
    return found


def place_in_panel(tab: Tab, share: float) -> tuple[float, float]:
    """Where in the window a share of the first panel's width is."""
    tab.ask("document.getElementById('timeline').scrollIntoView()")
    left, top, width, height = tab.ask(
        "(() => { const b = document.querySelector('.u-over').getBoundingClientRect();"
        " return [b.left, b.top, b.width, b.height]; })()"
    )
    return left + width * share, top + height / 2


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (390, True)])
def test_every_page_opens_offline_without_complaint_and_without_sideways_scrolling(
    name: str, width: int, dark: bool, tab: Tab, tmp_path: Path
) -> None:
    tab.open(written(name, tmp_path), width=width, dark=dark)
    tab.ask("new Promise((done) => setTimeout(done, 50))")
    assert tab.complaints() == []
    assert [each for each in tab.addresses() if not each.startswith(("file:", "data:"))] == []
    assert tab.ask("document.documentElement.scrollWidth") <= width
    assert tab.ask("Array.from(document.images).every((each) => each.naturalWidth > 0)")
    if result(name).timeline_rows:
        assert tab.ask("document.querySelectorAll('#timeline-panels canvas').length") == 4


def test_what_is_under_the_mouse_is_read_out(report: Path, tab: Tab) -> None:
    tab.open(report)
    before = text(tab, "uncached")
    tab.mouse("mouseMoved", *place_in_panel(tab, 0.02))
    assert text(tab, "uncached") != before
    early = float(text(tab, "when").split()[0])
    tab.mouse("mouseMoved", *place_in_panel(tab, 0.9))
    assert float(text(tab, "when").split()[0]) > early
    rows = {(row.uncached_pages, row.free_pages) for row in result("retracted").timeline_rows}
    assert (int(text(tab, "uncached")), int(text(tab, "free"))) in rows


def test_dragging_zooms_and_a_button_brings_the_whole_run_back(report: Path, tab: Tab) -> None:
    tab.open(report)
    whole = text(tab, "view")
    at, to = place_in_panel(tab, 0.3), place_in_panel(tab, 0.5)
    tab.mouse("mouseMoved", *at)
    tab.mouse("mousePressed", *at, "left")
    tab.mouse("mouseMoved", *to, "left")
    tab.mouse("mouseReleased", *to, "left")
    zoomed = text(tab, "view")
    assert zoomed != whole
    low, high = (float(zoomed.split()[i]) for i in (2, 5))
    end = result("retracted").summary["simulated_s"]
    assert low == pytest.approx(0.3 * end, rel=0.05)
    assert high == pytest.approx(0.5 * end, rel=0.05)
    tab.ask("document.getElementById('timeline-whole').click()")
    assert text(tab, "view") == whole


def test_the_keyboard_reaches_the_timeline_and_moves_in_it(report: Path, tab: Tab) -> None:
    tab.open(report)
    for _ in range(40):
        tab.press("Tab")
        if tab.ask("document.activeElement.id") == "timeline-panels":
            break
    assert tab.ask("document.activeElement.id") == "timeline-panels"
    tab.press("Home")
    tab.ask("new Promise((done) => setTimeout(done, 20))")
    moments = []
    for _ in range(4):
        tab.press("ArrowRight")
        tab.ask("new Promise((done) => setTimeout(done, 20))")
        moments.append(float(text(tab, "when").split()[0]))
    assert moments == sorted(set(moments))
    assert text(tab, "said").startswith("time ")
    whole = text(tab, "view")
    tab.press("+")
    assert text(tab, "view") != whole
    tab.press("0")
    assert text(tab, "view") == whole
    tab.press("w")
    tab.ask("new Promise((done) => setTimeout(done, 20))")
    assert text(tab, "when").endswith("(fullest)")


def test_retractions_in_view_are_counted(report: Path, tab: Tab) -> None:
    tab.open(report)
    assert f"{result('retracted').summary['retractions']} retractions." in text(tab, "view")


def test_an_evil_name_stays_text(tab: Tab, tmp_path: Path) -> None:
    page = written("evil", tmp_path)
    tab.open(page)
    assert EVIL.replace("/", "|") in tab.ask("document.querySelector('h1').textContent")
    assert tab.ask("document.scripts.length") == 3
    # Even markup that got past the escaping would not run: the policy knows the page's own scripts by their hashes.
    broken = page.read_text("utf-8").replace("<header>", "<header><script>document.title='owned'</script>", 1)
    page.write_text(broken, "utf-8")
    tab.open(page)
    assert tab.ask("document.title") != "owned"
    assert any("Content Security Policy" in each for each in tab.complaints())


CONTRAST = """
(() => {
  const parse = (colour) => (colour.match(/[\\d.]+/g) || [0, 0, 0]).map(Number);
  const light = (c) => c.slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (each) => {
    for (let at = each; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [];
  document.querySelectorAll("body *").forEach((each) => {
    const says = Array.from(each.childNodes).some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!says || ["SCRIPT", "NOSCRIPT", "STYLE"].includes(each.tagName)) return;
    const [a, b] = [light(parse(getComputedStyle(each).color)), light(ground(each))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(each.tagName + " " + each.textContent.slice(0, 40) + " " + ratio.toFixed(2));
  });
  return poor;
})()
"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["calm", "retracted", "crashed"])
def test_all_text_stands_out_from_its_ground(name: str, dark: bool, tab: Tab, tmp_path: Path) -> None:
    tab.open(written(name, tmp_path), dark=dark)
    assert tab.ask("getComputedStyle(document.body).backgroundColor") == (
        "rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)"
    )
    assert tab.ask(CONTRAST) == []


def test_without_scripts_the_timeline_is_a_still_picture(report: Path, tab: Tab) -> None:
    tab.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        tab.open(report)
        tree = tab.call("DOM.getDocument", depth=-1)["root"]["nodeId"]
        found = tab.call("DOM.querySelectorAll", nodeId=tree, selector="noscript img")["nodeIds"]
        assert len(found) == 1
    finally:
        tab.call("Emulation.setScriptExecutionDisabled", value=False)
