"""The engine's side of the pipe: say hello, answer requests one by one, die with the parent.

Runs inside an engine's environment, with the standard library and `protocol.py` only.
"""

from __future__ import annotations

import ctypes
import os
import platform
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from pagestorm_real.reference import protocol

Operation = Callable[[dict[str, Any]], dict[str, Any]]
PR_SET_PDEATHSIG = 1


class BadPayload(Exception):
    """The payload of a request makes no sense; the message says what would."""


def take_over_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes to the client. What the engine prints goes to stderr from here on, never between two messages."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return requests, answers


def die_with_parent(requests: BinaryIO, parent: int) -> None:
    """End this process when its parent, of that process id, ends, even in the middle of an operation.

    The kernel's signal comes at once, but also when only the thread that started us ends: then the parent is still
    the same and nothing happens. The thread sees the far end of the pipe closed, whoever held it.
    """

    def orphaned(*_: object) -> None:
        if os.getppid() != parent:
            os._exit(1)

    signal.signal(signal.SIGHUP, orphaned)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0)
    orphaned()

    def watch() -> None:
        hung_up = select.poll()
        hung_up.register(requests.fileno(), 0)
        while not hung_up.poll():
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="hang-up").start()


def serve(pipes: tuple[BinaryIO, BinaryIO], engine: str, version: str, operations: Mapping[str, Operation]) -> None:
    """Answer until the client closes its end."""
    requests, answers = pipes

    def send(message: protocol.Message) -> None:
        answers.write(protocol.pack(message))
        answers.flush()

    python = platform.python_version()
    send({"hello": {"protocol": protocol.PROTOCOL, "engine": engine, "version": version, "python": python}})
    while True:
        try:
            request = protocol.receive(requests.read)
        except protocol.Closed:
            return
        number = request.get("id")
        try:
            send({"id": number, **_answer(request, operations)})
        except protocol.ProtocolError as error:
            send({"id": number, **_error("request", f"the answer cannot be sent: {error}")})


def _answer(request: protocol.Message, operations: Mapping[str, Operation]) -> protocol.Message:
    operation = operations.get(str(request.get("op")))
    if operation is None:
        known = ", ".join(sorted(operations))
        return _error("request", f"no operation {request.get('op')!r}; there are {known}")
    payload = request.get("payload")
    if not isinstance(payload, dict):
        return _error("request", "a request has a payload, an object")
    try:
        return {"result": operation(payload)}
    except BadPayload as error:
        return _error("request", str(error))
    except Exception as error:  # the client decides what becomes of it; the server lives on
        return _error("engine", f"{type(error).__name__}: {error}", traceback.format_exc())


def _error(kind: str, message: str, trace: str = "") -> protocol.Message:
    return {"error": {"kind": kind, "message": message, "traceback": trace}}
