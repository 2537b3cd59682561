"""`ddpstats compare STEP` names the rank whose parameters or collective results are not those of the others."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.dump.hand_made import collective, forward, tensor, write_rank
from tests.dump.verbs import compare, compare_json


def module(weight: float, batch: float) -> tuple[str, Any]:
    entry = forward(tensor(batch), out=tensor(batch * weight), parameters={"weight": tensor(weight, 1.0)})
    return "Module.fc.Linear.forward.0", entry


def numbered(api: str, number: int, result: float | None, group: Sequence[int], **kwargs: int) -> tuple[str, Any]:
    """Return an entry of a collective. ``number`` counts the entries of the dump, a ``seq`` the calls of the group."""
    out = [] if result is None else tensor(result)
    entry = collective(tensor(float(number)), out=out, ranks=group, group=f"{sum(group):08x}", **kwargs)
    return f"Distributed.{api}.{number}.forward", entry


def step(path: Path, *ranks: Sequence[tuple[str, Any]], **more: Any) -> Path:
    for rank, entries in enumerate(ranks):
        write_rank(path / "step0" / f"rank{rank}", entries, **more)
    return path / "step0"


def compare_one(*words: object) -> tuple[int, dict[str, Any]]:
    """Return the status and the comparison of the ranks."""
    status, document = compare_json(*words)
    (comparison,) = document["comparisons"]
    return status, comparison


def test_different_batches_with_equal_parameters_have_status_0(tmp_path: Path) -> None:
    equal = step(tmp_path / "equal", *([module(2.0, rank)] for rank in range(3)))
    assert compare_one(equal)[0] == 0
    assert "NOTHING DIFFERENT: 1 tensor in 3 ranks: 1 equal in all their stat" in compare(equal)[1]


def test_rank_that_differs_from_the_majority_is_named(tmp_path: Path) -> None:
    stacks = {"Module.fc.Linear.forward.0": ["File /t.py, line 3, in step,\n    model(x)"]}
    ranks = [[module(2.001 if rank == 2 else 2.0, rank)] for rank in range(4)]
    path = step(tmp_path, *ranks, stacks=stacks, parents={"Module.fc.Linear.forward.0": "Module.root.Net.forward.0"})
    status, report = compare_one(path)
    (row,) = report["rows"]
    assert (status, report["compared"]) == (1, {"statistics": 1})
    assert (row["names"]["rank 2"], row["path"]) == ("Module.fc.Linear.forward.0", "parameters.weight")
    assert row["culprits"] == ["rank 2"]
    text = compare(path)[1]
    assert "rank 2 differs from the majority; relative error Max 0.0005" in text
    assert re.search(r"^ +rank 2 +2.001 +1.0 +1.5005 ", text, re.MULTILINE)
    assert "inside Module.root.Net.forward.0" in text
    assert "File /t.py, line 3, in step, model(x)" in text
    assert compare_one(path, "--tolerance", "0.01")[0] == 0


def test_no_rank_is_named_without_a_majority(tmp_path: Path) -> None:
    for weights, words in (([2.0, 3.0], "rank 0 | rank 1"), ([2.0, 2.0, 3.0, 3.0], "rank 0, rank 1 | rank 2, rank 3")):
        path = step(tmp_path / str(len(weights)), *([module(weight, 1.0)] for weight in weights))
        assert f"no majority: {words}" in compare(path)[1]
        assert compare_one(path)[1]["rows"][0]["culprits"] == []


# -- ranks that differ by right ----------------------------------------------------------------------------------------


def tensor_parallel(rank: int, **more: float) -> list[tuple[str, Any]]:
    """The two ranks hold one copy of the model between them: each has a half of the weight, and the whole bias."""
    weight = more.get("weight", 2.0 + rank % 2)
    entry = forward(parameters={"weight": tensor(weight), "bias": tensor(1.0)})
    pair, copies = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
    reduced = [numbered("all_reduce", 0, 5.0 + rank // 2, pair), numbered("all_reduce", 1, 7.0 + rank % 2, copies)]
    return [("Module.fc.ColumnParallel.forward.0", entry), *reduced]


def test_ranks_under_tensor_parallelism_are_compared_with_those_of_the_same_part(tmp_path: Path) -> None:
    path = step(tmp_path / "right", *map(tensor_parallel, range(4)))
    text = compare(path)[1]
    assert "of 6 tensors in 4 ranks, 1 differ at all" in text, "all else is equal"
    assert "No majority in 1 of 1 row: rank 0, rank 2 | rank 1, rank 3" in text
    assert "compare those that hold the same parameters, with --ranks" in text
    for ranks in ("0,2", "1,3"):
        status, report = compare_one(path, "--ranks", ranks)
        assert (status, report["compared"], report["lacking"]) == (0, {"statistics": 3}, {})
    wrong = [*map(tensor_parallel, range(3)), tensor_parallel(3, weight=9.0)]
    path = step(tmp_path / "wrong", *wrong)
    assert compare_one(path, "--ranks", "0,2")[0] == 0
    assert compare_one(path, "--ranks", "1,3")[0] == 1


def test_stages_of_a_pipeline_are_compared_with_the_ranks_that_have_them(tmp_path: Path) -> None:
    def stage(rank: int, weight: float) -> list[tuple[str, Any]]:
        _, entry = module(weight, 1.0)
        return [(f"Module.stage{rank % 2}.Linear.forward.0", entry), numbered("send", 0, None, (0, 1, 2, 3))]

    path = step(tmp_path / "right", *(stage(rank, 2.0 + rank % 2) for rank in range(4)))
    status, report = compare_one(path)
    assert (status, report["compared"], report["lacking"]) == (0, {"statistics": 2}, {})
    assert report["left_out"] == {"entries with parameters, on the ranks that lack them": 2}
    path = step(tmp_path / "alone", *(stage(rank, 2.0) for rank in range(3)))
    status, report = compare_one(path)
    assert (status, report["compared"], [*report["left_out"].values()]) == (0, {"statistics": 1}, [2])


@pytest.mark.parametrize(("part", "whole"), [("S(0)", "R"), ({"Shard": {"dim": 0}}, {"Replicate": {}})])
def test_sharded_parameters_are_not_compared(tmp_path: Path, part: Any, whole: Any) -> None:
    """The second of each is how msprobe writes it."""

    def entries(rank: int, placement: Any) -> list[tuple[str, Any]]:
        weight = tensor(2.0 + rank, placements=[placement])
        return [("Module.fc.Linear.forward.0", forward(parameters={"weight": weight, "bias": tensor(1.0)}))]

    path = step(tmp_path / "sharded", entries(0, part), entries(1, part))
    status, report = compare_one(path)
    assert (status, report["compared"]) == (0, {"statistics": 1})
    assert "not compared: 1 sharded tensors, of which each rank holds another part" in compare(path)[1]
    assert compare_one(step(tmp_path / "whole", entries(0, whole), entries(1, whole)))[0] == 1


# -- collectives -------------------------------------------------------------------------------------------------------


def test_collectives_are_matched_within_their_group(tmp_path: Path) -> None:
    """Ranks 0 and 1 have one more all_reduce, so the numbers of the common ones differ; rank 2's end in reverse."""
    pair, everyone = (0, 1), (0, 1, 2)
    common = [(5.0, 6.0), (5.0, 6.0), (5.0, 6.5)]
    ranks = []
    for rank, (first, second) in enumerate(common):
        more = rank < 2
        entries = [numbered("all_reduce", 0, 9.0, pair)] if more else []
        both = [
            numbered("all_reduce", more + 0, first, everyone),
            numbered("all_reduce", more + 1, second, everyone),
        ]
        ranks.append([*entries, *(both if rank < 2 else both[::-1])])
    status, report = compare_one(step(tmp_path, *ranks))
    (row,) = report["rows"]
    assert (status, report["compared"]) == (1, {"statistics": 3})
    assert row["names"] == {f"rank {rank}": f"Distributed.all_reduce.{2 - rank // 2}.forward" for rank in range(3)}
    assert row["culprits"] == ["rank 2"]


