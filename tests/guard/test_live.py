"""``ddpstats run --watch`` and ``ddpstats watch`` show what each rank does now, whom it waits for, and all alarms."""

from __future__ import annotations

import dataclasses
import fcntl
import io
import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddpstats
from ddpstats import DdpstatsError, cli
from ddpstats._ranks.failure import ProcessId
from ddpstats.guard import collective_guard, run, watch
from ddpstats.guard.event import Event, Signature, digest_of
from ddpstats.guard.record import read_records
from ddpstats.guard.recording import ROUNDS, Identity, Recording
from ddpstats.guard.watch import RankNow, Records, lines_of, picture_of
from ddpstats.testing import RankPool
from tests.needs import needs
from tests.programs import Program
from tests.report.records import recording_of

# -- what runs on the ranks -------------------------------------------------------------------------------------------


def told_of(directory: str, name: str) -> list[str]:
    """Return the lines that are shown once `find_things` has run on all ranks."""
    with collective_guard("record", record_dir=directory):
        find_things(f"{directory}/captures", name)
        dist.barrier()
        lines = lines_of(picture_of(Records(directory).look()))
        dist.barrier()
    return lines


def find_things(captures: str, name: str) -> None:
    """Rank 1 stops holding a key, has a gradient that is not finite, and then other parameters than rank 0."""
    rank = dist.get_rank()
    for step in range(3 * ROUNDS):
        has_both = step < ROUNDS - 1 or rank == 0
        ddpstats.reduce_stats({"loss": 1.0, **({"<snr>": 2.0} if has_both else {})}, name=name)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    with ddpstats.NaNCapture(captures, model=model) as capture:
        with capture.micro_batch(None):
            model(torch.full((1, 1), math.nan if rank else 1.0)).sum().backward()
        capture.check()
    model.zero_grad()
    with ddpstats.Sentinel(model, mode=1, digest_every_steps=1) as sentinel:
        for parameter in model.parameters() if rank else ():
            parameter.data.add_(1.0)
        model(torch.ones(1, 1)).sum().backward()
        sentinel.step()


# -- tests ------------------------------------------------------------------------------------------------------------


LIMIT_SEC = 150
SUM = Signature("all_reduce", "sum", None, ((),), ("float32",))
EVENT = Event("0", 0, SUM, "snr", 0, "train.py:7 in <module>", digest_of(SUM))


def recorded(
    directory: Path, collectives: int = 2, rank: int = 0, event: Event = EVENT, name: str = "this run"
) -> Recording:
    """Return the record of a rank of two, which this process writes."""
    recording = Recording(directory)
    recording.begin(Identity(name, rank, 2))
    write_events(recording, 1, collectives, event)
    return recording


def write_events(recording: Recording, first: int, last: int, event: Event = EVENT) -> None:
    recording.write({"new_group": "0", "words": "the default group", "ranks": [0, 1]})
    for seq in range(first, last + 1):
        recording.write(dataclasses.replace(event, seq=seq, started=time.time()).as_dict())


def shown(records: Records) -> str:
    return "\n".join(lines_of(picture_of(records.look())))


# -- records ----------------------------------------------------------------------------------------------------------


def test_records_of_two_ranks_are_shown_as_lines(tmp_path: Path) -> None:
    recording = recorded(tmp_path)
    left = recorded(tmp_path, 1, rank=1)
    left.write({"end": "ValueError", "time": time.time()})
    recording.step(EVENT)
    recording.renegotiated("train", ["l1"])
    recording.note(**{"not held any more": "'snr', 'l2' (name='train')"})
    recording.alarm("guard", "they\n  differ")
    recording.wait(time.time() - 3)
    assert [re.sub(r"\d+ s", "N s", line) for line in shown(Records(tmp_path)).splitlines()] == [
        "2 of 2 ranks, step 1; rank 0 waits for rank 1",
        "  rank 0: step 1, 0 behind, waits for N s: number 2 of the default group, all_reduce(float32[], sum) 'snr', "
        "at train.py:7 in <module>",
        "  rank 1: step 0, 1 behind, left the guard by ValueError (last began N s ago): "
        "number 1 of the default group, all_reduce(float32[], sum) 'snr', at train.py:7 in <module>",
        "  ALARM of guard, rank 0: they differ",
        "  not held any more, rank 0: 'snr', 'l2' (name='train')",
        "  renegotiations, rank 0: 1; new keys of the last: 'l1' (name='train')",
    ]


