"""Plain values as bytes, and back, checked: the layer below every message that ranks send each other.

Whatever `Reader` is given comes from another process: every read is checked against what is left, and refused with
``ProtocolMismatch`` where it is not exactly what the `put_*` functions write. No pickle.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import NoReturn

from ddpstats._base.text import holders_lines
from ddpstats.errors import ProtocolMismatch

PROTOCOL_VERSION = 4


def different_versions(group_words: str, by_rank: Mapping[int, str]) -> str:
    """What ranks raise that cannot understand each other. ``by_rank``: what each runs, in words."""
    advice = "Install the same version of ddpstats on all of them."
    return "\n".join([f"ranks of {group_words} run different versions:", *holders_lines(by_rank), advice])


def fingerprint(payload: bytes) -> bytes:
    """8 bytes, the same in every process and on every machine (never `hash`, which is salted)."""
    return hashlib.blake2b(payload, digest_size=8).digest()


def utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # a key may hold any Unicode, lone surrogates included


def from_utf8(payload: bytes) -> str:
    try:
        return payload.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        refuse(f"text that is not UTF-8 ({error.reason})")


def put_text(out: list[bytes], text: str) -> None:
    payload = utf8(text)
    out += (struct.pack("<I", len(payload)), payload)


def put_optional(out: list[bytes], text: str | None) -> None:
    out.append(b"\0" if text is None else b"\1")
    if text is not None:
        put_text(out, text)


def put_texts(out: list[bytes], texts: tuple[str, ...]) -> None:
    out.append(struct.pack("<H", len(texts)))
    for text in texts:
        put_text(out, text)


class Reader:
    """A position in untrusted bytes; every read is checked against what is left."""

    def __init__(self, payload: bytes) -> None:
        self._payload, self._at = payload, 0

    def take(self, count: int) -> bytes:
        start, self._at = self._at, self._at + count
        if self._at > len(self._payload):
            refuse("bytes that end too early")
        return self._payload[start : self._at]

    def numbers(self, code: str, count: int) -> tuple[int, ...]:
        layout = struct.Struct(f"<{count}{code}")
        return layout.unpack(self.take(layout.size))

    def flag(self) -> bool:
        value = self.take(1)[0]
        if value > 1:
            refuse(f"a flag of value {value}")
        return value == 1

    def text(self) -> str:
        return from_utf8(self.take(self.numbers("I", 1)[0]))

    def optional(self) -> str | None:
        return self.text() if self.flag() else None

    def texts(self) -> tuple[str, ...]:
        return tuple(self.text() for _ in range(self.numbers("H", 1)[0]))

    def rest(self) -> bytes:
        """What is left, for another reader."""
        return self.take(len(self._payload) - self._at)

    def finish(self) -> None:
        if self._at != len(self._payload):
            refuse(f"{len(self._payload) - self._at} bytes too many")


def refuse(what: str) -> NoReturn:
    """For bytes of a peer that are not what it should have sent."""
    raise ProtocolMismatch(
        f"a peer sent {what}; ranks must run the same version of ddpstats (protocol {PROTOCOL_VERSION})"
    )
