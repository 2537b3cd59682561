"""One parsed file: what its names were imported as, its functions by name, and in which class each of them is."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

Function = ast.FunctionDef | ast.AsyncFunctionDef
Exit = ast.Return | ast.Break | ast.Continue
_INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
RANGES = ("range", "trange")
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_WITHOUT_RANKS = frozenset({"torch", "numpy", "tqdm", *sys.stdlib_module_names})
_SHAPED = frozenset({"Linear", "zeros", "ones", "empty", "rand", "randn"})
_SETS_STATUS = re.compile(r"_?exit|SystemExit|\w*raise\w*|assert\w+")
_FILLS = frozenset({"append", "extend", "add", "update", "insert", "setdefault"})


class Program:
    """Built from the tree alone; names are resolved as if each import held for the whole file."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.imports: dict[str, str] = {}
        self.owner: dict[Function, ast.ClassDef | None] = {}  # of a nested function: that of the method around it
        self._nested: set[Function] = set()
        self.flags: dict[str, list[ast.expr]] = {}  # "self.is_main", "MAIN": the conditions that it is assigned
        self.made: dict[str, ast.Call] = {}  # "self.window": the call that its value came from
        self._collect(tree, None)

    def _collect(self, node: ast.AST, owner: ast.ClassDef | None, is_inside: bool = False) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                self.imports.update((alias.asname, alias.name) for alias in child.names if alias.asname)
            elif isinstance(child, ast.ImportFrom):
                home = "." * child.level + (child.module or "")
                self.imports.update((alias.asname or alias.name, f"{home}.{alias.name}") for alias in child.names)
            elif isinstance(child, ast.Assign) and isinstance(child.value, ast.Call):
                firsts = (target.elts[0] if isinstance(target, ast.Tuple) else target for target in child.targets)
                self.made.update((dotted(first), child.value) for first in firsts if dotted(first))
            if isinstance(child, ast.Assign) and isinstance(child.value, (ast.Compare, ast.Call, ast.Subscript)):
                for target in child.targets:
                    self.flags.setdefault(dotted(target), []).append(child.value)
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

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def modules(self) -> set[str]:
        """The first words of what is imported: "torch", "lightning"."""
        plain = (alias.name for node in self.nodes if isinstance(node, ast.Import) for alias in node.names)
        return {name.partition(".")[0] for name in (*self.imports.values(), *plain)}

    @cached_property
    def configured(self) -> set[str]:
        """Return attributes that a constructor sets from its parameters, or that no other method changes."""
        passed, made, changed = set[str](), set[str](), set[str]()
        for function in self.owner:
            parameters = set(parameters_of(function))
            for part in parts_of(*function.body):
                names = map(ast.unparse, changed_by(part))
                if function.name != "__init__":
                    changed.update(names)
                elif isinstance(part, ast.Assign):
                    named = {node.id for node in ast.walk(part.value) if isinstance(node, ast.Name)}
                    (passed if named & parameters else made).update(names)
        return passed | (made - changed)

    @cached_property
    def sizes(self) -> set[str]:
        """Parameters that are a size, by their default or in the shape of a tensor: ``rank`` of a decomposition."""
        sizes = set[str]()
        for node in self.nodes:
            if isinstance(node, ast.arguments):
                named = [*node.posonlyargs, *node.args]
                pairs = zip(named[len(named) - len(node.defaults) :], node.defaults, strict=True)
                sizes.update(argument.arg for argument, default in pairs if _is_size(default))
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
        return keys | {f"{last_name(self.made[name].func)}()" for name in keys & self.made.keys()}

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


def _is_size(default: ast.expr) -> bool:
    return isinstance(default, ast.Constant) and type(default.value) is int and default.value > 0


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
