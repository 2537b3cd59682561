"""Copies of known reductions in a tree of one's own: on real ranks as they are, and with ours in their place."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpstats import ConfigError, SchemaConflict
from ddpstats.integrations import functions
from ddpstats.integrations._pretended_ranks import has_other_ranks, pretended_ranks
from ddpstats.testing import RankPool, RankTimedOut, run_ranks
from tests.integrations import functions_runs as runs, tree_engine, tree_misc
from tests.needs import ROOT, needs

HANG_SEC = 3.0
MISC = "tests.integrations.tree_misc"
ALL = [
    f"{MISC}.{name}"
    for name in (
        "reduce_dict",
        "Detector._parse_losses",
        "Trainer.write_metrics",
        "NewerTrainer.write_metrics",
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


def test_where_ranks_agree_reduce_dict_is_the_copys_own(two_ranks: RankPool) -> None:
    stock = two_ranks.run(runs.same_keys, False).values()
    assert two_ranks.run(runs.same_keys, True).values() == stock
    mean, total = stock[1]
    assert mean == [("a", "float32", 0.375), ("b", "float32", 3.0)]
    assert total == [("a", "float32", 0.75), ("b", "float32", 6.0)]


def test_other_keys_are_not_mixed_up(two_ranks: RankPool) -> None:
    wrong = two_ranks.run(runs.other_keys, False).values()
    assert wrong[0] == [("a", "float32", 2.0), ("dn", "float32", -3.0)]  # a loss, and negative
    right = [("a", "float32", 2.0), ("dn", "float32", 4.0), ("x", "float32", -10.0)]
    assert two_ranks.run(runs.other_keys, True).values() == [right, right]


def test_a_copy_that_took_torchs_functions_by_name(two_ranks: RankPool) -> None:
    """Installed in a group of two ranks, where nothing may be sent for it."""
    right = [("a", "float32", 1.0), ("b", "float32", 3.0)]
    assert two_ranks.run(runs.of_functions_taken_by_name).values() == [right, right]


def test_what_is_reduced_to_rank_0_is_right_on_every_rank(two_ranks: RankPool) -> None:
    assert two_ranks.run(runs.reduced_to_rank_0, False).values()[0] == [("a", "float32", 2.0), ("b", "float32", 1.0)]
    right = [("a", "float32", 2.0), ("b", "float32", 4.0), ("c", "float32", -2.0)]
    assert two_ranks.run(runs.reduced_to_rank_0, True).values() == [right, right]


def test_a_key_that_one_rank_lacks(two_ranks: RankPool) -> None:
    stock = run_ranks(runs.without_denoising, 2, timeout_sec=HANG_SEC).errors()
    assert [type(error) for error in stock.values()] == [RankTimedOut] * 2
    one = [("vfl", "float32", 2.0), ("vfl_dn", "float32", 4.0)]
    summed = [("vfl", "float32", 4.0), ("vfl_dn", "float32", 4.0)]
    none = [("vfl", "float32", 1.0)]
    assert two_ranks.run(runs.missing_keys).values() == [[one, summed, none]] * 2


def test_shapes_and_dtypes(two_ranks: RankPool) -> None:
    expected = [
        ("count", "float32", 2.5),  # torch refuses to divide it in place
        ("half", "bfloat16", 1.5),
        ("mixed", "float32", 1.5),
        ("one", "float32", [2.0]),
        ("row", "float32", [1.0, 2.0]),
        ("rows", "float32", [[2.0] * 3] * 2),
    ]
    assert two_ranks.run(runs.shapes_and_dtypes).values() == [expected] * 2


def test_shapes_that_do_not_fit_are_an_error_on_every_rank(two_ranks: RankPool) -> None:
    for case, said in ((runs.two_shapes, "shapes 2 and 3 under 'a'"), (runs.tensor_against_scalar, "'a'")):
        errors = list(two_ranks.run(case).errors().values())
        assert [type(error) for error in errors] == [SchemaConflict] * 2
        assert len({str(error) for error in errors}) == 1
        assert said in str(errors[0])


def test_one_collective_and_none_on_the_programs_group() -> None:
    nothing_on_theirs: list[str] = []
    new, known = (nothing_on_theirs, 2), (nothing_on_theirs, 1)
    expected = {name: [new, known] for name in ("reduce_dict", "_parse_losses", "reduce")}
    assert run_ranks(runs.collectives, 2).values() == [{**expected, "write_metrics": [new, new]}] * 2


def test_one_rank_gets_its_own_dict_back() -> None:
    install(MISC)
    given = {"a": torch.ones(())}
    assert tree_misc.reduce_dict(given) is given


# -- _parse_losses ----------------------------------------------------------------------------------------------------


def test_where_ranks_agree_parse_losses_is_the_copys_own(two_ranks: RankPool) -> None:
    stock = two_ranks.run(runs.parse_losses, False, "alike").values()
    assert two_ranks.run(runs.parse_losses, True, "alike").values() == stock
    log_vars = [("loss_cls", 3.0), ("acc", 50.0), ("loss", 3.0)]
    assert stock == [(1.5, "OrderedDict", log_vars, [0.5, 0.5]), (4.5, "OrderedDict", log_vars, [1.5, 1.5])]


def test_other_losses_are_not_mixed_up(two_ranks: RankPool) -> None:
    wrong = dict(two_ranks.run(runs.parse_losses, False, "other keys").values()[0][2])
    assert wrong["loss_mask"] == 4.0  # half of which is another loss
    found = two_ranks.run(runs.parse_losses, True, "other keys").values()
    log_vars = [("loss_cls", 3.0), ("acc", 50.0), ("loss_mask", 4.0), ("loss_iou", 4.0), ("loss", 7.0)]
    assert found == [(5.5, "OrderedDict", log_vars, [2.5, 1.5]), (8.5, "OrderedDict", log_vars, [3.5, 2.5])]


def test_a_loss_that_one_rank_lacks(two_ranks: RankPool) -> None:
    errors = two_ranks.run(runs.parse_losses, False, "missing").errors()
    assert [str(error).split("\n")[0] for error in errors.values()] == ["the ranks have different log variables"] * 2
    found = two_ranks.run(runs.parse_losses, True, "missing").values()
    log_vars = [("loss_cls", 3.0), ("acc", 50.0), ("loss_mask", 3.0), ("loss", 4.5)]
    assert [one[2] for one in found] == [log_vars] * 2
    assert [one[0] for one in found] == [4.5, 4.5]


def test_what_is_no_loss_is_an_error_on_every_rank(two_ranks: RankPool) -> None:
    errors = list(two_ranks.run(runs.parse_losses, True, "refused").errors().values())
    assert len(errors) == 2
    assert len({str(error) for error in errors}) == 1
    assert "'loss_mask'" in str(errors[0])


# -- write_metrics ----------------------------------------------------------------------------------------------------

ALIKE = [{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 5.0}]
RANK_0_LACKS_MASK = [{"a": 1.0}, {"a": 3.0, "mask": 5.0}]


@pytest.mark.parametrize("newer", [False, True])
def test_where_ranks_agree_the_same_is_written(two_ranks: RankPool, newer: bool) -> None:
    stock = two_ranks.run(runs.write_metrics, False, newer, ALIKE).values()
    assert two_ranks.run(runs.write_metrics, True, newer, ALIKE).values() == stock
    at, total = (7, "x_total_loss") if newer else (3, "total_loss")
    written = {"data_time": (0.75, at), total: (5.5, at), "a": (2.0, at), "b": (3.5, at)}
    own = [{"rank_data_time": (0.25, 7)}, {"rank_data_time": (0.75, 7)}] if newer else [{}, {}]
    assert stock == [{**own[0], **written}, own[1]]


def test_metrics_that_rank_0_lacks_are_written(two_ranks: RankPool) -> None:
    dropped = two_ranks.run(runs.write_metrics, False, False, RANK_0_LACKS_MASK).values()[0]
    assert dropped == {"data_time": (0.75, 3), "total_loss": (2.0, 3)}
    found = two_ranks.run(runs.write_metrics, True, False, RANK_0_LACKS_MASK).values()
    # The ranks' totals are 1 and 8.
    assert found == [{"data_time": (0.75, 3), "total_loss": (4.5, 3), "a": (2.0, 3), "mask": (5.0, 3)}, {}]


def test_metrics_that_another_rank_lacks_are_written(two_ranks: RankPool) -> None:
    by_rank = RANK_0_LACKS_MASK[::-1]
    assert two_ranks.run(runs.write_metrics, False, False, by_rank).values() == ["KeyError: 'mask'", {}]
    found = two_ranks.run(runs.write_metrics, True, False, by_rank).values()[0]
    assert found["mask"] == (5.0, 3)
    assert found["total_loss"] == (4.5, 3)


def test_a_total_that_is_not_finite_is_an_error_on_every_rank(two_ranks: RankPool) -> None:
    by_rank = [{"a": 1.0}, {"a": float("nan")}]
    assert two_ranks.run(runs.write_metrics, False, False, by_rank).values()[1] == {}  # trains on
    found = two_ranks.run(runs.write_metrics, True, False, by_rank).values()
    expected = "FloatingPointError: Loss became infinite or NaN at iteration=3!\nloss_dict = {'a': nan}"
    assert found == [expected, expected]


# -- MetricsTracker.reduce --------------------------------------------------------------------------------------------


def test_where_ranks_agree_the_tracker_has_the_same_sums(two_ranks: RankPool) -> None:
    by_rank = [{"frames": 3, "loss": 1.5}, {"loss": 2.5, "frames": 4}]
    stock = two_ranks.run(runs.reduce_tracker, False, by_rank).values()
    assert two_ranks.run(runs.reduce_tracker, True, by_rank).values() == stock
    assert stock == [{"frames": 7.0, "loss": 4.0}] * 2


def test_the_trackers_keys_are_not_mixed_up(two_ranks: RankPool) -> None:
    by_rank: list[dict[str, float]] = [{"ctc_loss": 1.0, "frames": 3.0}, {"att_loss": -2.0, "frames": 4.0}]
    assert two_ranks.run(runs.reduce_tracker, False, by_rank).values()[0]["ctc_loss"] == -1.0
    expected = {"ctc_loss": 1.0, "att_loss": -2.0, "frames": 7.0}
    assert two_ranks.run(runs.reduce_tracker, True, by_rank).values() == [expected] * 2
    lacking: list[dict[str, float]] = [{"frames": 3.0, "loss": 2.0}, {}]
    assert two_ranks.run(runs.reduce_tracker, True, lacking).values() == [{"frames": 3.0, "loss": 2.0}] * 2


# -- the real packages ------------------------------------------------------------------------------------------------


def check_recursive(two_ranks: RankPool, module: str) -> None:
    wrong = two_ranks.run(runs.recursive, False, module).values()
    assert wrong[0][0] == [("l1", "float32", -1.125)]  # a mean of 1.25 and -3.5
    right = two_ranks.run(runs.recursive, True, module).values()
    assert [one[0] for one in right] == [[("l1", "float32", 1.25), ("snr", "float32", -3.5)]] * 2
    assert [one[4] for one in right] == [[("l1", "float32", 5.0), ("snr", "float32", -14.0)]] * 2
    # the total weight, what is not distributed, and what becomes of a NaN
    assert [(*one[1:4], one[5]) for one in right] == [(*one[1:4], one[5]) for one in wrong]
    assert right[0][5] == ("1.0" if module.startswith("espnet2") else "nan")


def test_espnets_own_module(two_ranks: RankPool) -> None:
    needs("espnet2")
    check_recursive(two_ranks, "espnet2.torch_utils.recursive_op")


def wants(package: str, how: str) -> None:
    """None of these installs beside what the other tests need, so no extra has it."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"no {package} here: {how}")


