"""Which modules are checkpoints, which values they give, and that nothing else changes."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
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
from ddpstats.sentinel._checkpoints import Checkpoints
from ddpstats.sentinel._detectors import RULES
from ddpstats.testing import RankPool
from tests.sentinel import checkpoints_runs as runs
from tests.sentinel.checkpoints_runs import Block, make_model, whole

Found = list[list[tuple[int, Any]]]


def taken(checkpoints: Checkpoints) -> Found:
    return [[(index, value.tolist()) for index, value in micro] for micro in checkpoints.take()]


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in module.parameters()]


def assert_bit_identical(found: list[Tensor | None], wanted: list[Tensor | None]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


def distinct(value: Tensor) -> list[float]:
    return sorted(set(value.flatten().tolist()))


def data() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(9))


def expected(model: nn.Module, x: Tensor) -> list[tuple[int, Any]]:
    """Gradients of the norms' outputs of `make_model`, from a forward pass written out by hand."""
    first, one, two, norm, last = copy.deepcopy(model).children()
    assert isinstance(one, Block)
    assert isinstance(two, Block)
    outputs = []
    x = first(x)
    for block in (one, two):
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


@pytest.mark.parametrize("detector", ["v2", "v3"])
def test_no_gradient_changes_by_a_bit_and_no_random_number_is_drawn(detector: str) -> None:
    plain, watched = make_model(), make_model()
    checkpoints = Checkpoints(watched, None, RULES["v2" if detector == "v2" else "v3"].value_of)
    before = torch.get_rng_state()
    for model in (plain, watched):
        model(data()).square().sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    assert_bit_identical(gradients(watched), gradients(plain))
    values = [value for _, value in checkpoints.take()[0]]
    assert [(value.shape, value.requires_grad, value.grad_fn) for value in values] == [(torch.Size(), False, None)] * 3


def test_a_full_backward_hook_would_break_the_in_place_change_that_works_here() -> None:
    model = make_model()
    model[1].norm.register_full_backward_hook(lambda *_: None)  # type: ignore[index]
    with pytest.raises(RuntimeError, match="inplace"):
        model(data())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_gives_each_value_once(use_reentrant: bool) -> None:
    model = make_model()
    checkpoints = Checkpoints(model, None, whole)
    first, one, two, norm, last = model.children()
    x = first(data())
    for block in (one, two):
        x = checkpoint(block, x, use_reentrant=use_reentrant)
    last(norm(x)).square().sum().backward()
    found = taken(checkpoints)
    assert found == [expected(model, data())]
    plain = make_model()
    plain(data()).square().sum().backward()
    assert_bit_identical(gradients(model), gradients(plain))


def test_a_module_that_is_called_twice_has_two_values() -> None:
    norm = nn.LayerNorm(4)
    checkpoints = Checkpoints(norm, None, whole)
    (norm(data()) * 2).sum().backward()
    (norm(norm(data()) * 3) * 5).sum().backward()
    ((first, once), (second, late), (third, early)) = checkpoints.take()[0]
    assert (first, second, third) == (0, 0, 0)
    assert (distinct(once), distinct(late)) == ([2.0], [5.0])
    assert early.abs().max() < 1e-3  # a norm of a norm hardly depends on it


def test_values_of_micro_batches_come_apart() -> None:
    norm = nn.LayerNorm(4)
    checkpoints = Checkpoints(norm, None, torch.linalg.vector_norm)
    for scale in (1.0, 2.0):
        checkpoints.begin()
        (norm(data()) * scale).sum().backward()
    checkpoints.begin()
    one, two, three = taken(checkpoints)
    assert one == [(0, pytest.approx(12**0.5))]
    assert two == [(0, pytest.approx(2 * 12**0.5))]
    assert three == []


def test_under_autocast_a_value_is_that_of_the_gradient_in_its_dtype() -> None:
    dtypes: list[torch.dtype] = []

    def value_of(gradient: Tensor) -> Tensor:
        dtypes.append(gradient.dtype)
        return RULES["v2"].value_of(gradient)

    model = make_model()
    checkpoints = Checkpoints(model, ["0", "3"], value_of)
    outputs: list[Tensor] = []
    for place in (0, 3):
        model[place].register_forward_hook(lambda _, args, output: outputs.append(output))  # type: ignore[index]
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(data()).float().square().sum()
    for output in outputs:
        output.retain_grad()
    loss.backward()
    assert dtypes == [outputs[1].dtype, torch.bfloat16]
    wanted = [(index, outputs[index].grad.float().norm().item()) for index in (1, 0)]  # type: ignore[union-attr]
    assert taken(checkpoints) == [[(index, pytest.approx(value, rel=1e-6)) for index, value in wanted]]


