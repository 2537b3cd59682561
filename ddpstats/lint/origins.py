"""An expression's value has an origin: the rank, this rank's data, or nothing that ranks differ in.

Judged by names that the field uses and by calls, and carried through the variables of one function. Three answers:

- `Differs`: ranks may have different values, and why;
- ``SAME``: a constant, or what a collective made equal on all ranks;
- None: not known, which is no finding. Configuration, sizes of the world and parameters are here.

And the order of an iteration: whether ranks may not share it. A set of strings has another order in each process, and a
dict has that of its insertions. A dict is a finding where it is a function's argument, unless the calls in the same
file pass one that ranks fill equally, and where its keys are read from the data. Other dicts are not judged.
"""

from __future__ import annotations

import ast
import builtins
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Final, NamedTuple

from ddpstats.lint.collectives import SYNCED, TRY, Collectives, is_about_world
from ddpstats.lint.program import (
    Exit,
    FunctionNode,
    blocks_of,
    calls_in,
    elements_of,
    heads_of,
    last_name,
    name_of,
    parameters_of,
    parts_of,
    text_of,
)

RANK_BRANCH = "rank-branch"
DATA_BRANCH = "data-branch"


@dataclass(frozen=True)
class Differs:
    """``rule`` is of a collective under such a condition, ``why`` the end of a sentence about it.

    ``file``: what is asked for, where it is a file: all ranks see the same, until one of them makes it.
    """

    rule: str
    why: str
    file: str = ""


SAME: Final = "same"
Origin = Differs | str | None

_RANK = re.compile(
    r"_*(get_)?(((local|global|world|dist|distributed|process|proc|node|my|cur|current|this|ddp|mpi)_)?rank|ordinal"
    r"|((local_)?process_(index|idx))|(is_|am_)?(local_|global_)?(main|master|primary)_(process|rank|worker|proc)|rank_?zero"
    r"|is_(main|master|chief|rank_?(zero|0)|global_zero|root_rank|world_process_zero|local_process_zero|master_ordinal))"
)
_RANK_VARIABLES = frozenset({"RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK"})
_IS_OF_A_CLASS = re.compile(r"(\w+\.)*(self|cls|[A-Z]\w*)\.[A-Z][A-Z0-9_]*")  # a constant, perhaps of another file
_OTHER_RANK = re.compile(r"n?dim(ension)?\b|len\(|matrix_rank|\.index\(")  # of a tensor, a matrix, in a list
_ADAPTERS = re.compile(r"(?i)lora|adapter|low_?rank|svd|power_?sgd|tucker|decompos")
_CONFIGURED = re.compile(r"(?i)args|config|cfg|opts?\b|hparams|split\(")
# what a rank has read or computed for itself
_DATA = re.compile(
    r"(?i).*?(^|_)(batch(es)?|samples?|loss(es)?|preds?|predictions?|outputs?|results?|stats?|metrics?|logits|labels?|"
    r"targets?|inputs?|tokens|utts?|boxes|masks?|feats?|features?|embeddings?|images?|examples?|completions?)"
)
_LOSS = re.compile(r"(?i)(?!.*(val|valid|eval|test|best|avg|mean|global|reduced|dev|sync)_).*?(^|_)loss(es)?")
_ENTRIES = re.compile(r"(?i).*?(^|_)(stats?|metrics|losses|loss_dict|log_vars|logs|results|scores|meters|totals)")
_COMPUTES = re.compile(r"\w*$|(self|torch|F)\.|.*(model|net|module|criterion)\.")  # a call of this rank's own
_EQUAL_NAMES = re.compile(
    r"(?i).*(grad|param|weight|norm|step|epoch|buffer|version|config|args|group|world|count|scale|lr)"
)
_NAN_CHECKS = frozenset({"isnan", "isinf", "isfinite"})
_CLOCKS = frozenset({"time.time", "time.monotonic", "time.perf_counter", "time.process_time"})
_FILE_CHECKS = frozenset({"exists", "isfile", "isdir", "is_file", "is_dir"})
_BATCHES = frozenset({"batch", "sample", "inputs"})
_NUMBERS = frozenset({"item", "numel", "nelement", "any", "all", "sum", "max", "min"})  # of a tensor
_THROUGH = frozenset(
    {"bool", "int", "float", "abs", "any", "all", "max", "min", "sum", "round", "list", "tuple", "str", "tensor"}
    | {"mean", "cpu", "detach", "long", "numpy", "clone", "to", "logical_not", "squeeze", "tolist", "view", "get"}
)
# for the order of an iteration
_SHARED = re.compile(
    r"(?i).*(param|state(_dict)?|buffers|modules|config|weights|groups|children|dataset|loader|batch|model|optim|args|hyper)"
)
_STRINGS = re.compile(r"(?i)name|keys?\b|lang|word|tags?\b|\.split\(|\bstr\(")
_PASSES_ON = frozenset({"enumerate", "list", "tuple", "tqdm"})
# The collectives of utilities for any dict, which hand in an entry itself: those with a buffer for the result are not.
_DIRECT = frozenset({"all_reduce", "all_gather", "reduce", "broadcast"})
# for backward()
_WRAPS_MODEL = re.compile(r"\b(DistributedDataParallel|DDP)\(")
_MAY_NOT_REDUCE = re.compile(  # where a function has it, its backward() is not judged
    r"no_(backward_)?sync|require_backward_grad_sync|\baccumulate\(|set_grad_enabled\((?!True)|requires_grad_\(False"
)
_WITHOUT_GRADIENT = re.compile(r"no_grad|inference_mode")
_CUTS = re.compile(  # what a tensor says of itself, and what has no gradient
    r"dtype|device|shape|n?dim|size|numel|nelement|stride|layout|requires_grad|element_size|is_(cuda|floating_point)|"
    r"detach_?|item|data|grad|tolist|numpy|long|int|float|bool|len|arg(max|min|sort|where)|\w+_like|tensor|from_numpy"
)


