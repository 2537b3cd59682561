"""Run a part of the tests with other versions than the pinned ones, and write the outcome into docs/compatibility.md.

    scripts/launch.sh compat torch==2.16.0               # a release of torch
    scripts/launch.sh compat torch==2.13.0 python=3.12   # the pinned torch, another Python
    scripts/launch.sh compat lightning==2.5.5            # a library: its integration's tests, with the pinned torch
    scripts/launch.sh compat torch==2.13.0 device=cuda   # on a machine that has a GPU: the tests of tests/gpu
    scripts/launch.sh compat                             # every line "run ..." of tests/compatibility.txt

1. A virtual environment is made in a temporary folder, and uv installed in it.
2. What is named is installed with what it asks for itself, in today's versions, as a user gets it who installs it
   today. The rest of what the tests need is put on top of that, in the versions of constraints.txt.
3. The tests run that tests/compatibility.txt lists for the named libraries or the device; without any, those for torch.
4. The row in the table whose first cell is these arguments is replaced, or a new one appended; the folder is removed.

The exit status is 0 where all was installed and no test failed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.set_up import requirements

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SEC = 3600
HEADER = "| `launch.sh compat ...` | Python | torch | libraries | passed | skipped | failed | ddpstats | date |"


class CannotRun(Exception):
    """These versions cannot be put together here; the message says which step failed."""


class Row(NamedTuple):
    asked: str
    python: str
    torch: str
    libraries: str
    passed: str
    skipped: str
    failed: str
    ddpstats: str
    date: str

    def line(self) -> str:
        return f"| {' | '.join(self)} |"


# -- what is to be run -------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """tests/compatibility.txt: the tests and extras of each library, and the arguments of each run of the matrix."""

    tests: Mapping[str, Sequence[str]]
    extras: Mapping[str, Sequence[str]]
    runs: Sequence[Sequence[str]]


def read_plan(text: str) -> Plan:
    tests: dict[str, list[str]] = {}
    extras: dict[str, list[str]] = {}
    runs = []
    for line in text.splitlines():
        first, *rest = line.partition("#")[0].split() or [""]
        if first == "run":
            runs.append(rest)
        elif first:
            tests.setdefault(normal(first), []).extend(word for word in rest if word[0] != "+")
            extras.setdefault(normal(first), []).extend(word[1:] for word in rest if word[0] == "+")
    return Plan(tests, extras, runs)


def normal(name: str) -> str:
    """Return a project's name as registries compare it: "pytorch-lightning" of "PyTorch_Lightning>=2"."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", name.strip())[0]).lower()


class Asked(NamedTuple):
    """The arguments of one run: a Python and a device, where one is named, and packages."""

    python: str | None
    packages: Sequence[str]
    device: str | None = None

    def text(self) -> str:
        named = {"python": self.python, "device": self.device}
        return "`" + " ".join([*self.packages, *(f"{key}={value}" for key, value in named.items() if value)]) + "`"

    def libraries(self) -> list[str]:
        return [name for name in map(normal, self.packages) if name != "torch"]

    def subjects(self) -> list[str]:
        """Return what the tests are about, as the plan names it."""
        return [*self.libraries(), *filter(None, [self.device])] or ["torch"]

    def tests(self, plan: Plan) -> list[str]:
        return [test for name in self.subjects() for test in plan.tests[name]]

    def extras(self, plan: Plan) -> list[str]:
        return sorted({"testing", *(extra for name in self.subjects() for extra in plan.extras[name])})


def asked_for(arguments: Sequence[str], plan: Plan) -> Asked:
    """Raise `CannotRun` for what is no NAME==VERSION, and for a library that has no tests."""
    python = device = None
    packages = []
    for argument in arguments:
        name, _, version = argument.partition("=")
        if name == "python" and re.fullmatch(r"\d+\.\d+", version):
            python = version
        elif argument == "device=cuda":
            device = version
        elif not re.fullmatch(r"[\w.-]+==[\w.+!]+", argument):
            raise CannotRun(f"{argument!r} is neither NAME==VERSION nor python=3.12 nor device=cuda")
        elif normal(argument) not in plan.tests:
            raise CannotRun(f"no tests are listed for {normal(argument)!r}, only for {', '.join(plan.tests)}")
        else:
            packages.append(argument)
    return Asked(python, packages, device)


