"""`ddpstats nan-origin` names the entry that made the first NaN or infinity, in dumps written by hand.

Each kind of verdict has a case: computation, uninitialised memory, parameter, given, arrived, gradient, collective.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpstats.dump.analyze import DumpEntry
from ddpstats.dump.analyze.stomp import MemoryWalk
from ddpstats.dump.statistics import statistic_keys
from tests.dump.collecting import dumped, leaves
from tests.dump.hand_made import backward, collective, forward, leaf, plain, write_lines, write_rank
from tests.dump.verbs import run_json, run_verb

NAN, INF = math.nan, math.inf
BAD, OTHER_BAD = leaf(NAN, NAN), leaf(NAN, NAN, (9,))
FINE, MASK = leaf(2.0), leaf(0.0, -INF)
REDUCE, LOG, LINEAR = "Distributed.all_reduce.{}.forward", "Torch.log.{}.forward", "Functional.linear.0.forward"
SEND, RECV = "Distributed.send.{}.forward", "Distributed.recv.{}.forward"
LOG_0, MUL = "Torch.log.0.forward", "Torch.mul.0.forward"
Entries = dict[str, dict[str, Any]]


def write(root: Path, entries: Entries, rank: int | str = 0, **more: Any) -> Path:
    """Write a rank's directory, and return its step's."""
    header = {"scope": [], "list": [], "data_mode": ["all"]}
    write_rank(root / "step0" / f"rank{rank}", entries, **{"header": header, **more})
    return root / "step0"


def report(step: Path) -> tuple[int, str]:
    return run_verb("nan-origin", step)


def findings(step: Path) -> dict[str, Any]:
    return run_json("nan-origin", step)[1]


def blamed(step: Path) -> list[tuple[int | None, str, str]]:
    return [(origin["rank"], origin["kind"], origin["name"]) for origin in findings(step)["origins"]]


# -- one rank ---------------------------------------------------------------------------------------------------------


CLEAN = {"Torch.mul.0.backward": backward(leaf(), out=leaf())}
EMPTY = {"Torch.empty.0.forward": forward(out=BAD)}
ADDED = {"Torch.add.0.forward": forward(leaf(), BAD, out=leaf(NAN, NAN, (9,), requires_grad=True))}
LOSS = {"Torch.mean.0.forward": forward(OTHER_BAD, out=leaf(NAN, NAN, (), requires_grad=True))}
TRAINED = leaf(INF, -INF, (9,), requires_grad=True)
OVERFLOW = leaf(INF, 0.0)
UNINITIALISED = [("uninitialised", "Torch.empty.0.forward")]
THEIRS, GARBAGE = leaf(ours=False), leaf(NAN, NAN, (3,), ours=False)
RECEIVING: Entries = {
    "recv": forward(GARBAGE, plain(1, "int"), out=THEIRS),
    "all_gather": forward([GARBAGE, GARBAGE], THEIRS, out=[THEIRS]),
    "all_gather_into_tensor": forward(GARBAGE, THEIRS, out=THEIRS),
    "reduce_scatter_tensor": forward(GARBAGE, THEIRS, out=THEIRS),
    "gather": forward(THEIRS, [GARBAGE], plain(0, "int"), out=[THEIRS]),
    "broadcast": forward(GARBAGE, plain(1, "int"), out=THEIRS),
}

CASES: dict[str, tuple[Entries, list[tuple[str, str]]]] = {
    "first operation with finite inputs": (
        {
            "Torch.add.0.forward": forward(leaf(2.0), out=leaf(3.0)),
            LOG_0: forward(leaf(3.0), out=BAD),
            MUL: forward(BAD, out=leaf(NAN, NAN, (7,))),
            "Torch.sqrt.0.forward": forward(leaf(3.0), out=OTHER_BAD),
        },
        [("computation", LOG_0)],
    ),
    "infinity that nothing used up": (
        {"Torch.exp.0.forward": forward(leaf(100.0), out=OVERFLOW), MUL: forward(OVERFLOW, out=leaf(INF, 1.0))},
        [("computation", "Torch.exp.0.forward")],
    ),
    "gradient of a parameter, after a backward pass that made it": (
        {
            "Torch.exp.0.forward": forward(leaf(1000.0), out=leaf(INF, INF, (), requires_grad=True)),
            "Torch.sqrt.0.backward": backward(leaf(), out=BAD),
            "Module.fc.Linear.parameters_grad.0": {"weight": [OTHER_BAD]},
        },
        [("computation", "Torch.sqrt.0.backward")],
    ),
    "recomputed call": (
        {LOG_0: forward(leaf(), out=BAD, is_recompute=True), "Torch.log.1.backward": backward(leaf(), out=BAD)},
        [("computation", "Torch.log.1.backward")],
    ),
    "entry that is written when the backward pass has ended": (
        {
            "Torch.sum.0.backward": backward(leaf(), out=leaf(2.0)),
            "Torch.mul.0.backward": backward(OTHER_BAD, out=leaf(NAN, NAN, (8,))),
            "Torch.gru.0.backward": backward(leaf(2.0), None, out=[OTHER_BAD, None]),
        },
        [("computation", "Torch.gru.0.backward")],
    ),
    "optimizer that ruins its parameters": (
        {**CLEAN, "Tensor.addcdiv_.0.forward": forward(leaf(), out=leaf(NAN, NAN, requires_grad=True))},
        [("computation", "Tensor.addcdiv_.0.forward")],
    ),
    "last producer of equal statistics": (
        {
            **EMPTY,
            "Tensor.copy_.0.forward": forward(BAD, leaf(), out=leaf()),
            LOG_0: forward(leaf(), out=BAD),
            "Torch.add.0.forward": forward(BAD, leaf(), out=BAD),
            "Torch.add.0.backward": backward(BAD, out=BAD),
        },
        [("computation", LOG_0)],
    ),
    "loss that is logged after a finite backward pass": (
        {
            LOG_0: forward(leaf(-1.0), out=BAD),
            "Torch.log.0.backward": backward(leaf(), out=leaf()),
            "Torch.add.0.forward": forward(leaf(), BAD, out=OTHER_BAD),
        },
        [("computation", LOG_0)],
    ),
    "infinity that where() leaves out, and zero times it in the backward pass": (
        {
            LOG_0: forward(leaf(), out=MASK),
            "Torch.where.0.forward": forward(MASK, leaf(), out=leaf()),
            "Torch.log.0.backward": backward(leaf(), out=BAD),
        },
        [("computation", LOG_0)],
    ),
    "buffer that was filled with a NaN": (
        {
            **EMPTY,
            LOG_0: forward(leaf(), out=OTHER_BAD),
            "Tensor.__setitem__.0.forward": forward(BAD, OTHER_BAD, out=leaf(NAN, NAN, (4,), requires_grad=True)),
        },
        [("computation", LOG_0)],
    ),
    "uninitialised memory that reaches a gradient": (
        {**EMPTY, "Torch.mul.0.backward": backward(BAD, out=BAD)},
        UNINITIALISED,
    ),
    "uninitialised memory that reaches the loss": ({**EMPTY, **ADDED, **LOSS}, UNINITIALISED),
    "uninitialised memory of which only a view is taken": (
        {**EMPTY, "Tensor.view.0.forward": forward(BAD, out=leaf(NAN, NAN, (6,)))},
        [],
    ),
    "mask of infinity into the weights' product": (
        {LINEAR: forward(leaf(1.0, -INF), leaf(), out=TRAINED)},
        [("arrived", LINEAR)],
    ),
    "infinity in a trained tensor": (
        {
            "Torch.add.0.forward": forward(
                leaf(), leaf(1.0, -INF, requires_grad=True), out=leaf(3.0, -INF, requires_grad=True)
            )
        },
        [("arrived", "Torch.add.0.forward")],
    ),
    "nansum": ({"Tensor.nansum.0.forward": forward(BAD, out=leaf(1.0, 1.0, ())), **CLEAN}, []),
    "NaN that is filled element by element": (
        {
            "Torch.full.0.forward": forward(plain(NAN), out=BAD),
            "Tensor.__setitem__.0.forward": forward(BAD, leaf(), out=leaf(NAN, 1.0)),
            "Tensor.__setitem__.1.forward": forward(leaf(NAN, 1.0), leaf(), out=leaf()),
            **CLEAN,
        },
        [],
    ),
    "NaN that where() leaves out": (
        {
            LOG_0: forward(leaf(), out=MASK),
            MUL: forward(leaf(), MASK, out=BAD),
            "Torch.where.0.forward": forward(leaf(), BAD, leaf(), out=leaf()),
            **CLEAN,
        },
        [],
    ),
    **{f"buffer that {api} receives into": ({f"Distributed.{api}.0.forward": RECEIVING[api]}, []) for api in RECEIVING},
    "empty buffer that is received into": (
        {"Torch.empty.0.forward": forward(out=GARBAGE), RECV.format(0): RECEIVING["recv"]},
        [],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_first_nan_of_one_rank_is_blamed_on_its_entry(tmp_path: Path, case: str) -> None:
    entries, expected = CASES[case]
    assert blamed(write(tmp_path, entries)) == [(0, *origin) for origin in expected]


@pytest.mark.parametrize(
    "made",
    [
        {"Aten.liba.masked_fill.0.forward": forward(leaf(), leaf(1.0, 0.0), plain(-INF), out=MASK)},
        {"Torch.add.0.forward": forward(leaf(), leaf(0.0, -INF, (3, 3)), out=MASK)},  # a mask made elsewhere
        {LOG_0: forward(leaf(1.0, 0.0), out=MASK)},  # no mask by its name, but it becomes finite
    ],
    ids=lambda made: next(iter(made)),
)
def test_mask_of_infinity_is_no_origin_unless_it_was_computed(tmp_path: Path, made: Entries) -> None:
    softmax = {"Functional.softmax.0.forward": forward(MASK, out=leaf(1.0, 0.0))}
    assert blamed(write(tmp_path / "finite", {**made, **softmax})) == []
    softmax = {"Functional.softmax.0.forward": forward(MASK, out=BAD)}
    culprit = "Torch.log.0.forward" if "Torch.log.0.forward" in made else "Functional.softmax.0.forward"
    assert blamed(write(tmp_path / "masked out", {**made, **softmax})) == [(0, "computation", culprit)]


def test_finite_dump_has_no_origin_and_status_0(tmp_path: Path) -> None:
    status, text = report(write(tmp_path, {"Torch.add.0.forward": forward(leaf(), out=leaf())}, ""))
    assert status == 0
    assert "Nothing found: every recorded tensor is finite" in text
    assert "1 rank of step 0, 1 entry, 0 collectives." in text


def test_nan_in_a_parameter_is_not_finite_before_the_step(tmp_path: Path) -> None:
    module = forward(leaf(), out=BAD, parameters={"weight": leaf(NAN, 1.0, (4,)), "bias": leaf()})
    step = write(tmp_path / "parameter", {"Module.net.fc.Linear.forward.0": module})
    assert blamed(step) == [(0, "parameter", "Module.net.fc.Linear.forward.0")]
    assert "not finite before the step: parameter net.fc.weight" in report(step)[1]
    inside = {LINEAR: forward(leaf(), leaf(NAN, 1.0, (4,), requires_grad=True), out=BAD)}
    step = write(tmp_path / "call", {**inside, "Module.net.fc.Linear.forward.0": module})
    assert blamed(step) == [(0, "parameter", LINEAR)]
    assert f"parameter net.fc.weight, used by {LINEAR}, holds NaN" in report(step)[1]
    step = write(tmp_path / "calls only", inside, level="L1")
    assert f"not finite before the step: input.1 of {LINEAR} holds NaN" in report(step)[1]
    module = forward(leaf(), out=OTHER_BAD, parameters={"weight_hh_l0": BAD})
    text = report(write(tmp_path / "root", {"Module.root.GRU.forward.0": module}))[1]
    assert "parameter weight_hh_l0, used by" in text


def test_nan_that_no_recorded_entry_made_has_arrived(tmp_path: Path) -> None:
    batch = {LINEAR: forward(BAD, leaf(), out=OTHER_BAD)}
    text = report(write(tmp_path / "batch", batch))[1]
    assert f"not finite before the step: input.0 of {LINEAR} holds NaN" in text
    entries = {"Torch.add.0.forward": forward(leaf(), out=FINE), "Torch.mul.0.forward": forward(BAD, out=OTHER_BAD)}
    step = write(tmp_path / "later", entries)
    assert blamed(step) == [(0, "arrived", "Torch.mul.0.forward")]
    assert "not finite and made by nothing that was recorded: input.0" in report(step)[1]


def test_nan_that_the_program_wrote_is_given(tmp_path: Path) -> None:
    written = forward(leaf(), plain(NAN), out=leaf(NAN, 1.0, requires_grad=True))
    step = write(tmp_path, {"Tensor.__setitem__.0.forward": written})
    assert blamed(step) == [(0, "given", "Tensor.__setitem__.0.forward")]
    assert "the first NaN was written by Tensor.__setitem__.0.forward, which was given NaN" in report(step)[1]


def test_text_and_json_of_a_computation(tmp_path: Path) -> None:
    """The innermost of the entries that hold the NaN is the origin, with the modules around it."""
    layer, net = "Module.net.fc.Linear.forward.0", "Module.net.Net.forward.0"
    entries = {
        "Torch.add.0.forward": forward(leaf(2.0), out=leaf(3.0)),
        LOG_0: forward(leaf(3.0), out=BAD),
        layer: forward(leaf(), out=BAD),
        net: forward(leaf(), out=BAD),
    }
    stacks = {LOG_0: ["File /home/train.py, line 12, in forward,\n    y = x.log()"]}
    step = write(tmp_path, entries, 3, parents={LOG_0: layer, layer: net}, stacks=stacks)
    status, text = report(step)
    assert status == 1
    assert text == (
        """\
