"""The only file that observes the process's collectives, and shows them to whatever subscribes.

torch runs every collective, however it was called (``dist.*``, ``group.allreduce``, DDP's C++ reducer, functional
collectives, DTensor, FSDP, compiled code, any thread), as an operator ``c10d::*``. While a subscriber is there, each of
these operators has our kernel at the dispatch key BackendSelect, which is tried before the kernels of all
devices and which c10d itself leaves empty, so nothing is overridden and removing ours restores everything. Our kernel

1. reads the arguments into a `Collective` and shows it to the subscribers, who may raise: then nothing has moved;
2. runs the collective: hands the operator on to the kernel of the tensors' device (`next_kernel`);
3. shows the subscribers the work. `Work.wait` is wrapped, for what has to be settled when the program waits.

To hand an operator's arguments to Python and back costs as much as a small collective. So the one call that matters for
speed, ``dist.all_reduce`` of a plain tensor in host memory, is observed earlier: `_all_reduce` replaces
``ProcessGroup.allreduce``, shows the call, and calls the group's backend, as c10d's own kernel for the CPU would.

The first `subscribe` of a process compares c10d's operators and their arguments with the table in `operators`, and
tries a collective of a group of one. A torch with other arguments, or with an operator that takes a process group and
has no row, is refused (``ConfigError``), because a program of which a part is not observed would look right. The
official hooks since torch 2.14 (``ProcessGroup.register_pre_hook``) are given neither reduce op, splits, peer nor tag,
so they cannot replace these kernels; they fire below them, and go on working.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ddpstats._observe import groups
from ddpstats._observe.groups import HOST, backend_of, group_of_one, unbox_group, unbox_work, view_of
from ddpstats._observe.operators import OPERATORS, Collective, Operator, index_of_tensors
from ddpstats._observe.torch_compat import (
    Kernels,
    dispatch_mode_count,
    explain_unseen,
    hide_from_dynamo,
    keys_of_device,
    next_kernel,
    no_dispatch_no_grad,
    operator_names,
    profiler_enabled,
    refuse,
    schema,
)
from ddpstats.errors import ConfigError


class Subscriber(Protocol):
    """Base class of whatever sees collectives, in the thread that issues them."""

    def before(self, call: Collective) -> None:
        """Called before it runs. Whatever this raises, the caller gets, and the collective does not run."""

    def after(self, call: Collective, work: Any) -> bool | None:
        """Called once it is issued. ``work`` is None where the operator returned when all was done.

        Return True if it has waited for ``work``, and no further wait is needed.
        """
        return None

    def before_wait(self, work: Any, limited: bool) -> bool:
        """Called before Python code waits for ``work``, under the caller's timeout if ``limited``.

        Return True if it has been waited for, and must not be once more.
        """
        return False

    def after_wait(self, work: Any, error: RuntimeError | None) -> None:
        """Called when Python code has waited for ``work``, with the error where the wait has failed."""
        return


_subscribers: list[Subscriber] = []
_kernels: Kernels | None = None
original_wait: Any = None  # `Work.wait` as it was before ours
_last_done: Callable[[], Any] = object  # returns the work for which `Subscriber.after` has waited last
_original_all_reduce: Any = None
_lock = threading.Lock()


def subscribe(subscriber: Subscriber) -> None:
    """Show all collectives of this process to it from now on. Raises ``ConfigError`` on an unknown torch."""
    with _lock:
        if not _subscribers:
            _install()
        _subscribers.append(subscriber)


def unsubscribe(subscriber: Subscriber) -> None:
    """Stop showing them. The last unsubscribe restores everything. Idempotent."""
    with _lock:
        if subscriber in _subscribers:
            _subscribers.remove(subscriber)
            if not _subscribers:
                _uninstall()


# -- installation -----------------------------------------------------------------------------------------------------


def _install() -> None:
    global _kernels, original_wait, _original_all_reduce
    if not dist.is_available():
        raise ConfigError("this build of torch has no torch.distributed: there are no collectives to observe")
    _kernels = Kernels("c10d", "BackendSelect", {operator.name: _kernel(operator) for operator in check_operators()})
    original_wait = vars(dist.Work)["wait"]
    dist.Work.wait = _wait  # type: ignore[method-assign]
    _original_all_reduce = vars(dist.ProcessGroup)["allreduce"]  # the attribute itself, not what it binds to
    dist.ProcessGroup.allreduce = _all_reduce  # type: ignore[method-assign]
    _try_out()


def _uninstall() -> None:
    global _kernels
    assert _kernels is not None
    dist.ProcessGroup.allreduce = _original_all_reduce  # type: ignore[method-assign]
    dist.Work.wait = original_wait  # type: ignore[method-assign]
    _kernels.remove()
    _kernels = None


@cache
def _try_out() -> None:
    """Raise `ConfigError` where a collective of a group of one, which is local, is not seen. Once in a process."""
    try:
        with group_of_one("ddpstats-probe") as only:
            reason = explain_unseen(lambda: _sees(only[0]) and _sees(only[0], dist.AllreduceOptions()))
    except Exception:  # no gloo: nothing to try it on
        return
    if reason is not None:
        _uninstall()
        refuse(f"it does not show its collectives ({reason})")


def _sees(group: Any, *options: Any) -> bool:
    """Return whether an all_reduce and its wait are seen: by the kernel, or, with options, by `_all_reduce`."""
    seen: list[str] = []
    thread = threading.get_ident()

    def note(event: str) -> None:
        if threading.get_ident() == thread:
            seen.append(event)

    probe: Any = SimpleNamespace(
        before=lambda call: note(call.op),
        after=lambda call, work: note("issued"),
        before_wait=lambda work, limited: note("waits for it"),
        after_wait=lambda work, error: note("has waited"),
    )
    _subscribers.append(probe)
    try:
        with no_dispatch_no_grad():
            group.allreduce([torch.zeros(1, device="cpu")], *options).wait()
    finally:
        _subscribers.remove(probe)
    return seen == ["all_reduce", "issued", "waits for it", "has waited"]


# -- waits ------------------------------------------------------------------------------------------------------------


def _wait(self: Any, *args: Any, **kwargs: Any) -> Any:
    waited = _last_done() is self
    if not waited:
        if torch.compiler.is_compiling():
            return original_wait(self, *args, **kwargs)
        for subscriber in tuple(_subscribers):
            waited = subscriber.before_wait(self, bool(args or kwargs)) or waited
    try:
        result = waited or original_wait(self, *args, **kwargs)
    except RuntimeError as error:
        for subscriber in tuple(_subscribers):
            subscriber.after_wait(self, error)
        raise
    for subscriber in tuple(_subscribers):
        subscriber.after_wait(self, None)
    return result


hide_from_dynamo(_wait)


# -- kernels ----------------------------------------------------------------------------------------------------------


def _kernel(operator: Operator) -> Callable[..., Any]:
    redispatch, read = next_kernel(_overload(operator.name)), reader_of(operator)
    names = _arguments_of(operator)
    group_at = names.index("process_group")
    timeout_at = names.index("timeout") if "timeout" in names else 0
    defaults = [argument.default_value for argument in schema(_overload(operator.name)).arguments]

    def kernel(*args: Any) -> Any:
        view = view_of(unbox_group(args[group_at]))
        keys = _keys_of(args[0]) or _keys_of(args[1]) or _CPU
        if view.is_internal:
            return redispatch(keys, *args)
        args = (*args, *defaults[len(args) :])  # torch leaves trailing defaults out
        call = read(args, view)
        call.is_on_host = keys is _CPU  # by the first tensor, which a barrier has as well
        if timeout_at:
            call.limit = args[timeout_at]
        for subscriber in tuple(_subscribers):
            subscriber.before(call)
        if timeout_at and call.timeout_ms is not None and not 0 <= args[timeout_at] <= call.timeout_ms:
            args = (*args[:timeout_at], call.timeout_ms, *args[timeout_at + 1 :])
        try:
            result = redispatch(keys, *args)
        except RuntimeError as error:
            if call.on_failure is not None:
                call.on_failure(call, error)
            raise
        boxed = result[-1] if type(result) is tuple else result
        work = None if boxed is None else unbox_work(boxed)
        for subscriber in tuple(_subscribers):
            subscriber.after(call, work)
        return result

    return kernel


def _keys_of(argument: Any) -> Any:
    """Return where the operator goes on, from a tensor, tensors, or lists of them; None if there is no tensor.

    A rank that does not receive what is gathered passes no output.
    """
    while type(argument) is list or type(argument) is tuple:
        if not argument:
            return None
        argument = argument[0]
    if not isinstance(argument, torch.Tensor):
        return None
    if argument.is_cpu and not argument.is_sparse:
        return _CPU
    return keys_of_device(argument.device.type, argument.is_sparse)


_CPU = keys_of_device("cpu", False)


# -- reading an operator's arguments ----------------------------------------------------------------------------------


def reader_of(operator: Operator) -> Callable[[Sequence[Any], groups.GroupView], Collective]:
    """Return what makes a `Collective` of all arguments of a call of ``operator``."""
    names = _arguments_of(operator)
    reduce_op, root, tag, asynchronous, sent = (
        names.index(name) if name in names else 0  # an operator's first argument is never one of these
        for name in ("reduce_op", "root_rank", "tag", "async_op", "input_split_sizes")
    )
    received = names.index("output_split_sizes") if sent else 0
    peer = next((names.index(name) for name in ("src", "dst") if name in names), 0)
    inputs = _tensors_getter(operator, "in", "inout")
    outputs = _tensors_getter(operator, "out", "inout")

    def read(args: Sequence[Any], view: groups.GroupView) -> Collective:
        call = Collective(operator, view, inputs(args), outputs(args))
        if reduce_op and groups.operators_name_reduce_op:
            call.reduce_op = reduce_op_name(args[reduce_op].op())
        if root:
            call.root = args[root]
        if asynchronous:
            call.blocking = not args[asynchronous]
        if tag:
            call.tag, call.peer = args[tag], args[peer] if peer else None
        if sent:
            size = len(view.ranks)
            call.splits = _even(args[sent], call.inputs[0], size), _even(args[received], call.outputs[0], size)
        return call

    return read


def _tensors_getter(operator: Operator, *marks: str) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return what takes a list of tensors from the arguments: torch passes one, a list, or a list of lists."""
    index = index_of_tensors(operator.schema, *marks)
    if index is None:
        return lambda args: ()
    kind = str(schema(_overload(operator.name)).arguments[index].type)
    if kind == "Tensor":
        return lambda args: [args[index]]
    if kind == "List[Tensor]":
        return itemgetter(index)
    return lambda args: [tensor for tensors in args[index] for tensor in tensors]


