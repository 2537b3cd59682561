"""`StatsDump` writes the modules and functions of a step under msprobe's names, and changes nothing in the program."""

from __future__ import annotations

import copy
import gc
import io
import json
import math
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddpstats import ConfigError, DumpError
from ddpstats.dump import StatsDump, record
from ddpstats.dump.analyze import open_rank
from ddpstats.dump.msprobe import parse_name
from tests import training
from tests.dump.collecting import LEAF_KEYS, Block, batch, data, dumped, hooks_of, leaves, lines, make_model


def step_of(model: nn.Module) -> Tensor:
    loss: Tensor = model(batch()).square().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


# -- names and entries ------------------------------------------------------------------------------------------------


def test_modules_are_named_by_path_and_class_and_end_before_those_around_them(tmp_path: Path) -> None:
    model = make_model()
    entries = dumped(tmp_path, lambda: step_of(model), model, "L0")
    forward = [name for name in entries if ".forward." in name]
    inside = ["norm.LayerNorm", "linear.Linear", "activation.ReLU", "dropout.Dropout"]
    blocks = [[*(f"Module.{n}.{part}.forward.0" for part in inside), f"Module.{n}.Block.forward.0"] for n in (1, 2)]
    assert forward == [
        "Module.0.Linear.forward.0", *blocks[0], *blocks[1], "Module.3.Linear.forward.0",
        "Module.root.Sequential.forward.0",
    ]  # fmt: skip
    assert set(entries["Module.3.Linear.forward.0"]["parameters"]) == {"weight", "bias"}
    assert entries["Module.3.Linear.backward.0"]["input"][0]["shape"] == [3, 2]
    assert set(entries["Module.3.Linear.parameters_grad.0"]) == {"weight", "bias"}
    construct = json.loads((tmp_path / "step0/rank/construct.json").read_text())
    assert construct["Module.root.Sequential.forward.0"] is None
    assert construct["Module.1.norm.LayerNorm.forward.0"] == "Module.1.Block.forward.0"
    assert construct["Module.1.norm.LayerNorm.backward.0"] == "Module.1.Block.backward.0"
    assert construct.keys() == entries.keys()


def test_functions_are_named_by_their_module_and_numbered(tmp_path: Path) -> None:
    convolution = nn.Conv2d(1, 2, 3)

    def body() -> None:
        x = torch.ones(2, 3, requires_grad=True)
        y = nn.functional.linear(x, torch.ones(4, 3)) + 1
        y = torch.cat([nn.functional.gelu(y), y]) @ torch.ones(4, 4)
        y[0] = 0.0
        y.add_(1)
        assert y.shape == (4, 4)
        assert y.size(0) == y.dim() + 2
        assert not y.is_complex()
        torch.ops.aten.relu(y).sum().backward()
        convolution(torch.ones(1, 1, 5, 5))

    entries = dumped(tmp_path, body)
    forward = [name.removesuffix(".forward") for name in entries if name.endswith(".forward")]
    assert forward == [
        "Torch.ones.0", "Torch.ones.1", "Functional.linear.0", "Tensor.add.0", "Functional.gelu.0", "Torch.cat.0",
        "Torch.ones.2", "Tensor.matmul.0", "Tensor.__setitem__.0", "Tensor.add_.0", "Aten.relu.0", "Tensor.sum.0",
        "Torch.ones.3", "Functional.conv2d.0",
    ]  # fmt: skip
    backward = [name for name in entries if name.endswith(".backward")]
    assert backward[0] == "Tensor.sum.0.backward"
    assert backward[-1] == "Functional.linear.0.backward"
    assert all(parse_name(name).prefix for name in entries)
    assert json.loads((tmp_path / "step0/rank/construct.json").read_text()) == {}


def test_type_conversion_is_an_entry_and_type_query_is_none(tmp_path: Path) -> None:
    def body() -> None:
        x = torch.full((3,), 1e6)
        assert x.type() == "torch.FloatTensor"
        x.type(torch.float16)
        torch.split_with_sizes_copy(x, [1, 2])

    entries = dumped(tmp_path, body)
    assert list(entries)[1:] == ["Tensor.type.1.forward", "Torch.split_with_sizes_copy.0.forward"]
    assert entries["Tensor.type.1.forward"]["output"][0]["inf_count"] == 3


