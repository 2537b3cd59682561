"""Ranks that cannot reduce together raise the same error, with rank and path, and the group goes on.

The ranks of the tables are threads; one case of each class of errors runs over gloo.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import ddpstats
from ddpstats import All, Mean, Min, StatsReducer, Sum, any_rank
from ddpstats._ranks import calls
from ddpstats._ranks.exchange import PROTOCOL_VERSION, Call, Failure, Status, decode_status, encode_status
from ddpstats._reduction.flatten import Structure, decode, flatten
from ddpstats._reduction.layout import Layout, agree, place
from ddpstats._reduction.reducer import kept_reducer
from ddpstats.errors import DdpstatsError, InvalidStats, NonFiniteStat, ProtocolMismatch, RankMissing, SchemaConflict
from ddpstats.testing import RankPool, ThreadGroup, run_threads
from ddpstats.testing.strategies import RankStats, uneven_stats
from ddpstats.testing.threads import ThreadComm

LIMIT_SEC = 60.0
TIMEOUT_SEC = 30.0  # of one reduction: nothing here may come near it


class Refused(NamedTuple):
    """The error of one call, and the result and cost of the reducer's next call."""

    kind: type
    text: str
    path: str | None
    ranks: tuple[int, ...]
    next_value: float
    next_collectives: int


MakeCall = Callable[[StatsReducer, int, Any], Any]
"""Makes a call with a reducer, on this rank, of this group."""


def refused(group: Any, call: MakeCall, **policy: Any) -> Refused:
    """Make a good call on this rank, then ``call``, which raises, and another good one."""
    rank = dist.get_rank() if group is None else group.rank
    reducer = StatsReducer(group=group, name="same", timeout_sec=TIMEOUT_SEC, **policy)
    assert reducer({"good": float(rank)}).values == {"good": 1.0}
    with pytest.raises(DdpstatsError) as caught:
        call(reducer, rank, group)
    assert caught.value.group == ("3 threads" if group is not None else "the default group of 3 ranks")
    before = reducer.counters.collectives
    value = reducer({"good": float(rank)}).values["good"]
    counted = reducer.counters.collectives - before
    return Refused(type(caught.value), str(caught.value), caught.value.path, caught.value.ranks, value, counted)


def refused_by_all(call: MakeCall, **policy: Any) -> Refused:
    """Return what all of three threads raise, in the same words; the reducer goes on with one collective a call."""
    outcomes = run_threads(refused, 3, call, timeout_sec=LIMIT_SEC, **policy).values()
    assert len(set(outcomes)) == 1
    first: Refused = outcomes[0]
    assert (first.next_value, first.next_collectives) == (1.0, 1)
    return first


# -- over gloo ---------------------------------------------------------------------------------------------------------


def be_invalid(reducer: StatsReducer, rank: int, group: Any) -> Any:
    return reducer({"good": object() if rank == 1 else 1.0})


def conflict(reducer: StatsReducer, rank: int, group: Any) -> Any:
    return reducer({"good": 1.0, "a": Sum(1.0) if rank == 1 else 1.0})


def be_infinite(reducer: StatsReducer, rank: int, group: Any) -> Any:
    return reducer({"good": math.inf if rank == 1 else 1.0})


def call_another(reducer: StatsReducer, rank: int, group: Any) -> Any:
    return any_rank(True, group=group) if rank == 1 else reducer({"good": 1.0})


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (be_invalid, InvalidStats),
        (conflict, SchemaConflict),
        (be_infinite, NonFiniteStat),
        (call_another, ProtocolMismatch),
    ],
)
def test_error_over_gloo_is_that_of_threads(three_ranks: RankPool, call: MakeCall, kind: type) -> None:
    over_gloo = three_ranks.run(refused, None, call, nonfinite="raise", timeout_sec=LIMIT_SEC).values()
    by_threads = refused_by_all(call, nonfinite="raise")
    assert by_threads.kind is kind
    assert {
        each._replace(text=each.text.replace("the default group of 3 ranks", "3 threads")) for each in over_gloo
    } == {by_threads}


# -- calls that do not belong together ---------------------------------------------------------------------------------


