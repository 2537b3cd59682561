"""Non-finite gradients: caught before they spread, named by rank, kept so that they can be replayed on a laptop.

Names are loaded when first used: ``ddpstats replay --help`` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpstats._rerun.step_record import MicroBatch as MicroBatch
    from ddpstats.capture._capture import NaNCapture as NaNCapture
    from ddpstats.capture._verdict import Verdict as Verdict

_HOME_OF = {
    "MicroBatch": "ddpstats._rerun.step_record",
    "NaNCapture": "ddpstats.capture._capture",
    "Verdict": "ddpstats.capture._verdict",
}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'ddpstats.capture' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
