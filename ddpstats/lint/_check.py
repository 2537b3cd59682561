"""One file: read with a bound, parsed, walked. Nothing of it is imported or run."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import warnings
from pathlib import Path

from ddpstats._base.files import open_regular, read_at_most
from ddpstats._base.text import first_line
from ddpstats.lint._collectives import MAY_HOLD, Collectives, TooLongError
from ddpstats.lint._flow import Accusation, FlowWalk, without_completed
from ddpstats.lint._ignores import without_ignored
from ddpstats.lint._program import MatchAsIf, Program
from ddpstats.lint._rules import Finding

_MOST_BYTES = 4 << 20


class UnreadError(Exception):
    """A file could not be checked; its text says why."""


def check_file(path: Path) -> list[Finding]:
    """What is found in one file, in the order of its lines. Raises `UnreadError`."""
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
        warnings.simplefilter("ignore")  # of escape sequences in strings of somebody else
        tree = ast.parse(text)
    return tree if "match " not in text else MatchAsIf().visit(tree)


def check_tree(tree: ast.Module, text: str, path: str) -> list[Finding]:
    """``path`` is what findings name. Raises RecursionError and `TooLongError`."""
    program = Program(tree)
    collectives = Collectives(program)
    accused, found = list[Accusation](), set()
    for body, function, owner in program.scopes():
        accused += FlowWalk(collectives, owner).walk(body, function)
    lines = text.split("\n")
    for one in without_completed(accused):
        line, last = getattr(one.node, "lineno", 1), getattr(one.node, "end_lineno", 1)
        before = lines[line - 1].encode()[: getattr(one.node, "col_offset", 0)].decode()  # ast counts bytes
        found.add(Finding(path, line, len(before) + 1, one.rule, re.sub(r"\s+", " ", one.reason), last))
    return sorted(without_ignored(sorted(found), text, path))
