"""The table of c10d's operators, and the `Collective` that a call of one is described by. It imports no torch.

torch runs each collective as an operator ``c10d::*``. `OPERATORS` has one row for each: a new collective of torch is
one new row, and all that observes collectives, or reads about them, then knows it.

Checked on torch 2.6 to 2.15. Before 2.7 most operators have no ``async_op``, and before 2.10 none names its reduce op:
there both are unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ddpstats._observe.groups import GroupView


@dataclass(frozen=True)
class Operator:
    """One operator of c10d.

    Attributes:
        name: "allreduce_" for ``c10d::allreduce_``.
        op: what the program calls it: "all_reduce".
        parameters: those of that function of ``torch.distributed``, up to its group. "in:", "out:" and "inout:" mark
            the tensors that a rank hands in, receives, or both; ``group``, ``src`` and ``dst`` mean what they say.
        schema: the names of the operator's arguments, in torch's order, with the same marks. ``reduce_op``,
            ``root_rank``, ``src``, ``dst``, ``tag``, ``async_op`` and ``*_split_sizes`` mean what they say.
        compared: the tensors that must have the same shapes and dtypes on all ranks: those that are handed in (where
            a rank hands in none, those that it receives), or those that it receives. "pieces": neither, but what one
            rank sends must be what another one expects.
        to_root: only the root receives.
        methods: the methods of ``ProcessGroup`` that issue it, where these are not called as the operator is.
        aliases: other functions of ``torch.distributed`` with these parameters.
    """

    name: str
    op: str
    parameters: str
    schema: str
    compared: Literal["in", "out", "pieces"] = "in"
    to_root: bool = False
    methods: str = ""
    aliases: str = ""

    @cached_property
    def arguments(self) -> list[str]:
        """The names of the operator's arguments, without their marks."""
        return [name.rpartition(":")[2] for name in self.schema.split()]

    @cached_property
    def parameter_names(self) -> list[str]:
        """The names of the function's parameters, without their marks."""
        return [name.rpartition(":")[2] for name in self.parameters.split()]

    @cached_property
    def combines(self) -> bool:
        """True where the values of the ranks are combined, which must then be the same thing on all ranks."""
        return "reduce_op" in self.arguments

    @cached_property
    def is_message(self) -> bool:
        """True for a message between two ranks."""
        return "tag" in self.arguments

    @cached_property
    def has_equal_results(self) -> bool:
        """True where all ranks receive the same. What is combined into another tensor is cut into pieces there."""
        if self.compared == "pieces" or self.to_root or self.is_message:
            return False
        return index_of_tensors(self.schema, "inout", *(() if self.combines else ("out",))) is not None

    @cached_property
    def method_names(self) -> list[str]:
        """The methods of ``ProcessGroup``, of this torch or of others."""
        return self.methods.split() or [self.name.rstrip("_")]


def index_of_tensors(arguments: str, *marks: str) -> int | None:
    """Return the index of the first argument with one of these marks; None where no argument has one."""
    indices = (index for index, name in enumerate(arguments.split()) if name.partition(":")[0] in marks)
    return next(indices, None)


# fmt: off
_TABLE = (
    Operator("allreduce_", "all_reduce", "inout:tensor op group",
             "inout:tensors process_group reduce_op sparse_indices async_op timeout"),
    Operator("allreduce_coalesced_", "all_reduce_coalesced", "inout:tensors op group",
             "inout:tensors process_group reduce_op async_op timeout"),
    Operator("broadcast_", "broadcast", "inout:tensor src group",
             "inout:tensors process_group root_rank root_tensor async_op timeout"),
    Operator("reduce_", "reduce", "inout:tensor dst op group",
             "inout:tensors process_group reduce_op root_rank root_tensor async_op timeout", to_root=True),
    # The list of outputs is the same on all ranks, the input is an entry of it.
    Operator("allgather_", "all_gather", "out:tensor_list in:tensor group",
             "out:output_tensors in:input_tensors process_group async_op timeout", compared="out"),
    Operator("_allgather_base_", "all_gather_into_tensor", "out:output_tensor in:input_tensor group",
             "out:output_tensor in:input_tensor process_group async_op timeout",
             methods="_allgather_base all_gather_single", aliases="all_gather_single _all_gather_base"),
    Operator("allgather_coalesced_", "all_gather_coalesced", "out:output_tensor_lists in:input_tensor_list group",
             "out:output_lists in:input_list process_group async_op"),
    Operator("allgather_into_tensor_coalesced_", "all_gather_coalesced", "in:inputs group",  # functional
             "out:outputs in:inputs process_group async_op", aliases="all_gather_into_tensor_coalesced",
             methods="allgather_into_tensor_coalesced all_gather_single_coalesced"),
    Operator("reduce_scatter_", "reduce_scatter", "out:output in:input_list op group",
             "out:output_tensors in:input_tensors process_group reduce_op async_op timeout"),
    Operator("_reduce_scatter_base_", "reduce_scatter_tensor", "out:output in:input op group",
             "out:output_tensor in:input_tensor process_group reduce_op async_op timeout",
             methods="_reduce_scatter_base reduce_scatter_single",
             aliases="reduce_scatter_single _reduce_scatter_base"),
    Operator("reduce_scatter_tensor_coalesced_", "reduce_scatter_tensor_coalesced",  # functional
             "in:inputs reduceOp scatter_dim group", "out:outputs in:inputs process_group reduce_op async_op timeout",
             methods="reduce_scatter_tensor_coalesced reduce_scatter_single_coalesced"),
    Operator("gather_", "gather", "in:tensor out:gather_list dst group",
             "out:output_tensors in:input_tensors process_group root_rank async_op timeout",
             compared="pieces", to_root=True),
    Operator("gather_into_tensor_", "gather_into_tensor", "in:tensor out:gather_tensor dst group",  # torch 2.14
             "out:output_tensor in:input_tensor process_group root_rank async_op timeout",
             to_root=True, aliases="gather_single"),
    Operator("scatter_", "scatter", "out:tensor in:scatter_list src group",
             "out:output_tensors in:input_tensors process_group root_rank async_op timeout", compared="pieces"),
    Operator("alltoall_", "all_to_all", "out:output_tensor_list in:input_tensor_list group",
             "out:output_tensors in:input_tensors process_group async_op timeout", compared="pieces"),
    Operator("alltoall_base_", "all_to_all_single", "out:output in:input output_split_sizes input_split_sizes group",
             "out:output in:input process_group output_split_sizes input_split_sizes async_op timeout",
             compared="pieces", methods="alltoall_base all_to_all_single"),
    Operator("barrier", "barrier", "group", "tensor process_group device_ids async_op timeout"),
    Operator("monitored_barrier_", "monitored_barrier", "group",
             "tensor process_group device_ids timeout wait_all_ranks"),
    Operator("send", "send", "in:tensor dst group", "in:tensors process_group dst tag", aliases="isend"),
    Operator("recv_", "recv", "out:tensor src group", "out:tensors process_group src tag", aliases="irecv"),
    Operator("recv_any_source_", "recv", "out:tensor src group", "out:tensors process_group tag",
             methods="recv_anysource"),
)
# fmt: on
OPERATORS = {operator.name: operator for operator in _TABLE}


def operator_of(function: str) -> Operator | None:
    """Return the row of a function of ``torch.distributed``; None where the table has none."""
    rows = OPERATORS.values()
    return next((row for row in rows if function == row.op or function in row.aliases.split()), None)


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
