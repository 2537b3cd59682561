"""What repetitions of a micro-batch say: does its step repeat itself, and if not, who is wrong? Pure.

Does a step repeat itself bit for bit? If not: how far apart may results of one and the same step be? Each rank tells
how far its step was from repetitions of it (``distance``), and whether these were equal to each other (``repeats``);
`measured` says what that comes to:

1. Most ranks' steps repeat themselves: there is no noise, and a rank whose step does not is in doubt.
2. Repetitions are far from the step, or equal to each other and not as far from it as by rounding: what repeats it
   is another step. (Compiled by Inductor, a step without DDP around it is another graph, which rounds otherwise.)
3. Else that is natural noise, and there is room for some times as much; for rounding, for the most that it may be.

What all that says holds for the steps that were measured. A program that was compiled may get other graphs at any time,
on one rank alone: for other shapes, or because a loss that was 0 is no longer. Where anything was compiled
(``compiled``) a difference that may be rounding is nobody's fault, whoever it seems to be of.

Of a micro-batch in doubt several ranks run the same: they compute from the same parameters, batch and random state, so
results that differ are somebody's fault. `judge` takes what two ranks agree on for right: a fault does not happen twice
in the same bits. What it says of a step, its repetition on its own rank, and those on peers (same letter: same bits):

=====  ======  ==========  ========================================================================================
step   again   peers       verdict
=====  ======  ==========  ========================================================================================
a      a       b, b        its rank, each time; with one peer: undecided
a      b       b, b        its rank, once; nobody where most ranks' steps are unlike their repetitions: all at once is
                           no fault, the program has begun to do something that is not repeated
a      b       c, c        its rank, each time
a      a       b, a        the peer
a      b       c, d        nobody: noise
any of these, compiled, within the room for rounding: nobody. Beyond it letters are told apart by that room.
=====  ======  ==========  ========================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpstats._base.text import holders_lines, ranks_text
from ddpstats.errors import ConfigError

_ROOM = 8.0  # times the noise that was measured
MOST_NOISE = 1e-2  # of the largest norm: beyond that it is another computation. Compiled bfloat16 comes to 2e-3
_ROUNDING = (1e-12, 1e-4)  # the same, where each repetition gives the same bits: a sign or an order changes no norm
Offers = Mapping[int, Mapping[str, Any]]  # what ranks told


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


def measured(offers: Offers) -> Noise | None:
    """``offers``: what ranks told; None where no rank could tell its ``distance``.

    Raises:
        ConfigError: what was run again is not the step that was trained.
    """
    known = {rank: offer for rank, offer in offers.items() if offer["distance"] is not None}
    if not known:
        return None
    most = MOST_NOISE if any(offer["compiled"] for offer in offers.values()) else 0.0
    doubted = tuple(rank for rank, offer in known.items() if offer["distance"] > most)
    if 2 * len(doubted) > len(known) or len(known) == 1:
        doubted = ()  # it is the step
    return _noise_of({rank: offer for rank, offer in known.items() if rank not in doubted}, doubted)


def _noise_of(offers: Offers, doubted: tuple[int, ...]) -> Noise:
    """Of the ranks that are not in doubt."""
    unlike = [offer for offer in offers.values() if offer["distance"] != 0.0]
    if not unlike:
        return Noise(0.0, doubted)
    largest = max(offer["distance"] for offer in unlike)
    if 2 * len(unlike) <= len(offers):  # compiled, else they were in doubt
        room = rounding_room(largest)
        return Noise(room, doubted, _noise_text(largest, room, offers, repeats=True))
    repeats = any(offer["repeats"] for offer in unlike)
    least, most = _ROUNDING if repeats else (0.0, MOST_NOISE)
    if not least <= largest <= most:
        raise _another_step(offers)
    room = max(_ROOM * largest, most if repeats else 0.0)  # rounding is another one in each step
    return Noise(room, doubted, _noise_text(largest, room, offers, repeats))


def rounding_room(distance: float) -> float:
    """What to leave room for, where one difference was taken for rounding."""
    return min(max(_ROOM * distance, _ROUNDING[1]), MOST_NOISE)


def _noise_text(largest: float, room: float, offers: Offers, repeats: bool) -> str:
    what = "rounds otherwise when it is run again" if repeats else "does not repeat itself bit for bit"
    why = "torch.compile may have made another graph of it." if repeats else _determinism_text(offers)
    return (
        f"the step {what}: norms of gradients differ by up to {largest:.1e} of the "
        f"largest one. Peers' gradients are compared by their norms, with room for {room:.1e}; "
        f"smaller faults are not seen. {why}"
    )


def _determinism_text(offers: Offers) -> str:
    """The switches come first: what they leave open is measured."""
    missing: dict[str, list[int]] = {}
    for rank, offer in offers.items():
        for switch in offer["loose"]:
            missing.setdefault(switch, []).append(rank)
    if not missing:
        return "Deterministic algorithms are on: look for what else the step depends on."
    return " ".join(f"{switch} on {ranks_text(ranks)} may make it repeat itself." for switch, ranks in missing.items())


def _another_step(offers: Offers) -> ConfigError:
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
        is_noise: hardly a run is like another one, or no step like its repetitions: that is not a fault of one rank.
        is_rounding: runs differ, and by no more than programs do that were compiled otherwise.
    """

    culprit_ranks: tuple[int, ...]
    text: str
    is_noise: bool = False
    is_rounding: bool = False


def judge(
    owner: int,
    runs: Sequence[Run],
    same: Callable[[Any, Any], bool],
    *,
    rounded: Callable[[Any, Any], bool] | None = None,
    is_common: bool = False,
) -> Judgement:
    """Who is wrong, if anybody.

    Args:
        owner: whose micro-batch it is.
        runs: the first one is the step itself.
        same: whether two results are equal.
        rounded: whether they are equal but for rounding; None where nothing was compiled.
        is_common: whether most of the micro-batches that were run are in doubt.
    """
    classes = _classes(runs, rounded or same)
    if rounded and len(classes) == 1:
        return Judgement((), _rounding_text(owner, runs), is_rounding=True)
    if is_common and len(classes) == 2 and len(classes[0]) == 1:
        return Judgement((), _all_at_once_text(owner), is_noise=True)
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


def _rounding_text(owner: int, runs: Sequence[Run]) -> str:
    return (
        f"the micro-batch of rank {owner}, run {len(runs)} times, does not give the same gradients each time. Programs "
        "that torch.compile made round otherwise from one to the next, and their norms differ by no more than that may "
        f"come to ({MOST_NOISE:g} of the largest one), so it is nobody's fault. From now on peers' gradients are "
        "compared by their norms, with room for it; smaller faults are not seen."
    )


def _all_at_once_text(owner: int) -> str:
    return (
        f"most ranks' steps are not what comes of running them again, which every rank finds alike (of rank {owner}'s, "
        "to begin with). That is no fault of one rank: from this step on the program does something that replay_fn "
        "does not. It is measured anew at the next time."
    )


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
