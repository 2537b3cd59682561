"""Which entry is blamed for the first NaN, over dumps written by hand."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from ddpstats import DumpError
from ddpstats.dump.format._files import find_ranks
from ddpstats.dump.origin._first_nan import Findings, find_origins
from ddpstats.dump.origin._memory import MemoryWalk, Storage
from ddpstats.dump.origin._nan_origin import add_arguments, read, run, stack_of
from tests.dump.dumps import INF, NAN, backward, collective, forward, leaf, write, write_lines

BAD = leaf(NAN, NAN)
Entries = dict[str, dict[str, Any]]


def found(step: Path) -> Findings:
    return find_origins(read(find_ranks(step))[0])


def blamed(step: Path) -> list[tuple[int, str, str]]:
    return [(origin.rank, origin.kind, origin.name) for origin in found(step).origins]


def alone(tmp_path: Path, entries: Entries, **more: Any) -> list[tuple[str, str]]:
    return [(kind, name) for _, kind, name in blamed(write(tmp_path, entries, **more))]


def say(step: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.add_argument("--json", action="store_true")
    code = run(parser.parse_args([str(step), *options]))
    return code, capsys.readouterr().out


# -- one rank ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ours", [True, False])
def test_the_first_operation_with_finite_inputs_and_other_outputs(tmp_path: Path, ours: bool) -> None:
    bad = leaf(NAN, NAN, ours=ours)
    entries = {
        "Torch.add.0.forward": forward(leaf(2.0), out=leaf(3.0)),
        "Torch.log.0.forward": forward(leaf(3.0, ours=ours), out=bad),
        "Torch.mul.0.forward": forward(bad, out=leaf(NAN, NAN, (7,), ours=ours)),
        "Torch.sqrt.0.forward": forward(leaf(3.0), out=leaf(NAN, NAN, (9,))),
    }
    assert alone(tmp_path, entries) == [("computation", "Torch.log.0.forward")]


def test_nothing_is_found_where_all_is_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = write(tmp_path, {"Torch.add.0.forward": forward(leaf(), out=leaf())}, None)
    code, text = say(step, capsys)
    assert code == 0
    assert "Nothing found: every tensor is finite" in text
    assert "1 rank of step 0, 1 entry, 0 collectives." in text


MASK = leaf(0.0, -INF)


@pytest.mark.parametrize(
    "made",
    [
        {"Tensor.masked_fill.0.forward": forward(leaf(), leaf(1.0, 0.0), {"type": "float", "value": -INF}, out=MASK)},
        {"Torch.full.0.forward": forward({"type": "float", "value": "-inf"}, out=MASK)},
        {"Torch.where.0.forward": forward(leaf(), leaf(), out=MASK)},
        {"Torch.add.0.forward": forward(leaf(), leaf(0.0, -INF, (3, 3)), out=MASK)},  # a mask made elsewhere
        {"Torch.log.0.forward": forward(leaf(1.0, 0.0), out=MASK)},  # nobody says so, but it becomes finite
    ],
)
def test_infinities_put_there_on_purpose_are_no_origin(tmp_path: Path, made: Entries) -> None:
    softmax = {"Functional.softmax.0.forward": forward(MASK, out=leaf(1.0, 0.0))}
    assert alone(tmp_path / "finite", {**made, **softmax}) == []
    softmax = {"Functional.softmax.0.forward": forward(MASK, out=BAD)}
    blamed = "Torch.log.0.forward" if "Torch.log.0.forward" in made else "Functional.softmax.0.forward"
    assert alone(tmp_path / "masked out", {**made, **softmax}) == [("computation", blamed)]


def test_an_infinity_that_nobody_uses_up_is_an_origin(tmp_path: Path) -> None:
    entries = {
        "Torch.exp.0.forward": forward(leaf(100.0), out=leaf(INF, 0.0)),
        "Torch.mul.0.forward": forward(leaf(INF, 0.0), out=leaf(INF, 1.0)),
    }
    assert alone(tmp_path, entries) == [("computation", "Torch.exp.0.forward")]


def test_uninitialised_memory_is_an_origin_only_if_it_reaches_a_gradient(tmp_path: Path) -> None:
    entries = {
        "Torch.empty.0.forward": forward(out=BAD),
        "Tensor.copy_.0.forward": forward(BAD, leaf(), out=leaf()),
    }
    assert alone(tmp_path / "written", entries) == []
    entries["Torch.mul.0.backward"] = backward(BAD, out=BAD)
    assert alone(tmp_path / "read", entries) == [("uninitialised", "Torch.empty.0.forward")]


def test_what_was_not_finite_before_the_step_is_said_to_be_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = forward(leaf(), out=BAD, parameters={"weight": leaf(NAN, 1.0, (4,)), "bias": leaf()})
    step = write(tmp_path / "parameter", {"Module.net.fc.Linear.forward.0": module})
    assert blamed(step) == [(0, "parameter", "Module.net.fc.Linear.forward.0")]
    assert "not finite before the step: parameter net.fc.weight" in say(step, capsys)[1]
    inside = {"Functional.linear.0.forward": forward(leaf(), leaf(NAN, 1.0, (4,), requires_grad=True), out=BAD)}
    step = write(tmp_path / "call", {**inside, "Module.net.fc.Linear.forward.0": module})
    assert blamed(step) == [(0, "parameter", "Functional.linear.0.forward")]
    assert "parameter net.fc.weight, used by Functional.linear.0.forward, holds NaN" in say(step, capsys)[1]
    step = write(tmp_path / "calls only", inside, level="L1")
    assert "input.1 of Functional.linear.0.forward (a parameter?) holds NaN" in say(step, capsys)[1]
    batch = {"Functional.linear.0.forward": forward(BAD, leaf(), out=leaf(NAN, NAN, (9,)))}
    step = write(tmp_path / "batch", batch)
    assert blamed(step) == [(0, "arrived", "Functional.linear.0.forward")]
    assert "not finite before the step: input.0 of Functional.linear.0.forward holds NaN" in say(step, capsys)[1]


def test_what_something_unrecorded_made_is_said_to_be_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = {
        "Torch.add.0.forward": forward(leaf(), out=leaf(2.0)),
        "Torch.mul.0.forward": forward(BAD, out=leaf(NAN, NAN, (9,))),
    }
    step = write(tmp_path, entries)
    assert blamed(step) == [(0, "arrived", "Torch.mul.0.forward")]
    assert "not finite, and made by nothing that was recorded: input.0" in say(step, capsys)[1]


def test_what_is_computed_again_does_not_count(tmp_path: Path) -> None:
    entries = {
        "Torch.log.0.forward": forward(leaf(), out=BAD, is_recompute=True),
        "Torch.log.1.backward": backward(leaf(), out=BAD),
    }
    assert alone(tmp_path, entries) == [("computation", "Torch.log.1.backward")]


@pytest.mark.parametrize("name", ["Torch.log.0.backward.1", "Module.a.Net.backward.0.1"])
def test_a_second_backward_pass_is_one_as_well(tmp_path: Path, name: str) -> None:
    overflow = leaf(INF, 0.0)
    entries = {name: backward(leaf(), out=overflow), "Torch.mul.0.backward": backward(overflow, out=leaf())}
    assert alone(tmp_path, entries) == [("computation", name)]


@pytest.mark.parametrize(
    ("forward_pass", "backward_pass"),
    [
        ("Module.backward_net.fc.Linear.forward.0", "Module.backward_net.fc.Linear.backward.0"),
        ("Torch.log.0.forward", "Torch.log.0.backward.1"),
        ("Module.a.Net.forward.0", "Module.a.Net.backward.0.1"),
    ],
)
def test_a_backward_pass_belongs_to_its_forward_pass(tmp_path: Path, forward_pass: str, backward_pass: str) -> None:
    entries = {forward_pass: forward(leaf(), out=BAD), backward_pass: backward(leaf(), out=leaf())}
    step = write(tmp_path, entries, stacks={forward_pass: ["File /t.py, line 3"]})
    assert blamed(step) == [(0, "computation", forward_pass)]
    (dump,) = find_ranks(step)
    assert stack_of(dump, backward_pass) == ["File /t.py, line 3"]


def test_names_that_are_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = write(tmp_path, {"Torch.\ud800\x1b[2J\n.0.forward": forward(leaf(), out=BAD)})
    code, text = say(step, capsys)
    assert code == 1
    assert "Torch.\\ud800\\x1b[2J\\n.0.forward made the first NaN" in text


def test_a_dump_that_cannot_be_read_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "/dump.json")

    monkeypatch.setattr("ddpstats.dump.origin._nan_origin.find_ranks", fail)
    with pytest.raises(DumpError, match=r"/dump\.json: Permission denied"):
        say(tmp_path, capsys)


def test_the_json_is_legal_and_has_the_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = write(tmp_path, {"Torch.log.0.forward": forward(leaf(), {"type": "float", "value": INF}, out=BAD)})
    (step / "rank0" / "stack.json").write_text("[")
    text = say(step, capsys, "--json")[1]
    assert "Infinity" not in text.replace('"Infinity"', "")
    assert "NaN" not in text.replace('"NaN"', "").replace("first NaN:", "")
    assert "stack.json" in json.loads(text)["notes"][0]


def test_a_gradient_alone_is_better_than_nothing(tmp_path: Path) -> None:
    entries = {"Module.fc.Linear.parameters_grad.0": {"weight": [BAD]}}
    assert alone(tmp_path, entries) == [("gradient", "Module.fc.Linear.parameters_grad.0")]


@pytest.mark.parametrize("inner_first", [True, False])
def test_it_is_the_innermost_that_is_named(tmp_path: Path, inner_first: bool) -> None:
    inside = {
        "Functional.linear.0.forward": forward(leaf(), out=leaf(2.0)),
        "Torch.log.0.forward": forward(leaf(2.0), out=BAD),
        "Module.net.fc.Linear.forward.0": forward(leaf(), out=BAD),
    }
    outside = {"Module.net.Net.forward.0": forward(leaf(), out=BAD)}
    entries = {**inside, **outside} if inner_first else {**outside, **dict(reversed(inside.items()))}
    parents = {"Torch.log.0.forward": "Module.net.fc.Linear.forward.0"}
    parents["Module.net.fc.Linear.forward.0"] = "Module.net.Net.forward.0"
    stacks = {"Torch.log.0.forward": ["File /home/train.py, line 12, in forward,\n    y = x.log()"]}
    step = write(tmp_path, entries, parents=parents, stacks=stacks)
    (origin,) = found(step).origins
    assert origin.name == "Torch.log.0.forward"
    assert origin.modules == ("Module.net.fc.Linear.forward.0", "Module.net.Net.forward.0")


def test_the_whole_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = {
        "Torch.add.0.forward": forward(leaf(2.0), out=leaf(3.0)),
        "Torch.log.0.forward": forward(leaf(3.0), out=BAD),
    }
    parents = {"Torch.log.0.forward": "Module.net.Net.forward.0"}
    stacks = {"Torch.log.0.forward": ["File /home/train.py, line 12, in forward,\n    y = x.log()"]}
    step = write(tmp_path, entries, 3, parents=parents, stacks=stacks)
    code, text = say(step, capsys)
    assert code == 1
    assert text == (
        """\
