"""pytest's plugin: ``@pytest.mark.ranks(2)`` runs a test on real gloo ranks of this machine.

``@pytest.mark.collective_guard("strict")`` runs it there under `ddpstats.collective_guard`, whose arguments it takes.

1. pytest's process starts the ranks, and sets up no fixture of the test. Each rank runs pytest for that one test, with
   the same command line: it imports the test, makes its fixtures, and reports.
2. A rank writes its reports and warnings to a file. One that fails then ends, so that ranks that wait for it fail soon.
3. pytest's process makes one report of theirs: what failed first, and sections with what each rank printed.

Nothing of ddpstats that imports torch is imported before the first test with the mark runs, unless DDPSTATS_GUARD is
set. That is for the ranks, which begin a guard of their own: pytest's process has none, unless it is a rank itself.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import json
import logging
import math
import os
import sys
import tempfile
import unittest
import warnings
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import pytest

from ddpstats._base.lazy import DYNAMO

if TYPE_CHECKING:
    from ddpstats.testing.outcomes import RankOutcome

_TIMEOUT_SEC = 60.0
_SHOWN_BYTES = 1 << 20  # of what a rank printed
_ON_RANK = "ddpstats-rank"
_PRELOADED = ("pytest", DYNAMO, "ddpstats.testing.rank", "ddpstats.testing.pytest_plugin", "ddpstats.guard.guard")


# -- in pytest's process ----------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"ranks(n, timeout={_TIMEOUT_SEC:g}): run on n gloo ranks of this machine")
    config.addinivalue_line("markers", "collective_guard(mode, ...): with ranks: under ddpstats.collective_guard")
    ending = sys.modules.get("ddpstats.guard.ending")  # DDPSTATS_GUARD was set when ddpstats was imported
    if ending is not None and not ending.had_ranks():
        ending.cancel()
    if not config.pluginmanager.has_plugin(_ON_RANK):
        config.pluginmanager.register(_RunsOnRanks())


class _RunsOnRanks:
    """The hooks of a pytest that starts ranks. `merged` is what the ranks reported of the test that runs."""

    merged: _MergedReport | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Refuse a mark that would do nothing: the test would pass without ranks."""
        self.merged = None
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
        item.fixturenames = []  # they are set up on the ranks

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        mark = pyfuncitem.get_closest_marker("ranks")
        if mark is None:
            return None
        try:
            self.merged = _run(pyfuncitem, *mark.args, **mark.kwargs)
        except (TypeError, ValueError) as error:
            _fail(f"@pytest.mark.ranks: {str(error).replace('_run()', 'ranks(n, timeout=60)')}")
        return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        if call.when == "call" and self.merged is not None:
            vars(report).pop("wasxfail", None)  # here the test has only started ranks: they know the mark `xfail`
            vars(report).update(self.merged)
        return report


_MergedReport = dict[str, Any]  # attributes of a `TestReport`


