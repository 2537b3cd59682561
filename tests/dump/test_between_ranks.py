"""`ddpstats compare STEP` names the rank whose parameters or collective results are not those of the others."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpstats.cli import main
from tests.dump.hand_made import forward, tensor, write_rank


def module(weight: float, batch: float) -> tuple[str, Any]:
    entry = forward([tensor(batch)], [tensor(batch * weight)], parameters={"weight": tensor(weight, 1.0)})
    return "Module.fc.Linear.forward.0", entry


def collective(api: str, number: int, result: float | None, group: Sequence[int]) -> tuple[str, Any]:
    leaf = {"type": "torch.ProcessGroup", "group_ranks": list(group), "group_id": f"{sum(group):08x}"}
    entry = forward([tensor(float(number))], [] if result is None else [tensor(result)])
    return f"Distributed.{api}.{number}.forward", {**entry, "input_kwargs": {"group": leaf}}


def numbered(seq: int, result: float, position: int) -> tuple[str, Any]:
    """Return an entry of our own; ``position`` counts the entries of the dump, ``seq`` the calls of the group."""
    name, entry = collective("all_reduce", position, result, (0, 1))
    return name, {**entry, "input_kwargs": {**entry["input_kwargs"], "seq": {"type": "int", "value": seq}}}


def step(path: Path, *ranks: Sequence[tuple[str, Any]], **more: Any) -> Path:
    for rank, entries in enumerate(ranks):
        write_rank(path / "step0" / f"rank{rank}", entries, **more)
    return path / "step0"


def compare(*words: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = main(["compare", *map(str, words), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert isinstance(report, dict)
    return status, report


def text_of(*words: object, capsys: pytest.CaptureFixture[str]) -> str:
    main(["compare", *map(str, words)])
    out, err = capsys.readouterr()
    return out + err


def test_different_batches_with_equal_parameters_have_status_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    equal = step(tmp_path / "equal", *([module(2.0, rank)] for rank in range(3)))
    assert compare(equal, capsys=capsys)[0] == 0
    assert "NOTHING DIFFERENT: 1 parameter and 0 results of collectives are equal" in text_of(equal, capsys=capsys)


def test_rank_that_differs_from_the_majority_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stacks = {"Module.fc.Linear.forward.0": ["File /t.py, line 3, in step,\n    model(x)"]}
    ranks = [[module(2.5 if rank == 2 else 2.0, rank)] for rank in range(4)]
    path = step(tmp_path, *ranks, stacks=stacks, parents={"Module.fc.Linear.forward.0": "Module.root.Net.forward.0"})
    status, report = compare(path, capsys=capsys)
    assert status == 1
    assert (report["compared"], report["different"]) == (1, 1)
    assert report["first"]["name"] == "Module.fc.Linear.forward.0.parameters.weight"
    assert report["first"]["culprit_ranks"] == [2]
    text = text_of(path, capsys=capsys)
    assert "rank 2 differs from the majority" in text
    assert "rank 2: torch.float32 [2] Max 2.5" in text
    assert "inside Module.root.Net.forward.0" in text
    assert "File /t.py, line 3, in step, model(x)" in text


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([2.0, 3.0], "two ranks differ: which of them is wrong cannot be told"),
        ([2.0, 2.0, 3.0, 3.0], "no values are those of more than half of the ranks"),
    ],
)
def test_no_rank_is_named_without_a_majority(
    weights: list[float], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = step(tmp_path, *([module(weight, 1.0)] for weight in weights))
    assert words in text_of(path, capsys=capsys)
    assert compare(path, capsys=capsys)[1]["first"]["culprit_ranks"] == []


def test_collectives_are_matched_within_their_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks 0 and 1 have one more all_reduce, so the numbers of the common ones differ; rank 2's end in reverse."""
    pair, everyone = (0, 1), (0, 1, 2)
    common = [(5.0, 6.0), (5.0, 6.0), (5.0, 6.5)]
    ranks = []
    for rank, (first, second) in enumerate(common):
        more = rank < 2
        entries = [collective("all_reduce", 0, 9.0, pair)] if more else []
        both = [
            collective("all_reduce", more + 0, first, everyone),
            collective("all_reduce", more + 1, second, everyone),
        ]
        ranks.append([*entries, *(both if rank < 2 else both[::-1])])
    status, report = compare(step(tmp_path, *ranks), capsys=capsys)
    assert (status, report["compared"], report["different"]) == (1, 3, 1)
    assert report["first"]["name"] == "Distributed.all_reduce.2.forward.output.0"
    assert report["first"]["culprit_ranks"] == [2]


