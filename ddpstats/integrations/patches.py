"""What every integration needs: has the library what is relied on, replace objects, put the very objects back.

`install` and `uninstall` do so for several libraries by name, so that no module of ours takes a library's own name.

1. All names are judged before anything is patched.
2. A library that is not installed is left: no number of this program can come from it.
3. Every other is patched by its own module's ``install``, which imports it and says what it relies on.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

from ddpstats._base import config
from ddpstats._base.text import first_line
from ddpstats.errors import ConfigError

ESPNET_VERSION = "202511"  # that CI runs; no extra can bring it (setup.cfg says why)


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

    def should_patch(
        self, relied_on: Iterable[str], probe: Callable[[], str | None] | None = None, version: str | None = None
    ) -> bool:
        """Whether to patch: not yet installed, not disabled, and the library has what is relied on. Else says why not.

        No version is compared: one that nobody has seen is patched if it has all that the tested ones have.

        Args:
            relied_on: as `difference` takes it.
            probe: tries one call of the library, local to this rank: None, or what it does that is not relied on.
            version: what the library calls itself, for the warning; None: as it was installed.
        """
        if self.is_installed or self.is_disabled():
            return False
        version = version or installed_version(self._library)
        reason = difference(relied_on)
        if reason is None and probe is not None:
            try:
                reason = probe()
            except Exception as error:
                reason = f"raises {type(error).__name__} where it is tried: {error}"
        if reason is not None:
            self.leave(f"{self._library} {version} {reason}")
        return reason is None

    def is_disabled(self) -> bool:
        """Whether the environment says that every library stays as it is."""
        if config.is_disabled():
            self.why_left = f"{config.DISABLE} is set"
            return True
        return False

    def leave(self, reason: str) -> None:
        """Warn, at the line outside of ddpstats.integrations that asked for it, that the library stays as it is."""
        self.why_left = reason
        warnings.warn(
            f"ddpstats.integrations.{self._library}: {reason}. {self._library} is left unpatched.",
            stacklevel=level_of_caller(),
        )

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Bind ``name`` of a class or module to ``new``."""
        old = vars(owner)[name]
        setattr(owner, name, new)
        self._undo.append(lambda: setattr(owner, name, old))

    def wrap(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        """Bind ``name``, a function, to ``ours``; see `in_place_of`."""
        self.replace(owner, name, in_place_of(getattr(owner, name), ours))

    def replace_everywhere(self, package: str | None, old: Any, new: Any) -> list[str]:
        """Bind every name in the modules of ``package`` that is bound to ``old`` now; undone also in later modules.

        ``package`` None: in all modules. Then ``new`` must be an object that nobody else has. Returns the names.
        """

        def undo() -> None:
            _rebind(package, new, old)

        self._undo.append(undo)
        return _rebind(package, old, new)

    def restore(self) -> None:
        """Put the very objects back."""
        while self._undo:
            self._undo.pop()()


def in_place_of(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """``ours``, which takes the original before its arguments, with the original's name and documentation."""

    @functools.wraps(original)
    def call(*args: Any, **named: Any) -> Any:
        return ours(original, *args, **named)

    return call


def difference(relied_on: Iterable[str]) -> str | None:
    """What a library has instead of something that is relied on, for people; None if it has all of it.

    ``relied_on``: "MODULE:NAME" for what has to be there, "MODULE:NAME(PARAMETER, ...)" for a function that has to take
    just these, for what stands in its place takes no others. Raises what the library raises when it is imported.
    """
    for one in relied_on:
        place, _, expected = one.rstrip(")").partition("(")
        module, _, name = place.partition(":")
        importlib.import_module(module.partition(".")[0])  # a library that cannot be imported says so itself
        try:
            found: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        except (ImportError, AttributeError):
            return f"has no {module}.{name}"
        if "(" in one:
            if not callable(found):
                return f"has a {type(found).__name__} as {module}.{name}"
            parameters = ", ".join(inspect.signature(found).parameters)
            if parameters != expected:
                return (
                    f"has {name}({parameters}) where {name}({expected}) is relied on: another package has patched it "
                    "already, or this ddpstats does not know that version"
                )
    return None


def pip_command(library: str) -> str:
    """What installs ``library`` beside ddpstats."""
    then = f" && pip install --no-deps espnet=={ESPNET_VERSION}" if library == "espnet" else ""
    return f"pip install 'ddpstats[{library}]'{then}"


def installed_version(library: str) -> str:
    """Raises `ConfigError` where the library is not installed."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"ddpstats.integrations.{library} needs {library}, which is not installed: {pip_command(library)}"
        ) from None


def level_of_caller() -> int:
    """The ``stacklevel``, for whoever calls this, of the first frame that is not one of this package's."""
    package, frame, level = __name__.rpartition(".")[0], sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(package):
        frame, level = frame.f_back, level + 1
    return level


def _rebind(package: str | None, old: Any, new: Any) -> list[str]:
    names = []
    for module_name, module in list(sys.modules.items()):
        if package in (None, module_name.partition(".")[0]) and isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if value is old:
                    setattr(module, name, new)
                    names.append(f"{module_name}.{name}")
    return names


_PACKAGES: dict[str, tuple[str, ...]] = {
    "accelerate": ("accelerate",),
    "espnet": ("espnet2",),
    "lightning": ("lightning", "pytorch_lightning"),
    "torcheval": ("torcheval",),
    "torchmetrics": ("torchmetrics",),
}
"""What can be patched: our name, which is that of the distribution and of the extra -> the packages that are imported,
of which one is enough."""

_ALIASES = {"pytorch_lightning": "lightning"}

_NOTHING_TO_PATCH = {
    "loggers": "ddpstats.integrations.loggers.write(writer, reduced, step) is called where you log",
    "transformers": "its Trainer takes ddpstats.integrations.transformers.NaNCaptureCallback",
}

PATCHABLE = tuple(_PACKAGES)
DISTRIBUTIONS = (*_PACKAGES, *_ALIASES, "transformers")
"""Whose versions an integration's work depends on."""


@dataclass(frozen=True)
class Installed:
    """What `install` did. Its ``str`` is a line for each library.

    Attributes:
        patched: the libraries that use ddpstats now, also those that did before.
        left: library -> why it is as it was: not installed (and the command that installs it), without something that
            we rely on, switched off by the environment.
    """

    patched: tuple[str, ...]
    left: Mapping[str, str]

    def __str__(self) -> str:
        return lines_of("patched", self.patched, self.left)


@dataclass(frozen=True)
class Uninstalled:
    """What `uninstall` did. Its ``str`` is a line for each library.

    Attributes:
        restored: the libraries that have their own objects again.
        left: library -> why nothing was done.
    """

    restored: tuple[str, ...]
    left: Mapping[str, str]

    def __str__(self) -> str:
        return lines_of("restored", self.restored, self.left)


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
        ConfigError: no name, or one that is none of these; nothing has been patched then. Also what a library that is
            installed but broken raises when it is imported.

    Example::

        import ddpstats, lightning

        print(ddpstats.integrations.install("lightning", "torchmetrics"))
        # patched: lightning
        # left: torchmetrics (not installed: pip install 'ddpstats[torchmetrics]')
    """
    wanted = _checked("install", names)
    patched: list[str] = []
    left: dict[str, str] = {}
    for name in wanted:
        if not any(map(_is_there, _PACKAGES[name])):
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
        ConfigError: a name that is none of `install`'s; nothing has been restored then.
    """
    restored: list[str] = []
    left: dict[str, str] = {}
    for name in _checked("uninstall", names) if names else [name for name in _PACKAGES if _is_patched(name)]:
        if not _is_patched(name):
            left[name] = "it was not patched"
            continue
        sys.modules[f"{__package__}.{name}"].uninstall()
        if _is_patched(name):
            left[name] = "a trainer with a DdpstatsCallback still needs it; that puts it back at its end"
        else:
            restored.append(name)
    return Uninstalled(tuple(restored), left)


def trial(name: str) -> str:
    """Whether `install` would patch that library here, else why not. Local: imports it, and puts everything back."""
    if _is_patched(name):
        return "patched"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            left = install(name).left
    except Exception as error:
        return f"would be left ({type(error).__name__}: {first_line(error)})"
    finally:
        uninstall(name)
    return f"would be left ({left[name]})" if name in left else "would be patched"


def _checked(function: str, names: tuple[object, ...]) -> list[str]:
    """Our names of the libraries, each once."""
    if not names:
        there = [name for name, packages in _PACKAGES.items() if any(map(_is_there, packages))]
        raise ConfigError(
            f"ddpstats.integrations.{function}() needs the names of the libraries that your program uses; "
            f"legal: {_quoted(_PACKAGES)}. Installed here: {_quoted(there) or 'none of them'}."
        )
    for name in names:
        if name not in [*_PACKAGES, *_ALIASES]:
            raise ConfigError(f"ddpstats.integrations.{function}: {_why_not(name)} Nothing was changed.")
    return list(dict.fromkeys(_ALIASES.get(name, name) for name in cast(tuple[str, ...], names)))


def _why_not(name: object) -> str:
    legal = f"legal: {_quoted(_PACKAGES)}."
    if not isinstance(name, str):
        kind = f"a {type(name).__name__}" if not isinstance(name, ModuleType) else "a module"
        return f"libraries are named by strings, each an argument of its own, and this is {kind}; {legal}"
    if name in _NOTHING_TO_PATCH:
        return f"{name!r} has nothing to patch: {_NOTHING_TO_PATCH[name]}; {legal}"
    close = difflib.get_close_matches(name.lower(), _PACKAGES, 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{name!r} is none of the libraries that can be patched: {hint}{legal}"


def _is_there(package: str) -> bool:
    """Whether it can be imported; a folder of that name, without code, is none."""
    if package in sys.modules:
        return sys.modules[package] is not None
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _is_patched(name: str) -> bool:
    module = sys.modules.get(f"{__package__}.{name}")  # never imported for this: then nothing is patched
    return module is not None and any(patches.is_installed for patches in _patches_of(module))


def _patches_of(module: ModuleType) -> list[Patches]:
    """One for each of its packages."""
    found = vars(module)["_patches"]
    return list(found.values()) if isinstance(found, dict) else [found]


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def lines_of(verb: str, done: tuple[str, ...], left: Mapping[str, str]) -> str:
    """A report: a line for what was done, and one for each thing that was left."""
    return "\n".join(
        [f"{verb}: {', '.join(done) or 'nothing'}", *(f"left: {name} ({why})" for name, why in left.items())]
    )
