"""``ddpstats demo`` prints wrong averages and then right ones, and leaves neither processes nor files behind."""

from __future__ import annotations

import json
import math
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from ddpstats import demo as demo_module
from ddpstats._observe.groups import operators_name_reduce_op
from tests.programs import LIMIT_SEC, Program, without_gloo

MARK = "DDPSTATS_TEST_MARK"
TRUE = {"l1_loss[0]": 0.0505, "l1_loss[1]": 0.023, "snr_loss[0]": -1.572, "snr_loss[1]": -2.468, "snr_loss[2]": -2.041}
# What the n-th all_reduce of two ranks gives, whichever names they had in mind
BY_ORDER = [0.0505, -0.5145, -2.5645, -1.97]

Start = Callable[..., Program]


# -- from reports made by hand ----------------------------------------------------------------------------------------


def report(rank: int, ddpstats: Mapping[str, float] = TRUE) -> demo_module.RankReport:
    inputs = demo_module.stats_of(rank)
    plain = dict(zip(demo_module.flat(inputs), BY_ORDER, strict=True))
    worst = [[0, -3.0369999408721924], [1, -1.8990000486373901]]
    collectives = {"plain_all_reduce": 5, "ddpstats_first_call": 5, "ddpstats": 1}
    averages = {"plain_all_reduce": plain, "ddpstats": ddpstats}
    return {"rank": rank, "inputs": inputs, **averages, "collectives": collectives, "worst": worst}


def test_text_of_two_ranks_has_both_tables_and_the_fix() -> None:
    text = demo_module.as_text(demo_module.report_of([report(0), report(1)]))
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
  ddpstats          1, and 5 the first time, when the ranks exchange what they hold

Which rank was it? With per_rank=True, farthest from the median of snr_loss[1]:
  rank 0 with -3.0370, rank 1 with -1.8990

The fix:

    import ddpstats
    averages = ddpstats.reduce_stats(stats, weight).values"""
    )


def test_text_of_three_ranks_says_which_ranks_hold_the_same() -> None:
    text = demo_module.as_text(demo_module.report_of([report(rank) for rank in range(3)]))
    assert "each odd rank holds" in text
    assert "Of the 3 ranks, every other even one gets what rank 0 gets" in text


def test_true_means_are_by_name() -> None:
    assert demo_module.report_of([report(0), report(1)])["true"] == pytest.approx(TRUE, rel=1e-12)
    assert demo_module.report_of([report(0)])["true"] == demo_module.flat(report(0)["inputs"])


def test_wrong_number_of_ddpstats_is_not_right() -> None:
    assert demo_module.report_of([report(0), report(1)])["ok"]
    for wrong in ({**TRUE, "l1_loss[1]": -0.5145}, {**TRUE, "l1_loss[1]": math.nan}, {**TRUE, "more": 0.0}):
        assert not demo_module.report_of([report(0), report(1, wrong)])["ok"]
    lacking = {name: value for name, value in TRUE.items() if name != "l1_loss[1]"}
    assert not demo_module.report_of([report(0, lacking), report(1)])["ok"]


# -- with real ranks --------------------------------------------------------------------------------------------------


def marked(mark: str) -> list[str]:
    """Return the command lines of all processes that inherited the mark; none where there is no /proc."""
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                commands.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:  # it has just ended, or is another user's
            continue
    return commands


@pytest.fixture
def mark() -> str:
    """Return what the environment of each child of a program holds."""
    return uuid.uuid4().hex


@pytest.fixture
def start(tmp_path: Path, mark: str) -> Iterator[Start]:
    """Start a program. At the end of the test its children and their children are gone, and so are their files."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    started: list[Program] = []

    def start(*arguments: str, **settings: str) -> Program:
        environ = {**os.environ, MARK: mark, "TMPDIR": str(scratch), **settings}
        started.append(Program(arguments, environ, fresh_children=True))
        return started[-1]

    yield start
    try:
        # The process that forked the ranks needs a moment to notice that its parent has ended
        until = time.monotonic() + LIMIT_SEC
        while (left := marked(mark)) and time.monotonic() < until:
            time.sleep(0.1)
        assert left == []
        assert not list(scratch.iterdir())
    finally:
        for program in started:
            program.kill()


