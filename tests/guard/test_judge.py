"""Labels that differ are judged by evidence: strong evidence is an error, weak evidence a warning, own data nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpstats.guard.diagnosis import DOUBT, MISMATCH, NOTHING, Alarm, GuardFinding, RankStatus, find
from ddpstats.guard.event import BY_TORCH, Event, Evidence, Signature, digest_of, label_word
from ddpstats.guard.labels.judge import Judgement, judge
from ddpstats.guard.record import read_records
from ddpstats.guard.recording import Identity, Recording

_SIGNATURE = Signature("all_reduce", "sum", shapes=((1,),), dtypes=("float32",))
_LOSSES = ("ctc", "att", "l1")


def event(evidence: Evidence | None, label: str | None = None, seq: int = 1) -> Event:
    if label is None and evidence is not None:
        label = evidence.key if evidence.outer is None else f"{evidence.outer.key}/{evidence.key}"
    word, digest = label_word(label), digest_of(_SIGNATURE)
    return Event("default_pg", seq, _SIGNATURE, label, word, "train.py:7 in step", digest, evidence_source=evidence)


def stored(key: str, names: tuple[str, ...] = _LOSSES, use: str = "stored") -> Evidence:
    return Evidence(key, names, "dict", use)


def judged(a: Evidence, b: Evidence) -> Judgement:
    judgement = judge([event(a), event(b)])
    assert judge([event(b), event(a)]) == judgement, "the order of the ranks decides"
    return judgement


PERMUTED = ("ctc", "att")
SHARED = ("l1", ("a", "l1")), ("snr", ("a", "snr"))
DISJOINT = ("l1_loss", ("l1_loss",)), ("snr_loss", ("snr_loss",))
NUMBERED = ("layer1", ("a", "layer1")), ("layer2", ("a", "layer2"))


@pytest.mark.parametrize(
    ("names", "known", "expected"),
    [
        *((names, {"use": use}, "fault") for names in (PERMUTED, SHARED) for use in ("stored", "element")),
        *((names, {"use": ""}, "doubt") for names in (PERMUTED, SHARED, DISJOINT)),
        *((names, {"use": "pooled"}, "data") for names in (PERMUTED, SHARED, DISJOINT)),
        *((names, {"use": "pooled element"}, "doubt") for names in (PERMUTED, SHARED)),
        *((PERMUTED, {"set_by": "text", "use": use}, "doubt") for use in ("stored", "element")),
        *((PERMUTED, {"aliases": PERMUTED}, "data"), (PERMUTED, {"source": "Module"}, "fault")),
        *((SHARED, {"source": "Module"}, "doubt"), (SHARED, {"source": "DataLoader"}, "data")),
        *((DISJOINT, {}, "doubt"), (DISJOINT, {"use": "element"}, "doubt")),
        *((DISJOINT, {"use": "pooled element"}, "data"), (NUMBERED, {}, "data")),
        ((("loss_1", ("loss_1", "loss_2")), ("loss_2", ("loss_2", "loss_1"))), {}, "fault"),
        ((("9f86d081884c7d65", ()), ("2c26b46b68ffc68f", ())), {}, "data"),
        ((("LOSS", ("LOSS", "ACC")), ("loss", ("loss", "acc"))), {}, "data"),
        ((("loss", ("loss", "acc")), ("acc", ("acc", "lr"))), {}, "fault"),
    ],
)
def test_names_that_differ_are_a_fault_a_doubt_or_data(names: Any, known: dict[str, Any], expected: Judgement) -> None:
    first, second = (stored(*((name,) if isinstance(name, str) else name)) for name in names)
    assert judged(replace(first, **known), replace(second, **known)) == expected


def test_only_one_of_the_ranks_that_keeps_its_result_under_the_name_is_no_fault() -> None:
    assert judged(stored("ctc"), stored("att", use="")) == "doubt"
    assert judged(stored("ctc"), stored("att", use="element")) == "fault"


def test_names_further_out_are_judged_where_the_inner_ones_are_equal() -> None:
    own = [replace(stored("loss", ("loss",)), outer=stored(name, (name,))) for name in ("utt_a", "utt_b")]
    permuted = [replace(stored("loss", ("loss",)), outer=stored(name)) for name in PERMUTED]
    assert judged(*own) == "doubt"
    assert judged(*permuted) == "fault"


@pytest.mark.parametrize(
    ("reduce_op", "dtype", "expected"),
    [("max", "int64", "doubt"), ("min", "bool", "doubt"), ("max", "float32", "fault"), ("sum", "int64", "fault")],
)
def test_the_largest_of_integers_is_something_that_ranks_agree_on(reduce_op: str, dtype: str, expected: str) -> None:
    """A length to pad to, a flag: kept under the rank's own name by right. But not the slowest time of a phase."""
    signature = Signature("all_reduce", reduce_op, shapes=((1,),), dtypes=(dtype,))
    pair = [replace(event(stored(key)), signature=signature) for key in PERMUTED]
    assert judge(pair) == expected


