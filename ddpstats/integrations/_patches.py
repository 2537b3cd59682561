"""What every integration needs: is this the version that was tested, replace objects, put the very objects back."""

from __future__ import annotations

import importlib.metadata
import inspect
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ddpstats._base import config
from ddpstats.errors import ConfigError

ESPNET_VERSION = "202511"  # the one that was tested; no extra can bring it (setup.cfg says why)


class Patches:
    """The replaced objects of one library, while an integration is installed. Local; not for several threads.

    Args:
        library: name of the distribution and of the extra.
        tested: the one version on which the integration was tested.

    Attributes:
        why_left: why the last attempt to install left the library as it is.
    """

    def __init__(self, library: str, tested: str) -> None:
        self._library, self._tested = library, tested
        self._undo: list[Callable[[], None]] = []
        self.why_left = ""

    @property
    def installed(self) -> bool:
        return bool(self._undo)

    def wanted(self, signatures: Callable[[], dict[Callable[..., Any], tuple[str, ...]]] | None = None) -> bool:
        """Whether to patch: not yet installed, not disabled, and the library is what was tested. Else says why not.

        ``signatures()``: what is relied on beyond the version's number: function -> names of its parameters.
        """
        if self.installed or self.disabled():
            return False
        version = installed_version(self._library)
        reason = None
        if version != self._tested:
            reason = f"tested with {self._library} {self._tested}, but {version} is installed"
        relied_on = signatures() if signatures is not None and reason is None else {}
        for function, expected in relied_on.items():
            found = tuple(inspect.signature(function).parameters)
            if found != expected:
                reason = (
                    f"tested with {self._library} {self._tested}, which has {function.__qualname__}"
                    f"({', '.join(expected)}); the one that is installed calls itself {version} too, but there it is "
                    f"({', '.join(found)}): another package has patched it already, or it is no release"
                )
        if reason is not None:
            self.leave(reason)
        return reason is None

    def disabled(self) -> bool:
        """Whether the environment says that every library stays as it is."""
        if config.disabled():
            self.why_left = f"{config.DISABLE} is set"
            return True
        return False

    def leave(self, reason: str) -> None:
        """Warn, at the line outside of ddpstats.integrations that asked for it, that the library stays as it is."""
        self.why_left = reason
        warnings.warn(
            f"ddpstats.integrations.{self._library}: {reason}. {self._library} is left unpatched.",
            stacklevel=_level_of_caller(),
        )

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Bind ``name`` of a class or module to ``new``."""
        old = vars(owner)[name]
        setattr(owner, name, new)
        self._undo.append(lambda: setattr(owner, name, old))

    def replace_everywhere(self, package: str, old: Any, new: Any) -> None:
        """Bind every name in the modules of ``package`` that is bound to ``old`` now; undone also in later modules."""
        _rebind(package, old, new)
        self._undo.append(lambda: _rebind(package, new, old))

    def restore(self) -> None:
        """Put the very objects back."""
        while self._undo:
            self._undo.pop()()


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


def _level_of_caller() -> int:
    """The ``stacklevel``, for whoever calls this, of the first frame that is not one of this package's."""
    package, frame, level = __name__.rpartition(".")[0], sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(package):
        frame, level = frame.f_back, level + 1
    return level


def _rebind(package: str, old: Any, new: Any) -> None:
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == package and isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if value is old:
                    setattr(module, name, new)
