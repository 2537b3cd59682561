"""`ddpstats.integrations.install`: several real libraries by name, what it says; and no example hides a library."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ddpstats
from ddpstats import ConfigError
from ddpstats.integrations import Installed, Uninstalled, install, uninstall
from ddpstats.integrations._install import trial
from tests.needs import needs

ROOT = Path(__file__).parents[2]
LIBRARIES = ("accelerate", "espnet", "lightning", "torcheval", "torchmetrics")
PACKAGES = {"espnet": "espnet2"}
ALSO = {"lightning": "pytorch_lightning"}  # either is enough
# The libraries' own, when they are imported; ours are UserWarnings.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    uninstall()
    yield
    uninstall()


def patched(library: str) -> bool:
    module: Any = importlib.import_module(f"ddpstats.integrations.{library}")
    patches = module._patches.values() if library == "lightning" else [module._patches]
    return all(one.installed for one in patches)


@pytest.mark.parametrize("library", LIBRARIES)
def test_one_library_is_patched_as_by_its_own_module(library: str) -> None:
    needs(PACKAGES.get(library, library))
    assert install(library) == Installed((library,), {})
    assert patched(library)
    assert install(library).patched == (library,)  # once more: it still is
    own: Any = importlib.import_module(f"ddpstats.integrations.{library}")
    own.uninstall()
    assert uninstall(library) == Uninstalled((), {library: "it was not patched"})
    own.install()
    assert uninstall(library) == Uninstalled((library,), {})
    assert not patched(library)
    assert trial(library) == "would be patched"
    assert not patched(library)


def test_several_at_once_in_the_order_that_was_asked_for() -> None:
    needs("torchmetrics", "accelerate")
    done = install("torchmetrics", "accelerate", "torchmetrics")
    assert done == Installed(("torchmetrics", "accelerate"), {})
    assert str(done) == "patched: torchmetrics, accelerate"
    assert str(uninstall("accelerate", "torchmetrics")) == "restored: accelerate, torchmetrics"


def test_uninstall_without_a_name_is_all_of_them() -> None:
    needs("torchmetrics", "torcheval")
    install("torcheval", "torchmetrics")
    assert uninstall().restored == ("torcheval", "torchmetrics")
    assert uninstall() == Uninstalled((), {})
    assert str(uninstall()) == "restored: nothing"


@pytest.mark.parametrize("library", LIBRARIES)
def test_one_that_is_not_installed_is_left_with_the_command(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quietly: warnings are errors here."""
    for package in (PACKAGES.get(library, library), ALSO.get(library, library)):
        monkeypatch.setitem(sys.modules, package, None)
    done = install(library)
    assert done.patched == ()
    assert done.left.keys() == {library}
    assert f"not installed: pip install 'ddpstats[{library}]'" in done.left[library]
    assert ("--no-deps espnet==" in done.left[library]) == (library == "espnet")
    assert str(done) == f"patched: nothing\nleft: {library} ({done.left[library]})"
    assert trial(library) == f"would be left ({done.left[library]})"


def test_the_others_are_patched_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("torchmetrics")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    done = install("accelerate", "torchmetrics")
    assert done.patched == ("torchmetrics",)
    assert list(done.left) == ["accelerate"]


def test_a_folder_of_that_name_is_no_library(tmp_path: Path) -> None:
    """Lightning's own logs, say."""
    (tmp_path / "torcheval" / "version_0").mkdir(parents=True)
    code = (
        "import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n"
        "from ddpstats.integrations import install; print(install('torcheval'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert done.stdout == "patched: nothing\nleft: torcheval (not installed: pip install 'ddpstats[torcheval]')\n"


def test_what_lacks_something_is_left_with_a_warning_at_the_callers_line(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("torchmetrics")
    import torchmetrics

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.0.0")
    monkeypatch.delattr(torchmetrics.MetricCollection, "compute")
    with pytest.warns(UserWarning, match=r"torchmetrics 2\.0\.0 has no torchmetrics\.MetricCollection") as caught:
        done = install("torchmetrics")
    assert caught[0].filename == __file__
    assert done == Installed((), {"torchmetrics": "torchmetrics 2.0.0 has no torchmetrics.MetricCollection.compute"})


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_kill_switch(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs(PACKAGES.get(library, library))
    monkeypatch.setenv("DDPSTATS_DISABLE", "1")
    assert install(library) == Installed((), {library: "DDPSTATS_DISABLE is set"})


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["torchmetric"], "'torchmetric' is none of the libraries that can be patched: did you mean 'torchmetrics'?"),
        (["Lightning"], "did you mean 'lightning'?"),
        (["pytorch-lightning"], "did you mean 'lightning'?"),
        (["espnet2"], "did you mean 'espnet'?"),
        (["keras"], "'keras' is none of the libraries that can be patched: legal: "),
        ([""], "'' is none of"),
        (["loggers"], "nothing to patch: ddpstats.integrations.loggers.write(writer, reduced, step)"),
        (["transformers"], "nothing to patch: its Trainer takes"),
        ([["torchmetrics"]], "libraries are named by strings, each an argument of its own, and this is a list"),
        ([types.ModuleType("torchmetrics")], "and this is a module"),
        ([None], "and this is a NoneType"),
        (["torchmetrics", "torcheva"], "did you mean 'torcheval'?"),
    ],
)
@pytest.mark.parametrize("function", [install, uninstall])
def test_a_name_that_is_none_changes_nothing(function: Any, names: list[Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        function(*names)
    assert said in str(caught.value)
    assert 'legal: "accelerate", "espnet", "lightning", "torcheval", "torchmetrics".' in str(caught.value)
    assert str(caught.value).startswith(f"ddpstats.integrations.{function.__name__}: ")
    assert uninstall() == Uninstalled((), {})


def test_a_name_that_is_none_restores_nothing() -> None:
    needs("torchmetrics")
    install("torchmetrics")
    with pytest.raises(ConfigError, match="did you mean 'torcheval'"):
        uninstall("torchmetrics", "torcheva")
    assert patched("torchmetrics")


def test_no_name_says_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in (*LIBRARIES, *PACKAGES.values(), *ALSO.values()):
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=r'needs the names .* legal: "accelerate", .* here: none of them\.'):
        install()
    monkeypatch.setitem(sys.modules, "torcheval", types.ModuleType("torcheval"))
    with pytest.raises(ConfigError, match=r'Installed here: "torcheval"\.'):
        install()


def test_results_are_frozen() -> None:
    for result in (Installed((), {}), Uninstalled((), {})):
        with pytest.raises(dataclasses.FrozenInstanceError):
            result.left = {}  # type: ignore[misc]


def test_a_trainer_that_still_needs_it_is_told_of() -> None:
    needs("lightning")
    ours: Any = importlib.import_module("ddpstats.integrations.lightning")
    ours._hold(7)  # what a DdpstatsCallback does at its setup
    try:
        done = uninstall("lightning")
        assert done.restored == ()
        assert "a trainer with a DdpstatsCallback still needs it" in done.left["lightning"]
    finally:
        ours._release(7)
    assert not patched("lightning")


def test_the_librarys_name_stays_the_librarys() -> None:
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
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=ROOT)
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


def test_public_names_are_documented() -> None:
    for value in (install, uninstall, Installed, Uninstalled):
        assert value.__doc__
        assert getattr(ddpstats.integrations, value.__name__) is value