1 rank of step 0, 4 entries, 0 collectives.
Not recorded: where tensors are in memory.

Rank 3: Torch.log.0.forward made the first NaN: its inputs are finite.
  at File /home/train.py, line 12, in forward, y = x.log()
  in Module.net.fc.Linear.forward.0, in Module.net.Net.forward.0
    input.0  float32[2, 3]  Max 3, Min -1, Mean 1, Norm 4
    output.0  float32[2, 3]  Max nan, Min nan, Mean nan, Norm nan, 2 NaN, first at [0, 0]
  What to do next: run it alone on its tensors (task "tensor", list ["Torch.log.0.forward"]). If nothing is found """
        """then, timing matters: set async_dump, and suspect memory that is given out too early.
"""
    )
    (origin,) = findings(step)["origins"]
    assert (origin["rank"], origin["name"], origin["modules"]) == (3, LOG_0, [layer, net])
    assert origin["entry"]["output"][0]["Max"] == "NaN"
    assert origin["stack"] == ["File /home/train.py, line 12, in forward, y = x.log()"]
    (step / "rank3" / "stack.json").write_text("[")
    assert "stack.json" in findings(step)["notes"][0]


def test_unused_infinity_is_no_origin_and_hides_none(tmp_path: Path) -> None:
    metric = {"Torch.exp.0.forward": forward(leaf(1000.0), out=leaf(INF, INF, ()))}
    status, text = report(write(tmp_path / "clean", {**metric, **CLEAN}))
    assert status == 0
    ends = "is finite, was made infinite on purpose, became finite again, or was used by nothing"
    assert f"Nothing found: every recorded tensor {ends}." in text
    real = {"Torch.sqrt.0.backward": backward(leaf(), out=leaf(INF, 0.0))}
    assert blamed(write(tmp_path / "real", {**metric, **real})) == [(0, "computation", "Torch.sqrt.0.backward")]


def test_report_names_what_the_dump_leaves_out(tmp_path: Path) -> None:
    fine = {"Torch.add.0.forward": forward(leaf(), out=leaf())}
    selected = {"scope": [], "list": ["add"], "data_mode": ["forward", "output"]}
    text = report(write(tmp_path / "list", fine, header=selected))[1]
    assert "Nothing found: every recorded tensor is finite" in text
    assert "Not recorded: what list, data_mode of the configuration may leave out; where" in text
    text = report(write(tmp_path / "L0", fine, level="L0"))[1]
    assert "Not recorded: operations between modules (level L0); where" in text
    text = report(write(tmp_path / "rank", {REDUCE.format(0): collective(FINE, out=FINE)}))[1]
    assert "Not recorded: rank 1; where" in text
    bad = {"Functional.linear.0.forward": forward(BAD, leaf(), out=leaf(NAN, NAN, (9,)))}
    assert "not finite before the first entry" in report(write(tmp_path / "one", bad, header=selected))[1]
    assert "not finite before the first entry" in report(write(tmp_path / "theirs", bad, header={}))[1]
    text = report(write(tmp_path / "arrived", bad, level="L0"))[1]
    assert 'operations inside of modules and between them are not in an L0 dump: dump with level "mix".' in text
    text = report(write(tmp_path / "output", {LOG_0: forward(out=BAD)}))[1]
    assert "made the first NaN: its inputs are not in this dump" in text


class Logarithm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x - 10)


@pytest.mark.parametrize("level", ["L0", "mix"])
@pytest.mark.parametrize("has_gradients", [True, False])
@pytest.mark.parametrize("last", [nn.Identity(), nn.Dropout(0.0).eval()])
def test_module_that_returns_its_input_hides_no_origin(
    tmp_path: Path, level: str, has_gradients: bool, last: nn.Module
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Logarithm(), nn.Identity(), nn.Linear(4, 4), last)

    def step() -> None:
        with torch.set_grad_enabled(has_gradients):
            loss = model(torch.ones(2, 4)).sum()
        if has_gradients:
            loss.backward()

    dumped(tmp_path, step, model, level)
    name = "Module.1.Logarithm.forward.0" if level == "L0" else "Torch.log.0.forward"
    assert blamed(tmp_path) == [(None, "computation", name)]


# -- growth -----------------------------------------------------------------------------------------------------------


def growing(layers: int) -> tuple[Entries, dict[str, str]]:
    """Backward through layers of an attention that makes gradients 1e6 times as large, and a linear that does not."""
    entries: Entries = {}
    parents = {}
    size = 1.0
    for layer in reversed(range(layers)):
        before, size = size, size * 1e6 if size < 1e35 else INF
        block, attention = f"Module.{layer}.Block.backward.0", f"Module.{layer}.core.Attention.backward.0"
        linear = f"Functional.linear.{layer}.backward"
        entries[linear] = backward(leaf(before, 0.0), out=[leaf(before, 0.0), leaf(before * 30, 0.0)])
        entries[attention] = backward(leaf(before, 0.0), out=leaf(size, 0.0))
        entries[block] = backward(leaf(before, 0.0), out=leaf(size, 0.0))
        parents[attention] = parents[linear] = block
    return entries, parents


def test_overflow_is_traced_to_the_module_that_makes_gradients_grow(tmp_path: Path) -> None:
    entries, parents = growing(7)
    step = write(tmp_path, entries, "", parents=parents)
    assert blamed(step) == [(None, "computation", "Module.0.core.Attention.backward.0")]
    text = report(step)[1]
    assert (
        "It grew until it overflowed: Module Attention (backward) makes it larger in 6 of 7 calls, x 1e+06 on average"
    ) in text
    assert "Module.6.core.Attention.backward.0  1 -> 1e+06  x 1e+06" in text
    assert "look at how Module Attention is called (arguments, masks, scales)" in text


def test_nan_without_overflow_has_no_growth(tmp_path: Path) -> None:
    entries, parents = growing(6)
    made = {"Torch.log.0.backward": backward(leaf(1.0), out=BAD)}
    (origin,) = findings(write(tmp_path / "log", {**entries, **made}, parents=parents))["origins"]
    assert (origin["name"], origin["growth"]) == ("Torch.log.0.backward", None)
    made = {"Torch.matmul.0.backward": backward(leaf(1e32), out=BAD)}
    (origin,) = findings(write(tmp_path / "matmul", {**entries, **made}, parents=parents))["origins"]
    assert origin["growth"]["operation"] == "Module Attention"


# -- several ranks ----------------------------------------------------------------------------------------------------


def two_ranks(tmp_path: Path, first: Entries, second: Entries) -> Path:
    write(tmp_path, first, 0)
    return write(tmp_path, second, 1)


def test_earliest_nan_between_collectives_is_named_whatever_its_rank(tmp_path: Path) -> None:
    first = {
        REDUCE.format(0): collective(FINE, out=leaf(4.0)),
        REDUCE.format(1): collective(FINE, out=leaf(5.0)),
        LOG_0: forward(leaf(), out=leaf(NAN, NAN, (8,))),
    }
    second = {
        REDUCE.format(0): collective(FINE, out=leaf(4.0)),
        LOG_0: forward(leaf(), out=BAD),
        REDUCE.format(1): collective(FINE, out=leaf(5.0)),
    }
    (origin,) = findings(two_ranks(tmp_path, first, second))["origins"]
    assert (origin["rank"], origin["name"]) == (1, LOG_0)
    assert (origin["after"], origin["before"]) == (REDUCE.format(0), REDUCE.format(1))


def test_sum_that_overflows_is_blamed_on_the_collective(tmp_path: Path) -> None:
    large = {REDUCE.format(0): collective(leaf(3e38), out=leaf(INF, 0.0))}
    step = two_ranks(tmp_path, large, large)
    assert blamed(step) == [(0, "collective", REDUCE.format(0)), (1, "collective", REDUCE.format(0))]
    status, text = report(step)
    assert status == 1
    assert (
        "Ranks 0, 1: Distributed.all_reduce.0.forward made the first infinity: finite on all its ranks before, not "
        "finite after."
    ) in text
    assert "a sum over ranks overflows where the parts do not" in text


def test_collective_with_undumped_ranks_names_them(tmp_path: Path) -> None:
    step = write(tmp_path, {REDUCE.format(0): collective(FINE, out=BAD, ranks=(0, 1, 2))}, 0)
    text = report(step)[1]
    assert (
        "finite on the dumped ranks; it came from ranks 1, 2, of which there is no dump, or from the collective" in text
    )
    assert "What to do next: dump ranks 1, 2 as well." in text


def test_broadcast_is_not_blamed_for_the_buffers_of_receivers(tmp_path: Path) -> None:
    name = "Distributed.broadcast.0.forward"
    step = two_ranks(
        tmp_path,
        {name: collective(BAD, out=FINE, src=1)},  # whatever was in the memory that is received into
        {name: collective(FINE, out=FINE, src=1)},
    )
    assert blamed(step) == []


def test_collectives_of_different_groups_are_matched_separately(tmp_path: Path) -> None:
    """Ranks 0 and 1 meet twice in one group; rank 1's number counts a third collective, of another group."""
    of_another_group = collective(FINE, out=FINE, ranks=(1,), group="0000bbbb")
    step = two_ranks(
        tmp_path,
        {REDUCE.format(0): collective(FINE, out=FINE), REDUCE.format(1): collective(FINE, out=BAD)},
        {
            REDUCE.format(0): of_another_group,
            REDUCE.format(1): collective(FINE, out=FINE),
            LOG_0: forward(leaf(), out=BAD),
            REDUCE.format(2): collective(BAD, out=BAD),
        },
    )
    assert blamed(step) == [(1, "computation", LOG_0)]


