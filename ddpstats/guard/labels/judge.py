"""`judge` says whether labels that differ between ranks are a fault, worth a warning, or each rank's own data. Pure.

That two ranks reached their tensors under different names proves nothing yet: a rank may sum the losses of the
utterances that it has in a loop over their names. It is a fault where the program gave the names by `label()`, and
where both ranks hold some of the same names and what is reduced is an element of its container, or goes back under its
name. Any other difference is a warning, unless the names are each rank's own by construction.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations
from typing import Literal

from ddpstats.guard.event import BY_TORCH, Event, Evidence, Signature

Judgement = Literal["fault", "doubt", "data"]
_SEVERITY: dict[Judgement, int] = {"data": 0, "doubt": 1, "fault": 2}
_DRAWN = frozenset({"DataLoader", "generator", "_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter"})
_NUMBERS = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b[0-9a-f]{8,}\b|0x[0-9a-f]+|\d+", re.IGNORECASE)
_PUNCTUATION = re.compile(r"[\W_]+")
_INTEGERS = frozenset({"bool", "uint8", "int8", "int16", "int32", "int64"})


def judge(events: Sequence[Event]) -> Judgement:
    """Judge the events of all ranks for one collective."""
    labels = {event.label for event in events}
    if BY_TORCH in labels and len(labels) > 1:
        return "fault"  # gradients are paired with another collective
    named = {event.label: event for event in events if event.word}
    return max((_judge(*pair) for pair in combinations(named.values(), 2)), key=_SEVERITY.__getitem__, default="data")


def _judge(first: Event, second: Event) -> Judgement:
    a, b = first.evidence, second.evidence
    if a is None or b is None:
        return "fault"  # a name that the program gave itself
    while a.key == b.key and a.outer is not None and b.outer is not None:
        a, b = a.outer, b.outer  # what differs is further out
    if _is_own_data(a, b):
        return "data"
    return "fault" if _is_fault(a, b) and not _agrees_on_integers(first.signature) else "doubt"


def _is_fault(a: Evidence, b: Evidence) -> bool:
    shared = {*a.names} & {*b.names}
    if "Module" in (a.source, b.source) and not {a.key, b.key} <= shared:
        return False  # stages of a model have parameters of their own
    in_loop = a.set_by == b.set_by == "loop"
    return bool(shared) and in_loop and {a.use, b.use} <= {"stored", "element"}


def _is_own_data(a: Evidence, b: Evidence) -> bool:
    """Say whether the names are each rank's own by construction, or the same in another spelling."""
    if a.source in _DRAWN or b.source in _DRAWN or b.key in a.aliases or a.use == b.use == "pooled":
        return True
    if {a.use, b.use} <= {"pooled", "pooled element"} and not {*a.names} & {*b.names}:
        return True
    are_held_by_both = {a.key, b.key} <= {*a.names} & {*b.names}
    return not are_held_by_both and _bare(a.key) == _bare(b.key)


def _bare(name: str) -> str:
    """Return the name without numbers, hashes, punctuation and case."""
    return _PUNCTUATION.sub("", _NUMBERS.sub("#", name)).casefold()


def _agrees_on_integers(signature: Signature) -> bool:
    """Say whether the largest or smallest of integers is wanted: of lengths, steps or flags, which ranks agree on.

    Ranks whose labels are judged have the reduce op and the dtypes in common.
    """
    return signature.reduce_op in ("max", "min") and all(dtype in _INTEGERS for dtype in signature.dtypes)
