"""Programs that do what a collector does not expect: nothing of theirs breaks, and what is written is true."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from ddpstats import DumpError
from ddpstats.dump import StatsDump, _dump
from ddpstats.dump.collect._calls import CallWatch
from ddpstats.dump.collect._recorder import Problems
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
            _dump._at_exit()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(process, 0)[1]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_forked_process_leaves_the_dump_alone(tmp_path: Path, is_async: bool) -> None:
    model = nn.Linear(4, 4)
    dump = started(tmp_path, model, async_dump=is_async)

    def child() -> None:
        assert mode_count() == 0
        assert not _dump._running
        model(torch.randn(2, 4)).sum().backward()
        dump.stop()
        dump.step()

    model(torch.ones(2, 4)).sum().backward()
    assert in_child(child) == 0
    model(torch.ones(2, 4)).sum().backward()
    dump.stop()
    found = data(tmp_path)
    assert "Module.root.Linear.parameters_grad.1" in found
    assert "Module.root.Linear.forward.2" not in found


def test_a_process_that_is_forked_between_pieces_leaves_the_dump_alone(tmp_path: Path) -> None:
    dump = StatsDump({"dump_path": str(tmp_path)})

    def piece() -> None:
        with dump:
            torch.ones(3).exp()

    def child() -> None:
        with pytest.raises(DumpError, match="holds a dump already"):
            piece()

    piece()
    assert in_child(child) == 0
    piece()
    assert [name for name in data(tmp_path) if "exp" in name] == ["Tensor.exp.0.forward", "Tensor.exp.1.forward"]


def test_workers_of_a_data_loader_are_forked_inside_a_step(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    dump = started(tmp_path, model)
    for (x,) in DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4, num_workers=2):
        model(x).sum().backward()
    dump.stop()
    assert "Module.root.Linear.forward.3" in data(tmp_path)


def test_two_programs_of_one_directory_are_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (StatsDump({"dump_path": str(tmp_path)}) for _ in range(2))
    one.start()
    monkeypatch.setattr(_dump, "_check_empty", lambda directory: None)  # both looked at the same moment
    with pytest.raises(DumpError, match=r"written to by another process.* or by RANK in the environment"):
        two.start()
    assert not two._is_running
    one.stop()
    monkeypatch.setenv("RANK", "3")
    two.start()
    two.stop()
    assert (tmp_path / "step0/rank3/dump.json").exists()


def test_what_another_thread_stops_and_trains(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    dump = started(tmp_path, model)

    def elsewhere(body: Callable[[], object]) -> None:
        thread = threading.Thread(target=body)
        thread.start()
        thread.join()

    elsewhere(lambda: model(torch.ones(2, 4)).sum().backward())
    model(torch.ones(2, 4))
    elsewhere(dump.stop)
    torch.ones(2).exp()
    assert list(data(tmp_path)) == [
        "Torch.ones.0.forward", "Functional.linear.0.forward", "Module.root.Linear.forward.0"
    ]  # fmt: skip
    dump.step()
    assert mode_count() == 0


# -- calls ------------------------------------------------------------------------------------------------------------


class Unhashable:
    __hash__ = None  # type: ignore[assignment]
    __name__ = "unhashable"

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def __eq__(self, other: object) -> bool:
        return self is other


def test_what_a_comparison_with_none_shows_is_not_learned(tmp_path: Path) -> None:
    def body() -> None:
        x = torch.ones(2)
        assert (x == None) is False  # noqa: E711
        assert (x == x).all()
        with pytest.raises(RuntimeError):
            torch.mm(x, x)
        handle_torch_function(Unhashable(), (x,), x)
        x.new_tensor(range(5_000))
        torch.tensor([[0] * 1_000] * 3)
        x.pow(2**80_000 > 0)

    found = dumped(tmp_path, body)
    assert "Tensor.eq.1.forward" in found or "Tensor.__eq__.1.forward" in found
    failed = found["Torch.mm.0.forward"]
    assert failed["raised"] == "RuntimeError"
    assert failed["output"] == []
    assert failed["input_args"][0]["Max"] == 1.0
    listed = found["Torch.tensor.0.forward"]["input_args"][0]
    assert listed == [{"type": "list", "length": 1_000}] * 3


def test_what_cannot_be_written_as_a_number_costs_no_entry(tmp_path: Path) -> None:
    def body() -> None:
        with pytest.raises(OverflowError):
            torch.full((2,), 10**5_000)
        torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(2, 8)]).sin()
        torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(2, 8)], layout=torch.jagged).sin()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*nested")
        found = dumped(tmp_path, body)
    assert found["Torch.full.0.forward"]["input_args"][1]["value"].startswith("0x")
    for number in (0, 1):
        leaf = found[f"Tensor.sin.{number}.forward"]["input_args"][0]
        assert (leaf["Max"], leaf["layout"]) == (1.0, "nested")
        assert sum(leaf["shape"]) in (40, 13)


def nodes(traced: Any) -> list[str]:
    return [node.kind() for node in traced.inlined_graph.nodes()]


@pytest.mark.filterwarnings("ignore:.*jit.trace")
def test_a_trace_is_not_looked_at(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = torch.ones(2, 4)
    plain = nodes(torch.jit.trace(model, x, check_trace=False))  # type: ignore[no-untyped-call]
    traced: list[Any] = []

    def body() -> None:
        traced.append(torch.jit.trace(model, x, check_trace=False))  # type: ignore[no-untyped-call]

    found = dumped(tmp_path, body, model, "mix")
    assert nodes(traced[0]) == plain
    assert not any(name.startswith("Module") for name in found)


def test_a_mode_that_was_left_inside_is_taken_off(tmp_path: Path) -> None:
    dump = StatsDump({"dump_path": str(tmp_path)})
    with torch.device("meta"):
        dump.start()
    with pytest.warns(UserWarning, match="could not be collected"):
        dump.stop()
    assert mode_count() == 0
    assert torch.ones(2).device.type == "cpu"
    assert "Start and stop on the same side of it" in (tmp_path / "step0/rank/dump_error_info.log").read_text()


def test_only_what_runs_again_is_marked_so(tmp_path: Path) -> None:
    def body() -> None:
        x = torch.ones(3, requires_grad=True)
        torch.autograd.grad(Cube.apply(x).sum(), x, create_graph=True)[0].sum().backward()  # type: ignore[no-untyped-call]

    found = dumped(tmp_path, body)
    assert "Tensor.square.0.forward" in found
    assert not any("is_recompute" in entry for entry in found.values())


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        (x,) = context.saved_tensors
        return gradient * 3 * Tensor.square(x)


# -- modules ----------------------------------------------------------------------------------------------------------


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bad, self.good = nn.Linear(4, 4), nn.Linear(4, 4)
        self.interrupts = True

    def forward(self, x: Tensor) -> Tensor:
        if self.interrupts:
            self.interrupts = False
            raise KeyboardInterrupt
        with contextlib.suppress(ValueError):
            self.bad(x)
        out: Tensor = self.good(x)
        return out


def test_forward_passes_that_are_left(tmp_path: Path) -> None:
    model = Outer()
    others = [parameter._backward_hooks for parameter in model.parameters()]

    def raises(module: nn.Module, args: Any) -> None:
        raise ValueError

    model.bad.register_forward_pre_hook(raises)

    def body() -> None:
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(2, 4))
        model(torch.ones(2, 4)).sum().backward()

    found = dumped(tmp_path, body, model, "L0")
    assert [name for name in found if ".forward." in name] == [
        "Module.good.Linear.forward.0", "Module.root.Outer.forward.1"
    ]  # fmt: skip
    parents = json.loads((tmp_path / "step0/rank/construct.json").read_text())
    assert parents["Module.good.Linear.forward.0"] == "Module.root.Outer.forward.1"
    assert parents["Module.root.Outer.forward.1"] is None
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


def test_dataclasses_are_taken_apart(tmp_path: Path) -> None:
    model = OfPairs()
    x = torch.ones(2, 4, requires_grad=True)
    found = dumped(tmp_path, lambda: model(Pair(x)).x.sum().backward(), model, "L0")
    entry = found["Module.root.OfPairs.forward.0"]
    assert entry["output"][0]["x"]["shape"] == [2, 4]
    assert entry["input_args"][0]["note"] == {"type": "str", "value": "a"}
    assert found["Module.root.OfPairs.backward.0"]["output"][0]["shape"] == [2, 4]


# -- tensors that are no plain tensors, and limits --------------------------------------------------------------------


class Named(Tensor):
    pass


def test_saved_tensors_can_be_loaded(tmp_path: Path) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def body() -> None:
        torch.ones(3).as_subclass(Named).exp()
        torch.func.vmap(lambda x: x.sin())(torch.ones(2, 3))
        TwoTensor(torch.ones(3), torch.ones(3)).tan()  # type: ignore[no-untyped-call]

    dump = started(tmp_path, task="tensor", tensor={"list": ["exp", "sin", "tan"]})
    body()
    with pytest.warns(UserWarning, match="could not be collected"):
        dump.stop()
    directory = tmp_path / "step0/rank"
    assert "a TwoTensor is no plain tensor, and is not saved" in (directory / "dump_error_info.log").read_text()
    files = sorted((directory / "dump_tensor_data").iterdir())
    assert [file.name.split(".")[1] for file in files] == ["exp", "exp"]
    assert all(type(torch.load(file, weights_only=True)) is Tensor for file in files)


def test_the_limit_is_one_of_entries_too_and_each_piece_has_all_of_it(tmp_path: Path) -> None:
    dump = StatsDump({"dump_path": str(tmp_path), "async_dump": True, "async_max_bytes": 60_000})
    x = torch.ones(3)
    for _ in range(4):
        dump.start()
        for _ in range(8):
            x.exp()
        dump.stop()
    dump.start()
    for _ in range(300):
        x.exp()
    recorder = dump._recorder
    assert recorder is not None
    assert recorder.leaves.held_bytes <= 60_000
    assert [entry.raw["output"] for entry in recorder._queue[100:]] == [[]] * 200
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="needs more than async_max_bytes"):
            dump.stop()
    found = list(data(tmp_path).values())
    assert len(found) == 332
    assert sum(any(leaf["Max"] is None for leaf in leaves(entry)) for entry in found) <= 1  # the first that did not fit
    assert all(entry["output"][0]["Max"] is not None for entry in found[:33])
    assert dump.current_step == 0
    dump.step()
    assert dump.current_step == 1


def test_a_directory_that_is_gone_is_said_to_be_so(tmp_path: Path) -> None:
    dump = started(tmp_path / "there")
    torch.ones(2).exp()
    dump.stop()
    (tmp_path / "there").rename(tmp_path / "elsewhere")
    (tmp_path / "there").touch()
    with pytest.raises(DumpError, match="cannot be written"):
        dump.start()
    assert mode_count() == 0


def test_what_was_chosen_and_did_not_come_is_told_once(tmp_path: Path) -> None:
    dump = StatsDump({"dump_path": str(tmp_path), "statistics": {"list": ["Tensor.exq"]}})
    for number in range(2):
        dump.start()
        torch.ones(2).exp()
        if number == 0:
            with pytest.warns(UserWarning, match=r"list has Tensor\.exq, which is in no name"):
                dump.stop()
        dump.stop()


class Raising(nn.Module):
    def forward(self, x: Tensor) -> None:
        if x[0] == 0:
            raise ValueError


def test_a_forward_pass_that_raised_is_not_one_that_returned_none(tmp_path: Path) -> None:
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


def test_a_long_text_is_cut(tmp_path: Path) -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor, text: str) -> Tensor:
            return x

    model = Reads()
    found = dumped(tmp_path, lambda: model(torch.ones(2), "ab" * 5_000), model, "L0")
    leaf = found["Module.root.Reads.forward.0"]["input_args"][1]
    assert leaf == {"type": "str", "value": "ab" * 500, "length": 10_000}


def test_a_start_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(watch: Any) -> None:
        raise RuntimeError("no")

    dump = StatsDump({"dump_path": str(tmp_path)})
    with monkeypatch.context() as patch:
        patch.setattr(CallWatch, "start", fails)
        with pytest.raises(RuntimeError, match="no"):
            dump.start()
    assert list((tmp_path / "step0/rank").iterdir()) == []
    with dump:
        torch.ones(2).exp()
    with monkeypatch.context() as patch:
        patch.setattr(CallWatch, "start", fails)
        with pytest.raises(RuntimeError, match="no"):
            dump.start()
    assert "Tensor.exp.0.forward" in data(tmp_path)


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_where_checkpointing_leaves_early_nothing_has_failed(tmp_path: Path, level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def body() -> None:
        out: Any = checkpoint(model, torch.ones(2, 4, requires_grad=True), use_reentrant=False)
        out.sum().backward()

    found = dumped(tmp_path, body, model, level)
    assert any(entry.get("is_recompute") for entry in found.values())
    assert not any("raised" in entry for entry in found.values())


def test_all_problems_are_counted_and_some_are_kept(tmp_path: Path) -> None:
    problems = Problems(tmp_path)
    for number in range(1_500):
        problems.note(f"entry {number}", "no")
    log = tmp_path / "dump_error_info.log"
    assert problems.sentences(["one"]) == [f"1500 part(s) of the dump could not be collected; see {log}", "one"]
    assert problems.sentences(["one"]) == []
    assert len(log.read_text().splitlines()) == 1_000
