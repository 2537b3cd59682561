"""Tensors of a dump as files of their own, and the checksum of their bytes. Reading them back is the comparison's."""

from __future__ import annotations

import ctypes
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddpstats._base.files import TEMPORARY_PREFIX, make_private_directory
from ddpstats._observe.torch_compat import without_tensor_classes
from ddpstats.dump.msprobe import file_name

_LONGEST_NAME = 255


class TensorFiles:
    """Saves what it is given, now or at the end of the step.

    Args:
        directory: made with the first file.
        at_once: False keeps a copy, on the tensor's own device, until `flush`: nothing waits and nothing is written.
    """

    def __init__(self, directory: Path, *, at_once: bool) -> None:
        self.directory = directory
        self._at_once = at_once
        self._kept: list[tuple[str, Tensor]] = []

    def save(self, tensor: Tensor, name: str, path: str) -> str:
        """The name of the file. Raises OSError, and TypeError for what is a tensor by a class of its own."""
        if type(tensor) is not Tensor:
            tensor = _plain(tensor)
        file = file_name(name, path)
        if self._at_once:
            self._write(tensor, file)
        else:
            self._kept.append((file, without_repeats(tensor.detach())[0].clone().expand(tensor.shape)))
        return file

    def flush(self) -> None:
        """Write what was kept. A file that fails costs no other; raises the first error when all are through."""
        kept, self._kept = self._kept, []
        first: Exception | None = None
        for file, tensor in kept:
            try:
                self._write(tensor, file)
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    def _write(self, tensor: Tensor, file: str) -> None:
        if tensor.is_meta:
            return
        plain = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)  # not the whole storage
        make_private_directory(self.directory)
        unfinished = self.directory / f"{TEMPORARY_PREFIX}{file}"[:_LONGEST_NAME]
        torch.save(plain, unfinished)
        os.replace(unfinished, self.directory / file)  # without waiting for the disk: there are too many of them


def _plain(tensor: Tensor) -> Tensor:
    """Without its class, where that is but a name. What consists of other tensors could not be loaded again."""
    kind: Any = type(tensor)
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise TypeError(f"a {kind.__name__} is no plain tensor, and is not saved")
    with without_tensor_classes():
        return tensor.detach().as_subclass(Tensor)


def without_repeats(tensor: Tensor) -> tuple[Tensor, int]:
    """Of an expanded tensor, what is in memory, with as many dimensions; and how often each element is there."""
    repeats = 1
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor, repeats = tensor.narrow(dimension, 0, 1), repeats * size
    return tensor, repeats


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether its elements lie in memory without gaps, and each once."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1 and step != expected:
            return False
        expected *= size
    return True


def checksum(tensor: Tensor) -> str:
    """CRC-32 of the elements' bytes in order, as 8 hex digits. Waits for a device."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    size = plain.numel() * plain.element_size()
    if not size:
        return f"{0:08x}"
    return f"{zlib.crc32((ctypes.c_char * size).from_address(plain.data_ptr())):08x}"
