"""What ranks tell each other of values that are not normal, and what that comes to. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddpstats._base.rank_names import ranks_text
from ddpstats.sentinel._lines import Check
from ddpstats.sentinel._verdict import SentinelFinding

if TYPE_CHECKING:
    from ddpstats.sentinel._matmul_fault import MatmulFault

_SHOWN_RANKS = 8


def alarm_tree(errors: Sequence[Check]) -> dict[str, Any] | None:
    """The first value of level 1 on this rank, and how many followed it; None without any. For `gather_trees`."""
    if not errors:
        return None
    first = errors[0]
    return {
        "checkpoint": first.checkpoint,
        "micro_batch": first.micro_batch,
        "value": first.value,
        "state": dict(first.state),
        "checks": first.checks,
        "more": len({check.checkpoint for check in errors}) - 1,
    }


def threshold_finding(trees: Mapping[int, dict[str, Any] | None]) -> SentinelFinding | None:
    """``trees``: of `alarm_tree`, by rank."""
    found = {rank: tree for rank, tree in trees.items() if tree is not None}
    if not found:
        return None
    first = found[min(found)]
    lines = [
        f"{ranks_text(list(found))}: a gradient of an activation is far from normal, before any reduction of gradients"
    ]
    lines += [f"  rank {rank}: {_words(found[rank])}" for rank in list(found)[:_SHOWN_RANKS]]
    if len(found) == len(trees) > 1:
        lines.append(
            "All ranks see it: parameters, data or software first; one faulty device does not reach all at once."
        )
    return SentinelFinding("thresholds", tuple(sorted(found)), first["checkpoint"], "\n".join(lines), first["value"])


def fault_tree(faults: Sequence[MatmulFault], count: int) -> dict[str, Any] | None:
    """The first wrong row on this rank, and how many there were; None without any. For `gather_trees`."""
    if not faults:
        return None
    first = faults[0]
    m, k, n = first.shape
    where = "backward" if first.backward else "forward"
    often = "it computes the same again: a sticky fault"
    if first.transient:
        often = "computed again, it is right: a transient fault"
    return {
        "op": first.op,
        "text": (
            f"{first.op} of ({m}, {k}) with ({k}, {n}) in {first.dtype}, {where}: "
            f"element {list(first.index)} is {first.got:g} instead of {first.expected:g}; {often}"
        ),
        "value": first.got,
        "more": count - 1,
    }


def matmul_finding(trees: Mapping[int, dict[str, Any] | None]) -> SentinelFinding | None:
    """``trees``: of `fault_tree`, by rank."""
    found = {rank: tree for rank, tree in trees.items() if tree is not None}
    if not found:
        return None
    first = found[min(found)]
    lines = [f"{ranks_text(list(found))}: a product of matrices is not what its operands say"]
    for rank in list(found)[:_SHOWN_RANKS]:
        more = f"; {found[rank]['more']} more rows" if found[rank]["more"] else ""
        lines.append(f"  rank {rank}: {found[rank]['text']}{more}")
    return SentinelFinding("matmul checksum", tuple(sorted(found)), first["op"], "\n".join(lines), first["value"])


def _words(tree: Mapping[str, Any]) -> str:
    state = ", ".join(f"{name} {value:g}" for name, value in tree["state"].items())
    more = f"; {tree['more']} more checkpoints after it" if tree["more"] else ""
    return (
        f"{tree['checkpoint']}, micro-batch {tree['micro_batch']}: value {tree['value']:g} after "
        f"{tree['checks']} checks ({state}){more}"
    )
