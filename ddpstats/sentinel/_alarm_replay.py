"""The micro-batch of an alarm, once more on its rank and on a peer: hardware, or software and data?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ddpstats.sentinel._peer_replay import Gathered
from ddpstats.sentinel._rerun import Reruns, attempt

Values = list[tuple[int, Tensor]]


def explain_alarm(
    gathered: Gathered,
    reruns: Reruns,
    ranks: Sequence[int],
    rank: int,
    owner: int,
    micro_batch: int,
    is_abnormal: Callable[[Values], bool],
) -> str:
    """Why rank ``owner``'s micro-batch gave a value that is not normal, in words. Collective: two gathers.

    ``ranks``: of the group; ``rank``: this one; ``is_abnormal``: of the values of a rerun.
    """

    def handed_out() -> dict[str, Any] | None:
        if rank != owner:
            return None
        own = reruns.packet(micro_batch)
        return own if own is None or "error" in own else {"plain": own, "buffers": reruns.buffers}

    packet = gathered(handed_out, "the micro-batch of the alarm")[owner]
    if packet is None or "error" in packet:
        why = "it did not run inside micro_batch()" if packet is None else packet["error"]
        return f"The micro-batch could not be run again: {why}."
    peer = ranks[(list(ranks).index(owner) + 1) % len(ranks)]

    def answer() -> dict[str, Any]:
        if rank not in (owner, peer):
            return {}
        return attempt(lambda: {"bad": is_abnormal(reruns.run(packet["plain"], packet["buffers"]).values)})

    told = gathered(answer, "the micro-batch of the alarm, once more")
    return _explanation(owner, peer, told[owner], told[peer])


def _explanation(owner: int, peer: int, here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    for rank, answer in ((owner, here), (peer, there)):
        if "error" in answer:
            return f"Rank {rank} could not run the micro-batch again: {answer['error']}"
    again = f"Run again on rank {owner}, the micro-batch gives "
    if not here["bad"]:
        return again + "normal values: a transient fault of its hardware, or a race."
    if peer == owner:
        return again + "such a value again; there is no other rank to tell hardware from software."
    if not there["bad"]:
        return (
            f"{again}such a value again, and on rank {peer} it does not: hardware of rank {owner}, or something that "
            "only it holds."
        )
    return f"{again}such a value again, and so it does on rank {peer}: software or data, not hardware."
