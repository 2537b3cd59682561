"""The only file that observes the process's collectives; guard, dump and replay subscribe.

torch runs every collective, however it was called (``dist.*``, ``group.allreduce``, DDP's C++ reducer, functional
collectives, DTensor, FSDP, compiled code, any thread), as an operator ``c10d::*``. While somebody is subscribed, each
of these operators has a kernel of ours at the dispatch key BackendSelect, which is tried before the kernels of all
devices and which c10d itself leaves empty, so nothing is overridden and removing ours restores everything. Our kernel

1. reads the arguments into a `Collective` and shows it to the subscribers, who may raise: then nothing has moved;
2. runs the collective: hands the operator on to the kernel of the tensors' device. (`redispatch` lets go of the GIL. To
   save a kernel and call it does not, and deadlocks; to leave BackendSelect out while the operator runs breaks what
   the operator itself calls, such as ``torch.empty``.)
3. shows the subscribers the work. `Work.wait` is wrapped, for what has to be settled when the program waits.

To hand an operator's arguments to Python and back costs as much as a small collective. So the one way that matters for
speed, ``dist.all_reduce`` of a plain tensor in host memory, has a door of its own: `_all_reduce` stands in the place of
``ProcessGroup.allreduce``, shows the call, and asks the group's backend, as c10d's own kernel for the CPU would.

Checked on torch 2.13, gloo. `subscribe` compares c10d's operators and their arguments with what this file knows, and on
a torch other than 2.13 it also tries a collective of a group of one: a torch that it would observe by half is refused
(``ConfigError``). torch 2.14 and 2.15 have the operators of 2.13 and ``gather_into_tensor_`` (read from their wheels;
not run). Their official hooks (``ProcessGroup.register_pre_hook``) tell neither reduce op, splits, peer nor tag, so
they cannot take the place of these kernels; they fire below them, and go on working.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ddpstats.errors import ConfigError

CHECKED_ON = "2.13"
OWN_GROUP = "ddpstats"  # the description of groups that carry our own collectives


@dataclass(eq=False)
class GroupView:
    """What is known of a process group; one object per group, so that subscribers can hang things on it."""

    name: str
    desc: str
    ranks: tuple[int, ...]
    rank: int
    is_ours: bool
    has_host: bool = False  # it has a backend for tensors in host memory
    group: Callable[[], Any] = lambda: None  # the process group itself, while it is there
    is_registered: bool = False  # with torch

    def is_alive(self) -> bool:
        """Whether the program may still use it."""
        group = self.group()
        return group is not None and (not self.is_registered or group in dist.distributed_c10d._world.pg_names)


class Collective:
    """One collective that is about to run on this rank.

    Attributes:
        op: "all_reduce", "send", ...: what the program asked for, not what the backend makes of it.
        view: the group.
        inputs, outputs: the tensors it reads and writes; the caller's very objects where it was called from Python.
        reduce_op: "sum", ...; None where nothing is reduced.
        root: rank in the group that broadcasts, gathers, ...
        splits: (sizes sent, sizes received) of an all_to_all; None where there are none.
        peer, tag: of point-to-point; ``peer`` is a rank in the group, or None for a receive from anybody.
        blocking: the caller goes on only when the result is there.
        timeout_ms: a subscriber may set it, to less than the program's own; None leaves that.
        seen: what the guard knows of it between `before` and `after`.
    """

    __slots__ = (
        "blocking", "inputs", "op", "outputs", "peer", "reduce_op", "root", "seen", "splits", "tag",
        "timeout_ms", "view",
    )  # fmt: skip

    def __init__(self, op: str, inputs: Sequence[Any], outputs: Sequence[Any] = ()) -> None:
        self.op, self.inputs, self.outputs = op, inputs, outputs
        self.view: GroupView
        self.reduce_op: str | None = None
        self.root: int | None = None
        self.splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self.peer: int | None = None
        self.tag: int | None = None
        self.blocking = False
        self.timeout_ms: int | None = None
        self.seen: Any = None

    @property
    def is_p2p(self) -> bool:
        return self.op in ("send", "recv")


class Subscriber(Protocol):
    """Sees collectives in the thread that issues them."""

    def before(self, call: Collective) -> None:
        """About to run. Whatever this raises, the caller gets, and the collective does not run."""

    def after(self, call: Collective, work: Any) -> None:
        """Issued. May wait for ``work``; that is None for the few operators that return when all is done."""

    def waiting(self, work: Any, limited: bool) -> bool:
        """Some Python code is about to wait for ``work``, under a timeout of its own if ``limited``.

        True: it has been waited for, and must not be once more.
        """


_subscribers: list[Subscriber] = []
_waited: list[tuple[Subscriber, Callable[[Any], None]]] = []
_library: Any = None
_original_wait: Any = None
_original_all_reduce: Any = None
_lock = threading.Lock()


def subscribe(subscriber: Subscriber, waited: Callable[[Any], None] | None = None) -> None:
    """Show all collectives of this process to ``subscriber`` from now on. Raises ``ConfigError`` on another torch.

    ``waited``: called with each work that Python code has waited for, once that wait has ended well. Who only wants to
    see results needs no wait of its own, and cannot come into conflict with one.
    """
    with _lock:
        if not _subscribers:
            _install()
        _subscribers.append(subscriber)
        if waited is not None:
            _waited.append((subscriber, waited))


def unsubscribe(subscriber: Subscriber) -> None:
    """The last one to leave restores everything. Idempotent."""
    with _lock:
        if subscriber in _subscribers:
            _subscribers.remove(subscriber)
            _waited[:] = [entry for entry in _waited if entry[0] is not subscriber]
            if not _subscribers:
                _uninstall()


def is_installed() -> bool:
    return _library is not None


# -- installation -----------------------------------------------------------------------------------------------------


def _install() -> None:
    global _library, _original_wait, _original_all_reduce
    if not dist.is_available():
        raise ConfigError("this build of torch has no torch.distributed: there are no collectives to observe")
    _check_operators()
    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]  # see `_uninstall`
    for name, reader in _OPERATORS.items():
        if _schema(name) is not None:
            library.impl(name, _kernel(name, reader), "BackendSelect")
    _library = library
    _original_wait = vars(dist.Work)["wait"]
    dist.Work.wait = _wait  # type: ignore[method-assign]
    if _is_checked():
        _original_all_reduce = vars(dist.ProcessGroup)["allreduce"]  # the attribute itself, not what it binds to
        dist.ProcessGroup.allreduce = _all_reduce  # type: ignore[method-assign]
    else:
        try:
            why = None if _sees_a_collective() else "it does not see them begin and end"
        except Exception as error:  # torch 2.9 and older do not tell which reduce op it is
            why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if why is not None:
            _uninstall()
            raise ConfigError(
                f"torch {torch.__version__} does not show its collectives to the guard, which was checked on torch "
                f"{CHECKED_ON} ({why}). Install that version, or run without the guard."
            )


def _uninstall() -> None:
    global _library, _original_all_reduce
    _library._destroy()
    _library = None
    dist.Work.wait = _original_wait  # type: ignore[method-assign]
    if _original_all_reduce is not None:
        dist.ProcessGroup.allreduce = _original_all_reduce  # type: ignore[method-assign]
        _original_all_reduce = None


def _is_checked() -> bool:
    return torch.__version__.startswith(CHECKED_ON + ".")


def _check_operators() -> None:
    hint = f"It was checked on torch {CHECKED_ON}. Install that version, or run without the guard."
    for name, expected in _ARGUMENTS.items():
        found = _schema(name)
        names = [] if found is None else [argument.name for argument in found.arguments]
        if names != expected.split() and (found is not None or name not in _NEWER):
            raise ConfigError(
                f"torch {torch.__version__} has no c10d::{name}({', '.join(expected.split())}), which the guard "
                f"observes. {hint}"
            )
    for name in _operator_names() - _OPERATORS.keys():
        if any("ProcessGroup" in str(argument.type) for argument in _schema(name).arguments):
            raise ConfigError(
                f"torch {torch.__version__} has a collective that the guard does not know, c10d::{name}. {hint}"
            )


def _operator_names() -> set[str]:
    found = torch._C._dispatch_get_all_op_names()
    return {name.removeprefix("c10d::") for name in found if name.startswith("c10d::") and "." not in name}


def _schema(name: str) -> Any:
    try:
        return getattr(torch.ops.c10d, name).default._schema
    except (AttributeError, RuntimeError):
        return None


def _sees_a_collective() -> bool:
    """Whether a collective of a group of one, which is local, comes through our kernel."""
    seen: list[Any] = []
    HashStore: Any = torch._C._distributed_c10d.HashStore
    group: Any = dist.ProcessGroup(HashStore(), 0, 1)
    backend = torch._C._distributed_c10d.ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=10))
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_group_name("ddpstats-probe")
    _subscribers.append(_Probe(seen))
    try:
        group.allreduce([torch.zeros(1, device="cpu")]).wait()
    finally:
        _subscribers.pop()
    return len(seen) == 2


class _Probe:
    """Sees one collective begin, and its end waited for."""

    def __init__(self, seen: list[Any]) -> None:
        self._seen = seen

    def before(self, call: Collective) -> None:
        self._seen.append(call.op)

    def after(self, call: Collective, work: Any) -> None:
        pass

    def waiting(self, work: Any, limited: bool) -> bool:
        self._seen.append(work)
        return False


def _wait(self: Any, *args: Any, **kwargs: Any) -> Any:
    waited = False
    if not torch.compiler.is_compiling():
        for subscriber in _subscribers:
            waited = subscriber.waiting(self, bool(args or kwargs)) or waited
    result = waited or _original_wait(self, *args, **kwargs)
    if _waited and not torch.compiler.is_compiling():
        for _, listener in tuple(_waited):
            listener(self)
    return result


def hide_from_dynamo(function: Any) -> None:
    """Between two graphs of a compiled program Dynamo looks at every Python frame, to compile that as well: not ours.

    Where it traces a call that we replaced (`torch.compiler.is_compiling`), it must see what it would see without us.
    """
    try:
        skip = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)
        _eval_frame.set_code_exec_strategy(function.__code__, skip)
    except AttributeError:  # another torch: its user sees warnings of graph breaks
        return


_eval_frame: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
hide_from_dynamo(_wait)


def wait_once(work: Any, seconds: float) -> None:
    """Wait for a message. Whether it came or not, gloo must not be asked again: a second wait never ends (2.13)."""
    (_original_wait or dist.Work.wait)(work, timedelta(seconds=seconds))


@lru_cache(maxsize=16)
def _timedelta(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


def wait_within(work: Any, seconds: float) -> bool:
    """Wait for ``work``; False if it goes on. Raises what the backend raises if it failed."""
    try:
        (_original_wait or dist.Work.wait)(work, _timedelta(seconds))
    except RuntimeError:
        if work.is_completed():
            raise
        return False
    return True


# -- groups -----------------------------------------------------------------------------------------------------------

_views: weakref.WeakKeyDictionary[Any, GroupView] = weakref.WeakKeyDictionary()


def view_of(group: Any) -> GroupView:
    """The view of a process group; always the same one."""
    view = _views.get(group)
    if view is None:
        try:
            ranks = tuple(dist.get_process_group_ranks(group))
        except (KeyError, ValueError, RuntimeError):
            ranks = tuple(range(group.size()))  # a group that torch's registry does not know
        rank = group.rank()
        ours = group.group_desc == OWN_GROUP
        view = _views[group] = GroupView(
            group.group_name,
            group.group_desc,
            ranks,
            ranks[rank],
            ours,
            not ours and _has_host(group),
            weakref.ref(group),
            group in dist.distributed_c10d._world.pg_names,
        )
    return view


def _has_host(group: Any) -> bool:
    try:
        group._get_backend(_HOST)
    except RuntimeError:  # a group for an accelerator alone
        return False
    return True


# -- kernels ----------------------------------------------------------------------------------------------------------

Reader = Callable[..., Collective]
"""The operator's arguments, as torch passes them (trailing defaults are left out), to a Collective without its view."""

