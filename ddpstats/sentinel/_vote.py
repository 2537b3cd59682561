"""What repetitions of a micro-batch say: does its step repeat itself, and if not, who is wrong? Pure.

Does a step repeat itself bit for bit? If not: how far apart may results of one and the same step be? Each rank tells
how far its step was from repetitions of it (``distance``), and whether these were equal to each other (``repeats``);
`measured` says what that comes to:

1. Most ranks' steps repeat themselves: there is no noise, and a rank whose step does not is in doubt.
2. Repetitions are far from the step, or equal to each other and not as far from it as by rounding: what repeats it
   is another step. (Compiled by Inductor, a step without DDP around it is another graph, which rounds otherwise.)
3. Else that is natural noise, and there is room for some times as much; for rounding, for the most that it may be.

Of a micro-batch in doubt several ranks run the same: they compute from the same parameters, batch and random state, so
results that differ are somebody's fault. `judge` takes what two ranks agree on for right: a fault does not happen twice
in the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpstats._base.rank_names import holders_lines, ranks_text
from ddpstats.errors import ConfigError

_ROOM = 8.0  # times the noise that was measured
_MOST_NOISE = 1e-2  # of the largest norm: beyond that it is another computation
_ROUNDING = (1e-12, 1e-4)  # the same, where each repetition gives the same bits: a sign or an order changes no norm


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
    repeats = any(known[rank]["repeats"] for rank in unlike)
    least, most = _ROUNDING if repeats else (0.0, _MOST_NOISE)
    if not least <= largest <= most:
        raise _another_step(known)
    room = max(_ROOM * largest, most if repeats else 0.0)  # rounding is another one in each step
    return Noise(room, text=_noise_text(largest, room, known, repeats) if unlike else "")


def _noise_text(largest: float, room: float, offers: Mapping[int, Mapping[str, Any]], repeats: bool) -> str:
    what = "rounds otherwise when it is run again" if repeats else "does not repeat itself bit for bit"
    why = "torch.compile may have made another graph of it." if repeats else _determinism_text(offers)
    return (
        f"the step {what}: norms of gradients differ by up to {largest:.1e} of the "
        f"largest one. Peers' gradients are compared by their norms, with room for {room:.1e}; "
        f"smaller faults are not seen. {why}"
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
        "optimizer inside the backward pass, reentrant checkpointing (it takes use_reentrant=False), a module that "
        "counts its forward passes, and Inductor's own random numbers (torch._inductor.config.fallback_random = True "
        "takes torch's) make it another step, too.",
    ]
    return ConfigError("\n".join(lines), ranks=offers)


def _distance_text(offer: Mapping[str, Any]) -> str:
    if offer["distance"] == 0.0:
        return "the same gradients"
    often = "twice the same gradients, and others" if offer["repeats"] else "other gradients each time"
    return f"{often} than in the step: norms differ by up to {offer['distance']:.1e} of the largest one"


@dataclass(frozen=True)
class Run:
    """One result for the micro-batch of one rank. ``when``: "in the step", "again", ..."""

    rank: int
    when: str
    result: Any


@dataclass(frozen=True)
class Judgement:
    """Who is wrong.

    Attributes:
        culprit_ranks: empty where the runs do not tell.
        is_noise: hardly a run is like another one: that is not a fault of one rank.
    """

    culprit_ranks: tuple[int, ...]
    text: str
    is_noise: bool = False


def judge(owner: int, runs: Sequence[Run], same: Callable[[Any, Any], bool]) -> Judgement:
    """``owner``: whose micro-batch it is. ``same``: whether two results are equal."""
    classes = _classes(runs, same)
    right = max(classes, key=lambda runs: (len({run.rank for run in runs}), len(runs)))
    agreeing = sorted({run.rank for run in right})
    lines = [f"the micro-batch of rank {owner}, run {len(runs)} times:"]
    lines += [f"  result {letter}: {_runs_text(one)}" for letter, one in zip("ABCDEFGH", classes, strict=False)]
    is_alone = len({run.rank for run in runs}) == 1
    if len(agreeing) < 2 and not (is_alone and len(right) > 1):
        return _undecided(lines, classes)
    wrong = [run for run in runs if run not in right]
    culprits = tuple(sorted({run.rank for run in wrong}))
    lines.append(f"Right by majority: {ranks_text(agreeing)}. {_kinds(wrong, right)}")
    return Judgement(culprits, "\n".join(lines))


def _classes(runs: Sequence[Run], same: Callable[[Any, Any], bool]) -> list[list[Run]]:
    found: list[list[Run]] = []
    for run in runs:
        place = next((one for one in found if same(one[0].result, run.result)), None)
        if place is None:
            found.append([run])
        else:
            place.append(run)
    return found


def _runs_text(runs: Sequence[Run]) -> str:
    return ", ".join(f"rank {run.rank} {run.when}" for run in runs)


def _kinds(wrong: Sequence[Run], right: Sequence[Run]) -> str:
    """One sentence for each rank that was wrong: every time, or now and then."""
    sentences = []
    for rank in sorted({run.rank for run in wrong}):
        if any(run.rank == rank for run in right):
            sentences.append(
                f"Rank {rank} was wrong once and right once: a transient fault of its hardware, or a race."
            )
        else:
            sentences.append(
                f"Rank {rank} is wrong each time: a lasting fault of its hardware, or something that only it holds "
                "outside of parameters, buffers, batch and random state."
            )
    return " ".join(sentences)


def _undecided(lines: list[str], classes: Sequence[Sequence[Run]]) -> Judgement:
    """No two ranks agree."""
    if len(classes) == 2 and classes[0][0].rank != classes[1][0].rank:
        lines.append(
            "Each rank repeats itself and they disagree: one of the two is wrong each time, and a third rank would "
            "have to decide; or their devices or libraries differ."
        )
        return Judgement((), "\n".join(lines))
    lines.append("No two ranks agree, and some do not repeat themselves: the step is not deterministic.")
    return Judgement((), "\n".join(lines), is_noise=True)
