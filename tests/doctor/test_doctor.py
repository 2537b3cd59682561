"""``ddpstats doctor`` marks what differs between ranks and should not, and names the rank that does not come."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils import collect_env

from ddpstats import cli
from ddpstats.doctor import (
    ALL_REDUCE,
    CLOCK,
    DISTRIBUTIONS,
    UNCONNECTED,
    Facts,
    as_text,
    compare,
    ranks,
)
from ddpstats.testing import PerRank, RankDied, run_ranks
from tests import programs
from tests.doctor.doctor_runs import Ended, doctor, doctor_without_rank_1

LIMIT_SEC = 240.0


def shown_by(ended: Ended) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(ended.out)
    return shown


# -- from facts that ranks might have ---------------------------------------------------------------------------------


def test_text_marks_differences_and_counts_them() -> None:
    facts_by_rank: list[Facts] = [
        {
            "location": {"host": f"h{rank}"},
            DISTRIBUTIONS: {"numpy": "2.1.3", "torchmetrics": f"1.{rank}"},
            "environment": {"NCCL_DEBUG": "INFO"} if rank else {},
            "measured": {ALL_REDUCE: 0.25 + rank, "same directory": "no" if rank else "yes", CLOCK: -40.0 * rank},
        }
        for rank in range(2)
    ]
    report = compare(facts_by_rank)
    assert (
        as_text(report)
        == """\
2 ranks. What differs between them, and should not, has a ! before it.

location
    host
      rank 0: h0
      rank 1: h1

distributions
  ! torchmetrics
      rank 0: 1.0
      rank 1: 1.1
    1 more, which do not differ: --json has them

environment
  ! NCCL_DEBUG
      rank 0: not there
      rank 1: INFO

measured
    all_reduce of 8 bytes
      rank 0: 0.2 ms
      rank 1: 1.2 ms
  ! same directory
      rank 0: yes
      rank 1: no
    clock ahead of rank 0's
      rank 0: -0.0 ms
      rank 1: -40.0 ms

3 differences: distributions: torchmetrics, environment: NCCL_DEBUG, measured: same directory"""
    )
    assert report["environment"] == {"NCCL_DEBUG": {"marked": True, "by_rank": [None, "INFO"]}}
    assert report[DISTRIBUTIONS]["numpy"] == {"marked": False, "value": "2.1.3"}


@pytest.mark.parametrize(
    ("ahead_ms", "stay_ms", "certain_ms", "is_marked"),
    [(0, 1, 0.0, False), (99, 0, 99.0, False), (150, 60, 90.0, False), (-150, 1, -149.0, True), (-3, 5, 0.0, False)],
)
def test_clock_is_marked_only_beyond_what_a_pass_leaves_open(
    ahead_ms: int, stay_ms: int, certain_ms: float, is_marked: bool
) -> None:
    slow = (0, 1_000_000_000)
    first, own = ([slow, (5, 5)], [slow, (ahead_ms * 1_000_000 - stay_ms * 1_000_000 + 5, ahead_ms * 1_000_000 + 5)])
    assert ranks._ahead_ms(first, own) == certain_ms
    report = compare([{"measured": {CLOCK: 0.0}}, {"measured": {CLOCK: certain_ms}}])
    assert report["differences"] == ([f"measured: {CLOCK}"] if is_marked else [])


def test_devices_and_hosts_are_not_marked_and_long_lists_are_cut() -> None:
    names = ("host", "CUDA_VISIBLE_DEVICES")
    report = compare([{"location": {name: str(rank) for name in names}} for rank in range(40)])
    assert report["differences"] == []
    assert as_text(report).count("and 24 more; --json has all") == 2


def test_texts_of_other_ranks_are_printed_without_control_characters() -> None:
    report = compare([{"location": {"host": "h\x1b[2J"}}, {"location": {"host": "h"}}])
    assert "rank 0: 'h\\x1b[2J'" in as_text(report)


def test_command_of_torch_that_hangs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `nvidia-smi` does where a driver hangs."""
    monkeypatch.setattr(ranks, "_COMMAND_SEC", 0.1)
    monkeypatch.setattr(collect_env, "get_gpu_info", lambda run: run("sleep 60"))
    monkeypatch.setattr(collect_env, "get_os", lambda run: run("echo one; echo two")[1])
    versions = dict(ranks._versions())
    assert versions["gpu_info"] == "TimeoutExpired: Command 'sleep 60' timed out after 0.1 seconds"
    assert versions["os"] == "one; two"


@pytest.mark.parametrize(
    ("name", "listed"),
    [
        *(("NCCL_DEBUG", True), ("NCCL_IB_PKEY", True), ("MASTER_PORT", True), ("PYTHONHASHSEED", True)),
        *(("RANK", False), ("TORCHELASTIC_ERROR_FILE", False)),
        *(("HF_TOKEN", False), ("TORCH_HUB_TOKEN", False), ("AWS_SECRET_ACCESS_KEY", False)),
    ],
)
def test_variables_of_the_launch_are_listed_but_no_secrets(name: str, listed: bool) -> None:
    assert bool(ranks.LISTED.match(name)) is listed


# -- real processes ---------------------------------------------------------------------------------------------------


def set_rank(monkeypatch: pytest.MonkeyPatch, rank: str, size: str, port: str) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", size), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", port)):
        monkeypatch.setenv(name, value)


