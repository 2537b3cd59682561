"""The calls of ``backward()`` on a loss that a DistributedDataParallel has computed.

A loss counts where the text shows that the wrapped model was called for it, on each way to the call: what went through
``detach()`` or ``no_grad()``, is a number or a shape, or was made by ``model.module``, by a copy or by a model that is
frozen, needs no other rank.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence

from ddpstats.lint.program import Exit, Program, blocks_of, changed_by, dotted, last_name, parts_of, stored_in

_WITHOUT_VALUE = frozenset(
    {"dtype", "device", "shape", "size", "ndim", "dim", "numel", "stride", "is_cuda", "layout"}
    | {"requires_grad", "element_size", "is_floating_point", "nelement"}
)
"""Attributes of a tensor that say nothing of what is in it."""
_WRAPS_MODEL = frozenset({"DistributedDataParallel", "DDP"})
_LEAVES_UNSYNCED = re.compile(r"no_(backward_)?sync|require_backward_grad_sync|accumulate")
_CUTS = _WITHOUT_VALUE | frozenset(
    {"detach", "detach_", "item", "data", "grad", "module", "tolist", "numpy"}
    | {"long", "int", "bool", "argmax", "argmin"}
)
_CUTTING = re.compile(r"float|int|bool|len|(torch|np|numpy)\.(\w+_like|arg\w+|tensor|from_numpy)")
_NO_GRADIENT = re.compile(r"no_grad|inference_mode|set_grad_enabled\((?!True)")
_UNWRAPS = re.compile(r"\.module\b|unwrap|copy")
_FREEZES = re.compile(r"(.+)\.requires_grad_\(False\)")


def backwards_of(program: Program) -> dict[ast.Call, bool]:
    """Return the calls outside of no_sync(), with whether the text shows that a wrapped model computed the loss."""
    wrapped = _names_of(node for node in program.nodes if isinstance(node, ast.Assign) and _wraps(node.value))
    calls: dict[ast.Call, bool] = {}
    for body, _, _ in program.scopes():
        nodes = list(parts_of(*body))
        if not any(_LEAVES_UNSYNCED.fullmatch(last_name(node)) for node in nodes):
            reassigned = _names_of(node for node in nodes if isinstance(node, ast.Assign))
            _Losses(wrapped - reassigned, calls).block(body)
    return calls


class _Losses:
    """The losses of one function. ``models`` are wrapped at its begin; ``_made`` has what they have computed so far."""

    def __init__(self, models: set[str], calls: dict[ast.Call, bool]) -> None:
        self._models = models
        self._made = set[str]()
        self._calls = calls

    def block(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            if any(blocks_of(statement)):
                self._compound(statement)
                continue
            for call in (part for part in parts_of(statement) if isinstance(part, ast.Call)):
                if last_name(call.func) == "backward":
                    self._calls[call] = any(map(self._is_made, ast.iter_child_nodes(call)))
                elif frozen := _FREEZES.fullmatch(ast.unparse(call)):
                    self._models -= {frozen[1]}
            if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and statement.value is not None:
                self._assign(statement, statement.value)

    def _compound(self, statement: ast.stmt) -> None:
        """Behind it, a loss is made where each of its sides has made it, and a model wrapped where none unwraps it."""
        heads = (part for part in ast.iter_child_nodes(statement) if isinstance(part, (ast.expr, ast.withitem)))
        reassigned = stored_in(*heads)
        models, made = self._models - reassigned, self._made - reassigned
        after: list[tuple[set[str], set[str]]] = []
        for side in _sides_of(statement):
            self._models, self._made = set(models), set(made)
            self.block(side)
            if not (side and isinstance(side[-1], Exit | ast.Raise)):
                after.append((self._models, self._made))
        wrapped, kept = zip(*after or [(models, made)], strict=True)
        self._models = set.intersection(*wrapped) | (set.union(*wrapped) - models)
        self._made = set.intersection(*kept)
        if isinstance(statement, ast.With) and any(_NO_GRADIENT.search(ast.unparse(item)) for item in statement.items):
            self._made &= made - _names_of(parts_of(*statement.body))

    def _assign(self, statement: ast.Assign | ast.AnnAssign | ast.AugAssign, value: ast.expr) -> None:
        names = _names_of([statement])
        if _wraps(value) or dotted(value) in self._models:
            self._models |= names
        elif _UNWRAPS.search(ast.unparse(value)) or self._models.isdisjoint(map(dotted, ast.walk(value))):
            self._models -= names
        if self._is_made(value):
            self._made |= names
        elif not isinstance(statement, ast.AugAssign):
            self._made -= names

    def _is_made(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Call) and (dotted(node.func) in self._models or _CUTTING.fullmatch(dotted(node.func))):
            return dotted(node.func) in self._models
        hides = hasattr(node, "generators") and not self._models.isdisjoint(stored_in(node))  # another of that name
        if hides or isinstance(node, (ast.Lambda, ast.Compare)) or getattr(node, "attr", "") in _CUTS:
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
    return [[inner for block in blocks_of(statement) for inner in block]]


def _wraps(value: ast.AST) -> bool:
    return any(isinstance(node, ast.Call) and last_name(node.func) in _WRAPS_MODEL for node in ast.walk(value))


def _names_of(statements: Iterable[ast.AST]) -> set[str]:
    """The variables that they set; of ``losses["ce"]`` the dict."""
    return {dotted(variable) for node in statements if isinstance(node, ast.stmt) for variable in changed_by(node)} - {
        ""
    }
