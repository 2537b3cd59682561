"""torch's private names, each once: what it is for, how it is found, what is lost where a torch has no such name.

`find` looks for a name when this file is imported; versions are never compared. `lacking` returns the names that this
torch has not; a comment at each says what that costs. Names for process groups and DDP are in `groups`, in the same
way. What other files import from here are functions and values that work either way. Names that are read off an object
later (of a process group, a node, a module) are looked for there.

Two files below this room may not import it and have their own names: `ddpstats._base.lazy`, which is used before
torch is imported, and `ddpstats._ranks.gloo`. Anywhere else a test refuses them. C functions are bound here
once, so that a caller on a hot path pays for no other call.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ddpstats._base.lazy import DYNAMO
from ddpstats.errors import ConfigError

_lacking: list[str] = []


def lacking() -> list[str]:
    """Return the private names that this torch does not have, of those that have been looked for."""
    return list(_lacking)


def note_lack(path: str) -> None:
    """Note that this torch has nothing at ``path``."""
    if path not in _lacking:
        _lacking.append(path)


def find(path: str, default: Any = None) -> Any:
    """Return what torch has at ``path``; ``default`` where there is no such thing."""
    value: Any = torch
    for name in path.split("."):
        value = getattr(value, name, None)
        if value is None:
            note_lack(f"torch.{path}")
            return default
    return value


def attribute(kind: str, name: str, default: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return what reads attribute ``name`` of objects of a class of torch's; ``default`` where that class has none."""
    return default if find(f"{kind}.{name}") is None else attrgetter(name)


def refuse(need: str) -> NoReturn:
    """Raise `ConfigError` on a torch without what ddpstats cannot do without."""
    raise ConfigError(f"torch {torch.__version__} cannot do what ddpstats needs here: {need}")


# -- the dispatcher ---------------------------------------------------------------------------------------------------

# Takes the kernels of a `torch.library.Library` away at a moment that we choose. Without it no kernel is registered: no
# collective and no product is observed.
_destroy = find("library.Library._destroy")


def open_library(namespace: str) -> Any:
    """Return a library whose kernels `close_library` can take away. Raises `ConfigError` where it could not."""
    if _destroy is None:
        refuse("kernels for operators of torch could not be taken away again")
    return torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]


def close_library(library: Any) -> None:
    """Take its kernels away."""
    _destroy(library)


# Without it a collective of torch that the guard does not know is not noticed.
_all_operators = find("_C._dispatch_get_all_op_names", list)


def operator_names(namespace: str) -> set[str]:
    """Return the operators of ``namespace``, without their overloads."""
    prefix = namespace + "::"
    return {name.removeprefix(prefix) for name in _all_operators() if name.startswith(prefix) and "." not in name}


def schema(operator: Any) -> Any:
    """Return the signature of an operator's overload; without ``_schema`` no arguments can be read."""
    return operator._schema


def next_kernel(operator: Any) -> Callable[..., Any]:
    """Return what runs an operator's overload from the dispatch keys that are its first argument, without the GIL.

    ``_handle`` saves each call a Python frame. Without it the overload's own method does the same.
    """
    handle = getattr(operator, "_handle", None)
    redispatch: Callable[..., Any] = getattr(handle, "redispatch_boxed", operator.redispatch)
    return redispatch


# How a device's kernels are found when an operator goes on below ours. Without the first two no collective and no
# product is observed, without the next two none on an accelerator or of sparse tensors, without the last no product.
_DispatchKeySet, _DispatchKey = find("_C.DispatchKeySet"), find("_C.DispatchKey")
_parse_key, _key_name = find("_C._parse_dispatch_key"), find("_C._dispatch_key_for_device")
_keys_after = find("_C._dispatch_keyset_full_after")


def keys_of_device(device: str, is_sparse: bool) -> Any:
    """Return the dispatch keys at which an operator reaches a kind of device's kernels. Raises `ConfigError`."""
    if _DispatchKeySet is None or _DispatchKey is None:
        refuse("the dispatch keys of torch have other names")
    if _parse_key is not None and _key_name is not None:
        return _DispatchKeySet(_parse_key(("Sparse" if is_sparse else "") + _key_name(device)))
    if device == "cpu" and not is_sparse:
        return _DispatchKeySet(_DispatchKey.CPU)
    return refuse(f"the dispatch key of {device} has another name")


def keys_below(key: str) -> Any:
    """Return all dispatch keys that come after ``key``. Raises `ConfigError`."""
    if _keys_after is None or _DispatchKey is None:
        refuse("the order of the dispatch keys is not known")
    return _keys_after(getattr(_DispatchKey, key))


# The kernel that an operator has at a key now: to keep it while a thread may still enter it, and to call it. Without it
# kernels that were parked are not taken away, and bits of matrix products cannot be flipped.
kernel_at: Callable[[str, str], Any] | None = find("_C._dispatch_get_computed_kernel_for_dispatch_key")

