"""The whole label corpus ends as docs/guard-labels.md says.

No legal program raises; of the faulty ones nine in ten raise or warn, and of those seven in ten raise.
"""

from __future__ import annotations

import pytest

from benchmarks import label_corpus as corpus
from ddpstats.testing import RankPool

PROGRAMS = corpus.programs()
VISIBLE_FAULTS = [program.name for program in PROGRAMS if program.is_faulty and not program.unseen]
LEAST_SHARE_FOUND = 0.9
LEAST_SHARE_RAISED = 0.7
Ends = corpus.Ends


@pytest.fixture(scope="module")
def ends(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """Return how every program ends, in both modes, as it is and with its labels."""
    return corpus.all_outcomes(two_ranks, PROGRAMS, tmp_path_factory.mktemp("labelled"))


def test_programs_are_what_their_folders_say(two_ranks: RankPool) -> None:
    assert not corpus.unsound(two_ranks, PROGRAMS)


def test_there_are_at_least_sixty_programs_of_each_kind() -> None:
    assert sum(program.is_faulty for program in PROGRAMS) >= 60
    assert sum(not program.is_faulty for program in PROGRAMS) >= 60


@pytest.mark.parametrize("column", corpus.COLUMNS)
def test_no_legal_program_is_accused(ends: Ends, column: str) -> None:
    legal_ends = {program.name: ends[column][program.name] for program in PROGRAMS if not program.is_faulty}
    assert set(legal_ends.values()) <= {"silent", "warned"}, legal_ends


@pytest.mark.parametrize("column", corpus.COLUMNS)
def test_visible_faults_raise_or_warn(ends: Ends, column: str) -> None:
    missed = [name for name in VISIBLE_FAULTS if ends[column][name] not in ("raised", "warned")]
    assert len(missed) <= (1 - LEAST_SHARE_FOUND) * len(VISIBLE_FAULTS), missed


@pytest.mark.parametrize("mode", corpus.MODES)
def test_most_visible_faults_raise_by_inference(ends: Ends, mode: str) -> None:
    of_faults = [ends[f"{mode}, inference"][name] for name in VISIBLE_FAULTS]
    assert of_faults.count("raised") >= LEAST_SHARE_RAISED * (len(of_faults) - of_faults.count("silent"))


@pytest.mark.parametrize("mode", corpus.MODES)
def test_visible_faults_raise_where_labels_are_given(ends: Ends, mode: str) -> None:
    missed = [name for name in VISIBLE_FAULTS if ends[f"{mode}, label()"][name] != "raised"]
    assert len(missed) <= (1 - LEAST_SHARE_FOUND) * len(VISIBLE_FAULTS), missed


def test_every_program_ends_as_the_document_says(ends: Ends) -> None:
    assert corpus.published(PROGRAMS) == ends
