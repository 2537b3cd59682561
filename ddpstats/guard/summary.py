"""Counters of what a guard has seen and compared, and the one line that it ends with. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

RECORDED = "mode 'record' compares nothing while it runs"
WITHOUT_OTHERS = "of groups of one rank"
UNSETTLED = "since the last comparison"
GIVEN_UP = "torch's own timeout ended a collective of that group"
TO_RUN = "Start it on ranks: `ddpstats run --nproc 2 SCRIPT`, or `torchrun --nproc-per-node 2 SCRIPT`"
NO_GROUP = (
    "no process group was made in this process. If the program starts its ranks itself (mp.spawn), guard them with "
    f"DDPSTATS_GUARD=strict, where they import ddpstats. Otherwise s{TO_RUN[1:]}"
)
MESSAGES_SEEN = "messages between ranks, which are compared only when one of them fails"


@dataclass(frozen=True)
class Tally:
    """``not_compared``: reason -> collectives. ``agreeing``: ranks that were seen to do the same."""

    compared: int = 0
    not_compared: Mapping[str, int] = field(default_factory=dict)
    agreeing: frozenset[int] = frozenset()

    @classmethod
    def of(cls, not_compared: Mapping[str, int], compared: int = 0, agreeing: Iterable[int] = ()) -> Tally:
        return cls(compared, {why: count for why, count in not_compared.items() if count}, frozenset(agreeing))

    def __add__(self, other: Tally) -> Tally:
        reasons = {**self.not_compared}
        for why, count in other.not_compared.items():
            reasons[why] = reasons.get(why, 0) + count
        return Tally(self.compared + other.compared, reasons, self.agreeing | other.agreeing)


@dataclass(frozen=True)
class GuardCounters:
    """One guard's counters, so far.

    Attributes:
        collectives: seen on this rank; messages count, too.
        compared: those that all ranks of their group are known to have issued.
        not_compared: all others.
        steps: calls of `collective_guard.step`.
        mode: of the guard.
        reasons: why -> how many were not compared.
        ranks_agreeing: how many ranks were seen to do the same, this one among them.
    """

    collectives: int
    compared: int
    not_compared: int
    steps: int
    mode: str = "off"
    reasons: Mapping[str, int] = field(default_factory=dict)
    ranks_agreeing: int = 0


def last_line(
    counters: GuardCounters, nothing: str, verdict: str = "", record_dir: str | None = None
) -> tuple[bool, str]:
    """Return whether something is wrong, and the line.

    ``nothing``: why there was nothing to compare, where that is known. ``verdict``: what was raised, in short.
    """
    seen = f"collective guard, mode {counters.mode}: {_collectives(counters.collectives)} seen"
    then = f" Next: ddpstats report {record_dir}" if record_dir is not None and counters.mode == "record" else ""
    if counters.reasons.keys() == {MESSAGES_SEEN} and not verdict and not nothing:
        return False, (
            f"collective guard, mode {counters.mode}: {counters.collectives:,} messages between ranks seen; messages "
            "are compared only when one of them fails."
        )
    if counters.compared == 0 and not verdict:
        why = nothing or _reasons(counters.reasons) or "the program itself issued none while the guard was on"
        return True, f"{seen}, nothing was compared: {why}.{then}"
    left = f"{counters.not_compared:,} not"
    left += f" ({_reasons(counters.reasons)})" if counters.reasons else ""
    end = f"{counters.ranks_agreeing} ranks agree" if not verdict else f"it ended in {verdict.rstrip('.')}"
    return False, f"{seen}, {counters.compared:,} compared, {left}; {end}.{then}"


def _collectives(count: int) -> str:
    return f"{count:,} collective{'' if count == 1 else 's'}"


def _reasons(reasons: Mapping[str, int]) -> str:
    if len(reasons) == 1:
        return next(iter(reasons))
    return "; ".join(f"{count:,}: {why}" for why, count in reasons.items())
