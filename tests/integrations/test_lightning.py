"""Lightning's `self.log(..., sync_dist=True)` is right on every rank after `install`, or with the callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpstats.testing import RankPool, run_ranks
from tests.integrations.window_adds import KEYS, close, expected
from tests.needs import Late, needs

pytestmark = pytest.mark.library
needs("lightning", "torchmetrics")
runs: Any = Late("tests.integrations.lightning_runs")

WAYS = ["install", "callback"]
LIMIT_SEC = 240  # of ranks that import Lightning, on a loaded machine


def played(pool: RankPool, name: str, how: str, **settings: Any) -> list[dict[str, Any]]:
    return pool.run(runs.play, name, how, timeout_sec=LIMIT_SEC, **settings).values()


@pytest.mark.parametrize("how", WAYS)
def test_keys_that_differ_between_ranks_are_on_every_rank(two_ranks: RankPool, how: str) -> None:
    expected = {"loss": 2.0, "loss_step": 2.0, "loss_epoch": 2.0, "even": 0.5, "odd": 0.75, "v": 1.5, "v0": 0, "v1": 1}
    for run in played(two_ranks, "different keys", how, val=2):
        assert run["callback"] == expected
        assert run["rows"] == [
            (0, {"loss_step": 2.0, "even": 0.5, "odd": 0.75}),
            (1, {"loss_step": 2.0, "even": 0.5, "odd": 0.75}),
            (1, {"v": 1.5, "v0": 0.0, "v1": 1.0}),
            (1, {"loss_epoch": 2.0}),
        ]
        assert run["seen"][0] == ("on_train_batch_end", {"loss": 2.0, "loss_step": 2.0, "even": 0.5, "odd": 0.75})


@pytest.mark.parametrize(("how", "values"), [("stock", [50.5] * 6), ("install", [1, 100, 1, 100, 1, 100])])
def test_keys_in_another_order_are_not_mixed_up(two_ranks: RankPool, how: str, values: list[float]) -> None:
    for run in played(two_ranks, "other order", how, val=2):
        assert [run["callback"][name] for name in ("a_step", "b_step", "a_epoch", "b_epoch", "c", "d")] == values


def test_keys_that_differ_between_steps_are_on_every_rank(two_ranks: RankPool) -> None:
    for run in played(two_ranks, "now and then", "install", train=4, val=4):
        assert [row["x_step"] for _, row in run["rows"] if "x_step" in row] == [0, 1, 2, 3]
        assert run["callback"]["x_epoch"] == run["callback"]["y_epoch"] == 1.5


def test_epoch_means_are_weighted_by_batch_size(two_ranks: RankPool) -> None:
    for stock in played(two_ranks, "batch sizes", "stock", train=3, val=3):
        # issue 21859: the batch sizes' mean is an integer
        assert stock["callback"]["one_epoch"] == stock["callback"]["one"] == pytest.approx(4.5 / 4)
    for ours in played(two_ranks, "batch sizes", "install", train=3, val=3):
        metrics = ours["callback"]
        assert metrics["one"] == metrics["one_epoch"] == 1.0
        assert metrics["mean"] == pytest.approx((0 + 1 + 2 + 3 * (2 + 3 + 4)) / 12)


def test_reductions_are_those_of_all_ranks(two_ranks: RankPool) -> None:
    # rank 0 has 1 and 11, rank 1 has 2 and 12
    steps = {"sum_step": 23, "min_step": 11, "max_step": 12, "mean_step": 11.5}
    epoch = {"sum_epoch": 26, "min_epoch": 1, "max_epoch": 12, "mean_epoch": 6.5}
    first = {"sum0": 12, "min0": 1, "max0": 11, "mean0": 6}
    second = {"sum1": 14, "min1": 2, "max1": 12, "mean1": 7}
    for run in played(two_ranks, "reductions", "install", val=2):
        assert run["callback"].items() >= {**steps, **epoch, **first, **second}.items()


def test_low_and_high_precision_and_whole_numbers(two_ranks: RankPool) -> None:
    for run in played(two_ranks, "low precision", "install", train=50, val=50):
        metrics = run["callback"]
        assert metrics["low_epoch"] == metrics["low"] == pytest.approx(float(runs.LOW), rel=1e-7)
        assert (metrics["exact"], metrics["whole"]) == (16777217.0, 3.5)


def test_keys_of_the_hooks_at_the_end_are_on_every_rank(two_ranks: RankPool) -> None:
    for run in played(two_ranks, "late", "install", train=3, val=1):
        metrics = run["callback"]
        assert [metrics[name] for name in ("end0", "end1", "end", "vend0", "vend1", "vend")] == [5, 6, 0.5, 7, 8, 0.5]
        assert metrics["late0_epoch"] == metrics["late1_epoch"] == 1.0
        assert [row["late1_step"] for _, row in run["rows"] if "late1_step" in row] == [0, 1, 2]


@pytest.mark.parametrize("how", ["stock", "install"])
def test_keys_that_are_not_synced_stay_stock(two_ranks: RankPool, how: str) -> None:
    first, second = played(two_ranks, "rank zero only", how)
    assert (first["callback"], second["callback"]) == ({"mine": 0.0}, {})
    first, second = played(two_ranks, "not synced", how, val=1)
    assert set(first["callback"].values()) == {0.0}
    assert set(second["callback"].values()) == {1.0}
    assert [run["callback"] for run in played(two_ranks, "of a group", how)] == [{"k": 0.5}] * 2


def test_several_loaders_have_keys_of_their_own(two_ranks: RankPool) -> None:
    for run in played(two_ranks, "loaders", "install", val=[2, 3]):
        metrics = run["callback"]
        for only in ("only0", "only1"):
            assert metrics[f"{only}/dataloader_idx_0"] == 1.5
            assert metrics[f"{only}/dataloader_idx_1"] == 12.0
        assert metrics["all/dataloader_idx_0"] == metrics["all/dataloader_idx_1"] == 0.5


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("sanity", [0, 2])
def test_ranks_may_validate_different_numbers_of_batches(two_ranks: RankPool, how: str, sanity: int) -> None:
    """One rank validates five batches, the other two. Stock Lightning hangs where they are logged with on_step."""
    results = two_ranks.run(runs.play_uneven, how, sanity).values()
    for run in results:
        # y is i on both ranks: 0..4 and 0..1
        assert run["callback"]["y_epoch"] == pytest.approx((0 + 1 + 2 + 3 + 4 + 0 + 1) / 7)
    assert not any("y_step" in row for _, row in results[0]["rows"])


@pytest.mark.parametrize("how", WAYS)
def test_callbacks_agree_on_a_key_of_one_rank(two_ranks: RankPool, how: str) -> None:
    stopped = two_ranks.run(runs.play_watched, how, "stop").values()
    assert [run["epoch"] for run, _ in stopped] == [2, 2]
    saved = two_ranks.run(runs.play_watched, how, "checkpoint").values()
    assert "watched=1.0.ckpt" in saved[0][1]
    plateau = two_ranks.run(runs.play_watched, how, "plateau").values()
    assert [run["lr"] for run, _ in plateau] == [0.5**4] * 2


def test_validate_and_test_return_the_keys_of_all_ranks(two_ranks: RankPool) -> None:
    expected = {"v": 1.5, "v0": 0.0, "v1": 1.0}
    first, second = ({f"{name}/dataloader_idx_{i}": value for name, value in expected.items()} for i in (0, 1))
    stages = [[expected], [expected], [first, second]]
    assert two_ranks.run(runs.play_stages, "install").values() == [stages] * 2


@pytest.mark.parametrize("script", ["reductions", "late", "loaders", "low precision", "one name in two hooks"])
def test_where_ranks_agree_nothing_changes(two_ranks: RankPool, script: str) -> None:
    """Every value that hooks, loggers and callbacks see, and the model's weights.

    But for batches of a second loader: stock has the first one's values then, and ours when validation ends.
    """
    stock, ours = (two_ranks.run(runs.play_agreeing, script, how).values() for how in ("stock", "install"))
    for before, after in zip(stock, ours, strict=True):
        assert before.keys() == after.keys()
        for key in before.keys() - ({"seen"} if script == "loaders" else set()):
            assert runs.close(before[key], after[key]), key
        assert before["weight"] == after["weight"]


def test_one_rank_may_look_whether_a_loop_is_skipped(two_ranks: RankPool) -> None:
    assert two_ranks.run(runs.skips_seen_by_one_rank, "install").values() == [[False] * 3, []]


def test_a_batch_without_size_can_be_logged_in_a_step(two_ranks: RankPool) -> None:
    assert two_ranks.run(runs.validate_without_sizes, "install").values() == [{"v": 1.5}] * 2


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(("script", "val"), [("two reductions", 0), ("two reductions of an epoch", 1)])
def test_conflicts_are_the_same_error_on_every_rank(two_ranks: RankPool, script: str, val: int, how: str) -> None:
    first, second = two_ranks.run(runs.raised, "play", script, how, val=val).values()
    assert first == second
    assert (first[0], first[2]) == ("SchemaConflict", (0, 1))
    assert "loss" in first[1]


def test_progress_bar_on_one_rank_is_on_all(two_ranks: RankPool) -> None:
    for run in played(two_ranks, "progress bar on one rank", "install"):
        assert run["callback"] == {"k": 1.5}
        assert run["rows"] == [(0, {"k": 1.5}), (1, {"k": 1.5})]


def test_batches_of_validation_cost_no_collective(two_ranks: RankPool) -> None:
    assert two_ranks.run(runs.of_ten_more_validation_batches, "install").values() == [[0, 0]] * 2


def test_one_collective_per_point(two_ranks: RankPool) -> None:
    steps = {"stock": 20, "install": 1, "callback": 1}
    with_hook = {"stock": 20, "install": 2, "callback": 2}  # which might log as well
    assert two_ranks.run(runs.counted, timeout_sec=LIMIT_SEC).values() == [[steps, with_hook]] * 2


def test_a_rank_that_does_not_come_to_a_point_is_missing_on_every_rank() -> None:
    env = {"DDPSTATS_TIMEOUT_SEC": "4"}
    first, second = run_ranks(runs.one_is_late, 2, "install", env=env, timeout_sec=100).values()
    assert first == second
    assert first[0] == "RankMissing"
    assert first[2] == (1,)


def test_before_the_point_a_rank_does_not_see_its_own_number(two_ranks: RankPool) -> None:
    assert two_ranks.run(runs.peeked, "install").values() == [[{}, {"k": 0.5}, {"k": 10.5}]] * 2


def test_a_callback_leaves_nothing_behind(two_ranks: RankPool) -> None:
    assert two_ranks.run(runs.left_by_callback).values() == [(True, True)] * 2


def test_a_trainer_of_one_rank_waits_for_no_other(two_ranks: RankPool) -> None:
    expected = [{"t": 0.5}, {"v/dataloader_idx_0": 1.0}, {"v/dataloader_idx_1": 2.0}]
    assert two_ranks.run(runs.trainers_of_one_rank).values() == [expected, None]


def test_a_rank_without_batches_has_the_keys_of_the_others(two_ranks: RankPool) -> None:
    """EarlyStopping's decision, which is another collective, is made there, too."""
    expected = {"v/dataloader_idx_0": 1.5, "v/dataloader_idx_1": 5.0}
    assert two_ranks.run(runs.without_batches, "install", True).values() == [(expected, 2)] * 2
    assert two_ranks.run(runs.without_batches, "install", False).values() == [({"v": 1.0}, 2)] * 2