def test_peers_and_tags_given_by_position_are_matched(tmp_path: Path) -> None:
    """Messages of other tools, with positional arguments; the ranks' counts of other collectives differ."""
    named_tag = {**forward(THEIRS, plain(1, "int"), out=BAD), "input_kwargs": {"tag": plain(7, "int")}}
    step = two_ranks(
        tmp_path,
        {RECV.format(0): named_tag},
        {
            REDUCE.format(0): collective(FINE, out=FINE, ranks=(1, 2)),
            LOG_0: forward(FINE, out=BAD),
            SEND.format(0): forward(BAD, plain(0, "int"), None, plain(7, "int")),
        },
    )
    assert blamed(step) == [(1, "computation", LOG_0)]
    assert findings(step)["unmatched"] == []


UNMEASURED: dict[str, tuple[dict[str, Any], str]] = {
    "no numbers": (forward(leaf(), out={**leaf(), **dict.fromkeys(statistic_keys())}), "the numbers of 1 tensor"),
    "no memory left": (
        {**forward(), "dropped": True},
        "the tensors of 1 entry, for which async_max_bytes was too small",
    ),
}


@pytest.mark.parametrize(("entry", "left_out"), UNMEASURED.values(), ids=list(UNMEASURED))
def test_tensor_without_numbers_is_not_called_finite(tmp_path: Path, entry: dict[str, Any], left_out: str) -> None:
    step = write(tmp_path, {MUL: entry})
    assert findings(step)["left_out"] == ["where tensors are in memory", left_out]
    assert "Nothing found: every recorded tensor that was measured is finite" in report(step)[1]
    (step / "rank0" / "dump_error_info.log").write_text("Torch.mul.0.forward: RuntimeError")
    assert "dump_error_info.log says what could not be recorded" in report(step)[1]


