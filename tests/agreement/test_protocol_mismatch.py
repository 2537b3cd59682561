"""What ranks cannot reduce together: the same error on every rank, naming who and where, and a group that goes on."""

from __future__ import annotations

import dataclasses
import math
import struct
import time
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import ddpstats
from ddpstats import All, Max, Mean, Min, StatsReducer, Sum, all_ranks, any_rank
from ddpstats._agreement import channel
from ddpstats._agreement.codec import PROTOCOL_VERSION
from ddpstats._agreement.status import Failure, Status, decode_status, encode_status
from ddpstats._reduction.schema import OPS, Container, Node, leaf
from ddpstats._reduction.wire import (
    Holding,
    Numbers,
    decode_holding,
    decode_numbers,
    decode_schema,
    decode_slots,
    encode_holding,
    encode_numbers,
    encode_schema,
    encode_slots,
    more_bytes,
    numbers_bytes,
)
from ddpstats.errors import DdpstatsError, InvalidStats, NonFiniteStat, ProtocolMismatch, SchemaConflict
from ddpstats.testing import PerRank, RankPool, count_collectives

LIMIT_SEC = 60.0
TIMEOUT_SEC = 30.0  # of one reduction: nothing here may come near it


class Refused(NamedTuple):
    """What one call raised, and what the next call of the same reducer gave and cost."""

    kind: type
    text: str
    path: str | None
    ranks: tuple[int, ...]
    next_value: float
    next_collectives: int
    after_sec: float


def refused(call: Callable[[], Any], reducer: StatsReducer) -> Refused:
    """``reducer`` has made a call of ``{"good": ...}`` before, so that another one needs one collective."""
    started = time.monotonic()
    try:
        answer = call()
    except DdpstatsError as error:
        after_sec = time.monotonic() - started
        counted = reducer.counters.collectives
        with count_collectives() as seen:
            value = reducer({"good": float(dist.get_rank())}).values["good"]
        assert reducer.counters.collectives - counted == seen.total
        return Refused(type(error), str(error), error.path, error.ranks, value, seen.total, after_sec)
    raise AssertionError(f"nothing was raised: {answer}")


def good_reducer(name: str, **policy: Any) -> StatsReducer:
    reducer = StatsReducer(name=name, timeout_sec=TIMEOUT_SEC, **policy)
    assert reducer({"good": float(dist.get_rank())}).values == {"good": 1.0}
    return reducer


def agreed(outcomes: list[Refused]) -> Refused:
    """What all three ranks say alike."""
    assert len({one[:-1] for one in outcomes}) == 1
    assert max(one.after_sec for one in outcomes) < TIMEOUT_SEC / 2
    assert outcomes[0].next_value == 1.0
    assert outcomes[0].next_collectives == 1
    return outcomes[0]


# -- calls that do not belong together ---------------------------------------------------------------------------------


def call_by(how: str) -> Any:
    stats, weight = {"good": 1.0}, torch.ones(1)
    if how == "any_rank":
        return any_rank(True)
    if how == "all_ranks":
        return all_ranks(True)
    if how == "recursive_sum":
        return ddpstats.recursive_sum({"good": torch.ones(1)}, weight, True)
    if how == "recursive_average":
        return ddpstats.recursive_average({"good": torch.ones(1)}, weight, True)
    name, policy = how.split("|")
    return ddpstats.reduce_stats(stats, name=None if name == "None" else name, nonfinite=policy)  # type: ignore[arg-type]


def pair(how: str) -> Refused:
    reducer = good_reducer("pair")
    return refused(lambda: call_by(how), reducer)


