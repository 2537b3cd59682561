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

Checked on torch 2.13, gloo. `subscribe` compares the arguments of every operator with what this file knows and raises
``ConfigError`` where one differs: another torch is refused rather than observed by half.
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

    def waiting(self, work: Any) -> bool:
        """Some Python code is about to wait for ``work``. True: it has been waited for, and must not be once more."""


_subscribers: list[Subscriber] = []
_library: Any = None
_original_wait: Any = None
_lock = threading.Lock()


def subscribe(subscriber: Subscriber) -> None:
    """Show all collectives of this process to ``subscriber`` from now on. Raises ``ConfigError`` on another torch."""
    with _lock:
        if not _subscribers:
            _install()
        _subscribers.append(subscriber)


def unsubscribe(subscriber: Subscriber) -> None:
    """The last one to leave restores everything. Idempotent."""
    with _lock:
        if subscriber in _subscribers:
            _subscribers.remove(subscriber)
            if not _subscribers:
                _uninstall()


def is_installed() -> bool:
    return _library is not None


# -- installation -----------------------------------------------------------------------------------------------------


def _install() -> None:
    global _library, _original_wait
    if not dist.is_available():
        raise ConfigError("this build of torch has no torch.distributed: there are no collectives to observe")
    _check_operators()
    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]  # see `_uninstall`
    for name, reader in _OPERATORS.items():
        library.impl(name, _kernel(name, reader), "BackendSelect")
    _library = library
    _original_wait = dist.Work.wait
    dist.Work.wait = _wait  # type: ignore[method-assign]


def _uninstall() -> None:
    global _library
    _library._destroy()
    _library = None
    dist.Work.wait = _original_wait  # type: ignore[method-assign]


def _check_operators() -> None:
    for name, expected in _ARGUMENTS.items():
        try:
            found = getattr(torch.ops.c10d, name).default._schema
        except (AttributeError, RuntimeError):
            found = None
        names = [] if found is None else [argument.name for argument in found.arguments]
        if names != expected.split():
            raise ConfigError(
                f"torch {torch.__version__} has no c10d::{name}({', '.join(expected.split())}), which the guard "
                f"observes; it was checked on torch {CHECKED_ON}. Install that version, or run without the guard."
            )


def _wait(self: Any, *args: Any, **kwargs: Any) -> Any:
    waited = False
    for subscriber in _subscribers:
        waited = subscriber.waiting(self) or waited
    return waited or _original_wait(self, *args, **kwargs)


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
        view = _views[group] = GroupView(
            group.group_name, group.group_desc, ranks, ranks[rank], group.group_desc == OWN_GROUP
        )
    return view


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

    return kernel


def _with_timeout(args: tuple[Any, ...], at: int, timeout_ms: int) -> tuple[Any, ...]:
    if 0 <= args[at] <= timeout_ms:
        return args
    return (*args[:at], timeout_ms, *args[at + 1 :])


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

_REDUCE_OPS: dict[int, str] = {}


def _reduce_op(given: Any) -> str:
    number = given.op()
    known = _REDUCE_OPS.get(number)
    if known is None:
        known = _REDUCE_OPS[number] = dist.ReduceOp.RedOpType(number).name.lower()
    return known


# One reader per operator; its arguments as in `_ARGUMENTS`.


def _read_all_reduce(
    tensors: Any, group: Any, op: Any, sparse: Any = None, async_op: bool = True, timeout: int = -1
) -> Collective:
    call = Collective("all_reduce", tensors, tensors)
    call.reduce_op, call.blocking = _reduce_op(op), not async_op
    return call


def _read_coalesced(tensors: Any, group: Any, op: Any, async_op: bool = True, timeout: int = -1) -> Collective:
    call = Collective("all_reduce_coalesced", tensors, tensors)
    call.reduce_op, call.blocking = _reduce_op(op), not async_op
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
    call.reduce_op, call.root, call.blocking = _reduce_op(op), root, not async_op
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
    call.reduce_op, call.blocking = _reduce_op(op), not async_op
    return call


def _read_reduce_scatter_base(
    output: Any, input: Any, group: Any, op: Any, async_op: bool = True, timeout: int = -1
) -> Collective:
    call = Collective("reduce_scatter_tensor", [input], [output])
    call.reduce_op, call.blocking = _reduce_op(op), not async_op
    return call


def _read_reduce_scatter_coalesced(
    outputs: Any, inputs: Any, group: Any, op: Any, async_op: bool = True, timeout: int = -1
) -> Collective:
    call = Collective("reduce_scatter_tensor_coalesced", inputs, outputs)
    call.reduce_op, call.blocking = _reduce_op(op), not async_op
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
    "scatter_": _read_scatter,
    "alltoall_": _read_all_to_all,
    "alltoall_base_": _read_all_to_all_base,
    "barrier": _read_barrier,
    "monitored_barrier_": _read_monitored_barrier,
    "send": _read_send,
    "recv_": _read_recv,
    "recv_any_source_": _read_recv_any,
}

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
    "scatter_": "output_tensors input_tensors process_group root_rank async_op timeout",
    "alltoall_": "output_tensors input_tensors process_group async_op timeout",
    "alltoall_base_": "output input process_group output_split_sizes input_split_sizes async_op timeout",
    "barrier": "tensor process_group device_ids async_op timeout",
    "monitored_barrier_": "tensor process_group device_ids timeout wait_all_ranks",
    "send": "tensors process_group dst tag",
    "recv_": "tensors process_group src tag",
    "recv_any_source_": "tensors process_group tag",
}