1 rank of step 0, 2 entries, 0 collectives.

Rank 3: Torch.log.0.forward made the first NaN: its inputs are finite.
  at File /home/train.py, line 12, in forward, y = x.log()
  in Module.net.Net.forward.0
  inputs:
    input.0  float32[2, 3]  Max 3, Min -1, Mean 1, Norm 4
  outputs:
    output.0  float32[2, 3]  Max nan, Min nan, Mean nan, Norm nan, 2 NaN, first at [0, 0]
  just before: Torch.add.0.forward
  What to do next: dump the step again with task "tensor" and list ["Torch.log.0.forward"], to see the elements. """
        """If nothing is found then, timing matters: set async_dump, and suspect memory that is given out too early.

note: rank 3: this dump does not record where its tensors are in memory.
"""
    )
    code, text = say(step, capsys, "--json")
    told = json.loads(text)
    assert code == 1
    assert told["origins"][0]["name"] == "Torch.log.0.forward"
    assert told["rank_3"][0]["op_name"] == "Torch.log.0.forward"
    assert told["rank_3"][0]["data_info"]["output"][0]["Max"] == "NaN"
    assert told["rank_3"][0]["construct_info"] == ["Module.net.Net.forward.0"]


def test_whoever_made_it_last_made_what_looks_the_same(tmp_path: Path) -> None:
    entries = {
        "Torch.empty.0.forward": forward(out=BAD),
        "Tensor.copy_.0.forward": forward(BAD, leaf(), out=leaf()),
        "Torch.log.0.forward": forward(leaf(), out=BAD),
        "Torch.add.0.forward": forward(BAD, leaf(), out=BAD),
        "Torch.add.0.backward": backward(BAD, out=BAD),
    }
    assert alone(tmp_path, entries) == [("computation", "Torch.log.0.forward")]


EMPTY = {"Torch.empty.0.forward": forward(out=BAD)}
ADDED = {"Torch.add.0.forward": forward(leaf(), BAD, out=leaf(NAN, NAN, (9,), requires_grad=True))}
CLEAN = {"Torch.mul.0.backward": backward(leaf(), out=leaf())}


def test_uninitialised_memory_that_the_loss_ends_in(tmp_path: Path) -> None:
    loss = {"Torch.mean.0.forward": forward(leaf(NAN, NAN, (9,)), out=leaf(NAN, NAN, (), requires_grad=True))}
    assert alone(tmp_path / "forward only", {**EMPTY, **ADDED, **loss}) == [("uninitialised", "Torch.empty.0.forward")]
    entries = {**EMPTY, **ADDED, **loss, "Torch.mean.0.backward": backward(leaf(), out=leaf())}
    assert alone(tmp_path / "its backward", entries) == [("uninitialised", "Torch.empty.0.forward")]
    looked_at = {"Tensor.view.0.forward": forward(BAD, out=leaf(NAN, NAN, (6,)))}  # and filled by what is not recorded
    assert alone(tmp_path / "unused", {**EMPTY, **looked_at}) == []


@pytest.mark.parametrize("name", ["exp", "log"])
def test_what_nothing_used_is_mentioned_and_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    metric = {f"Torch.{name}.0.forward": forward(leaf(1000.0), out=leaf(INF, INF, ()))}
    code, text = say(write(tmp_path / "clean", {**metric, **CLEAN}), capsys)
    assert code == 0
    assert "No NaN or infinity found that reached a gradient or a collective." in text
    assert f"also: rank 0: Torch.{name}.0.forward made infinity; nothing that was recorded used it" in text
    real = {"Torch.sqrt.0.backward": backward(leaf(), out=leaf(INF, 0.0))}
    assert alone(tmp_path / "real", {**metric, **real}) == [("computation", "Torch.sqrt.0.backward")]


def test_what_nothing_used_hides_no_other_rank(tmp_path: Path) -> None:
    metric = {"Torch.exp.0.forward": forward(leaf(), out=leaf(INF, INF, ()))}
    step = two_ranks(
        tmp_path,
        {**metric, REDUCE.format(0): collective(FINE, out=FINE), REDUCE.format(1): collective(FINE, out=BAD)},
        {
            REDUCE.format(0): collective(FINE, out=FINE),
            LOG.format(0): forward(FINE, out=BAD),
            REDUCE.format(1): collective(BAD, out=BAD),
        },
    )
    assert blamed(step) == [(1, "computation", LOG.format(0))]
    assert [(rank, one.name) for rank, one in found(step).also] == [(0, "Torch.exp.0.forward")]


@pytest.mark.parametrize(
    "entries",
    [
        {"Torch.minimum.0.forward": forward(leaf(INF, INF, ()), leaf(), out=leaf())},  # an observer's buffer
        {"Tensor.nansum.0.forward": forward(BAD, out=leaf(1.0, 1.0, ()))},
        {"Torch.isnan.0.forward": forward(BAD, out=leaf(1.0, 0.0, dtype="torch.bool"))},  # labels that lack
        {
            "Torch.full.0.forward": forward({"type": "float", "value": NAN}, out=BAD),
            "Tensor.__setitem__.0.forward": forward(BAD, leaf(), out=leaf(NAN, 1.0)),
            "Tensor.__setitem__.1.forward": forward(leaf(NAN, 1.0), leaf(), out=leaf()),
        },
        {"Tensor.std.0.forward": forward(leaf(), out=leaf(NAN, NAN, ()))},  # of one row; nobody asks
        {
            "Torch.log.0.forward": forward(leaf(), out=leaf(0.0, -INF)),
            "Torch.mul.0.forward": forward(leaf(), leaf(0.0, -INF), out=BAD),
            "Torch.where.0.forward": forward(leaf(), BAD, leaf(), out=leaf()),
        },
    ],
)
def test_what_becomes_finite_outside_gradients_is_no_origin(tmp_path: Path, entries: Entries) -> None:
    assert alone(tmp_path, {**entries, **CLEAN}) == []


def test_what_goes_into_weights_is_no_mask(tmp_path: Path) -> None:
    minus = leaf(1.0, -INF)
    linear = {"Functional.linear.0.forward": forward(minus, leaf(), out=leaf(INF, -INF, (9,), requires_grad=True))}
    assert alone(tmp_path / "batch", linear) == [("arrived", "Functional.linear.0.forward")]
    scaled = {"Torch.mul.0.forward": forward(minus, out=leaf(2.0, -INF))}
    linear = {"Functional.linear.0.forward": forward(leaf(2.0, -INF), out=leaf(INF, -INF, (9,), requires_grad=True))}
    assert alone(tmp_path / "scaled", {**scaled, **linear}) == [("arrived", "Torch.mul.0.forward")]
    mine = leaf(1.0, -INF, requires_grad=True)
    add = {"Torch.add.0.forward": forward(leaf(), mine, out=leaf(3.0, -INF, requires_grad=True))}
    assert alone(tmp_path / "parameter", add) == [("arrived", "Torch.add.0.forward")]


def test_a_nan_that_the_program_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = forward(leaf(), {"type": "float", "value": NAN}, out=leaf(NAN, 1.0, requires_grad=True))
    step = write(tmp_path, {"Tensor.__setitem__.0.forward": written})
    assert blamed(step) == [(0, "given", "Tensor.__setitem__.0.forward")]
    assert "the first NaN was written by Tensor.__setitem__.0.forward, which was given NaN" in say(step, capsys)[1]


def test_an_optimizer_that_ruins_its_parameters(tmp_path: Path) -> None:
    after = {"Tensor.addcdiv_.0.forward": forward(leaf(), out=leaf(NAN, NAN, requires_grad=True))}
    assert alone(tmp_path, {**CLEAN, **after}) == [("computation", "Tensor.addcdiv_.0.forward")]


def test_what_the_dump_leaves_out_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fine = {"Torch.add.0.forward": forward(leaf(), out=leaf())}
    selected = {"scope": [], "list": ["add"], "data_mode": ["forward", "output"]}
    text = say(write(tmp_path / "list", fine, header=selected), capsys)[1]
    assert "Nothing found: every recorded tensor is finite" in text
    assert "Not recorded: what is outside of list add; anything but forward, output (data_mode)." in text
    text = say(write(tmp_path / "L0", fine, level="L0"), capsys)[1]
    assert "Not recorded: operations between modules (level L0)." in text
    text = say(write(tmp_path / "rank", {REDUCE.format(0): collective(FINE, out=FINE)}), capsys)[1]
    assert "Not recorded: rank 1." in text
    bad = {"Functional.linear.0.forward": forward(BAD, leaf(), out=leaf(NAN, NAN, (9,)))}
    assert "not finite before the first entry" in say(write(tmp_path / "one", bad, header=selected), capsys)[1]
    assert "not finite before the first entry" in say(write(tmp_path / "theirs", bad, header={}), capsys)[1]
    text = say(write(tmp_path / "arrived", bad, level="L0"), capsys)[1]
    assert 'operations between modules are not in an L0 dump: dump with level "mix".' in text


def test_inputs_that_are_not_recorded_are_not_called_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = say(write(tmp_path / "output", {LOG.format(0): forward(out=BAD)}), capsys)[1]
    assert "made the first NaN: its inputs are not in this dump" in text
    text = say(write(tmp_path / "backward", {"Torch.log.0.backward": backward(leaf(), out=BAD)}), capsys)[1]
    assert "its inputs are finite, and the forward pass is not in this dump" in text


def test_a_parameter_of_the_root_has_its_own_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = forward(leaf(), out=leaf(NAN, NAN, (9,)), parameters={"weight_hh_l0": BAD})
    text = say(write(tmp_path, {"Module.root.GRU.forward.0": module}), capsys)[1]
    assert "parameter weight_hh_l0, used by" in text


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


def test_what_grows_until_it_overflows_is_traced_to_what_makes_it_grow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries, parents = growing(7)
    step = write(tmp_path, entries, None, parents=parents)
    (origin,) = found(step).origins
    assert origin.name == "Module.0.core.Attention.backward.0"
    assert origin.grower is not None
    assert (origin.grower.operation, origin.grower.calls, origin.grower.times) == ("Module Attention", 7, 6)
    assert origin.grower.ratio == pytest.approx(1e6)
    text = say(step, capsys)[1]
    assert (
        "It grew until it overflowed: Module Attention (backward) makes it larger in 6 of 7 calls, x 1e+06 on average"
    ) in text
    assert "Module.6.core.Attention.backward.0  1 -> 1e+06  x 1e+06" in text
    assert "look at how Module Attention is called (arguments, masks, scales)" in text


def test_a_nan_that_is_no_overflow_has_no_grower(tmp_path: Path) -> None:
    entries, parents = growing(6)
    made = {"Torch.log.0.backward": backward(leaf(1.0), out=BAD)}
    (origin,) = found(write(tmp_path / "log", {**entries, **made}, parents=parents)).origins
    assert (origin.name, origin.grower) == ("Torch.log.0.backward", None)
    made = {"Torch.matmul.0.backward": backward(leaf(1e32), out=BAD)}
    (origin,) = found(write(tmp_path / "matmul", {**entries, **made}, parents=parents)).origins
    assert origin.grower is not None


def test_a_single_growth_is_no_trail(tmp_path: Path) -> None:
    entries, parents = growing(1)
    entries["Torch.log.0.backward"] = backward(leaf(), out=BAD)
    (origin,) = found(write(tmp_path, entries, parents=parents)).origins
    assert (origin.name, origin.grower) == ("Torch.log.0.backward", None)


# -- several ranks ----------------------------------------------------------------------------------------------------

FINE = leaf(2.0)
REDUCE, LOG = "Distributed.all_reduce.{}.forward", "Torch.log.{}.forward"


def two_ranks(tmp_path: Path, first: Entries, second: Entries) -> Path:
    write(tmp_path, first, 0)
    return write(tmp_path, second, 1)


def test_before_the_first_collective_the_rank_that_made_it_is_named(tmp_path: Path) -> None:
    step = two_ranks(
        tmp_path,
        {REDUCE.format(0): collective(FINE, out=BAD), LOG.format(0): forward(BAD, out=leaf(NAN, NAN, (9,)))},
        {LOG.format(0): forward(leaf(), out=BAD), REDUCE.format(0): collective(BAD, out=BAD)},
    )
    assert blamed(step) == [(1, "computation", LOG.format(0))]
    assert found(step).phase == "before the first collective"


def test_between_collectives_the_earlier_one_counts_and_not_the_lower_rank(tmp_path: Path) -> None:
    first = {
        REDUCE.format(0): collective(FINE, out=leaf(4.0)),
        REDUCE.format(1): collective(FINE, out=leaf(5.0)),
        LOG.format(0): forward(leaf(), out=leaf(NAN, NAN, (8,))),
    }
    second = {
        REDUCE.format(0): collective(FINE, out=leaf(4.0)),
        LOG.format(0): forward(leaf(), out=BAD),
        REDUCE.format(1): collective(FINE, out=leaf(5.0)),
    }
    (origin,) = found(two_ranks(tmp_path, first, second)).origins
    assert (origin.rank, origin.name, origin.after, origin.until) == (
        1, LOG.format(0), REDUCE.format(0), REDUCE.format(1),
    )  # fmt: skip


def test_a_sum_that_overflows_is_the_collective_s_own_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = {REDUCE.format(0): collective(leaf(3e38), out=leaf(INF, 0.0))}
    step = two_ranks(tmp_path, large, large)
    assert blamed(step) == [(0, "collective", REDUCE.format(0)), (1, "collective", REDUCE.format(0))]
    code, text = say(step, capsys)
    assert code == 1
    assert (
        "Ranks 0, 1: Distributed.all_reduce.0.forward made the first infinity: finite on all its ranks before, not "
        "finite after."
    ) in text
    assert "a sum over ranks overflows where the parts do not" in text


def test_after_the_last_collective(tmp_path: Path) -> None:
    clean = {REDUCE.format(0): collective(FINE, out=leaf(4.0))}
    step = two_ranks(tmp_path, {**clean, LOG.format(0): forward(leaf(), out=BAD)}, clean)
    assert blamed(step) == [(0, "computation", LOG.format(0))]


def test_a_collective_among_ranks_that_are_not_there_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = write(tmp_path / "nan", {REDUCE.format(0): collective(FINE, out=BAD, ranks=(0, 1, 2))}, 0)
    text = say(step, capsys)[1]
    assert "finite on the dumped ranks; it came from ranks 1, 2 (of ranks 1, 2 there is no dump)" in text
    assert "What to do next: dump ranks 1, 2 as well." in text
    step = write(tmp_path / "inf", {REDUCE.format(0): collective(FINE, out=leaf(INF, 0.0), ranks=(0, 1))}, 0)
    assert "finite on the dumped ranks; it came from rank 1 or from the sum" in say(step, capsys)[1]


def test_a_broadcast_takes_nothing_from_those_who_receive(tmp_path: Path) -> None:
    name = "Distributed.broadcast.0.forward"
    step = two_ranks(
        tmp_path,
        {name: collective(BAD, out=FINE, src=1)},  # whatever was in the memory that is received into
        {name: collective(FINE, out=FINE, src=1)},
    )
    assert blamed(step) == []


def test_a_message_leads_back_to_its_sender(tmp_path: Path) -> None:
    step = two_ranks(
        tmp_path,
        {
            LOG.format(0): forward(leaf(), out=leaf()),
            "Distributed.recv.0.forward": collective(out=BAD, src=1),
            "Torch.mul.0.forward": forward(BAD, out=leaf(NAN, NAN, (9,))),
        },
        {LOG.format(0): forward(leaf(), out=BAD), "Distributed.send.0.forward": collective(BAD, dst=0)},
    )
    assert blamed(step) == [(1, "computation", LOG.format(0))]
    assert found(step).unmatched == ()


def test_groups_of_their_own_are_matched_apart(tmp_path: Path) -> None:
    """Ranks 0 and 1 meet twice in one group; rank 1's number counts a third collective, of another group."""
    other = collective(FINE, out=FINE, ranks=(1,), group="0000bbbb")
    step = two_ranks(
        tmp_path,
        {REDUCE.format(0): collective(FINE, out=FINE), REDUCE.format(1): collective(FINE, out=BAD)},
        {
            REDUCE.format(0): other,
            REDUCE.format(1): collective(FINE, out=FINE),
            LOG.format(0): forward(leaf(), out=BAD),
            REDUCE.format(2): collective(BAD, out=BAD),
        },
    )
    assert blamed(step) == [(1, "computation", LOG.format(0))]


