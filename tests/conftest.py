"""Pools of ranks that all tests share, and what a run reports at its end: unmarked tests that are slow, and skips.

Tests without a mark are what `scripts/launch.sh test` runs. The mark ``slow`` is for what takes seconds or repeats a
mechanism that another test shows; ``library``, for what needs a library beside torch. Both are run by ``test --all``.
Further cases of what another test shows have the mark ``nightly``, and only ``test --nightly`` runs them.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from ddpstats.testing import RankPool
from ddpstats.testing.forkserver import preload
from tests.hosts import hosts as hosts

ALLOWED_SKIPS = "DDPSTATS_TEST_ALLOWED_SKIPS"
"""A variable with the path of a file: a pattern a line, for the reasons of skips that do not fail the run."""
SLOW_SEC = 2.0

# Some tests send SIGINT to themselves or to their ranks, which a job in the background of a script ignores.
signal.signal(signal.SIGINT, signal.default_int_handler)

# torch's store looks up the name of each address that connects. Where the name service drops such a question, the store
# gives no answer until the resolver gives up, by default after 5 s; a test's timeout may be shorter.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# No example has a time limit: on a busy machine any may take long.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")
settings.register_profile("nightly", settings.default, max_examples=2000)  # `scripts/launch.sh test --nightly`

# Imported once, in the server that forks ranks, by each of pytest's workers.
preload(
    [
        *("numpy", "pytest", "torch._dynamo", "torch.distributed.launcher.api"),
        *(
            "ddpstats.guard.guard",
            "ddpstats.capture.capture",
            "ddpstats.sentinel.sentinel",
            "ddpstats.dump.record",
        ),
    ]
)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    with RankPool(2, timeout_sec=60) as pool:
        yield pool


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[RankPool]:
    with RankPool(3, timeout_sec=60) as pool:
        yield pool


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankPool]:
    """Start four ranks for one module alone: four processes are many for two cores."""
    with RankPool(4, timeout_sec=60) as pool:
        yield pool


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked nightly, except in `scripts/launch.sh test --nightly` and where tests are named."""
    if config.getoption("hypothesis_profile") == "nightly" or any("::" in argument for argument in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker("nightly")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("nightly")]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Import torchmetrics in the server that forks ranks: most of what a rank takes to import Lightning."""
    if any(item.get_closest_marker("library") for item in session.items):
        preload(["torchmetrics"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for report in terminalreporter.stats.get("passed", []) if report.when == "call"]
    slow = sorted((report for report in reports if _is_slow_and_unmarked(report)), key=lambda report: -report.duration)
    if slow:
        terminalreporter.section(f"tests above {SLOW_SEC:g} s without the mark slow")
        for report in slow:
            terminalreporter.line(f"{report.duration:6.1f} s  {report.nodeid}")
    refused = _refused_skips(terminalreporter)
    if refused:
        terminalreporter.section(f"skips that are not on the list {os.environ[ALLOWED_SKIPS]}", red=True)
        for line in refused:
            terminalreporter.line(line)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and _refused_skips(reporter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _is_slow_and_unmarked(report: pytest.TestReport) -> bool:
    return report.duration > SLOW_SEC and not {"slow", "library"}.intersection(report.keywords)


def _refused_skips(reporter: pytest.TerminalReporter) -> list[str]:
    """Return the skips that are not on the list, where there is a list."""
    path = os.environ.get(ALLOWED_SKIPS)
    if not path:
        return []
    allowed = [line for line in Path(path).read_text().splitlines() if line and not line.startswith("#")]
    skips = [(report.nodeid, str(report.longrepr)) for report in reporter.stats.get("skipped", [])]
    return [f"{test}: {why}" for test, why in skips if not any(re.search(pattern, why) for pattern in allowed)]
