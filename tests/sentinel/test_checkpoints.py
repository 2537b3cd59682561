"""Norm layers, or the modules that are chosen, give one value of their output's gradient in each backward pass."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from ddpstats import ConfigError
from ddpstats.sentinel.activations import Checkpoints


class Block(nn.Module):
    """A residual block that changes the norm's output in place, which full backward hooks do not allow."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y += x
        out: Tensor = x + self.linear(y)
        return out


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), Block(6), Block(6), nn.LayerNorm(6), nn.Linear(6, 2))


def whole(gradient: Tensor) -> Tensor:
    """Return a 'value' that leaves nothing to chance: the gradient itself."""
    return gradient.detach().clone()


def taken(checkpoints: Checkpoints) -> list[list[tuple[int, Any]]]:
    return [[(index, value.tolist()) for index, value in micro] for micro in checkpoints.take()]


def gradients(module: nn.Module) -> list[Any]:
    return [None if parameter.grad is None else parameter.grad.tolist() for parameter in module.parameters()]


def distinct(value: Tensor) -> list[float]:
    return sorted(set(value.flatten().tolist()))


def data() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(9))


def expected(model: nn.Module, x: Tensor) -> list[tuple[int, Any]]:
    """Return the gradients of the norms' outputs of `make_model`, from a forward pass written out by hand."""
    first, first_block, second_block, norm, last = copy.deepcopy(model).children()
    assert isinstance(first_block, Block)
    assert isinstance(second_block, Block)
    outputs = []
    x = first(x)
    for block in (first_block, second_block):
        outputs.append(block.norm(x))
        x = x + block.linear(outputs[-1] + x)
    outputs.append(norm(x))
    for output in outputs:
        output.retain_grad()
    last(outputs[-1]).square().sum().backward()
    return [(index, outputs[index].grad.tolist()) for index in (2, 1, 0)]


# -- values -----------------------------------------------------------------------------------------------------------


def test_a_value_is_that_of_the_gradient_of_the_module_s_output_in_backward_order() -> None:
    model = make_model()
    checkpoints = Checkpoints(model, None, whole)
    assert checkpoints.names == ["1.norm", "2.norm", "3"]
    assert checkpoints.warnings == ()
    model(data()).square().sum().backward()
    assert taken(checkpoints) == [expected(model, data())]
    assert checkpoints.take() == []


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_gives_each_value_once(use_reentrant: bool) -> None:
    model = make_model()
    checkpoints = Checkpoints(model, None, whole)
    first, first_block, second_block, norm, last = model.children()
    x = first(data())
    for block in (first_block, second_block):
        x = checkpoint(block, x, use_reentrant=use_reentrant)
    last(norm(x)).square().sum().backward()
    values = taken(checkpoints)
    assert values == [expected(model, data())]
    plain = make_model()
    plain(data()).square().sum().backward()
    assert gradients(model) == gradients(plain)


def test_a_module_that_is_called_twice_has_two_values() -> None:
    norm = nn.LayerNorm(4)
    checkpoints = Checkpoints(norm, None, whole)
    (norm(data()) * 2).sum().backward()
    (norm(norm(data()) * 3) * 5).sum().backward()
    ((first, once), (second, late), (third, early)) = checkpoints.take()[0]
    assert (first, second, third) == (0, 0, 0)
    assert (distinct(once), distinct(late)) == ([2.0], [5.0])
    assert early.abs().max() < 1e-3  # a norm of a norm hardly depends on it


def test_without_gradients_nothing_is_hooked() -> None:
    norm = nn.LayerNorm(4)
    checkpoints = Checkpoints(norm, None, whole)
    with torch.no_grad():
        assert norm(data())._backward_hooks is None
    with torch.inference_mode():
        norm(data())
    frozen = nn.LayerNorm(4).requires_grad_(False)
    frozen_checkpoints = Checkpoints(frozen, None, whole)
    assert frozen(data())._backward_hooks is None
    assert checkpoints.take() == frozen_checkpoints.take() == []


@pytest.mark.slow
def test_inside_torch_compile_there_are_no_values_and_gradients_are_right() -> None:
    model, plain = make_model(), make_model()
    checkpoints = Checkpoints(model, None, whole)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(data()).square().sum().backward()
    plain(data()).square().sum().backward()
    assert checkpoints.take() == []
    assert gradients(model) == gradients(plain)


@dataclass
class Output:
    state: Tensor
    attention: Tensor | None = None


class Wrapped(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self._wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self._wrap(x * self.weight)


WRAPS: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda y: (None, y, y.detach()),
    "nested": lambda y: [{"mask": torch.ones(2), "deep": (1, [y])}],
    "mapping": lambda y: OrderedDict(logits=y),
    "dataclass": lambda y: Output(y),
}


@pytest.mark.parametrize("kind", WRAPS)
def test_the_first_tensor_that_wants_a_gradient_counts(kind: str) -> None:
    caught: list[Tensor] = []

    def wrap(y: Tensor) -> Any:
        caught.append(y)
        return WRAPS[kind](y)

    module = Wrapped(wrap)
    checkpoints = Checkpoints(module, [""], whole)
    module(data())
    (caught[0] * 7).sum().backward()  # type: ignore[no-untyped-call]
    ((index, value),) = checkpoints.take()[0]
    assert (index, distinct(value)) == (0, [7.0])


