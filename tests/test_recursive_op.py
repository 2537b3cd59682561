"""The functions of `recursive_op` unite what ranks hold, with the signatures of those that they take the place of."""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import ddpstats
from ddpstats.errors import DdpstatsError, InvalidStats, ProtocolMismatch
from ddpstats.recursive_op import (
    parse_losses,
    recursive_average,
    recursive_divide,
    recursive_sum,
    reduce_dict,
)
from ddpstats.testing import PerRank, RankPool, count_collectives
from tests.integrations.on_ranks import on_group
from tests.needs import imported, needs


class Losses(NamedTuple):
    l1: Any
    snr: Any


# -- what runs on the ranks -------------------------------------------------------------------------------------------


def average(obj: Any, weight: Any) -> Any:
    return recursive_average(obj, weight, True)


def total(obj: Any, weight: Any) -> Any:
    return recursive_sum(obj, weight, True)


def averages(objs: list[Any], weight: Any) -> list[Any]:
    return [recursive_average(obj, weight, True)[0] for obj in objs]


def average_in_pairs(obj: Any, weight: Any) -> Any:
    """Ranks 0 and 2 among themselves; rank 1 alone."""
    group = [dist.new_group([0, 2]), dist.new_group([1])][dist.get_rank() % 2]
    averaged = recursive_average(obj, weight, True, group=group)
    return averaged, recursive_sum(obj, weight, True, group=group)


def average_of_leaves_with_gradients(value: float) -> tuple[Any, bool, Any, int, float]:
    leaf, weight = torch.tensor([value], requires_grad=True), torch.tensor([8.0])
    (leaf * 2).sum().backward()  # type: ignore[no-untyped-call]
    averaged, _ = recursive_average({"a": leaf, "b": leaf * 2}, weight, True)
    assert leaf.grad is not None
    requires_grad = any(average.requires_grad for average in averaged.values())
    return averaged, requires_grad, leaf.grad.item(), leaf._version, weight.item()


# -- helpers ----------------------------------------------------------------------------------------------------------


