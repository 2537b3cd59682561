"""What labels that differ prove: pure functions of what is known of each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddpstats.guard._diagnosis import find
from ddpstats.guard._events import BY_TORCH, Event, Evidence, Signature, digest_of, label_word
from ddpstats.guard._status import DOUBT, MISMATCH, NOTHING, GuardFinding, RankStatus
from ddpstats.guard.labels._judge import Judgement, judge

_SIGNATURE = Signature("all_reduce", "sum", shapes=((1,),), dtypes=("float32",))
_LOSSES = ("ctc", "att", "l1")


def event(evidence: Evidence | None, label: str | None = None, site: str = "train.py:7 in step", seq: int = 1) -> Event:
    if label is None and evidence is not None:
        label = evidence.key if evidence.outer is None else f"{evidence.outer.key}/{evidence.key}"
    word, digest = label_word(label), digest_of(_SIGNATURE)
    return Event("default_pg", seq, _SIGNATURE, label, word, site, digest, told=evidence)


def keyed(key: str, names: tuple[str, ...] = _LOSSES, fate: str = "keyed", spelled: str = "whole") -> Evidence:
    return Evidence(key, names, "dict", fate, spelled)


def judged(a: Evidence, b: Evidence, matched: int = 0) -> Judgement:
    found = judge([event(a), event(b)], matched)
    assert judge([event(b), event(a)], matched) == found, "the order of the ranks decides"
    return found


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        pytest.param(keyed("ctc"), keyed("att"), "fault", id="permuted, keyed"),
        pytest.param(keyed("ctc", fate="in place"), keyed("att", fate="in place"), "fault", id="permuted, in place"),
        pytest.param(keyed("ctc", spelled=""), keyed("att", spelled=""), "fault", id="permuted, not spelled"),
        pytest.param(keyed("ctc", fate="kept"), keyed("att", fate="kept"), "fault", id="permuted, kept in order"),
        pytest.param(keyed("ctc", fate="pooled"), keyed("att", fate="pooled"), "data", id="permuted, pooled"),
        pytest.param(
            keyed("ctc", fate="kept", spelled=""), keyed("att", fate="kept", spelled=""), "doubt", id="permuted, kept"
        ),
        pytest.param(keyed("l1", ("a", "l1")), keyed("snr", ("a", "snr")), "fault", id="overlapping, spelled"),
        pytest.param(
            keyed("l1", ("a", "l1"), spelled=""), keyed("snr", ("a", "snr"), spelled=""), "doubt", id="overlapping"
        ),
        pytest.param(keyed("l1_loss", ("l1_loss",)), keyed("snr_loss", ("snr_loss",)), "fault", id="one each, spelled"),
        pytest.param(
            replace(keyed("ctc", fate="in place"), chosen_by=""),
            replace(keyed("att", fate="in place"), chosen_by=""), "data", id="looked up, once",
        ),
        pytest.param(
            replace(keyed("ctc"), chosen_by=""), replace(keyed("att"), chosen_by=""), "doubt", id="looked up"
        ),
        pytest.param(keyed("control", ("control",)), keyed("treated", ("treated",)), "doubt", id="of no one kind"),
        pytest.param(
            keyed("utt_a", ("utt_a",), spelled=""), keyed("utt_b", ("utt_b",), spelled=""), "doubt", id="one each, data"
        ),
        pytest.param(
            keyed("l1", ("l1",), fate="kept"), keyed("snr", ("snr",), fate="kept"), "doubt", id="one each, kept"
        ),
        pytest.param(keyed("utt3", (), spelled=""), keyed("utt7", (), spelled=""), "data", id="numbers differ"),
        pytest.param(keyed("layer1", ()), keyed("layer2", ()), "fault", id="numbers differ, in two words of the text"),
        pytest.param(
            keyed("9f86d081884c7d65", (), spelled=""), keyed("2c26b46b68ffc68f", (), spelled=""), "data", id="hashes"
        ),
        pytest.param(keyed("ctc", ("ctc", "att")), keyed("val_ctc", ("val_ctc", "val_att")), "data", id="a prefix"),
        pytest.param(
            keyed("Split.TRAIN", ("Split.TRAIN", "Split.VALID")), keyed("train", ("train", "valid")), "data",
            id="written otherwise",
        ),
        pytest.param(keyed("LOSS", ("LOSS", "ACC")), keyed("loss", ("loss", "acc")), "data", id="in capitals"),
        pytest.param(keyed("a_x", ("a_x", "a_y")), keyed("b_x", ("b_x", "b_y")), "doubt", id="two prefixes"),
        pytest.param(keyed("loss", ("loss", "acc")), keyed("acc", ("acc", "lr")), "fault", id="shifted, not rewritten"),
        pytest.param(
            replace(keyed("l1", ()), is_beside=True), replace(keyed("snr", ()), is_beside=True), "doubt", id="beside"
        ),
        pytest.param(
            replace(keyed("wte"), aliases=("wte", "head")), replace(keyed("head"), aliases=("wte", "head")), "data",
            id="tied",
        ),
        pytest.param(
            replace(keyed("l1"), source="DataLoader"), replace(keyed("snr"), source="DataLoader"), "data", id="drawn"
        ),
        pytest.param(
            replace(keyed("a.weight", ("a.weight",)), source="Module"),
            replace(keyed("b.weight", ("b.weight",)), source="Module"), "doubt", id="parameters of stages",
        ),
        pytest.param(
            replace(keyed("l1", (), spelled=""), is_known=True), replace(keyed("snr", (), spelled=""), is_known=True),
            "fault", id="a function known to reduce stats",
        ),
        pytest.param(
            replace(keyed("loss", ("loss",)), outer=keyed("utt_a", ("utt_a",), spelled="")),
            replace(keyed("loss", ("loss",)), outer=keyed("utt_b", ("utt_b",), spelled="")), "doubt", id="data, nested",
        ),
    ],
)  # fmt: skip
def test_judgement(a: Evidence, b: Evidence, expected: Judgement) -> None:
    assert judged(a, b) == expected


def test_two_lines_of_the_program_that_have_no_names_in_common_are_only_doubted() -> None:
    one, other = keyed("stop", ("stop",)), keyed("exhausted", ("exhausted",))
    assert judge([event(one, site="a.py:1 in f"), event(other, site="a.py:9 in f")], 0) == "doubt"


@pytest.mark.parametrize(
    ("reduce_op", "dtype", "expected"),
    [("max", "int64", "doubt"), ("min", "bool", "doubt"), ("max", "float32", "fault"), ("sum", "int64", "fault")],
)
def test_the_largest_of_integers_is_something_that_ranks_agree_on(reduce_op: str, dtype: str, expected: str) -> None:
    """A length to pad to, a flag: kept under the rank's own name by right. But not the slowest time of a phase."""
    signature = Signature("all_reduce", reduce_op, shapes=((1,),), dtypes=(dtype,))
    pair = [replace(event(keyed(key)), signature=signature) for key in ("ctc", "att")]
    assert judge(pair, 0) == expected


