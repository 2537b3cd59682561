"""``ddpstats lint PATH...``: which collectives of a program some ranks may not run, read from its text.

A directory stands for the ``.py`` files in it, without those in hidden directories below it. A file that cannot be read
or is no such file, or has a word of a collective and cannot be parsed, is named, and the others are checked.

Exit status 0 if nothing is found, 1 if something is, 2 if nothing is found and some file could not be checked.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import stat
import sys
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpstats._base.files import open_regular, read_at_most
from ddpstats._base.text import VerbReport, check_writable, count_of, first_line, write_file
from ddpstats.errors import DdpstatsError
from ddpstats.lint.collectives import MAY_HOLD, Collectives, TooLongError
from ddpstats.lint.findings import RULES, Finding, as_sarif, without_ignored
from ddpstats.lint.flow import Accusation, FlowWalk, without_completed
from ddpstats.lint.program import MatchAsIf, Program

EPILOG = """examples:
  ddpstats lint train.py
  ddpstats lint src --sarif lint.sarif

exit status: 0 nothing found, 1 something found, 2 it could not run"""


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

    @property
    def status(self) -> int:
        return 1 if self.findings else 2 if self.unread else 0

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
        log = json.dumps(as_sarif(result.findings, result.unread), indent=1)
        write_file(args.sarif, lambda file: file.write(log))
    return VerbReport(result.status, result.as_text, result.as_dict).show(args.json)


def lint(paths: Sequence[Path], rules: Sequence[str] = tuple(RULES)) -> LintResult:
    """Check files, and the files in directories. Raises `DdpstatsError` for a path without one."""
    files, findings, unread = 0, list[Finding](), list[tuple[str, str]]()
    for path in dict.fromkeys(_files(paths)):
        files += 1
        try:
            findings += check_file(path)
        except UnreadError as error:
            unread.append((str(path), str(error)))
    return LintResult(files, tuple(finding for finding in findings if finding.rule in rules), tuple(unread))


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        try:
            is_dir = stat.S_ISDIR(path.stat().st_mode)
        except (OSError, ValueError) as error:  # also of a name that is too long, or has a null in it
            why = getattr(error, "strerror", None) or first_line(error)
            raise DdpstatsError(f"{path}: {why[:1].lower()}{why[1:]}.", path=str(path)) from None
        files = list(_files_below(path)) if is_dir else [path]
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
        with open_regular(path) as file:
            content = read_at_most(file, _MOST_BYTES)
        if not MAY_HOLD.search(content):
            return []
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        text = io.TextIOWrapper(io.BytesIO(content), encoding).read()
        tree = parsed(text)
    except OSError as error:
        raise UnreadError(error.strerror or type(error).__name__) from None
    except SyntaxError as error:
        where = f"line {error.lineno}: " if error.lineno else ""
        raise UnreadError(f"{where}{error.msg} (read as Python {sys.version_info[0]}.{sys.version_info[1]})") from None
    except (ValueError, tokenize.TokenError) as error:  # also UnicodeDecodeError
        raise UnreadError(first_line(error)) from None
    except (RecursionError, MemoryError):
        raise UnreadError("it is nested too deeply") from None
    try:
        return check_tree(tree, text, str(path))
    except RecursionError:
        raise UnreadError("it is nested too deeply") from None
    except TooLongError:
        raise UnreadError("it takes too long") from None


def parsed(text: str) -> ast.Module:
    """Raises SyntaxError, ValueError, RecursionError or MemoryError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escape sequences in the program's strings
        tree = ast.parse(text)
    return tree if "match " not in text else MatchAsIf().visit(tree)


def check_tree(tree: ast.Module, text: str, path: str) -> list[Finding]:
    """``path`` is what findings name. Raises RecursionError and `TooLongError`."""
    program = Program(tree)
    collectives = Collectives(program)
    accused, findings = list[Accusation](), set()
    for body, function, owner in program.scopes():
        accused += FlowWalk(collectives, owner).walk(body, function)
    lines = text.split("\n")
    for accusation in without_completed(accused):
        line, last = getattr(accusation.node, "lineno", 1), getattr(accusation.node, "end_lineno", 1)
        before = lines[line - 1].encode()[: getattr(accusation.node, "col_offset", 0)].decode()  # ast counts bytes
        findings.add(
            Finding(path, line, len(before) + 1, accusation.rule, re.sub(r"\s+", " ", accusation.reason), last)
        )
    return sorted(without_ignored(sorted(findings), text, path))