def test_wait_is_recorded_when_it_is_long_and_when_it_ends(tmp_path: Path) -> None:
    recording, began = recorded(tmp_path), time.time()
    recording.wait(began)
    recording.wait(None)
    assert b"now" not in (tmp_path / "rank0.jsonl").read_bytes()
    recording.wait(began - 3)
    recording.wait(began - 3)
    recording.wait(None)
    lines = (tmp_path / "rank0.jsonl").read_text().splitlines()
    assert lines[-2:] == [json.dumps({"now": {"waits_since": at}}, separators=(",", ":")) for at in (began - 3, None)]


def test_line_that_is_half_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    recording, records = recorded(tmp_path, 5), Records(tmp_path)
    path = tmp_path / "rank0.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    (rank,) = records.look()
    assert rank.event is not None
    assert (rank.groups, rank.event.seq) == ({"0": 4}, 4)
    path.write_bytes(whole)
    write_events(recording, 6, 6)
    (rank,) = records.look()
    assert rank.groups == {"0": 6}


def test_state_is_known_after_the_record_has_begun_its_next_file(tmp_path: Path) -> None:
    """Also to who looks for the first time then."""
    recording, records = recording_of(tmp_path, 0, 2, "this run", max_bytes=8000), Records(tmp_path)
    recording.step(EVENT)
    recording.alarm("guard", "differ")
    write_events(recording, 1, 3)
    assert records.look()[0].groups == {"0": 3}
    write_events(recording, 4, 30)
    assert (tmp_path / "rank0.old.jsonl").exists()
    for seen in (records.look(), Records(tmp_path).look()):
        (rank,) = seen
        assert (rank.steps, rank.remarks, rank.groups) == (1, {"ALARM of guard": "differ"}, {"0": 30})
    (record,) = read_records(tmp_path)
    assert record.events[-1].seq == 30


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_bytes(b"\xff" * 100 + b"\n"),
        lambda path: path.write_bytes(b'{"ddpstats":1,"rank":1,"world_size":2}\n'),
        lambda path: path.write_bytes(b'{"ddpstats":1,"rank":1,"world_size":2,"process":"00"}\n{"now":3}\n'),
        lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40),
        lambda path: path.write_bytes(b""),
        lambda path: path.symlink_to("/dev/zero"),
        os.mkfifo,
    ],
    ids=["bytes", "no process", "no state", "large", "empty", "link", "pipe"],
)
def test_file_that_is_no_record_is_left_out(make: Callable[[Path], object], tmp_path: Path) -> None:
    recorded(tmp_path)
    make(tmp_path / "rank1.jsonl")
    assert [rank.rank for rank in Records(tmp_path).look()] == [0]


def of_a_newer_format(directory: Path) -> None:
    (directory / "rank0.jsonl").write_text('{"ddpstats": 2, "run": "x", "rank": 0, "world_size": 2, "time": 1.0}\n')


def test_records_of_a_newer_format_are_refused(tmp_path: Path) -> None:
    of_a_newer_format(tmp_path)
    with pytest.raises(DdpstatsError, match=r"rank0\.jsonl cannot .* written by a newer ddpstats: format 2"):
        Records(tmp_path).look()
    recorded(tmp_path, rank=1)
    assert [rank.rank for rank in Records(tmp_path).look()] == [1]


def test_program_goes_on_beside_records_of_a_newer_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_a_newer_format(tmp_path)
    with run._watch_records(str(tmp_path)):
        pass
    assert capsys.readouterr().err == ""
    recorded(tmp_path, rank=1)
    with run._watch_records(str(tmp_path)):
        pass
    assert "ddpstats watch: 1 of 2 ranks" in capsys.readouterr().err


def test_lines_are_printed_when_a_state_changes_and_every_ten_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, now, view = recorded(tmp_path), [1000.0], watch.Lines(sys.stderr)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def printed_after(sec: float) -> bool:
        now[0] += sec
        view.show(picture_of(Records(tmp_path).look()))
        return bool(capsys.readouterr().err)

    assert printed_after(0.0)
    write_events(recording, 3, 9)
    assert not printed_after(9.5), "a rank that goes on is in the same state"
    assert printed_after(1.0)
    recording.wait(time.time() - 3)
    assert printed_after(0.5)
    assert not printed_after(0.5)
    recording.alarm("guard", "they differ")
    assert printed_after(0.5)


