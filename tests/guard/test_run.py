"""``ddpstats run`` and ``ddpstats report``: programs as they are, on ranks that torchrun starts."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ddpstats.guard._records import read_records
from tests import programs
from tests.needs import needs
from tests.programs import alone, on_ranks

LIMIT_SEC = 120


def ddpstats(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return programs.run(["-m", "ddpstats", *args], timeout=LIMIT_SEC, environ=env)


SEED = """
    import torch, torch.distributed as dist
    from espnet2.torch_utils.recursive_op import recursive_average

    dist.init_process_group("gloo")
    lack = "l1_loss" if dist.get_rank() else "snr_loss"
    stats = {"loss": torch.ones(2), lack: [torch.ones(2)]}
    recursive_average(stats, torch.ones(2), True)
    print("rank", dist.get_rank(), "went on")
"""


def test_unmodified_espnet_code_is_stopped_and_both_keys_are_named(script: Any) -> None:
    needs("espnet2")
    done = ddpstats("run", "--nproc", "2", "--guard", "strict", script(SEED))
    assert done.returncode != 0
    assert "went on" not in done.stdout
    assert "'snr_loss[0]'" in done.stderr
    assert "'l1_loss[0]'" in done.stderr
    assert "rank 1 lacks key 'snr_loss'" in done.stderr


def test_under_torchrun(script: Any) -> None:
    needs("espnet2")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "ddpstats", "run"]
    done = programs.run([*torchrun, "--guard", "step", script(SEED)], timeout=LIMIT_SEC)
    assert done.returncode != 0
    assert "'snr_loss[0]'" in done.stderr


ORDINARY = """
    import atexit, pickle, sys, threading

    class Settings:
        pass

    def save():
        print(len(pickle.dumps(Settings())))

    def save_later():
        threading.main_thread().join()
        save()

    def tell(kind, error, trace):
        print("told", kind, error, trace.tb_frame.f_code.co_name)

    atexit.register(save)
    threading.Thread(target=save_later).start()
    print(sys.argv[1:], __name__, sys.path[0], sys.modules["__main__"].__file__ == __file__)

    def fail(how):
        if how == "exit":
            sys.exit(3)
        if how == "hook":
            sys.excepthook = tell
        if how in ("raise", "hook"):
            raise ValueError("of the script")

    fail(sys.argv[1])
"""


@pytest.mark.parametrize("how", ["pass", "exit", "raise", "hook"])
def test_a_script_notices_no_difference(script: Any, how: str) -> None:
    path = script(ORDINARY)
    plain, under = (
        subprocess.run([sys.executable, *words, path, how, "--json"], capture_output=True, text=True, timeout=LIMIT_SEC)
        for words in ([], ["-m", "ddpstats", "run"])
    )
    assert (under.returncode, under.stdout) == (plain.returncode, plain.stdout)
    ours = [line for line in under.stderr.splitlines() if line.startswith("ddpstats run: ")]
    assert _unmarked(under.stderr) == _unmarked(plain.stderr)
    assert len(ours) == (how not in ("raise", "hook"))
    assert all(
        "nothing was compared: no process group was made. Start it on ranks: `ddpstats run" in one for one in ours
    )


def _unmarked(text: str) -> str:
    """Without our own last line, and without the marks under a traceback's lines."""
    return "\n".join(line for line in text.splitlines() if not re.match(r"\s*[\^~]+\s*$|ddpstats run: ", line))


def test_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    text = "import atexit, pickle, sys\nclass Settings: pass\nprint(__name__, __spec__.name, sys.argv[1:])\n"
    (tmp_path / "programme.py").write_text(f"{text}atexit.register(lambda: print(pickle.dumps(Settings())[:2]))\n")
    done = alone("-m", "ddpstats", "run", "-m", "programme", "a")
    assert (done.statuses, done.stdout) == ([0], "__main__ programme ['a']\nb'\\x80\\x04'\n"), done.stderr


ABORT = """
    import torch, torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(300_000 if dist.get_rank() else 100))
"""


def test_where_gloo_aborts_the_process_the_records_tell_why(script: Any, tmp_path: Path) -> None:
    directory = tmp_path / "records"
    done = ddpstats("run", "--nproc", "2", "--guard", "record", "--record-dir", str(directory), script(ABORT))
    assert done.returncode != 0
    assert "Received data size doesn't match expected size" in done.stderr  # gloo's own words
    assert "What differs: the shape" in done.stderr
    told = ddpstats("report", str(directory))
    assert told.returncode == 1
    assert "rank 0: all_reduce(float32[100], sum)" in told.stdout
    assert "rank 1: all_reduce(float32[300000], sum)" in told.stdout
    found = json.loads(ddpstats("report", str(directory), "--json").stdout)
    assert found["findings"][0]["seq"] == 2
    assert found["findings"][0]["by_rank"]["1"]["shapes"] == [[300000]]