def test_numbered_collectives_are_matched_by_their_number(tmp_path: Path) -> None:
    first = [numbered("all_reduce", seq, 10.0 + seq, (0, 1), seq=seq) for seq in range(4)]
    second = [numbered("all_reduce", seq - 1, 10.0 + seq, (0, 1), seq=seq) for seq in range(1, 4)]
    path = step(tmp_path, first, second)
    status, report = compare_one(path)
    assert (status, report["compared"], report["lacking"]) == (1, {"statistics": 3}, {"rank 1": 1})
    assert [row["verdict"]["message"] for row in report["rows"]] == ["rank 1 lacks this entry"]
    assert "1 entry not in rank 1" in compare(path)[1]


def test_results_that_differ_by_right_are_not_compared(tmp_path: Path) -> None:
    def entries(rank: int) -> list[tuple[str, Any]]:
        return [
            numbered("reduce_scatter", 0, rank, (0, 1)),
            numbered("all_to_all", 0, rank, (0, 1)),
            numbered("all_reduce", 0, None if rank else 3.0, (0, 1)),
        ]

    path = step(tmp_path, entries(0), entries(1))
    status, report = compare_one(path)
    assert (status, report["compared"], [*report["left_out"].values()]) == (2, {}, [1])
    assert "NOTHING TO COMPARE" in compare(path)[1]


