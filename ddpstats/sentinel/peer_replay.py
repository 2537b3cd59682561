"""Layer 3: a rank's micro-batch repeated by a peer, to find what went wrong on one rank before gradients were reduced.

`PeerReplay.examine`, every so many steps, on all ranks together:

1. Each rank has digests of the gradients of its first micro-batch of the step, taken before the reduce
   (`LocalGradients`). At the first time it also runs that micro-batch twice itself: does the step repeat itself bit for
   bit? `measure_noise` says what that comes to: bits are compared, or norms, with room for noise. All-zero gradients
   are no evidence. Where a part of the step is compiled, or that is not known, norms are compared, with room for
   ``limit``: a program may get other graphs at any time, on one rank only, and they round otherwise.
2. As many ranks as fit into `MOST_BYTES` hand out their micro-batch (all of them where batches are small), beginning
   with another rank each time, and those buffers that differ between ranks. The next rank runs it, and all gather what
   came of it.
3. Where a result differs, its owner runs that micro-batch twice more, and the next two ranks once (`blame`); `judge`
   says who is wrong.

`explain_alarm` is the same for an alarm of layer 1: hardware, or software and data?

The course depends on gathered things only. What fails on one rank is reported on all.

What several runs of one micro-batch say of the step, its repetitions on its own rank, and those on two peers, of which
the first ran it before, too (same letter: the same result). They compute from the same parameters, batch and random
state, so what two ranks agree on is right: a fault does not happen twice in the same bits.

=====  ======  ==========  ========================================================================================
step   again   peers       verdict
=====  ======  ==========  ========================================================================================
a      a       b, b        its rank, each time; with one peer: undecided
a      b       b, b        its rank, once; no rank where that is so of most ranks' steps: all at once is no fault, the
                           program has begun to do something that is not repeated
a      b       c, c        its rank, each time
a      a       b, a        the peer
a      b       c, d        no rank: noise
=====  ======  ==========  ========================================================================================
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from ddpstats._base.text import holders_lines, ranks_text, shorten
from ddpstats._observe.gradient_norms import NO_GRADIENT as NO_NORM, held_values, is_sparse, measure
from ddpstats._observe.gradients import GradientWatch
from ddpstats._rerun.blame import Cause, Gathered, attempt, blame, cause_of, from_rank_on, hand_out, unpack_step
from ddpstats._rerun.digest import digests
from ddpstats._rerun.record import PackedStep, tensor_bytes
from ddpstats._rerun.run import BatchChanged, Reruns
from ddpstats.errors import ConfigError
from ddpstats.sentinel.activations import Checkpoints, NumberedTensors
from ddpstats.sentinel.verdict import Detector, Exam, SentinelFinding, SentinelVerdict

if TYPE_CHECKING:
    from ddpstats.sentinel.sentinel import Setup

MOST_BYTES = 64 << 20  # of all batches that are handed out at a time: every rank receives them
MOST_NOISE = 1e-2  # of the largest norm: beyond that it is another computation. Compiled bfloat16 comes to 2e-3
_ROOM = 8.0  # times the noise that was measured
_ROUNDING = (1e-12, 1e-4)  # of the largest norm, where repetitions give the same bits: a sign changes no norm
_SHOWN_NAMES = 5
_LEAST = 2.0**-52  # between gradients of one norm that are not the same, as of a loss and its negative


# -- the gradients of one run -----------------------------------------------------------------------------------------

NO_GRADIENT = 0


@dataclass(frozen=True)
class GradientDigests:
    """The gradients of one run of one micro-batch: per parameter a digest of the bits, and the norm.

    Attributes:
        digests: int64, one per parameter that wants a gradient; `NO_GRADIENT` where none came.
        norms: float64, as `ddpstats._observe.gradient_norms.measure`.
    """

    digests: Tensor
    norms: Tensor

    def to_tree(self) -> dict[str, Tensor]:
        """Return a tree for `gather_trees`."""
        return {"digests": self.digests, "norms": self.norms}

    @classmethod
    def of(cls, gradients: Sequence[Tensor | None]) -> GradientDigests:
        """Digest one gradient, or None, per parameter."""
        values = torch.full((len(gradients),), NO_GRADIENT, dtype=torch.int64, device="cpu")
        held = {index: gradient for index, gradient in enumerate(gradients) if gradient is not None}
        values[torch.tensor(list(held), dtype=torch.int64, device="cpu")] = gradient_digests(held.values()).cpu()
        return cls(values, measure(gradients))

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> GradientDigests:
        """Read what `to_tree` made."""
        return cls(tree["digests"], tree["norms"])

    @property
    def is_zero(self) -> bool:
        """Return whether no parameter has a gradient other than zero."""
        return not bool((self.norms > 0).logical_or(self.norms.isnan()).any())

    def is_same(self, peer: GradientDigests, room: float) -> bool:
        """Return whether no gradient `differs`."""
        return not bool(self.differs(peer, room).any())

    def differs(self, peer: GradientDigests, room: float) -> Tensor:
        """Return a bool per parameter: it has other bits, and where ``room`` is not 0 also another norm.

        Norms differ by more than that part of the largest one. All True where the numbers of parameters differ.
        """
        if self.digests.shape != peer.digests.shape:
            return torch.ones(max(len(self.digests), len(peer.digests)), dtype=torch.bool, device="cpu")
        differing = self.digests != peer.digests
        if room > 0.0 and len(differing):
            larger = torch.maximum(self.norms, peer.norms)
            most = room * larger.where(larger.isfinite(), 0.0).max().clamp(min=0.0)
            differing &= ~((self.norms - peer.norms).abs() <= most)
        return differing

    def distance(self, peer: GradientDigests) -> float:
        """Return the largest difference of two norms as a part of the largest norm; inf where one is not finite."""
        if self.norms.shape != peer.norms.shape or not len(self.norms):
            return float("inf")
        difference, largest = (self.norms - peer.norms).abs().max(), torch.maximum(self.norms, peer.norms).max()
        distance = float(difference / largest) if float(largest) > 0 else float(difference)
        return distance if distance == distance else float("inf")


def gradient_digests(gradients: Iterable[Tensor]) -> Tensor:
    """Return the `digests` of gradients, of a sparse one's dense form, but that a zero has no sign.

    ``.grad`` that was zeros before holds 0.0 where the gradient is -0.0. The sum is a copy, made of one at a time.
    """
    with torch.no_grad():
        return digests(
            (gradient.to_dense() if is_sparse(gradient) else held_values(gradient)) + 0 for gradient in gradients
        )


class LocalGradients:
    """Takes the gradients of one micro-batch of the step, before the reduce, while it runs. Local.

    1. `begin` hooks the parameters for this one micro-batch: just before the first gradient is accumulated, it looks
       whether ``.grad`` is empty. What is left there would be added to, and nothing that can be repeated comes of it.
       The program may empty it at any time before, also inside the micro-batch.
    2. Every gradient that is complete is digested, before it is reduced (`ddpstats._observe.gradients`).
    3. `end`: was it one backward pass alone?

    Args:
        model: as it is trained.

    Attributes:
        problem: why `witness` returns None, in words; empty where it does not.

    Raises:
        ConfigError: the parameters are sharded: no rank has what another one computes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._watch = GradientWatch(model)
        if not self._watch.sees_local:
            raise ConfigError("replay_fn needs replicas: this model is sharded, each rank has parameters of its own")
        self._watch.observer = self._note
        self._wanted: list[Tensor] = []
        self._seen: dict[int, tuple[int, float]] = {}
        self._handle: Any = None
        self.problem = _NOTHING

    def begin(self) -> None:
        """Begin to watch: the micro-batch is about to run."""
        self.discard()
        self._wanted = [parameter for parameter in self._watch.parameters if parameter.requires_grad]
        if self._wanted:
            self._watch.begin()  # before our hooks on tensors, which it would take for the program's
            self._handle = register_multi_grad_hook(self._wanted, self._about_to_arrive, mode="any")

    def end(self) -> None:
        """End it: the micro-batch is through. Idempotent."""
        passes = self._stop()
        if passes > 1:
            self.problem = f"it had {passes} backward passes"
        elif passes and not self._seen:
            self.problem = self.problem or "its gradients were gone before they could be seen"

    def discard(self) -> None:
        """Forget the micro-batch, as where it has raised. Idempotent; also without an `end`."""
        self._stop()
        self._seen, self.problem = {}, _NOTHING

    def witness(self) -> GradientDigests | None:
        """Return the gradients; None where they were not those of one backward pass alone: `problem`."""
        if self.problem:
            return None
        seen = [self._seen.get(id(parameter), (NO_GRADIENT, NO_NORM)) for parameter in self._wanted]
        return GradientDigests(
            torch.tensor([digest for digest, _ in seen], dtype=torch.int64, device="cpu"),
            torch.tensor([norm for _, norm in seen], dtype=torch.float64, device="cpu"),
        )

    def close(self) -> None:
        """Take the hooks away. Idempotent."""
        self._stop()
        self._watch.close()

    def _stop(self) -> int:
        """Stop watching, and return how many backward passes there were."""
        if self._handle is None:
            return 0
        self._handle.remove()
        self._handle = None
        self._watch.end()
        passes = len(self._watch.arrivals[-1].exchanged)
        self._watch.forget()
        return passes

    def _about_to_arrive(self, gradient: Tensor) -> None:
        """Look at ``.grad`` before anything is accumulated. A second pass, and one inside of another, come too late."""
        if self.problem == _NOTHING:
            left = [held_values(wanted.grad.detach()).any() for wanted in self._wanted if wanted.grad is not None]
            self.problem = _LEFT if any(map(bool, left)) else ""

    def _note(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        values, norms = gradient_digests(gradients).tolist(), measure(gradients).tolist()
        self._seen.update(zip(map(id, parameters), zip(values, norms, strict=True), strict=True))


_NOTHING = "no backward pass ran in it"
_LEFT = "something was left in .grad before its backward pass: zero the gradients first"


# -- the detector -----------------------------------------------------------------------------------------------------


class PeerReplay(Detector):
    """Layer 3: compares what ranks compute from the same micro-batch. Every rank of the group must make one.

    It examines the first step, so that what cannot work is known at once, and every ``replay_every_steps``-th. From
    mode 2 on a step that cannot be repeated is an error on every rank, and in mode 1 a warning.

    Raises:
        ConfigError: as `LocalGradients`.
    """

    def __init__(self, setup: Setup, reruns: Reruns) -> None:
        options = setup.options
        self._original = LocalGradients(setup.model)
        self._reruns, self._ranks, self._rank = reruns, setup.ranks, setup.rank
        self._limit, self._every_steps = options.replay_tolerance, options.replay_every_steps
        self._raises = options.mode >= 2
        self._noise: float | None = None
        self._compiled = False
        self._turn = -1
        self._steps = self._micro_batches = 0

    def begin(self) -> None:
        if not self._micro_batches and self._is_due():
            self._original.begin()
        self._micro_batches += 1

    def end(self, failed: bool) -> None:
        self._original.end()
        self._micro_batches -= failed
        if not self._micro_batches:
            self._original.discard()

    def findings(self, exam: Exam) -> list[SentinelFinding]:
        """Return which rank is wrong. All ranks report a step that cannot be repeated, but that hides no finding."""
        if not self._is_due():
            return []
        try:
            finding = self.examine(exam.gathered)
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
        self._original.close()

    def _is_due(self) -> bool:
        return self._steps == 0 or (self._steps + 1) % self._every_steps == 0

    def examine(self, gathered: Gathered) -> SentinelFinding | None:
        """Compare, and return which rank is wrong. Collective: two small gathers and one of batches; one more on doubt.

        Raises:
            ConfigError: some rank's step cannot be repeated, or is not the one that was trained; on every rank.
        """
        self._turn += 1
        own: list[dict[str, Any]] = []
        offers = gathered(lambda: attempt(lambda: self._offer(own)), "what each rank can hand out")
        _refuse(offers)
        self._note_compiled(offers.values())
        if self._noise is None:
            self._noise, text = measure_noise(offers, self._limit, self._compiled)
            self._warn(text)
        differing = _find_differing_buffers([offer["buffers"] for offer in offers.values()])
        owners = _choose_owners(offers, differing, self._turn)
        if not owners:
            why = holders_lines({rank: offer["why"] for rank, offer in offers.items()})
            self._warn("\n".join(["no rank's first micro-batch of this step can be repeated:", *why]))
            return None
        packets = hand_out(
            gathered, self._rank, owners, lambda: _packet(own, differing), "micro-batches", most_bytes=math.inf
        )
        _refuse(packets)
        checkers = {owner: from_rank_on(self._ranks, owner)[1 % len(self._ranks)] for owner in owners}
        checked = [owner for owner, checker in checkers.items() if checker == self._rank]
        answers = gathered(
            lambda: attempt(lambda: {str(owner): self._run(unpack_step(packets[owner], owner)) for owner in checked}),
            "what came of them",
        )
        _refuse(answers)
        checks = {owner: answers[checker][str(owner)] for owner, checker in checkers.items()}
        self._note_compiled(checks.values())
        doubted = {
            owner: [
                Run(owner, "in the step", _digests(packets[owner]["original"])),
                Run(checkers[owner], "before", run),
            ]
            for owner, run in zip(checks, map(_digests, checks.values()), strict=True)
            if not self._is_same(_digests(packets[owner]["original"]), run)
        }
        if not doubted:
            return None
        owner, runs = next(iter(doubted.items()))
        return self._judge_again(gathered, packets[owner], owner, runs, is_common=2 * len(doubted) > len(owners) > 1)

    def _judge_again(
        self, gathered: Gathered, packet: Mapping[str, Any], owner: int, runs: list[Run], *, is_common: bool
    ) -> SentinelFinding | None:
        """Run a micro-batch in doubt again, on its owner and two peers, and return which rank is wrong. Collective."""
        peers = tuple(rank for rank in from_rank_on(self._ranks, owner)[1:3] if rank != owner)
        again = blame(gathered, self._rank, owner, peers, lambda: self._run(unpack_step(packet, owner)))
        _refuse(again)
        runs += [Run(rank, "again", _digests(run)) for rank, tree in again.items() for run in tree["runs"]]
        judgement = judge(owner, runs, self._is_same, is_common=is_common)
        if judgement.is_noise:
            self._noise = None  # measured again at the next time
            self._warn(judgement.text)
            return None
        names = self._find_differing([run.result for run in runs])
        text = f"{judgement.text}\nGradients that differ: {shorten(names, _SHOWN_NAMES)}."
        return SentinelFinding("peer replay", judgement.culprit_ranks, names[0], text)

    def _offer(self, own: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what can be handed out, or why nothing can; the packet goes into ``own``."""
        micro_batches = self._reruns.record.micro_batches[:1]
        if not micro_batches:
            return _offer_nothing("no micro_batch(): put `with sentinel.micro_batch(batch):` around each of them")
        try:
            step = self._reruns.pack(micro_batches)
        except BatchChanged as error:
            return _offer_nothing(f"{error}; from now on batches are copied")
        original = self._original.witness()
        if original is None:
            return _offer_nothing(self._original.problem)
        own.append({"step": step, "original": original.to_tree()})
        return {
            "bytes": tensor_bytes(step.micro_batches),
            "buffers": digests(step.buffers.values()).cpu(),
            "buffer_bytes": list(map(tensor_bytes, step.buffers.values())),
            "compiled": self._reruns.is_compiled,
            **(self._distance(step, original) if self._noise is None else {}),
        }

    def _distance(self, step: PackedStep, original: GradientDigests) -> dict[str, Any]:
        """Return how far the step's own repetitions are from it; ``repeats``: whether these have the same bits."""
        trees = [self._run(step)]
        if original.is_same(_digests(trees[0]), 0.0):
            return {} if original.is_zero else {"distance": 0.0, "repeats": True}
        trees.append(self._run(step))
        first, second = map(_digests, trees)
        return {
            "distance": max(_LEAST, original.distance(first), original.distance(second)),
            "repeats": first.is_same(second, 0.0),
            "compiled": self._reruns.is_compiled or trees[0]["compiled"],
        }

    def _run(self, step: PackedStep) -> dict[str, Any]:
        """Run it, and return the digests as a tree."""
        rerun = self._reruns.run(step)
        return {**GradientDigests.of(rerun.gradients).to_tree(), "compiled": rerun.compiled}

    def _note_compiled(self, trees: Iterable[Mapping[str, Any]]) -> None:
        if not self._compiled and any(tree["compiled"] for tree in trees):
            self._compiled = True
            self._warn(
                f"a part of the step is compiled, or does not pass the model's forward(). {_explain_room(self._limit)}"
            )

    def _is_same(self, first: GradientDigests, second: GradientDigests) -> bool:
        return first.is_same(second, self._room)

    @property
    def _room(self) -> float:
        return max(self._noise or 0.0, self._limit if self._compiled else 0.0)

    def _warn(self, text: str) -> None:
        if text:
            warnings.warn(f"Sentinel, peer replay: {text}", stacklevel=2)

    def _find_differing(self, results: Sequence[GradientDigests]) -> list[str]:
        """Return the parameters whose gradient is not the same in all results. Never empty."""
        names = self._reruns.names
        if any(len(result.digests) != len(names) for result in results):
            return ["(ranks do not have as many parameters that want a gradient)"]
        pairs = itertools.combinations(results, 2)
        differs = torch.stack([first.differs(second, self._room) for first, second in pairs]).any(0).tolist()
        return [name for name, is_other in zip(names, differs, strict=True) if is_other]


def _explain_room(room: float) -> str:
    return (
        f"Peers' gradients are compared by their norms, with room for {room:.1e} of the largest one; smaller faults "
        "are not seen."
    )


def _offer_nothing(why: str) -> dict[str, Any]:
    return {"bytes": -1, "buffers": None, "compiled": False, "why": why}


def _packet(own: Sequence[dict[str, Any]], differing: Sequence[int] | None) -> dict[str, Any]:
    """Return what a rank hands out: of its buffers those that differ between ranks."""
    step = own[0]["step"]
    buffers = list(step.buffers.items())
    kept = dict(buffers if differing is None else [buffers[index] for index in differing])
    return {**own[0], "step": replace(step, buffers=kept)}


def _find_differing_buffers(by_rank: Sequence[Tensor | None]) -> list[int] | None:
    """Return the indices of buffers that differ between ranks; None: all of them. ``by_rank``: digests, if known."""
    known = [values for values in by_rank if values is not None]
    if len(known) < len(by_rank) or any(values.shape != known[0].shape for values in known):
        return None
    return [int(index) for index in (torch.stack(known) != known[0]).any(0).nonzero()]


def _choose_owners(offers: Mapping[int, dict[str, Any]], differing: Sequence[int] | None, turn: int) -> list[int]:
    """Return whose micro-batches are handed out: those of as many ranks as fit, in turns; at least one."""
    holders = [rank for rank, offer in offers.items() if offer["bytes"] >= 0]
    chosen, total = list[int](), 0
    for rank in from_rank_on(holders, holders[turn % len(holders)]) if holders else ():
        sizes = offers[rank]["buffer_bytes"]
        total += offers[rank]["bytes"] + sum(sizes if differing is None else [sizes[index] for index in differing])
        if total <= MOST_BYTES or not chosen:
            chosen.append(rank)
    return chosen


_digests = GradientDigests.from_tree


def _refuse(trees: Mapping[int, dict[str, Any]]) -> None:
    """Raise `ConfigError` where some rank could not run."""
    errors = {rank: tree["error"] for rank, tree in trees.items() if "error" in tree}
    if errors:
        lines = ["Sentinel, peer replay: a micro-batch cannot be run again:", *holders_lines(errors)]
        raise ConfigError(
            "\n".join([*lines, "Mend replay_fn, or switch replay off: replay_every_steps=0."]), ranks=errors
        )


# -- noise, and who is wrong: pure functions of what was gathered -----------------------------------------------------


def measure_noise(offers: Mapping[int, Mapping[str, Any]], limit: float, compiled: bool) -> tuple[float | None, str]:
    """Return by how much of the largest one norms may differ, and a warning; None where no rank gave a ``distance``.

    1. Most ranks' steps repeat themselves: bits are compared. A rank whose step does not may be wrong.
    2. Repetitions are farther from the step than ``limit``, or equal to each other and not as far from it as by
       rounding: what repeats it is another step.
    3. Otherwise that is natural noise, and there is room for some times as much, up to ``limit``.

    Raises:
        ConfigError: what was run again is not the step that was trained.
    """
    known = {rank: offer for rank, offer in offers.items() if "distance" in offer}
    if not known:
        return None, ""
    repeating = {rank: offer for rank, offer in known.items() if offer["distance"] <= (limit if compiled else 0.0)}
    if 2 * len(repeating) >= len(known) > 1 or len(repeating) == len(known):
        return 0.0, ""
    distance = max(offer["distance"] for offer in known.values())
    repeats = any(offer["distance"] and offer["repeats"] for offer in known.values())
    if distance > limit or (repeats and not _ROUNDING[0] <= distance <= _ROUNDING[1]):
        raise _another_step(known)
    room = min(_ROOM * distance, limit)
    return room, (
        f"run again, the step gives gradients whose norms differ by up to {distance:.1e} of the largest one. "
        f"{_explain_room(room)} torch.use_deterministic_algorithms(True) may make it repeat itself."
    )


def _another_step(offers: Mapping[int, Mapping[str, Any]]) -> ConfigError:
    distances = {
        rank: f"norms differ by up to {offer['distance']:.1e} of the largest" for rank, offer in offers.items()
    }
    lines = [
        "Sentinel, peer replay: replay_fn is not the step that was trained. Run again from the same state on the same "
        "rank:",
        *holders_lines(distances),
        "It must return what backward() was called on (before a GradScaler's scale), computed from the batch that was "
        "given to micro_batch(), from random numbers drawn inside micro_batch(), and under the same autocast. An "
        "optimizer inside the backward pass, reentrant checkpointing (it takes use_reentrant=False), a module that "
        "counts its forward passes, and Inductor's own random numbers (torch._inductor.config.fallback_random = True "
        "takes torch's) make it another step, too.",
    ]
    return ConfigError("\n".join(lines), ranks=offers)


@dataclass(frozen=True)
class Run:
    """One result for the micro-batch of one rank. ``when``: "in the step", "again", ..."""

    rank: int
    when: str
    result: Any


@dataclass(frozen=True)
class ReplayJudgement:
    """A verdict on several runs of one micro-batch: which ranks are wrong.

    Attributes:
        culprit_ranks: empty where the runs do not decide.
        is_noise: hardly a run is like another one, or no step like its repetitions: that is not a fault of one rank.
    """

    culprit_ranks: tuple[int, ...]
    text: str
    is_noise: bool = False


def judge(
    owner: int, runs: Sequence[Run], is_same: Callable[[Any, Any], bool], *, is_common: bool = False
) -> ReplayJudgement:
    """Return who is wrong, if any rank is.

    Args:
        owner: whose micro-batch it is.
        runs: the first one is the step itself.
        is_same: whether two results are equal.
        is_common: whether most of the micro-batches that were run are in doubt.
    """
    classes: list[list[Run]] = []
    for run in runs:
        same = next((group for group in classes if is_same(group[0].result, run.result)), None)
        classes.append([run]) if same is None else same.append(run)
    right = max(classes, key=lambda group: (len({run.rank for run in group}), len(group)))
    agreeing = sorted({run.rank for run in right})
    lines = [f"the micro-batch of rank {owner}, run {len(runs)} times:"]
    for letter, group in zip("ABCDEFGH", classes, strict=False):
        lines.append(f"  result {letter}: {', '.join(f'rank {run.rank} {run.when}' for run in group)}")
    if is_common and len(classes) == 2 and len(classes[0]) == 1:
        lines.append("Most ranks' steps are not what comes of running them again: replay_fn is not the step any more.")
        return ReplayJudgement((), "\n".join(lines), is_noise=True)
    is_alone = len({run.rank for run in runs}) == 1
    if len(agreeing) < 2 and not (is_alone and len(right) > 1):
        is_split = len(classes) == 2 and classes[0][0].rank != classes[1][0].rank
        lines.append(_SPLIT if is_split else "No two ranks agree: the step is not deterministic.")
        return ReplayJudgement((), "\n".join(lines), is_noise=not is_split)
    culprits = tuple(sorted({run.rank for group in classes for run in group if group is not right}))
    lines.append(f"Right by majority: {ranks_text(agreeing)}.")
    for rank in culprits:
        often = "was wrong once and right once: a transient fault of its hardware, or a race"
        if rank not in agreeing:
            often = f"is wrong each time: a lasting fault of its hardware, or {_ONLY_THERE}"
        lines.append(f"Rank {rank} {often}.")
    return ReplayJudgement(culprits, "\n".join(lines))


_ONLY_THERE = "something that only it holds outside of parameters, buffers, batch and random state"
_SPLIT = (
    "Each rank reproduces its own result, but the two differ: one rank is wrong each time, or their devices or "
    "libraries differ. A third rank is needed to decide."
)


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
    is_abnormal: Callable[[NumberedTensors], bool],
    checkpoints: Checkpoints,
) -> tuple[str, bool]:
    """Return why rank ``owner``'s micro-batch gave a value that is not normal, and whether hardware may have done it.

    Collective: two gathers.

    Only the owner can say whether values are normal: each rank remembers other values. What both ranks compute is no
    fault of one of them.

    ``ranks``: of the group; ``rank``: this one; ``is_abnormal``: of the values of a rerun, asked on ``owner`` only.
    """

    def packed() -> dict[str, Any]:
        micro_batches = reruns.record.micro_batches[micro_batch : micro_batch + 1]
        if not micro_batches:
            raise ConfigError("it did not run inside micro_batch()")
        return {"step": reruns.pack(micro_batches)}

    def run() -> dict[str, Any]:
        with checkpoints.redirect() as values:
            reruns.run(unpack_step(packet, owner))
        floats = [(index, float(value)) for index, value in values]  # (checkpoint, value)
        return {"values": floats, "bad": is_abnormal(values) if rank == owner else None}

    packet = hand_out(gathered, rank, [owner], packed, f"the step of rank {owner}")[owner]
    if "error" in packet:
        return f"The micro-batch could not be run again: {packet['error']}.", True
    peer = from_rank_on(ranks, owner)[1 % len(ranks)]
    answers = blame(gathered, rank, owner, () if peer == owner else (peer,), run)
    return _explanation(owner, peer, answers, checkpoints.names)


def _explanation(
    owner: int, peer: int, answers: Mapping[int, Mapping[str, Any]], names: Sequence[str]
) -> tuple[str, bool]:
    if "error" in answers[owner]:
        return f"Rank {owner} could not run the micro-batch again: {answers[owner]['error']}", True
    runs, peer_runs = answers[owner]["runs"], answers[peer].get("runs")
    difference = None if peer_runs is None else _first_difference(runs[0]["values"], peer_runs[0]["values"])
    wrong_on_peer = None if peer_runs is None or peer == owner else difference is None
    cause = cause_of([run["bad"] for run in runs], wrong_on_peer)
    again = f"Run again on rank {owner}, the micro-batch gives "
    if cause is Cause.TRANSIENT:
        return again + "normal values: a transient fault of its hardware, or a race.", True
    again += "such a value again"
    if peer_runs is None:
        return f"{again}. Rank {peer} could not run it: {answers[peer]['error']}", True
    if cause is Cause.UNDECIDED:
        return again + "; there is no other rank to distinguish hardware from software.", True
    if difference is None:
        return f"{again}, and so it does on rank {peer}: software or data, not hardware.", False
    index, value, peer_value = difference
    values = f"{names[index]} has {value:.4g} on rank {owner} and {peer_value:.4g} on rank {peer}."
    where = f"hardware of rank {owner}, or something that only it holds"
    return f"{again}, and on rank {peer} it does not: {where}. {values}", True


def _first_difference(
    first: Sequence[tuple[int, float]], second: Sequence[tuple[int, float]]
) -> tuple[int, float, float] | None:
    """Return (checkpoint, value in the first run, in the second) of the first that differ; NaN for none."""
    room = _ATOL * max((abs(value) for _, value in (*first, *second) if math.isfinite(value)), default=0.0)
    for (index, value), (index2, value2) in itertools.zip_longest(first, second, fillvalue=(-1, math.nan)):
        if index != index2 or not _is_about(value, value2, room):
            return max(index, index2), value, value2
    return None


def _is_about(first: float, second: float, room: float) -> bool:
    if not (math.isfinite(first) and math.isfinite(second)):
        return not (math.isfinite(first) or math.isfinite(second))
    return math.isclose(first, second, rel_tol=_RTOL, abs_tol=room)
