"""Copies of known reductions in a user's own tree do not mix up keys once `functions.install` has put ours in place.

The tree is `tree_misc`: it needs torch alone.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpstats import ConfigError
from ddpstats.integrations import functions
from ddpstats.testing import RankPool, RankTimedOut, run_ranks
from tests.integrations import functions_runs as runs, tree_engine, tree_misc
from tests.needs import needs

HANG_SEC = 3.0
MISC = "tests.integrations.tree_misc"
ALL = [
    f"{MISC}.{name}"
    for name in (
        "reduce_dict",
        "Detector._parse_losses",
        "Trainer.write_metrics",
        "MetricsTracker.reduce",
    )
]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    functions.uninstall()


def install(*targets: Any) -> functions.InstalledFunctions:
    """Without the warnings, which have tests of their own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return functions.install(*targets)


# -- reduce_dict ------------------------------------------------------------------------------------------------------


# A rank whose batch has no annotation lacks the losses of denoising.
WITHOUT_DENOISING = [{"vfl": 1.0, "vfl_dn": 4.0}, {"vfl": 3.0}]
OTHER_KEYS = [{"a": 1.0, "dn": 4.0}, {"a": 3.0, "x": -10.0}]
AGREEING = [{"b": 2.0, "a": 0.25}, {"b": 4.0, "a": 0.5}]


@pytest.mark.parametrize(
    ("name", "by_rank", "average", "stock", "ours"),
    [
        ("reduce_dict", AGREEING, True, {"a": 0.375, "b": 3.0}, {"a": 0.375, "b": 3.0}),
        ("reduce_dict", AGREEING, False, {"a": 0.75, "b": 6.0}, {"a": 0.75, "b": 6.0}),
        # A loss, and negative.
        ("reduce_dict", OTHER_KEYS, True, {"a": 2.0, "dn": -3.0}, {"a": 2.0, "dn": 4.0, "x": -10.0}),
        # Stock has the result on rank 0 alone.
        ("to_main", OTHER_KEYS, True, {"a": 2.0, "dn": -3.0}, {"a": 2.0, "dn": 4.0, "x": -10.0}),
        ("by_name", [{"a": 1.0}, {"a": 3.0}], True, {"a": 2.0}, {"a": 2.0}),
        ("by_name", WITHOUT_DENOISING, True, None, {"vfl": 2.0, "vfl_dn": 4.0}),
        ("reduce_dict", WITHOUT_DENOISING, False, None, {"vfl": 4.0, "vfl_dn": 4.0}),
        ("reduce_dict", [{"vfl": 1.0}, {}], True, None, {"vfl": 1.0}),
    ],
)
def test_reduce_dict_is_the_copys_own_where_ranks_agree_and_right_where_not(
    two_ranks: RankPool, name: str, by_rank: Any, average: bool, stock: dict[str, float] | None, ours: dict[str, float]
) -> None:
    if stock is not None:  # it would hang
        assert two_ranks.run(runs.reduce_dict, name, by_rank, False, average).values()[0] == scalars(stock)
    assert two_ranks.run(runs.reduce_dict, name, by_rank, True, average).values() == [scalars(ours)] * 2


def scalars(values: dict[str, float]) -> list[tuple[str, str, float]]:
    return [(name, "float32", value) for name, value in values.items()]


@pytest.mark.slow
def test_stock_hangs_where_one_rank_lacks_a_key() -> None:
    stock = run_ranks(runs.reduce_dict, 2, "reduce_dict", WITHOUT_DENOISING, False, timeout_sec=HANG_SEC).errors()
    assert [type(error) for error in stock.values()] == [RankTimedOut] * 2


def test_reduce_dict_keeps_shapes_and_promotes_dtypes(two_ranks: RankPool) -> None:
    expected = [
        ("count", "float32", 2.5),  # torch refuses to divide it in place
        ("half", "bfloat16", 1.5),
        ("mixed", "float32", 1.5),
        ("one", "float32", [2.0]),
        ("row", "float32", [1.0, 2.0]),
        ("rows", "float32", [[2.0] * 3] * 2),
    ]
    assert two_ranks.run(runs.shapes_and_dtypes).values() == [expected] * 2


