"""``ddpstats doctor`` marks what differs between ranks and should not, and names the rank that does not come."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from ddpstats import cli
from ddpstats.doctor import facts, ranks
from ddpstats.doctor.report import CLOCK, UNCONNECTED, Told, as_json, as_text, compared
from ddpstats.testing import PerRank, RankDied, run_ranks
from tests import programs
from tests.doctor import doctor_runs
from tests.doctor.doctor_runs import Ended, doctor, doctor_without_rank_1

LIMIT_SEC = 240.0
CANNOT = "cannot write there (No such file or directory)"
NOWHERE = "no (No such file or directory)"


def shown_by(ended: Ended) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(ended.out)
    return shown


# -- from what ranks might tell ---------------------------------------------------------------------------------------


def test_text_marks_differences_and_counts_them() -> None:
    facts_by_rank: list[Told] = [
        {"place": {"host": f"h{rank}"}, "environment": {"NCCL_DEBUG": "INFO"} if rank else {}, "measured": measured}
        for rank, measured in enumerate(
            [
                {"store round trip": 0.25, "same directory": "yes", CLOCK: [0.0, 0.0]},
                {"store round trip": 0.5, "same directory": "no", CLOCK: [-40.0, 0.125]},
            ]
        )
    ]
    assert (
        as_text(compared(facts_by_rank))
        == """\
2 ranks. What differs between them, and should not, has a ! before it.

place
    host
      rank 0: h0
      rank 1: h1

environment
  ! NCCL_DEBUG
      rank 0: not there
      rank 1: INFO

measured
    store round trip: 0.250 to 0.500 ms, most on rank 1
  ! same directory
      rank 0: yes
      rank 1: no
    clock minus rank 0's: -40.000 ms at most, and that at most 0.125 wrong

2 differences: NCCL_DEBUG (environment), same directory (measured)"""
    )
    assert as_json(compared(facts_by_rank))["environment"] == {
        "NCCL_DEBUG": {"marked": True, "by_rank": [None, "INFO"]}
    }


@pytest.mark.parametrize(("ahead", "error", "marked"), [(-99.0, 0.0, False), (150.0, 60.0, False), (-150.0, 1.0, True)])
def test_clock_is_marked_only_beyond_its_error(ahead: float, error: float, marked: bool) -> None:
    rows = compared([{"measured": {CLOCK: [0.0, 0.0]}}, {"measured": {CLOCK: [ahead, error]}}])
    assert [row.is_marked for row in rows] == [marked]


def test_devices_and_hosts_are_not_marked_and_long_lists_are_cut() -> None:
    names = ("host", "CUDA_VISIBLE_DEVICES")
    rows = compared([{"place": {name: str(rank) for name in names}} for rank in range(40)])
    assert not any(row.is_marked for row in rows)
    assert as_text(rows).count("and 24 more; --json has all") == 2


@pytest.mark.parametrize(
    ("name", "listed"),
    [
        *(("NCCL_DEBUG", True), ("NCCL_IB_PKEY", True), ("MASTER_PORT", True), ("PYTHONHASHSEED", True)),
        *(("RANK", False), ("TORCHELASTIC_ERROR_FILE", False)),
        *(("HF_TOKEN", False), ("TORCH_HUB_TOKEN", False), ("AWS_SECRET_ACCESS_KEY", False)),
    ],
)
def test_variables_of_the_launch_are_listed_but_no_secrets(name: str, listed: bool) -> None:
    assert facts._is_listed(name) is listed


# -- real processes ---------------------------------------------------------------------------------------------------


def test_process_without_rank_is_told_how_to_compare_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert cli.main(["doctor", "--no-libraries"]) == 0
    assert "To compare ranks: torchrun --nproc-per-node 2 -m ddpstats doctor" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert cli.main(["doctor", "--no-libraries"]) == 2
    assert "RANK is set without WORLD_SIZE" in capsys.readouterr().err


def test_only_rank_of_a_job_is_examined_by_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    assert cli.main(["doctor", "--no-libraries"]) == 0
    assert capsys.readouterr().out.startswith("1 rank. What differs")


@pytest.mark.parametrize(("rank", "size", "port"), [("one", "2", "29500"), ("2", "2", "29500"), ("0", "2", "")])
def test_impossible_rank_or_port_is_an_error(
    rank: str, size: str, port: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", size), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", port)):
        monkeypatch.setenv(name, value)
    assert cli.main(["doctor", "--no-libraries"]) == 2
    assert f"RANK={rank!r}, WORLD_SIZE={size!r}, MASTER_PORT={port!r}: RANK is" in capsys.readouterr().err


def test_rank_0_removes_its_file_on_sigterm(tmp_path: Path) -> None:
    def terminated() -> None:
        with ranks._file(tmp_path) as (name, _):
            assert (tmp_path / name).is_file()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(LIMIT_SEC)

    with pytest.raises(SystemExit, match="143"):
        terminated()
    assert list(tmp_path.iterdir()) == []


def test_error_of_a_directory_is_reported_instead_of_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a mount that is stale on one host: an error there would keep the others waiting."""
    monkeypatch.setattr(ranks, "_LOOK_SEC", 0.0)
    (tmp_path / "loop").symlink_to("loop")
    assert ranks._seen(tmp_path) == "yes"
    assert ranks._seen(tmp_path / "nowhere") == "no"
    assert ranks._seen(tmp_path / "loop" / "file") == "no (Too many levels of symbolic links)"