def test_watching_ends_where_the_records_are_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(tmp_path)
    monkeypatch.setattr(time, "sleep", lambda _: (tmp_path / "rank0.jsonl").unlink())
    assert cli.main(["watch", str(tmp_path)]) == 2
    assert "holds no records of ranks" in capsys.readouterr().err


def test_only_ranks_of_the_newest_run_are_shown(tmp_path: Path) -> None:
    recorded(tmp_path, rank=1, name="a run before")
    recorded(tmp_path)
    assert [rank.rank for rank in Records(tmp_path).look()] == [0]
    assert "no collective yet, or on another host: rank 1" in shown(Records(tmp_path))


def test_next_run_in_the_same_files_is_followed(tmp_path: Path) -> None:
    records = Records(tmp_path)
    recorded(tmp_path, 20).step(EVENT)
    records.look()
    recorded(tmp_path, 1, name="the next run")
    (rank,) = records.look()
    assert (rank.steps, rank.groups) == (0, {"0": 1})


def test_label_cannot_command_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path, event=dataclasses.replace(EVENT, label="\x1b[2Jsnr", site="\x1b[H.py:1 in f"))
    watch.Lines(sys.stdout).show(picture_of(Records(tmp_path).look()))
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "\\x1b[H.py:1 in f" in printed


def test_watch_in_json_looks_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path)
    assert cli.main(["watch", str(tmp_path), "--json"]) == 0
    recorded(tmp_path).alarm("guard", "differ")
    assert cli.main(["watch", str(tmp_path), "--json"]) == 1
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(each["ranks"]) for each in shown] == [1, 1]
    assert shown[1]["remarks"][0] == "ALARM of guard, rank 0: differ"


def test_rank_that_is_furthest_behind_is_shown_first_among_many() -> None:
    described = {name: {"ranks": [*range(size)]} for name, size in {"all": 40, "half": 20}.items()}
    numbers = {"all": 9, "half": 5}
    process = ProcessId.mine()
    ranks = [
        RankNow(rank, 40, process, groups=numbers if rank != 33 else {}, described=described) for rank in range(40)
    ]
    picture = picture_of(ranks)
    assert (picture.rows[0].rank, picture.rows[0].behind) == (33, 9)  # it may be no member of the half
    assert len(picture.rows) == 16
    assert "24 more ranks" in picture.remarks[0]


def test_watch_without_ranks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert cli.main(["run", "--watch", str(script)]) == 2
    assert "--watch is for --nproc N" in capsys.readouterr().err
    assert cli.main(["run", "--watch", "--nproc", "2", "--guard", "off", str(script)]) == 2
    assert "for a guard that is not off" in capsys.readouterr().err


# -- ranks ------------------------------------------------------------------------------------------------------------


NOT_HELD = "not held any more, rank 1: '<snr>' (name='{}')"
NOT_FINITE = ", ranks 0, 1: step 0: the gradients of rank 1 are not finite"
DIVERGED = ", ranks 0, 1: step 0, found by the sentinel: [replica digests] replicas differ"


def test_dropped_keys_and_alarms_of_all_wings_are_shown(two_ranks: RankPool, tmp_path: Path) -> None:
    for lines in two_ranks.run(told_of, str(tmp_path), "lines").values():
        _, _, _, first, second, not_held, renegotiations = (line.strip() for line in lines)
        assert renegotiations.startswith("renegotiations, ranks 0, 1: 1;")
        assert not_held == NOT_HELD.format("lines")
        assert NOT_FINITE in first
        assert DIVERGED in second


STOPPED = """
    import os, signal, torch, torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    stats = {"loss": torch.ones(1)}
    for key in stats:
        dist.all_reduce(stats[key])
    optimizer.step()
    if dist.get_rank() == 1:
        print("process", os.getpid(), flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1 + dist.get_rank()))
"""


