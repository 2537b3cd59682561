"""Tools to test distributed programs: real ranks, threads that act as ranks, faults, and uneven stats.

- `run_ranks`, `RankPool`, `PerRank`: a function on real gloo processes, with a hard time limit and nothing left behind.
- `run_threads`: the same for reductions of this library over hundreds of ranks in one process.
- `count_collectives`, `die`, `sleep_past`: what really went over the wire, and how ranks fail.
- `ddpstats.testing.strategies`: hypothesis strategies for stats that differ between ranks (needs ``ddpstats[testing]``).

Functions and their results travel between the parent and its own children by pickle, over private pipes; nothing from
outside ever gets there.
"""

from __future__ import annotations

from ddpstats.testing._faults import CollectiveCount as CollectiveCount
from ddpstats.testing._faults import count_collectives as count_collectives
from ddpstats.testing._faults import die as die
from ddpstats.testing._faults import sleep_past as sleep_past
from ddpstats.testing._rank_outcomes import RankDied as RankDied
from ddpstats.testing._rank_outcomes import RankError as RankError
from ddpstats.testing._rank_outcomes import RankNotRun as RankNotRun
from ddpstats.testing._rank_outcomes import RankOutcome as RankOutcome
from ddpstats.testing._rank_outcomes import RankOutcomes as RankOutcomes
from ddpstats.testing._rank_outcomes import RanksFailed as RanksFailed
from ddpstats.testing._rank_outcomes import RankTimedOut as RankTimedOut
from ddpstats.testing._rank_outcomes import RankUnpicklable as RankUnpicklable
from ddpstats.testing._ranks import PerRank as PerRank
from ddpstats.testing._ranks import RankPool as RankPool
from ddpstats.testing._ranks import run_ranks as run_ranks
from ddpstats.testing._threads import ThreadGroup as ThreadGroup
from ddpstats.testing._threads import run_threads as run_threads
