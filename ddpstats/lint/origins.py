"""What the value of an expression depends on: on the rank, on this rank's data, or on nothing that ranks differ in.

Judged by names that the field uses and by calls, and carried through the variables of one function. Three answers:

- `Differs`: ranks may have different values, and why;
- ``SAME``: a constant, or what a collective made alike;
- None: not known, which accuses nobody. Configuration, sizes of the world and parameters are here.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ddpstats.lint.collectives import Collectives, is_about_world
from ddpstats.lint.findings import DATA_BRANCH, RANK_BRANCH
from ddpstats.lint.program import COMPREHENSIONS, Function, dotted, last_name, parts_of, text_of


@dataclass(frozen=True)
class Differs:
    """``rule`` is of a collective under such a condition, ``why`` the end of a sentence about it.

    ``file``: what is asked for, where it is a file: ranks see it alike, until one of them makes it.
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
# what a rank has read or computed for itself
_OTHER_RANK = re.compile(r"n?dim(ension)?\b|len\(|matrix_rank|\.index\(")  # of a tensor, a matrix, in a list
_ADAPTERS = re.compile(r"(?i)lora|adapter|low_?rank|svd|power_?sgd|tucker|decompos")
_CONFIGURED = re.compile(r"(?i)args|config|cfg|opts?\b|hparams|split\(")
_DATA = re.compile(
    r"(?i).*?(^|_)(batch(es)?|samples?|loss(es)?|preds?|predictions?|outputs?|results?|stats?|metrics?|logits|labels?|"
    r"targets?|inputs?|tokens|utts?|boxes|masks?|feats?|features?|embeddings?|images?|examples?|completions?)"
)
_LOSS = re.compile(r"(?i)(?!.*(val|valid|eval|test|best|avg|mean|global|reduced|dev|sync)_).*?(^|_)loss(es)?")
_ENTRIES = re.compile(r"(?i).*?(^|_)(stats?|metrics|losses|loss_dict|log_vars|logs|results|scores|meters|totals)")
_COMPUTES = re.compile(r"\w*$|(self|torch|F)\.|.*(model|net|module|criterion)\.")  # a call of this rank's own
_ALIKE = re.compile(r"(?i).*(grad|param|weight|norm|step|epoch|buffer|version|config|args|group|world|count|scale|lr)")
_SYNCED = re.compile(r"(?i)all_?reduce|broadcast|bcast|_reduce$|reduce_|sync|agree|gather|across")
_ALIKE_RESULT = re.compile(r"(?i)eval|valid|average|avg|train_batch")  # of a function of another file
_GIVEN = frozenset({"tensor", "object_list", "tensor_list", "output_tensor"})  # keywords of torch's collectives
_NAN_CHECKS = frozenset({"isnan", "isinf", "isfinite"})
_CLOCKS = frozenset({"time.time", "time.monotonic", "time.perf_counter", "time.process_time"})
_FILE_CHECKS = frozenset({"exists", "isfile", "isdir", "is_file", "is_dir"})
_BATCHES = frozenset({"batch", "sample", "inputs"})
_NUMBERS = frozenset({"item", "numel", "nelement", "any", "all", "sum", "max", "min"})  # of a tensor
_THROUGH = frozenset(
    {"bool", "int", "float", "abs", "any", "all", "max", "min", "sum", "round", "list", "tuple", "str", "tensor"}
    | {"mean", "cpu", "detach", "long", "numpy", "clone", "to", "logical_not", "squeeze", "tolist", "view", "get"}
)
_COUNTED = frozenset({"range", "trange", "enumerate"})


