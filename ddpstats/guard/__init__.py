"""See that ranks are about to combine different things; say which, where, and who.

Names are loaded when first used: ``ddpstats report`` reads records without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpstats.guard._guard import collective_guard as collective_guard
    from ddpstats.guard._labels import label as label
    from ddpstats.guard._summary import GuardCounters as GuardCounters

_HOME_OF = {"GuardCounters": "_summary", "collective_guard": "_guard", "label": "_labels"}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'ddpstats.guard' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ddpstats.guard.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
