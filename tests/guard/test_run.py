"""``ddpstats run`` guards a program as it is, and ``ddpstats report`` names the fault from the records it leaves."""

from __future__ import annotations

import json
import os
import py_compile
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from ddpstats import cli
from ddpstats.guard import run
from ddpstats.guard.group import MODES
from ddpstats.guard.record import read_records
from tests import programs
from tests.guard.tiers import tiers
from tests.needs import needs
from tests.programs import alone, ddpstats, on_ranks, without_gloo

SEED = """
    import torch, torch.distributed as dist
    from espnet2.torch_utils.recursive_op import recursive_average

    dist.init_process_group("gloo")
    lack = "l1_loss" if dist.get_rank() else "snr_loss"
    stats = {"loss": torch.ones(2), lack: [torch.ones(2)]}
    recursive_average(stats, torch.ones(2), True)
    print("rank", dist.get_rank(), "went on")
"""


@pytest.mark.library
def test_unmodified_espnet_code_is_stopped_and_both_keys_are_named(script: Any) -> None:
    needs("espnet2")
    done = ddpstats("run", "--nproc", "2", "--guard", "strict", script(SEED))
    assert done.returncode != 0
    assert "went on" not in done.stdout
    assert "'snr_loss'" in done.stderr
    assert "'l1_loss'" in done.stderr
    assert "rank 1 lacks key 'snr_loss'" in done.stderr


@pytest.mark.library
def test_unmodified_espnet_code_is_right_with_espnet(script: Any) -> None:
    needs("espnet2")
    file = script(
        SEED.replace("    recursive_average(stats", "    averages, _ = recursive_average(stats")
        + "    print(averages)\n"
    )
    done = ddpstats("run", "--nproc", "2", "--guard", "strict", "--espnet", file)
    assert done.returncode == 0, done.stderr
    averages = [line for line in done.stdout.splitlines() if "snr_loss" in line]
    assert len(averages) == 2
    assert all(re.search(r"'loss': tensor\(1.\).*'l1_loss': \[tensor\(1.\)\]", line) for line in averages), averages