def test_funasrs_copy(two_ranks: RankPool) -> None:
    wants("funasr", "pip install --no-deps funasr")
    check_recursive(two_ranks, "funasr.train_utils.recursive_op")


def test_mmclassifications_classifier(two_ranks: RankPool) -> None:
    """mmdetection 2 has the same method, but is not imported without mmcv's compiled operators."""
    wants("torchvision", "mmcv 1 imports it: install the one that fits this torch")
    wants("mmcls", "MMCV_WITH_OPS=0 pip install --no-deps --no-build-isolation mmcls==0.25.0 mmcv==1.7.2 addict yapf")
    arguments = ("mmcls.models.classifiers.base", "BaseClassifier")
    stock = two_ranks.run(runs.parse_losses_of, *arguments, False).values()
    assert dict(stock[0][1])["loss_mask"] == (1.0 + 50.0) / 2
    found = two_ranks.run(runs.parse_losses_of, *arguments, True).values()
    log_vars = [("loss_cls", 3.0), ("loss_mask", 1.0), ("acc", 50.0), ("loss", 3.5)]
    assert found == [(3.0, log_vars), (4.0, log_vars)]


def test_a_lookalike_of_a_real_package_is_left() -> None:
    wants("mmengine", "pip install mmengine")
    done = install({"mmengine.runner.loops": ["_parse_losses"]})
    assert done.patched == {}
    assert "stage" in done.left["mmengine.runner.loops._parse_losses"]


