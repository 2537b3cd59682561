"""See that ranks are about to combine different things; say which, where, and who."""

from ddpstats.guard._guard import GuardCounters as GuardCounters, collective_guard as collective_guard
from ddpstats.guard._labels import label as label