def ended(program: Program) -> tuple[int, str, str]:
    """Return status, stdout and stderr of a program at its end."""
    return program.wait(), without_gloo(program.output()), program.errors()


def demo(start: Start, *arguments: str, **settings: str) -> tuple[int, str, str]:
    return ended(start("-m", "ddpstats", "demo", *arguments, **settings))


def test_demo_of_two_ranks_prints_what_reports_say(start: Start) -> None:
    status, out, err = demo(start, **({"DDPSTATS_GUARD": "strict"} if operators_name_reduce_op else {}))
    assert (status, err) == (0, "")
    assert out == demo_module.as_text(demo_module.report_of([report(0), report(1)])) + "\n"


@pytest.mark.slow
def test_json_of_two_ranks_inside_another_job_has_the_same_numbers(start: Start) -> None:
    """The settings of the other torchrun must not get in."""
    other_job = {"RANK": "5", "WORLD_SIZE": "9", "PET_NNODES": "3", "TORCHELASTIC_RUN_ID": "x", "MASTER_PORT": "1"}
    status, out, err = demo(start, "--json", **other_job)
    assert (status, err) == (0, "")
    shown = json.loads(out)
    assert (shown["ranks"], shown["weight"], shown["ok"]) == (2, 8.0, True)
    assert shown["true"] == pytest.approx(TRUE, rel=1e-12)
    first, second = shown["by_rank"]
    assert second["plain_all_reduce"]["l1_loss[1]"] == pytest.approx(-0.5145, rel=1e-6)
    assert "l1_loss[1]" not in first["plain_all_reduce"]
    assert first["ddpstats"] == second["ddpstats"] == pytest.approx(TRUE, rel=1e-6)
    for rank, shown_by_rank in enumerate((first, second)):
        assert shown_by_rank["rank"] == rank
        assert shown_by_rank["inputs"] == demo_module.stats_of(rank)
        assert shown_by_rank["collectives"].items() >= {"plain_all_reduce": 5, "ddpstats": 1}.items()
        assert [value for _, value in shown_by_rank["worst"]] == pytest.approx([-3.037, -1.899], rel=1e-6)


@pytest.mark.slow
def test_demo_takes_two_to_eight_ranks(start: Start) -> None:
    status, out, err = demo(start, "--ranks", "8")
    assert (status, err) == (0, "")
    assert "Of the 8 ranks, every other even one gets what rank 0 gets" in out
    for ranks in ("1", "9"):
        status, out, err = demo(start, "--ranks", ranks)
        assert (status, out) == (2, "")
        assert f"argument --ranks: invalid choice: {ranks} (choose from 2, 3, 4, 5, 6, 7, 8)" in err


@pytest.mark.slow
def test_error_of_the_ranks_is_quoted(start: Start) -> None:
    status, out, err = demo(start, "--json", DDPSTATS_TIMEOUT_SEC="soon")
    assert (status, out) == (2, "")
    assert err.startswith("ddpstats demo: error: the ranks could not run: 2 of 2 ranks failed\n--- rank 0 ---\n")
    assert "ConfigError: DDPSTATS_TIMEOUT_SEC='soon' must be a number of seconds" in err


@pytest.mark.slow
def test_interrupted_parent_ends_its_ranks_and_says_nothing(start: Start, tmp_path: Path, mark: str) -> None:
    """The fixture looks for them, which this test shows to find ranks that run."""
    folder = tmp_path / "site"
    folder.mkdir()
    begun = tmp_path / "begun"
    (folder / "sitecustomize.py").write_text(f"""import time
from ddpstats import demo
def stats_of(rank):
    open({str(begun)!r}, "w").close()
    time.sleep(1000)
demo.stats_of = stats_of
""")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    parent = start("-m", "ddpstats", "demo", PYTHONPATH=path)
    until = time.monotonic() + LIMIT_SEC
    while not begun.exists():
        assert parent.poll() is None
        assert time.monotonic() < until
        time.sleep(0.1)
    assert not Path("/proc").exists() or len(marked(mark)) >= 3
    os.kill(parent.pid, signal.SIGINT)
    assert ended(parent) == (130, "", "")
