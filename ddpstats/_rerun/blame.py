"""Find where a fault comes from: the rank that has it runs its step twice, a peer once, from the same state, in place.

1. `hand_out`: the owner packs its micro-batches; every rank receives them once, and reads them with `unpack_step`.
2. `blame`: the owner runs them twice, its peers once, at the same time. All ranks gather what came of it.
3. `cause_of`: not wrong each time on the owner: a transient fault of its hardware, or a race. Wrong each time, and
   right on a peer: hardware of the owner, or what only the owner holds outside of what was handed out. Wrong on a peer,
   too: software or data.

Only the caller knows what is wrong: a gradient that is not finite, a value that is not normal on that rank, or
gradients with other bits than most runs have.

Ranks that wait for an answer receive an error in its place.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ddpstats._rerun.codec import from_bytes, to_bytes
from ddpstats._rerun.record import PackedStep, tensor_bytes
from ddpstats.errors import ConfigError

# Every rank's tree by global rank. Collective: called with what makes this rank's tree, and what it is.
Gathered = Callable[[Callable[[], Any], str], dict[int, Any]]

MOST_BYTES = 256 << 20  # of what one rank hands out to all
_RUNS = 2


class Cause(enum.Enum):
    """The ranks on which the fault recurs when the step is run again."""

    TRANSIENT = "not each time on the same rank"
    UNDECIDED = "on the same rank, and no other one could run it"
    HARDWARE = "on the same rank, and not on another one"
    SOFTWARE_OR_DATA = "on another rank, too"


def cause_of(wrong_on_owner: Iterable[object], wrong_on_peer: object) -> Cause:
    """Return the cause. ``wrong_on_owner``: of each run; ``wrong_on_peer``: None where no peer could run it."""
    if not all(wrong_on_owner):
        return Cause.TRANSIENT
    if wrong_on_peer is None:
        return Cause.UNDECIDED
    return Cause.SOFTWARE_OR_DATA if wrong_on_peer else Cause.HARDWARE


def from_rank_on(ranks: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return ``rank``, the next one, and so on around: the order in which ranks are asked to run a step of it."""
    index = ranks.index(rank)
    return (*ranks[index:], *ranks[:index])


def attempt(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what ``run`` returns, or {"error": words}."""
    try:
        return run()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def hand_out(
    gathered: Gathered,
    rank: int,
    owners: Collection[int],
    pack: Callable[[], dict[str, Any]],
    what: str,
    most_bytes: float = MOST_BYTES,
) -> dict[int, dict[str, Any]]:
    """Return what ``pack`` returns on each of ``owners``, on every rank, or {"error": words}. Collective.

    Its "step" is a `PackedStep`, and becomes bytes for `unpack_step`. ``rank``: this one; ``most_bytes``: of tensors.
    """

    def packed() -> dict[str, Any]:
        packet = pack()
        size = tensor_bytes(packet)
        if size > most_bytes:
            raise ConfigError(
                f"it has {size >> 20} MiB, and at most {most_bytes / 2**20:.0f} MiB are sent to other ranks"
            )
        return {**packet, "step": to_bytes(packet["step"])}

    packets = gathered(lambda: attempt(packed) if rank in owners else None, what)
    return {owner: packets[owner] for owner in owners}


def unpack_step(packet: Mapping[str, Any], owner: int) -> PackedStep:
    """Return the step of what `hand_out` returned of rank ``owner``. Raises `BundleError`."""
    return from_bytes(packet["step"], PackedStep, f"the step of rank {owner}")


def blame(
    gathered: Gathered, rank: int, owner: int, peers: Collection[int], run: Callable[[], dict[str, Any]]
) -> dict[int, dict[str, Any]]:
    """Return {"runs": what ``run`` returned each time} or {"error": words} of ``owner`` and ``peers``. Collective.

    ``rank``: this one; ``run``: runs what was handed out, and reports.
    """

    def runs() -> dict[str, Any]:
        count = _RUNS if rank == owner else int(rank in peers)
        return {"runs": [run() for _ in range(count)]}

    answers = gathered(lambda: attempt(runs), f"the step of rank {owner}, run again")
    return {asked: answers[asked] for asked in (owner, *peers)}
