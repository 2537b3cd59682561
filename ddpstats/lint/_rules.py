"""The rules, each with what it means and what to do about it, and a finding of one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """``meaning`` is one sentence, ``fix`` says what to write in its place."""

    meaning: str
    fix: str


RANK_BRANCH = "rank-branch"
DATA_BRANCH = "data-branch"
EARLY_EXIT = "early-exit"
SWALLOWED_ERROR = "swallowed-error"
DICT_ORDER = "dict-order"
UNUSED_IGNORE = "unused-ignore"

RULES = {
    RANK_BRANCH: Rule(
        "A collective that only some ranks run, because a condition depends on the rank.",
        "Move the collective out of the branch, so that each rank runs it; leave only printing and saving in it.",
    ),
    DATA_BRANCH: Rule(
        "A collective under a condition that depends on this rank's data, clock or file system.",
        "Let the ranks agree on the condition first (ddpstats.any_rank, or an all_reduce of the flag), or run the "
        "collective on each rank, with weight 0 where there is nothing to add.",
    ),
    EARLY_EXIT: Rule(
        "return, break or continue on some ranks only, before a collective that the others run.",
        "Let the ranks agree on leaving (ddpstats.any_rank, or an all_reduce of the flag), and leave on all of them.",
    ),
    SWALLOWED_ERROR: Rule(
        "An exception on one rank skips a collective, and is caught, so that the program goes on.",
        "Catch only around what may fail, and run the collective after it on each rank; or let the error end the run.",
    ),
    DICT_ORDER: Rule(
        "A collective for each entry, in an order that ranks do not share: that of a dict's insertions, or of a set.",
        "Loop over sorted keys that all ranks agree on, or reduce the dict in one call: ddpstats.reduce_stats(stats).",
    ),
    UNUSED_IGNORE: Rule(
        "A comment that suppresses a finding that is not there.",
        "Remove the comment, or correct the rule's name in it.",
    ),
}


@dataclass(frozen=True, order=True)
class Finding:
    """``line`` and ``column`` count from 1, in characters; ``reason`` is a sentence about this place."""

    path: str
    line: int
    column: int
    rule: str
    reason: str
    last_line: int = 0

    @property
    def fix(self) -> str:
        return RULES[self.rule].fix

    def as_text(self) -> str:
        return f"{self.path}:{self.line}:{self.column}: {self.rule}: {self.reason}\n    fix: {self.fix}"

    def as_dict(self) -> dict[str, str | int]:
        return {**vars(self), "fix": self.fix}
