"""Fields of a record that was written elsewhere: each with its type and limits, or a `BundleError` that names it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ddpstats.errors import BundleError

MOST_RANKS = 1_000_000
MOST_ENTRIES = 1_000_000
LONGEST_TEXT = 1_000_000

_DAMAGED = "the bundle is damaged, hostile, or of another version of ddpstats"


class Fields:
    """A dict whose keys are strings.

    ``where`` starts every message: the file, and the place in it. ``advice`` ends it: whose fault that may be.
    """

    def __init__(self, content: Any, where: str, advice: str = _DAMAGED) -> None:
        if type(content) is not dict or not all(type(key) is str for key in content):
            raise BundleError(f"{where}: not a record but {type(content).__name__}; {advice}")
        self._content: dict[str, Any] = content
        self._where, self._advice = where, advice

    def wrong(self, name: str, wanted: str) -> BundleError:
        """An error for the field ``name``, to be raised."""
        found = self._content.get(name, "nothing")
        shown = repr(found) if isinstance(found, (str, int, float)) else f"something of type {type(found).__name__}"
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        return BundleError(f"{self._where}: field {name!r} holds {shown}, not {wanted}; {self._advice}")

    def only(self, names: Iterable[str]) -> None:
        """Refuse any other field, and the lack of one."""
        names = set(names)
        for name in sorted(names - self._content.keys()):
            raise self.wrong(name, "what a capture writes there")
        for name in sorted(self._content.keys() - names):
            raise self.wrong(name, "a field that a capture writes")

    def raw(self, name: str) -> Any:
        if name not in self._content:
            raise self.wrong(name, "what a capture writes there")
        return self._content[name]

    def at(self, name: str) -> str:
        """Where the field is, for a message about what is inside it."""
        return f"{self._where}: {name}"

    def inner(self, content: Any, at: str) -> Fields:
        """A record inside this one."""
        return Fields(content, at, self._advice)

    def integer(self, name: str, low: int, high: int) -> int:
        value = self.raw(name)
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str) -> float:
        value = self.raw(name)
        if type(value) not in (int, float):
            raise self.wrong(name, "a number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.raw(name)
        if type(value) is not bool:
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str) -> str:
        value = self.raw(name)
        if type(value) is not str or len(value) > LONGEST_TEXT:
            raise self.wrong(name, "a text")
        return value

    def text_or_none(self, name: str) -> str | None:
        return None if self.raw(name) is None else self.text(name)

    def one_of(self, name: str, legal: Iterable[str]) -> str:
        value, legal = self.raw(name), list(legal)
        if type(value) is not str or value not in legal:
            raise self.wrong(name, f"one of {', '.join(legal)}")
        return value

    def texts(self, name: str) -> list[str]:
        value = self.raw(name)
        if not is_texts(value):
            raise self.wrong(name, "a list of texts")
        return list(value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.raw(name)
        if type(value) is not dict or len(value) > MOST_ENTRIES or not all(type(key) is str for key in value):
            raise self.wrong(name, "a record")
        return value

    def ranks(self, name: str, legal: Collection[int] = range(MOST_RANKS)) -> tuple[int, ...]:
        """Ascending ranks, each of them one of ``legal``."""
        value = self.raw(name)
        fits = type(value) is list and len(value) <= MOST_RANKS and all(_is_rank(rank, legal) for rank in value)
        if not fits or value != sorted(set(value)):
            raise self.wrong(name, f"ascending ranks of {_shown(legal)}")
        return tuple(value)

    def by_rank(self, name: str, legal: Collection[int]) -> dict[int, Any]:
        """A record whose keys are ranks in decimal, each of them one of ``legal``."""
        found: dict[int, Any] = {}
        for key, value in self.mapping(name).items():
            rank = int(key) if key.isascii() and key.isdecimal() and len(key) <= 7 else -1
            if not _is_rank(rank, legal) or str(rank) != key:
                raise self.wrong(name, f"a record by ranks of {_shown(legal)}: {key[:20]!r} is none")
            found[rank] = value
        return found


def is_texts(value: Any) -> bool:
    fits = type(value) is list and len(value) <= MOST_ENTRIES
    return fits and all(type(text) is str and len(text) <= LONGEST_TEXT for text in value)


def _is_rank(value: Any, legal: Collection[int]) -> bool:
    return type(value) is int and value in legal


def _shown(legal: Collection[int]) -> str:
    first = ", ".join(map(str, sorted(legal)[:8])) if len(legal) < MOST_RANKS else f"0 to {MOST_RANKS - 1}"
    return f"the group's ({first}{', ...' if 8 < len(legal) < MOST_RANKS else ''})"