def call_by(how: str, group: Any) -> Any:
    if how in ("any_rank", "all_ranks"):
        return getattr(ddpstats, how)(True, group=group)
    if how == "recursive_average|skip":  # as the integration of espnet reduces
        return kept_reducer(group, None, "skip", "recursive_average")({"good": 1.0})
    if how in ("recursive_sum", "recursive_average"):
        return getattr(ddpstats, how)({"good": torch.ones(1)}, torch.ones(1), True, group=group)
    name, policy = how.split("|")
    name_or_none = None if name == "None" else name
    return ddpstats.reduce_stats({"good": 1.0}, name=name_or_none, nonfinite=policy, group=group)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("odd", "usual", "odd_text", "usual_text"),
    [
        ("train|skip", "valid|skip", "name='train', nonfinite='skip'", "name='valid', nonfinite='skip'"),
        ("None|skip", "|skip", "reduce_stats, without a name, nonf", "name='', nonfinite='skip'"),
        ("a|skip", "a|raise", "nonfinite='skip'", "nonfinite='raise'"),
        ("a\0|skip", "a|skip", r"name='a\x00'", "name='a'"),
        ("\ud800|skip", "\udfff|skip", r"name='\ud800'", r"name='\udfff'"),
        ("x" * 100_000 + "|skip", "y|skip", "name='xxx", "name='y'"),
        ("any_rank", "a|skip", "any_rank()", "reduce_stats, name='a'"),
        ("any_rank", "all_ranks", "any_rank()", "all_ranks()"),
        ("recursive_sum", "recursive_average", "recursive_sum()", "recursive_average()"),
        ("recursive_average|skip", "recursive_average", "recursive_average(), nonfinite='skip'", "recursive_average()"),
    ],
    ids=lambda text: ascii(text[:30]).replace("\\", "_"),
)
def test_calls_that_do_not_belong_together(odd: str, usual: str, odd_text: str, usual_text: str) -> None:
    error = refused_by_all(lambda reducer, rank, group: call_by(odd if rank == 1 else usual, group))
    assert (error.kind, error.ranks, error.path) == (ProtocolMismatch, (0, 1, 2), None)
    first, second, third, advice = error.text.split("\n")
    assert first == "ranks of 3 threads take part in one collective with different calls:"
    assert second.startswith("  ranks 0, 2: ")
    assert usual_text in second
    assert third.startswith("  rank 1: ")
    assert odd_text in third
    assert advice.startswith("All ranks must make the same calls in the same order.")
    assert "A rank with one call more or less than the others" in advice


# -- versions ----------------------------------------------------------------------------------------------------------


def with_version(name: str, value: Any) -> list[str]:
    """Reduce twice with another version on rank 1, then with the same version everywhere."""
    reducer, installed = StatsReducer(group=dist.new_group(), timeout_sec=TIMEOUT_SEC), vars(calls)[name]
    texts = []
    try:
        if dist.get_rank() == 1:
            vars(calls)[name] = value
        for _ in range(2):
            with pytest.raises(ProtocolMismatch) as caught:
                reducer({"loss": 1.0})
            assert caught.value.ranks == (0, 1, 2)
            texts.append(str(caught.value))
    finally:
        vars(calls)[name] = installed
    return [*texts, str(reducer({"loss": 1.0}).values)]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("__version__", "9" * 100, f"ddpstats {'9' * 32}, protocol {PROTOCOL_VERSION}"),
        ("PROTOCOL_VERSION", 77, f"ddpstats {ddpstats.__version__}, protocol 77"),
    ],
    ids=["library", "protocol"],
)
def test_versions_that_differ_meet_in_a_handshake(three_ranks: RankPool, name: str, value: Any, text: str) -> None:
    answers = three_ranks.run(with_version, name, value, timeout_sec=LIMIT_SEC).values()
    assert answers[0] == answers[1] == answers[2]
    first, second, after = answers[0]
    assert first == second
    head, *lines = first.split("\n")
    assert head.endswith("of 3 ranks run different versions:")
    assert lines == [
        f"  ranks 0, 2: ddpstats {ddpstats.__version__}, protocol {PROTOCOL_VERSION}",
        f"  rank 1: {text}",
        "Install the same version of ddpstats on all of them.",
    ]
    assert after == "{'loss': 1.0}"


