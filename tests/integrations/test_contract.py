"""Every integration restores the very objects, obeys DDPSTATS_DISABLE, and patches only a library that it knows.

"Knows" is judged by what the library has and does, never by its version.

One suite for all libraries that `ddpstats.integrations.install` knows, with one `Library` for each; Lightning has two,
one for each name under which it is installed.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
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

NOT_THERE: Any = object()
VERSION = "99.0"


@dataclasses.dataclass(frozen=True)
class Difference:
    """A library that has ``other`` as ``target``, and the part of the warning that names this."""

    target: str
    other: Any
    warning: str


@dataclasses.dataclass(frozen=True)
class Library:
    """Describe an integration to the contract. Targets are MODULE:NAME or MODULE:CLASS.NAME.

    Args:
        package: what is imported.
        replaced: targets that `install` binds to something else, at least one in each class and module that it changes.
        module: the last part of the integration's name.
    """

    name: str
    package: str
    replaced: tuple[str, ...]
    differences: tuple[Difference, ...]
    module: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def integration(self) -> Any:
        """The module of ddpstats."""
        return importlib.import_module(f"ddpstats.integrations.{self.module or self.name}")

    def objects(self) -> dict[str, Any]:
        """Return everything that is bound in the classes and modules that `install` changes."""
        owners = dict.fromkeys(split(target)[0] for target in self.replaced)
        return {f"{owner}.{name}": value for owner in owners for name, value in vars(resolve(owner)).items()}


def split(target: str) -> tuple[str, str]:
    """Return the class or module of a target, and the name in it."""
    module, _, names = target.partition(":")
    owner, _, name = names.rpartition(".")
    return f"{module}:{owner}", name


def resolve(owner: str) -> Any:
    module, _, name = owner.partition(":")
    return functools.reduce(getattr, filter(None, name.split(".")), imported(module))


def lightning(name: str, root: str, *differences: Difference) -> Library:
    connectors = f"{root}.trainer.connectors.logger_connector"
    return Library(
        name,
        name,
        (
            f"{connectors}.result:_ResultCollection.log",
            f"{connectors}.logger_connector:_LoggerConnector.on_batch_end",
            f"{root}.loops.fit_loop:_FitLoop.on_advance_end",
            f"{root}.loops.evaluation_loop:_EvaluationLoop.run",
            f"{root}.trainer.call:_call_callback_hooks",
        ),
        tuple(dataclasses.replace(each, target=f"{connectors}.result:{each.target}") for each in differences),
        "lightning",
    )


def keeps_attribute(self: Any, name: str, default: Any, *args: Any, **kwargs: Any) -> None:
    setattr(self, name, default)


def only_a(self: Any, keep_base: bool = False, copy_state: bool = True) -> Any:
    return [("a", self["a"])]


GET_CACHE = Difference(
    "_ResultCollection._get_cache",
    lambda result_metric: None,
    r"has _ResultCollection\._get_cache\(result_metric\) where",
)
OPERATIONS, TOOLKIT, RECURSIVE = (
    *("accelerate.utils.operations", "torcheval.metrics.toolkit"),
    "espnet2.torch_utils.recursive_op",
)
LIBRARIES = [
    Library(
        *("accelerate", "accelerate"),
        (
            *(f"{module}:{name}" for module in (OPERATIONS, "accelerate.utils") for name in ("gather", "reduce")),
            "accelerate.accelerator:gather",
            "accelerate.accelerator:Accelerator.gather_for_metrics",
        ),
        (
            Difference(
                f"{OPERATIONS}:gather",
                lambda tensor, dim=0: tensor,
                r"has gather\(tensor, dim\) where gather\(tensor\) is relied on",
            ),
        ),
    ),
    Library(
        *("espnet", "espnet2"),
        (
            *(f"{RECURSIVE}:recursive_{name}" for name in ("average", "sum", "divide")),
            "espnet2.train.trainer:recursive_average",
            "espnet2.train.reporter:SubReporter.register",
        ),
        (
            Difference(
                f"{RECURSIVE}:recursive_divide",
                lambda a, b: a,
                "averages 2 and 5 with weights 2 and 1 to .*, where 3 with weight 3 is relied on",
            ),
            Difference(
                f"{RECURSIVE}:recursive_sum",
                lambda obj, weight, group: obj,
                r"has recursive_sum\(obj, weight, group\) where",
            ),
            Difference(f"{RECURSIVE}:recursive_sum", None, rf"has a NoneType as {RECURSIVE}\.recursive_sum"),
        ),
    ),
    lightning(
        *("lightning", "lightning.pytorch"),
        GET_CACHE,
        Difference(
            "_ResultCollection.metrics",
            lambda self, on_step: {"callback": {}},
            r"gives \{\} for what was logged as a = 2\.0",
        ),
    ),
    lightning("pytorch_lightning", "pytorch_lightning", GET_CACHE),
    Library(
        *("torcheval", "torcheval"),
        tuple(
            f"{TOOLKIT}:{name}"
            for name in ("get_synced_metric", "get_synced_metric_collection", "sync_and_compute_collection")
        ),
        (
            Difference(f"{TOOLKIT}:_get_world_size", NOT_THERE, rf"has no {TOOLKIT}\._get_world_size"),
            Difference(
                f"{TOOLKIT}:get_synced_metric",
                lambda metric: metric,
                r"has get_synced_metric\(metric\) where .*\(metric, process_group\) is",
            ),
        ),
    ),
    Library(
        *("torchmetrics", "torchmetrics"),
        tuple(f"torchmetrics:{name}" for name in ("Metric._sync_dist", "MetricCollection.compute")),
        (
            Difference("torchmetrics:Metric.add_state", keeps_attribute, r"keeps other states in a SumMetric of 2\.0"),
            Difference(
                "torchmetrics:MetricCollection.items",
                only_a,
                r"computes \{'a': .*\} for members that are a = 2\.0 and b = 3\.0",
            ),
            Difference(
                "torchmetrics:Metric._sync_dist",
                lambda self, group=None: None,
                r"has Metric\._sync_dist\(self, group\) where .*, process_group\) is",
            ),
            Difference(
                "torchmetrics:MetricCollection.compute",
                NOT_THERE,
                r"has no torchmetrics\.MetricCollection\.compute",
            ),
        ),
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


def same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return all(after[name] is value for name, value in before.items())


def test_uninstall_restores_the_very_objects(library: Library) -> None:
    before = library.objects()
    library.integration.install()
    installed = library.objects()
    library.integration.install()
    assert same(installed, library.objects())
    replaced = {".".join(split(target)) for target in library.replaced}
    assert replaced <= {name for name, value in before.items() if installed[name] is not value}
    assert all(installed[name].__doc__ == before[name].__doc__ for name in replaced if library.name != "espnet")
    library.integration.uninstall()
    assert same(before, library.objects())
    library.integration.uninstall()
    assert same(before, library.objects())


def test_kill_switch_leaves_every_object(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a warning, which would be an error here."""
    before = library.objects()
    monkeypatch.setenv("DDPSTATS_DISABLE", "1")
    library.integration.install()
    assert install(library.name) == Installed((), {library.module or library.name: "DDPSTATS_DISABLE is set"})
    assert same(before, library.objects())


