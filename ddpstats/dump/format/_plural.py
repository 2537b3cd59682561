"""Numbers of things, in words."""

from __future__ import annotations

_ONE = {"entries": "entry"}


def count_of(count: int, words: str) -> str:
    """``1,024 tensors``, ``1 tensor``: ``words`` begins with the plural."""
    first, _, rest = words.partition(" ")
    if count == 1:
        first = _ONE.get(first, first.removesuffix("s"))
    return f"{count:,} {first} {rest}".rstrip()
