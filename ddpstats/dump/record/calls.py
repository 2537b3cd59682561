"""Calls: `RecordedCall` records one of a module or a function, and `CallWatch` those of torch's functions.

`CallWatch` sees the outermost calls that the program makes in Python:

1. A ``TorchFunctionMode`` is asked about every call. Getters, questions such as ``size`` and functions that return no
   tensor have no entry.
2. ``torch.autograd.backward`` would run without the mode, because it is itself a function that modes are asked about.
   The engine is therefore called with the mode on, so that what hooks call, and what activation checkpointing runs once
   more, is seen.

Not seen: what C++ calls by itself, ``torch.autograd.Function.apply``, what is traced (``torch.compile``, export,
``torch.jit.trace``), and other threads than the one that started the dump.

Modes are a stack, and leaving one takes off what is on top. A mode of the program that was entered before `start` and
is left before `stop` takes ours off in its place: it stays, and nothing more is seen. `stop` takes it off.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ddpstats._base.caches import EmptiedCache
from ddpstats._observe.torch_compat import (
    NN_FUNCTIONS,
    OPERATOR_CLASSES,
    TENSOR_METHODS,
    engine_under,
    function_modes,
    is_tracing,
    library_of,
)
from ddpstats.dump.msprobe import forward_name
from ddpstats.dump.record.backward import InputEdges, watch_backward
from ddpstats.dump.record.leaves import tensors_in
from ddpstats.dump.record.recorder import OpenEntry, Recorder


class RecordedCall:
    """A call that is about to run, of a module with its own parameters or of a function."""

    def __init__(
        self, recorder: Recorder, name: str, args: Any, kwargs: Any, parameters: Mapping[str, Tensor] | None = None
    ) -> None:
        self._recorder, self.name = recorder, name
        self._entry: OpenEntry | None = None
        self._before: InputEdges | None = None
        with recorder.safely(name):
            if torch.is_grad_enabled() and recorder.wants_backward:
                self._before = InputEdges(tensors_in([args, list(kwargs.values())]))
            self._entry = recorder.begin(name, args, kwargs, parameters)

    def end(self, result: Any) -> None:
        """Record what the call has returned, and watch its backward pass."""
        recorder = self._recorder
        if self._entry is not None:
            with recorder.safely(self.name):
                recorder.end(self._entry, result)
                if self._before is not None:
                    watch_backward(recorder, self._entry, self._before, result)

    def fail(self, error: BaseException) -> None:
        """Record that the call has raised."""
        if self._entry is not None:
            with self._recorder.safely(self.name):
                self._recorder.fail(self._entry, error)


# -- functions of torch -----------------------------------------------------------------------------------------------

# Questions, conversions to Python, and what changes no value.
_SKIPPED = frozenset((
    "__get__", "__set__", "__delete__", "__repr__", "__str__", "__format__", "__len__", "__bool__", "__int__",
    "__float__", "__index__", "__complex__", "__contains__", "__hash__", "__dir__", "__iter__", "__reduce_ex__",
    "__reduce__", "__setstate__", "__deepcopy__", "__array__", "__dlpack__", "__dlpack_device__",
    "__torch_dispatch__", "size", "dim", "ndimension", "stride", "numel", "nelement", "element_size",
    "storage_offset", "data_ptr", "storage", "untyped_storage", "is_contiguous", "is_floating_point", "is_complex",
    "is_signed", "is_pinned", "is_shared", "is_inference", "is_set_to", "is_same_size", "is_conj", "is_neg",
    "is_coalesced", "is_nonzero", "is_distributed", "get_device", "backward", "requires_grad_", "retain_grad",
    "register_hook", "register_post_accumulate_grad_hook", "share_memory_", "item", "tolist", "numpy", "pin_memory",
    "record_stream", "_set_grad_enabled", "_is_zerotensor", "_version", "_typed_storage", "dense_dim", "sparse_dim",
    "_nnz", "result_type", "can_cast", "equal", "allclose", "has_names", "rename_", "align_to",
    "_make_subclass", "detach_", "dim_order", "names", "refine_names",
    "is_storage", "is_tensor", "get_default_dtype", "set_printoptions", "manual_seed", "seed", "initial_seed",
    "get_rng_state", "set_rng_state", "broadcast_shapes", "grad",
))  # fmt: skip


_TORCH_LIBRARIES = ("", "aten", "prims")
_names: EmptiedCache[Any, str] = EmptiedCache(4096)  # by function, of which a program may make ever more


def _name_of(func: Any) -> str:
    name = _names.get(func)
    return _names.keep(func, _find_name(func)) if name is None else name


def _find_name(func: Any) -> str:
    """Return ``Functional.linear``; an empty string for what is of no interest."""
    name = getattr(func, "__name__", None) or type(func).__name__
    if name in _SKIPPED:
        return ""
    if isinstance(func, OPERATOR_CLASSES):
        library = library_of(func)
        return f"Aten.{'' if library in _TORCH_LIBRARIES else f'{library}.'}{name.partition('.')[0]}"
    owner = getattr(func, "__objclass__", None)
    module = getattr(func, "__module__", None) or ""
    if (isinstance(owner, type) and issubclass(Tensor, owner)) or module == TENSOR_METHODS:
        return f"Tensor.{name}"
    # conv2d and others of torch.nn.functional are torch's own; other tools count them as what modules call them by
    is_functional = module in ("torch.nn.functional", NN_FUNCTIONS) or getattr(functional, name, None) is func
    return f"Functional.{name}" if is_functional else f"Torch.{name}"


class CallWatch(TorchFunctionMode):
    """Records calls between `start` and `stop`, in the thread that called `start`."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._is_on = False
        self._thread = threading.get_ident()
        self._below: list[Any] = []  # the modes that were on when this one was entered

    def start(self) -> None:
        self._below = function_modes()
        self.__enter__()  # type: ignore[no-untyped-call]
        self._is_on = True

    def stop(self) -> None:
        """Idempotent. A mode that the program entered later, and has not left, stays.

        In another thread than that of `start`, whose modes are out of reach, ours stays there and does nothing more.
        """
        was_on, self._is_on = self._is_on, False
        if not was_on or threading.get_ident() != self._thread or _take_off(self):
            return
        left = [mode for mode in self._below if mode in function_modes()]
        if left:
            _take_off(left[-1])
            self._recorder.note(
                "calls",
                f"{type(left[-1]).__name__} was entered before the dump was started, and left before it was stopped: "
                "calls after that are missing. Start and stop on the same side of it.",
            )

    forget = stop  # in a process that was forked from the one that records

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_on or is_tracing():
            return func(*args, **kwargs)
        try:
            name = _name_of(func)
        except Exception:  # an object that a program calls may have no hash
            name = ""
        if not name:
            return self._run_skipped(func, args, kwargs)
        call = RecordedCall(self._recorder, forward_name(name, self._recorder.next_number(name)), args, kwargs)
        try:
            result = func(*args, **kwargs)
        except BaseException as error:
            call.fail(error)
            raise
        writes = result is None and args and name.endswith("_")  # x.add_(y), x[0] = y
        output = args[0] if writes else result
        with self._recorder.safely(name):
            if any(isinstance(part, Tensor) for part in tensors_in(output)):
                call.end(output)
        return result

    def _run_skipped(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is Tensor.backward:  # it would call the other one without this mode
            func, kwargs = torch.autograd.backward, dict(kwargs, grad_tensors=kwargs.get("gradient"))
            kwargs.pop("gradient", None)
        if func is torch.autograd.backward or func is torch.autograd.grad:
            func = engine_under(self, func)
        return func(*args, **kwargs)


def _take_off(mode: Any) -> bool:
    """Take a mode off this thread's stack, wherever in it. Return whether it was there."""
    modes = function_modes()
    if mode not in modes:
        return False
    inner = modes[modes.index(mode) + 1 :]
    for _ in (mode, *inner):
        TorchFunctionMode.__exit__(mode, None, None, None)  # type: ignore[no-untyped-call]
    for inner_mode in inner:
        TorchFunctionMode.__enter__(inner_mode)  # type: ignore[no-untyped-call]
    return True