def test_in_place_call_has_its_input_before_and_its_output_after(tmp_path: Path) -> None:
    def body() -> None:
        x = torch.ones(3)
        x.mul_(5)
        x[1] = 7.0
        torch.add(x, 1.0, out=x)

    entries = dumped(tmp_path, body)
    multiplied, set_, added = (
        entries[f"{name}.0.forward"] for name in ("Tensor.mul_", "Tensor.__setitem__", "Torch.add")
    )
    assert (multiplied["input_args"][0]["Max"], multiplied["output"][0]["Max"]) == (1.0, 5.0)
    assert (set_["input_args"][0]["Max"], set_["output"][0]["Max"]) == (5.0, 7.0)
    assert (added["input_args"][0]["Max"], added["output"][0]["Max"]) == (7.0, 8.0)


def test_leaf_has_the_keys_of_msprobe_in_order_and_then_ours(tmp_path: Path) -> None:
    x = torch.tensor([[1.0, -3.0], [2.0, 4.0]])
    entries = dumped(tmp_path, lambda: torch.nn.functional.relu(x.t()))
    leaf = entries["Functional.relu.0.forward"]["input_args"][0]
    assert list(leaf) == LEAF_KEYS
    assert [leaf[key] for key in LEAF_KEYS[:11]] == [
        "torch.Tensor", "torch.float32", [2, 2], 4.0, -3.0, 1.0, pytest.approx(30**0.5), False, 0, 0, None,
    ]  # fmt: skip
    assert leaf["stride"] == [1, 2]
    assert leaf["data_ptr"] == leaf["storage_ptr"] == x.data_ptr()
    assert (leaf["storage_bytes"], leaf["storage_offset"], leaf["stream"]) == (16, 0, None)  # the CPU has no streams
    assert entries["Functional.relu.0.forward"]["output"][0]["storage_id"] != leaf["storage_id"]
    assert entries["Tensor.t.0.forward"]["output"][0]["storage_id"] == leaf["storage_id"]


def test_arguments_that_are_no_tensors_have_type_and_value(tmp_path: Path) -> None:
    def body() -> None:
        x = torch.ones(4, 3)
        _ = x[1:3, ..., None]
        torch.zeros((2, 1), dtype=torch.float16, device=torch.device("cpu"))
        torch.cat([x, x], dim=1)
        x.mul(2 + 1j)
        nn.functional.dropout(x, np.float32(0.5))  # type: ignore[arg-type]

    entries = dumped(tmp_path, body)
    index = entries["Tensor.__getitem__.0.forward"]["input_args"][1]
    assert index == [{"type": "slice", "value": [1, 3, None]}, {"type": "ellipsis", "value": "..."}, None]
    zeros = entries["Torch.zeros.0.forward"]
    assert zeros["input_args"] == [[{"type": "int", "value": 2}, {"type": "int", "value": 1}]]
    assert zeros["input_kwargs"]["dtype"] == {"type": "torch.dtype", "value": "torch.float16"}
    assert [leaf["shape"] for leaf in entries["Torch.cat.0.forward"]["input_args"][0]] == [[4, 3], [4, 3]]
    assert entries["Tensor.mul.0.forward"]["input_args"][1] == {"type": "complex", "value": "(2+1j)"}
    dropout = entries["Functional.dropout.0.forward"]
    assert dropout["input_kwargs"]["p"] == {"type": "float32", "value": 0.5}  # as msprobe writes it


def test_mix_gives_functions_their_modules_as_parents(tmp_path: Path) -> None:
    model = make_model()
    entries = dumped(tmp_path, lambda: step_of(model), model, "mix")
    construct = json.loads((tmp_path / "step0/rank/construct.json").read_text())
    assert construct["Functional.linear.1.forward"] == "Module.1.linear.Linear.forward.0"
    assert construct["Functional.linear.1.backward"] == "Module.1.linear.Linear.backward.0"
    assert construct["Tensor.add_.0.forward"] == "Module.1.Block.forward.0"
    assert construct["Tensor.square.0.forward"] is None
    names = list(entries)
    assert names.index("Functional.linear.1.forward") < names.index("Module.1.linear.Linear.forward.0")


