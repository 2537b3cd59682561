"""Integrations find out here whether a library has what they rely on, replace its objects and restore them.

`install` and `uninstall` do so for several libraries by name, so that no module here takes a library's own name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ddpstats._base import config
from ddpstats.errors import ConfigError

# What can be patched: name of the distribution and of the extra -> packages to import, of which one is enough.
_PACKAGES = {
    "accelerate": ("accelerate",),
    "espnet": ("espnet2",),
    "lightning": ("lightning", "pytorch_lightning"),
    "torcheval": ("torcheval",),
    "torchmetrics": ("torchmetrics",),
}

_ALIASES = {"pytorch_lightning": "lightning"}


# -- one library ------------------------------------------------------------------------------------------------------


class Patches:
    """The replaced objects of one library, while an integration is installed. Local; not for several threads.

    Args:
        library: name of the distribution and of the extra.

    Attributes:
        why_left: why the last attempt to install left the library as it is.
    """

    def __init__(self, library: str) -> None:
        self._library = library
        self._undo: list[Callable[[], None]] = []
        self.why_left = ""

    @property
    def is_installed(self) -> bool:
        return bool(self._undo)

    def should_patch(self, relied_on: Iterable[str], probe: Callable[[], str | None] | None = None) -> bool:
        """Return whether the library is unpatched and may be patched; if it lacks something, warn and name that.

        No version is compared: an unknown one is patched if it has all that the tested ones have.

        Args:
            relied_on: "MODULE:NAME" for what has to be there, "MODULE:NAME(PARAMETER, ...)" for a function that has to
                take exactly these, because its replacement takes no others.
            probe: tries one call of the library, local to this rank: None, or what it does that is not relied on.

        Raises:
            ConfigError: the library is not installed, or lacks a package that it needs itself.
        """
        if self.is_installed:
            return False
        if config.is_disabled():
            self.why_left = f"{config.DISABLE} is set"
            return False
        targets = list(relied_on)
        difference = next(filter(None, map(self._difference, targets)), None)
        if difference is None and probe is not None:
            try:
                difference = probe()
            except Exception as error:
                difference = f"raises {type(error).__name__} where it is tried: {error}"
        if difference is not None:
            version = getattr(sys.modules[_root(targets[0])], "__version__", "of no version")
            self.why_left = f"{self._library} {version} {difference}"
            warnings.warn(
                f"ddpstats.integrations.{self._library}: {self.why_left}. {self._library} is left unpatched.",
                stacklevel=_level_of_caller(),
            )
        return difference is None

    def _difference(self, target: str) -> str | None:
        """Return what the library has instead of ``target``, for people; None if it has that."""
        path, _, expected = target.rstrip(")").partition("(")
        module, _, name = path.partition(":")
        try:
            importlib.import_module(_root(target))  # a submodule that is imported already does not ask for it
            value: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        except (ImportError, AttributeError) as error:
            if isinstance(error, ImportError) and not str(error.name).startswith(f"{_root(target)}."):
                raise ConfigError(
                    f"ddpstats.integrations.{self._library} needs {self._library}, but {module} cannot be imported: "
                    f"{error}. {pip_command(self._library)}"
                ) from error
            return f"has no {module}.{name}"
        if "(" not in target:
            return None
        if not callable(value):
            return f"has a {type(value).__name__} as {module}.{name}"
        parameters = ", ".join(inspect.signature(value).parameters)
        if parameters == expected:
            return None
        return (
            f"has {name}({parameters}) where {name}({expected}) is relied on: another package has patched it already, "
            "or this ddpstats does not know that version"
        )

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Bind ``name`` of a class or module to ``new``."""
        is_inherited = name not in vars(owner)
        old = None if is_inherited else vars(owner)[name]
        setattr(owner, name, new)
        self._undo.append(lambda: delattr(owner, name) if is_inherited else setattr(owner, name, old))

    def wrap(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        """Bind ``name``, a function, to ``ours``; see `in_place_of`."""
        self.replace(owner, name, in_place_of(getattr(owner, name), ours))

    def replace_everywhere(self, package: str, old: Any, new: Any) -> None:
        """Bind every name in the modules of ``package`` that is bound to ``old`` now; undone also in later modules."""
        _rebind(package, old, new)
        self._undo.append(lambda: _rebind(package, new, old))

    def restore(self) -> None:
        """Put the very objects back."""
        while self._undo:
            self._undo.pop()()


def in_place_of(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``ours``, which takes the original before its arguments, with the original's name and documentation."""

    @functools.wraps(original)
    def call(*args: Any, **named: Any) -> Any:
        return ours(original, *args, **named)

    return call


def pip_command(library: str) -> str:
    """Return what installs ``library`` beside ddpstats. No extra can bring espnet (setup.cfg says why)."""
    then = " && pip install --no-deps espnet==202511" if library == "espnet" else ""
    return f"pip install 'ddpstats[{library}]'{then}"


def _root(target: str) -> str:
    return target.partition(":")[0].partition(".")[0]


def _rebind(package: str, old: Any, new: Any) -> None:
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == package and isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if value is old:
                    setattr(module, name, new)


def _level_of_caller() -> int:
    """Return the ``stacklevel``, for the function that calls this, of the first frame outside of this package."""
    package, frame, level = __name__.rpartition(".")[0], sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(package):
        frame, level = frame.f_back, level + 1
    return level


# -- several libraries by name ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Installed:
    """`install` returns this. Its ``str`` is a line for each library.

    Attributes:
        patched: the libraries that use ddpstats now, also those that did before.
        left: library -> why it is as it was: not installed (and the command that installs it), without something that
            we rely on, switched off by the environment.
    """

    patched: tuple[str, ...]
    left: Mapping[str, str]

    def __str__(self) -> str:
        return _lines("patched", self.patched, self.left)


@dataclass(frozen=True)
class Uninstalled:
    """`uninstall` returns this. Its ``str`` is a line for each library.

    Attributes:
        restored: the libraries that have their own objects again.
        left: library -> why nothing was done.
    """

    restored: tuple[str, ...]
    left: Mapping[str, str]

    def __str__(self) -> str:
        return _lines("restored", self.restored, self.left)


def install(*names: str) -> Installed:
    """Make the named libraries use ddpstats. Local and idempotent; every rank with the same names, before training.

    Each is patched as by its own module's ``install()``, whose documentation says what that covers; a library that is
    not imported yet is imported. One that is not installed is left, and one that lacks what we rely on too, with a
    warning. No version is compared. Does nothing under ``DDPSTATS_DISABLE=1``.

    Args:
        names: of "accelerate", "espnet", "lightning" (or "pytorch_lightning": both names stand for both packages),
            "torcheval", "torchmetrics", at least one. All that are installed is no default: which libraries a program
            patches would then depend on the machine, and may differ by rank.

    Returns:
        What was patched, and what was left and why.

    Raises:
        ConfigError: no name, or an unknown one; nothing has been patched then. Also what a library that is installed
            but broken raises when it is imported.

    Example::

        import ddpstats, lightning

        print(ddpstats.integrations.install("lightning", "torchmetrics"))
        # patched: lightning
        # left: torchmetrics (not installed: pip install 'ddpstats[torchmetrics]')
    """
    patched: list[str] = []
    left: dict[str, str] = {}
    for name in _check_names("install", names):
        if not any(map(_is_importable, _PACKAGES[name])):
            left[name] = f"not installed: {pip_command(name)}"
            continue
        module = importlib.import_module(f"{__package__}.{name}")
        module.install()
        if _is_patched(name):
            patched.append(name)
        else:
            left[name] = "; ".join(dict.fromkeys(patches.why_left for patches in _patches_of(module)))
    return Installed(tuple(patched), left)


def uninstall(*names: str) -> Uninstalled:
    """Put the named libraries' own objects back; without a name, those of every library that is patched. Local.

    Returns:
        What was restored, and what was left and why.

    Raises:
        ConfigError: a name that `install` does not know; nothing has been restored then.
    """
    restored: list[str] = []
    left: dict[str, str] = {}
    for name in _check_names("uninstall", names) if names else filter(_is_patched, _PACKAGES):
        if not _is_patched(name):
            left[name] = "it was not patched"
            continue
        sys.modules[f"{__package__}.{name}"].uninstall()
        if _is_patched(name):
            left[name] = "a trainer with a DdpstatsCallback still needs it; that puts it back at its end"
        else:
            restored.append(name)
    return Uninstalled(tuple(restored), left)


def _check_names(function: str, names: tuple[str, ...]) -> list[str]:
    """Return the libraries that ``names`` stand for, each once."""
    unknown = [name for name in names if name not in (*_PACKAGES, *_ALIASES)]
    if unknown or not names:
        raise ConfigError(
            f"ddpstats.integrations.{function} takes names of libraries that your program uses"
            f"{f', not {unknown[0]!r}' if unknown else ''}; legal: {', '.join(map(repr, _PACKAGES))}. "
            "Nothing was changed."
        )
    return list(dict.fromkeys(_ALIASES.get(name, name) for name in names))


def _is_importable(package: str) -> bool:
    """Return whether it can be imported; a folder of that name, without code, cannot."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _is_patched(name: str) -> bool:
    module = sys.modules.get(f"{__package__}.{name}")  # never imported for this: then nothing is patched
    return module is not None and any(patches.is_installed for patches in _patches_of(module))


def _patches_of(module: ModuleType) -> list[Patches]:
    """Return an integration's patches, of each of its packages."""
    patches = vars(module)["_patches"]
    return list(patches.values()) if isinstance(patches, dict) else [patches]


def _lines(verb: str, done: tuple[str, ...], left: Mapping[str, str]) -> str:
    lines = [f"{verb}: {', '.join(done) or 'nothing'}", *(f"left: {name} ({why})" for name, why in left.items())]
    return "\n".join(lines)
