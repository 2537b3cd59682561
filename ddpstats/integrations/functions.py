"""Copies of well-known reductions in your own tree, with ours in their place: keys that ranks lack are not mixed up.

`install` looks for these functions in the modules that you name, tries each, and puts an aligned one in its place:

- ``recursive_average``, ``recursive_sum`` of espnet (FunASR has a copy): as `ddpstats.recursive_average`, each mean
  over the weight of the ranks that hold its path. A rank's NaN counts as absent if it does for the copy.
- ``reduce_dict(input_dict, average=True)`` of torchvision's references, DETR, RT-DETR, D-FINE, DEIM, and of detectron2,
  where rank 0 alone got the result: every rank gets the union of keys, sorted; a mean over the ranks that hold the key,
  a sum with ``average=False``. Tensors on this rank's device without gradient, of the floating dtype that the ranks'
  promote to; torch's default one for integers.
- ``_parse_losses`` of mmdetection 2 and what else stands on mmcv 1: the loss is this rank's own, with its graph;
  ``log_vars`` has the union of keys, each a mean over the ranks that hold it, ``loss`` the mean of all ranks' losses.
- ``write_metrics`` of detectron2: rank 0's storage gets the union of keys, each a mean over the ranks that hold it,
  and the mean of the ranks' totals. A total that is not finite is a FloatingPointError on every rank.
- ``MetricsTracker.reduce`` of icefall: in place, sums over the ranks that hold the key; every rank gets the union.

Every rank must call what is aligned, as with the copy. A call costs one collective on a group of our own, two where a
key is new and in ``write_metrics``. Where ranks hold what cannot be combined (a tensor against a list, two shapes under
one key), every rank raises `SchemaConflict`. On one rank, and without a process group, the copy itself runs.

Not looked for: a function under another name, unless you name it; what stands inside of another function; a subclass's
own method.
"""

from __future__ import annotations

import importlib
import inspect
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch.distributed as dist

from ddpstats._base import config
from ddpstats.errors import ConfigError
from ddpstats.integrations._known_functions import KNOWN, Function, Known
from ddpstats.integrations.patches import Patches, level_of_caller, lines_of

__all__ = ["InstalledFunctions", "install", "uninstall"]

_patches = Patches("functions")
_ours: dict[Function, tuple[str, ...]] = {}
"""What stands in the place of a copy now -> the names that had the copy."""


@dataclass(frozen=True)
class InstalledFunctions:
    """What `install` did. Its ``str`` is a line for each function.

    Attributes:
        patched: function -> the other names under which modules had it, and which have ours now, too.
        left: function, or module without one -> why it is as it was.
    """

    patched: Mapping[str, tuple[str, ...]]
    left: Mapping[str, str]

    def __str__(self) -> str:
        done = (f"{name} (also {', '.join(others)})" if others else name for name, others in self.patched.items())
        return lines_of("patched", tuple(done), self.left)


@dataclass(frozen=True)
class _Place:
    """Where a function is bound: in a module, or in a class of it."""

    module: ModuleType
    owner: Any
    name: str

    @property
    def spelled(self) -> str:
        inside = "" if self.owner is self.module else f"{self.owner.__qualname__}."
        return f"{self.module.__name__}.{inside}{self.name}"

    @property
    def bound(self) -> Any:
        """As it stands there: a staticmethod is not the function itself."""
        return vars(self.owner).get(self.name)

    @property
    def function(self) -> Any:
        return self.bound.__func__ if type(self.bound) is staticmethod else self.bound

    @property
    def holder(self) -> type | None:
        """The class whose instance it takes."""
        return None if self.owner is self.module or type(self.bound) is staticmethod else self.owner


def install(*targets: str | ModuleType | Mapping[str, Sequence[str]]) -> InstalledFunctions:
    """Put aligned functions in the place of the copies in your modules. Local; idempotent; before training.

    Every rank must call it with the same arguments, or none. Call it when the modules that use the functions are
    imported: names that they took by ``from util.misc import reduce_dict`` are replaced, too, in whatever module. A
    module that is named and not imported yet is imported.

    Each function is tried first, with a few numbers, in this thread, and without sending anything: one that gives
    other numbers than its namesakes on one or two ranks, or takes other arguments, is left, with a warning that says
    what differs. Does nothing under ``DDPSTATS_DISABLE=1``.

    Args:
        targets: names of modules, or modules, that are searched for the functions of this module's documentation; or a
            dict of a module's name and the functions in it, under whatever name: ``{"util.misc": ["mean_of_losses"]}``,
            ``{"engine.train": ["Trainer.write_metrics"]}``.

    Returns:
        What was patched, and where, and what was left and why.

    Raises:
        ConfigError: no target, or none of these kinds; a module that cannot be imported; a named function that is not
            there. Nothing has been patched then.

    Example::

        # rank 0: reduce_dict({"loss_vfl": 1.0, "loss_dn": 4.0})   rank 1: reduce_dict({"loss_vfl": 3.0})
        print(ddpstats.integrations.functions.install("util.misc"))
        # patched: util.misc.reduce_dict (also engine.reduce_dict)
        # now both: {"loss_dn": 4.0, "loss_vfl": 2.0}; before, both waited for ever
    """
    if not targets:
        raise ConfigError('functions.install() needs the modules that hold your functions: install("util.misc")')
    wanted = [_found_in(*one) for target in targets for one in _named(target)]
    patched: dict[str, tuple[str, ...]] = {}
    left: dict[str, str] = {}
    to_replace: list[tuple[_Place, Known]] = []
    for module, places in wanted:
        if not places:
            names = ", ".join(name for known in KNOWN for name in known.names)
            left[module.__name__] = f"holds none of {names}; name another one: {{{module.__name__!r}: ['NAME']}}"
        for place in places:
            known = _known(place)
            if isinstance(known, str):
                left[place.spelled] = known
            else:
                to_replace.append((place, known))
    for place, known in to_replace:
        patched[place.spelled] = _replace(place, known)
    if not config.is_disabled():
        for name, reason in left.items():
            text = f"ddpstats.integrations.functions: {name} {reason}. It is left as it is."
            warnings.warn(text, stacklevel=level_of_caller())
    return InstalledFunctions(patched, left)


