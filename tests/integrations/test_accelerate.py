"""accelerate's Accelerator combines dicts that differ between ranks by key after `install`; stock does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddpstats.integrations import accelerate
from ddpstats.testing import RankPool
from tests import programs
from tests.integrations.window_adds import close, expected
from tests.needs import Late, needs

pytestmark = pytest.mark.library
needs("accelerate")
runs: Any = Late("tests.integrations.accelerate_runs")


F32, F64 = "float32", "float64"


def same(per_rank: list[Any]) -> Any:
    assert all(each == per_rank[0] for each in per_rank)
    return per_rank[0]


def test_documented_examples_are_the_same_as_in_stock(two_ranks: RankPool) -> None:
    stock = two_ranks.run(runs.documented, False).values()
    ours = two_ranks.run(runs.documented, True).values()
    assert ours == stock
    assert ours[0][:2] == [("int64", [0, 1]), ("int64", [4, 6])]
    assert ours[0][2] == ("int64", list(range(9)))


@pytest.mark.parametrize(
    ("case", "stock", "ours"),
    [
        (
            "another order",
            [
                ("dict", [("a", (F32, 21.0)), ("b", (F32, 12.0))]),
                ("dict", [("a", (F32, [1.0, 20.0])), ("b", (F32, [2.0, 10.0]))]),
            ],
            [
                ("dict", [("a", (F32, 11.0)), ("b", (F32, 22.0))]),
                ("dict", [("a", (F32, [1.0, 10.0])), ("b", (F32, [2.0, 20.0]))]),
            ],
        ),
        (
            "other keys",
            ("dict", [("a", (F32, 11.0)), ("b", (F32, 32.0))]),
            ("dict", [("a", (F32, 11.0)), ("b", (F32, 2.0)), ("c", (F32, 30.0))]),
        ),
        (
            "numbers",
            ("list", ["loss", "acc", "loss", "acc"]),
            ("dict", [("loss", ("float64", [1.0, 2.0])), ("acc", ("float64", [0.5, 0.5]))]),
        ),
    ],
)
def test_dicts_that_differ_are_combined_by_key_and_not_as_in_stock(
    two_ranks: RankPool, case: str, stock: Any, ours: Any
) -> None:
    assert two_ranks.run(runs.dicts_that_differ, case, False).values()[0] == stock
    combined = two_ranks.run(runs.dicts_that_differ, case, True).values()
    assert [sorted_keys(rank) for rank in combined] == [sorted_keys(ours)] * 2


def sorted_keys(tree: Any) -> Any:
    """Return what `runs.plain` gives, with the keys of dicts sorted."""
    if isinstance(tree, list):
        return [sorted_keys(item) for item in tree]
    return ("dict", sorted(tree[1])) if tree[0] == "dict" else tree


def test_keys_that_are_no_texts_are_matched(two_ranks: RankPool) -> None:
    assert two_ranks.run(runs.keys_that_are_no_texts).values() == [[[1.0] * 2, [5.0] * 2, [10.0] * 2, [7.0]]] * 2


def test_tensors_without_keys_are_gathered_by_accelerate_itself(two_ranks: RankPool) -> None:
    """On its group, and so on its device: with NCCL, of which this knows nothing, nothing comes to the CPU."""
    ours = two_ranks.run(runs.tensors_without_keys, True).values()
    assert ours == two_ranks.run(runs.tensors_without_keys, False).values()
    for results, everywhere, on_accelerates_group in ours:
        assert results[0] == ("tuple", [("float32", [0.0, 1.0]), ("int64", [0, 10])])
        assert everywhere == on_accelerates_group == 9


def test_other_objects_are_gathered_as_the_error_says(two_ranks: RankPool) -> None:
    for error, advised, as_object in two_ranks.run(runs.other_objects).values():
        assert error[:3] == ("InvalidStats", (0, 1), "a")
        assert "an object of type str; leaves must be dense tensors or numbers. For other objects call " in error[3]
        assert "accelerate.utils.gather_object([tree]), which returns a list of every rank's tree" in error[3]
        assert advised == [{"a": "x0"}, {"a": "x1"}]
        assert as_object == ["a", "a"]  # of use_gather_object=True, which is for lists


def test_three_ranks_hold_the_union_each_key_over_its_holders(three_ranks: RankPool) -> None:
    per_rank = three_ranks.run(runs.on_three_ranks).values()
    # What a rank lacked itself is in plain containers.
    lacked = [rank.pop("lacked a namedtuple") for rank in per_rank]
    pair = [("float32", 2.0), 4]
    assert lacked == [("dict", [("p", ("tuple", pair))])] + [("dict", [("p", ("Pair", pair))])] * 2
    mixed = {name: [rank.pop(name) for rank in per_rank] for name in ("nested", "containers")}
    rest = same(per_rank)

    xyz = {"sum": (4.0, 8.0, 4.0), "mean": (2.0, 4.0, 4.0), "max": (3.0, 6.0, 4)}
    for kind, (z, y, x) in xyz.items():
        x_there = (F32, x) if kind == "mean" else ("int64", int(x))  # a mean of integers is no integer
        assert dict(rest["keys"][1])[kind] == ("dict", [("z", (F32, z)), ("y", (F32, y)), ("x", x_there)])
    assert rest["gathered keys"] == ("dict", [("z", (F32, [1, 3])), ("y", (F32, [2, 6])), ("x", ("int64", [4]))])

    numbers = {kind: dict(pairs[1]) for kind, pairs in rest["numbers"][1]}
    assert numbers == {
        "sum": {"n": 9, "f": 2.0, "b": 1},
        "mean": {"n": 3.0, "f": 1.0, "b": 0.5},
        "max": {"n": 6, "f": 1.5, "b": True},
    }
    types = {kind: [type(value) for value in by_key.values()] for kind, by_key in numbers.items()}
    assert types == {"sum": [int, float, int], "mean": [float] * 3, "max": [int, float, bool]}
    listed = ("dict", [("n", ("int64", [1, 2, 6])), ("f", (F64, [0.5, 1.5])), ("b", ("bool", [True, False]))])
    assert rest["gathered numbers"] == listed

    assert same(mixed["nested"]) == (
        "dict",
        [
            ("d", ("dict", [("a", (F32, 1.0)), ("b", ("tuple", [(F32, 7.0)]))])),
            ("l", ("list", [(F32, 4.0), ("dict", [("q", 5)])])),
        ],
    )
    assert same(mixed["containers"]) == ("Output", [("a", (F32, 2.0)), ("b", (F32, 3.0))])
    assert rest["rows"] == ("dict", [("p", (F32, [[1.0] * 3, [1.0] * 3, [2.0] * 3]))])
    assert rest["no samples"] == ("dict", [("p", ("int64", [[1, 1]]))])
    assert rest["large"] == ("dict", [("x", ("int64", 2**62 + 2))])
    assert rest["number and tensor"] == ("dict", [("x", (F64, 6.5))])
    assert rest["low precision"] == ("dict", [("x", ("bfloat16", [258.0]))])  # 256 + 1 is 256 in bfloat16


def test_the_last_batch_loses_its_copies_but_no_numbers(two_ranks: RankPool) -> None:
    for batches in two_ranks.run(runs.last_batch).values():
        assert [dict(keys)["x"][1] for _, keys in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
        assert [dict(keys)["loss"][1] for _, keys in batches] == [[0, 2], [4, 6], [8, 1]]
        assert [[key for key, _ in keys] for _, keys in batches] == [["loss", "x", "first"]] * 3


def test_a_result_is_on_the_ranks_device_or_on_the_accelerators() -> None:
    """Values that a rank lacked or passed as numbers are on the accelerator; no public call shows it without a GPU."""
    combined = {"own": torch.ones(1), "number": torch.ones(1), "lacked": torch.ones(1)}
    result = accelerate._like({"number": 1, "own": torch.zeros(1)}, combined, torch.device("meta"))
    assert {key: value.device.type for key, value in result.items()} == {
        "own": "cpu",
        "number": "meta",
        "lacked": "meta",
    }


def test_results_share_no_memory_with_what_was_passed(two_ranks: RankPool) -> None:
    assert two_ranks.run(runs.memory_of_results).values() == [[[1.0, 1.0], False, False]] * 2


def test_conflicts_are_the_same_error_on_every_rank(two_ranks: RankPool) -> None:
    errors = same(two_ranks.run(runs.conflicts).values())
    assert errors.pop("afterwards")[3] == "{'a': 2}"
    assert {case: value[:3] for case, value in errors.items()} == {
        "shape": ("SchemaConflict", (0, 1), "m/a"),
        "trailing": ("SchemaConflict", (0, 1), "x[0]"),
        "leaf": ("SchemaConflict", (0, 1), "a"),
        "object": ("InvalidStats", (1,), "a"),
        "calls": ("ProtocolMismatch", (0, 1), None),
        "reductions": ("ProtocolMismatch", (0, 1), None),
    }
    assert errors["shape"][3] == (
        "accelerate.reduce, 'sum': ranks of the default group of 2 ranks hold what cannot be combined under 'm/a':\n"
        "  rank 0: a tensor of shape (2,)\n"
        "  rank 1: a tensor of shape (3,)\n"
        "Give each key one structure and fitting shapes on all ranks, or use other keys."
    )
    assert "rank 0: a tensor of shape ()\n  rank 1: a dict\n" in errors["leaf"][3]
    assert "rank 1 at 'a': an object of type NoneType; leaves must be dense tensors or numbers" in errors["object"][3]


def test_in_accelerates_debug_mode_a_conflict_is_accelerates_own_error_too(two_ranks: RankPool) -> None:
    text, is_accelerates = same(two_ranks.run(runs.conflict_in_debug_mode).values())
    assert is_accelerates
    assert "under 'a':\n  rank 0: a tensor of shape (2,)\n  rank 1: a tensor of shape (3,)\n" in text


def test_collectives_do_not_grow_with_the_keys(two_ranks: RankPool) -> None:
    assert two_ranks.run(runs.counts, True).values() == [[(4, 0), (4, 0)]] * 2
    assert two_ranks.run(runs.counts, False).values() == [[(2, 2), (80, 80)]] * 2


def test_a_reduction_is_written_to_the_trackers(two_ranks: RankPool) -> None:
    rows, of_rank_1 = two_ranks.run(runs.reduced_for_trackers).values()
    assert rows == [(3, {"loss": 0.5, "only0": 1.0, "only1": 1.0})]
    assert of_rank_1 == []  # accelerate's trackers write on one rank


def test_a_window_is_written_to_the_trackers(two_ranks: RankPool) -> None:
    """A flush is one collective each ten steps; ranks exchange new keys in one more, where there are any."""
    (rows, collectives), (of_rank_1, also) = two_ranks.run(runs.windowed).values()
    assert of_rank_1 == []
    assert collectives == also
    assert collectives[1:] == [1, 1, 1]
    assert [step for step, _ in rows] == [10, 20, 30, 34]
    for (_, row), first in zip(rows, (0, 20, 40, 60), strict=True):
        assert close(row, expected(first, min(first + 20, 68)))


def test_a_single_process_has_accelerates_own_functions() -> None:
    """The test starts a process, since accelerate's state belongs to the process."""
    code = """
import torch, ddpstats.integrations.accelerate as ours
from accelerate import Accelerator
ours.install()
accelerator = Accelerator(cpu=True)
tree = {"a": torch.ones(2)}
assert accelerator.gather(tree) is tree
assert accelerator.gather_for_metrics({"loss": 1.0}) == {"loss": 1.0}
assert accelerator.reduce(tree)["a"].tolist() == [1, 1]
try:
    accelerator.reduce({"loss": 1.0})
except TypeError as error:
    print(error)
"""
    done = programs.run(["-c", code], environ=programs.environ_of())
    assert done.returncode == 0, done.stderr
    assert "Unsupported types (<class 'float'>)" in done.stdout
