"""`Sentinel` on real ranks finds faults with each layer, names the rank and the cause, and leaves nothing behind."""

from __future__ import annotations

import gc
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ddpstats import ConfigError, InvalidStats, Sentinel, SentinelAlarm
from ddpstats.testing import BitFlip, PerRank, RankPool, inject_bit_flips, run_ranks
from tests.capabilities import flips_products
from tests.sentinel import sentinel_runs as runs
from tests.sentinel.sentinel_runs import Plan, alarm_of, trained
from tests.training import logged

EXPONENT = 30  # of float32: the highest bit; a number below 2 becomes 2**128 times as large
EVERYTHING: dict[str, Any] = {
    "mode": 2,
    "digest_every_steps": 1,
    "replay_every_steps": 1,
    "replay_fn": runs.step_fn,
    "matmul_checksum": True,
}


EXPONENT_FLIP = BitFlip("blocks.1.down", "activation_gradient", element=3, bit=EXPONENT, step=2, rank=1)


# -- what it costs, and what stays as it was --------------------------------------------------------------------------


def test_a_step_is_one_collective(two_ranks: RankPool) -> None:
    for outcome in trained(two_ranks, Plan(options={"mode": 2, "digest_every_steps": 4}, steps=9)):
        first, *others = outcome.collectives
        assert first > 1  # connect, and agree on settings
        assert [others[step - 1] for step in (1, 2, 4, 5, 6, 8)] == [1] * 6
        assert others[7 - 1] == 3  # digests: agreed on, and gathered, besides what all steps share


def test_mode_0_attaches_nothing_and_finds_all_well() -> None:
    module = runs.wrapped("alone")
    before = runs.hooks_of(module)
    with Sentinel(module, mode=0) as sentinel:
        assert runs.hooks_of(module) == before
        assert sentinel.step().ok
        with pytest.raises(ConfigError, match=r"step\(step=-1\): a whole number, 0 or more"):
            sentinel.step(step=-1)
        assert sentinel.step().step == 1


# -- layer 1 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("detector", ["v2", "v3"])
def test_an_activations_gradient_is_named_by_rank_before_the_reduce(three_ranks: RankPool, detector: str) -> None:
    flip = replace(EXPONENT_FLIP, step=4, rank=2)
    outcomes = trained(three_ranks, Plan(options={"mode": 2, "detector": detector}, flips=[flip]))
    step, layers, culprits, text = alarm_of(outcomes)
    assert (step, layers, culprits) == (4, ("thresholds",), (2,))
    assert "rank 2: blocks.1.norm2, micro-batch 0: value inf after 4 checks" in text
    for outcome in outcomes:  # the fault reached no rank's parameters
        assert all(bool(parameter.isfinite().all()) for parameter in outcome.parameters)
        assert all(torch.equal(a, b) for a, b in zip(outcome.parameters[:-3], outcomes[0].parameters[:-3], strict=True))
    assert [len(outcome.errors) for outcome in outcomes] == [0, 0, 1]


def test_mode_1_names_the_origin_in_every_later_verdict(two_ranks: RankPool) -> None:
    for outcome in trained(two_ranks, Plan(options={"mode": 1}, flips=[EXPONENT_FLIP], steps=5)):
        assert [verdict.culprit_ranks for verdict in outcome.verdicts] == [(), (), (1,), (0, 1), (0, 1)]
        assert "All ranks see it" in outcome.verdicts[3].message
        assert "The first alarm was at step 2 on rank 1" in outcome.verdicts[4].message


def test_the_micro_batch_is_named(two_ranks: RankPool) -> None:
    flip = BitFlip("blocks.0.down", "activation_gradient", element=0, bit=EXPONENT, step=1, rank=0)
    outcomes = trained(two_ranks, Plan(options={"mode": 2}, flips=[flip], micro_batches=3))
    assert "micro-batch 0" in alarm_of(outcomes)[3]


def test_a_stop_that_is_caught_does_not_teach_the_detector(two_ranks: RankPool) -> None:
    """The program skips the step, and the next one is judged as if the bad one had not been."""
    plan = Plan(options={"mode": 3}, flips=[EXPONENT_FLIP], steps=4, patience=2, lr=0.0)
    outcome = trained(two_ranks, plan)[1]
    assert [step for step, *_ in outcome.alarms] == [2]
    assert [verdict.step for verdict in outcome.verdicts] == [0, 1, 3]
    after = [line for line in outcome.lines if "[blocks.1.norm2] val" in line]
    assert "step = [2]" in after[-1]  # not 3
    assert "inf" not in after[-1]


