"""Messages over pipes, and a client that no server can hang, fool or outlive."""

from __future__ import annotations

import io
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagestorm_real.reference import protocol
from pagestorm_real.reference.client import (
    ReferenceBroken,
    ReferenceProcess,
    ReferenceRefused,
    ReferenceTimeout,
)

FAKE = Path(__file__).with_name("fake_server.py")
SOON_S = 30.0
"""Long enough for a process to start or to be gone on a busy machine."""
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def fake(behaviour: str = "good", **settings: float) -> ReferenceProcess:
    return ReferenceProcess("sglang", command=[sys.executable, str(FAKE), behaviour], **settings)


def gone(pid: int) -> bool:
    """Whether the process ends, or has ended."""
    deadline = time.monotonic() + SOON_S
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


# --- messages ------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.dictionaries(st.text(), JSON, max_size=4), st.dictionaries(st.text(), JSON, max_size=2))
def test_messages_come_back_as_they_went_one_after_another(first: dict[str, Any], second: dict[str, Any]) -> None:
    stream = io.BytesIO(protocol.pack(first) + protocol.pack(second))
    assert protocol.receive(stream.read) == first
    assert protocol.receive(stream.read) == second
    with pytest.raises(protocol.Closed):
        protocol.receive(stream.read)


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(min_value=2**60, max_value=2**90))
def test_floats_and_femtoseconds_keep_every_bit(ratio: float, time_fs: int) -> None:
    answer = protocol.receive(io.BytesIO(protocol.pack({"ratio": ratio, "time": time_fs})).read)
    assert (answer["ratio"].hex(), answer["time"]) == (ratio.hex(), time_fs)


@pytest.mark.parametrize("cut", [1, 3, 5, 9])
def test_a_message_cut_short_is_a_closed_pipe(cut: int) -> None:
    with pytest.raises(protocol.Closed):
        protocol.receive(io.BytesIO(protocol.pack({"a": "bcdef"})[:cut]).read)


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe", b"[1]", b"3", b""])
def test_what_is_no_object_is_no_message(body: bytes) -> None:
    with pytest.raises(protocol.ProtocolError) as caught:
        protocol.receive(io.BytesIO(struct.pack(">I", len(body)) + body).read)
    assert not isinstance(caught.value, protocol.Closed)


def test_an_announced_gigabyte_is_refused_before_it_is_read() -> None:
    with pytest.raises(protocol.ProtocolError, match="longer than"):
        protocol.receive(io.BytesIO(struct.pack(">I", 2**30)).read)


def test_a_message_longer_than_the_limit_is_never_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_MESSAGE_BYTES", 100)
    protocol.pack({"a": "x" * 92})
    with pytest.raises(protocol.ProtocolError, match="101 bytes"):
        protocol.pack({"a": "x" * 93})


def test_what_json_has_no_word_for_is_never_sent() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        protocol.pack({"ratio": float("nan")})


# --- a server that behaves --------------------------------------------------------------------------------------


def test_one_process_answers_many_requests_and_is_gone_afterwards() -> None:
    with fake() as server:
        pid = server.pid
        assert pid is not None
        assert server.version == "0.5.23"
        for number in range(50):
            assert server.request("echo", number=number) == {"number": number}
    assert gone(pid)
    assert server.pid is None


def test_a_request_larger_than_a_pipe_holds_passes_both_ways() -> None:
    tokens = list(range(300_000))
    with fake() as server:
        assert server.request("echo", tokens=tokens) == {"tokens": tokens}


def test_an_error_of_the_engine_is_told_with_its_traceback_and_the_server_lives_on() -> None:
    with fake() as server:
        with pytest.raises(ReferenceRefused, match="sglang reference, 'fail': ValueError: pool leak") as caught:
            server.request("fail", why="pool leak")
        assert "in fail" in caught.value.traceback
        with pytest.raises(ReferenceRefused, match=r"no operation 'fly'; there are chatter, die, echo"):
            server.request("fly")
        assert server.request("echo", a=1) == {"a": 1}


