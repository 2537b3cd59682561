"""Silent data corruption: found by layers, each usable alone, at the rank where it happens.

Thresholds on gradients of activations, digests of replicas, micro-batches repeated by a peer, and checksums of matmuls.
Names are loaded when first used: parts of this package are pure, and need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpstats._base.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from ddpstats.sentinel.matmul import ChecksumWindow as ChecksumWindow
    from ddpstats.sentinel.sentinel import Sentinel as Sentinel
    from ddpstats.sentinel.verdict import SentinelFinding as SentinelFinding, SentinelVerdict as SentinelVerdict

_HOME_OF = {
    "ChecksumWindow": "sentinel.matmul",
    "SentinelFinding": "sentinel.verdict",
    "Sentinel": "sentinel.sentinel",
    "SentinelVerdict": "sentinel.verdict",
}

__all__ = sorted(_HOME_OF)
__getattr__, __dir__ = _lazy_names(__name__, _HOME_OF)