def test_a_level_2_value_is_a_warning_and_no_alarm() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with logged(logging.ERROR) as errors, logged() as lines, Sentinel(module, mode=2) as sentinel:
        (module(torch.ones(2, 4)) * 3e4).sum().backward()
        assert sentinel.step().ok
    assert errors == []
    assert [line.startswith("[rank 0] [1] SilentCheck get L2") for line in lines] == [True]


def test_a_gradient_scaler_scale_is_taken_out() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with logged(logging.INFO) as lines, Sentinel(module, mode=3, scaler=scaler) as sentinel:
        for factor in (1.0, float("inf"), 1.0):
            scaler.scale((module(torch.ones(2, 4)) * factor).sum()).backward()
            assert sentinel.step().ok  # an overflow is the scaler's business
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    values = [line for line in lines if "val = " in line and "c_min" not in line]
    assert len(values) == 2
    assert all("val = [2.828427]" in line for line in values)  # the norm of 2 x 4 ones, whatever the scale


@pytest.mark.parametrize("autocast", [False, True], ids=["half()", "autocast, and norms in float32"])
def test_float16_without_a_scaler_switches_the_thresholds_off_with_a_warning(autocast: bool) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).to(torch.float32 if autocast else torch.float16)
    x = torch.ones(2, 4, dtype=torch.float32 if autocast else torch.float16)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
            out = module(x)
        (out.float() * float("inf")).sum().backward()
        assert sentinel.step().ok

    with Sentinel(module, mode=2) as sentinel:
        with pytest.warns(UserWarning, match="float16, or of an autocast to it, and there is no enabled scaler="):
            step()
        step()  # and it says so once


def test_without_norm_layers_a_warning_says_what_is_used_instead() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.warns(UserWarning, match="no norm layer.*all 2 layers"):
        sentinel = Sentinel(module, mode=2)
    with sentinel:
        (module(torch.ones(2, 4)) * float("nan")).sum().backward()
        with pytest.raises(SentinelAlarm, match="value nan"):
            sentinel.step()


# -- layers 2 to 4 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "where"),
    [("head.weight", "weight"), ("blocks.0.up.weight", "reduced_gradient")],
    ids=["weight", "gradient"],
)
@pytest.mark.parametrize("bit", [0, pytest.param(13, marks=pytest.mark.slow), 31])
def test_digests_name_rank_tensor_element_and_bit(three_ranks: RankPool, name: str, where: Any, bit: int) -> None:
    flip = BitFlip(name, where, element=37, bit=bit, step=3, rank=1)
    outcomes = trained(three_ranks, Plan(options={"mode": 2, "digest_every_steps": 2}, flips=[flip]))
    step, layers, culprits, text = alarm_of(outcomes)
    assert (step, layers, culprits) == (3, ("replica digests",), (1,))
    assert name in text
    assert "First element [2, 5]:" in text
    assert f"bit {bit}" in text


def test_digests_find_what_software_does_to_one_rank(three_ranks: RankPool) -> None:
    plan = Plan(options={"mode": 2, "digest_every_steps": 3}, after_backward=runs.noise_on_rank_2)
    step, layers, culprits, text = alarm_of(trained(three_ranks, plan))
    assert (step, layers, culprits) == (2, ("replica digests",), (2,))
    assert "software" in text


@pytest.mark.parametrize("wrap", ["ddp", *(pytest.param(wrap, marks=pytest.mark.slow) for wrap in ("view", "static"))])
def test_a_peer_finds_a_fault_before_the_reduce(three_ranks: RankPool, wrap: str) -> None:
    """All replicas have the same wrong sum: digests cannot see it."""
    flip = BitFlip("blocks.0.up.weight", "gradient", element=5, bit=20, step=3, rank=2)
    options = {"mode": 2, "digest_every_steps": 1, "replay_every_steps": 2, "replay_fn": runs.step_fn}
    outcomes = trained(three_ranks, Plan(options=options, flips=[flip], wrap=wrap))
    step, layers, culprits, text = alarm_of(outcomes)
    assert (step, layers, culprits) == (3, ("peer replay",), (2,))
    assert "Rank 2 was wrong once and right once" in text


