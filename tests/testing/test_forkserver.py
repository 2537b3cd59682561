"""What ranks are forked from (`ddpstats.testing.forkserver`), and what it leaves as it was."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import sys
import tempfile
import textwrap
import time
import types
from collections.abc import Callable
from typing import Any

import pytest

from ddpstats.testing import RankPool, forkserver, ranks
from tests import programs


def forked(function: Callable[..., Any] = os.getpid, *args: Any, stderr: int = 2, **env: str) -> forkserver.Fork:
    return forkserver.fork(function, *args, environ={**os.environ, **env}, stdout=1, stderr=stderr)


def test_program_keeps_its_start_method_and_its_main_module() -> None:
    before, main = multiprocessing.get_start_method(allow_none=True), sys.modules["__main__"]
    multiprocessing.set_start_method(None, force=True)
    try:
        assert forked().wait(60) == 0
        assert multiprocessing.get_start_method(allow_none=True) is None
        assert sys.modules["__main__"] is main
    finally:
        multiprocessing.set_start_method(before, force=True)


def test_fork_has_as_many_threads_as_its_environment_says() -> None:
    process = forkserver.fork(_with_status, environ={**os.environ, "OMP_NUM_THREADS": "3"}, stdout=1, stderr=2)
    assert process.wait(60) == 3


def _with_status() -> None:
    import torch

    forkserver.end(torch.get_num_threads())


@pytest.mark.slow
def test_server_that_cannot_start_is_an_error_and_long_directories_are_not(tmp_path: pathlib.Path) -> None:
    """The path of a socket has about 100 bytes at most."""
    (tmp_path / "breaks.py").write_text("raise OSError")
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
        forkserver._preloaded.remove("breaks")
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
    answer, last = done.stdout.splitlines()[-2:]
    assert answer.startswith("the process that forks ranks has ended"), done.stderr
    assert last == "done"


def test_function_that_cannot_be_imported_is_reported_on_stderr_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("of_this_process_alone")
    exec("def function(): pass", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with tempfile.TemporaryFile() as stderr:
        assert forked(module.function, stderr=stderr.fileno()).wait(60) == 1
        stderr.seek(0)
        assert b"No module named 'of_this_process_alone'" in stderr.read()


@pytest.mark.slow
def test_rank_whose_end_is_not_reported_is_given_up_by_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that the kernel holds in a driver: SIGKILL does not end it."""
    monkeypatch.setattr(ranks, "_REAP_SEC", 0.1)
    monkeypatch.setattr(ranks, "_STOP_GRACE_SEC", 0.1)
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
    assert "RuntimeError: ranks are started when a module is imported" in outcome.traceback