def test_what_came_from_another_rank_unseen_is_not_blamed(tmp_path: Path) -> None:
    """The entry of an asynchronous collective stands where its end was seen, which may be after its result was used."""
    step = two_ranks(
        tmp_path,
        {"Torch.mul.0.forward": forward(BAD, out=leaf(NAN, NAN, (9,))), REDUCE.format(0): collective(FINE, out=BAD)},
        {LOG.format(0): forward(leaf(), out=BAD), REDUCE.format(0): collective(BAD, out=BAD)},
    )
    assert blamed(step) == [(1, "computation", LOG.format(0))]


THEIRS, GARBAGE = leaf(ours=False), leaf(NAN, NAN, (3,), ours=False)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("recv", forward(GARBAGE, {"type": "int", "value": 1}, out=THEIRS)),
        ("all_gather", forward([GARBAGE, GARBAGE], THEIRS, out=[THEIRS])),
        ("all_gather_into_tensor", forward(GARBAGE, THEIRS, out=THEIRS)),
        ("reduce_scatter_tensor", forward(GARBAGE, THEIRS, out=THEIRS)),
        ("gather", forward(THEIRS, [GARBAGE], {"type": "int", "value": 0}, out=[THEIRS])),
        ("broadcast", forward(GARBAGE, {"type": "int", "value": 1}, out=THEIRS)),
    ],
)
def test_what_is_in_a_buffer_before_it_is_received_into_is_nobody_s_fault(
    tmp_path: Path, name: str, call: dict[str, Any]
) -> None:
    empty = {"Torch.empty.0.forward": forward(out=GARBAGE)}
    received = {f"Distributed.{name}.0.forward": call}
    assert alone(tmp_path / "made", {**empty, **received}) == []
    assert alone(tmp_path / "arrived", received) == []