@pytest.mark.parametrize(
    ("mine", "theirs", "mine_text", "theirs_text"),
    [
        ("train|skip", "valid|skip", "name='train', nonfinite='skip'", "name='valid', nonfinite='skip'"),
        ("None|skip", "|skip", "reduce_stats, without a name, nonf", "name='', nonfinite='skip'"),
        ("a|skip", "a|raise", "nonfinite='skip'", "nonfinite='raise'"),
        ("a|propagate", "a|skip", "nonfinite='propagate'", "nonfinite='skip'"),
        ("a\0|skip", "a|skip", r"name='a\x00'", "name='a'"),
        ("\ud800|skip", "\udfff|skip", r"name='\ud800'", r"name='\udfff'"),
        ("x" * 100_000 + "|skip", "y|skip", "name='xxx", "name='y'"),
        ("any_rank", "a|skip", "any_rank()", "reduce_stats, name='a'"),
        ("any_rank", "all_ranks", "any_rank()", "all_ranks()"),
        ("recursive_sum", "recursive_average", "recursive_sum()", "recursive_average()"),
        ("recursive_sum", "None|propagate", "recursive_sum()", "without a name"),
    ],
    ids=lambda text: ascii(text[:30]).replace("\\", "_"),
)
def test_calls_that_do_not_belong_together(
    three_ranks: RankPool, mine: str, theirs: str, mine_text: str, theirs_text: str
) -> None:
    found = three_ranks.run(pair, PerRank([theirs, mine, theirs]), timeout_sec=LIMIT_SEC).values()
    told = agreed(found)
    assert (told.kind, told.ranks, told.path) == (ProtocolMismatch, (0, 1, 2), None)
    first, second, third, advice = told.text.split("\n")
    assert first == "ranks of the default group of 3 ranks met in one collective with different calls:"
    assert second.startswith("  ranks 0, 2: ")
    assert theirs_text in second
    assert third.startswith("  rank 1: ")
    assert mine_text in third
    assert advice.startswith("All ranks must make the same calls in the same order.")


def one_more_train() -> list[Any]:
    train, valid = good_reducer("train"), good_reducer("valid")
    seen: list[Any] = []
    calls = [train, train, valid] if dist.get_rank() == 1 else [train, valid, valid]
    for reducer in calls:
        try:
            seen.append(reducer({"good": float(dist.get_rank())}).values)
        except ProtocolMismatch as error:
            seen.append(str(error))
    return seen


def test_one_call_more_is_caught_where_calls_have_names(three_ranks: RankPool) -> None:
    found = three_ranks.run(one_more_train, timeout_sec=LIMIT_SEC).values()
    assert found[0] == found[1] == found[2]
    first, second, third = found[0]
    assert (first, third) == ({"good": 1.0}, {"good": 1.0})
    assert "  ranks 0, 2: reduce_stats, name='valid'" in second
    assert "  rank 1: reduce_stats, name='train'" in second
    assert "A rank with one call more or less than the others" in second


# -- versions ----------------------------------------------------------------------------------------------------------


def with_version(name: str, value: Any) -> list[str]:
    """Twice with another version on rank 1, then with the same everywhere."""
    reducer, installed = StatsReducer(group=dist.new_group(), timeout_sec=TIMEOUT_SEC), vars(channel)[name]
    said = []
    try:
        if dist.get_rank() == 1:
            vars(channel)[name] = value
        for _ in range(2):
            with pytest.raises(ProtocolMismatch) as caught:
                reducer({"loss": 1.0})
            assert caught.value.ranks == (0, 1, 2)
            said.append(str(caught.value))
    finally:
        vars(channel)[name] = installed
    return [*said, str(reducer({"loss": 1.0}).values)]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("__version__", "99.1", f"ddpstats 99.1, protocol {PROTOCOL_VERSION}"),
        ("__version__", "9" * 100, f"ddpstats {'9' * 32}, protocol {PROTOCOL_VERSION}"),
        ("PROTOCOL_VERSION", 77, f"ddpstats {ddpstats.__version__}, protocol 77"),
    ],
    ids=["library", "long", "protocol"],
)
def test_versions_that_differ_meet_in_a_handshake(three_ranks: RankPool, name: str, value: Any, text: str) -> None:
    found = three_ranks.run(with_version, name, value, timeout_sec=LIMIT_SEC).values()
    assert found[0] == found[1] == found[2]
    first, second, after = found[0]
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


