"""The progress line: simulated time, requests, events per second and time left; on a terminal and nowhere else."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from pagestorm.report.progress import progress_words
from pagestorm.runs import Progress

ROOT = Path(__file__).resolve().parents[2]
LONG = [
    *("run", "first-retraction", "--pools", "sim", "--step", "--json"),
    *("--set", "workload.num_requests=12000", "--set", "expect={}"),
]


@pytest.mark.parametrize(
    ("progress", "elapsed_s", "words"),
    [
        (Progress(0.0, 0, 10, 0), 0.0, "0 s simulated, 0 events/s"),
        (Progress(7261.4, 3, 10, 90_000), 2.0, "7,261 s simulated, 45,000 events/s"),
    ],
)
def test_the_words(progress: Progress, elapsed_s: float, words: str) -> None:
    assert progress_words(progress, elapsed_s) == words


def run_long(stderr: int) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("sim", "real")),
        "TERM": "xterm",
    }
    subprocess.run(
        [sys.executable, "-m", "pagestorm", *LONG],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        check=True,
        timeout=300,
    )


def test_a_terminal_sees_how_far_the_run_is(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    shown = b""
    try:
        with (tmp_path / "seen").open("wb") as seen:
            reader = subprocess.Popen(["cat"], stdin=ours, stdout=seen, stderr=subprocess.DEVNULL)
            run_long(theirs)
            os.close(theirs)
            reader.wait(60)
        shown = (tmp_path / "seen").read_bytes()
    finally:
        os.close(ours)
    lines = [line for line in shown.decode().split("\r") if " req, " in line]
    assert lines
    pattern = r" *\d+% \|.*\| +\d+/12000 req, [\d:?]+ left, .* simulated, [\d,]+ events/s"
    assert [line for line in lines if not re.match(pattern, line)] == []
    assert max(len(line.rstrip()) for line in lines) <= 80


def test_a_file_or_a_pipe_gets_no_progress(tmp_path: Path) -> None:
    with (tmp_path / "stderr").open("wb") as stderr:
        run_long(stderr.fileno())
    assert (tmp_path / "stderr").read_bytes() == b""
