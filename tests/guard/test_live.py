"""``ddpstats run --watch`` and ``ddpstats watch`` show what each rank does now, whom it waits for, and all alarms."""

from __future__ import annotations

import dataclasses
import fcntl
import io
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

from ddpstats import ConfigError, DdpstatsError, cli
from ddpstats.guard import live_notes, watch
from ddpstats.guard.event import Event, Signature, digest_of
from ddpstats.guard.live_notes import LiveNotes, RankNow, read_notes
from ddpstats.guard.screen import Screen, run_watched
from ddpstats.guard.watch import lines_of, picture_of
from ddpstats.testing import RankPool
from tests import programs
from tests.guard import live_runs
from tests.guard.tiers import tiers
from tests.needs import needs
from tests.programs import Program

LIMIT_SEC = 150
SUM = Signature("all_reduce", "sum", None, ((),), ("float32",))
EVENT = Event("0", 0, SUM, "snr", 0, "train.py:7 in <module>", digest_of(SUM))


def noted(directory: Path, collectives: int = 2, rank: int = 0, event: Event = EVENT) -> LiveNotes:
    notes = LiveNotes(directory, rank, 2)
    for seq in range(1, collectives + 1):
        notes.begins("0", (0, 1), event, seq)
    return notes


def shown(directory: Path) -> str:
    return "\n".join(lines_of(picture_of(read_notes(directory))))


# -- notes ------------------------------------------------------------------------------------------------------------


def test_notes_of_two_ranks_are_shown_as_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = noted(tmp_path)
    noted(tmp_path, 1, rank=1).left("left the guard by ValueError: no data")
    notes.stepped(EVENT)
    notes.tidings.renegotiated("train", ["l1"])
    notes.tidings.stopped_holding("train", ["snr", "l2"])
    notes.alarm("they\n  differ")
    notes.waits(True)
    monkeypatch.setattr(watch, "_LONG_SEC", -1.0)
    assert [re.sub(r"\d+ s", "N s", line) for line in shown(tmp_path).splitlines()] == [
        "2 of 2 ranks, step 1; rank 0 waits for rank 1",
        "  rank 0: step 1, 2 collectives, 0 behind, waits for N s: number 2, all_reduce(float32[], sum) 'snr', "
        "at train.py:7 in <module>",
        "  rank 1: step 0, 1 collectives, 1 behind, left the guard by ValueError: no data (last began N s ago): "
        "number 1, all_reduce(float32[], sum) 'snr', at train.py:7 in <module>",
        "  renegotiations: 1; new keys of the last: 'l1' (name='train')",
        "  not held any more by rank 0: 'snr', 'l2' (name='train')",
        "  ALARM: they differ",
    ]


def test_half_written_note_leaves_the_one_before(tmp_path: Path) -> None:
    noted(tmp_path, 5)
    path = tmp_path / "rank0.live"
    whole = path.read_bytes()
    at = whole.rindex(b'"numbers":[6,5,')  # the note before has 5, in the other slot
    path.write_bytes(whole[:at] + b"#" + whole[at + 1 :])
    (note,) = read_notes(tmp_path)
    assert (note.collectives, note.event) == (4, dataclasses.replace(EVENT, seq=4))
    path.write_bytes(whole.replace(b'"numbers"', b'"Numbers"'))
    assert read_notes(tmp_path) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_bytes(b"\xff" * 100),
        lambda path: path.write_bytes(bytes(1 << 20)),
        lambda path: path.write_bytes(b""),
        lambda path: path.symlink_to("/dev/zero"),
        os.mkfifo,
    ],
    ids=["bytes", "large", "empty", "link", "pipe"],
)
def test_file_that_is_no_note_is_left_out(make: Callable[[Path], object], tmp_path: Path) -> None:
    noted(tmp_path)
    make(tmp_path / "rank1.live")
    assert [note.rank for note in read_notes(tmp_path)] == [0]


def test_notes_of_a_newer_format_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(live_notes, "FORMAT", 3)
        noted(tmp_path)
    with pytest.raises(DdpstatsError, match="written by a newer ddpstats: format 3, this one reads 2"):
        read_notes(tmp_path)
    noted(tmp_path, rank=1)
    assert [note.rank for note in read_notes(tmp_path)] == [1]


def test_program_goes_on_beside_notes_of_a_newer_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(live_notes, "FORMAT", 3)
        noted(tmp_path)
    program = [sys.executable, "-c", "import sys; sys.exit(3)"]
    assert run_watched(program, os.environ, str(tmp_path)) == 3