@pytest.mark.parametrize("name", ["output", "input", "input_args", "parameters", "input_kwargs"])
def test_gradient_of_a_parameter_whose_name_is_that_of_a_section_is_a_gradient(tmp_path: Path, name: str) -> None:
    entry = "Module.root.Net.parameters_grad.0"
    step = write(tmp_path, {entry: {name: [BAD]}})
    assert blamed(step) == [(0, "gradient", entry)]
    assert findings(step)["origins"][0]["verdict"].startswith(f"{entry} ({name}) holds the first NaN")


def test_messages_are_matched_by_their_tag(tmp_path: Path) -> None:
    """Rank 1 receives in another order than rank 0 sends; only what was sent with tag 2 is not finite."""
    step = two_ranks(
        tmp_path,
        {
            SEND.format(0): collective(FINE, dst=1, tag=1, seq=0),
            LOG_0: forward(FINE, out=BAD),
            SEND.format(1): collective(BAD, dst=1, tag=2, seq=0),
        },
        {
            RECV.format(0): collective(out=BAD, src=0, tag=2, seq=0),
            RECV.format(1): collective(out=FINE, src=0, tag=1, seq=0),
        },
    )
    assert blamed(step) == [(0, "computation", LOG_0)]
    assert findings(step)["unmatched"] == []


