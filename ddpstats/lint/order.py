"""The order of an iteration: whether ranks may not share it.

A set of strings has another order in each process, and a dict has that of its insertions. A dict is a finding where
it is a function's argument, unless the calls in the same file pass one that ranks fill equally, and where its keys are
those of such a dict or are read from the data. Other dicts, such as those that a call returned, are not judged.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from ddpstats.lint.origins import names_entries
from ddpstats.lint.program import Function, Program, dotted, last_name, parameters_of, parts_of, text_of

_SHARED = re.compile(
    r"(?i).*(param|state(_dict)?|buffers|modules|config|weights|groups|children|dataset|loader|model|optim|args|hyper)"
)
_STRINGS = re.compile(r"(?i)name|keys?\b|lang|word|tags?\b|\.split\(|\bstr\(")
_PASSES_ON = frozenset({"enumerate", "list", "tuple", "tqdm"})
_DIRECT = frozenset({"all_reduce", "all_gather", "reduce", "broadcast"})


class Order:
    """The iterations in one function, or in a module's own statements."""

    def __init__(self, program: Program, body: Sequence[ast.stmt], function: Function | None) -> None:
        self._program = program
        self._body = body
        self._function = function

    def differing_order(
        self, loop: ast.For | ast.AsyncFor | ast.comprehension, turn: Sequence[ast.AST], call: ast.Call
    ) -> str:
        """Return what gives this rank an order that others may not have; empty where that is not known.

        ``turn`` is the loop's body, ``call`` the one in it that runs a collective.
        """
        iterated = _passed_on(loop.iter)
        assigned = (part for part in parts_of(*self._body) if isinstance(part, ast.Assign))
        values = [
            assignment.value for assignment in assigned if dotted(assignment.targets[0]) == dotted(iterated) != ""
        ]
        source = values[0] if len(values) == 1 else iterated
        args = source.args if isinstance(source, ast.Call) else []
        has_keys = any(names_entries(argument) and _is_indexed(argument, turn) for argument in args)
        if _is_set_of_strings(source, "keys" if has_keys else dotted(iterated)):
            return f"the set `{text_of(iterated)}`, whose strings each process hashes otherwise"
        held = _dict_of(iterated)
        if held is iterated and not (names_entries(held) and _is_indexed(held, turn)):
            return ""
        name = dotted(held)
        known = names_entries(held) or (self._function is not None and self._is_for_any(self._function, loop, call))
        if not known or not name or _SHARED.fullmatch(name) or not self._is_own(name, self._body, self._function, 2):
            return ""
        return f"the dict `{name}`, which is that of its insertions on this rank"

    def _is_for_any(self, function: Function, loop: ast.For | ast.AsyncFor | ast.comprehension, call: ast.Call) -> bool:
        """Return whether the function takes any dict: it reduces the entries themselves, or calls itself for each."""
        entries = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
        passed = {node.id for part in call.args for node in ast.walk(part) if isinstance(node, ast.Name)}
        name = last_name(call.func)
        is_direct = name in _DIRECT and not entries.isdisjoint(passed)
        return not _SHARED.fullmatch(function.name) and (is_direct or name == function.name)

    def _is_own(self, name: str, body: Sequence[ast.stmt], function: Function | None, depth: int) -> bool:
        """Return whether the text shows that ranks may insert other keys, or in another order."""
        owner = self._program.owner[function] if function is not None and name.startswith("self.") else None
        if owner is not None:
            body = [statement for method, of in self._program.owner.items() if of is owner for statement in method.body]
        is_reset, sources = False, set[str]()
        for part in parts_of(*body):
            for target in part.targets if isinstance(part, ast.Assign) else ():
                if dotted(target) == name and isinstance(part, ast.Assign):
                    if "sorted(" in ast.unparse(part.value):
                        return False
                    names = {node.id for node in ast.walk(part.value) if isinstance(node, ast.Name)}
                    is_reset |= part in body and name not in names
                    generators = part.value.generators if isinstance(part.value, ast.DictComp) else ()
                    sources |= {dotted(part.value), *(dotted(_dict_of(generator.iter)) for generator in generators)}
                elif isinstance(target, ast.Subscript) and dotted(target.value) == name:
                    if isinstance(target.slice, (ast.Subscript, ast.Call)):
                        return True  # a key of the data
                    sources |= set(_sources_of(target.slice, body))
        if any(
            depth and source not in ("", name) and self._is_own(source, body, function, depth - 1) for source in sources
        ):
            return True
        if function is None or is_reset or name not in parameters_of(function):
            return False
        handed = list(self._handed(function, name))
        return not handed or any(
            depth and dotted(value) and self._is_own(dotted(value), where, caller, depth - 1)
            for value, where, caller in handed
        )

    def _handed(self, function: Function, name: str) -> Iterator[tuple[ast.expr, Sequence[ast.stmt], Function | None]]:
        """Yield what the calls in this file pass as a parameter, with the function that each call is in."""
        position = parameters_of(function).index(name)
        is_method = self._program.is_method(function)
        for body, caller, owner in self._program.scopes():
            calls = (part for part in parts_of(*body) if isinstance(part, ast.Call)) if caller is not function else ()
            for call in calls:
                is_its = is_method and isinstance(call.func, ast.Attribute) and call.func.attr == function.name
                if is_its or self._program.function_called(call, owner) is function:
                    passed = [*call.args[position : position + 1], *(k.value for k in call.keywords if k.arg == name)]
                    yield from ((value, body, caller) for value in passed)