def t(*values: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def on_all(pool: RankPool, fn: Any, objs: list[Any], weights: Any) -> Any:
    """Return what all ranks agree on, to the values, dtypes, shapes and order of keys."""
    weight = PerRank(weights) if isinstance(weights, list) else weights
    answers = pool.run(fn, PerRank(objs), weight).values()
    assert len({repr(written_out(answer)) for answer in answers}) == 1, answers
    return answers[0]


def written_out(tree: Any) -> Any:
    """A tree with its tensors written out in full."""
    if isinstance(tree, dict):
        return type(tree), [(key, written_out(value)) for key, value in tree.items()]
    if isinstance(tree, list | tuple):
        return type(tree), [written_out(value) for value in tree]
    if isinstance(tree, torch.Tensor):
        return tree.dtype, tree.device, tuple(tree.shape), tree.tolist()
    return tree


def plain(tree: Any) -> Any:
    """A tree with Python numbers for its 0-d tensors."""
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(plain, tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map(plain, tree))
    if isinstance(tree, torch.Tensor):
        assert tree.dim() == 0
        return tree.item()
    return tree


# -- the union of what the ranks hold ---------------------------------------------------------------------------------


def test_the_first_example(two_ranks: RankPool) -> None:
    rank0 = {"l1_loss": [t(0.0505)], "snr_loss": [t(0.0230), t(-2.0530), t(-1.9700)]}
    rank1 = {"l1_loss": [t(0.0505), t(0.0230)], "snr_loss": [t(-3.167), t(-2.883)]}
    averaged, weight = on_all(two_ranks, average, [rank0, rank1], t(8.0))
    expected = {"l1_loss": [0.0505, 0.0230], "snr_loss": [-1.572, -2.468, -1.970]}
    assert plain(averaged)["l1_loss"] == pytest.approx(expected["l1_loss"])
    assert plain(averaged)["snr_loss"] == pytest.approx(expected["snr_loss"])
    assert weight.item() == 16.0


@pytest.mark.parametrize(
    ("objs", "expected"),
    [
        ([{"l1": t(0.5)}, {"snr": t(-2.0)}], {"l1": 0.5, "snr": -2.0}),
        ([{}, {"a": t(1.0)}], {"a": 1.0}),
        ([{}, {}], {}),
        ([{"a": None, "b": t(1.0)}, {"a": None}], {"a": None, "b": 1.0}),
        ([None, None], None),
        ([{"a": None}, {"a": {"b": [t(1.0)]}}], {"a": {"b": [1.0]}}),
        ([[t(1.0)], [t(3.0), t(4.0)]], [2.5, 4.0]),
        ([Losses(t(1.0), None), Losses(t(3.0), t(4.0))], {"l1": 2.5, "snr": 4.0}),
        ([t(1.0), t(3.0)], 2.5),
    ],
    ids=lambda value: repr(plain(value)) if isinstance(value, tuple | dict) else None,
)
def test_ranks_may_hold_different_things(two_ranks: RankPool, objs: list[Any], expected: Any) -> None:
    # rank 1 weighs three times as much
    averaged, weight = on_all(two_ranks, average, objs, [t(1.0), t(3.0)])
    assert written_out(plain(averaged)) == written_out(expected)
    assert weight.item() == 4.0


def test_the_order_of_keys_is_one_however_it_changes(two_ranks: RankPool) -> None:
    steps = [["a", "b"], ["b", "a", "c"], ["c", "a"]]
    rank0, rank1 = ([{key: t(1.0) for key in keys} for keys in keys_by_step] for keys_by_step in (steps, steps[::-1]))
    answers = two_ranks.run(averages, PerRank([rank0, rank1]), t(1.0)).values()
    assert list(map(list, answers[0])) == list(map(list, answers[1]))
    assert list(map(set, answers[0])) == [{"a", "b", "c"}] * 3


def test_a_sum_over_ranks(two_ranks: RankPool) -> None:
    objs = [{"a": t(1.0, 2.0), "b": t(1.0, 1.0)}, {"a": t(3.0, 4.0), "c": None}]
    summed = on_all(two_ranks, total, objs, [t(1.0, 2.0), t(1.0, 0.0)])
    assert plain(summed) == {"a": 1.0 + 4.0 + 3.0, "b": 3.0, "c": None}


# -- weights ----------------------------------------------------------------------------------------------------------


def test_weight_is_the_plain_total_in_its_own_dtype(two_ranks: RankPool) -> None:
    for dtype in (torch.int64, torch.float32, torch.float16):
        weights = [t(8, 1, dtype=dtype), t(3, dtype=dtype)]
        averaged, weight = on_all(two_ranks, average, [{"a": t(1.0, 10.0)}, {"a": t(4.0), "b": t(5.0)}], weights)
        assert written_out(weight) == written_out(torch.tensor(12, dtype=dtype))
        assert plain(averaged) == {"a": pytest.approx((8 + 10 + 12) / 12), "b": 5.0}


def test_a_large_integer_weight_stays_exact(two_ranks: RankPool) -> None:
    _, weight = on_all(two_ranks, average, [{"a": t(1.0)}] * 2, [t(2**40 + 1), t(2)])
    assert written_out(weight) == written_out(torch.tensor(2**40 + 3))


def test_a_large_weight_does_not_overflow_a_half_precision_leaf(two_ranks: RankPool) -> None:
    averaged, _ = on_all(two_ranks, average, [{"a": t(2.0, dtype=torch.float16)}] * 2, t(40000.0))  # stock: nan
    assert written_out(averaged) == written_out({"a": torch.tensor(2.0, dtype=torch.float16)})


# -- NaN, infinity ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [[t(8.0), t(2.0)], [t(2.0), t(8.0)]])
def test_nan_on_one_rank_is_nan_for_that_key_alone(two_ranks: RankPool, weights: list[torch.Tensor]) -> None:
    # Stock leaves the NaN out and scales the rest as if all weights were equal: 3.2 or 0.8 for 2.0.
    averaged, _ = on_all(two_ranks, average, [{"a": t(math.nan), "b": t(1.0)}, {"a": t(2.0), "b": t(1.0)}], weights)
    assert math.isnan(averaged["a"].item())
    assert averaged["b"].item() == 1.0


# -- dtypes -----------------------------------------------------------------------------------------------------------

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool]