# -- stats that cannot be reduced --------------------------------------------------------------------------------------


class Unreadable:
    def __float__(self) -> float:
        raise ZeroDivisionError("this one never works")


class Undecided:
    def __bool__(self) -> bool:
        raise RuntimeError("cannot say")


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class LooksDistributed(torch.Tensor):
    placements = ()


@dataclasses.dataclass
class Losses:
    first: Any
    second: Any


def nested(depth: int) -> Any:
    stats: Any = 1.0
    for _ in range(depth):
        stats = {"k": stats}
    return stats


def fake(shape: tuple[int, ...]) -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(shape)


def too_large() -> torch.Tensor:
    return torch.tensor([1.0, 1e101], dtype=torch.float64)


def cyclic_dict() -> Any:
    stats: dict[str, Any] = {"good": 1.0}
    stats["again"] = {"x": [stats]}
    return stats


def cyclic_list() -> Any:
    stats: list[Any] = [1.0]
    stats.append(stats)
    return {"l": stats}


# What rank 1 passes, in place of {"good": ...} or of the weight 1.0; the path; what the text says.
BAD_STATS: dict[str, tuple[Callable[[], Any], str | None, str]] = {
    "object": (lambda: {"a": [1.0, {"b": object()}]}, "a[1]/b", "object is not a leaf"),
    "unprintable": (lambda: {"good": Unprintable()}, "good", "Unprintable is not a leaf"),
    "in a dataclass": (lambda: Losses(1.0, "x"), "second", "str is not a leaf"),
    "marker in a marker": (lambda: {"good": Sum(Mean(1.0))}, "good", "Mean is not a leaf"),
    "complex": (lambda: {"good": 1j}, "good", "complex is not a leaf"),
    "matrix": (lambda: {"good": torch.ones(2, 2)}, "good", "a tensor of shape (2, 2)"),
    "vector": (lambda: {"good": torch.ones(3)}, "good", "a 1-d tensor of 3 elements, while the weight is a single"),
    "no element": (lambda: {"good": torch.ones(0)}, "good", "a 1-d tensor of 0 elements"),
    "distributed": (
        lambda: {"good": torch.ones(()).as_subclass(LooksDistributed)},
        "good",
        "a DTensor; pass .full_tensor()",
    ),
    "raises": (lambda: {"a": {"b": Unreadable()}}, "a/b", "cannot be read: ZeroDivisionError: this one never works"),
    "no flag": (lambda: {"good": ddpstats.Any(2)}, "good", "2.0, which is not a flag"),
    "own weight": (lambda: {"good": Mean(1.0, -1)}, "good", "a Mean for which the weight is -1"),
    "minimum of nothing": (lambda: {"good": Min(torch.ones(0))}, "good", "empty, and has no min"),
    "fake": (lambda: {"a": [fake(())]}, "a[0]", "the value is a FakeTensor, which has a shape but no value; pass a"),
    "fake, 1-d": (lambda: {"a": Sum(fake((3,)))}, "a", "the value is a FakeTensor, which has a shape but no value"),
    "weight too large": (
        lambda: {"a": {"x": Mean(torch.ones(2), weight=too_large())}},
        "a/x",
        "a weight is 0, or between 1e-100 and 1e+100; only the ratios of weights count in a mean",
    ),
    "float key": (lambda: {"a": {1.0: 1.0}}, "a/1.0", "the key 1.0 is of type float"),
    "tuple key": (lambda: {("a", "b"): 1.0}, "('a', 'b')", "is of type tuple"),
    "numpy key": (lambda: {np.int64(3): 1.0}, "np.int64(3)", "is of type numpy.int64"),
    "endless int key": (lambda: {"a": {10**5000: 1.0}}, "a", "an int key of 16610 bits"),
    "cycle": (cyclic_dict, "again/x[0]", "the structure contains itself"),
    "cycle in a list": (cyclic_list, "l[1]", "the structure contains itself"),
    "100,000 deep": (lambda: nested(100_000), "/".join("k" * 8), "nested more than 100 deep"),
    "no stats": (lambda: "abc", None, "str is not a leaf"),
    "lone surrogate": (lambda: {"\ud800": "x"}, "\ud800", "str is not a leaf"),
}
BAD_WEIGHTS: dict[str, tuple[Callable[[], Any], str]] = {
    "negative": (lambda: -1.0, "the weight is -1.0; a weight is 0, or between 1e-100 and 1e+100"),
    "NaN": (lambda: math.nan, "the weight is nan"),
    "infinite": (lambda: math.inf, "the weight is inf"),
    "huge": (lambda: 10**400, "int too large to convert to float"),
    "matrix": (lambda: torch.ones(2, 2), "the weight is a tensor of shape (2, 2)"),
    "negative element": (lambda: torch.tensor([2.0, -1.0]), "a weight is 0, or between"),
    "NaN element": (lambda: torch.tensor([2.0, math.nan]), "a weight is 0, or between"),
    "too large": (too_large, "a weight is 0, or between"),
    "fake": (lambda: fake((2,)), "the weight is a FakeTensor, which has a shape but no value; it is a real number or"),
    "None": (lambda: None, "the weight is of type NoneType, which is not a number"),
    "list": (lambda: [1.0, 2.0], "the weight is of type list, which is not a number"),
    "complex": (lambda: 1j, "the weight is complex"),
    "masked": (lambda: np.ma.masked, "the weight is"),
    "duration": (
        lambda: np.timedelta64(3, "ns"),
        "the weight is of type timedelta64, dtype timedelta64[ns], which is not a number",
    ),
    "raises": (Unreadable, "ZeroDivisionError: this one never works"),
    "meta": (lambda: torch.ones((), device="meta"), "meta"),
}