def test_a_module_in_eval_mode_gives_values_as_long_as_gradients_pass() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    checkpoints = Checkpoints(model, None, whole)
    (model(data()) * 2).sum().backward()
    ((_, value),) = checkpoints.take()[0]
    assert distinct(value) == [2.0]


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


def test_inside_torch_compile_there_are_no_values_and_gradients_are_right() -> None:
    model, plain = make_model(), make_model()
    checkpoints = Checkpoints(model, None, whole)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(data()).square().sum().backward()
    plain(data()).square().sum().backward()
    assert checkpoints.take() == []
    assert_bit_identical(gradients(model), gradients(plain))


def test_inside_transformations_of_torch_func_there_are_no_values() -> None:
    model = make_model()
    checkpoints = Checkpoints(model, None, torch.linalg.vector_norm)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Any:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    torch.func.grad(loss)(parameters, data())
    torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, data()[:, None])
    assert checkpoints.take() == []


def test_values_are_not_part_of_a_graph_of_a_graph() -> None:
    norm = nn.LayerNorm(4)
    checkpoints = Checkpoints(norm, None, torch.linalg.vector_norm)
    loss = norm(data()).pow(3).sum()
    (gradient,) = torch.autograd.grad(loss, [norm.weight], create_graph=True)
    assert gradient.requires_grad
    ((_, value),) = checkpoints.take()[0]
    assert not value.requires_grad


@dataclass
class Output:
    state: Tensor
    other: Tensor | None = None


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


def test_an_output_that_holds_itself_gives_no_value() -> None:
    endless: list[Any] = []
    endless.append(endless)
    module = Wrapped(lambda _: endless)
    checkpoints = Checkpoints(module, [""], whole)
    module(data())
    assert checkpoints.take() == []


def test_an_output_without_a_gradient_gives_no_value() -> None:
    module = Wrapped(lambda y: y.unbind())  # three outputs of one operator, of which only the second one is used
    checkpoints = Checkpoints(module, [""], whole)
    module(data())[1].sum().backward()
    assert checkpoints.take() == []


def test_complex_gradients_are_left_alone() -> None:
    module = Wrapped(lambda y: torch.complex(y, y))
    checkpoints = Checkpoints(module, [""], whole)
    module(data()).abs().sum().backward()
    assert checkpoints.take() == []


def test_sparse_and_nested_gradients_have_the_value_of_what_they_store() -> None:
    checkpoints = Checkpoints(nn.LayerNorm(4), None, torch.linalg.vector_norm)
    stored = torch.tensor([3.0, 4.0])
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 5]]), stored, (9,), check_invariants=True)
    checkpoints._arrived(0, sparse)
    jagged = torch.nested.nested_tensor_from_jagged(torch.tensor([[3.0], [4.0]]), torch.tensor([0, 1, 2]))
    checkpoints._arrived(0, jagged)
    assert taken(checkpoints) == [[(0, 5.0), (0, 5.0)]]


# -- DDP --------------------------------------------------------------------------------------------------------------


def test_under_ddp_values_are_each_rank_s_own_and_a_bad_one_stays_where_it_is(two_ranks: RankPool) -> None:
    bare = two_ranks.run(runs.train, False, False).values()
    fine = two_ranks.run(runs.train, False, True).values()
    spoilt = two_ranks.run(runs.train, True, True).values()
    assert all(one["random"] for one in fine)
    assert [one["gradients"] for one in fine] == [one["gradients"] for one in bare]
    for rank in range(2):
        torch.manual_seed(rank)
        wanted = [
            [
                (index, pytest.approx(torch.tensor(value).norm().item()))
                for index, value in expected(make_model(), batch)
            ]
            for batch in torch.randn(2, 3, 4)
        ]
        assert fine[rank]["values"] == wanted
    # Parameters hold what the other rank sent; the values before that do not.
    assert spoilt[0]["values"] == fine[0]["values"]
    assert spoilt[1]["values"][0] == fine[1]["values"][0]
    assert not any(torch.tensor(value).isfinite() for _, value in spoilt[1]["values"][1])
    assert not torch.tensor(spoilt[0]["gradients"][0]).isfinite().any()


# -- lifetime ---------------------------------------------------------------------------------------------------------


