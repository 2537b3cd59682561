"""Whether an error that is caught ends the run after all: then nobody waits for ever for what it has skipped."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from ddpstats.lint._collectives import is_about_world
from ddpstats.lint._program import FILLS, Function, Program, exits, last_name, parts_of

_ENDS_THE_RUN = frozenset({"exit", "_exit", "abort", "quit", "kill", "destroy_process_group"})
_HANDS_ON = FILLS | {"put", "put_nowait", "send", "set_exception"}
_EXPECTS = re.compile(r"assert\w*|fail")  # of a test, which lets all ranks run into it


class Errors:
    """Of one function, or of a module's own statements."""

    def __init__(self, program: Program, owner: ast.ClassDef | None, function: Function | None) -> None:
        self._program = program
        self._owner = owner
        self._function = function

    def are_told(self, node: ast.Try, handler: ast.ExceptHandler) -> bool:
        """Whether what a handler catches is raised, ends the run, is a test's own or is kept for somebody to raise."""
        if _raises(handler) or _keeps(handler) or self._tells_status(handler):
            return True
        calls = (one for one in parts_of(*handler.body, *node.orelse) if isinstance(one, (ast.Call, ast.Assert)))
        if any(isinstance(one, ast.Assert) or _EXPECTS.fullmatch(last_name(one.func)) for one in calls):
            return True
        return self.end_the_run([*handler.body, *node.finalbody])

    def end_the_run(self, statements: Sequence[ast.stmt], depth: int = 1) -> bool:
        """By a call, or by a function of the file that has one."""
        calls = [part for part in parts_of(*statements) if isinstance(part, ast.Call)]
        if any(last_name(call.func) in _ENDS_THE_RUN for call in calls):
            return True
        called = (self._program.function_called(call, self._owner) for call in calls if depth)
        return any(self.end_the_run(function.body, depth - 1) for function in called if function is not None)

    def _tells_status(self, handler: ast.ExceptHandler) -> bool:
        """Whether it sets what the file ends with: ``return 1`` of a main that sys.exit() runs, or ``code = 1``."""
        names = {name for part in parts_of(*handler.body) for name in _changed_by(part)}
        if self._function is not None and any(isinstance(one, ast.Return) for one in exits(handler.body)):
            names.add(self._function.name)
        return not names.isdisjoint(self._program.statuses)


def _changed_by(part: ast.AST) -> set[str]:
    """``ok`` of ``ok = False``, ``results`` of ``results[i] = None`` and of ``results.append(None)``."""
    if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
        return {last_name(part.func.value)} if part.func.attr in FILLS else set()
    is_set = isinstance(getattr(part, "ctx", None), ast.Store)
    return {last_name(part.value if isinstance(part, ast.Subscript) else part)} if is_set else set()


def _keeps(handler: ast.ExceptHandler) -> bool:
    """Whether the error itself, and not its text, is kept or handed on."""
    for part in parts_of(*handler.body):
        given = [part.value] if isinstance(part, ast.Assign) else []
        if isinstance(part, ast.Call) and last_name(part.func) in _HANDS_ON:
            given = part.args
        inside = (one for value in given for one in (value.elts if isinstance(value, ast.Tuple) else [value]))
        if handler.name and any(last_name(one) == handler.name for one in inside):
            return True
    return False


def _raises(handler: ast.ExceptHandler) -> bool:
    """Whether it raises, and not only where the error's text is another one."""
    asks = [one for one in handler.body if isinstance(one, ast.If) and f"str({handler.name})" in ast.unparse(one.test)]
    leaves = (ast.Return, ast.Break, ast.Continue)
    skips = [one.body for one in asks if isinstance(one.body[-1], leaves) and not is_about_world(one.test)]
    raises = any(isinstance(part, ast.Raise) for part in parts_of(*handler.body))
    return raises and all(any(isinstance(part, ast.Raise) for part in parts_of(*body)) for body in skips)
