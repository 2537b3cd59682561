"""Peer replay repeats a micro-batch on other ranks: it names the rank that computes wrong, and accuses no other."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddpstats._rerun.blame import MOST_BYTES, hand_out
from ddpstats._rerun.record import PackedStep
from ddpstats.sentinel.peer_replay import GradientDigests, _explanation
from ddpstats.testing import BitFlip, RankPool
from tests.sentinel import replay_runs, sentinel_runs as runs
from tests.sentinel.sentinel_runs import Plan, alarm_of, assert_quiet, trained

OPTIONS: dict[str, Any] = {"mode": 2, "replay_every_steps": 2, "replay_fn": runs.step_fn}


def gradient_flip(step: int, rank: int, *, sticky: bool = False) -> BitFlip:
    return BitFlip("blocks.0.up.weight", "gradient", element=5, bit=20, step=step, rank=rank, sticky=sticky)


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (Plan(steps=6, micro_batches=3), {}),
        pytest.param(
            Plan(steps=6, step_fn=runs.autocast_step), {"replay_fn": runs.autocast_step}, marks=pytest.mark.slow
        ),
        pytest.param(
            Plan(steps=6, wrap="view", micro_batches=2, optimizer=runs.ZeroInPlace), {}, marks=pytest.mark.slow
        ),
        pytest.param(Plan(steps=6, wrap="static"), {}, marks=pytest.mark.slow),
    ],
    ids=["accumulated", "bf16 autocast", "bucket view", "static graph"],
)
def test_equal_ranks_agree_bit_for_bit(three_ranks: RankPool, plan: Plan, options: dict[str, Any]) -> None:
    plan.options = {**OPTIONS, **options}
    outcomes = trained(three_ranks, plan)
    assert_quiet(outcomes, 6)
    assert [outcome.warnings for outcome in outcomes] == [[]] * 3  # no noise either


def test_a_rank_that_is_wrong_each_time_is_named(three_ranks: RankPool) -> None:
    plan = Plan(options=OPTIONS, flips=[gradient_flip(0, 2, sticky=True)])
    step, layers, culprits, text = alarm_of(trained(three_ranks, plan))
    assert (step, layers, culprits) == (0, ("peer replay",), (2,))
    assert "Rank 2 is wrong each time" in text


def test_two_ranks_and_a_transient_fault_need_no_third_one(two_ranks: RankPool) -> None:
    _, _, culprits, text = alarm_of(trained(two_ranks, Plan(options=OPTIONS, flips=[gradient_flip(3, 1)])))
    assert culprits == (1,)
    assert "the micro-batch of rank 1, run 5 times" in text


def test_a_faulty_checker_is_not_taken_for_a_faulty_owner(three_ranks: RankPool) -> None:
    """Rank 2 is wrong only while it repeats rank 1's micro-batch."""
    plan = Plan(options={**OPTIONS, "replay_fn": runs.wrong_on_rank_2_when_repeating})
    _, _, culprits, text = alarm_of(trained(three_ranks, plan))
    assert culprits == (2,)
    assert "Rank 2 is wrong each time" in text


@pytest.mark.parametrize(
    ("replay_fn", "words"),
    [
        (runs.another_step, "replay_fn is not the step that was trained"),
        (runs.raising_step, "rank 1: ValueError: not on this rank"),
        (runs.communicating_step, "replay_fn communicates (all_reduce), and only one rank runs it here"),
        (runs.float_step, "replay_fn must return the loss, a tensor of one element, and it returned a float"),
        (runs.detached_step, "a loss that no parameter has a part in"),
    ],
    ids=["another step", "raises", "communicates", "returns a float", "detached"],
)
def test_a_step_that_cannot_be_repeated_is_an_error_on_every_rank(
    three_ranks: RankPool, replay_fn: Any, words: str
) -> None:
    first, *others = trained(three_ranks, Plan(options={**OPTIONS, "replay_fn": replay_fn}))
    assert words in first.error
    assert [outcome.error for outcome in others] == [first.error] * 2


def test_a_batch_that_cannot_be_sent_is_named(two_ranks: RankPool) -> None:
    for outcome in trained(two_ranks, Plan(options=OPTIONS, batch_of=runs.unsendable_batch_of)):
        assert "batch['thing'] is of type object" in outcome.error