def too_large_together() -> torch.Tensor:
    return torch.tensor([1e308, 1e308], dtype=torch.float64)


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
    "str": (lambda: {"good": "0.5"}, "good", "str is not a leaf"),
    "bytes": (lambda: {"good": b"x"}, "good", "bytes is not a leaf"),
    "object": (lambda: {"a": [1.0, {"b": object()}]}, "a[1]/b", "object is not a leaf"),
    "set": (lambda: {"good": {1.0}}, "good", "set is not a leaf"),
    "iterator": (lambda: {"good": iter([1.0])}, "good", "list_iterator is not a leaf"),
    "unprintable": (lambda: {"good": Unprintable()}, "good", "Unprintable is not a leaf"),
    "in a dataclass": (lambda: Losses(1.0, "x"), "second", "str is not a leaf"),
    "marker in a marker": (lambda: {"good": Sum(Mean(1.0))}, "good", "Mean is not a leaf"),
    "marker of a dict": (lambda: {"good": Sum({"x": 1.0})}, "good", "dict is not a leaf"),
    "complex": (lambda: {"good": 1j}, "good", "complex is not a leaf"),
    "complex tensor": (lambda: {"good": torch.tensor(1j)}, "good", "a complex tensor"),
    "complex numpy": (lambda: {"good": np.complex64(1j)}, "good", "complex; log its real part"),
    "complex in a marker": (lambda: {"good": Sum(np.complex128(1j))}, "good", "complex; log its real part"),
    "matrix": (lambda: {"good": torch.ones(2, 2)}, "good", "a tensor of shape (2, 2)"),
    "vector": (lambda: {"good": torch.ones(3)}, "good", "a 1-d tensor of 3 elements, while the weight is a single"),
    "no element": (lambda: {"good": torch.ones(0)}, "good", "a 1-d tensor of 0 elements"),
    "numpy matrix": (lambda: {"good": np.ones((2, 2))}, "good", "an array of shape (2, 2)"),
    "numpy text": (lambda: {"good": np.array("x")}, "good", "of type str, which is not a number"),
    "meta": (lambda: {"good": torch.ones((), device="meta")}, "good", "meta tensors"),
    "distributed": (
        lambda: {"good": torch.ones(()).as_subclass(LooksDistributed)},
        "good",
        "a DTensor; pass .full_tensor()",
    ),
    "raises": (lambda: {"a": {"b": Unreadable()}}, "a/b", "cannot be read: ZeroDivisionError: this one never works"),
    "huge int": (lambda: {"good": 10**400}, "good", "int too large to convert to float"),
    "no flag": (lambda: {"good": ddpstats.Any(2)}, "good", "2.0, which is not a flag"),
    "own weight": (lambda: {"good": Mean(1.0, -1)}, "good", "a Mean for which the weight is -1"),
    "own NaN weight": (lambda: {"good": Mean(1.0, math.nan)}, "good", "a Mean for which the weight is nan"),
    "minimum of nothing": (lambda: {"good": Min(torch.ones(0))}, "good", "empty, and has no min"),
    "fake": (lambda: {"a": [fake(())]}, "a[0]", "the value is a FakeTensor, which has a shape but no value; pass a"),
    "fake, 1-d": (lambda: {"a": Sum(fake((3,)))}, "a", "the value is a FakeTensor, which has a shape but no value"),
    "meta, 1-d": (
        lambda: {"a": torch.ones(3, device="meta")},
        "a",
        "on the device meta, and meta tensors have a shape but",
    ),
    "weights too large together": (
        lambda: {"a": {"x": Mean(torch.ones(2), weight=too_large_together())}},
        "a/x",
        "its elements add up to more than a float64 can hold. Only the ratios of weights count in a mean: divide",
    ),
    "float key": (lambda: {"a": {1.0: 1.0}}, "a/1.0", "the key 1.0 is of type float"),
    "None key": (lambda: {None: 1.0}, "None", "the key None is of type NoneType"),
    "tuple key": (lambda: {("a", "b"): 1.0}, "('a', 'b')", "is of type tuple"),
    "bytes key": (lambda: {b"a": 1.0}, "b'a'", "is of type bytes"),
    "numpy key": (lambda: {np.int64(3): 1.0}, "np.int64(3)", "is of type numpy.int64"),
    "endless int key": (lambda: {"a": {10**5000: 1.0}}, "a", "an int key of 16610 bits"),
    "cycle": (cyclic_dict, "again/x[0]", "the structure contains itself"),
    "cycle in a list": (cyclic_list, "l[1]", "the structure contains itself"),
    "200 deep": (lambda: nested(200), "/".join("k" * 8), "nested more than 100 deep"),
    "100,000 deep": (lambda: nested(100_000), "/".join("k" * 8), "nested more than 100 deep"),
    "no stats": (lambda: "abc", None, "str is not a leaf"),
    "lone surrogate": (lambda: {"\ud800": "x"}, "\ud800", "str is not a leaf"),
}
BAD_WEIGHTS: dict[str, tuple[Callable[[], Any], str]] = {
    "negative": (lambda: -1.0, "the weight is -1.0; a weight is finite and not negative"),
    "NaN": (lambda: math.nan, "the weight is nan"),
    "infinite": (lambda: math.inf, "the weight is inf"),
    "huge": (lambda: 10**400, "int too large to convert to float"),
    "matrix": (lambda: torch.ones(2, 2), "the weight is a tensor of shape (2, 2)"),
    "negative element": (lambda: torch.tensor([2.0, -1.0]), "a weight is finite and not negative"),
    "NaN element": (lambda: torch.tensor([2.0, math.nan]), "a weight is finite and not negative"),
    "too large together": (too_large_together, "its elements add up to more than a float64 can hold. Only the ratios"),
    "fake": (lambda: fake((2,)), "the weight is a FakeTensor, which has a shape but no value; it is a real number or"),
    "None": (lambda: None, "the weight is of type NoneType, which is not a number"),
    "str": (lambda: "8", "the weight is of type str, which is not a number"),
    "list": (lambda: [1.0, 2.0], "the weight is of type list, which is not a number"),
    "complex": (lambda: 1j, "the weight is complex"),
    "marker": (lambda: Sum(1.0), "the weight is of type Sum, which is not a number"),
    "raises": (Unreadable, "ZeroDivisionError: this one never works"),
    "meta": (lambda: torch.ones((), device="meta"), "meta tensors"),
}


