"""torcheval's real toolkit on gloo ranks: what stock makes of states that differ, and what `install` does."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
from typing import Any

import pytest

from ddpstats.integrations import torcheval
from ddpstats.testing import RankPool
from tests.needs import imported, needs

needs("torcheval")
toolkit: Any = imported("torcheval.metrics.toolkit")
runs: Any = importlib.import_module("tests.integrations.torcheval_runs")

NAMES = ("get_synced_metric", "get_synced_metric_collection", "sync_and_compute_collection", "sync_and_compute")


def test_documented_metrics_are_the_same_to_the_bit(three_ranks: RankPool) -> None:
    stock, ours = (three_ranks.run(runs.results_of_documented, install).values() for install in (False, True))
    assert ours == stock
    assert len(ours[0]["alone"]) == 11
    assert ours[0]["alone"]["sum"] != ours[0]["local"]["sum"]["weighted_sum"]  # something was merged


def test_keys_of_a_dict_state(two_ranks: RankPool) -> None:
    stock = two_ranks.run(runs.dict_keys_differ, False).values()
    assert stock == [({"a": 11.0, "b": 32.0},) * 2, ({"a": 11.0, "c": 32.0},) * 2]
    assert two_ranks.run(runs.dict_keys_differ, True).values() == [({"a": 11.0, "b": 2.0, "c": 30.0},) * 2] * 2


def test_members_of_a_collection(two_ranks: RankPool) -> None:
    stock = two_ranks.run(runs.members_differ, False).values()
    assert stock == [{"loss": 2.0, "acc_a": 15.0}, {"loss": 2.0, "acc_b": 15.0}]
    ours = two_ranks.run(runs.members_differ, True).values()
    assert ours == [{"loss": 2.0, "acc_a": 10.0, "acc_b": 20.0}] * 2


def test_members_that_only_others_have(two_ranks: RankPool, three_ranks: RankPool) -> None:
    f64 = "torch.float64"
    for pool, size in ((two_ranks, 2), (three_ranks, 3)):
        found, *others = pool.run(runs.members_of_others).values()
        assert others == [found] * (size - 1)
        last = size - 1
        assert found["order"] == ["mean", "own class", "list", "pair"]
        assert found["results"] == {
            "mean": (f64, last / 2),
            "own class": {(1, "x"): 1.0, "k": 2.0},
            "list": [("torch.float32", 5.0)],
            "pair": (1.0, 2.0),
        }
        assert found["of the others"] == {"all": (f64, 1.0), "some": (f64, (1 + last) / 2)}
        assert found["states"] == {
            "all": {"weighted_sum": (f64, float(size)), "weights": (f64, float(size))},
            "some": {"weighted_sum": (f64, sum(range(size))), "weights": (f64, float(last))},
        }
        assert found["collectives"] == [1, 2]


def test_a_metric_of_others_takes_no_values(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(runs.uses_of_a_metric_elsewhere).values()
    assert first == ["MetricElsewhere", 3.0, 3.0, "this metric is on other ranks: it shows what they have merged"]
    assert second == ["Mean", 3.0, 3.0, "4.0"]


def test_a_result_that_cannot_be_had_is_an_error_on_every_rank(two_ranks: RankPool, three_ranks: RankPool) -> None:
    for pool, size in ((two_ranks, 2), (three_ranks, 3)):
        ranks = pool.run(runs.members_that_give_nothing).values()
        last = (size - 1,)
        for rank, found in enumerate(ranks):
            raised, odd, states, here, afterwards = found
            assert raised == ("InvalidStats", last, "only", raised[3])
            assert odd == ("InvalidStats", last, "only", odd[3])
            assert raised[3] == (
                f"torcheval.get_synced_metric_collection: member 'only', which only rank {last[0]} of the default "
                f"group of {size} ranks holds, gives no result: ZeroDivisionError: mine"
            )
            assert odd[3].endswith("of type object, which cannot be sent to other ranks")
            assert states == {"state": 1.0}
            assert here == ("ZeroDivisionError: mine" if rank == last[0] else f"InvalidStats: {raised[3]}")
            assert afterwards == last[0] / 2


def test_lists_numbers_and_ranks_without_data(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(runs.more_that_differs).values()
    f32 = "torch.float32"
    assert first["empty list"] == second["empty list"] == (f32, [1.0, 2.0, 3.0])
    assert first["both empty"] == second["both empty"] == (f32, [])
    three = [(f32, []), (f32, [1.0]), (f32, [1.0, 1.0])]
    assert (first["lists"], second["lists"]) == (
        [*three[:1], *three],
        [*three, *three[:1]],
    )  # a rank's own state comes first
    assert first["not updated"] == second["not updated"] == (f32, [1.0, 1.0, 1.0])
    assert first["int and float"] == second["int and float"] == 3.5
    assert first["cat of int and float"] == (f32, [1.0, 2.5])
    assert second["cat of int and float"] == (f32, [2.5, 1.0])
    assert float(first["no members"]["only"]) == float(second["no members"]["only"]) == 7.0
    assert first["odd keys"] == second["odd keys"] == {(1, "x"): 1.0, 2.5: 5.0, None: 5.0}
    assert first["infinity"] == second["infinity"] == float("inf")


def test_subgroups_and_torchevals_rules_of_return(three_ranks: RankPool) -> None:
    outside, one, two = three_ranks.run(runs.in_subgroups, True).values()
    warned = ["World size is 1, and metric(s) not synced. returning the input metric(s)."]
    assert outside == ["The current process is not part of the process group", True, True, warned]
    both = [("torch.float32", 2.0)]
    assert one == two == [{"mean": 1.5, "own1": 5.0, "own2": 10.0}, both, True, True, warned]


def test_an_empty_list_in_a_subgroup(three_ranks: RankPool) -> None:
    stock = three_ranks.run(runs.list_in_a_subgroup, False).values()
    assert stock == [None] + ["cannot unpack non-iterable NoneType object"] * 2
    assert three_ranks.run(runs.list_in_a_subgroup, True).values() == [None] + [[("torch.float32", 2.0)]] * 2


def test_conflicts_are_raised_alike_on_every_rank(two_ranks: RankPool) -> None:
    found, other = two_ranks.run(runs.conflicts).values()
    assert found == other
    assert found.pop("afterwards")[3] == "0.5"
    assert found.pop("own error")[:2] == ("InvalidStats", (1,))
    assert found.pop("key")[:2] == found.pop("name")[:2] == ("InvalidStats", (1,))
    assert found.pop("other call")[0] == "ProtocolMismatch"
    paths = {
        "tensor, list": "state",
        "tensor, number": "state",
        "list, dict": "state",
        "list of other ndim": "inputs",
        "shape": "acc/state",
        "classes": "acc/confusion_matrix",
        "kind": "n/weighted_sum",
        "dict value": "d/state/k",
        "metric": "loss",
        "states": "w/sum_squared_error",
    }
    assert {case: (kind, ranks, path) for case, (kind, ranks, path, _) in found.items()} == {
        case: ("SchemaConflict", (0, 1), path) for case, path in paths.items()
    }
    assert found["classes"][3] == (
        "torcheval.get_synced_metric_collection: ranks of the default group of 2 ranks hold what cannot be merged "
        "under 'acc/confusion_matrix':\n"
        "  rank 0: a tensor of shape (3, 3), float\n"
        "  rank 1: a tensor of shape (4, 4), float\n"
        "merging failed on ranks 0, 1, there with RuntimeError: The size of tensor a (3) must match the size of tensor "
        "b (4) at non-singleton dimension 1\n"
        "Make the metric with the same class and arguments on all ranks and update it with values of one kind, or give "
        "it another name. Nothing was merged."
    )
    assert "rank 0: a list of tensors\n  rank 1: a dict of tensors" in found["list, dict"][3]
    assert "rank 0: a torcheval.metrics.aggregation.mean.Mean" in found["metric"][3]
    assert "rank 0: no such state\n  rank 1: a tensor" in found["states"][3]
    assert "with 1 dimensions\n  rank 1: a list of tensors with 2 dimensions" in found["list of other ndim"][3]


def test_conflict_names_global_ranks(three_ranks: RankPool) -> None:
    outside, one, two = three_ranks.run(runs.conflict_in_a_group).values()
    assert outside == ((), None, "")
    assert one == two
    assert one[:2] == ((1, 2), "state")
    assert "rank 1 (group rank 0): a number\n  rank 2 (group rank 1): a tensor" in one[2]


def test_a_metrics_own_error_stays_its_own(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(runs.error_of_the_metric).values()
    assert (first[0], second[0]) == ("ZeroDivisionError: mine", "2.0")
    assert first[1] == second[1]
    assert "merging failed on rank 0, there with ZeroDivisionError: mine" in first[1]


def test_collectives_do_not_grow_with_the_states(two_ranks: RankPool) -> None:
    assert two_ranks.run(runs.counts, True).values() == [[(1, 0), (1, 0)]] * 2
    for one, forty in two_ranks.run(runs.counts, False).values():
        assert forty[1] == 40 * one[1] > 0


# -- install and uninstall --------------------------------------------------------------------------------------------


def test_the_very_objects_come_back() -> None:
    import torcheval.metrics as metrics

    before = {name: getattr(toolkit, name) for name in NAMES}
    state = metrics.Mean.merge_state
    torcheval.install()
    try:
        ours = {name: getattr(toolkit, name) for name in NAMES}
        torcheval.install()
        assert {name: getattr(toolkit, name) for name in NAMES} == ours
        assert [name for name in NAMES if ours[name] is not before[name]] == list(NAMES[:3])
        assert ours["get_synced_metric"].__doc__ == before["get_synced_metric"].__doc__
    finally:
        torcheval.uninstall()
    torcheval.uninstall()
    assert all(getattr(toolkit, name) is before[name] for name in NAMES)
    assert metrics.Mean.merge_state is state


def test_a_version_without_what_is_relied_on_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = toolkit.get_synced_metric
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.8")
    monkeypatch.delattr(toolkit, "_get_world_size")
    with pytest.warns(UserWarning, match=r"torcheval 0\.0\.8 has no torcheval\.metrics\.toolkit\._get_world_size"):
        torcheval.install()
    assert toolkit.get_synced_metric is before
    monkeypatch.undo()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.8")
    torcheval.install()
    assert toolkit.get_synced_metric is not before  # the number alone tells nothing
    torcheval.uninstall()


def test_other_signatures_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_synced_metric(metric: Any) -> Any:
        return metric

    monkeypatch.setattr(toolkit, "get_synced_metric", get_synced_metric)
    with pytest.warns(UserWarning, match=r"has get_synced_metric\(metric\) where .*\(metric, process_group\) is"):
        torcheval.install()
    assert toolkit.get_synced_metric is get_synced_metric


def test_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    before = toolkit.get_synced_metric
    monkeypatch.setenv("DDPSTATS_DISABLE", "1")
    torcheval.install()
    assert toolkit.get_synced_metric is before


def test_importing_the_integration_does_not_import_the_library() -> None:
    code = "import sys, ddpstats.integrations.torcheval; sys.exit('torcheval' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