@pytest.mark.slow
def test_program_is_watched_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "train.py").write_text(textwrap.dedent(STOPPED))
    command = ["-m", "ddpstats", "run", "--nproc", "2", "--watch", str(tmp_path / "train.py")]
    with Program(command, {**os.environ, "TMPDIR": str(tmp_path / "scratch")}) as program:
        _until(lambda: "rank 0 waits for rank 1" in program.errors(), program)
        os.kill(int(program.output().split()[1]), signal.SIGCONT)
        done = program.finish()
    assert done.returncode != 0
    lines = [line.partition("ddpstats watch: ")[2] for line in done.stderr.splitlines()]
    at = next(number for number, line in enumerate(lines) if "rank 0 waits for rank 1" in line)
    assert "step 1" in lines[at]
    assert re.search(r"waits for \d+ s: number 2 .*, all_reduce\(float32\[1\], sum\), at .*train.py:14", lines[at + 1])
    assert re.search(r"1 behind, runs .*: number 1 .*, all_reduce\(float32\[1\], sum\) 'loss', at", lines[at + 2])
    assert any("ALARM of guard, ranks 0, 1: the ranks of the default group" in line for line in lines)
    assert "CollectiveMismatch" in done.stderr
    assert not list((tmp_path / "scratch").glob("ddpstats-run-*"))


def _until(is_so: Callable[[], bool], program: Program) -> None:
    deadline = time.monotonic() + LIMIT_SEC
    while not is_so():
        assert time.monotonic() < deadline, program.errors()
        time.sleep(0.1)


# -- a terminal -------------------------------------------------------------------------------------------------------

RANK = """
import sys, time
from pathlib import Path
from tests.guard.test_live import recorded

recorded(Path(sys.argv[1])).alarm("guard", "\\x1b[2Jdiffer")
time.sleep(600)
"""


@pytest.mark.library
def test_a_table_on_a_terminal(tmp_path: Path) -> None:
    needs("rich")
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, b"\x28\0\xa0\0\0\0\0\0")  # 40 lines of 160 characters
    environ = {**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)}
    environ.pop("COLUMNS", None)  # GNU readline leaves it behind, and it wins over the terminal's width
    with Program(["-c", RANK, str(tmp_path)], environ) as rank:
        _until(lambda: "ALARM of guard" in _text(tmp_path / "rank0.jsonl"), rank)
        command = [sys.executable, "-m", "ddpstats", "watch", str(tmp_path)]
        watching = subprocess.Popen(command, env=environ, stdin=its, stdout=its, stderr=its, start_new_session=True)
        os.close(its)
        drawn = b""
        try:
            deadline = time.monotonic() + LIMIT_SEC
            while select.select([ours], [], [], max(0.0, deadline - time.monotonic()))[0]:
                try:
                    drawn += os.read(ours, 1 << 16)
                except OSError:  # the other end is closed
                    break
                if b"last collective" in drawn and rank.poll() is None:
                    os.kill(rank.pid, signal.SIGKILL)
            assert watching.wait(LIMIT_SEC) == 1
        finally:
            watching.kill()
            watching.wait()
            os.close(ours)
    assert b"runs" in drawn
    assert b"killed" in drawn
    assert b"'snr'" in drawn
    assert b"\\x1b[2Jdiffer" in drawn
    assert b"\x1b[2J" not in drawn
    assert drawn.rindex(b"\x1b[?25h") > drawn.rindex(b"\x1b[?25l")


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.library
def test_small_terminal_shows_the_late_rank_and_the_alarm() -> None:
    needs("rich")
    from rich.console import Console
    from rich.live import Live

    last = (
        "number 4812 of the default group, all_reduce(float32[25557032], sum) '(gradients)', at train.py:214 in train"
    )
    rows = [watch.RankLine(rank, 120, 0, "waits for 31 s", last) for rank in range(15)]
    rows.append(watch.RankLine(15, 120, 1, "runs (last began 33 s ago)", last))
    remarks = [
        "ALARM: step 118: the gradients of rank 1 are not finite",
        "ALARM: long" + " s" * 900,
        "renegotiations: 1",
    ]
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=80, height=16, color_system=None)
    with Live(console=console, auto_refresh=False) as live:
        live.update(watch.table_of(watch.Picture("16 of 16 ranks", rows, remarks, [15], 0)), refresh=True)
        lines = [line.strip() for line in drawn.getvalue().splitlines()]
    assert len(lines) == 16
    assert lines[:2] == ["\x1b[?25l16 of 16 ranks", remarks[0]]
    assert lines[2].endswith(" s\u2026")
    assert lines[4].split() == ["rank", "step", "behind", "state", "last", "collective"]
    assert [int(line.split()[0]) for line in lines[5:-1]] == [15, *range(9)]
    assert lines[-1] == "..."
