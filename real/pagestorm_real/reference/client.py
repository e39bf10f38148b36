"""Pagestorm's side of the pipe: a reference process that is started, asked, and surely ended.

with ReferenceProcess("sglang") as sglang:
    answer = sglang.request("run", page_size=16, max_total_tokens=4096, ...)
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn

from pagestorm.errors import PagestormError
from pagestorm_real.reference import environment, protocol
from pagestorm_real.reference.environment import ReferenceBroken, ReferenceMissing

__all__ = ["ReferenceBroken", "ReferenceMissing", "ReferenceProcess", "ReferenceRefused", "ReferenceTimeout"]

STARTUP_S = 120.0
"""Importing an engine takes 5 to 20 s; a cold disk several times that."""
REQUEST_S = 300.0
ENDING_S = 1.0
"""How long to wait for the exit code of a process that has closed its pipe."""
STDERR_TAIL_BYTES = 4000


class ReferenceRefused(PagestormError):
    """The server lives and says that the request makes no sense or that the engine raised; `traceback` is its own."""

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


class ReferenceTimeout(ReferenceBroken):
    """The server did not answer in time; it has been killed."""


class ReferenceProcess:
    """One server of an engine, alive from `__enter__` to `__exit__`.

    `command` replaces the environment's interpreter and server file. Errors: `ReferenceMissing` when there is no
    environment, `ReferenceBroken` when it is not the one that this version wants, or the process says something
    unexpected or dies, `ReferenceTimeout` when it hangs, `ReferenceRefused` for an answer that is an error. After any
    but the last the process is gone and the object of no more use.
    """

    def __init__(
        self,
        engine: str,
        *,
        command: list[str] | None = None,
        startup_s: float = STARTUP_S,
        request_s: float = REQUEST_S,
    ) -> None:
        self.engine = engine
        self.version = ""
        """The engine's version, known after the start."""
        self._command = command
        self._startup_s = startup_s
        self._request_s = request_s
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self._number = 0

    def __enter__(self) -> ReferenceProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the server while it lives."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the server and wait for its hello."""
        command = self._command or environment.server_command(self.engine)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        try:
            self._process = subprocess.Popen(
                [*command, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                start_new_session=True,
                cwd=Path(__file__).parent,
            )
        except OSError as error:
            broken = self._broken(f"cannot be started ({error})")
            self.close()
            raise broken from error
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        self._greet(self._receive(time.monotonic() + self._startup_s, "did not start"))

    def request(self, op: str, *, timeout_s: float | None = None, **payload: Any) -> dict[str, Any]:
        """The server's answer to one operation."""
        limit_s = self._request_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        self._number += 1
        message = protocol.pack({"id": self._number, "op": op, "payload": payload})
        self._send(message, deadline, op)
        answer = self._receive(deadline, f"did not answer {op!r}")
        if answer.get("id") != self._number:
            self._fail(f"answered request {answer.get('id')!r} where {self._number} was asked")
        if "error" in answer:
            error = answer["error"]
            raise ReferenceRefused(f"{self.engine} reference, {op!r}: {error['message']}", error["traceback"])
        result = answer.get("result")
        if not isinstance(result, dict):
            self._fail(f"answered {op!r} without a result")
        return result

    def close(self) -> None:
        """End the server and everything that it started. Does nothing a second time."""
        process, self._process = self._process, None
        if process is not None:
            _kill_group(process)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        if self._stderr is not None:
            self._stderr.close()
            self._stderr = None

    # --- inside ----------------------------------------------------------------------------------------------

    def _greet(self, message: protocol.Message) -> None:
        hello = message.get("hello")
        if not isinstance(hello, dict):
            self._fail("said something else than hello first")
        if hello.get("protocol") != protocol.PROTOCOL:
            self._fail(f"speaks protocol {hello.get('protocol')!r} where {protocol.PROTOCOL} is wanted")
        wanted = environment.engine_version(self.engine)
        if (hello.get("engine"), hello.get("version")) != (self.engine, wanted):
            found = f"{hello.get('engine')} {hello.get('version')}"
            self._fail(f"runs {found} where {self.engine} {wanted} is pinned")
        self.version = wanted

    def _send(self, message: bytes, deadline: float, op: str) -> None:
        process = self._alive()
        assert process.stdin is not None
        pipe, left = process.stdin.fileno(), memoryview(message)
        while left:
            if not _ready(pipe, select.POLLOUT, deadline):
                self._fail(f"took in no request {op!r} within its time", ReferenceTimeout)
            try:
                left = left[os.write(pipe, left) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                self._fail(f"ended before it was asked {op!r}")

    def _receive(self, deadline: float, complaint: str) -> protocol.Message:
        process = self._alive()
        assert process.stdout is not None
        pipe = process.stdout.fileno()

        def read(count: int) -> bytes:
            parts, missing = [], count
            while missing:
                if not _ready(pipe, select.POLLIN, deadline):
                    self._fail(f"{complaint} within its time", ReferenceTimeout)
                part = os.read(pipe, min(missing, 1 << 20))
                if not part:
                    break
                parts.append(part)
                missing -= len(part)
            return b"".join(parts)

        try:
            return protocol.receive(read)
        except protocol.Closed:
            self._fail(f"{complaint}: it ended")
        except protocol.ProtocolError as error:
            self._fail(f"{complaint}: {error}")

    def _alive(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ReferenceBroken(f"the {self.engine} reference process is not running: start it first")
        return self._process

    def _fail(self, what: str, kind: type[ReferenceBroken] = ReferenceBroken) -> NoReturn:
        error = self._broken(what, kind)
        self.close()
        raise error

    def _broken(self, what: str, kind: type[ReferenceBroken] = ReferenceBroken) -> ReferenceBroken:
        return kind(f"the {self.engine} reference process {what}{self._ending()}; {environment.REMEDY}")

    def _ending(self) -> str:
        """How the process ended, if it did, and the last that it wrote to stderr."""
        process, told = self._process, ""
        if process is not None:
            if _hung_up(process):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(ENDING_S)
            if process.poll() is not None:
                told = f" (exit {process.returncode})"
        if self._stderr is None:
            return told
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - STDERR_TAIL_BYTES))
        tail = self._stderr.read().decode(errors="replace").strip()
        return f"{told}; the end of its stderr:\n{tail}\n" if tail else told


def _ready(pipe: int, event: int, deadline: float) -> bool:
    """Wait until the pipe is ready or closed at the other end; False when the time is over."""
    poll = select.poll()
    poll.register(pipe, event)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


def _hung_up(process: subprocess.Popen[bytes]) -> bool:
    assert process.stdout is not None
    poll = select.poll()
    poll.register(process.stdout.fileno(), 0)
    return bool(poll.poll(0))


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """The server leads a session of its own, so this reaches all that it started and nothing else."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
