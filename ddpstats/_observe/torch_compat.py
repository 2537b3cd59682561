"""torch's private names, each once: what it is for, how it is found, what is lost where a torch has no such name.

`find` looks for a name when this file is imported; versions are never compared. A torch without it costs what `find`
says, and `lacking` returns a sentence for each. Names for process groups and DDP are in `groups`, in the same way. What
other files import from here are functions and values that work either way. Names that are read off an object later (of
a process group, a node, a module) are looked for there.

Two files below this room may not import it and have their own names: `ddpstats._base.lazy`, which is used before
torch is imported, and `ddpstats._ranks.gloo`. Anywhere else a test refuses them. C functions are bound here
once, so that a caller on a hot path pays no call of ours.
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

_lacking: dict[str, str] = {}


def lacking() -> dict[str, str]:
    """Private name that this torch does not have -> what is lost without it."""
    return dict(_lacking)


def note_lack(name: str, lost: str) -> None:
    """This torch does not have ``name``, and ``lost`` is what that costs."""
    _lacking[name] = lost


def find(path: str, lost: str, otherwise: Any = None) -> Any:
    """What torch has at ``path``; ``otherwise`` where there is no such thing, and ``lost`` is what that costs."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
        if found is None:
            note_lack(f"torch.{path}", lost)
            return otherwise
    return found


def attribute(kind: str, name: str, lost: str, otherwise: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Reads attribute ``name`` of objects of a class of torch's; ``otherwise`` where that class has none."""
    return otherwise if find(f"{kind}.{name}", lost) is None else attrgetter(name)


def refuse(what: str) -> NoReturn:
    raise ConfigError(f"torch {torch.__version__} cannot do what ddpstats needs here: {what}")


# -- the dispatcher ---------------------------------------------------------------------------------------------------

# Takes the kernels of a `torch.library.Library` away at a moment that we choose.
_destroy = find("library.Library._destroy", "no kernels are registered: no collective and no product is observed")


def open_library(namespace: str) -> Any:
    """A library whose kernels `close_library` can take away. Raises `ConfigError` where it could not."""
    if _destroy is None:
        refuse("kernels for operators of torch could not be taken away again")
    return torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]


def close_library(library: Any) -> None:
    """Take its kernels away."""
    _destroy(library)


_all_operators = find(
    "_C._dispatch_get_all_op_names", "a collective of torch that the guard does not know is not noticed", list
)


def operator_names(namespace: str) -> set[str]:
    """The operators of ``namespace``, without their overloads."""
    prefix = namespace + "::"
    return {name.removeprefix(prefix) for name in _all_operators() if name.startswith(prefix) and "." not in name}


def schema(operator: Any) -> Any:
    """The signature of an operator's overload; without ``_schema`` nothing that reads arguments can be had."""
    return operator._schema


def operator_arguments(operator: Any) -> list[str]:
    """The names of its arguments; torch 2.6 spells ``async_op`` in two ways."""
    return ["async_op" if one.name == "asyncOp" else one.name for one in schema(operator).arguments]


def next_kernel(operator: Any) -> Callable[..., Any]:
    """Runs an operator's overload from the dispatch keys that are its first argument; lets go of the GIL.

    ``_handle`` saves each call a Python frame. Without it the overload's own method does the same.
    """
    handle = getattr(operator, "_handle", None)
    found: Callable[..., Any] = getattr(handle, "redispatch_boxed", operator.redispatch)
    return found


# How a device's kernels are found when an operator goes on below ours.
_DispatchKeySet = find("_C.DispatchKeySet", "no collective and no product is observed")
_DispatchKey = find("_C.DispatchKey", "no collective and no product is observed")
_parse_key = find("_C._parse_dispatch_key", "collectives of accelerators and of sparse tensors are not observed")
_key_name = find("_C._dispatch_key_for_device", "collectives of accelerators and of sparse tensors are not observed")
_keys_after = find("_C._dispatch_keyset_full_after", "no matrix product is checked")


