"""scripts/launch.sh sets up what a verb needs, starts ranks, and names the fix where it cannot go on."""

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import ddpstats
from tests import forked_python
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
    *("NNODES", "NODE_RANK", "RDZV_BACKEND", "RDZV_ENDPOINT", "RDZV_ID"),
    *("PET_NNODES", "PET_NODE_RANK", "PET_RDZV_BACKEND", "PET_RDZV_ENDPOINT", "PET_RDZV_ID"),
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


# A Python that notes what pip is asked for, and is a real one in all other ways.
NOTING = f"""#!/bin/sh
case "$*" in
  "-m pip --version") exit 0 ;;
  "-m pip install"*)
    echo "$*" >>"$PIP_LOG"
    case "$*" in *stdin*) cat >>"$PIP_LOG" ;; esac
    echo "$PIP_SAYS"
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
    settings = {"DDPSTATS_VENV": tmp_path / "venv", "PIP_LOG": tmp_path / "asked", "PIP_SAYS": "", "PIP_STATUS": 0}
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    return tmp_path / "venv"


def levels(venv: Path) -> set[str]:
    return {stamp.name for stamp in venv.glob("set-up-*")}


WORKERS = " -m pytest --numprocesses 6 --dist worksteal"
NIGHTLY = f"{WORKERS} -o testpaths=tests benchmarks -o faulthandler_timeout=0 --hypothesis-profile nightly"
QUICK = f"{WORKERS} -m not slow and not library"
NAMED = " -m pytest --numprocesses 0"


@pytest.mark.parametrize(
    ("arguments", "level", "asked"),
    [
        ([], 1, QUICK),
        (["-x", "-k", "tests"], 1, f"{QUICK} -x -k tests"),
        (["tests/base", "-x"], 1, f"{NAMED} tests/base -x"),
        (["tests/base/test_paths.py::test_x[a::b]"], 1, f"{NAMED} tests/base/test_paths.py::test_x[a::b]"),
        (["--all", "-x"], 2, f"{WORKERS} -x"),
        (["--nightly"], 2, NIGHTLY),
        (["--nightly", "benchmarks"], 2, f"{NIGHTLY} benchmarks"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_tier_sets_up_its_libraries_and_selects_its_tests(
    venv: Path, arguments: list[str], level: int, asked: str
) -> None:
    done = launch("test", *arguments, DDPSTATS_VENV=str(venv))
    assert (done.returncode, done.stdout) == (0, f"pytest ran:{asked}\n"), done.stderr
    assert levels(venv) == {f"set-up-{number}" for number in range(level + 1)}


def test_set_ups_add_up_and_print_nothing_when_nothing_is_missing(venv: Path) -> None:
    log = venv.parent / "asked"
    launch("test", DDPSTATS_VENV=str(venv))
    asked = log.read_text()
    for wanted in ("torch>=2.6\n", "numpy\n", "hypothesis\n"):
        assert wanted in asked
    assert "lightning" not in asked
    again = launch("test", DDPSTATS_VENV=str(venv))
    assert (again.returncode, again.stderr, log.read_text()) == (0, "", asked)
    launch("test", "--all", DDPSTATS_VENV=str(venv))
    asked = log.read_text()
    for wanted in ("torcheval>=", "mypy\n", "mkdocs\n", "--no-deps espnet"):
        assert wanted in asked
    launch("test", DDPSTATS_VENV=str(venv))
    assert log.read_text() == asked
    (venv / "set-up-1").write_text("another setup.cfg\n")
    launch("test", DDPSTATS_VENV=str(venv))
    assert log.read_text() != asked


def test_environment_of_an_older_set_up_script_is_made_again(venv: Path, tmp_path: Path) -> None:
    """A copy of what launch.sh reads is run before and after its set_up.py changes."""
    for name in ("constraints.txt", "setup.cfg", "scripts/launch.sh", "scripts/set_up.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    log, command = tmp_path / "asked", ["bash", str(tmp_path / "scripts" / "launch.sh"), "test"]
    subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_SEC)
    asked = log.read_text()
    subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_SEC)
    assert log.read_text() == asked
    with open(tmp_path / "scripts" / "set_up.py", "a") as file:
        file.write("# it lists another requirement\n")
    subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_SEC)
    assert log.read_text() != asked


def test_set_up_prints_the_next_command(venv: Path) -> None:
    done = launch("test", "tests/base/test_paths.py", DDPSTATS_VENV=str(venv))
    first, *_, last = done.stderr.splitlines()
    assert f"installing torch and what else is needed into {venv}" in first
    assert f"For the command ddpstats: source {venv}/bin/activate, or scripts/launch.sh dev ddpstats" in last


def test_output_of_pip_is_printed_when_it_fails(venv: Path) -> None:
    command = "test", "tests/base/test_paths.py"
    done = launch(*command, DDPSTATS_VENV=str(venv), PIP_STATUS="3", PIP_SAYS="no space left on device")
    assert done.returncode == 2
    assert "\nno space left on device\n" in done.stderr
    assert "error: pip could not install" in done.stderr
    assert "PIP_INDEX_URL" in done.stderr
    assert levels(venv) == set()  # so the next launch tries again
    assert launch(*command, DDPSTATS_VENV=str(venv)).returncode == 0


def test_dev_ddpstats_installs_no_development_tools(venv: Path) -> None:
    done = launch("dev", "ddpstats", "--version", DDPSTATS_VENV=str(venv))
    assert (done.returncode, done.stdout) == (0, f"ddpstats {ddpstats.__version__}\n")
    assert levels(venv) == {"set-up-0"}


def test_needs_skips_with_the_command_that_installs_the_library() -> None:
    command = "no no_such_library here: `scripts/launch.sh test --all` installs it"
    with pytest.raises(pytest.skip.Exception, match=re.escape(command)):
        needs("no_such_library")


def test_help_names_every_verb() -> None:
    done = launch("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for verb in ("demo", "test", "compat", "bench", "N SCRIPT", "dev"):
        assert f"scripts/launch.sh {verb}" in done.stdout
    no_verb = launch()
    assert (no_verb.returncode, no_verb.stdout, no_verb.stderr) == (2, "", done.stdout)


@pytest.mark.parametrize("verb", ["trian", "0", "-2", "2x"])
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
    old = program(tmp_path / "python", "#!/bin/sh\necho 'python is Python 3.8' >&2\nexit 1\n")
    done = launch("demo", PYTHON=old, DDPSTATS_VENV=str(tmp_path / "venv"))
    assert done.returncode == 2
    assert f"python is Python 3.8\nlaunch.sh: error: Python 3.10 or newer is needed, and {old} is none" in done.stderr
    assert "fix: install one" in done.stderr
    assert "PYTHON=/path/to/python3.11" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_python_without_venv_is_refused(tmp_path: Path) -> None:
    bare = program(tmp_path / "python", f'#!/bin/sh\ncase "$2" in venv) exit 1 ;; esac\necho {tmp_path}/python\n')
    done = launch("demo", PYTHON=bare, DDPSTATS_VENV=str(tmp_path / "venv"))
    assert done.returncode == 2
    assert f"{bare} cannot make a virtual environment" in done.stderr
    assert "apt-get install python3-venv" in done.stderr


BARE = """#!/bin/sh
# A Python of which only `venv` works: what it makes is a copy of itself that writes down what it is asked to do.
case "$*" in
  "-m venv "*)
    for folder; do :; done
    case "$*" in *--clear*) rm -r "$folder" ;; esac
    mkdir -p "$folder/bin"; cp "$0" "$folder/bin/python"; touch "$folder/pyvenv.cfg" ;;
  "-m pip --version") [ -e "${0%/bin/python}/pyvenv.cfg" ] ;;
  "-m pip install"*) echo "$*" >>"$ASKED"; case "$*" in *stdin*) cat >>"$ASKED"; sleep 1 ;; esac ;;
  "-m "*) echo "$*" >>"$ASKED" ;;
  -VV) echo Python 3.11 ;;
  *requirements*) exec "$REAL" "$@" ;;
  *) echo "$0" ;;
