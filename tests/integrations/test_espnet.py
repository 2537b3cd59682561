"""espnet's trainers report the right averages of stats that differ between ranks after `install`; stock does not."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ddpstats.errors import ConfigError
from ddpstats.integrations import espnet
from ddpstats.testing import PerRank, RankPool
from tests.integrations import espnet_runs
from tests.integrations.espnet_runs import Script, Step, Trained
from tests.needs import imported, needs

pytestmark = pytest.mark.library
needs("espnet2")
imported("espnet2.train.reporter")
WRONG_TYPE = getattr(imported("typeguard"), "TypeCheckError", TypeError)  # espnet 202402 has a typeguard of before it

# A key that the trainers' criteria name must be there in every epoch.
A = {"a": 1.0}


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[RankPool, list[Any]]]:
    """The ranks, and what came of installing before they had imported any trainer."""
    scripts = both({**A, "l1": 0.5}, {**A, "snr": -2.0})
    with RankPool(2, timeout_sec=90.0) as ranks:
        yield ranks, ranks.run(espnet_runs.install_then_import, PerRank(scripts)).values()


@pytest.fixture(scope="module")
def pool(started: tuple[RankPool, list[Any]]) -> RankPool:
    return started[0]


def step(stats: dict[str, Any], size: int = 8) -> list[list[Step]]:
    """One epoch of one step."""
    return [[(stats, size)]]


def both(rank0: dict[str, Any], rank1: dict[str, Any]) -> list[Script]:
    """The same single step in training and validation."""
    return [Script(step(stats), step(stats)) for stats in (rank0, rank1)]


def trained(pool: RankPool, scripts: list[Script], install: bool) -> list[Trained]:
    results: list[Trained] = pool.run(espnet_runs.train, PerRank(scripts), install).values()
    return results


def installed(pool: RankPool, scripts: list[Script]) -> Trained:
    """Train with `install`; return the result, the same on all ranks to the bit and in the order of the keys."""
    rank0, rank1 = trained(pool, scripts, True)
    assert rank0 == rank1
    assert [list(epoch) for epoch in rank0.train + rank0.valid] == [list(epoch) for epoch in rank1.train + rank1.valid]
    return rank0


# -- one test per way in which ranks differ ---------------------------------------------------------------------------

EVERY_EPOCH_ALIKE = [
    Script(
        train=[
            [({**A, "loss": 0.1 * (rank + 1), "acc": 0.7}, 2 + 6 * rank), ({**A, "loss": 0.3, "acc": 1 / 3}, 4)],
            [({**A, "loss": 1.5, "acc": 0.25 * rank}, 7 - 3 * rank)],
        ],
        valid=step({"a": 0.2 * (rank + 1), "loss": 1 / 7}, 5 + rank),
        epochs=2,
    )
    for rank in range(2)
]


def test_same_keys_give_the_numbers_and_the_parameters_of_stock_espnet(pool: RankPool) -> None:
    stock = trained(pool, EVERY_EPOCH_ALIKE, False)
    ours = installed(pool, EVERY_EPOCH_ALIKE)
    assert [result.parameters for result in stock] == [ours.parameters] * 2  # bit for bit
    for epoch in range(2):
        # stock multiplies and divides in float32
        assert ours.train[epoch] == pytest.approx(stock[0].train[epoch], rel=1e-6)
        assert ours.valid[epoch] == pytest.approx(stock[0].valid[epoch], rel=1e-6)
        assert list(ours.train[epoch]) == list(stock[0].train[epoch])


def test_different_keys_are_on_every_rank(pool: RankPool) -> None:
    scripts = both({"l1_loss": 0.057}, {"snr_loss": -2.0})
    stock = trained(pool, scripts, False)
    assert stock[0].train == stock[0].valid == [{"l1_loss": pytest.approx(-0.9715)}]  # a loss, and negative
    assert stock[1].train == stock[1].valid == [{"snr_loss": pytest.approx(-0.9715)}]
    ours = installed(pool, scripts)
    assert ours.train == ours.valid == [{"l1_loss": pytest.approx(0.057), "snr_loss": -2.0}]
    assert ours.parameters == stock[0].parameters  # the total weight, which scales the gradient, is stock's


def test_keys_in_another_order_are_not_mixed_up(pool: RankPool) -> None:
    scripts = both({"l1": 0.05, "snr": -2.0}, {"snr": -4.0, "l1": 0.07})
    stock = trained(pool, scripts, False)
    assert stock[0].train == stock[0].valid == [pytest.approx({"l1": -1.975, "snr": -0.965})]
    assert stock[1].train == stock[1].valid == [pytest.approx({"l1": -0.965, "snr": -1.975})]
    ours = installed(pool, scripts)
    assert ours.train == ours.valid == [pytest.approx({"l1": 0.06, "snr": -3.0})]


def test_lists_of_different_lengths_are_averaged_by_index(pool: RankPool) -> None:
    scripts = both({"l1": [0.0505], "snr": [-0.5, -2.5, -1.9]}, {"l1": [0.05, 0.023], "snr": [-2.5, -1.5]})
    stock = pool.run(espnet_runs.train, PerRank(scripts), False).errors()
    assert [type(error).__name__ for error in stock.values()] == [WRONG_TYPE.__name__] * 2
    ours = installed(pool, scripts)
    expected = {"l1[0]": 0.05025, "l1[1]": 0.023, "snr[0]": -1.5, "snr[1]": -2.0, "snr[2]": -1.9}
    assert ours.train == ours.valid == [pytest.approx(expected)]


def by_epoch(rank: int, patience: int | None = None) -> Script:
    """Give keys in another order on each rank: ``a`` goes down; with ``b`` mixed in, one rank sees it go up."""
    epochs = [{"a": 1 - 0.1 * epoch, "b": 0.5 * epoch * (1 - rank)} for epoch in range(4)]
    valid = [[(dict(stats if rank == 0 else reversed(stats.items())), 8)] for stats in epochs]
    return Script(step({"loss": 1.0}), valid, epochs=4, plateau=True, patience=patience)


PLATEAU = [by_epoch(rank) for rank in range(2)]


def test_a_learning_rate_that_follows_a_key_is_the_same_on_every_rank(pool: RankPool) -> None:
    stock = trained(pool, PLATEAU, False)
    assert [result.learning_rate for result in stock] == pytest.approx([0.1, 0.0001])
    assert stock[0].parameters != stock[1].parameters  # the models differ now
    ours = installed(pool, PLATEAU)
    assert ours.learning_rate == 0.1
    assert [epoch["a"] for epoch in ours.valid] == pytest.approx([1.0, 0.9, 0.8, 0.7])


def test_early_stopping_on_a_key_stops_no_rank_alone(pool: RankPool) -> None:
    ours = installed(pool, [by_epoch(rank, patience=0) for rank in range(2)])
    assert len(ours.valid) == 4


NONE = both({**A, "loss": None}, {**A, "loss": 2.0})
NONE_IN_VALIDATION = [Script(step(A), script.valid) for script in NONE]


@pytest.mark.parametrize(
    ("scripts", "train"), [(NONE, {**A, "loss": 2.0}), (NONE_IN_VALIDATION, A)], ids=["in both", "in validation"]
)
def test_none_on_one_rank_is_absent_there(pool: RankPool, scripts: list[Script], train: dict[str, float]) -> None:
    """The trainers drop None in training: there the ranks hold another number of keys."""
    ours = installed(pool, scripts)
    assert (ours.train, ours.valid) == ([train], [{"a": 1.0, "loss": 2.0}])


def test_none_on_every_rank_is_nan_as_in_stock(pool: RankPool) -> None:
    scripts = both({**A, "cer": None}, {**A, "cer": None})
    stock, (ours, ours_too) = trained(pool, scripts, False)[0], trained(pool, scripts, True)
    assert repr(ours) == repr(ours_too)
    assert ours.train == stock.train == [A]  # the trainers drop None before they average, but only in training
    assert list(ours.valid[0]) == list(stock.valid[0]) == ["a", "cer"]
    assert math.isnan(ours.valid[0]["cer"])
    assert math.isnan(stock.valid[0]["cer"])


# -- the weight of each key -------------------------------------------------------------------------------------------


def test_an_epoch_is_averaged_with_each_keys_own_weight(pool: RankPool) -> None:
    # The step in which one rank alone has snr counts half as much as the one in which both have it.
    rank0: list[Step] = [({**A, "snr": -2.0}, 8), ({**A, "snr": -4.0}, 8)]
    rank1: list[Step] = [(A, 8), ({**A, "snr": -4.0}, 8)]
    ours = installed(pool, [Script([steps], [steps]) for steps in (rank0, rank1)])
    assert ours.train == ours.valid == [{"a": 1.0, "snr": pytest.approx(-10 / 3)}]  # -3.0 with the total weight


def test_nan_means_absent_as_espnets_models_mean_it(pool: RankPool) -> None:
    scripts = [
        Script(step({**A, "single": -2.0, "multi": math.nan}, 8), step({**A, "single": -2.0, "multi": math.nan}, 8)),
        Script(step({**A, "single": math.nan, "multi": 3.0}, 2), step({**A, "single": math.nan, "multi": 3.0}, 2)),
    ]
    stock = trained(pool, scripts, False)
    assert stock[0].train == [pytest.approx({"a": 1.0, "single": -3.2, "multi": 1.2})]  # right for equal weights only
    ours = installed(pool, scripts)
    assert ours.train == ours.valid == [{"a": 1.0, "single": -2.0, "multi": 3.0}]


def test_an_integer_on_one_rank_is_averaged_with_floats(pool: RankPool) -> None:
    # espnet2/ssl/loss/hubert.py reports 0 where it has counted nothing. Stock espnet's process aborts.
    ours = installed(pool, both({**A, "acc": 0}, {**A, "acc": 0.5}))
    assert ours.train == [{"a": 1.0, "acc": 0.25}]


def test_ranks_with_different_numbers_of_batches_are_averaged(pool: RankPool) -> None:
    short: list[Step] = [({**A, "x": 1.0}, 8)] * 2
    ours = installed(pool, [Script([short], [short]), Script([[*short, (A, 8)]], [[*short, (A, 8)]])])
    assert ours.train == ours.valid == [{"a": 1.0, "x": 1.0}]


# -- the other trainers -----------------------------------------------------------------------------------------------


def test_every_module_that_binds_the_function_is_patched_and_restored(pool: RankPool) -> None:
    modules = pool.run(espnet_runs.consumers, True).values()[0]
    trainers = {f"espnet2.train.{name}" for name in ("trainer", "gan_trainer", "uasr_trainer")}
    assert modules.keys() >= trainers | set(filter(espnet_runs.is_there, espnet_runs.NEWER_CONSUMERS))
    assert set(modules.values()) == {("ddpstats.integrations.espnet", "espnet2.torch_utils.recursive_op")}


# -- install and uninstall --------------------------------------------------------------------------------------------


def test_counts_of_the_uasr_trainer_are_sums_over_all_ranks(pool: RankPool) -> None:
    """It divides them: the phone error rate is 14 / 50, and 0.188 of averages weighted by batch size."""
    counts = ("batch_num_errors", "batch_num_ref_tokens", "batch_lm_log_prob", "batch_num_hyp_tokens", "batch_size")
    held = [dict(zip(counts, (6, 40, -30.0, 32, 8), strict=True)), dict(zip(counts, (8, 10, -10.0, 8, 2), strict=True))]
    tensors = [{name: torch.tensor([float(number)]) for name, number in stats.items()} for stats in held]
    tensors[0]["loss"] = torch.tensor([1.0])
    for averaged, weights in pool.run(espnet_runs.counts_of_uasr, PerRank(tensors), PerRank([8, 2])).values():
        assert averaged == {**dict(zip(counts, (14.0, 50.0, -40.0, 40.0, 10.0), strict=True)), "loss": 1.0}
        assert weights == {**dict.fromkeys(counts, 10.0), "loss": 8.0}


def test_install_before_the_trainers_are_imported(started: tuple[RankPool, list[Any]]) -> None:
    for result, ours, restored in started[1]:
        assert result.train == result.valid == [{"a": 1.0, "l1": 0.5, "snr": -2.0}]
        assert ours
        assert restored


@pytest.fixture
def espnet_module() -> Iterator[Any]:
    """espnet's `recursive_op`, as it was before and will be again."""
    import espnet2.torch_utils.recursive_op as module

    yield module
    espnet.uninstall()


