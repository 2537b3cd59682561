"""Statistics of every module and function of a step, on disk; and what finds the first difference in them.

Names are loaded when first used: ``ddpstats compare --help`` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpstats.dump._dump import StatsDump as StatsDump

_HOME_OF = {"StatsDump": "ddpstats.dump._dump"}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'ddpstats.dump' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
