"""Which storage a tensor lies in: a number that, unlike an address, is never given twice."""

from __future__ import annotations

from typing import Any

import torch


class StorageNumbers:
    """A number for every storage; an address is given again when memory is freed, the number is not.

    A storage is held weakly: its memory is given back, but what names it stays ours.
    """

    _count = 0

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._references: list[Any] = []

    def number(self, storage: torch.UntypedStorage) -> int:
        key = storage._cdata
        found = self._numbers.get(key)
        if found is None:
            self._references.append(storage._weak_ref())
            StorageNumbers._count += 1
            found = self._numbers[key] = StorageNumbers._count
        return found

    def __del__(self) -> None:
        for reference in self._references:
            torch.UntypedStorage._free_weak_ref(reference)  # type: ignore[no-untyped-call]
