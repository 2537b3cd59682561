"""One module per library: ``install()`` makes it use ddpstats, ``uninstall()`` undoes that.

``ddpstats.integrations.install("lightning", "torchmetrics")`` does so for several, by name. The modules have the
libraries' names: ``from ddpstats.integrations import lightning`` would hide Lightning itself.
"""

from __future__ import annotations

from ddpstats._base.lazy import lazy_names as _lazy_names
from ddpstats.integrations.patches import (
    Installed as Installed,
    Uninstalled as Uninstalled,
    install as install,
    uninstall as uninstall,
)

_MODULES = frozenset({"accelerate", "espnet", "lightning", "loggers", "torcheval", "torchmetrics", "transformers"})

__getattr__, __dir__ = _lazy_names(__name__, {}, _MODULES)
