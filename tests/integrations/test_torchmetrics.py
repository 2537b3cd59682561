"""torchmetrics' metrics are as stock where ranks fit together after `install`, and right or an error where not."""

from __future__ import annotations

from typing import Any

import pytest

from ddpstats.testing import RankPool
from tests.needs import Late, needs

pytestmark = pytest.mark.library
needs("torchmetrics")
runs: Any = Late("tests.integrations.torchmetrics_runs")

LIMIT_SEC = 240  # of ranks that import torchmetrics, on a loaded machine
F32, I32 = ("torch.float32", "cpu"), ("torch.int32", "cpu")


def test_metrics_are_the_same_to_the_bit_as_in_stock(two_ranks: RankPool) -> None:
    stock, ours = (
        two_ranks.run(runs.every_metric, install, timeout_sec=LIMIT_SEC).values() for install in (False, True)
    )
    for theirs, of_rank in zip(stock, ours, strict=True):
        assert len(of_rank) == 3 * len(runs.BUILDERS) + 1
        assert {name: value for name, value in of_rank.items() if repr(value) != repr(theirs[name])} == {}
    own, synced = ours[0]["mean {'sync_on_compute': False}"], ours[0]["mean {}"]
    assert own[1] != synced[1]  # something was merged


def test_collections_are_the_same_to_the_bit_as_in_stock(two_ranks: RankPool, three_ranks: RankPool) -> None:
    for pool in (two_ranks, three_ranks):
        stock, ours = (
            pool.run(runs.every_collection, install, timeout_sec=LIMIT_SEC).values() for install in (False, True)
        )
        assert list(map(repr, ours)) == list(map(repr, stock))
        assert len(ours[0]) == 21


def test_members_are_merged_by_name(two_ranks: RankPool) -> None:
    assert two_ranks.run(runs.members_differ, False).values()[0] == [{"aa": 50.5, "loss": 50.5}]
    assert two_ranks.run(runs.members_differ, True).values() == [[{"aa": 100.0, "loss": 1.0, "zz": 100.0}]] * 2


def test_members_of_other_ranks_are_in_the_result(two_ranks: RankPool, three_ranks: RankPool) -> None:
    for pool, size in ((two_ranks, 2), (three_ranks, 3)):
        results, *results_of_others = pool.run(runs.members_of_others).values()
        assert results_of_others == [results] * (size - 1)
        own = {"my_mean": (*F32, (size - 1) / 2), "my_it": [(*F32, 1.0), (*F32, 2.0)]}
        assert results["own class"] == [own, own]
        assert results["order"] == ["my_mean", "my_it"]
        assert results["left as it was"] is True
        assert results["of the others"] == {
            "all": (*F32, float(size)),
            "two": (*F32, 5.0 if size == 2 else 15.0),
        }
        alone, together = results["names"]  # one rank that has all members, and several that share them
        assert len(alone) == 7
        assert together == alone
        assert results["collectives"] == [2, 6]
        assert results["again"] == {"my_mean": (*F32, 1.0), "my_it": []}


def test_a_result_that_cannot_be_had_is_an_error_on_every_rank(two_ranks: RankPool, three_ranks: RankPool) -> None:
    for pool, size in ((two_ranks, 2), (three_ranks, 3)):
        results, *results_of_others = pool.run(runs.members_that_give_nothing).values()
        assert results_of_others == [results] * (size - 1)
        assert results.pop("afterwards") == {"mean": (*F32, 1.0)}
        assert {outcome[:2] for outcome in results.values()} == {("InvalidStats", (size - 1,))}
        assert {name: path for name, (_, _, path, _) in results.items()} == {
            "raises": "only",
            "odd result": "only/x",
            "step": "only/x",
        }
        assert results["raises"][3] == (
            "torchmetrics/MetricCollection ..., results: values that cannot be gathered:\n"
            f"  rank {size - 1} at 'only': ZeroDivisionError: mine\n"
            "Nothing was gathered."
        )
        assert "of type object, which cannot be sent to other ranks" in results["step"][3]


