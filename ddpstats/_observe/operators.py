"""The table of c10d's operators, and the reader that makes a `Collective` of an operator's arguments.

torch runs each collective as an operator ``c10d::*``. `OPERATORS` has one row for each: a new collective of torch is
one new row, and guard, dumps and `count_collectives` then describe it. `check_operators` compares the table with what
torch has. An operator with other arguments, or one that takes a process group and has no row, is refused
(``ConfigError``), because a program of which a part is not observed would look right.

Checked on torch 2.6 to 2.15. Before 2.7 most operators have no ``async_op``, and before 2.10 none names its reduce op:
there both are unknown, which is enough for dumps, and the guard refuses to start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from operator import itemgetter
from typing import Any, Literal

import torch
import torch.distributed as dist

from ddpstats._observe.groups import GroupView, operators_name_reduce_op
from ddpstats._observe.torch_compat import operator_names, schema
from ddpstats.errors import ConfigError

HINT = "Install a torch that ddpstats was run with: docs/compatibility.md"


@dataclass(frozen=True)
class Operator:
    """One operator of c10d.

    Attributes:
        name: "allreduce_" for ``c10d::allreduce_``.
        op: what the program calls it: "all_reduce".
        schema: the names of its arguments, in torch's order. "in:", "out:" and "inout:" mark the tensors that a rank
            hands in, receives, or both. ``reduce_op``, ``root_rank``, ``src``, ``dst``, ``tag``, ``async_op`` and
            ``*_split_sizes`` mean what they say.
        compared: the tensors that must have the same shapes and dtypes on all ranks: those that are handed in (where
            a rank hands in none, those that it receives), or those that it receives. "pieces": neither, but what one
            rank sends must be what another one expects.
        to_root: only the root receives.
        methods: the methods of ``ProcessGroup`` that issue it, where these are not called as the operator is.
    """

    name: str
    op: str
    schema: str
    compared: Literal["in", "out", "pieces"] = "in"
    to_root: bool = False
    methods: str = ""

    @cached_property
    def arguments(self) -> list[str]:
        """The names of the arguments, without their marks."""
        return [name.rpartition(":")[2] for name in self.schema.split()]

    def index_of_tensors(self, *marks: str) -> int | None:
        """Return the index of the first argument with one of these marks; None where no argument has one."""
        indices = (index for index, name in enumerate(self.schema.split()) if name.partition(":")[0] in marks)
        return next(indices, None)

    @cached_property
    def combines(self) -> bool:
        """True where the values of the ranks are combined, which must then be the same thing on all ranks."""
        return "reduce_op" in self.arguments

    @cached_property
    def is_message(self) -> bool:
        """True for a message between two ranks."""
        return "tag" in self.arguments

    @cached_property
    def method_names(self) -> list[str]:
        """The methods of ``ProcessGroup``, of this torch or of others."""
        return self.methods.split() or [self.name.rstrip("_")]


# fmt: off
_TABLE = (
    Operator("allreduce_", "all_reduce", "inout:tensors process_group reduce_op sparse_indices async_op timeout"),
    Operator("allreduce_coalesced_", "all_reduce_coalesced",
             "inout:tensors process_group reduce_op async_op timeout"),
    Operator("broadcast_", "broadcast", "inout:tensors process_group root_rank root_tensor async_op timeout"),
    Operator("reduce_", "reduce", "inout:tensors process_group reduce_op root_rank root_tensor async_op timeout",
             to_root=True),
    # The list of outputs is the same on all ranks, the input is an entry of it.
    Operator("allgather_", "all_gather", "out:output_tensors in:input_tensors process_group async_op timeout",
             compared="out"),
    Operator("_allgather_base_", "all_gather_into_tensor",
             "out:output_tensor in:input_tensor process_group async_op timeout",
             methods="_allgather_base all_gather_single"),
    Operator("allgather_coalesced_", "all_gather_coalesced",
             "out:output_lists in:input_list process_group async_op"),
    Operator("allgather_into_tensor_coalesced_", "all_gather_coalesced",
             "out:outputs in:inputs process_group async_op",
             methods="allgather_into_tensor_coalesced all_gather_single_coalesced"),
    Operator("reduce_scatter_", "reduce_scatter",
             "out:output_tensors in:input_tensors process_group reduce_op async_op timeout"),
    Operator("_reduce_scatter_base_", "reduce_scatter_tensor",
             "out:output_tensor in:input_tensor process_group reduce_op async_op timeout",
             methods="_reduce_scatter_base reduce_scatter_single"),
    Operator("reduce_scatter_tensor_coalesced_", "reduce_scatter_tensor_coalesced",
             "out:outputs in:inputs process_group reduce_op async_op timeout",
             methods="reduce_scatter_tensor_coalesced reduce_scatter_single_coalesced"),
    Operator("gather_", "gather", "out:output_tensors in:input_tensors process_group root_rank async_op timeout",
             compared="pieces", to_root=True),
    Operator("gather_into_tensor_", "gather_into_tensor",  # since torch 2.14
             "out:output_tensor in:input_tensor process_group root_rank async_op timeout", to_root=True),
    Operator("scatter_", "scatter", "out:output_tensors in:input_tensors process_group root_rank async_op timeout",
             compared="pieces"),
    Operator("alltoall_", "all_to_all", "out:output_tensors in:input_tensors process_group async_op timeout",
             compared="pieces"),
    Operator("alltoall_base_", "all_to_all_single",
             "out:output in:input process_group output_split_sizes input_split_sizes async_op timeout",
             compared="pieces", methods="alltoall_base all_to_all_single"),
    Operator("barrier", "barrier", "tensor process_group device_ids async_op timeout"),
    Operator("monitored_barrier_", "monitored_barrier", "tensor process_group device_ids timeout wait_all_ranks"),
    Operator("send", "send", "in:tensors process_group dst tag"),
    Operator("recv_", "recv", "out:tensors process_group src tag"),
    Operator("recv_any_source_", "recv", "out:tensors process_group tag", methods="recv_anysource"),
)
# fmt: on
OPERATORS = {operator.name: operator for operator in _TABLE}


@dataclass(eq=False)
class Collective:
    """One collective that is about to run on this rank.

    Attributes:
        operator: its row of the table.
        view: the group.
        inputs, outputs: the tensors it reads and writes; the caller's very objects where it was called from Python.
        reduce_op: "sum", ...; None where nothing is reduced.
        root: rank in the group that broadcasts, gathers, ...
        splits: (sizes sent, sizes received) of an all_to_all; None for other operations.
        peer, tag: of a message; ``peer`` is a rank in the group, or None for a receive from any rank.
        blocking: the caller goes on only when the result is there.
        is_on_host: it moves host memory, so that a wait for it is a wait of the CPU.
        timeout_ms: a subscriber may set it, to less than the program's own; None leaves that.
        limit: the call's own timeout in milliseconds; negative or None where it has none.
        on_failure: a subscriber may set it: called with this and the error if the collective fails while it is issued.
        subscriber_state: what a subscriber keeps of the call between `before` and `after`.
    """

    operator: Operator
    view: GroupView
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    reduce_op: str | None = None
    # Most calls leave these as they are: then making one does not set them.
    root: int | None = field(default=None, init=False)
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = field(default=None, init=False)
    peer: int | None = field(default=None, init=False)
    tag: int | None = field(default=None, init=False)
    blocking: bool = field(default=False, init=False)
    is_on_host: bool = field(default=True, init=False)
    timeout_ms: int | None = field(default=None, init=False)
    limit: int | None = field(default=None, init=False)
    on_failure: Callable[[Collective, RuntimeError], None] | None = field(default=None, init=False)
    subscriber_state: Any = field(default=None, init=False)

    @property
    def op(self) -> str:
        """The name of what the program asked for ("all_reduce", "send"), not of what the backend makes of it."""
        return self.operator.op


# -- reading an operator's arguments ----------------------------------------------------------------------------------

Reader = Callable[[Sequence[Any], GroupView], Collective]


def reader_of(operator: Operator) -> Reader:
    """Return what makes a `Collective` of all arguments of a call of ``operator``."""
    names = arguments_of(operator)
    reduce_op, root, tag, asynchronous, sent = (
        names.index(name) if name in names else 0  # an operator's first argument is never one of these
        for name in ("reduce_op", "root_rank", "tag", "async_op", "input_split_sizes")
    )
    received = names.index("output_split_sizes") if sent else 0
    peer = next((names.index(name) for name in ("src", "dst") if name in names), 0)
    inputs = _tensors_getter(operator, "in", "inout")
    outputs = _tensors_getter(operator, "out", "inout")

    def read(args: Sequence[Any], view: GroupView) -> Collective:
        call = Collective(operator, view, inputs(args), outputs(args))
        if reduce_op and operators_name_reduce_op:
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
    index = operator.index_of_tensors(*marks)
    if index is None:
        return lambda args: ()
    kind = str(schema(overload(operator.name)).arguments[index].type)
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


def overload(name: str) -> Any:
    """Return the operator ``c10d::name`` as torch calls it; None where this torch has none."""
    try:
        return getattr(torch.ops.c10d, name).default
    except (AttributeError, RuntimeError):
        return None


def arguments_of(operator: Operator) -> list[str]:
    """Return the names of its arguments on this torch, which may lack ``async_op``. Raises `ConfigError` on others."""
    spelled = [argument.name for argument in schema(overload(operator.name)).arguments]
    names = ["async_op" if name == "asyncOp" else name for name in spelled]  # torch 2.6 has both
    if names not in (operator.arguments, [name for name in operator.arguments if name != "async_op"]):
        expected = f"c10d::{operator.name}({', '.join(operator.arguments)})"
        raise ConfigError(f"torch {torch.__version__} has no {expected}, which ddpstats observes. {HINT}")
    return names


def check_operators() -> None:
    """Raise `ConfigError` where this torch has other operators than the table. It may lack some."""
    for operator in known_operators():
        arguments_of(operator)
    for name in operator_names("c10d") - OPERATORS.keys():
        if any("ProcessGroup" in str(argument.type) for argument in schema(overload(name)).arguments):
            raise ConfigError(
                f"torch {torch.__version__} has a collective that ddpstats does not know, c10d::{name}. {HINT}"
            )


def known_operators() -> list[Operator]:
    """Return the rows of the table whose operators this torch has."""
    return [operator for operator in OPERATORS.values() if overload(operator.name) is not None]
