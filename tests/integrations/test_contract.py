"""Every integration restores the very objects, obeys DDPSTATS_DISABLE, and patches only a library that it knows.

"Knows" is judged by what the library has and does, never by its version. One suite for all libraries that
`ddpstats.integrations.install` patches; Lightning is there twice, for each name under which it is installed.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from ddpstats import ConfigError
from ddpstats.integrations import Installed, install, uninstall
from tests import programs
from tests.needs import imported, needs

pytestmark = [
    pytest.mark.library,
    # The libraries' own, when they are imported; ours are UserWarnings.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

VERSION = "99.0"
NOT_THERE: Any = object()
Differences = list[tuple[str, Any, str]]
"""Name in a class or module that a library has otherwise; what it has, or `NOT_THERE`; the warning that names this."""


@dataclasses.dataclass(frozen=True)
class Library:
    """Describe an integration to the contract.

    Args:
        package: what is imported.
        replaced: module -> names that `install` binds to other objects, at least one in each class that it changes.
        differences: versions of the library that are to be left.
        module: the last part of the integration's name.
    """

    name: str
    package: str
    replaced: dict[str, str]
    differences: Differences
    module: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def integration(self) -> Any:
        return importlib.import_module(f"ddpstats.integrations.{self.module or self.name}")

    def targets(self) -> set[str]:
        return {f"{module}:{name}" for module, names in self.replaced.items() for name in names.split()}

    def objects(self) -> dict[str, Any]:
        """Return everything that is bound in the classes and modules that `install` changes."""
        owners = {re.sub(r"(?<=:)\w+$|\.\w+$", "", target) for target in self.targets()}
        return {
            f"{owner}{'' if owner.endswith(':') else '.'}{name}": value
            for owner in owners
            for name, value in vars(resolve(owner)).items()
        }


def resolve(owner: str) -> Any:
    module, _, name = owner.partition(":")
    return functools.reduce(getattr, filter(None, name.split(".")), imported(module))


def lightning(name: str, root: str, differences: Differences) -> Library:
    connectors = f"{root}.trainer.connectors.logger_connector"
    replaced = {
        f"{connectors}.result": "_ResultCollection.log",
        f"{root}.loops.evaluation_loop": "_EvaluationLoop.skip",
        f"{root}.trainer.call": "_call_callback_hooks _call_lightning_module_hook",
    }
    collection = f"{connectors}.result:_ResultCollection"
    return Library(name, name, replaced, [(f"{collection}.{at}", *rest) for at, *rest in differences], "lightning")


def keeps_attribute(self: Any, name: str, default: Any, *args: Any, **kwargs: Any) -> None:
    setattr(self, name, default)


def only_a(self: Any, keep_base: bool = False, copy_state: bool = True) -> Any:
    return [("a", self["a"])]


UPDATE = ("update_metrics", lambda self, key: None, r"has _ResultCollection\.update_metrics\(self, key\) where")
NO_METRICS: tuple[str, Any, str] = (
    "metrics",
    lambda self, on_step: {"callback": {}},
    r"gives \{\} for what was logged as a = 2\.0",
)
OPERATIONS, TOOLKIT = "accelerate.utils.operations", "torcheval.metrics.toolkit"
RECURSIVE = "espnet2.torch_utils.recursive_op"
LIBRARIES = [
    Library(
        *("accelerate", "accelerate"),
        {
            OPERATIONS: "gather reduce",
            "accelerate.utils": "gather reduce",
            "accelerate.accelerator": "gather Accelerator.gather_for_metrics",
        },
        [
            (
                f"{OPERATIONS}:gather",
                lambda tensor, dim=0: tensor,
                r"has gather\(tensor, dim\) where gather\(tensor\) is",
            )
        ],
    ),
    Library(
        *("espnet", "espnet2"),
        {
            RECURSIVE: "recursive_average recursive_sum recursive_divide",
            "espnet2.train.trainer": "recursive_average",
            "espnet2.train.reporter": "SubReporter.register",
        },
        [
            (
                f"{RECURSIVE}:recursive_divide",
                lambda a, b: a,
                "averages 2 and 5 with weights 2 and 1 to .*, where 3 with",
            ),
            (f"{RECURSIVE}:recursive_sum", lambda obj, group: obj, r"has recursive_sum\(obj, group\) where"),
            (f"{RECURSIVE}:recursive_sum", None, rf"has a NoneType as {RECURSIVE}\.recursive_sum"),
        ],
    ),
    lightning("lightning", "lightning.pytorch", [UPDATE, NO_METRICS]),
    lightning("pytorch_lightning", "pytorch_lightning", [UPDATE]),
    Library(
        *("torcheval", "torcheval"),
        {TOOLKIT: "get_synced_metric get_synced_metric_collection sync_and_compute_collection"},
        [
            (f"{TOOLKIT}:_get_world_size", NOT_THERE, rf"has no {TOOLKIT}\._get_world_size"),
            (f"{TOOLKIT}:get_synced_metric", lambda metric: metric, r"has get_synced_metric\(metric\) where"),
        ],
    ),
    Library(
        *("torchmetrics", "torchmetrics"),
        {"torchmetrics": "Metric._sync_dist MetricCollection.compute MetricCollection.forward"},
        [
            ("torchmetrics:Metric.add_state", keeps_attribute, r"keeps other states in a SumMetric of 2\.0"),
            ("torchmetrics:MetricCollection.items", only_a, r"computes \{'a': .*\} for members that are a = 2\.0 and"),
            ("torchmetrics:Metric._sync_dist", lambda self, group=None: None, r"has Metric\._sync_dist\(self, group\)"),
            ("torchmetrics:MetricCollection.compute", NOT_THERE, r"has no torchmetrics\.MetricCollection\.compute"),
        ],
    ),
]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    uninstall()
    yield
    uninstall()


@pytest.fixture(params=LIBRARIES, ids=str)
def library(request: pytest.FixtureRequest) -> Library:
    each: Library = request.param
    needs(each.package)
    return each


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Return the names that are bound to another object now."""
    return {name for name, value in before.items() if after.get(name, NOT_THERE) is not value}