class Origins:
    """The variables of one function, as far as it was walked."""

    def __init__(self, collectives: Collectives, owner: ast.ClassDef | None) -> None:
        self._collectives = collectives
        self._owner = owner
        self._owned_by = owner.name if owner else ""
        self._given: dict[str, list[ast.expr]] = {}  # what a variable was assigned
        self._read_by_key = set[str]()
        self.known: dict[str, Origin] = {}  # by the text of a variable: "flag", "self.flag", "stats['loss']"

    def enter(self, body: Sequence[ast.stmt], function: Function | None) -> None:
        """Which variables are read by key, and which parameters have a constant for their default."""
        for part in parts_of(*body):
            is_dicts = isinstance(part, ast.Attribute) and part.attr in ("items", "keys", "values", "get")
            if isinstance(part, (ast.Attribute, ast.Subscript)) and (is_dicts or isinstance(part, ast.Subscript)):
                self._read_by_key.add(dotted(part.value))
        if function is not None:
            self._owned_by += function.name
            given = function.args
            named = [*given.posonlyargs, *given.args][-len(given.defaults) or None :] if given.defaults else []
            for one, default in zip(named, given.defaults, strict=False):
                if isinstance(default, (ast.Tuple, ast.List)) and self.of(default) == SAME:
                    self.known[one.arg] = SAME

    # -- variables ----------------------------------------------------------------------------------------------------

    def assign(self, target: ast.expr, origin: Origin) -> None:
        for one in target.elts if isinstance(target, (ast.Tuple, ast.List)) else (target,):
            one = one.value if isinstance(one, ast.Starred) else one
            if origin is None:
                self.known.pop(ast.unparse(one), None)
            else:
                self.known[ast.unparse(one)] = origin

    def assigned_by(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign_value(target, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign_value(node.target, node.value)
        elif isinstance(node, ast.AugAssign):
            self.assign(node.target, _combined([self.of(node.target), self.of(node.value)]))

    def _assign_value(self, target: ast.expr, value: ast.expr) -> None:
        """``a, b = x, y`` one by one; what is taken apart otherwise is known only where all of it is alike."""
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, its in zip(target.elts, value.elts, strict=True):
                self._assign_value(one, its)
            return
        origin = self.of(value)
        self._given.setdefault(ast.unparse(target), []).append(value)
        if _RANK.fullmatch(last_name(target)) and _OTHER_RANK.search(ast.unparse(value)):
            origin = SAME
        self.assign(target, origin if origin == SAME or not isinstance(target, ast.Tuple) else None)

    def assign_turn(self, target: ast.expr, iterated: ast.expr) -> None:
        """What a loop runs over; ``for rank in ranks`` is not about the own rank."""
        counted = isinstance(iterated, ast.Call) and last_name(iterated.func) in _COUNTED
        self.assign(target, SAME if counted else None)
        for one in ast.walk(target):
            if isinstance(one, ast.Name) and _RANK.fullmatch(one.id):
                self.assign(one, SAME)

    def after(self, call: ast.Call) -> None:
        """A collective that has returned, or what is called like one, has made its arguments alike."""
        run = self._collectives.of(call, self._owner)
        synced = any(one.agrees for one in run) or (not run and _SYNCED.search(last_name(call.func)))
        given = [*call.args, *(one.value for one in call.keywords if one.arg in _GIVEN)]
        for argument in given if synced else ():
            for part in argument.elts if isinstance(argument, (ast.List, ast.Tuple)) else (argument,):
                part = part.value if isinstance(part, ast.Attribute) and part.attr == "data" else part
                if isinstance(part, (ast.Name, ast.Attribute, ast.Subscript)):
                    self.assign(part, SAME)
        grows = isinstance(call.func, ast.Attribute) and call.func.attr in ("extend", "append") and bool(call.args)
        if grows and isinstance(call.func, ast.Attribute) and self.of(call.args[0]) == SAME:
            self.assign(call.func.value, SAME)

    def merge(self, branches: Iterable[dict[str, Origin]]) -> None:
        """Where branches meet."""
        met = list(branches)
        self.known = {name: _combined([one.get(name) for one in met]) for name in {name for one in met for name in one}}

    def assign_under(self, condition: Origin, statements: Iterable[ast.stmt]) -> None:
        """A constant that was set under a condition depends on what the condition does."""
        if isinstance(condition, Differs):
            for node in (one for one in statements if isinstance(one, ast.Assign)):
                for target in node.targets if isinstance(node.value, ast.Constant) else ():
                    self.assign(target, condition)

    # -- expressions --------------------------------------------------------------------------------------------------

    def of_condition(self, node: ast.expr) -> Origin:
        """As `of`, but RANK in the environment, asked for alone, says that there is a launcher."""
        if isinstance(node, ast.BoolOp):
            found = [self.of_condition(one) for one in node.values]
            others = (one for one, origin in zip(node.values, found, strict=True) if origin is None)
            if isinstance(node.op, ast.Or) and any(map(is_of_rank, found)) and not all(map(is_about_world, others)):
                return None  # it may hold on the other ranks as well
            return _combined(found)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self.of_condition(node.operand)
        called = node.func if isinstance(node, ast.Call) else node.value if isinstance(node, ast.Subscript) else None
        return SAME if called is not None and "environ" in dotted(called) else self.of(node)

    def of(self, node: ast.expr) -> Origin:
        if isinstance(node, ast.Constant):
            return SAME
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
            text = ast.unparse(node)
            if text in self.known:
                return self.known[text]
            return self._of_subscript(node) if isinstance(node, ast.Subscript) else self._of_name(node, text)
        if isinstance(node, ast.Call):
            return self._of_call(node)
        if isinstance(node, ast.Compare):
            return self._of_comparison(node)
        if isinstance(node, ast.NamedExpr):
            self._assign_value(node.target, node.value)
            return self.of(node.value)
        if isinstance(node, COMPREHENSIONS):
            return self._of_comprehension(node)
        if isinstance(node, (ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.IfExp, ast.Tuple, ast.List, ast.Set, ast.Starred)):
            parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
            computes = isinstance(node, ast.BinOp)  # with a length: a number of steps, from the size of a data set
            return _combined([None if computes and _is_length(part) else self.of(part) for part in parts])
        return None

    def _of_name(self, node: ast.Name | ast.Attribute, text: str) -> Origin:
        is_other = last_name(node) in self._collectives.program.sizes or _ADAPTERS.search(self._owned_by + text)
        if _RANK.fullmatch(last_name(node)) and not is_other:
            return Differs(RANK_BRANCH, f"`{text_of(node)}` is this rank's own")
        given = self._collectives.program.flags.get(text, [])
        if (text.startswith("self.") or text.isupper()) and len(given) == 1:
            self.known[text] = None  # it may be of itself
            origin = self.of(given[0])  # a flag of the class or the module
            del self.known[text]
            return origin if is_of_rank(origin) else None
        is_part = isinstance(node, ast.Attribute) and self.known.get(dotted(node).rpartition(".")[0]) == SAME
        return SAME if is_part else None

    def _of_subscript(self, node: ast.Subscript) -> Origin:
        key = node.slice
        if isinstance(key, ast.Constant) and key.value in _RANK_VARIABLES and last_name(node.value) == "environ":
            return Differs(RANK_BRANCH, f"`{text_of(node)}` is this rank's own")
        return self.of(node.value)

    def _of_comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> Origin:
        if re.search(r"param|grad|buffers\(|modules\(|optim", ast.unparse(node)):
            return SAME  # replicas hold the same
        names = (one for part in node.generators for one in ast.walk(part.iter) if isinstance(one, ast.Name))
        if any(self.of(name) == SAME for name in names):
            return SAME
        return self.of(node.value if isinstance(node, ast.DictComp) else node.elt)

    def _of_comparison(self, node: ast.Compare) -> Origin:
        """Not of what differs without saying anything, as ``local_rank == -1``: not distributed at all."""
        sides = [node.left, *node.comparators]
        found = [self.of(side) for side in sides]
        operator, other = node.ops[0], sides[1]
        is_order = isinstance(operator, (ast.Lt, ast.Gt, ast.LtE, ast.GtE))
        if any(isinstance(side, ast.Constant) and side.value is None for side in sides):
            names = {last_name(side) for side in sides} - {*self._given}  # what next() returned ends with the loader
            return Differs(DATA_BRANCH, f"`{text_of(node)}` is about this rank's batch") if names & _BATCHES else None
        others = (side for side, origin in zip(sides, found, strict=True) if not is_of_rank(origin))
        constants = self._collectives.program.constants
        no_rank = any(constants.get(last_name(one), _IS_OF_A_CLASS.fullmatch(ast.unparse(one))) for one in others)
        if (no_rank and any(map(is_of_rank, found))) or any(ast.unparse(side).startswith("-") for side in sides):
            return None
        if isinstance(operator, (ast.GtE, ast.Lt)) and ast.unparse(other) == "0" and is_of_rank(found[0]):
            return None
        if any(map(_is_length, sides)) and not any(
            isinstance(side, ast.Constant) and side.value == 0 for side in sides
        ):
            return None  # how many parts there are, or whether a batch is a full one
        if isinstance(operator, (ast.In, ast.NotIn)):
            return self._of_membership(other, found)
        for side, origin in zip(sides, found, strict=True):
            if is_order and origin is None and _LOSS.fullmatch(last_name(side)) and self._is_seen_made(side):
                return Differs(DATA_BRANCH, f"`{text_of(side)}` is this rank's own loss")
        return _combined(found)

    def _of_membership(self, held: ast.expr, found: list[Origin]) -> Origin:
        if isinstance(found[1], Differs) or (found[1] == SAME and found[0] == SAME):
            return found[1]
        if found[1] is None and isinstance(held, ast.Name) and names_entries(held) and self._has_own_keys(held):
            return Differs(DATA_BRANCH, f"`{text_of(held)}` has the keys that this rank has met")
        return found[0] if found[1] == SAME else None  # the ranks of a group

    def _has_own_keys(self, held: ast.Name) -> bool:
        """Whether it is a dict, and neither of configuration nor written down in the text."""
        given = self._given.get(held.id, [])
        told = any(isinstance(one, ast.Dict) or _CONFIGURED.search(ast.unparse(one)) for one in given)
        return held.id in self._read_by_key and not told and not self._may_be_alike(held)

    # -- where a value came from --------------------------------------------------------------------------------------

    def _makers(self, node: ast.expr) -> Iterator[ast.Call]:
        """The calls that made a value, through what was assigned here, arithmetic, and what changes its form only."""
        parts, seen = [node], set[str]()
        while parts:
            part = parts.pop()
            text = ast.unparse(part)
            if isinstance(part, ast.Call) and last_name(part.func) not in _THROUGH:
                yield part
            elif text not in seen:
                seen.add(text)
                inside = [one for one in ast.iter_child_nodes(part) if isinstance(one, ast.expr)]
                parts += self._given.get(text) or inside

    def _may_be_alike(self, node: ast.expr) -> bool:
        """Whether a function of another file made it, or one that may run a collective."""
        makers = list(self._makers(node))
        elsewhere = self._collectives.program.is_elsewhere
        return any(elsewhere(one) or self._collectives.possible(one, self._owner) for one in makers)

    def _is_seen_made(self, node: ast.expr) -> bool:
        """Whether the text shows that this rank made it: with a model, or with a function that runs no collective."""
        named = [dotted(one.func) for one in self._makers(node)]
        return bool(named) and all(map(_COMPUTES.match, named)) and not self._may_be_alike(node)

    # -- calls --------------------------------------------------------------------------------------------------------

    def _of_call(self, call: ast.Call) -> Origin:
        if run := self._collectives.of(call, self._owner):
            return SAME if any(one.agrees for one in run) else None
        name, text = last_name(call.func), text_of(call)
        full = self._collectives.program.resolve(call.func)
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
        elsewhere = self._collectives.program.function_called(call, self._owner) is None
        if _SYNCED.search(name) or (elsewhere and _ALIKE_RESULT.search(name)):
            return SAME
        if name in _NAN_CHECKS:
            return self._of_own_value(call.args[0] if call.args else call.func, text, anything=True)
        if name == "len" and key is not None:
            origin = self._of_own_value(key, text)
            return None if is_of_rank(origin) else origin  # a progress bar on one rank is as long
        is_method = on is not None and dotted(on) not in ("torch", "np", "numpy", "math")
        if on is not None and is_method and name in _NUMBERS:
            return self._of_own_value(on, text)
        found = self.of(on) if on is not None and is_method else _combined([self.of(one) for one in call.args])
        if name in _THROUGH:
            return found
        known = is_method or full.startswith(("torch.", "numpy.", "math.")) or hasattr(builtins, full)
        made = not is_method and all(isinstance(one, ast.Constant) for one in call.args)  # to be filled later
        return SAME if known and found == SAME and not made else None

    def _of_own_value(self, node: ast.expr, text: str, *, anything: bool = False) -> Origin:
        """Of a number that is read from a tensor or a container."""
        origin = self.of(node)
        if origin is not None:
            return origin
        name = last_name(node.value if isinstance(node, ast.Subscript) else node)
        if isinstance(node, ast.Subscript) and name not in _BATCHES:
            return None
        if _ALIKE.search(ast.unparse(node)) or not (anything or _DATA.fullmatch(name)) or self._may_be_alike(node):
            return None
        if ast.unparse(node) in self._collectives.program.configured:
            return None
        return Differs(DATA_BRANCH, f"`{text}` is of this rank's own data")


def _is_length(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and last_name(node.func) == "len"


def is_of_rank(origin: Origin) -> bool:
    return isinstance(origin, Differs) and origin.rule == RANK_BRANCH


def _combined(origins: Iterable[Origin]) -> Origin:
    found = list(origins)
    differing = next((one for one in found if isinstance(one, Differs)), None)
    return differing if differing else SAME if found and all(one == SAME for one in found) else None


def names_entries(node: ast.expr) -> bool:
    """Whether a dict is likely to hold what this rank met, and not what its configuration or model says."""
    return bool(_ENTRIES.fullmatch(last_name(node)))
