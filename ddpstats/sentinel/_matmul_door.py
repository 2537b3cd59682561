"""The only module of the sentinel that touches torch internals: it shows every matrix product of this process.

Whatever multiplies matrices in torch (``@``, ``torch.matmul``, ``einsum``, ``nn.Linear``, attention written out), in
the forward or the backward pass, in any thread, under autocast, in inference mode, comes down to one of four operators
of aten: ``mm``, ``addmm``, ``bmm``, ``baddbmm``. While somebody listens, each of them, and its variant with ``out=``,
has a kernel of ours at the dispatch key BackendSelect. That is tried below autograd and before the kernels of all
devices, and aten leaves it empty for these operators, so nothing is overridden and removing ours restores everything.
No other operator pays. Our kernel

1. hands the operator on to the kernel of the tensors' device, which computes what it always computes;
2. shows the listener the arguments and the result as a `Product`. What the listener multiplies itself is not shown.

Not seen: products inside fused kernels (``scaled_dot_product_attention``, ``_native_multi_head_attention``,
convolutions, recurrent networks), matrix times vector (``mv``, ``dot``), the variants in place (``addmm_``, which lose
an operand) and with ``out_dtype``, tensors that are sparse or quantized, integers and complex numbers, and a CUDA graph
while it is captured or replayed.

Checked on torch 2.13, CPU. On another torch `install` tries a product of two rows, and refuses a torch that does not
show it (``ConfigError``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddpstats._intercept import hide_from_dynamo
from ddpstats.errors import ConfigError

CHECKED_ON = "2.13"

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Product(NamedTuple):
    """One finished matrix product: ``result`` is alpha * left @ right + beta * addend.

    Attributes:
        op: "mm", "addmm", "bmm" or "baddbmm".
        result, left, right: the program's own tensors, (m, n), (m, k) and (k, n); of bmm and baddbmm a batch of them.
        addend: anything that broadcasts to ``result``; None where nothing is added.
        again: computes the result once more, by the same kernel, into a tensor of its own.
    """

    op: str
    result: Tensor
    left: Tensor
    right: Tensor
    addend: Tensor | None
    beta: float
    alpha: float
    again: Callable[[], Tensor]


Listener = Callable[[Product], None]
"""Called in the thread that multiplies, below autograd. Must change no tensor. What it raises, the program gets."""

_listener: Listener | None = None
_library: Any = None


class _Here(threading.local):
    listening = False  # this thread is inside the listener


_here = _Here()


def install(listener: Listener) -> None:
    """Show ``listener`` all products of this process from now on. Raises ``ConfigError`` on a torch that hides them."""
    global _listener, _library
    assert _library is None
    _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # see `uninstall`
    try:
        for op in ("mm", "addmm", "bmm", "baddbmm"):
            for name, overload in ((op, "default"), (f"{op}.out", "out")):
                _library.impl(name, _kernel(op, overload), "BackendSelect", with_keyset=True)
        if not torch.__version__.startswith(CHECKED_ON + ".") and not _sees_a_product():
            raise ConfigError(
                f"torch {torch.__version__} does not show its matrix products to the sentinel, which was checked on "
                f"torch {CHECKED_ON}. Install that version, or run without the matmul checksum."
            )
    except BaseException:
        uninstall()
        raise
    _listener = listener


def uninstall() -> None:
    """Restore everything. Products under way in other threads may still be shown. Idempotent."""
    global _listener, _library
    _listener = None
    if _library is not None:
        _library._destroy()
        _library = None


def is_installed() -> bool:
    return _library is not None


def in_backward() -> bool:
    """Whether this thread is inside a backward pass of autograd."""
    return _graph_task() != -1


_graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def _sees_a_product() -> bool:
    global _listener
    seen: list[Product] = []
    _listener = seen.append
    ones = torch.ones(2, 2, device="cpu")
    torch.mm(ones, ones)
    return len(seen) == 1


def _kernel(op: str, overload: str) -> Callable[..., Any]:
    packet = getattr(torch.ops.aten, op)
    redispatch = getattr(packet, overload)._handle.redispatch_boxed
    functional = packet.default._handle.redispatch_boxed
    below: Any = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        keys = keys & below
        result = redispatch(keys, *args, **kwargs)
        listener = _listener
        if listener is None or _here.listening:
            return result
        out = kwargs.pop("out", None)
        product = _product(op, lambda: functional(keys, *args, **kwargs), result, args, out=out, **kwargs)
        if product is not None:
            _show(listener, product)
        return result

    hide_from_dynamo(kernel)
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
    *,
    out: Tensor | None,
    beta: float = 1.0,
    alpha: float = 1.0,
) -> Product | None:
    """None where the operands cannot be checked."""
    *added, left, right = args
    addend = added[0] if added and beta != 0 else None
    if not all(map(_is_plain, (result, left, right, *added))) or not result.dtype == left.dtype == right.dtype:
        return None
    if result.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # a check reads the device, which a capture does not survive
    if out is not None and addend is not None and _share_memory(out, addend):
        return None  # the addend may be overwritten
    return Product(op, result, left, right, addend, beta, alpha, again)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.dtype in DTYPES and not tensor.is_meta


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
