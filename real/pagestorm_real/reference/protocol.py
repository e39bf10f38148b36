"""What the two sides say to each other: one JSON object a message, its length in four bytes before it.

Both sides load this file, the engine's side by path in an environment that has nothing of Pagestorm, so it needs the
standard library only. Numbers keep their value exactly: integers have no bound and floats are written as `repr`.

    server -> client   {"hello": {"protocol", "engine", "version", "python"}}        once, when it is ready
    client -> server   {"id", "op", "payload"}
    server -> client   {"id", "result"}  or  {"id", "error": {"kind", "message", "traceback"}}
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

PROTOCOL = 1
"""Raised by one whenever a message changes its meaning; both sides must have the same."""
MAX_MESSAGE_BYTES = 64 * 2**20
HEADER_BYTES = 4

Message = dict[str, Any]
ReadExactly = Callable[[int], bytes]
"""Gives exactly so many bytes, or fewer when the other side has closed its end."""


class ProtocolError(Exception):
    """What came over the pipe is no message of this protocol."""


class Closed(ProtocolError):
    """The other side closed its end between two messages or inside one."""


def pack(message: Message) -> bytes:
    """A message as bytes, header included. Raises `ProtocolError` when it is longer than `MAX_MESSAGE_BYTES`."""
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(body)} bytes is longer than the {MAX_MESSAGE_BYTES} allowed")
    return struct.pack(">I", len(body)) + body


def receive(read: ReadExactly) -> Message:
    """The next message. Raises `Closed` at the end of the stream, `ProtocolError` for anything malformed."""
    header = read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        raise Closed("the other side closed the pipe")
    (length,) = struct.unpack(">I", header)
    if length > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {length} bytes was announced, longer than the {MAX_MESSAGE_BYTES} allowed")
    body = read(length)
    if len(body) < length:
        raise Closed("the other side closed the pipe inside a message")
    try:
        message = json.loads(body)
    except ValueError as error:
        raise ProtocolError(f"a message that is not JSON: {body[:80]!r}") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"a message that is not an object: {body[:80]!r}")
    return message
