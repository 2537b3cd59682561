"""Findings as SARIF 2.1.0, which code hosts and editors show beside the lines.

https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ddpstats._base.version import __version__
from ddpstats.lint._rules import RULES, Finding

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def as_sarif(findings: Iterable[Finding], unread: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """One run. A file that could not be read is a notification of it, and the run not a complete one."""
    notes = [
        {
            "level": "error",
            "message": {"text": why},
            "locations": [{"physicalLocation": {"artifactLocation": _uri(path)}}],
        }
        for path, why in unread
    ]
    rules = [
        {"id": name, "shortDescription": {"text": rule.meaning}, "help": {"text": rule.fix}}
        for name, rule in RULES.items()
    ]
    run = {
        "tool": {"driver": {"name": "ddpstats", "version": __version__, "rules": rules}},
        "columnKind": "unicodeCodePoints",
        "invocations": [{"executionSuccessful": not notes, "toolExecutionNotifications": notes}],
        "results": [_result(finding) for finding in findings],
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _result(finding: Finding) -> dict[str, Any]:
    place = {
        "artifactLocation": _uri(finding.path),
        "region": {"startLine": finding.line, "startColumn": finding.column},
    }
    return {
        "ruleId": finding.rule,
        "ruleIndex": list(RULES).index(finding.rule),
        "level": "warning",
        "message": {"text": f"{finding.reason} {finding.fix}"},
        "locations": [{"physicalLocation": place}],
    }


def _uri(path: str) -> dict[str, str]:
    """Relative where the path is: code hosts want it relative to the repository."""
    shown = Path(path)
    return {"uri": shown.as_uri() if shown.is_absolute() else quote(os.fsencode(shown))}