def test_autocast_around_the_loss_is_part_of_the_step(two_ranks: RankPool) -> None:
    for outcome in trained(two_ranks, Plan(options=OPTIONS, step_fn=runs.autocast_step)):
        assert "replay_fn is not the step that was trained" in outcome.error
        assert "under the same autocast" in outcome.error


def test_a_step_that_changes_its_batch_is_repeated_from_what_it_was_before(two_ranks: RankPool) -> None:
    options = {**OPTIONS, "replay_every_steps": 1, "replay_fn": runs.changing_step}
    plan = Plan(options=options, steps=4, step_fn=runs.changing_step, batch_of=runs.counted_batch_of)
    outcomes = trained(two_ranks, plan)
    assert_quiet(outcomes, 4)
    for outcome in outcomes:
        (warning,) = outcome.warnings  # of the first step; the others are repeated
        assert "batch['count'] was changed in place during the step; from now on batches are copied" in warning


def test_a_step_with_noise_of_its_own_is_measured_and_is_no_fault(three_ranks: RankPool) -> None:
    plan = Plan(options={**OPTIONS, "replay_fn": runs.noisy_step}, step_fn=runs.noisy_step)
    for outcome in trained(three_ranks, plan):
        assert all(verdict.ok for verdict in outcome.verdicts)
        (warning,) = outcome.warnings
        assert "run again, the step gives gradients whose norms differ by up to" in warning
        assert "torch.use_deterministic_algorithms(True) may make it repeat itself." in warning


def test_noise_hides_small_faults_and_not_large_ones(three_ranks: RankPool) -> None:
    flip = BitFlip("blocks.0.up.weight", "gradient", element=5, bit=30, step=3, rank=1)
    plan = Plan(options={**OPTIONS, "replay_fn": runs.noisy_step}, step_fn=runs.noisy_step, flips=[flip])
    _, _, culprits, text = alarm_of(trained(three_ranks, plan))
    assert culprits == (1,)
    assert "a transient fault" in text


def test_without_micro_batch_there_is_a_warning_and_no_alarm(two_ranks: RankPool) -> None:
    for outcome in trained(two_ranks, Plan(options=OPTIONS, has_micro_batch=False)):
        assert all(verdict.ok for verdict in outcome.verdicts)
        assert any("put `with sentinel.micro_batch(batch):`" in warning for warning in outcome.warnings)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(idle_rank=1),
        Plan(wrap="eval"),
        Plan(optimizer=runs.NeverZero),
    ],
    ids=["a rank has no batch", "buffers that differ travel with the batch", "gradients are never zeroed"],
)
def test_what_ranks_do_legally_is_no_fault(two_ranks: RankPool, plan: Plan) -> None:
    plan.options, plan.steps, plan.lr = OPTIONS, 4, 0.0
    assert_quiet(trained(two_ranks, plan), 4)


def test_batches_that_do_not_all_fit_take_turns(three_ranks: RankPool) -> None:
    """A rank's fault is found when it is that rank's turn, if there is room for one batch."""
    alarm_steps = three_ranks.run(runs.with_room_for_one_batch, [gradient_flip(step, 1) for step in (3, 5, 7)]).values()
    assert alarm_steps == [[7]] * 3  # turns: rank 0 at step 0, 1 at step 1, 2 at step 3, 0 at step 5, 1 at step 7


@pytest.mark.slow
def test_what_is_compiled_elsewhere_hides_no_fault(two_ranks: RankPool) -> None:
    two_ranks.restart()
    for outcome in two_ranks.run(replay_runs.compiled_elsewhere).values():
        assert outcome.ok == [True]
        assert "Rank 1 was wrong once and right once" in outcome.error
    two_ranks.restart()


def test_a_micro_batch_that_is_too_large_to_be_sent_is_not_run_again() -> None:
    step = PackedStep((), {"x": torch.empty(MOST_BYTES + 1, dtype=torch.uint8)}, 1.0, {})
    answer = hand_out(lambda tree, what: {0: tree()}, 0, [0], lambda: {"step": step}, "the step")[0]
    assert answer["error"].startswith("ConfigError: it has 256 MiB, and at most 256 MiB")


