"""torch's private names, each once: what it is for, how it is found, what is lost where a torch has no such name.

`Kernels` registers kernels that see operators of torch, and takes them away again.

`find` looks for a name when this file is imported; versions are never compared. `lacking` holds the names that this
torch has not; a comment at each says what that costs. Names for process groups and DDP are in `groups`, in the
same way. What other files import from here are functions and values that work either way. Names that are read off an
object later (of a process group, a node, a module) are looked for there.

Two files below this room may not import it and have their own names: `ddpstats._base.lazy`, which is used before
torch is imported, and `ddpstats._ranks.gloo`. A test refuses them in all other files. C functions are bound here
once, so that a caller on a hot path pays for no other call.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from types import FunctionType
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from ddpstats._base.text import first_line
from ddpstats._ranks.device import device_kinds
from ddpstats.errors import ConfigError

lacking: set[str] = set()  # private names that this torch does not have, of those that have been looked for


def find(path: str, default: Any = None) -> Any:
    """Return what torch has at ``path``; ``default`` where there is no such thing."""
    value: Any = torch
    for name in path.split("."):
        value = getattr(value, name, None)
        if value is None:
            lacking.add(f"torch.{path}")
            return default
    return value


def attribute(kind: str, name: str, default: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return what reads attribute ``name`` of objects of a class of torch's; ``default`` where that class has none."""
    return default if find(f"{kind}.{name}") is None else attrgetter(name)


def refuse(reason: str) -> NoReturn:
    """Raise `ConfigError` on a torch without what ddpstats cannot do without."""
    raise ConfigError(f"torch {torch.__version__} cannot be observed: {reason}. Use one of docs/compatibility.md.")


# From which rank of its group a message came that was received from any: of its work.
source_rank: Callable[[Any], int] = find("distributed.Work._source_rank", lambda work: -1)


# -- the dispatcher ---------------------------------------------------------------------------------------------------


def library_of(operator: Any) -> str:
    """Return ``aten`` for ``torch.ops.aten.add`` and its overloads."""
    namespace: str = getattr(operator, "namespace", "")  # a packet of overloads has none
    return namespace or getattr(operator, "_qualified_op_name", "").partition("::")[0]


# Without it a collective of torch that ddpstats does not know is not noticed.
_all_operators = find("_C._dispatch_get_all_op_names", list)


def operator_names(namespace: str) -> set[str]:
    """Return the operators of ``namespace``, without their overloads."""
    prefix = namespace + "::"
    return {name.removeprefix(prefix) for name in _all_operators() if name.startswith(prefix) and "." not in name}


# The signature of an operator's overload; without ``_schema`` no arguments can be read.
schema: Callable[[Any], Any] = attrgetter("_schema")


def next_kernel(operator: Any) -> Callable[..., Any]:
    """Return what runs an operator's overload from the dispatch keys that are its first argument, without the GIL.

    ``_handle`` saves each call a Python frame. Without it the overload's own method does the same.
    """
    handle = getattr(operator, "_handle", None)
    redispatch: Callable[..., Any] = getattr(handle, "redispatch_boxed", operator.redispatch)
    return redispatch


# How a device's kernels are found when an operator goes on below ours. Without the first four no collective and no
# product is observed, without the last no product.
_DispatchKeySet, _DispatchKey = find("_C.DispatchKeySet"), find("_C.DispatchKey")
_parse_key, _key_name = find("_C._parse_dispatch_key"), find("_C._dispatch_key_for_device")
_keys_after = find("_C._dispatch_keyset_full_after")


@cache
def keys_of_device(device: str, is_sparse: bool) -> Any:
    """Return the dispatch keys at which an operator reaches a kind of device's kernels. Raises `ConfigError`."""
    if None in (_DispatchKeySet, _parse_key, _key_name):
        refuse("the dispatch keys of torch have other names")
    return _DispatchKeySet(_parse_key(("Sparse" if is_sparse else "") + _key_name(device)))