def pass_bad(stats: str | None, weight: str | None) -> Refused:
    reducer = good_reducer("bad")
    one_bad = dist.get_rank() == 1
    given_stats = BAD_STATS[stats][0]() if one_bad and stats is not None else {"good": 1.0}
    given_weight = BAD_WEIGHTS[weight][0]() if one_bad and weight is not None else 1.0
    return refused(lambda: reducer(given_stats, given_weight), reducer)


@pytest.mark.parametrize("case", BAD_STATS)
def test_bad_stats_of_one_rank_are_refused_on_all(three_ranks: RankPool, case: str) -> None:
    told = agreed(three_ranks.run(pass_bad, case, None, timeout_sec=LIMIT_SEC).values())
    _, path, text = BAD_STATS[case]
    assert (told.kind, told.ranks, told.path) == (InvalidStats, (1,), path)
    head, line, end = told.text.split("\n")
    assert head == "stats that cannot be reduced:"
    assert line.startswith(f"  rank 1 at {path!r}: " if path else "  rank 1: ")
    assert text in line
    assert end == "Nothing was reduced; the reducer goes on working."


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_a_bad_weight_of_one_rank_is_refused_on_all(three_ranks: RankPool, case: str) -> None:
    told = agreed(three_ranks.run(pass_bad, None, case, timeout_sec=LIMIT_SEC).values())
    assert (told.kind, told.ranks, told.path) == (InvalidStats, (1,), None)
    assert told.text.split("\n")[1].startswith("  rank 1: ")
    assert BAD_WEIGHTS[case][1] in told.text


def bad_on_the_first_call() -> list[Any]:
    """No layout is known yet, and the other ranks hold new paths of their own."""
    reducer = StatsReducer(group=dist.new_group(), timeout_sec=TIMEOUT_SEC)
    rank = dist.get_rank()
    with pytest.raises(InvalidStats) as caught:
        reducer({f"of rank {rank}": object() if rank == 1 else 1.0})
    return [str(caught.value), reducer({f"of rank {rank}": 1.0}).values]


def test_bad_stats_in_the_first_call(three_ranks: RankPool) -> None:
    found = three_ranks.run(bad_on_the_first_call, timeout_sec=LIMIT_SEC).values()
    assert found[0] == found[1] == found[2]
    assert "  rank 1 at 'of rank 1': object is not a leaf" in found[0][0]
    assert found[0][1] == {"of rank 0": 1.0, "of rank 1": 1.0, "of rank 2": 1.0}


