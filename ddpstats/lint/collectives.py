"""The calls of a program that are collectives of all ranks.

The tables have the functions of torch.distributed and of libraries that are built on it, methods of objects that the
file makes, and a few methods by name. A function of the same file that always runs a collective counts as a collective.
A collective of a process group other than all ranks is left out: its members cannot be read from the text.
"""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from ddpstats.lint.backwards import backwards_of
from ddpstats.lint.program import Function, Program, blocks_of, dotted, exits, last_name, parts_of

# by operation: at which position the process group is passed
_TORCH = {
    **dict.fromkeys(("barrier", "monitored_barrier"), 0),
    **dict.fromkeys(("all_reduce", "all_reduce_coalesced", "broadcast", "broadcast_object_list", "all_to_all"), 2),
    **dict.fromkeys(("all_gather", "all_gather_object", "all_gather_coalesced", "all_gather_into_tensor"), 2),
    **dict.fromkeys(("_all_gather_base",), 2),
    **dict.fromkeys(("gather", "gather_object", "scatter", "scatter_object_list", "reduce"), 3),
    **dict.fromkeys(("reduce_scatter", "reduce_scatter_tensor", "_reduce_scatter_base"), 3),
    **dict.fromkeys(("all_to_all_single", "new_group", "new_subgroups"), 4),
}
_TORCH_HOMES = re.compile(
    r"(torch\.distributed|deepspeed\.comm|deepspeed)(\.distributed_c10d|\.nn|\.nn\.functional|\.comm|"
    r"\._functional_collectives)?"
)
_FUNCTIONS = {
    "accelerate.utils": (
        *("gather", "gather_object", "reduce", "broadcast", "broadcast_object_list"),
        *("pad_across_processes", "wait_for_everyone"),
    ),
    "mmengine.dist": (*_TORCH, "all_reduce_dict", "all_reduce_params", "collect_results", "sync_random_seed"),
    "detectron2.utils.comm": ("synchronize", "all_gather", "gather", "reduce_dict", "shared_random_seed"),
    "torch_xla.core.xla_model": ("all_reduce", "all_gather", "mesh_reduce", "rendezvous", "reduce_scatter"),
    "horovod.torch": ("allreduce", "allgather", "broadcast", "broadcast_object", "allgather_object", "barrier"),
    "ddpstats": ("reduce_stats", "any_rank", "all_ranks", "recursive_average", "recursive_sum"),
    "torch.distributed.checkpoint": ("save", "load", "async_save"),
    "torch.nn.parallel": ("DistributedDataParallel",),
}
# What some module of a program itself is likely to wrap: by these names, in a module that is called after it.
_WRAPPED = frozenset({"all_reduce", "all_gather", "all_gather_object", "barrier", "broadcast", "broadcast_object_list"})
_WRAPPERS = re.compile(r".*(^|[._])(dist|distrib|distributed|comm)(_utils?)?")