def test_numbered_collectives_are_matched_by_their_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = [numbered(seq, 10.0 + seq, seq) for seq in range(4)]
    second = [numbered(seq, 10.0 + seq, seq - 1) for seq in range(1, 4)]
    path = step(tmp_path, first, second)
    status, report = compare(path, capsys=capsys)
    assert (status, report["compared"], report["different"], report["not_on_every_rank"]) == (1, 3, 0, 1)
    assert [divergence["missing_ranks"] for divergence in report["divergences"]] == [[1]]
    assert "3 results of collectives, 0 differ between ranks 0, 1 of" in text_of(path, capsys=capsys)
    assert "1 entry not on every rank" in text_of(path, capsys=capsys)


def test_sharded_parameters_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def entries(rank: int, placement: str) -> list[tuple[str, Any]]:
        weight = tensor(2.0 + rank, placements=[placement])
        return [("Module.fc.Linear.forward.0", forward(parameters={"weight": weight, "bias": tensor(1.0)}))]

    path = step(tmp_path / "sharded", entries(0, "S(0)"), entries(1, "S(0)"))
    status, report = compare(path, capsys=capsys)
    assert (status, report["compared"], report["sharded"]) == (0, 1, 1)
    assert "1 sharded tensor was not compared: every rank has a part of its own" in text_of(path, capsys=capsys)
    assert compare(step(tmp_path / "whole", entries(0, "R"), entries(1, "R")), capsys=capsys)[0] == 1


def test_json_is_legal_and_has_the_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = step(tmp_path, [module(float("inf"), 1.0)], [module(1.0, 1.0)])
    (path / "rank0" / "stack.json").write_text("[")
    assert main(["compare", str(path), "--json"]) == 1
    out = capsys.readouterr().out
    assert "Infinity" not in out.replace('"Infinity"', "")
    assert "stack.json" in json.loads(out)["notes"][0]


def test_results_that_differ_by_right_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def entries(rank: int) -> list[tuple[str, Any]]:
        return [
            collective("reduce_scatter", 0, rank, (0, 1)),
            collective("all_to_all", 0, rank, (0, 1)),
            collective("all_reduce", 0, None if rank else 3.0, (0, 1)),
        ]

    path = step(tmp_path, entries(0), entries(1))
    status, report = compare(path, capsys=capsys)
    assert (status, report["compared"], report["skipped"]) == (2, 0, 1)
    assert "NOTHING TO COMPARE" in text_of(path, capsys=capsys)


def test_report_says_what_was_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = step(tmp_path, *([collective("all_reduce", 0, 1.0, (0, 1, 5))] for _ in range(2)), level="L1")
    (path / "rank5").mkdir()
    text = text_of(path, capsys=capsys)
    assert "0 parameters and 1 result of collectives are equal" in text
    assert "no parameters in these dumps (level L1): use level L0 or mix" in text
    assert "rank5 has no dump" in text
    assert "groups have ranks of which no dump is here: rank 5" in text
    mix = step(tmp_path / "mix", *([collective("all_reduce", 0, 1.0, (0, 1))] for _ in range(2)))
    assert "no parameters were compared (data_mode, scope or list left them out" in text_of(mix, capsys=capsys)
    report = compare(path, capsys=capsys)[1]
    assert (report["compared_parameters"], report["compared_results"]) == (0, 1)
    assert (report["ranks_without_dump"], report["ranks_of_groups_without_dump"]) == (["rank5"], [5])


@pytest.mark.parametrize("group", [(7, 8), (0, 7)])
def test_group_without_the_rank_or_its_partners_is_skipped(
    group: Sequence[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = step(tmp_path, *([collective("all_reduce", 0, 1.0 + rank, group)] for rank in range(2)))
    status, report = compare(path, capsys=capsys)
    assert (status, report["verdict"], report["skipped"]) == (2, "nothing to compare", 2 - group.count(0))


def test_rank_that_lacks_an_entry_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broadcast = collective("broadcast", 0, 1.0, (0, 1, 2))
    path = step(tmp_path, [broadcast, module(1.0, 1.0)], [broadcast], [module(1.0, 1.0)])
    status, report = compare(path, capsys=capsys)
    assert status == 1
    assert [divergence["verdict"] for divergence in report["divergences"]] == [
        "rank 2 lacks this entry",
        "rank 1 lacks this entry",
    ]


def test_table_and_page_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = step(tmp_path, *([module(weight, 1.0)] for weight in (1.0, 1.0, 3.0)))
    text_of(path, "--csv", tmp_path / "t.csv", "--html", tmp_path / "t.html", capsys=capsys)
    rows = list(csv.DictReader((tmp_path / "t.csv").read_text().splitlines()))
    assert [(row["Rank"], row["Max"], row["Differs"]) for row in rows] == [
        ("0", "1.0", "False"),
        ("1", "1.0", "False"),
        ("2", "3.0", "True"),
    ]
    assert "rank 2 differs from the majority" in (tmp_path / "t.html").read_text()