esac
"""


def bare_machine(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """Return where is written what pip and others are asked for, and the settings of a launch."""
    asked = tmp_path / "asked"
    settings = {"PYTHON": program(tmp_path / "python", BARE), "ASKED": str(asked), "REAL": sys.executable}
    return asked, {**settings, "DDPSTATS_VENV": str(tmp_path / "venv")}


def test_verb_on_a_bare_machine_sets_up_what_it_needs_once(tmp_path: Path) -> None:
    asked, settings = bare_machine(tmp_path)
    for _ in range(2):
        assert launch("demo", **settings).returncode == 0
    pip, torch, *_, own, first, second = asked.read_text().splitlines()
    assert re.fullmatch(r"-m pip install --constraint .*/constraints\.txt --upgrade pip", pip)
    assert torch.startswith("-m pip install --constraint")
    assert "torch>=2.6" in asked.read_text()
    assert own.endswith(f"--editable {LAUNCH.parents[1]}")
    assert first == second == "-m ddpstats demo"
    done = launch("test", "tests/base/test_paths.py", **settings)
    assert done.returncode == 0, done.stderr
    assert "hypothesis" in asked.read_text()
    assert asked.read_text().splitlines()[-1] == f"{NAMED.strip()} tests/base/test_paths.py"


def test_two_launches_at_once_set_up_once(tmp_path: Path) -> None:
    asked, settings = bare_machine(tmp_path)
    for done in [finish(process) for process in [start("demo", **settings), start("demo", **settings)]]:
        assert done.returncode == 0, done.stderr
    assert asked.read_text().count("--editable") == 1


def test_set_up_that_was_interrupted_is_done_again(tmp_path: Path) -> None:
    """A half-made environment has no pip and no stamp."""
    asked, settings = bare_machine(tmp_path)
    (tmp_path / "venv").mkdir()
    for file in ("pyvenv.cfg", "half a package"):
        (tmp_path / "venv" / file).touch()
    assert launch("demo", **settings).returncode == 0
    assert not (tmp_path / "venv" / "half a package").exists()
    assert asked.read_text().splitlines()[-1] == "-m ddpstats demo"


def test_folder_that_is_no_environment_is_not_cleared(tmp_path: Path) -> None:
    _, settings = bare_machine(tmp_path)
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "thesis.tex").touch()
    assert launch("demo", **settings).returncode == 0
    assert (tmp_path / "venv" / "thesis.tex").exists()


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
    done = launch("2", str(script), str(tmp_path), "7", "--lr=1", "two words", PYTHON=forked_python.path())
    assert done.returncode == 7, done.stderr
    for rank in "01":
        assert (tmp_path / rank).read_text() == "2 1 7 --lr=1 two words"


def test_exit_status_of_a_killed_rank_is_128_and_the_signal(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    done = launch("1", str(script), PYTHON=sys.executable)
    assert done.returncode == 128 + 9, done.stderr


def test_two_launchers_with_one_rendezvous_make_one_job(tmp_path: Path) -> None:
    """The launchers of one machine play two hosts; both take torchrun's settings from the environment."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with reserved_port() as port:
        settings = {"NNODES": "2", "RDZV_BACKEND": "c10d", "RDZV_ENDPOINT": f"127.0.0.1:{port}"}
        local = {"PET_LOCAL_ADDR": "127.0.0.1"}  # this machine's name need not resolve
        by_torchruns_names = {f"PET_{name}": value for name, value in settings.items()}
        hosts = [
            start("1", str(script), str(tmp_path), "0", PYTHON=forked_python.path(), **local, **names)
            for names in (settings, by_torchruns_names)
        ]
        for done in [finish(host) for host in hosts]:
            assert done.returncode == 0, done.stderr
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text() == "2 1 0"