# -- the environment ---------------------------------------------------------------------------------------------------


def interpreter(version: str | None) -> str:
    """Return a Python of that version, from the PATH or from pyenv."""
    if version is None:
        return os.environ.get("PYTHON", sys.executable)
    of_pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for candidate in (f"python{version}", *map(str, of_pyenv.glob(f"{version}.*/bin/python"))):
        try:
            subprocess.run([candidate, "-c", ""], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):  # no such file, or a shim with no Python behind it
            continue
        return candidate
    raise CannotRun(f"there is no python{version} on the PATH")


def environment() -> dict[str, str]:
    """Return the environment of uv and the tests: uv has pip's settings, and bytecode is written."""
    environ = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")}
    for name in ("INDEX_URL", "EXTRA_INDEX_URL", "FIND_LINKS"):
        if f"PIP_{name}" in environ:
            environ.setdefault(f"UV_{name}", environ[f"PIP_{name}"])
    return environ | {"PYTHONPATH": str(ROOT)}


def install(python: str, folder: Path, asked: Asked, extras: Sequence[str]) -> dict[str, str]:
    """Install it into the environment of ``python``. Return the versions of everything that is there."""

    def pip(*arguments: str) -> str:
        return run([python, "-m", "uv", "pip", *arguments], environ, capture=arguments[0] == "freeze")

    def installed() -> dict[str, str]:
        pairs = (line.split("==") for line in pip("freeze").splitlines() if "==" in line)
        return {normal(name): version for name, version in pairs}

    environ = {"UV_CACHE_DIR": str(folder / "cache")} | environment() | {"VIRTUAL_ENV": str(folder / "venv")}
    run([python, "-m", "pip", "install", "--quiet", "uv"], environ)
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    espnet = [package for package in asked.packages if normal(package) == "espnet"]
    named = [package for package in asked.packages if package not in espnet]
    if "torch" not in map(normal, named):
        named += [line for line in constraints if normal(line) == "torch"]
    pip("install", "--quiet", *named)
    versions = installed()
    kept = [f"{name}=={version}" for name, version in versions.items()]
    kept += [line for line in constraints if line[:1] not in ("", "#") and normal(line) not in versions]
    (folder / "constraints.txt").write_text("\n".join(kept) + "\n")
    wanted = ["setuptools", *(line for line in requirements(extras) if normal(line) not in versions)]
    pip("install", "--quiet", "--constraint", str(folder / "constraints.txt"), *wanted)
    if "espnet" in extras:  # setup.cfg says why without what it asks for
        pip("install", "--quiet", "--no-deps", *(espnet or ["espnet"]))
    return installed()


def run(command: Sequence[str], environ: Mapping[str, str], capture: bool = False, may_fail: bool = False) -> str:
    stdout = subprocess.PIPE if capture else None
    try:
        done = subprocess.run(command, env=environ, text=True, stdout=stdout, cwd=ROOT, timeout=LIMIT_SEC)
    except subprocess.TimeoutExpired:
        raise CannotRun(f"{' '.join(command[1:])} did not end within {LIMIT_SEC} s") from None
    if done.returncode != 0 and not may_fail:
        raise CannotRun(f"{' '.join(command[1:])} ended with {done.returncode}")
    return done.stdout or ""


# -- one run -----------------------------------------------------------------------------------------------------------