@pytest.mark.parametrize("missing", ["espnet2", "typeguard"])
def test_without_espnet_or_what_it_needs_the_error_says_how_to_get_it(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "espnet2.train.reporter")
    with pytest.raises(ConfigError, match=r"ddpstats\[espnet\].*pip install --no-deps espnet==202511"):
        espnet.install()


# -- the Reporter, alone ----------------------------------------------------------------------------------------------


@pytest.fixture
def registered(espnet_module: Any) -> Callable[..., dict[str, list[Any]]]:
    """Return a function that averages stats, has the trainer change them, and returns what the Reporter holds."""
    from espnet2.train.reporter import SubReporter

    espnet.install()

    def run(stats: dict[str, Any], change: Any = None, weight: Any = None) -> dict[str, list[Any]]:
        reporter = SubReporter("train", 1, 0)
        averaged, total = espnet_module.recursive_average(stats, torch.tensor([8.0]))
        if change is not None:
            averaged = change(averaged) or averaged
        reporter.register(averaged, total if weight is None else weight)
        reporter.next()
        return {name: [(entry.value, entry.weight) for entry in values] for name, values in reporter.stats.items()}

    return run


ONE_AND_TWO = {"one": torch.tensor([1.0]), "two": torch.tensor([2.0])}


def test_a_key_that_the_trainer_adds_or_replaces_has_the_weight_it_gives(registered: Any) -> None:
    def change(stats: Any) -> None:
        stats["two"] = 5.0
        stats["new"] = torch.tensor(3.0)

    assert registered(ONE_AND_TWO, change, 6) == {"one": [(1.0, 8.0)], "two": [(5.0, 6)], "new": [(3.0, 6)]}


def test_types_are_still_checked(registered: Any) -> None:
    def change(stats: Any) -> None:
        stats["two"] = "three"

    with pytest.raises(WRONG_TYPE, match=r"'two' of argument \"stats\"|argument \"stats\"\['two'\]"):
        registered(ONE_AND_TWO, change)


def test_a_key_that_is_none_first_and_registered_without_a_weight(espnet_module: Any) -> None:
    from espnet2.train.reporter import SubReporter

    espnet.install()
    reporter = SubReporter("train", 1, 0)
    for value in (None, torch.tensor([3.0])):
        averaged, _ = espnet_module.recursive_average({"late": value, "one": torch.tensor([1.0])}, torch.tensor([8.0]))
        reporter.register(averaged)
        reporter.next()
    assert "late=3.000" in reporter.log_message()