def test_dtype_is_promoted_over_ranks(two_ranks: RankPool) -> None:
    pairs = [(first, second) for first in DTYPES for second in DTYPES]
    stats = [{str(pair): t(1 - rank, dtype=pair[rank]) for pair in pairs} for rank in range(2)]
    averaged, _ = on_all(two_ranks, average, stats, t(1.0))
    assert [value.item() for value in averaged.values()] == [0.5] * len(pairs)
    for pair in pairs:
        promoted = torch.promote_types(*pair)
        expected = promoted if promoted.is_floating_point else torch.get_default_dtype()
        assert averaged[str(pair)].dtype == expected


def test_a_dtype_of_another_step_does_not_linger(two_ranks: RankPool) -> None:
    steps = [{"a": t(1.0, dtype=dtype)} for dtype in (torch.float64, torch.float16, torch.float32)]
    steps_of_rank_1 = [{"a": t(1.0, dtype=torch.float16)}, {}, {"a": t(1.0, dtype=torch.float32)}]
    answers = two_ranks.run(averages, PerRank([steps, steps_of_rank_1]), t(1.0)).values()
    dtypes = [[answer["a"].dtype for answer in rank] for rank in answers]
    assert dtypes == [[torch.float64, torch.float16, torch.float32]] * 2


def test_python_numbers_take_the_default_dtype(two_ranks: RankPool) -> None:
    averaged, _ = on_all(two_ranks, average, [{"a": 1.0, "b": 2, "c": True}, {"a": 2.0, "b": 4.0, "c": False}], t(1.0))
    expected = {key: torch.tensor(value) for key, value in {"a": 1.5, "b": 3.0, "c": 0.5}.items()}
    assert written_out(averaged) == written_out(expected)


# -- gradients, groups, no group --------------------------------------------------------------------------------------


def collectives_of_a_call(keys: int) -> int:
    stats = {f"k{key}": [t(1.0)] for key in (range(keys) if dist.get_rank() else reversed(range(keys)))}
    recursive_average(stats, t(1.0), True)
    with count_collectives() as seen:
        recursive_average(stats, t(1.0), True)
    return seen.total


def test_one_collective_for_the_whole_tree_in_whatever_order(two_ranks: RankPool) -> None:
    for keys in (1, 50):
        assert two_ranks.run(collectives_of_a_call, keys).values() == [1, 1]


def storages(obj: Any, weight: Any) -> dict[str, int]:
    averaged, _ = recursive_average(obj, weight, True)
    return {key: value.untyped_storage().data_ptr() for key, value in averaged.items()}


def test_tensors_of_one_dtype_share_one_storage(two_ranks: RankPool) -> None:
    held = {"a": t(1.0), "b": t(2.0), "c": t(3.0, dtype=torch.float64), "d": t(4.0, dtype=torch.float64)}
    for storage_of in two_ranks.run(storages, PerRank([held, {**held, "e": t(5.0)}]), t(1.0)).values():
        assert storage_of["a"] == storage_of["b"] == storage_of["e"] != storage_of["c"] == storage_of["d"]


def test_gradients_and_the_weight_that_was_passed_are_left_alone(two_ranks: RankPool) -> None:
    for averaged, *rest in two_ranks.run(average_of_leaves_with_gradients, PerRank([1.0, 3.0])).values():
        assert plain(averaged) == {"a": 2.0, "b": 4.0}
        assert rest == [False, 2.0, 0, 8.0]