def test_collective_of_a_group_without_the_rank_is_not_compared_with_that_of_its_members(tmp_path: Path) -> None:
    path = step(tmp_path / "all", *([numbered("all_reduce", 0, rank // 2, (0, 1))] for rank in range(3)))
    status, report = compare_one(path)
    assert (status, report["compared"], report["rows"]) == (0, {"statistics": 1}, [])
    path = step(tmp_path / "one", [module(1.0, 1.0)], [module(1.0, 1.0)], [numbered("all_reduce", 0, 1.0, (0, 1))])
    status, report = compare_one(path)
    assert (status, report["compared"], [*report["left_out"].values()]) == (0, {"statistics": 1}, [1, 1])


@pytest.mark.parametrize("group", [(7, 8), (0, 7)])
def test_group_without_the_rank_or_its_partners_is_left_out(group: Sequence[int], tmp_path: Path) -> None:
    path = step(tmp_path, *([numbered("all_reduce", 0, 1.0 + rank, group)] for rank in range(2)))
    (path / "rank5").mkdir()
    status, report = compare_one(path)
    assert (status, report["compared"], [*report["left_out"].values()]) == (2, {}, [1])
    text = compare(path)[1]
    assert "not compared: 1 collectives of which no other rank is compared" in text
    assert f"note: {path / 'rank5'} has no dump" in text


def test_rank_that_lacks_a_collective_is_named(tmp_path: Path) -> None:
    broadcast = numbered("broadcast", 0, 1.0, (0, 1, 2))
    path = step(tmp_path, [broadcast, module(1.0, 1.0)], [broadcast], [module(1.0, 1.0)])
    status, report = compare_one(path)
    (row,) = report["rows"]
    assert (status, row["culprits"], row["verdict"]["message"]) == (1, ["rank 2"], "rank 2 lacks this entry")


# -- reports -----------------------------------------------------------------------------------------------------------


def test_table_and_page_of_ranks(tmp_path: Path) -> None:
    path = step(tmp_path, *([module(weight, 1.0)] for weight in (1.0, 1.0, 3.0)))
    compare(path, "--csv", tmp_path / "t.csv", "--html", tmp_path / "t.html")[1]
    (row,) = csv.DictReader((tmp_path / "t.csv").read_text().splitlines())
    assert (row["NPU max"], row["Bench max"], row["Result"]) == ("3.0", "1.0", "Warning")
    assert row["Err_message"].startswith("rank 2 differs from the majority")
    assert "rank 2 differs from the majority" in (tmp_path / "t.html").read_text()
