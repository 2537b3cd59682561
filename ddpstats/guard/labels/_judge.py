"""Whether labels that differ between ranks are a fault, a doubt, or each rank's own data. Pure.

That two ranks reached their tensors under different names proves nothing yet: a rank may sum the losses of its own
utterances in a loop over their names. So it is asked what the names are (spelled out in the program, or data), what
stood beside them (the same names in another order, some of the same, others altogether), and above all what the
program does with the result. Strong evidence is a fault; weak evidence is worth one warning; data is nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations
from typing import Literal

from ddpstats._events import BY_TORCH, Event, Evidence

Judgement = Literal["fault", "doubt", "data"]
_SEVERITY: dict[Judgement, int] = {"data": 0, "doubt": 1, "fault": 2}
_DRAWN = frozenset({"DataLoader", "generator", "_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter"})
_INDEX = re.compile(r"\[-?\d+\]")
_RUNS = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b[0-9a-f]{8,}\b|0x[0-9a-f]+|\d+", re.IGNORECASE)
_MATTERS = ("keyed", "in place")


def judge(events: Sequence[Event], matched: int) -> Judgement:
    """Of the events of all ranks for one collective. ``matched``: names that were equal here on all of them before."""
    labels = {event.label for event in events}
    if BY_TORCH in labels and len(labels) > 1:
        return "fault"  # gradients meet something else
    known = {event.label: event for event in events if event.word}
    pairs = combinations(known.values(), 2)
    return max((_judge(one, other, matched) for one, other in pairs), key=_SEVERITY.__getitem__, default="data")


def _judge(one: Event, other: Event, matched: int) -> Judgement:
    a, b = one.evidence, other.evidence
    if a is None or b is None:
        return "fault"  # a name that the program gave itself
    assert one.label is not None
    assert other.label is not None
    alike = _INDEX.sub("", one.label) == _INDEX.sub("", other.label)
    if a.is_known and b.is_known and not alike:
        return "fault"
    while a.key == b.key and a.outer is not None and b.outer is not None:
        a, b = a.outer, b.outer  # what differs stands further out
    if a.source in _DRAWN or b.source in _DRAWN or (a.fate == b.fate == "pooled") or b.key in a.aliases:
        return "data"
    matters = a.fate in _MATTERS and b.fate in _MATTERS
    spelled = bool(a.spelled and b.spelled)
    beside = a.is_beside or b.is_beside
    if _are_permuted(a, b) and not beside and (matters or (spelled and "pooled" not in (a.fate, b.fate))):
        return "fault"
    if alike or _are_affixed(a, b):
        return "data"
    if _without_numbers(one.label) == _without_numbers(other.label) and not a.spelled == b.spelled == "whole":
        return "data"
    if beside or not matters:
        return "doubt"
    if set(a.names) & set(b.names):
        return "fault" if spelled or matched >= 2 else "doubt"
    # Nothing in common. Only where one line of the program walks both, and spells both out, can they be the same stats.
    own = "Module" in (a.source, b.source) or str(one.site) != str(other.site)
    known = spelled or (matched >= 2 and not (a.names and b.names))
    return "fault" if known and not own else "doubt"


def _are_permuted(a: Evidence, b: Evidence) -> bool:
    """Whether both ranks hold the same names, the two that met among them."""
    return len(a.names) > 1 and set(a.names) == set(b.names) and {a.key, b.key} <= set(a.names)


def _are_affixed(a: Evidence, b: Evidence) -> bool:
    """Whether one rank's names are the other's, in the same order, with the same text before or after each."""
    short, long = sorted((a.names, b.names), key=lambda names: sum(map(len, names)))
    if len(short) != len(long) or len(short) < 2 or short == long:
        return False
    added = len(long[0]) - len(short[0])
    before, after = long[0][:added], long[0][len(short[0]) :]
    pairs = list(zip(short, long, strict=True))
    same = all(name == before + given for given, name in pairs) or all(name == given + after for given, name in pairs)
    return same and ((a.key, b.key) in pairs or (b.key, a.key) in pairs)


def _without_numbers(text: str) -> str:
    return _RUNS.sub("#", text)