def test_receive_of_unknown_source_leaves_numbers_to_the_others(tmp_path: Path) -> None:
    step = two_ranks(
        tmp_path,
        {
            REDUCE.format(0): collective(FINE, out=FINE, seq=0),
            SEND.format(0): collective(FINE, dst=1, tag=0, seq=0),
            LOG_0: forward(FINE, out=BAD),
            SEND.format(1): collective(BAD, dst=1, tag=0, seq=1),
        },
        {
            REDUCE.format(0): collective(FINE, out=FINE, seq=0),
            RECV.format(0): collective(out=FINE, tag=0),
            RECV.format(1): collective(out=BAD, src=0, tag=0, seq=1),
        },
    )
    assert blamed(step) == [(0, "computation", LOG_0)]
    assert findings(step)["unmatched"] == []


def test_message_without_peer_is_of_its_rank_alone(tmp_path: Path) -> None:
    received = {RECV.format(0): collective(out=BAD), "Torch.mul.0.forward": forward(BAD, out=OTHER_BAD)}
    step = two_ranks(tmp_path, received, {SEND.format(0): collective(FINE)})
    assert blamed(step) == [(0, "collective", RECV.format(0))]
    assert findings(step)["unmatched"] == []


def test_numbered_collectives_are_matched_where_an_entry_is_missing(tmp_path: Path) -> None:
    first = collective(FINE, out=FINE, seq=0)
    step = two_ranks(
        tmp_path,
        {REDUCE.format(0): first, REDUCE.format(2): collective(FINE, out=BAD, seq=2)},
        {
            REDUCE.format(0): first,
            REDUCE.format(1): {**collective(FINE, seq=1), "incomplete": True},
            LOG_0: forward(FINE, out=BAD),
            REDUCE.format(2): collective(BAD, out=BAD, seq=2),
        },
    )
    assert blamed(step) == [(1, "computation", LOG_0)]
    assert findings(step)["unmatched"] == [
        "Distributed.all_reduce.1.forward of rank 1 has no counterpart in the dump of rank 0",
        "Distributed.all_reduce.1.forward of rank 1 had not ended when the dump did, or it failed",
    ]


