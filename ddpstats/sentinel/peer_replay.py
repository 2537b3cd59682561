"""A rank's micro-batch repeated by a peer: finds what went wrong on one rank before the gradients were reduced.

`PeerReplay.examine`, every so many steps, on all ranks together:

1. Each rank has digests of its own gradients of the step's first micro-batch, taken before the reduce
   (`_rerun.digest`). At the first time it also runs that micro-batch twice more itself: does the step repeat itself bit
   for bit? `measured` says what that comes to: bits are compared, or norms, with room for noise. All-zero gradients are
   no evidence.
2. As many ranks as fit into `MOST_BYTES` hand out their micro-batch (all of them where batches are small), beginning
   with another rank each time, and those buffers that differ between ranks. The next rank runs it, and all gather what
   came of it.
3. Where a result differs, its owner runs that micro-batch twice more, and the next two ranks once (`blame`); `judge`
   says who is wrong.

`explain_alarm` is the same for an alarm of layer 1: hardware, or software and data?

The course depends on gathered things only. What fails on one rank is reported on all.

What several runs of one micro-batch say of the step, its repetitions on its own rank, and those on two peers, of which
the first ran it before, too (same letter: same bits). They compute from the same parameters, batch and random state, so
what two ranks agree on is right: a fault does not happen twice in the same bits.

=====  ======  ==========  ========================================================================================
step   again   peers       verdict
=====  ======  ==========  ========================================================================================
a      a       b, b        its rank, each time; with one peer: undecided
a      b       b, b        its rank, once; no rank where most ranks' steps differ from their repetitions: all at once is
                           no fault, the program has begun to do something that is not repeated
a      b       c, c        its rank, each time
a      a       b, a        the peer
a      b       c, d        no rank: noise
any of these, compiled, within the limit for rounding: no rank. Beyond it results are compared with that room.
=====  ======  ==========  ========================================================================================
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddpstats._base.text import holders_lines, ranks_text, shorten
from ddpstats._rerun.blame import Cause, attempt, blame, cause_of, from_rank_on, hand_out
from ddpstats._rerun.digest import GradientDigests, LocalGradients, digests
from ddpstats._rerun.record import tensor_bytes
from ddpstats._rerun.run import BatchChanged, Reruns
from ddpstats.errors import ConfigError
from ddpstats.sentinel.activations import Checkpoints, Values
from ddpstats.sentinel.verdict import Detector, Exam, Gathered, SentinelFinding, SentinelVerdict

MOST_BYTES = 64 << 20  # of all batches that are handed out at a time: every rank receives them
MOST_NOISE = 1e-2  # of the largest norm: beyond that it is another computation. Compiled bfloat16 comes to 2e-3
_ROOM = 8.0  # times the noise that was measured
_ROUNDING = (1e-12, 1e-4)  # of the largest norm, where repetitions give the same bits: a sign changes no norm
_SHOWN_NAMES = 5
_LEAST = 2.0**-52  # between gradients of one norm that are not the same, as of a loss and its negative
_NO_BATCH = "no micro_batch() in this step"
_CHANGED = "the batch was changed in place"


class PeerReplay:
    """Compares what ranks compute from the same micro-batch. Local to make; every rank of the group must make one.

    Args:
        model: as it is trained.
        ranks: of the group, global, in the order of group ranks.
        rank: this one, global.
        limit: the largest noise that is taken for one, as a part of the largest norm of a gradient.

    Attributes:
        original: the caller begins and ends it around the first micro-batch of a step that is to be examined.

    Raises:
        ConfigError: as `LocalGradients`.
    """

    def __init__(self, model: nn.Module, reruns: Reruns, ranks: Sequence[int], rank: int, limit: float) -> None:
        self.original = LocalGradients(model)
        self._reruns, self._ranks, self._rank, self._limit = reruns, tuple(ranks), rank, limit
        self._noise: float | None = None
        self._turn = -1

    def examine(self, gathered: Gathered) -> SentinelFinding | None:
        """Collective: two small gathers and one of batches; one more on doubt.

        Raises:
            ConfigError: some rank's step cannot be repeated, or is not the one that was trained; on every rank.
        """
        self._turn += 1
        own: list[dict[str, Any]] = []
        offers = gathered(lambda: attempt(lambda: self._offer(own)), "what each rank can hand out")
        _refuse(offers)
        doubted = self._learn_noise(offers)
        differing = _differing_buffers([offer["buffers"] for offer in offers.values()])
        chosen = _chosen(offers, differing, self._turn, doubted)
        if not chosen:
            self._say_why_none(offers)
            return None
        packets = gathered(lambda: self._packet(own, differing, chosen), "micro-batches")
        checker = {owner: from_rank_on(self._ranks, owner)[1 % len(self._ranks)] for owner in chosen}
        answers = gathered(lambda: self._answers(packets, checker), "what came of them")
        _refuse(answers)
        first = {owner: answers[rank][str(owner)] for owner, rank in checker.items()}
        runs = {
            owner: [Run(owner, "in the step", _digests(packets[owner]["original"])), Run(rank, "before", _digests(run))]
            for (owner, rank), run in zip(checker.items(), first.values(), strict=True)
        }
        doubted += [owner for owner, (step, before) in runs.items() if not self._is_same(step.result, before.result)]
        if not doubted:
            return None
        compiled = any(tree["compiled"] for tree in (*offers.values(), *first.values()))
        room = max(self._noise or 0.0, self._limit if compiled else 0.0)
        beyond = {owner for owner in doubted if not runs[owner][0].result.is_same(runs[owner][1].result, room)}
        owner = next((owner for owner in doubted if owner in beyond), doubted[0])
        peers = tuple(rank for rank in from_rank_on(self._ranks, owner)[1:3] if rank != owner)
        again = blame(gathered, self._rank, owner, peers, lambda: self._run(packets[owner]))
        _refuse(again)
        runs[owner] += [Run(rank, "again", _digests(run)) for rank, tree in again.items() for run in tree["runs"]]
        if not compiled and any(run["compiled"] for tree in again.values() for run in tree["runs"]):
            compiled, room = True, max(room, self._limit)
        return self._finding(owner, runs[owner], room, compiled, is_common=2 * len(beyond) > len(chosen) > 1)

    def _offer(self, own: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what can be handed out, or why nothing can; the packet goes into ``own``."""
        micro_batches = self._reruns.micro_batches[:1]
        if not micro_batches:
            return _nothing(_NO_BATCH)
        try:
            packet = self._reruns.pack(micro_batches)
        except BatchChanged:
            return _nothing(_CHANGED)
        original = self.original.witness()
        if original is None:
            return _nothing(self.original.problem)
        buffers = packet["buffers"]
        own.append({**packet, "strided": list(self.original.strided), "original": original.to_tree()})
        return {
            "bytes": tensor_bytes({**packet, "buffers": None}),
            "buffers": digests(list(buffers.values())).cpu(),
            "buffer_bytes": list(map(tensor_bytes, buffers.values())),
            "loose": _loose_switches(self._reruns.device),
            "compiled": self._reruns.is_compiled,
            **(self._distance(own[0], original) if self._noise is None else {"distance": None}),
        }

    def _distance(self, packet: dict[str, Any], original: GradientDigests) -> dict[str, Any]:
        """How far the step's own repetitions are from it; ``repeats``: whether these have the same bits."""
        results = [self._run(packet)]
        if original.is_same(_digests(results[0]), 0.0):
            return {"distance": None if original.is_zero else 0.0}
        results.append(self._run(packet))
        one, other = map(_digests, results)
        return {
            "distance": max(_LEAST, original.distance(one), original.distance(other)),
            "repeats": one.is_same(other, 0.0),
            "compiled": self._reruns.is_compiled or results[0]["compiled"],
        }

    def _packet(
        self, own: Sequence[dict[str, Any]], differing: Sequence[int] | None, chosen: Sequence[int]
    ) -> dict[str, Any] | None:
        """Return what this rank hands out; None where it is not chosen."""
        if self._rank not in chosen:
            return None
        named = list(own[0]["buffers"].items())
        return {**own[0], "buffers": dict(named if differing is None else [named[index] for index in differing])}

    def _run(self, packet: Mapping[str, Any]) -> dict[str, Any]:
        """Run a packet, and return the digests as a tree."""
        rerun, strided = self._reruns.run(packet), packet["strided"]
        gradients = [
            # in the step they were added to zeros that are not sparse
            gradient.to_dense() if gradient is not None and gradient.is_sparse and index in strided else gradient
            for index, gradient in enumerate(rerun.gradients)
        ]
        return {**GradientDigests.of(gradients).to_tree(), "compiled": rerun.compiled}

    def _answers(self, packets: Mapping[int, dict[str, Any]], runner: Mapping[int, int]) -> dict[str, Any]:
        """Return what came of the packets that are this rank's to run, by owner."""
        mine = [owner for owner, rank in runner.items() if rank == self._rank]
        return attempt(lambda: {str(owner): self._run(packets[owner]) for owner in mine})

    def _is_same(self, one: GradientDigests, other: GradientDigests) -> bool:
        return one.is_same(other, self._noise or 0.0)

    def _learn_noise(self, offers: Mapping[int, dict[str, Any]]) -> list[int]:
        """Where it is not known yet. Returns ranks whose step did not repeat itself where most ranks' did."""
        noise = measured(offers, self._limit) if self._noise is None else None
        if noise is None:
            return []
        self._noise = noise.room
        if noise.text:
            self._say(noise.text)
        return list(noise.doubted)

    def _say_why_none(self, offers: Mapping[int, dict[str, Any]]) -> None:
        """Nothing was repeated. Batches that were changed in place are copied from now on: no need to speak of it."""
        why = {rank: offer["why"] for rank, offer in offers.items()}
        if _CHANGED in why.values():
            return
        if set(why.values()) == {_NO_BATCH}:
            self._say(
                "no rank had a micro-batch to repeat; put `with sentinel.micro_batch(batch):` around each of them"
            )
            return
        lines = ["no rank's gradients of the step's first micro-batch can be told apart:", *holders_lines(why)]
        self._say("\n".join([*lines, "What cannot be compared is not repeated."]))

    def _say(self, text: str) -> None:
        warnings.warn(f"Sentinel, peer replay: {text}", stacklevel=2)

    def _finding(
        self, owner: int, runs: Sequence[Run], room: float, compiled: bool, *, is_common: bool
    ) -> SentinelFinding | None:
        """Who is wrong; what is no rank's fault is a warning, and is learnt. ``room``: for noise, and for rounding."""
        rounded = (lambda one, other: one.is_same(other, room)) if compiled else None
        judgement = judge(owner, runs, self._is_same, rounded=rounded, is_common=is_common)
        if judgement.is_noise or judgement.is_rounding:
            self._noise = room if judgement.is_rounding else None  # None: measured again at the next time
            self._say(judgement.text)
            return None
        names = self._differing([run.result for run in runs], room)
        text = f"{judgement.text}\nGradients that differ: {shorten(names, _SHOWN_NAMES)}."
        return SentinelFinding("peer replay", judgement.culprit_ranks, names[0], text)

    def _differing(self, results: Sequence[GradientDigests], room: float) -> list[str]:
        """Parameters whose gradient is not the same in all of them, with that room. Never empty."""
        names = self._reruns.names
        if any(len(one.digests) != len(names) for one in results):
            return ["(ranks do not have as many parameters that want a gradient)"]
        pairs = itertools.combinations(results, 2)
        differs = torch.stack([one.differs(other, room) for one, other in pairs]).any(0).tolist()
        return [name for name, one in zip(names, differs, strict=True) if one] or ["(none)"]


