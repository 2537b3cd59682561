"""The walk through one function reports collectives that some ranks run and others do not.

1. The statements are walked in order; `Origins` follows what each variable depends on.
2. At a condition in which ranks may differ, the collectives of the two sides are compared, up to where the sides meet
   again: what comes after an early exit belongs to the other side. Sides that run the same operations are no finding.
3. A loop of which ranks may make different numbers of turns, an iteration in an order that ranks do not share, an
   exception that is caught between collectives, and a context or a decorator for single ranks are reported on the way.
4. Branches that complete each other (first the others wait, then rank 0) are taken out at the end.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from ddpstats.lint.collectives import TRY, CollectiveCall, Collectives, is_for_one_rank
from ddpstats.lint.origins import RANK_BRANCH, SAME, Differs, Origin, Origins, is_of_rank
from ddpstats.lint.program import Exit, FunctionNode, blocks_of, calls_in, exits, heads_of, last_name, parts_of, text_of

EARLY_EXIT = "early-exit"
SWALLOWED_ERROR = "swallowed-error"
DICT_ORDER = "dict-order"

_ENDS_THE_RUN = frozenset({"exit", "_exit", "abort", "quit", "kill", "destroy_process_group"})
_ONLY_REPORTS = re.compile(
    r"(?i)(\w*print|log|warn|write|sync)\w*|info|debug|error|exception|critical|len|str|repr|type"
)
_ONE_AFTER_ANOTHER = re.compile(r".*(process|zero|rank)_first")
_MAY_FAIL_ON_ONE = frozenset(
    {"", "Exception", "BaseException", "RuntimeError", "ValueError", "KeyError", "OSError", "OutOfMemoryError"}
)
_NEGATIVE = re.compile(r"\bnot |!=|> 0\b")  # in a condition that is true on all ranks but one
_HARMLESS = re.compile(
    r"(?i)print|log\w*|info|warning|debug|(is|get|current)\w*|len|wait|str|list|range|int|float|tensor|zeros|ones|sum|mean"
)
_LEADS = re.compile(r"broadcast|scatter")  # which the others may await elsewhere, of a leader that may fail before
_IN_ANY_ORDER = frozenset({"", "backward", "log", "log_dict", "pad_across_processes"})
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_MAKES_EVEN = re.compile(r"(?i) % |pad|drop|trunc|even|divisible|multiple|ceil")


# For each kind of exit from a block, the collectives that a rank misses by it.
#
# For `ast.While`, those of a turn, in a loop that only an exit ends.
_Later = dict[type[ast.stmt], tuple[CollectiveCall, ...]]


def _behind(later: _Later, rest: Sequence[CollectiveCall]) -> _Later:
    return {**later, **{kind: (*rest, *later.get(kind, ())) for kind in get_args(Exit)}}


_Conditions = frozenset[tuple[str, bool]]  # the texts of conditions, and whether each holds
_NEGATED = {ast.NotEq: ast.Eq, ast.IsNot: ast.Is, ast.NotIn: ast.In}


@dataclass(frozen=True)
class Accusation:
    """A finding at ``node``. ``ops``: what one branch runs. ``is_for_rest``: on all ranks but one."""

    rule: str
    node: ast.expr | ast.stmt
    reason: str
    ops: tuple[str, ...] = ()
    is_for_rest: bool = False


class FlowWalk:
    """The walk through one function, or through a module's own statements."""

    def __init__(self, collectives: Collectives, body: Sequence[ast.stmt], function: FunctionNode | None) -> None:
        self._collectives = collectives
        self._program = collectives.program
        self._among = collectives.among
        self._body = body
        self.accusations: list[Accusation] = []
        ops = self._among(body)
        if function is not None and is_for_one_rank(function):
            if ops:
                self._accuse(RANK_BRANCH, ops[0], f"a decorator lets only one rank run {function.name}()")
        elif ops or any(isinstance(part, _COMPREHENSIONS) or last_name(part) == "backward" for part in parts_of(*body)):
            self._conditions = dict(_with_conditions(body))
            self._origins = Origins(self._collectives, body, function)
            self._block(body, {})

    def _accuse(
        self, rule: str, first: CollectiveCall, why: str, ops: tuple[str, ...] = (), is_for_rest: bool = False
    ) -> None:
        reason = f"{first} needs all ranks: {why}."
        self.accusations.append(Accusation(rule, first.call, reason, ops, is_for_rest))

    def _report_skip(self, exit_: ast.stmt, first: CollectiveCall, why: str) -> None:
        skipped = f"{type(exit_).__name__.lower()} skips {first.op} (line {first.call.lineno})"
        self.accusations.append(Accusation(EARLY_EXIT, exit_, f"{skipped}, which other ranks run: {why}."))

    # -- statements ---------------------------------------------------------------------------------------------------

    def _block(self, statements: Sequence[ast.stmt], later: _Later, *, is_reported: bool = False) -> None:
        """Walk statements. ``is_reported``: a finding covers them already, so that none is added for what is inside."""
        before = len(self.accusations)
        leaves = [index for index, statement in enumerate(statements) if isinstance(statement, (ast.Return, ast.Raise))]
        rest = self._among(statements)
        for index, statement in enumerate(statements):
            rest = rest[len(self._among([statement])) :]
            others = {} if leaves and index < leaves[-1] else later  # the others leave as well
            self._statement(statement, _behind(others, rest) if hasattr(statement, "body") else later)
        if is_reported:
            del self.accusations[before:]

    def _statement(self, node: ast.stmt, later: _Later) -> None:
        self._origins.at(node)
        self._expressions(*heads_of(node))
        if isinstance(node, ast.If):
            is_reported = self._report_branches(node, later)
            for side in (node.body, node.orelse):
                self._block(side, later, is_reported=is_reported)
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            self._loop(node, later)
        elif isinstance(node, TRY):
            self._try(node, later)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            self._with(node, later)

    def _expressions(self, *nodes: ast.AST) -> None:
        """Walk conditions and iterations inside of expressions."""
        for part in parts_of(*nodes):
            if isinstance(part, ast.IfExp):
                self._compare(part.test, [part.body], [part.orelse])
            elif isinstance(part, ast.BoolOp):
                for index, value in enumerate(part.values[:-1]):
                    self._compare(value, part.values[index + 1 :], [])
            elif isinstance(part, _COMPREHENSIONS):
                element = [part.key, part.value] if isinstance(part, ast.DictComp) else [part.elt]
                for generator in part.generators:
                    self._iteration(generator, element)

    # -- branches -----------------------------------------------------------------------------------------------------

    def _report_branches(self, node: ast.If, later: _Later) -> bool:
        """Report a finding if the branches run different collectives on some ranks; return whether they do."""
        origin = self._origins.of_condition(node.test)
        if not isinstance(origin, Differs) or (origin.file and not self._is_made_behind(node, origin.file)):
            return False
        sides = [node.body, node.orelse]
        if any(self._is_unclear(side, origin) for side in sides):
            return False
        runs = [self._among(side) for side in sides]
        leaving = [side[-1] if side and isinstance(side[-1], Exit) else None for side in sides]
        exit_ = leaving[0] or leaving[1]
        if exit_ is not None and not all(leaving):
            stays = leaving.index(None)
            missed = self._find_missed(later, exit_)
            runs[stays] = [*runs[stays], *missed]
            return self._differ(runs, origin, node.test, exit_ if missed else None)
        if self._differ(runs, origin, node.test):
            return True
        for inner in () if exit_ else (each for side in sides for each in exits(side)):
            if missed := self._find_missed_sometimes(later, inner):
                self._report_skip(inner, missed[0], origin.why)
                return True
        return False

    def _find_missed(self, later: _Later, exit_: ast.stmt) -> list[CollectiveCall]:
        """Return the collectives behind an exit, without those whose conditions exclude the exit's."""
        excluding = {(text, not holds) for text, holds in self._conditions.get(exit_, ())}
        behind = later.get(type(exit_), ())
        return [each for each in behind if excluding.isdisjoint(self._conditions.get(each.call, ()))]

    def _find_missed_sometimes(self, later: _Later, exit_: ast.stmt) -> list[CollectiveCall]:
        """Do as `_find_missed`, but a rank that begins an endless loop's turn again only comes later."""
        only_later = isinstance(exit_, ast.Continue) and later.get(ast.Continue) == later.get(ast.While)
        return [] if only_later else self._find_missed(later, exit_)

    def _is_made_behind(self, node: ast.If, file: str) -> bool:
        """Return whether one rank makes the file before the next collective: a rank that looks later sees it."""
        named = re.compile(rf"(?<![\w.])(?<!dirname\(){re.escape(file)}(?!\w|\.(parent|name|stem)\b)")  # not its folder
        for part in (part for part in parts_of(*self._body) if getattr(part, "lineno", 0) > node.lineno):
            if isinstance(part, ast.Call) and self._collectives.of(part):
                return False
            calls = calls_in(*part.body) if isinstance(part, ast.If) and is_of_rank(self._origins.of(part.test)) else ()
            if any(named.search(ast.unparse(call)) for call in calls if not _is_harmless(call)):
                return True
        return False

    def _is_unclear(self, side: Sequence[ast.stmt], origin: Differs) -> bool:
        """Return whether a side ends the run, or the text does not show which ranks run its collectives, and how often.

        Such a side defines a function that runs one, or calls a function that serves others in an endless loop. Under
        a test of the rank, a function of another file may run what the other side does.
        """
        calls = list(calls_in(*side))
        if (side and isinstance(side[-1], ast.Raise)) or any(last_name(call.func) in _ENDS_THE_RUN for call in calls):
            return True
        called: Iterator[FunctionNode] = filter(None, map(self._program.find_function, calls))
        endless = (isinstance(node, ast.While) and _is_true(node.test) for function in called for node in function.body)
        inner = (each.body for part in side for each in ast.walk(part) if isinstance(each, ast.FunctionDef))
        if any(endless) or any(map(self._among, inner)):
            return True
        elsewhere = (call for call in calls if self._program.is_elsewhere(call) and not _is_harmless(call))
        return is_of_rank(origin) and not self._among(side) and any(elsewhere)

    def _differ(
        self, runs: Sequence[list[CollectiveCall]], origin: Differs, test: ast.expr, exit_: ast.stmt | None = None
    ) -> bool:
        """Report if two sides run different collectives. ``exit_``: how one side leaves before those of the other."""
        body, orelse = ([collective.op for collective in run] for run in runs)
        if body == orelse or (body and orelse and {*body} == {*orelse}):
            return False
        pairs = enumerate(zip(body, orelse, strict=False))
        common = next((index for index, (first, second) in pairs if first != second), min(len(body), len(orelse)))
        on_body = len(body) > common
        longer = runs[0] if on_body else runs[1]
        if exit_ is not None:
            self._report_skip(exit_, longer[common], origin.why)
        else:
            parts = test.values if isinstance(test, ast.BoolOp) else [test]
            of_rank = next((part for part in parts if is_of_rank(self._origins.of_condition(part))), test)
            is_for_rest = on_body == bool(_NEGATIVE.search(ast.unparse(of_rank)))
            self._accuse(origin.rule, longer[common], origin.why, tuple(body if on_body else orelse), is_for_rest)
        return True

    def _compare(self, test: ast.expr, body: Sequence[ast.AST], orelse: Sequence[ast.AST]) -> None:
        origin = self._origins.of_condition(test)
        if isinstance(origin, Differs) and not origin.file:
            self._differ([self._among(body), self._among(orelse)], origin, test)

    # -- loops --------------------------------------------------------------------------------------------------------

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, later: _Later) -> None:
        ops = self._among(node.body)
        if isinstance(node, ast.While):
            self._origins.at(node.test)
            origin = self._origins.of(node.test)  # of what a turn has left
        else:
            self._iteration(node, node.body)
            origin = self._turns(node.iter)
        if isinstance(origin, Differs) and ops:
            self._accuse(origin.rule, ops[0], f"ranks may make different numbers of turns, {origin.why}")
        turn = tuple(ops)  # the others make more turns
        inside: _Later = {ast.Return: (*turn, *later.get(ast.Return, ())), ast.Break: turn}
        if isinstance(node, ast.While) and _is_true(node.test):
            inside[ast.While] = turn
        self._block(node.body, inside, is_reported=isinstance(origin, Differs))
        self._block(node.orelse, later)

    def _turns(self, iterated: ast.expr) -> Origin:
        """Return the origin of the number of turns: ranks differ in ``range(rank, n, size)`` and ``files[rank::size]``.

        Where both ends move with the rank, the parts are equal.
        """
        is_range = isinstance(iterated, ast.Call) and last_name(iterated.func) in ("range", "trange")
        args, slice_ = getattr(iterated, "args", []), getattr(iterated, "slice", None)
        ends = (
            args[:2] if is_range and len(args) > 1 else [getattr(slice_, "lower", None), getattr(slice_, "upper", None)]
        )
        differing = [origin for end in filter(None, ends) if is_of_rank(origin := self._origins.of(end))]
        is_even = len(differing) != 1 or _MAKES_EVEN.search(self._origins.text)  # padded, or known to be divisible
        return None if is_even else differing[0]

    def _iteration(self, loop: ast.For | ast.AsyncFor | ast.comprehension, body: Sequence[ast.AST]) -> None:
        """Report a loop whose turns run a collective in an order that ranks do not share."""
        ops = ((call, self._collectives.possible(call)) for call in calls_in(*body))
        call, op = next(((call, op) for call, op in ops if op not in _IN_ANY_ORDER), (None, ""))
        is_same = self._origins.of(loop.iter) == SAME and not isinstance(loop.iter, ast.Set)
        before = (known for known in self._among(self._body) if known.call.lineno < loop.iter.lineno)
        if not call or is_same or any("object" in known.op for known in before):  # such as the lists of keys
            return
        if why := self._origins.find_differing_order(loop, call):
            reason = f"{op} for each entry in the order of {why}."
            self.accusations.append(Accusation(DICT_ORDER, call, reason))

    # -- errors and contexts ------------------------------------------------------------------------------------------

    def _try(self, node: ast.Try, later: _Later) -> None:
        ops = self._among(node.body)
        behind = _behind(later, self._among(node.orelse))  # an exit runs what is in finally
        self._block(node.body, behind)
        self._block(node.orelse, later)
        for handler in node.handlers:
            self._handler(node, handler, ops, behind)
            self._block(handler.body, behind)
        self._block(node.finalbody, later)

    def _handler(self, node: ast.Try, handler: ast.ExceptHandler, ops: list[CollectiveCall], later: _Later) -> None:
        kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        broad = any(kind is None or last_name(kind) in _MAY_FAIL_ON_ONE for kind in kinds)
        if not broad or node.finalbody:
            return
        usual = {text for text, read_until, set_at in self._origins.unread if read_until < handler.lineno < set_at}
        if not _swallows(handler.body, usual):
            return
        collectives = {id(collective.call) for collective in ops}
        calls = [call for call in calls_in(*node.body) if id(call) not in collectives]
        risky = [call for call in calls if not _is_harmless(call)]
        if not risky or any(last_name(call.func) == "init_process_group" for call in risky):
            return  # it goes on alone without one
        why = f"`{text_of(risky[0])}` may raise on one rank"
        retries = later.get(ast.While) or isinstance((node.orelse or node.body)[-1], ast.Break)  # it only comes later
        if ops and not retries and risky[0].lineno <= ops[-1].call.lineno:
            self._accuse(SWALLOWED_ERROR, ops[-1], f"{why}, and line {handler.lineno} goes on")
        for exit_ in () if ops else exits(handler.body):
            if (missed := self._find_missed_sometimes(later, exit_)) and not _LEADS.match(missed[0].op):
                self._report_skip(exit_, missed[0], why)
                return

    def _with(self, node: ast.With | ast.AsyncWith, later: _Later) -> None:
        items = [item.context_expr for item in node.items]
        called = [last_name(item.func) for item in items if isinstance(item, ast.Call)]
        first = next((name for name in called if _ONE_AFTER_ANOTHER.fullmatch(name)), None)
        if first and (ops := self._among(node.body)):
            self._accuse(RANK_BRANCH, ops[0], f"{first}() lets the other ranks wait until the first has left it")
        for call in items:
            if isinstance(call, ast.Call) and last_name(call.func) == "suppress":
                handler = ast.ExceptHandler(ast.Tuple(call.args), None, [ast.Pass()], lineno=node.lineno)
                self._handler(ast.Try(node.body, [handler], [], []), handler, self._among(node.body), later)
        uneven = any(name in ("Join", "join") for name in called)  # ranks without a batch run what the others do
        self._block(node.body, later, is_reported=uneven)


