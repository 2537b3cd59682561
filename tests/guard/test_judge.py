"""Labels that differ are judged by evidence: strong evidence is an error, weak evidence a warning, own data nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddpstats.guard.diagnosis import find
from ddpstats.guard.event import BY_TORCH, Event, Evidence, Signature, digest_of, label_word
from ddpstats.guard.labels.judge import Judgement, judge
from ddpstats.guard.status import DOUBT, MISMATCH, NOTHING, GuardFinding, RankStatus

_SIGNATURE = Signature("all_reduce", "sum", shapes=((1,),), dtypes=("float32",))
_LOSSES = ("ctc", "att", "l1")


def event(evidence: Evidence | None, label: str | None = None, site: str = "train.py:7 in step", seq: int = 1) -> Event:
    if label is None and evidence is not None:
        label = evidence.key if evidence.outer is None else f"{evidence.outer.key}/{evidence.key}"
    word, digest = label_word(label), digest_of(_SIGNATURE)
    return Event("default_pg", seq, _SIGNATURE, label, word, site, digest, evidence_source=evidence)


def keyed(key: str, names: tuple[str, ...] = _LOSSES, fate: str = "keyed", spelled: str = "whole") -> Evidence:
    return Evidence(key, names, "dict", fate, spelled)


def judged(a: Evidence, b: Evidence, matched: int = 0) -> Judgement:
    judgement = judge([event(a), event(b)], matched)
    assert judge([event(b), event(a)], matched) == judgement, "the order of the ranks decides"
    return judgement


PERMUTED = ("ctc", "att")
OVERLAPPING = ("l1", ("a", "l1")), ("snr", ("a", "snr"))
SINGLE = ("l1_loss", ("l1_loss",)), ("snr_loss", ("snr_loss",))


@pytest.mark.parametrize(
    ("names", "known", "expected"),
    [
        *((PERMUTED, {}, "fault"), (PERMUTED, {"fate": "in place"}, "fault"), (PERMUTED, {"spelled": ""}, "fault")),
        *((PERMUTED, {"fate": "kept"}, "fault"), (PERMUTED, {"fate": "kept", "spelled": ""}, "doubt")),
        *((PERMUTED, {"fate": "pooled"}, "data"), (PERMUTED, {"fate": "in place", "chosen_by": ""}, "data")),
        *((PERMUTED, {"chosen_by": ""}, "doubt"), (PERMUTED, {"aliases": PERMUTED}, "data")),
        *((OVERLAPPING, {}, "fault"), (OVERLAPPING, {"spelled": ""}, "doubt")),
        *((SINGLE, {}, "fault"), (SINGLE, {"fate": "kept"}, "doubt"), (SINGLE, {"is_beside": True}, "doubt")),
        *((SINGLE, {"source": "DataLoader"}, "data"), (SINGLE, {"source": "Module"}, "doubt")),
        *((SINGLE, {"spelled": "", "is_known": True}, "fault"), (SINGLE, {"spelled": ""}, "doubt")),
        ((("control", ("control",)), ("treated", ("treated",))), {}, "doubt"),
        ((("utt3", ()), ("utt7", ())), {"spelled": ""}, "data"),
        ((("layer1", ()), ("layer2", ())), {}, "fault"),
        ((("9f86d081884c7d65", ()), ("2c26b46b68ffc68f", ())), {"spelled": ""}, "data"),
        ((("ctc", ("ctc", "att")), ("val_ctc", ("val_ctc", "val_att"))), {}, "data"),
        ((("Split.TRAIN", ("Split.TRAIN", "Split.VALID")), ("train", ("train", "valid"))), {}, "data"),
        ((("LOSS", ("LOSS", "ACC")), ("loss", ("loss", "acc"))), {}, "data"),
        ((("a_x", ("a_x", "a_y")), ("b_x", ("b_x", "b_y"))), {}, "doubt"),
        ((("loss", ("loss", "acc")), ("acc", ("acc", "lr"))), {}, "fault"),
    ],
)
def test_names_that_differ_are_a_fault_a_doubt_or_data(names: Any, known: dict[str, Any], expected: Judgement) -> None:
    first, second = (keyed(*((name,) if isinstance(name, str) else name)) for name in names)
    assert judged(replace(first, **known), replace(second, **known)) == expected


def test_names_of_own_data_around_one_name_are_a_doubt() -> None:
    outer = [keyed(name, (name,), spelled="") for name in ("utt_a", "utt_b")]
    first, second = (replace(keyed("loss", ("loss",)), outer=evidence) for evidence in outer)
    assert judged(first, second) == "doubt"


def test_two_lines_of_the_program_that_have_no_names_in_common_are_only_doubted() -> None:
    first, second = keyed("stop", ("stop",)), keyed("exhausted", ("exhausted",))
    assert judge([event(first, site="a.py:1 in f"), event(second, site="a.py:9 in f")], 0) == "doubt"


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
    first, second = keyed("p", ("a", "p"), spelled=""), keyed("q", ("a", "q"), spelled="")
    assert (judged(first, second, 1), judged(first, second, 2)) == ("doubt", "fault")


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


def verdict_of(*pairs: tuple[Evidence, Evidence]) -> GuardFinding | None:
    columns = zip(*[(event(a, seq=seq), event(b, seq=seq)) for seq, (a, b) in enumerate(pairs, 1)], strict=True)
    statuses = [RankStatus(rank, events, count=len(pairs)) for rank, events in enumerate(columns)]
    return find("default_pg", "the default group of 2 ranks", statuses)


def test_a_fault_goes_before_doubts_and_data() -> None:
    utterances = keyed("utt_a", ("utt_a",), spelled=""), keyed("utt_b", ("utt_b",), spelled="")
    data = keyed("utt1", (), spelled=""), keyed("utt2", (), spelled="")
    fault = keyed("ctc"), keyed("att")
    assert (verdict := verdict_of(data, data)) is not None
    assert (verdict.kind, verdict.doubts) == (NOTHING, (1, 2))
    assert (verdict := verdict_of(data, utterances)) is not None
    assert (verdict.kind, verdict.doubts, verdict.seq) == (DOUBT, (1, 2), 2)
    assert "'utt_a'" in verdict.message
    assert "label(" in verdict.message
    assert (verdict := verdict_of(data, utterances, fault)) is not None
    assert (verdict.kind, verdict.seq) == (MISMATCH, 3)
    assert verdict_of((keyed("ctc"), keyed("ctc"))) is None


def test_evidence_survives_the_wire() -> None:
    evidence = replace(keyed("ctc"), outer=keyed("spk1", ("spk1", "spk2")), aliases=("ctc", "x"), is_known=True)
    assert Event.from_dict(event(evidence, "spk1/ctc").as_dict()).evidence == evidence


@pytest.mark.parametrize(
    "evidence", [[], "text", ["k"], ["k", [1], "", "", "", [], 0, 0, "", None], [*["k"] * 9, [*["k"] * 10]]]
)
def test_malformed_evidence_is_refused(evidence: object) -> None:
    record = {**event(keyed("ctc")).as_dict(), "evidence": evidence}
    with pytest.raises(ValueError, match="not a record of a collective"):
        Event.from_dict(record)


def test_a_silenced_label_is_not_compared_on_the_other_side_either() -> None:
    silenced = event(keyed("utt_a"))
    silenced.word = 0
    assert Event.from_dict(silenced.as_dict()).word == 0
