"""The corpus of small programs that labels are measured on: read it, run it on ranks, and write the table of it.

A program is a file in `benchmarks/labels/faulty` or `benchmarks/labels/legal`. Its docstring says what happens, and
has lines that begin with:

- ``Style:`` where this is seen, the family before the first colon;
- ``Mechanism:`` how its keys reach the collective, in one program of each mechanism: those are run by each test run,
  the others at night;
- ``Cannot be seen:`` why nothing in the program's text says the key, where that is so.

Its ``main()`` runs on every rank of two. A faulty one returns ``(held, reported)``: what this rank held and what it
reports, by name. It is a fault where a number reported on some rank is neither the sum nor the mean over the ranks
that held that name. A legal program that returns two dicts is held to the same.

A statement on one line that ends with ``# label: EXPR`` is where a user would set a label; `labelled` wraps it.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import dataclasses
import datetime
import importlib.util
import io
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import ddpstats
from ddpstats.guard import collective_guard
from ddpstats.testing import RankPool
from tests.training import logged

CORPUS = Path(__file__).parent / "labels"
DOCUMENT = Path(__file__).parents[1] / "docs" / "guard-labels.md"
MODES = ("strict", "step")
WAYS = ("inference", "label()")
COLUMNS = tuple(f"{mode}, {way}" for way in WAYS for mode in MODES)

_LABEL = re.compile(r"^( *)(\S.*?)  # label: (.+)$")
_TIMEOUT_SEC = 20.0
_RUN_SEC = 120.0


@dataclasses.dataclass(frozen=True)
class Program:
    """One file of the corpus. ``unseen`` is the reason why no text says the key, or empty."""

    path: Path
    summary: str
    style: str
    mechanism: str
    unseen: str

    @property
    def name(self) -> str:
        """Return the name that the table has: ``faulty/espnet_stats``."""
        return f"{self.path.parent.name}/{self.path.stem}"

    @property
    def is_faulty(self) -> bool:
        return self.path.parent.name == "faulty"

    @property
    def family(self) -> str:
        return self.style.split(":")[0]


def programs() -> list[Program]:
    """Return all programs, faulty ones first, by name."""
    return [_read(path) for kind in ("faulty", "legal") for path in sorted((CORPUS / kind).glob("*.py"))]


def _read(path: Path) -> Program:
    lines = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()
    fields = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
    return Program(path, lines[0], fields["Style"], fields.get("Mechanism", ""), fields.get("Cannot be seen", ""))


def labelled(source: str) -> str:
    """Return the program with the labels that its comments give. Lines keep their numbers."""
    return "\n".join(_LABEL.sub(r"\1with ddpstats.label(\3): \2", line) for line in source.split("\n"))


# -- on the ranks -----------------------------------------------------------------------------------------------------


def play(paths: Sequence[str], mode: str | None) -> list[tuple[str, Any]]:
    """Run programs one after the other, each under its own guard. Return how each ended on this rank, and its messages.

    Without a mode there is no guard, and in place of messages stands what ``main`` returned, in plain numbers.
    """
    return [_play(path, mode) for path in paths]


def _play(path: str, mode: Any) -> tuple[str, Any]:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            if mode is None:
                return "silent", _plain(_load(path).main())
            messages = _guarded(path, mode)
    except ddpstats.CollectiveMismatch as error:
        return "raised", str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}", None
    return ("warned" if messages else "silent"), messages


def _guarded(path: str, mode: Any) -> list[str]:
    """Return the guard's warnings until everything was compared. Those at its own end are not about this program."""
    with collective_guard(mode, timeout_sec=_TIMEOUT_SEC) as guard, logged() as messages:
        _load(path).main()
        guard.step()
    return messages


def _load(path: str) -> Any:
    """Return the program as a fresh module that knows ddpstats."""
    spec = importlib.util.spec_from_file_location(f"corpus_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vars(module)["ddpstats"] = ddpstats
    spec.loader.exec_module(module)
    return module


def _plain(value: Any) -> Any:
    """Return the two dicts of a program as flat ones of plain numbers."""
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(tree, Mapping) for tree in value):
        return tuple(dict(_flat(tree)) for tree in value)
    return None