class PeerReplayDetector(Detector):
    """Layer 3: examines the first step, so that what cannot work is known at once, and every ``every_steps``-th.

    ``raises``: a step that cannot be repeated is an error on every rank, and not a warning.
    """

    def __init__(self, replay: PeerReplay, every_steps: int, *, raises: bool) -> None:
        self._replay, self._every_steps, self._raises = replay, every_steps, raises
        self._steps = self._micro_batches = 0

    def begin(self) -> None:
        if not self._micro_batches and self._is_due():
            self._replay.original.begin()
        self._micro_batches += 1

    def end(self, failed: bool) -> None:
        self._replay.original.end()
        self._micro_batches -= failed
        if not self._micro_batches:
            self._replay.original.discard()

    def findings(self, exam: Exam) -> list[SentinelFinding]:
        """What cannot be repeated is reported by all ranks, but does not hide what was found."""
        if not self._is_due():
            return []
        try:
            finding = self._replay.examine(exam.gathered)
        except ConfigError as error:
            if self._raises and not exam.findings and not exam.is_suspected:
                raise
            warnings.warn(str(error), stacklevel=2)
            exam.notes.append(str(error))
            return []
        return [] if finding is None else [finding]

    def conclude(self, verdict: SentinelVerdict | None) -> None:
        self._steps += verdict is not None
        self._micro_batches = 0

    def close(self) -> None:
        self._replay.original.close()

    def _is_due(self) -> bool:
        return self._steps == 0 or (self._steps + 1) % self._every_steps == 0