def test_names_that_have_met_before_make_a_name_one_of_them() -> None:
    one, other = keyed("p", ("a", "p"), spelled=""), keyed("q", ("a", "q"), spelled="")
    assert (judged(one, other, 1), judged(one, other, 2)) == ("doubt", "fault")


def test_names_given_by_the_program_raise() -> None:
    assert judge([event(None, "l1"), event(None, "snr")], 0) == "fault"
    assert judge([event(None, "l1"), event(keyed("ctc"))], 0) == "fault"


def test_gradients_that_meet_anything_else_raise() -> None:
    assert judge([event(None, BY_TORCH), event(keyed("ctc"))], 0) == "fault"
    assert judge([event(None, BY_TORCH), event(None)], 0) == "fault"


def test_the_worst_of_all_pairs_counts() -> None:
    data = [event(keyed(f"utt{n}", (), spelled="")) for n in range(3)]
    assert judge(data, 0) == "data"
    assert judge([*data, event(keyed("loss", ()))], 0) == "doubt"


# -- what comes of it --------------------------------------------------------------------------------------------------


def found(*pairs: tuple[Evidence, Evidence]) -> GuardFinding | None:
    columns = zip(*[(event(a, seq=seq), event(b, seq=seq)) for seq, (a, b) in enumerate(pairs, 1)], strict=True)
    statuses = [RankStatus(rank, events, count=len(pairs)) for rank, events in enumerate(columns)]
    return find("default_pg", "the default group of 2 ranks", statuses)


def test_a_fault_goes_before_doubts_and_data() -> None:
    utterances = keyed("utt_a", ("utt_a",), spelled=""), keyed("utt_b", ("utt_b",), spelled="")
    data = keyed("utt1", (), spelled=""), keyed("utt2", (), spelled="")
    fault = keyed("ctc"), keyed("att")
    assert (verdict := found(data, data)) is not None
    assert (verdict.kind, verdict.doubts) == (NOTHING, (1, 2))
    assert (verdict := found(data, utterances)) is not None
    assert (verdict.kind, verdict.doubts, verdict.seq) == (DOUBT, (1, 2), 2)
    assert "'utt_a'" in verdict.message
    assert "label(" in verdict.message
    assert (verdict := found(data, utterances, fault)) is not None
    assert (verdict.kind, verdict.seq) == (MISMATCH, 3)
    assert found((keyed("ctc"), keyed("ctc"))) is None


def test_evidence_survives_the_wire() -> None:
    evidence = replace(keyed("ctc"), outer=keyed("spk1", ("spk1", "spk2")), aliases=("ctc", "x"), is_known=True)
    assert Event.from_dict(event(evidence, "spk1/ctc").as_dict()).evidence == evidence


@pytest.mark.parametrize(
    "given", [[], "text", ["k"], ["k", [1], "", "", "", [], 0, 0, "", None], [*["k"] * 9, [*["k"] * 10]]]
)
def test_evidence_that_is_none_is_refused(given: object) -> None:
    told = {**event(keyed("ctc")).as_dict(), "evidence": given}
    with pytest.raises(ValueError, match="not a record of a collective"):
        Event.from_dict(told)


def test_a_silenced_label_is_not_compared_on_the_other_side_either() -> None:
    silenced = event(keyed("utt_a"))
    silenced.word = 0
    assert Event.from_dict(silenced.as_dict()).word == 0