SIGNALS_ITS_PARENT = """
import os, signal, sys, time

parent = os.getppid()
while not int(open(f"/proc/{parent}/status").read().split("SigCgt:")[1].split()[0], 16) >> 14 & 1:
    time.sleep(0.05)
os.kill(parent, int(sys.argv[1]))
time.sleep(600)
"""
ENDS_WITH_ITS_PROGRAM = """
import signal, sys
from ddpstats.guard import screen

screen.ENDING_SEC = 0.5
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background has it ignored
try:
    sys.exit(-screen.run_watched(sys.argv[2:], {}, sys.argv[1]))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize(("number", "status"), tiers([(signal.SIGTERM, signal.SIGTERM)], [(signal.SIGINT, 130)]))
def test_signal_to_the_launcher_alone_ends_the_program(number: int, status: int, tmp_path: Path) -> None:
    program = [str(tmp_path), sys.executable, "-c", SIGNALS_ITS_PARENT, str(int(number))]
    assert programs.run(["-c", ENDS_WITH_ITS_PROGRAM, *program], timeout=LIMIT_SEC).returncode == status


def test_notes_that_cannot_be_made_leave_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", lambda *_: os.stat(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"rank 0 cannot write its notes to .*: No such file"):
        noted(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_watching_ends_where_the_notes_are_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted(tmp_path)
    monkeypatch.setattr(time, "sleep", lambda _: (tmp_path / "rank0.live").unlink())
    assert cli.main(["watch", str(tmp_path)]) == 2
    assert "are gone: whoever started the ranks has removed them" in capsys.readouterr().err


def test_only_ranks_of_the_newest_run_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "getppid", lambda: 1)
        noted(tmp_path, rank=1)
    noted(tmp_path)
    assert [note.rank for note in read_notes(tmp_path)] == [0]
    assert not list(tmp_path.glob("*.live.*"))
    assert (tmp_path / "rank0.live").stat().st_mode & 0o777 == 0o600


def test_label_cannot_command_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noted(tmp_path, event=dataclasses.replace(EVENT, label="\x1b[2Jsnr", site="\x1b[H.py:1 in f"))
    with watch.Lines(sys.stdout) as view:
        view.show(picture_of(read_notes(tmp_path)))
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "\\x1b[H.py:1 in f" in printed


def test_rank_that_is_furthest_behind_is_shown_first_among_many() -> None:
    ranks = [RankNow(rank, 40, groups={"all": (40, 9), "half": (20, 5)} if rank != 33 else {}) for rank in range(40)]
    picture = picture_of(ranks)
    assert (picture.rows[0].rank, picture.rows[0].behind) == (33, 9)  # it may be no member of the half
    assert len(picture.rows) == 16
    assert "24 more ranks" in picture.remarks[0]


def test_watch_without_ranks_or_without_guard_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert cli.main(["run", "--watch", str(script)]) == 2
    assert "--watch is for --nproc N" in capsys.readouterr().err
    assert cli.main(["run", "--nproc", "2", "--guard", "off", "--watch", str(script)]) == 2
    assert "with --guard off nothing is seen" in capsys.readouterr().err


# -- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", tiers(["step"], ["strict"]))
def test_late_rank_and_the_call_of_the_waiting_rank_are_shown(two_ranks: RankPool, mode: str, tmp_path: Path) -> None:
    _, (heading, first, second, *remarks) = two_ranks.run(live_runs.waited_for, str(tmp_path), mode).values()
    assert heading == "2 of 2 ranks, step 1; rank 0 waits for rank 1"
    assert re.search(
        r"0 behind, waits for \d+ s: number 2, all_reduce\(float32\[1\], sum\) 'snr', at .*live_runs", first
    )
    assert "1 behind, runs" in second
    assert remarks == [f"  renegotiations: 1; new keys of the last: '{mode} 0', '{mode} 1' (name='train')"]


NOT_HELD = "not held any more by rank 1: '<snr>' (name='{}')"
NOT_FINITE = "ALARM: step 0: the gradients of rank 1 are not finite"
DIVERGED = "ALARM: step 0, found by the sentinel: [replica digests] replicas differ"


def test_dropped_keys_and_alarms_of_all_wings_are_shown(two_ranks: RankPool, tmp_path: Path) -> None:
    for lines in two_ranks.run(live_runs.told_of, str(tmp_path), "lines").values():
        _, _, _, renegotiations, not_held, *alarms = (line.strip() for line in lines)
        assert renegotiations.startswith("renegotiations: 1;")
        assert not_held == NOT_HELD.format("lines")
        first, second = alarms
        assert first.startswith(NOT_FINITE)
        assert second.startswith(DIVERGED)


@pytest.mark.slow
def test_number_of_a_collective_has_its_group_where_there_are_several(two_ranks: RankPool, tmp_path: Path) -> None:
    for alone, beside in two_ranks.run(live_runs.last_of_groups, str(tmp_path)).values():
        assert re.search(r": number 2, all_reduce\(", alone)
        assert re.search(r": number 1 of group '[^']+', all_reduce\(", beside)


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
    assert re.search(r"waits for \d+ s: number 2, all_reduce\(float32\[1\], sum\), at .*train.py:14", lines[at + 1])
    assert re.search(r"1 behind, stopped .*: number 1, all_reduce\(float32\[1\], sum\) 'loss', at", lines[at + 2])
    assert any("ALARM: the ranks of the default group" in line for line in lines)
    assert "CollectiveMismatch" in done.stderr
    assert not list((tmp_path / "scratch").glob("ddpstats-run-*"))


def _until(is_so: Callable[[], bool], program: Program) -> None:
    deadline = time.monotonic() + LIMIT_SEC
    while not is_so():
        assert time.monotonic() < deadline, program.errors()
        time.sleep(0.1)


# -- a terminal -------------------------------------------------------------------------------------------------------

WATCHED = """
import fcntl, signal, sys, termios
from ddpstats.guard.screen import run_watched

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background has it ignored
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
program = "import sys, time; print('step', 1, sys.stdout.isatty()); sys.stderr.write('10%\\\\r20%'); " + sys.argv[2]
try:
    sys.exit(run_watched([sys.executable, "-c", program], {}, sys.argv[1]))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.library