@pytest.mark.parametrize(("shapes", "said"), [([[2], [3]], "shapes 2 and 3 under 'a'"), ([[2], []], "'a'")])
def test_shapes_that_do_not_fit_are_an_error_on_every_rank(
    two_ranks: RankPool, shapes: list[list[int]], said: str
) -> None:
    first, second = two_ranks.run(runs.two_shapes, shapes).values()
    assert first == second
    assert first[0] == "SchemaConflict"
    assert said in first[3]


def test_a_call_is_one_collective_and_none_on_the_programs_group() -> None:
    nothing_on_theirs: list[str] = []
    new, known = (nothing_on_theirs, 3), (nothing_on_theirs, 1)
    expected = {name: [new, known] for name in ("reduce_dict", "_parse_losses", "reduce")}
    write_metrics = [(nothing_on_theirs, 4), (nothing_on_theirs, 2)]
    assert run_ranks(runs.collectives, 2).values() == [{**expected, "write_metrics": write_metrics}] * 2


def test_one_rank_gets_its_own_dict_back() -> None:
    install(MISC)
    given = {"a": torch.ones(())}
    assert tree_misc.reduce_dict(given) is given


# -- _parse_losses ----------------------------------------------------------------------------------------------------


def test_parse_losses_is_the_copys_own_where_ranks_agree(two_ranks: RankPool) -> None:
    stock = two_ranks.run(runs.parse_losses, False, "alike").values()
    assert two_ranks.run(runs.parse_losses, True, "alike").values() == stock
    log_vars = [("loss_cls", 3.0), ("acc", 50.0), ("loss", 3.0)]
    assert stock == [(1.5, "OrderedDict", log_vars, [0.5, 0.5]), (4.5, "OrderedDict", log_vars, [1.5, 1.5])]


def test_parse_losses_averages_each_loss_over_the_ranks_that_hold_it(two_ranks: RankPool) -> None:
    wrong = dict(two_ranks.run(runs.parse_losses, False, "other keys").values()[0][2])
    assert wrong["loss_mask"] == 4.0  # half of which is another loss
    found = two_ranks.run(runs.parse_losses, True, "other keys").values()
    log_vars = [("loss_cls", 3.0), ("acc", 50.0), ("loss_mask", 4.0), ("loss_iou", 4.0), ("loss", 7.0)]
    assert found == [(5.5, "OrderedDict", log_vars, [2.5, 1.5]), (8.5, "OrderedDict", log_vars, [3.5, 2.5])]
    found = two_ranks.run(runs.parse_losses, True, "missing").values()
    log_vars = [("loss_cls", 3.0), ("acc", 50.0), ("loss_mask", 3.0), ("loss", 4.5)]
    assert [rank[:3] for rank in found] == [(4.5, "OrderedDict", log_vars)] * 2


