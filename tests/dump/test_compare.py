"""`ddpstats compare A B` finds the first difference of two dumps: exit status, text, JSON, CSV and HTML."""

from __future__ import annotations

import csv
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.dump.collecting import dumped
from tests.dump.hand_made import ONE, changed, forward, tensor, two, write_lines, write_rank
from tests.dump.verbs import compare, compare_json

HEADER = """NPU Name,Bench Name,NPU Dtype,Bench Dtype,NPU Tensor Shape,Bench Tensor Shape,NPU Requires_grad
Bench Requires_grad,Max diff,Min diff,Mean diff,L2norm diff,MaxRelativeErr,MinRelativeErr,MeanRelativeErr
NormRelativeErr,NPU max,NPU min,NPU mean,NPU l2norm,Bench max,Bench min,Bench mean,Bench l2norm
Requires_grad Consistent,Result,Err_message,NPU_Stack_Info"""


def dump_step(path: Path, *, change: float = 0.0, **config: Any) -> Path:
    """Dump a step of two layers, with ``change`` added to one weight of the second; return its directory."""
    torch.manual_seed(0)
    last = nn.Linear(4, 2)
    with torch.no_grad():
        last.weight.copy_(torch.arange(8.0).view(2, 4) / 8)
        last.weight[0, 0] += change
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), last)
    dumped(path, lambda: model(torch.ones(2, 3)).square().sum().backward(), model, "mix", **config)
    return path / "step0"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("saved")
    changes = {"plain": 0.0, "again": 0.0, "changed": 4.0, "slightly": 1e-4}
    return {name: dump_step(root / name, task="tensor", change=change) for name, change in changes.items()}


def test_changed_weight_is_found_with_module_and_line(tmp_path: Path) -> None:
    status, text = compare(dump_step(tmp_path / "a", change=4.0), dump_step(tmp_path / "b"))
    assert status == 1
    assert "DIFFERENT: of " in text
    assert "Functional.linear.1.forward  input.1  torch.float32 [2, 4]" in text
    assert "inside Module.2.Linear.forward.0" in text
    assert "test_compare.py, line" in text
    assert "first that differs:" in text


def test_equal_dumps_are_equal_in_their_statistics(tmp_path: Path) -> None:
    status, text = compare(*two(tmp_path, ONE, ONE))
    assert status == 0
    assert text.startswith("NOTHING DIFFERENT: 6 tensors in 1 rank: 6 equal in all their statistics (which")


def test_first_unequal_and_first_over_the_tolerance_are_named(tmp_path: Path) -> None:
    entries = changed(0, Mean=3.5000001)
    entries[1:] = changed(1, Mean=35.0)[1:]
    status, report = compare_json(*two(tmp_path, entries, ONE))
    (rank,) = report["comparisons"]
    assert status == 1
    assert (rank["unequal"], rank["failed"]) == (2, 1)
    first, second = rank["rows"]
    assert (first["names"]["A"], first["path"]) == ("Functional.linear.0.forward", "output.0")
    assert (second["names"]["B"], second["verdict"]["result"]) == ("Torch.relu.0.forward", "Warning")
    assert second["verdict"]["errors"]["Mean"] == [pytest.approx(31.5), pytest.approx(9.0)]


def test_below_the_tolerance_is_not_different_unless_exact(tmp_path: Path) -> None:
    pair = two(tmp_path, changed(0, Max=4.1), ONE)
    status, text = compare(*pair)
    assert status == 0
    assert text.startswith("NOTHING DIFFERENT by the rule: of 6 tensors")
    assert "1 differ at all." in text
    assert "Other values" not in text
    assert compare(*pair, "--exact")[0] == 1
    assert compare(*pair, "--tolerance", "0.01")[0] == 1