@flips_products
def test_the_matmul_checksum_opens_after_an_alarm_and_names_the_rank(two_ranks: RankPool) -> None:
    flips = [
        replace(EXPONENT_FLIP, rank=0),
        BitFlip("blocks.0.up", "matmul", element=7, bit=27, step=4, rank=1),
    ]
    options = {"mode": 2, "matmul_checksum": True, "checksum_steps": 3}
    outcomes = trained(two_ranks, Plan(options=options, flips=flips, steps=5, patience=2))
    for outcome in outcomes:
        assert outcome.applied == 1
        assert outcome.alarms == outcomes[0].alarms
        first, second = outcome.alarms
        assert first[:3] == (2, ("thresholds",), (0,))
        assert "Matmuls are checked in the next 3 steps." in first[3]
        assert second[:3] == (4, ("matmul checksum",), (1,))
        assert "computed again, it is right: a transient fault" in second[3]


@flips_products
def test_a_rerun_after_an_alarm_shows_a_wrong_product_in_the_same_step(two_ranks: RankPool) -> None:
    flip = BitFlip("blocks.0.up", "matmul", element=8, bit=EXPONENT, step=2, rank=1, sticky=True)
    options = {"mode": 2, "matmul_checksum": True, "replay_fn": runs.step_fn}
    _, layers, culprits, text = alarm_of(trained(two_ranks, Plan(options=options, flips=[flip])))
    assert (layers, culprits) == (("thresholds", "matmul checksum"), (1,))
    assert "rank 1: mm of " in text or "rank 1: addmm of " in text


@flips_products
def test_the_window_shuts_again(two_ranks: RankPool) -> None:
    flips = [BitFlip("blocks.0.up", "matmul", element=7, bit=27, step=step, rank=1) for step in (2, 3)]
    for outcome in trained(two_ranks, Plan(options={"mode": 1}, flips=flips, window_steps=2, steps=5)):
        assert [verdict.layers for verdict in outcome.verdicts] == [(), (), ("matmul checksum",), (), ()]


def test_an_alarm_is_explained_where_only_some_ranks_check_matmuls(two_ranks: RankPool) -> None:
    plan = Plan(options={"mode": 1, "replay_fn": runs.step_fn}, flips=[replace(EXPONENT_FLIP, step=4)], steps=5)
    for outcome in two_ranks.run(runs.train_with_windows_of_other_lengths, plan).values():
        assert [verdict.layers for verdict in outcome.verdicts] == [(), (), (), (), ("thresholds",)]
        assert "a transient fault" in outcome.verdicts[-1].message


def test_a_detector_from_outside_is_one_class_and_one_entry_of_the_list(two_ranks: RankPool) -> None:
    plan = Plan(options={"mode": 2, "replay_fn": runs.step_fn}, after_backward=runs.large_on_rank_1)
    step, layers, culprits, text = alarm_of(two_ranks.run(runs.train_with_another_detector, plan, 99.0).values())
    assert (step, layers, culprits) == (2, ("large parameter",), (1,))
    assert "[large parameter] on [1]" in text
    assert "No rank has applied this step. Test the device of rank 1" in text
    assert [run.alarms for run in two_ranks.run(runs.train_with_another_detector, plan, 101.0).values()] == [[], []]


@pytest.mark.parametrize(
    ("modes", "words"),
    [
        ((2, 2), ("rank 0: LargeParameter.limit=99.0", "rank 1: LargeParameter.limit=101.0")),
        ((2, 0), ("rank 0: mode=2", "rank 1: mode=0", "LargeParameter.limit=None")),
        ((0, 2), ("rank 0: mode=0", "LargeParameter.limit=None", "LargeParameter.limit=101.0")),
        ((2, 1), ("rank 0: mode=2", "rank 1: mode=1")),  # not hidden by the detector's own "mode"
    ],
)
def test_an_option_of_a_detector_from_outside_must_be_the_same_on_all_ranks(
    two_ranks: RankPool, modes: tuple[int, int], words: tuple[str, ...]
) -> None:
    plans = PerRank([Plan(options={"mode": mode}) for mode in modes])
    first, second = two_ranks.run(runs.train_with_another_detector, plans, PerRank([99.0, 101.0])).values()
    assert first.error == second.error
    assert all(part in first.error for part in ("different settings", *words))