def test_parse_losses_of_what_is_no_loss_is_an_error_on_every_rank(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(runs.parse_losses, True, "refused").errors().values()
    assert str(first) == str(second)
    assert "'loss_mask'" in str(first)


# -- write_metrics ----------------------------------------------------------------------------------------------------

ALIKE = [{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 5.0}]
RANK_0_LACKS_MASK = [{"a": 1.0}, {"a": 3.0, "mask": 5.0}]


def test_write_metrics_writes_the_same_where_ranks_agree(two_ranks: RankPool) -> None:
    stock = two_ranks.run(runs.write_metrics, False, ALIKE).values()
    assert two_ranks.run(runs.write_metrics, True, ALIKE).values() == stock
    written = {"data_time": (0.75, 7), "x_total_loss": (5.5, 7), "a": (2.0, 7), "b": (3.5, 7)}
    assert stock == [{"rank_data_time": (0.25, 7), **written}, {"rank_data_time": (0.75, 7)}]


@pytest.mark.parametrize(
    ("by_rank", "stock"),
    [
        (RANK_0_LACKS_MASK, {"rank_data_time": (0.25, 7), "data_time": (0.75, 7), "x_total_loss": (2.0, 7)}),
        (RANK_0_LACKS_MASK[::-1], "KeyError: 'mask'"),
    ],
)
def test_write_metrics_writes_what_a_rank_lacks(
    two_ranks: RankPool, by_rank: list[dict[str, float]], stock: Any
) -> None:
    assert two_ranks.run(runs.write_metrics, False, by_rank).values()[0] == stock
    first, second = two_ranks.run(runs.write_metrics, True, by_rank).values()
    # The ranks' totals are 1 and 8.
    assert {"x_total_loss": (4.5, 7), "a": (2.0, 7), "mask": (5.0, 7)}.items() <= first.items()
    assert second == {"rank_data_time": (0.75, 7)}


def test_a_total_that_is_not_finite_is_an_error_on_every_rank(two_ranks: RankPool) -> None:
    by_rank = [{"a": 1.0}, {"a": float("nan")}]
    assert two_ranks.run(runs.write_metrics, False, by_rank).values()[1] == {"rank_data_time": (0.75, 7)}  # trains on
    expected = "FloatingPointError: Loss became infinite or NaN at iteration=7!\nloss_dict = {'a': nan}"
    assert two_ranks.run(runs.write_metrics, True, by_rank).values() == [expected, expected]


# -- MetricsTracker.reduce --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by_rank", "stock", "ours"),
    [
        ([{"frames": 3.0, "loss": 1.5}, {"loss": 2.5, "frames": 4.0}], {"frames": 7.0, "loss": 4.0}, None),
        (
            [{"ctc_loss": 1.0, "frames": 3.0}, {"att_loss": -2.0, "frames": 4.0}],
            {"ctc_loss": -1.0, "frames": 7.0},
            {"ctc_loss": 1.0, "att_loss": -2.0, "frames": 7.0},
        ),
    ],
)
def test_the_tracker_sums_each_key_over_the_ranks_that_hold_it(
    two_ranks: RankPool, by_rank: list[dict[str, float]], stock: dict[str, float], ours: dict[str, float] | None
) -> None:
    assert two_ranks.run(runs.reduce_tracker, False, by_rank).values()[0] == stock
    assert two_ranks.run(runs.reduce_tracker, True, by_rank).values() == [ours or stock] * 2


# -- the real packages ------------------------------------------------------------------------------------------------


@pytest.mark.library
@pytest.mark.parametrize(
    ("module", "nan"),
    [("espnet2.torch_utils.recursive_op", "1.0"), ("funasr.train_utils.recursive_op", "nan")],
)
def test_recursive_op_of_a_real_package(two_ranks: RankPool, module: str, nan: str) -> None:
    needs(module.partition(".")[0])
    wrong = two_ranks.run(runs.recursive, False, module).values()
    assert wrong[0][0] == [("l1", "float32", -1.125)]  # a mean of 1.25 and -3.5
    right = two_ranks.run(runs.recursive, True, module).values()
    assert [rank[0] for rank in right] == [[("l1", "float32", 1.25), ("snr", "float32", -3.5)]] * 2
    assert [rank[4] for rank in right] == [[("l1", "float32", 5.0), ("snr", "float32", -14.0)]] * 2
    # the total weight, what is not distributed, and what becomes of a NaN
    assert [(*rank[1:4], rank[5]) for rank in right] == [(*rank[1:4], rank[5]) for rank in wrong]
    assert right[0][5] == nan


# -- what is replaced, what is left, and what is said of it ------------------------------------------------------------


