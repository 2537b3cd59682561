"""A kept micro-batch that is run again has its loss and random state, and may not communicate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ddpstats._rerun.blame import Cause, cause_of
from ddpstats._rerun.record import Packet, StepRecord, tensor_bytes
from ddpstats._rerun.run import Reruns, Runner, RunSettings
from ddpstats.errors import BundleError, ConfigError
from ddpstats.testing import RankPool
from tests.sentinel import replay_runs as runs


def test_collectives_of_the_step_are_refused_and_those_of_other_threads_are_not(two_ranks: RankPool) -> None:
    for messages in two_ranks.run(runs.refused_collectives).values():
        refused = "step_fn communicates (all_reduce), and only one rank runs it here"
        assert messages == {"own": refused, "backward": refused, "thread": "none"}


def packet_of(batch: Any, factor: torch.Tensor | None = None) -> Packet:
    record = StepRecord(nn.Linear(1, 1))
    micro = record.begin(batch)
    record.module(torch.ones(1, 1))
    micro.factor = factor
    (packet,) = Reruns(record, lambda model, batch: batch, "step", lambda: 1.0).pack([micro]).micro_batches
    return packet


def runner(step: Any, precision: str = "captured") -> Runner:
    return Runner(nn.Linear(1, 1), step, "--step", RunSettings(torch.device("cpu"), precision), "rank 3")


@pytest.mark.parametrize(
    ("shape", "factor", "loss"),
    [
        ((), None, 1.0),
        ((1,), None, 1.0),
        ((), (), 3.0),
        ((1,), (), 3.0),
        ((), (1,), 3.0),
        ((2,), (), 6.0),
        ((2,), (2,), 6.0),
    ],
)
def test_the_loss_is_the_steps_times_the_factor(
    shape: tuple[int, ...], factor: tuple[int, ...] | None, loss: float
) -> None:
    packet = packet_of(0, None if factor is None else torch.full(factor, 3.0))
    assert runner(lambda model, batch: torch.ones(shape)).loss(packet, None).item() == loss


@pytest.mark.parametrize("factor", [None, torch.ones(3)])
def test_what_is_no_loss_is_refused(factor: torch.Tensor | None) -> None:
    packet = packet_of(0, factor)
    with pytest.raises(ConfigError, match=r"--step must return the loss.* it returned a tensor of shape \(2,\)"):
        runner(lambda model, batch: torch.ones(2)).loss(packet, None)


def test_a_run_begins_with_the_random_state_that_was_kept_under_its_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        packet = packet_of(0)
    drawn = torch.rand(2)
    assert packet.autocast == ("cpu", True, torch.bfloat16)
    again = runner(None)
    with torch.no_grad(), again.restore_state(packet):
        assert not torch.is_autocast_enabled("cpu")  # the module's forward pass alone is under it
        assert again._module(torch.ones(1, 1)).dtype is torch.bfloat16
        assert torch.is_grad_enabled()
        assert torch.equal(torch.rand(2), drawn)


def test_a_random_state_that_is_none_is_named() -> None:
    packet = replace(packet_of(0), random={"python": 1})
    with pytest.raises(BundleError, match="rank 3: the random state is not one"), runner(None).restore_state(packet):
        pass


def test_a_wider_precision_is_that_of_floating_tensors_alone() -> None:
    packet = packet_of({"x": torch.ones(2), "n": [torch.ones(3, dtype=torch.int16)]})
    batch = runner(None, "fp64").batch(packet)
    assert (batch["x"].dtype, batch["n"][0].dtype) == (torch.float64, torch.int16)
    assert tensor_bytes(packet.batch) == 2 * 4 + 3 * 2


@pytest.mark.parametrize(
    ("wrong_here", "wrong_there", "cause"),
    [
        ([True, False], None, Cause.TRANSIENT),
        ([[], ["layer.weight"]], True, Cause.TRANSIENT),
        ([True, True], None, Cause.UNDECIDED),
        ([["layer.weight"]], [], Cause.HARDWARE),
        ([True], True, Cause.SOFTWARE_OR_DATA),
    ],
)
def test_cause_follows_from_reruns_on_two_ranks(wrong_here: list[object], wrong_there: object, cause: Cause) -> None:
    assert cause_of(wrong_here, wrong_there) is cause