@pytest.mark.parametrize("case", BAD_STATS)
def test_bad_stats_of_one_rank_are_refused_on_all(case: str) -> None:
    make, path, text = BAD_STATS[case]
    error = refused_by_all(lambda reducer, rank, group: reducer(make() if rank == 1 else {"good": 1.0}))
    assert (error.kind, error.ranks, error.path) == (InvalidStats, (1,), path)
    head, line, end = error.text.split("\n")
    assert head == "stats that cannot be reduced:"
    assert line.startswith(f"  rank 1 at {path!r}: " if path else "  rank 1: ")
    assert text in line
    assert end == "Nothing was reduced; the reducer goes on working."


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_bad_weight_of_one_rank_is_refused_on_all(case: str) -> None:
    make, text = BAD_WEIGHTS[case]
    error = refused_by_all(lambda reducer, rank, group: reducer({"good": 1.0}, make() if rank == 1 else 1.0))
    assert (error.kind, error.ranks, error.path) == (InvalidStats, (1,), None)
    assert error.text.split("\n")[1].startswith("  rank 1: ")
    assert text in error.text


def test_every_bad_rank_is_named() -> None:
    error = refused_by_all(lambda reducer, rank, group: reducer({"x": "text"} if rank < 2 else {"y": 1j}))
    assert (error.ranks, error.path) == ((0, 1, 2), "x")
    assert "\n  ranks 0, 1 at 'x': str is not a leaf" in error.text
    assert "\n  rank 2 at 'y': complex is not a leaf" in error.text


@pytest.mark.parametrize("name", ["any_rank", "all_ranks"])
def test_flag_without_a_truth_value_is_refused_on_all(name: str) -> None:
    flags = [False, Undecided(), torch.tensor(True)]
    error = refused_by_all(lambda reducer, rank, group: getattr(ddpstats, name)(flags[rank], group=group))
    assert (error.kind, error.ranks, error.path) == (InvalidStats, (1,), None)
    reason = f"  rank 1: the flag of {name}() has no truth value: cannot say\n"
    assert error.text.startswith(f"{name}() cannot decide:\n{reason}")


# -- stats that do not fit together ------------------------------------------------------------------------------------

