"""A dump is found by its root, step, rank or file; one that is cut off is read, one that is damaged is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ddpstats.dump import analyze
from ddpstats.dump.analyze import find_ranks, open_rank, ranks_without_dump
from ddpstats.dump.analyze.nan_origin import examine
from ddpstats.dump.msprobe import steps_in
from ddpstats.errors import DumpError
from tests.dump.hand_made import as_lines, backward, document, forward, tensor, write_lines, write_rank

ENTRIES = [("Torch.a.0.forward", forward(tensor(1.0), out=tensor(2.0))), ("Torch.b.0.forward", forward(tensor(2.0)))]


@pytest.mark.parametrize("path", [".", "step3", "step3/rank0", "step3/rank0/dump.json"])
def test_root_step_rank_and_file_lead_to_the_rank(path: str, tmp_path: Path) -> None:
    write_rank(tmp_path / "step3" / "rank0", ENTRIES, level="L1")
    (dump,) = find_ranks(tmp_path / path)
    assert (dump.rank, dump.step, dump.level, dump.task, dump.complete) == (0, 3, "L1", "statistics", True)
    assert [(entry.name, entry.raw) for entry in dump.entries()] == ENTRIES


@pytest.mark.parametrize("path", [".", "step0", "step0/proc4242", "step0/proc4242/dump.json"])
def test_process_of_msprobe_is_found(path: str) -> None:
    (dump,) = find_ranks(Path(__file__).parent / "msprobe_26/one" / path)
    assert (dump.rank, dump.step, dump.level) == (None, 0, "mix")
    assert len(list(dump.entries())) == 37
    assert dump.stack_of("Tensor.add.0.forward")
    assert dump.parent_of("Functional.linear.0.forward") == "Module.fc.Linear.forward.0"


def test_ranks_are_sorted_by_number(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        write_rank(tmp_path / "step0" / f"rank{rank}", ENTRIES)
    (tmp_path / "step0" / "rank7").mkdir()  # it died before its first entry
    assert [dump.rank for dump in find_ranks(tmp_path)] == [0, 2, 10]

    assert ranks_without_dump(tmp_path / "step0") == ["rank7"]


def test_several_steps_are_refused_and_listed(tmp_path: Path) -> None:
    for step in (10, 2):
        write_rank(tmp_path / f"step{step}" / "rank0", ENTRIES)
    with pytest.raises(DumpError, match=r"has 2 steps: step2, step10\. Give .* of one; compare takes --step N"):
        find_ranks(tmp_path)
    assert list(steps_in(tmp_path)) == [2, 10]


def test_dump_of_a_killed_run_is_read_without_its_broken_last_line(tmp_path: Path) -> None:
    (dump,) = find_ranks(write_lines(tmp_path / "step0" / "rank1", ENTRIES, '{"name": "Torch.c.0.forw'))
    assert (dump.rank, dump.level, dump.complete) == (1, "L1", False)
    assert [entry.name for entry in dump.entries()] == ["Torch.a.0.forward", "Torch.b.0.forward"]
    assert [entry.raw for entry in dump.entries()] == [raw for _, raw in ENTRIES]
    assert dump.stack_of("Torch.b.0.forward") == ["at Torch.b.0.forward"]
    assert dump.parent_of("Torch.b.0.forward") is None
    for member in dump.entry_texts():
        assert dump.reread(member.key, member.offset, member.size) == member


@pytest.mark.parametrize("first", ["", '{"task": "stat'])
def test_rank_that_was_killed_in_its_first_line_has_no_dump(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rank(tmp_path / "step0" / "rank0", ENTRIES)
    killed = tmp_path / "step0" / "rank1" / "dump.jsonl"
    killed.parent.mkdir()
    killed.write_text(first)
    assert [dump.rank for dump in find_ranks(tmp_path)] == [0]
    assert ranks_without_dump(tmp_path / "step0") == ["rank1"]
    monkeypatch.chdir(tmp_path / "step0" / "rank0")
    for path in (tmp_path, Path()):
        assert "rank1, which has no dump" in examine(find_ranks(path)).left_out


def test_broken_line_in_the_middle_is_refused(tmp_path: Path) -> None:
    (dump,) = find_ranks(write_lines(tmp_path / "step0" / "rank1", ENTRIES, '{"name": \n', "{}\n"))
    with pytest.raises(DumpError, match=r"dump.jsonl: the line at byte \d"):
        list(dump.entries())


@pytest.mark.parametrize("old", [False, True])
def test_stack_and_parent_of_an_entry_are_read(old: bool, tmp_path: Path) -> None:
    lines = ["File /a.py, line 3, in f,\n    x", "File /b.py, line 4, in g,\n    y"]
    parents = {"Torch.a.0.forward": "Module.m.M.forward.0", "Torch.b.0.forward": None}
    rank = write_rank(tmp_path / "rank0", ENTRIES, stacks={"Torch.a.0.forward": lines}, parents=parents)
    if old:
        (rank / "stack.json").write_text(json.dumps({"Torch.a.0.forward": lines}))
    dump = open_rank(rank)
    assert dump.stack_of("Torch.a.0.forward") == lines
    assert dump.stack_of("Torch.b.0.forward") == []
    assert dump.parent_of("Torch.a.0.forward") == "Module.m.M.forward.0"
    assert dump.parent_of("Torch.b.0.forward") is None
    assert dump.parent_of("Torch.z.0.forward") is None


def test_missing_dump_is_named_with_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match=r"nowhere: no dump here: no such file or directory. Give the dump_path"):
        find_ranks(tmp_path / "nowhere")
    with pytest.raises(DumpError, match=r"no dump here: .*it is empty"):
        find_ranks(tmp_path)
    (tmp_path / "logs").mkdir()
    with pytest.raises(DumpError, match=r"no dump here: .*it has logs"):
        find_ranks(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"it is not JSON: Expecting value: line 1 column 1 \(char 0\)"),
        ("[]", r"it is '\[\]', and should be an object"),
        ('{"task": "statistics"}', "\"data\" is 'None', and should be an object"),
        ('{"data": {"a": 5}}', "a is '5', and should be an object"),
        ('{"data": {\n"a": 5\n}}\n', "the line at byte 11 is no entry"),
        ('{"data": {\n"a": {},\n"b": {]}\n}}\n', "b is not JSON: Expecting property name"),
        ('{"data": {\n"a": {}\n}}\n{', "the line at byte 19 is no entry"),
        ('{"task": }, "data": {\n"a": {}\n}}\n', "its first line is no JSON object: Expecting value"),
        ('{"data": {\n"\xe4": {}\n}}\n', "at byte 11: 'ascii' codec can't decode"),
        ('{"data": {"a": {"x": ' + "[" * 200_000, "it is nested too deeply"),
        ('{"data": {\n"a": {"x": ' + "[" * 200_000 + "}\n}}\n", "it is nested too deeply"),
        ('{"data": {"a": {"x": ' + "1" * 5000, "it is not JSON: Exceeds the limit"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_damaged_file_is_refused_by_name(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "dump.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DumpError, match=rf"dump.json: .*({words})"):
        list(open_rank(tmp_path).entries())


def test_endless_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analyze, "LARGEST_ENTRY_BYTES", 100)
    (tmp_path / "dump.jsonl").write_bytes(bytes(1000))
    with pytest.raises(DumpError, match=r"dump.jsonl: its first line is no JSON object"):
        open_rank(tmp_path)
    (tmp_path / "dump.jsonl").write_bytes(b'{"task": "statistics"}\n' + bytes(1000))
    with pytest.raises(DumpError, match=r"dump.jsonl: at byte 23: a line of more than 100 bytes"):
        list(open_rank(tmp_path).entries())


def test_large_file_of_another_layout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analyze, "LARGEST_FILE_BYTES", 500)
    write_rank(tmp_path / "rank0", ENTRIES)
    assert len(list(open_rank(tmp_path / "rank0").entries())) == 2
    write_rank(tmp_path / "rank1", ENTRIES, layout=1)
    with pytest.raises(DumpError, match=r"dump.json has 903 bytes, and a file that .* only up to 500\. Dump"):
        open_rank(tmp_path / "rank1")


ODD = [
    ("Functional.linear.0.forward", forward(tensor(1.0, 2.0), out=[tensor(3.0), {"type": "str", "value": 'a "}{" b'}])),
    ('Tensor.é\\."1.backward', backward(tensor(float("nan"), 1.0), out=[None, {}])),
    ("empty", {}),
    *((f"Torch.add.{n}.forward", forward(tensor(float(n)), {"type": "slice", "value": [None, 1]})) for n in range(9)),
]
WHOLE = document(ODD)
LAYOUTS = {
    "our lines": as_lines(WHOLE),
    "lines of Windows": as_lines(WHOLE).replace("\n", "\r\n"),
    "no entry": as_lines(document([])),
    "one line": json.dumps(WHOLE),
    "indent 4, not ASCII": json.dumps(WHOLE, indent=4, ensure_ascii=False),
    "with a byte order mark": "\ufeff" + json.dumps(WHOLE),
    "more after the data": json.dumps({**WHOLE, "later": [1, {"a": "}"}]}, indent=2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_same_entries(layout: str, tmp_path: Path) -> None:
    (tmp_path / "dump.json").write_bytes(LAYOUTS[layout].encode())
    dump = open_rank(tmp_path)
    assert {key: dump.header[key] for key in WHOLE if key != "data"} == {k: v for k, v in WHOLE.items() if k != "data"}
    assert repr([(entry.name, entry.raw) for entry in dump.entries()]) == repr([] if layout == "no entry" else ODD)
    for member in dump.entry_texts():
        assert dump.reread(member.key, member.offset, member.size) == member


@pytest.mark.parametrize("layout", ["our lines", "one line", "more after the data"])
def test_file_cut_anywhere_is_refused(layout: str, tmp_path: Path) -> None:
    text = LAYOUTS[layout].rstrip()
    for cut in [0, 1, *range(2, len(text) - 1, 97), len(text) - 1]:
        (tmp_path / "dump.json").write_text(text[:cut])
        with pytest.raises(DumpError, match=r"dump\.json: .*\. It is damaged, not copied completely") as caught:
            list(open_rank(tmp_path).entries())
        assert caught.value.path == str(tmp_path / "dump.json")


def test_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "dump.json")
    with pytest.raises(DumpError, match="no dump here"):
        open_rank(tmp_path)
    write_rank(tmp_path / "rank0", ENTRIES)
    opened = open_rank(tmp_path / "rank0")
    (tmp_path / "dump.json").rename(tmp_path / "rank0" / "dump.json")  # after it was looked at
    with pytest.raises(OSError, match="Not a regular file"):
        list(opened.entries())


@pytest.mark.parametrize("name", ["../secret.pt", "/etc/passwd", "a/b.pt", "", "a\0b", "link.pt"])
def test_tensor_file_outside_the_dump_is_refused(name: str, tmp_path: Path) -> None:
    dump = open_rank(write_rank(tmp_path, ENTRIES))
    (tmp_path / "dump_tensor_data").mkdir()
    (tmp_path / "secret.pt").write_text("")
    (tmp_path / "dump_tensor_data" / "link.pt").symlink_to(tmp_path / "secret.pt")
    with pytest.raises(DumpError, match="leads out of dump_tensor_data"):
        dump.tensor_file(name)
    with pytest.raises(DumpError, match=r"gone.pt is not there"):
        dump.tensor_file("gone.pt")
    with pytest.raises(DumpError, match=r"long is not there"):
        dump.tensor_file("long" * 100)
    os.mkfifo(tmp_path / "dump_tensor_data" / "pipe.pt")
    with pytest.raises(DumpError, match=r"pipe.pt is not there, or no regular file"):
        dump.tensor_file("pipe.pt")