@pytest.mark.slow
def test_equal_ranks_under_torchrun_do_not_differ(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "ddpstats", "doctor"]
    done = programs.run([*torchrun, "--no-libraries"], timeout=LIMIT_SEC, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 ranks. ")
    assert done.stdout.endswith("\nNothing differs.\n")
    assert list(tmp_path.iterdir()) == []


def test_differing_environment_directory_and_version_are_marked(tmp_path: Path) -> None:
    """Another environment, another directory, and another version of a library."""
    here, there = tmp_path / "here", tmp_path / "there"
    (there / "torcheval-9.9.dist-info").mkdir(parents=True)
    (there / "torcheval-9.9.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torcheval\nVersion: 9.9\n"
    )
    here.mkdir()
    first, other = run_ranks(
        doctor,
        2,
        "--json",
        environ=PerRank([{}, {"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "1"}]),
        cwd=PerRank([str(here), str(there)]),
        path=PerRank(["", str(there)]),
        timeout_sec=LIMIT_SEC,
    ).values()
    assert (first.status, other) == (1, Ended(0, "", ""))
    shown = shown_by(first)
    assert shown["differences"] == [
        "place: directory",
        "versions: torcheval",
        "environment: NCCL_DEBUG",
        "measured: same directory",
    ]
    assert shown["versions"]["torcheval"]["by_rank"][1] == "9.9"
    assert shown["measured"]["same directory"]["by_rank"] == ["yes", "no"]
    assert shown["environment"]["CUDA_VISIBLE_DEVICES"]["by_rank"][1] == "1"
    ahead, error = shown["measured"][CLOCK]["by_rank"][1]
    assert abs(ahead) <= error  # it is the same clock
    assert list(here.iterdir()) == []


@pytest.mark.slow
def test_interface_that_does_not_exist_is_marked_as_unconnected() -> None:
    first, other = run_ranks(
        doctor,
        2,
        *("--json", "--timeout-sec", "10"),
        environ=PerRank([{}, {"GLOO_SOCKET_IFNAME": "nosuch0"}]),
        timeout_sec=LIMIT_SEC,
    ).values()
    assert (first.status, other.status) == (1, 0)
    shown = shown_by(first)
    assert shown["differences"] == ["environment: GLOO_SOCKET_IFNAME", f"measured: {UNCONNECTED}"]
    assert "nosuch0" in shown["measured"][UNCONNECTED]["by_rank"][1]


@pytest.mark.parametrize("when", [pytest.param("at first", marks=pytest.mark.slow), "in the middle"])
def test_killed_rank_is_named(when: str, tmp_path: Path) -> None:
    arguments = ("--dir", str(tmp_path), "--timeout-sec", "10")
    outcomes = run_ranks(doctor_without_rank_1, 2, when, *arguments, timeout_sec=LIMIT_SEC)
    assert isinstance(outcomes[1].error, RankDied)
    ended = outcomes[0].value
    assert (ended.status, ended.out) == (2, "")
    assert "ddpstats doctor: error: " in ended.err
    assert "\n  rank 1: " in ended.err
    assert list(tmp_path.iterdir()) == []


def test_directory_that_cannot_be_written_is_unknown() -> None:
    first, _ = run_ranks(doctor, 2, "--json", "--dir", "/proc", timeout_sec=LIMIT_SEC).values()
    assert first.status == 0
    seen = shown_by(first)["measured"]["same directory"]
    assert seen == {"marked": False, "value": f"unknown: {CANNOT}, inode {os.stat('/proc').st_ino}"}


@pytest.mark.parametrize(
    ("directory", "there_is", "differences", "seen"),
    [
        (
            ".",
            None,
            ["same directory"],
            [f"unknown: {CANNOT}", "unknown: can write there, inode {} of another device "],
        ),
        ("checkpoints", "checkpoints", ["directory exists", "same directory"], [NOWHERE, "unknown: can write there, "]),
        ("checkpoints", None, ["directory exists"], [NOWHERE, NOWHERE]),
    ],
)
def test_directory_that_only_rank_1_can_write_is_compared_by_inode(
    directory: str, there_is: str | None, differences: list[str], seen: list[str], tmp_path: Path
) -> None:
    """Both ranks are given one path, which leads through where each runs: for rank 0 that is read-only."""
    if there_is is not None:
        (tmp_path / there_is).mkdir()
    ended = programs.on_ranks(doctor_runs.__file__, f"/proc/self/cwd/{directory}", "/proc", str(tmp_path))
    assert ended.statuses == [1, 0], ended.stderr
    shown = json.loads(ended.stdout)
    assert [name.partition(": ")[2] for name in shown["differences"]] == differences
    row = shown["measured"]["same directory"]
    for text, start in zip(row.get("by_rank") or [row["value"]] * 2, seen, strict=True):
        assert text.startswith(start.format(tmp_path.stat().st_ino))
    assert [path.name for path in tmp_path.rglob("*")] == [there_is] * (there_is is not None)


def test_missing_directory_is_marked_without_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "file").touch()
    for name, why in (("nowhere", "No such file or directory"), ("file", "Not a directory")):
        assert cli.main(["doctor", "--no-libraries", "--dir", str(tmp_path / name)]) == 1
        assert f"  ! directory exists: no ({why})\n" in capsys.readouterr().out