@pytest.mark.parametrize(
    ("a", "words"),
    [
        (changed(0, shape=[1, 2]), "the shape is [1, 2] in A and [2] in B"),
        (ONE[1:], "A lacks this entry"),
        ([*ONE, ("Torch.new.0.forward", forward(tensor(1.0)))], "B lacks this entry"),
        ([("Functional.linear.0.forward", forward(tensor(1.0, 2.0))), *ONE[1:]], "A lacks this tensor"),
    ],
)
def test_entry_or_tensor_without_counterpart_is_not_comparable(a: Any, words: str, tmp_path: Path) -> None:
    status, text = compare(*two(tmp_path, a, ONE))
    assert status == 1
    assert words in text


def test_entries_in_another_order_are_paired(tmp_path: Path) -> None:
    many = [(f"Torch.add.{n}.forward", forward(tensor(float(n)))) for n in range(300)]
    shifted = [*many[150:], *many[:150]]
    assert compare(*two(tmp_path, many, shifted))[0] == 0


def test_csv_has_the_columns_of_msprobe(tmp_path: Path) -> None:
    entries = [*changed(0, Max=8.0, requires_grad=True), ("=1+1", forward(tensor(1.0)))]
    stacks = {"Functional.linear.0.forward": ["File /a.py, line 3, in f,\n    y"]}
    file = tmp_path / "t.csv"
    assert compare(*two(tmp_path, entries, ONE, stacks=stacks), "--csv", file)[0] == 1
    with file.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert list(rows[0]) == HEADER.replace("\n", ",").split(",")
    row = next(row for row in rows if row["NPU Name"] == "Functional.linear.0.forward.output.0")
    assert (row["Max diff"], row["MaxRelativeErr"], row["Result"]) == ("4.0", "100%", "Warning")
    assert (row["NPU max"], row["Bench max"], row["Requires_grad Consistent"]) == ("8.0", "4.0", "False")
    assert row["NPU_Stack_Info"] == "File /a.py, line 3, in f,\n    y"
    assert rows[-1]["NPU Name"] == "'=1+1"
    assert (rows[-1]["Bench Name"], rows[-1]["Result"]) == ("N/A", "N/A")
    assert len(rows) == 7


def test_html_page_is_escaped_and_highlights_rows(tmp_path: Path) -> None:
    entries = [*changed(0, Max=math.nan), ("<script>alert(1)</script>", forward(tensor(1.0)))]
    file = tmp_path / "t.html"
    assert compare(*two(tmp_path, entries, ONE), "--html", file)[0] == 1
    page = file.read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert '<tr class="red">' in page
    assert "NaN or infinity on one side only" in page
    assert "http" not in page.replace("http-equiv", "")
    assert page.index("Functional.linear.0.forward.output.0") < page.index("script&gt;alert")


def test_checksums_are_compared_where_both_have_them(tmp_path: Path) -> None:
    def entries(md5: str) -> Any:
        return [("Torch.a.0.forward", forward(tensor(1.0, md5="00000000"), out=tensor(1.0, md5=md5)))]

    same = two(tmp_path / "same", entries("1234abcd"), entries("1234abcd"))
    assert compare_json(*same)[1]["mode"] == "md5"
    assert compare(*same)[0] == 0
    unequal = two(tmp_path / "other", entries("1234abcd"), entries("1234abce"))
    status, text = compare(*unequal, "--csv", tmp_path / "t.csv")
    assert status == 1
    assert text.index("1234abcd") < text.index("1234abce")
    rows = csv.DictReader((tmp_path / "t.csv").read_text().splitlines())
    assert [row["Result"] for row in rows] == ["Pass", "Different"]
    assert compare(*unequal, "--mode", "statistics")[0] == 0, "statistics are equal"