def test_inside_redirected_values_go_elsewhere() -> None:
    norm = nn.LayerNorm(4)
    checkpoints = Checkpoints(norm, None, torch.linalg.vector_norm)
    with checkpoints.redirected() as outer:
        norm(data()).sum().backward()
        with checkpoints.redirected() as inner:
            pass
        norm(data()).sum().backward()
    assert (len(outer), len(inner), checkpoints.take()) == (2, 0, [])
    with pytest.raises(ZeroDivisionError), checkpoints.redirected():
        raise ZeroDivisionError
    norm(data()).sum().backward()
    assert [len(micro) for micro in checkpoints.take()] == [1]


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


def test_neither_the_module_nor_a_graph_keeps_checkpoints_alive() -> None:
    norm = nn.LayerNorm(4)
    checkpoints = Checkpoints(norm, None, whole)
    waiting = norm(data())
    reference = weakref.ref(checkpoints)
    del checkpoints
    gc.collect()
    assert reference() is None
    waiting.sum().backward()
    norm(data()).sum().backward()


def test_a_module_can_be_copied_and_pickled_and_its_copies_give_no_values() -> None:
    model = make_model()
    checkpoints = Checkpoints(model, None, whole)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(data()).square().sum().backward()
        assert checkpoints.take() == []
        model(data()).square().sum().backward()
        assert_bit_identical(gradients(model), gradients(twin))
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


def value_of_nothing(_: Tensor) -> Tensor:
    raise NotImplementedError


def names_of(module: nn.Module, selection: Any = None) -> list[str]:
    return Checkpoints(module, selection, value_of_nothing).names


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
    module = nn.Sequential(
        nn.Conv1d(2, 2, 1), nn.PReLU(), nn.Linear(2, 2), weight_norm(nn.Linear(2, 2)), nn.LazyLinear(2)
    )
    checkpoints = Checkpoints(module, None, value_of_nothing)
    assert checkpoints.names == ["0", "2", "3", "4"]
    assert checkpoints.warnings == (
        "the model has no norm layer: the gradients of the outputs of all 4 layers with a weight of two or more "
        "dimensions are looked at instead (1 Conv1d, 1 Linear, 1 ParametrizedLinear, 1 LazyLinear); checkpoints=[...] "
        "chooses others, by name, class or function",
    )


def test_without_a_matrix_all_layers_with_parameters_are_taken_with_a_warning() -> None:
    checkpoints = Checkpoints(nn.Sequential(nn.PReLU(), nn.Tanh(), nn.PReLU()), None, value_of_nothing)
    assert checkpoints.names == ["0", "2"]
    assert "all 2 layers with parameters are looked at instead (2 PReLU)" in checkpoints.warnings[0]


def test_a_model_without_parameters_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"neither a norm layer nor any other layer with parameters.*checkpoints="):
        names_of(nn.Sequential(nn.Tanh(), nn.ReLU()))


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
    assert len({hook._hook._index for hook in norm._forward_hooks.values()}) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("selection", "said"),
    [
        (["1.nrom"], r"the model has no module '1.nrom'; did you mean '1.norm'"),
        (["encoder"], r"the model has no module 'encoder'; some that it has: '0', '1', '1.norm'"),
        ([nn.Conv2d], r"Conv2d fits none of the model's 10 modules"),
        ([lambda name, module: False], r"<lambda> fits none of the model's 10 modules"),
        ([3], r"3 is neither a name nor a module class nor a function"),
        ([int], r"<class 'int'> is neither a name nor a module class nor a function"),
        ([nn.Tanh()], r"Tanh\(\) is neither a name nor a module class nor a function"),
        ([], r"checkpoints=\[\] is not understood; legal values: None for the norm layers, or a list of"),
        ("1.norm", r"checkpoints='1.norm' is not understood"),
        (nn.LayerNorm, r"checkpoints=<class .*LayerNorm'> is not understood"),
        (5, r"checkpoints=5 is not understood"),
    ],
)
def test_a_selection_that_cannot_work_is_an_error_and_leaves_no_hook(selection: Any, said: str) -> None:
    model = make_model()
    with pytest.raises(ConfigError, match=said):
        Checkpoints(model, selection, value_of_nothing)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_container_that_is_never_called_is_an_error() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.LayerNorm(2)])})
    with pytest.raises(ConfigError, match=r"^checkpoints: 'blocks' is a ModuleList, which is never called itself$"):
        names_of(model, ["blocks"])