# The classes of operators below torch's functions, and the modules that functions written in C say they are of. Without
# them operators are named as functions are in a dump.
OPERATOR_CLASSES: tuple[Any, ...] = tuple(filter(None, (find("_ops.OpOverload"), find("_ops.OpOverloadPacket"))))
TENSOR_METHODS = "torch._tensor"
NN_FUNCTIONS = "torch._C._nn"


# -- compiled programs ------------------------------------------------------------------------------------------------

# Without it users of torch.compile see warnings of graph breaks in our functions.
_eval_frame = find("_C._dynamo.eval_frame")


def hide_from_dynamo(function: Any) -> None:
    """Keep Dynamo from compiling our function where it comes between two graphs of a compiled program.

    Where it traces a call that we replaced (`torch.compiler.is_compiling`), it must see what it would see without us.
    """
    try:
        skip = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)
        _eval_frame.set_code_exec_strategy(function.__code__, skip)
    except AttributeError:
        note_lack("torch._C._dynamo.eval_frame.set_code_exec_strategy")


def compiled_call(module: nn.Module) -> Any:
    """Return what ``module.compile()`` made of its forward pass; without the name it counts as not compiled."""
    return getattr(module, "_compiled_call_impl", None)


def without_compile(module: nn.Module) -> nn.Module:
    """Return the module inside what ``torch.compile`` returns; any other itself. Without the name a dump lacks it."""
    inner = vars(module).get("_modules", {}).get("_orig_mod")
    return inner if isinstance(inner, nn.Module) else module


def has_compiled() -> bool:
    """Return whether this process has compiled anything so far; True if that is unknown.

    ``torch._dynamo.utils.counters`` says so; without it, something may have been.
    """
    if DYNAMO not in sys.modules:
        return False
    counters = getattr(sys.modules.get(f"{DYNAMO}.utils"), "counters", None)
    return counters is None or any(counters.values())


# -- modes ------------------------------------------------------------------------------------------------------------

# Whether a `TorchDispatchMode` or a profiler may see what we compute. Without them every all_reduce pays for the way
# through torch's dispatcher.
dispatch_mode_count: Callable[[], int] = find("_C._len_torch_dispatch_stack", lambda: 1)
profiler_enabled: Callable[[], bool] = find("_C._autograd._profiler_enabled", lambda: True)
# Takes these modes off, and those of `TorchFunctionMode` with classes of tensors, and the classes alone. Without them
# those of the program see what a dump computes and saves.
_without_dispatch_modes: Any = find("utils._python_dispatch._disable_current_modes", contextlib.nullcontext)
_without_torch_function: Any = find("_C.DisableTorchFunction", contextlib.nullcontext)
without_tensor_classes: Any = find("_C.DisableTorchFunctionSubclass", contextlib.nullcontext)
# `torch.jit.trace` records what runs. Without it what a dump computes becomes part of a traced program.
_is_jit_tracing: Callable[[], bool] = find("_C._is_tracing", lambda: False)
# Tensors inside ``torch.func`` have no value of their own. Without it a dump notes errors there in place of numbers.
is_functorch_tensor: Callable[[Tensor], bool] = find("_C._functorch.is_functorch_wrapped_tensor", lambda tensor: False)

# Of this thread's stack of `TorchFunctionMode`s: how many, each of them, the last one off, one more on. Without them a
# dump does not see what is run again in a backward pass, and stays on a stack of modes that the program changed.
_function_modes = [
    find(f"_C.{name}")
    for name in ("_len_torch_function_stack", "_get_function_stack_at", "_pop_torch_function_stack",
                 "_push_on_torch_function_stack")
]  # fmt: skip


def function_modes() -> list[Any]:
    """Return this thread's `TorchFunctionMode`s, innermost last; empty where torch does not say."""
    if None in _function_modes:
        return []
    count, at, _, _ = _function_modes
    return [at(index) for index in range(count())]


def take_function_mode_off(mode: Any) -> bool:
    """Take a mode off this thread's stack, wherever in it. Return whether it was there."""
    if None in _function_modes:
        return False
    count, _, pop, push = _function_modes
    above = []
    top = None
    while count():
        top = pop()
        if top is mode:
            break
        above.append(top)
    for taken in reversed(above):
        push(taken)
    return top is mode


# Sees every operation of a step, forward and backward; and every leaf in the arguments of one. Without them no origin
# of a value is traced in a replay.
tree_leaves: Callable[[Any], Iterable[Any]] = find(
    "utils._pytree.tree_leaves", lambda value: refuse("arguments of operations cannot be flattened")
)
DispatchMode: Any = find("utils._python_dispatch.TorchDispatchMode")
if DispatchMode is None:

    class DispatchMode:  # type: ignore[no-redef]
        def __init__(self) -> None:
            refuse("operations of a step cannot be seen one by one")