def test_different_tensors_are_described_and_judged(saved: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    status, text = compare(saved["again"], saved["plain"])
    assert (status, "equal element by element." in text) == (0, True)
    status, text = compare(saved["changed"], saved["plain"], "--csv", file)
    assert status == 1
    assert "element 0 of 8 differs: a single one" in text
    rows = {row["NPU Name"]: row for row in csv.DictReader(file.read_text().splitlines())}
    weight = rows["Functional.linear.1.forward.input.1"]
    numbers = [weight[column] for column in ("MaxAbsErr", "One Thousandth Err Ratio", "Accurate or Not")]
    assert numbers == ["4.0", "0.875", "No"]
    assert rows["Functional.linear.0.forward.input.0"]["Accurate or Not"] == "Yes"
    status, whole = compare_json(saved["slightly"], saved["plain"])
    assert (status, whole["mode"], whole["comparisons"][0]["unequal"] > 0) == (0, "tensor", True)


def test_two_tensors_of_one_dump_are_compared_by_name(saved: dict[str, Path]) -> None:
    names = ["Functional.linear.1.backward.output.0", "Functional.relu.0.backward.input.0"]
    status, text = compare(saved["plain"], "--tensor", *names)
    assert status == 0
    assert text.startswith("NOTHING DIFFERENT: 1 tensor in 1 rank: 1 equal element by element")
    name = "Functional.linear.1.forward.input.1"
    status, report = compare_json(saved["changed"], saved["plain"], "--tensor", name)
    assert status == 1
    assert report["comparisons"][0]["rows"][0]["verdict"]["closeness"]["runs"]["first"] == [[0, 1]]
    status, text = compare(saved["plain"], "--tensor", names[0], "Functional.relu.0.backward.input.7")
    assert status == 2
    assert "has no tensor Functional.relu.0.backward.input.7. It has Functional.relu.0.backward.input.0" in text
    status, text = compare(saved["plain"], "--tensor", names[0], name)
    assert status == 1
    assert "elements differ" in text


@pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning", "ignore:TypedStorage")
def test_file_that_holds_no_plain_tensor_is_refused(saved: dict[str, Path], tmp_path: Path) -> None:
    copy = tmp_path / "step0"
    shutil.copytree(saved["plain"], copy)
    file = copy / "rank" / "dump_tensor_data" / "Functional.linear.0.forward.input.0.pt"

    def refused() -> str:
        status, text = compare(copy, saved["plain"])
        assert status == 2
        return text

    for kind, held in {
        "list": ["no tensor"],
        "dict": {"a": torch.ones(1)},
        "quantized tensor": torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8),
        "tensor without elements": torch.ones(2, 3, device="meta"),
        "tensor that repeats its elements": torch.ones(1).expand(1 << 50),
        "sparse tensor": torch.ones(2, 3).to_sparse(),
    }.items():
        torch.save(held, file)
        assert f"{file} holds a {kind}, and should hold a plain tensor" in refused()
    torch.save(Path("hostile"), file)
    assert "cannot be read as a tensor" in refused()
    for damaged in (b"", b"PK\x03\x04 damaged", file.read_bytes()[:100]):
        file.write_bytes(damaged)
        assert "cannot be read as a tensor" in refused()
    torch.save(torch.ones(7), file)
    assert "It is a file of another dump" in refused()
    file.unlink()
    assert "is not there" in refused()


def test_incomplete_dump_is_named(tmp_path: Path) -> None:
    write_rank(tmp_path / "b" / "rank0", ONE, level="L1")
    write_lines(tmp_path / "a" / "rank0", ONE[:2], '{"na')
    status, text = compare(tmp_path / "a", tmp_path / "b")
    assert status == 1
    assert "incomplete: the run ended inside this step" in text
    assert "A lacks this entry" in text


def test_dumps_of_other_levels_or_steps_are_noted(tmp_path: Path) -> None:
    for name, level in (("L1", "L1"), ("mix", "mix")):
        write_rank(tmp_path / name / "step0" / "rank0", ONE, level=level)
    write_rank(tmp_path / "mix" / "step5" / "rank0", ONE)
    status, text = compare(tmp_path / "L1", tmp_path / "mix" / "step0")
    assert (status, "note: A is of level L1, B of level mix" in text) == (0, True)
    status, text = compare(tmp_path / "mix" / "step0", tmp_path / "mix" / "step5")
    assert (status, "note: A is of step 0, B of step 5" in text) == (0, True)
    status, text = compare(tmp_path / "mix", tmp_path / "mix")
    assert (status, "has 2 steps: step0, step5" in text) == (2, True)
    assert compare(tmp_path / "mix", tmp_path / "mix", "--step", 5)[0] == 0
    status, text = compare(tmp_path / "mix", tmp_path / "mix", "--step", 4)
    assert (status, "has 2 steps: step0, step5" in text) == (2, True)