# -- what is replaced, what is left, and what is said of it ------------------------------------------------------------


def test_a_module_is_searched_and_what_took_a_function_by_name_has_ours_too() -> None:
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


def test_a_module_that_is_imported_later_gets_the_copy_back() -> None:
    theirs = tree_misc.reduce_dict
    functions.install(MISC)
    late = types.ModuleType("a_module_that_is_imported_later")
    vars(late)["reduce_dict"] = tree_misc.reduce_dict
    sys.modules[late.__name__] = late
    try:
        functions.uninstall()
        assert vars(late)["reduce_dict"] is theirs
    finally:
        del sys.modules[late.__name__]


def test_named_functions_only_under_whatever_name() -> None:
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
        ("floats", "gives {'b': 2.0, 'a': 0.5} on one rank, where {'a': tensor(0.5000)"),
        ("gathers", "on one rank, where"),
        ("needs_a_gpu", "raises RuntimeError where it is tried: no GPU here"),
        ("other_parameters", "where (obj, weight, distributed=False) or (input_dict, average=True) or "),
        ("writes_another_name", "writes {'loss': (1.0, 3)} where {'data_time': (0.25, 3), 'x_total_loss': (2.5, 3), "),
    ],
)
def test_what_only_looks_like_one_is_left_with_the_difference(name: str, said: str) -> None:
    before = vars(tree_misc.Lookalikes)[name]
    with pytest.warns(UserWarning, match=r"functions: \S+Lookalikes\.\w+ .* It is left as it is\.$") as caught:
        done = functions.install({MISC: [f"Lookalikes.{name}"]})
    assert caught[0].filename == __file__
    assert done.patched == {}
    assert said in done.left[f"{MISC}.Lookalikes.{name}"]
    assert vars(tree_misc.Lookalikes)[name] is before


