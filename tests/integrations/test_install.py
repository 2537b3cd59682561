"""`ddpstats.integrations.install` patches libraries by name and says what it left; no example hides a library."""

from __future__ import annotations

import importlib
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpstats import ConfigError
from ddpstats.integrations import Installed, Uninstalled, install, uninstall
from ddpstats.integrations.patches import Patches
from tests import programs
from tests.needs import ROOT, needs

LIBRARIES = ("accelerate", "espnet", "lightning", "torcheval", "torchmetrics")
PACKAGES = {"espnet": "espnet2"}
ALSO = {"lightning": "pytorch_lightning"}  # either is enough
# The libraries' own, when they are imported; ours are UserWarnings.
pytestmark = [
    pytest.mark.library,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    uninstall()
    yield
    uninstall()


def test_several_libraries_are_patched_in_the_order_of_the_call_and_restored_without_a_name() -> None:
    needs("torchmetrics", "accelerate")
    done = install("torchmetrics", "accelerate", "torchmetrics")
    assert done == Installed(("torchmetrics", "accelerate"), {})
    assert str(done) == "patched: torchmetrics, accelerate"
    assert str(uninstall("torchmetrics")) == "restored: torchmetrics"
    install("torchmetrics")
    assert uninstall().restored == ("accelerate", "torchmetrics")
    assert uninstall() == Uninstalled((), {})
    assert str(uninstall()) == "restored: nothing"


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_that_is_not_installed_is_left_with_the_command(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a warning, which would be an error here. The others are patched all the same."""
    for package in (PACKAGES.get(library, library), ALSO.get(library, library)):
        monkeypatch.setitem(sys.modules, package, None)
    second = "torcheval" if library == "torchmetrics" else "torchmetrics"
    needs(second)
    done = install(library, second)
    assert done.patched == (second,)
    assert done.left.keys() == {library}
    assert f"not installed: pip install 'ddpstats[{library}]'" in done.left[library]
    assert ("--no-deps espnet==" in done.left[library]) == (library == "espnet")
    assert str(done) == f"patched: {second}\nleft: {library} ({done.left[library]})"


def test_a_folder_with_the_name_of_a_library_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of Lightning's logs has such a name."""
    (tmp_path / "torcheval" / "version_0").mkdir(parents=True)
    code = (
        "import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n"
        "from ddpstats.integrations import install; print(install('torcheval'))"
    )
    done = programs.run(["-c", code], cwd=tmp_path, fresh=True)
    assert done.stdout == "patched: nothing\nleft: torcheval (not installed: pip install 'ddpstats[torcheval]')\n"


@pytest.mark.parametrize(
    ("names", "unknown"),
    [
        (["torchmetric"], "'torchmetric'"),
        ([""], "''"),
        (["loggers"], "'loggers'"),
        ([["torchmetrics"]], "['torchmetrics']"),
        ([types.ModuleType("torchmetrics")], "<module 'torchmetrics'>"),
        (["torchmetrics", "torcheva"], "'torcheva'"),
    ],
)
@pytest.mark.parametrize("function", [install, uninstall])
def test_an_unknown_name_is_an_error_and_changes_nothing(function: Any, names: list[Any], unknown: str) -> None:
    if function is uninstall:
        needs("torchmetrics")
        install("torchmetrics")
    with pytest.raises(ConfigError) as caught:
        function(*names)
    assert str(caught.value) == (
        f"ddpstats.integrations.{function.__name__} takes names of libraries that your program uses, not {unknown}; "
        "legal: 'accelerate', 'espnet', 'lightning', 'torcheval', 'torchmetrics'. Nothing was changed."
    )
    assert uninstall().restored == (("torchmetrics",) if function is uninstall else ())


def test_no_name_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"takes names of libraries that your program uses; legal: 'accelerate', "):
        install()


def test_uninstall_beside_a_trainer_with_a_callback_says_that_it_still_needs_the_patches() -> None:
    needs("lightning")
    ours: Any = importlib.import_module("ddpstats.integrations.lightning")
    ours._hold(7)  # what a DdpstatsCallback does at its setup
    try:
        done = uninstall("lightning")
        assert done.restored == ()
        assert "a trainer with a DdpstatsCallback still needs it" in done.left["lightning"]
    finally:
        ours._release(7)
    assert uninstall("lightning").left == {"lightning": "it was not patched"}


def test_a_librarys_name_stays_the_librarys_and_importing_the_package_imports_none() -> None:
    """Imported before or after, from a fresh process; and our package imports none of them by itself."""
    needs("lightning")
    code = (
        "import sys, ddpstats.integrations\n"
        f"assert not {{'torch', *{LIBRARIES}, 'espnet2'}} & set(sys.modules)\n"
        "done = ddpstats.integrations.install('lightning')\n"
        "import lightning\n"
        "assert done.patched == ('lightning',) and lightning.Trainer.__module__.startswith('lightning.')\n"
        "assert ddpstats.integrations.lightning is not lightning\n"
        "print(ddpstats.integrations.uninstall())"
    )
    done = programs.run(["-c", code], cwd=ROOT, fresh=True, environ={"PYTHONWARNINGS": "ignore"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("restored: lightning\n")


HIDES = re.compile(
    rf"from ddpstats\.integrations import (?:\w+, *)*({'|'.join([*LIBRARIES, 'transformers'])})\b(?! as )"
)


def test_no_example_hides_a_library() -> None:
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    files += [file for folder in ("ddpstats", "examples", "scripts") for file in (ROOT / folder).rglob("*.py")]
    own_warning = ROOT / "ddpstats" / "integrations" / "__init__.py"
    hiding = [file for file in files if file != own_warning and HIDES.search(file.read_text())]
    assert hiding == []
    assert HIDES.search(own_warning.read_text())  # the search finds what it is for


def test_a_method_that_moved_to_a_base_class_is_patched_and_restored() -> None:
    class Base:
        def name(self) -> str:
            return "theirs"

    class Moved(Base):
        pass

    patches = Patches("library")
    patches.wrap(Moved, "name", lambda original, self: f"ours, then {original(self)}")
    assert (Moved().name(), Base().name()) == ("ours, then theirs", "theirs")
    patches.restore()
    assert Moved().name() == "theirs"
    assert "name" not in vars(Moved)