def test_a_module_is_searched_and_names_in_other_modules_are_replaced_and_restored() -> None:
    theirs, in_class = tree_misc.reduce_dict, vars(tree_misc.Trainer)["write_metrics"]
    done = functions.install(MISC)
    assert list(done.patched) == ALL
    assert done.patched[f"{MISC}.reduce_dict"] == ("tests.integrations.tree_engine.reduce_dict",)
    assert done.left == {}
    assert str(done).startswith(
        f"patched: {MISC}.reduce_dict (also tests.integrations.tree_engine.reduce_dict), {MISC}.Detector"
    )
    assert tree_engine.reduce_dict is tree_misc.reduce_dict is not theirs
    assert inspect.signature(tree_misc.reduce_dict) == inspect.signature(theirs)
    assert isinstance(vars(tree_misc.Trainer)["write_metrics"], staticmethod)
    assert functions.install(tree_misc) == done  # once more, and as a module: it still is
    functions.uninstall()
    assert tree_engine.reduce_dict is tree_misc.reduce_dict is theirs
    assert vars(tree_misc.Trainer)["write_metrics"] is in_class
    functions.uninstall()


def test_named_functions_alone_are_replaced_under_any_name() -> None:
    done = functions.install({MISC: ["renamed", "MetricsTracker.reduce"]})
    assert done.patched == {
        f"{MISC}.renamed": ("tests.integrations.tree_engine.mean_of_losses",),
        f"{MISC}.MetricsTracker.reduce": (),
    }
    assert not hasattr(tree_misc.reduce_dict, "__wrapped__")
    assert install({MISC: ["reduce_dict"]}).patched  # what it calls may be ours, and is found all the same
    assert install({MISC: ["renamed"]}).patched


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "largest",
            "gives {'b': tensor(2.), 'a': tensor(0.5000)} on 2 ranks that hold the same, where {'a': tensor(1.)",
        ),
        ("needs_a_gpu", "raises RuntimeError where it is tried: no GPU here"),
        ("other_parameters", "where (obj, weight, distributed=False) or (input_dict, average=True) or "),
        ("writes_another_name", "writes {'loss': (1.0, 3)} where {'data_time': (0.25, 3), 'x_total_loss': (2.5, 3), "),
    ],
)
def test_a_function_that_only_looks_like_a_known_one_is_left_with_the_difference(name: str, said: str) -> None:
    before = vars(tree_misc.Lookalikes)[name]
    with pytest.warns(UserWarning, match=r"functions: \S+Lookalikes\.\w+ .* It is left as it is\.$") as caught:
        done = functions.install({MISC: [f"Lookalikes.{name}"]})
    assert caught[0].filename == __file__
    assert done.patched == {}
    assert said in done.left[f"{MISC}.Lookalikes.{name}"]
    assert vars(tree_misc.Lookalikes)[name] is before


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ([], "needs the modules"),
        (["no_such_module.at_all"], "no_such_module.at_all cannot be imported"),
        ([MISC, 3], "not a int"),
        ([{MISC: "reduce_dict"}], "needs a list of names, not 'reduce_dict'"),
        ([MISC, {MISC: ["reduce_dict", "reduce_dicts"]}], "has no function reduce_dicts"),
        ([{MISC: ["Detectors._parse_losses"]}], "has no class Detectors"),
        ([{MISC: ["Detector"]}], "has no function Detector"),
    ],
)
def test_a_users_mistake_changes_nothing(targets: list[Any], said: str) -> None:
    theirs = tree_misc.reduce_dict
    with pytest.raises(ConfigError, match=r"^functions\.install") as caught:
        functions.install(*targets)
    assert said in str(caught.value)
    assert tree_misc.reduce_dict is theirs


def test_kill_switch_leaves_every_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a warning, which would be an error here."""
    theirs = tree_misc.reduce_dict
    monkeypatch.setenv("DDPSTATS_DISABLE", "1")
    done = functions.install(MISC)
    assert done.patched == {}
    assert done.left == dict.fromkeys(ALL, "DDPSTATS_DISABLE is set")
    assert tree_misc.reduce_dict is theirs


# -- nothing is changed by trying -------------------------------------------------------------------------------------


def test_trying_changes_nothing() -> None:
    state, theirs = torch.get_rng_state(), dict(vars(dist))
    install(MISC, {MISC: ["Lookalikes.needs_a_gpu"]})
    assert torch.equal(torch.get_rng_state(), state)
    assert vars(dist) == theirs
    assert not dist.is_initialized()
    assert tree_misc.EventStorage.stack == []