def test_espnet_that_cannot_be_patched_is_an_error(script: Any, tmp_path: Path) -> None:
    (tmp_path / "espnet2").mkdir()
    (tmp_path / "espnet2" / "__init__.py").touch()
    file = script("print('the program ran')")
    done = ddpstats("run", "--espnet", file, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "the program ran" not in done.stdout
    assert "ddpstats run: error:" in done.stderr
    left_alone = ddpstats("run", "--espnet", file, PYTHONPATH=str(tmp_path), DDPSTATS_DISABLE="1")
    assert (left_alone.returncode, left_alone.stdout) == (0, "the program ran\n"), left_alone.stderr


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
    print(type(__builtins__), sys.argv[1:], __name__, sys.path[0], sys.modules["__main__"].__file__ == __file__)

    def fail(how):
        if how == "exit":
            sys.exit(3)
        if how == "hook":
            sys.excepthook = tell
        if how in ("raise", "hook"):
            raise ValueError("of the script")

    fail(sys.argv[1])
"""


@pytest.mark.parametrize("how", tiers(["raise"], ["pass", "exit", "hook"]))
def test_script_sees_no_difference_under_run(script: Any, how: str) -> None:
    """Both run in fresh interpreters: a fork would hide a difference."""
    arguments = [script(ORDINARY), how, "--json"]
    plain, under = (programs.run([*run, *arguments], fresh=True) for run in ([], ["-m", "ddpstats", "run"]))
    assert (under.returncode, without_gloo(under.stdout)) == (plain.returncode, without_gloo(plain.stdout))
    last_lines = [line for line in under.stderr.splitlines() if line.startswith("ddpstats run: ")]
    assert _unmarked(under.stderr) == _unmarked(plain.stderr)
    assert len(last_lines) == (how not in ("raise", "hook"))
    hint = "nothing was compared: no process group was made in this process. If the program starts its ranks itself"
    assert all(hint in line and "Otherwise start it on ranks: `ddpstats run --nproc" in line for line in last_lines)


def _unmarked(text: str) -> str:
    """Without our own last line, and without the marks under a traceback's lines."""
    return "\n".join(line for line in text.splitlines() if not re.match(r"\s*[\^~]+\s*$|ddpstats run: ", line))


def test_module_runs_as_main_until_its_exit_handlers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    text = "import atexit, pickle, sys\nclass Settings: pass\nprint(__name__, __spec__.name, sys.argv[1:])\n"
    (tmp_path / "programme.py").write_text(f"{text}atexit.register(lambda: print(pickle.dumps(Settings())[:2]))\n")
    done = alone("-m", "ddpstats", "run", "-m", "programme", "a")
    shown = "__main__ programme ['a']\nb'\\x80\\x04'\n"
    assert (done.statuses, without_gloo(done.stdout)) == ([0], shown), done.stderr


ABORT = """
    import torch, torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(300_000 if dist.get_rank() else 100))
"""


def test_records_say_why_gloo_aborted_the_process(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "records"
    done = ddpstats("run", "--nproc", "2", "--guard", "record", "--record-dir", str(directory), script(ABORT))
    assert done.returncode != 0
    assert "Received data size doesn't match expected size" in done.stderr  # gloo's own words
    assert "What differs: the shape" in done.stderr
    capsys.readouterr()
    assert cli.main(["report", str(directory)]) == 1
    report = capsys.readouterr().out
    assert "rank 0: all_reduce(float32[100], sum)" in report
    assert "rank 1: all_reduce(float32[300000], sum)" in report
    assert cli.main(["report", str(directory), "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["seq"], finding["by_rank"]["1"]["shapes"]) == (2, [[300000]])


@pytest.mark.slow
def test_run_prints_the_finding_as_json_on_stderr(script: Any) -> None:
    """Stdout is left to the script."""
    done = ddpstats("run", "--nproc", "2", "--json", "--guard", "strict", script(ABORT))
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("{")]
    assert json.loads(line)["findings"][0]["seq"] == 2
    done = ddpstats("run", "--nproc", "2", "--json", script("import sys; sys.exit(7)"))
    assert (done.returncode, done.stdout) == (7, "")
    assert not [line for line in done.stderr.splitlines() if line.startswith("{")]


ENDS = """
    import os, signal, sys, time, torch.distributed as dist

    how = sys.argv[1]
    if how == "killed" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit 3 on rank 1" and os.environ["RANK"] == "1":
        sys.exit(3)
    time.sleep(100)
"""


@pytest.mark.parametrize(("how", "status"), tiers([("killed", 128 + signal.SIGKILL)], [("exit 3 on rank 1", 3)]))
def test_run_ends_with_the_status_of_the_rank_that_failed_first(script: Any, how: str, status: int) -> None:
    """A rank that torchrun ends meanwhile has another status."""
    done = ddpstats("run", "--nproc", "2", script(ENDS), how)
    assert done.returncode == status, done.stderr
    assert "Root Cause (first observed failure)" in done.stderr
    assert not re.search(r'File ".*(torch/distributed|ddpstats)/', done.stderr)


GOES_ON = """
    import os, time, torch, torch.distributed as dist

    dist.init_process_group("gloo")
    for step in range(10_000):
        dist.all_reduce(torch.ones(1))
        time.sleep(0.02)
        if step == 5:
            print(os.getpid(), flush=True)
"""


@pytest.mark.parametrize(
    ("number", "is_sent_to"),
    tiers([(signal.SIGINT, "terminal")], [(signal.SIGTERM, "launcher"), (signal.SIGINT, "launcher")]),
)
def test_signal_ends_all_ranks_in_one_line_and_leaves_their_records(
    script: Any, tmp_path: Path, number: signal.Signals, is_sent_to: str
) -> None:
    """The ranks are fresh interpreters: a terminal sends SIGINT to all processes of its session's group."""
    records = tmp_path / "records"
    arguments = ["-m", "ddpstats", "run", "--nproc", "2", "--record-dir", str(records), script(GOES_ON)]
    with programs.Program(arguments, programs.environ_of(), fresh=True) as program:
        deadline = time.monotonic() + programs.LIMIT_SEC
        while len(ranks := program.output().split()) < 2:
            assert time.monotonic() < deadline, program.errors()
            time.sleep(0.05)
        send = os.killpg if is_sent_to == "terminal" else os.kill
        send(program.pid, number)
        done = program.finish()
    assert done.returncode == 128 + number, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last == f"ddpstats run: ended by {number.name}, and all ranks with it"
    assert done.stderr.count("ddpstats run: ") == 1
    assert not re.search(r'File ".*(torch/distributed/(run|launcher|elastic)|ddpstats)', done.stderr), done.stderr
    assert not any(Path("/proc", rank).exists() for rank in ranks)
    assert [len(record.events) > 5 for record in read_records(records)] == [True, True]


KILLED = """
    import os, signal, sys, torch, torch.distributed as dist

    dist.init_process_group("gloo")
    for step in range(20):
        dist.all_reduce(torch.ones(1))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_record_is_whole_to_the_last_event_when_the_process_is_killed(script: Any, tmp_path: Path) -> None:
    options = ["--guard", "record", "--record-dir", str(tmp_path / "records")]
    done = on_ranks("-m", "ddpstats", "run", *options, script(KILLED), ranks=1)
    assert done.statuses == [-signal.SIGKILL]
    (record,) = read_records(tmp_path / "records")
    assert [event.seq for event in record.events] == list(range(1, 21))
    assert record.end is None


LONG_FAULTY = """
    import ddpstats, torch, torch.distributed as dist

    dist.init_process_group("gloo")
    stats = {"loss": torch.ones(1), ("l1_loss" if dist.get_rank() else "snr_loss"): torch.ones(1)}
    for key in stats:
        dist.all_reduce(stats[key])
    for _ in range(99):
        dist.barrier()
    print("went on")
"""


def test_environment_variable_alone_guards_a_program_that_imports_ddpstats(script: Any) -> None:
    done = on_ranks(script(LONG_FAULTY), DDPSTATS_GUARD="step")
    assert 0 not in done.statuses
    assert "'snr_loss'" in done.stderr
    assert "went on" not in done.stdout, "99 barriers are more than check_every"


def test_environment_variable_with_an_unknown_mode_is_refused() -> None:
    done = programs.run(["-c", "import ddpstats"], environ={"DDPSTATS_GUARD": "sometimes"})
    assert "legal values: strict, step, record, off" in done.stderr


def test_environment_variable_does_not_import_ddpstats() -> None:
    code = "import sys; print('ddpstats' in sys.modules)"
    done = programs.run(["-c", code], environ={"DDPSTATS_GUARD": "strict"}, fresh=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


@pytest.mark.slow
def test_report_of_ranks_that_agree_ends_with_0(script: Any, tmp_path: Path) -> None:
    directory = str(tmp_path / "records")
    text = ABORT.replace("300_000 if dist.get_rank() else 100", "100")
    done = ddpstats("run", "--nproc", "2", "--guard", "record", "--record-dir", directory, script(text))
    assert done.returncode == 0, done.stderr
    assert cli.main(["report", directory]) == 0


def test_run_refuses_record_without_directory_and_no_ranks(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--guard", "record", script("pass")]) == 2
    assert "--record-dir" in capsys.readouterr().err
    assert cli.main(["run", "--nproc", "0", script("pass")]) == 2
    assert ddpstats("run", "--guard", "off", script("print(1)")).stdout == "1\n"


def test_compiled_script_runs(tmp_path: Path) -> None:
    source, compiled = tmp_path / "train.py", tmp_path / "train.pyc"
    source.write_text("print('runs as', __name__)\n")
    py_compile.compile(str(source), str(compiled))
    done = ddpstats("run", "--guard", "off", str(compiled))
    assert (done.returncode, done.stdout) == (0, "runs as __main__\n"), done.stderr


def test_run_offers_the_modes_of_the_guard_and_watches_optimizers_for_a_record_alone(
    script: Any, tmp_path: Path
) -> None:
    assert run._MODES == MODES
    hooks = script("from torch.optim import optimizer; print(len(optimizer._global_optimizer_post_hooks))")
    assert ddpstats("run", hooks).stdout == "0\n"
    assert ddpstats("run", "--record-dir", str(tmp_path / "records"), hooks).stdout == "1\n"