def _with_conditions(
    statements: Sequence[ast.stmt], known: _Conditions = frozenset()
) -> Iterator[tuple[ast.AST, _Conditions]]:
    """Yield the statements and the calls, each with what surely holds there, of the ``if`` statements around it."""
    for statement in statements:
        yield from ((node, known) for node in (statement, *calls_in(*heads_of(statement))))
        if isinstance(statement, ast.If):
            yield from _with_conditions(statement.body, known | _conditions_of(statement.test, True))
            yield from _with_conditions(statement.orelse, known | _conditions_of(statement.test, False))
        else:
            for block in blocks_of(statement):
                yield from _with_conditions(block, known)


def _conditions_of(test: ast.expr, holds: bool) -> _Conditions:
    """Return what holds where the test holds, or where it does not."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _conditions_of(test.operand, not holds)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And if holds else ast.Or):
        return frozenset().union(*(_conditions_of(value, holds) for value in test.values))
    if isinstance(test, ast.Compare) and (positive := _NEGATED.get(type(test.ops[0]))) and len(test.ops) == 1:
        return _conditions_of(ast.Compare(test.left, [positive()], test.comparators), not holds)
    return frozenset({(ast.unparse(test), holds)})


def _is_true(test: ast.expr) -> bool:
    return isinstance(test, ast.Constant) and bool(test.value)


def _swallows(statements: Sequence[ast.stmt], usual: set[str]) -> bool:
    """Return whether a handler surely goes on as if nothing had happened.

    It prints, and sets variables or returns None. What keeps the error or a flag may raise it later, or end the run,
    unless the flag is set in the same way where nothing has failed: by one of the ``usual`` statements.
    An ``if`` swallows where one of its sides does, and then leaves.
    """
    for node in statements:
        if isinstance(node, ast.If):
            sides = (node.body, node.orelse)
            if any(_swallows(side, usual) for side in sides if side and isinstance(side[-1], Exit)):
                return True
            if all(_swallows(side, usual) for side in sides):
                continue
        calls = list(calls_in(node))
        value = getattr(node, "value", None)
        is_none = value is None or (isinstance(value, ast.Constant) and value.value is None)
        is_usual = isinstance(node, ast.Assign) and ast.unparse(node) in usual
        only_reports = isinstance(node, ast.Expr) and all(
            _ONLY_REPORTS.fullmatch(last_name(call.func)) for call in calls
        )
        if not only_reports and not is_usual and not (is_none and isinstance(node, Exit | ast.Pass | ast.Assign)):
            return False
    return True


def _is_harmless(call: ast.Call) -> bool:
    return bool(_HARMLESS.fullmatch(last_name(call.func)))


def drop_completed(accused: Sequence[Accusation]) -> list[Accusation]:
    """Drop what one function runs on rank 0 and another on the rest, as in ``__enter__`` and ``__exit__``."""
    branches = {(accusation.ops, accusation.is_for_rest) for accusation in accused if accusation.ops}
    completed = {ops for ops, is_for_rest in branches if (ops, not is_for_rest) in branches}
    return [accusation for accusation in accused if accusation.rule != RANK_BRANCH or accusation.ops not in completed]