def test_sequence_number_that_a_dump_repeats_has_no_counterpart(tmp_path: Path) -> None:
    first = collective(FINE, out=FINE, seq=0)
    step = two_ranks(tmp_path, {REDUCE.format(0): first, REDUCE.format(1): first}, {REDUCE.format(0): first})
    assert findings(step)["unmatched"] == [
        "Distributed.all_reduce.1.forward of rank 0 has no counterpart in the dump of rank 1"
    ]


def test_rank_whose_dump_ends_early_is_named(tmp_path: Path) -> None:
    write(tmp_path, {REDUCE.format(0): collective(FINE, out=FINE), REDUCE.format(1): collective(FINE, out=FINE)}, 0)
    entries = {REDUCE.format(0): collective(FINE, out=FINE), LOG_0: forward(FINE, out=BAD)}
    step = write_lines(tmp_path / "step0" / "rank1", entries, '{"name": "Torch.ad').parent
    status, text = report(step)
    assert status == 1
    assert "the end of the step of rank 1, in which the run ended" in text
    assert f"note: {REDUCE.format(1)} of rank 0 has no counterpart in the dump of rank 1" in text
    assert blamed(step) == [(1, "computation", LOG_0)]


# -- memory -----------------------------------------------------------------------------------------------------------


def placed(number: int, start: int, size: int, moment: int, stream: int = 0) -> dict[str, Any]:
    memory: dict[str, Any] = {"storage_ptr": start, "storage_bytes": size, "storage_id": number, "data_ptr": start}
    return leaf(device="cuda:0", stream=stream, moment=moment, **memory)


