"""Decisions that all ranks take alike: whether a flag is set on any rank, or on all of them."""

from __future__ import annotations

from typing import Any

from ddpstats._base import config
from ddpstats._base.lazy import breaks_graph
from ddpstats._ranks.agreement import Agreement, Call, Counters
from ddpstats._ranks.calls import channel_of
from ddpstats._ranks.comm import patience_sec
from ddpstats._ranks.status import Failure


@breaks_graph
def any_rank(flag: Any, *, group: Any = None) -> bool:
    """Whether ``flag`` is true on some rank; the same answer on every rank. Collective, one all_reduce.

    For decisions that must be taken in lockstep, such as "skip this step". Without a process group: ``bool(flag)``.
    Raises `InvalidStats` on every rank where some rank's flag has no truth value; `ProtocolMismatch` and `RankMissing`
    as `StatsReducer` does.

    Example::

        rank 0: any_rank(False)   rank 1: any_rank(True)   both: True
    """
    return count_ranks("any_rank", flag, group)[0] > 0


@breaks_graph
def all_ranks(flag: Any, *, group: Any = None) -> bool:
    """Whether ``flag`` is true on every rank; the same answer on every rank. Collective, like `any_rank`."""
    count, world_size = count_ranks("all_ranks", flag, group)
    return count == world_size


def count_ranks(kind: str, flag: Any, group: Any) -> tuple[float, int]:
    """(how many ranks' flags are set, how many ranks there are). Collective, one all_reduce.

    ``kind``: the name of the public function. Ranks that pair two of them get `ProtocolMismatch`.
    """
    channel = channel_of(group)
    answer: bool | Failure
    try:
        answer = bool(flag)
    except Exception as error:  # this rank must still take part
        answer = Failure("", f"the flag of {kind}() has no truth value: {error}")
    timeout_sec = config.timeout_sec(None)
    call = Call(kind, None, "", patience_sec(timeout_sec))

    def work(agreement: Agreement) -> tuple[float, int]:
        return agreement.decide(call, answer, Counters()), agreement.world_size

    return channel.run(work, timeout_sec)
