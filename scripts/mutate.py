"""How many small faults the tests find: one is put into a copy of the package at a time, and its room's tests are run.

    python scripts/mutate.py --count 200 --seed 1 > mutants.txt
    python scripts/mutate.py --room _ranks --count 20 --seed 2

The faults are drawn by chance, as many from each room: a comparison, a condition, an arithmetic sign, a number or a
truth value changed, a call or a returned value left out. The tests are those of the room (`tests/` mirrors it), those
of the module first; the first that fails ends them. A line for each: killed; survived; or unfinished, where its tests
took longer than `LIMIT_SEC` and none had failed (each test has a limit of its own, so that one that hangs fails). What
survives is a gap in the tests, or no fault at all (a limit one larger, a debug line). The same seed draws the same
faults from the same source.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SEC = 600.0
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
}


class Mutant(NamedTuple):
    """``before`` stands in ``path`` from character ``start`` on; ``after`` takes its place."""

    path: Path
    line: int
    start: int
    before: str
    after: str

    @property
    def room(self) -> str:
        return self.path.parts[0] if len(self.path.parts) > 1 else ""

    def __str__(self) -> str:
        before, after = (" ".join(text.split())[:60] for text in (self.before, self.after))
        return f"{self.path}:{self.line}: {before!r} -> {after!r}"


def mutants_of(path: Path, package: Path) -> Iterator[Mutant]:
    """All faults that can be put into one module."""
    source = (package / path).read_text()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in _executable(ast.parse(source)):
        for after in _changed(node):
            before = ast.get_source_segment(source, node)
            if before is not None and before.isascii():
                yield Mutant(path, node.lineno, starts[node.lineno - 1] + node.col_offset, before, after)


def _executable(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Without annotations, and what only a type checker reads."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.expr | ast.stmt):
        yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _executable(child)


def _changed(node: ast.AST) -> Iterator[str]:
    """The source of ``node`` with a fault."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPPED:
        swapped = SWAPPED[type(node.ops[0])]()
        yield f"({ast.unparse(ast.Compare(node.left, [swapped], node.comparators))})"  # type: ignore[list-item]
    elif isinstance(node, ast.BoolOp):
        yield f"({ast.unparse(ast.BoolOp(SWAPPED[type(node.op)](), node.values))})"  # type: ignore[arg-type]
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPPED and not _is_text(node):
        yield f"({ast.unparse(ast.BinOp(node.left, SWAPPED[type(node.op)](), node.right))})"  # type: ignore[arg-type]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield str(node.value + 1)
    elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield "return None"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "pass"


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(part, ast.JoinedStr | ast.Constant | ast.List | ast.Tuple) for part in (node.left, node.right)
    )


def drawn(package: Path, rooms: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """``count`` of them, as many of each room as of another, as far as there are."""
    by_room: defaultdict[str, list[Mutant]] = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        for mutant in mutants_of(path.relative_to(package), package):
            if not rooms or mutant.room in rooms:
                by_room[mutant.room].append(mutant)
    chance = random.Random(seed)
    for found in by_room.values():
        chance.shuffle(found)
    chosen: list[Mutant] = []
    while len(chosen) < count and any(by_room.values()):
        chosen += [found.pop() for _, found in sorted(by_room.items()) if found]
    return chosen[:count]


def tests_of(mutant: Mutant, tests: Path) -> list[str]:
    """Those of the module first, then the others of its room."""
    room = tests / mutant.room.lstrip("_") if mutant.room else tests
    name = mutant.path.stem.lstrip("_")
    files = sorted(room.glob("test_*.py"), key=lambda file: (name not in file.stem, file.name))
    return [str(file.relative_to(tests.parent)) for file in files]


def outcome_of(mutant: Mutant, scratch: Path) -> tuple[str, float]:
    """ "killed", "survived" or "unfinished", and after how many seconds: what the tests say of the mutant."""
    tree, began = Path(tempfile.mkdtemp(dir=scratch)), time.monotonic()
    try:
        for part in ("ddpstats", "tests", "scripts", "examples", "docs", "setup.cfg", "README.md", "CONTRIBUTING.md"):
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy2
            copy(ROOT / part, tree / part)
        file = tree / "ddpstats" / mutant.path
        text = file.read_text()
        end = mutant.start + len(mutant.before)
        assert text[mutant.start : end] == mutant.before, mutant
        file.write_text(text[: mutant.start] + mutant.after + text[end:])
        return tested(tree, tests_of(mutant, tree / "tests")), time.monotonic() - began
    finally:
        shutil.rmtree(tree, ignore_errors=True)


def tested(tree: Path, files: Sequence[str]) -> str:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *files]
    process = subprocess.Popen(
        command,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return "survived" if process.wait(LIMIT_SEC) == 0 else "killed"
    except subprocess.TimeoutExpired:
        return "unfinished"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="how many faults (default: 200)")
    parser.add_argument("--seed", type=int, default=1, help="what is drawn (default: 1)")
    parser.add_argument(
        "--room", action="append", default=[], help="a folder of ddpstats/, may be repeated; all of them"
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many are tested at the same time (default: 1)")
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    options = parser.parse_args()
    mutants = drawn(ROOT / "ddpstats", options.room, options.count, options.seed)
    outcomes: Counter[str] = Counter()
    if options.list:
        print(*mutants, sep="\n")
        return
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as at_work:
        tried = at_work.map(outcome_of, mutants, repeat(Path(scratch)))
        for mutant, (outcome, seconds) in zip(mutants, tried, strict=True):
            outcomes[outcome] += 1
            print(f"{outcome:10} {seconds:5.0f} s  {mutant}", flush=True)
    print(f"seed {options.seed}: {dict(outcomes)} of {len(mutants)}")


if __name__ == "__main__":
    main()
