"""`ddpstats compare` says what it refuses and what it could not compare, and writes its reports."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpstats.cli import main
from tests import programs
from tests.dump.hand_made import ONE, changed, collective, forward, tensor, two, write_rank
from tests.dump.verbs import compare, compare_json


def named(name: str, **more: Any) -> list[Any]:
    return [(name, forward(tensor(1.0, **more), out=tensor(1.0, 2.0)))]


def test_tensor_without_a_checksum_is_compared_by_statistics(tmp_path: Path) -> None:
    pair = two(tmp_path, *[named("Torch.a.0.forward", md5="00000000")] * 2)
    text = compare(*pair, "--mode", "md5")[1]
    assert "2 tensors in 1 rank: 1 equal in their checksums, 1 equal in all their statistics" in text


@pytest.mark.parametrize(("mode", "words"), [("md5", "no tensor has its checksum"), ("tensor", "has its elements")])
def test_mode_that_the_dumps_do_not_hold_is_refused(mode: str, words: str, tmp_path: Path) -> None:
    for rank in (0, 1):
        write_rank(tmp_path / "step0" / f"rank{rank}", ONE)
    for dumps in ([tmp_path], [tmp_path, tmp_path]):
        status, text = compare(*dumps, "--mode", mode)
        assert (status, words in text) == (2, True)


def unmeasured(*, dropped: bool) -> list[Any]:
    """Return an entry of a sparse CSR tensor, or one for which there was no memory left."""
    if dropped:
        return [("Torch.a.0.forward", {**forward(), "dropped": True})]
    return [("Torch.a.0.forward", forward({**tensor(1.0), **dict.fromkeys(("Max", "Min", "Mean", "Norm"))}))]


@pytest.mark.parametrize(
    ("dropped", "left_out"),
    [(False, "1 tensors of which the dumps have no numbers"), (True, "1 entries of which a dump has no tensors")],
)
def test_tensors_without_numbers_are_left_out(dropped: bool, left_out: str, tmp_path: Path) -> None:
    nothing = unmeasured(dropped=dropped)
    status, text = compare(*two(tmp_path / "alone", nothing, nothing))
    assert (status, text.startswith("NOTHING TO COMPARE: "), left_out in text) == (2, True, True)
    status, text = compare(
        *two(tmp_path / "beside", nothing + named("Torch.b.0.forward"), named("Torch.b.0.forward") + nothing),
    )
    assert (status, text.startswith("NOTHING DIFFERENT: 2 tensors"), left_out in text) == (0, True, True)


def test_numbers_of_collectives_and_arguments_of_one_side_alone_are_not_compared(tmp_path: Path) -> None:
    def reduced(**kwargs: Any) -> list[Any]:
        return [("Distributed.all_reduce.0.forward", collective(tensor(1.0), out=tensor(2.0), **kwargs))]

    newer = reduced(seq=0, op=1)
    for number, older in enumerate((reduced(seq=1, op=1), reduced(op=1), reduced())):
        assert compare(*two(tmp_path / str(number), newer, older), "--exact")[0] == 0
    assert compare(*two(tmp_path / "other", newer, reduced(seq=0, op=2)))[0] == 1


def test_entry_without_tensors_that_the_other_side_lacks_is_named(tmp_path: Path) -> None:
    pair = two(tmp_path, unmeasured(dropped=True) + ONE, ONE)
    status, text = compare(*pair)
    assert (status, "B lacks this entry" in text) == (1, True)


def test_log_of_what_could_not_be_recorded_is_named(tmp_path: Path) -> None:
    pair = two(tmp_path, ONE, ONE)
    log = pair[1] / "dump_error_info.log"
    log.write_text("Torch.a.0.forward: RuntimeError")
    assert f"note: {log} says what could not be recorded" in compare(*pair)[1]


def test_nothing_to_compare_has_status_2(tmp_path: Path) -> None:
    pair = two(tmp_path, [], [])
    status, text = compare(*pair)
    assert (status, text.startswith("NOTHING TO COMPARE: ")) == (2, True)
    assert compare_json(*pair)[1]["status"] == 2


def test_parameter_is_named_before_the_output(tmp_path: Path) -> None:
    def entries(weight: float) -> Any:
        parameters = {"weight": tensor(weight)}
        return [("Module.m.L.forward.0", forward(tensor(1.0), out=tensor(weight * 2), parameters=parameters))]

    status, text = compare(*two(tmp_path, entries(9.0), entries(1.0)))
    assert status == 1
    assert "first that differs:\n    Module.m.L.forward.0  parameters.weight" in text


def test_unprintable_name_is_escaped_in_every_report(tmp_path: Path) -> None:
    a, b = two(tmp_path, named("Torch.\ud800\x1b[2J\n.0.forward"), ONE)
    table, page = tmp_path / "t.csv", tmp_path / "t.html"
    status, text = compare(a, b, "--csv", table, "--html", page)
    assert status == 1
    assert "Torch.\\ud800\\x1b[2J\\n.0.forward" in text
    assert "\\ud800" in table.read_text()
    assert "\\ud800" in page.read_text()


def test_report_that_cannot_be_written_fails_at_once(tmp_path: Path) -> None:
    for words in ([tmp_path / "no" / "t.csv", "there is no directory"], [tmp_path, "is a directory"]):
        for option in ("--csv", "--html"):
            status, text = compare("not read", "either", option, words[0])
            assert (status, f"{words[0]}" in text, str(words[1]) in text) == (2, True, True)


TO_A_CLOSED_PIPE = """
import os, sys
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 1)
from ddpstats.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_closed_pipe_ends_the_verb_quietly_with_status_141_after_its_files(tmp_path: Path) -> None:
    page = tmp_path / "t.html"
    pair = map(str, two(tmp_path, changed(0, Max=99.0), ONE))
    done = programs.run(["-c", TO_A_CLOSED_PIPE, "compare", *pair, "--html", str(page)])
    assert (done.returncode, done.stderr) == (141, "")
    assert "DIFFERENT" in page.read_text()


