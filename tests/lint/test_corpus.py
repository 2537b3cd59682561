"""Each program of the corpus is accused of what it says, and of nothing else; the counts are those of docs/lint.md."""

from __future__ import annotations

import pathlib
import re

import pytest

from ddpstats.lint._check import check_tree, parsed
from tests.lint.cases import cases

ROOT = pathlib.Path(__file__).parents[2]
HEAD = "import torch, torch.distributed as dist\ndef step(model, batch, rank, loss, losses, correct, total):\n    "


def counts() -> tuple[str, list[str]]:
    """One line of numbers, and what is not as it should be."""
    wrong, found, faulty, legal, accused = [], 0, 0, 0, 0
    for case in cases():
        rules = {finding.rule for finding in check_tree(parsed(case.text), case.text, case.name)}
        expected = {case.rule} - {None} if not case.missed else set()
        faulty, legal = faulty + (case.rule is not None), legal + (case.rule is None)
        found += case.rule in rules
        accused += case.rule is None and bool(rules)
        if rules != expected:
            wrong.append(
                f"{case.name}: {sorted(rules) or 'nothing'}, expected {sorted(map(str, expected)) or 'nothing'}"
            )
    return (
        f"{found} of {faulty} faulty programs found, {faulty - found} missed; {accused} of {legal} legal ones accused",
        wrong,
    )


@pytest.mark.parametrize(
    "rule", ["rank-branch", "data-branch", "swallowed-error", "dict-order", "aliased-reduce", "mean-of-means"]
)
def test_the_example_of_a_rule_in_the_docs(rule: str) -> None:
    """As it stands there, in one line."""
    row = re.search(rf"^\| `{rule}` \| `([^`]+)`", (ROOT / "docs" / "lint.md").read_text(), flags=re.MULTILINE)
    assert row is not None
    caught = "\n    except Exception: print(rank)" if rule == "swallowed-error" else ""
    text = f"{HEAD}{row[1]}{caught}"
    assert [finding.rule for finding in check_tree(parsed(text), text, "docs")] == [rule]


def test_corpus() -> None:
    line, wrong = counts()
    assert not wrong, "\n".join(wrong)
    assert line in " ".join((ROOT / "docs" / "lint.md").read_text().split()), line


if __name__ == "__main__":
    print(*counts()[1], counts()[0], sep="\n")