def uninstall() -> None:
    """Put the very functions back, also into modules that were imported since `install`. Local and idempotent."""
    _patches.restore()
    _ours.clear()


# -- from targets to places -------------------------------------------------------------------------------------------


def _named(target: Any) -> Iterator[tuple[ModuleType, Sequence[str] | None]]:
    """The modules of one target, each with the names in it; None: whatever is known."""
    if isinstance(target, Mapping):
        for module, names in target.items():
            if isinstance(names, str) or not all(isinstance(name, str) for name in names):
                raise ConfigError(f"functions.install: {module!r} needs a list of names, not {names!r}")
            yield _module(module), names
    else:
        yield _module(target), None


def _module(target: Any) -> ModuleType:
    if isinstance(target, ModuleType):
        return target
    if not isinstance(target, str):
        raise ConfigError(
            "functions.install takes names of modules, modules, and dicts of a module's name and a list of functions, "
            f"not a {type(target).__name__}"
        )
    try:
        return importlib.import_module(target)
    except ImportError as error:
        raise ConfigError(f"functions.install: {target} cannot be imported: {error}") from error


def _found_in(module: ModuleType, names: Sequence[str] | None) -> tuple[ModuleType, list[_Place]]:
    if names is not None:
        return module, [_place(module, name) for name in names]
    searched = {name for known in KNOWN for name in known.names}
    owners = [module, *(value for value in vars(module).values() if _is_class_of(module, value))]
    places = [_Place(module, owner, name) for owner in owners for name in vars(owner) if name in searched]
    return module, [
        place for place in places if isinstance(place.function, types.FunctionType) and not _is_other(place)
    ]


def _is_class_of(module: ModuleType, value: Any) -> bool:
    return issubclass(type(value), type) and value.__module__ == module.__name__  # isinstance may run its code


def _is_other(place: _Place) -> bool:
    """Whether it only shares its name, which is a common word: ``reduce`` of what is no dict."""
    return place.name == "reduce" and not (isinstance(place.owner, type) and issubclass(place.owner, dict))


def _place(module: ModuleType, name: str) -> _Place:
    """Raises `ConfigError` where there is no function of that name."""
    owner: Any = module
    *classes, last = name.split(".")
    for one in classes:
        owner = vars(owner).get(one)
        if not isinstance(owner, type):
            raise ConfigError(f"functions.install: {module.__name__} has no class {'.'.join(classes)}")
    place = _Place(module, owner, last)
    if not isinstance(place.function, types.FunctionType):
        raise ConfigError(f"functions.install: {module.__name__} has no function {name}")
    return place


# -- from places to replacements --------------------------------------------------------------------------------------


def _known(place: _Place) -> Known | str:
    """What this is a copy of, also where it was replaced before, or why it is left."""
    if config.is_disabled():
        return f"{config.DISABLE} is set"
    if not dist.is_available():
        return "reduces nothing: this torch is built without torch.distributed"
    if place.function.__module__.partition(".")[0] == __name__.partition(".")[0]:
        return "is a function of ddpstats"
    parameters = list(inspect.signature(place.function).parameters.values())
    namesakes = [known for known in KNOWN if place.name in known.names]
    fitting = [known for known in namesakes or KNOWN if known.fits(parameters)]
    if not fitting:
        takes = " or ".join(dict.fromkeys(known.takes for known in namesakes or KNOWN))
        return f"takes {inspect.signature(place.function)}, where {takes} is expected"
    reasons = []
    for known in fitting:
        try:
            reason = known.probe(place.function, place.holder)
        except Exception as error:
            reason = f"raises {type(error).__name__} where it is tried: {error}"
        if reason is None:
            return known
        reasons.append(reason)
    return reasons[0]


def _replace(place: _Place, known: Known) -> tuple[str, ...]:
    """Returns the other names that are bound to the function."""
    if place.function not in _ours:
        original = place.function
        ours = known.aligned(original)
        if place.owner is not place.module:
            _patches.replace(place.owner, place.name, staticmethod(ours) if place.bound is not original else ours)
        _ours[ours] = (place.spelled, *_patches.replace_everywhere(None, original, ours))
    return tuple(dict.fromkeys(name for name in _ours[place.function] if name != place.spelled))
