"""The guard's comparison at a step as a question: one of several that all ranks ask in one collective.

1. Each rank sends its share of a sum over all ranks, modulo 2**64, which is 0 if in every group all have done the same
   (`notes_shm.share`); and whether it knows of a mismatch already. A sum of float64 is exact for whole numbers, so the
   share travels as four of 16 bits.
2. 0, and nobody knows of anything: compared.
3. Otherwise every rank tells what it has done in each group, as digests. All see alike in which groups ranks differ,
   and come to the verdict on these, also where they are no members.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from ddpstats._ranks.gather import gather_trees
from ddpstats.errors import CollectiveMismatch
from ddpstats.guard.compare import Comparing, Told, alarms_of
from ddpstats.guard.group import Standing

_CHUNKS = struct.Struct("<4H")
_BITS = 16


class StepQuestion:
    """Of one step. ``comparing`` is None where there is nothing to compare, or nobody to compare with."""

    def __init__(self, comparing: Comparing | None, standing: Standing) -> None:
        self._comparing, self._standing = comparing, standing
        self._known: CollectiveMismatch | None = None

    def _ask(self, step: int | None) -> Sequence[float]:
        self._standing.steps += 1
        share = 0
        try:
            if self._standing.verdict is not None:
                raise self._standing.verdict.with_traceback(None)
            if self._comparing is not None and not self._standing.silent:
                share = self._comparing.ask()
        except CollectiveMismatch as error:  # the others are to hear of it
            self._known = error
        return float(self._known is not None), *map(float, _chunks(share))

    def _answer(self, sums: Sequence[float], group: Any) -> None:
        known, *chunks = sums
        if known or _joined(chunks):
            self._settle(group)
        if self._comparing is not None and not self._standing.silent:
            self._comparing.take_agreed()

    def _drop(self) -> None:
        """Nothing is kept: digests go on from where they are."""

    def _settle(self, group: Any) -> None:
        """Some rank differs, or knows of a mismatch. Collective."""
        comparing = self._comparing
        mine: Told = {} if comparing is None else comparing.told()
        tree = {"error": str(self._known or ""), "silent": self._standing.silent, "groups": mine}
        told = gather_trees(tree, name="collective_guard.step: what each rank did", group=group)
        if self._known is not None:
            raise self._known
        errors = [one["error"] for one in told if one["error"]]
        if comparing is not None and (errors or any(one["silent"] for one in told)):
            comparing.verdicts.catch_up()
        if errors:
            raise CollectiveMismatch(errors[0])
        self._standing.silent |= any(one["silent"] for one in told)
        for alarm in alarms_of(one["groups"] for one in told):
            if comparing is not None and not self._standing.silent:
                comparing.verdicts.await_verdict(alarm)


def _chunks(number: int) -> tuple[int, ...]:
    return _CHUNKS.unpack(number.to_bytes(_CHUNKS.size, "little"))


def _joined(sums: Sequence[float]) -> int:
    """The sum of what `_chunks` took apart, modulo 2**64."""
    total = sum(int(chunk) << _BITS * place for place, chunk in enumerate(sums))
    return total % (1 << _BITS * len(sums))