def bad_everywhere() -> Refused:
    reducer = good_reducer("bad")
    bad = {"x": "text"} if dist.get_rank() < 2 else {"y": 1j}
    return refused(lambda: reducer(bad), reducer)


def test_every_bad_rank_is_named(three_ranks: RankPool) -> None:
    told = agreed(three_ranks.run(bad_everywhere, timeout_sec=LIMIT_SEC).values())
    assert (told.ranks, told.path) == ((0, 1, 2), "x")
    assert "\n  ranks 0, 1 at 'x': str is not a leaf" in told.text
    assert "\n  rank 2 at 'y': complex is not a leaf" in told.text


def undecided_flag(kind: str) -> Refused:
    reducer = good_reducer("bad")
    decide = {"any_rank": any_rank, "all_ranks": all_ranks}[kind]
    flag = [False, Undecided(), torch.tensor(True)][dist.get_rank()]
    return refused(lambda: decide(flag), reducer)


@pytest.mark.parametrize("kind", ["any_rank", "all_ranks"])
def test_a_flag_without_a_truth_value(three_ranks: RankPool, kind: str) -> None:
    told = agreed(three_ranks.run(undecided_flag, kind, timeout_sec=LIMIT_SEC).values())
    assert (told.kind, told.ranks, told.path) == (InvalidStats, (1,), None)
    assert f"  rank 1: the flag of {kind}() has no truth value: cannot say\n" in told.text


# -- stats that do not fit together ------------------------------------------------------------------------------------

# What rank 1 holds, what ranks 0 and 2 hold, the path, and the words for both.
CONFLICTS: dict[str, tuple[Any, Any, str, str, str]] = {
    "leaf or dict": ({"a": 1.0}, {"a": {"b": 1.0}}, "a", "a leaf (mean)", "a dict with 1 entries ('b')"),
    "leaf or list": ({"a": 1.0}, {"a": [1.0, 2.0]}, "a", "a leaf (mean)", "a list with 2 entries (0, 1)"),
    "list or dict": ({"a": [1.0]}, {"a": {"0": 1.0}}, "a", "a list with 1 entries (0)", "a dict with 1 entries ('0')"),
    "tuple or dict": ({"a": (1.0,)}, {"a": {0: 1.0}}, "a", "a tuple with 1 entries (0)", "a dict with 1 entries (0)"),
    "mean or sum": ({"a": 1.0}, {"a": Sum(1.0)}, "a", "a leaf (mean)", "a leaf (sum)"),
    "min or max": ({"a": Min(1.0)}, {"a": Max(1.0)}, "a", "a leaf (min)", "a leaf (max)"),
    "any or all": ({"a": ddpstats.Any(1)}, {"a": All(1)}, "a", "a leaf (any)", "a leaf (all)"),
    "sum or list": ({"a": Sum(1.0)}, {"a": [1.0]}, "a", "a leaf (sum)", "a list with 1 entries (0)"),
    "deep down": ({"x": [0.0, {"y": 1.0}]}, {"x": [0.0, {"y": [1.0]}]}, "x[1]/y", "a leaf (mean)", "a list with 1"),
    "the whole": (1.0, {"a": 1.0}, "", "a leaf (mean)", "a dict with 1 entries ('a')"),
    "dataclass or list": (Losses(1.0, 2.0), [1.0], "", "a Losses with 2 entries ('first', 'second')", "a list with 1"),
}


def hold(case: str) -> Refused:
    reducer = good_reducer("conflict")
    mine, theirs, *_ = CONFLICTS[case]
    return refused(lambda: reducer(mine if dist.get_rank() == 1 else theirs), reducer)


@pytest.mark.parametrize("case", CONFLICTS)
def test_stats_that_do_not_fit_together(three_ranks: RankPool, case: str) -> None:
    told = agreed(three_ranks.run(hold, case, timeout_sec=LIMIT_SEC).values())
    _, _, path, mine, theirs = CONFLICTS[case]
    assert (told.kind, told.ranks, told.path) == (SchemaConflict, (0, 1, 2), path or None)
    head, first, second, advice = told.text.split("\n")
    what = f"different things under {path!r}" if path else "different stats"
    assert head == f"ranks of the default group of 3 ranks hold {what}:"
    assert first.startswith(f"  ranks 0, 2: {theirs}")
    assert second.startswith(f"  rank 1: {mine}")
    assert advice.endswith("Nothing was reduced.")


