"""What the server forks is what a fresh interpreter runs, and ends with it."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

import pytest

from tests.scripts import python, server
from tests.warm_python import ENDS_WHOLE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs are forked on Linux alone")

PROGRAM = """
import atexit, os, sys, threading

def said(*what):
    print(*what, sorted(name for name in globals() if not name.startswith("__")))

print(__name__, sys.modules["__main__"].__file__ if "__file__" in globals() else None, sys.argv, sys.path)
print(os.environ["OF_THE_PROGRAM"], os.getcwd(), "ddpstats" in sys.modules, os.getsid(0) == os.getpid())
print(os.read(0, 5), os.read(int(sys.argv[1]), 5), sorted(map(int, os.listdir("/proc/self/fd")))[:4])
atexit.register(said, "at exit")
threading.Timer(0.2, said, ["in a thread"]).start()
raise SystemExit(4) if sys.argv[2:] else ValueError("of the program")
"""


def environ(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


@pytest.mark.parametrize("arguments", [[], ["an argument"]])
@pytest.mark.parametrize("how", ["path", "-m", "-c"])
def test_it_is_what_python_runs(
    how: str, arguments: list[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "input").write_text("input")
    (tmp_path / "handed on").write_text("more of it")
    monkeypatch.chdir(tmp_path)
    command = {"path": ["program.py"], "-m": ["-u", "-m", "program"], "-c": ["-c", PROGRAM]}[how]
    ended = []
    for executable in (sys.executable, python()):
        with open("input") as stdin, open("handed on") as more:
            done = subprocess.run(
                [executable, *command, str(more.fileno()), *arguments],
                env=environ(OF_THE_PROGRAM="2", PYTHONPATH=str(tmp_path / "imports")),
                stdin=stdin,
                pass_fds=[more.fileno()],
                start_new_session=True,
                capture_output=True,
                text=True,
                timeout=60,
            )
        ended.append([done.returncode, *done.stdout.splitlines(), _without_the_runner(done.stderr)])
    assert ended[0] == ended[1]
    assert ended[0][0] == (4 if arguments else 1)


def _without_the_runner(traceback: str) -> str:
    return re.sub(r'  File "<(string|frozen runpy)>", line .*\n', "", traceback)


@pytest.mark.parametrize(
    ("more", "parent"),
    [
        ({}, "the server"),
        ({"TORCHELASTIC_RUN_ID": "x", "DDPSTATS_GUARD": "step"}, "the server"),
        ({"PYTHONHASHSEED": "1"}, "this process"),
        ({"OMP_NUM_THREADS": "2"}, "this process"),
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, "this process"),
    ],
)
def test_what_is_read_at_the_start_needs_an_interpreter_of_its_own(more: Mapping[str, str], parent: str) -> None:
    done = subprocess.run(
        [python(), "-c", "import os; print(os.getppid())"],
        env=environ(**more),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert int(done.stdout) == {"the server": server().process.pid, "this process": os.getpid()}[parent]


def test_a_sitecustomize_needs_an_interpreter_of_its_own(tmp_path: pathlib.Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('customized')")
    done = subprocess.run(
        [python(), "-c", ""],
        env=environ(PYTHONPATH=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "customized\n"


def test_what_it_starts_itself_is_forked_too() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import os; print(os.getppid())'])"
    done = subprocess.run([python(), "-c", code], env=environ(), capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) == server().process.pid


WAITS = """
import json, os, signal, sys, time
if sys.argv[1:]:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
print(json.dumps(os.getpid()), flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("number", "more", "code"),
    [
        (signal.SIGTERM, [], -signal.SIGTERM),
        (signal.SIGTERM, ["a handler"], 7),
        (signal.SIGKILL, [], -signal.SIGKILL),
        (signal.SIGABRT, ["to the fork"], -signal.SIGABRT),
    ],
)
def test_a_signal_ends_it(number: signal.Signals, more: list[str], code: int) -> None:
    command = [python(), "-c", WAITS, *more]
    with subprocess.Popen(command, env=environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = json.loads(process.stdout.readline())
        os.kill(pid if more == ["to the fork"] else process.pid, number)
        assert process.wait(20) == code
    deadline = time.monotonic() + 20
    while pathlib.Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_server_that_starts_threads_would_leave_them_behind() -> None:
    subprocess.run([python(), "-c", ""], env=environ(), timeout=60, check=True)
    assert len(os.listdir(f"/proc/{server().process.pid}/task")) == 1


ENDS = """
import atexit, ctypes, sys, threading
libc = ctypes.CDLL(None)
libc.strdup.restype = ctypes.c_void_p
told = ctypes.c_void_p(libc.strdup(b"of C"))
libc.__cxa_atexit(ctypes.cast(libc.puts, ctypes.c_void_p), told, None)  # after the interpreter has taken itself apart
sys.stdout.write("no end of line")
"""


@pytest.mark.parametrize(
    "end",
    [
        "",
        "sys.exit()",
        "sys.exit(0)",
        "sys.exit(-1)",
        "sys.exit(300)",
        "sys.exit('why')",
        "raise KeyboardInterrupt",
        "atexit.register(sys.exit, 5)",
        "threading.Thread(target=sys.exit, args=(5,)).start()",
        "sys.stdout.close()",
        "sys.kept = type('Kept', (), {'__del__': lambda self, end=__import__('os')._exit: end(7)})()",
        "sys.excepthook = lambda *what: print('hooked'); raise OSError",
    ],
)
def test_it_ends_as_it_would_but_for_what_is_taken_apart(end: str) -> None:
    """KeyboardInterrupt and a stdout that fails have Python end the process."""
    ended = []
    for executable, more in ((sys.executable, {}), (python(), {}), (python(), {ENDS_WHOLE: "1"})):
        command = [executable, "-c", ENDS + end]
        done = subprocess.run(command, env=environ(**more), capture_output=True, text=True, timeout=60)
        ended.append((done.returncode, done.stdout, done.stderr.strip().rpartition("\n")[2]))
    whole, fast, as_whole = ended
    assert as_whole == whole
    assert fast in (whole, (whole[0], whole[1].removesuffix("of C\n"), whole[2]))
    if not end:
        assert fast != whole
