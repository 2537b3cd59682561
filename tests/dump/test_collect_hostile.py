"""Programs that fork, raise, trace, subclass or use threads run on under `StatsDump`, and their dump is right."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import threading
import warnings
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function

from ddpstats import DumpError
from ddpstats.dump import StatsDump, record
from ddpstats.dump.analyze import DumpEntry
from ddpstats.dump.record import calls
from tests import programs
from tests.dump.collecting import data, dumped, leaves


def started(path: Path, model: Any = None, **config: Any) -> StatsDump:
    dump = StatsDump({"dump_path": str(path), "level": "L1" if model is None else "mix", **config}, model=model)
    dump.start()
    return dump


def mode_count() -> int:
    return int(torch._C._len_torch_function_stack())


# -- processes and threads --------------------------------------------------------------------------------------------


def in_child(body: Callable[[], object]) -> int:
    """``body`` and what runs at exit, in a forked process; its exit status."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            body()
            record._at_exit()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(process, 0)[1]


@pytest.mark.parametrize("is_async", [False, True])
def test_forked_process_does_not_touch_the_dump(tmp_path: Path, is_async: bool) -> None:
    model = nn.Linear(4, 4)
    dump = started(tmp_path, model, async_dump=is_async)

    def child() -> None:
        assert mode_count() == 0
        assert not record._unfinished
        model(torch.randn(2, 4)).sum().backward()
        dump.step()
        dump.step()

    model(torch.ones(2, 4)).sum().backward()
    assert in_child(child) == 0
    model(torch.ones(2, 4)).sum().backward()
    dump.step()
    entries = data(tmp_path)
    assert "Module.root.Linear.parameters_grad.1" in entries
    assert "Module.root.Linear.forward.2" not in entries


def test_second_program_in_one_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (StatsDump({"dump_path": str(tmp_path)}) for _ in range(2))
    first.start()
    monkeypatch.setattr(record, "_check_empty", lambda directory: None)  # both looked at the same moment
    with pytest.raises(DumpError, match=r"another process writes one.* or by RANK in the environment"):
        second.start()
    assert not second._watches
    first.step()
    monkeypatch.setenv("RANK", "3")
    second.start()
    second.step()
    assert (tmp_path / "step0/rank3/dump.json").exists()


def test_step_has_modules_of_another_thread(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    dump = started(tmp_path, model)

    thread = threading.Thread(target=lambda: model(torch.ones(2, 4)).sum().backward())
    thread.start()
    thread.join()
    model(torch.ones(2, 4))
    dump.step()
    torch.ones(2).exp()
    assert list(data(tmp_path)) == [
        "Torch.ones.0.forward", "Functional.linear.0.forward", "Module.root.Linear.forward.0"
    ]  # fmt: skip
    assert mode_count() == 0


# -- calls ------------------------------------------------------------------------------------------------------------


class Unhashable:
    __hash__ = None  # type: ignore[assignment]
    __name__ = "unhashable"

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def __eq__(self, other: object) -> bool:
        return self is other


def test_unusual_calls_and_a_call_that_raises_are_recorded(tmp_path: Path) -> None:
    def body() -> None:
        x = torch.ones(2)
        assert (x == None) is False  # noqa: E711
        assert (x == x).all()
        with pytest.raises(RuntimeError):
            torch.mm(x, x)
        handle_torch_function(Unhashable(), (x,), x)
        x.new_tensor(range(5_000))
        torch.tensor([[0] * 1_001] * 3)
        x.pow(2**80_000 > 0)

    entries = dumped(tmp_path, body)
    assert "Tensor.eq.1.forward" in entries or "Tensor.__eq__.1.forward" in entries
    failed = entries["Torch.mm.0.forward"]
    assert failed["raised"] == "RuntimeError"
    assert failed["output"] == []
    assert failed["input_args"][0]["Max"] == 1.0
    listed = entries["Torch.tensor.0.forward"]["input_args"][0]
    assert listed == [{"type": "list", "length": 1_001}] * 3


def test_nested_tensor_is_recorded(tmp_path: Path) -> None:
    def body() -> None:
        torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(2, 8)]).sin()
        torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(2, 8)], layout=torch.jagged).sin()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*nested")
        entries = dumped(tmp_path, body)
    for number, shape in enumerate(([40], [5, 8])):
        leaf = entries[f"Tensor.sin.{number}.forward"]["input_args"][0]
        assert (leaf["Max"], leaf["layout"], leaf["shape"]) == (1.0, "nested", shape)


