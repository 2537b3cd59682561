"""One module per library: ``install()`` makes it use ddpstats, ``uninstall()`` undoes that.

``ddpstats.integrations.install("lightning", "torchmetrics")`` does so for several, by name. The modules have the
libraries' names: ``from ddpstats.integrations import lightning`` would hide Lightning itself.
"""

from __future__ import annotations

import importlib
from typing import Any

from ddpstats.integrations._install import (
    Installed as Installed,
    Uninstalled as Uninstalled,
    install as install,
    uninstall as uninstall,
)

_LIBRARIES = frozenset({"accelerate", "espnet", "lightning", "loggers", "torcheval", "torchmetrics", "transformers"})


def __getattr__(name: str) -> Any:
    """``ddpstats.integrations.espnet`` without an import of its own; loaded when it is first asked for."""
    if name in _LIBRARIES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LIBRARIES})
