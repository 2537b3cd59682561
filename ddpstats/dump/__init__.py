"""Statistics of every module and function of a step, on disk; and what finds the first difference in them.

Names are loaded when first used: ``ddpstats compare --help`` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpstats._base.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from ddpstats.dump.record import StatsDump as StatsDump

_HOME_OF = {"StatsDump": "dump.record"}

__all__ = sorted(_HOME_OF)
__getattr__, __dir__ = _lazy_names(__name__, _HOME_OF)