def test_peers_are_read_by_place_too(tmp_path: Path) -> None:
    """Messages of other tools, with positional arguments; the ranks' counts of other collectives differ."""
    step = two_ranks(
        tmp_path,
        {"Distributed.recv.0.forward": forward(THEIRS, {"type": "int", "value": 1}, out=BAD)},
        {
            REDUCE.format(0): collective(FINE, out=FINE, ranks=(1, 2)),
            LOG.format(0): forward(FINE, out=BAD),
            "Distributed.send.0.forward": forward(BAD, {"type": "int", "value": 0}),
        },
    )
    assert blamed(step) == [(1, "computation", LOG.format(0))]
    assert found(step).unmatched == ()


def test_a_message_that_does_not_say_with_whom(tmp_path: Path) -> None:
    findings = found(write(tmp_path, {"Distributed.recv.0.forward": collective(out=FINE)}))
    assert findings.unmatched == (
        "Distributed.recv.0.forward of rank 0 does not say with whom: what it received is not followed back",
    )


def test_a_nan_out_of_finite_parts_has_nothing_to_do_with_magnitudes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = {REDUCE.format(0): collective(FINE, out=BAD)}
    text = say(two_ranks(tmp_path, made, made), capsys)[1]
    assert "magnitudes" not in text
    assert "finite values do not add up to a NaN" in text


