"""The verdict of a step, the same on every rank, and the protocol of the detectors that come to it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddpstats._base.text import ranks_text

if TYPE_CHECKING:
    from ddpstats._rerun.blame import Gathered


@dataclass(frozen=True)
class SentinelFinding:
    """A finding of one layer.

    Attributes:
        layer: which.
        culprit_ranks: global ranks where it arose, ascending; empty where that is unknown, and the text says why.
        name: of the module, parameter, buffer or operator that shows it.
        text: all of it, in words.
        value: what was measured, where it is one number.
    """

    layer: str
    culprit_ranks: tuple[int, ...]
    name: str
    text: str
    value: float | None = None


@dataclass(frozen=True)
class SentinelVerdict:
    """The verdict on one training step.

    Attributes:
        step: its number.
        findings: in the order of the layers; empty where all is well.
        notes: what the reader should know besides.
    """

    step: int
    findings: tuple[SentinelFinding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Return whether no layer found anything."""
        return not self.findings

    @property
    def culprit_ranks(self) -> tuple[int, ...]:
        """Return the culprit ranks of all findings, ascending."""
        return tuple(sorted({rank for finding in self.findings for rank in finding.culprit_ranks}))

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the names of the layers that found something, each once."""
        return tuple(dict.fromkeys(finding.layer for finding in self.findings))

    @property
    def message(self) -> str:
        """Return the verdict in several lines; empty where all is well."""
        if self.ok:
            return ""
        lines = [f"step {self.step}, found by the sentinel:"]
        lines += [f"[{finding.layer}] {finding.text}" for finding in self.findings]
        return "\n".join([*lines, *self.notes])


@dataclass
class Exam:
    """One step, on which all ranks decide together.

    Attributes:
        step: its number.
        gathered: every rank's tree by global rank; collective.
        detectors: all of them, in their order.
        is_suspected: whether some detector of some rank suspects anything.
        evidence: global rank -> what `Detector.suspicious` returned there; empty where nothing is suspected.
        findings: of the detectors before this one.
        notes: what the reader should know besides; detectors add to it.
        may_be_hardware: False where a rerun has shown that another rank computes the same.
    """

    step: int
    gathered: Gathered
    detectors: Sequence[Detector]
    is_suspected: bool = False
    evidence: Mapping[int, Any] = field(default_factory=dict)
    findings: list[SentinelFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    may_be_hardware: bool = True


class Detector:
    """One way to find silent corruption. All ranks have the same detectors, in the same order.

    A detector derives from this protocol, and overrides what it needs. No detector may hold what holds the sentinel.

    Attributes:
        same_on_all_ranks: its own options, by name, beside the arguments of `Sentinel`; `Sentinel.step` refuses ranks
            that differ in them, and puts the name of the detector's class before theirs.
        warnings: what it cannot see, a sentence each.
    """

    same_on_all_ranks: Mapping[str, Any] = {}
    warnings: Sequence[str] = ()

    def begin(self) -> None:
        """A micro-batch is about to run. Local."""

    def end(self, failed: bool) -> None:
        """The micro-batch is through, or it has failed and does not count. Local."""

    def suspicious(self, step: int) -> Any:
        """Return what this rank suspects, as a tree for `gather_trees`; None for nothing. Local."""

    def findings(self, exam: Exam) -> Sequence[SentinelFinding]:
        """Return what all ranks conclude. Collective: called on every rank in every step that is judged."""
        return ()

    def before_rerun(self) -> None:
        """The sentinel is about to run a micro-batch with an alarm again, on two ranks. Local; called on every rank."""

    def conclude(self, verdict: SentinelVerdict | None) -> None:
        """The step is over: ``verdict``, or None where it was not judged. Local."""

    def close(self) -> None:
        """Take hooks away. Idempotent."""


_SHOWN_RANKS = 8


def finding_of(
    layer: str, what: str, reports: Mapping[int, Mapping[str, Any]], more: Sequence[str] = ()
) -> SentinelFinding | None:
    """Return the finding of ``reports`` (name, text and value, by rank), or None. ``more``: lines at the end."""
    if not reports:
        return None
    lines = [f"{ranks_text(reports)}: {what}"]
    lines += [f"  rank {rank}: {tree['text']}" for rank, tree in list(reports.items())[:_SHOWN_RANKS]]
    first = reports[min(reports)]
    return SentinelFinding(layer, tuple(sorted(reports)), first["name"], "\n".join([*lines, *more]), first["value"])