# What rank 1 holds, what ranks 0 and 2 hold, the path, and the words for both.
CONFLICTS: dict[str, tuple[Any, Any, str, str, str]] = {
    "leaf or dict": ({"a": 1.0}, {"a": {"b": 1.0}}, "a", "a leaf (mean)", "a dict with 1 entry ('b')"),
    "leaf or list": ({"a": 1.0}, {"a": [1.0, 2.0]}, "a", "a leaf (mean)", "a list with 2 entries (0, 1)"),
    "list or dict": ({"a": [1.0]}, {"a": {"0": 1.0}}, "a", "a list with 1 entry (0)", "a dict with 1 entry ('0')"),
    "tuple or dict": ({"a": (1.0,)}, {"a": {0: 1.0}}, "a", "a tuple with 1 entry (0)", "a dict with 1 entry (0)"),
    "mean or sum": ({"a": 1.0}, {"a": Sum(1.0)}, "a", "a leaf (mean)", "a leaf (sum)"),
    "any or all": ({"a": ddpstats.Any(1)}, {"a": All(1)}, "a", "a leaf (any)", "a leaf (all)"),
    "deep down": ({"x": [0.0, {"y": 1.0}]}, {"x": [0.0, {"y": [1.0]}]}, "x[1]/y", "a leaf (mean)", "a list with 1"),
    "the whole": (1.0, {"a": 1.0}, "", "a leaf (mean)", "a dict with 1 entry ('a')"),
    "dataclass or list": (Losses(1.0, 2.0), [1.0], "", "a dict with 2 entries ('first', 'second')", "a list with 1"),
}


@pytest.mark.parametrize("case", CONFLICTS)
def test_stats_that_do_not_fit_together(case: str) -> None:
    odd, usual, path, odd_text, usual_text = CONFLICTS[case]
    error = refused_by_all(lambda reducer, rank, group: reducer(odd if rank == 1 else usual))
    assert (error.kind, error.ranks, error.path) == (SchemaConflict, (0, 1, 2), path or None)
    head, first, second, advice = error.text.split("\n")
    what = f"different things under {path!r}" if path else "different stats"
    assert head == f"ranks of 3 threads hold {what}:"
    assert first.startswith(f"  ranks 0, 2: {usual_text}")
    assert second.startswith(f"  rank 1: {odd_text}")
    assert advice.endswith("Nothing was reduced.")


def test_long_list_of_conflicts_is_cut() -> None:
    error = refused_by_all(
        lambda reducer, rank, group: reducer({f"k{i}": Sum(1.0) if rank else 1.0 for i in range(1000)})
    )
    assert error.path == "k0"
    assert "\nand 995 more paths\n" in error.text
    assert len(error.text) < 1000


# -- values that are not finite ----------------------------------------------------------------------------------------


def test_value_that_is_not_finite_is_named_with_its_ranks() -> None:
    def call(reducer: StatsReducer, rank: int, group: Any) -> Any:
        last, third = ((1.0, 0.0), (math.nan, 0.0), (-math.inf, math.nan))[rank]
        return reducer({"good": 1.0, "a": {"b": [0.0, last]}, "c": third})

    error = refused_by_all(call, nonfinite="raise")
    assert (error.kind, error.ranks, error.path) == (NonFiniteStat, (1, 2), "a/b[1]")
    assert error.text.split("\n") == [
        "non-finite stats (nonfinite='raise') on 3 threads:",
        "  'a/b[1]': ranks 1, 2",
        "  'c': rank 2",
    ]


# -- bytes from a peer -------------------------------------------------------------------------------------------------

texts = st.text(st.characters(), max_size=8)
statuses = st.builds(
    Status,
    call=st.builds(Call, texts, st.none() | texts, texts, st.booleans()),
    failure=st.none() | st.builds(Failure, texts, texts),
    stale=st.booleans(),
    agreed=st.binary(min_size=8, max_size=8),
    body=st.text(max_size=8),
)
DAMAGE = ("truncated", "flipped", "spliced")


def damaged(payload: bytes, how: str, data: st.DataObject) -> bytes:
    at = data.draw(st.integers(0, max(0, len(payload) - 1)))
    if how == "truncated":
        return payload[:at]
    if how == "flipped":
        return payload[:at] + bytes([payload[at] ^ (1 << data.draw(st.integers(0, 7)))]) + payload[at + 1 :]
    return payload[:at] + payload[data.draw(st.integers(0, len(payload))) :]