# -- why: on an alarm -------------------------------------------------------------------------------------------------


def test_an_alarm_that_does_not_repeat_is_transient(three_ranks: RankPool) -> None:
    options = {"mode": 2, "replay_fn": runs.step_fn}
    text = alarm_of(trained(three_ranks, Plan(options=options, flips=[EXPONENT_FLIP])))[3]
    assert "Run again on rank 1, the micro-batch gives normal values: a transient fault" in text
    assert "Rank 1 is on host " in text
    assert "No rank has applied this step. Test the device of rank 1" in text


def test_an_alarm_that_repeats_on_its_rank_alone_is_hardware(three_ranks: RankPool) -> None:
    flip = replace(EXPONENT_FLIP, sticky=True)
    text = alarm_of(trained(three_ranks, Plan(options={"mode": 2, "replay_fn": runs.step_fn}, flips=[flip])))[3]
    assert "gives such a value again, and on rank 2 it does not: hardware of rank 1" in text


def test_an_alarm_that_a_peer_gets_too_is_software_or_data(three_ranks: RankPool) -> None:
    plan = Plan(options={"mode": 2, "replay_fn": runs.spoilt_step}, step_fn=runs.spoilt_step)
    step, _, culprits, text = alarm_of(trained(three_ranks, plan))
    assert (step, culprits) == (2, (1,))
    assert "and so it does on rank 2: software or data, not hardware" in text
    assert "No rank has applied this step. Look at the batch of rank 1" in text
    assert "Test the device" not in text


# -- settings and calls -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([{"mode": 2}, {"mode": 0}], ("rank 0: mode=2", "rank 1: mode=0")),
        ([{"mode": 2, "ignore": ["head.bias"]}, {"mode": 2, "ignore": []}], ("rank 0: ignore=['head.bias']",)),
    ],
    ids=["mode", "ignore"],
)
def test_settings_that_differ_between_ranks_are_an_error_on_every_rank(
    two_ranks: RankPool, options: list[dict[str, Any]], words: tuple[str, ...]
) -> None:
    plans = PerRank([Plan(options=of_rank) for of_rank in options])
    first, second = two_ranks.run(runs.train, plans).values()
    assert first.error == second.error
    assert all(part in first.error for part in ("different settings", *words))


def test_a_sentinel_of_another_group_than_ddps_is_refused(three_ranks: RankPool) -> None:
    for text in three_ranks.run(runs.in_a_subgroup).values()[:2]:
        assert "DistributedDataParallel reduces over ranks 0, 1, and this sentinel's group has ranks 0, 1, 2" in text
        assert "pass group=" in text


def test_a_bad_step_number_on_one_rank_is_an_error_on_all(two_ranks: RankPool) -> None:
    texts = two_ranks.run(runs.bad_step_on_rank_1).values()
    assert texts[0] == texts[1]
    assert "Sentinel.step(step=3.0): a whole number, 0 or more" in texts[0]


def test_a_batch_that_cannot_be_kept_leaves_the_rank_in_step(two_ranks: RankPool) -> None:
    assert two_ranks.run(runs.unreadable_batch_on_rank_1, EVERYTHING).values() == ["fine", "KeyError, then fine"]


def test_a_micro_batch_that_raises_and_is_tried_again_is_no_fault(three_ranks: RankPool) -> None:
    assert three_ranks.run(runs.one_backward_raises, EVERYTHING).values() == [[True] * 4] * 3