def test_uninstall_restores_the_very_objects(library: Library) -> None:
    before = library.objects()
    library.integration.install()
    installed = library.objects()
    assert changed(before, installed) >= library.targets()
    library.integration.install()
    assert not changed(installed, library.objects())
    for _ in range(2):
        library.integration.uninstall()
        assert not changed(before, library.objects())


def test_kill_switch_leaves_every_object(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a warning, which would be an error here."""
    before = library.objects()
    monkeypatch.setenv("DDPSTATS_DISABLE", "1")
    library.integration.install()
    assert install(library.name) == Installed((), {library.module or library.name: "DDPSTATS_DISABLE is set"})
    assert not changed(before, library.objects())


def call_itself_untested(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imported(library.package.partition(".")[0]), "__version__", VERSION)


def test_unknown_version_with_all_that_is_relied_on_is_patched(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = library.objects()
    call_itself_untested(library, monkeypatch)
    library.integration.install()
    assert changed(before, library.objects())


@pytest.mark.parametrize(
    ("library", "target", "replacement", "warning"),
    [
        pytest.param(library, *difference, id=f"{library}-{index}")
        for library in LIBRARIES
        for index, difference in enumerate(library.differences)
    ],
)
def test_a_library_with_a_difference_is_left_with_a_warning_that_names_it(
    library: Library, target: str, replacement: Any, warning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(library.package)
    library.objects()  # imports it
    call_itself_untested(library, monkeypatch)
    owner, _, name = target.replace(":", ":.").rpartition(".")
    if replacement is NOT_THERE:
        monkeypatch.delattr(resolve(owner), name)
    else:
        monkeypatch.setattr(resolve(owner), name, replacement)
    before = library.objects()
    with pytest.warns(UserWarning, match=rf"{library.name} 99\.0 {warning}.* is left unpatched") as caught:
        done = install(library.name)
    assert [each.filename for each in caught] == [__file__]
    assert not changed(before, library.objects())
    if library.module == "lightning":
        assert done == Installed(("lightning",), {})  # its other package is patched
    else:
        assert done.patched == ()
        assert re.match(rf"{library.name} 99\.0 {warning}", done.left[library.name])


def test_a_library_that_is_not_installed_is_an_error_with_the_command(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    integration = library.integration
    for each in LIBRARIES:
        if each.integration is integration:
            monkeypatch.setitem(sys.modules, each.package, None)
    with pytest.raises(ConfigError, match=rf"pip install 'ddpstats\[{library.module or library.name}\]'"):
        integration.install()


def test_importing_an_integration_imports_no_library() -> None:
    """Lightning's integration is left out: its callback is a class of Lightning's, so that it imports the library."""
    names = [library.name for library in LIBRARIES if not library.module]
    code = (
        f"import importlib, sys\nfor name in {names}: importlib.import_module(f'ddpstats.integrations.{{name}}')\n"
        f"print({ {library.package for library in LIBRARIES} } & set(sys.modules))"
    )
    done = programs.run(["-c", code], fresh=True)
    assert done.stdout == "set()\n", done.stderr
