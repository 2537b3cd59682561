"""Comments that suppress findings: ``# ddpstats: ignore[rule-name]``, on a line of what is found, or on the one before.

Several rules stand with commas between them. A comment that suppresses nothing is a finding itself.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable, Iterator

from ddpstats.lint._rules import RULES, UNUSED_IGNORE, Finding

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
    """By line: the column, the rules, and whether nothing else stands on the line."""
    if "ddpstats" not in text:
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and (found := _COMMENT.search(token.string)):
            line, column = token.start
            rules = frozenset(rule.strip() for rule in (found[1] or "").split(","))
            yield line, (column + 1, rules, not token.line[:column].strip())