def test_the_environment_of_mindspore_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ENABLE", "3"), ("UPPER_THRESH", "500,20"), ("SIGMA_THRESH", "5,9")):
        monkeypatch.setenv(f"NPU_ASD_{name}", value)
    module = runs.wrapped("alone")
    with pytest.warns(
        UserWarning, match="NPU_ASD_SIGMA_THRESH='5,9' is not two integers.* the default is used instead"
    ):
        sentinel = Sentinel(module)
    with sentinel, logged(logging.INFO) as lines:
        runs.step_fn(module, runs.batch_of(0)).backward()  # type: ignore[no-untyped-call]
        sentinel.step()
    assert "c_thresh_l1 = [500.000000], c_coeff_l1 = [100000.000000]" in lines[-1]
    assert "npu_asd_detect = [3]" in lines[-1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"detector": "v4"}, "legal values: v2, v3"),
        ({"digest_every_steps": -1}, "digest_every_steps=-1"),
        ({"replay_every_steps": 10}, "needs replay_fn="),
        ({"replay_fn": 3}, "replay_fn=3"),
        ({"matmul_checksum": 1}, "matmul_checksum=1"),
        ({"scaler": 1.0}, "scaler=1.0 must be a torch.amp.GradScaler"),
        ({"ignore": "*.running_mean"}, r"must be a list of patterns"),
        ({"ignore": [3]}, r"must be a list of patterns"),
        ({"ignore": ["*.no_such"]}, r"'\*.no_such' fits no parameter or buffer"),
        ({"mode": 2, "checkpoints": ["blocks.9"]}, "'blocks.9' fits none of the model's"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Sentinel(runs.wrapped("alone"), **options)


@pytest.mark.filterwarnings("ignore:Sentinel. no checkpoint has given a value")
def test_calls_out_of_order_are_errors() -> None:
    sentinel = Sentinel(runs.wrapped("alone"), mode=1)
    with sentinel.micro_batch({}):
        with pytest.raises(ConfigError, match="inside micro_batch"):
            sentinel.step()
        with pytest.raises(ConfigError, match="inside another micro_batch"), sentinel.micro_batch({}):
            pass
    with pytest.raises(InvalidStats, match="whole number, 0 or more"):  # as other ranks would get it
        sentinel.step(step=-1)
    with pytest.raises(ConfigError, match="check_matmuls: steps=0 must be a whole number, 1 or more"):
        sentinel.check_matmuls(0)
    assert sentinel.step(step=7).step == 7
    assert sentinel.step().step == 8
    sentinel.close()
    with pytest.raises(ConfigError, match="after close"):
        sentinel.step()
    with pytest.raises(ConfigError, match="after close"), sentinel.micro_batch({}):
        pass


def test_alone_without_a_process_group_every_layer_works() -> None:
    flip = BitFlip("head.weight", "gradient", element=1, bit=20, step=2)
    plan = Plan(options=EVERYTHING, wrap="alone", flips=[flip])
    (outcome,) = run_ranks(runs.train_without_group, 1, plan, timeout_sec=60).values()
    ((step, layers, culprits, text),) = outcome.alarms
    assert (step, layers, culprits) == (2, ("peer replay",), (0,))
    assert "Rank 0 was wrong once and right once" in text


# -- what does not work does not hide what was found, and is not hidden ------------------------------------------------


def test_in_mode_1_a_step_that_cannot_be_repeated_is_a_warning(two_ranks: RankPool) -> None:
    plan = Plan(options={"mode": 1, "replay_every_steps": 2, "replay_fn": runs.another_step}, steps=4)
    for outcome in trained(two_ranks, plan):
        assert len(outcome.verdicts) == 4
        assert any("replay_fn is not the step that was trained" in warning for warning in outcome.warnings)


def test_a_step_that_cannot_be_repeated_does_not_hide_an_alarm(two_ranks: RankPool) -> None:
    flip = replace(EXPONENT_FLIP, step=0)
    options = {"mode": 2, "replay_every_steps": 2, "replay_fn": runs.raising_step}
    step, layers, culprits, text = alarm_of(trained(two_ranks, Plan(options=options, flips=[flip])))
    assert (step, layers, culprits) == (0, ("thresholds",), (1,))
    assert "ValueError: not on this rank" in text


def test_what_became_of_an_alarm_is_logged_once_in_mode_1(two_ranks: RankPool) -> None:
    flip = replace(EXPONENT_FLIP, step=1)
    outcomes = trained(two_ranks, Plan(options={"mode": 1, "replay_fn": runs.step_fn}, flips=[flip], steps=2))
    explanations = [[line for line in outcome.lines if "a transient fault" in line] for outcome in outcomes]
    assert [len(lines) for lines in explanations] == [1, 0]


def test_an_alarm_that_follows_from_another_does_not_renew_the_window(two_ranks: RankPool) -> None:
    flip = replace(EXPONENT_FLIP, step=1)
    options = {"mode": 1, "matmul_checksum": True, "checksum_steps": 2}
    for outcome in trained(two_ranks, Plan(options=options, flips=[flip], steps=3)):
        opened = ["Matmuls are checked" in verdict.message for verdict in outcome.verdicts]
        assert opened == [False, True, False]


def test_an_alarm_after_the_window_has_shut_opens_it_again_and_says_so(two_ranks: RankPool) -> None:
    flips = [replace(EXPONENT_FLIP, step=step) for step in (1, 4)]
    options = {"mode": 2, "matmul_checksum": True, "checksum_steps": 1, "replay_fn": runs.step_fn}
    for outcome in trained(two_ranks, Plan(options=options, flips=flips, steps=6, patience=3)):
        openings = [(step, "Matmuls are checked in the next 1 steps." in text) for step, _, _, text in outcome.alarms]
        assert openings == [(1, True), (4, True)]


@flips_products
def test_a_second_shorter_window_does_not_shorten_the_first() -> None:
    module, checked = runs.wrapped("alone"), []
    flips = [BitFlip("head", "matmul", element=7, bit=27, step=step) for step in (4, 5)]
    with Sentinel(module, mode=1) as sentinel, inject_bit_flips(module, flips) as faults:
        sentinel.check_matmuls(5)
        sentinel.check_matmuls(2)
        for step in range(6):
            runs.step_fn(module, runs.batch_of(step)).backward()  # type: ignore[no-untyped-call]
            checked.append(sentinel.step().layers)
            faults.step()
    assert checked == [()] * 4 + [("matmul checksum",), ()]


def test_a_sentinel_that_sees_nothing_says_so() -> None:
    with Sentinel(runs.wrapped("alone"), mode=2) as sentinel:
        sentinel.step()
        sentinel.step()
        with pytest.warns(UserWarning, match="no checkpoint has given a value in the first 3 steps"):
            sentinel.step()
        sentinel.step()


def test_a_nan_behind_a_gradient_scaler_is_an_alarm_in_the_end_and_is_found_again() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    batch = torch.ones(2, 4)

    def loss_of(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (module(batch) * float("nan")).sum()
        return loss

    with Sentinel(module, mode=2, scaler=scaler, replay_fn=loss_of) as sentinel:
        for step in range(16):
            with sentinel.micro_batch(batch):
                scaler.scale(loss_of(module, batch)).backward()  # type: ignore[no-untyped-call]
            if step < 15:
                assert sentinel.step().ok
        with pytest.raises(SentinelAlarm, match="value nan") as raised:
            sentinel.step()
    assert "Run again on rank 0, the micro-batch gives such a value again" in str(raised.value)


def test_backward_passes_outside_of_micro_batches_are_not_of_the_step() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with logged(logging.INFO) as lines, Sentinel(module, mode=3) as sentinel:
        for _ in range(2):
            with sentinel.micro_batch(None):
                module(torch.ones(2, 4)).sum().backward()
            module(torch.ones(2, 4) * float("nan")).sum().backward()
            assert sentinel.step().ok
    assert len([line for line in lines if "] val = " in line]) == 2


def test_a_rerun_of_one_sentinel_is_no_step_of_another() -> None:
    module = runs.wrapped("alone")
    with (
        logged(logging.INFO) as lines,
        Sentinel(module, mode=1, replay_every_steps=1, replay_fn=runs.step_fn) as first,
        Sentinel(module, mode=3) as second,
    ):
        for step in range(3):
            with first.micro_batch(runs.batch_of(step)):
                runs.step_fn(module, runs.batch_of(step)).backward()  # type: ignore[no-untyped-call]
            first.step()
            second.step()
            module.zero_grad()
    checks = [line.split("step = [")[1][0] for line in lines if "[norm] val" in line]
    assert checks == ["0", "1", "2"]


def test_a_sentinel_that_is_closed_or_dropped_by_its_trainer_leaves_no_hook() -> None:
    module = runs.wrapped("alone")
    before = runs.hooks_of(module)
    sentinel = Sentinel(module, **EVERYTHING)
    sentinel.close()
    sentinel.close()
    assert runs.hooks_of(module) == before
    trainer = runs.Trainer(module)
    assert runs.hooks_of(module) > before
    del trainer
    gc.collect()
    assert runs.hooks_of(module) == before