# -- what is seen of the step itself ----------------------------------------------------------------------------------


def test_a_step_that_zeroes_inside_micro_batch_is_examined(two_ranks: RankPool) -> None:
    for outcome in two_ranks.run(replay_runs.odd_loop, "zeroed inside").values():
        assert (outcome.ok, outcome.error, outcome.warnings) == ([True, True], "", [])
        assert outcome.runs == 3  # one to learn whether it repeats itself, and one for the other rank in each step
    for outcome in two_ranks.run(replay_runs.odd_loop, "zeroed inside", 2, replay_runs.twice_the_loss).values():
        assert "replay_fn is not the step that was trained" in outcome.error
        assert "reentrant checkpointing" in outcome.error


@pytest.mark.parametrize(
    ("habit", "why"),
    [
        ("gradients left", "something was left in .grad before its backward pass"),
        ("two passes", "it had 2 backward passes"),
    ],
)
def test_without_gradients_of_its_own_a_micro_batch_is_not_repeated(two_ranks: RankPool, habit: str, why: str) -> None:
    for outcome in two_ranks.run(replay_runs.odd_loop, habit).values():
        assert (outcome.ok, outcome.runs) == ([True, True], 0)
        assert outcome.warnings
        for warning in outcome.warnings:
            assert "no rank's first micro-batch of this step can be repeated" in warning
            assert f"ranks 0, 1: {why}" in warning


# -- batches ----------------------------------------------------------------------------------------------------------


def test_a_batch_that_the_program_empties_is_changed_and_keeps_no_rank_waiting(two_ranks: RankPool) -> None:
    for outcome in two_ranks.run(replay_runs.odd_loop, "emptied", 3).values():
        assert (outcome.ok, outcome.error, outcome.warnings) == ([True] * 3, "", [])


def test_batches_that_are_changed_in_place_are_copied_from_the_next_step_on(two_ranks: RankPool) -> None:
    for outcome in two_ranks.run(replay_runs.odd_loop, "changed in place", 3).values():
        assert (outcome.ok, outcome.error) == ([True] * 3, "")
        (warning,) = outcome.warnings
        assert "ranks 0, 1: batch[0] was changed in place during the step; from now on batches are copied" in warning
        assert outcome.runs == 3  # from the second step on


# -- what a rerun leaves ----------------------------------------------------------------------------------------------


# -- what travels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [True, False])
def test_dtypes_that_a_bundle_alone_holds_travel(two_ranks: RankPool, wrong: bool) -> None:
    for outcome in two_ranks.run(replay_runs.with_kept, torch.uint16, torch.float8_e5m2, wrong, 2).values():
        assert outcome.ok == ([True] if wrong else [True] * 3)
        assert outcome.warnings == []
        assert ("Rank 1 was wrong once and right once" if wrong else "") in outcome.error


@pytest.mark.parametrize(
    ("buffer", "why"),
    [
        (
            torch.float8_e4m3fnuz,
            "TypeError: buffers['kept'] is of type torch.Tensor (torch.strided, torch.float8_e4m3fnuz, cpu), ",
        ),
        ("foreign", "ConfigError: the buffer kept is of type tests.training.Foreign (torch.strided, "),
    ],
)
def test_what_cannot_travel_is_a_warning_where_an_alarm_is_one(two_ranks: RankPool, buffer: Any, why: str) -> None:
    for outcome in two_ranks.run(replay_runs.with_kept, None, buffer, False, 1).values():
        assert outcome.ok == [True] * 3
        assert len(outcome.warnings) == 3
        for warning in outcome.warnings:
            assert "a micro-batch cannot be run again" in warning
            assert f"ranks 0, 1: {why}" in warning


def test_a_buffer_that_cannot_travel_is_a_reason_beside_the_alarm(two_ranks: RankPool) -> None:
    for outcome in two_ranks.run(replay_runs.an_outlier_of_data, torch.float8_e4m3fnuz).values():
        assert "The micro-batch could not be run again: TypeError: buffers['kept'] is of type " in outcome.error
        assert "thresholds" in outcome.error or "is far from normal" in outcome.error