class ValueOrigin(NamedTuple):
    """A variable's origin, and whether it is a wrapped model or came from one.

    ``is_model``: DistributedDataParallel may wrap it. ``is_made``: such a model has made it.
    """

    origin: Origin = None
    is_model: bool = False
    is_made: bool = False


class VariableOrigins:
    """The values of a function's variables, by the text of a target: "loss", "self.loss", "losses[0]".

    ``now`` is the number of changes until here. It may be set back, and the values are then those of that time.
    """

    def __init__(self) -> None:
        self.now = 0
        self._changed: list[str] = []
        self._values: dict[str, list[tuple[int, ValueOrigin | None]]] = {}

    def get(self, name: str) -> ValueOrigin | None:
        values = self._values.get(name, [])
        index = bisect_right(values, self.now, key=itemgetter(0))
        return values[index - 1][1] if index else None

    def set(self, name: str, value: ValueOrigin | None) -> None:
        self._changed.append(name)
        self.now = len(self._changed)
        self._values.setdefault(name, []).append((self.now, value))

    def undo_since(self, then: int) -> dict[str, ValueOrigin | None]:
        """Give the variables that have changed the values that they had, and return those that they have now."""
        changed = {name: self.get(name) for name in self._changed[then:]}
        self.now = then
        for name, value in [(name, self.get(name)) for name in changed]:
            self.set(name, value)
        return changed