def _nothing(why: str) -> dict[str, Any]:
    return {"bytes": -1, "buffers": None, "distance": None, "compiled": False, "why": why}


def _differing_buffers(by_rank: Sequence[Tensor | None]) -> list[int] | None:
    """Return the indices of buffers that differ between ranks; None: all of them. ``by_rank``: digests, if known."""
    known = [digests for digests in by_rank if digests is not None]
    if len(known) < len(by_rank) or any(digests.shape != known[0].shape for digests in known):
        return None
    return [int(index) for index in (torch.stack(known) != known[0]).any(0).nonzero()]


def _chosen(
    offers: Mapping[int, dict[str, Any]], differing: Sequence[int] | None, turn: int, doubted: Sequence[int]
) -> list[int]:
    """Return whose micro-batches are handed out: those in doubt, then others as far as they fit, in turns."""
    sizes = {rank: _size_bytes(offer, differing) for rank, offer in offers.items() if offer["bytes"] >= 0}
    holders = list(sizes)
    start = turn % len(holders) if holders else 0
    chosen, total = list(doubted), sum(sizes[rank] for rank in doubted)
    for rank in (*holders[start:], *holders[:start]):
        if rank not in chosen and (not chosen or total + sizes[rank] <= MOST_BYTES):
            chosen.append(rank)
            total += sizes[rank]
    return chosen