def test_what_a_collective_stands_between(tmp_path: Path) -> None:
    entries = {REDUCE.format(number): collective(FINE, out=BAD if number == 1 else FINE) for number in range(3)}
    origins = found(two_ranks(tmp_path, entries, entries)).origins
    assert {(one.name, one.after, one.until) for one in origins} == {
        (REDUCE.format(1), REDUCE.format(0), REDUCE.format(2))
    }


def test_numbers_in_the_group_match_where_an_entry_lacks(tmp_path: Path) -> None:
    def number(count: int, *inputs: Any, out: Any) -> dict[str, Any]:
        return collective(*inputs, out=out, seq=count)

    step = two_ranks(
        tmp_path,
        {REDUCE.format(0): number(0, FINE, out=FINE), REDUCE.format(2): number(2, FINE, out=BAD)},
        {
            REDUCE.format(0): number(0, FINE, out=FINE),
            REDUCE.format(1): {**number(1, FINE, out=None), "incomplete": True},
            LOG.format(0): forward(FINE, out=BAD),
            REDUCE.format(2): number(2, BAD, out=BAD),
        },
    )
    assert blamed(step) == [(1, "computation", LOG.format(0))]
    assert found(step).unmatched == (
        "Distributed.all_reduce.1.forward of rank 1 has no counterpart in the dump of rank 0",
        "Distributed.all_reduce.1.forward of rank 1 had not ended when the dump did, or it failed",
    )


