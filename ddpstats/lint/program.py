"""`Program` knows the imports and functions of one parsed file, and functions here read its syntax tree."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Exit = ast.Return | ast.Break | ast.Continue
_INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_WITHOUT_RANKS = frozenset({"torch", "numpy", "tqdm", *sys.stdlib_module_names})
_SHAPED = frozenset({"Linear", "zeros", "ones", "empty", "rand", "randn"})


class Program:
    """The names of one file, built from its tree alone, and resolved as if each import held for the whole file."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.imports: dict[str, str] = {}
        self.modules = set[str]()  # the first words of what is imported: "torch", "lightning"
        self.functions: dict[FunctionNode, str] = {}  # with the class of a method; of other functions ""
        self.flags: dict[str, list[ast.expr]] = {}  # "self.is_main", "MAIN": the conditions and calls assigned to it
        self.constants: dict[str, bool] = {}  # by their last word: whether the file sets a negative number, so no rank
        self.sizes = set[str]()  # what is a size by its default or in a tensor's shape: ``rank`` of a decomposition
        self._parameters = set[str]()
        self._class_around: dict[ast.AST, str] = {}
        self._bases: dict[str, list[str]] = {}
        for node in ast.walk(tree):
            self._collect(node)
        self._by_name: dict[tuple[str, str], list[FunctionNode]] = {}
        for function, owner in self.functions.items():
            self._by_name.setdefault((owner, function.name), []).append(function)

    def _collect(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            self.imports.update((alias.asname, alias.name) for alias in node.names if alias.asname)
            self.modules.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = "." * node.level + (node.module or "")
            self.imports.update((alias.asname or alias.name, f"{home}.{alias.name}") for alias in node.names)
            self.modules.add(home.partition(".")[0])
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if last_name(target).isupper():
                    self.constants[last_name(target)] = isinstance(node.value, ast.UnaryOp)
                if isinstance(node.value, (ast.Compare, ast.Call, ast.Subscript)):
                    for first in elements_of(target)[:1]:
                        self.flags.setdefault(name_of(first), []).append(node.value)
        elif isinstance(node, ast.Call) and last_name(node.func) in _SHAPED and len(node.args) > 1:
            self.sizes.update(map(last_name, node.args))
        elif isinstance(node, ast.arg):
            self._parameters.add(node.arg)
        elif isinstance(node, ast.ClassDef):
            self._bases[node.name] = [name_of(base) for base in node.bases]
            self._class_around.update((inner, node.name) for inner in ast.walk(node))  # an inner class comes later
            self.functions.update((inner, node.name) for inner in ast.walk(node) if isinstance(inner, FunctionNode))
        elif isinstance(node, FunctionNode):
            self.functions.setdefault(node, "")
            inside = (inner for part in node.body for inner in ast.walk(part))
            self.functions.update((inner, "") for inner in inside if isinstance(inner, FunctionNode))
            defaults = parameters_of(node).items()
            self.sizes.update(name for name, value in defaults if value and ast.unparse(value).strip("0").isdigit())

    def maker(self, name: str) -> ast.Call | None:
        """Return the call that a value came from, of ``window, _ = make()`` as well."""
        calls = [value for value in self.flags.get(name, ()) if isinstance(value, ast.Call)]
        return calls[-1] if calls and name else None

    def is_elsewhere(self, call: ast.Call) -> bool:
        """Return whether a call is of another file of the program, or of a library that may know ranks."""
        first = name_of(call.func).partition(".")[0]
        return first in self.imports and self.imports[first].partition(".")[0] not in _WITHOUT_RANKS

    def resolve(self, called: ast.expr) -> str:
        """Return ``torch.distributed.all_reduce`` for ``dist.all_reduce``; empty where it is no plain name."""
        first, dot, rest = name_of(called).partition(".")
        return self.imports.get(first, first) + dot + rest

    def find_function(self, call: ast.Call) -> FunctionNode | None:
        """Return the function of this file that a call runs, where only one has its name."""
        first, _, name = name_of(call.func).rpartition(".")
        owner = self._class_around.get(call, "")
        if not first:
            functions = self._by_name.get(("", name), []) if name not in self._parameters else []
        else:
            functions = self._method(owner, name) if first in ("self", "cls") and owner else []
        return functions[0] if len(functions) == 1 else None

    def _method(self, owner: str, name: str, seen: tuple[str, ...] = ()) -> list[FunctionNode]:
        functions = self._by_name.get((owner, name), [])
        for base in self._bases.get(owner, ()) if not functions and owner not in seen else ():
            functions = functions or self._method(base, name, (*seen, owner))
        return functions

    def scopes(self) -> Iterator[tuple[Sequence[ast.stmt], FunctionNode | None]]:
        """Yield each body of statements that runs as a whole: the module's, and each function's."""
        yield self.tree.body, None
        for function in self.functions:
            yield function.body, function

    def calls_of(self, function: FunctionNode) -> Iterator[tuple[ast.Call, FunctionNode | None]]:
        """Yield the calls of a function in this file, each with the function that it is in."""
        for body, caller in self.scopes():
            for call in calls_in(*body) if caller is not function else ():
                is_its = self.functions[function] and getattr(call.func, "attr", "") == function.name
                if is_its or self.find_function(call) is function:
                    yield call, caller


def heads_of(statement: ast.stmt) -> list[ast.AST]:
    """Return the expressions of a statement itself, without its blocks."""
    return [part for part in ast.iter_child_nodes(statement) if isinstance(part, (ast.expr, ast.withitem))]


def blocks_of(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """Yield the blocks that a compound statement has, and none of a function or class."""
    if isinstance(statement, _INNER):
        return
    for field in ("body", "orelse", "finalbody"):
        if block := getattr(statement, field, None):
            yield block
    for part in getattr(statement, "handlers", ()):
        yield part.body


def exits(statements: Sequence[ast.stmt]) -> Iterator[Exit]:
    """Yield the statements that leave these ones early, and do not belong to a loop in them."""
    for statement in statements:
        if isinstance(statement, Exit):
            yield statement
        for block in blocks_of(statement):
            inside = exits(block)
            yield from (exit_ for exit_ in inside if isinstance(exit_, ast.Return) or not isinstance(statement, _LOOPS))


def elements_of(target: ast.expr) -> list[ast.expr]:
    """Return ``a`` and ``b`` of ``a, *b``."""
    elements = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
    return [element.value if isinstance(element, ast.Starred) else element for element in elements]


def parameters_of(function: FunctionNode) -> dict[str, ast.expr | None]:
    """Return the parameters by name, each with its default, in the order in which a call passes them."""
    signature = function.args
    positional = [*signature.posonlyargs, *signature.args]
    defaults = [None] * (len(positional) - len(signature.defaults)) + [*signature.defaults, *signature.kw_defaults]
    pairs = zip([*positional, *signature.kwonlyargs], defaults, strict=True)
    return {argument.arg: default for argument, default in pairs if argument.arg not in ("self", "cls")}


def name_of(node: ast.AST) -> str:
    """Return ``a.b.c`` for a plain name, and an empty text for anything more."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def last_name(node: ast.AST) -> str:
    """Return ``c`` for ``a().b.c`` and for ``c``, and an empty text where there is no name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def text_of(node: ast.AST) -> str:
    """Return the source of an expression in one line, of at most 60 characters."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else text[:57] + "..."


def parts_of(*nodes: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes in the order in which they run, without what is in functions and classes that they define."""
    for node in nodes:
        if isinstance(node, _INNER):
            continue
        yield from parts_of(*ast.iter_child_nodes(node))
        yield node


def calls_in(*nodes: ast.AST) -> Iterator[ast.Call]:
    """Return the calls in nodes, in the order in which they run."""
    return (part for part in parts_of(*nodes) if isinstance(part, ast.Call))