def nodes(traced: Any) -> list[str]:
    return [node.kind() for node in traced.inlined_graph.nodes()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*jit.trace")
def test_jit_trace_is_not_recorded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = torch.ones(2, 4)
    plain = nodes(torch.jit.trace(model, x, check_trace=False))  # type: ignore[no-untyped-call]
    traced: list[Any] = []

    def body() -> None:
        traced.append(torch.jit.trace(model, x, check_trace=False))  # type: ignore[no-untyped-call]

    entries = dumped(tmp_path, body, model, "mix")
    assert nodes(traced[0]) == plain
    assert not any(name.startswith("Module") for name in entries)


def test_start_inside_a_device_context_is_undone_by_stop(tmp_path: Path) -> None:
    dump = StatsDump({"dump_path": str(tmp_path)})
    with torch.device("meta"):
        dump.start()
    with pytest.warns(UserWarning, match="could not be collected"):
        dump.step()
    assert mode_count() == 0
    assert torch.ones(2).device.type == "cpu"
    assert "Start and stop on the same side of it" in (tmp_path / "step0/rank/dump_error_info.log").read_text()


# -- modules ----------------------------------------------------------------------------------------------------------


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bad, self.good = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with contextlib.suppress(ValueError):
            self.bad(x)
        out: Tensor = self.good(x)
        return out


def test_module_that_a_hook_of_the_program_stops_does_not_change_later_parents(tmp_path: Path) -> None:
    model = Outer()
    others = [parameter._backward_hooks for parameter in model.parameters()]

    def raises(module: nn.Module, args: Any) -> None:
        raise ValueError

    model.bad.register_forward_pre_hook(raises)
    entries = dumped(tmp_path, lambda: model(torch.ones(2, 4)).sum().backward(), model, "L0")
    assert [name for name in entries if ".forward." in name] == [
        "Module.good.Linear.forward.0", "Module.root.Outer.forward.0"
    ]  # fmt: skip
    parents = json.loads((tmp_path / "step0/rank/construct.json").read_text())
    assert parents["Module.good.Linear.forward.0"] == "Module.root.Outer.forward.0"
    assert parents["Module.root.Outer.forward.0"] is None
    assert others == [None] * 4 == [parameter._backward_hooks for parameter in model.parameters()]


@dataclasses.dataclass
class Pair:
    x: Tensor
    note: str = "a"
    late: int = dataclasses.field(init=False)


class OfPairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair: Pair) -> Pair:
        return Pair(self.linear(pair.x))


def test_fields_of_dataclasses_are_recorded(tmp_path: Path) -> None:
    model = OfPairs()
    x = torch.ones(2, 4, requires_grad=True)
    entries = dumped(tmp_path, lambda: model(Pair(x)).x.sum().backward(), model, "L0")
    entry = entries["Module.root.OfPairs.forward.0"]
    assert entry["output"][0]["x"]["shape"] == [2, 4]
    assert entry["input_args"][0]["note"] == {"type": "str", "value": "a"}
    assert entries["Module.root.OfPairs.backward.0"]["output"][0]["shape"] == [2, 4]


# -- tensors that are no plain tensors, and limits --------------------------------------------------------------------


class Named(Tensor):
    pass


def test_saved_subclass_tensors_are_loaded_as_plain_tensors(tmp_path: Path) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def body() -> None:
        torch.ones(3).as_subclass(Named).exp()
        torch.func.vmap(lambda x: x.sin())(torch.ones(2, 3))
        TwoTensor(torch.ones(3), torch.ones(3)).tan()  # type: ignore[no-untyped-call]

    dump = started(tmp_path, task="tensor", tensor={"list": ["exp", "sin", "tan"]})
    body()
    with pytest.warns(UserWarning, match="could not be collected"):
        dump.step()
    directory = tmp_path / "step0/rank"
    assert "a TwoTensor is no plain tensor, and is not saved" in (directory / "dump_error_info.log").read_text()
    files = sorted((directory / "dump_tensor_data").iterdir())
    assert [file.name.split(".")[1] for file in files] == ["exp", "exp"]
    assert all(type(torch.load(file, weights_only=True)) is Tensor for file in files)


def test_limit_counts_entries_and_each_piece_has_all_of_it(tmp_path: Path) -> None:
    dump = StatsDump({"dump_path": str(tmp_path), "async_dump": True, "async_max_bytes": 60_000})
    x = torch.ones(3)
    for _ in range(4):
        with dump:
            for _ in range(8):
                x.exp()
    dump.start()
    for _ in range(300):
        x.exp()
    message = (
        r"needs more than async_max_bytes, 60,000 bytes: from (\S+) on, entries have no numbers. Choose fewer by "
        "list or scope, or set async_max_bytes higher"
    )
    with pytest.warns(UserWarning, match=message) as warned:
        dump.step()
    assert len(warned) == 1
    dumped_entries = data(tmp_path)
    assert str(warned[0].message).split("from ")[1].split(" on,")[0] in dumped_entries
    entries = list(dumped_entries.values())
    assert len(entries) == 332
    assert all(entry["output"][0]["Max"] is not None for entry in entries[:33])
    assert [entry["output"] for entry in entries[132:]] == [[]] * 200
    without_numbers = [entry for entry in entries if any(leaf["Max"] is None for leaf in leaves(entry))]
    assert len(without_numbers) <= 1, "the first above the limit"


