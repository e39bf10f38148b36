"""How long a person waits before anything happens: whole processes, best of ten."""

from __future__ import annotations

import sys

from bench.closed_loop import timed
from bench.table import Row

COMMANDS = {
    "python alone": ["-c", "pass"],
    "pagestorm --help": ["-m", "pagestorm", "--help"],
    "pagestorm run prompt-too-long": ["-m", "pagestorm", "run", "prompt-too-long", "--json"],
}


def rows() -> list[Row]:
    """Seconds of each command, and how many times the bare interpreter's."""
    seconds = {name: min(timed([sys.executable, *words])[0] for _ in range(10)) for name, words in COMMANDS.items()}
    alone = seconds["python alone"]
    return [{"command": name, "seconds": each, "times_python": each / alone} for name, each in seconds.items()]