def _even(splits: Sequence[int], tensor: torch.Tensor, size: int) -> tuple[int, ...]:
    rows = tensor.size(0) if tensor.dim() else 1
    return tuple(splits) or (rows // size,) * size


@cache
def reduce_op_name(kind: Any) -> str:
    """Return the name of a reduce op, given its number, which is torch's hash of it, too."""
    kinds: Any = dist.ReduceOp.RedOpType
    return str(kinds(kind).name).lower()


# -- what this torch has ----------------------------------------------------------------------------------------------


def _overload(name: str) -> Any:
    """Return the operator ``c10d::name`` as torch calls it; None where this torch has none."""
    try:
        return getattr(torch.ops.c10d, name).default
    except (AttributeError, RuntimeError):
        return None


def _arguments_of(operator: Operator) -> list[str]:
    """Return the names of its arguments on this torch, which may lack ``async_op``. Raises `ConfigError` on others."""
    spelled = [argument.name for argument in schema(_overload(operator.name)).arguments]
    names = ["async_op" if name == "asyncOp" else name for name in spelled]  # torch 2.6 has both
    if names not in (operator.arguments, [name for name in operator.arguments if name != "async_op"]):
        expected = f"c10d::{operator.name}({', '.join(operator.arguments)})"
        refuse(f"it has no {expected}, which ddpstats observes")
    return names


def check_operators() -> list[Operator]:
    """Return the rows whose operators this torch has. Raises `ConfigError` where it has others than the table."""
    operators = [operator for operator in OPERATORS.values() if _overload(operator.name) is not None]
    for operator in operators:
        _arguments_of(operator)
    for name in operator_names("c10d") - OPERATORS.keys():
        if any("ProcessGroup" in str(argument.type) for argument in schema(_overload(name)).arguments):
            refuse(f"it has a collective that ddpstats does not know, c10d::{name}")
    return operators


# -- all_reduce in host memory, without the dispatcher ----------------------------------------------------------------

_AllreduceOptions: Any = getattr(dist, "AllreduceOptions", None)
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_ALL_REDUCE = OPERATORS["allreduce_"]
_MILLISECOND = timedelta(milliseconds=1)


def _all_reduce(self: Any, *args: Any, **kwargs: Any) -> Any:
    global _last_done
    view = None if kwargs or torch.compiler.is_dynamo_compiling() or not _is_plain(args) else view_of(self)
    if view is None or view.is_internal:
        return _original_all_reduce.__get__(self)(*args, **kwargs)
    tensors, options = args
    call = Collective(_ALL_REDUCE, view, tensors, tensors, reduce_op_name(hash(options.reduceOp)))
    call.limit = options.timeout // _MILLISECOND  # now: torch copies the options, which the program may then change
    call.blocking = not getattr(options, "asyncOp", True)
    backend = backend_of(self, HOST)  # raises torch's error where the group has none
    for subscriber in tuple(_subscribers):
        subscriber.before(call)
    if call.timeout_ms is not None and not 0 <= call.limit <= call.timeout_ms:
        own, options = options, _AllreduceOptions()  # the caller's stay as they are
        options.reduceOp, options.asyncOp = own.reduceOp, own.asyncOp
        options.timeout = timedelta(milliseconds=call.timeout_ms)
    work = backend.allreduce(tensors, options)
    has_waited = [subscriber.after(call, work) for subscriber in tuple(_subscribers)]
    _last_done = weakref.ref(work) if any(has_waited) else object
    return work


hide_from_dynamo(_all_reduce)


def _is_plain(args: Sequence[Any]) -> bool:
    """Return whether these arguments would reach c10d's kernel for the CPU, and nothing would see them on the way."""
    if len(args) != 2 or type(args[0]) is not list or len(args[0]) != 1 or type(args[1]) is not _AllreduceOptions:
        return False
    tensor = args[0][0]
    return (
        type(tensor) in _PLAIN
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not (tensor.requires_grad and torch.is_grad_enabled())
        and not dispatch_mode_count()
        and not profiler_enabled()
    )
