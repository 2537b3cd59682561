"""The guard accuses no legal program of the label corpus, and finds its faults as docs/guard-labels.md says.

One program for each mechanism by which keys reach a collective; `benchmarks/test_labels.py` runs all programs.
"""

from __future__ import annotations

import pytest

from benchmarks import label_corpus as corpus
from ddpstats.testing import RankPool

PROGRAMS = [program for program in corpus.programs() if program.mechanism]
Ends = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def ends(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """Return how every program ends, in both modes, as it is and with its labels."""
    return corpus.all_outcomes(two_ranks, PROGRAMS, tmp_path_factory.mktemp("labelled"))


def test_each_mechanism_has_one_program() -> None:
    mechanisms = [(program.is_faulty, program.mechanism) for program in PROGRAMS]
    assert len(set(mechanisms)) == len(mechanisms) >= 60


@pytest.mark.parametrize("column", corpus.COLUMNS)
def test_no_legal_program_is_accused(ends: Ends, column: str) -> None:
    legal_ends = {program.name: ends[column][program.name] for program in PROGRAMS if not program.is_faulty}
    assert set(legal_ends.values()) <= {"silent", "warned"}, legal_ends


@pytest.mark.parametrize("column", corpus.COLUMNS)
def test_each_mechanism_ends_as_the_document_says(ends: Ends, column: str) -> None:
    published = corpus.published()[column]
    assert ends[column] == {program.name: published[program.name] for program in PROGRAMS}


def test_a_statement_gets_its_label_and_keeps_its_line() -> None:
    source = "for k in d:\n    reduce(d[k])  # label: f'x{k}'\n    plain()  # a comment\n"
    assert corpus.labelled(source).split("\n") == [
        "for k in d:",
        "    with ddpstats.label(f'x{k}'): reduce(d[k])",
        "    plain()  # a comment",
        "",
    ]
