"""Words that messages share: numbers of things, lists cut short, names of dtypes."""

from __future__ import annotations

import functools
from collections.abc import Iterable

_ONE = {"entries": "entry", "micro-batches": "micro-batch"}


def count_of(count: int, words: str) -> str:
    """``1,024 tensors``, ``1 tensor``: ``words`` begins with the plural."""
    first, _, rest = words.partition(" ")
    if count == 1:
        first = _ONE.get(first, first.removesuffix("s"))
    return f"{count:,} {first} {rest}".rstrip()


def listed(things: Iterable[object], most: int, rest: str = " and {} more") -> str:
    """ "a, b and 3 more": at most ``most`` are named, then ``rest`` with the number of the others."""
    names = [str(one) for one in things]
    left = len(names) - most
    return ", ".join(names[:most]) + (rest.format(left) if left > 0 else "")


@functools.lru_cache(maxsize=128)
def dtype_name(dtype: object) -> str:
    """ "float32", of a torch.dtype or of its text."""
    return str(dtype).removeprefix("torch.")
