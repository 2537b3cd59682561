"""accelerate's real Accelerator on gloo ranks: what stock makes of dicts that differ, and what `install` does."""

from __future__ import annotations

import importlib
import importlib.metadata
import math
import subprocess
import sys
from typing import Any

import pytest
import torch

from ddpstats.integrations import accelerate
from ddpstats.testing import RankPool
from tests.integrations.window_adds import close, expected
from tests.needs import imported, needs

needs("accelerate")
operations: Any = imported("accelerate.utils.operations")
runs: Any = importlib.import_module("tests.integrations.accelerate_runs")


def same(per_rank: list[Any]) -> Any:
    assert all(each == per_rank[0] for each in per_rank)
    return per_rank[0]


def test_documented_examples_are_the_same(two_ranks: RankPool) -> None:
    stock = two_ranks.run(runs.documented, False).values()
    ours = two_ranks.run(runs.documented, True).values()
    assert ours == stock
    assert ours[0][:2] == [("int64", [0, 1]), ("int64", [4, 6])]
    assert ours[0][2] == ("int64", list(range(9)))
    assert two_ranks.run(runs.documented, True, debug=True).values() == stock


def test_another_order_of_keys(two_ranks: RankPool) -> None:
    wrong = [{"a": 21.0, "b": 12.0}, {"a": [1.0, 20.0], "b": [2.0, 10.0]}]
    assert two_ranks.run(runs.another_order, False).values()[0] == wrong
    right = [{"a": 11.0, "b": 22.0}, {"a": [1.0, 10.0], "b": [2.0, 20.0]}]
    assert two_ranks.run(runs.another_order, True).values() == [right, right]


def test_other_keys(two_ranks: RankPool) -> None:
    assert two_ranks.run(runs.other_keys, False).values() == [{"a": 11.0, "b": 32.0}, {"a": 11.0, "c": 32.0}]
    assert two_ranks.run(runs.other_keys, True).values() == [{"a": 11.0, "b": 2.0, "c": 30.0}] * 2


def test_a_dict_of_numbers(two_ranks: RankPool) -> None:
    assert two_ranks.run(runs.numbers, False).values() == [("list", ["loss", "acc", "loss", "acc"])] * 2
    ours = ("dict", [("loss", ("float64", [1.0, 2.0])), ("acc", ("float64", [0.5, 0.5]))])
    assert two_ranks.run(runs.numbers, True).values() == [ours, ours]


def test_three_ranks_agree(three_ranks: RankPool) -> None:
    per_rank = three_ranks.run(runs.on_three_ranks).values()
    nan, nans = [rank.pop("nan")[1][0][1] for rank in per_rank], []
    for (_, number), (_, (_, tensor)) in nan:
        nans += [number, tensor]
    assert len(nans) == 6
    assert all(map(math.isnan, nans))
    # What a rank lacked itself is in plain containers.
    lacked = [rank.pop("lacked a namedtuple") for rank in per_rank]
    pair = [("float32", 2.0), 4]
    assert lacked == [("dict", [("p", ("tuple", pair))])] + [("dict", [("p", ("Pair", pair))])] * 2
    mixed = {name: [rank.pop(name) for rank in per_rank] for name in ("nested", "containers")}
    rest = same(per_rank)

    f32, f64 = "float32", "float64"
    xyz = {"sum": (4.0, 8.0, 4.0), "mean": (2.0, 4.0, 4.0), "max": (3.0, 6.0, 4)}
    for kind, (z, y, x) in xyz.items():
        x_there = (f32, x) if kind == "mean" else ("int64", int(x))  # a mean of integers is no integer
        assert dict(rest["keys"][1])[kind] == ("dict", [("z", (f32, z)), ("y", (f32, y)), ("x", x_there)])
    assert rest["gathered keys"] == ("dict", [("z", (f32, [1, 3])), ("y", (f32, [2, 6])), ("x", ("int64", [4]))])

    numbers = {kind: dict(found[1]) for kind, found in rest["numbers"][1]}
    assert numbers == {
        "sum": {"n": 9, "f": 2.0, "b": 1},
        "mean": {"n": 3.0, "f": 1.0, "b": 0.5},
        "max": {"n": 6, "f": 1.5, "b": True},
    }
    types = {kind: [type(value) for value in found.values()] for kind, found in numbers.items()}
    assert types == {"sum": [int, float, int], "mean": [float] * 3, "max": [int, float, bool]}
    listed = ("dict", [("n", ("int64", [1, 2, 6])), ("f", (f64, [0.5, 1.5])), ("b", ("bool", [True, False]))])
    assert rest["gathered numbers"] == rest["metrics"] == listed

    assert same(mixed["nested"]) == (
        "dict",
        [
            ("d", ("dict", [("a", (f32, 1.0)), ("b", ("tuple", [(f32, 7.0)]))])),
            ("l", ("list", [(f32, 4.0), ("dict", [("q", 5)])])),
        ],
    )
    assert same(mixed["containers"]) == ("Output", [("a", (f32, 2.0)), ("b", (f32, 3.0))])
    assert rest["rows"] == ("dict", [("p", (f32, [[1.0] * 3, [1.0] * 3, [2.0] * 3]))])
    assert rest["no samples"] == ("dict", [("p", ("int64", [[1, 1]]))])
    assert rest["dtypes"] == ("dict", [("i", (f32, [1.5, 2.5])), ("u", ("uint8", 44))])  # wraps, as stock
    assert rest["mean of int tensors"] == ("dict", [("i", (f32, 1.0))])
    assert rest["number and tensor"] == ("dict", [("x", (f64, 6.5))])
    assert rest["big"] == ("dict", [("x", ("int64", 2**62 + 2))])
    assert rest["huge"] == ("dict", [("x", 3 * 10**30)])
    assert rest["default"] == ("defaultdict", [("a", 3), ("b", 3)])
    assert rest["batch"] == ("Batch", [("a", ("int64", [1, 2]))])
    assert rest["lengths"] == ("list", [2, 2])
    assert rest["low precision"] == ("dict", [("x", ("bfloat16", [258.0]))])  # 256 + 1 is 256 in bfloat16