def used(payload: str | bytes) -> Structure:
    """Make a layout of what another rank holds, and write that as this rank's own."""
    structure = decode(payload)
    layout = agree([(structure, (0, 1))], Layout(), "the group")
    assert place(structure, layout) is not None
    assert decode(structure.encoded) is not None
    assert len(layout.names) == layout.size
    return structure


@given(uneven_stats(1), st.booleans(), statuses)
def test_what_ranks_send_survives_the_way_there_and_back(
    ranks: list[RankStats], keep_dtypes: bool, status: Status
) -> None:
    sent = flatten(ranks[0].stats, keep_dtypes).structure
    received = used(sent.encoded)
    assert (received.leaves, set(received.tags)) == (sent.leaves, set(sent.tags))
    assert decode_status(encode_status(status)) == status


@settings(max_examples=150)
@given(uneven_stats(1), st.sampled_from(DAMAGE), st.data())
def test_damaged_schemas_are_refused(ranks: list[RankStats], how: str, data: st.DataObject) -> None:
    """A damaged schema that is still readable can be used."""
    started, refusal = time.monotonic(), "a peer sent nothing wrong"
    try:
        used(damaged(flatten(ranks[0].stats).structure.encoded.encode(), how, data))
    except ProtocolMismatch as error:
        refusal = str(error)
    assert refusal.startswith("a peer sent ")
    assert len(refusal) < 2000
    assert time.monotonic() - started < 5.0


def test_bytes_that_are_not_what_was_announced_are_rank_missing_and_close_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One byte of what rank 1 sends about its keys arrives changed, also on rank 1 itself."""
    gather = ThreadComm.all_gather

    def damage(comm: ThreadComm, payload: bytes | bytearray, timeout_sec: float) -> Any:
        if comm.rank == 1 and b"damaged" in payload:
            payload = payload.replace(b"damaged", b"Damaged")
        return gather(comm, payload, timeout_sec)

    def call(group: ThreadGroup) -> list[str]:
        reducer, texts = group.reducer(timeout_sec=TIMEOUT_SEC), []
        for key in ("damaged", "good"):
            with pytest.raises(RankMissing) as caught:
                reducer({f"{key} {group.rank}": 1.0})
            texts.append(str(caught.value))
        return texts

    monkeypatch.setattr(ThreadComm, "all_gather", damage)
    texts = run_threads(call, 3).values()
    assert {text for of_rank in texts for text in of_rank} == {texts[0][0]}
    assert "left in the middle of it (DamagedError: what rank 1 sent arrived damaged)" in texts[0][0]
    assert "Reductions on this group are closed" in texts[0][0]


@pytest.mark.parametrize(
    "schema",
    [
        '[[[[],"list"]],[[[-1],"mean"]]]',
        '[[[[],"tuple"]],[[["0"],"mean"]]]',
        '[[[[],"dict"]],[[["a"],"mean"],[["a"],"sum"]]]',
        '[[[[],"dict"]],[[[true],"mean"]]]',
        '[[[[],"dict"],[[],"list"]],[[["a"],"mean"]]]',
        '[[[[],"OrderedDict"]],[[["a"],"mean"]]]',
        '[[[[],"dict"]],[[[],"mean"]]]',
        '[[[[],"dict"]],[[["a"],"median"]]]',
        '[[[[],"dict"],[["a"],"int8"]],[[["a"],"mean"]]]',
        '[[[[],"dict"]],[[["a"],["mean"]]]]',
        '[[],[[[],"mean"',
        "[]",
        '{"a": NaN}',
    ],
)
def test_schema_that_no_honest_peer_sends_is_refused(schema: str) -> None:
    with pytest.raises(ProtocolMismatch, match=r"^a peer sent .*; ranks must run the same version"):
        decode(schema.encode())


@pytest.mark.parametrize("depth", [101, 100_000])
def test_structure_that_is_too_deep_is_refused(depth: int) -> None:
    steps = ",".join(['"k"'] * depth)
    with pytest.raises(ProtocolMismatch, match="a structure deeper than 100"):
        decode(f'[[[[],"dict"]],[[[{steps}],"mean"]]]'.encode())
    with pytest.raises(ProtocolMismatch, match="a peer sent"):
        decode(b"[" * depth)