def test_what_json_of_run_prints(script: Any) -> None:
    """Its stdout is the script's. With --nproc the status is torchrun's own."""
    done = ddpstats("run", "--nproc", "2", "--json", "--guard", "strict", script(ABORT))
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("{")]
    assert json.loads(line)["findings"][0]["seq"] == 2
    done = ddpstats("run", "--nproc", "2", "--json", script("import sys; sys.exit(7)"))
    assert (done.returncode, done.stdout) == (1, "")
    assert not [line for line in done.stderr.splitlines() if line.startswith("{")]


KILLED = """
    import os, signal, sys, torch, torch.distributed as dist

    dist.init_process_group("gloo")
    for step in range(20):
        dist.all_reduce(torch.ones(1))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_record_is_whole_to_the_last_event_when_the_process_is_killed(script: Any, tmp_path: Path) -> None:
    options = ["--guard", "record", "--record-dir", str(tmp_path / "records")]
    done = on_ranks("-m", "ddpstats", "run", *options, script(KILLED), ranks=1)
    assert done.statuses == [-signal.SIGKILL]
    (record,) = read_records(tmp_path / "records")
    assert [event.seq for event in record.events] == list(range(1, 21))
    assert record.end is None


def test_the_environment_variable_is_enough(script: Any) -> None:
    text = SEED.replace("import torch,", "import ddpstats, torch,").replace(
        "print(", "[dist.barrier() for _ in range(99)]; print("
    )
    done = on_ranks(script(text), DDPSTATS_GUARD="step")
    assert 0 not in done.statuses
    assert "'snr_loss[0]'" in done.stderr
    assert "went on" not in done.stdout, "99 barriers are more than check_every"
    refused = programs.run(["-c", "import ddpstats"], timeout=LIMIT_SEC, environ={"DDPSTATS_GUARD": "sometimes"})
    assert "legal values: strict, step, record, off" in refused.stderr


def test_the_environment_variable_alone_runs_nothing_of_ours() -> None:
    done = programs.run(
        ["-c", "import sys; print('ddpstats' in sys.modules)"],
        timeout=LIMIT_SEC,
        environ={"DDPSTATS_GUARD": "strict"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_report_of_what_is_no_record(tmp_path: Path) -> None:
    done = ddpstats("report", str(tmp_path))
    assert done.returncode == 2
    assert "holds no rank*.jsonl" in done.stderr
    (tmp_path / "rank0.jsonl").write_text('{"ddpstats": 1, "rank": 0, "world_size": 1}\n{"op": 3, "group": "0"}\n')
    done = ddpstats("report", str(tmp_path))
    assert done.returncode == 2
    assert "rank0.jsonl, line 2" in done.stderr


def test_ranks_that_agree_are_nothing_to_report(script: Any, tmp_path: Path) -> None:
    directory = str(tmp_path / "records")
    text = ABORT.replace("300_000 if dist.get_rank() else 100", "100")
    done = ddpstats("run", "--nproc", "2", "--guard", "record", "--record-dir", directory, script(text))
    assert done.returncode == 0, done.stderr
    assert ddpstats("report", directory).returncode == 0
    assert json.loads(ddpstats("report", directory, "--json").stdout)["findings"] == []


def test_options_that_make_no_sense(script: Any) -> None:
    done = ddpstats("run", "--guard", "record", script("pass"))
    assert done.returncode == 2
    assert "--record-dir" in done.stderr
    assert ddpstats("run", "--nproc", "0", script("pass")).returncode == 2
    started = time.monotonic()
    assert ddpstats("run", "--guard", "off", script("print(1)")).stdout == "1\n"
    assert time.monotonic() - started < LIMIT_SEC


def test_a_script_that_ends_by_sys_exit_is_compared_to_the_end(script: Any) -> None:
    text = """
        import sys, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM)
        sys.exit(0)
    """
    done = on_ranks("-m", "ddpstats", "run", "--guard", "step", script(text))
    assert set(done.statuses) == {1}
    assert "What differs: the reduce op" in done.stderr