def test_average_in_a_subgroup_is_of_its_ranks_alone(three_ranks: RankPool) -> None:
    objs = [{f"only{rank}": t(float(rank)), "all": t(float(rank))} for rank in range(3)]
    rank0, rank1, rank2 = three_ranks.run(average_in_pairs, PerRank(objs), t(2.0)).values()
    assert written_out(rank0) == written_out(rank2)
    (averaged, weight), summed = rank0
    assert plain(averaged) == {"only0": 0.0, "all": 1.0, "only2": 2.0}
    assert plain(summed) == {"only0": 0.0, "all": 4.0, "only2": 4.0}
    assert weight.item() == 4.0
    (averaged, weight), _ = rank1
    assert (plain(averaged), weight.item()) == ({"only1": 1.0, "all": 1.0}, 2.0)


def test_not_distributed_is_local_even_where_there_is_a_group(two_ranks: RankPool) -> None:
    answers = two_ranks.run(recursive_average, PerRank([{"a": t(1.0)}, {"b": t(2.0)}]), t(8.0), False).values()
    assert [plain(averaged) for averaged, _ in answers] == [{"a": 1.0}, {"b": 2.0}]
    assert [weight.item() for _, weight in answers] == [8.0, 8.0]


def test_distributed_without_a_group_is_local() -> None:
    averaged, weight = recursive_average({"a": t(1.0, 4.0)}, t(1.0, 2.0), True)
    assert (plain(averaged), weight.item()) == ({"a": 3.0}, 3.0)


# -- errors -----------------------------------------------------------------------------------------------------------


def test_a_leaf_that_is_no_number_is_named_on_every_rank(two_ranks: RankPool) -> None:
    errors = two_ranks.run(average, PerRank([{"a": t(1.0)}, {"a": "one"}]), t(1.0)).errors()
    assert [(type(error), getattr(error, "path", None)) for error in errors.values()] == [(InvalidStats, "a")] * 2
    assert on_all(two_ranks, average, [{"a": t(1.0)}] * 2, t(1.0))[0]["a"].item() == 1.0  # and it goes on working


def test_a_length_other_than_the_weights_is_named_on_every_rank(two_ranks: RankPool) -> None:
    errors = two_ranks.run(average, PerRank([{"a": t(1.0)}, {"a": t(1.0, 2.0)}]), t(1.0)).errors()
    assert [getattr(error, "ranks", None) for error in errors.values()] == [(1,)] * 2


def test_sum_and_average_do_not_meet(two_ranks: RankPool) -> None:
    errors = two_ranks.run(call_either, PerRank([True, False])).errors()
    assert len(errors) == 2
    assert all(isinstance(error, DdpstatsError) and "recursive_sum" in str(error) for error in errors.values())


def call_either(first: bool) -> None:
    (recursive_sum if first else recursive_average)({"a": t(1.0)}, t(1.0), True)


# -- beside espnet's own ----------------------------------------------------------------------------------------------

SAME_AS_ESPNET = [
    {"a": t(0.1, 0.7), "b": [t(1.0, 2.0), (t(3.0, 4.0), None)]},
    OrderedDict(a=t(0.1, 0.7)),
    {"a": t(0.1, 0.7, dtype=torch.float64)},
    {"a": t(math.nan, 1.0), "b": t(math.inf, 1.0)},
    [t(0.25, -1.5)],
    t(0.25, -1.5),
    {},
    {"a": {}},
    None,
]


@pytest.mark.library
@pytest.mark.parametrize("obj", SAME_AS_ESPNET, ids=range(len(SAME_AS_ESPNET)))
@pytest.mark.parametrize("weight", [t(2.0, 3.0), t(2, 3)], ids=["float", "int"])
def test_not_distributed_is_what_espnet_computes(obj: Any, weight: torch.Tensor) -> None:
    needs("espnet2")
    espnet = imported("espnet2.torch_utils.recursive_op")
    (theirs, their_weight), (ours, our_weight) = espnet.recursive_average(obj, weight), recursive_average(obj, weight)
    assert_equal_to_espnets(ours, theirs)
    assert_equal_to_espnets(recursive_sum(obj, weight), espnet.recursive_sum(obj, weight))
    assert written_out(our_weight) == written_out(their_weight)
    assert_equal_to_espnets(recursive_divide(theirs, t(2.0)[0]), espnet.recursive_divide(theirs, t(2.0)[0]))


