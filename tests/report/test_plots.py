"""The pictures: drawn for every run there can be, with units, and true to their numbers."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagestorm.report import theme
from pagestorm.report.plots import WIDE_IN, Plots, hold, thin
from pagestorm.runs import run
from pagestorm.scenario import from_mapping
from tests.report.cases import CASES, burst, diagnosis, result, uniform


def test_every_picture_has_a_title() -> None:
    plots = Plots(result("calm"), diagnosis("calm"))
    assert list(plots.figures) == list(plots.titles) == ["timeline", "lengths", "latency"]


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("evil", "queued out")])
def test_every_picture_can_be_drawn_of_every_run(name: str) -> None:
    for draw in Plots(result(name), diagnosis(name)).figures.values():
        assert theme.png(draw(WIDE_IN)).startswith(b"\x89PNG")


def test_axes_carry_their_units() -> None:
    plots = Plots(result("retracted"))
    pool, running, waiting, ratio = plots.timeline().axes
    assert pool.get_ylabel() == "pages"
    assert "requests" in running.get_ylabel()
    assert "requests" in waiting.get_ylabel()
    assert ratio.get_xlabel() == "simulated time (s)"
    assert [axes.get_xlabel() for axes in plots.lengths().axes] == ["prompt (tokens)", "output (tokens)"]
    assert plots.latency().axes[0].get_xlabel() == "time since arrival (s)"


def test_the_stack_of_pages_adds_up_to_the_pool_at_every_moment() -> None:
    pool = Plots(result("retracted")).timeline().axes[0]
    free = pool.collections[-1].get_paths()[0].vertices
    assert isinstance(free, np.ndarray)
    assert free[:, 1].max() == pool.get_ylim()[1] == 300
    used = [row.uncached_pages for row in result("retracted").timeline_rows]
    held = pool.collections[0].get_paths()[0].vertices
    assert isinstance(held, np.ndarray)
    assert held[:, 1].max() == max(used)


def test_retractions_and_out_of_memory_are_marked_where_they_happened() -> None:
    found = diagnosis("crashed")
    pool = Plots(result("crashed")).timeline().axes[0]
    lines = {str(line.get_label()): line for line in pool.lines}
    (times,) = [line.get_xdata() for label, line in lines.items() if label.startswith("retraction")]
    assert list(np.asarray(times)) == [found.first["retraction"][0].time_ns / 1e9]
    (when,) = np.asarray(lines["out of memory"].get_xdata())
    assert when == found.first["decode_oom"][0].time_ns / 1e9
    assert f"retraction ({found.victims})" in lines


def test_titles_say_what_is_seen() -> None:
    assert Plots(result("calm")).titles["timeline"].startswith("No retraction, at most ")
    assert Plots(result("retracted")).titles["timeline"] == "2 retractions, at most 100 % of 300 pages in use"
    assert Plots(result("crashed")).titles["timeline"] == "Out of memory 9.7 s into the run"
    assert Plots(result("none served")).titles["latency"] == "No request finished, so there is no latency to show"


def test_the_limit_that_refused_prompts_is_in_the_picture() -> None:
    prompts = Plots(result("rejected")).lengths().axes[0]
    assert " refused from 894 on " in [text.get_text() for text in prompts.texts]
    low, high = prompts.get_xlim()
    assert low < 894 < high


def test_a_run_of_twenty_thousand_requests_makes_small_pictures() -> None:
    big = run(
        from_mapping(
            {
                "schema": 1,
                "name": "big",
                "engine": {"disable_radix_cache": True, "page_size": 16, "max_total_tokens": 64_000},
                "workload": {
                    **burst(20_000, uniform(50, 400), uniform(1, 40)),
                    "arrivals": {"process": "gamma", "rate_per_s": 90, "cv": 2},
                },
            }
        )
    )
    for draw in Plots(big).figures.values():
        assert len(theme.svg(draw(WIDE_IN))) < 400_000


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=3000), st.integers(1, 50))
@settings(deadline=None, max_examples=30)
def test_thinning_keeps_ends_and_extremes_in_order(values: list[int], columns: int) -> None:
    series = np.array(values, dtype=np.float64)
    time = np.arange(len(series), dtype=np.float64)
    kept = thin(time, series, columns)
    assert len(kept) <= max(3 * columns, 1) + 2
    assert kept[0] == 0
    assert kept[-1] == len(series) - 1
    assert (np.diff(kept) > 0).all()
    assert series[kept].max() == series.max()
    assert series[kept].min() == series.min()


def test_what_is_given_back_at_once_has_a_vertical_edge() -> None:
    time, values = np.array([0.0, 1.0, 2.0, 3.0]), np.array([5.0, 8.0, 2.0, 2.0])
    moments, held = hold(time, np.diff(values) < 0, values)
    assert moments.tolist() == [0, 1, 2, 2, 3]
    assert held.tolist() == [5, 8, 8, 2, 2]


def test_an_svg_is_the_same_each_time_and_follows_the_preference_for_dark() -> None:
    first, second = (theme.svg(Plots(result("retracted")).timeline()) for _ in range(2))
    assert first == second
    assert first.startswith("<svg")
    assert "prefers-color-scheme:dark" in first
    assert theme.INK not in first.split("</style>", 1)[1]


def test_pictures_are_saved_under_their_names(tmp_path: Path) -> None:
    paths = Plots(result("calm")).save(tmp_path)
    assert [path.name for path in paths] == ["timeline.png", "lengths.png", "latency.png"]
    assert all(path.stat().st_size > 10_000 for path in paths)


def test_a_figure_belongs_to_no_window_and_changes_no_global_state() -> None:
    code = (
        "import sys, matplotlib as mpl; before = mpl.rcParams.copy()\n"
        "from pagestorm.report import theme\n"
        "figure = theme.new_figure(4, 3)\n"
        "theme.dress(figure.subplots(), 'pages')\n"
        "theme.png(figure), theme.svg(figure)\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert repr(mpl.rcParams.copy()) == repr(before)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_a_png_is_readable_at_print_size() -> None:
    from matplotlib.image import imread

    height, width, _ = imread(io.BytesIO(theme.png(Plots(result("calm")).timeline())), format="png").shape
    assert (width, height) == (1350, 1050)
