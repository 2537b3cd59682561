"""scripts/launch.sh compat installs the named versions, runs their tests, and writes one row of the table."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import ddpstats
from tests.needs import ROOT

pytestmark = pytest.mark.slow

COMPAT: Any = runpy.run_path(str(ROOT / "scripts" / "compat.py"), run_name="compat")
PLAN = """\
# tests, and the matrix
torch      tests/test_package.py tests/demo
lightning  +lightning +torchmetrics tests/integrations/test_lightning.py
cuda       tests/gpu
run torch==2.6.0
run lightning==2.4.0  # with the pinned torch
"""

# A Python whose `venv` makes a copy of it, whose uv installs nothing but says that it did, and whose pytest writes a
# report; it writes what it is asked for into $ASKED.
FAKE = f"""#!/bin/sh
case "$*" in
  "-m venv "*)
    for folder; do :; done
    mkdir -p "$folder/bin"; cp "$0" "$folder/bin/python" ;;
  "-m uv pip freeze"*) cat "$FREEZE" ;;
  "-m uv "*|"-m pip "*)
    echo "$*" >>"$ASKED"
    case "$*" in *"$REFUSED"*) exit 1 ;; esac ;;
  "-m pytest"*)
    echo "$*" >>"$ASKED"
    for option; do case "$option" in --junitxml=*) cp "$REPORT" "${{option#--junitxml=}}" ;; esac; done
    exit 1 ;;
  *) exec {sys.executable} "$@" ;;
esac
"""
REPORT = '<testsuites><testsuite tests="9" skipped="2" failures="{failed}" errors="{errors}"/></testsuites>'


class Fake:
    """A folder in which nothing is installed, with its own table and plan."""

    def __init__(self, folder: Path) -> None:
        self.page, self.asked, self._folder = folder / "page.md", folder / "asked", folder
        (folder / "python").write_text(FAKE)
        (folder / "python").chmod(0o755)
        (folder / "plan.txt").write_text(PLAN)
        (folder / "freeze.txt").write_text("torch==2.6.0\nsympy==1.13.1\nlightning==2.4.0\n")
        (folder / "tmp").mkdir()
        self.report(0, 0)

    def report(self, failed: int, errors: int) -> None:
        (self._folder / "report.xml").write_text(REPORT.format(failed=failed, errors=errors))

    def run(self, *arguments: str, refused: str = "nothing of that name") -> subprocess.CompletedProcess[str]:
        settings = {
            "PYTHON": "python", "ASKED": "asked", "REPORT": "report.xml", "FREEZE": "freeze.txt", "TMPDIR": "tmp",
        }  # fmt: skip
        paths = {name: str(self._folder / file) for name, file in settings.items()}
        options = ["--table", str(self.page), "--plan", str(self._folder / "plan.txt")]
        self.asked.write_text("")
        return subprocess.run(
            ["bash", str(ROOT / "scripts" / "launch.sh"), "compat", *arguments, *options],
            env={**os.environ, **paths, "REFUSED": refused},
            capture_output=True,
            text=True,
            timeout=120,
        )

    def left(self) -> Sequence[Path]:
        return list((self._folder / "tmp").iterdir())


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


def test_the_plan_names_tests_that_are_there_and_runs_that_can_be_asked_for() -> None:
    plan = COMPAT["read_plan"]((ROOT / "tests" / "compatibility.txt").read_text())
    for library, tests in plan.tests.items():
        assert library in ("torch", "cuda", "typeguard", *plan.extras[library])
        for test in tests:
            assert (ROOT / test.partition("::")[0]).exists(), test
    texts = [COMPAT["asked_for"](run, plan).text() for run in plan.runs]
    assert len(set(texts)) == len(texts) > 0


@pytest.mark.parametrize(
    "argument", ["torch", "torch=2.6", "torch>=2.6", "python=3", "somebody==1.0", "--", "torch== 2", "device=tpu"]
)
def test_arguments_of_other_forms_are_refused(argument: str) -> None:
    with pytest.raises(COMPAT["CannotRun"], match=r"is neither NAME==VERSION nor|no tests are listed for 'somebody'"):
        COMPAT["asked_for"]([argument], COMPAT["read_plan"](PLAN))


def test_an_environment_is_made_on_top_of_what_is_named_and_the_row_is_written(fake: Fake) -> None:
    fake.report(1, 1)
    done = fake.run("lightning==2.4.0", "--pytest=-x")
    assert done.returncode == 1, done.stderr
    uv, named, rest, tests = fake.asked.read_text().splitlines()
    assert uv.endswith("install --quiet uv")
    assert named == "-m uv pip install --quiet lightning==2.4.0 torch==2.13.0"
    assert "lightning>=" not in rest  # what is there stays
    assert " pytest>=9 " in rest
    assert tests.startswith("-m pytest tests/integrations/test_lightning.py -n 2 ")
    assert tests.endswith(" -x")
    (only,) = COMPAT["rows_of"](fake.page.read_text())
    assert only[:1] + only[2:8] == (
        "`lightning==2.4.0`", "2.6.0", "lightning 2.4.0", "5", "2", "**2**", ddpstats.__version__,
    )  # fmt: skip
    assert re.fullmatch(r"3\.\d+\.\d+", only.python)
    assert fake.left() == []


def test_the_matrix_goes_on_after_a_run_that_cannot_be_made(fake: Fake) -> None:
    fake.page.write_text("# Title\n\nText.\n")
    done = fake.run(refused="torch==2.6.0")
    assert done.returncode == 1
    assert "torch==2.6.0: -m uv pip install --quiet torch==2.6.0 ended with 1" in done.stderr
    assert [row.asked for row in COMPAT["rows_of"](fake.page.read_text())] == ["`lightning==2.4.0`"]
    done = fake.run()
    assert done.returncode == 0, done.stderr
    assert fake.asked.read_text().count("-m pytest") == 2
    assert [row.asked for row in COMPAT["rows_of"](fake.page.read_text())] == ["`lightning==2.4.0`", "`torch==2.6.0`"]
    page = fake.page.read_text() + "\nBelow the table.\n"
    fake.page.write_text(page)
    fake.run()
    assert fake.page.read_text() == page  # each row takes the place of the one with the same arguments


def test_missing_gpu_writes_no_row(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = fake.run("torch==2.13.0", "device=cuda")
    assert done.returncode == 1
    assert "torch==2.13.0 device=cuda: torch finds no GPU here" in done.stderr
    assert "pytest tests" not in fake.asked.read_text()
    assert not fake.page.exists()


def test_keep_keeps_the_environment(fake: Fake) -> None:
    done = fake.run("torch==2.6.0", "--keep")
    (folder,) = fake.left()
    assert f"the environment is {folder / 'venv'}" in done.stderr
    pins = (folder / "constraints.txt").read_text().splitlines()
    assert "sympy==1.13.1" in pins
    assert not [pin for pin in pins if pin.startswith("sympy==1.14")]
    assert "pytest==9.2.0" in pins