def test_members_that_differ_step_together(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(runs.steps_differ, True).values()
    both = [{"SumMetric": 3.0, "MeanMetric": 1.5}, {"SumMetric": 21.0, "MeanMetric": 10.5}]
    total = {"SumMetric": 24.0, "MeanMetric": 6.0, "MinMetric": 1.0, "only0": 10.0, "only1": 11.0}
    only = [{"only0": 1.0, "only1": 2.0}, {"only0": 10.0, "only1": 11.0}]
    assert first == [
        both[0] | only[0] | {"MinMetric": 1.0},
        both[1] | only[1] | {"MinMetric": 10.0},
        total,
    ]
    assert second == [  # MinMetric does not sync in a step
        both[0] | only[0] | {"MinMetric": 2.0},
        both[1] | only[1] | {"MinMetric": 11.0},
        total,
    ]


def test_lists_of_other_lengths_are_concatenated(two_ranks: RankPool, three_ranks: RankPool) -> None:
    for pool, items in ((two_ranks, [0, 10, 1, 11, 12]), (three_ranks, [0, 10, 20, 1, 11, 21, 12, 22, 23])):
        results, *results_of_others = pool.run(runs.uneven).values()
        size = results["size"]
        assert results["none"] == [(*F32, float(item)) for item in items]
        assert results["cat"] == (*F32, sorted(map(float, items)))
        assert results["some empty"] == [(*F32, 10.0), (*F32, 11.0)]
        assert results["some empty cat"] == (*I32, [[1, 1, 1]] * 2)
        assert results["all empty"] == []
        assert results["all empty cat"] == (*F32, [])
        assert results["scalars"] == ((*F32, 2.0) if size == 2 else (*F32, [2.0, 3.0, 3.0]))
        assert results["retrieval"] == (*F32, 1.0)
        assert results["sizes that do not fit on one rank"] == "InvalidStats"
        assert results["grad"] == (*F32, [2.0 + 5.0] * 3)
        assert results_of_others == [results] * (size - 1)


def test_result_that_one_rank_has_cached_is_computed_by_all(three_ranks: RankPool) -> None:
    assert three_ranks.run(runs.results_cached_on_rank_0).values() == [[5.0, 5.0]] * 3


CONFLICTS = [
    ("tensor and list", "a tensor, reduction None, shape (2)", "a list, reduction None"),
    ("reduction", "a tensor, reduction min, shape (2)", "a tensor, reduction max, shape (2)"),
    ("cat", "a list, reduction cat, items of shape (*)", "a list, reduction cat, items of shape (*, 3)"),
    ("member's class", "Holder", "OtherHolder"),
    ("words", "no such metric", "Words, which syncs by itself and must be on every rank"),
    ("steps", "MaxMetric", "SumMetric"),
]
"""What ranks hold, and what the last rank holds, as the error says it."""


def test_conflicts_are_the_same_error_on_every_rank(two_ranks: RankPool, three_ranks: RankPool) -> None:
    for pool, size in ((two_ranks, 2), (three_ranks, 3)):
        results, *results_of_others = pool.run(runs.conflicts).values()
        assert results_of_others == [results] * (size - 1)
        assert results.pop("afterwards") == (*F32, (size - 1) / 2)
        kind, ranks, _, message = results.pop("other metric")
        assert (kind, ranks) == ("ProtocolMismatch", tuple(range(size)))
        assert ": torchmetrics/MeanMetric" in message
        assert {(kind, ranks) for kind, ranks, _, _ in results.values()} == {("SchemaConflict", tuple(range(size)))}
        paths = {name: path for name, (_, _, path, _) in results.items() if path != "Holder/state"}
        assert paths == {
            "states": "MulticlassAUROC/preds",
            "member's shape": "acc/confmat",
            "member's class": "b",
            "words": "b",
            "steps": "a",
        }
        before, last = ("rank 0", "rank 1") if size == 2 else ("ranks 0, 1", "rank 2")
        for name, theirs, ours in CONFLICTS:
            assert f"  {before}: {theirs}\n  {last}: {ours}\n" in results[name][3]
        assert results["shape sum"][3] == (
            f"torchmetrics/Holder: ranks of the default group of {size} ranks hold what cannot be combined under "
            "'Holder/state':\n"
            f"  {before}: a tensor, reduction sum, shape (2)\n"
            f"  {last}: a tensor, reduction sum, shape (3)\n"
            "Make the metric with the same class and arguments (num_classes, thresholds, ...) on all ranks, or give it "
            "another name in the collection. Nothing was reduced."
        )
        assert "hold what cannot be combined under 'b':\n" in results["member's class"][3]
        assert "reduction spread" in results["shape spread"][3]


def test_subgroups_combine_their_own_ranks_alone(three_ranks: RankPool) -> None:
    first, second, third = three_ranks.run(runs.in_groups).values()
    assert (first[0], second[0], third[0]) == ([101.0, 1.0], [10.0, 110.0], [101.0, 110.0])
    assert first[1] == {"in 0": 101.0, "in 1": 1.0, "all": 111.0}
    assert second[1] == {"in 0": 10.0, "in 1": 110.0, "own": 5.0, "all": 111.0}
    assert third[1] == {"in 1": 110.0, "in 0": 101.0, "own": 5.0, "all": 111.0}
    assert first[2] == ()  # outside of the group: no error
    assert second[2] == third[2]
    assert "  rank 1 (group rank 0): a tensor, reduction sum, shape (1)\n" in second[2][0]


def test_collectives_do_not_grow_with_the_states_and_none_is_on_the_users_group(two_ranks: RankPool) -> None:
    steady = {"allreduce": 1, "allgather": 1, "on the user's group": 0}  # lengths; all ranks hold the same
    for stock, five, single in two_ranks.run(runs.collectives).values():
        assert stock == {"barrier": 10, "allgather": 10, "on the user's group": 20}
        assert five == single == steady


def test_one_rank_has_torchmetrics_own_functions(two_ranks: RankPool) -> None:
    for stock, ours in two_ranks.run(runs.alone_in_a_group).values():
        assert ours == stock
        assert stock[1] == {"barrier": 12, "allgather": 14}
