"""What the package promises from outside: names, import cost, purity, typing, documentation."""

from __future__ import annotations

import ast
import pathlib
import pickle
import re
import subprocess
import sys
import types

import pytest

import ddpstats
from ddpstats import errors

ROOT = pathlib.Path(__file__).parents[1]
PURE = [
    "_reduction.layout",
    "_reduction.layout_agreement",
    "_reduction.wire",
    "_reduction.schema",
    "_base.rank_names",
    "_base.report",
    "_reduction.markers",
    "_reduction.nesting",
    "_base.config",
    "_base.containers",
    "_base.paths",
    "_base.bounded_cache",
    "errors",
    "_base.version",
    "_base.atomic_files",
    "capture._fields",
    "capture._manifest",
    "sentinel._settings",
    "sentinel._alarms",
    "sentinel._divergence",
    "sentinel._vote",
    "sentinel._verdict",
    "dump._selection",
    "dump.format._files",
    "dump.format._writer",
    "dump.collect._stacks",
    "dump.compare._comparison",
    "dump.compare._between_ranks",
    "dump.origin._nan_origin",
    "lint._lint",
    "report._report",
]


def run(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["ddpstats", *(f"ddpstats.{name}" for name in PURE)])
def test_pure_modules_do_not_import_torch(module: str) -> None:
    assert run(f"import sys, {module}; print({{'torch', 'numpy', 'hypothesis'}} & set(sys.modules))") == "set()"


def test_the_test_above_can_fail() -> None:
    assert run("import sys, ddpstats._reduction.reducer; print('torch' in sys.modules)") == "True"


def test_every_public_name_is_there_and_documented() -> None:
    documents = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    for name in ddpstats.__all__:
        value = getattr(ddpstats, name)
        if name != "__version__":
            assert value.__doc__, name
            assert f"`{name}" in documents, f"{name} is missing in README.md and docs/"
    assert set(ddpstats.__all__) <= set(dir(ddpstats))
    with pytest.raises(AttributeError, match="no_such_name"):
        ddpstats.no_such_name  # noqa: B018


@pytest.mark.parametrize("package", [ddpstats, ddpstats.testing])
def test_lazy_names_and_declared_names_are_the_same(package: types.ModuleType) -> None:
    assert package.__file__ is not None
    tree = ast.parse(pathlib.Path(package.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    declared = [
        name for node in imports if node.module != "__future__" for name in node.names if name.name == name.asname
    ]
    assert sorted(name.name for name in declared) == package.__all__
    assert set(package.__all__) <= set(dir(package))
    assert all(hasattr(package, name) for name in package.__all__)


def test_submodules_are_reachable_without_importing_them() -> None:
    assert run("import ddpstats; print(ddpstats.recursive_op.recursive_sum is ddpstats.recursive_sum)") == "True"


def test_errors_travel_by_pickle_with_their_attributes() -> None:
    for name in errors.__dict__:
        kind = getattr(errors, name)
        if isinstance(kind, type) and issubclass(kind, errors.DdpstatsError):
            ranks = {"missing_ranks" if name == "RankMissing" else "ranks": [2]}
            error = kind("text", path="a/b", group="g", **ranks)
            copy = pickle.loads(pickle.dumps(error))
            assert type(copy) is kind
            assert (str(copy), copy.path, copy.group, copy.ranks) == ("text", "a/b", "g", (2,))
            assert name != "RankMissing" or getattr(copy, "missing_ranks", ()) == (2,)


def test_a_bad_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddpstats._base import config

    monkeypatch.setenv("DDPSTATS_TIMEOUT_SEC", "soon")
    with pytest.raises(errors.ConfigError, match="DDPSTATS_TIMEOUT_SEC='soon'"):
        config.timeout_sec(None)
    monkeypatch.setenv("DDPSTATS_DISABLE", "perhaps")
    with pytest.raises(errors.ConfigError, match=r"DDPSTATS_DISABLE='perhaps'.*'1'"):
        config.disabled()


def test_the_timeout_comes_from_the_argument_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddpstats._base import config

    assert config.timeout_sec(None) == 300.0
    monkeypatch.setenv("DDPSTATS_TIMEOUT_SEC", "7.5")
    assert config.timeout_sec(None) == 7.5
    assert config.timeout_sec(2) == 2.0


def test_nothing_of_ours_uses_pickle_or_object_collectives() -> None:
    forbidden = re.compile(r"\bpickle\b|_object\b|torch\.load(?!\([^)]*weights_only=True)|\beval\(|\bexec\(")
    for file in (ROOT / "ddpstats").rglob("*.py"):
        if not {"testing", "integrations", "lint"} & set(
            file.relative_to(ROOT).parts
        ):  # lint knows their names, and no torch
            code = re.sub(r'"""[\s\S]*?"""|#.*', "", file.read_text())
            assert not forbidden.search(code), file