def row_of(asked: Asked, plan: Plan, folder: Path, options: Sequence[str]) -> Row:
    """Make the environment in ``folder``, and run the tests there."""
    tests = asked.tests(plan)
    run([interpreter(asked.python), "-m", "venv", str(folder / "venv")], os.environ)
    python = str(folder / "venv" / "bin" / "python")
    versions = install(python, folder, asked, asked.extras(plan))
    libraries = [f"{name} {versions.get(name, '-')}" for name in asked.libraries()]
    if asked.device:
        libraries.append(gpu_of(python))
    report = folder / "report.xml"
    command = [python, "-m", "pytest", *tests, "-n", "2", "--dist", "loadfile", f"--junitxml={report}", *options]
    path = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    say(f"{asked.text()}: {len(tests)} files of tests, with torch {versions.get('torch')}")
    run(command, environment() | {"PATH": path}, may_fail=True)
    if not report.exists():
        raise CannotRun("pytest wrote no report")
    passed, skipped, failed = counts(report.read_text())
    return Row(
        asked.text(),
        run([python, "-c", "import platform; print(platform.python_version())"], environment(), capture=True).strip(),
        versions.get("torch", "-"),
        ", ".join(libraries) or "-",
        str(passed),
        str(skipped),
        f"**{failed}**" if failed else "0",
        own_version(),
        datetime.date.today().isoformat(),
    )


def gpu_of(python: str) -> str:
    """Return the name of the GPU, as torch in that environment has it."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    name = run([python, "-c", code], environment(), capture=True).strip()
    if not name:
        raise CannotRun("torch finds no GPU here")
    return name


def counts(report: str) -> tuple[int, int, int]:
    """Return (passed, skipped, failed) of a report in JUnit's XML; an error counts as a failure."""
    suites = list(ElementTree.fromstring(report).iter("testsuite"))
    total, skipped, failures, errors = (
        sum(int(suite.get(key, "0")) for suite in suites) for key in ("tests", "skipped", "failures", "errors")
    )
    return total - skipped - failures - errors, skipped, failures + errors


def own_version() -> str:
    return (ROOT / "ddpstats" / "_base" / "version.py").read_text().split('"')[-2]


# -- the table ---------------------------------------------------------------------------------------------------------


def rows_of(page: str) -> list[Row]:
    lines = page.splitlines()
    if HEADER not in lines:
        return []
    rows = []
    for line in lines[lines.index(HEADER) + 2 :]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != len(Row._fields):
            break
        rows.append(Row(*cells))
    return rows


def with_row(page: str, row: Row) -> str:
    """Return the page with this row instead of the one that has the same first cell, or below all others."""
    lines = page.splitlines()
    if HEADER not in lines:
        lines += ["", HEADER, "|" + "---|" * len(Row._fields)]
    rows = rows_of("\n".join(lines))
    begin = lines.index(HEADER) + 2
    replaced = [row if old.asked == row.asked else old for old in rows]
    lines[begin : begin + len(rows)] = [new.line() for new in (replaced if row in replaced else [*replaced, row])]
    return "\n".join(lines) + "\n"


def say(text: str) -> None:
    print(f"compat: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/launch.sh compat", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "wanted", nargs="*", metavar="NAME==VERSION", help="also python=3.12, device=cuda; none: the whole matrix"
    )
    parser.add_argument("--keep", action="store_true", help="leave the environment, and say where it is")
    parser.add_argument("--pytest", action="append", default=[], metavar="OPTION", help="one more option for pytest")
    parser.add_argument(
        "--table", type=Path, default=ROOT / "docs" / "compatibility.md", help="the page with the table"
    )
    parser.add_argument("--plan", type=Path, default=ROOT / "tests" / "compatibility.txt", help="tests and matrix")
    options = parser.parse_args(arguments)
    plan = read_plan(options.plan.read_text())
    page = options.table.read_text() if options.table.exists() else "# Compatibility\n"
    status = 0
    for wanted in [options.wanted] if options.wanted else plan.runs:
        folder = Path(tempfile.mkdtemp(prefix="ddpstats-compat-"))
        try:
            row = row_of(asked_for(wanted, plan), plan, folder, options.pytest)
        except CannotRun as error:
            say(f"{' '.join(wanted)}: {error}")
            status = 1
            continue
        finally:
            if options.keep:
                say(f"the environment is {folder / 'venv'}")
            else:
                shutil.rmtree(folder)
        page = with_row(page, row)
        options.table.write_text(page)
        say(row.line())
        status = status or int(row.failed != "0")
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