def _size_bytes(offer: Mapping[str, Any], differing: Sequence[int] | None) -> int:
    sizes: list[int] = offer["buffer_bytes"]
    return int(offer["bytes"]) + sum(sizes if differing is None else [sizes[index] for index in differing])


def _digests(tree: Mapping[str, Any]) -> GradientDigests:
    return GradientDigests.from_tree(tree)


def _refuse(told: Mapping[int, dict[str, Any]]) -> None:
    errors = {rank: one["error"] for rank, one in told.items() if "error" in one}
    if errors:
        lines = ["Sentinel, peer replay: a micro-batch cannot be run again:", *holders_lines(errors)]
        raise ConfigError(
            "\n".join([*lines, "Mend replay_fn, or switch replay off: replay_every_steps=0."]), ranks=errors
        )


def _loose_switches(device: torch.device) -> list[str]:
    """What would make a step more deterministic, and is not set on this rank."""
    loose = [] if torch.are_deterministic_algorithms_enabled() else ["torch.use_deterministic_algorithms(True)"]
    if device.type != "cpu" and torch.backends.cudnn.benchmark:
        loose.append("torch.backends.cudnn.benchmark = False")
    return loose


# -- noise, and who is wrong: pure functions of what was gathered -----------------------------------------------------

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


def measured(offers: Offers, limit: float) -> Noise | None:
    """Return what steps' own repetitions say; None where no rank could give its ``distance``.

    1. Most ranks' steps repeat themselves: there is no noise, and a rank whose step does not is in doubt.
    2. Repetitions are farther from the step than ``limit``, or equal to each other and not as far from it as by
       rounding: what repeats it is another step.
    3. Otherwise that is natural noise, and there is room for some times as much, up to ``limit``. A compiled program
       may get other graphs at any time, on one rank alone, so there is room for ``limit``.

    Raises:
        ConfigError: what was run again is not the step that was trained.
    """
    known = {rank: offer for rank, offer in offers.items() if offer["distance"] is not None}
    if not known:
        return None
    compiled = any(offer["compiled"] for offer in offers.values())
    doubted = tuple(rank for rank, offer in known.items() if offer["distance"] > (limit if compiled else 0.0))
    if 2 * len(doubted) > len(known) or len(known) == 1:
        doubted = ()  # it is the step
    known = {rank: offer for rank, offer in known.items() if rank not in doubted}
    distance = max(offer["distance"] for offer in known.values())
    if not distance:
        return Noise(0.0, doubted)
    repeats = any(offer["distance"] and offer["repeats"] for offer in known.values())
    is_rounding = _ROUNDING[0] <= distance <= _ROUNDING[1]
    if distance > limit or (repeats and not compiled and not is_rounding):
        raise _another_step(known)
    room = limit if compiled else min(_ROOM * distance, limit)
    return Noise(room, doubted, _noise_text(distance, room, known, repeats or compiled))


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
    wrong = [run for group in classes if group is not right for run in group]
    culprits = tuple(sorted({run.rank for run in wrong}))
    lines.append(f"Right by majority: {ranks_text(agreeing)}. {_kinds(wrong, right)}")
    return Judgement(culprits, "\n".join(lines))


