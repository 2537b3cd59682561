"""`ddpstats lint` finds the faults of benchmarks/lint at their lines, and accuses no legal program there.

``# expect: RULE`` ends a line of a faulty program that the rule must name, and ``# missed: RULE`` one that lint should
name and does not. docs/lint.md has the counts; ``python -m tests.lint.test_corpus`` prints them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from ddpstats.lint.lint import check_text

ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "benchmarks" / "lint"
HEAD = "import torch, torch.distributed as dist\ndef step(model, batch, rank, loss, losses, correct, total):\n    "

Lines = set[tuple[int, str]]
"""Numbers of lines, and the rule that names each."""


class Program(NamedTuple):
    name: str
    findings: Lines
    expected: Lines
    missed: Lines


def programs() -> list[Program]:
    return [_read(path) for path in sorted(CORPUS.rglob("*.py"))]


def _read(path: Path) -> Program:
    text = path.read_text()
    findings = {(finding.line, finding.rule) for finding in check_text(text, path.name)}
    expected, missed = (_marked(text, mark) for mark in ("expect", "missed"))
    return Program(path.relative_to(CORPUS).as_posix(), findings, expected, missed)


def _marked(text: str, mark: str) -> Lines:
    lines = enumerate(text.splitlines(), 1)
    return {(number, rule) for number, line in lines for rule in re.findall(rf"# {mark}: ([a-z-]+)$", line)}


def counts(corpus: list[Program]) -> str:
    faulty = [program for program in corpus if program.name.startswith("faulty/")]
    legal = [program for program in corpus if program.name.startswith("legal/")]
    found_count = sum(bool(program.findings) for program in faulty)
    accused = sum(bool(program.findings) for program in legal)
    return (
        f"{found_count} of {len(faulty)} faulty programs found, {len(faulty) - found_count} missed; "
        f"{accused} of {len(legal)} legal ones accused"
    )


@pytest.mark.parametrize("rule", ["rank-branch", "data-branch", "swallowed-error", "dict-order"])
def test_example_of_rule_in_docs_is_found(rule: str) -> None:
    row = re.search(rf"^\| `{rule}` \| `([^`]+)`", (ROOT / "docs" / "lint.md").read_text(), flags=re.MULTILINE)
    assert row is not None
    handler = "\n    except Exception: print(rank)" if rule == "swallowed-error" else ""
    text = f"{HEAD}{row[1]}{handler}"
    assert [finding.rule for finding in check_text(text, "docs")] == [rule]


def test_corpus() -> None:
    corpus = programs()
    wrong = [f"{name}: {findings}, not {expected}" for name, findings, expected, _ in corpus if findings != expected]
    assert not wrong, "\n".join(wrong)
    for name, _, expected, missed in corpus:
        kind, folder, _ = name.split("/")
        assert {rule for _, rule in expected | missed} == ({folder} if kind == "faulty" else set()), name
    line = counts(corpus)
    assert line in " ".join((ROOT / "docs" / "lint.md").read_text().split()), line


if __name__ == "__main__":
    print(counts(programs()))