def test_damaged_or_missing_dump_ends_with_status_2(tmp_path: Path) -> None:
    a, b = two(tmp_path, ONE, ONE)
    assert compare(a, tmp_path / "nowhere")[0] == 2
    assert compare(a, tmp_path)[0] == 2
    (b / "dump.json").write_bytes((a / "dump.json").read_bytes()[:-100])
    status, text = compare(a, b)
    assert status == 2
    assert f"{b / 'dump.json'}: " in text
    assert "is damaged" in text
    status, text = compare(a, "--json")
    assert (status, "is one rank" in text) == (2, True)


def test_entries_of_one_side_are_counted_beside_the_tensors_of_both(tmp_path: Path) -> None:
    many = [(f"Torch.add.{number}.forward", ONE[0][1]) for number in range(50)]
    pair = two(tmp_path, [*changed(1, Mean=35.0), *many], ONE)
    status, text = compare(*pair)
    first = text.splitlines()[0]
    assert status == 1
    assert first.startswith("DIFFERENT: of 6 tensors in 1 rank, 1 are over the tolerance 0.5, 1 differ at all.")
    assert first.endswith("Other values that differ or have no counterpart: 50.")
    assert "50 entries not in B" in text
    (rank,) = compare_json(*pair)[1]["comparisons"]
    assert (rank["unequal_tensors"], rank["failed_tensors"], rank["lacking"]) == (1, 1, {"B": 50})


def test_rows_that_fail_are_kept_behind_many_that_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpstats.dump.analyze.compare.KEPT_ROWS", 3)
    many = [(f"Torch.add.{number}.forward", forward(tensor(1.0))) for number in range(20)]
    almost_equal = [(name, forward(tensor(1.0001))) for name, _ in many[:-1]]
    pair = two(tmp_path, [*almost_equal, (many[-1][0], forward(tensor(9.0)))], many)
    (rank,) = compare_json(*pair)[1]["comparisons"]
    assert (rank["unequal"], rank["failed"]) == (20, 1)
    assert [row["names"]["A"] for row in rank["rows"]] == [f"Torch.add.{number}.forward" for number in (0, 1, 2, 19)]


def test_ranks_are_paired_by_number_and_chosen(tmp_path: Path) -> None:
    for side in ("a", "b"):
        for rank in range(4):
            entries = changed(1, Max=40.0) if (side, rank) == ("a", 1) else ONE
            write_rank(tmp_path / side / "step0" / f"rank{rank}", entries)
    write_rank(tmp_path / "b" / "step0" / "rank4", ONE)
    pair = tmp_path / "a", tmp_path / "b"
    status, text = compare(*pair, "--csv", tmp_path / "t.csv")
    assert (status, "A lacks rank 4." in text, "rank 1: 3 entries on all sides" in text) == (1, True, True)
    assert sorted(path.name for path in tmp_path.glob("*.csv")) == [f"t_rank{rank}.csv" for rank in range(4)]
    status, report = compare_json(*pair, "--ranks", "0,2-3")
    assert (status, [each["ranks"] for each in report["comparisons"]]) == (0, [[0], [2], [3]])
    status, text = compare(*pair, "--ranks", "7-99999999999")
    assert (status, "has none of the ranks that --ranks names" in text) == (2, True)
    status, text = compare(tmp_path / "a", "--tensor", "x", "y")
    assert (status, "has ranks 0, 1, 2, 3. Choose one with --ranks" in text) == (2, True)
    assert compare(*pair, "--ranks", "1", "--tensor", "Torch.relu.0.forward.output.0")[0] == 1
