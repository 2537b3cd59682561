"""The origin of an expression's value: the rank, this rank's data, or nothing that ranks differ in.

Judged by names that the field uses and by calls, and carried through the variables of one function. Three answers:

- `Differs`: ranks may have different values, and why;
- ``SAME``: a constant, or what a collective made equal on all ranks;
- None: not known, which is no finding. Configuration, sizes of the world and parameters are here.
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
_EQUAL_NAMES = re.compile(
    r"(?i).*(grad|param|weight|norm|step|epoch|buffer|version|config|args|group|world|count|scale|lr)"
)
_SYNCED = re.compile(r"(?i)all_?reduce|broadcast|bcast|_reduce$|reduce_|sync|agree|gather|across")
_EQUAL_RESULT = re.compile(r"(?i)eval|valid|average|avg|train_batch")  # of a function of another file
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
        self._assigned: dict[str, list[ast.expr]] = {}  # what a variable was assigned
        self._read_by_key = set[str]()
        self.known: dict[str, Origin] = {}  # by the text of a variable: "flag", "self.flag", "stats['loss']"

    def enter(self, body: Sequence[ast.stmt], function: Function | None) -> None:
        """Note which variables are read by key, and which parameters have a constant for their default."""
        for part in parts_of(*body):
            is_dicts = isinstance(part, ast.Attribute) and part.attr in ("items", "keys", "values", "get")
            if isinstance(part, (ast.Attribute, ast.Subscript)) and (is_dicts or isinstance(part, ast.Subscript)):
                self._read_by_key.add(dotted(part.value))
        if function is not None:
            self._owned_by += function.name
            signature = function.args
            named = [*signature.posonlyargs, *signature.args]
            named = named[-len(signature.defaults) :] if signature.defaults else []
            for argument, default in zip(named, signature.defaults, strict=False):
                if isinstance(default, (ast.Tuple, ast.List)) and self.of(default) == SAME:
                    self.known[argument.arg] = SAME

    # -- variables ----------------------------------------------------------------------------------------------------

    def assign(self, target: ast.expr, origin: Origin) -> None:
        for element in target.elts if isinstance(target, (ast.Tuple, ast.List)) else (target,):
            element = element.value if isinstance(element, ast.Starred) else element
            if origin is None:
                self.known.pop(ast.unparse(element), None)
            else:
                self.known[ast.unparse(element)] = origin

    def assigned_by(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign_value(target, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign_value(node.target, node.value)
        elif isinstance(node, ast.AugAssign):
            self.assign(node.target, _combined([self.of(node.target), self.of(node.value)]))

    def _assign_value(self, target: ast.expr, value: ast.expr) -> None:
        """Assign ``a, b = x, y`` in pairs; another unpacked value is known only where it is equal on all ranks."""
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for element, its in zip(target.elts, value.elts, strict=True):
                self._assign_value(element, its)
            return
        origin = self.of(value)
        self._assigned.setdefault(ast.unparse(target), []).append(value)
        if _RANK.fullmatch(last_name(target)) and _OTHER_RANK.search(ast.unparse(value)):
            origin = SAME
        self.assign(target, origin if origin == SAME or not isinstance(target, ast.Tuple) else None)

    def assign_turn(self, target: ast.expr, iterated: ast.expr) -> None:
        """Assign the target of a loop; ``rank`` of ``for rank in ranks`` is not this process' rank."""
        counted = isinstance(iterated, ast.Call) and last_name(iterated.func) in _COUNTED
        self.assign(target, SAME if counted else None)
        for node in ast.walk(target):
            if isinstance(node, ast.Name) and _RANK.fullmatch(node.id):
                self.assign(node, SAME)

    def after(self, call: ast.Call) -> None:
        """Note that a collective, or a call named like a collective, has made its arguments equal on all ranks."""
        run = self._collectives.of(call, self._owner)
        synced = any(collective.agrees for collective in run) or (not run and _SYNCED.search(last_name(call.func)))
        arguments = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg in _GIVEN)]
        for argument in arguments if synced else ():
            for part in argument.elts if isinstance(argument, (ast.List, ast.Tuple)) else (argument,):
                part = part.value if isinstance(part, ast.Attribute) and part.attr == "data" else part
                if isinstance(part, (ast.Name, ast.Attribute, ast.Subscript)):
                    self.assign(part, SAME)
        grows = isinstance(call.func, ast.Attribute) and call.func.attr in ("extend", "append") and bool(call.args)
        if grows and isinstance(call.func, ast.Attribute) and self.of(call.args[0]) == SAME:
            self.assign(call.func.value, SAME)

    def merge(self, branches: Iterable[dict[str, Origin]]) -> None:
        """Merge what the branches know."""
        met = list(branches)
        self.known = {
            name: _combined([branch.get(name) for branch in met])
            for name in {name for branch in met for name in branch}
        }

    def assign_under(self, condition: Origin, statements: Iterable[ast.stmt]) -> None:
        """A constant that was set under a condition depends on what the condition does."""
        if isinstance(condition, Differs):
            for node in (statement for statement in statements if isinstance(statement, ast.Assign)):
                for target in node.targets if isinstance(node.value, ast.Constant) else ():
                    self.assign(target, condition)

    # -- expressions --------------------------------------------------------------------------------------------------

    def of_condition(self, node: ast.expr) -> Origin:
        """As `of`, but RANK in the environment, asked for alone, says that there is a launcher."""
        if isinstance(node, ast.BoolOp):
            origins = [self.of_condition(value) for value in node.values]
            others = (value for value, origin in zip(node.values, origins, strict=True) if origin is None)
            if isinstance(node.op, ast.Or) and any(map(is_of_rank, origins)) and not all(map(is_about_world, others)):
                return None  # it may hold on the other ranks as well
            return _combined(origins)
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
        values = self._collectives.program.flags.get(text, [])
        if (text.startswith("self.") or text.isupper()) and len(values) == 1:
            self.known[text] = None  # it may be of itself
            origin = self.of(values[0])  # a flag of the class or the module
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
        names = (node for part in node.generators for node in ast.walk(part.iter) if isinstance(node, ast.Name))
        if any(self.of(name) == SAME for name in names):
            return SAME
        return self.of(node.value if isinstance(node, ast.DictComp) else node.elt)

    def _of_comparison(self, node: ast.Compare) -> Origin:
        """Return the origin of a comparison; ``local_rank == -1`` asks whether the program is distributed at all."""
        sides = [node.left, *node.comparators]
        origins = [self.of(side) for side in sides]
        operator, other = node.ops[0], sides[1]
        is_order = isinstance(operator, (ast.Lt, ast.Gt, ast.LtE, ast.GtE))
        if any(isinstance(side, ast.Constant) and side.value is None for side in sides):
            names = {last_name(side) for side in sides} - {*self._assigned}  # what next() returned ends with the loader
            return Differs(DATA_BRANCH, f"`{text_of(node)}` is about this rank's batch") if names & _BATCHES else None
        others = (side for side, origin in zip(sides, origins, strict=True) if not is_of_rank(origin))
        constants = self._collectives.program.constants
        no_rank = any(constants.get(last_name(other), _IS_OF_A_CLASS.fullmatch(ast.unparse(other))) for other in others)
        if (no_rank and any(map(is_of_rank, origins))) or any(ast.unparse(side).startswith("-") for side in sides):
            return None
        if isinstance(operator, (ast.GtE, ast.Lt)) and ast.unparse(other) == "0" and is_of_rank(origins[0]):
            return None
        if any(map(_is_length, sides)) and not any(
            isinstance(side, ast.Constant) and side.value == 0 for side in sides
        ):
            return None  # how many parts there are, or whether a batch is a full one
        if isinstance(operator, (ast.In, ast.NotIn)):
            return self._of_membership(other, origins)
        for side, origin in zip(sides, origins, strict=True):
            if is_order and origin is None and _LOSS.fullmatch(last_name(side)) and self._is_seen_made(side):
                return Differs(DATA_BRANCH, f"`{text_of(side)}` is this rank's own loss")
        return _combined(origins)

    def _of_membership(self, held: ast.expr, origins: list[Origin]) -> Origin:
        if isinstance(origins[1], Differs) or (origins[1] == SAME and origins[0] == SAME):
            return origins[1]
        if origins[1] is None and isinstance(held, ast.Name) and names_entries(held) and self._has_own_keys(held):
            return Differs(DATA_BRANCH, f"`{text_of(held)}` has the keys that this rank has met")
        return origins[0] if origins[1] == SAME else None  # the ranks of a group

    def _has_own_keys(self, held: ast.Name) -> bool:
        """Return whether it is a dict, and neither configuration nor written down in the text."""
        values = self._assigned.get(held.id, [])
        is_configured = any(isinstance(value, ast.Dict) or _CONFIGURED.search(ast.unparse(value)) for value in values)
        return held.id in self._read_by_key and not is_configured and not self._may_be_equal(held)

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
                inside = [child for child in ast.iter_child_nodes(part) if isinstance(child, ast.expr)]
                parts += self._assigned.get(text) or inside

    def _may_be_equal(self, node: ast.expr) -> bool:
        """Return whether it came from a function of another file, or from one that may run a collective."""
        makers = list(self._makers(node))
        elsewhere = self._collectives.program.is_elsewhere
        return any(elsewhere(maker) or self._collectives.possible(maker, self._owner) for maker in makers)

    def _is_seen_made(self, node: ast.expr) -> bool:
        """Return whether the text shows that this rank computed it, by a model or a function without collectives."""
        named = [dotted(maker.func) for maker in self._makers(node)]
        return bool(named) and all(map(_COMPUTES.match, named)) and not self._may_be_equal(node)

    # -- calls --------------------------------------------------------------------------------------------------------

    def _of_call(self, call: ast.Call) -> Origin:
        if run := self._collectives.of(call, self._owner):
            return SAME if any(collective.agrees for collective in run) else None
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
        if _SYNCED.search(name) or (elsewhere and _EQUAL_RESULT.search(name)):
            return SAME
        if name in _NAN_CHECKS:
            return self._of_own_value(call.args[0] if call.args else call.func, text, anything=True)
        if name == "len" and key is not None:
            origin = self._of_own_value(key, text)
            return None if is_of_rank(origin) else origin  # a progress bar on one rank is as long
        is_method = on is not None and dotted(on) not in ("torch", "np", "numpy", "math")
        if on is not None and is_method and name in _NUMBERS:
            return self._of_own_value(on, text)
        origin = (
            self.of(on) if on is not None and is_method else _combined([self.of(argument) for argument in call.args])
        )
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
        name = last_name(node.value if isinstance(node, ast.Subscript) else node)
        if isinstance(node, ast.Subscript) and name not in _BATCHES:
            return None
        if (
            _EQUAL_NAMES.search(ast.unparse(node))
            or not (anything or _DATA.fullmatch(name))
            or self._may_be_equal(node)
        ):
            return None
        if ast.unparse(node) in self._collectives.program.configured:
            return None
        return Differs(DATA_BRANCH, f"`{text}` is of this rank's own data")


def _is_length(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and last_name(node.func) == "len"


def is_of_rank(origin: Origin) -> bool:
    return isinstance(origin, Differs) and origin.rule == RANK_BRANCH


def _combined(origins: Iterable[Origin]) -> Origin:
    known = list(origins)
    differing = next((origin for origin in known if isinstance(origin, Differs)), None)
    return differing if differing else SAME if known and all(origin == SAME for origin in known) else None


def names_entries(node: ast.expr) -> bool:
    """Return whether a dict is likely to hold this rank's statistics, and not its configuration or model."""
    return bool(_ENTRIES.fullmatch(last_name(node)))