def keys_of_device(device: str, is_sparse: bool) -> Any:
    """The dispatch keys at which an operator reaches the kernels of a kind of device. Raises `ConfigError`."""
    if _DispatchKeySet is None or _DispatchKey is None:
        refuse("the dispatch keys of torch have other names")
    if _parse_key is not None and _key_name is not None:
        return _DispatchKeySet(_parse_key(("Sparse" if is_sparse else "") + _key_name(device)))
    if device == "cpu" and not is_sparse:
        return _DispatchKeySet(_DispatchKey.CPU)
    return refuse(f"the dispatch key of {device} has another name")


def keys_below(key: str) -> Any:
    """All dispatch keys that come after ``key``. Raises `ConfigError`."""
    if _keys_after is None or _DispatchKey is None:
        refuse("the order of the dispatch keys is not told")
    return _keys_after(getattr(_DispatchKey, key))


# The kernel that an operator has at a key now: to keep it while a thread may still enter it, and to call it.
kernel_at: Callable[[str, str], Any] | None = find(
    "_C._dispatch_get_computed_kernel_for_dispatch_key",
    "kernels that were parked are not taken away, and bits of matrix products cannot be flipped",
)

# The classes of operators below torch's functions, and the modules that functions written in C say they are of.
OPERATOR_CLASSES: tuple[Any, ...] = tuple(
    filter(None, (find(f"_ops.{name}", "in a dump, operators are named as functions are")
                  for name in ("OpOverload", "OpOverloadPacket")))
)  # fmt: skip
TENSOR_METHODS = "torch._tensor"
NN_FUNCTIONS = "torch._C._nn"


# -- compiled programs ------------------------------------------------------------------------------------------------

_SEEN_BY_DYNAMO = "users of torch.compile see warnings of graph breaks that functions of ours make"
_eval_frame = find("_C._dynamo.eval_frame", _SEEN_BY_DYNAMO)


def hide_from_dynamo(function: Any) -> None:
    """Between two graphs of a compiled program Dynamo looks at every Python frame, to compile that as well: not ours.

    Where it traces a call that we replaced (`torch.compiler.is_compiling`), it must see what it would see without us.
    """
    try:
        skip = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)
        _eval_frame.set_code_exec_strategy(function.__code__, skip)
    except AttributeError:
        note_lack("torch._C._dynamo.eval_frame.set_code_exec_strategy", _SEEN_BY_DYNAMO)


def compiled_call(module: nn.Module) -> Any:
    """What ``module.compile()`` made of its forward pass; without the name such a module is taken for a plain one."""
    return getattr(module, "_compiled_call_impl", None)


def without_compile(module: nn.Module) -> nn.Module:
    """The module inside what ``torch.compile`` returns; any other itself. A dump without it has no modules of such."""
    inner = vars(module).get("_modules", {}).get("_orig_mod")
    return inner if isinstance(inner, nn.Module) else module


# -- modes ------------------------------------------------------------------------------------------------------------

# Whether a `TorchDispatchMode` may see what we compute. Unknown: one may.
dispatch_mode_count: Callable[[], int] = find(
    "_C._len_torch_dispatch_stack", "every all_reduce pays for the way through torch's dispatcher", lambda: 1
)
# Takes these modes off for as long as we compute something ourselves.
without_dispatch_modes: Callable[[], contextlib.AbstractContextManager[Any]] = find(
    "utils._python_dispatch._disable_current_modes", "modes of the program see what a dump computes",
    contextlib.nullcontext,
)  # fmt: skip
# The same for `TorchFunctionMode` and for classes of tensors; with the second, for the classes alone.
without_torch_function: Any = find(
    "_C.DisableTorchFunction", "modes and tensor classes of the program see what a dump computes",
    contextlib.nullcontext,
)  # fmt: skip
without_tensor_classes: Any = find(
    "_C.DisableTorchFunctionSubclass", "tensor classes of the program see that a dump saves them",
    contextlib.nullcontext,
)  # fmt: skip
# Whether a profiler wants to see every operator. Unknown: one may.
profiler_enabled: Callable[[], bool] = find(
    "_C._autograd._profiler_enabled", "every all_reduce pays for the way through torch's dispatcher", lambda: True
)
# `torch.jit.trace` records what runs.
is_jit_tracing: Callable[[], bool] = find(
    "_C._is_tracing", "what a dump computes becomes part of a traced program", lambda: False
)
# Tensors inside ``torch.func`` have no value of their own.
is_functorch_tensor: Callable[[Tensor], bool] = find(
    "_C._functorch.is_functorch_wrapped_tensor", "inside torch.func a dump notes errors in place of numbers",
    lambda tensor: False,
)  # fmt: skip

