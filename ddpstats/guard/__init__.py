"""See that ranks are about to combine different things; say which, where, and who.

Names are loaded when first used: ``ddpstats report`` reads records without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpstats._base.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from ddpstats.guard.guard import collective_guard as collective_guard
    from ddpstats.guard.labels import label as label
    from ddpstats.guard.printing import GuardCounters as GuardCounters

_HOME_OF = {
    "GuardCounters": "guard.printing",
    "collective_guard": "guard.guard",
    "label": "guard.labels",
}

__all__ = sorted(_HOME_OF)
__getattr__, __dir__ = _lazy_names(__name__, _HOME_OF)