def test_two_dumps_of_one_rank_are_refused(tmp_path: Path) -> None:
    write(tmp_path, {LOG.format(0): forward(FINE, out=FINE)}, None)
    step = write(tmp_path, {LOG.format(0): forward(FINE, out=BAD)}, 0)
    with pytest.raises(DumpError, match="two dumps of rank 0"):
        found(step)


def test_ranks_whose_dump_ends_early_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, {REDUCE.format(0): collective(FINE, out=FINE), REDUCE.format(1): collective(FINE, out=FINE)}, 0)
    step = write_lines(
        tmp_path, {REDUCE.format(0): collective(FINE, out=FINE), LOG.format(0): forward(FINE, out=BAD)}, 1
    )
    code, text = say(step, capsys)
    assert code == 1
    assert "rank 1: incomplete: the run ended inside this step; the newest entries may be missing" in text
    assert f"note: {REDUCE.format(1)} of rank 0 has no counterpart in the dump of rank 1" in text
    assert blamed(step) == [(1, "computation", LOG.format(0))]


def test_a_dump_without_entries_is_an_error(tmp_path: Path) -> None:
    step = write(tmp_path, {})
    with pytest.raises(DumpError, match="has no entries"):
        read(find_ranks(step))


# -- memory -----------------------------------------------------------------------------------------------------------