def test_live_storages_that_share_memory_are_reported_with_status_1(tmp_path: Path) -> None:
    first, second = (1, 4096, 12288), placed(2, 8192, 8192, 3, stream=7)
    entries = {
        "Functional.layer_norm.0.forward": forward(placed(3, 65536, 64, 0), out=placed(*first, 1)),
        "Torch.cat.0.forward": forward(placed(4, 131072, 64, 2), out=second),
        "Torch.split.0.forward": forward(placed(*first, 4), out=placed(*first, 5)),
    }
    status, text = report(write(tmp_path, entries))
    assert status == 1
    assert "No NaN or infinity found: every recorded tensor is finite" in text
    assert "Nothing found" not in text
    assert "note: rank 0: live storages that share memory (a stomp, unless it is meant, as by from_numpy" in text
    assert (
        "Functional.layer_norm.0.forward output.0 (storage 1) and Torch.cat.0.forward output.0 (storage 2) share 8,192 "
        "bytes on cuda:0, stream 0 and stream 7: 0x2000 to 0x4000, from byte 4,096 of the one and byte 0 of the other; "
        "the one is still in use at Torch.split.0.forward output.0, the other at Torch.cat.0.forward output.0"
    ) in text


def test_memory_of_older_dumps_is_not_searched(tmp_path: Path) -> None:
    older = placed(1, 4096, 64, 0)
    del older["moment"]
    step = write(tmp_path, {MUL: forward(older, out=older)})
    assert findings(step)["left_out"] == ["when tensors were in memory (dumped by an older ddpstats)"]


