"""Several runs of one micro-batch, on several ranks: who is wrong? Pure functions of plain values.

Ranks compute from the same parameters, batch and random state, so results that differ are somebody's fault. What two
ranks agree on is taken for right: a fault does not happen twice in the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ddpstats._base.rank_names import ranks_text


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