class Origins:
    """The variables of one function: it is interpreted once, and `at` goes back to a statement.

    A loop makes a turn. Behind an ``if`` or a ``try``, a variable has what its sides have in common. Of an ``if`` of
    which one side synchronises, only that side counts: with several ranks, it is taken.
    """

    def __init__(self, collectives: Collectives, body: Sequence[ast.stmt], function: FunctionNode | None) -> None:
        self._collectives = collectives
        self._program = collectives.program
        self._body, self._function = body, function
        self._owned_by = self._program.functions[function] + function.name if function else ""
        self.text = "\n".join(map(ast.unparse, body))
        self._may_reduce = "backward" in self.text and not _MAY_NOT_REDUCE.search(self.text)
        self._variables = VariableOrigins()
        self._at: dict[ast.AST, int] = {}  # when `VariableOrigins.now` was at each statement
        self._values: dict[str, list[ast.expr]] = {}  # all that are assigned to a name
        self._asked = set[str]()  # flags that may be of themselves
        self._parameters = parameters_of(function) if function else {}
        for name, default in self._parameters.items():
            if isinstance(default, (ast.Tuple, ast.List)):
                self._assign(ast.Name(name), default)
        self._walk(body)

    def at(self, node: ast.AST) -> None:
        self._variables.now = self._at[node]

    @cached_property
    def unread(self) -> list[tuple[str, int, int]]:
        """Return what the function's own statements assign, and between which lines it is not read."""
        unread, read = list[tuple[str, int, int]](), dict[str, int]()
        for statement in self._body:
            if isinstance(statement, ast.Assign):
                elements = (element for target in statement.targets for element in elements_of(target))
                held = (element.value if isinstance(element, ast.Subscript) else element for element in elements)
                # `() = f()` holds nothing
                read_until = max((read.get(name_of(each), 0) for each in held), default=0)
                unread.append((ast.unparse(statement), read_until, statement.lineno))
            loads = (part for part in ast.walk(statement) if isinstance(getattr(part, "ctx", None), ast.Load))
            read.update((name_of(part), statement.end_lineno or 0) for part in loads)
        return unread

    # -- statements ---------------------------------------------------------------------------------------------------

    def _walk(self, statements: Sequence[ast.stmt]) -> None:
        for node in statements:
            for part in parts_of(*heads_of(node)):
                self._expression(part)
            self._at[node] = self._variables.now
            if isinstance(node, (ast.For, ast.AsyncFor)):
                self._turn(node)
            elif isinstance(node, ast.AugAssign):
                added = ast.BinOp(node.target, node.op, node.value)
                self._set(node.target, self._value(node.target, added))
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self._assign(target, node.value)
            if isinstance(node, ast.If):
                self._sides([node.body, node.orelse], node.test)
            elif isinstance(node, TRY):
                whole = [*node.body, *node.orelse, *node.finalbody]
                self._sides([whole, *(handler.body for handler in node.handlers)])
            else:
                for block in blocks_of(node):
                    self._walk(block)
            if isinstance(node, ast.With) and any(map(_WITHOUT_GRADIENT.search, map(ast.unparse, node.items))):
                for name, value in self._variables.undo_since(self._at[node]).items():
                    if value and value is not self._variables.get(name):
                        self._variables.set(name, value._replace(is_made=False))
            if isinstance(node, ast.While):
                self._at[node.test] = self._variables.now

    def _turn(self, node: ast.For | ast.AsyncFor) -> None:
        """Set the variables of a loop; ``rank`` of ``for rank in ranks`` is not this process' rank."""
        for target in parts_of(node.target):
            if isinstance(target, (ast.Name, ast.Attribute)):
                self._set(target, ValueOrigin(SAME if _RANK.fullmatch(last_name(target)) else None))

    def _sides(self, sides: Sequence[Sequence[ast.stmt]], test: ast.expr | None = None) -> None:
        """Walk the sides. A constant that is set under a condition depends on what the condition does."""
        before = self._variables.now
        origin = self.of_condition(test) if test is not None else None
        ends: list[tuple[bool, dict[str, ValueOrigin | None]]] = []
        for side in sides:
            self._walk(side)
            assigned = {ast.unparse(node.targets[0]): node.value for node in side if isinstance(node, ast.Assign)}
            for name, value in assigned.items():
                if isinstance(origin, Differs) and isinstance(value, ast.Constant):
                    self._variables.set(name, ValueOrigin(origin))
            changed = self._variables.undo_since(before)
            if not side or not isinstance(side[-1], Exit | ast.Raise):
                synced = test is not None and any(map(self._collectives.syncs, calls_in(*side)))
                ends.append((synced, changed))
        kept = [end for synced, end in ends if synced] or [end for _, end in ends]
        for name in {name for end in kept for name in end}:
            old = self._variables.get(name)
            self._variables.set(name, _join([end.get(name, old) or ValueOrigin() for end in reversed(kept)]))

    def _expression(self, part: ast.AST) -> None:
        """Take in what a part of an expression changes."""
        if isinstance(part, ast.NamedExpr):
            self._assign(part.target, part.value)
        elif isinstance(part, ast.Call):
            arguments = (
                [*part.args, *(keyword.value for keyword in part.keywords)] if self._collectives.syncs(part) else []
            )
            for element in (each for argument in arguments for each in elements_of(argument)):
                target = element.value if isinstance(element, ast.Attribute) and element.attr == "data" else element
                if not _RANK.fullmatch(last_name(target)):  # a number that is passed on stays as it is
                    self._set(target, self._look_up(target)._replace(origin=SAME))
            name, on = last_name(part.func), getattr(part.func, "value", None)
            if name in ("extend", "append") and part.args and on is not None and self.of(part.args[0]) == SAME:
                self._set(on, self._look_up(on)._replace(origin=SAME))
            is_judged = name == "backward" and self._may_reduce
            if is_judged and (any(map(self._is_made, (part.func, *part.args))) or self._collectives.of_library(part)):
                self._collectives.reducing.add(part)

    # -- variables ----------------------------------------------------------------------------------------------------

    def _look_up(self, target: ast.expr) -> ValueOrigin:
        return self._variables.get(ast.unparse(target)) or ValueOrigin()

    def _set(self, target: ast.expr, value: ValueOrigin) -> None:
        self._variables.set(ast.unparse(target), value)
        if isinstance(target, ast.Subscript):
            held = self._look_up(target.value)._replace(is_made=value.is_made)
            self._variables.set(ast.unparse(target.value), held)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        known = self._value(target, value)
        if elements_of(target) == [target]:
            self._values.setdefault(ast.unparse(target), []).append(value)
            self._set(target, known)
            return
        for element in elements_of(target):
            self._set(element, known if known.origin == SAME else known._replace(origin=None))

    def _value(self, target: ast.expr, value: ast.expr) -> ValueOrigin:
        text = ast.unparse(value)
        is_other = _RANK.fullmatch(last_name(target)) and _OTHER_RANK.search(text)
        is_model = bool(_WRAPS_MODEL.search(text)) or self._is_model(text)
        return ValueOrigin(SAME if is_other else self.of(value), is_model, self._is_made(value))

    def _is_model(self, name: str) -> bool:
        known = self._variables.get(name)
        if known or name in self._parameters:
            return bool(known and known.is_model)
        return any(map(_WRAPS_MODEL.search, map(ast.unparse, self._program.flags.get(name, ()))))

    def _is_made(self, node: ast.AST) -> bool:
        """Return whether a wrapped model has surely computed a part of it, with a gradient."""
        called = node.func if isinstance(node, ast.Call) else node
        if isinstance(node, (ast.Lambda, ast.Compare, ast.IfExp)) or _CUTS.fullmatch(last_name(called)):
            return False
        if isinstance(node, ast.Call) and self._is_model(name_of(node.func)):
            return True
        known = self._variables.get(name_of(node))
        return bool(known and known.is_made) or any(map(self._is_made, ast.iter_child_nodes(node)))

    # -- expressions --------------------------------------------------------------------------------------------------

    def of_condition(self, node: ast.expr) -> Origin:
        """Do as `of`, but RANK in the environment, asked for alone, says that there is a launcher."""
        if isinstance(node, ast.BoolOp):
            origins = [self.of_condition(value) for value in node.values]
            others = (value for value, origin in zip(node.values, origins, strict=True) if origin is None)
            if isinstance(node.op, ast.Or) and any(map(is_of_rank, origins)) and not all(map(is_about_world, others)):
                return None  # it may hold on the other ranks as well
            return _combine(origins)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self.of_condition(node.operand)
        called = node.func if isinstance(node, ast.Call) else node.value if isinstance(node, ast.Subscript) else None
        return SAME if called is not None and "environ" in name_of(called) else self.of(node)

    def of(self, node: ast.expr) -> Origin:
        if isinstance(node, ast.Constant):
            return SAME
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
            if known := self._look_up(node).origin:
                return known
            if not isinstance(node, ast.Subscript):
                return self._of_name(node)
            key = getattr(node.slice, "value", "")
            is_rank = key in _RANK_VARIABLES and last_name(node.value) == "environ"
            return Differs(RANK_BRANCH, f"`{text_of(node)}` is this rank's own") if is_rank else self.of(node.value)
        if isinstance(node, ast.Call):
            return self._of_call(node)
        if isinstance(node, ast.Compare):
            return self._of_comparison(node)
        if isinstance(node, ast.NamedExpr):
            return self.of(node.value)
        if isinstance(node, (ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.IfExp, ast.Tuple, ast.List, ast.Set, ast.Starred)):
            parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
            computes = isinstance(node, ast.BinOp)  # with a length: a number of steps, from the size of a data set
            return _combine([None if computes and _is_length(part) else self.of(part) for part in parts])
        return None

    def _of_name(self, node: ast.Name | ast.Attribute) -> Origin:
        text = ast.unparse(node)
        is_other = last_name(node) in self._program.sizes or _ADAPTERS.search(self._owned_by + text)
        if _RANK.fullmatch(last_name(node)) and not is_other:
            return Differs(RANK_BRANCH, f"`{text_of(node)}` is this rank's own")
        values = self._program.flags.get(text, [])
        if (text.startswith("self.") or text.isupper()) and len(values) == 1 and text not in self._asked:
            self._asked.add(text)
            origin = self.of(values[0])  # a flag of the class or the module
            self._asked.remove(text)
            return origin if is_of_rank(origin) else None
        is_part = isinstance(node, ast.Attribute) and self._look_up(node.value).origin == SAME
        return SAME if is_part else None

    def _of_comparison(self, node: ast.Compare) -> Origin:
        """Return the origin of a comparison; ``local_rank == -1`` asks whether the program is distributed at all."""
        sides = [node.left, *node.comparators]
        origins = [self.of(side) for side in sides]
        operator, second, texts = node.ops[0], sides[1], [ast.unparse(side) for side in sides]
        others = [side for side, origin in zip(sides, origins, strict=True) if not is_of_rank(origin)]
        is_valid = isinstance(operator, (ast.GtE, ast.Lt)) and texts[1] == "0" and is_of_rank(origins[0])
        is_full = any(map(_is_length, sides)) and "0" not in texts  # a batch, or there are enough parts
        if is_valid or is_full or "None" in texts or any(map(self._may_be_no_rank, others)):
            return None
        if isinstance(operator, (ast.In, ast.NotIn)):
            if origins[1] is None and isinstance(second, ast.Name) and self._has_own_keys(second):
                return Differs(DATA_BRANCH, f"`{text_of(second)}` has the keys that this rank has met")
            is_known = isinstance(origins[1], Differs)
            return origins[1] if is_known else origins[0] if origins[1] == SAME else None  # the ranks of a group
        for side, origin in zip(sides, origins, strict=True) if not isinstance(operator, (ast.Eq, ast.NotEq)) else ():
            if origin is None and _LOSS.fullmatch(last_name(side)) and self._is_seen_made(side):
                return Differs(DATA_BRANCH, f"`{text_of(side)}` is this rank's own loss")
        return _combine(origins)

    def _may_be_no_rank(self, side: ast.expr) -> bool:
        """Return whether it is negative, or a constant that is, or one of a class of another file."""
        text = ast.unparse(side)
        return text[0] == "-" or self._program.constants.get(last_name(side), bool(_IS_OF_A_CLASS.fullmatch(text)))

    def _has_own_keys(self, held: ast.Name) -> bool:
        """Return whether it is a dict, and neither configuration nor written down in the text."""
        values = self._values.get(held.id, [])
        is_configured = any(isinstance(value, ast.Dict) or _CONFIGURED.search(ast.unparse(value)) for value in values)
        is_dict = _names_entries(held) and re.search(rf"\b{held.id}(\[|\.(items|keys|values|get)\b)", self.text)
        return bool(is_dict) and not is_configured and not self._may_be_equal(held)

    # -- where a value came from --------------------------------------------------------------------------------------

    def _makers(self, node: ast.expr) -> Iterator[ast.Call]:
        """Yield the calls that made a value, through assignments, arithmetic, and what changes its form only."""
        parts, seen = [node], set[str]()
        while parts:
            part = parts.pop()
            text = ast.unparse(part)
            if isinstance(part, ast.Call) and last_name(part.func) not in _THROUGH:
                yield part
            elif text not in seen:
                seen.add(text)
                inside = [child for child in ast.iter_child_nodes(part) if isinstance(child, ast.expr)]
                parts += self._values.get(text) or inside

    def _may_be_equal(self, node: ast.expr) -> bool:
        """Return whether it came from a function of another file, or from one that may run a collective."""
        makers = list(self._makers(node))
        elsewhere = self._program.is_elsewhere
        return any(elsewhere(maker) or self._collectives.possible(maker) for maker in makers)

    def _is_seen_made(self, node: ast.expr) -> bool:
        """Return whether the text shows that this rank computed it, by a model or a function without collectives."""
        named = [name_of(maker.func) for maker in self._makers(node)]
        return bool(named) and all(map(_COMPUTES.match, named)) and not self._may_be_equal(node)

    # -- calls --------------------------------------------------------------------------------------------------------

    def _of_call(self, call: ast.Call) -> Origin:
        if run := self._collectives.of(call):
            return SAME if any(collective.agrees for collective in run) else None
        name, text = last_name(call.func), text_of(call)
        full = self._program.resolve(call.func)
        key = call.args[0] if call.args else None
        if full in ("os.getenv", "os.environ.get"):
            is_rank = isinstance(key, ast.Constant) and key.value in _RANK_VARIABLES
            return Differs(RANK_BRANCH, f"`{text}` is this rank's own") if is_rank else SAME
        if _RANK.fullmatch(name):
            in_group = name.endswith("rank") and (key or call.keywords)
            return None if in_group else Differs(RANK_BRANCH, f"`{text}` is this rank's own")
        if full in _CLOCKS:
            return Differs(DATA_BRANCH, f"`{text}` is this process' own clock")
        on = call.func.value if isinstance(call.func, ast.Attribute) else None
        if name in _FILE_CHECKS and on is not None and (full.startswith("os.path.") or not call.args):
            file = ast.unparse(key or on)
            return Differs(DATA_BRANCH, f"`{text}` changes when the first rank makes the file", file)
        function = self._program.find_function(call)
        if SYNCED.search(name):
            return SAME
        first = function.body[0] if function is not None and function.name not in self._asked else None
        if function is not None and isinstance(first, ast.Return) and first.value is not None:
            self._asked.add(function.name)
            origin = self.of_condition(first.value)  # of a function that returns a condition
            self._asked.remove(function.name)
            return origin if is_of_rank(origin) else None
        if name in _NAN_CHECKS:
            return self._of_own_value(call.args[0] if call.args else call.func, text, anything=True)
        if name == "len" and key is not None:
            origin = self._of_own_value(key, text)
            return None if is_of_rank(origin) else origin  # a progress bar on one rank is as long
        is_method = on is not None and name_of(on) not in ("torch", "np", "numpy", "math")
        if on is not None and is_method and name in _NUMBERS:
            return self._of_own_value(on, text)
        origin = _combine([self.of(source) for source in ([on] if on is not None and is_method else call.args)])
        if name in _THROUGH:
            return origin
        known = is_method or full.startswith(("torch.", "numpy.", "math.")) or hasattr(builtins, full)
        made = not is_method and all(isinstance(argument, ast.Constant) for argument in call.args)  # to be filled later
        return SAME if known and origin == SAME and not made else None

    def _of_own_value(self, node: ast.expr, text: str, *, anything: bool = False) -> Origin:
        """Return the origin of a number that is read from a tensor or a container."""
        origin = self.of(node)
        if origin is not None:
            return origin
        name, whole = last_name(node.value if isinstance(node, ast.Subscript) else node), ast.unparse(node)
        if isinstance(node, ast.Subscript) and name not in _BATCHES:
            return None
        is_data = (anything or _DATA.fullmatch(name)) and not _EQUAL_NAMES.search(whole)
        is_kept = whole.startswith("self.") and whole not in self._values  # perhaps configuration
        if not is_data or is_kept or self._may_be_equal(node):
            return None
        return Differs(DATA_BRANCH, f"`{text}` is of this rank's own data")

    # -- the order of an iteration ------------------------------------------------------------------------------------

    def find_differing_order(self, loop: ast.For | ast.AsyncFor | ast.comprehension, call: ast.Call) -> str:
        """Return what gives this rank an order that others may not have; empty where that is not known.

        ``call`` is the one in the loop that runs a collective.
        """
        iterated, target = loop.iter, ast.unparse(loop.target)
        while isinstance(iterated, ast.Call) and last_name(iterated.func) in _PASSES_ON and iterated.args:
            iterated = iterated.args[0]
        values = self._values.get(name_of(iterated), [])
        source = values[0] if len(values) == 1 else iterated
        args = source.args if isinstance(source, ast.Call) else []
        has_keys = any(
            _names_entries(argument) and f"{ast.unparse(argument)}[{target}]" in self.text for argument in args
        )
        if _is_set_of_strings(source, "keys" if has_keys else name_of(iterated)):
            return f"the set `{text_of(iterated)}`, whose strings each process hashes otherwise"
        if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Attribute) and not iterated.args:
            held = iterated.func.value if iterated.func.attr in ("items", "keys", "values") else iterated
            is_dict = _names_entries(held) or self._is_for_any(target, call)
        else:
            held = iterated
            is_dict = _names_entries(held) and f"{ast.unparse(held)}[{target}]" in self.text
        name = name_of(held)
        is_own = is_dict and name and not _SHARED.fullmatch(name) and self._is_own(name)
        return f"the dict `{name}`, which is that of its insertions on this rank" if is_own else ""

    def _is_for_any(self, target: str, call: ast.Call) -> bool:
        """Return whether the function takes any dict: it reduces the entries themselves, or calls itself for each."""
        function = self._function.name if self._function else ""
        passed = {part.id for argument in call.args for part in ast.walk(argument) if isinstance(part, ast.Name)}
        is_direct = last_name(call.func) in _DIRECT and not passed.isdisjoint(re.findall(r"\w+", target))
        return bool(function) and not _SHARED.fullmatch(function) and (is_direct or last_name(call.func) == function)

    def _is_own(self, name: str) -> bool:
        """Return whether the text shows that ranks may insert other keys, or in another order."""
        key_of_data = re.compile(rf"{re.escape(name)}\[.*[\])]\]")  # of a subscript or a call
        if any(map(key_of_data.fullmatch, self._values)):
            return True
        values, function = self._values.get(name, []), self._function
        if function is None or name not in self._parameters:
            return False
        resets = [
            node.value for node in function.body if isinstance(node, ast.Assign) and name_of(node.targets[0]) == name
        ]
        is_reset = any(name not in map(name_of, ast.walk(value)) for value in resets)
        if is_reset or any("sorted(" in ast.unparse(value) for value in values):
            return False
        calls = [(map(name_of, call.args), caller) for call, caller in self._program.calls_of(function)]
        return not calls or any(caller and not set(parameters_of(caller)).isdisjoint(args) for args, caller in calls)


