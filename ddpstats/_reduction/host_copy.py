"""One copy to the host for all tensors of a tree that live on accelerators, without waiting for it.

Tensors are concatenated on their device per dtype, widened to float64 there, and copied as one piece per device into
pinned memory. An event marks its end, so that the caller's thread goes on and the worker waits. Checked on CPU only so
far: the grouping and splitting run in the tests, streams and pinned memory need a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from ddpstats._reduction.markers import Marker, Mean


class HostCopy:
    """A copy on its way. Made by `start_if_needed`, ended by `wait`."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._pieces = [_Piece(device, tensors) for device in dict.fromkeys(tensor.device for tensor in tensors)]

    @classmethod
    def start_if_needed(cls, leaves: list[Any], weight: Any) -> HostCopy | None:
        """Start copying what is not in host memory; None if everything is."""
        tensors = [value for value in (*leaves, weight) if isinstance(value, torch.Tensor)]
        for marker in [value for value in leaves if isinstance(value, Marker)]:
            tensors += [
                part for part in (marker.value, getattr(marker, "weight", None)) if isinstance(part, torch.Tensor)
            ]
        away = [tensor for tensor in tensors if _is_away(tensor)]
        return cls(away) if away else None

    def wait(self, leaves: list[Any], weight: Any) -> tuple[list[Any], Any]:
        """``leaves`` and ``weight`` with every tensor that was away replaced by its float64 copy in host memory."""
        copies: dict[int, torch.Tensor] = {}
        for piece in self._pieces:
            copies.update(piece.wait())
        return [_replaced(value, copies) for value in leaves], _replaced(weight, copies)


class _Piece:
    """The tensors of one device, as one float64 vector."""

    def __init__(self, device: torch.device, tensors: list[torch.Tensor]) -> None:
        mine = [tensor for tensor in tensors if tensor.device == device]
        by_dtype = {dtype: [t for t in mine if t.dtype == dtype] for dtype in dict.fromkeys(t.dtype for t in mine)}
        wide = torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
        vector = torch.cat([torch.cat([t.detach().reshape(-1) for t in group]).to(wide) for group in by_dtype.values()])
        self._order = [tensor for group in by_dtype.values() for tensor in group]
        self._event: Any = None
        if device.type == "cuda":
            self._host = torch.empty(vector.shape, dtype=wide, pin_memory=True, device="cpu")
            self._host.copy_(vector, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))
        else:
            self._host = vector.cpu()

    def wait(self) -> dict[int, torch.Tensor]:
        """id of the tensor -> its copy, in its shape."""
        if self._event is not None:
            self._event.synchronize()
        parts = torch.split(self._host.to(torch.float64), [tensor.numel() for tensor in self._order])
        return {id(t): part.reshape(t.shape) for t, part in zip(self._order, parts, strict=True)}


def _is_away(tensor: torch.Tensor) -> bool:
    # Complex, meta and DTensor values are refused later, one by one and with their path.
    return not tensor.is_cpu and not tensor.is_complex() and not tensor.is_meta and not hasattr(tensor, "placements")


def _replaced(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, Mean):
        return Mean(copies.get(id(value.value), value.value), copies.get(id(value.weight), value.weight))
    if isinstance(value, Marker):
        return type(value)(copies.get(id(value.value), value.value))
    return copies.get(id(value), value)