def _sources_of(key: ast.expr, body: Sequence[ast.stmt]) -> Iterator[str]:
    """The dicts whose keys a loop runs over that sets ``key``."""
    loops = (part for part in parts_of(*body) if isinstance(part, ast.For) and isinstance(key, ast.Name))
    for loop in loops:
        if dotted(key) in {dotted(node) for node in ast.walk(loop.target)}:
            yield dotted(_dict_of(_passed_on(loop.iter)))


def _is_set_of_strings(iterated: ast.expr, name: str) -> bool:
    """As far as it and the name of its variable show: a set of numbers has the same order in each process."""
    if isinstance(iterated, ast.BinOp):
        return _is_set_of_strings(iterated.left, name)
    held = iterated.args[0] if isinstance(iterated, ast.Call) and iterated.args else iterated
    if isinstance(iterated, ast.Call) and dotted(iterated.func) != "set":
        return False
    if isinstance(held, (ast.Set, ast.List, ast.Tuple)) and (held is not iterated or isinstance(held, ast.Set)):
        strings = (
            element for element in held.elts if isinstance(element, ast.Constant) and isinstance(element.value, str)
        )
        return len(held.elts) > 1 and any(strings)
    is_set = held is not iterated or isinstance(held, ast.SetComp)
    return is_set and bool(_STRINGS.search(f"{name} {ast.unparse(held)}"))


def _passed_on(iterated: ast.expr) -> ast.expr:
    """``stats`` of ``list(stats)``."""
    while isinstance(iterated, ast.Call) and last_name(iterated.func) in _PASSES_ON and iterated.args:
        iterated = iterated.args[0]
    return iterated


def _dict_of(iterated: ast.expr) -> ast.expr:
    """``stats`` of ``stats.items()``."""
    if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Attribute) and not iterated.args:
        return iterated.func.value if iterated.func.attr in ("items", "keys", "values") else iterated
    return iterated


def _is_indexed(held: ast.expr, turn: Sequence[ast.AST]) -> bool:
    """A loop over ``stats`` itself, in which ``stats[key]`` is read: it is a dict."""
    text = ast.unparse(held)
    return any(isinstance(part, ast.Subscript) and ast.unparse(part.value) == text for part in parts_of(*turn))
