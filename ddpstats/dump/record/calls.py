"""Calls of torch's functions, as the program makes them: the outermost ones that are written in Python.

1. A ``TorchFunctionMode`` is asked about every call. What it is, and whether it is of interest, is found out once for
   each function (`Fact`): getters, questions such as ``size`` and functions that return no tensor are not.
2. What goes in and comes out of it, and its backward pass, are taken by `ForwardPass`.

``torch.autograd.backward`` would run without the mode, because it is itself a function that modes are asked about. The
engine is therefore called with the mode on, so that a forward pass that is run once more by activation checkpointing is
seen, and marked.

Not seen: what C++ calls by itself, ``torch.autograd.Function.apply``, what is traced (``torch.compile``, export,
``torch.jit.trace``), and other threads than the one that started the dump.

Modes are a stack, and who leaves takes what is on top. A mode of the program that was entered before `start` and is
left before `stop` takes ours for its own: it stays, and nothing more is seen. `stop` takes it off in its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ddpstats._observe.torch_compat import (
    NN_FUNCTIONS,
    OPERATOR_CLASSES,
    TENSOR_METHODS,
    function_modes,
    is_tracing,
    with_engine,
)
from ddpstats.dump.record.arguments import tensors_in
from ddpstats.dump.record.forward import ForwardPass
from ddpstats.dump.record.recorder import Recorder

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
    "get_rng_state", "set_rng_state", "broadcast_shapes",
))  # fmt: skip
"""Questions, conversions to Python, and what changes no value."""

_WRITING_DUNDERS = frozenset((
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ifloordiv__", "__imod__",
    "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
))  # fmt: skip


class Fact:
    """What is known of a function.

    Attributes:
        what: ``Functional.linear``.
        is_skipped: it is of no interest.
        is_backward: it runs a backward pass.
        may_be_silent: who sees it return no tensor knows that it never does.
        writes: it changes its first argument.
    """

    __slots__ = ("is_backward", "is_skipped", "may_be_silent", "what", "writes")

    def __init__(self, func: Any) -> None:
        name = getattr(func, "__name__", None) or type(func).__name__
        prefix = _prefix(func)
        if prefix == "Aten":
            name = name.partition(".")[0]
        self.what = f"{prefix}.{name}"
        self.is_skipped = name in _SKIPPED
        self.is_backward = False
        # `x == None` is False, and `x == y` a tensor; `x.type()` is a name, and `x.type(torch.half)` a tensor
        self.may_be_silent = not name.startswith("__") and name != "type"
        self.writes = name in _WRITING_DUNDERS or (name.endswith("_") and not name.endswith("__"))


def _prefix(func: Any) -> str:
    if isinstance(func, OPERATOR_CLASSES):
        return "Aten"
    owner = getattr(func, "__objclass__", None)
    module = getattr(func, "__module__", None) or ""
    if (isinstance(owner, type) and issubclass(Tensor, owner)) or module == TENSOR_METHODS:
        return "Tensor"
    # conv2d and others of torch.nn.functional are torch's own; other tools count them as what modules call them by
    name = getattr(func, "__name__", "")
    is_functional = module in ("torch.nn.functional", NN_FUNCTIONS) or getattr(functional, name, None) is func
    return "Functional" if is_functional else "Torch"


facts: dict[Any, Fact] = {}


def fact_of(func: Any) -> Fact | None:
    """None of what cannot even be named."""
    try:
        found = facts.get(func)
        if found is None:
            found = facts[func] = Fact(func)
        return found
    except Exception:  # an object that a program calls may have no hash
        try:
            return Fact(func)
        except Exception:
            return None


# -- a call ------------------------------------------------------------------------------------------------------------


_TELLS_NOTHING = (type(None), type(NotImplemented), list, tuple)


class CallWatch(TorchFunctionMode):
    """Records calls between `start` and `stop`, in the thread that called `start`."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._is_on = False
        self._thread = -1
        self._below: list[Any] = []

    def start(self) -> None:
        self._thread = threading.get_ident()
        self._below = function_modes()
        self.__enter__()  # type: ignore[no-untyped-call]
        self._is_on = True

    def stop(self) -> bool:
        """Idempotent. A mode that the program entered later, and has not left, stays.

        Returns whether that is all: False in another thread than that of `start`, whose modes are out of reach. There
        the mode does nothing more, and goes with the next `stop` in its own thread.
        """
        self._is_on = False
        if self._thread == -1:
            return True
        if threading.get_ident() != self._thread:
            return False
        below, self._below = self._below, []
        if not _take_off(self):
            self._repair(below)
        self._thread = -1
        return True

    def forget(self) -> None:
        """In a process that was forked from the one that collects."""
        self._is_on, self._thread = False, -1
        _take_off(self)

    def _repair(self, below: list[Any]) -> None:
        """Somebody has taken ours off in place of his own."""
        left = [mode for mode in below if mode in function_modes()]
        if not left:
            return
        _take_off(left[-1])
        self._recorder.note(
            "calls",
            f"{type(left[-1]).__name__} was entered before the dump was started, and left before it was stopped: calls "
            "after that are missing. Start and stop on the same side of it.",
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_on or is_tracing():
            return func(*args, **kwargs)
        fact = fact_of(func)
        if fact is None or fact.is_skipped or fact.what in self._recorder.silent:
            backward = _BACKWARD.get(func) if fact is not None and fact.is_backward else None
            return func(*args, **kwargs) if backward is None else backward(self, args, kwargs)
        if not self._recorder.is_active:
            return func(*args, **kwargs)
        number = self._recorder.number(fact.what)
        call = ForwardPass(self._recorder, f"{fact.what}.{number}.forward", self._recorder.parents)
        call.begins(args, kwargs)
        try:
            result = func(*args, **kwargs)
        except BaseException as error:
            call.fails(error)
            raise
        if call.is_seen:
            self._ended(call, fact, args, result)
        return result

    def _ended(self, call: ForwardPass, fact: Fact, args: Any, result: Any) -> None:
        if fact.writes and result is None and args:
            result = args[0]
        try:
            if any(isinstance(one, Tensor) for one in tensors_in(result)):
                call.ends(result)
            elif fact.may_be_silent and not isinstance(result, _TELLS_NOTHING):
                self._recorder.silent.add(fact.what)
        except Exception as error:
            self._recorder.note_error(call.name, error)


def _take_off(mode: Any) -> bool:
    """Take a mode off this thread's stack, wherever in it. Return whether it was there."""
    modes = function_modes()
    if mode not in modes:
        return False
    inner = modes[modes.index(mode) + 1 :]
    for _ in (mode, *inner):
        TorchFunctionMode.__exit__(mode, None, None, None)  # type: ignore[no-untyped-call]
    for other in inner:
        TorchFunctionMode.__enter__(other)  # type: ignore[no-untyped-call]
    return True


# -- backward passes, with the mode on --------------------------------------------------------------------------------


def _engine_under(mode: CallWatch, engine: Callable[..., Any]) -> Callable[..., Any]:
    """Autograd's engine, run under ``mode``."""

    def run(*args: Any, **kwargs: Any) -> Any:
        recorder = mode._recorder
        before, recorder.creates_graph = recorder.creates_graph, bool(args[3:4] and args[3])
        try:
            mode.__enter__()  # type: ignore[no-untyped-call]
            return engine(*args, **kwargs)
        finally:
            _take_off(mode)
            recorder.creates_graph = before

    return run


_backward, _grad = with_engine(torch.autograd.backward, _engine_under), with_engine(torch.autograd.grad, _engine_under)


def _tensor_backward(mode: CallWatch, args: Any, kwargs: Any) -> Any:
    assert _backward is not None
    return _backward(mode, *_as_autograd_takes(*args, **kwargs))


def _as_autograd_takes(
    tensor: Any, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> tuple[Any, Any]:
    return (tensor, gradient, retain_graph, create_graph), {"inputs": inputs}


_BACKWARD: dict[Any, Callable[[CallWatch, Any, Any], Any]] = {}
if _backward is not None:
    _BACKWARD |= {torch.autograd.backward: _backward, Tensor.backward: _tensor_backward}
if _grad is not None:
    _BACKWARD |= {torch.autograd.grad: _grad}
for _function in (torch.autograd.backward, torch.autograd.grad):
    facts[_function] = Fact(_function)
    facts[_function].is_skipped = True
for _function in _BACKWARD:
    facts.setdefault(_function, Fact(_function)).is_backward = True