def keys_below(key: str) -> Any:
    """Return all dispatch keys that come after ``key``. Raises `ConfigError`."""
    if _keys_after is None or _DispatchKey is None:
        refuse("the order of the dispatch keys is not known")
    return _keys_after(getattr(_DispatchKey, key))


# The kernel that an operator has at a key now: to keep it while a thread may still enter it, and to call it. Without it
# removed kernels are not kept, kernels that wait to be removed stay, and bits of matrix products cannot be flipped.
kernel_at: Callable[[str, str], Any] | None = find("_C._dispatch_get_computed_kernel_for_dispatch_key")

# Takes the kernels of a `torch.library.Library` away at a moment that we choose. Without it no kernel is registered: no
# collective and no product is observed.
_destroy = find("library.Library._destroy")
_impls: set[str] = find("library._impls", set())  # kernels from Python, which `Library.impl` has registered
_removed: dict[tuple[str, str], Any] = {}  # (operator, key) -> kernels that a thread may still be about to enter


class Kernels:
    """Kernels that see operators of torch: registered when this is made, until `remove`.

    A kernel at a dispatch key that is tried before a device's own (``BackendSelect``) sees every call of its operator,
    from any caller and in any thread, and runs it by `next_kernel`. (To save the kernel that was there and call it
    holds the GIL, and deadlocks; to leave the key out while the operator runs breaks what the operator itself calls.)

    A kernel may not be removed while another thread is about to enter it, and no function of torch says so. So the
    kernels that are removed are kept in memory until the next removal; a caller that cannot be sure that no thread is
    about to enter waits first.

    Args:
        namespace: of the operators: "aten", "c10d".
        key: the dispatch key.
        kernels: name of an operator ("mm", "mm.out") -> what takes its arguments, and returns what it returns.
        with_keys: each is given the dispatch keys of the call as its first argument.
        replaces: something is registered there already, and comes back when ours are removed.

    Raises `ConfigError` on a torch that could not take them away again.
    """

    def __init__(
        self,
        namespace: str,
        key: str,
        kernels: Mapping[str, Callable[..., Any]],
        *,
        with_keys: bool = False,
        replaces: bool = False,
    ) -> None:
        self._slots = [(f"{namespace}::{name}", key) for name in kernels]
        if _destroy is None:
            refuse("kernels for operators of torch could not be taken away again")
        self._library = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            if replaces:  # torch up to 2.10 refuses a second kernel, except with an argument that 2.7 does not have
                warnings.filterwarnings("ignore", message=r"[\s\S]*verriding a previously registered kernel")
                _impls.difference_update(f"{namespace}/{name}/{key}" for name in kernels)
            for name, kernel in kernels.items():
                hide_from_dynamo(kernel)
                self._library.impl(name, kernel, key, with_keyset=with_keys)  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Restore what was there."""
        if kernel_at is not None:
            _removed.update({slot: kernel_at(*slot) for slot in self._slots})
        _destroy(self._library)


def explain_unseen(sees: Callable[[], bool]) -> str | None:
    """Return why kernels do not see their operators on this torch; None where ``sees`` returns True."""
    try:
        return None if sees() else "what was tried was not seen"
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"


# The classes of operators below torch's functions, and the modules that functions written in C say they are of. Without
# them an operator is named as a function is.
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
        lacking.add("torch._C._dynamo.eval_frame.set_code_exec_strategy")


def compiled_call(module: nn.Module) -> Any:
    """Return what ``module.compile()`` made of its forward pass; without the name it counts as not compiled."""
    return getattr(module, "_compiled_call_impl", None)


def without_compile(module: nn.Module) -> nn.Module:
    """Return the module inside what ``torch.compile`` returns; any other itself, and so each without that name."""
    inner = vars(module).get("_modules", {}).get("_orig_mod")
    return inner if isinstance(inner, nn.Module) else module


# -- modes ------------------------------------------------------------------------------------------------------------

# Whether a `TorchDispatchMode` or a profiler may see what we compute. Without them every all_reduce pays for the way
# through torch's dispatcher.
dispatch_mode_count: Callable[[], int] = find("_C._len_torch_dispatch_stack", lambda: 1)
profiler_enabled: Callable[[], bool] = find("_C._autograd._profiler_enabled", lambda: True)
# Takes these modes off, and those of `TorchFunctionMode` with classes of tensors, and the classes alone. Without them
# those of the program see what we compute and save.
_without_dispatch_modes: Any = find("utils._python_dispatch._disable_current_modes", contextlib.nullcontext)
_without_torch_function: Any = find("_C.DisableTorchFunction", contextlib.nullcontext)
without_tensor_classes: Any = find("_C.DisableTorchFunctionSubclass", contextlib.nullcontext)
# `torch.jit.trace` records what runs. Without it what we compute becomes part of a traced program.
_is_jit_tracing: Callable[[], bool] = find("_C._is_tracing", lambda: False)
# Tensors inside ``torch.func`` have no value of their own. Without it to read one is an error.
is_functorch_tensor: Callable[[Tensor], bool] = find("_C._functorch.is_functorch_wrapped_tensor", lambda tensor: False)

# The `TorchFunctionMode`s of this thread, innermost last. Without this, our mode may stay there, and does nothing.
function_modes: Callable[[], list[Any]] = find("overrides._get_current_function_mode_stack", list)

# Reaches every tensor that a module returns. Without it bits are flipped where a module returns a tensor alone.
tree_map: Callable[[Callable[[Any], Any], Any], Any] = find("utils._pytree.tree_map", lambda change, leaf: change(leaf))

# Sees every operation of a step, forward and backward; and every leaf in the arguments of one. Without them no origin
# of a value is traced.
tree_leaves: Callable[[Any], Iterable[Any]] = find("utils._pytree.tree_leaves")
DispatchMode: Any = find("utils._python_dispatch.TorchDispatchMode", object)


class no_dispatch_no_grad:
    """Around what we compute: it makes no graph, autocast is off, no mode of the program sees it."""

    __slots__ = ("_contexts",)

    def __enter__(self) -> None:
        self._contexts: list[Any] = [_without_torch_function()]
        if torch.is_grad_enabled():
            self._contexts.append(torch.no_grad())
        for kind in device_kinds():
            if torch.is_autocast_enabled(kind):
                self._contexts.append(torch.autocast(kind, enabled=False))
        if dispatch_mode_count():
            self._contexts.append(_without_dispatch_modes())
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(None, None, None)


def is_tracing() -> bool:
    """Return whether what runs now is made into a program: by ``torch.compile``, export or ``torch.jit.trace``."""
    return torch.compiler.is_compiling() or _is_jit_tracing()


# -- autograd ---------------------------------------------------------------------------------------------------------

# From inside a backward pass: calls something at its end, after what was asked for before. DDP and FSDP use it. Without
# it every gradient is measured in its hook.
queue_callback: Callable[[Callable[[], None]], None] | None = find("autograd.Variable._execution_engine.queue_callback")
# The number of the backward pass that this thread is in; -1 outside of any, and where torch does not say.
graph_task: Callable[[], int] = find("_C._current_graph_task_id", lambda: -1)
# The node of the graph whose backward operation this thread runs. Without it, or without the numbers of nodes, the
# module of a backward operation is not known, and no node counts as old.
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


def engine_under(mode: Any, function: Any) -> Callable[..., Any]:
    """Return a copy of ``torch.autograd.backward`` or ``grad`` that starts autograd's engine with ``mode`` on.

    Where torch has no engine by that name, ``mode`` sees neither what hooks call in the backward pass, nor what is run
    again there.
    """
    names, code = function.__globals__, function.__code__
    if _ENGINE not in names or _ENGINE not in code.co_names:
        lacking.add(f"torch.autograd.{_ENGINE}")
        return cast(Callable[..., Any], function)

    def run(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return names[_ENGINE](*args, **kwargs)

    return FunctionType(code, {**names, _ENGINE: run}, None, function.__defaults__)


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
