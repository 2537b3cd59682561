"""``ddpstats lint PATH...`` reads from a program's text which collectives some ranks may not run.

Of a directory, the ``.py`` files in it are checked, without those in hidden directories below it. A file that cannot
be read, is no such file, or has a word of a collective and cannot be parsed, is named, and the others are checked.

Exit status 0 if nothing is found, 1 if something is, 2 if nothing is found and some file could not be checked.

``# ddpstats: ignore[rule-name]`` suppresses a finding on its line, or on the next line where it has no code before it;
commas separate several rules. A comment that suppresses nothing is a finding itself. Code hosts and editors show SARIF
beside the lines: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import sys
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import decode_source
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ddpstats._base.files import read_regular
from ddpstats._base.text import check_writable, count_of, first_line, print_report, write_file
from ddpstats._base.version import __version__
from ddpstats.errors import DdpstatsError
from ddpstats.lint.collectives import MAY_HOLD, Collectives
from ddpstats.lint.flow import DICT_ORDER, EARLY_EXIT, SWALLOWED_ERROR, Accusation, FlowWalk, drop_completed
from ddpstats.lint.origins import DATA_BRANCH, RANK_BRANCH
from ddpstats.lint.program import Program

EPILOG = """examples:
  ddpstats lint train.py
  ddpstats lint src --sarif lint.sarif"""


UNUSED_IGNORE = "unused-ignore"


RULES = {  # with what to write in its place
    RANK_BRANCH: "Move the collective out of the branch, so that each rank runs it; leave printing and saving in it.",
    DATA_BRANCH: "Let the ranks agree on the condition first (ddpstats.any_rank, or an all_reduce of the flag), or run "
    "the collective on each rank, with weight 0 where there is nothing to add.",
    EARLY_EXIT: "Let the ranks agree on leaving (ddpstats.any_rank, or an all_reduce of the flag), and leave together.",
    SWALLOWED_ERROR: "Catch only around what may fail, and run the collective after it on each rank, or let the error "
    "end the run.",
    DICT_ORDER: "Loop over sorted keys that all ranks agree on, or reduce the dict at once, by ddpstats.reduce_stats.",
    UNUSED_IGNORE: "Remove the comment, or correct the rule's name in it.",
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

    def as_text(self) -> str:
        return f"{self.path}:{self.line}:{self.column}: {self.rule}: {self.reason}\n    fix: {RULES[self.rule]}"

    def as_dict(self) -> dict[str, str | int]:
        return {**vars(self), "fix": RULES[self.rule]}


_COMMENT = re.compile(r"#\s*ddpstats:\s*ignore(?:\[([^\]]*)\])?")


def _drop_ignored(findings: Iterable[Finding], text: str, path: str) -> Iterator[Finding]:
    """Yield the findings that no comment of the file suppresses, and the comments that suppress none."""
    comments = dict(_comments(text, path)) if "ddpstats" in text else {}
    used = set[tuple[int, str]]()
    for finding in findings:
        covering = comments.keys() & {(line, finding.rule) for line in range(finding.line, finding.last_line + 1)}
        used |= covering
        if not covering:
            yield finding
    yield from (comment for key, comment in comments.items() if key not in used)


def _comments(text: str, path: str) -> Iterator[tuple[tuple[int, str], Finding]]:
    """Yield a line and a rule that a comment suppresses there, with what it is where it suppresses nothing."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and (match := _COMMENT.search(token.string)):
            line, column = token.start
            covered = line if token.line[:column].strip() else line + 1  # that of a comment that is alone
            for rule in map(str.strip, (match[1] or "").split(",")):
                why = "there is no such finding here" if rule in RULES else f"the rules are {', '.join(RULES)}"
                yield (covered, rule), Finding(path, line, column + 1, UNUSED_IGNORE, f"ignore[{rule}]: {why}.")


