"""The rules, a finding of one, the comments that suppress it, and findings as SARIF 2.1.0.

``# ddpstats: ignore[rule-name]`` stands on a line of what is found, or alone on the line before; several rules have
commas between them. A comment that suppresses nothing is a finding itself. SARIF is what code hosts and editors show
beside the lines: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

from __future__ import annotations

import io
import os
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ddpstats._base.version import __version__


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
    """``line`` and ``column`` count from 1, in characters; ``reason`` is a sentence about this line."""

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


_COMMENT = re.compile(r"#\s*ddpstats:\s*ignore(?:\[([^\]]*)\])?")


def without_ignored(findings: Iterable[Finding], text: str, path: str) -> Iterator[Finding]:
    """The findings that no comment of the file suppresses, and the comments that suppress none."""
    wanted = dict(_ignores(text))
    used: set[tuple[int, str]] = set()
    for finding in findings:
        line, column, rules, own_line = 0, 0, frozenset[str](), False
        for line in (*range(finding.line, finding.last_line + 1), finding.line - 1):
            column, rules, own_line = wanted.get(line, (0, frozenset(), False))
            if finding.rule in rules and (own_line or line >= finding.line):
                used.add((line, finding.rule))
                break
        else:
            yield finding
    for line, (column, rules, _) in wanted.items():
        for rule in sorted(rules):
            if (line, rule) not in used:
                why = "there is no such finding here" if rule in RULES else f"the rules are {', '.join(RULES)}"
                yield Finding(path, line, column, UNUSED_IGNORE, f"ignore[{rule}]: {why}.")


def _ignores(text: str) -> Iterator[tuple[int, tuple[int, frozenset[str], bool]]]:
    """Yield each line with its column, its rules, and whether the comment is alone on the line."""
    if "ddpstats" not in text:
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and (match := _COMMENT.search(token.string)):
            line, column = token.start
            rules = frozenset(rule.strip() for rule in (match[1] or "").split(","))
            yield line, (column + 1, rules, not token.line[:column].strip())


_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def as_sarif(findings: Iterable[Finding], unread: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return one SARIF run. A file that could not be read is a notification, and the run is not complete then."""
    notes = [{"level": "error", "message": {"text": why}, "locations": _locations(path)} for path, why in unread]
    rules = [
        {"id": name, "shortDescription": {"text": rule.meaning}, "help": {"text": rule.fix}}
        for name, rule in RULES.items()
    ]
    results = [
        {
            "ruleId": finding.rule,
            "ruleIndex": list(RULES).index(finding.rule),
            "level": "warning",
            "message": {"text": f"{finding.reason} {finding.fix}"},
            "locations": _locations(finding.path, region={"startLine": finding.line, "startColumn": finding.column}),
        }
        for finding in findings
    ]
    run = {
        "tool": {"driver": {"name": "ddpstats", "version": __version__, "rules": rules}},
        "columnKind": "unicodeCodePoints",
        "invocations": [{"executionSuccessful": not notes, "toolExecutionNotifications": notes}],
        "results": results,
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _locations(path: str, **where: Any) -> list[dict[str, Any]]:
    """Return SARIF's list of one location. The path stays relative: code hosts want it so."""
    shown = Path(path)
    uri = shown.as_uri() if shown.is_absolute() else quote(os.fsencode(shown))
    return [{"physicalLocation": {"artifactLocation": {"uri": uri}, **where}}]
