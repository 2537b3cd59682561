"""``--bisect``: each way in which a step goes wrong, and the operation that has to be blamed for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddpstats import cli
from tests.capabilities import numbers_nodes
from tests.capture import making, replay_models
from tests.capture.making import MODELS, captured
from tests.capture.test_replay import FEW, FINE, NAN

ROWS = {"x": torch.randn(3, 4, generator=torch.Generator().manual_seed(3))}
FULL_ROW = {"x": ROWS["x"].clone().index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(200.0))}


def bisected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, step: str, *batches: Any, **how: Any
) -> dict[str, Any]:
    bundle = captured(tmp_path / model, getattr(replay_models, model), getattr(replay_models, step), *batches, **how)
    return replayed(bundle, capsys, model, step)


def replayed(bundle: Path, capsys: pytest.CaptureFixture[str], model: str, step: str, *args: str) -> dict[str, Any]:
    command = [
        "replay",
        str(bundle),
        "--model",
        f"{MODELS}:{model}",
        "--step",
        f"{MODELS}:{step}",
        "--bisect",
        "--json",
    ]
    assert cli.main([*command, *args]) in (0, 1)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["bisect"]
    return found


def last_line(found: dict[str, Any]) -> str:
    return str(found["origin"]["frames"][-1]["source"])


def test_a_class_that_does_not_occur(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = bisected(tmp_path, capsys, "toy", "per_class_step", FEW, FEW)
    origin = found["origin"]
    assert (origin["kind"], origin["what"], origin["direction"]) == ("operation", "aten.div.Tensor", "forward")
    assert origin["module"] is None
    assert last_line(found) == "total = total + summed / torch.count_nonzero(of_class)"
    assert (origin["inputs"][1]["low"], origin["inputs"][1]["high"]) == (0.0, 0.0)
    assert (origin["outputs"][0]["infs"], origin["outputs"][0]["nans"]) == (1, 0)
    assert found["symptom"] == "the loss of micro-batch 0"
    assert found["path"][0].startswith("aten.add.Tensor")


@pytest.mark.parametrize(
    ("model", "what", "node", "line"),
    [
        ("log_zero", "aten.log.default", None, "return torch.log(self.layer(x).relu() * 0)"),
        pytest.param(
            "sqrt_of_zero", "aten.div.Tensor", "SqrtBackward0", "return torch.sqrt(self.layer(x) * 0)",
            marks=numbers_nodes,
        ),
        pytest.param(
            "where_trap", "aten.div.Tensor", "LogBackward0",
            "return torch.where(y > 0, torch.log(y), torch.zeros_like(y))",
            marks=numbers_nodes,
        ),
        ("masked_then_log", "aten.log.default", None, "return torch.log(weights.sum() - weights.sum())"),
        ("half_matmul", "aten.mm.default", None, "return ((y * 0 + 60000) @ (y.T * 0 + 60000)).float()"),
        ("preallocated", "aten.div.Tensor", None, "out[1] = y[1] / (y[1].detach() * 0)"),
        ("times_infinity", "aten.mul.Tensor", None, "return found + torch.zeros(3) * -math.inf"),
        ("nested", "aten.log.default", None, "return torch.log(self.layer(x).relu() * 0)"),
    ],
)  # fmt: skip
def test_the_operation_and_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, what: str, node: str | None, line: str
) -> None:
    found = bisected(tmp_path, capsys, model, "sum_step", FINE)
    origin = found["origin"]
    assert (origin["kind"], origin["what"], origin["autograd_node"]) == ("operation", what, node)
    assert last_line(found) == line
    assert origin["module"] == ("deep.0" if model == "nested" else "")
    assert origin["frames"][0]["function"] == "sum_step"
    assert all(one["nans"] == one["infs"] == 0 for one in origin["inputs"] if isinstance(one, dict))
    assert any(one["nans"] or one["infs"] for one in origin["outputs"])


def test_a_row_that_is_masked_altogether(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = bisected(tmp_path, capsys, "attention", "sum_step", FULL_ROW)
    assert found["origin"]["what"] == "aten._softmax.default"
    assert found["origin"]["outputs"][0]["first"] == [1, 0]


def test_a_legal_mask_is_not_blamed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bisected(tmp_path, capsys, "attention", "sum_step", ROWS)["symptom"] is None
    found = bisected(tmp_path / "outside", capsys, "attention", "outside_step", ROWS)
    assert (found["origin"]["what"], found["origin"]["module"]) == ("aten.div.Tensor", None)
    assert last_line(found) == "return loss / (loss.detach() * 0)"


def test_a_mask_that_arrives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = bisected(tmp_path, capsys, "mask_arrives", "sum_step", FINE)
    assert (found["origin"]["kind"], found["origin"]["what"]) == ("put", "aten.masked_fill.Scalar")


def test_what_was_in_the_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = bisected(tmp_path, capsys, "small", "sum_step", FINE, NAN)
    origin = found["origin"]
    assert (origin["kind"], origin["what"], origin["micro_batch"]) == ("source", "batch['x']", 1)
    assert origin["outputs"][0]["first"] == [0, 1]
    assert found["path"] == ["aten.addmm.default", "aten.sum.default"]


@pytest.mark.parametrize(
    ("model", "name", "what"),
    [
        ("small", "layer.bias", "parameter layer.bias, before the step"),
        ("toy", "inner.1.running_var", "buffer inner.1.running_var, before the step"),
    ],
)
def test_what_was_in_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, name: str, what: str
) -> None:
    def spoil(module: nn.Module) -> None:
        module.eval()
        module.state_dict()[name].view(-1)[1] = float("nan")

    found = bisected(tmp_path, capsys, model, "mean_step", FEW, prepare=spoil)
    assert (found["origin"]["kind"], found["origin"]["what"]) == ("source", what)
    assert found["origin"]["outputs"][0]["first"] == [1]


def test_an_array_of_numpy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = bisected(tmp_path, capsys, "small", "numpy_step", FINE)
    assert found["origin"]["kind"] == "unknown"
    assert "numpy.array" in last_line(found)


@numbers_nodes
def test_a_forward_pass_that_is_computed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = bisected(tmp_path, capsys, "sqrt_of_zero", "checkpointed_step", FINE)
    assert found["origin"]["autograd_node"] == "SqrtBackward0"
    assert last_line(found) == "return torch.sqrt(self.layer(x) * 0)"


@numbers_nodes
def test_an_overflow_in_backward_by_the_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = bisected(tmp_path, capsys, "half_cast", "sum_step", FINE, scale=1e6)
    assert found["origin"]["direction"] == "backward"
    assert found["origin"]["outputs"][0]["dtype"] == "torch.float16"
    assert found["origin"]["module_class"] == "HalfCast"


def test_collectives_under_observation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = captured(tmp_path, replay_models.small, replay_models.mean_step, FINE, rank=1, world_size=4)
    assert replayed(bundle, capsys, "small", "distributed_step")["symptom"] is None


def test_a_step_that_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = captured(tmp_path, replay_models.small, replay_models.raising_step, NAN, reason="exception", raises=True)
    found = replayed(bundle, capsys, "small", "raising_step")
    assert (found["symptom"], found["error"]) == (None, "ZeroDivisionError: no class")


def text(bundle: Path, capsys: pytest.CaptureFixture[str], model: str, step: str) -> str:
    cli.main(["replay", str(bundle), "--model", f"{MODELS}:{model}", "--step", f"{MODELS}:{step}", "--bisect"])
    return capsys.readouterr().out


def test_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    half = captured(tmp_path / "1", replay_models.half_matmul, replay_models.sum_step, FINE)
    out = text(half, capsys, "half_matmul", "sum_step")
    first = (
        "bisect: the first operation whose inputs are finite and whose output is not: aten.mm.default in the forward"
    )
    assert first in out
    assert "  in the model itself (HalfMatmul)\n  called at:\n    File " in out
    assert "    float16[2, 3] finite from 60000 to 60000\n" in out
    assert "  output:\n    float16[2, 2] no finite element, 0 NaN, 4 Inf, the first at [0, 0]\n" in out
    assert "float16 may be too narrow: --precision fp32 tells overflow from mathematics" in out
    assert "it arrived at: the loss of micro-batch 0" in out
    nan = captured(tmp_path / "2", replay_models.small, replay_models.sum_step, NAN)
    out = text(nan, capsys, "small", "sum_step")
    assert "bisect: the batch holds 1 NaN, 0 Inf at batch['x'], element [0, 1] (micro-batch 0)" in out
    fine = captured(tmp_path / "3", replay_models.small, replay_models.sum_step, FINE)
    assert "bisect: no loss and no gradient was not finite" in text(fine, capsys, "small", "sum_step")
    sqrt = captured(tmp_path / "4", replay_models.sqrt_of_zero, replay_models.sum_step, FINE)
    out = text(sqrt, capsys, "sqrt_of_zero", "sum_step")
    assert "in the backward pass (SqrtBackward0) of micro-batch 0\n" in out
    assert "  the forward operation was called at:\n" in out
    assert "it arrived at: the gradient of layer.weight, and 1 more, micro-batch 0" in out


def test_without_the_internals_of_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward operation is still found; its module is not."""
    monkeypatch.setattr("ddpstats._observe.torch_compat._has_numbers", False)
    bundle = captured(tmp_path, replay_models.sqrt_of_zero, replay_models.sum_step, FINE)
    assert "in a module that is not known (the node is SqrtBackward0)" in text(
        bundle, capsys, "sqrt_of_zero", "sum_step"
    )


def test_the_run_is_bit_for_bit_the_same_under_observation(tmp_path: Path) -> None:
    from ddpstats._rerun.runner import RunSettings
    from ddpstats.capture._bisect import bisect
    from ddpstats.capture._bundle import Bundle
    from ddpstats.capture._outcome import same_outcome
    from ddpstats.capture._rerun import Rerun

    opened = Bundle.open(captured(tmp_path, replay_models.toy, replay_models.per_class_step, FEW))
    parameters = opened.model_part(0)["parameters"]
    step = replay_models.per_class_step
    rerun = Rerun(replay_models.toy(), step, opened.rank_part(0), parameters, RunSettings(making.CPU))
    before = rerun.run()
    assert bisect(rerun).mark is not None
    assert same_outcome(before, rerun.run())
