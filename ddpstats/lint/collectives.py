"""The calls of a program that are collectives of all ranks.

The tables have the functions of torch.distributed and of libraries that are built on it, methods of objects that the
file makes, and a few methods by name. A function of the same file that always runs a collective counts as a collective.
A collective of a process group other than all ranks is left out: its members cannot be read from the text.

``backward()`` is one on a loss for which the text shows, on each way to the call, that a model in a
DistributedDataParallel was called: what went through ``detach()`` or ``no_grad()``, is a number or a shape, or was made
by ``model.module``, by a copy or by a model that is frozen, needs no other rank.
"""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from ddpstats.lint.program import (
    Definition,
    Function,
    Position,
    Program,
    Table,
    blocks_of,
    calls_in,
    dotted,
    exits,
    heads_of,
    last_name,
    parts_of,
    sides_of,
    stored_in,
)

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
_OWN_RESULTS = frozenset(  # of torch's, whose results are not the same on all ranks
    {"gather", "gather_object", "reduce", "scatter", "scatter_object_list", "barrier"}
    | {"reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"}
)
_ONLY_ONE_RANK = re.compile(r"(rank_?(zero|0)|main_process|master|on_main)(_only|_process)?(_fn)?|main_only")

SYNCED = re.compile(r"(?i)all_?reduce|broadcast|bcast|_reduce$|reduce_|sync|agree|gather|across")
"""What a function is called that makes its arguments equal on all ranks, or returns what is."""

_WRAPS_MODEL = frozenset({"DistributedDataParallel", "DDP"})
_LEAVES_UNSYNCED = re.compile(r"no_(backward_)?sync|require_backward_grad_sync|accumulate")
_CUTS = re.compile(  # what a tensor says of itself, and what has no gradient or is not of the wrapped model
    r"dtype|device|shape|n?dim|size|numel|nelement|stride|layout|requires_grad|element_size|is_(cuda|floating_point)|"
    r"detach_?|item|data|grad|module|tolist|numpy|long|int|bool|arg(max|min)"
)
_CUTTING = re.compile(r"float|int|bool|len|(torch|np|numpy)\.(\w+_like|arg\w+|tensor|from_numpy)")
_NO_GRADIENT = re.compile(r"no_grad|inference_mode|set_grad_enabled\((?!True)")
_UNWRAPS = re.compile(r"\.module\b|unwrap|copy")
_FREEZES = re.compile(r"(.+)\.requires_grad_\(False\)")

_MOST_OPS = 100  # of one function, which others call in turn
MOST_SEC = 30.0  # of this process, for one file

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
        self._end = time.process_time() + MOST_SEC
        self._calls: dict[ast.AST, list[ast.Call]] = {}
        self._certain_of: dict[Function, tuple[str, ...]] = {}
        self._possible_of: dict[Function, str] = {}
        self._known: dict[ast.Call, tuple[Collective, ...]] = {}

    def of(self, call: ast.Call, owner: ast.ClassDef | None) -> tuple[Collective, ...]:
        """Return the collectives that a call runs, in order. Raises `TooLongError`."""
        if call not in self._known:
            if time.process_time() > self._end:
                raise TooLongError
            self._known[call] = self._through(call, owner) or self._direct(call)
        return self._known[call]

    def among(self, nodes: Sequence[ast.AST], owner: ast.ClassDef | None) -> list[Collective]:
        """Return the collectives of all ranks in the nodes, in the order of the text."""
        calls = (call for node in nodes for call in self._calls_in(node))
        return [collective for call in calls for collective in self.of(call, owner) if not collective.is_grouped]

    def syncs(self, call: ast.Call, owner: ast.ClassDef | None) -> bool:
        """Return whether a call makes its arguments equal on all ranks: a collective, or one named like it."""
        run = self.of(call, owner)
        return any(collective.agrees for collective in run) if run else bool(SYNCED.search(last_name(call.func)))

    def _calls_in(self, node: ast.AST) -> list[ast.Call]:
        if node not in self._calls:
            self._calls[node] = list(calls_in(node))
        return self._calls[node]

    def possible(self, call: ast.Call, owner: ast.ClassDef | None) -> str:
        """Return an operation that the call may run, of any group and under any condition; empty if there is none."""
        if run := self._direct(call):
            return run[0].op
        function = self.program.function_called(call, owner)
        if function is not None and function not in self._possible_of:
            self._possible_of[function] = ""  # of one that calls itself
            inside = (self.possible(inner, self.program.owner[function]) for inner in calls_in(*function.body))
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
                yield from (collective.op for collective in self.among(heads_of(statement), owner))
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
        at = _TORCH[op]  # those that return the result have it elsewhere, behind numbers and operations
        others = [argument for argument in call.args[1:] if not isinstance(argument, ast.Constant)]
        others = [argument for argument in others if "ReduceOp" not in dotted(argument)]
        positional = others if returns_result else call.args[at : at + 1]
        groups = [keyword.value for keyword in call.keywords if keyword.arg is None or _names_group(keyword.arg)]
        groups += [] if op.startswith("new_") else positional
        groups += [argument for argument in call.args if _names_group(last_name(getattr(argument, "func", argument)))]
        grouped = not all(ast.unparse(group) == "None" or dotted(group).endswith(".WORLD") for group in groups)
        return (Collective(op, call, "", grouped, op not in _OWN_RESULTS),)

    def _method(self, call: ast.Call) -> tuple[Collective, ...]:
        op, on = "__call__", call.func  # of an object that the file has made, or a method
        if isinstance(on, ast.Attribute) and not self.program.maker(dotted(on)):
            op, on = on.attr, on.value
        maker = self.program.maker(dotted(on)) or (on if isinstance(on, ast.Call) else None)
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
    called = (getattr(decorator, "func", decorator) for decorator in function.decorator_list)
    return any(_ONLY_ONE_RANK.fullmatch(last_name(name)) for name in called)