class no_dispatch_no_grad:
    """Around what we compute: it makes no graph, autocast (of cpu and cuda) is off, no mode of the program sees it."""

    __slots__ = ("_autocast", "_function", "_grad", "_modes")

    def __enter__(self) -> None:
        self._function = _without_torch_function()
        self._function.__enter__()
        self._grad = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        self._autocast = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        for kind in self._autocast:
            torch.set_autocast_enabled(kind, False)
        self._modes: Any = None
        if dispatch_mode_count():
            self._modes = _without_dispatch_modes()
            self._modes.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            if self._modes is not None:
                self._modes.__exit__(None, None, None)
        finally:
            for kind in self._autocast:
                torch.set_autocast_enabled(kind, True)
            torch.set_grad_enabled(self._grad)
            self._function.__exit__(None, None, None)


def is_tracing() -> bool:
    """Return whether what runs now is made into a program: by ``torch.compile``, export or ``torch.jit.trace``."""
    return torch.compiler.is_compiling() or _is_jit_tracing()


# -- autograd ---------------------------------------------------------------------------------------------------------

# From inside a backward pass: calls something at its end, after what was asked for before. DDP and FSDP use it. Without
# it every gradient is measured in its hook.
queue_callback: Callable[[Callable[[], None]], None] | None = find("autograd.Variable._execution_engine.queue_callback")
# The number of the backward pass that this thread is in; -1 outside of any, and where torch does not say.
graph_task: Callable[[], int] = find("_C._current_graph_task_id", lambda: -1)
# The node of the graph whose backward operation this thread runs. Without it, or without the numbers of nodes, a replay
# does not name the module of a backward operation, and a dump takes no node to be old.
current_node: Callable[[], Any] = find("_C._current_autograd_node", lambda: None)
_next_number = find("autograd._get_sequence_nr")
_has_numbers = find("autograd.graph.Node._sequence_nr") is not None and _next_number is not None


def next_node_number() -> int:
    """Return the number of the next node of the graph that this thread makes; -1 where torch does not say."""
    return int(_next_number()) if _has_numbers else -1


def node_number(node: Any) -> int:
    """Return the number of a node; -1 where torch does not say."""
    return int(node._sequence_nr()) if _has_numbers else -1


def in_backward() -> bool:
    """Return whether this thread is inside a backward pass."""
    return graph_task() != -1


_ENGINE = "_engine_run_backward"


def with_engine(function: Any, engine_of: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return a copy of ``torch.autograd.backward`` or ``grad``, called as ``copy(context, args, kwargs)``.

    The copy starts autograd's engine through ``engine_of(context, engine)``. None where torch has no engine by that
    name: what is run again in the backward pass is then not seen by a dump.
    """
    code = getattr(function, "__code__", None)
    if code is None or _ENGINE not in code.co_names or _ENGINE not in function.__globals__:
        note_lack(f"torch.autograd.{_ENGINE}")
        return None
    names = function.__globals__

    def call(context: Any, args: Any, kwargs: Any) -> Any:
        copy = FunctionType(code, {**names, _ENGINE: engine_of(context, names[_ENGINE])}, function.__name__)
        copy.__defaults__, copy.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
        return copy(*args, **kwargs)

    return call


# -- tensors, storages and modules ------------------------------------------------------------------------------------

# A number that changes with every operation in place. Without it no change in place is noticed.
version_of: Callable[[Tensor], int] = attribute("Tensor", "_version", lambda tensor: 0)
# The hooks of `Tensor.register_hook`, a dict in the order in which they run, or None; and those of
# `Tensor.register_post_accumulate_grad_hook`. Without them gradients are taken after hooks of the program.
gradient_hooks: Callable[[Tensor], dict[int, Any] | None] = attribute("Tensor", "_backward_hooks", lambda tensor: None)
accumulated_hooks: Callable[[Tensor], dict[int, Any]] = attribute(
    "Tensor", "_post_accumulate_grad_hooks", lambda tensor: {}
)
# What a sparse tensor stores, where it has not been coalesced. Without it its elements are summed before.
stored_values: Callable[[Tensor], Tensor] = find("Tensor._values", lambda tensor: tensor.coalesce().values())
# An id of a storage, which is given again once the storage is gone. Without it storages of no bytes look like one.
storage_id: Callable[[Any], int] = attribute("UntypedStorage", "_cdata", lambda storage: int(storage.data_ptr()))


def leave_no_hooks(tensor: Tensor) -> None:
    """Take away the empty dict that torch keeps where all hooks have been removed."""
    if gradient_hooks(tensor) is not None and not gradient_hooks(tensor):
        tensor._backward_hooks = None


def shard_version(tensor: Tensor) -> int:
    """Return its version; of a DTensor that of its shard (``_local_tensor``), which FSDP2 writes to."""
    return version_of(getattr(tensor, "_local_tensor", tensor))


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dict of a module's own buffers, in which each may be replaced. No torch lacks it."""
    return module._buffers


def _norm_each(tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]


def _copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


# A norm of each tensor, 0-d; the values of each into another: in one call for all, which share device and dtype.
# Without them it is done one by one.
norm_each: Callable[..., Sequence[Tensor]] = find("_foreach_norm", _norm_each)
copy_each: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = find("_foreach_copy_", _copy_each)
