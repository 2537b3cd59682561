"""See that ranks are about to combine different things; say which, where, and who.

Names are loaded when first used: ``ddpstats report`` reads records without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpstats._base.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from ddpstats.guard._debug_page import debug_handler as debug_handler
    from ddpstats.guard._guard import collective_guard as collective_guard
    from ddpstats.guard._summary import GuardCounters as GuardCounters
    from ddpstats.guard.labels import label as label

_HOME_OF = {
    "GuardCounters": "guard._summary",
    "collective_guard": "guard._guard",
    "debug_handler": "guard._debug_page",
    "label": "guard.labels",
}

__all__ = sorted(_HOME_OF)
__getattr__, __dir__ = _lazy_names(__name__, _HOME_OF)