def _flat(tree: Any, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _flat(value, f"{path}/{key}")
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from _flat(value, f"{path}/{number}")
    else:
        yield path, float(tree)


# -- in the parent ----------------------------------------------------------------------------------------------------


def outcomes(pool: RankPool, paths: Sequence[Path], mode: str) -> list[str]:
    """Return how each program ends in a mode: raised, warned, silent, or another error."""
    by_rank = pool.run(play, [str(path) for path in paths], mode, timeout_sec=_RUN_SEC).values()
    return [_together([end for end, _ in ends]) for ends in zip(*by_rank, strict=True)]


def _together(ends: list[str]) -> str:
    if len(set(ends)) == 1:
        return ends[0]
    return "warned" if set(ends) == {"warned", "silent"} else " / ".join(ends)


def all_outcomes(
    pool: RankPool, chosen: Sequence[Program], directory: Path, modes: Sequence[str] = MODES
) -> dict[str, dict[str, str]]:
    """Return, for each column of these modes, how each program ends.

    Copies with labels are made in the directory; a program without labels ends as it does by inference.
    """
    names = [program.name for program in chosen]
    copies = {program.name: copy for program in chosen if (copy := _labelled_copy(program, directory))}
    ends: dict[str, dict[str, str]] = {}
    for mode in modes:
        inferred = dict(zip(names, outcomes(pool, [program.path for program in chosen], mode), strict=True))
        with_labels = dict(zip(copies, outcomes(pool, list(copies.values()), mode), strict=True))
        ends |= {f"{mode}, inference": inferred, f"{mode}, label()": inferred | with_labels}
    return ends


def _labelled_copy(program: Program, directory: Path) -> Path | None:
    before = program.path.read_text()
    after = labelled(before)
    if after == before:
        return None
    target = directory / program.path.parent.name / program.path.name
    target.parent.mkdir(exist_ok=True, parents=True)
    target.write_text(after)
    return target


def unsound(pool: RankPool, chosen: Sequence[Program]) -> list[str]:
    """Return the programs that are not what their folder says, without a guard.

    Each has to end on all ranks, and to report wrong numbers if, and only if, it is faulty.
    """
    by_rank = pool.run(play, [str(program.path) for program in chosen], None, timeout_sec=_RUN_SEC).values()
    faults = []
    for number, program in enumerate(chosen):
        ends = [rank[number] for rank in by_rank]
        if {end for end, _ in ends} != {"silent"}:
            faults.append(f"{program.name}: {[end for end, _ in ends]}")
        elif bool(wrong := _wrong([returned for _, returned in ends])) != program.is_faulty:
            faults.append(f"{program.name}: wrong numbers: {wrong}")
    return faults


def _wrong(returned: list[Any]) -> list[str]:
    """Return the names under which a rank reports neither the sum nor the mean of what ranks held."""
    pairs = [pair for pair in returned if pair is not None]
    held: dict[str, list[float]] = collections.defaultdict(list)
    for of_rank, _ in pairs:
        for name, value in of_rank.items():
            held[name].append(value)
    return sorted(
        {
            name
            for _, reported in pairs
            for name, value in reported.items()
            if name in held and not any(abs(value - right) < 1e-4 for right in _right(held[name], len(returned)))
        }
    )


def _right(values: list[float], world_size: int) -> list[float]:
    total = sum(values)
    return [total, total / len(values), total / world_size]


# -- the table --------------------------------------------------------------------------------------------------------

_ROW = re.compile(r"^\| `((?:faulty|legal)/\w+)` \|(.*)\|$")
Ends = dict[str, dict[str, str]]


def published(chosen: Sequence[Program]) -> Ends:
    """Return how the documentation says that these programs end, in the form of `all_outcomes`.

    The table has a row for each program that does not end in the best way everywhere.
    """
    rows = (_ROW.match(line) for line in DOCUMENT.read_text().splitlines())
    cells = {row[1]: [cell.strip(" *") for cell in row[2].split("|")] for row in rows if row}
    return {
        column: {program.name: cells.get(program.name, [_best_end(program)] * 4)[index] for program in chosen}
        for index, column in enumerate(COLUMNS)
    }


def table(chosen: Sequence[Program], ends: Ends) -> list[str]:
    """Return the measured part of the documentation, in Markdown."""
    today, python = datetime.date.today(), platform.python_version()
    return [
        f"Measured on {today} with torch {torch.__version__.partition('+')[0]} and Python {python}.",
        "",
        *_sums(chosen, ends),
        "",
        "Each faulty program that does not raise in some column, and each legal one that is not silent in some column;",
        "in bold where the guard should have said something:",
        "",
        *_exceptions(chosen, ends),
    ]


def _sums(chosen: Sequence[Program], ends: Ends) -> list[str]:
    faulty = [program for program in chosen if program.is_faulty and not program.unseen]
    unseen = [program for program in chosen if program.is_faulty and program.unseen]
    legal = [program for program in chosen if not program.is_faulty]
    ways = "raised / warned / silent"
    lines = [
        f"| {len(chosen)} programs | {len(faulty)} faulty: {ways} | {len(unseen)} without a key in the text: {ways} | "
        f"{len(legal)} legal: {ways} |",
        "|---|---|---|---|",
    ]
    for column in COLUMNS:
        cells = [_counts(of_kind, ends[column]) for of_kind in (faulty, unseen, legal)]
        lines.append(f"| {column} | {' | '.join(cells)} |")
    return lines


def _counts(chosen: Sequence[Program], ends: dict[str, str]) -> str:
    counts = collections.Counter(ends[program.name] for program in chosen)
    return " / ".join(str(counts[end]) for end in ("raised", "warned", "silent"))


def _exceptions(chosen: Sequence[Program], ends: Ends) -> list[str]:
    lines = [f"| program | {' | '.join(COLUMNS)} | what it does |", "|---|" + "---|" * (len(COLUMNS) + 1)]
    for program in chosen:
        of_program = [ends[column][program.name] for column in COLUMNS]
        if set(of_program) != {_best_end(program)}:
            cells = [*(_cell(program, end) for end in of_program), program.style]
            lines.append(f"| `{program.name}` | {' | '.join(cells)} |")
    return lines


def _best_end(program: Program) -> str:
    return "raised" if program.is_faulty else "silent"


def _cell(program: Program, end: str) -> str:
    """Return the cell, in bold where the program ends as it should not."""
    allowed = {"warned", _best_end(program), "silent" if program.unseen else "warned"}
    return end if end in allowed else f"**{end}**"