def conflict_many_times(count: int) -> Refused:
    reducer = good_reducer("conflict")
    return refused(lambda: reducer({f"k{i}": Sum(1.0) if dist.get_rank() else 1.0 for i in range(count)}), reducer)


def test_a_long_list_of_conflicts_is_cut(three_ranks: RankPool) -> None:
    told = agreed(three_ranks.run(conflict_many_times, 1000, timeout_sec=LIMIT_SEC).values())
    assert told.path == "k0"
    assert "\nand 995 more paths\n" in told.text
    assert len(told.text) < 1000


def go_on_after_a_conflict() -> list[Any]:
    """The layout of before is neither lost nor polluted by what was refused."""
    reducer = good_reducer("after")
    rank = dist.get_rank()
    with pytest.raises(SchemaConflict):
        reducer({"good": 1.0, "new": 1.0 if rank else [1.0]})
    before = reducer.counters
    values = [reducer({"good": 1.0}).values, reducer({"good": 1.0, "new": Sum(1.0)}).values]
    after = reducer.counters
    return [values, after.collectives - before.collectives, after.renegotiations - before.renegotiations]


def test_a_conflict_leaves_no_trace_in_the_layout(three_ranks: RankPool) -> None:
    found = three_ranks.run(go_on_after_a_conflict, timeout_sec=LIMIT_SEC).values()
    # one collective; then the new path: an all_reduce and an all_gather
    assert found == [[[{"good": 1.0}, {"good": 1.0, "new": 3.0}], 1 + 2, 1]] * 3


def look_alike() -> list[Any]:
    """Not a conflict: the same spelling, and None beside a container."""
    rank = dist.get_rank()
    reducer = StatsReducer(name="alike", timeout_sec=TIMEOUT_SEC)
    mixed = [{1: 10.0}, {"1": 20.0}, {True: 30.0}][rank]
    found: list[Any] = [reducer(mixed).values, reducer(mixed).flat()]
    found.append(reducer([{"a": None}, {"a": {"b": 1.0}}, {"a": [] if rank == 5 else {}}][rank]).values)
    return found


def test_what_only_looks_alike_is_kept_apart(three_ranks: RankPool) -> None:
    found = three_ranks.run(look_alike, timeout_sec=LIMIT_SEC).values()
    assert found == [[{1: 20.0, "1": 20.0}, {"1": 20.0, "\\1": 20.0}, {"a": {"b": 1.0}}]] * 3


# -- values that are not finite ----------------------------------------------------------------------------------------


def not_finite(count: int) -> Refused:
    reducer = good_reducer("finite", nonfinite="raise")
    rank = dist.get_rank()
    values = {0: 1.0, 1: math.nan, 2: -math.inf}
    stats = {"good": 1.0, "a": {"b": [0.0, values[rank]]}, "c": math.nan if rank == 2 else 0.0}
    stats |= {f"k{i}": math.inf if rank == 1 else 0.0 for i in range(count)}
    return refused(lambda: reducer(stats), reducer)


def test_a_value_that_is_not_finite_is_named_with_its_ranks(three_ranks: RankPool) -> None:
    told = agreed(three_ranks.run(not_finite, 0, timeout_sec=LIMIT_SEC).values())
    assert (told.kind, told.ranks, told.path) == (NonFiniteStat, (1, 2), "a/b[1]")
    assert told.text.split("\n") == [
        "non-finite stats (nonfinite='raise') on the default group of 3 ranks:",
        "  'a/b[1]': ranks 1, 2",
        "  'c': rank 2",
    ]


def test_a_long_list_of_values_that_are_not_finite_is_cut(three_ranks: RankPool) -> None:
    told = agreed(three_ranks.run(not_finite, 100, timeout_sec=LIMIT_SEC).values())
    assert told.text.endswith("\n  and 92 more paths")


# -- bytes from a peer -------------------------------------------------------------------------------------------------

KINDS = ("dict", "OrderedDict", "namedtuple:some.module:Outer.Name", "dataclass:m:\ud800")
texts = st.text(st.characters(), max_size=8)
leaves = st.builds(leaf, st.sampled_from(OPS), st.lists(texts, max_size=2).map(tuple))


