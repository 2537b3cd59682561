"""pytest's plugin: ``@pytest.mark.ranks(2)`` runs a test on real gloo ranks of this machine.

``@pytest.mark.collective_guard("strict")`` runs it there under `ddpstats.collective_guard`, whose arguments it takes.

1. Fixtures and parameters are made in pytest's process, and sent to each rank by pickle.
2. Each rank imports the test's file and calls the test (`rank_test`). What it prints goes to a file of its own.
3. A rank whose test fails writes down how and when, and ends: the others, which may wait for it, then fail soon.
4. The filters of warnings that hold in the test hold on the ranks. What they let pass is issued again in pytest's
   process, for its summary of warnings.
5. The report has what failed first, a line for each other rank, and sections of what each rank printed.

Nothing of ddpstats that imports torch is imported before the first test with the mark runs, unless DDPSTATS_GUARD is
set. That is for the ranks, which begin a guard of their own: pytest's process has none, unless it is a rank itself.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import operator
import pickle
import re
import sys
import tempfile
import unittest
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from ddpstats._base.lazy import DYNAMO

if TYPE_CHECKING:
    from ddpstats.testing.outcomes import RankOutcome

_TIMEOUT_SEC = 60.0
_SHOWN_BYTES = 1 << 20  # of what a rank printed
_ENDED = {"fail": "failed", "skip": "skipped, and not all ranks did", "xfail": "xfailed, and not all ranks did"}
_PRELOADED = (
    "pytest",
    DYNAMO,
    "ddpstats.testing.rank",
    "ddpstats.testing.rank_test",
    "ddpstats.guard.guard",
)
_KNOWN = ("builtins", "torch", "pytest", "ddpstats")  # whose warnings keep their category
_NOT_SENT = (
    "Fixtures and parameters reach the ranks by pickle: plain values, tensors, tmp_path, objects of importable "
    "classes. Make this one in the test itself, on each rank."
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"ranks(n, timeout={_TIMEOUT_SEC:g}): run on n gloo ranks of this machine")
    config.addinivalue_line("markers", "collective_guard(mode, ...): with ranks: under ddpstats.collective_guard")
    ending = sys.modules.get("ddpstats.guard.ending")  # DDPSTATS_GUARD was set when ddpstats was imported
    if ending is not None and not ending.had_ranks():
        ending.cancel()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A mark that would do nothing is an error, for the test would pass without ranks."""
    if item.get_closest_marker("ranks") is None:
        if item.get_closest_marker("collective_guard") is not None:
            _fail("@pytest.mark.collective_guard needs @pytest.mark.ranks(N): it compares the collectives of ranks")
        return
    if not isinstance(item, pytest.Function) or issubclass(item.cls or object, unittest.TestCase):
        _fail("@pytest.mark.ranks is for functions, and for methods of classes that are no unittest.TestCase")
    if inspect.iscoroutinefunction(item.obj):
        _fail("@pytest.mark.ranks does not run coroutines: let the test call asyncio.run")
    if getattr(item.obj, "is_hypothesis_test", False):
        _fail("@pytest.mark.ranks and @given: each rank would draw other examples. Call run_ranks in the test")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    try:
        world_size, timeout_sec = _asked(*mark.args, **mark.kwargs)
    except TypeError as error:
        _fail(f"@pytest.mark.ranks: {str(error).replace('_asked()', 'ranks(n, timeout=60)')}")
    _run(pyfuncitem, world_size, timeout_sec)
    return True


def _asked(n: int, *, timeout: float = _TIMEOUT_SEC) -> tuple[int, float]:
    if type(n) is not int:
        raise TypeError(f"n must be a whole number, not {n!r}")
    if type(timeout) not in (int, float):
        raise TypeError(f"timeout must be a number of seconds, not {timeout!r}")
    return n, timeout


def _run(item: pytest.Function, world_size: int, timeout_sec: float) -> None:
    from ddpstats.testing.forkserver import preload
    from ddpstats.testing.rank_test import RankTest, run_test
    from ddpstats.testing.ranks import run_ranks

    preload(_PRELOADED)
    guard = item.get_closest_marker("collective_guard")
    test = RankTest(
        module=item.module.__name__,
        path=str(item.path),
        holder=item.cls.__qualname__ if item.cls else "",
        name=item.originalname,
        arguments=_pickled(item),
        guard=None if guard is None else (guard.args, guard.kwargs),
        filters=list(_filters()),
    )
    with tempfile.TemporaryDirectory(prefix="ddpstats-ranks-") as scratch:
        try:
            outcomes = run_ranks(run_test, world_size, test, scratch, timeout_sec=timeout_sec)
        except (TypeError, ValueError) as error:
            _fail(f"@pytest.mark.ranks: {error}")
        ends = [_End(outcome, Path(scratch)) for outcome in outcomes]
    for end in ends:
        end.add_sections(item)
        end.warn()
    _judge(ends, any("raises" in mark.kwargs for mark in item.iter_markers("xfail")))


def _pickled(item: pytest.Function) -> dict[str, bytes]:
    """Return what the test is called with, by name."""
    sent = {}
    for name in inspect.signature(item.obj).parameters:
        if name in item.funcargs:
            try:
                sent[name] = pickle.dumps(item.funcargs[name])
            except Exception as error:
                _fail(f"{name} (a {type(item.funcargs[name]).__name__}) cannot be sent to ranks: {error}. {_NOT_SENT}")
    return sent


