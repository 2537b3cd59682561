"""The tables and rules here say which calls of a program are collectives of all ranks.

The tables have the functions of torch.distributed and of libraries that are built on it, methods of objects that the
file makes, and a few methods by name. A function of the same file that always runs a collective counts as a collective.
A collective of a process group other than all ranks is left out: its members cannot be read from the text.

``backward()`` is one where `origins` has seen that it reduces; never through a function that calls it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice

from ddpstats._observe.operators import operator_of
from ddpstats.lint.program import FunctionNode, Program, blocks_of, calls_in, exits, heads_of, last_name, name_of

TRY = (ast.Try, getattr(ast, "TryStar", ast.Try))  # ``except*`` makes a TryStar, since Python 3.11
# Functions of torch.distributed that all ranks must call and that are no operators of c10d: the index of the process
# group among their parameters (None: they make one), and whether all ranks get the same result.
_BESIDE_OPERATORS: dict[str, tuple[int | None, bool]] = {
    **dict.fromkeys(("broadcast_object_list", "all_gather_object"), (2, True)),
    **dict.fromkeys(("gather_object", "scatter_object_list"), (3, False)),
    **dict.fromkeys(("new_group", "new_subgroups"), (None, True)),
}
_TORCH_HOMES = re.compile(
    r"(torch\.distributed|deepspeed\.comm|deepspeed)(\.distributed_c10d|\.nn|\.nn\.functional|\.comm|"
    r"\._functional_collectives)?"
)
_ACCELERATOR = ("gather", "reduce", "pad_across_processes", "wait_for_everyone", "backward")
# The collectives that programs are likely to wrap: by these names, in a module that is called after torch.distributed.
_WRAPPED = frozenset({"all_reduce", "all_gather", "all_gather_object", "barrier", "broadcast", "broadcast_object_list"})
_FUNCTIONS = {
    "mmengine.dist": (
        *(*_WRAPPED, "gather", "gather_object", "all_reduce_dict", "all_reduce_params"),
        *("collect_results", "sync_random_seed"),
    ),
    "accelerate.utils": (*_ACCELERATOR, "gather_object", "broadcast", "broadcast_object_list"),
    "detectron2.utils.comm": ("synchronize", "all_gather", "gather", "reduce_dict", "shared_random_seed"),
    "torch_xla.core.xla_model": ("all_reduce", "all_gather", "mesh_reduce", "rendezvous", "reduce_scatter"),
    "horovod.torch": ("allreduce", "allgather", "broadcast", "broadcast_object", "allgather_object", "barrier"),
    "ddpstats": ("reduce_stats", "any_rank", "all_ranks", "recursive_average", "recursive_sum"),
    "torch.distributed.checkpoint": ("save", "load", "async_save"),
    "torch.nn.parallel": ("DistributedDataParallel",),
}
_WRAPPERS = re.compile(r".*(^|[._])(dist|distrib|distributed|comm)(_utils?)?")

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
    "WORLD": ("allreduce", "allgather", "barrier", "broadcast"),
    "strategy": ("barrier", "reduce", "broadcast", "all_gather", "reduce_boolean_decision"),
}
_METHODS = frozenset({"wait_for_everyone", "gather_for_metrics", "reduce_boolean_decision"})
_SYNCS_OTHERWISE = frozenset(
    {"sync_on_compute", "process_group", "distributed_available_fn", "dist_sync_fn"}
    | {"rank_zero_only", "sync_dist_group"}
)
_LIGHTNING = frozenset({"lightning", "pytorch_lightning"})
_ASKS_FOR_WORLD = re.compile(
    r"(?i)is_(available|initialized|dist|distributed|parallel|multi)|world_?size|distributed|num_processes|n_?gpu|ddp"
)
_ASKS_FOR_RANK = re.compile(r"rank|main_process|master|zero")
_ONLY_ONE_RANK = re.compile(r"(rank_?(zero|0)|main_process|master|on_main)(_only|_process)?(_fn)?|main_only")

# Names of functions that make their arguments equal on all ranks, or return what is.
SYNCED = re.compile(r"(?i)all_?reduce|broadcast|bcast|_reduce$|reduce_|sync|agree|gather|across")

_MOST_OPS = 100  # of one function, which others call in turn

_LIBRARIES = {home.partition(".")[0] for home in (*_FUNCTIONS, *_METHODS_OF_MADE)} - {"torch"} | _LIGHTNING
_WORDS = _LIBRARIES.union(
    ("distributed", "sync_dist"),
    *(_WRAPPED, _METHODS, _METHODS_OF_NAMED, _FUNCTIONS["torch.nn.parallel"]),
)
# Bytes that a file has where it calls a collective itself.
MAY_HOLD = re.compile("|".join(map(re.escape, sorted(_WORDS))).encode())


@dataclass(frozen=True, eq=False)
class CollectiveCall:
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


class Collectives:
    """The collectives of one file, looked up once for each call.

    ``reducing``: the calls of ``backward()`` that are known to reduce.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.reducing = set[ast.Call]()
        self._has_lightning = bool(program.modules & _LIGHTNING)
        self._calls_in = cache(lambda node: tuple(calls_in(node)))
        self._certain_of: dict[FunctionNode, tuple[str, ...]] = {}
        self._possible_of: dict[FunctionNode, str] = {}
        self._known: dict[ast.Call, tuple[CollectiveCall, ...]] = {}

    def of(self, call: ast.Call) -> tuple[CollectiveCall, ...]:
        """Return the collectives that a call runs, in order."""
        if last_name(call.func) == "backward":
            return (CollectiveCall("backward", call, agrees=False),) if call in self.reducing else ()
        if call not in self._known:
            self._known[call] = self._through(call) or self.of_library(call)
        return self._known[call]

    def among(self, nodes: Sequence[ast.AST]) -> list[CollectiveCall]:
        """Return the collectives of all ranks in the nodes, in the order of the text."""
        calls = (call for node in nodes for call in self._calls_in(node))
        return [collective for call in calls for collective in self.of(call) if not collective.is_grouped]

    def syncs(self, call: ast.Call) -> bool:
        """Return whether a call makes its arguments equal on all ranks: a collective, or one named like it."""
        run = self.of(call)
        return any(collective.agrees for collective in run) if run else bool(SYNCED.search(last_name(call.func)))

    def possible(self, call: ast.Call) -> str:
        """Return an operation that the call may run, of any group and under any condition; empty if it runs none."""
        if run := self.of_library(call):
            return run[0].op
        function = self.program.find_function(call)
        if function is not None and function not in self._possible_of:
            self._possible_of[function] = ""  # of one that calls itself
            inside = map(self.possible, calls_in(*function.body))
            self._possible_of[function] = next((op for op in inside if op), "")
        return self._possible_of[function] if function is not None else ""

    # -- a function of the file ---------------------------------------------------------------------------------------

    def _through(self, call: ast.Call) -> tuple[CollectiveCall, ...]:
        function = self.program.find_function(call)
        if function is None or is_for_one_rank(function):
            return ()
        if function not in self._certain_of:
            self._certain_of[function] = ()  # of one that calls itself
            ops = (op for op in self._certain(function.body) if op != "backward")
            self._certain_of[function] = tuple(islice(ops, _MOST_OPS))
        grouped = any(map(_names_group, _argument_names(call)))
        return tuple(CollectiveCall(op, call, function.name, grouped) for op in self._certain_of[function])

    def _certain(self, statements: Sequence[ast.stmt]) -> Iterator[str]:
        """Yield the operations that statements run whenever there is more than one rank."""
        for statement in statements:
            yield from (collective.op for collective in self.among(heads_of(statement)))
            if isinstance(statement, ast.If):
                body, orelse = (list(self._certain(side)) for side in (statement.body, statement.orelse))
                if is_about_world(statement.test):
                    yield from body or orelse
                    continue
                yield from body if body == orelse else ()
                if any(exits([statement])):
                    return
                continue
            blocks = list(blocks_of(statement))
            for block in blocks[:1] if isinstance(statement, TRY) else blocks:
                yield from self._certain(block)
            if isinstance(statement, (ast.Return, ast.Raise)):
                return

    # -- a library's --------------------------------------------------------------------------------------------------

    def of_library(self, call: ast.Call) -> tuple[CollectiveCall, ...]:
        """Return the collective that a call runs where it is one of the tables."""
        name = self.program.resolve(call.func)
        home, _, op = name.rpartition(".")
        if _TORCH_HOMES.fullmatch(home) and _group_and_agreement(op):
            return self._of_torch(call, op, returns_result=bool(re.search(r"functional|\.nn", home)))
        for known, ops in _FUNCTIONS.items():
            if op in ops and (home == known or home.startswith(f"{known}.")):
                grouped = any(name in ("", "no_dist", "groups") or _names_group(name) for name in _argument_names(call))
                return (CollectiveCall(op, call, "", grouped, op != "barrier"),)
        if op in _WRAPPED and _WRAPPERS.fullmatch(home) and not home.startswith("torch."):
            first = name_of(call.func).partition(".")[0]
            is_module = first in self.program.imports or first in self.program.modules  # and no communicator
            return self._of_torch(call, op) if is_module else ()
        return self._method(call)

    def _of_torch(self, call: ast.Call, op: str, returns_result: bool = False) -> tuple[CollectiveCall, ...]:
        if op == "new_group" and any(keyword.arg == "use_local_synchronization" for keyword in call.keywords):
            return ()
        # Those that return the result have the group elsewhere, behind numbers and operations.
        index, agrees = _group_and_agreement(op) or (None, True)
        others = [argument for argument in call.args[1:] if not isinstance(argument, ast.Constant)]
        others = [argument for argument in others if "ReduceOp" not in name_of(argument)]
        groups = [keyword.value for keyword in call.keywords if keyword.arg is None or _names_group(keyword.arg)]
        groups += others if returns_result else [] if index is None else call.args[index : index + 1]
        groups += [argument for argument in call.args if _names_group(last_name(getattr(argument, "func", argument)))]
        grouped = not all(ast.unparse(group) == "None" or name_of(group).endswith(".WORLD") for group in groups)
        return (CollectiveCall(op, call, "", grouped, agrees),)

    def _method(self, call: ast.Call) -> tuple[CollectiveCall, ...]:
        op, on = "__call__", call.func  # of an object that the file has made, or a method
        if isinstance(on, ast.Attribute) and not self.program.maker(name_of(on)):
            op, on = on.attr, on.value
        maker = self.program.maker(name_of(on)) or (on if isinstance(on, ast.Call) else None)
        made_by = self.program.resolve(maker.func) if maker else ""
        keywords = [node.arg for node in ast.walk(maker) if isinstance(node, ast.keyword)] if maker else []
        is_partial = made_by == "functools.partial" and op == "__call__"
        # no chain, no circle
        if maker and is_partial and maker.args and not self.program.maker(name_of(maker.args[0])):
            whole = ast.Call(maker.args[0], [*maker.args[1:], *call.args], [*maker.keywords, *call.keywords])
            return tuple(replace(collective, call=call) for collective in self.of_library(whole))
        alone = not _SYNCS_OTHERWISE.isdisjoint(keywords)
        if not alone and any(op in ops and made_by.startswith(begin) for begin, ops in _METHODS_OF_MADE.items()):
            return (CollectiveCall(made_by.rpartition(".")[2] if op == "__call__" else op, call),)
        name = last_name(on).lstrip("_")
        named = op in _METHODS_OF_NAMED.get(name, ()) and (
            name != "strategy" or (self._has_lightning and isinstance(on, ast.Attribute))
        )
        if named or op in _METHODS or self._is_lightnings(call, op, on):
            return (CollectiveCall(op, call, agrees=op not in ("barrier", "wait_for_everyone")),)
        return ()

    def _is_lightnings(self, call: ast.Call, op: str, on: ast.expr) -> bool:
        if op in ("log", "log_dict"):
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            return keywords.get("sync_dist") == "True" and keywords.keys().isdisjoint(_SYNCS_OTHERWISE)
        gathers = op == "all_gather" and name_of(on) in ("self", "pl_module")
        return self._has_lightning and (gathers or (op == "save_checkpoint" and last_name(on) == "trainer"))