# Of this thread's stack of `TorchFunctionMode`s: how many, each of them, the last one off, one more on.
_function_modes = [
    find(f"_C.{name}", "a dump does not see what is run again in a backward pass, and stays on a stack of modes that "
          "the program took apart")
    for name in ("_len_torch_function_stack", "_get_function_stack_at", "_pop_torch_function_stack",
                 "_push_on_torch_function_stack")
]  # fmt: skip


def function_modes() -> list[Any]:
    """This thread's `TorchFunctionMode`s, innermost last; empty where torch does not tell."""
    if None in _function_modes:
        return []
    count, at, _, _ = _function_modes
    return [at(place) for place in range(count())]


def take_function_mode_off(mode: Any) -> bool:
    """Off this thread's stack, wherever in it. Whether it was there."""
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
    for one in reversed(above):
        push(one)
    return top is mode


class _NoDispatchMode:
    def __init__(self) -> None:
        refuse("operations of a step cannot be seen one by one")


# Sees every operation of a step, forward and backward; and every leaf in the arguments of one.
DispatchMode: Any = find(
    "utils._python_dispatch.TorchDispatchMode", "no origin of a value is traced in a replay", _NoDispatchMode
)
tree_leaves: Callable[[Any], Iterable[Any]] = find(
    "utils._pytree.tree_leaves", "no origin of a value is traced in a replay",
    lambda value: refuse("arguments of operations are not taken apart"),
)  # fmt: skip


class no_dispatch_no_grad:
    """Around what we compute: it makes no graph, autocast (of cpu and cuda) is off, and nobody's mode sees it."""

    __slots__ = ("_autocast", "_function", "_grad", "_modes")

    def __enter__(self) -> None:
        self._function = without_torch_function()
        self._function.__enter__()
        self._grad = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        self._autocast = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        for kind in self._autocast:
            torch.set_autocast_enabled(kind, False)
        self._modes: Any = None
        if dispatch_mode_count():
            self._modes = without_dispatch_modes()
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
    """Whether a program is made of what runs now: by ``torch.compile``, export or ``torch.jit.trace``."""
    return torch.compiler.is_compiling() or is_jit_tracing()


# -- autograd ---------------------------------------------------------------------------------------------------------

# From inside a backward pass: calls something at its end, after what was asked for before. DDP and FSDP use it.
queue_callback: Callable[[Callable[[], None]], None] | None = find(
    "autograd.Variable._execution_engine.queue_callback", "every gradient is measured in a hook of its own"
)
# The number of the backward pass that this thread is in; -1 outside of any.
graph_task: Callable[[], int] = find(
    "_C._current_graph_task_id", "no thread is ever seen inside a backward pass", lambda: -1
)
# The node of the graph whose backward operation this thread runs.
current_node: Callable[[], Any] = find(
    "_C._current_autograd_node", "a replay does not tell the module of a backward operation", lambda: None
)
_WITHOUT_NUMBERS = "a replay does not tell the module of a backward operation, and a dump takes no node to be old"
_next_number = find("autograd._get_sequence_nr", _WITHOUT_NUMBERS)
_has_numbers = find("autograd.graph.Node._sequence_nr", _WITHOUT_NUMBERS) is not None and _next_number is not None


def next_node_number() -> int:
    """What the next node of the graph that this thread makes is numbered with; -1 where torch does not tell."""
    return int(_next_number()) if _has_numbers else -1


def node_number(node: Any) -> int:
    """The number of a node; -1 where torch does not tell."""
    return int(node._sequence_nr()) if _has_numbers else -1


def in_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return graph_task() != -1