def placed(number: int, start: int, size: int, stream: int = 0) -> dict[str, Any]:
    return leaf(
        device="cuda:0", storage_ptr=start, storage_bytes=size, storage_id=number, stream=stream, data_ptr=start
    )


def test_live_storages_that_share_memory_are_something_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = placed(1, 4096, 12288), placed(2, 8192, 8192, stream=7)
    entries = {
        "Functional.layer_norm.0.forward": forward(placed(3, 65536, 64), out=one),
        "Torch.cat.0.forward": forward(placed(4, 131072, 64), out=two),
        "Torch.split.0.forward": forward(one, out=one),
    }
    code, text = say(write(tmp_path, entries), capsys)
    assert code == 1
    assert "No NaN or infinity found: every tensor is finite" in text
    assert "Nothing found" not in text
    assert "note: rank 0: live storages that share memory (a stomp, unless it is meant, as by from_numpy" in text
    assert (
        "Functional.layer_norm.0.forward output.0 (storage 1) and Torch.cat.0.forward output.0 (storage 2) share 8,192 "
        "bytes on cuda:0, stream 0 and stream 7: 0x2000 to 0x4000, from byte 4,096 of the one and byte 0 of the other; "
        "the one is still in use at Torch.split.0.forward output.0, the other at Torch.cat.0.forward output.0"
    ) in text


