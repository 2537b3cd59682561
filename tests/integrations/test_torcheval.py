"""torcheval's toolkit merges the states of all ranks by member and key after `install`; stock mixes them up."""

from __future__ import annotations

from typing import Any

import pytest

from ddpstats.testing import RankPool
from tests.needs import Late, needs

pytestmark = pytest.mark.library
needs("torcheval")
runs: Any = Late("tests.integrations.torcheval_runs")


def test_metrics_are_the_same_to_the_bit_as_in_stock(three_ranks: RankPool) -> None:
    stock, ours = (three_ranks.run(runs.results_of_documented, install).values() for install in (False, True))
    assert ours == stock
    assert len(ours[0]["alone"]) == 8
    assert ours[0]["alone"]["sum"] != ours[0]["local"]["sum"]["weighted_sum"]  # something was merged


def test_dict_states_are_merged_by_key(two_ranks: RankPool) -> None:
    stock = two_ranks.run(runs.dict_keys_differ, False).values()
    assert stock == [({"a": 11.0, "b": 32.0},) * 2, ({"a": 11.0, "c": 32.0},) * 2]
    assert two_ranks.run(runs.dict_keys_differ, True).values() == [({"a": 11.0, "b": 2.0, "c": 30.0},) * 2] * 2


def test_members_are_merged_by_name(two_ranks: RankPool) -> None:
    stock = two_ranks.run(runs.members_differ, False).values()
    assert stock == [{"loss": 2.0, "acc_a": 15.0}, {"loss": 2.0, "acc_b": 15.0}]
    ours = two_ranks.run(runs.members_differ, True).values()
    assert ours == [{"loss": 2.0, "acc_a": 10.0, "acc_b": 20.0}] * 2


def test_members_of_other_ranks_are_in_the_result(two_ranks: RankPool, three_ranks: RankPool) -> None:
    f64 = "torch.float64"
    for pool, size in ((two_ranks, 2), (three_ranks, 3)):
        ranks = pool.run(runs.members_of_others).values()
        last = size - 1
        everyones = {"weighted_sum": (f64, float(size)), "weights": (f64, float(size))}
        some = {"weighted_sum": (f64, float(sum(range(size)))), "weights": (f64, float(last))}
        own = [rank.pop("states") for rank in ranks]  # the metrics themselves do not travel
        assert own == [{"all": everyones}] + [{"all": everyones, "some": some}] * last
        results, *results_of_others = ranks
        assert results_of_others == [results] * last
        assert results["order"] == ["mean", "own class", "list", "pair"]
        assert results["results"] == {
            "mean": (f64, last / 2),
            "own class": {(1, "x"): 1.0, "k": 2.0},
            "list": [("torch.float32", 5.0)],
            "pair": (1.0, 2.0),
        }
        assert results["of the others"] == {"all": (f64, 1.0), "some": (f64, (1 + last) / 2)}
        assert results["collectives"] == [2, 6]


def test_a_result_that_cannot_be_had_is_an_error_on_every_rank(two_ranks: RankPool, three_ranks: RankPool) -> None:
    for pool, size in ((two_ranks, 2), (three_ranks, 3)):
        ranks = pool.run(runs.members_that_give_nothing).values()
        last = (size - 1,)
        for raised, odd, unmerged, afterwards in ranks:
            assert unmerged == raised
            assert raised == ("InvalidStats", last, "only", raised[3])
            assert odd == ("InvalidStats", last, "only", odd[3])
            assert raised[3] == (
                "torcheval.get_synced_metric_collection, results: values that cannot be gathered:\n"
                f"  rank {last[0]} at 'only': ZeroDivisionError: mine\n"
                "Nothing was gathered."
            )
            assert "of type object, which cannot be sent to other ranks" in odd[3]
            assert afterwards == last[0] / 2


def test_lists_numbers_and_ranks_without_data_are_merged(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(runs.states_that_differ).values()
    f32 = "torch.float32"
    empty: list[Any] = [(f32, [])]
    three = [(f32, []), (f32, [1.0]), (f32, [1.0, 1.0])]
    assert (first.pop("lists"), second.pop("lists")) == (empty + three, three + empty)  # the rank's own come first
    assert first == second
    assert first == {
        "empty list": (f32, [1.0, 2.0, 3.0]),
        "both empty": (f32, []),
        "not updated": (f32, [1.0, 1.0, 1.0]),
        "int and float": 3.5,
        "no members": {"only": ("torch.float64", 7.0)},
        "odd keys": {(1, "x"): 1.0, 2.5: 5.0, None: 5.0},
    }


def test_subgroups_combine_their_own_ranks_alone(three_ranks: RankPool) -> None:
    outside, first, second = three_ranks.run(runs.in_subgroups).values()
    assert outside == [True, "The current process is not part of the process group"]
    assert first == second == [True, {"mean": 1.5, "own1": 5.0, "own2": 10.0}, [("torch.float32", 2.0)]]


def test_conflicts_are_the_same_error_on_every_rank(two_ranks: RankPool) -> None:
    results, results_of_rank_1 = two_ranks.run(runs.conflicts).values()
    assert results == results_of_rank_1
    assert results.pop("afterwards")[3] == "0.5"
    assert results.pop("own error")[:2] == ("InvalidStats", (1,))
    assert results.pop("key")[:2] == ("InvalidStats", (1,))
    assert results.pop("other call")[0] == "ProtocolMismatch"
    paths = {
        "tensor, list": "state",
        "list, dict": "state",
        "list of other ndim": "inputs",
        "shape": "acc/state",
        "classes": "acc/confusion_matrix",
        "kind": "n/weighted_sum",
        "dict value": "d/state/k",
        "metric": "loss",
        "states": "w/sum_squared_error",
    }
    assert {case: (kind, ranks, path) for case, (kind, ranks, path, _) in results.items()} == {
        case: ("SchemaConflict", (0, 1), path) for case, path in paths.items()
    }
    assert results["classes"][3] == (
        "torcheval.get_synced_metric_collection: ranks of the default group of 2 ranks hold what cannot be combined "
        "under 'acc/confusion_matrix':\n"
        "  rank 0: a tensor of shape (3, 3), float32\n"
        "  rank 1: a tensor of shape (4, 4), float32\n"
        "merging failed on ranks 0, 1, there with RuntimeError: The size of tensor a (3) must match the size of tensor "
        "b (4) at non-singleton dimension 1\n"
        "Make the metric with the same class and arguments on all ranks and update it with values of one kind, or give "
        "it another name. Nothing was merged."
    )
    assert "rank 0: a list\n  rank 1: a dict" in results["list, dict"][3]
    assert "rank 0: a torcheval.metrics.aggregation.mean.Mean" in results["metric"][3]
    assert "rank 0: no such state\n  rank 1: a Tensor" in results["states"][3]
    assert "with 1 dimensions\n  rank 1: a list of tensors with 2 dimensions" in results["list of other ndim"][3]


def test_collectives_do_not_grow_with_the_states(two_ranks: RankPool) -> None:
    assert two_ranks.run(runs.counts, True).values() == [[(2, 0), (2, 0)]] * 2
    for single, forty in two_ranks.run(runs.counts, False).values():
        assert forty[1] == 40 * single[1] > 0