# The moments are those at which a recorder sees the tensors, which is not the order of the entries.
REUSED: dict[str, Entries] = {
    "in one entry": {
        "Torch.add.0.forward": forward(placed(1, 4096, 64, 0), out=placed(2, 8192, 64, 1)),
        "Torch.add.1.forward": forward(placed(2, 8192, 64, 2), out=placed(3, 4096, 64, 3)),
        "Torch.add.2.backward": backward(placed(3, 4096, 64, 4), out=placed(4, 4096, 64, 5)),
        "Module.a.A.backward.0": backward(placed(3, 4096, 64, 4), out=placed(4, 4096, 64, 5)),
    },
    "between two gradients of one backward entry": {
        "Functional.linear.0.backward": backward(placed(1, 4096, 64, 0), out=placed(2, 8192, 64, 1)),
        "Functional.multi_head_attention_forward.0.backward": backward(
            placed(2, 8192, 64, 2), out=[placed(3, 8192, 64, 5), placed(4, 65536, 64, 3), placed(5, 65536, 64, 4)]
        ),
    },
    "before a GRU's entry is written, of which nothing uses the last state": {
        "Torch.cat.0.backward": backward(placed(1, 4096, 64, 0), out=placed(2, 8192, 64, 1)),
        "Torch.add.0.backward": backward(placed(3, 65536, 64, 4), out=placed(4, 8192, 64, 5)),
        "Torch.gru.0.backward": {
            **backward(placed(2, 8192, 64, 2), None, out=[placed(5, 65536, 64, 3), None]), "incomplete": True
        },
    },
    "before a module ends": {
        "Torch.add.0.forward": forward(placed(1, 4096, 64, 0), out=placed(2, 8192, 64, 2)),
        "Torch.add.1.forward": forward(placed(2, 8192, 64, 3), out=placed(3, 4096, 64, 4)),
        "Module.a.A.forward.0": forward(placed(1, 4096, 64, 0), out=placed(3, 4096, 64, 5)),
    },
}  # fmt: skip


@pytest.mark.parametrize("entries", REUSED.values(), ids=list(REUSED))
def test_reused_memory_is_not_reported(tmp_path: Path, entries: Entries) -> None:
    step = write(tmp_path, entries)
    assert "share memory" not in report(step)[1]
    assert "where tensors are in memory" not in findings(step)["left_out"]


def test_gradients_of_one_entry_have_the_moments_at_which_they_came(tmp_path: Path) -> None:
    """A gradient is added to ``grad`` where that holds one already, and freed before the next one comes."""
    attention = nn.MultiheadAttention(8, 2)
    x = torch.randn(3, 2, 8)
    entries = dumped(tmp_path, lambda: attention(x, x, x)[0].sum().backward())
    entry = entries["Functional.multi_head_attention_forward.0.backward"]
    assert len({gradient["moment"] for gradient in leaves(entry["output"])}) > 1
    moments = [leaf["moment"] for leaf in leaves(entries["Functional.multi_head_attention_forward.0.forward"])]
    assert sorted(set(moments)) == [moments[0], moments[-1]]


def test_gradient_of_a_gradient_shares_no_memory(tmp_path: Path) -> None:
    """The first pass needs no gradients of parameters: what they go with is written when the second one comes."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))

    def body() -> None:
        x = torch.ones(3, 4, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)
        gradient.square().sum().backward()  # type: ignore[no-untyped-call]

    entries = dumped(tmp_path, body, model, "mix")
    assert entries["Functional.linear.1.backward"]["incomplete"] is True
    assert "incomplete" not in entries["Functional.linear.1.backward.1"]
    assert "share memory" not in report(tmp_path)[1]


@pytest.mark.parametrize("seed", range(20))
def test_shared_memory_is_that_of_a_search_over_all_pairs(seed: int) -> None:
    choice = random.Random(seed)
    storages = [(number, 16 * choice.randrange(1, 60), 16 * choice.randrange(1, 40)) for number in range(20)]
    seen: dict[int, list[int]] = {}
    walk = MemoryWalk()
    for time in range(30):
        storage = choice.choice(storages)
        seen.setdefault(storage[0], []).append(time)
        walk.take(DumpEntry(f"Torch.add.{time}.forward", forward(out=placed(*storage, time))))
    expected = {
        (a, b)
        for a, start_a, size_a in storages
        for b, start_b, size_b in storages
        if a < b and a in seen and b in seen
        if max(start_a, start_b) < min(start_a + size_a, start_b + size_b)
        if max(seen[a][0], seen[b][0]) <= min(seen[a][-1], seen[b][-1])
    }
    overlaps = [{overlap.first.number, overlap.second.number} for overlap in walk.overlaps()]
    assert sorted(map(sorted, overlaps)) == sorted(map(list, expected))


# -- dumps that are refused -------------------------------------------------------------------------------------------


def test_unusable_dump_is_an_error_with_status_2(tmp_path: Path) -> None:
    status, text = report(write(tmp_path / "empty", {}))
    assert (status, "has no entries" in text) == (2, True)
    write(tmp_path / "two", {LOG_0: forward(FINE, out=FINE)}, "")
    status, text = report(write(tmp_path / "two", {LOG_0: forward(FINE, out=BAD)}, 0))
    assert (status, "two dumps of rank 0" in text) == (2, True)
    (tmp_path / "two" / "step0" / "rank0" / "dump.json").write_text("{")
    assert report(tmp_path / "two" / "step0" / "rank0")[0] == 2
