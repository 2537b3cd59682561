"""Silent data corruption: found by layers, each usable alone, at the rank where it happens.

Thresholds on gradients of activations, digests of replicas, micro-batches repeated by a peer, and checksums of matmuls.
Names are loaded when first used: parts of this package are pure, and need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpstats.sentinel._matmul import ChecksumWindow as ChecksumWindow
    from ddpstats.sentinel._sentinel import Sentinel as Sentinel
    from ddpstats.sentinel._verdict import Finding as Finding, Verdict as Verdict

_HOME_OF = {
    "ChecksumWindow": "ddpstats.sentinel._matmul",
    "Finding": "ddpstats.sentinel._verdict",
    "Sentinel": "ddpstats.sentinel._sentinel",
    "Verdict": "ddpstats.sentinel._verdict",
}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'ddpstats.sentinel' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