def test_an_answer_that_is_too_long_is_an_error_and_no_death() -> None:
    half = "x" * (protocol.MAX_MESSAGE_BYTES - 100)
    with fake() as server:
        assert server.request("echo", a=1) == {"a": 1}
        with pytest.raises(protocol.ProtocolError):
            server.request("echo", a=half, b=half)
        assert server.request("echo", a=2) == {"a": 2}


def test_what_the_engine_prints_never_gets_between_two_messages() -> None:
    with fake() as server:
        assert server.request("chatter") == {"read": ""}
        assert server.request("echo", a=1) == {"a": 1}


# --- servers that do not ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "told"),
    [
        ("other-version", "runs sglang 0.0.1 where sglang 0.5.23 is pinned"),
        ("other-engine", "runs vllm 0.5.23 where sglang 0.5.23 is pinned"),
        ("other-protocol", f"speaks protocol {protocol.PROTOCOL + 1} where {protocol.PROTOCOL} is wanted"),
        ("garbage", "longer than"),
        ("dies", r"did not start: it ended \(exit 1\); the end of its stderr:\ncannot import the engine"),
    ],
)
def test_a_server_that_is_not_what_was_asked_for_is_named_and_ended(behaviour: str, told: str) -> None:
    server = fake(behaviour)
    with pytest.raises(ReferenceBroken, match=told) as caught, server:
        pytest.fail("started")
    assert "make reference" in str(caught.value)
    assert server.pid is None


def test_a_server_that_never_says_hello_is_ended_when_its_time_is_over() -> None:
    with pytest.raises(ReferenceTimeout, match="did not start within its time"):
        fake("silent", startup_s=0.3).start()


def test_a_request_that_hangs_is_ended_when_its_time_is_over() -> None:
    with fake() as server:
        pid = server.pid
        assert pid is not None
        with pytest.raises(ReferenceTimeout, match="did not answer 'sleep' within its time"):
            server.request("sleep", timeout_s=0.3, s=600)
        assert gone(pid)
        with pytest.raises(ReferenceBroken, match="not running"):
            server.request("echo")


def test_a_server_that_takes_no_request_in_is_ended_when_its_time_is_over() -> None:
    with fake() as server:
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        with pytest.raises(ReferenceTimeout, match="took in no request 'echo'"):
            server.request("echo", timeout_s=0.5, tokens=list(range(300_000)))


def test_a_server_that_dies_leaves_its_exit_code_and_its_last_words() -> None:
    with fake() as server:
        with pytest.raises(ReferenceBroken, match=r"(?s)did not answer 'die': it ended \(exit 7\).*last words"):
            server.request("die")
        assert server.pid is None


def test_an_interpreter_that_is_not_there_is_a_broken_reference(tmp_path: Path) -> None:
    with pytest.raises(ReferenceBroken, match="cannot be started"):
        ReferenceProcess("sglang", command=[str(tmp_path / "python")]).start()


# --- nothing is left behind -------------------------------------------------------------------------------------


def test_what_the_server_started_ends_with_it() -> None:
    with fake() as server:
        child = server.request("spawn")["pid"]
    assert gone(child)


@pytest.mark.parametrize("busy", [False, True])
def test_the_server_dies_with_its_client_even_in_the_middle_of_a_request(busy: bool) -> None:
    script = (
        "import sys; from pagestorm_real.reference.client import ReferenceProcess\n"
        f"server = ReferenceProcess('sglang', command=[sys.executable, {str(FAKE)!r}, 'good'])\n"
        "server.start(); print(server.pid, flush=True)\n"
        f"server.request('sleep', s=600) if {busy} else sys.stdin.read()\n"
    )
    paths = os.pathsep.join(str(FAKE.parents[2] / source) for source in ("sim", "real"))
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
    ) as client:
        assert client.stdout is not None
        pid = int(client.stdout.readline())
        assert psutil.pid_exists(pid)
        client.kill()
    assert gone(pid)


def test_the_server_outlives_the_thread_that_started_it() -> None:
    server = fake()
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    try:
        assert server.request("sleep", s=0.3) == {"slept": 0.3}
        assert server.request("echo", a=1) == {"a": 1}
    finally:
        server.close()
        server.close()