_ACCELERATOR = ("gather", "reduce", "pad_across_processes", "wait_for_everyone")
_FABRIC = ("barrier", "all_reduce", "all_gather", "broadcast", "backward")
_METHODS_OF_MADE = {  # by how the maker's name begins
    "accelerate.Accelerator": _ACCELERATOR,
    "lightning.Fabric": _FABRIC,
    "lightning.fabric.Fabric": _FABRIC,
    "torchmetrics.": ("compute", "sync"),
    "deepspeed.initialize": ("backward", "step", "save_checkpoint", "load_checkpoint"),
    "ddpstats.StatsWindow": ("flush",),
    "ddpstats.StatsReducer": ("__call__", "start"),
    "ddpstats.StepChecks": ("step",),
    "ddpstats.NaNCapture": ("check",),
    "ddpstats.Sentinel": ("step",),
}
_METHODS_OF_NAMED = {  # by the last word of what they are called on
    "accelerator": _ACCELERATOR,
    "fabric": _FABRIC,
    "strategy": ("barrier", "reduce", "broadcast", "all_gather", "reduce_boolean_decision"),
}
_METHODS = frozenset({"wait_for_everyone", "gather_for_metrics", "reduce_boolean_decision"})
_SYNCS_OTHERWISE = frozenset({"sync_on_compute", "process_group", "distributed_available_fn", "dist_sync_fn"})
_LIGHTNING = frozenset({"lightning", "pytorch_lightning"})
_ASKS_FOR_WORLD = re.compile(
    r"(?i)is_(available|initialized|dist|distributed|parallel|multi)|world_?size|distributed|num_processes|n_?gpu|ddp"
)
_ASKS_FOR_RANK = re.compile(r"rank|main_process|master|zero")
_ON_ONE_RANK = frozenset({"gather", "gather_object", "reduce", "scatter", "scatter_object_list"})  # of torch
_OTHER_RESULTS = frozenset({"reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier"})
_ONLY_ONE_RANK = re.compile(r"(rank_?(zero|0)|main_process|master|on_main)(_only|_process)?(_fn)?|main_only")

_MOST_OPS = 100  # of one function, which others call in turn
MOST_SEC = 30.0  # of this process, for one file
_EACH = 1000  # questions between two looks at the clock, which is slow in places

_LIBRARIES = {home.partition(".")[0] for home in (*_FUNCTIONS, *_METHODS_OF_MADE)} - {"torch"} | _LIGHTNING
_WORDS = _LIBRARIES.union(
    ("torch.distributed", "import distributed", "sync_dist"),
    *(_WRAPPED, _METHODS, _METHODS_OF_NAMED, _FUNCTIONS["torch.nn.parallel"]),
)
MAY_HOLD = re.compile("|".join(map(re.escape, sorted(_WORDS))).encode())
"""Bytes that a file has where it calls a collective itself."""


@dataclass(frozen=True, eq=False)
class Collective:
    """``op`` is the operation, ``call`` where it is run in this function, ``via`` the function of the file that has it.

    ``is_grouped``: of a process group that may be not all ranks. ``agrees``: its result is the same on all ranks.
    """

    op: str
    call: ast.Call
    via: str = ""
    is_grouped: bool = False
    agrees: bool = True

    def __str__(self) -> str:
        return f"{self.via}() runs {self.op}, which" if self.via else self.op


class TooLongError(Exception):
    """Raised when a file takes longer than `MOST_SEC`."""