def _is_length(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and last_name(node.func) == "len"


def is_of_rank(origin: Origin) -> bool:
    return isinstance(origin, Differs) and origin.rule == RANK_BRANCH


def _combine(origins: Iterable[Origin]) -> Origin:
    known = list(origins)
    differing = next((origin for origin in known if isinstance(origin, Differs)), None)
    return differing if differing else SAME if known and all(origin == SAME for origin in known) else None


def _join(values: Sequence[ValueOrigin]) -> ValueOrigin:
    """Merge the values that a variable has at the end of each branch."""
    origins, models, made = zip(*values, strict=True)
    return ValueOrigin(_combine(origins), any(models), all(made))


def _names_entries(node: ast.expr) -> bool:
    """Return whether a dict is likely to hold this rank's statistics, and not its configuration or model."""
    return bool(_ENTRIES.fullmatch(last_name(node)))


def _is_set_of_strings(iterated: ast.expr, name: str) -> bool:
    """Return whether it and the name of its variable show a set of strings: one of numbers has the same order."""
    while isinstance(iterated, ast.BinOp):
        iterated = iterated.left
    args = iterated.args if isinstance(iterated, ast.Call) and name_of(iterated.func) == "set" else []
    held = args[0] if args else iterated
    is_set = held is not iterated or isinstance(held, (ast.Set, ast.SetComp))
    if isinstance(held, (ast.Set, ast.List, ast.Tuple)):
        return is_set and len(held.elts) > 1 and any(isinstance(getattr(each, "value", 0), str) for each in held.elts)
    return is_set and bool(_STRINGS.search(f"{name} {ast.unparse(held)}"))