def _filters() -> Iterator[bytes]:
    """Those of warnings that hold now: of the command line, the configuration, marks and fixtures. By their order."""
    for action, message, category, module, lineno in warnings.filters:
        with contextlib.suppress(pickle.PicklingError, AttributeError):  # a class of a function: no rank has that one
            yield pickle.dumps((action, _pattern(message), category, _pattern(module), lineno))


def _pattern(given: re.Pattern[str] | str | None) -> str:
    """Of a part of a filter. Python's own filters have names there."""
    if isinstance(given, re.Pattern):
        return given.pattern
    return f"{re.escape(given)}\\Z" if given else ""


class _End:
    """How the test ended on one rank."""

    def __init__(self, outcome: RankOutcome, scratch: Path) -> None:
        from ddpstats.testing.outcomes import RankTimedOut
        from ddpstats.testing.rank_test import Failure

        self.rank = outcome.rank
        self.failure = Failure.read(scratch, outcome.rank)
        self.error = outcome.error
        self.stack = outcome.error.stack if isinstance(outcome.error, RankTimedOut) else ""
        self.output = _end_of(scratch / f"output{outcome.rank}")
        self.warned = list(_warnings_in(scratch / f"warnings{outcome.rank}"))

    @property
    def turn(self) -> tuple[int, float]:
        """Sorts causes before consequences: a death, failures by time, what else there is."""
        from ddpstats.testing.outcomes import RankDied

        return (1, self.failure.at) if self.failure else (0 if isinstance(self.error, RankDied) else 2, 0.0)

    def add_sections(self, item: pytest.Function) -> None:
        for what, text in (("", self.output), (" stack", self.stack)):
            if text:
                item.add_report_section("call", f"rank {self.rank}{what}", text)

    def warn(self) -> None:
        """In this process, of what the rank's filters let pass."""
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            for message, names, filename, lineno in self.warned:
                warnings.warn_explicit(f"rank {self.rank}: {message}", _category(names), filename, lineno)

    def __str__(self) -> str:
        """In one line."""
        from ddpstats.testing.outcomes import RankDied, RankError, RankTimedOut, describe_exit

        if self.failure:
            return f"rank {self.rank} {_ENDED[self.failure.kind]}: {self.failure.line}"
        if isinstance(self.error, RankDied):
            return f"rank {self.rank} died: {describe_exit(self.error.exit_code)}"
        if isinstance(self.error, RankTimedOut):
            return f"rank {self.rank} still ran after {self.error.timeout_sec:g} s, and was ended"
        if isinstance(self.error, RankError):
            return str(self.error)
        return f"rank {self.rank} failed before the test: {type(self.error).__name__}: {self.error}"


def _end_of(path: Path) -> str:
    """What a rank printed: of very much, which a rank that hangs in a loop may print, the end."""
    try:
        with path.open("rb") as file:
            left_out = file.seek(max(0, path.stat().st_size - _SHOWN_BYTES))
            text = file.read(_SHOWN_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return ""
    return f"({left_out:,} bytes before this are left out)\n{text}" if left_out else text


def _warnings_in(path: Path) -> Iterator[tuple[str, list[str], str, int]]:
    """Of very many the first."""
    with contextlib.suppress(FileNotFoundError), path.open(errors="replace") as file:
        for line in file.read(_SHOWN_BYTES).splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)


def _category(names: list[str]) -> type[Warning]:
    """The most special one that is Python's, torch's, pytest's or ours. Others may be made from more than a text."""
    for module, _, name in (place.partition(":") for place in names):
        found = vars(sys.modules[module]).get(name) if module in sys.modules else None
        if module.partition(".")[0] in _KNOWN and isinstance(found, type) and issubclass(found, Warning):
            return found
    return UserWarning


class _Raised(pytest.fail.Exception):  # type: ignore[misc, name-defined]
    """A failure that is an instance of what the ranks raised, too: ``xfail(raises=...)`` asks `isinstance`."""

    raised: type[BaseException]
    __class__ = property(operator.attrgetter("raised"))


_Raised.__qualname__, _Raised.__module__ = pytest.fail.Exception.__qualname__, "builtins"  # shown as pytest's own


def _judge(ends: list[_End], is_expected: bool) -> None:
    """``is_expected``: a mark says which exception the test raises."""
    bad = sorted((end for end in ends if end.error is not None), key=lambda end: end.turn)
    if not bad:
        return
    failures = [(end.rank, end.failure) for end in bad if end.failure]
    kinds = {failure.kind for _, failure in failures}
    if len(failures) == len(ends) and kinds == {"skip"}:
        raise pytest.skip.Exception(failures[0][1].line, _use_item_location=True)
    if len(failures) == len(ends) and kinds == {"xfail"}:
        pytest.xfail(failures[0][1].line)
    texts = [f"\nrank {rank}:\n{failure.text}" for rank, failure in failures[:1] if failure.text]
    text = "\n".join([*map(str, bad), *texts])
    raised = _common_class([failure.classes for _, failure in failures]) if len(failures) == len(bad) else None
    if raised is None or not is_expected:
        _fail(text)
    failed = _Raised(text, pytrace=False)
    failed.raised = raised
    raise failed


def _common_class(classes: list[list[str]]) -> type[BaseException] | None:
    """The most special one, of those that this process has as well: it has what a mark of the test names."""
    for place in classes[0]:
        module, _, qualname = place.partition(":")
        if all(place in others for others in classes):
            with contextlib.suppress(AttributeError):  # made in a function, or in a module that only ranks import
                found: Any = functools.reduce(getattr, qualname.split("."), sys.modules.get(module))
                if isinstance(found, type) and issubclass(found, BaseException):
                    return found
    return None


def _fail(text: str) -> NoReturn:
    raise pytest.fail.Exception(text, pytrace=False) from None
