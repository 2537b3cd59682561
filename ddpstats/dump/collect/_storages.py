"""Which storage a tensor lies in: a number that, unlike an address, is never given twice."""

from __future__ import annotations

import itertools

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ddpstats._observe.torch_compat import storage_id

_numbers = itertools.count(1)


class StorageNumbers:
    """A number for every storage; an address is given again when memory is freed, the number is not.

    A storage is held weakly: its memory is given back, but what names it stays ours.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, StorageWeakRef]] = {}

    def number(self, storage: torch.UntypedStorage) -> int:
        key = storage_id(storage)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = next(_numbers), StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return found[0]