def test_a_module_without_a_known_function_is_said() -> None:
    with pytest.warns(UserWarning, match="holds none of recursive_average, "):
        done = functions.install("tests.integrations.watching")
    assert list(done.left) == ["tests.integrations.watching"]
    assert str(done).startswith("patched: nothing\nleft: tests.integrations.watching (holds none of")


def test_our_own_functions_are_left() -> None:
    done = install("ddpstats.recursive_op")
    assert set(done.left.values()) == {"is a function of ddpstats"}
    assert len(done.left) == 2


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


def test_the_kill_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quietly: warnings are errors here."""
    monkeypatch.setenv("DDPSTATS_DISABLE", "1")
    done = functions.install(MISC)
    assert done.patched == {}
    assert done.left == dict.fromkeys(ALL, "DDPSTATS_DISABLE is set")


# -- nothing is changed by trying -------------------------------------------------------------------------------------


def test_trying_changes_nothing() -> None:
    state, theirs = torch.get_rng_state(), dict(vars(dist))
    install(MISC, {MISC: ["Lookalikes.needs_a_gpu"]})
    assert torch.equal(torch.get_rng_state(), state)
    assert vars(dist) == theirs
    assert not dist.is_initialized()
    assert tree_misc.EventStorage.stack == []


def test_other_threads_have_torchs_own_functions_meanwhile() -> None:
    seen: list[Any] = []
    with pretended_ranks(2):
        thread = threading.Thread(target=lambda: seen.extend([dist.is_initialized(), has_other_ranks()]))
        thread.start()
        thread.join(10)
        assert dist.get_world_size() == 2
        assert not has_other_ranks()
        with pytest.raises(RuntimeError, match=r"calls torch\.distributed\.new_group, which is not tried"):
            dist.new_group()
        with pytest.raises(RuntimeError, match="async_op=True"):
            dist.all_reduce(torch.ones(1), async_op=True)
    assert seen == [False, False]


def test_importing_the_package_does_not_import_torch() -> None:
    code = (
        "import sys, ddpstats.integrations; assert 'functions' in dir(ddpstats.integrations)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert done.stdout == "False\n", done.stderr