def test_stack_is_the_user_s_lines_innermost_first_and_shared(tmp_path: Path) -> None:
    model = make_model()
    entries = dumped(tmp_path, lambda: step_of(model), model, "mix")
    stacks = json.loads((tmp_path / "step0/rank/stack.json").read_text())
    assert sorted(name for names, _ in stacks.values() for name in names) == sorted(entries)
    dump = open_rank(tmp_path / "step0/rank")
    stack = dump.stack_of("Tensor.add_.0.forward")
    assert stack[0].endswith("in forward,\n    y += x")
    assert "collecting.py, line " in stack[0]
    assert any("in step_of" in line for line in stack)
    assert not any("torch/nn/modules" in line or "ddpstats/dump" in line for line in stack)
    assert dump.stack_of("Tensor.add_.0.backward") == stack


def test_second_backward_pass_has_its_own_entry(tmp_path: Path) -> None:
    def body() -> None:
        x = torch.ones(2, requires_grad=True)
        y = torch.exp(x)
        y.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
        (y * 3).sum().backward()  # type: ignore[no-untyped-call]

    entries = dumped(tmp_path, body)
    assert entries["Torch.exp.0.backward"]["input"][0]["Max"] == 1.0
    assert entries["Torch.exp.0.backward.1"]["input"][0]["Max"] == 3.0


@pytest.mark.parametrize("reentrant", [False, True])
def test_calls_that_checkpointing_repeats_are_marked_recomputed(tmp_path: Path, reentrant: bool) -> None:
    model = make_model()
    x = batch().requires_grad_()

    def body() -> None:
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()

    entries = dumped(tmp_path, body, model, "mix")
    assert entries["Module.0.Linear.forward.1"]["is_recompute"] is True
    assert "is_recompute" not in entries["Module.0.Linear.forward.0"]
    assert entries["Functional.linear.4.forward"]["is_recompute"] is True
    assert not any("raised" in entry for entry in entries.values()), "checkpointing stops the repetition early"
    assert f"Functional.linear.{4 if reentrant else 0}.backward" in entries


# -- what is chosen ---------------------------------------------------------------------------------------------------


def test_only_chosen_steps_and_ranks_are_collected(tmp_path: Path) -> None:
    model = make_model()
    dump = StatsDump({"dump_path": str(tmp_path), "level": "mix", "step": [1, "3-4"]}, model=model)
    for step in range(6):
        dump.start()
        assert bool(hooks_of(model)) == (step in (1, 3, 4))
        assert bool(torch._C._len_torch_function_stack()) == (step in (1, 3, 4))
        step_of(model)
        dump.stop()
        dump.step()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step1", "step3", "step4"]
    of_rank_1 = StatsDump({"dump_path": str(tmp_path / "other"), "rank": [1]})
    with pytest.warns(UserWarning, match="rank chooses 1, and there is 1 rank, counted from 0"):
        of_rank_1.start()
    of_rank_1.start()  # once is enough
    assert not torch._C._len_torch_function_stack()


def test_stop_without_start_does_nothing(tmp_path: Path) -> None:
    dump = StatsDump({"dump_path": str(tmp_path), "step": [1]})
    dump.stop()
    dump.start()  # a step that is not chosen
    dump.stop()
    dump.stop()
    assert list(tmp_path.iterdir()) == []