def test_damaged_stack_file_is_a_note(tmp_path: Path) -> None:
    a, b = two(tmp_path, changed(0, Max=math.inf), ONE, stacks={"x": ["y"]}, parents={"x": [1, "m", 2]})
    (a / "stack.json").write_text('{"0": [["x"')
    status, text = compare(a, b)
    assert status == 1
    assert "without what stack.json says" in text
    assert "Functional.linear.0.forward  output.0" in text
    status, report = compare_json(a, b)
    assert (status, "stack.json" in report["notes"][0]) == (1, True)


def test_rank_without_a_dump_is_named(tmp_path: Path) -> None:
    for side in ("a", "b"):
        write_rank(tmp_path / side / "step0" / "rank0", ONE)
    (tmp_path / "a" / "step0" / "rank2").mkdir()
    status, text = compare(tmp_path / "a", tmp_path / "b")
    assert (status, "step0/rank2 has no dump" in text) == (0, True)


def test_tensors_that_neither_side_saved_are_compared_by_statistics(tmp_path: Path) -> None:
    def saved(side: str) -> Path:
        tensors = [tensor(1.0, shape=[2], data_name="t.pt"), tensor(3.0)]
        entries = [("Torch.a.0.forward", forward(*tensors)), ("Torch.b.0.forward", forward(tensor(1.0)))]
        rank = write_rank(tmp_path / side / "rank0", entries, task="tensor")
        (rank / "dump_tensor_data").mkdir()
        torch.save(torch.ones(2), rank / "dump_tensor_data" / "t.pt")
        return rank

    status, text = compare(saved("a"), saved("b"), "--mode", "tensor")
    assert status == 0
    assert "3 tensors in 1 rank: 1 equal element by element, 2 equal in all their statistics" in text


def test_unprintable_name_is_escaped_in_an_error(tmp_path: Path) -> None:
    a, b = two(tmp_path, ONE, ONE)
    (a / "dump.json").write_text(json.dumps({"data": {"x\x1b[2J": 5}}))
    status, text = compare(a, b)
    assert (status, "x\\x1b[2J is '5', and should be an object" in text) == (2, True)


def test_tolerance_that_is_no_number_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare", "A", "B", "--tolerance", "abc"])
    assert "argument --tolerance: invalid ratio value: 'abc'" in capsys.readouterr().err


def test_process_without_ranks_is_compared_as_rank_0(tmp_path: Path) -> None:
    for directory in ("a/step0/rank", "a/step0/rank1", "b/step0/rank0", "b/step0/rank1", "c/step0/rank2"):
        write_rank(tmp_path / directory, ONE)
    assert compare(tmp_path / "a", tmp_path / "b", "--csv", tmp_path / "t.csv")[0] == 0
    assert sorted(path.name for path in tmp_path.glob("*.csv")) == ["t_rank0.csv", "t_rank1.csv"]
    assert "A has ranks 0, 1, B has rank 2" in compare(tmp_path / "a", tmp_path / "c")[1]
