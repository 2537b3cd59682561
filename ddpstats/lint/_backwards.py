"""Which calls of ``backward()`` are of what a DistributedDataParallel has made.

A loss counts where the text shows that the wrapped model was called for it, on each way to the call: what went through
``detach()`` or ``no_grad()``, or was made by ``model.module`` or by a copy, meets no other rank.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from ddpstats.lint._program import Program, blocks_of, dotted, last_name, parts_of

_WRAPS_MODEL = frozenset({"DistributedDataParallel", "DDP"})
_LEAVES_UNSYNCED = re.compile(r"no_(backward_)?sync|require_backward_grad_sync|accumulate")
_CUTS = frozenset({"detach", "item", "data", "module", "tolist", "numpy"})
_NO_GRADIENT = re.compile(r"no_grad|inference_mode")
_UNWRAPS = re.compile(r"\.module\b|unwrap|copy")
_LEAVES = (ast.Return, ast.Break, ast.Continue, ast.Raise)


def backwards_of(program: Program) -> dict[ast.Call, bool]:
    """Those outside of no_sync(), with whether a wrapped model has made the loss, as far as its function shows."""
    assigned = [node for node in program.nodes if isinstance(node, ast.Assign) and _wraps(node.value)]
    wrapped = {name for node in assigned for name in _targets(node)}
    found: dict[ast.Call, bool] = {}
    for body, _, _ in program.scopes():
        nodes = list(parts_of(*body))
        if not any(_LEAVES_UNSYNCED.fullmatch(last_name(node)) for node in nodes):
            own = {name for node in nodes if isinstance(node, ast.Assign) for name in _targets(node)}
            _Losses(wrapped - own, found).block(body)
    return found


class _Losses:
    """Of one function: ``models`` are wrapped where it begins, ``made`` has what they have made so far."""

    def __init__(self, models: set[str], found: dict[ast.Call, bool]) -> None:
        self._models = models
        self._made = set[str]()
        self._found = found

    def block(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            if any(blocks_of(statement)):
                self._compound(statement)
                continue
            for call in (one for one in parts_of(statement) if isinstance(one, ast.Call)):
                if last_name(call.func) == "backward":
                    self._found[call] = self._is_made(call)
            if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and statement.value is not None:
                self._assign(statement, statement.value)

    def _compound(self, statement: ast.stmt) -> None:
        """Where its sides meet, what each of them has made is left."""
        before, after = set(self._made), list[set[str]]()
        for side in _sides_of(statement):
            self._made = set(before)
            self.block(side)
            if not (side and isinstance(side[-1], _LEAVES)):
                after.append(self._made)
        self._made = set.intersection(*after) if after else before
        if isinstance(statement, ast.With) and any(_NO_GRADIENT.search(ast.unparse(one)) for one in statement.items):
            self._made &= before

    def _assign(self, statement: ast.Assign | ast.AnnAssign | ast.AugAssign, value: ast.expr) -> None:
        names = _targets(statement)
        if _wraps(value) or dotted(value) in self._models:
            self._models |= names
        elif _UNWRAPS.search(ast.unparse(value)):
            self._models -= names
        if self._is_made(value):
            self._made |= names
        elif not isinstance(statement, ast.AugAssign):
            self._made -= names

    def _is_made(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Call) and dotted(node.func) in self._models:
            return True
        if isinstance(node, ast.Lambda) or (isinstance(node, ast.Attribute) and node.attr in _CUTS):
            return False
        if isinstance(node, ast.IfExp):
            return self._is_made(node.body) and self._is_made(node.orelse)
        return dotted(node) in self._made or any(map(self._is_made, ast.iter_child_nodes(node)))


def _sides_of(statement: ast.stmt) -> list[list[ast.stmt]]:
    """The ways through a statement; of a loop, that it makes a turn."""
    if isinstance(statement, ast.If):
        return [statement.body, statement.orelse]
    if isinstance(statement, ast.Try):
        whole = [*statement.body, *statement.orelse, *statement.finalbody]
        return [whole, *(handler.body for handler in statement.handlers)]
    return [[one for block in blocks_of(statement) for one in block]]


def _wraps(value: ast.AST) -> bool:
    return any(isinstance(one, ast.Call) and last_name(one.func) in _WRAPS_MODEL for one in ast.walk(value))


def _targets(statement: ast.Assign | ast.AnnAssign | ast.AugAssign) -> set[str]:
    """The variables that it sets; of ``losses["ce"]`` the dict."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    parts = [part for one in targets for part in (one.elts if isinstance(one, (ast.Tuple, ast.List)) else [one])]
    return {dotted(part.value if isinstance(part, ast.Subscript) else part) for part in parts} - {""}