def _rounding_text(owner: int, runs: Sequence[Run]) -> str:
    return (
        f"the micro-batch of rank {owner}, run {len(runs)} times, does not give the same gradients each time. Programs "
        "that torch.compile made round otherwise from one to the next, and their norms differ by no more than "
        "that may come to, so it is nobody's fault. From now on peers' gradients are "
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


# -- why: the micro-batch of an alarm ---------------------------------------------------------------------------------

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
    checkpoints: Checkpoints,
) -> str:
    """Return in words why rank ``owner``'s micro-batch gave a value that is not normal. Collective: two gathers.

    Whether values are normal only the owner can say: each rank has a past of its own. What both ranks compute is no
    fault of one of them.

    ``ranks``: of the group; ``rank``: this one; ``is_abnormal``: of the values of a rerun, asked on ``owner`` only.
    """

    def packed() -> dict[str, Any]:
        micro_batches = reruns.micro_batches[micro_batch : micro_batch + 1]
        if not micro_batches:
            raise ConfigError("it did not run inside micro_batch()")
        return reruns.pack(micro_batches)

    def run() -> dict[str, Any]:
        with checkpoints.redirected() as values:
            gradients = reruns.run(packet).gradients
        floats = [(index, float(value)) for index, value in values]  # (checkpoint, value)
        bad = is_abnormal(values) if rank == owner else None
        return {"digests": GradientDigests.of(gradients).digests, "values": floats, "bad": bad}

    packet = hand_out(gathered, rank == owner, owner, packed)
    if "error" in packet:
        return f"The micro-batch could not be run again: {packet['error']}."
    peer = from_rank_on(ranks, owner)[1 % len(ranks)]
    answers = blame(gathered, rank, owner, () if peer == owner else (peer,), run)
    return _explanation(owner, peer, answers, checkpoints.names)


def _explanation(owner: int, peer: int, answers: Mapping[int, Mapping[str, Any]], names: Sequence[str]) -> str:
    errors = {
        rank: f"Rank {rank} could not run the micro-batch again: {answer['error']}"
        for rank, answer in answers.items()
        if "error" in answer
    }
    if owner in errors:
        return errors[owner]
    here, differing, wrong_there = answers[owner]["runs"], None, None
    if peer != owner and peer not in errors:
        there = answers[peer]["runs"][0]
        is_same = torch.equal(here[0]["digests"], there["digests"])
        differing = None if is_same else _first_difference(here[0], there)
        wrong_there = differing is None
    cause = cause_of([run["bad"] for run in here], wrong_there)
    again = f"Run again on rank {owner}, the micro-batch gives "
    if cause is Cause.TRANSIENT:
        return again + "normal values: a transient fault of its hardware, or a race."
    again += "such a value again"
    if cause is Cause.UNDECIDED and peer == owner:
        return again + "; there is no other rank to tell hardware from software."
    if cause is Cause.UNDECIDED:
        return f"{again}. {errors[peer]}"
    if differing is None:
        return f"{again}, and so it does on rank {peer}: software or data, not hardware."
    index, value, other = differing
    return (
        f"{again}, and on rank {peer} it does not: hardware of rank {owner}, or something that only "
        f"it holds. {names[index]} has {value:.4g} on rank {owner} and {other:.4g} on rank {peer}."
    )


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