def assert_equal_to_espnets(ours: Any, theirs: Any) -> None:
    """Equal but for the last digit, as espnet computes in the leaf's dtype. An empty container has no path in ours."""
    if isinstance(theirs, dict):
        for key, value in theirs.items():
            if key in ours or value != {}:
                assert_equal_to_espnets(ours[key], value)
    elif isinstance(theirs, list | tuple):
        assert type(ours) is type(theirs)
        for our_value, their_value in zip(ours, theirs, strict=True):
            assert_equal_to_espnets(our_value, their_value)
    elif isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    else:
        assert ours is theirs


def test_recursive_divide_keeps_containers_and_refuses_texts() -> None:
    tree = {"a": [t(1.0)[0], None], "b": Losses(t(3, dtype=torch.int64)[0], t(1.0, dtype=torch.float64)[0])}
    divided = recursive_divide(tree, torch.tensor(2))
    assert plain(divided) == {"a": [0.5, None], "b": Losses(1.5, 0.5)}
    assert divided["b"].snr.dtype == torch.float64
    with pytest.raises(InvalidStats, match="not str"):
        recursive_divide({"a": "b"}, torch.tensor(2))


# -- with the weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weight", "want"), [([True, True], 2), ([200, 200], 400)])
def test_a_total_that_the_weights_dtype_cannot_hold_is_int64(weight: list[int], want: int) -> None:
    weights = torch.tensor(weight, dtype=torch.bool if weight[0] is True else torch.uint8)
    total = ddpstats.recursive_average({"a": torch.tensor([1.0, 3.0])}, weights)[1]
    assert (total.dtype, total.item()) == (torch.int64, want)


# -- reduce_dict, of DETR, torchvision's references and detectron2 ----------------------------------------------------


def means(values: dict[str, torch.Tensor]) -> Any:
    """Call `reduce_dict` under a default device that is not the values'."""
    before = dict(values)
    with torch.device("meta"):
        result = reduce_dict(values)
    assert values == before
    return result


def sums(values: dict[str, torch.Tensor]) -> Any:
    return reduce_dict(values, average=False)


def means_of_values_with_gradients(values: dict[str, float]) -> list[bool]:
    result = reduce_dict({key: torch.tensor(value, requires_grad=True) for key, value in values.items()})
    return [tensor.requires_grad for tensor in result.values()]


def collectives_of_two_calls(keys: int) -> list[tuple[list[str], int]]:
    """Return those on the program's group, and the number of all."""
    seen = []
    for _ in range(2):
        with on_group(dist.group.WORLD) as on_theirs, count_collectives() as issued:
            reduce_dict({f"loss_{index}": torch.tensor(1.0) for index in range(keys)})
        seen.append((on_theirs, issued.total))
    return seen


@pytest.mark.parametrize(
    ("by_rank", "fn", "expected"),
    [
        ([{"b": 2.0, "a": 0.25}, {"a": 0.5, "b": 4.0}], means, {"b": 3.0, "a": 0.375}),
        ([{"b": 2.0, "a": 0.25}, {"a": 0.5, "b": 4.0}], sums, {"b": 6.0, "a": 0.75}),
        ([{"a": 1.0, "dn": 4.0}, {"a": 3.0, "x": -10.0}], means, {"a": 2.0, "dn": 4.0, "x": -10.0}),
        # A rank whose batch has no annotation lacks the losses of denoising.
        ([{"vfl": 1.0, "vfl_dn": 4.0}, {"vfl": 3.0}], sums, {"vfl": 4.0, "vfl_dn": 4.0}),
        ([{"vfl": 1.0}, {}], means, {"vfl": 1.0}),
        ([{}, {}], means, {}),
    ],
)
def test_reduce_dict_has_the_keys_of_all_ranks_on_every_rank(
    two_ranks: RankPool, by_rank: list[dict[str, float]], fn: Any, expected: dict[str, float]
) -> None:
    values = [{key: torch.tensor(value) for key, value in held.items()} for held in by_rank]
    rank0, rank1 = two_ranks.run(fn, PerRank(values)).values()
    assert written_out(rank0) == written_out(rank1)
    assert plain(rank0) == expected
    assert {(tensor.dtype, tensor.device.type) for tensor in rank0.values()} <= {(torch.float32, "cpu")}