_ENGINE = "_engine_run_backward"


def with_engine(function: Any, engine_of: Callable[..., Any]) -> Callable[..., Any] | None:
    """A copy of ``torch.autograd.backward`` or ``grad``, called as ``copy(context, args, kwargs)``.

    In it stands, for the function of torch that starts the engine, ``engine_of(context, that function)``. None where
    torch has no such function by that name: what is run again in the backward pass is then not seen by a dump.
    """
    code = getattr(function, "__code__", None)
    if code is None or _ENGINE not in code.co_names or _ENGINE not in function.__globals__:
        note_lack(f"torch.autograd.{_ENGINE}", "a dump does not see what is run again in a backward pass")
        return None
    names = function.__globals__

    def call(context: Any, args: Any, kwargs: Any) -> Any:
        copy = FunctionType(code, {**names, _ENGINE: engine_of(context, names[_ENGINE])}, function.__name__)
        copy.__defaults__, copy.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
        return copy(*args, **kwargs)

    return call


# -- tensors and storages ---------------------------------------------------------------------------------------------

# A number that changes with every operation in place.
version_of: Callable[[Tensor], int] = attribute(
    "Tensor", "_version", "nobody notices that a tensor was changed in place meanwhile", lambda tensor: 0
)
# The hooks of `Tensor.register_hook`: a dict in the order in which they run, or None.
gradient_hooks: Callable[[Tensor], dict[int, Any] | None] = attribute(
    "Tensor", "_backward_hooks", "gradients are taken after hooks of the program, which may have reduced them",
    lambda tensor: None,
)  # fmt: skip
# Those of `Tensor.register_post_accumulate_grad_hook`.
accumulated_hooks: Callable[[Tensor], dict[int, Any]] = attribute(
    "Tensor", "_post_accumulate_grad_hooks",
    "gradients are taken after hooks of the program, which may have reduced them", lambda tensor: {},
)  # fmt: skip
# What a sparse tensor stores, where it has not been coalesced.
stored_values: Callable[[Tensor], Tensor] = find(
    "Tensor._values", "elements of sparse gradients are summed before they are looked at",
    lambda tensor: tensor.coalesce().values(),
)  # fmt: skip
# Where a storage lies: an id that is given again once the storage is gone.
storage_id: Callable[[Any], int] = attribute(
    "UntypedStorage", "_cdata", "storages are told apart by their addresses, which a storage of no bytes has not",
    lambda storage: int(storage.data_ptr()),
)  # fmt: skip


def leave_no_hooks(tensor: Tensor) -> None:
    """Where there are none any more, torch keeps an empty dict: take that away as well."""
    if gradient_hooks(tensor) is not None and not gradient_hooks(tensor):
        tensor._backward_hooks = None


def shard_version(tensor: Tensor) -> int:
    """Its version; of a DTensor that of the shard, which FSDP2 writes to. Without ``_local_tensor`` the DTensor's."""
    return version_of(getattr(tensor, "_local_tensor", tensor))


def _norm_each(tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]


def _copy_each(to: Sequence[Tensor], of: Sequence[Tensor]) -> None:
    for one, other in zip(to, of, strict=True):
        one.copy_(other)


# A norm of each tensor, 0-d; the values of each into another: in one call for all, which share device and dtype.
norm_each: Callable[..., Sequence[Tensor]] = find("_foreach_norm", "gradients are measured one by one", _norm_each)
copy_each: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = find(
    "_foreach_copy_", "buffers are copied one by one", _copy_each
)


# -- modules ----------------------------------------------------------------------------------------------------------


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The dict of a module's own buffers, in which another may be put in the place of one. No torch lacks it."""
    return module._buffers


# -- what was compiled ------------------------------------------------------------------------------------------------


def has_compiled() -> bool:
    """Return whether this process has compiled anything so far; true if that is unknown.

    ``torch._dynamo.utils.counters`` says so; without it, something may have been.
    """
    if DYNAMO not in sys.modules:
        return False
    counters = getattr(sys.modules.get(f"{DYNAMO}.utils"), "counters", None)
    return counters is None or any(counters.values())
