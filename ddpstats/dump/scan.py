"""The members of a large JSON object, one after another, from a file that is never in memory whole.

1. Read the file in chunks, as Latin-1: one character is one byte then, so that positions are those of the file. What
   is parsed is decoded as UTF-8 first, if it is not plain ASCII.
2. After a key, find where its value ends. Where the file has one member a line, or is indented, that is a search for
   the line's end, or for the closing brace of the same indent: no newline stands inside a JSON string. A slice whose
   braces do not balance was no such value, and anything else is no such layout: then the JSON decoder finds the end.
3. Give the member as text, with its place. Who needs the value parses it; who only finds it equal to another does not.

What is wrong with a file is said with its name and the byte at which it was noticed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from ddpstats._base.files import parse_json
from ddpstats.errors import DumpError

_CHUNK_BYTES = 1 << 20
LARGEST_VALUE_BYTES = 64 << 20  # one entry of this size is not a dump, and would be read again and again

_LONGEST_INDENT = 64
_LONGEST_TOKEN = 64  # that is no string and no number: what the decoder calls wrong may be one cut in two
_LONGEST_EXPONENT_SIGN = 2  # "e+", which alone is no part of a number
_VERIFIED_MEMBERS = 8  # of each object: their ends are asked of the decoder too

_SPACE = re.compile(r"[ \t\r\n]*")
_KEY = re.compile(r'"([^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*)"[ \t\r\n]*:[ \t\r\n]*')
_LINE = re.compile(r'\s*"([^"\\\x00-\x1f\x80-\xff]*)":[ \t]*(\{[^\n]*\}),(?=\r?\n)')
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Member:
    """One ``"key": value`` of an object; ``text`` is the value as it stands in the file, one character per byte."""

    key: str
    text: str
    offset: int  # of the value, in bytes from the beginning of the file

    def value(self) -> Any:
        """Parse the value. Raises ValueError."""
        return parse(self.text)


def parse(text: str) -> Any:
    """JSON in Latin-1 characters, each a byte of UTF-8. Raises ValueError."""
    return parse_json(text if text.isascii() else text.encode("latin-1").decode("utf-8"), strict=False)


class Scanner:
    """A place in a JSON file.

    Args:
        file: open for reading bytes, at its beginning.
        path: for messages.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        self._buffer = ""
        self._at = 0  # in the buffer
        self._base = 0  # of the buffer, in the file
        self._trusted = True  # what the layout says of where values end
        self._to_verify = _VERIFIED_MEMBERS
        if self._fill() and self._buffer.startswith("\xef\xbb\xbf"):  # a byte order mark, as some editors write it
            self._at = 3

    def enter(self) -> None:
        """Step into the object that begins here."""
        if self._peek() != "{":
            self.fail("a JSON object was expected here")
        self._at += 1
        self._trusted, self._to_verify = True, _VERIFIED_MEMBERS

    def members(self, *, stop_at: str | None = None) -> Iterator[Member]:
        """Those of the object that was entered, up to its end, or up to the value of the key ``stop_at``."""
        if self._peek() == "}":
            self._at += 1
            return
        while True:
            yield from self._plain_lines(stop_at)
            key, indent = self._key()
            if key == stop_at:
                return
            start = self._base + self._at
            yield Member(key, self._value(indent), start)
            mark = self._peek()
            self._at += 1
            if mark == "}":
                return
            if mark != ",":
                self._at -= 1
                self.fail("a comma or the end of the object was expected here")

    def _plain_lines(self, stop_at: str | None) -> Iterator[Member]:
        """The fast way through members that have a line each, up to the last one in the buffer."""
        if not self._trusted or self._to_verify:
            return
        while self._buffer.startswith(("\n", "\r\n"), self._at):  # elsewhere the search below may go on for megabytes
            line_end = self._buffer.find("\n", self._at + 2) + 1
            match = _LINE.match(self._buffer, self._at, line_end) if line_end else None
            if match is None:
                return
            key, text = match.groups()
            if key == stop_at or text.count("{") != text.count("}"):
                return
            start = self._base + match.start(2)
            self._at = match.end()
            yield Member(key, text, start)

    def rest_of_braces(self) -> None:
        """Go through what is left of an object of which ``members(stop_at=...)`` gave the first part, to the end."""
        if self._peek() == ",":
            self._at += 1
            for _ in self.members():
                pass
        elif self._peek() == "}":
            self._at += 1
        else:
            self.fail("the end of the object was expected here")

    def at_end(self) -> bool:
        """Whether nothing is left of the file."""
        return not self._peek()

    def fail(self, problem: str) -> NoReturn:
        """Raises `DumpError` for this file at this place."""
        ended = not self._buffer[self._at : self._at + 1]
        where = "the file ends in the middle of its JSON" if ended else problem
        raise DumpError(
            f"{self._path}: {where} (byte {self._base + self._at:,}). It is damaged, or was not copied completely: "
            "copy it again, or dump the step again. If dump.jsonl lies beside it, remove dump.json: it is read then.",
            path=str(self._path),
        )

    def _key(self) -> tuple[str, str | None]:
        """The key that comes next, and the white space before it on its line, None where it does not begin a line.

        The place is then that of its value.
        """
        self._peek()
        match = _KEY.match(self._buffer, self._at)
        while (match is None or match.end() == len(self._buffer)) and self._fill(keep=True):
            match = _KEY.match(self._buffer, self._at)
        if match is None:
            self._fail_at_end_of_file_or_here("a key in double quotes and a colon were expected here")
        indent = self._line_before()
        raw = match.group(1)
        key = raw if "\\" not in raw and raw.isascii() else str(self._parsed(f'"{raw}"'))
        self._at = match.end()
        return key, indent if indent is not None and not indent.strip(" \t") else None

    def _line_before(self) -> str | None:
        """The characters before the place on its line; None where the line began far away."""
        start = self._buffer.rfind("\n", max(0, self._at - _LONGEST_INDENT), self._at) + 1
        return self._buffer[start : self._at] if start else None

    def _parsed(self, text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            self.fail(f"this is not JSON: {error}")

    def _value(self, indent: str | None) -> str:
        if len(self._buffer) - self._at < 3:
            self._fill()
        indented = self._buffer.startswith(("{\n", "{\r\n"), self._at)
        end = -1
        if indent is not None and self._trusted and self._buffer.startswith("{", self._at):
            end = self._end_by_layout("\n" + indent + "}" if indented else "\n")
        if end < 0 or self._to_verify:
            by_decoder = self._end_by_decoder()
            self._trusted = self._trusted and end in (-1, by_decoder)
            self._to_verify = max(0, self._to_verify - 1)
            end = by_decoder
        text = self._buffer[self._at : end]
        self._at = end
        return text

    def _end_by_layout(self, closing: str) -> int:
        """Where the value ends, or -1 where the text is not laid out as thought."""
        indented = len(closing) > 1
        searched = 0  # characters of the value, counted from the place: the buffer moves when it is filled
        while (found := self._buffer.find(closing, self._at + searched)) < 0:
            searched = max(0, len(self._buffer) - len(closing) - self._at)
            if not self._fill(keep=True):
                return -1
        end = found + len(closing) if indented else found
        if not indented:
            end -= self._buffer[end - 1] == "\r"
            end -= self._buffer[end - 1] == ","
        balanced = self._buffer.count("{", self._at, end) == self._buffer.count("}", self._at, end)
        return end if balanced and self._buffer[end - 1] == "}" else -1

    def _end_by_decoder(self) -> int:
        while True:
            try:
                _, end = _DECODER.raw_decode(self._buffer, self._at)
            except RecursionError:
                self.fail("this is nested too deeply")
            except ValueError as error:
                if self._is_wrong_anyway(error) or not self._fill(keep=True):
                    self._fail_at_end_of_file_or_here(f"this is not JSON: {error}")
            else:
                # a number may go on in the next chunk, and of 1e+5 the decoder takes 1 where it was cut before the 5
                if end + _LONGEST_EXPONENT_SIGN < len(self._buffer) or not self._fill(keep=True):
                    return end

    def _is_wrong_anyway(self, error: ValueError) -> bool:
        """Whether more of the file could not help."""
        if not isinstance(error, json.JSONDecodeError):
            return True  # a number of too many digits
        return "Unterminated" not in error.msg and error.pos < len(self._buffer) - _LONGEST_TOKEN

    def _fail_at_end_of_file_or_here(self, problem: str) -> NoReturn:
        try:
            _DECODER.raw_decode(self._buffer, self._at)
        except json.JSONDecodeError as error:
            self._at = min(error.pos, len(self._buffer))
            if '"' in self._buffer[self._at : self._at + 1] and "Unterminated" in error.msg:
                self._at = len(self._buffer)
        except (ValueError, RecursionError):
            pass
        self.fail(problem)

    def _peek(self) -> str:
        """The next character that is not white space; empty at the end of the file."""
        while True:
            match = _SPACE.match(self._buffer, self._at)
            self._at = match.end() if match is not None else self._at
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._fill():
                return ""

    def _fill(self, *, keep: bool = False) -> bool:
        """Read on; what lies before the place's line goes. Twice as much each time while a value has no end."""
        pending = len(self._buffer) - self._at
        if pending > LARGEST_VALUE_BYTES:
            self.fail(f"one value is larger than {LARGEST_VALUE_BYTES:,} bytes, which no dump holds")
        size = max(_CHUNK_BYTES, pending) if keep else _CHUNK_BYTES
        chunk = self._file.read(size)
        if not chunk:
            return False
        drop = max(0, self._at - _LONGEST_INDENT)  # the indent of a key stands before it
        self._buffer = self._buffer[drop:] + chunk.decode("latin-1")
        self._base += drop
        self._at -= drop
        return True
