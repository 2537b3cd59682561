"""The guard on accelerators: its scenarios and whole programs on ranks that share one; and FSDP2 under all checks.

What a program waits for is a device there: a rank that waits in ``loss.item()`` can raise nothing, and its watchdog
prints the verdict.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import programs
from tests.gpu import accelerator, device_runs
from tests.gpu.conftest import Ranks
from tests.guard.scenarios import DIES, SCENARIOS
from tests.guard.test_scenarios import UNMARKED_IN_STEP
from tests.guard.tiers import tiers

pytestmark = pytest.mark.slow
PROGRAM = str(Path(__file__).with_name("program.py"))
NOT_ON_ACCELERATORS = {
    "in_a_thread": "the default device belongs to a thread",
    "fsdp2": "the model is on the CPU",
    "message_from_anybody": "NCCL has no receive from any rank",
    "waited_for_with_a_timeout": "NCCL aborts a communicator whose collective was waited for in vain",
    "message_tag": "NCCL knows no tags",
    "groups_in_different_order": "NCCL makes a communicator at its first collective, and all its ranks must be there",
}
# The rank that differs raises. Another one waits for the device, and prints the verdict, as whole programs below.
WAITS_FOR_DEVICE = {
    *("functional", "compiled", "message_shape", "message_dtype", "message_bytes", "ddp_comm_hook"),
    *("subgroup_that_others_do_not_use", "late"),
}
# Mode "step" lets collectives of different sizes meet: on NCCL the process of rank 1 ended, in both of two runs.
ENDED_BY_NCCL = {("extra_call", "step")}
# One for each thing that differs and each way to come to it; the others are nightly.
FAULTS_OF_ALL_KINDS = {
    *("operation", "dtype", "shape", "reduce_op", "root", "extra_call", "asynchronous", "coalesced_count"),
    *("swap_of_equal_signature", "returns_early", "raises", "killed", "ddp_other_parameters", "compiled_with_breaks"),
}


def scenarios(excluded: set[str], nightly: set[str]) -> list[Any]:
    names = [name for name in SCENARIOS if name not in NOT_ON_ACCELERATORS.keys() | excluded]
    cases = [(name, "step" if name in UNMARKED_IN_STEP else "strict") for name in names]
    return tiers([case for case in cases if case[0] not in nightly], [], [case for case in cases if case[0] in nightly])


@pytest.mark.parametrize(("name", "mode"), scenarios(set(), set()))
def test_legal_twin_is_silent(ranks: Ranks, gpu: str, name: str, mode: str) -> None:
    endings = ranks.of(gpu, SCENARIOS[name].ranks).run(accelerator.probe, gpu, name, mode, False).values()
    assert {ending.error for ending in endings} == {"silent"}


@pytest.mark.parametrize(("name", "mode"), scenarios(WAITS_FOR_DEVICE, SCENARIOS.keys() - FAULTS_OF_ALL_KINDS))
def test_fault_is_named_on_every_rank(ranks: Ranks, gpu: str, name: str, mode: str) -> None:
    row = SCENARIOS[name]
    pool = ranks.of(gpu, row.ranks)
    try:
        endings = [outcome.value for outcome in pool.run(accelerator.probe, gpu, name, mode, True)]
    finally:
        pool.restart()
    errors = [DIES if ending is None else ending.error for ending in endings]
    rank_1 = DIES if (name, mode) in ENDED_BY_NCCL and accelerator.backend_of(gpu) == "nccl" else row.rank_1
    assert errors == [row.error, rank_1 or row.error, row.error][: row.ranks], endings
    messages = {ending.message for ending in endings if ending is not None and ending.error == row.error}
    assert len(messages) == 1
    text = (row.in_step if mode == "step" else "") or row.text
    assert ("rank 1: " if name == "returns_early" else text) in messages.pop()  # no rank waits on the host


WORDS = {
    "raises": "rank 1: left the guard by ValueError: bad batch",
    "late": "rank 1: did not take part",
    "skips": "Likely: rank 1 skipped a call",
    "differs": "What differs: the reduce op",
    "sends more": "What differs: the shape",
}


@pytest.mark.parametrize(
    ("case", "mode"),
    tiers(
        [("raises", "strict"), ("late", "step"), ("skips", "strict"), ("differs", "step"), ("sends more", "step")],
        [],
        [("raises", "step"), ("late", "strict"), ("skips", "step"), ("differs", "strict"), ("sends more", "strict")],
    ),
)
def test_fault_of_a_program_is_named_on_every_rank(gpu: str, case: str, mode: str) -> None:
    done = programs.on_ranks("-m", "ddpstats", "run", "--guard", mode, PROGRAM, gpu, case)
    assert 0 not in done.statuses
    assert WORDS[case] in done.stderr
    assert "ddpstats.errors." in done.stderr, done.stderr  # in full by one rank
    # the other one has its own error, or a line
    assert re.search(r"ValueError: bad batch$|^rank \d: \w+: rank 0: ", done.stderr, re.MULTILINE), done.stderr


@pytest.mark.parametrize("mode", tiers(["strict"], [], ["step"]))
def test_rank_that_died_is_named(gpu: str, mode: str) -> None:
    done = programs.on_ranks("-m", "ddpstats", "run", "--guard", mode, PROGRAM, gpu, "dies")
    assert 0 not in done.statuses
    if gpu == "refdev":  # NCCL may end the others before the guard knows
        assert "rank 1: the process is gone" in done.stderr, done.stderr


@pytest.mark.parametrize("case", ["right", "barriers"])
def test_program_that_is_right_trains_to_the_same_bits(gpu: str, case: str) -> None:
    weights = set()
    for mode in ("strict", "step") if case == "barriers" else ("off", "strict", "step"):
        done = programs.on_ranks("-m", "ddpstats", "run", "--guard", mode, PROGRAM, gpu, case)
        assert done.statuses == [0, 0], done.stderr
        assert mode == "off" or "2 ranks agree" in done.stderr
        weights.update(re.findall(r"weights (.*)", done.stdout))
    assert len(weights) == 1


def test_fsdp2_with_empty_shards_under_all_checks(on_ranks: Callable[..., Any], gpu: str, tmp_path: Path) -> None:
    assert on_ranks(device_runs.sharded, gpu, str(tmp_path)) == [True, False, True]
