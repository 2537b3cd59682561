"""Pools of real gloo ranks, shared by the whole session: starting one costs seconds, a call on it milliseconds."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from ddpstats.testing import RankPool
from ddpstats.testing._rank_main import RankSpec
from ddpstats.testing._rank_process import rank_environ
from ddpstats.testing._rank_server import RankServer
from tests import scripts
from tests.hosts import hosts as hosts
from tests.needs import ROOT, table

# The package too: to import it takes longer than the rest of a start. Programs that are about that import are
# started by `tests.scripts`.
OURS = (
    "ddpstats.testing._rank_main",
    "ddpstats.guard._guard",
    "ddpstats.capture._capture",
    "ddpstats.sentinel._sentinel",
    "ddpstats.dump._dump",
)
# What other libraries spend seconds on when they are imported. Not those themselves: some read at import which rank
# they are on.
OF_LIBRARIES = ("scipy.signal", "matplotlib.pyplot", "transformers")
IMPORTING = {"espnet", "lightning", "torchmetrics", "transformers"}


# A minute and more each: begun last, one of them would keep one worker busy while the others have nothing left to do.
# Those that wait, for a limit above all, are between those that compute.
LONG_FILES = (
    "tests/transport/test_two_hosts.py",  # waits
    "tests/reduction/test_reduce_oracle.py",
    "tests/transport/test_store_host.py",  # waits
    "tests/launchers/test_launchers.py",
    "tests/guard/test_scenarios.py",  # waits
    "tests/interference/test_interference.py",
    "tests/guard/test_ending.py",
    "tests/transport/test_missing_ranks.py",  # waits
    "tests/sentinel/test_compiled_replay.py",
    "tests/transport/test_comm.py",  # waits
    "tests/guard/test_label_corpus.py",
    "tests/guard/test_guard.py",
    "tests/test_bench.py",
    "tests/testing/test_ranks.py",
    "tests/faults/test_faults.py",
    "tests/integrations/test_lightning.py",
    "tests/demo/test_demo.py",
    "tests/capture/test_trainers.py",
    "tests/guard/test_run.py",
    "tests/guard/test_libraries.py",
    "tests/testing/test_rank_server.py",
    "tests/testing/test_pytest_plugin.py",
    "tests/test_readme.py",
    "tests/test_launch.py",
    "tests/integrations/test_functions.py",
    "tests/integrations/test_pytorch_lightning.py",
    "tests/faults/test_elastic.py",
    "tests/capture/test_without_numpy.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; the others in their order."""
    turns = {ROOT / path: turn for turn, path in enumerate(LONG_FILES)}
    items.sort(key=lambda item: turns.get(item.path, len(turns)))


def preloaded(session: pytest.Session) -> list[str]:
    """What the tests of this session make worth the time."""
    files = {item.path.relative_to(ROOT).as_posix() for item in session.items}
    wanted = any(IMPORTING.intersection(table().get(file, ())) for file in files)
    installed = [name for name in OF_LIBRARIES if importlib.util.find_spec(name.partition(".")[0])]
    return ["torch._dynamo", "numpy", "pytest", *(installed if wanted else ()), *OURS]


@pytest.fixture(scope="session", autouse=True)
def rank_server(request: pytest.FixtureRequest) -> Iterator[RankServer]:
    """Ranks are forked from a process that has torch: to import it takes longer than most tests."""
    with RankServer(rank_environ(RankSpec(0, 1, 0, 0, 0, 0), {}), preloaded(request.session)) as server:
        yield server
    if scripts.server.cache_info().currsize:
        scripts.server().close()


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
    """Of one module only: four processes are many for two cores."""
    with RankPool(4, timeout_sec=60) as pool:
        yield pool