@pytest.mark.parametrize("ways", [("stock", "install"), ("install", "stock"), ("install", "install")], ids=str)
def test_a_trainer_that_fits_twice_starts_again(two_ranks: RankPool, ways: tuple[str, str]) -> None:
    metrics = {"loss": 1.5, "loss_step": 1.5, "loss_epoch": 1.5}
    assert two_ranks.run(runs.one_trainer_twice, *ways).values() == [[metrics, metrics]] * 2


@pytest.mark.parametrize("how", ["stock", "install"])
def test_a_window_is_flushed_in_the_trainers_own_rows(two_ranks: RankPool, how: str) -> None:
    """Ranks add other keys, or nothing; the trainer logs each tenth step, in two epochs, and validates in between."""
    for run in two_ranks.run(runs.windowed, how, timeout_sec=LIMIT_SEC).values():
        rows = [(step, row) for step, row in run["rows"] if "acc" in row]
        assert [step for step, _ in rows] == [9, 19, 29, 33]
        for (_, row), first in zip(rows, (0, 20, 40, 60), strict=True):
            assert close(row, expected(first, min(first + 20, 68)))
        assert [step for step, row in run["rows"] if row == {"v": 1.0}] == [16, 33]
        after_the_batches = [row for where, row in run["seen"] if where == "on_train_batch_end"]
        assert "acc" not in after_the_batches[18]
        assert close(after_the_batches[19], expected(0, 20))
        assert close({name: run["end"][name] for name in run["end"].keys() & KEYS}, expected(60, 68))
        assert (run["collectives"], run["left"]) == (4, 0)  # three rows, and the end


def test_windows_of_trainers_that_log_in_other_steps_are_an_error(tmp_path: Path) -> None:
    """Rank 0 waits alone in the window of step 2; rank 1 for rank 0's gradients of step 3, which never come."""
    env = {"DDPSTATS_TIMEOUT_SEC": "4"}
    errors = run_ranks(runs.windows_at_other_steps, 2, tmp_path, env=env, timeout_sec=LIMIT_SEC).errors()
    assert errors.keys() == {0, 1}
    assert (tmp_path / "rank0").read_text() == "misses (1,)"
