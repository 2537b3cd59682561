"""What every integration needs: has the library what is relied on, replace objects, put the very objects back."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from ddpstats._base import config
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
    def installed(self) -> bool:
        return bool(self._undo)

    def wanted(
        self, relied_on: Iterable[str], probe: Callable[[], str | None] | None = None, version: str | None = None
    ) -> bool:
        """Whether to patch: not yet installed, not disabled, and the library has what is relied on. Else says why not.

        No version is compared: one that nobody has seen is patched if it has all that the tested ones have.

        Args:
            relied_on: as `difference` takes it.
            probe: tries one call of the library, local to this rank: None, or what it does that is not relied on.
            version: what the library calls itself, for the warning; None: as it was installed.
        """
        if self.installed or self.disabled():
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

    def disabled(self) -> bool:
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
