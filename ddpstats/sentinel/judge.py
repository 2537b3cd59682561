"""One step, judged by all ranks together, on a sentinel that is on.

1. This rank looks at its own values, and logs them.
2. One all_reduce, which is the caller's: on how many ranks is something wrong? Always, on every rank.
3. Where that says so, all ranks tell what they saw, and a micro-batch that can be is run again, there and on a peer.
4. In the steps in which they are due, digests of replicas are compared, and micro-batches run on peers.
5. What all that comes to is learnt and said; it is the same on every rank.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddpstats._base.text import ranks_text
from ddpstats.errors import ConfigError
from ddpstats.sentinel.matmul import fault_tree, matmul_finding
from ddpstats.sentinel.rerun import explain_alarm
from ddpstats.sentinel.thresholds import ERROR, Check, alarm_tree, threshold_finding
from ddpstats.sentinel.verdict import Gathered, SentinelFinding, SentinelVerdict

if TYPE_CHECKING:
    from ddpstats.sentinel.sentinel import Layers

_logger = logging.getLogger("ddpstats")
_SHOWN_RANKS = 4


class Judge:
    """Comes to a verdict per step. Local to make.

    Args:
        gathered: every rank's tree by global rank; collective.
        rank: this one, global.

    Attributes:
        where: global rank -> host, process and device, in words; known once all ranks have told.
    """

    def __init__(self, layers: Layers, gathered: Gathered, rank: int) -> None:
        self._layers, self._options = layers, layers.options
        self._gathered, self._rank = gathered, rank
        self.where: Mapping[int, str] = {}
        self._errors: list[Check] = []
        self._problem: Exception | None = None
        self._first_alarm: SentinelVerdict | None = None
        self._alarmed: frozenset[int] = frozenset()  # ranks whose thresholds raised an alarm in the step before

    def look(self, step: int, problem: Exception | None) -> bool:
        """Whether this rank has anything to say of the step. Local.

        ``problem``: what went wrong here before; every rank hears of it, as `InvalidStats`.
        """
        self._errors, self._problem = self._level_1(step, problem)
        return self._problem is not None or bool(self._errors) or self._layers.window.has_news

    def judge(self, step: int, seen: bool) -> SentinelVerdict:
        """After `look`. Collective. ``seen``: whether some rank has anything to say."""
        layers, errors, problem = self._layers, self._errors, self._problem
        self._errors, self._problem = [], None
        findings, notes = self._settled(errors, problem) if seen else ([], [])
        is_new = not findings
        if layers.compares_digests and layers.replicas is not None:
            found = layers.replicas.compare(self._gathered)
            if found is not None:
                findings.append(SentinelFinding("replica digests", found.culprit_ranks, found.name, found.message))
        if layers.replays:
            more, trouble = self._examined(bool(findings))
            findings += more
            notes += trouble
        if findings and is_new:
            notes += self._window_notes()
        return self._concluded(SentinelVerdict(step, tuple(findings), tuple(notes)))

    def _level_1(self, step: int, problem: Exception | None) -> tuple[list[Check], Exception | None]:
        """This rank's values of level 1."""
        try:
            checks = self._layers.thresholds.look(step)
        except Exception as error:
            return [], problem or error
        self._layers.thresholds.log(checks)
        return [check for check in checks if check.level == ERROR], problem

    def _settled(self, errors: Sequence[Check], problem: Exception | None) -> tuple[list[SentinelFinding], list[str]]:
        """Some rank saw something: all tell what. Collective."""

        def told() -> dict[str, Any]:
            if problem is not None:
                raise problem
            return {"alarm": alarm_tree(errors), **self._faults()}

        trees = self._gathered(told, "what each rank saw")
        alarms = {rank: tree["alarm"] for rank, tree in trees.items()}
        alarm, faults = threshold_finding(alarms), _fault_finding(trees)
        notes = [f"Rank {rank}: {tree['unchecked']}" for rank, tree in trees.items() if tree["unchecked"]]
        opened = [] if alarm is None and faults is None else self._window_notes()  # before reruns, which it sees, too
        if alarm is not None:
            fresh = [rank for rank in alarm.culprit_ranks if rank not in self._alarmed]
            if fresh and self._layers.reruns is not None:
                notes.append(self._explained(fresh[0], alarms[fresh[0]]["micro_batch"]))
                if self._layers.window.is_open and faults is None:
                    faults = _fault_finding(self._gathered(self._faults, "products of the reruns"))
        self._alarmed = frozenset() if alarm is None else frozenset(alarm.culprit_ranks)
        return [one for one in (alarm, faults) if one is not None], [*notes, *opened]

    def _faults(self) -> dict[str, Any]:
        """What the window saw on this rank."""
        faults, count, problem, unchecked = self._layers.window.take()
        text = (
            "" if problem is None else f"{unchecked} products could not be checked: {type(problem).__name__}: {problem}"
        )
        return {"fault": fault_tree(faults, count), "unchecked": text}

    def _explained(self, owner: int, micro_batch: int) -> str:
        """Hardware, or not? Collective."""
        layers = self._layers
        assert layers.reruns is not None
        return explain_alarm(
            self._gathered,
            layers.reruns,
            tuple(self.where),
            self._rank,
            owner,
            micro_batch,
            layers.thresholds.is_abnormal,
            layers.thresholds.checkpoints.names,
        )

    def _examined(self, has_findings: bool) -> tuple[list[SentinelFinding], list[str]]:
        """Layer 3. What cannot be repeated is told by all ranks alike, but does not hide what was found."""
        assert self._layers.peer_replay is not None
        try:
            found = self._layers.peer_replay.examine(self._gathered)
        except ConfigError as error:
            if self._options.settings.mode >= 2 and not has_findings:
                raise
            warnings.warn(str(error), stacklevel=2)
            return [], [str(error)]
        return [] if found is None else [found], []

    def _window_notes(self) -> list[str]:
        """Open layer 4's window, on every rank alike; an alarm that follows from another one does not renew it."""
        steps = self._options.checksum_steps
        if not self._options.matmul_checksum or (self._first_alarm is not None and self._layers.window.is_open):
            return []
        self._layers.open_window(steps + 1)  # what is left of this one, too
        return [f"Matmuls are checked in the next {steps} steps."]

    def _concluded(self, verdict: SentinelVerdict) -> SentinelVerdict:
        mode = self._options.settings.mode
        if verdict.ok:
            self._alarmed = frozenset()
            self._layers.thresholds.learn()
            return verdict
        if mode == 1:
            self._layers.thresholds.learn()
        else:
            self._layers.thresholds.forget()
        # Alarms of layer 1 have lines of their own, on their rank: what else there is to say is said once.
        says_more = verdict.layers != ("thresholds",) or bool(verdict.notes)
        verdict = replace(verdict, notes=(*verdict.notes, *self._advice(verdict, mode)))
        if says_more and self._rank == min(self.where):
            _logger.error("%s", verdict.message)
        self._first_alarm = self._first_alarm or verdict
        return verdict

    def _advice(self, verdict: SentinelVerdict, mode: int) -> list[str]:
        culprits = verdict.culprit_ranks
        lines = [f"Rank {rank} is {self.where[rank]}." for rank in culprits[:_SHOWN_RANKS]]
        if self._first_alarm is not None and mode == 1:
            first = self._first_alarm
            where = f" on {ranks_text(first.culprit_ranks)}" if first.culprit_ranks else ""
            lines.append(f"The first alarm was at step {first.step}{where}; this may follow from it.")
        if mode >= 2 and culprits and len(culprits) < len(self.where):
            lines.append(
                f"No rank has applied this step. Test the device of {ranks_text(culprits)}, or go on without it, from "
                "this step or a checkpoint before it."
            )
        return lines


def _fault_finding(trees: Mapping[int, dict[str, Any]]) -> SentinelFinding | None:
    return matmul_finding({rank: tree["fault"] for rank, tree in trees.items()})
