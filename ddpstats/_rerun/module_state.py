"""Where a module in use is; and its buffers and plain attributes: set for a step that is run again, then put back."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ddpstats._observe.torch_compat import buffers_of


def device_of(module: nn.Module) -> torch.device:
    """Where its first parameter is; the CPU where it has none."""
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def place_text(module: nn.Module) -> str:
    """Host, process and device, for whoever has to go there."""
    device = device_of(module)
    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    return f"host {socket.gethostname()}, process {os.getpid()}, device {device}{name}"


@contextmanager
def put_back(module: nn.Module) -> Iterator[None]:
    """Buffers and plain attributes are afterwards as they are now."""
    owners = [(buffers_of(one), dict(buffers_of(one))) for one in module.modules()]
    buffers = {id(buffer): buffer for _, kept in owners for buffer in kept.values() if buffer is not None}
    values = [(buffer, buffer.detach().clone()) for buffer in buffers.values()]
    attributes = [(one, _plain_attributes(one), set(vars(one))) for one in module.modules()]
    try:
        yield
    finally:
        _put_buffers_back(owners, values)
        for one, kept, names in attributes:
            _put_attributes_back(vars(one), kept, names)


def buffer_places(module: nn.Module) -> Iterator[tuple[dict[str, Tensor | None], str, Tensor, str]]:
    """(owner's buffers, key, buffer, name); one that several modules share has one name, as in ``named_buffers``."""
    names: dict[int, str] = {}
    for prefix, owner in module.named_modules():
        for key, buffer in list(buffers_of(owner).items()):
            if buffer is not None:
                name = names.setdefault(id(buffer), f"{prefix}.{key}" if prefix else key)
                yield buffers_of(owner), key, buffer, name


def _put_buffers_back(
    owners: Sequence[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]], values: Sequence[tuple[Tensor, Tensor]]
) -> None:
    """``owners``: a module's buffers, and which they were; ``values``: buffers, and what they held."""
    for owner, kept in owners:
        if list(owner) != list(kept) or any(owner[key] is not buffer for key, buffer in kept.items()):
            owner.clear()
            owner.update(kept)
    with torch.no_grad():
        for buffer, value in values:
            if buffer.shape == value.shape:
                buffer.copy_(value)
            else:  # resized in place
                buffer.data = value


def set_buffers(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """In place, but where the step has put a tensor of another shape or dtype there: by a new one."""
    made: dict[str, Tensor] = {}
    with torch.no_grad():
        for owner, key, buffer, name in list(buffer_places(module)):
            value = values.get(name)
            if value is None:
                continue
            if (buffer.shape, buffer.dtype) == (value.shape, value.dtype):
                buffer.copy_(value)
            else:
                owner[key] = made.setdefault(name, value.to(buffer.device, copy=True))


_PLAIN = frozenset({int, float, bool, str, type(None)})


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_is_plain, value)))


def _put_attributes_back(attributes: MutableMapping[str, Any], kept: Mapping[str, Any], names: set[str]) -> None:
    """``names``: of all attributes that there were; what is new came from the rerun."""
    for name in [one for one in attributes if one not in names]:
        del attributes[name]
    for name, value in kept.items():
        if attributes.get(name, _put_attributes_back) is not value:
            attributes[name] = value
