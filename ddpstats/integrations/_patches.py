"""What every integration needs: is this the version that was tested, replace objects, put the very objects back."""

from __future__ import annotations

import importlib.metadata
import inspect
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ddpstats import _config
from ddpstats.errors import ConfigError


class Patches:
    """The replaced objects of one library, while an integration is installed. Local; not for several threads.

    Args:
        library: name of the distribution and of the extra.
        tested: the one version on which the integration was tested.
    """

    def __init__(self, library: str, tested: str) -> None:
        self._library, self._tested = library, tested
        self._undo: list[Callable[[], None]] = []

    @property
    def installed(self) -> bool:
        return bool(self._undo)

    def wanted(self, signatures: Callable[[], dict[Callable[..., Any], tuple[str, ...]]] | None = None) -> bool:
        """Whether to patch: not yet installed, not disabled, and the library is what was tested. Else says why not.

        ``signatures()``: what is relied on beyond the version's number: function -> names of its parameters.
        """
        if self.installed or _config.disabled():
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
            warnings.warn(
                f"ddpstats.integrations.{self._library}: {reason}. {self._library} is left unpatched.", stacklevel=3
            )
        return reason is None

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


def installed_version(library: str) -> str:
    """Raises `ConfigError` where the library is not installed."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"ddpstats.integrations.{library} needs {library}, which is not installed: "
            f"pip install 'ddpstats[{library}]'"
        ) from None


def _rebind(package: str, old: Any, new: Any) -> None:
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == package and isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if value is old:
                    setattr(module, name, new)
