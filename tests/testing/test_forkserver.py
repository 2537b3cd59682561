"""The server that ranks are forked from (`ddpstats.testing.forkserver`) leaves the program as it was."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import sys
import textwrap
import time
from collections.abc import Callable
from typing import Any

import pytest

from ddpstats.testing import RankPool, forkserver, ranks
from tests import programs


def status_of(function: Callable[..., Any], **env: str) -> int | None:
    """Return the exit status of a fork that calls ``function``."""
    process = forkserver.Fork(function, environ={**os.environ, **env}, stderr=2)
    process.start()
    process.join(60)
    return process.exitcode


def test_program_keeps_its_start_method_and_its_main_module() -> None:
    before, main = multiprocessing.get_start_method(allow_none=True), sys.modules["__main__"]
    multiprocessing.set_start_method(None, force=True)
    try:
        assert status_of(os.getpid) == 0
        assert multiprocessing.get_start_method(allow_none=True) is None
        assert sys.modules["__main__"] is main
    finally:
        multiprocessing.set_start_method(before, force=True)


def test_fork_has_as_many_threads_as_its_environment_says() -> None:
    assert status_of(_exit_with_threads, OMP_NUM_THREADS="3") == 3


def _exit_with_threads() -> None:
    import torch

    sys.exit(torch.get_num_threads())


@pytest.mark.slow
def test_server_that_cannot_start_or_is_silent_is_an_error_and_long_directories_are_not(tmp_path: pathlib.Path) -> None:
    """The path of a socket has about 100 bytes at most."""
    (tmp_path / "breaks.py").write_text("raise OSError")
    (tmp_path / "never_ends.py").write_text("import time\ntime.sleep(1000)")
    directory = tmp_path / ("x" * 100)
    directory.mkdir()
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, time
        from ddpstats.testing import forkserver, run_ranks
        forkserver.preload(["breaks"])
        try:
            run_ranks(os.getpid, 1)
        except RuntimeError as error:
            print(error)
        forkserver._preloaded[-1] = "never_ends"
        forkserver._ANSWER_SEC = 1.0
        try:
            run_ranks(os.getpid, 1)
        except RuntimeError as error:
            print(error)
        forkserver._preloaded.remove("never_ends")
        forkserver._ANSWER_SEC = 300.0
        for _ in range(600):  # until the system says that the server has ended
            try:
                run_ranks(os.getpid, 1).values()
                break
            except RuntimeError:
                time.sleep(0.1)
        else:
            raise SystemExit("the next server does not start")
        print("done")
    """)
    )
    environ = {"TMPDIR": str(directory), "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = programs.run([str(script)], environ=environ, fresh=True)
    ended, silent, last = done.stdout.splitlines()[-3:]
    assert ended.startswith("the process that forks ranks has ended"), done.stderr
    assert "gave no answer for 1 s" in silent, done.stderr
    assert last == "done"


@pytest.mark.slow
def test_rank_whose_end_is_not_reported_is_given_up_by_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank seems to run on, as one that the kernel holds in a driver, which SIGKILL does not end."""
    monkeypatch.setattr(ranks, "_REAP_SEC", 0.1)
    monkeypatch.setattr(ranks.RankPool._stop, "__defaults__", (0.1,))
    with monkeypatch.context() as patched:
        pool = RankPool(1)
        pool.run(os.getpid).values()
        patched.setattr(forkserver.Fork, "exitcode", None)
        began = time.monotonic()
        pool.close()
        assert time.monotonic() - began < 10


def test_module_that_starts_ranks_when_imported_says_so_on_its_ranks(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "from ddpstats.testing import run_ranks\ndef f(): pass\noutcomes = run_ranks(f, 1)\n"
    (tmp_path / "starts_ranks.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    module = __import__("starts_ranks")
    monkeypatch.delitem(sys.modules, "starts_ranks")
    (outcome,) = module.outcomes
    assert "RuntimeError: \n        An attempt has been made to start a new process" in outcome.traceback