def test_directory_that_is_gone_is_named(tmp_path: Path) -> None:
    dump = started(tmp_path / "there")
    torch.ones(2).exp()
    dump.step()
    (tmp_path / "there").rename(tmp_path / "elsewhere")
    (tmp_path / "there").touch()
    with pytest.raises(DumpError, match="cannot be written"):
        dump.start()
    assert mode_count() == 0


class Raising(nn.Module):
    def forward(self, x: Tensor) -> None:
        if x[0] == 0:
            raise ValueError


def test_forward_pass_that_raised_is_distinguished_from_one_that_returned_none(tmp_path: Path) -> None:
    model = Raising()

    def body() -> None:
        model(torch.ones(2))
        try:
            model(torch.zeros(2))
        except ValueError:
            model(torch.ones(2))

    entries = list(dumped(tmp_path, body, model, "L0").values())
    assert [(entry.get("raised"), entry["output"]) for entry in entries] == [
        (None, [None]), ("ValueError", []), (None, [None])
    ]  # fmt: skip


def test_long_text_is_cut(tmp_path: Path) -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor, text: str) -> Tensor:
            return x

    model = Reads()
    entries = dumped(tmp_path, lambda: model(torch.ones(2), "ab" * 5_000), model, "L0")
    leaf = entries["Module.root.Reads.forward.0"]["input_args"][1]
    assert leaf == {"type": "str", "value": "ab" * 500}


def test_each_tensor_has_a_path_of_its_own(tmp_path: Path) -> None:
    class Net(nn.Module):
        def forward(self, *arguments: Any) -> None:
            pass

    net = Net()
    held = {"a.b": torch.ones(2), "a": {"b": torch.ones(3)}, 1: torch.ones(4), "1": torch.ones(5)}
    listed = {"a.0": torch.ones(7), "a": [torch.ones(8), torch.ones(9)]}
    entries = dumped(
        tmp_path, lambda: net(held, UserDict(x=torch.ones(6)), listed), net, "L0", task="tensor", tensor={"list": []}
    )
    ((name, raw),) = entries.items()
    paths = {leaf.data_name: (path, leaf.shape) for path, leaf in DumpEntry(name, raw).inputs}
    assert [*paths.values()] == [
        ("input.0.a.b", (2,)), ("input.0.a.b_", (3,)), ("input.0.1", (4,)), ("input.0.1_", (5,)), ("input.1.x", (6,)),
        ("input.2.a.0", (7,)), ("input.2.a.0_", (8,)), ("input.2.a.1", (9,)),
    ]  # fmt: skip
    for file, (_, shape) in paths.items():
        assert torch.load(tmp_path / "step0" / "rank" / "dump_tensor_data" / str(file)).shape == shape


def test_sparse_tensor_has_its_layout_and_no_index_of_stored_elements(tmp_path: Path) -> None:
    sparse = torch.tensor([[0.0, 0.0], [1.0, math.nan]]).to_sparse()
    entries = dumped(tmp_path, lambda: torch.sparse.sum(sparse))
    (leaf, *_) = leaves(entries)
    assert (leaf["layout"], leaf["nnz"], leaf["nan_count"], leaf["first_bad"]) == ("sparse_coo", 2, 1, None)


def test_model_with_a_method_of_its_own_for_parameters_is_recorded(tmp_path: Path) -> None:
    class Net(nn.Linear):
        def named_parameters(self) -> Any:  # type: ignore[override]
            return iter(())

    net = Net(2, 2)
    entries = dumped(tmp_path, lambda: net(torch.ones(2)).sum().backward(), net, "L0")
    assert [*entries["Module.root.Net.forward.0"]["parameters"]] == ["weight", "bias"]
    assert {*entries["Module.root.Net.parameters_grad.0"]} == {"weight", "bias"}


def test_all_steps_are_written_at_exit_where_warnings_are_errors(tmp_path: Path) -> None:
    program = f"""
import warnings
import torch
from ddpstats.dump import StatsDump
for name in "ab":
    dump = StatsDump({{"dump_path": f"{tmp_path}/{{name}}", "statistics": {{"list": ["nothing", "relu"]}}}})
    with dump:
        torch.relu(torch.ones(2))
warnings.simplefilter("error")
"""
    done = programs.run(["-c", program])
    assert "list has nothing" in done.stderr
    for name in "ab":
        assert (tmp_path / name / "step0" / "rank" / "dump.json").is_file()


def test_operators_of_two_libraries_have_two_names(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        for library in ("liba", "libb"):
            operators = stack.enter_context(torch.library._scoped_library(library, "DEF"))
            operators.define("double(Tensor x) -> Tensor")
            operators.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
        body = lambda: [torch.ops.liba.double(torch.ones(2)), torch.ops.libb.double.default(torch.ones(2))]  # noqa: E731
        names = dumped(tmp_path, body)
    assert [name for name in names if name.startswith("Aten.")] == [
        "Aten.liba.double.0.forward",
        "Aten.libb.double.0.forward",
    ]


def test_names_of_functions_take_bounded_memory() -> None:
    for _ in range(5_000):
        calls._name_of(lambda: None)
    assert len(calls._names) <= 4096
