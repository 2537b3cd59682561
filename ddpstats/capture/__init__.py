"""Non-finite gradients: caught before they spread, named by rank, kept so that they can be replayed on a laptop.

Names are loaded when first used: ``ddpstats replay --help`` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpstats._base.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from ddpstats._rerun.record import MicroBatch as MicroBatch
    from ddpstats.capture.capture import NaNCapture as NaNCapture
    from ddpstats.capture.verdict import CaptureVerdict as CaptureVerdict

_HOME_OF = {
    "MicroBatch": "_rerun.record",
    "NaNCapture": "capture.capture",
    "CaptureVerdict": "capture.verdict",
}

__all__ = sorted(_HOME_OF)
__getattr__, __dir__ = _lazy_names(__name__, _HOME_OF)