@pytest.mark.parametrize("output", [None, 3, "text", (), {}, torch.ones(2), torch.ones(2, dtype=torch.int64)])
def test_an_output_that_wants_no_gradient_gives_no_value(output: Any) -> None:
    module = Wrapped(lambda _: output)
    checkpoints = Checkpoints(module, [""], whole)
    module(data())
    assert checkpoints.take() == []


def test_an_output_that_is_a_parameter_keeps_no_hook() -> None:
    module = Wrapped(lambda _: module.weight)
    checkpoints = Checkpoints(module, [""], whole)
    for _ in range(3):
        module(data()).sum().backward()
    checkpoints.close()
    assert not module.weight._backward_hooks


# -- lifetime ---------------------------------------------------------------------------------------------------------


def test_after_close_nothing_is_recorded_not_even_from_a_graph_that_is_hooked() -> None:
    norm = nn.LayerNorm(4)
    checkpoints = Checkpoints(norm, None, whole)
    waiting = norm(data())
    checkpoints.close()
    checkpoints.close()
    waiting.sum().backward()
    norm(data()).sum().backward()
    assert checkpoints.take() == []
    assert not norm._forward_hooks


def test_a_module_can_be_copied_and_pickled_and_its_copies_give_no_values() -> None:
    model = make_model()
    checkpoints = Checkpoints(model, None, whole)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(data()).square().sum().backward()
        assert checkpoints.take() == []
        model(data()).square().sum().backward()
        assert gradients(model) == gradients(twin)
        assert len(checkpoints.take()[0]) == 3
        model.zero_grad()


def test_an_output_can_be_saved_without_a_warning() -> None:
    norm = nn.LayerNorm(4)
    checkpoints = Checkpoints(norm, None, whole)
    output = norm(data())
    assert output._backward_hooks
    torch.save(output, io.BytesIO())
    output.register_hook(lambda _: None)
    with pytest.warns(UserWarning, match="will not be serialized"):
        torch.save(output, io.BytesIO())
    checkpoints.close()


# -- selection --------------------------------------------------------------------------------------------------------


class RMSNormOfItsOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class MyRMSNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Renamed(nn.LayerNorm):
    pass


def names_of(module: nn.Module, selection: Any = None) -> list[str]:
    return Checkpoints(module, selection, whole).names


def test_norm_layers_are_found_by_class_and_by_name() -> None:
    norms = {
        "layer": nn.LayerNorm(2),
        "rms": nn.RMSNorm(2),
        "group": nn.GroupNorm(1, 2),
        "batch": nn.BatchNorm1d(2),
        "lazy": nn.LazyBatchNorm2d(),
        "sync": nn.SyncBatchNorm(2),
        "instance": nn.InstanceNorm2d(2),
        "response": nn.LocalResponseNorm(2),
        "own": MyRMSNorm(),
        "renamed": Renamed(2),
    }
    others = {"linear": nn.Linear(2, 2), "pre_norm": nn.Identity(), "weight": weight_norm(nn.Linear(2, 2))}
    module = nn.ModuleDict({**others, **norms})
    assert names_of(module) == list(norms)
    # Not a leaf, so its name alone says nothing
    assert names_of(nn.Sequential(RMSNormOfItsOwn(), nn.LayerNorm(2))) == ["1"]


def test_without_norm_layers_all_layers_with_a_matrix_are_taken_with_a_warning() -> None:
    module = nn.Sequential(nn.Conv1d(2, 2, 1), nn.PReLU(), weight_norm(nn.Linear(2, 2)), nn.LazyLinear(2))
    checkpoints = Checkpoints(module, None, whole)
    assert checkpoints.names == ["0", "2", "3"]
    assert "all 3 layers with a weight matrix are looked at instead" in checkpoints.warnings[0]


def test_modules_are_chosen_by_name_class_and_function_once_each_in_the_model_s_order() -> None:
    model = make_model()
    assert names_of(model, ["3", "1.linear"]) == ["1.linear", "3"]
    assert names_of(model, [nn.LayerNorm, "3", lambda name, module: name == "1"]) == ["1", "1.norm", "2.norm", "3"]
    assert names_of(model, (Block,)) == ["1", "2"]


def test_a_shared_module_is_one_checkpoint_under_its_first_name() -> None:
    norm = nn.LayerNorm(2)
    module = nn.ModuleDict({"a": norm, "b": norm})
    assert names_of(module) == ["a"]
    assert names_of(module, ["b", "a"]) == ["a"]
    assert len(norm._forward_hooks) == 2
    assert len({hook._hook.index for hook in norm._forward_hooks.values()}) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (["1.nrom"], r"checkpoints: '1.nrom' fits none of the model's 10 modules that are called"),
        ([lambda name, module: False], r"<lambda> fits none of the model's 10 modules that are called"),
        ([3], r"3 is neither a name nor a module class nor a function"),
        ([], r"checkpoints=\[\] is not understood; legal values: None for the norm layers, or a list of"),
        ("1.norm", r"checkpoints='1.norm' is not understood"),
    ],
)
def test_a_selection_that_cannot_work_is_an_error_and_leaves_no_hook(selection: Any, message: str) -> None:
    model = make_model()
    with pytest.raises(ConfigError, match=message):
        Checkpoints(model, selection, whole)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_container_that_is_never_called_is_an_error() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.LayerNorm(2)])})
    with pytest.raises(
        ConfigError, match=r"^checkpoints: 'blocks' fits none of the model's 1 modules that are called$"
    ):
        names_of(model, ["blocks"])
