"""A rank's micro-batch repeated by a peer: finds what went wrong on one rank before the gradients were reduced.

`PeerReplay.examine`, every so many steps, on all ranks together:

1. Each rank has digests of its own gradients of the step's first micro-batch, taken before the reduce
   (`_rerun.digest`). At the first time it also runs that micro-batch once more itself, and on a difference twice:
   does the step repeat itself bit for bit? Where it does not, that is natural noise, or the function that repeats it
   is another step (`vote`): from then on gradients are compared by their norms, with room for the noise. Gradients
   that are all zero say nothing.
2. As many ranks as fit into `MOST_BYTES` hand out their micro-batch (all of them where batches are small), beginning
   with another rank each time, and those buffers that ranks do not have alike. The next rank runs it, and all tell what
   came of it.
3. Where a result is another one, its owner, the next rank and a third one run that micro-batch again, and `judge` says
   who is wrong.

The course depends on gathered things only. What fails on one rank is told to all.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddpstats._base.text import holders_lines, shorten
from ddpstats._rerun.digest import GradientDigests, LocalGradients, digests
from ddpstats._rerun.record import tensor_bytes
from ddpstats._rerun.run import attempt, from_rank_on
from ddpstats.errors import ConfigError
from ddpstats.sentinel.rerun import Reruns
from ddpstats.sentinel.verdict import Detector, Exam, Gathered, SentinelFinding, SentinelVerdict
from ddpstats.sentinel.vote import MOST_NOISE, Run, judge, measured, rounding_room

MOST_BYTES = 64 << 20  # of all batches that are handed out at a time: every rank receives them
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

    Attributes:
        original: the caller begins and ends it around the first micro-batch of a step that is to be examined.

    Raises:
        ConfigError: as `LocalGradients`.
    """

    def __init__(self, model: nn.Module, reruns: Reruns, ranks: Sequence[int], rank: int) -> None:
        self.original = LocalGradients(model)
        self._reruns, self._ranks, self._rank = reruns, tuple(ranks), rank
        self._noise: float | None = None
        self._turn = -1

    def examine(self, gathered: Gathered) -> SentinelFinding | None:
        """Collective: two small gathers and one of batches; one more on doubt.

        Raises:
            ConfigError: some rank's step cannot be repeated, or is not the one that was trained; on every rank.
        """
        self._turn += 1
        kept: list[dict[str, Any]] = []
        offers = gathered(lambda: attempt(lambda: self._offer(kept)), "what each rank can hand out")
        _refuse(offers)
        doubted = self._learn_noise(offers)
        travelling = _travelling([offer["buffers"] for offer in offers.values()])
        chosen = _chosen(offers, travelling, self._turn, doubted)
        if not chosen:
            self._say_why_none(offers)
            return None
        packets = self._exchanged(gathered, kept, travelling, chosen)
        checker = {owner: from_rank_on(self._ranks, owner)[1 % len(self._ranks)] for owner in chosen}
        answers = gathered(lambda: self._answers(packets, checker), "what came of them")
        _refuse(answers)
        first = {owner: _witness(answers[rank], owner) for owner, rank in checker.items()}
        steps = {owner: _witness(packets[owner], "original") for owner in chosen}
        doubted += [owner for owner in chosen if not self._same(steps[owner], first[owner])]
        if not doubted:
            return None
        is_compiled = any(offer["compiled"] for offer in offers.values())
        room = max(self._noise or 0.0, MOST_NOISE if is_compiled else 0.0)
        beyond = {owner for owner in doubted if not steps[owner].is_same(first[owner], room)}
        owner = next((one for one in doubted if one in beyond), doubted[0])
        runs = self._run_again(gathered, owner, packets, first)
        return self._settled(owner, runs, room, is_compiled=is_compiled, is_common=2 * len(beyond) > len(chosen) > 1)

    def _offer(self, kept: list[dict[str, Any]]) -> dict[str, Any]:
        """What can be handed out, or why nothing can; it goes into ``kept``."""
        own = self._reruns.packet(0)
        if own is None:
            return _nothing(_NO_BATCH)
        if "changed" in own:
            return _nothing(_CHANGED)
        if "error" in own:
            return own
        original = self.original.witness()
        if original is None:
            return _nothing(self.original.problem)
        own["strided"] = list(self.original.strided)
        kept.append(own)
        buffers = list(self._reruns.buffers.values())
        return {
            "bytes": tensor_bytes(own),
            "buffers": digests(buffers).cpu(),
            "buffer_bytes": [tensor_bytes(buffer) for buffer in buffers],
            "loose": _loose_switches(self._reruns.device),
            "compiled": self._reruns.is_compiled,
            **(self._repeated(own, original) if self._noise is None else {"distance": None}),
        }

    def _repeated(self, own: dict[str, Any], original: GradientDigests) -> dict[str, Any]:
        """How far the step's own repetition is from it, and from another one. Two times nothing says nothing."""
        travelled = {"plain": own, "buffers": {}}
        runs = [self._reruns.run(travelled).witness]
        if original.is_same(runs[0], 0.0):
            return {"distance": None if original.is_zero else 0.0}
        runs.append(self._reruns.run(travelled).witness)
        return {
            "distance": max(_LEAST, *(original.distance(one) for one in runs)),
            "repeats": runs[0].is_same(runs[1], 0.0),
        }

    def _exchanged(
        self,
        gathered: Gathered,
        kept: Sequence[dict[str, Any]],
        travelling: Sequence[int] | None,
        chosen: Sequence[int],
    ) -> dict[int, dict[str, Any]]:
        """What the chosen ranks hand out: packet, buffers, and what its owner got."""

        def handed_out() -> dict[str, Any] | None:
            original = self.original.witness()
            if self._rank not in chosen or original is None:
                return None
            named = list(self._reruns.buffers.items())
            buffers = dict(named if travelling is None else [named[place] for place in travelling])
            return {"plain": kept[0], "buffers": buffers, "original": original.to_tree()}

        return gathered(handed_out, "micro-batches")

    def _answers(self, packets: Mapping[int, dict[str, Any]], runner: Mapping[int, int]) -> dict[str, Any]:
        """What came of the packets that are this rank's to run, by owner."""
        mine = [owner for owner, rank in runner.items() if rank == self._rank]
        return attempt(lambda: {str(owner): self._reruns.run(packets[owner]).witness.to_tree() for owner in mine})

    def _same(self, one: GradientDigests, other: GradientDigests) -> bool:
        return one.is_same(other, self._noise or 0.0)

    def _learn_noise(self, offers: Mapping[int, dict[str, Any]]) -> list[int]:
        """Where it is not known yet. Returns ranks whose step did not repeat itself where most ranks' did."""
        found = measured(offers) if self._noise is None else None
        if found is None:
            return []
        self._noise = found.room
        if found.text:
            self._say(found.text)
        return list(found.doubted)

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

    def _run_again(
        self,
        gathered: Gathered,
        owner: int,
        packets: Mapping[int, dict[str, Any]],
        first: Mapping[int, GradientDigests],
    ) -> list[Run]:
        """Once more on up to three ranks; with the step, and what came of it before. Collective."""
        deciding = from_rank_on(self._ranks, owner)[:3]
        checker = deciding[1 % len(deciding)]
        mine = {owner: self._rank} if self._rank in deciding else {}
        answers = gathered(lambda: self._answers(packets, mine), "what came of the one in doubt")
        _refuse(answers)
        runs = [Run(owner, "in the step", _witness(packets[owner], "original"))]
        runs += [Run(rank, "again", _witness(answers[rank], owner)) for rank in deciding]
        return [*runs, Run(checker, "before", first[owner])]

    def _settled(
        self, owner: int, runs: Sequence[Run], room: float, *, is_compiled: bool, is_common: bool
    ) -> SentinelFinding | None:
        """Who is wrong; what is nobody's fault is said, and learnt. ``room``: for noise, and for rounding."""
        rounded = (lambda one, other: one.is_same(other, room)) if is_compiled else None
        found = judge(owner, runs, self._same, rounded=rounded, is_common=is_common)
        if found.is_noise or found.is_rounding:
            results = [run.result for run in runs]
            furthest = max(one.distance(other) for one, other in itertools.combinations(results, 2))
            known = max(self._noise or 0.0, rounding_room(furthest))
            self._noise = known if found.is_rounding else None  # None: measured anew at the next time
            self._say(found.text)
            return None
        names = self._differing([run.result for run in runs], room)
        text = f"{found.text}\nGradients that differ: {shorten(names, _SHOWN_NAMES)}."
        return SentinelFinding("peer replay", found.culprit_ranks, names[0], text)

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