def test_process_without_rank_is_told_how_to_compare_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert cli.main(["doctor"]) == 0
    assert "To compare ranks: torchrun --nproc-per-node 2 -m ddpstats doctor" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert cli.main(["doctor"]) == 2
    assert "have to be as torchrun sets them: WORLD_SIZE is not set" in capsys.readouterr().err


def test_only_rank_of_a_job_is_examined_by_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_rank(monkeypatch, "0", "1", "29500")
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.startswith("1 rank. What differs")


@pytest.mark.parametrize(
    ("rank", "size", "port", "words"),
    [("x", "2", "29500", "'x'"), ("2", "2", "29500", "rank 2 of 2"), ("0", "2", "", "''"), ("0", "2", "0", "port 0")],
)
def test_impossible_rank_or_port_is_an_error(
    rank: str, size: str, port: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_rank(monkeypatch, rank, size, port)
    assert cli.main(["doctor"]) == 2
    error = capsys.readouterr().err
    assert "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT have to be as torchrun sets them" in error
    assert words in error


def test_rank_0_removes_its_file_on_sigterm(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def terminated() -> None:
        with contextlib.ExitStack() as stack:
            assert (tmp_path / ranks._make_file(tmp_path, stack)).is_file()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(LIMIT_SEC)

    try:
        with pytest.raises(SystemExit, match="143"):
            terminated()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_equal_ranks_under_torchrun_do_not_differ(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "ddpstats", "doctor"]
    done = programs.run(torchrun, timeout=LIMIT_SEC, cwd=tmp_path, fresh_children=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 ranks. ")
    assert done.stdout.endswith("\nNothing differs.\n")
    assert list(tmp_path.iterdir()) == []


def test_differing_environment_directory_and_version_are_marked(tmp_path: Path) -> None:
    """Another environment, another version of a library, and another directory, which gives errors as a stale mount."""
    mounted, stale = tmp_path / "mounted", tmp_path / "stale"
    (stale / "torcheval-9.9.dist-info").mkdir(parents=True)
    (stale / "torcheval-9.9.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torcheval\nVersion: 9.9\n"
    )
    (mounted / "sub").mkdir(parents=True)
    (stale / "sub").symlink_to("sub")
    first, second = run_ranks(
        doctor,
        2,
        *("--json", "--dir", "sub"),
        environ=PerRank([{}, {"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "1"}]),
        cwd=PerRank([str(mounted), str(stale)]),
        path=PerRank(["", str(stale)]),
        timeout_sec=LIMIT_SEC,
    ).values()
    assert (first.status, second) == (1, Ended(0, "", ""))
    shown = shown_by(first)
    assert shown["differences"] == [
        "location: directory",
        "location: directory exists",
        "distributions: torcheval",
        "environment: NCCL_DEBUG",
        "measured: same directory",
    ]
    assert shown[DISTRIBUTIONS]["torcheval"]["by_rank"][1] == "9.9"
    assert shown["measured"]["same directory"]["by_rank"] == ["yes", "no"]
    assert shown["environment"]["CUDA_VISIBLE_DEVICES"]["by_rank"][1] == "1"
    assert shown["measured"][CLOCK] == {"marked": False, "value": 0.0}  # it is the same clock
    assert list((mounted / "sub").iterdir()) == []


@pytest.mark.slow
def test_interface_that_does_not_exist_is_marked_as_unconnected() -> None:
    first, second = run_ranks(
        doctor,
        2,
        *("--json", "--timeout-sec", "10"),
        environ=PerRank([{}, {"GLOO_SOCKET_IFNAME": "nosuch0"}]),
        timeout_sec=LIMIT_SEC,
    ).values()
    assert (first.status, second.status) == (1, 0)
    shown = shown_by(first)
    assert shown["differences"] == ["environment: GLOO_SOCKET_IFNAME", f"measured: {UNCONNECTED}"]
    assert "nosuch0" in shown["measured"][UNCONNECTED]["by_rank"][1]


@pytest.mark.parametrize("when", [pytest.param("at first", marks=pytest.mark.nightly), "in the middle"])
def test_killed_rank_is_named(when: str, tmp_path: Path) -> None:
    arguments = ("--dir", str(tmp_path), "--timeout-sec", "10")
    outcomes = run_ranks(doctor_without_rank_1, 2, when, *arguments, timeout_sec=LIMIT_SEC)
    assert isinstance(outcomes[1].error, RankDied)
    ended = outcomes[0].value
    assert (ended.status, ended.out) == (2, "")
    assert "ddpstats doctor: error: " in ended.err
    assert "\n  rank 1: " in ended.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("directory", "differences"), [("/proc", []), ("/nowhere", ["location: directory exists"])])
def test_directory_that_cannot_be_written_is_unknown(directory: str, differences: list[str]) -> None:
    first, _ = run_ranks(doctor, 2, "--json", "--dir", directory, timeout_sec=LIMIT_SEC).values()
    assert first.status == len(differences)
    shown = shown_by(first)
    assert shown["differences"] == differences
    row = {"marked": False, "value": "unknown: rank 0 cannot write there"}
    assert shown["measured"]["same directory"] == row


def test_missing_directory_is_marked_without_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "file").touch()
    for name in ("nowhere", "file"):
        assert cli.main(["doctor", "--dir", str(tmp_path / name)]) == 1
        assert "  ! directory exists: no\n" in capsys.readouterr().out