_unbox_group = dist.ProcessGroup.unbox if dist.is_available() else None
_unbox_work = dist.Work.unbox if dist.is_available() else None


def _kernel(name: str, reader: Reader) -> Callable[..., Any]:
    redispatch = getattr(torch.ops.c10d, name).default._handle.redispatch_boxed
    names = _ARGUMENTS[name].split()
    group_at = names.index("process_group")
    timeout_at = names.index("timeout") if "timeout" in names else -1
    defaults = [a.default_value for a in getattr(torch.ops.c10d, name).default._schema.arguments]

    def kernel(*args: Any) -> Any:
        view = view_of(_unbox_group(args[group_at]))  # type: ignore[misc]
        keys = _keys_of(args[0]) or _keys_of(args[1]) or _CPU
        if view.is_ours:
            return redispatch(keys, *args)
        call = reader(*args)
        call.view = view
        for subscriber in _subscribers:
            subscriber.before(call)
        if call.timeout_ms is not None and timeout_at >= 0:
            args = _with_timeout((*args, *defaults[len(args) :]), timeout_at, call.timeout_ms)
        result = redispatch(keys, *args)
        boxed = result[-1] if type(result) is tuple else result
        work = None if boxed is None else _unbox_work(boxed)  # type: ignore[misc]
        for subscriber in _subscribers:
            subscriber.after(call, work)
        return result

    hide_from_dynamo(kernel)
    return kernel


