"""The corpus of small programs on real ranks: no legal one accused, the faults found, and the published table true."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpstats.testing import RankPool
from tests.guard import corpus_runs as corpus

_DOCUMENT = Path(__file__).parents[2] / "docs" / "guard-labels.md"
_PROGRAMS = corpus.programs()
_LEAST = 0.9

Ends = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def ends(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """How every program ends, in both modes, as it is and with its labels."""
    return corpus.all_outcomes(two_ranks, _PROGRAMS, tmp_path_factory.mktemp("labelled"))


def test_the_programs_are_what_their_folders_say(two_ranks: RankPool) -> None:
    assert not corpus.unsound(two_ranks, _PROGRAMS)


def test_there_are_at_least_sixty_of_each_kind() -> None:
    assert sum(program.is_faulty for program in _PROGRAMS) >= 60
    assert sum(not program.is_faulty for program in _PROGRAMS) >= 60


@pytest.mark.parametrize("column", corpus.COLUMNS)
def test_every_program_ends_in_one_of_three_ways(ends: Ends, column: str) -> None:
    assert set(ends[column].values()) <= {"raised", "warned", "silent"}


@pytest.mark.parametrize("column", corpus.COLUMNS)
def test_no_legal_program_is_accused(ends: Ends, column: str) -> None:
    assert not [one.name for one in _PROGRAMS if not one.is_faulty and ends[column][one.name] == "raised"]


@pytest.mark.parametrize("column", corpus.COLUMNS)
def test_faults_that_leave_a_trace_are_told(ends: Ends, column: str) -> None:
    seen = [one.name for one in _PROGRAMS if one.is_faulty and not one.unseen]
    missed = [name for name in seen if ends[column][name] == "silent"]
    assert len(missed) <= (1 - _LEAST) * len(seen), missed


@pytest.mark.parametrize("mode", corpus.MODES)
def test_with_labels_they_are_raised(ends: Ends, mode: str) -> None:
    column = f"{mode}, label()"
    seen = [one.name for one in _PROGRAMS if one.is_faulty and not one.unseen]
    missed = [name for name in seen if ends[column][name] != "raised"]
    assert len(missed) <= (1 - _LEAST) * len(seen), missed


def test_the_table_says_what_was_measured(ends: Ends) -> None:
    assert corpus.told(_DOCUMENT.read_text()) == ends


def test_a_statement_gets_its_label_and_keeps_its_line() -> None:
    source = "for k in d:\n    reduce(d[k])  # label: f'x{k}'\n    plain()  # a comment\n"
    assert corpus.labelled(source).split("\n") == [
        "for k in d:",
        "    with ddpstats.label(f'x{k}'): reduce(d[k])",
        "    plain()  # a comment",
        "",
    ]
