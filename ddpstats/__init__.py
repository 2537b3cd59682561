"""The numbers a distributed training run reports are the right numbers, or you get an error that names key and ranks.

Names are loaded when first used, so that importing this package does not import torch.

PYTEST_DONT_REWRITE: pytest finds a plugin here, and must not warn that this package was imported before it.
"""

from __future__ import annotations

import importlib
import os as _os
from typing import TYPE_CHECKING

from ddpstats._base.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from ddpstats._base.version import __version__ as __version__
    from ddpstats._ranks.step import all_ranks as all_ranks, any_rank as any_rank
    from ddpstats._reduction.ops import All as All, Any as Any, Max as Max, Mean as Mean, Min as Min, Sum as Sum
    from ddpstats._reduction.reducer import (
        Entry as Entry,
        PendingReduction as PendingReduction,
        RankValues as RankValues,
        Reduced as Reduced,
        ReductionCounters as ReductionCounters,
        StatsReducer as StatsReducer,
        reduce_stats as reduce_stats,
    )
    from ddpstats._reduction.window import StatsWindow as StatsWindow
    from ddpstats.capture import NaNCapture as NaNCapture
    from ddpstats.dump import StatsDump as StatsDump
    from ddpstats.errors import (
        BundleError as BundleError,
        CollectiveMismatch as CollectiveMismatch,
        ConfigError as ConfigError,
        DdpstatsError as DdpstatsError,
        DumpError as DumpError,
        InvalidStats as InvalidStats,
        NonFiniteStat as NonFiniteStat,
        ProtocolMismatch as ProtocolMismatch,
        RankMissing as RankMissing,
        SchemaConflict as SchemaConflict,
        SentinelAlarm as SentinelAlarm,
    )
    from ddpstats.guard import collective_guard as collective_guard, label as label
    from ddpstats.recursive_op import (
        recursive_average as recursive_average,
        recursive_divide as recursive_divide,
        recursive_sum as recursive_sum,
    )
    from ddpstats.sentinel import Sentinel as Sentinel
    from ddpstats.step_checks import StepChecks as StepChecks, StepVerdicts as StepVerdicts

_HOMES = {
    "_base.version": "__version__",
    "_ranks.step": "all_ranks any_rank",
    "_reduction.ops": "All Any Max Mean Min Sum",
    "_reduction.reducer": "Entry PendingReduction RankValues Reduced ReductionCounters StatsReducer reduce_stats",
    "_reduction.window": "StatsWindow",
    "capture": "NaNCapture",
    "dump": "StatsDump",
    "errors": "BundleError CollectiveMismatch ConfigError DdpstatsError DumpError InvalidStats NonFiniteStat "
    "ProtocolMismatch RankMissing SchemaConflict SentinelAlarm",
    "guard": "collective_guard label",
    "recursive_op": "recursive_average recursive_divide recursive_sum",
    "sentinel": "Sentinel",
    "step_checks": "StepChecks StepVerdicts",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

_SUBMODULES = frozenset({"capture", "dump", "errors", "guard", "integrations", "recursive_op", "sentinel", "testing"})

__all__ = sorted(_HOME_OF)
__getattr__, __dir__ = _lazy_names(__name__, _HOME_OF, _SUBMODULES)

if _os.environ.get("DDPSTATS_GUARD"):
    importlib.import_module("ddpstats.guard.ending").start()