def test_a_large_buffer_that_is_equal_on_all_ranks_is_not_sent(two_ranks: RankPool) -> None:
    two_ranks.restart()  # a group's buffer is as large as the largest layout that the group has seen
    for outcome, sent_bytes in two_ranks.run(replay_runs.with_a_mask, 2).values():
        assert (outcome.ok, outcome.error) == ([True, True], "")
        assert sent_bytes < 1 << 20


# -- gradients that differ --------------------------------------------------------------------------------------------


def witness(digests: list[int], norms: list[float]) -> GradientDigests:
    return GradientDigests(torch.tensor(digests), torch.tensor(norms, dtype=torch.float64))


def test_with_noise_only_norms_outside_of_the_room_differ() -> None:
    first, second = witness([1, 2, 3], [1.0, 2.0, 3.0]), witness([1, 5, 6], [1.0, 2.0001, 3.5])
    assert first.differs(second, 0.0).tolist() == [False, True, True]
    assert first.differs(second, 1e-3).tolist() == [False, False, True]
    assert first.is_same(second, 0.5)


def test_a_norm_that_is_not_finite_differs_and_makes_no_room() -> None:
    digests = witness([1, 2], [float("inf"), 2.0])
    assert digests.differs(witness([1, 3], [float("inf"), 9.0]), 1e-2).tolist() == [False, True]
    assert digests.differs(witness([4, 2], [1.0, 2.0]), 1e-2).tolist() == [True, False]


class _Memory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages that operators made and that are still alive."""

    def __init__(self) -> None:
        self.bytes = self.peak_bytes = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not any(
                tensor.untyped_storage().data_ptr() == argument.untyped_storage().data_ptr()
                for argument in tree_leaves((args, kwargs))
                if isinstance(argument, Tensor)
            ):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._alive:
            self._alive.add(key)
            self.bytes += size
            self.peak_bytes = max(self.peak_bytes, self.bytes)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.bytes -= size


def test_digests_of_gradients_take_the_memory_of_one_of_them_and_not_of_all() -> None:
    gradients = [torch.randn(256, 1024) for _ in range(16)]
    GradientDigests.of(gradients[:1])  # tables that stay
    with _Memory() as memory:
        GradientDigests.of(gradients)
    assert memory.peak_bytes < 3 * gradients[0].nbytes


# -- why: the micro-batch of an alarm ---------------------------------------------------------------------------------


def test_an_outlier_of_the_data_is_not_taken_for_hardware_where_the_peers_values_are_large_anyway(
    two_ranks: RankPool,
) -> None:
    """The peer's own past would call the value normal."""
    for outcome in two_ranks.run(replay_runs.an_outlier_of_data).values():
        assert len(outcome.ok) == 30
        assert "and so it does on rank 1: software or data, not hardware" in outcome.error


def answer(*values: float, bad: bool | None = True) -> dict[str, Any]:
    run = {"values": list(enumerate(values)), "bad": bad}
    return {"runs": [run, run]}


@pytest.mark.parametrize(
    ("by_owner", "by_peer", "words"),
    [
        (answer(1.0, 1e9), answer(1.001, 1.001e9), "software or data"),
        (answer(1.0, float("nan")), answer(1.0, float("inf")), "software or data"),
        (answer(1e9, 1e-9), answer(1e9, 3e-9), "software or data"),
        (answer(1.0, 1e9), answer(1.0, 2.5), "norm2 has 1e+09 on rank 0 and 2.5 on rank 1."),
        (answer(1.0, 1e9), answer(1.0, 2e9), "hardware of rank 0, or something that only it holds"),
        (answer(1.0, 1e9), answer(1.0), "norm2 has 1e+09 on rank 0 and nan on rank 1."),
        (answer(1.0, bad=False), {"error": "no"}, "normal values: a transient fault"),
        (answer(1.0), {"error": "no"}, "such a value again. Rank 1 could not run it: no"),
        ({"error": "no"}, answer(1.0), "Rank 0 could not run the micro-batch again: no"),
    ],
)
def test_the_cause_follows_from_the_values_of_two_ranks(by_owner: Any, by_peer: Any, words: str) -> None:
    text, may_be_hardware = _explanation(0, 1, {0: by_owner, 1: by_peer}, ["norm1", "norm2"])
    assert words in text
    assert may_be_hardware == (words != "software or data")