def is_about_world(test: ast.expr) -> bool:
    """Return whether a condition asks if there are other ranks at all."""
    text = ast.unparse(test)
    return bool(_ASKS_FOR_WORLD.search(text)) and not _ASKS_FOR_RANK.search(text)


def _may_be_grouped(call: ast.Call) -> bool:
    named = [*(keyword.arg for keyword in call.keywords), *map(last_name, call.args)]
    return any(name in (None, "no_dist", "groups") or _names_group(name) for name in named)


def _names_group(name: str) -> bool:
    return name in ("pg", "comm") or name.endswith(("group", "mesh", "process_set"))


def backwards_of(program: Program) -> dict[ast.Call, bool]:
    """Return the calls outside of no_sync(), with whether the text shows that a wrapped model computed the loss."""
    assigned = [node for node in program.nodes if isinstance(node, ast.Assign) and _wraps(node.value)]
    wrapped = {dotted(part) for node in assigned for target in node.targets for part in ast.walk(target)} - {""}
    calls: dict[ast.Call, bool] = {}
    for body, function, _ in program.scopes():
        names = {last_name(part) for part in parts_of(*body)}
        if "backward" in names and not any(map(_LEAVES_UNSYNCED.fullmatch, names)):
            losses = _Losses(body, program.table(function), wrapped)
            for node, position in losses.table.at.items():
                for call in calls_in(node) if isinstance(node, ast.stmt) and not sides_of(node) else ():
                    if last_name(call.func) == "backward":
                        calls[call] = any(losses.is_made(part, position) for part in ast.iter_child_nodes(call))
    return calls


class _Losses:
    """The losses of one function. ``wrapped``: the models that the file wraps anywhere."""

    def __init__(self, body: Sequence[ast.stmt], table: Table, wrapped: set[str]) -> None:
        self.table = table
        self._wrapped = wrapped - {definition.name for definition in self.table.definitions}
        self._frozen = {match[1] for call in calls_in(*body) if (match := _FREEZES.fullmatch(ast.unparse(call)))}
        blocks = (node for node in self.table.at if isinstance(node, ast.With))
        free = (block for block in blocks if any(_NO_GRADIENT.search(ast.unparse(item)) for item in block.items))
        self._without_gradient = {part for block in free for part in parts_of(*block.body)}
        self._known: dict[Definition, tuple[bool, bool]] = {}
        for definition in self.table.definitions:  # in order, so that none waits for a long chain of others
            self._of_definition(definition)

    def _of_definition(self, definition: Definition) -> tuple[bool, bool]:
        """Return whether a definition gives a wrapped model, and whether it gives what one has computed."""
        if definition not in self._known:
            name, value, before = definition.name, definition.value, definition.before
            keeps = not _UNWRAPS.search(ast.unparse(value)) and name in map(dotted, ast.walk(value))
            is_model = self._is_model(dotted(value), before) or (keeps and self._is_model(name, before))
            sources = [value, definition.target] if definition.kind == "added" else [value]
            made = any(self.is_made(source, before) for source in sources)
            made &= definition.kind != "turn" and definition.target not in self._without_gradient
            self._known[definition] = is_model or _wraps(value), made
        return self._known[definition]

    def _is_model(self, name: str, position: Position) -> bool:
        """Return whether a name is a wrapped model, and on no way another value that has replaced one."""
        reaching = [definition for definition in self.table.reaching(name, position) if definition]
        others = [definition for definition in reaching if not self._of_definition(definition)[0]]
        is_wrapped = len(others) < len(reaching) or (not reaching and name in self._wrapped)
        is_replaced = any(self._is_model(name, other.before) for other in others)
        return is_wrapped and not is_replaced and name not in self._frozen

    def is_made(self, node: ast.AST, position: Position) -> bool:
        if isinstance(node, ast.Call):
            if self._is_model(dotted(node.func), position):
                return True
            if _CUTTING.fullmatch(dotted(node.func)):
                return False
        hides = hasattr(node, "generators") and any(self._is_model(name, position) for name in stored_in(node))
        if hides or isinstance(node, (ast.Lambda, ast.Compare)) or _CUTS.fullmatch(getattr(node, "attr", "")):
            return False
        if isinstance(node, ast.IfExp):
            return self.is_made(node.body, position) and self.is_made(node.orelse, position)
        reaching = [definition for definition in self.table.reaching(f"{dotted(node)}[]", position) if definition]
        if reaching and all(self._of_definition(definition)[1] for definition in reaching):
            return True
        return any(self.is_made(part, position) for part in ast.iter_child_nodes(node))


def _wraps(value: ast.AST) -> bool:
    return any(isinstance(node, ast.Call) and last_name(node.func) in _WRAPS_MODEL for node in ast.walk(value))