def test_reduce_dict_averages_integers_and_bools_in_the_default_float_dtype(two_ranks: RankPool) -> None:
    by_rank = [
        {"count": torch.tensor(1), "is_last": torch.tensor(True)},
        {"count": torch.tensor(4), "is_last": torch.tensor(False)},
    ]
    for result in two_ranks.run(means, PerRank(by_rank)).values():
        assert plain(result) == {"count": 2.5, "is_last": 0.5}
        assert [tensor.dtype for tensor in result.values()] == [torch.float32] * 2


def test_reduce_dict_rounds_no_sum_of_integers(two_ranks: RankPool) -> None:
    by_rank = [{"n": torch.tensor(16777217), "x": torch.tensor(1.0)}, {"n": torch.tensor(0), "x": torch.tensor(2.0)}]
    for result in two_ranks.run(sums, PerRank(by_rank)).values():
        assert plain(result) == {"n": 16777217.0, "x": 3.0}
        assert [tensor.dtype for tensor in result.values()] == [torch.float64, torch.float32]


def averages_dict_or(call: str, values: dict[str, torch.Tensor]) -> str:
    """Call `reduce_dict` on rank 0 and ``call`` on rank 1; return the error."""
    calls: dict[str, Callable[[], Any]] = {
        "sum": lambda: reduce_dict(values, average=False),
        "recursive_average": lambda: recursive_average(values, torch.ones(1), True),
    }
    with pytest.raises(ProtocolMismatch) as caught:
        calls[call]() if dist.get_rank() else reduce_dict(values)
    return str(caught.value)


@pytest.mark.parametrize(
    ("call", "text"), [("sum", "reduce_dict(average=False)"), ("recursive_average", "recursive_average()")]
)
def test_reduce_dict_is_not_paired_with_another_function(two_ranks: RankPool, call: str, text: str) -> None:
    messages = two_ranks.run(averages_dict_or, call, {"loss": torch.tensor(1.0)}).values()
    assert messages[0] == messages[1]
    assert "rank 0: reduce_dict(average=True)" in messages[0]
    assert f"rank 1: {text}" in messages[0]


def test_reduce_dict_has_no_gradient_and_is_one_collective_on_a_group_of_its_own(two_ranks: RankPool) -> None:
    assert two_ranks.run(means_of_values_with_gradients, {"a": 1.0}).values() == [[False]] * 2
    for first, second in two_ranks.run(collectives_of_two_calls, 40).values():
        assert first[0] == []
        assert second == ([], 1)


def test_reduce_dict_of_a_vector_is_an_error_on_every_rank(two_ranks: RankPool) -> None:
    by_rank = [{"a": torch.ones(2)}, {"a": torch.ones(())}]
    first, second = two_ranks.run(means, PerRank(by_rank)).errors().values()
    assert type(first) is InvalidStats
    assert str(first) == str(second)
    assert "'a'" in str(first)


# -- parse_losses, of mmdetection -------------------------------------------------------------------------------------


def parsed(factor: float, values: dict[str, Any], lists: dict[str, list[float]]) -> tuple[float, Any, list[float]]:
    """Return this rank's loss, what it logs, and the gradient of two weights, of which every loss is a multiple."""
    weights = torch.tensor([1.0, 2.0], requires_grad=True)
    multiples = {name: [weights[index] * by for index, by in enumerate(factors)] for name, factors in lists.items()}
    loss, log_vars = parse_losses({"loss_cls": weights * factor, **values, **multiples})
    loss.backward()  # type: ignore[no-untyped-call]
    assert weights.grad is not None
    return loss.item(), log_vars, weights.grad.tolist()


def logged_by_a_rank_without_losses(is_without: bool) -> Any:
    return parse_losses({} if is_without else {"loss_cls": torch.tensor([2.0, 4.0]), "num_pos": torch.tensor([1, 2])})[
        1
    ]