@pytest.mark.parametrize(
    ("ends", "keys", "status"),
    [("sys.exit(3)", b"", 3), ("sys.stderr.flush(); time.sleep(600)", b"\x03", 130)],
    ids=["by itself", "by an interrupt"],
)
def test_a_table_on_a_terminal(ends: str, keys: bytes, status: int, tmp_path: Path) -> None:
    noted(tmp_path).alarm("\x1b[2Jdiffer")
    drawn = _drawn_beside(tmp_path, ends, keys, status)
    assert b"step 1 True" in drawn  # the program has a terminal
    assert b"'snr'" in drawn
    assert b"\\x1b[2Jdiffer" in drawn
    assert b"\x1b[2J" not in drawn
    assert drawn.rindex(b"\x1b[?25h") > drawn.rindex(b"\x1b[?25l")


@pytest.mark.library
def test_small_terminal_shows_the_late_rank_and_the_alarm() -> None:
    needs("rich")
    from rich.console import Console
    from rich.live import Live

    last = ("number 4812, all_reduce(float32[25557032], sum) '(gradients)'", "train.py:214 in train_one_epoch")
    rows = [watch.Row(rank, 120, 4812, 0, "waits for 31 s", *last) for rank in range(15)]
    rows.append(watch.Row(15, 120, 4811, 1, "stopped (last began 33 s ago)", *last))
    remarks = [
        "renegotiations: 1",
        "ALARM: step 118: the gradients of rank 1 are not finite",
        "ALARM: long" + " s" * 900,
    ]
    drawn, screen = io.StringIO(), Screen(io.StringIO())
    console = Console(file=drawn, force_terminal=True, width=80, height=24, color_system=None)
    screen._live = Live(console=console, auto_refresh=False)
    with screen:
        screen.above(b"[" + b"=" * 100)  # a progress bar without an end
        screen.show(watch.Picture("16 of 16 ranks", rows, remarks, [15], 0))
        lines = [line.strip() for line in drawn.getvalue().splitlines()[-24:]]
    assert lines[0].endswith("=\u2026")
    assert lines[1:3] == ["16 of 16 ranks", remarks[1]]
    names = lines.index("...") + 1  # of the alarm that is too long
    assert lines[names].startswith("rank step behind state")
    ranks = [int(line.split()[0]) for line in lines[names + 1 : -2]]
    assert ranks == [15, *range(len(ranks) - 1)]
    assert lines[-2:] == [f"and {16 - len(ranks)} more ranks", "renegotiations: 1"]


def _drawn_beside(directory: Path, ends: str, keys: bytes, status: int) -> bytes:
    """What comes to a terminal, while a program that ``ends`` runs beside the notes of ``directory``."""
    needs("rich")
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, b"\x28\0\xa0\0\0\0\0\0")  # 40 lines of 160 characters
    environ = {**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)}
    environ.pop("COLUMNS", None)  # GNU readline leaves it behind, and it wins over the terminal's width
    process = subprocess.Popen(
        [sys.executable, "-c", WATCHED, str(directory), ends],
        env=environ, stdin=its, stdout=its, stderr=its, start_new_session=True,
    )  # fmt: skip
    os.close(its)
    drawn = b""
    try:
        deadline = time.monotonic() + LIMIT_SEC
        while select.select([ours], [], [], max(0.0, deadline - time.monotonic()))[0]:
            try:
                drawn += os.read(ours, 1 << 16)
            except OSError:  # nobody has the other end any more
                break
            if keys and b"20%" in drawn and b"last collective" in drawn:
                os.write(ours, keys)
                keys = b""
        assert not keys, drawn
        assert process.wait(LIMIT_SEC) == status
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return drawn
