"""How a parent and its ranks talk: frames of length and bytes over a private socket pair.

1. The parent sends a frame with the pickled `(fn, args, kwargs)`; an empty frame means "end".
2. The rank sends one frame back, a pickled `Reply` made of plain values only, so that opening the envelope never fails.
   What may fail (the user's value or exception) is pickled a second time inside it.

Pickle runs here between a process and the children it started itself, over file descriptors that nobody else holds:
nothing from outside ever reaches it.
"""

from __future__ import annotations

import pickle
import socket
import struct
import traceback
from typing import Any, NamedTuple

from ddpstats.testing._rank_outcomes import RankOutcome, RankUnpicklable

READY = b"ready"
END = b""

_LENGTH = struct.Struct("!Q")
_CHUNK_BYTES = 1 << 20
_REPR_CHARS = 2000


class GroupState(NamedTuple):
    """What all ranks of a healthy default process group agree on after a run."""

    world_size: int
    collectives: int
    groups_created: int


class Reply(NamedTuple):
    """What a rank sends back: the pickled value or exception, or (`payload` None) why that could not be pickled."""

    ok: bool
    payload: bytes | None
    summary: str
    traceback: str
    group_state: GroupState | None


def send_frame(sock: socket.socket, payload: bytes) -> None:
    """Send one frame; blocks as long as the socket's own timeout allows."""
    sock.sendall(_LENGTH.pack(len(payload)))
    sock.sendall(payload)


def recv_frame(sock: socket.socket) -> bytes | None:
    """The next frame of a blocking socket; None when the other end is gone."""
    reader = FrameReader()
    while reader.frame is None:
        # Never more than this frame: the next one stays in the socket.
        chunk = sock.recv(min(reader.missing_bytes, _CHUNK_BYTES))
        if not chunk:
            return None
        reader.feed(chunk)
    return reader.frame


class FrameReader:
    """Puts one frame together from pieces of any size. `frame` is None until it is whole."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.frame: bytes | None = None

    @property
    def missing_bytes(self) -> int:
        """How many bytes to read next: the rest of the length, then the rest of the body."""
        if len(self._buffer) < _LENGTH.size:
            return _LENGTH.size - len(self._buffer)
        return _LENGTH.size + self._body_bytes() - len(self._buffer)

    def feed(self, chunk: bytes) -> None:
        """Add what was read: at most `missing_bytes`."""
        self._buffer += chunk
        if len(self._buffer) >= _LENGTH.size and self.missing_bytes == 0:
            self.frame = bytes(self._buffer[_LENGTH.size :])

    def _body_bytes(self) -> int:
        length: int = _LENGTH.unpack_from(self._buffer)[0]
        return length


def value_reply(value: Any, state: GroupState | None) -> Reply:
    """The rank's side: wrap what the function returned."""
    try:
        return Reply(True, pickle.dumps(value), type(value).__qualname__, "", state)
    except Exception:
        return Reply(True, None, _safe_repr(value), traceback.format_exc(), state)


def error_reply(error: BaseException, state: GroupState | None) -> Reply:
    """The rank's side: wrap what the function raised."""
    text = "".join(traceback.format_exception(error))
    return Reply(False, _faithful_pickle(error), _safe_repr(error), text, state)


def outcome_of(rank: int, reply: Reply) -> RankOutcome:
    """The parent's side: open a reply. What cannot be opened becomes a `RankUnpicklable`."""
    what = "return value" if reply.ok else "exception"
    if reply.payload is None:
        return _unpicklable(rank, what, reply.summary, reply.traceback)
    try:
        thing = pickle.loads(reply.payload)
    except Exception:
        return _unpicklable(rank, what, reply.summary, reply.traceback + traceback.format_exc())
    if reply.ok:
        return RankOutcome(rank, thing, None, "", None)
    return RankOutcome(rank, None, thing, reply.traceback, None)


def _unpicklable(rank: int, what: str, summary: str, reason: str) -> RankOutcome:
    return RankOutcome(rank, None, RankUnpicklable(rank, what, summary, reason), reason, None)


def _faithful_pickle(error: BaseException) -> bytes | None:
    """Pickle an exception, or None if a copy would differ.

    An exception whose `__init__` builds its message pickles well and comes back with the message built twice, or does
    not come back at all; a test that looks at the message must not see a distorted one.
    """
    try:
        payload = pickle.dumps(error)
        copy = pickle.loads(payload)
        return payload if type(copy) is type(error) and str(copy) == str(error) else None
    except Exception:
        return None


def _safe_repr(thing: Any) -> str:
    try:
        return repr(thing)[:_REPR_CHARS]
    except Exception as error:
        return f"<{type(thing).__qualname__} whose repr raised {type(error).__qualname__}>"