def test_the_last_batch_loses_its_copies_but_no_numbers(two_ranks: RankPool) -> None:
    for found in two_ranks.run(runs.last_batch).values():
        assert [dict(keys)["x"][1] for _, keys in found] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
        assert [dict(keys)["loss"][1] for _, keys in found] == [[0, 2], [4, 6], [8, 1]]
        assert [[key for key, _ in keys] for _, keys in found] == [["loss", "x", "first"]] * 3


def test_devices() -> None:
    """On this rank's own device what it passed, on the accelerator's what it lacked or passed as a number."""
    combined = {"own": torch.ones(1), "number": torch.ones(1), "lacked": torch.ones(1)}
    found = accelerate._like({"number": 1, "own": torch.zeros(1)}, combined, torch.device("meta"))
    assert {key: value.device.type for key, value in found.items()} == {
        "own": "cpu",
        "number": "meta",
        "lacked": "meta",
    }


def test_results_share_no_memory(two_ranks: RankPool) -> None:
    assert two_ranks.run(runs.memory_of_its_own).values() == [[[1.0, 1.0], False, False]] * 2


def test_conflicts_are_raised_alike_on_every_rank(two_ranks: RankPool) -> None:
    found = same(two_ranks.run(runs.conflicts).values())
    assert found.pop("afterwards")[3] == "{'a': 2}"
    assert {case: value[:3] for case, value in found.items()} == {
        "shape": ("SchemaConflict", (0, 1), "m/a"),
        "number, vector": ("SchemaConflict", (0, 1), "a"),
        "trailing": ("SchemaConflict", (0, 1), "[0]"),
        "leaf": ("SchemaConflict", (0, 1), "a"),
        "list": ("SchemaConflict", (0, 1), None),
        "fields": ("SchemaConflict", (0, 1), None),
        "object": ("InvalidStats", (1,), "a"),
        "text": ("InvalidStats", (0,), "a[0]"),
        "calls": ("ProtocolMismatch", (0, 1), None),
        "reductions": ("ProtocolMismatch", (0, 1), None),
    }
    assert found["shape"][3] == (
        "accelerate.reduce, 'sum': ranks of the default group of 2 ranks hold what cannot be combined under 'm/a':\n"
        "  rank 0: a tensor of shape (2,)\n"
        "  rank 1: a tensor of shape (3,)\n"
        "Give each key one structure and fitting shapes on all ranks, or use different keys."
    )
    assert "rank 0: a tensor of shape ()\n  rank 1: a dict\n" in found["leaf"][3]
    assert "rank 0: a dict\n  rank 1: a list\n" in found["list"][3]
    assert "rank 0: a tuple\n  rank 1: a namedtuple (loss, acc)\n" in found["fields"][3]
    assert "rank 0: a number\n  rank 1: a tensor of shape (1,)\n" in found["number, vector"][3]
    assert "rank 1 of the default group of 2 ranks holds an object of type NoneType under 'a'" in found["object"][3]


