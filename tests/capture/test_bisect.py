"""``ddpstats replay --bisect`` names the operation, parameter or batch with which a step went wrong, and its line."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddpstats import cli
from ddpstats.capture.bisect import OperationTracer, nan_and_inf, tensor_stats
from tests.capabilities import numbers_nodes
from tests.capture import replay_models
from tests.capture.making import MODELS, captured
from tests.capture.test_replay import FEW, FINE, NAN

ROWS = {"x": torch.randn(3, 4, generator=torch.Generator().manual_seed(3))}
FULL_ROW = {"x": ROWS["x"].clone().index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(200.0))}


def capture(tmp_path: Path, model: str, step: str, *batches: Any, **how: Any) -> Path:
    return captured(tmp_path / model, getattr(replay_models, model), getattr(replay_models, step), *batches, **how)


def shown(bundle: Path, capsys: pytest.CaptureFixture[str], model: str, step: str, *args: str) -> str:
    capsys.readouterr()
    names = ["--model", f"{MODELS}:{model}", "--step", f"{MODELS}:{step}"]
    assert cli.main(["replay", str(bundle), *names, "--bisect", *args]) in (0, 1)
    return capsys.readouterr().out


def bisected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, step: str, *batches: Any, **how: Any
) -> dict[str, Any]:
    bundle = capture(tmp_path, model, step, *batches, **how)
    result: dict[str, Any] = json.loads(shown(bundle, capsys, model, step, "--json"))["bisect"]
    return result


def spoiled(name: str) -> Callable[[nn.Module], None]:
    """Return a function that puts a NaN into a parameter or buffer, before the step."""

    def spoil(module: nn.Module) -> None:
        module.eval()
        module.state_dict()[name].view(-1)[1] = float("nan")

    return spoil


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz])
def test_a_nan_in_float8_is_seen(dtype: torch.dtype) -> None:
    assert nan_and_inf(torch.ones(2).to(dtype)) == (False, False)
    tensor = torch.tensor([1.0, float("nan")]).to(dtype)
    assert nan_and_inf(tensor) == (True, False)
    stats = tensor_stats(tensor)
    assert (stats["low"], stats["nans"], stats["infs"], stats["first"]) == (1.0, 1, 0, (1,))
    assert stats["dtype"] == str(dtype)


def case(
    model: str,
    step: str = "sum_step",
    batches: Sequence[Any] = (FINE,),
    *,
    marks: Any = (),
    how: Any = None,
    **facts: Any,
) -> Any:
    """Return a step that goes wrong, and what is expected of its origin."""
    return pytest.param(model, step, batches, how or {}, facts, marks=marks)


@pytest.mark.parametrize(
    ("model", "step", "batches", "how", "expected"),
    [
        case(
            *("Toy", "per_class_step", [FEW, FEW]),
            what="aten.div.Tensor",
            module=None,
            line="total = total + summed / torch.count_nonzero(of_class)",
        ),
        case("LogZero", what="aten.log.default", module="", line="return torch.log(self.layer(x).relu() * 0)"),
        case("Float8Cast", line="return torch.log(nn.functional.linear(x, narrow).relu() * 0)"),
        case("Nested", what="aten.log.default", module="deep.0"),
        case(
            *("SqrtOfZero", "checkpointed_step"),
            marks=numbers_nodes,
            autograd_node="SqrtBackward0",
            line="return torch.sqrt(self.layer(x) * 0)",
        ),
        case(
            "WhereTrap",
            marks=numbers_nodes,
            autograd_node="LogBackward0",
            line="return torch.where(y > 0, torch.log(y), torch.zeros_like(y))",
        ),
        case(
            "HalfCast",
            marks=numbers_nodes,
            how={"scale": 1e6},
            direction="backward",
            dtype="torch.float16",
            module_class="HalfCast",
        ),
        case("MaskedThenLog", what="aten.log.default", line="return torch.log(weights.sum() - weights.sum())"),
        case("Preallocated", what="aten.div.Tensor", line="out[1] = y[1] / (y[1].detach() * 0)"),
        case("TimesInfinity", what="aten.mul.Tensor"),
        case("Attention", batches=[FULL_ROW], what="aten._softmax.default", first=[1, 0]),
        case(
            *("Attention", "outside_step", [ROWS]),
            what="aten.div.Tensor",
            module=None,
            line="return loss / (loss.detach() * 0)",
        ),
        case("MaskArrives", kind="put", what="aten.masked_fill.Scalar"),
        case("Small", batches=[FINE, NAN], kind="source", what="batch['x']", micro_batch=1, first=[0, 1]),
        case(
            *("Small", "mean_step", [FEW]),
            how={"prepare": spoiled("layer.bias")},
            kind="source",
            what="parameter layer.bias, before the step",
            first=[1],
        ),
        case(
            *("Toy", "mean_step", [FEW]),
            how={"prepare": spoiled("inner.1.running_var")},
            kind="source",
            what="buffer inner.1.running_var, before the step",
            first=[1],
        ),
        case(
            *("Small", "numpy_step"),
            kind="unknown",
            line='return loss * torch.from_numpy(numpy.array([math.nan], dtype="float32"))',
        ),
    ],
)
def test_the_origin_of_a_nan_and_its_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model: str,
    step: str,
    batches: Sequence[Any],
    how: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    result = bisected(tmp_path, capsys, model, step, *batches, **how)
    origin = result["origin"]
    facts = {**origin, **origin["outputs"][0]}
    if origin["frames"]:
        facts["line"] = origin["frames"][-1]["source"]
        assert origin["frames"][0]["function"] == step
    assert {key: facts[key] for key in expected} == expected
    if origin["kind"] == "operation" and "softmax" not in origin["what"]:  # a masked row is legal there
        assert all(tensor["nans"] == tensor["infs"] == 0 for tensor in origin["inputs"] if isinstance(tensor, dict))
    assert any(tensor["nans"] or tensor["infs"] for tensor in origin["outputs"])
    assert result["symptom"] is not None


@numbers_nodes
@pytest.mark.parametrize(
    ("model", "what", "node", "line"),
    [
        ("ReentrantForward", "aten.log.default", None, "return torch.log(y.relu() * 0) * 0"),
        (
            *("ReentrantAgain", "aten.log.default", None),
            "return torch.log(y.relu() * 0) * 0 if torch.is_grad_enabled() else y",
        ),
        ("ReentrantBackward", "aten.div.Tensor", "SqrtBackward0", "return torch.sqrt(y * 0)"),
    ],
)
def test_reentrant_checkpointing_of_a_function(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, what: str, node: str | None, line: str
) -> None:
    """The NaN is made in the forward pass, where that is run again, or in the backward pass of what was run again."""
    origin = bisected(tmp_path, capsys, model, "sum_step", FINE)["origin"]
    assert (origin["what"], origin["autograd_node"], origin["frames"][-1]["source"]) == (what, node, line)


@numbers_nodes
def test_nodes_of_two_threads_that_have_one_number_are_not_confused() -> None:
    """A device's backward pass is a thread, which numbers the nodes of a recomputed forward pass from 0 on."""
    model = replay_models.ReentrantBackward()
    tracer, results = OperationTracer(model), list[Any]()

    def watched(run: Callable[[], Any]) -> None:
        with tracer.watch():
            results.append(run())

    for run in (lambda: model(FINE["x"]).sum(), lambda: results[0].backward()):
        thread = threading.Thread(target=watched, args=(run,))
        thread.start()
        thread.join()
    assert model.layer.weight.grad is not None
    mark = tracer.mark_of(model.layer.weight.grad)
    assert mark is not None
    assert mark.origin.autograd_node == "SqrtBackward0"
    assert [frame[2] for frame in mark.origin.frames][-2:] == ["second_half", "spoil"]