def test_selection_does_not_change_names(tmp_path: Path) -> None:
    model = make_model()

    def chosen(name: str, **section: Any) -> list[str]:
        return list(dumped(tmp_path / name, lambda: step_of(model), model, "mix", statistics=section))

    assert chosen("list", list=["Functional.linear.2"]) == [
        "Functional.linear.2.forward",
        "Functional.linear.2.backward",
    ]
    assert set(chosen("inside", list=["Module.1.linear.Linear.forward.0"])) == {
        "Functional.linear.1.forward", "Module.1.linear.Linear.forward.0",
    }  # fmt: skip
    scope = ["Functional.linear.1.forward", "Functional.relu.0.forward"]
    assert chosen("scope", scope=scope) == [*scope, "Module.1.activation.ReLU.forward.0"]  # which began before the last
    backward = chosen("backward scope", scope=["Functional.linear.3.backward", "Functional.layer_norm.1.backward"])
    assert {"Functional.linear.3.backward", "Tensor.add_.1.backward", "Functional.layer_norm.1.backward"} <= {*backward}
    assert "Functional.linear.1.backward" not in backward


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_gradients_of_parameters_are_chosen_with_their_module(tmp_path: Path, level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 2))

    def gradients(name: str, **section: Any) -> list[str]:
        def body() -> None:
            model(batch().requires_grad_()).sum().backward()

        entries = dumped(tmp_path / name, body, model, level, statistics=section)
        return [entry.split(".Linear")[0] for entry in entries if "parameters_grad" in entry]

    scope = ["Module.2.Linear.forward.0", "Module.1.Sequential.backward.0"]
    assert gradients("scope", scope=scope) == ["Module.2", "Module.1.1", "Module.1.0"]
    assert gradients("list", list=["Module.1.Sequential"]) == ["Module.1.1", "Module.1.0"]


def test_data_mode_leaves_out_inputs_or_outputs(tmp_path: Path) -> None:
    x = batch().requires_grad_()
    for mode in ("input", "output"):
        entries = dumped(tmp_path / mode, lambda: x.exp().sum().backward(), statistics={"data_mode": [mode]})  # type: ignore[no-untyped-call]
        forward, backward = entries["Tensor.exp.0.forward"], entries["Tensor.exp.0.backward"]
        assert bool(forward["input_args"]) == bool(backward["input"]) == (mode == "input")
        assert bool(forward["output"]) == bool(backward["output"]) == (mode == "output")


# -- files ------------------------------------------------------------------------------------------------------------


def test_files_of_a_dump_are_those_of_the_format(tmp_path: Path) -> None:
    dumped(tmp_path, lambda: torch.ones(2).exp(), level="L1")
    directory = tmp_path / "step0/rank"
    assert sorted(path.name for path in directory.iterdir()) == ["construct.json", "dump.json", "stack.json"]
    text = (directory / "dump.json").read_text()
    assert list(json.loads(text)) == [
        "task", "level", "framework", "dump_data_dir", "scope", "list", "data_mode", "ddpstats", "data"
    ]  # fmt: skip
    assert text.split("\n")[1].startswith('"Torch.ones.0.forward": {')
    assert [entry.name for entry in open_rank(directory).entries()] == ["Torch.ones.0.forward", "Tensor.exp.0.forward"]


