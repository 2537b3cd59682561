"""The guard accuses no legal program of the label corpus, and finds its faults as docs/guard-labels.md says.

One program for each mechanism by which keys reach a collective; `benchmarks/test_labels.py` runs all programs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import label_corpus as corpus
from ddpstats.testing import RankPool

PROGRAMS = [program for program in corpus.programs() if program.mechanism]


def test_each_mechanism_has_one_program() -> None:
    mechanisms = [(program.is_faulty, program.mechanism) for program in PROGRAMS]
    assert len(set(mechanisms)) == len(mechanisms) >= 60


@pytest.mark.parametrize("mode", corpus.MODES)
def test_mechanisms_end_as_documented_and_no_legal_program_is_accused(
    two_ranks: RankPool, mode: str, tmp_path: Path
) -> None:
    """As they are, and with their labels."""
    published = corpus.published(PROGRAMS)
    ends_by_column = corpus.all_outcomes(two_ranks, PROGRAMS, tmp_path, [mode])
    assert len(ends_by_column) == 2
    for column, ends in ends_by_column.items():
        legal_ends = {program.name: ends[program.name] for program in PROGRAMS if not program.is_faulty}
        assert set(legal_ends.values()) <= {"silent", "warned"}, legal_ends
        assert ends == published[column]


def test_labelled_statement_keeps_its_line() -> None:
    source = "for k in d:\n    reduce(d[k])  # label: f'x{k}'\n    plain()  # a comment\n"
    assert corpus.labelled(source).split("\n") == [
        "for k in d:",
        "    with ddpstats.label(f'x{k}'): reduce(d[k])",
        "    plain()  # a comment",
        "",
    ]
