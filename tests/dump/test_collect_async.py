"""`async_dump` reads and writes nothing inside the step, and `async_max_bytes` limits what is held."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpstats.dump import StatsDump
from tests.dump.collecting import data, dumped, leaves, make_model


def model_on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)


def train_on_meta(model: nn.Module) -> None:
    """A whole step: forward, backward, optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.empty(2, 3, 8, device="meta", requires_grad=True)
    mask = torch.empty(2, 3, device="meta", dtype=torch.bool)
    loss: Tensor = model(x, src_key_padding_mask=mask).square().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


@pytest.mark.parametrize(
    "config",
    [{}, pytest.param({"task": "tensor", "tensor": {"list": ["Functional", "Module"]}}, marks=pytest.mark.slow)],
)
def test_no_value_is_read_inside_the_step(tmp_path: Path, config: dict[str, Any]) -> None:
    """A tensor on meta has no value: to read one raises, which `data` would find in the log."""
    model = model_on_meta()
    entries = dumped(tmp_path, lambda: train_on_meta(model), model, "mix", async_dump=True, **config)
    assert "Functional.linear.1.forward" in entries
    assert "Functional.multi_head_attention_forward.0.backward" in entries
    assert "Module.layers.0.linear2.Linear.parameters_grad.0" in entries
    assert all(leaf["Max"] is None and leaf["device"] == "meta" for entry in entries.values() for leaf in leaves(entry))


def on_a_device(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Treat tensors in host memory as if they were on a device; return a list that grows with each read from it."""
    from ddpstats.dump.record import leaves as record_leaves

    reads: list[int] = []

    read_devices = record_leaves.TensorSummaries.read_devices

    def counted(self: Any) -> None:
        reads.append(self.deferred_count)
        read_devices(self)

    monkeypatch.setattr(record_leaves, "_is_on_host", lambda values: False)
    monkeypatch.setattr(record_leaves.TensorSummaries, "read_devices", counted)
    return reads


def step_of(model: nn.Module) -> None:
    torch.manual_seed(4)
    model(torch.randn(3, 4)).square().sum().backward()


NUMBERS = ("Max", "Min", "Mean", "Norm", "nan_count", "inf_count", "first_bad")


@pytest.mark.parametrize("is_async", [False, True])
def test_statistics_on_a_device_are_those_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    model = make_model()
    on_host = dumped(tmp_path / "host", lambda: step_of(model), model, "mix")
    monkeypatch.setattr("ddpstats.dump.record.recorder._BATCH", 20)
    reads = on_a_device(monkeypatch)
    entries = dumped(tmp_path / "device", lambda: step_of(model), model, "mix", async_dump=is_async)
    assert len(reads) == 1 if is_async else len(reads) > 5
    assert list(entries) == list(on_host)
    for name, entry in entries.items():
        for leaf, expected in zip(leaves(entry), leaves(on_host[name]), strict=True):
            for key in NUMBERS:
                number = expected[key]
                is_float = isinstance(number, float)
                assert leaf[key] == (pytest.approx(number, rel=1e-5, abs=1e-6) if is_float else number), name


def test_nothing_is_written_inside_the_step(tmp_path: Path) -> None:
    model = make_model()
    dump = StatsDump({"dump_path": str(tmp_path), "level": "mix", "async_dump": True}, model=model)
    dump.start()
    step_of(model)
    assert list(tmp_path.iterdir()) == []
    dump.step()
    assert "Functional.linear.3.backward" in data(tmp_path)


def test_held_tensors_count_against_the_limit(tmp_path: Path) -> None:
    dump = StatsDump(
        {"dump_path": str(tmp_path), "task": "tensor", "async_dump": True, "async_max_bytes": 9_000,
         "tensor": {"list": ["exp"]}}
    )  # fmt: skip
    x = torch.ones(1_000)
    dump.start()
    for _ in range(3):
        x.exp()
    with pytest.warns(UserWarning, match=r"from Tensor\.exp\.0\.forward on"):
        dump.step()
    saved = list((tmp_path / "step0/rank/dump_tensor_data").iterdir())
    assert [file.name for file in saved] == ["Tensor.exp.0.forward.input.0.pt"]


def test_tensor_is_saved_as_it_was(tmp_path: Path) -> None:
    def body() -> None:
        x = torch.ones(3)
        y = x.exp()
        y.zero_()

    config: dict[str, Any] = {"task": "tensor", "async_dump": True, "tensor": {"list": ["exp"]}}
    entries = dumped(tmp_path, body, **config)
    leaf = entries["Tensor.exp.0.forward"]["output"][0]
    saved = torch.load(tmp_path / "step0/rank/dump_tensor_data" / leaf["data_name"], weights_only=True)
    assert saved.tolist() == pytest.approx([2.718282] * 3)


@pytest.mark.parametrize("is_async", [False, True])
def test_error_of_the_device_costs_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    on_a_device(monkeypatch)
    dump = StatsDump({"dump_path": str(tmp_path), "async_dump": is_async})
    dump.start()
    torch.ones(3).exp().sin()
    monkeypatch.setattr("ddpstats.dump.record.leaves.as_statistics", broken)
    with pytest.warns(UserWarning, match="could not be collected"):
        dump.step()
    directory = tmp_path / "step0/rank"
    assert "device-side assert" in (directory / "dump_error_info.log").read_text()
    entries = json.loads((directory / "dump.json").read_text())["data"]
    assert list(entries) == ["Torch.ones.0.forward", "Tensor.exp.0.forward", "Tensor.sin.0.forward"]
    assert entries["Tensor.sin.0.forward"]["output"][0]["shape"] == [3]


class BusyStream:
    """A stream of which no event ends."""

    stream_id, device = 7, torch.device("cpu")

    def wait_stream(self, stream: BusyStream) -> None:
        pass

    def record_event(self) -> BusyStream:
        return self

    def query(self) -> bool:
        return False


def test_copies_that_are_measured_beside_the_program_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, side, entered = BusyStream(), BusyStream(), list[BusyStream]()
    on_a_device(monkeypatch)
    monkeypatch.setattr("ddpstats.dump.record.leaves.new_stream", lambda device: side)
    monkeypatch.setattr("ddpstats.dump.record.leaves._COPIED_BYTES", 100)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda *device: program)
    monkeypatch.setattr(torch.accelerator, "set_stream", entered.append)
    with StatsDump({"dump_path": str(tmp_path), "async_dump": True, "statistics": {"data_mode": ["input"]}}):
        torch.ones(20).exp()
        torch.ones(10).exp()  # its copy is too large beside the first
    assert entered.count(side) == 1