def test_collectives_do_not_grow_with_the_keys(two_ranks: RankPool) -> None:
    assert two_ranks.run(runs.counts, True).values() == [[(2, 0), (2, 0)]] * 2
    assert two_ranks.run(runs.counts, False).values() == [[(2, 2), (80, 80)]] * 2


def test_a_window_into_its_trackers(two_ranks: RankPool) -> None:
    """One collective each ten steps; ranks tell each other of new keys in one more, where there are any."""
    (rows, collectives), (others, also) = two_ranks.run(runs.windowed).values()
    assert others == []  # accelerate's trackers write on one rank
    assert collectives == also
    assert collectives[1:] == [1, 1, 1]
    assert [step for step, _ in rows] == [10, 20, 30, 34]
    for (_, row), first in zip(rows, (0, 20, 40, 60), strict=True):
        wanted = expected(first, min(first + 20, 68))
        assert close(row, {f"train/{name}": value for name, value in wanted.items()})


# -- install and uninstall --------------------------------------------------------------------------------------------


def bound() -> dict[str, Any]:
    utils: Any = importlib.import_module("accelerate.utils")
    accelerator: Any = importlib.import_module("accelerate.accelerator")
    return {
        "utils.gather": utils.gather,
        "utils.reduce": utils.reduce,
        "accelerator.gather": accelerator.gather,
        "accelerator.reduce": accelerator.reduce,
        "operations.gather": operations.gather,
        "operations.reduce": operations.reduce,
        "gather_for_metrics": vars(accelerator.Accelerator)["gather_for_metrics"],
    }


def test_the_very_objects_come_back() -> None:
    before = bound()
    accelerate.install()
    try:
        ours = bound()
        accelerate.install()
        assert bound() == ours
        assert all(ours[name] is not before[name] for name in before)
        assert ours["utils.gather"] is ours["accelerator.gather"]
        assert ours["utils.gather"].__doc__ == before["utils.gather"].__doc__
    finally:
        accelerate.uninstall()
    accelerate.uninstall()
    after = bound()
    assert all(after[name] is before[name] for name in before)


def test_the_number_of_a_version_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = bound()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99.0")
    accelerate.install()
    assert bound() != before
    accelerate.uninstall()
    assert bound() == before


def test_other_signatures_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(tensor: Any, dim: int = 0) -> Any:
        return tensor

    monkeypatch.setattr(operations, "gather", gather)
    before = bound()
    with pytest.warns(UserWarning, match=r"has gather\(tensor, dim\) where gather\(tensor\) is relied on"):
        accelerate.install()
    assert bound() == before


def test_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    before = bound()
    monkeypatch.setenv("DDPSTATS_DISABLE", "1")
    accelerate.install()
    assert bound() == before


def test_a_single_process_is_accelerates_own() -> None:
    """In a process of its own, for accelerate's state is the process's."""
    code = """
import torch, ddpstats.integrations.accelerate as ours
from accelerate import Accelerator
ours.install()
one = Accelerator(cpu=True)
given = {"a": torch.ones(2)}
assert one.gather(given) is given
assert one.gather_for_metrics({"loss": 1.0}) == {"loss": 1.0}
assert one.reduce(given)["a"].tolist() == [1, 1]
try:
    one.reduce({"loss": 1.0})
except TypeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "Unsupported types (<class 'float'>)" in done.stdout


def test_importing_the_integration_does_not_import_the_library() -> None:
    code = "import sys, ddpstats.integrations.accelerate; sys.exit('accelerate' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_keys_of_any_type_and_deep_trees(two_ranks: RankPool) -> None:
    for own, lacked, nested in two_ranks.run(runs.keys_of_other_types).values():
        assert own == [[1.0, 1.0], [10.0, 10.0], [5.0, 5.0]]
        assert lacked == [[7.0]]
        assert nested == [0.0, 1.0]
