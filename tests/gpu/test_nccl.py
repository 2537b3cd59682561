"""The guard on NCCL: its scenarios and whole programs on two ranks that share one card; and FSDP2 under all checks.

What a program waits for is a device there: a rank that waits in ``loss.item()`` can raise nothing, and its watchdog
prints the verdict.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ddpstats.testing import RankPool
from tests.gpu import device_runs, nccl
from tests.gpu.conftest import REASON
from tests.guard.scenarios import DIES, SCENARIOS
from tests.guard.test_scenarios import UNMARKED_IN_STEP
from tests.programs import on_ranks

pytestmark = pytest.mark.slow
PROGRAM = str(Path(__file__).with_name("program.py"))
NOT_ON_NCCL = {
    "in_a_thread": "the default device belongs to a thread",
    "fsdp2": "the model is on the CPU",
    "message_from_anybody": "NCCL has no receive from any rank",
    "waited_for_with_a_timeout": "NCCL aborts a communicator whose collective was waited for in vain",
    "message_tag": "NCCL knows no tags",
    "groups_in_different_order": "NCCL makes a communicator at its first collective, and all its ranks must be there",
}
# The rank that differs raises. Another one waits for the device, and prints: `test_fault_of_a_program_is_named`.
WAITS_FOR_DEVICE = {
    *("functional", "compiled", "message_shape", "message_dtype", "message_bytes", "ddp_comm_hook"),
    *("subgroup_that_others_do_not_use", "late"),
}


@pytest.fixture(scope="module")
def nccl_ranks() -> Iterator[dict[int, RankPool]]:
    if not torch.cuda.is_available():
        pytest.skip(REASON)
    with RankPool(2, timeout_sec=60) as two, RankPool(3, timeout_sec=60) as three:
        yield {2: two, 3: three}


def scenarios(excluded: set[str]) -> list[tuple[str, str]]:
    names = [name for name in SCENARIOS if name not in NOT_ON_NCCL.keys() | excluded]
    return [(name, "step" if name in UNMARKED_IN_STEP else "strict") for name in names]


@pytest.mark.parametrize(("name", "mode"), scenarios(set()))
def test_legal_twin_is_silent(nccl_ranks: dict[int, RankPool], name: str, mode: str) -> None:
    endings = nccl_ranks[SCENARIOS[name].ranks].run(nccl.probe, name, mode, False).values()
    assert {ending.error for ending in endings} == {"silent"}


@pytest.mark.parametrize(("name", "mode"), scenarios(WAITS_FOR_DEVICE))
def test_fault_is_named_on_every_rank(nccl_ranks: dict[int, RankPool], name: str, mode: str) -> None:
    row = SCENARIOS[name]
    pool = nccl_ranks[row.ranks]
    try:
        endings = [outcome.value for outcome in pool.run(nccl.probe, name, mode, True)]
    finally:
        pool.restart()
    errors = [DIES if ending is None else ending.error for ending in endings]
    assert errors == [row.error, row.rank_1 or row.error, row.error][: row.ranks], endings
    messages = {ending.message for ending in endings if ending is not None and ending.error == row.error}
    assert len(messages) == 1
    text = (row.in_step if mode == "step" else "") or row.text
    assert ("rank 1: " if name == "returns_early" else text) in messages.pop()  # no rank waits on the host


@pytest.mark.parametrize("mode", ["strict", "step"])
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("raises", "rank 1: left the guard by ValueError: bad batch"),
        ("late", "rank 1: did not take part"),
        ("skips", "Likely: rank 1 skipped a call"),
        ("differs", "What differs: the reduce op"),
        ("sends more", "What differs: the shape"),
    ],
)
def test_fault_of_a_program_is_named(device: str, case: str, text: str, mode: str) -> None:
    done = on_ranks("-m", "ddpstats", "run", "--guard", mode, PROGRAM, device, case)
    assert 0 not in done.statuses
    assert done.stderr.count(text) >= 1, done.stderr


@pytest.mark.parametrize("case", ["right", "barriers"])
def test_program_that_is_right_trains_to_the_same_bits(device: str, case: str) -> None:
    weights = set()
    for mode in ("off", "strict", "step"):
        done = on_ranks("-m", "ddpstats", "run", "--guard", mode, PROGRAM, device, case)
        assert done.statuses == [0, 0], done.stderr
        assert mode == "off" or "2 ranks agree" in done.stderr
        weights.update(re.findall(r"weights (.*)", done.stdout))
    assert len(weights) == 1


def test_fsdp2_with_empty_shards_under_all_checks(nccl_ranks: dict[int, RankPool], tmp_path: Path) -> None:
    outcomes = nccl_ranks[2].run(device_runs.sharded, str(tmp_path)).values()
    assert outcomes[0] == outcomes[1] == [True, False, True]
