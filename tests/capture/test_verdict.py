"""From the ranks' reports to one verdict: pure, no ranks needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddpstats.capture._verdict import CaptureFinding, NonFiniteGradients, Policy, Report, find

FINE = Report(2, (), (), True, None, 7)
NAN = replace(FINE, bad=(NonFiniteGradients(0, 0, (("b", "NaN"), ("a", "Inf"))),), reduced=("a", "b"))
SPREAD = replace(FINE, reduced=("a", "b"))


def found(*reports: Report, skips: int = 0) -> CaptureFinding:
    return find(dict(enumerate(reports)), skips, 3)


def test_reports_travel_as_trees() -> None:
    report = replace(NAN, scale=2.0, exchanged=(0, 1), unseen=("a",))
    assert Report.from_tree(report.to_tree()) == report


def test_nobody_saw_anything() -> None:
    assert found(FINE, FINE).kind == "ok"
    assert found(FINE, FINE).verdict("stop", None).ok
    assert str(found(FINE).verdict("stop", None)) == "step 7: all gradients are finite"


def test_a_culprit_and_those_that_only_got_it_from_the_reduce() -> None:
    finding = found(SPREAD, NAN, SPREAD)
    assert (finding.kind, finding.culprit_ranks, finding.parameters) == ("nonfinite", (1,), ("b", "a"))
    assert finding.lines == (
        "step 7: the gradients of rank 1 are not finite, before any reduction:",
        "  rank 1: Inf and NaN in b, a, first in micro-batch 0 of 2",
        "The gradients of ranks 0, 2 were finite.",
    )


def test_all_ranks_are_culprits() -> None:
    assert found(NAN, NAN).culprit_ranks == (0, 1)
    assert not any("were finite" in line for line in found(NAN, NAN).lines)


def test_what_came_through_the_reduction_of_an_earlier_micro_batch_makes_no_culprit() -> None:
    later = NonFiniteGradients(1, 1, (("a", "NaN"), ("b", "NaN")))
    origin = replace(NAN, bad=(*NAN.bad, later), exchanged=(0, 1))
    infected = replace(SPREAD, bad=(later,), exchanged=(0, 1))
    assert found(infected, origin).culprit_ranks == (1,)
    # Without a reduction in between, each is its own.
    apart = [replace(one, exchanged=(1,)) for one in (infected, origin)]
    assert found(*apart).culprit_ranks == (0, 1)


def test_only_the_reduction_overflowed() -> None:
    everywhere, here = found(SPREAD, SPREAD), found(FINE, SPREAD)
    assert everywhere.kind == here.kind == "overflow"
    assert everywhere.culprit_ranks == here.culprit_ranks == ()
    assert "damaged" not in "".join(everywhere.lines)
    assert "on rank 1: a, b" in here.lines[0]
    assert "damaged" in here.lines[1]


def test_what_nobody_saw_arrive() -> None:
    unseen = replace(SPREAD, unseen=("a", "b"))
    finding = found(unseen, unseen)
    assert (finding.kind, finding.culprit_ranks) == ("nonfinite", ())
    assert "backward() belongs inside of micro_batch()" in finding.lines[1]
    assert found(unseen, SPREAD).kind == "overflow"  # one of them did see it, and it was finite


def test_a_scaler_skips() -> None:
    scaled = replace(NAN, scale=4.0)
    assert found(scaled, skips=2).kind == "scaler_skip"
    last = found(scaled, replace(SPREAD, scale=2.0), skips=3)
    assert (last.kind, last.culprit_ranks) == ("scaler_skips", (0,))
    assert "at scale 4.0 (rank 0), 2.0 (rank 1)" in last.lines[0]
    assert "The ranks' scales differ" in last.lines[1]


@pytest.mark.parametrize(
    ("policy", "stop", "skip"), [("stop", True, True), ("skip", False, True), ("continue", False, False)]
)
def test_policies(policy: Policy, stop: bool, skip: bool) -> None:
    verdict = found(NAN).verdict(policy, Path("b"), ("Bundle: b",))
    assert (verdict.should_stop, verdict.should_skip, verdict.ok) == (stop, skip, False)
    assert verdict.message.splitlines()[-2] == "Bundle: b"
    assert verdict.message.splitlines()[-1].startswith(f"on_nonfinite={policy!r}: every rank")
