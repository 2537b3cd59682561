"""Every matrix product of this process, shown to a listener.

Whatever multiplies matrices in torch (``@``, ``torch.matmul``, ``einsum``, ``nn.Linear``, attention written out), in
the forward or the backward pass, in any thread, under autocast, in inference mode, comes down to one of four operators
of aten: ``mm``, ``addmm``, ``bmm``, ``baddbmm``. While somebody listens, each of them, and its variant with ``out=``,
has a kernel of ours at the dispatch key BackendSelect. That is tried below autograd and before the kernels of all
devices, and aten leaves it empty for these operators, so nothing is overridden and removing ours restores everything.
No other operator pays. Our kernel

1. hands the operator on to the kernel of the tensors' device, which computes what it always computes;
2. shows the listener the arguments and the result as a `Product`. What the listener multiplies itself is not shown.

A kernel may not be taken away while another thread is about to enter it, and torch does not say when (`Kernels`). So
`uninstall` only stops the listening: our kernels stay parked, hand on, and cost each product some microseconds, until
`tidy` finds them parked for 5 seconds and removes them. `install` takes parked kernels into use again. A forked child
has parked kernels and no listener.

Not seen: products inside fused kernels (``scaled_dot_product_attention``, ``_native_multi_head_attention``,
convolutions, recurrent networks), matrix times vector (``mv``, ``dot``), the variants in place (``addmm_``, which lose
an operand) and with ``out_dtype``, results written over an operand or into its storage (``out=``), tensors that are
sparse, nested or quantized, integers and complex numbers, what ``alpha=0`` leaves out, and a CUDA graph while it is
captured or replayed.

`install` tries a product of two rows, and refuses a torch that does not show it (``ConfigError``). Run on torch 2.13,
CPU. Where torch does not tell which kernels it uses, `tidy` removes nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddpstats._observe.torch_compat import (
    Kernels,
    kernel_at,
    keys_below,
    next_kernel,
    no_dispatch_no_grad,
    unseen,
    version_of,
)
from ddpstats.errors import ConfigError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Product(NamedTuple):
    """One finished matrix product: ``result`` is alpha * left @ right + beta * addend.

    Attributes:
        op: "mm", "addmm", "bmm" or "baddbmm".
        result, left, right: the program's own tensors, (m, n), (m, k) and (k, n); of bmm and baddbmm a batch of them.
        addend: anything that broadcasts to ``result``; None where nothing is added.
        again: computes the result once more, by the same kernel, into a tensor of its own.
        versions: of the result (after the product) and the operands (before it); None of tensors without versions.
    """

    op: str
    result: Tensor
    left: Tensor
    right: Tensor
    addend: Tensor | None
    beta: float
    alpha: float
    again: Callable[[], Tensor]
    versions: tuple[int, ...] | None = None

    def was_changed(self) -> bool:
        """Another thread has written into a tensor of the product since: its elements say nothing any more."""
        operands = [self.left, self.right] if self.addend is None else [self.addend, self.left, self.right]
        return self.versions is not None and _versions((self.result, *operands)) != self.versions


Listener = Callable[[Product], None]
"""Called in the thread that multiplies, below autograd. Must change no tensor. What it raises, the program gets."""

_OPS = ("mm", "addmm", "bmm", "baddbmm")
_PARKED_SEC = 5.0

_listener: Listener | None = None
_kernels: Kernels | None = None
_parked_at_sec: float | None = None  # since when nobody listens, while our kernels are there


class _InThisThread(threading.local):
    listening = False  # this thread is inside the listener


_here = _InThisThread()


def install(listener: Listener) -> None:
    """Show ``listener`` all products of this process from now on. Raises ``ConfigError`` on a torch that hides them."""
    global _listener, _kernels, _parked_at_sec
    assert _listener is None
    if _kernels is None:
        ours = {op: _kernel(op, "default") for op in _OPS} | {f"{op}.out": _kernel(op, "out") for op in _OPS}
        _kernels, _parked_at_sec = Kernels("aten", "BackendSelect", ours, with_keys=True), time.monotonic()
    why = unseen(_sees_a_product)
    if why is not None:
        uninstall()
        raise ConfigError(
            f"torch {torch.__version__} does not show its matrix products to the sentinel ({why}). It was checked "
            "on torch 2.13: install that version, or run without the matmul checksum."
        )
    _listener, _parked_at_sec = listener, None


def uninstall() -> None:
    """Park: nobody listens any more. Products under way in other threads may still be shown. Idempotent."""
    global _listener, _parked_at_sec
    if _kernels is not None and _parked_at_sec is None:
        _parked_at_sec = time.monotonic()
    _listener = None


def tidy() -> None:
    """Remove our kernels where they have been parked for 5 seconds. Restores everything."""
    global _kernels, _parked_at_sec
    is_due = _parked_at_sec is not None and time.monotonic() - _parked_at_sec >= _PARKED_SEC
    if is_due and kernel_at is not None and _kernels is not None:
        _kernels.remove()
        _kernels = _parked_at_sec = None


def _after_fork() -> None:
    global _here
    uninstall()
    _here = _InThisThread()


os.register_at_fork(after_in_child=_after_fork)


def _sees_a_product() -> bool:
    global _listener
    seen: list[Product] = []
    _listener = seen.append
    try:
        with no_dispatch_no_grad():
            ones = torch.ones(2, 2, device="cpu")
            torch.mm(ones, ones)
    finally:
        _listener = None
    return len(seen) >= 1  # other threads multiply, too


def _kernel(op: str, overload: str) -> Callable[..., Any]:
    packet = getattr(torch.ops.aten, op)
    redispatch, functional = next_kernel(getattr(packet, overload)), next_kernel(packet.default)
    below = keys_below("BackendSelect")

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        keys = keys & below
        listener = _listener
        if listener is None or _here.listening:
            return redispatch(keys, *args, **kwargs)
        versions = _versions(args)
        result = redispatch(keys, *args, **kwargs)
        out = kwargs.pop("out", None)
        product = _product(op, lambda: functional(keys, *args, **kwargs), result, args, versions, out=out, **kwargs)
        if product is not None:
            _show(listener, product)
        return result

    return kernel


def _show(listener: Listener, product: Product) -> None:
    _here.listening = True
    try:
        listener(product)
    finally:
        _here.listening = False


def _product(
    op: str,
    again: Callable[[], Tensor],
    result: Tensor,
    args: tuple[Tensor, ...],
    versions: tuple[int, ...] | None,
    *,
    out: Tensor | None,
    beta: float = 1.0,
    alpha: float = 1.0,
) -> Product | None:
    """None where the operands cannot be checked, or nothing is multiplied."""
    *added, left, right = args
    addend = added[0] if added and beta != 0 else None
    if not all(map(_is_plain, (result, left, right, *added))) or not result.dtype == left.dtype == right.dtype:
        return None
    if alpha == 0 or left.shape[-1] == 0:
        return None
    if result.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # a check reads the device, which a capture does not survive
    if out is not None and any(_share_memory(out, one) for one in args):
        return None  # an operand may be overwritten
    of_result = _versions((result,))
    if versions is not None and of_result is not None:
        versions = of_result + versions[-3 if addend is not None else -2 :]
    return Product(op, result, left, right, addend, beta, alpha, again, versions if of_result is not None else None)


def _is_plain(tensor: Tensor) -> bool:
    plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
    return plain and tensor.dtype in DTYPES


def _versions(tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    """None where a tensor has no version: one of inference mode."""
    if any(tensor.is_inference() for tensor in tensors):
        return None
    return tuple(map(version_of, tensors))


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
