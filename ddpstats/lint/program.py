"""One parsed file: its imports, its functions by name, and the definitions of names that reach a statement."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
Exit = ast.Return | ast.Break | ast.Continue
EXITS = (ast.Return, ast.Break, ast.Continue)
LEAVES = (*EXITS, ast.Raise)
_INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
RANGES = ("range", "trange")
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_WITHOUT_RANKS = frozenset({"torch", "numpy", "tqdm", *sys.stdlib_module_names})
_SHAPED = frozenset({"Linear", "zeros", "ones", "empty", "rand", "randn"})
_GIVEN = frozenset({"tensor", "object_list", "tensor_list", "output_tensor"})  # keywords of torch's collectives
_SETS_STATUS = re.compile(r"_?exit|SystemExit|\w*raise\w*|assert\w+")
_FILLS = frozenset({"append", "extend", "add", "update", "insert", "setdefault"})


class Program:
    """Built from the tree alone; names are resolved as if each import held for the whole file."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.imports: dict[str, str] = {}
        self.modules = set[str]()  # the first words of what is imported: "torch", "lightning"
        self.owner: dict[Function, ast.ClassDef | None] = {}  # of a nested function: that of the method around it
        self._nested: set[Function] = set()
        self._tables: dict[Function | None, Table] = {}
        self.flags: dict[str, list[ast.expr]] = {}  # "self.is_main", "MAIN": the conditions and calls assigned to it
        self._collect(tree, None)

    def _collect(self, node: ast.AST, owner: ast.ClassDef | None, is_inside: bool = False) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                self.imports.update((alias.asname, alias.name) for alias in child.names if alias.asname)
                self.modules.update(alias.name.partition(".")[0] for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                home = "." * child.level + (child.module or "")
                self.imports.update((alias.asname or alias.name, f"{home}.{alias.name}") for alias in child.names)
                self.modules.add(home.partition(".")[0])
            elif isinstance(child, ast.Assign) and isinstance(child.value, (ast.Compare, ast.Call, ast.Subscript)):
                for first in (element for target in child.targets for element in elements_of(target)[:1]):
                    self.flags.setdefault(dotted(first), []).append(child.value)
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self.owner[child] = owner
                if is_inside:
                    self._nested.add(child)
                self._collect(child, owner, True)
            elif isinstance(child, ast.ClassDef):
                self._collect(child, child)
            else:
                self._collect(child, owner, is_inside)

    def is_method(self, function: Function) -> bool:
        return self.owner[function] is not None and function not in self._nested

    def maker(self, name: str) -> ast.Call | None:
        """Return the call that a value came from, of ``window, _ = make()`` as well."""
        calls = [value for value in self.flags.get(name, ()) if isinstance(value, ast.Call)]
        return calls[-1] if calls and name else None

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    def is_configured(self, name: str) -> bool:
        """Return whether it is an attribute that only constructors set."""
        return name.startswith("self.") and name not in self._changed

    @cached_property
    def _changed(self) -> set[str]:
        parts = (part for function in self.owner if function.name != "__init__" for part in parts_of(*function.body))
        return {ast.unparse(target) for part in parts for target in changed_by(part)}

    @cached_property
    def sizes(self) -> set[str]:
        """Parameters that are a size, by their default or in the shape of a tensor: ``rank`` of a decomposition."""
        sizes = set[str]()
        for node in self.nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                sizes.update(name for name, default in defaults_of(node) if _is_size(default))
            elif isinstance(node, ast.AnnAssign) and node.value is not None and _is_size(node.value):
                sizes.add(last_name(node.target))
            elif isinstance(node, ast.Call) and last_name(node.func) in _SHAPED and len(node.args) > 1:
                sizes.update(map(last_name, node.args))
        return sizes

    @cached_property
    def constants(self) -> dict[str, bool]:
        """Return constants by the last word of their name, with whether the file may set a negative number: no rank."""
        constants: dict[str, bool] = {}
        for node in self.nodes:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                for name in filter(str.isupper, map(last_name, changed_by(node))):
                    constants[name] = constants.get(name, False) or bool(re.search(r"-\d", ast.unparse(node.value)))
        return constants

    @cached_property
    def statuses(self) -> set[str]:
        """`ends_of` the whole file, and what made their values: "main()" of ``code = main()``."""
        keys = self.ends_of(self.nodes)
        return keys | {key_of(self.maker(name)) for name in keys}

    @staticmethod
    def ends_of(nodes: Iterable[ast.AST]) -> set[str]:
        """What a run ends with or for, as `key_of`: ``sys.exit(code)``, ``assert not problems``, ``raise error``."""
        keys = set[str]()
        for node in nodes:
            values: list[ast.expr] = []
            if isinstance(node, ast.Raise):
                raised = [node.exc, node.cause, *(node.exc.args if isinstance(node.exc, ast.Call) else ())]
                keys.update(key_of(value.value if isinstance(value, ast.Subscript) else value) for value in raised)
            elif isinstance(node, ast.Call) and _SETS_STATUS.fullmatch(last_name(node.func)):
                values = node.args
            elif isinstance(node, ast.Assert) or (isinstance(node, ast.If) and any(map(_stops, node.body))):
                values = [node.test]
            elif isinstance(node, ast.For) and any(map(_stops, node.body)):
                values = [node.iter]
            keys.update(key_of(part) for value in values for part in ast.walk(value))
        return keys - {""}

    def is_elsewhere(self, call: ast.Call) -> bool:
        """Return whether a call is of another file of the program, or of a library that may know ranks."""
        first = dotted(call.func).partition(".")[0]
        return first in self.imports and self.imports[first].partition(".")[0] not in _WITHOUT_RANKS

    @cached_property
    def _by_name(self) -> dict[tuple[str | None, str], list[Function]]:
        functions: dict[tuple[str | None, str], list[Function]] = {}
        for function, owner in self.owner.items():
            class_name = owner.name if owner and self.is_method(function) else None
            functions.setdefault((class_name, function.name), []).append(function)
        return functions

    @cached_property
    def _parameters(self) -> set[str]:
        return {node.arg for node in self.nodes if isinstance(node, ast.arg)}

    @cached_property
    def _bases(self) -> dict[str, list[str]]:
        classes = (node for node in self.nodes if isinstance(node, ast.ClassDef))
        return {node.name: [dotted(base) for base in node.bases] for node in classes}

    def resolve(self, called: ast.expr) -> str:
        """``torch.distributed.all_reduce`` of ``dist.all_reduce``; empty where it is no plain name."""
        name = dotted(called)
        first, dot, rest = name.partition(".")
        return self.imports.get(first, first) + dot + rest

    def function_called(self, call: ast.Call, owner: ast.ClassDef | None) -> Function | None:
        """The function of this file that a call runs, where its name is there once."""
        name = dotted(call.func)
        first, _, rest = name.rpartition(".")
        if not first:
            functions = self._by_name.get((None, name), []) if name not in self._parameters else []
        elif first in ("self", "cls") and owner is not None:
            functions = self._method(owner.name, rest, frozenset())
        else:
            return None
        return functions[0] if len(functions) == 1 else None

    def _method(self, owner: str, name: str, seen: frozenset[str]) -> list[Function]:
        functions = self._by_name.get((owner, name), [])
        for base in self._bases.get(owner, ()) if not functions and owner not in seen else ():
            functions = functions or self._method(base, name, seen | {owner})
        return functions

    def scopes(self) -> Iterator[tuple[Sequence[ast.stmt], Function | None, ast.ClassDef | None]]:
        """Each body of statements that runs as one: the module's, and each function's with its class."""
        yield self.tree.body, None, None
        for function, owner in self.owner.items():
            yield function.body, function, owner

    def table(self, function: Function | None) -> Table:
        """Return the definitions in a function, or in the module's own statements, whatever collectives make equal."""
        if function not in self._tables:
            self._tables[function] = Table(function.body if function else self.tree.body, None, lambda call: False)
        return self._tables[function]

    def passed_to(self, function: Function, name: str) -> Iterator[tuple[ast.expr, Function | None]]:
        """Yield what the calls in this file pass as a parameter, with the function that each call is in."""
        index = parameters_of(function).index(name)
        is_method = self.is_method(function)
        for body, caller, owner in self.scopes():
            for call in calls_in(*body) if caller is not function else ():
                is_its = is_method and isinstance(call.func, ast.Attribute) and call.func.attr == function.name
                if is_its or self.function_called(call, owner) is function:
                    named = (keyword.value for keyword in call.keywords if keyword.arg == name)
                    yield from ((value, caller) for value in (*call.args[index : index + 1], *named))


class Position(NamedTuple):
    """A position in a function: how many definitions come before it, and the sides of ``if`` and ``try`` around it."""

    order: int
    sides: dict[ast.stmt, int]


@dataclass(frozen=True, eq=False)
class Definition:
    """One definition of a name.

    ``kind``: "assigned" ``value``, "unpacked" from it, "added" (``+=``), "grown" (``append``), "item" (``x[0] =``),
    "turn" of a loop over it, or "synced": made equal on all ranks by that call.
    """

    kind: str
    name: str
    target: ast.expr
    value: ast.expr
    before: Position


class Table:
    """The definitions in one function, in the order of the text, and which of them reach a statement.

    ``at``: the position behind the calls in a statement's head; for the test of ``while``, behind a turn.
    ``syncs`` says of a call whether it makes its arguments equal. A loop makes a turn, and an ``if`` of which one side
    synchronises takes that side: with several ranks, it does.
    """

    def __init__(self, body: Sequence[ast.stmt], function: Function | None, syncs: Callable[[ast.Call], bool]) -> None:
        self.at: dict[ast.AST, Position] = {}
        self.definitions: list[Definition] = []
        self._of_name: dict[str, list[Definition]] = {}
        self._kept: dict[ast.stmt, list[int]] = {}  # the sides that lead behind a statement
        self._syncs = syncs
        for name, default in defaults_of(function) if function else ():
            if isinstance(default, (ast.Tuple, ast.List)):
                self._define({}, [("assigned", ast.Name(name), default)])
        self._walk(body, {})

    def values(self, name: str) -> list[ast.expr]:
        """Return what a name is assigned anywhere."""
        return [definition.value for definition in self._of_name.get(name, ()) if definition.kind == "assigned"]

    def reaching(self, name: str, position: Position) -> list[Definition | None]:
        """Return the definitions that reach a position, the last one first; None for a way that may have none."""
        definitions: list[Definition | None] = []
        replacing: dict[ast.stmt, set[int]] = {}
        for definition in reversed(self._of_name.get(name, ())):
            order, sides = definition.before
            left = {node: side for node, side in sides.items() if node not in position.sides}
            is_other = any(position.sides.get(node, side) != side for node, side in sides.items())
            if order < position.order and not is_other and all(left[node] in self._kept[node] for node in left):
                definitions.append(definition)
                unsure = [node for node in left if self._kept[node] != [left[node]]]
                for node in unsure if len(unsure) == 1 else ():
                    replacing.setdefault(node, set()).add(left[node])
                if not unsure or len(replacing.get(unsure[0], ())) == len(self._kept[unsure[0]]):
                    return definitions
        return [*definitions, None] if definitions else []

    def _walk(self, statements: Sequence[ast.stmt], inside: dict[ast.stmt, int]) -> None:
        for node in statements:
            for part in parts_of(*heads_of(node)):
                self._define(inside, self._changes_in(part))
            self.at[node] = Position(len(self.definitions), inside)
            self._define(inside, _changes_by(node))
            sides = sides_of(node)
            kept = [index for index, side in enumerate(sides) if not side or not isinstance(side[-1], LEAVES)]
            synced = [index for index in kept if any(self._syncs(call) for call in calls_in(*sides[index]))]
            self._kept[node] = synced if synced and isinstance(node, ast.If) else kept
            for index, side in enumerate(sides):
                self._walk(side, {**inside, node: index} if isinstance(node, (ast.If, ast.Try)) else inside)
            if isinstance(node, ast.While):
                self.at[node.test] = Position(len(self.definitions), inside)

    def _changes_in(self, part: ast.AST) -> Iterator[Change]:
        """Yield the changes by a part of an expression."""
        if isinstance(part, ast.NamedExpr):
            yield "assigned", part.target, part.value
        elif isinstance(part, ast.Call):
            arguments = [*part.args, *(keyword.value for keyword in part.keywords if keyword.arg in _GIVEN)]
            for element in chain.from_iterable(map(elements_of, arguments)) if self._syncs(part) else ():
                target = element.value if isinstance(element, ast.Attribute) and element.attr == "data" else element
                if isinstance(target, (ast.Name, ast.Attribute, ast.Subscript)):
                    yield "synced", target, part
            if isinstance(part.func, ast.Attribute) and part.func.attr in ("extend", "append") and part.args:
                yield "grown", part.func.value, part.args[0]

    def _define(self, inside: dict[ast.stmt, int], changes: Iterable[Change]) -> None:
        """Add definitions, also as "name[]", what the name holds, if they replace or fill it."""
        for kind, target, value in changes:
            name, before = ast.unparse(target), Position(len(self.definitions), inside)
            definition = Definition(kind, name, target, value, before)
            self.definitions.append(definition)
            if kind != "item":
                self._of_name.setdefault(name, []).append(definition)
            if kind not in ("grown", "synced"):
                self._of_name.setdefault(f"{name}[]", []).append(definition)


Change = tuple[str, ast.expr, ast.expr]
"""The kind, the target and the value of a definition."""


def _changes_by(node: ast.stmt) -> Iterator[Change]:
    """Yield the changes by a statement itself; ``a, b = x, y`` is assigned in pairs."""
    if isinstance(node, (ast.For, ast.AsyncFor)):
        names = (part for part in ast.walk(node.target) if isinstance(part, ast.Name))
        yield from (("turn", target, node.iter) for target in (*elements_of(node.target), *names))
    elif isinstance(node, ast.AugAssign):
        yield "added", node.target, node.value
        if isinstance(node.target, ast.Subscript):
            yield "item", node.target.value, node.value
    elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from _assigned(target, node.value)


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[Change]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for element, its in zip(target.elts, value.elts, strict=True):
            yield from _assigned(element, its)
        return
    for element in elements_of(target):
        yield "assigned" if element is target else "unpacked", element, value
        if isinstance(element, ast.Subscript):
            yield "item", element.value, value


class MatchAsIf(ast.NodeTransformer):
    """``match`` becomes ``if``, ``elif`` and ``else``, so that no other part has to know it."""

    def visit_Match(self, node: ast.Match) -> ast.AST:
        self.generic_visit(node)
        rest: list[ast.stmt] = []
        for case in reversed(node.cases):
            test, pattern = node.subject, case.pattern
            if isinstance(pattern, ast.MatchValue):
                test = ast.Compare(node.subject, [ast.Eq()], [pattern.value])
            if case.guard is not None:
                test = ast.BoolOp(ast.And(), [test, case.guard])
            is_else = case.guard is None and isinstance(pattern, ast.MatchAs) and pattern.pattern is None
            rest = case.body if is_else else [ast.copy_location(ast.If(test, case.body, rest), node)]
        whole = ast.If(ast.Constant(True), rest, []) if rest is node.cases[0].body else rest[0]
        return ast.fix_missing_locations(ast.copy_location(whole, node))


def _stops(statement: ast.stmt) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    is_exit = isinstance(call, ast.Call) and _SETS_STATUS.fullmatch(last_name(call.func))
    return bool(is_exit) or isinstance(statement, ast.Raise)


def key_of(node: ast.AST | None) -> str:
    """A variable by its name, an attribute as ".name", a call as "name()"; empty of what is none of them."""
    if isinstance(node, ast.Call):
        return f"{last_name(node.func)}()"
    return f".{node.attr}" if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def changed_by(part: ast.AST) -> list[ast.expr]:
    """The variables that it sets or fills: ``x`` of ``x = 1``, of ``x[0] += 1`` and of ``x.append(1)``."""
    targets = part.targets if isinstance(part, ast.Assign) else []
    if isinstance(part, (ast.AugAssign, ast.AnnAssign)):
        targets = [part.target]
    elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in _FILLS:
        targets = [part.func.value]
    each = [element for target in targets for element in getattr(target, "elts", [target])]
    return [element.value if isinstance(element, ast.Subscript) else element for element in each]


def stored_in(*nodes: ast.AST) -> set[str]:
    """The variables that are set anywhere in them, also by a loop or ``with``."""
    return {dotted(part) for part in parts_of(*nodes) if isinstance(getattr(part, "ctx", None), ast.Store)}


def heads_of(statement: ast.stmt) -> list[ast.AST]:
    """The expressions of a statement itself, without its blocks."""
    return [part for part in ast.iter_child_nodes(statement) if isinstance(part, (ast.expr, ast.withitem))]


def sides_of(statement: ast.stmt) -> list[list[ast.stmt]]:
    """The ways through a compound statement; of a loop, that it makes a turn."""
    if isinstance(statement, ast.If):
        return [statement.body, statement.orelse]
    if isinstance(statement, ast.Try):
        whole = [*statement.body, *statement.orelse, *statement.finalbody]
        return [whole, *(handler.body for handler in statement.handlers)]
    return [[inner for block in blocks for inner in block]] if (blocks := list(blocks_of(statement))) else []


def elements_of(target: ast.expr) -> list[ast.expr]:
    """``a`` and ``b`` of ``a, *b``."""
    elements = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
    return [element.value if isinstance(element, ast.Starred) else element for element in elements]


def _is_size(default: ast.expr) -> bool:
    return isinstance(default, ast.Constant) and type(default.value) is int and default.value > 0


def defaults_of(function: Function) -> list[tuple[str, ast.expr]]:
    """The parameters that have a default, with it."""
    named = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    defaults = function.args.defaults
    return list(zip(named[len(named) - len(defaults) :], defaults, strict=True))


def parameters_of(function: Function) -> list[str]:
    """Return the names of the parameters in the order in which a call passes them."""
    signature = function.args
    return [
        argument.arg
        for argument in (*signature.posonlyargs, *signature.args, *signature.kwonlyargs)
        if argument.arg not in ("self", "cls")
    ]


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of a plain name; empty of what is none."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def last_name(node: ast.AST) -> str:
    """``c`` of ``a().b.c`` and of ``c``; empty of what has no name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def text_of(node: ast.AST, most: int = 60) -> str:
    """The source of an expression, cut short, in one line."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= most else text[: most - 3] + "..."


def parts_of(*nodes: ast.AST) -> Iterator[ast.AST]:
    """The nodes in the order in which they run, without what is in functions and classes that they define."""
    for node in nodes:
        if isinstance(node, _INNER):
            continue
        yield from parts_of(*ast.iter_child_nodes(node))
        yield node


def calls_in(*nodes: ast.AST) -> Iterator[ast.Call]:
    """The calls in nodes, in the order in which they run."""
    return (part for part in parts_of(*nodes) if isinstance(part, ast.Call))


def exits(statements: Sequence[ast.stmt]) -> Iterator[Exit]:
    """Yield the statements that leave these ones early, and do not belong to a loop in them."""
    for statement in statements:
        if isinstance(statement, Exit):
            yield statement
        for block in blocks_of(statement):
            inside = exits(block)
            yield from (exit_ for exit_ in inside if isinstance(exit_, ast.Return) or not isinstance(statement, _LOOPS))


def blocks_of(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The blocks that a compound statement has; of a function or class none."""
    if isinstance(statement, _INNER):
        return
    for field in ("body", "orelse", "finalbody"):
        if block := getattr(statement, field, None):
            yield block
    for part in getattr(statement, "handlers", ()):
        yield part.body
