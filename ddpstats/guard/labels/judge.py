"""Whether labels that differ between ranks are a fault, a doubt, or each rank's own data. Pure.

That two ranks reached their tensors under different names proves nothing yet: a rank may sum the losses of its own
utterances in a loop over their names. So it is asked what the names are (spelled out in the program, or data), what
stood beside them (the same names in another order, some of the same, others altogether), and above all what the
program does with the result. Strong evidence is a fault; weak evidence is worth one warning; data is nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import combinations
from typing import Literal

from ddpstats.guard.event import BY_TORCH, Event, Evidence

Judgement = Literal["fault", "doubt", "data"]
_SEVERITY: dict[Judgement, int] = {"data": 0, "doubt": 1, "fault": 2}
_DRAWN = frozenset({"DataLoader", "generator", "_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter"})
_INDEX = re.compile(r"\[-?\d+\]")
_RUNS = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b[0-9a-f]{8,}\b|0x[0-9a-f]+|\d+", re.IGNORECASE)
_UNSAID = re.compile(r"[\W_]+")
_INTEGERS = frozenset({"bool", "uint8", "int8", "int16", "int32", "int64"})
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
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
    if not (a.chosen_by and b.chosen_by):  # each looked up one of its own: names in common prove nothing
        return "data" if "keyed" not in (a.fate, b.fate) else "doubt"
    if _agree_on_integers(one) and _agree_on_integers(other):
        return "doubt"
    spelled = bool(a.spelled and b.spelled)
    beside = a.is_beside or b.is_beside
    in_order = spelled and a.chosen_by == b.chosen_by == "loop" and "pooled" not in (a.fate, b.fate)
    if _are_permuted(a, b) and not beside and (matters or in_order):
        return "fault"
    rewritten = _rewritten(a, b)
    if alike or rewritten == "same":
        return "data"
    if _without_numbers(one.label) == _without_numbers(other.label) and not a.spelled == b.spelled == "whole":
        return "data"
    if beside or not matters or rewritten:
        return "doubt"
    are_of_modules = "Module" in (a.source, b.source)
    are_strange = a.key not in b.names and b.key not in a.names  # each to the other rank
    if set(a.names) & set(b.names) and not (are_of_modules and are_strange):
        return "fault" if spelled or matched >= 2 else "doubt"
    if are_of_modules or str(one.site) != str(other.site):
        return "doubt"  # stages of a model, or two lines of the program
    if a.names and b.names:
        # Nothing in common. They can be the same stats only where the program spells out both, and they are names of
        # one kind: `l1_loss` and `snr_loss`, not `control` and `treatment`.
        return "fault" if spelled and _share_a_word(a.key, b.key) else "doubt"
    return "fault" if spelled or matched >= 2 else "doubt"


def _share_a_word(one: str, other: str) -> bool:
    words = [{word.lower() for word in _WORDS.findall(text) if not word.isdigit()} for text in (one, other)]
    return bool(words[0] & words[1])


def _are_permuted(a: Evidence, b: Evidence) -> bool:
    """Whether both ranks hold the same names, the two that met among them."""
    return len(a.names) > 1 and set(a.names) == set(b.names) and {a.key, b.key} <= set(a.names)


def _agree_on_integers(event: Event) -> bool:
    """Whether the largest or smallest of integers is wanted: of lengths, steps or flags, which ranks agree on."""
    told = event.signature
    return told.reduce_op in ("max", "min") and all(kind in _INTEGERS for kind in told.dtypes)


def _rewritten(a: Evidence, b: Evidence) -> Literal["same", "affixed", ""]:
    """Whether one rank's names are the other's, in the same order, however written (``Split.TRAIN``, ``train``): the
    "same" where text was added on one rank only, "affixed" where each has its own before or after its names."""
    here, there = ([_UNSAID.sub("", name).casefold() for name in side.names] for side in (a, b))
    if len(here) != len(there) or len(here) < 2 or a.names == b.names or not _stand_alike(a, b):
        return ""
    (before, cores, after), (before_there, cores_there, after_there) = _stripped(here), _stripped(there)
    if cores != cores_there:
        return ""
    added = before.endswith(before_there) or before_there.endswith(before)
    return "same" if added and (after.startswith(after_there) or after_there.startswith(after)) else "affixed"


def _stand_alike(a: Evidence, b: Evidence) -> bool:
    """Whether the two names stand at the same place on their ranks."""
    return a.key in a.names and b.key in b.names and a.names.index(a.key) == b.names.index(b.key)


def _stripped(names: list[str]) -> tuple[str, list[str], str]:
    """What all names begin with, what is left of them, and what all end with."""
    before = os.path.commonprefix(names)  # noqa: RUF071 character by character is what is meant
    rest = [name[len(before) :] for name in names]
    after = os.path.commonprefix([name[::-1] for name in rest])[::-1]  # noqa: RUF071
    return before, [name[: len(name) - len(after)] for name in rest], after


def _without_numbers(text: str) -> str:
    return _RUNS.sub("#", text)