def test_tensors_are_saved_under_their_names(tmp_path: Path) -> None:
    x = torch.arange(12.0).requires_grad_()
    entries = dumped(tmp_path, lambda: torch.add(x, other=x).sum().backward(), task="tensor")  # type: ignore[no-untyped-call]
    entry = entries["Torch.add.0.forward"]
    leaf = entry["input_args"][0]
    assert leaf["data_name"] == "Torch.add.0.forward.input.0.pt"
    assert list(leaf)[7:10] == ["requires_grad", "data_name", "nan_count"]
    assert entry["input_kwargs"]["other"]["data_name"] == "Torch.add.0.forward.input_kwargs.other.pt"
    assert entries["Torch.add.0.backward"]["output"][0]["data_name"] == "Torch.add.0.backward.output.0.pt"
    rank = tmp_path / "step0/rank"
    assert json.loads((rank / "dump.json").read_text())["dump_data_dir"] == str(rank / "dump_tensor_data")


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x[1:],
        lambda x: x[:1].expand(3, 4),
        lambda x: torch.complex(x, x).conj(),
        lambda x: torch.complex(x, x).conj().imag,
    ],
    ids=["whole", "transposed", "part", "expanded", "conjugate", "negative"],
)
def test_file_of_a_tensor_has_its_elements_in_order_and_no_others(
    change: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    x = change(torch.arange(12.0).reshape(3, 4))
    entries = dumped(tmp_path, x.clone, task="tensor")
    file = entries["Tensor.clone.0.forward"]["input_args"][0]["data_name"]
    saved = torch.load(tmp_path / "step0/rank/dump_tensor_data" / file, weights_only=True)
    assert torch.equal(saved, x)
    assert saved.is_contiguous()
    assert not saved.is_conj()
    assert not saved.is_neg()
    assert saved.untyped_storage().nbytes() == saved.nbytes


@pytest.mark.parametrize("is_on_device", [False, True])
def test_numbers_that_are_not_finite_are_written_in_words(
    is_on_device: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpstats.dump.record.leaves._is_on_host", lambda values: not is_on_device)
    x = torch.tensor([1.0, math.inf, math.nan, -math.inf])
    entries = dumped(tmp_path, lambda: (x[:2].clone(), x.clone(), x[1:].masked_fill(x[1:] > 0, -math.inf)))
    infinite, both = (entries[f"Tensor.clone.{number}.forward"]["output"][0] for number in range(2))
    assert [infinite[key] for key in ("Max", "Min", "Mean", "Norm")] == [math.inf, 1.0, math.inf, math.inf]
    assert all(math.isnan(both[key]) for key in ("Max", "Min", "Mean", "Norm"))
    assert (both["nan_count"], both["inf_count"], both["first_bad"]) == (1, 2, [1])
    assert entries["Tensor.masked_fill.0.forward"]["input_args"][2] == {"type": "float", "value": -math.inf}


def test_tensor_list_saves_some_tensors_beside_statistics(tmp_path: Path) -> None:
    entries = dumped(tmp_path, lambda: torch.ones(2).exp().sum(), statistics={"tensor_list": ["exp"]})
    saved = {leaf.get("data_name") for entry in entries.values() for leaf in leaves(entry)}
    assert saved == {None, "Tensor.exp.0.forward.input.0.pt", "Tensor.exp.0.forward.output.0.pt"}


def test_md5_is_the_crc_of_the_elements_in_order(tmp_path: Path) -> None:
    import zlib

    x = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    entries = dumped(tmp_path, lambda: (x.t() + 1, torch.empty(0).exp()), statistics={"summary_mode": "md5"})
    leaf = entries["Tensor.add.0.forward"]["input_args"][0]
    raw = bytes(x.t().contiguous().view(torch.uint8).flatten().tolist())
    assert leaf["md5"] == f"{zlib.crc32(raw):08x}"
    assert leaf["Max"] == 5.0
    assert entries["Torch.empty.0.forward"]["output"][0]["md5"] == "00000000"


def test_step_is_collected_in_pieces(tmp_path: Path) -> None:
    model = make_model()
    for is_async in (False, True):
        path = tmp_path / str(is_async)
        dump = StatsDump({"dump_path": str(path), "level": "mix", "async_dump": is_async}, model=model)
        for _ in range(2):
            dump.start()
            step_of(model)
            dump.stop()
            model(batch())
        dump.step()
        entries = data(path)
        assert [f"Functional.linear.{n}.forward" in entries for n in (0, 7, 8)] == [True, True, False]
        assert {"Module.root.Sequential.backward.1", "Module.3.Linear.backward.1"} <= entries.keys()
        assert not (path / "step0/rank/dump.jsonl").exists()


@pytest.mark.parametrize("is_async", [False, True])
def test_files_of_a_step_that_was_only_stopped_are_written_at_exit(tmp_path: Path, is_async: bool) -> None:
    model = nn.Linear(2, 2)
    seen = weakref.ref(model)
    dump = StatsDump({"dump_path": str(tmp_path), "async_dump": is_async}, model=model)
    with dump:
        torch.ones(2).exp()
    del dump, model
    gc.collect()
    assert seen() is None
    assert [path.name for path in (tmp_path / "step0/rank").iterdir()] == ["dump.jsonl"]  # all that a kill leaves
    assert [entry["name"] for entry in lines(tmp_path)[1:]] == ["Torch.ones.0.forward", "Tensor.exp.0.forward"]
    record._at_exit()
    assert list(data(tmp_path)) == ["Torch.ones.0.forward", "Tensor.exp.0.forward"]


def test_step_that_raises_is_written(tmp_path: Path) -> None:
    model = make_model()
    dump = StatsDump({"dump_path": str(tmp_path), "level": "mix"}, model=model)
    with pytest.raises(RuntimeError), dump:
        model(torch.cat([model(batch()), torch.ones(2, 99)]))
    dump.step()
    assert hooks_of(model) == torch._C._len_torch_function_stack() == 0
    assert "Module.root.Sequential.forward.0" in data(tmp_path)


def test_existing_dump_is_never_overwritten(tmp_path: Path) -> None:
    later = StatsDump({"dump_path": str(tmp_path)})
    dumped(tmp_path, lambda: torch.ones(2))
    with pytest.raises(DumpError, match=r"step0/rank holds a dump already.*Give another dump_path"):
        StatsDump({"dump_path": str(tmp_path)})
    with pytest.raises(DumpError, match="holds a dump already"):
        later.start()
    assert not torch._C._len_torch_function_stack()
    StatsDump({"dump_path": str(tmp_path), "step": [1]})
    (tmp_path / "file").write_text("")
    with pytest.raises(DumpError, match="cannot be written to"):
        StatsDump({"dump_path": str(tmp_path / "file")})


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_level_with_modules_needs_a_model(tmp_path: Path, level: str) -> None:
    dump = StatsDump({"dump_path": str(tmp_path), "level": level})
    with pytest.raises(ConfigError, match=f"level {level} collects modules: give the model"):
        dump.start()
    dump.start(make_model())
    dump.step()
    with pytest.raises(ConfigError, match="model is a int"):
        StatsDump({"dump_path": str(tmp_path / "b")}, model=3)


def test_several_models_are_named_by_their_keys(tmp_path: Path) -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 2)
    entries = dumped(tmp_path, lambda: second(first(batch())), {"first": first, "second": second}, "L0")
    assert list(entries) == ["Module.first.Linear.forward.0", "Module.second.Linear.forward.0"]


# -- nothing changes --------------------------------------------------------------------------------------------------


def trained(path: Path | None, **config: Any) -> training.Trained:
    """Train for three steps, with dropout, checkpointing and a gradient of gradients."""
    model = make_model()
    hooks = training.Hooks()
    if path is not None:
        dump = StatsDump({"dump_path": str(path), **config}, model=model)
        hooks = training.Hooks(micro_batch=lambda batch: dump, after_step=lambda step: dump.step())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return training.train(
        model, batch_of=lambda step, micro: {"x": batch(step)}, loss_of=loss_of, optimizer=optimizer, hooks=hooks
    )


def loss_of(model: nn.Module, inputs: training.Batch) -> Tensor:
    x = inputs["x"].requires_grad_()
    loss: Tensor = checkpoint(model, x, use_reentrant=False).square().sum()
    (inner,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + 0.1 * inner.square().sum()


@pytest.mark.parametrize("level", [*(pytest.param(level, marks=pytest.mark.slow) for level in ("L0", "L1")), "mix"])
@pytest.mark.parametrize("is_async", [False, True])
def test_training_with_a_dump_is_bit_identical(tmp_path: Path, level: str, is_async: bool) -> None:
    plain, dumped_run = trained(None), trained(tmp_path, level=level, async_dump=is_async)
    assert all(map(torch.equal, plain.parameters, dumped_run.parameters))
    assert (plain.losses, plain.drawn) == (dumped_run.losses, dumped_run.drawn)
    for step in range(3):
        assert data(tmp_path, step)


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_lazy_modules_and_batched_gradients_are_dumped(tmp_path: Path, level: str) -> None:
    """Parameters that have no shape at the start, and gradients that are several at once, which have no numbers."""
    model = nn.Sequential(nn.LazyLinear(2), nn.ReLU())
    dump = StatsDump({"dump_path": str(tmp_path), "level": level}, model=model)
    for step in range(2):
        x = torch.ones(3, 2, requires_grad=True)
        dump.start()
        torch.autograd.grad(model(x), x, torch.eye(6).view(6, 3, 2), is_grads_batched=True)
        dump.stop()
        dump.step()
        entry = data(tmp_path, step)["Module.0.Linear.forward.0" if step else "Module.0.LazyLinear.forward.0"]
        assert entry["parameters"].keys() == {"weight", "bias"}  # it has its shape when the forward pass begins


def test_model_is_saved_and_copied_while_it_is_dumped(tmp_path: Path) -> None:
    model = make_model()

    def body() -> None:
        copied = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for copy_of_model in (copied, torch.load(file, weights_only=False)):
            assert torch.equal(copy_of_model.eval()(batch()), copy_of_model(batch()))

    assert dumped(tmp_path, body, model, "L0") == {}


@pytest.mark.slow
def test_compiled_parts_are_left_alone_and_named_in_a_warning(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Block(4))
    compiled = nn.Sequential(model[0], cast(nn.Module, torch.compile(model[1], backend="eager")))
    function = torch.compile(lambda x: (x * 2).sin().sum(), backend="eager")
    expected = function(batch())
    dump = StatsDump({"dump_path": str(tmp_path), "level": "mix"}, model=compiled)
    with pytest.warns(UserWarning, match="parts under torch.compile or TorchScript"):
        dump.start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own
        step_of(compiled)
        assert torch.equal(function(batch()), expected)
    dump.step()
    entries = data(tmp_path)
    assert "Module.1.Block.forward.0" in entries
    assert not any(".norm." in name for name in entries)


def test_error_of_the_dump_is_logged_and_does_not_reach_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(tensor: Tensor, shape: torch.Size) -> None:
        raise RuntimeError("made up")

    monkeypatch.setattr("ddpstats.dump.record.leaves.host_numbers", fails)
    model = make_model()
    dump = StatsDump({"dump_path": str(tmp_path), "level": "mix"}, model=model)
    dump.start()
    step_of(model)
    with pytest.warns(UserWarning, match=r"part\(s\) of the dump could not be collected; see .*dump_error_info.log"):
        dump.step()
    assert "made up" in (tmp_path / "step0/rank/dump_error_info.log").read_text()
    entries = json.loads((tmp_path / "step0/rank/dump.json").read_text())["data"]
    assert entries["Functional.linear.0.forward"]["output"][0]["Max"] is None
    assert entries["Functional.linear.0.forward"]["output"][0]["shape"] == [3, 6]


def test_entries_are_on_disk_while_the_step_runs(tmp_path: Path) -> None:
    dump = StatsDump({"dump_path": str(tmp_path)})
    dump.start()
    torch.ones(2).exp()
    header, *entries = lines(tmp_path)
    dump.step()
    chosen = {"scope": [], "list": [], "data_mode": ["all"]}
    assert header == {"task": "statistics", "level": "L1", "dump_data_dir": None, **chosen, "ddpstats": 1}
    assert [entry["name"] for entry in entries] == ["Torch.ones.0.forward", "Tensor.exp.0.forward"]
    assert data(tmp_path)["Tensor.exp.0.forward"] == entries[1]["entry"]


@pytest.mark.slow
def test_autocast_and_other_modes_do_not_change_what_is_measured(tmp_path: Path) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.full((70, 70), 1.0 + 2**-12)
    counter = FlopCounterMode(display=False)

    def body() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16), counter:
            torch.mm(x, x)

    entries = dumped(tmp_path, body)
    entry = entries["Torch.mm.0.forward"]
    assert entry["input_args"][0]["Norm"] == pytest.approx(70 * (1 + 2**-12), rel=1e-6)
    assert entry["output"][0]["dtype"] == "torch.bfloat16"
    assert counter.get_total_flops() == 2 * 70**3
