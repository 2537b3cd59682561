"""The package has its public names, documented, and imports torch only where it needs it."""

from __future__ import annotations

import ast
import configparser
import pathlib
import pickle
import re
import types

import pytest

import ddpstats
from ddpstats import errors
from tests import programs

ROOT = pathlib.Path(__file__).parents[1]


def run(code: str) -> str:
    done = programs.run(["-c", code], cwd=ROOT, fresh=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def pure_modules() -> list[str]:
    """Return the modules that the import contract in setup.cfg keeps free of torch."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config["importlinter:contract:pure"]["source_modules"].split()


def test_pure_modules_do_not_import_torch() -> None:
    modules = ", ".join(["sys", "ddpstats", *pure_modules()])
    assert run(f"import {modules}; print({{'torch', 'numpy', 'hypothesis'}} & set(sys.modules))") == "set()"
    assert run("import sys, ddpstats._reduction.reducer; print('torch' in sys.modules)") == "True", "this can fail"


def test_no_public_name_imports_a_library_that_an_integration_patches() -> None:
    """The ranks of other tests are forked from a process that has imported one."""
    code = """
import sys, ddpstats
for name in ddpstats.__all__:
    getattr(ddpstats, name)
ddpstats.reduce_stats({"loss": 1.0})
print({"torchmetrics", "torcheval", "lightning", "accelerate", "transformers", "espnet"} & set(sys.modules))
"""
    assert run(code) == "set()"


def test_every_public_name_exists_and_is_documented() -> None:
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
def test_lazy_names_are_the_declared_names(package: types.ModuleType) -> None:
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


def test_program_that_catches_runtime_error_catches_the_death_of_a_rank() -> None:
    assert issubclass(errors.RankMissing, RuntimeError)


def test_package_uses_no_pickle_and_no_object_collectives() -> None:
    load = r"(?<!safetensors\.)torch\.load(?!\([^)]*weights_only=True)"
    forbidden = re.compile(rf"\bpickle\b|_object\b|{load}|\beval\(|\bexec\(")
    for file in (ROOT / "ddpstats").rglob("*.py"):
        # lint knows their names, and no torch; the Flight Recorder's files are pickles, of which no name is looked up
        if not {"testing", "integrations", "lint", "flight_recorder.py"} & set(file.relative_to(ROOT).parts):
            code = re.sub(r'"""[\s\S]*?"""|#.*', "", file.read_text())
            assert not forbidden.search(code), file
