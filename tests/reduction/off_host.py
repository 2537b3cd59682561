"""Host tensors that take the way of tensors on an accelerator, on a machine that has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from ddpstats._reduction import read, window


@contextmanager
def tensors_off_host(is_off_host: Callable[[torch.Tensor], bool] = lambda tensor: True) -> Iterator[None]:
    """Treat the tensors that ``is_off_host`` names as if they were on a device; nothing has to be waited for."""
    with (
        mock.patch.object(read, "is_off_host", is_off_host),
        mock.patch.object(read, "_is_cpu", lambda tensor: not is_off_host(tensor)),
        mock.patch.object(read, "accelerator_in_use", return_value=True),
        mock.patch.object(window, "accelerator_in_use", return_value=True),
    ):
        yield