def test_memory_that_is_given_out_again_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = {
        "Torch.add.0.forward": forward(placed(1, 4096, 64), out=placed(2, 8192, 64)),
        "Torch.add.1.forward": forward(placed(2, 8192, 64), out=placed(3, 4096, 64)),
        "Torch.add.2.backward": backward(placed(3, 4096, 64), out=placed(4, 4096, 64)),
        "Module.a.A.backward.0": backward(placed(3, 4096, 64), out=placed(4, 4096, 64)),
    }
    assert "share memory" not in say(write(tmp_path, entries), capsys)[1]


@given(
    st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(0, 30), st.integers(0, 10)),
        min_size=1,
        max_size=12,
    )
)
@settings(deadline=None)
def test_what_shares_memory_is_what_overlaps_in_time_and_place(storages: list[tuple[int, int, int, int]]) -> None:
    walk = MemoryWalk("L1")
    for number, (start, size, first, more) in enumerate(storages):
        walk._storages[number, start] = Storage(number, "cpu", start, size, first, "", first + more, "")
    expected = {
        (one, other)
        for other, (start, size, first, more) in enumerate(storages)
        for one, (its_start, its_size, its_first, its_more) in enumerate(storages[:other])
        if max(start, its_start) < min(start + size, its_start + its_size)
        and max(first, its_first) <= min(first + more, its_first + its_more)
    }
    assert {tuple(sorted((found.one.number, found.other.number))) for found in walk.overlaps() or ()} == expected


def test_an_address_that_is_given_out_again_and_again_takes_no_time() -> None:
    walk = MemoryWalk("L1")
    for number in range(20_000):
        walk._storages[number, 4096] = Storage(number, "cpu", 4096, 64, number, "", number, "")
        walk._storages[-number - 1, 8192] = Storage(-number - 1, "cpu", 8192, 64, number, "", number, "")
    began = time.process_time()
    assert not walk.overlaps()
    assert time.process_time() - began < 5, "it was minutes"
