"""Whether an error that is caught ends the run after all: then nobody waits for ever for what it has skipped."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence

from ddpstats.lint._collectives import is_about_world
from ddpstats.lint._program import Exit, Function, Program, changed_by, exits, key_of, last_name, parts_of, stored_in

_ENDS_THE_RUN = frozenset({"exit", "_exit", "abort", "quit", "kill", "destroy_process_group"})
_HANDS_ON = frozenset({"put", "put_nowait", "send", "set_exception"})
_IS_TEST = re.compile(r"_?test_\w+")
_CHECKS = re.compile(r"\b(self|pytest)\.fail\(|\.(assert[A-Z]\w*|fail)\([^)]")  # of a test
_ONLY_READS = re.compile(r"(?i)(\w*print|log|warn|write)\w*|info|debug|error|exception|critical|len|str|repr|type|bool")
_SEVERAL = (ast.Tuple, ast.List, ast.Dict)


class Errors:
    """Of one function, or of a module's own statements."""

    def __init__(self, program: Program, owner: ast.ClassDef | None, function: Function | None) -> None:
        self._program = program
        self._owner = owner
        self._function = function

    def are_told(self, node: ast.Try, handler: ast.ExceptHandler) -> bool:
        """Whether what a handler catches is raised, ends the run, is a test's own or is kept for somebody to raise."""
        if _raises(handler) or self._is_expected(node, handler) or self._tells_status(node, handler):
            return True
        return self.end_the_run([*handler.body, *node.finalbody])

    def end_the_run(self, statements: Sequence[ast.stmt], depth: int = 1) -> bool:
        """By a call, or by a function of the file that has one."""
        calls = [part for part in parts_of(*statements) if isinstance(part, ast.Call)]
        if any(last_name(call.func) in _ENDS_THE_RUN for call in calls):
            return True
        called = (self._program.function_called(call, self._owner) for call in calls if depth)
        return any(self.end_the_run(function.body, depth - 1) for function in called if function is not None)

    def _is_expected(self, node: ast.Try, handler: ast.ExceptHandler) -> bool:
        """Whether a test runs into it, on all ranks, or an assertion is about the error or what was made of it."""
        text = "\n".join(map(ast.unparse, [*handler.body, *node.orelse]))
        if _CHECKS.search(text) or ("assert" in text and self._function and _IS_TEST.fullmatch(self._function.name)):
            return True
        own = stored_in(*handler.body) | {handler.name}
        asserted = (one for part in parts_of(*handler.body) if isinstance(part, ast.Assert) for one in ast.walk(part))
        return any(last_name(one) in own for one in asserted)

    def _tells_status(self, node: ast.Try, handler: ast.ExceptHandler) -> bool:
        """Whether it sets what the run ends with, as main() of ``sys.exit(main())`` does, or keeps the error itself."""
        scope = self._function or self._program.tree
        calm = {part for one in [*node.body, *node.orelse] for part in ast.walk(one)}  # which runs without an error
        around = [part for part in ast.walk(scope) if part not in calm]
        ends = self._program.ends_of(around)
        values = [part.value for part in around if isinstance(part, (ast.Return, ast.Assign))]
        for call in (part for part in around if isinstance(part, ast.Call)):
            if function := self._program.function_called(call, self._owner):
                ends |= set(map(key_of, call.args)) if self._program.ends_of(ast.walk(function)) else set()
            elif not _ONLY_READS.fullmatch(last_name(call.func)):
                values += [*call.args, *(keyword.value for keyword in call.keywords)]
        passed = {key_of(one) for value in values for one in _each(value)}  # to whoever may raise it
        shared = {name for part in around if isinstance(part, (ast.Global, ast.Nonlocal)) for name in part.names}
        for part in parts_of(*handler.body):
            keys = set(map(key_of, changed_by(part)))
            others = keys - (stored_in(*scope.body) - shared)  # which are read elsewhere
            given = part.args if isinstance(part, ast.Call) else [part.value] if isinstance(part, ast.Assign) else []
            keeps = any(last_name(one) == handler.name for value in given for one in _each(value))
            hands_on = isinstance(part, ast.Call) and last_name(part.func) in _HANDS_ON
            if keys & ends or others & self._program.statuses or (keeps and (hands_on or others or keys & passed)):
                return True
        returns = any(isinstance(one, ast.Return) for one in exits(handler.body))
        return returns and f"{getattr(scope, 'name', '')}()" in self._program.statuses


def _each(value: ast.AST | None) -> Iterable[ast.AST]:
    """What a tuple, a list or a dict has, or the value itself."""
    return ast.iter_child_nodes(value) if isinstance(value, _SEVERAL) else [value] if value else []


def _raises(handler: ast.ExceptHandler) -> bool:
    """Whether it raises, and not only where the error's text is another one."""
    asks = [one for one in handler.body if isinstance(one, ast.If) and f"str({handler.name})" in ast.unparse(one.test)]
    skips = [one.body for one in asks if isinstance(one.body[-1], Exit) and not is_about_world(one.test)]
    raises = any(isinstance(part, ast.Raise) for part in parts_of(*handler.body))
    return raises and all(any(isinstance(part, ast.Raise) for part in parts_of(*body)) for body in skips)