class Collectives:
    """The collectives of one file, looked up once for each call."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._end, self._asked = time.process_time() + MOST_SEC, 0
        self._calls: dict[ast.AST, list[ast.Call]] = {}
        self._certain_of: dict[Function, tuple[str, ...]] = {}
        self._possible_of: dict[Function, str] = {}
        self._known: dict[ast.Call, tuple[Collective, ...]] = {}

    def of(self, call: ast.Call, owner: ast.ClassDef | None) -> tuple[Collective, ...]:
        """Return the collectives that a call runs, in order. Raises `TooLongError`."""
        self._asked += 1
        if self._asked % _EACH == 0 and time.process_time() > self._end:
            raise TooLongError
        if call not in self._known:
            self._known[call] = self._through(call, owner) or self._direct(call)
        return self._known[call]

    def among(self, nodes: Sequence[ast.AST], owner: ast.ClassDef | None) -> list[Collective]:
        """Return the collectives of all ranks in the nodes, in the order of the text."""
        calls = (call for node in nodes for call in self._calls_in(node))
        return [collective for call in calls for collective in self.of(call, owner) if not collective.is_grouped]

    def _calls_in(self, node: ast.AST) -> list[ast.Call]:
        if node not in self._calls:
            self._calls[node] = [part for part in parts_of(node) if isinstance(part, ast.Call)]
        return self._calls[node]

    def possible(self, call: ast.Call, owner: ast.ClassDef | None) -> str:
        """Return an operation that the call may run, of any group and under any condition; empty if there is none."""
        if run := self._direct(call):
            return run[0].op
        function = self.program.function_called(call, owner)
        if function is not None and function not in self._possible_of:
            self._possible_of[function] = ""  # of one that calls itself
            calls = (part for part in parts_of(*function.body) if isinstance(part, ast.Call))
            inside = (self.possible(inner, self.program.owner[function]) for inner in calls)
            self._possible_of[function] = next((op for op in inside if op), "")
        return self._possible_of[function] if function is not None else ""

    # -- a function of the file ---------------------------------------------------------------------------------------

    def _through(self, call: ast.Call, owner: ast.ClassDef | None) -> tuple[Collective, ...]:
        function = self.program.function_called(call, owner)
        if function is None or is_for_one_rank(function):
            return ()
        ops = self._certain(function)
        passed = any(_names_group(keyword.arg or "") for keyword in call.keywords)
        grouped = passed or any(_names_group(last_name(argument)) for argument in call.args)
        return tuple(Collective(op, call, function.name, grouped) for op in ops)

    def _certain(self, function: Function) -> tuple[str, ...]:
        """Return the operations that a function runs whenever there is more than one rank."""
        if function not in self._certain_of:
            self._certain_of[function] = ()  # of one that calls itself
            ops = self._of_block(function.body, self.program.owner[function])
            self._certain_of[function] = tuple(islice(ops, _MOST_OPS))
        return self._certain_of[function]

    def _of_block(self, statements: Sequence[ast.stmt], owner: ast.ClassDef | None) -> Iterator[str]:
        for statement in statements:
            if isinstance(statement, ast.If):
                yield from (collective.op for collective in self.among([statement.test], owner))
                branches = [list(self._of_block(block, owner)) for block in (statement.body, statement.orelse)]
                if is_about_world(statement.test):
                    yield from branches[0] or branches[1]
                    continue
                yield from branches[0] if branches[0] == branches[1] else ()
                if any(exits([statement])):
                    return
            elif blocks := list(blocks_of(statement)):
                heads = [part for part in ast.iter_child_nodes(statement) if isinstance(part, (ast.expr, ast.withitem))]
                yield from (collective.op for collective in self.among(heads, owner))
                for block in blocks[:1] if isinstance(statement, ast.Try) else blocks:
                    yield from self._of_block(block, owner)
            else:
                yield from (collective.op for collective in self.among([statement], owner))
                if isinstance(statement, (ast.Return, ast.Raise)):
                    return

    # -- a library's --------------------------------------------------------------------------------------------------

    def _direct(self, call: ast.Call) -> tuple[Collective, ...]:
        name = self.program.resolve(call.func)
        home, _, op = name.rpartition(".")
        if home and op in _TORCH and _TORCH_HOMES.fullmatch(home):
            return self._of_torch(call, op, returns_result=bool(re.search(r"functional|\.nn", home)))
        for known, ops in _FUNCTIONS.items():
            if op in ops and (home == known or home.startswith(f"{known}.")):
                return (Collective(op, call, "", _may_be_grouped(call), op != "barrier"),)
        if op in _WRAPPED and _WRAPPERS.fullmatch(home) and not home.startswith("torch."):
            first = dotted(call.func).partition(".")[0]
            is_module = first in self.program.imports or first in self.program.modules  # and no communicator
            return self._of_torch(call, op) if is_module else ()
        return self._method(call)

    def _of_torch(self, call: ast.Call, op: str, returns_result: bool = False) -> tuple[Collective, ...]:
        if op == "new_group" and any(keyword.arg == "use_local_synchronization" for keyword in call.keywords):
            return ()
        groups = [keyword.value for keyword in call.keywords if keyword.arg is None or _names_group(keyword.arg)]
        last = _TORCH[op] + 1  # those that return the result have it elsewhere, behind numbers and operations
        groups += (
            []
            if op.startswith("new_")
            else _no_numbers(call.args[1:])
            if returns_result
            else call.args[last - 1 : last]
        )
        groups += [
            argument
            for argument in call.args
            if _names_group(last_name(argument.func if isinstance(argument, ast.Call) else argument))
        ]
        grouped = not all(ast.unparse(group) == "None" or dotted(group).endswith(".WORLD") for group in groups)
        agrees = op not in _ON_ONE_RANK and op not in _OTHER_RESULTS
        return (Collective(op, call, "", grouped, agrees),)

    def _method(self, call: ast.Call) -> tuple[Collective, ...]:
        op, on = "__call__", call.func  # of an object that the file has made, or a method
        if isinstance(on, ast.Attribute) and dotted(on) not in self.program.made:
            op, on = on.attr, on.value
        maker = self.program.made.get(dotted(on)) or (on if isinstance(on, ast.Call) else None)
        made_by = self.program.resolve(maker.func) if maker else ""
        keywords = [node.arg for node in ast.walk(maker) if isinstance(node, ast.keyword)] if maker else []
        alone = not _SYNCS_OTHERWISE.isdisjoint(keywords)
        known = not alone and any(op in ops and made_by.startswith(begin) for begin, ops in _METHODS_OF_MADE.items())
        if known and op == "__call__":
            return (Collective(made_by.rpartition(".")[2], call),)
        name = last_name(on).lstrip("_")
        is_lightnings = self._has_lightning and isinstance(on, ast.Attribute)
        named = op in _METHODS_OF_NAMED.get(name, ()) and (name != "strategy" or is_lightnings)
        if op == "backward":
            reduces = self._backwards.get(call)  # None of one that does not
            is_sure = reduces is not None and (reduces or named or known or name == "accelerator")
            return (Collective(op, call, agrees=False),) if is_sure else ()
        if known or named or op in _METHODS or self._is_lightnings(call, op, on):
            return (Collective(op, call, agrees=op not in ("barrier", "wait_for_everyone")),)
        return ()

    def _is_lightnings(self, call: ast.Call, op: str, on: ast.expr) -> bool:
        if op in ("log", "log_dict"):
            synced = [keyword.value for keyword in call.keywords if keyword.arg == "sync_dist"]
            alone = any(keyword.arg in ("rank_zero_only", "sync_dist_group") for keyword in call.keywords)
            return not alone and any(isinstance(value, ast.Constant) and value.value is True for value in synced)
        gathers = op == "all_gather" and dotted(on) in ("self", "pl_module")
        return self._has_lightning and (gathers or (op == "save_checkpoint" and last_name(on) == "trainer"))

    @property
    def _has_lightning(self) -> bool:
        return bool(self.program.modules & _LIGHTNING)

    @cached_property
    def _backwards(self) -> dict[ast.Call, bool]:
        return backwards_of(self.program)


def is_for_one_rank(function: Function) -> bool:
    """Return whether a decorator lets only one rank run the function."""
    functions = (
        decorator.func if isinstance(decorator, ast.Call) else decorator for decorator in function.decorator_list
    )
    return any(_ONLY_ONE_RANK.fullmatch(last_name(called)) for called in functions)


def is_about_world(test: ast.expr) -> bool:
    """Return whether a condition asks if there are other ranks at all."""
    text = ast.unparse(test)
    return bool(_ASKS_FOR_WORLD.search(text)) and not _ASKS_FOR_RANK.search(text)


def _may_be_grouped(call: ast.Call) -> bool:
    named = [*(keyword.arg for keyword in call.keywords), *map(last_name, call.args)]
    return any(name in (None, "no_dist", "groups") or _names_group(name) for name in named)


def _names_group(name: str) -> bool:
    return name in ("pg", "comm") or name.endswith(("group", "mesh", "process_set"))


def _no_numbers(arguments: Sequence[ast.expr]) -> list[ast.expr]:
    return [
        argument
        for argument in arguments
        if not isinstance(argument, ast.Constant) and "ReduceOp" not in dotted(argument)
    ]
