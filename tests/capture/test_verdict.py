"""All ranks come to one verdict from their reports: who is a culprit where an earlier reduction shared a NaN.

Verdicts that real ranks come to are in `test_capture` and `test_backward_passes`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddpstats.capture._verdict import CaptureFinding, NonFiniteGradients, Policy, Report, find

FINE = Report(2, (), (), True, None, 7)
NAN = replace(FINE, bad=(NonFiniteGradients(0, 0, (("b", "NaN"), ("a", "Inf"))),), reduced=("a", "b"))
SPREAD = replace(FINE, reduced=("a", "b"))


def finding_of(*reports: Report, skips: int = 0) -> CaptureFinding:
    return find(dict(enumerate(reports)), skips, 3)


def test_a_nan_from_the_reduction_of_an_earlier_micro_batch_makes_no_culprit() -> None:
    later = NonFiniteGradients(1, 1, (("a", "NaN"), ("b", "NaN")))
    origin = replace(NAN, bad=(*NAN.bad, later), exchanged=(0, 1))
    infected = replace(SPREAD, bad=(later,), exchanged=(0, 1))
    assert finding_of(infected, origin).culprit_ranks == (1,)
    # Without a reduction in between, each has its own.
    separate = [replace(report, exchanged=(1,)) for report in (infected, origin)]
    assert finding_of(*separate).culprit_ranks == (0, 1)


def test_a_result_that_differs_by_rank_is_an_overflow_with_a_note() -> None:
    everywhere, on_one = finding_of(SPREAD, SPREAD), finding_of(FINE, SPREAD)
    assert everywhere.kind == on_one.kind == "overflow"
    assert everywhere.culprit_ranks == on_one.culprit_ranks == ()
    assert "damaged" not in "".join(everywhere.lines)
    assert "on rank 1: a, b" in on_one.lines[0]
    assert "damaged" in on_one.lines[1]
    # A gradient that one rank of two did not see arrive was finite on the other.
    assert finding_of(replace(SPREAD, unseen=("a", "b")), SPREAD).kind == "overflow"


def test_scales_that_differ_by_rank_are_a_note() -> None:
    finding = finding_of(replace(NAN, scale=4.0), replace(SPREAD, scale=2.0), skips=3)
    assert (finding.kind, finding.culprit_ranks) == ("scaler_skips", (0,))
    assert "at scale 4.0 (rank 0), 2.0 (rank 1)" in finding.lines[0]
    assert "The ranks' scales differ" in finding.lines[1]


@pytest.mark.parametrize(
    ("policy", "stop", "skip"), [("stop", True, True), ("skip", False, True), ("continue", False, False)]
)
def test_the_policy_decides_whether_to_stop_or_skip(policy: Policy, stop: bool, skip: bool) -> None:
    verdict = finding_of(NAN).verdict(policy, Path("b"), ("Bundle: b",))
    assert (verdict.should_stop, verdict.should_skip, verdict.ok) == (stop, skip, False)
    assert verdict.message.splitlines()[-2] == "Bundle: b"
    assert verdict.message.splitlines()[-1].startswith(f"on_nonfinite={policy!r}: every rank")
