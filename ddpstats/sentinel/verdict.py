"""What the ranks come to, step after step: plain values, the same on every rank. And how layers hear of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ddpstats._base.text import ranks_text

Layer = Literal["thresholds", "replica digests", "peer replay", "matmul checksum"]

Gathered = Callable[[Callable[[], Any], str], dict[int, Any]]
"""Every rank's tree by global rank. Collective: called with what makes this rank's tree, and what it is."""


@dataclass(frozen=True)
class SentinelFinding:
    """One thing that one layer found.

    Attributes:
        layer: which.
        culprit_ranks: global ranks where it arose, ascending; empty where that cannot be told, and the text says why.
        name: of the module, parameter, buffer or operator that shows it.
        text: all of it, in words.
        value: what was measured, where it is one number.
    """

    layer: Layer
    culprit_ranks: tuple[int, ...]
    name: str
    text: str
    value: float | None = None


@dataclass(frozen=True)
class SentinelVerdict:
    """On one training step.

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
        """Whether no layer found anything."""
        return not self.findings

    @property
    def culprit_ranks(self) -> tuple[int, ...]:
        """Of all findings, ascending."""
        return tuple(sorted({rank for finding in self.findings for rank in finding.culprit_ranks}))

    @property
    def layers(self) -> tuple[Layer, ...]:
        """That found something, each once."""
        return tuple(dict.fromkeys(finding.layer for finding in self.findings))

    @property
    def message(self) -> str:
        """Several lines; empty where all is well."""
        if self.ok:
            return ""
        lines = [f"step {self.step}, found by the sentinel:"]
        lines += [f"[{finding.layer}] {finding.text}" for finding in self.findings]
        return "\n".join([*lines, *self.notes])


_SHOWN_RANKS = 8


def finding_of(
    layer: Layer, what: str, told: Mapping[int, Mapping[str, Any]], more: Sequence[str] = ()
) -> SentinelFinding | None:
    """``told``: name, text and value, by rank; None without any. ``more``: lines at the end."""
    if not told:
        return None
    lines = [f"{ranks_text(told)}: {what}"]
    lines += [f"  rank {rank}: {tree['text']}" for rank, tree in list(told.items())[:_SHOWN_RANKS]]
    first = told[min(told)]
    return SentinelFinding(layer, tuple(sorted(told)), first["name"], "\n".join([*lines, *more]), first["value"])