def _travelling(told: Sequence[Tensor | None]) -> list[int] | None:
    """Which buffers, by place, ranks do not have alike; None: all of them. ``told``: digests, None where unknown."""
    known = [one for one in told if one is not None]
    if len(known) < len(told) or any(one.shape != known[0].shape for one in known):
        return None
    return [int(place) for place in (torch.stack(known) != known[0]).any(0).nonzero()]


def _chosen(
    offers: Mapping[int, dict[str, Any]], travelling: Sequence[int] | None, turn: int, doubted: Sequence[int]
) -> list[int]:
    """Whose micro-batches are handed out: those in doubt, then from another rank on each time, as many as fit."""
    sizes = {rank: _size_bytes(offer, travelling) for rank, offer in offers.items() if offer["bytes"] >= 0}
    holders = list(sizes)
    start = turn % len(holders) if holders else 0
    chosen, total = list(doubted), sum(sizes[rank] for rank in doubted)
    for rank in (*holders[start:], *holders[:start]):
        if rank not in chosen and (not chosen or total + sizes[rank] <= MOST_BYTES):
            chosen.append(rank)
            total += sizes[rank]
    return chosen


def _size_bytes(offer: Mapping[str, Any], travelling: Sequence[int] | None) -> int:
    sizes: list[int] = offer["buffer_bytes"]
    return int(offer["bytes"]) + sum(sizes if travelling is None else [sizes[place] for place in travelling])


def _witness(tree: Mapping[str, Any], key: object) -> GradientDigests:
    return GradientDigests.from_tree(tree[str(key)])


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
    if device.type == "cuda" and torch.backends.cudnn.benchmark:
        loose.append("torch.backends.cudnn.benchmark = False")
    return loose