def with_version(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the library call itself a version that nobody has tested."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: VERSION)
    if library.name == "espnet":
        monkeypatch.setattr("espnet2.__version__", VERSION)


def test_unknown_version_with_all_that_is_relied_on_is_patched(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = library.objects()
    with_version(library, monkeypatch)
    library.integration.install()
    assert not same(before, library.objects())


@pytest.mark.parametrize(
    ("library", "difference"),
    [
        pytest.param(library, difference, id=f"{library}-{difference.target.rpartition('.')[2]}-{index}")
        for library in LIBRARIES
        for index, difference in enumerate(library.differences)
    ],
)
def test_library_with_a_difference_is_left_with_a_warning_that_names_it(
    library: Library, difference: Difference, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(library.package)
    library.objects()  # imports it
    with_version(library, monkeypatch)
    owner, name = split(difference.target)
    if difference.other is NOT_THERE:
        monkeypatch.delattr(resolve(owner), name)
    else:
        monkeypatch.setattr(resolve(owner), name, difference.other)
    before = library.objects()
    with pytest.warns(UserWarning, match=rf"{library.name} 99\.0 {difference.warning}.* is left unpatched") as caught:
        done = install(library.name)
    assert [warning.filename for warning in caught] == [__file__]
    assert same(before, library.objects())
    if library.module != "lightning":  # the other of the two packages is patched
        assert done.patched == ()
        assert re.match(rf"{library.name} 99\.0 {difference.warning}", done.left[library.name])


def test_one_of_lightnings_two_packages_that_differs_leaves_the_other_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("lightning", "pytorch_lightning")
    first, second = (library for library in LIBRARIES if library.module == "lightning")
    before, theirs = first.objects(), second.objects()
    monkeypatch.setattr(resolve(split(second.differences[0].target)[0]), "_get_cache", GET_CACHE.other)
    with pytest.warns(UserWarning, match=r"integrations\.pytorch_lightning: .* has _ResultCollection\._get_cache"):
        assert install("lightning").patched == ("lightning",)
    assert not same(before, first.objects())
    assert {name for name, value in second.objects().items() if theirs[name] is not value} == {
        ".".join(split(second.differences[0].target))
    }


def test_library_that_is_not_installed_is_an_error_with_the_command(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    integration = library.integration

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    monkeypatch.setitem(sys.modules, library.package, None)
    with pytest.raises(ConfigError, match=rf"pip install 'ddpstats\[{library.module or library.name}\]'"):
        integration.install()


def test_importing_an_integration_imports_no_library() -> None:
    """Lightning's has a callback, which is a class of Lightning's, and imports it."""
    names = [library.name for library in LIBRARIES if not library.module]
    code = (
        f"import importlib, sys\nfor name in {names}: importlib.import_module(f'ddpstats.integrations.{{name}}')\n"
        f"print({ {library.package for library in LIBRARIES} } & set(sys.modules))"
    )
    done = programs.run(["-c", code], fresh=True)
    assert done.stdout == "set()\n", done.stderr
