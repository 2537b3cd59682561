"""``ddpstats demo``: what it prints, from reports made by hand and from real ranks, and that nothing is left behind."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ddpstats.demo import demo as demo_module, report as report_module
from ddpstats.demo.report import Collectives, RankReport
from tests.programs import without_gloo

LIMIT_SEC = 180
TRUE = {"l1_loss[0]": 0.0505, "l1_loss[1]": 0.023, "snr_loss[0]": -1.572, "snr_loss[1]": -2.468, "snr_loss[2]": -2.041}
# What the n-th all_reduce of two ranks gives, whichever names they had in mind
BY_ORDER = [0.0505, -0.5145, -2.5645, -1.97]

Start = Callable[..., "subprocess.Popen[str]"]


# -- from reports made by hand ----------------------------------------------------------------------------------------


def report(rank: int, ddpstats: Mapping[str, float] = TRUE) -> RankReport:
    inputs = report_module.stats_of(rank)
    plain = dict(zip(report_module.flat(inputs), BY_ORDER, strict=True))
    worst = [[0, -3.0369999408721924], [1, -1.8990000486373901]]
    return RankReport(rank, inputs, plain, ddpstats, Collectives(5, 3, 1), worst)


def test_the_whole_text() -> None:
    text = report_module.as_text([report(0), report(1)], colour=False)
    assert (
        text
        == """\
Ranks average their losses, each with weight 8. An L1 loss is never negative.
  rank 0 holds {"l1_loss": [0.057], "snr_loss": [-1.052, -3.037, -2.041]}
  rank 1 holds {"l1_loss": [0.044, 0.023], "snr_loss": [-2.092, -1.899]}

              true     plain all_reduce                     ddpstats
                       rank 0             rank 1            rank 0     rank 1
l1_loss[0]    0.0505   0.0505             0.0505            0.0505     0.0505
l1_loss[1]    0.0230   -                 -0.5145 <- wrong   0.0230     0.0230
snr_loss[0]  -1.5720  -0.5145 <- wrong   -2.5645 <- wrong  -1.5720    -1.5720
snr_loss[1]  -2.4680  -2.5645 <- wrong   -1.9700 <- wrong  -2.4680    -2.4680
snr_loss[2]  -2.0410  -1.9700 <- wrong    -                -2.0410    -2.0410

Nothing failed, for all ranks made the same number of calls. But an all_reduce knows no names: the second
one added snr_loss[0] of rank 0 to l1_loss[1] of rank 1.

Collectives for one set of averages:
  plain all_reduce  5: one for each value, and one for the weight
  ddpstats          1, and 3 the first time, when the ranks tell each other what they hold

Which rank was it? With per_rank=True, farthest from the median of snr_loss[1]:
  rank 0 with -3.0370, rank 1 with -1.8990

The fix:

    import ddpstats
    averages = ddpstats.reduce_stats(stats, weight).values"""
    )


def test_colour_marks_what_is_wrong_and_nothing_else() -> None:
    reports = [report(0), report(1)]
    coloured, plain = (report_module.as_text(reports, colour=colour) for colour in (True, False))
    red = re.findall(r"\033\[31m(.*?)\033\[0m", coloured)
    assert len(red) == plain.count("<- wrong") == 6
    assert all(text.endswith(" <- wrong") for text in red)
    assert re.sub(r"\033\[\d+m", "", coloured) == plain


@pytest.mark.parametrize(
    ("is_terminal", "environ", "colour"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
    ],
)
def test_colour_only_where_it_is_wanted(
    is_terminal: bool, environ: dict[str, str], colour: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert demo_module._wants_colour() is colour


def test_the_true_means_are_by_name() -> None:
    assert report_module.true_means([report(0), report(1)]) == pytest.approx(TRUE, rel=1e-12)
    assert report_module.true_means([report(0)]) == report_module.flat(report(0).inputs)


def test_a_wrong_number_of_our_own_is_admitted() -> None:
    assert report_module.is_right([report(0), report(1)])
    for wrong in ({**TRUE, "l1_loss[1]": -0.5145}, {**TRUE, "l1_loss[1]": math.nan}, {**TRUE, "more": 0.0}):
        assert not report_module.is_right([report(0), report(1, wrong)])
    lacking = {name: value for name, value in TRUE.items() if name != "l1_loss[1]"}
    assert not report_module.is_right([report(0, lacking), report(1)])


def test_a_report_survives_its_file() -> None:
    assert RankReport.from_json(report(1).to_json()) == report(1)


# -- with real ranks --------------------------------------------------------------------------------------------------


def marked(mark: str) -> list[str]:
    """The command lines of all processes that inherited the mark; none where there is no /proc to tell."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:  # it has just ended, or is another user's
            continue
    return found


