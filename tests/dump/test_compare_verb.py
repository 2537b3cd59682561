"""``ddpstats compare``: what it refuses, what it could not compare and says so, and where its reports go."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ddpstats.cli import main
from tests.dump.hand_made import forward, tensor, write_rank
from tests.dump.test_compare import ONE, changed, compare, compare_json, two


def named(name: str, **more: Any) -> list[Any]:
    return [(name, forward([tensor(1.0, **more)], [tensor(1.0, 2.0)]))]


def test_a_checksum_that_lacks_is_not_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = two(tmp_path, *[named("Torch.a.0.forward", md5="00000000")] * 2)
    for more in ([], ["--csv", tmp_path / "t.csv"]):
        status, text = compare(*pair, "--mode", "md5", *more, capsys=capsys)
        assert (status, "both have no md5 of this tensor" in text) == (1, True)


@pytest.mark.parametrize(("mode", "words"), [("md5", "no checksums in"), ("tensor", "no saved tensors in")])
def test_a_mode_that_the_dumps_do_not_hold(
    mode: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        write_rank(tmp_path / "step0" / f"rank{rank}", ONE)
    for dumps in ([tmp_path], [tmp_path, tmp_path]):
        status, text = compare(*dumps, "--mode", mode, capsys=capsys)
        assert (status, words in text) == (2, True)


@pytest.mark.parametrize(
    "words",
    [
        ["A", "--tolerance", "0.1"],
        ["A", "--exact"],
        ["A", "--any-step"],
        ["A", "B", "--everything"],
        ["A", "B", "--any-step", "--tensor", "x"],
        ["A", "B", "--csv", "t.csv", "--tensor", "x"],
        ["A", "B", "--html", "t.html", "--tensor", "x"],
        ["A", "B", "--mode", "md5", "--tensor", "x"],
    ],
)
def test_an_option_that_does_not_apply(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, text = compare(*words, capsys=capsys)
    assert (status, "is for comparing" in text, "Leave it out" in text) == (2, True, True)


def test_nothing_to_compare_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = two(tmp_path, [], [])
    status, text = compare(*pair, capsys=capsys)
    assert (status, text.startswith("NOTHING TO COMPARE: ")) == (2, True)
    assert compare_json(*pair, capsys=capsys)[1]["verdict"] == "nothing to compare"


def test_equal_rows_are_not_called_unequal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = changed(0, Max="nan")
    status, text = compare(*two(tmp_path, entries, entries), capsys=capsys)
    assert status == 0
    assert "    unequal" not in text
    assert "worth a look, 1 of 1:\n    Functional.linear.0.forward.output.0  NaN or infinity in A" in text


def test_requires_grad_counts_when_exact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = two(tmp_path, changed(0, requires_grad=True), ONE)
    assert [compare(*pair, *more, capsys=capsys)[0] for more in ([], ["--exact"])] == [0, 1]


def test_the_parameter_is_blamed_before_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def entries(weight: float) -> Any:
        parameters = {"weight": tensor(weight)}
        return [("Module.m.L.forward.0", forward([tensor(1.0)], [tensor(weight * 2)], parameters=parameters))]

    status, text = compare(*two(tmp_path, entries(9.0), entries(1.0)), capsys=capsys)
    assert status == 1
    assert "first that is unequal at all:\n    Module.m.L.forward.0  parameters.weight" in text
    assert "its inputs and parameters were equal if it is an output" in text


def test_rows_that_are_not_shown_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpstats.dump.compare._comparison._JSON_ROWS", 2)
    monkeypatch.setattr("ddpstats.dump.compare._two_dumps.KEPT_ROWS", 30)
    sides = [[(f"Torch.a.{n}.forward", forward([tensor(value)])) for n in range(40)] for value in (1.1, 1.0)]
    pair = two(tmp_path, *sides)
    (rank,) = compare_json(*pair, capsys=capsys)[1]["ranks"]
    assert (len(rank["rows"]), rank["rows_total"]) == (2, 40)
    page = tmp_path / "t.html"
    assert "in execution order, 20 of 40:" in compare(*pair, "--html", page, "--exact", capsys=capsys)[1]
    assert "<p>30 of 40 rows that differ or stand out: the first that fail, and the first others;" in page.read_text()


def test_names_that_are_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = two(tmp_path, named("Torch.\ud800\x1b[2J\n.0.forward"), ONE)
    table, page = tmp_path / "t.csv", tmp_path / "t.html"
    status, text = compare(a, b, "--csv", table, "--html", page, capsys=capsys)
    assert status == 1
    assert "Torch.\\ud800\\x1b[2J\\n.0.forward" in text
    assert "\\ud800" in table.read_text()
    assert "\\ud800" in page.read_text()


def test_formulas_in_both_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        write_rank(tmp_path / "step0" / f"rank{rank}", [("-1+1", forward([tensor(-1.0 - rank)]))])
    ranks = tmp_path / "step0"
    compare(ranks, "--everything", "--csv", tmp_path / "1.csv", capsys=capsys)
    compare(ranks / "rank0", ranks / "rank1", "--csv", tmp_path / "2.csv", capsys=capsys)
    for file in ("1.csv", "2.csv"):
        rows = list(csv.reader((tmp_path / file).read_text().splitlines()))
        assert (rows[1][0], "-1.0" in rows[1]) == ("'-1+1.input.0", True)


def test_a_place_that_cannot_be_written_fails_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([tmp_path / "no" / "t.csv", "there is no directory"], [tmp_path, "is a directory"]):
        for option in ("--csv", "--html"):
            status, text = compare("not read", "either", option, words[0], capsys=capsys)
            assert (status, f"{words[0]}" in text, str(words[1]) in text) == (2, True, True)


def test_a_reader_that_has_gone_keeps_no_file_from_being_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed:
        def write(self, text: str) -> None:
            raise BrokenPipeError(32, "Broken pipe")

        def flush(self) -> None:
            """Nothing is left to write."""

        def fileno(self) -> int:
            raise OSError

    page = tmp_path / "t.html"
    words = ["compare", *map(str, two(tmp_path, changed(0, Max=99.0), ONE)), "--html", str(page)]
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", Closed())
        assert main(words) == 141, "as every verb, and every other command"
    assert capsys.readouterr().err == ""
    assert "DIFFERENT" in page.read_text()


def test_a_damaged_stack_file_costs_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = two(tmp_path, changed(0, Max=99.0), ONE, stacks={"x": ["y"]}, parents={"x": [1, "m", 2]})
    (a / "stack.json").write_text('{"0": [["x"')
    status, text = compare(a, b, capsys=capsys)
    assert status == 1
    assert "without what stack.json says" in text
    assert "Functional.linear.0.forward  output.0" in text
    status, found = compare_json(a, b, capsys=capsys)
    assert (status, "stack.json" in found["ranks"][0]["notes"][0]) == (1, True)


def test_an_argument_nested_too_deep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep: Any = []
    for _ in range(900):
        deep = [deep]
    a, b = two(tmp_path, [("Torch.a.0.forward", forward([{"type": "slice", "value": deep}]))], ONE)
    status, text = compare(a, b, "--json", capsys=capsys)
    assert (status, "nested more than 64 deep" in text) == (2, True)


def test_a_rank_without_a_dump_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for side in ("a", "b"):
        write_rank(tmp_path / side / "step0" / "rank0", ONE)
    (tmp_path / "a" / "step0" / "rank2").mkdir()
    status, text = compare(tmp_path / "a", tmp_path / "b", capsys=capsys)
    assert (status, "A: rank2 has no dump" in text) == (0, True)


def saved(tmp_path: Path, side: str, held: object, **more: Any) -> Path:
    import torch

    entries = [
        ("Torch.a.0.forward", forward([tensor(1.0, shape=[2], data_name="t.pt"), tensor(3.0, **more)])),
        ("Torch.b.0.forward", forward([tensor(1.0)])),
    ]
    rank = write_rank(tmp_path / side / "rank0", entries, task="tensor")
    (rank / "dump_tensor_data").mkdir(exist_ok=True)
    torch.save(held, rank / "dump_tensor_data" / "t.pt")
    return rank


def test_tensors_that_nobody_saved_do_not_make_dumps_different(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    a, b = (saved(tmp_path, side, torch.ones(2)) for side in "ab")
    status, text = compare(a, b, "--mode", "tensor", capsys=capsys)
    assert status == 0
    assert "3 tensors in 1 rank are equal element by element, 2 that neither side saved in all their statist" in text


@pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning", "ignore:TypedStorage")
def test_odd_tensor_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    good = saved(tmp_path, "good", torch.ones(2))
    for kind, held in {
        "quantized tensor": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "tensor without elements": torch.ones(2, device="meta"),
        "tensor that repeats its elements": torch.ones(1).expand(1 << 50),
        "sparse tensor": torch.ones(2).to_sparse(),
    }.items():
        status, text = compare(saved(tmp_path, "bad", held), good, capsys=capsys)
        assert (status, f"holds a {kind}, and should hold a plain tensor" in text) == (2, True), text
    status, text = compare(saved(tmp_path, "bad", torch.ones(3)), good, capsys=capsys)
    assert (status, "shape [3], and " in text) == (2, True)


def test_help_says_where_names_of_tensors_go(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    assert "goes last" in " ".join(capsys.readouterr().out.split())


def test_names_in_errors_are_printable_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = two(tmp_path, ONE, ONE)
    (a / "dump.json").write_text(json.dumps({"data": {"x\x1b[2J": 5}}))
    status, text = compare(a, b, capsys=capsys)
    assert (status, "x\\x1b[2J is '5', and should be an object" in text) == (2, True)


def test_a_tolerance_that_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare", "A", "B", "--tolerance", "abc"])
    assert "abc: a ratio of 0 or more is expected, 0.5 for 50 %" in capsys.readouterr().err


def test_a_process_alone_is_rank_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for directory in ("a/step0/rank", "a/step0/rank1", "b/step0/rank0", "b/step0/rank1", "c/step0/rank2"):
        write_rank(tmp_path / directory, ONE)
    assert compare(tmp_path / "a", tmp_path / "b", "--csv", tmp_path / "t.csv", capsys=capsys)[0] == 0
    assert sorted(path.name for path in tmp_path.glob("*.csv")) == ["t_rank0.csv", "t_rank1.csv"]
    assert "A has ranks 0, 1, B has rank 2" in compare(tmp_path / "a", tmp_path / "c", capsys=capsys)[1]


def test_a_truth_is_no_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = [{"type": "bool", "value": True}, {"type": "int", "value": 1}]
    status, text = compare(*two(tmp_path, *([("Torch.a.0.forward", forward([one]))] for one in values)), capsys=capsys)
    assert (status, "True in A and 1 in B" in text) == (1, True)
