"""A server that a test starts instead of an engine's: `fake_server.py BEHAVIOUR PARENT`.

It speaks through the real `serving.py`, as the engines' servers do, but for what the behaviour spoils.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parents[2] / "real"


def sleep(payload: dict[str, Any]) -> dict[str, Any]:
    """Busy for so long."""
    time.sleep(payload["s"])
    return {"slept": payload["s"]}


def fail(payload: dict[str, Any]) -> dict[str, Any]:
    """What an engine's own error looks like."""
    raise ValueError(payload["why"])


def die(payload: dict[str, Any]) -> dict[str, Any]:
    """Last words, then nothing more."""
    print("last words", file=sys.stderr, flush=True)
    os._exit(7)


def chatter(payload: dict[str, Any]) -> dict[str, Any]:
    """Prints, as imported code may do at any time."""
    print("this is no message")
    subprocess.run(["echo", "neither is this"], check=True)
    return {"read": sys.stdin.read()}


def spawn(payload: dict[str, Any]) -> dict[str, Any]:
    """A child of the server's."""
    return {"pid": subprocess.Popen(["sleep", "600"]).pid}


def echo(payload: dict[str, Any]) -> dict[str, Any]:
    return payload


def main(behaviour: str, parent: int) -> None:
    sys.path.insert(0, str(SOURCES))
    from pagestorm_real.reference import protocol, serving

    pipes = serving.take_over_pipes()
    serving.die_with_parent(pipes[0], parent)
    if behaviour == "silent":
        time.sleep(600)
    if behaviour == "dies":
        sys.exit("cannot import the engine")
    if behaviour == "garbage":
        pipes[1].write(b"Traceback (most recent call last):\n")
        pipes[1].flush()
        time.sleep(600)
    if behaviour == "other-protocol":
        protocol.PROTOCOL += 1
    version = "0.0.1" if behaviour == "other-version" else "0.5.23"
    operations = {f.__name__: f for f in (sleep, fail, die, chatter, spawn, echo)}
    serving.serve(pipes, "vllm" if behaviour == "other-engine" else "sglang", version, operations)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