def _with_timeout(args: tuple[Any, ...], at: int, timeout_ms: int) -> tuple[Any, ...]:
    if 0 <= args[at] <= timeout_ms:
        return args
    return (*args[:at], timeout_ms, *args[at + 1 :])


# -- the door for all_reduce ------------------------------------------------------------------------------------------

_AllreduceOptions: Any = getattr(dist, "AllreduceOptions", None)
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_HOST = torch.device("cpu")


def _all_reduce(self: Any, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return _original_all_reduce.__get__(self)(*args, **kwargs)
    if len(args) != 2 or kwargs or type(args[1]) is not _AllreduceOptions or not _is_plain(args[0]):
        return _original_all_reduce.__get__(self)(*args, **kwargs)
    view = view_of(self)
    if not view.has_host:
        return _original_all_reduce.__get__(self)(*args)
    tensors, options = args
    call = Collective("all_reduce", tensors, tensors)
    call.view, call.reduce_op, call.blocking = view, _reduce_op(options.reduceOp.op), not options.asyncOp
    for subscriber in _subscribers:
        subscriber.before(call)
    if call.timeout_ms is not None:
        options = _limited(options, _timedelta(call.timeout_ms / 1000))
    work = self._get_backend(_HOST).allreduce(tensors, options)
    for subscriber in _subscribers:
        subscriber.after(call, work)
    return work


hide_from_dynamo(_all_reduce)


def _limited(options: Any, limit: timedelta) -> Any:
    """Options with a timeout of at most ``limit``. The caller's own stay as they are; a negative timeout means none."""
    if timedelta(0) <= options.timeout <= limit:
        return options
    limited = _AllreduceOptions()
    limited.reduceOp, limited.asyncOp, limited.timeout = options.reduceOp, options.asyncOp, limit
    return limited


def _is_plain(tensors: Any) -> bool:
    """Whether c10d's kernel for the CPU would get this, and nothing else would see it on its way there."""
    if type(tensors) is not list or len(tensors) != 1 or torch._C._len_torch_dispatch_stack():
        return False
    tensor = tensors[0]
    return (
        type(tensor) in _PLAIN
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not (tensor.requires_grad and torch.is_grad_enabled())
        and not torch._C._autograd._profiler_enabled()
    )


_key_sets: dict[tuple[str, bool], Any] = {}


def _keys_of(given: Any) -> Any:
    """Where the operator goes on, from one of its arguments: a tensor, tensors, or lists of them; None if it has none.

    Who does not receive what is gathered, say, passes no output.
    """
    while type(given) is list or type(given) is tuple:
        if not given:
            return None
        given = given[0]
    if not isinstance(given, torch.Tensor):
        return None
    if given.is_cpu and not given.is_sparse:
        return _CPU
    return _key_set(given.device.type, given.is_sparse)


def _key_set(device: str, is_sparse: bool) -> Any:
    found = _key_sets.get((device, is_sparse))
    if found is None:
        name = ("Sparse" if is_sparse else "") + torch._C._dispatch_key_for_device(device)
        key: Any = torch._C._parse_dispatch_key(name)
        found = _key_sets[device, is_sparse] = torch._C.DispatchKeySet(key)
    return found


_CPU = _key_set("cpu", False)

_RedOpType: Any = dist.ReduceOp.RedOpType if dist.is_available() else None
_REDUCE_OPS: dict[Any, str] = {}


def _reduce_op(kind: Any) -> str:
    """The name of a reduce op, from its number or the member of ``RedOpType``."""
    known = _REDUCE_OPS.get(kind)
    if known is None:
        known = _REDUCE_OPS[kind] = _RedOpType(kind).name.lower()
    return known


# One reader per operator; its arguments as in `_ARGUMENTS`.


def _read_all_reduce(
    tensors: Any, group: Any, op: Any, sparse: Any = None, async_op: bool = True, timeout: int = -1
) -> Collective:
    call = Collective("all_reduce", tensors, tensors)
    call.reduce_op, call.blocking = _reduce_op(op.op()), not async_op
    return call


def _read_coalesced(tensors: Any, group: Any, op: Any, async_op: bool = True, timeout: int = -1) -> Collective:
    call = Collective("all_reduce_coalesced", tensors, tensors)
    call.reduce_op, call.blocking = _reduce_op(op.op()), not async_op
    return call


def _read_broadcast(
    tensors: Any, group: Any, root: int, root_tensor: int = 0, async_op: bool = True, timeout: int = -1
) -> Collective:
    call = Collective("broadcast", tensors, tensors)
    call.root, call.blocking = root, not async_op
    return call


def _read_reduce(
    tensors: Any, group: Any, op: Any, root: int, root_tensor: int = 0, async_op: bool = True, timeout: int = -1
) -> Collective:
    call = Collective("reduce", tensors, tensors)
    call.reduce_op, call.root, call.blocking = _reduce_op(op.op()), root, not async_op
    return call


def _read_all_gather(outputs: Any, inputs: Any, group: Any, async_op: bool = True, timeout: int = -1) -> Collective:
    call = Collective("all_gather", inputs, outputs[0] if outputs else ())
    call.blocking = not async_op
    return call


def _read_all_gather_base(output: Any, input: Any, group: Any, async_op: bool = True, timeout: int = -1) -> Collective:
    call = Collective("all_gather_into_tensor", [input], [output])
    call.blocking = not async_op
    return call


def _read_all_gather_coalesced(outputs: Any, inputs: Any, group: Any, async_op: bool = True) -> Collective:
    call = Collective("all_gather_coalesced", inputs, outputs)
    call.blocking = not async_op
    return call


def _read_reduce_scatter(
    outputs: Any, inputs: Any, group: Any, op: Any, async_op: bool = True, timeout: int = -1
) -> Collective:
    call = Collective("reduce_scatter", inputs[0] if inputs else (), outputs)
    call.reduce_op, call.blocking = _reduce_op(op.op()), not async_op
    return call


def _read_reduce_scatter_base(
    output: Any, input: Any, group: Any, op: Any, async_op: bool = True, timeout: int = -1
) -> Collective:
    call = Collective("reduce_scatter_tensor", [input], [output])
    call.reduce_op, call.blocking = _reduce_op(op.op()), not async_op
    return call


def _read_reduce_scatter_coalesced(
    outputs: Any, inputs: Any, group: Any, op: Any, async_op: bool = True, timeout: int = -1
) -> Collective:
    call = Collective("reduce_scatter_tensor_coalesced", inputs, outputs)
    call.reduce_op, call.blocking = _reduce_op(op.op()), not async_op
    return call


def _read_gather(
    outputs: Any, inputs: Any, group: Any, root: int, async_op: bool = True, timeout: int = -1
) -> Collective:
    call = Collective("gather", inputs, outputs[0] if outputs else ())
    call.root, call.blocking = root, not async_op
    return call


def _read_scatter(
    outputs: Any, inputs: Any, group: Any, root: int, async_op: bool = True, timeout: int = -1
) -> Collective:
    call = Collective("scatter", inputs[0] if inputs else (), outputs)
    call.root, call.blocking = root, not async_op
    return call


def _read_gather_into(
    output: Any, input: Any, group: Any, root: int, async_op: bool = True, timeout: int = -1
) -> Collective:
    call = Collective("gather_into_tensor", [input], [output])
    call.root, call.blocking = root, not async_op
    return call


def _read_all_to_all(outputs: Any, inputs: Any, group: Any, async_op: bool = True, timeout: int = -1) -> Collective:
    call = Collective("all_to_all", inputs, outputs)
    call.blocking = not async_op
    return call


def _read_all_to_all_base(
    output: Any, input: Any, group: Any, out_splits: Any, in_splits: Any, async_op: bool = True, timeout: int = -1
) -> Collective:
    call = Collective("all_to_all_single", [input], [output])
    size = group_size(group)
    call.splits = _even(in_splits, input, size), _even(out_splits, output, size)
    call.blocking = not async_op
    return call


def group_size(boxed: Any) -> int:
    return int(_unbox_group(boxed).size())  # type: ignore[misc]


def _even(splits: Sequence[int], tensor: torch.Tensor, size: int) -> tuple[int, ...]:
    rows = tensor.size(0) if tensor.dim() else 1
    return tuple(splits) or (rows // size,) * size


def _read_barrier(
    tensor: Any, group: Any, device_ids: Any = (), async_op: bool = True, timeout: int = -1
) -> Collective:
    call = Collective("barrier", ())
    call.blocking = not async_op
    return call


def _read_monitored_barrier(
    tensor: Any, group: Any, device_ids: Any = (), timeout: int = -1, wait_all_ranks: bool = False
) -> Collective:
    return Collective("monitored_barrier", ())


def _read_send(tensors: Any, group: Any, peer: int, tag: int) -> Collective:
    call = Collective("send", tensors)
    call.peer, call.tag = peer, tag
    return call


def _read_recv(tensors: Any, group: Any, peer: int, tag: int) -> Collective:
    call = Collective("recv", (), tensors)
    call.peer, call.tag = peer, tag
    return call


def _read_recv_any(tensors: Any, group: Any, tag: int) -> Collective:
    call = Collective("recv", (), tensors)
    call.tag = tag
    return call


_OPERATORS: dict[str, Reader] = {
    "allreduce_": _read_all_reduce,
    "allreduce_coalesced_": _read_coalesced,
    "broadcast_": _read_broadcast,
    "reduce_": _read_reduce,
    "allgather_": _read_all_gather,
    "_allgather_base_": _read_all_gather_base,
    "allgather_coalesced_": _read_all_gather_coalesced,
    "allgather_into_tensor_coalesced_": _read_all_gather_coalesced,
    "reduce_scatter_": _read_reduce_scatter,
    "_reduce_scatter_base_": _read_reduce_scatter_base,
    "reduce_scatter_tensor_coalesced_": _read_reduce_scatter_coalesced,
    "gather_": _read_gather,
    "gather_into_tensor_": _read_gather_into,
    "scatter_": _read_scatter,
    "alltoall_": _read_all_to_all,
    "alltoall_base_": _read_all_to_all_base,
    "barrier": _read_barrier,
    "monitored_barrier_": _read_monitored_barrier,
    "send": _read_send,
    "recv_": _read_recv,
    "recv_any_source_": _read_recv_any,
}

_NEWER = frozenset({"gather_into_tensor_"})  # since torch 2.14

_ARGUMENTS = {
    "allreduce_": "tensors process_group reduce_op sparse_indices async_op timeout",
    "allreduce_coalesced_": "tensors process_group reduce_op async_op timeout",
    "broadcast_": "tensors process_group root_rank root_tensor async_op timeout",
    "reduce_": "tensors process_group reduce_op root_rank root_tensor async_op timeout",
    "allgather_": "output_tensors input_tensors process_group async_op timeout",
    "_allgather_base_": "output_tensor input_tensor process_group async_op timeout",
    "allgather_coalesced_": "output_lists input_list process_group async_op",
    "allgather_into_tensor_coalesced_": "outputs inputs process_group async_op",
    "reduce_scatter_": "output_tensors input_tensors process_group reduce_op async_op timeout",
    "_reduce_scatter_base_": "output_tensor input_tensor process_group reduce_op async_op timeout",
    "reduce_scatter_tensor_coalesced_": "outputs inputs process_group reduce_op async_op timeout",
    "gather_": "output_tensors input_tensors process_group root_rank async_op timeout",
    "gather_into_tensor_": "output_tensor input_tensor process_group root_rank async_op timeout",
    "scatter_": "output_tensors input_tensors process_group root_rank async_op timeout",
    "alltoall_": "output_tensors input_tensors process_group async_op timeout",
    "alltoall_base_": "output input process_group output_split_sizes input_split_sizes async_op timeout",
    "barrier": "tensor process_group device_ids async_op timeout",
    "monitored_barrier_": "tensor process_group device_ids timeout wait_all_ranks",
    "send": "tensors process_group dst tag",
    "recv_": "tensors process_group src tag",
    "recv_any_source_": "tensors process_group tag",
}
