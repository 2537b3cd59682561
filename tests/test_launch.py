"""scripts/launch.sh sets up what a verb needs, starts ranks, and names the fix where it cannot go on."""

import os
import re
import runpy
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import ddpstats
from tests.needs import ROOT, needs
from tests.programs import reserved_port

pytestmark = pytest.mark.slow

LAUNCH = ROOT / "scripts" / "launch.sh"
LIMIT_SEC = 120
# What the caller's environment could say that changes the outcome
SETTINGS = (
    "DDPSTATS_VENV",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "PYTHON",
    "NNODES",
    "NODE_RANK",
    "RDZV_ENDPOINT",
    "MASTER_ADDR",
)


def start(*args: str, **settings: str) -> subprocess.Popen[str]:
    inherited = {key: value for key, value in os.environ.items() if key not in SETTINGS}
    return subprocess.Popen(
        ["bash", str(LAUNCH), *args],
        env=inherited | settings,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    try:
        out, err = process.communicate(timeout=LIMIT_SEC)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun takes its ranks with it; killed, it would leave them behind
        process.communicate(timeout=LIMIT_SEC)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def launch(*args: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return finish(start(*args, **settings))


def program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


# A Python that notes what pip is asked for, and is a real one for everything else.
NOTING = f"""#!/bin/sh
case "$*" in
  "-m pip --version") exit 0 ;;
  "-m pip install"*)
    echo "$*" >>"$PIP_LOG"
    case "$*" in *stdin*) cat >>"$PIP_LOG" ;; esac
    test -z "$PIP_SAYS" || cat "$PIP_SAYS"
    exit "$PIP_STATUS" ;;
  "-m pytest"*) echo "pytest ran: $*" ; exit 0 ;;
esac
exec {sys.executable} "$@"
"""


@pytest.fixture
def venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment that is made already, in which pip installs nothing, but says that it does."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    program(tmp_path / "venv" / "bin" / "python", NOTING)
    (tmp_path / "pip.txt").write_text("Collecting torch\nInstalling collected packages: torch, sympy\n")
    settings = {"DDPSTATS_VENV": tmp_path / "venv", "PIP_LOG": tmp_path / "asked", "PIP_SAYS": tmp_path / "pip.txt"}
    for name, value in {**settings, "PIP_STATUS": 0}.items():
        monkeypatch.setenv(name, str(value))
    return tmp_path / "venv"


LIBRARIES = {
    *("accelerate", "bench", "espnet", "lightning", "live", "mlflow", "msprobe", "ray"),
    *("tensorboard", "torcheval", "torchmetrics", "transformers", "wandb"),
}
NIGHTLY = " -m pytest --numprocesses 4 --dist worksteal -o faulthandler_timeout=0"
QUICK = " -m pytest --numprocesses 4 --dist worksteal -m not slow and not library"


@pytest.mark.parametrize(
    ("arguments", "extras", "asked"),
    [
        ([], set(), QUICK),
        (["-x", "-k", "layout"], set(), f"{QUICK} -x -k layout"),
        (["-k", "tests"], set(), f"{QUICK} -k tests"),
        (["-x", "tests"], set(), " -m pytest -x tests"),
        (["tests/base", "-x"], set(), " -m pytest tests/base -x"),
        (["tests/base/test_paths.py::test_x[a::b]"], set(), " -m pytest tests/base/test_paths.py::test_x[a::b]"),
        (["--all", "-x"], LIBRARIES, " -m pytest --numprocesses 4 --dist worksteal -x"),
        (["--nightly"], LIBRARIES, f"{NIGHTLY} tests benchmarks"),
        (["--nightly", "benchmarks"], LIBRARIES, f"{NIGHTLY} benchmarks"),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, list) else "",
)
def test_tier_sets_up_its_libraries_and_selects_its_tests(
    venv: Path, arguments: list[str], extras: set[str], asked: str
) -> None:
    done = launch("test", *arguments, DDPSTATS_VENV=str(venv))
    assert (done.returncode, done.stdout) == (0, f"pytest ran:{asked}\n"), done.stderr
    assert set((venv / "ddpstats-set-up").read_text().splitlines()[1:]) == {"testing", *extras}


def test_set_ups_add_up_and_print_nothing_when_nothing_is_missing(venv: Path) -> None:
    log, stamp = venv.parent / "asked", venv / "ddpstats-set-up"
    launch("test", DDPSTATS_VENV=str(venv))
    asked = log.read_text()
    assert "torch>=2.6\n" in asked
    assert "numpy\n" in asked
    assert "lightning" not in asked
    again = launch("test", DDPSTATS_VENV=str(venv))
    assert (again.returncode, again.stderr, log.read_text()) == (0, "", asked)
    launch("test", "--all", DDPSTATS_VENV=str(venv))
    assert "torcheval>=" in log.read_text()
    asked = log.read_text()
    launch("test", DDPSTATS_VENV=str(venv))
    assert log.read_text() == asked
    assert set(stamp.read_text().splitlines()[1:]) == {"testing", *LIBRARIES}
    stamp.write_text("another setup.cfg\ntesting\ntorcheval\n")
    launch("test", DDPSTATS_VENV=str(venv))
    assert log.read_text() != asked
    assert stamp.read_text().splitlines()[1:] == ["testing"]


def test_set_up_prints_its_phases_and_the_next_command(venv: Path) -> None:
    done = launch("test", "tests/base/test_paths.py", DDPSTATS_VENV=str(venv))
    lines = done.stderr.splitlines()
    assert all(re.match(r"launch\.sh: +\d+ s  ", line) for line in lines), done.stderr
    assert "installing torch and what is needed for: testing into" in lines[0]
    assert lines[1].endswith("    installing 2 packages")
    assert f"set up. For the command ddpstats: source {venv}/bin/activate, or scripts/launch.sh dev" in lines[-1]
    assert "Collecting" not in done.stderr


def test_output_of_pip_is_printed_whole_when_it_fails(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_STATUS", "3")
    (venv.parent / "pip.txt").write_text("Collecting torch\nWARNING: a mirror\nno space left on device\n")
    done = launch("test", "tests/base/test_paths.py", DDPSTATS_VENV=str(venv))
    assert done.returncode == 2
    assert "\nCollecting torch\nWARNING: a mirror\nno space left on device\n" in done.stderr
    assert "error: pip could not install" in done.stderr


def test_dev_ddpstats_installs_no_development_tools(venv: Path) -> None:
    done = launch("dev", "ddpstats", "--version", DDPSTATS_VENV=str(venv))
    assert (done.returncode, done.stdout) == (0, f"ddpstats {ddpstats.__version__}\n")
    assert (venv / "ddpstats-set-up").read_text().splitlines()[1:] == [""]  # no extra


def test_needs_skips_with_the_command_that_installs_the_library() -> None:
    command = "no no_such_library here: `scripts/launch.sh test --all` installs it"
    with pytest.raises(pytest.skip.Exception, match=re.escape(command)):
        needs("no_such_library")


def test_progress_names_large_downloads_and_reports_every_20_s() -> None:
    module = runpy.run_path(str(ROOT / "scripts" / "_pip_progress.py"))
    progress = module["Progress"](3.0, "a heading", 100.0)
    assert progress.line("Requirement already satisfied: numpy in /somewhere", 100.0) is None
    assert progress.line("Collecting torch>=2.6 (from -r /dev/stdin)", 101.0) is None
    assert progress.line("  Downloading sympy-1.14.0-py3-none-any.whl (6.3 MB)", 101.0) is None
    assert progress.line("  Downloading torch-2.13.0-cp311-cp311-manylinux.whl.metadata (30 kB)", 101.0) is None
    said = progress.line("Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (821.0 MB)", 102.0)
    assert said == "launch.sh:    5 s  a heading\nlaunch.sh:    5 s    downloading: torch 2.13.0 (821.0 MB)"
    assert progress.idle(110.0) is None
    assert progress.idle(122.0) == "launch.sh:   25 s    still at it: torch 2.13.0"
    assert progress.idle(123.0) is None
    said = progress.line("Using cached nvidia_cublas-13.1.0-py3-none-any.whl (1.2 GB)", 124.0)
    assert said == "launch.sh:   27 s    from pip's cache: nvidia_cublas 13.1.0 (1.2 GB)"
    said = progress.line("Installing collected packages: mpmath, sympy, torch", 125.0)
    assert said == "launch.sh:   28 s    installing 3 packages"


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_names_every_verb(flag: str) -> None:
    done = launch(flag)
    assert done.returncode == 0
    assert done.stderr == ""
    for verb in ("demo", "test", "compat", "bench", "N SCRIPT", "dev"):
        assert f"scripts/launch.sh {verb}" in done.stdout


def test_no_verb_shows_the_help_as_an_error() -> None:
    done = launch()
    assert done.returncode == 2
    assert done.stdout == ""
    assert "usage:" in done.stderr


@pytest.mark.parametrize("verb", ["trian", "0", "-2", "2x", ""])
def test_unknown_verb_is_refused_with_the_verbs(verb: str) -> None:
    done = launch(verb)
    assert done.returncode == 2
    assert f"error: '{verb}' is neither a verb nor a number of ranks" in done.stderr
    assert "fix: use one of demo, test, compat, bench, dev" in done.stderr


def test_number_of_ranks_without_a_script_is_refused() -> None:
    done = launch("2")
    assert done.returncode == 2
    assert "fix: scripts/launch.sh 2 SCRIPT" in done.stderr


def test_python_that_is_too_old_is_refused(tmp_path: Path) -> None:
    old = program(tmp_path / "python", "#!/bin/sh\necho 3.8 -\n")
    done = launch("demo", PYTHON=old, DDPSTATS_VENV=str(tmp_path / "venv"))
    assert done.returncode == 2
    assert f"Python 3.10 or newer is needed, but {old} is 3.8" in done.stderr
    assert "fix: install one" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_python_that_does_not_run_is_refused(tmp_path: Path) -> None:
    missing = str(tmp_path / "python")
    done = launch("demo", PYTHON=missing, DDPSTATS_VENV=str(tmp_path / "venv"))
    assert done.returncode == 2
    assert f"no Python runs under the name {missing}" in done.stderr
    assert "PYTHON=/path/to/python3.11" in done.stderr


def test_python_without_venv_is_refused(tmp_path: Path) -> None:
    bare = program(tmp_path / "python", '#!/bin/sh\ncase "$2" in *ensurepip*) exit 1 ;; esac\necho 3.11 -\n')
    done = launch("demo", PYTHON=bare, DDPSTATS_VENV=str(tmp_path / "venv"))
    assert done.returncode == 2
    assert f"{bare} cannot make virtual environments" in done.stderr
    assert "apt-get install python3-venv" in done.stderr


BARE = """#!/bin/sh
# A Python of which only `venv` works: what it makes is a copy of itself that writes down what it is asked to do.
case "$*" in
  *ensurepip*) ;;
  "-m venv "*)
    for folder; do :; done
    mkdir -p "$folder/bin"; cp "$0" "$folder/bin/python"; touch "$folder/pyvenv.cfg" ;;
  "-m pip --version") [ -e "${0%/bin/python}/pyvenv.cfg" ] ;;
  "-m pip install"*) echo "$*" >>"$ASKED"; case "$*" in *stdin*) cat >>"$ASKED" ;; esac ;;
  "-m "*) echo "$*" >>"$ASKED" ;;
  -VV) echo Python 3.11 ;;
  *configparser*) exec "$REAL" "$@" ;;
  *) echo 3.11 - ;;
esac
"""


def test_verb_on_a_bare_machine_sets_up_what_it_needs_once(tmp_path: Path) -> None:
    bare, asked = program(tmp_path / "python", BARE), tmp_path / "asked"
    settings = {"PYTHON": bare, "DDPSTATS_VENV": str(tmp_path / "venv"), "ASKED": str(asked), "REAL": sys.executable}
    for _ in range(2):
        assert launch("demo", **settings).returncode == 0
    torch, *_, own, first, second = asked.read_text().splitlines()
    assert torch.startswith("-m pip install --progress-bar off --constraint")
    assert "torch>=2.6" in asked.read_text()
    assert own.endswith(f"--editable {LAUNCH.parents[1]}")
    assert first == second == "-m ddpstats demo"
    done = launch("test", "tests/base/test_paths.py", **settings)
    assert done.returncode == 0, done.stderr
    assert "hypothesis" in asked.read_text()
    assert asked.read_text().splitlines()[-1] == "-m pytest tests/base/test_paths.py"


def test_set_up_that_failed_is_tried_again(tmp_path: Path) -> None:
    """A half-made environment has no stamp, so the next launch tries again."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    program(venv / "bin" / "python", '#!/bin/sh\ncase "$*" in "-m pip install"*) exit 1 ;; esac\necho setuptools\n')
    for _ in range(2):
        done = launch("demo", DDPSTATS_VENV=str(venv))
        assert done.returncode == 2
        assert "error: pip could not install" in done.stderr
        assert "PIP_INDEX_URL" in done.stderr


def test_folder_that_is_no_environment_is_not_cleared(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    done = launch("demo", PYTHON=sys.executable, DDPSTATS_VENV=str(tmp_path))
    assert done.returncode == 2
    assert "is no virtual environment, and not empty" in done.stderr
    assert (tmp_path / "thesis.tex").exists()


def test_two_hosts_without_a_rendezvous_are_refused() -> None:
    done = launch("2", "train.py", NNODES="2")
    assert done.returncode == 2
    assert "error: NNODES=2, but nothing says where the hosts meet" in done.stderr
    assert "RDZV_ENDPOINT=HOST:PORT" in done.stderr


SCRIPT = """
import os, sys, pathlib
import torch, torch.distributed as dist
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
rank = dist.get_rank()
facts = [int(ones.item()), os.environ["OMP_NUM_THREADS"], *sys.argv[2:]]
pathlib.Path(sys.argv[1], str(rank)).write_text(" ".join(map(str, facts)))
dist.destroy_process_group()
sys.exit(int(sys.argv[2]) if rank == 1 else 0)
"""


def test_exit_status_is_that_of_the_failed_rank(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = launch("2", str(script), str(tmp_path), "7", "--lr=1", "two words", PYTHON=sys.executable)
    assert done.returncode == 7, done.stderr
    for rank in "01":
        assert (tmp_path / rank).read_text() == "2 1 7 --lr=1 two words"


def test_exit_status_of_a_killed_rank_is_128_and_the_signal(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    done = launch("1", str(script), PYTHON=sys.executable)
    assert done.returncode == 128 + 9, done.stderr


def test_two_launchers_with_one_rendezvous_make_one_job(tmp_path: Path) -> None:
    """Two launchers on one machine stand for two hosts; both take torchrun's settings from the environment."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with reserved_port() as port:
        hosts = [
            start(
                *("1", str(script), str(tmp_path), "0"),
                PYTHON=sys.executable,
                NNODES="2",
                RDZV_ENDPOINT=f"127.0.0.1:{port}",
                RDZV_ID="test",
                PET_LOCAL_ADDR="127.0.0.1",  # torchrun's own variable: this machine's name need not resolve
            )
            for _ in range(2)
        ]
        for done in [finish(host) for host in hosts]:
            assert done.returncode == 0, done.stderr
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text() == "2 1 0"