def left_within(mark: str, limit_sec: float) -> list[str]:
    """Who is still there after a while. The ranks of a parent that was killed need a moment to notice."""
    until = time.monotonic() + limit_sec
    while (left := marked(mark)) and time.monotonic() < until:
        time.sleep(0.1)
    return left


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a program whose children, and their children, are all gone at the end of the test, with their files."""
    mark = f"DDPSTATS_TEST_MARK={uuid.uuid4().hex}"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    started = []

    def start(*command: str, **settings: str) -> subprocess.Popen[str]:
        name, value = mark.split("=")
        environ = os.environ | {name: value, "TMPDIR": str(scratch)} | settings
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        started.append(subprocess.Popen(command, env=environ, text=True, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=LIMIT_SEC)
    was_killed = any(process.returncode == -signal.SIGKILL for process in started)
    assert left_within(mark, LIMIT_SEC if was_killed else 0) == []
    assert was_killed or not list(scratch.glob("ddpstats-demo-*"))


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=LIMIT_SEC)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def demo(start: Start, *args: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return finish(start(sys.executable, "-m", "ddpstats", "demo", *args, **{"OMP_NUM_THREADS": "1", **settings}))


def test_two_ranks(start: Start) -> None:
    done = finish(start(sys.executable, "-m", "ddpstats", "demo", DDPSTATS_GUARD="strict"))
    assert (done.returncode, done.stderr) == (0, "")
    assert without_gloo(done.stdout) == report_module.as_text([report(0), report(1)], colour=False) + "\n"


def test_two_ranks_in_json(start: Start) -> None:
    """Also from within a job of another torchrun, whose settings must not get in."""
    done = demo(start, "--json", RANK="5", WORLD_SIZE="9", PET_NNODES="3", TORCHELASTIC_RUN_ID="x", MASTER_PORT="1")
    assert (done.returncode, done.stderr) == (0, "")
    shown = json.loads(done.stdout)
    assert (shown["ranks"], shown["weight"], shown["ok"]) == (2, 8.0, True)
    assert shown["true"] == pytest.approx(TRUE, rel=1e-12)
    assert [of["rank"] for of in shown["by_rank"]] == [0, 1]
    assert shown["by_rank"][1]["plain_all_reduce"]["l1_loss[1]"] == pytest.approx(-0.5145, rel=1e-6)
    assert "l1_loss[1]" not in shown["by_rank"][0]["plain_all_reduce"]
    for of in shown["by_rank"]:
        assert of["inputs"] == report_module.stats_of(of["rank"])
        assert of["ddpstats"] == pytest.approx(TRUE, rel=1e-6)
        assert of["ddpstats"] == shown["by_rank"][0]["ddpstats"]
        assert of["collectives"]["plain_all_reduce"] == 5
        assert of["collectives"]["ddpstats"] == 1
        assert [rank for rank, _ in of["worst"]] == [0, 1]
        assert [value for _, value in of["worst"]] == pytest.approx([-3.037, -1.899], rel=1e-6)


def test_one_rank_has_nothing_to_mix_up(start: Start) -> None:
    done = demo(start, "--ranks", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "wrong" not in done.stdout
    assert "A single rank has nothing to mix up" in done.stdout
    assert "Which rank" not in done.stdout
    assert "ddpstats          0\n" in done.stdout


def test_three_ranks(start: Start) -> None:
    done = demo(start, "--ranks", "3")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^l1_loss\[1\]    0\.0230   - +-0\.6937 <- wrong   0\.0230     0\.0230$", done.stdout, re.M)
    assert "each odd rank holds" in done.stdout
    assert "median of snr_loss[1]:\n  rank 1 with -1.8990, rank 0 with -3.0370\n" in done.stdout  # rank 0 is at it
    assert "Of the 3 ranks, every other even one gets what rank 0 gets" in done.stdout


def test_ranks_that_fail(start: Start) -> None:
    done = demo(start, "--json", DDPSTATS_TIMEOUT_SEC="soon")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ddpstats demo: error: the ranks failed\nthe end of rank ")
    assert "ConfigError: DDPSTATS_TIMEOUT_SEC='soon' is not a number of seconds" in done.stderr


def on_rank_1(tmp_path: Path, code: str) -> str:
    """A PYTHONPATH with which rank 1 runs ``code`` before anything else."""
    folder = tmp_path / "site"
    folder.mkdir()
    text = f"import os, signal, time\nif os.environ.get('LOCAL_RANK') == '1':\n    {code}\n"
    (folder / "sitecustomize.py").write_text(text)
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))


def test_a_rank_that_is_killed(start: Start, tmp_path: Path) -> None:
    done = demo(start, PYTHONPATH=on_rank_1(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "exitcode  : -9" in done.stderr


HANGS = "time.sleep(1000)"


def test_ranks_that_take_too_long(start: Start, tmp_path: Path) -> None:
    """Rank 0 waits for rank 1, which has not even begun to watch whether its parent lives."""
    code = "from ddpstats.demo import demo; demo.measure(2, limit_sec=12)"
    done = finish(start(sys.executable, "-c", code, PYTHONPATH=on_rank_1(tmp_path, HANGS)))
    assert done.returncode == 1
    assert "DdpstatsError: the ranks took longer than 12 s, and were ended" in done.stderr


def until_the_ranks_run(parent: subprocess.Popen[str], scratch: Path) -> None:
    until = time.monotonic() + LIMIT_SEC
    while len(list(scratch.glob("*/logs/**/stderr.log"))) < 2:
        assert parent.poll() is None
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_parent_that_is_killed(start: Start, tmp_path: Path) -> None:
    parent = start(sys.executable, "-m", "ddpstats", "demo", PYTHONPATH=on_rank_1(tmp_path, HANGS))
    until_the_ranks_run(parent, tmp_path / "scratch")
    parent.kill()


def test_a_parent_that_is_interrupted(start: Start, tmp_path: Path) -> None:
    parent = start(sys.executable, "-m", "ddpstats", "demo", PYTHONPATH=on_rank_1(tmp_path, HANGS))
    until_the_ranks_run(parent, tmp_path / "scratch")
    parent.send_signal(signal.SIGINT)
    done = finish(parent)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_look_for_what_is_left_can_fail(start: Start) -> None:
    sleeper = start(sys.executable, "-c", "import time; time.sleep(1000)")
    environ = Path(f"/proc/{sleeper.pid}/environ")
    if not environ.exists():
        pytest.skip("without /proc there is no telling which processes are left")
    until = time.monotonic() + LIMIT_SEC
    while not (mark := re.search(rb"DDPSTATS_TEST_MARK=\w+", environ.read_bytes())):
        assert time.monotonic() < until  # before its exec, a child still shows the environment of its parent
        time.sleep(0.02)
    assert len(marked(mark.group().decode())) == 1