def _run(item: pytest.Function, n: int, *, timeout: float = _TIMEOUT_SEC) -> _MergedReport:
    from ddpstats.testing.forkserver import preload
    from ddpstats.testing.ranks import run_ranks

    preload(_PRELOADED)
    invocation = item.config.invocation_params
    test = f"{item.path}::{item.nodeid.partition('::')[2]}"
    arguments = [*map(str, invocation.args), "--capture=no", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    with tempfile.TemporaryDirectory(prefix="ddpstats-ranks-") as scratch:
        outcomes = run_ranks(_run_pytest, n, test, arguments, str(invocation.dir), scratch, timeout_sec=timeout)
        ends = [_read_end(outcome, Path(scratch), item) for outcome in outcomes]
    for end in ends:
        end.warn()
    return {**_merge(ends), "sections": [section for end in ends for section in end.sections]}


class _RankEnd(NamedTuple):
    """The end of the test on one rank.

    ``report``: the first that did not pass, or the last one. ``kind``: "passed", "failed", "skipped", "xfailed",
    "xpassed", "died" or "late".
    """

    rank: int
    kind: str
    report: Any
    warnings: list[Any]
    sections: list[tuple[str, str]]

    @property
    def blame_order(self) -> tuple[bool, float]:
        """Sort key: deaths first, then failures by time, then ranks that still ran."""
        return self.kind not in ("died", "failed"), getattr(self.report, "stop", 0.0)

    def describe(self) -> str:
        """Say in one line how the rank ended."""
        if self.kind in ("died", "late"):
            return f"rank {self.rank} {self.report.longrepr}"
        crash = getattr(self.report.longrepr, "reprcrash", None)
        why = crash.message if crash else self.report.longrepr[2] if self.report.skipped else str(self.report.longrepr)
        ending = self.kind if self.kind == "failed" else f"{self.kind}, and not all ranks did"
        return f"rank {self.rank} {ending}: {why.removeprefix('Skipped: ').partition(chr(10))[0]}"

    def warn(self) -> None:
        """Issue the rank's warnings in this process, for pytest's summary of warnings."""
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            for message, category, filename, line_number in self.warnings:
                kind = getattr(builtins, category, UserWarning)
                warnings.warn_explicit(f"rank {self.rank}: {message}", kind, filename, line_number)


def _read_end(outcome: RankOutcome, scratch: Path, item: pytest.Function) -> _RankEnd:
    from ddpstats.testing.outcomes import RankDied, RankTimedOut, describe_exit

    rank, error = outcome.rank, outcome.error
    lines = _lines_of(scratch / f"reports{rank}")
    read = item.config.hook.pytest_report_from_serializable
    reports: list[Any] = [read(config=item.config, data=line["report"]) for line in lines if "report" in line]
    report = next((report for report in reports if not _has_passed(report)), (reports or [None])[-1])
    if error is None or (report is not None and not _has_passed(report)):
        kind = _kind_of(report)
    else:
        kind, text, stop = "late", f"failed before the test: {error}", math.inf
        if isinstance(error, RankDied):
            kind, text, stop = "died", f"died: {describe_exit(error.exit_code)}", 0.0
        elif isinstance(error, RankTimedOut):
            text = f"still ran after {error.timeout_sec:g} s, and was ended"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call", stop=stop)
    texts = {"call": _end_of(scratch / f"output{rank}"), "stack": getattr(error, "stack", "")}
    sections = [(f"Captured rank {rank} {name}", text) for name, text in texts.items() if text]
    return _RankEnd(rank, kind, report, [line["warning"] for line in lines if "warning" in line], sections)


def _kind_of(report: Any) -> str:
    if hasattr(report, "wasxfail"):
        return "xfailed" if report.skipped else "xpassed"
    return "xpassed" if str(report.longrepr).startswith("[XPASS(strict)]") else str(report.outcome)


def _has_passed(report: Any) -> bool:
    return bool(report.passed and not hasattr(report, "wasxfail"))


def _merge(ends: Sequence[_RankEnd]) -> _MergedReport:
    """Return one report for all ranks: theirs where all ended the same way, or a failure that names the ranks."""
    kinds = {end.kind for end in ends}
    first = min(ends, key=lambda end: end.blame_order)
    if (len(kinds) == 1 and kinds <= {"passed", "skipped", "xfailed", "xpassed"}) or kinds == {"xfailed", "xpassed"}:
        shown = next((end for end in ends if end.kind == "xfailed"), first).report
        names = ("outcome", "longrepr", "wasxfail", "user_properties")
        merged = {name: getattr(shown, name) for name in names if hasattr(shown, name)}
        if isinstance(merged["longrepr"], list):  # JSON's; pytest asks for a tuple
            merged["longrepr"] = tuple(merged["longrepr"])
        return merged
    bad = sorted((end for end in ends if end.kind not in ("passed", "xpassed")), key=lambda end: end.blame_order)
    texts = [f"\nrank {end.rank}:\n{end.report.longreprtext}" for end in bad if end.kind == "failed"]
    phases = {getattr(end.report, "when", "setup") for end in bad}
    return {
        "outcome": "failed",
        "longrepr": "\n".join([*(end.describe() for end in bad), *texts[:1]]),
        "when": phases.pop() if len(phases) == 1 else "call",
    }


def _lines_of(path: Path) -> list[dict[str, Any]]:
    """Read what a rank wrote; its last line may be cut off, where it was killed."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _end_of(path: Path) -> str:
    """Return what a rank printed: the end of very much, which a rank that hangs in a loop may print."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        left_out = file.seek(max(0, path.stat().st_size - _SHOWN_BYTES))
        text = file.read(_SHOWN_BYTES).decode(errors="replace")
    return f"({left_out:,} bytes before this are left out)\n{text}" if left_out else text


def _fail(text: str) -> NoReturn:
    raise pytest.fail.Exception(text, pytrace=False) from None


# -- on a rank --------------------------------------------------------------------------------------------------------


def _run_pytest(test: str, arguments: Sequence[str], directory: str, scratch: str) -> None:
    """Run one test by pytest. A rank on which it does not pass ends at once: others see that sooner than the limit."""
    import torch.distributed as dist

    rank = dist.get_rank()
    output = open(Path(scratch, f"output{rank}"), "w", buffering=1)  # noqa: SIM115  # as long as the process lives
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    sys.stdout = output
    os.chdir(directory)
    dist.barrier()  # no rank is to fail while another still connects
    plugin = _OnRank(test, Path(scratch), rank)
    status = pytest.main(list(arguments), plugins=[plugin])
    if status or not plugin.has_passed:
        output.flush()
        os._exit(1)


class _OnRank:
    """The plugin of the pytest that runs on a rank: one test, no terminal, and reports that go to a file."""

    __name__ = _ON_RANK

    def __init__(self, test: str, scratch: Path, rank: int) -> None:
        self._test, self._directory = test, scratch / f"tmp{rank}"
        self._file = (scratch / f"reports{rank}").open("w", buffering=1)
        self.has_passed = True

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> None:
        config.args = [self._test]
        vars(config.option).update(
            basetemp=str(self._directory), xmlpath=None, usepdb=False, dist="no", numprocesses=None, tx=[]
        )

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config
        for name in ("terminalreporter", "lfplugin", "nfplugin", "stepwiseplugin"):
            if (plugin := config.pluginmanager.get_plugin(name)) is not None:
                config.pluginmanager.unregister(plugin)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._write_report(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._write_report(report)

    def _write_report(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        self.has_passed &= _has_passed(report)
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        print(json.dumps({"report": data}, default=str), file=self._file)

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        if when == "runtest":  # the others pytest's process has seen itself
            warned = warning_message
            self._write_warning(str(warned.message), warned.category.__name__, warned.filename, warned.lineno)

    def _write_warning(self, *warning: object) -> None:
        print(json.dumps({"warning": warning}), file=self._file)

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
        """Raise what the guard of the mark, or of DDPSTATS_GUARD, has found, which the test may have caught."""
        from ddpstats.guard import collective_guard, ending

        mark = pyfuncitem.get_closest_marker("collective_guard")
        guard = collective_guard(*mark.args, **mark.kwargs) if mark else None

        def verdict() -> Exception | None:
            return guard.verdict if guard is not None else ending.verdict()

        def write(record: logging.LogRecord) -> bool:
            if record.levelno >= logging.WARNING:  # for pytest's summary of warnings
                self._write_warning(record.getMessage(), "UserWarning", record.pathname, record.lineno)
            return True

        result = None
        logger = logging.getLogger("ddpstats")
        logger.addFilter(write)
        try:
            with guard or contextlib.nullcontext():
                result = yield
        except (pytest.skip.Exception, pytest.xfail.Exception):
            if verdict() is None:
                raise
        finally:
            logger.removeFilter(write)
        if (error := verdict()) is not None:
            raise error
        return result
