"""Shell completion, click's own: what README says works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = [sys.executable, "-c", "import sys; from pagestorm.cli import main; sys.argv[0] = 'pagestorm'; main()"]


def asked(**variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("sim", "real"))}
    done = subprocess.run(PROGRAM, env=environment | variables, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


@pytest.mark.parametrize(
    ("shell", "sign"), [("bash", "complete -o nosort"), ("zsh", "#compdef pagestorm"), ("fish", "complete --no-files")]
)
def test_every_shell_gets_a_script(shell: str, sign: str) -> None:
    if shell == "bash" and shutil.which("bash") is None:
        pytest.skip("click asks bash for its version")
    assert sign in asked(_PAGESTORM_COMPLETE=f"{shell}_source")


@pytest.mark.parametrize(
    ("words", "at", "offered"),
    [
        ("pagestorm co", "1", ["plain,compare-runs"]),
        ("pagestorm run decode-o", "2", ["plain,decode-oom-page-64", "file,decode-o"]),
        ("pagestorm run x --payload s", "4", ["plain,stamp"]),
        ("pagestorm run x --perf", "3", ["plain,--perfetto"]),
    ],
)
def test_commands_options_and_shipped_scenarios_are_offered(words: str, at: str, offered: list[str]) -> None:
    told = asked(_PAGESTORM_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=at).splitlines()
    assert set(offered) <= set(told)
    assert not [each for each in told if each.startswith("plain,") and words.split()[-1] not in each]