def containers(children: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    kinds = st.lists(st.sampled_from(KINDS), min_size=1, max_size=2, unique=True)
    mappings = st.dictionaries(texts | st.integers(-(2**70), 2**70), children, max_size=4)
    lists = st.lists(st.sampled_from(("list", "tuple")), min_size=1, unique=True)
    sequences = st.dictionaries(st.integers(0, 1000), children, max_size=4).map(
        lambda items: dict(sorted(items.items()))
    )
    return st.builds(container, kinds, mappings, st.booleans()) | st.builds(container, lists, sequences, st.booleans())


def container(kinds: list[str], items: dict[Any, Node], nullable: bool) -> Node:
    return Container(tuple(kinds), tuple(items), tuple(items.values()), nullable)


schemas: st.SearchStrategy[Node] = st.recursive(leaves, containers, max_leaves=8)
statuses = st.builds(
    Status,
    call=texts,
    name=st.none() | texts,
    nonfinite=texts,
    failure=st.none() | st.builds(Failure, texts, texts),
    stale=st.booleans(),
    agreed=st.binary(min_size=8, max_size=8),
    body=st.binary(max_size=8),
)
holdings = st.builds(Holding, st.lists(texts, max_size=2).map(tuple), schemas)
DAMAGE = ("truncated", "extended", "flipped", "huge number", "spliced")


def damaged(payload: bytes, how: str, data: st.DataObject) -> bytes:
    at = data.draw(st.integers(0, max(0, len(payload) - 1)))
    if how == "truncated":
        return payload[:at]
    if how == "extended":
        return payload + data.draw(st.binary(min_size=1, max_size=8))
    if how == "flipped":
        return payload[:at] + bytes([payload[at] ^ (1 << data.draw(st.integers(0, 7)))]) + payload[at + 1 :]
    if how == "huge number":
        return payload[:at] + b"\xff\xff\xff\xff" + payload[at + 4 :]
    return payload[:at] + payload[data.draw(st.integers(0, len(payload))) :]


def read_or_refuse(payload: bytes, decode: Callable[[bytes], Any], encode: Callable[[Any], bytes]) -> None:
    """Whatever is read is exactly what an honest peer would have sent; anything else is a ProtocolMismatch."""
    started = time.monotonic()
    refusal = None
    try:
        value = decode(payload)
    except ProtocolMismatch as error:
        refusal = str(error)
    assert time.monotonic() - started < 5.0
    if refusal is None:
        assert encode(value) == payload
    else:
        assert refusal.startswith("a peer sent ")
        assert len(refusal) < 2000


def encoded(holding: Holding) -> bytes:
    return encode_holding(holding.unbuildable, encode_schema(holding.schema))


@given(schemas, statuses, holdings)
def test_what_is_told_survives_the_way_there_and_back(schema: Node, status: Status, holding: Holding) -> None:
    assert decode_schema(encode_schema(schema)) == schema
    assert decode_status(encode_status(status)) == status
    assert decode_holding(encoded(holding)) == holding


@given(st.binary(max_size=100))
@example(b"\x20" * 1000)
@example(b"\x20\x01\x00\x04\x00\x00\x00dict\xff\xff\xff\xff")
@example(b"\x40\x00\xff\xff")
def test_random_bytes_are_no_schema(payload: bytes) -> None:
    read_or_refuse(payload, decode_schema, encode_schema)
    read_or_refuse(payload, decode_holding, encoded)
    read_or_refuse(payload, decode_status, encode_status)
    read_or_refuse(struct.pack("<H", PROTOCOL_VERSION) + payload, decode_status, encode_status)


@settings(max_examples=150)
@given(schemas, st.sampled_from(DAMAGE), st.data())
def test_a_damaged_schema_is_refused(schema: Node, how: str, data: st.DataObject) -> None:
    read_or_refuse(damaged(encode_schema(schema), how, data), decode_schema, encode_schema)


@settings(max_examples=150)
@given(statuses, st.sampled_from(DAMAGE), st.data())
def test_a_damaged_status_is_refused(status: Status, how: str, data: st.DataObject) -> None:
    read_or_refuse(damaged(encode_status(status), how, data), decode_status, encode_status)


@settings(max_examples=150)
@given(holdings, st.sampled_from(DAMAGE), st.data())
def test_a_damaged_holding_is_refused(holding: Holding, how: str, data: st.DataObject) -> None:
    read_or_refuse(damaged(encoded(holding), how, data), decode_holding, encoded)


floats = st.floats(allow_nan=False)
weights = st.floats(0, allow_nan=False, allow_infinity=False)


@st.composite
def numbers(draw: st.DrawFn) -> tuple[int, Numbers]:
    leaves = draw(st.integers(0, 5))
    lanes = array("d", draw(st.lists(floats, min_size=leaves, max_size=leaves)))
    own = array("d", draw(st.lists(weights, min_size=leaves, max_size=leaves)))
    positions = draw(st.sets(st.integers(0, leaves - 1))) if leaves else set()
    scaled = {i: (draw(st.floats(-2, 2)), draw(st.integers(-4400, 4400))) for i in sorted(positions)}
    each: float | array[float] = own if draw(st.booleans()) else draw(weights)
    return leaves, Numbers(draw(weights), lanes, each, scaled)


@given(numbers())
def test_numbers_survive_the_way_there_and_back(held: tuple[int, Numbers]) -> None:
    leaves, sent = held
    payload = encode_numbers(sent)
    assert decode_numbers(payload, leaves) == sent
    assert len(payload) <= numbers_bytes(leaves) + more_bytes(len(sent.scaled), len(sent.mixed))
    assert decode_numbers(encode_numbers(None), leaves) is None
    if sent.weights != array("d") or not isinstance(sent.weights, array):
        with pytest.raises(ProtocolMismatch, match="a peer sent"):
            decode_numbers(payload, leaves + 1)


@settings(max_examples=150)
@given(numbers(), st.sampled_from(DAMAGE), st.data())
def test_damaged_numbers_are_refused(held: tuple[int, Numbers], how: str, data: st.DataObject) -> None:
    leaves, sent = held
    payload = damaged(encode_numbers(sent), how, data)
    read_or_refuse(payload, lambda given: decode_numbers(given, leaves), encode_numbers)


@given(st.binary(max_size=60), st.integers(0, 3))
def test_random_bytes_are_no_numbers(payload: bytes, leaves: int) -> None:
    for given_ in (payload, b"\1" + payload, b"\2" + payload):
        read_or_refuse(given_, lambda held: decode_numbers(held, leaves), encode_numbers)


@given(st.binary(max_size=40), st.integers(0, 2**33))
def test_slots_from_a_peer_stay_within_the_layout(payload: bytes, size: int) -> None:
    try:
        slots = decode_slots(payload, size)
    except ProtocolMismatch:
        return
    assert all(0 <= slot < size for slot in slots)
    assert encode_slots(list(slots)) == payload


def container_bytes(kind: str, keys: list[Any]) -> bytes:
    return encode_schema(Container((kind,), tuple(keys), tuple(leaf("mean") for _ in keys)))


@pytest.mark.parametrize(
    "payload",
    [
        container_bytes("list", [-1]),
        container_bytes("list", [1, 0]),
        container_bytes("list", [2**40]),
        container_bytes("tuple", ["0"]),
        container_bytes("dict", ["a", "a"]),
        container_bytes("unheard of", ["a"]),
        container_bytes("dataclass:no_name", ["a"]),
        container_bytes("class:os:environ", ["a"]),
        container_bytes("", ["a"]),
    ],
    ids=["negative", "unsorted", "far away", "text", "twice", "kind", "half a class", "other class", "no kind"],
)
def test_what_no_honest_peer_sends_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolMismatch, match=r"^a peer sent .*; ranks must run the same version"):
        decode_schema(payload)


def test_bytes_behind_the_end_are_counted() -> None:
    with pytest.raises(ProtocolMismatch, match="a peer sent 3 bytes too many"):
        decode_schema(container_bytes("dict", ["k"]) + b"abc")


@pytest.mark.parametrize("depth", [101, 1000, 100_000])
def test_a_structure_deeper_than_any_is_refused(depth: int) -> None:
    level = container_bytes("dict", ["k"])[:-1]
    with pytest.raises(ProtocolMismatch, match="a structure deeper than 100"):
        decode_schema(level * depth + b"\x01")
