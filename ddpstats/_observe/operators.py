"""c10d's operators: what each of them asks for, read from its arguments into a `Collective`.

One reader per operator. `check_operators` compares what torch has with what this file knows: an operator with other
arguments, or one that moves data and is not known here, is refused (``ConfigError``), for a program that was observed
by half would look right. Of torch 2.13 on, all of them are there but ``gather_into_tensor_``, which 2.14 added; before
2.7 most have no ``async_op``, and before 2.10 none tells its reduce op: `c10d_callers` has both.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddpstats._observe.c10d_callers import told
from ddpstats._observe.groups import backend_of, is_registered, operators_tell_reduce_op, unbox_group
from ddpstats._observe.torch_compat import operator_arguments, operator_names, schema
from ddpstats._ranks.gloo import OWN_GROUP
from ddpstats.errors import ConfigError

HOST = torch.device("cpu")


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
        return group is not None and (not self.is_registered or is_registered(group))


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
        subscriber_state: for who subscribes, to keep what it knows of the call between `before` and `after`.
    """

    __slots__ = (
        "blocking", "inputs", "op", "outputs", "peer", "reduce_op", "root", "splits", "subscriber_state", "tag",
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
        self.subscriber_state: Any = None

    @property
    def is_p2p(self) -> bool:
        return self.op in ("send", "recv")


# -- groups -----------------------------------------------------------------------------------------------------------

_views: dict[int, GroupView] = {}  # by the id of the group, while it is there


def view_of(group: Any) -> GroupView:
    """The view of a process group; always the same one."""
    view = _views.get(id(group))
    if view is None or view.group() is not group:
        try:
            ranks = tuple(map(int, dist.get_process_group_ranks(group)))  # who made it may have given numpy's
        except (KeyError, ValueError, RuntimeError):
            ranks = tuple(range(group.size()))  # a group that torch's registry does not know
        ours = group.group_desc == OWN_GROUP
        view = _views[id(group)] = GroupView(
            group.group_name,
            group.group_desc,
            ranks,
            ranks[group.rank()],
            ours,
            not ours and _has_host(group),
            weakref.ref(group, partial(_forget, _views, id(group))),
            is_registered(group),
        )
    return view


def _forget(views: dict[int, GroupView], number: int, reference: Any) -> None:
    """``views``: `_views`, which is gone from this module by its name when the interpreter ends."""
    if number in views and views[number].group is reference:
        del views[number]


def _has_host(group: Any) -> bool:
    try:
        backend_of(group, HOST)
    except RuntimeError:  # a group for an accelerator alone
        return False
    return True


# -- readers -----------------------------------------------------------------------------------------------------------

Reader = Callable[..., Collective]
"""The operator's arguments, as torch passes them (trailing defaults are left out), to a Collective without its view."""


HINT = "Install a torch that it was run with (docs/compatibility.md), or run without the guard."

_RedOpType: Any = dist.ReduceOp.RedOpType if dist.is_available() else None
_REDUCE_OPS: dict[Any, str] = {}


def reduce_op_name(kind: Any) -> str:
    """The name of a reduce op, from its number or the member of ``RedOpType``."""
    known = _REDUCE_OPS.get(kind)
    if known is None:
        known = _REDUCE_OPS[kind] = _RedOpType(kind).name.lower()
    return known


def _reduce_op_of(op: Any) -> str | None:
    """Of what an operator is given; where torch does not tell, what the caller has noted, and else None."""
    kind = op.op() if operators_tell_reduce_op else told().reduce_op
    return None if kind is None else reduce_op_name(kind)


# One reader per operator; its arguments as in `ARGUMENTS`.


def _read_all_reduce(
    tensors: Any, group: Any, op: Any, sparse: Any = None, async_op: bool = True, timeout: int = -1
) -> Collective:
    call = Collective("all_reduce", tensors, tensors)
    call.reduce_op, call.blocking = _reduce_op_of(op), not async_op
    return call


def _read_coalesced(tensors: Any, group: Any, op: Any, async_op: bool = True, timeout: int = -1) -> Collective:
    call = Collective("all_reduce_coalesced", tensors, tensors)
    call.reduce_op, call.blocking = _reduce_op_of(op), not async_op
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
    call.reduce_op, call.root, call.blocking = _reduce_op_of(op), root, not async_op
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
    call.reduce_op, call.blocking = _reduce_op_of(op), not async_op
    return call


def _read_reduce_scatter_base(
    output: Any, input: Any, group: Any, op: Any, async_op: bool = True, timeout: int = -1
) -> Collective:
    call = Collective("reduce_scatter_tensor", [input], [output])
    call.reduce_op, call.blocking = _reduce_op_of(op), not async_op
    return call


def _read_reduce_scatter_coalesced(
    outputs: Any, inputs: Any, group: Any, op: Any, async_op: bool = True, timeout: int = -1
) -> Collective:
    call = Collective("reduce_scatter_tensor_coalesced", inputs, outputs)
    call.reduce_op, call.blocking = _reduce_op_of(op), not async_op
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
    size = unbox_group(group).size()
    call.splits = _even(in_splits, input, size), _even(out_splits, output, size)
    call.blocking = not async_op
    return call


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


OPERATORS: dict[str, Reader] = {
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
_ASYNC_OP = "async_op"

ARGUMENTS = {
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


# -- what this torch has ----------------------------------------------------------------------------------------------


def overload(name: str) -> Any:
    """The operator ``c10d::name`` as torch calls it; None where this torch has none."""
    try:
        return getattr(torch.ops.c10d, name).default
    except (AttributeError, RuntimeError):
        return None


def arguments_of(name: str) -> list[str]:
    """The arguments of ``c10d::name`` on this torch, which may lack ``async_op``. Raises `ConfigError` on others."""
    expected = ARGUMENTS[name].split()
    found = overload(name)
    names = [] if found is None else operator_arguments(found)
    if names not in (expected, [one for one in expected if one != _ASYNC_OP]):
        raise ConfigError(
            f"torch {torch.__version__} has no c10d::{name}({', '.join(expected)}), which the guard observes. {HINT}"
        )
    return names


def lacks_async_op(name: str) -> bool:
    """Whether this torch does not say whether the caller of ``c10d::name`` waits for it."""
    return _ASYNC_OP in ARGUMENTS[name].split() and _ASYNC_OP not in arguments_of(name)


def check_operators() -> None:
    """Raises `ConfigError` where they are not what this file knows."""
    for name in ARGUMENTS:
        if name not in _NEWER or overload(name) is not None:
            arguments_of(name)
    for name in operator_names("c10d") - OPERATORS.keys():
        if any("ProcessGroup" in str(argument.type) for argument in schema(overload(name)).arguments):
            raise ConfigError(
                f"torch {torch.__version__} has a collective that the guard does not know, c10d::{name}. {HINT}"
            )