def _group_and_agreement(op: str) -> tuple[int | None, bool] | None:
    """Return what `_BESIDE_OPERATORS` says, of any collective of torch.distributed; None for other functions."""
    operator = operator_of(op)
    if operator is None or operator.is_message:
        return _BESIDE_OPERATORS.get(op)
    return operator.parameter_names.index("group"), operator.has_equal_results


def is_for_one_rank(function: FunctionNode) -> bool:
    """Return whether a decorator lets only one rank run the function."""
    called = (getattr(decorator, "func", decorator) for decorator in function.decorator_list)
    return any(_ONLY_ONE_RANK.fullmatch(last_name(name)) for name in called)


def is_about_world(test: ast.expr) -> bool:
    """Return whether a condition asks if there are other ranks at all."""
    text = ast.unparse(test)
    return bool(_ASKS_FOR_WORLD.search(text)) and not _ASKS_FOR_RANK.search(text)


def _argument_names(call: ast.Call) -> list[str]:
    """Return the names of keywords, "" of ``**kwargs``, and of variables that are passed."""
    positional = filter(None, map(last_name, call.args))
    return [*(keyword.arg or "" for keyword in call.keywords), *positional]


def _names_group(name: str) -> bool:
    return name in ("pg", "comm") or name.endswith(("group", "mesh", "process_set"))
