"""What follows when the control lanes were not clean: from every rank's status to a new layout, or one error for all.

Pure functions: each rank runs them on the same statuses and comes to the same end.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddpstats._base.rank_names import ranks_text
from ddpstats._reduction.layout import Layout, overlay, union
from ddpstats._reduction.schema import EMPTY
from ddpstats._reduction.wire import Status
from ddpstats.errors import InvalidStats, ProtocolMismatch

Statuses = Sequence[tuple[Status, tuple[int, ...]]]
"""Each distinct status with the global ranks that sent it, in the order of the ranks."""

_SHOWN_FAILURES = 8


def agree(statuses: Statuses, base: Layout, group_name: str) -> Layout:
    """The layout that holds all paths of this call. Raises what is wrong with the call, on every rank alike.

    ``base`` is the layout to extend; ranks whose layouts differ (one was interrupted in the middle of a call) start
    anew.
    """
    _refuse_different_calls(statuses, group_name)
    _refuse_failures(statuses, group_name)
    if len({status.layout for status, _ in statuses}) > 1:
        base = Layout()
    elif not any(status.stale for status, _ in statuses):
        raise ProtocolMismatch(
            f"the control lanes of {_call_text(statuses[0][0])} on {group_name} are damaged although all ranks agree: "
            "another program writes to this group's connections, or memory or network is faulty",
            group=group_name,
        )
    unbuildable = base.unbuildable.union(*(status.unbuildable for status, _ in statuses))
    new = union([(status.schema, ranks) for status, ranks in statuses], unbuildable, group_name)
    if base.root == EMPTY:
        return Layout(new, unbuildable)
    known = union([(base.root, ())], unbuildable) if unbuildable else base.root  # may still hold a kind to be given up
    return Layout(overlay(known, new), unbuildable)


def _refuse_different_calls(statuses: Statuses, group_name: str) -> None:
    ranks_of: dict[str, list[int]] = {}
    for status, ranks in statuses:
        ranks_of.setdefault(_call_text(status), []).extend(ranks)
    if len(ranks_of) < 2:
        return
    lines = [f"ranks of {group_name} met in one collective with different calls:"]
    lines += [f"  {ranks_text(ranks)}: {text}" for text, ranks in ranks_of.items()]
    lines.append(
        "All ranks must make the same calls in the same order. A rank with one call more or less than the others, "
        "or a call that only some ranks reach, is the usual cause. Nothing was reduced."
    )
    involved = [rank for _, ranks in statuses for rank in ranks]
    raise ProtocolMismatch("\n".join(lines), ranks=involved, group=group_name)


def _call_text(status: Status) -> str:
    if status.call == "gather":
        return str(status.name)
    if status.call != "reduce_stats":
        return f"{status.call}()"
    name = "without a name" if status.name is None else f"name={status.name!r}"
    return f"{status.call}, {name}, nonfinite={status.nonfinite!r}"


def _refuse_failures(statuses: Statuses, group_name: str) -> None:
    failed = [(status.failure, ranks) for status, ranks in statuses if status.failure is not None]
    if not failed:
        return
    gathers = statuses[0][0].call == "gather"
    lines = [f"{statuses[0][0].name}: values that cannot be gathered:" if gathers else "stats that cannot be reduced:"]
    for failure, ranks in failed[:_SHOWN_FAILURES]:
        where = f" at {failure.path!r}" if failure.path else ""
        lines.append(f"  {ranks_text(ranks)}{where}: {failure.message}")
    if len(failed) > _SHOWN_FAILURES:
        lines.append(f"  and {sum(len(ranks) for _, ranks in failed[_SHOWN_FAILURES:])} more ranks")
    lines.append("Nothing was gathered." if gathers else "Nothing was reduced; the reducer goes on working.")
    involved = [rank for _, ranks in failed for rank in ranks]
    raise InvalidStats("\n".join(lines), ranks=involved, path=failed[0][0].path or None, group=group_name)
