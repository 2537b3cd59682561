"""Does a step repeat itself bit for bit? If not: how far apart may results of one and the same step be? Pure.

Each rank tells how far its step was from repetitions of it (``distance``), and whether these were equal to each other
(``repeats``); `measured` says what that comes to:

1. Most ranks' steps repeat themselves: there is no noise, and a rank whose step does not is in doubt.
2. Repetitions are equal to each other, and not to the step; or they are far from it: what repeats it is another step.
3. Else that is natural noise, and there is room for some times as much.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddpstats._base.rank_names import holders_lines, ranks_text
from ddpstats.errors import ConfigError

_ROOM = 8.0  # times the noise that was measured
_MOST_NOISE = 1e-2  # of the largest norm: beyond that it is another computation


@dataclass(frozen=True)
class Noise:
    """What was learnt.

    Attributes:
        room: by how much of the largest one norms of gradients may differ; 0.0 where bits are compared.
        doubted: ranks whose step did not repeat itself where most ranks' did.
        text: for the user; empty where there is no noise.
    """

    room: float
    doubted: tuple[int, ...] = ()
    text: str = ""


def measured(offers: Mapping[int, Mapping[str, Any]]) -> Noise | None:
    """``offers``: what ranks told; None where no rank could tell its ``distance``.

    Raises:
        ConfigError: what was run again is not the step that was trained.
    """
    known = {rank: offer for rank, offer in offers.items() if offer["distance"] is not None}
    if not known:
        return None
    unlike = [rank for rank, offer in known.items() if offer["distance"] != 0.0]
    if 2 * len(unlike) <= len(known) and len(known) > 1:
        return Noise(0.0, tuple(unlike))
    largest = max(offer["distance"] for offer in known.values())
    if any(known[rank]["repeats"] for rank in unlike) or not largest <= _MOST_NOISE:
        raise _another_step(known)
    room = _ROOM * largest
    return Noise(room, text=_noise_text(largest, room, known) if unlike else "")


def _noise_text(largest: float, room: float, offers: Mapping[int, Mapping[str, Any]]) -> str:
    return (
        f"the step does not repeat itself bit for bit: norms of gradients differ by up to {largest:.1e} of the "
        f"largest one. Peers' gradients are compared by their norms, with room for {room:.1e}; "
        f"smaller faults are not seen. {_determinism_text(offers)}"
    )


def _determinism_text(offers: Mapping[int, Mapping[str, Any]]) -> str:
    """The switches come first: what they leave open is measured."""
    missing: dict[str, list[int]] = {}
    for rank, offer in offers.items():
        for switch in offer["loose"]:
            missing.setdefault(switch, []).append(rank)
    if not missing:
        return "Deterministic algorithms are on: look for what else the step depends on."
    return " ".join(f"{switch} on {ranks_text(ranks)} may make it repeat itself." for switch, ranks in missing.items())


def _another_step(offers: Mapping[int, Mapping[str, Any]]) -> ConfigError:
    by_rank = {rank: _distance_text(offer) for rank, offer in offers.items()}
    lines = [
        "Sentinel, peer replay: replay_fn is not the step that was trained. Run again from the same state on the same "
        "rank:",
        *holders_lines(by_rank),
        "It must return what backward() was called on (before a GradScaler's scale), computed from the batch that was "
        "given to micro_batch(), from random numbers drawn inside micro_batch(), and under the same autocast. An "
        "optimizer inside the backward pass, reentrant checkpointing (it takes use_reentrant=False), and a module that "
        "counts its forward passes make it another step, too.",
    ]
    return ConfigError("\n".join(lines), ranks=offers)


def _distance_text(offer: Mapping[str, Any]) -> str:
    if offer["distance"] == 0.0:
        return "the same gradients"
    often = "twice the same gradients, and others" if offer["repeats"] else "other gradients each time"
    return f"{often} than in the step: norms differ by up to {offer['distance']:.1e} of the largest one"