@pytest.mark.parametrize(
    ("model", "step", "batch", "how", "error"),
    [
        ("Attention", "sum_step", ROWS, {}, None),  # its mask is legal
        ("Small", "raising_step", NAN, {"reason": "exception"}, "ZeroDivisionError: no class"),
    ],
)
def test_a_step_without_nan_has_no_origin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, step: str, batch: Any, how: Any, error: Any
) -> None:
    result = bisected(tmp_path, capsys, model, step, batch, **how)
    assert (result["symptom"], result["origin"], result["error"]) == (None, None, error)


def test_the_path_leads_from_the_origin_to_the_symptom(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = bisected(tmp_path, capsys, "Toy", "per_class_step", FEW, FEW)
    assert (result["origin"]["inputs"][1]["low"], result["origin"]["inputs"][1]["high"]) == (0.0, 0.0)
    assert (result["origin"]["outputs"][0]["infs"], result["origin"]["outputs"][0]["nans"]) == (1, 0)
    assert result["symptom"] == "the loss of micro-batch 0"
    assert result["path"][0].startswith("aten.add.Tensor")


def test_report_in_words_names_operation_line_and_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def words(model: str, batch: Any) -> str:
        return shown(capture(tmp_path, model, "sum_step", batch), capsys, model, "sum_step")

    out = words("HalfMatmul", FINE)
    first = (
        "bisect: the first operation whose inputs are finite and whose output is not: aten.mm.default in the forward"
    )
    assert first in out
    assert "  in the model itself (HalfMatmul)\n  called at:\n    File " in out
    assert "    float16[2, 3] finite from 60000 to 60000\n" in out
    assert "  output:\n    float16[2, 2] no finite element, 0 NaN, 4 Inf, the first at [0, 0]\n" in out
    assert "float16 may be too narrow: --precision fp32 distinguishes overflow from mathematics" in out
    assert "it arrived at: the loss of micro-batch 0" in out
    assert "bisect: not finite before the step: batch['x'] of micro-batch 0\n  output:\n    float32[2, 4]" in words(
        "Small", NAN
    )


@numbers_nodes
def test_report_in_words_names_the_line_of_the_forward_operation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shown(capture(tmp_path, "SqrtOfZero", "sum_step", FINE), capsys, "SqrtOfZero", "sum_step")
    assert "in the backward pass (SqrtBackward0) of micro-batch 0\n" in out
    assert "  the forward operation was called at:\n" in out
    assert "it arrived at: the gradient of layer.weight, and 1 more, micro-batch 0" in out


def test_a_backward_operation_is_found_without_the_internals_of_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operation's module is not."""
    monkeypatch.setattr("ddpstats._observe.torch_compat._has_numbers", False)
    out = shown(capture(tmp_path, "SqrtOfZero", "sum_step", FINE), capsys, "SqrtOfZero", "sum_step")
    assert "in a module that is not known (the node is SqrtBackward0)" in out