def as_sarif(findings: Iterable[Finding], unread: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return one SARIF run. A file that could not be read is a notification, and the run is not complete then."""
    notes = [{"level": "error", "message": {"text": why}, "locations": _locations(path)} for path, why in unread]
    rules = [{"id": name, "shortDescription": {"text": name}, "help": {"text": fix}} for name, fix in RULES.items()]
    results = [
        {
            "ruleId": finding.rule,
            "message": {"text": f"{finding.reason} {RULES[finding.rule]}"},
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
    return {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}


def _locations(path: str, **where: Any) -> list[dict[str, Any]]:
    """Return SARIF's list of one location. The path stays relative: code hosts want it so."""
    shown = Path(path)
    uri = shown.as_uri() if shown.is_absolute() else quote(os.fsencode(shown))
    return [{"physicalLocation": {"artifactLocation": {"uri": uri}, **where}}]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", metavar="PATH", nargs="+", type=Path, help="a Python file, or a directory of them")
    parser.add_argument("--rule", action="append", choices=list(RULES), help="look for this only; may be repeated")
    parser.add_argument("--sarif", type=Path, metavar="FILE", help="write the findings as SARIF 2.1.0 too")


@dataclass(frozen=True)
class LintResult:
    """``unread`` has the path and the reason of each file that could not be checked."""

    files: int
    findings: tuple[Finding, ...]
    unread: tuple[tuple[str, str], ...]

    def as_text(self) -> str:
        lines = [finding.as_text() for finding in self.findings]
        lines += [f"{path}: not checked: {why}" for path, why in self.unread]
        count = count_of(len(self.findings), "findings") if self.findings else "nothing found"
        return "\n".join([*lines, f"{count} in {count_of(self.files, 'files')}"])

    def as_dict(self) -> dict[str, Any]:
        return {
            "files": self.files,
            "findings": [finding.as_dict() for finding in self.findings],
            "unread": [{"path": path, "why": why} for path, why in self.unread],
        }


def run(args: argparse.Namespace) -> int:
    """Raises `DdpstatsError` as `lint` does, and for an output that cannot be written."""
    check_writable(args.sarif)
    result = lint(args.paths, args.rule or list(RULES))
    if args.sarif is not None:
        write_file(args.sarif, lambda file: json.dump(as_sarif(result.findings, result.unread), file, indent=1))
    status = 1 if result.findings else 2 if result.unread else 0
    return print_report(status, args.json, result.as_text, result.as_dict)


def lint(paths: Sequence[Path], rules: Sequence[str] = tuple(RULES)) -> LintResult:
    """Check files, and the files in directories. Raises `DdpstatsError` for a path without one."""
    files, findings, unread = dict.fromkeys(_files(paths)), list[Finding](), list[tuple[str, str]]()
    for path in files:
        try:
            findings += check_file(path)
        except UnreadError as error:
            unread.append((str(path), str(error)))
    return LintResult(len(files), tuple(finding for finding in findings if finding.rule in rules), tuple(unread))


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if not os.path.exists(path):
            raise DdpstatsError(f"{path}: it does not exist, or cannot be reached.", path=str(path))
        files = list(_files_below(path)) if path.is_dir() else [path]
        if not files:
            raise DdpstatsError(f"{path}: there is no Python file in this directory.", path=str(path))
        yield from files


def _files_below(path: Path) -> Iterator[Path]:
    for directory, inside, names in os.walk(path):
        inside[:] = sorted(name for name in inside if not name.startswith("."))
        files = (Path(directory, name) for name in sorted(names) if name.endswith(".py"))
        yield from (file for file in files if file.is_file())


_MOST_BYTES = 4 << 20


class UnreadError(Exception):
    """A file could not be checked; its text says why."""


def check_file(path: Path) -> list[Finding]:
    """Return the findings in one file, in the order of its lines. Raises `UnreadError`."""
    if path.suffix != ".py":
        raise UnreadError("its name does not end in .py")
    try:
        content = read_regular(path, _MOST_BYTES)
        if not MAY_HOLD.search(content):
            return []
        return check_text(decode_source(content), str(path))
    except OSError as error:
        raise UnreadError(error.strerror or type(error).__name__) from None
    except SyntaxError as error:
        where = f"line {error.lineno}: " if error.lineno else ""
        raise UnreadError(f"{where}{error.msg} (read as Python {sys.version_info[0]}.{sys.version_info[1]})") from None
    except (ValueError, tokenize.TokenError) as error:  # also UnicodeDecodeError
        raise UnreadError(first_line(error)) from None
    except (RecursionError, MemoryError):
        raise UnreadError("it is nested too deeply") from None


def check_text(text: str, path: str) -> list[Finding]:
    """Check a program. Findings name ``path``. Raises what `ast.parse` raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escape sequences in the program's strings
        program = Program(ast.parse(text))
    collectives = Collectives(program)
    accused, findings = list[Accusation](), set()
    for body, function in program.scopes():
        accused += FlowWalk(collectives, body, function).accusations
    lines = text.split("\n")
    for accusation in drop_completed(accused):
        node = accusation.node
        before = lines[node.lineno - 1].encode()[: node.col_offset].decode()  # ast counts bytes
        last = node.end_lineno or node.lineno
        findings.add(Finding(path, node.lineno, len(before) + 1, accusation.rule, accusation.reason, last))
    return sorted(_drop_ignored(sorted(findings), text, path))
