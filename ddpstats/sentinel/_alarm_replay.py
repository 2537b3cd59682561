"""The micro-batch of an alarm, once more on its rank and on a peer: hardware, or software and data?

1. The alarm's rank hands out the micro-batch. It and the next rank run it, and tell the gradients and the values at the
   checkpoints.
2. Whether these values are normal only the alarm's rank can say: each rank has a past of its own.
3. What both ranks compute alike is no fault of one of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddpstats._rerun.runner import Cause, attempt, cause_of, from_rank_on
from ddpstats.sentinel._rerun import Repeated, Reruns
from ddpstats.sentinel._verdict import Gathered

Values = list[tuple[int, Tensor]]

_RTOL = 1e-2
_ATOL = 1e-6  # of the largest value: what should cancel to nothing does so up to noise


def explain_alarm(
    gathered: Gathered,
    reruns: Reruns,
    ranks: Sequence[int],
    rank: int,
    owner: int,
    micro_batch: int,
    is_abnormal: Callable[[Values], bool],
    *,
    names: Sequence[str] = (),
) -> str:
    """Why rank ``owner``'s micro-batch gave a value that is not normal, in words. Collective: two gathers.

    ``ranks``: of the group; ``rank``: this one; ``is_abnormal``: of the values of a rerun, asked on ``owner`` only;
    ``names``: of the checkpoints, by index.
    """

    def handed_out() -> dict[str, Any] | None:
        return attempt(lambda: _packet(reruns, micro_batch)) if rank == owner else None

    packet = gathered(handed_out, "the micro-batch of the alarm")[owner]
    if "error" in packet:
        return f"The micro-batch could not be run again: {packet['error']}."
    peer = from_rank_on(ranks, owner)[1 % len(ranks)]

    def answer() -> dict[str, Any]:
        if rank not in (owner, peer):
            return {}
        repeated = reruns.run(packet)
        return {**_answer(repeated), "bad": is_abnormal(repeated.values) if rank == owner else None}

    told = gathered(lambda: attempt(answer), "the micro-batch of the alarm, once more")
    return _explanation(owner, peer, told[owner], told[peer], names)


def _packet(reruns: Reruns, micro_batch: int) -> dict[str, Any]:
    own = reruns.packet(micro_batch)
    if own is None:
        return {"error": "it did not run inside micro_batch()"}
    return own if "error" in own else {"plain": own, "buffers": reruns.buffers}


def _answer(repeated: Repeated) -> dict[str, Any]:
    """Of one run: the gradients' digests, and a list of (checkpoint, value)."""
    values = [(index, float(value)) for index, value in repeated.values]
    return {"digests": repeated.witness.digests, "values": values}


def _explanation(owner: int, peer: int, here: Mapping[str, Any], there: Mapping[str, Any], names: Sequence[str]) -> str:
    if "error" in here:
        return _failed(owner, here)
    again, differing, wrong_there = f"Run again on rank {owner}, the micro-batch gives ", None, None
    if peer != owner and "error" not in there:
        alike = torch.equal(here["digests"], there["digests"])
        differing = None if alike else _first_difference(here, there)
        wrong_there = differing is None
    cause = cause_of([here["bad"]], wrong_there)
    if cause is Cause.TRANSIENT:
        return again + "normal values: a transient fault of its hardware, or a race."
    again += "such a value again"
    if cause is Cause.UNTOLD and peer == owner:
        return again + "; there is no other rank to tell hardware from software."
    if cause is Cause.UNTOLD:
        return f"{again}. {_failed(peer, there)}"
    if differing is None:
        return f"{again}, and so it does on rank {peer}: software or data, not hardware."
    place, value, other = differing
    return (
        f"{again}, and on rank {peer} it does not: hardware of rank {owner}, or something that only "
        f"it holds. {_name(place, names)} has {value:.4g} on rank {owner} and {other:.4g} on rank {peer}."
    )


def _failed(rank: int, answer: Mapping[str, Any]) -> str:
    return f"Rank {rank} could not run the micro-batch again: {answer['error']}"


def _first_difference(here: Mapping[str, Any], there: Mapping[str, Any]) -> tuple[int, float, float] | None:
    """(checkpoint, the value here, the value there) of the first ones that are not about the same; NaN for none."""
    finite = [abs(value) for _, value in (*here["values"], *there["values"]) if math.isfinite(value)]
    for mine, theirs in itertools.zip_longest(here["values"], there["values"]):
        if mine is None:
            return theirs[0], math.nan, theirs[1]
        if theirs is None or mine[0] != theirs[0]:
            return (*mine, math.nan)
        if not _is_about(mine[1], theirs[1], _ATOL * max(finite, default=0.0)):
            return (*mine, theirs[1])
    return None


def _is_about(one: float, other: float, room: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return not (math.isfinite(one) or math.isfinite(other))
    return math.isclose(one, other, rel_tol=_RTOL, abs_tol=room)


def _name(index: int, names: Sequence[str]) -> str:
    return names[index] if index < len(names) else f"Checkpoint {index}"