def test_names_given_by_the_program_raise() -> None:
    assert judge([event(None, "l1"), event(None, "snr")]) == "fault"
    assert judge([event(None, "l1"), event(stored("ctc"))]) == "fault"


def test_gradients_that_meet_anything_else_raise() -> None:
    assert judge([event(None, BY_TORCH), event(stored("ctc"))]) == "fault"
    assert judge([event(None, BY_TORCH), event(None)]) == "fault"


def test_the_worst_of_all_pairs_counts() -> None:
    data = [event(stored(f"utt{number}", ())) for number in range(3)]
    assert judge(data) == "data"
    assert judge([*data, event(stored("loss", ()))]) == "doubt"


# -- what comes of it --------------------------------------------------------------------------------------------------


def verdict_of(*pairs: tuple[Evidence, Evidence]) -> GuardFinding | None:
    columns = zip(*[(event(a, seq=seq), event(b, seq=seq)) for seq, (a, b) in enumerate(pairs, 1)], strict=True)
    statuses = [RankStatus(rank, events, count=len(pairs)) for rank, events in enumerate(columns)]
    return find(Alarm("default_pg", "the default group of 2 ranks", (0, 1), 0, overdue=False), statuses)


def test_a_fault_goes_before_doubts_and_data() -> None:
    utterances = stored("utt_a", ("utt_a",)), stored("utt_b", ("utt_b",))
    data = stored("utt1", ()), stored("utt2", ())
    fault = stored("ctc"), stored("att")
    assert (verdict := verdict_of(data, data)) is not None
    assert (verdict.kind, verdict.doubts) == (NOTHING, (1, 2))
    assert (verdict := verdict_of(data, utterances)) is not None
    assert (verdict.kind, verdict.doubts, verdict.seq) == (DOUBT, (1, 2), 2)
    assert "'utt_a'" in verdict.message
    assert "label(" in verdict.message
    assert (verdict := verdict_of(data, utterances, fault)) is not None
    assert (verdict.kind, verdict.seq) == (MISMATCH, 3)
    assert verdict_of((stored("ctc"), stored("ctc"))) is None


def test_evidence_survives_the_wire() -> None:
    evidence = replace(stored("ctc"), outer=stored("spk1", ("spk1", "spk2")), aliases=("ctc", "x"), set_by="text")
    assert Event.from_dict(event(evidence, "spk1/ctc").as_dict()).evidence == evidence


def test_names_of_a_container_are_sent_and_recorded_once(tmp_path: Path) -> None:
    names = tuple(f"model.layer{number}.weight" for number in range(200))
    events = [event(replace(stored(name, names), outer=stored("a", names)), name, seq=seq)
              for seq, name in enumerate(names, 1)]  # fmt: skip
    status = RankStatus(0, events, count=len(events))
    assert len(status.pack()) < 100_000
    assert [e.evidence for e in RankStatus.unpack(status.pack().encode()).events] == [e.evidence for e in events]
    recording = Recording(tmp_path, max_bytes=60_000)
    recording.begin(Identity("a run", 0, 1))
    for known in events:
        recording.write_event(known)
    recording.close()
    assert (tmp_path / "rank0.old.jsonl").exists()  # each file can be read by itself
    (record,) = read_records(tmp_path)
    assert len(record.events) > 100
    assert {e.evidence.names for e in record.events if e.evidence is not None} == {names}


@pytest.mark.parametrize("evidence", [[], "text", ["k"], ["k", [1], "", "", [], "", None], [*["k"] * 6, [*["k"] * 7]]])
def test_malformed_evidence_is_refused(evidence: object) -> None:
    record = {**event(stored("ctc")).as_dict(), "evidence": evidence}
    with pytest.raises(ValueError, match="not a record of a collective"):
        Event.from_dict(record)


def test_a_silenced_label_is_not_compared_on_the_other_side_either() -> None:
    silenced = event(stored("utt_a"))
    silenced.word = 0
    assert Event.from_dict(silenced.as_dict()).word == 0