@pytest.mark.parametrize(
    ("values", "lists", "log_vars", "own"),
    [
        # a loss is what has "loss" in its name
        (
            [{"acc": torch.tensor([40.0])}, {"acc": torch.tensor([60.0])}],
            [{}, {}],
            {"loss_cls": 3.0, "acc": 50.0, "loss": 3.0},
            [(1.5, [0.5, 0.5]), (4.5, [1.5, 1.5])],
        ),
        # rank 1 has no mask
        (
            [{}, {}],
            [{"loss_mask": [2.0, 1.0]}, {}],
            {"loss_cls": 3.0, "loss_mask": 4.0, "loss": 5.0},
            [(5.5, [2.5, 1.5]), (4.5, [1.5, 1.5])],
        ),
        # as many keys, and other ones
        (
            [{"n": torch.tensor([1, 2])}, {"n": torch.tensor([True])}],
            [{"loss_mask": [2.0, 1.0]}, {"loss_iou": [2.0, 1.0]}],
            {"loss_cls": 3.0, "n": 1.25, "loss_mask": 4.0, "loss_iou": 4.0, "loss": 7.0},
            [(5.5, [2.5, 1.5]), (8.5, [3.5, 2.5])],
        ),
    ],
)
def test_parse_losses_logs_each_key_over_its_holders_and_keeps_this_ranks_graph(
    two_ranks: RankPool, values: Any, lists: Any, log_vars: dict[str, float], own: list[tuple[float, list[float]]]
) -> None:
    results = two_ranks.run(parsed, PerRank([1.0, 3.0]), PerRank(values), PerRank(lists)).values()
    assert [(loss, gradient) for loss, _, gradient in results] == own
    assert [logged for _, logged, _ in results] == [log_vars, log_vars]
    assert {type(value) for value in results[0][1].values()} == {float}


def test_parse_losses_of_a_rank_without_losses_logs_those_of_the_others(two_ranks: RankPool) -> None:
    logged = two_ranks.run(logged_by_a_rank_without_losses, PerRank([False, True])).values()
    assert logged == [{"loss_cls": 3.0, "num_pos": 1.5, "loss": 1.5}] * 2


def test_parse_losses_of_what_is_no_loss_is_an_error_on_every_rank(two_ranks: RankPool) -> None:
    values = [{"loss_mask": "none"}, {}]
    first, second = two_ranks.run(parsed, PerRank([1.0, 3.0]), PerRank(values), {}).errors().values()
    assert type(first) is InvalidStats
    assert str(first) == str(second)
    assert "'loss_mask'" in str(first)


def losses_without_a_mean(is_bad: bool) -> Any:
    loss = torch.tensor([1.0, 2.0])
    return parse_losses({"loss_mask": [loss, loss.to_sparse() if is_bad else loss]})


def test_parse_losses_of_a_tensor_without_a_mean_is_an_error_on_every_rank(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(losses_without_a_mean, PerRank([False, True])).errors().values()
    assert type(first) is type(second) is InvalidStats
    assert str(first) == str(second)
    assert "rank 1 at 'loss_mask': the value is without a mean: " in str(first)


def test_drop_ins_without_a_group_are_local_and_take_what_the_originals_take() -> None:
    assert plain(means({"b": torch.tensor(2.0), "a": torch.tensor(1)})) == {"b": 2.0, "a": 1.0}
    assert plain(sums({"b": torch.tensor(2.0)})) == {"b": 2.0}
    loss, log_vars = parse_losses({"loss": torch.tensor([1.0, 3.0]), "losses": [torch.tensor(4.0)]})
    assert (loss.item(), log_vars) == (6.0, {"loss": 6.0, "losses": 4.0})
    parameters = [inspect.signature(function).parameters.values() for function in (reduce_dict, parse_losses)]
    assert [parameter.name for parameter in parameters[0]] == ["input_dict", "average"]
    assert [parameter.default for parameter in parameters[0]] == [inspect.Parameter.empty, True]
    assert [parameter.name for parameter in parameters[1]] == ["losses"]
