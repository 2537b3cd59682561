"""`inject_bit_flips` flips the named bit, in its step, on its rank, and leaves no hook behind."""

from __future__ import annotations

import copy
import io
import random
import struct
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpstats import ConfigError
from ddpstats.testing import BitFlip, RankPool, inject_bit_flips
from tests import programs
from tests.capabilities import flips_products
from tests.testing import bit_flip_runs as runs

WEIGHT, HEAD = "0.weight", "2.weight"
OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"gradient_as_bucket_view": True}, id="view", marks=pytest.mark.slow),
]


def bits_of(tensor: Tensor) -> list[int]:
    sizes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    size = tensor.dtype.itemsize
    return [int(x) % (1 << 8 * size) for x in tensor.detach().contiguous().view(sizes[size]).flatten().tolist()]


def bit_of(value: float, bit: int) -> int:
    return bits_of(torch.tensor(value))[0] >> bit & 1


def flipped_bits(before: Tensor, after: Tensor) -> dict[int, int]:
    """Return the bits that differ, by the flat index of their element."""
    pairs = enumerate(zip(bits_of(before), bits_of(after), strict=True))
    return {at: a ^ b for at, (a, b) in pairs if a != b}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# -- the bits themselves ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("name", ["lowest", "middle", "sign"])
def test_exactly_one_bit_of_a_weight_is_flipped(dtype: torch.dtype, name: str) -> None:
    width = 8 * dtype.itemsize
    bit = {"lowest": 0, "middle": width // 2 + 1, "sign": width - 1}[name]
    model = nn.Module()
    values = torch.arange(1, 13).reshape(3, 4).to(dtype)
    model.register_parameter("w", nn.Parameter(values.clone(), requires_grad=False))
    with inject_bit_flips(_called(model), [BitFlip("w", "weight", 12 + 6, bit, 0)]) as faults:
        model()
        model()
    assert flipped_bits(values, model.w) == {6: 1 << bit}  # type: ignore[arg-type]
    (applied,) = faults.applied
    assert (applied.index, applied.before, applied.after) == ((1, 2), 7.0, float(model.w[1, 2]))  # type: ignore[index]


def _called(model: Any) -> Any:
    model.forward = lambda: None
    return model


def test_before_and_after_are_the_values_that_the_bits_mean() -> None:
    model = runs.make_model()
    (value,) = struct.unpack("I", struct.pack("f", model[0].weight[0, 3].item()))  # type: ignore[index]
    (meant,) = struct.unpack("f", struct.pack("I", value ^ 1 << 30))
    fault = runs.train(model, [BitFlip(WEIGHT, "weight", 3, 30, 0)], steps=1)["applied"][0]
    assert fault.after == meant
    assert fault.index == (0, 3)
    assert (fault.step, fault.rank) == (0, 0)


def test_a_weight_that_autograd_has_saved_can_be_flipped() -> None:
    model = runs.make_model()
    first = model(torch.ones(2, 4)).sum()
    with inject_bit_flips(model, [BitFlip(HEAD, "weight", 0, 3, 0)]) as faults:
        model(torch.ones(2, 4))
    first.backward()
    assert len(faults.applied) == 1


def test_a_buffer_and_a_strided_weight_are_flipped_in_place() -> None:
    model = _called(nn.Module())
    model.register_buffer("count", torch.tensor(5))
    model.register_parameter("w", nn.Parameter(torch.arange(6.0).reshape(2, 3).t()))
    where = model.w.data_ptr()
    with inject_bit_flips(model, [BitFlip("count", "weight", 9, 1, 0), BitFlip("w", "weight", 1, 31, 0)]):
        model()
    assert model.count == 7
    assert model.w[0, 1] == -3.0
    assert model.w.data_ptr() == where


# -- when -------------------------------------------------------------------------------------------------------------


@flips_products
def test_a_transient_flip_happens_once_in_its_step() -> None:
    parameters = [BitFlip(WEIGHT, where, 5, 20, 1) for where in ("weight", "gradient", "reduced_gradient")]
    modules = [BitFlip("0", where, 5, 20, 1) for where in ("activation", "activation_gradient", "matmul")]
    for flip in parameters + modules:
        run = runs.train(runs.make_model(), [flip], micro_batches=2)
        assert [fault.step for fault in run["applied"]] == [1], flip.where


def test_a_sticky_bit_keeps_its_value_from_its_step_on() -> None:
    for bit in (0, 22):
        flip = BitFlip(WEIGHT, "weight", 5, bit, 1, sticky=True)
        faults = runs.train(runs.make_model(), [flip], steps=6)["applied"]
        assert [fault.step for fault in faults] == [1, 2, 3, 4, 5]
        assert faults[0].before != faults[0].after
        stuck_at = bit_of(faults[0].after, bit)
        assert {bit_of(fault.after, bit) for fault in faults} == {stuck_at}
        unchanged = [fault for fault in faults if bit_of(fault.before, bit) == stuck_at]
        assert unchanged
        assert all(fault.before == fault.after for fault in unchanged)


# -- what follows -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clean() -> dict[str, Any]:
    return runs.train(runs.make_model(), [])


def test_an_activations_gradient_passes_back_unchanged() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    model = nn.Sequential(nn.Identity())
    with inject_bit_flips(model, [BitFlip("0", "activation", 0, 31, 0)]):
        out = model(x)
    out.backward(torch.full((2, 3), 7.0))
    assert flipped_bits(x, out) == {0: 1 << 31}
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((2, 3), 7.0))


def test_the_first_floating_point_tensor_of_several_outputs_is_flipped() -> None:
    class Several(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"n": torch.tensor(3), "pair": (None, [x]), "y": x}

    model = Several()
    with inject_bit_flips(model, [BitFlip("", "activation", 1, 31, 0)]):
        out = model(torch.ones(2))
    assert out["pair"][1][0].tolist() == [1, -1]
    assert out["y"].tolist() == [1, 1]
    assert out["n"] == 3
    lstm = nn.LSTM(2, 2)
    with inject_bit_flips(lstm, [BitFlip("", "activation", 0, 31, 0)]) as faults:
        y, (h, _) = lstm(torch.ones(1, 2))
    assert y[0, 0] == -h[0, 0]
    assert len(faults.applied) == 1


def test_an_activation_gradient_changes_what_lies_before_it_only(clean: dict[str, Any]) -> None:
    run = runs.train(runs.make_model(), [BitFlip("0", "activation_gradient", 2, 30, 1)])
    assert run["losses"][:2] == clean["losses"][:2]
    changed = {name for name, g in run["gradients"][1].items() if not torch.equal(g, clean["gradients"][1][name])}
    assert changed == {"0.weight", "0.bias"}


def test_a_gradient_differs_in_one_bit_of_one_parameter(clean: dict[str, Any]) -> None:
    for where in ("gradient", "reduced_gradient"):
        run = runs.train(runs.make_model(), [BitFlip(HEAD, where, 4, 17, 1)])
        ours, theirs = run["gradients"][1], clean["gradients"][1]
        assert flipped_bits(ours.pop(HEAD), theirs[HEAD]) == {4: 1 << 17}, where
        assert same(ours, {name: gradient for name, gradient in theirs.items() if name != HEAD})


@flips_products
def test_a_matmul_is_flipped_in_the_first_product_of_the_module() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x @ x, x @ x @ x

    x = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))
    for factor in (x, x.bfloat16(), x.double(), torch.stack([x, x])):
        model, bit = Twice(), 8 * factor.dtype.itemsize - 1
        with inject_bit_flips(model, [BitFlip("", "matmul", 4, bit, 0), BitFlip("", "matmul", 5, bit, 0)]):
            first, second = model(factor)
        assert flipped_bits(first, factor @ factor) == {4: 1 << bit, 5: 1 << bit}
        assert torch.equal(second, factor @ factor @ factor)


@flips_products
def test_no_random_numbers_are_drawn() -> None:
    model, before = runs.make_model(), (torch.get_rng_state(), random.getstate())
    with inject_bit_flips(model, [BitFlip("0", "matmul", 0, 3, 0), BitFlip(HEAD, "gradient", 0, 3, 0)]) as faults:
        model(torch.ones(2, 4)).sum().backward()
    assert len(faults.applied) == 2
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


class Returning(nn.Module):
    def __init__(self, made: Any) -> None:
        super().__init__()
        self.inner, self.made = nn.Linear(3, 3), made

    def forward(self, x: Tensor) -> Any:
        return self.made(self.inner(x))


@pytest.mark.parametrize("where", ["activation", "activation_gradient"])
@pytest.mark.parametrize(
    "made",
    [
        lambda x: None,
        lambda x: SimpleNamespace(x=x),
        lambda x: x.argmax(-1),
        lambda x: x.to_sparse(),
    ],
    ids=["none", "object", "integers", "sparse"],
)
def test_a_module_that_returns_no_floating_point_tensor_is_left_alone(where: Any, made: Any) -> None:
    model = Returning(made)
    expected = model(torch.ones(2, 3))
    with inject_bit_flips(model, [BitFlip("", where, 1, 40, 0)]) as faults:
        output = model(torch.ones(2, 3))
    assert repr(output) == repr(expected)
    assert faults.applied == []


@pytest.mark.parametrize("where", ["gradient", "reduced_gradient"])
def test_of_a_sparse_gradient_a_value_is_flipped(where: Any) -> None:
    model = nn.Embedding(10, 4, sparse=True)
    with inject_bit_flips(model, [BitFlip("weight", where, 5, 31, 0)]) as faults:
        model(torch.tensor([1, 2])).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.to_dense()[2].tolist() == [1, -1, 1, 1]
    assert model.weight.grad.to_dense().sum() == 6
    assert [(fault.index, fault.before, fault.after) for fault in faults.applied] == [((1, 1), 1.0, -1.0)]


@flips_products
def test_a_copy_of_the_model_has_no_faults_and_brings_none(every_kind: list[BitFlip]) -> None:
    model = runs.make_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    saved = io.BytesIO()
    with inject_bit_flips(model, every_kind) as faults:
        copied = copy.deepcopy(model)
        torch.save(model, saved)
        saved.seek(0)
        loaded = torch.load(saved, weights_only=False)
        for copy_of_model in (copied, loaded):
            copy_of_model(torch.ones(2, 4)).sum().backward()
            assert same(dict(copy_of_model.named_parameters()), before)
        assert faults.applied == []
        assert same(dict(model.named_parameters()), before)


@flips_products
def test_other_modules_multiply_as_without_the_block() -> None:
    model, x = nn.Sequential(nn.Linear(33, 17), nn.Linear(17, 5)), torch.randn(9, 33)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model, x = model.to(dtype), x.to(dtype)
        expected, hidden = model(x), model[0](x)
        with inject_bit_flips(model, [BitFlip("1", "matmul", 0, 3, 0)]):
            assert torch.equal(model[0](x), hidden)
            assert torch.equal(x @ x.t(), x @ x.t())
            assert len(flipped_bits(model(x), expected)) == 1


# -- on ranks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
def test_before_the_reduce_both_ranks_get_the_same_corrupted_mean(two_ranks: RankPool, options: dict[str, Any]) -> None:
    flip = BitFlip(HEAD, "gradient", 4, 28, 1, rank=1)
    first, second = two_ranks.run(runs.train_ddp, [flip], **options).values()
    clean = two_ranks.run(runs.train_ddp, [], **options).values()[0]
    assert all(same(a, b) for a, b in zip(first["gradients"], second["gradients"], strict=True))
    assert same(first["gradients"][0], clean["gradients"][0])
    assert first["gradients"][1][HEAD].flatten()[4] != clean["gradients"][1][HEAD].flatten()[4]
    assert first["applied"] == []
    assert [fault.rank for fault in second["applied"]] == [1]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("step", [0, 1])
def test_after_the_reduce_only_one_rank_has_it(two_ranks: RankPool, options: dict[str, Any], step: int) -> None:
    flip = BitFlip(HEAD, "reduced_gradient", 4, 28, step, rank=1)
    first, second = two_ranks.run(runs.train_ddp, [flip], **options).values()
    ours, theirs = second["gradients"][step], first["gradients"][step]
    assert flipped_bits(ours.pop(HEAD), theirs.pop(HEAD)) == {4: 1 << 28}
    assert same(ours, theirs)
    assert [fault.step for fault in second["applied"]] == [step]


@pytest.mark.parametrize("options", OPTIONS)
def test_with_accumulation_the_reduced_gradient_is_hit_in_the_pass_that_exchanges(
    two_ranks: RankPool, options: dict[str, Any]
) -> None:
    flip = BitFlip(WEIGHT, "reduced_gradient", 4, 28, 1, rank=0, sticky=True)
    first, second = two_ranks.run(runs.train_ddp, [flip], micro_batches=3, **options).values()
    assert [fault.step for fault in first["applied"]] == [1, 2]
    assert flipped_bits(first["gradients"][1][WEIGHT], second["gradients"][1][WEIGHT]) == {4: 1 << 28}


def test_a_flip_of_no_rank_is_one_of_every_rank(two_ranks: RankPool) -> None:
    by_rank = two_ranks.run(runs.train_ddp, [BitFlip(WEIGHT, "weight", 0, 30, 2)]).values()
    assert [[fault.rank for fault in run["applied"]] for run in by_rank] == [[0], [1]]


# -- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flip", "words"),
    [
        (BitFlip("3.weight", "weight", 0, 0, 0), "Sequential has no attribute `3`"),
        (BitFlip("0.weight", "activation", 0, 0, 0), "`weight` is not an nn.Module"),
        (BitFlip("0", "gradient", 0, 0, 0), "`0` is not an nn.Parameter"),
        (BitFlip("0.weight", "gradient", 0, 32, 0), r"the bits of torch\.float32 are 0 to 31"),
        (BitFlip("0.weight", "weight", 0, -1, 0), "element, bit, step and rank are whole numbers, 0 or more"),
        (BitFlip("0.weight", "weight", 0, 0, 0, rank=-1), "element, bit, step and rank"),
        (BitFlip("0.weight", "weights", 0, 0, 0), "where must be one of weight, activation"),  # type: ignore[arg-type]
    ],
)
def test_flip_that_cannot_happen_is_refused_at_once(flip: BitFlip, words: str) -> None:
    with pytest.raises(ConfigError, match=words), inject_bit_flips(runs.make_model(), [flip]):
        raise AssertionError("the block ran")


def test_a_rank_outside_of_the_world_is_refused(two_ranks: RankPool) -> None:
    assert two_ranks.run(runs.refused, BitFlip(WEIGHT, "weight", 0, 0, 0, rank=1)).values() == ["", ""]
    texts = two_ranks.run(runs.refused, BitFlip(WEIGHT, "weight", 0, 0, 0, rank=2)).values()
    assert all("the ranks are 0 to 1" in text for text in texts)


def test_a_frozen_parameter_has_no_gradient_to_flip() -> None:
    model = runs.make_model()
    model.requires_grad_(False)
    with (
        pytest.raises(ConfigError, match="require gradient"),
        inject_bit_flips(model, [BitFlip(WEIGHT, "gradient", 0, 0, 0)]),
    ):
        raise AssertionError("the block ran")


def test_a_torch_that_does_not_say_when_a_backward_pass_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpstats.testing.flips.queue_callback", None)
    flips = [BitFlip(WEIGHT, "reduced_gradient", 0, 0, 0)]
    words = "does not say when a backward pass ends"
    with pytest.raises(ConfigError, match=words), inject_bit_flips(runs.make_model(), flips):
        raise AssertionError("the block ran")


@flips_products
def test_a_bit_beyond_an_activations_dtype_is_refused_when_it_is_applied() -> None:
    model = runs.make_model(torch.bfloat16)
    for where in ("activation", "matmul"):
        flips = [BitFlip("0", where, 0, 16, 0)]
        with pytest.raises(ConfigError, match=r"bfloat16 are 0 to 15"), inject_bit_flips(model, flips):
            model(torch.ones(1, 4, dtype=torch.bfloat16))


# -- nothing stays ----------------------------------------------------------------------------------------------------


def everything_hooked(model: nn.Module) -> list[Any]:
    hooks: list[Any] = []
    for module in model.modules():
        hooks += [
            dict(module._forward_hooks),
            dict(module._forward_pre_hooks),
            dict(module._forward_hooks_always_called),
        ]
    for parameter in model.parameters():
        hooks += [dict(parameter._backward_hooks or {}), dict(parameter._post_accumulate_grad_hooks or {})]
    return hooks


def registrations() -> list[str]:
    return [torch._C._dispatch_dump(f"aten::{op}") for op in ("mm", "addmm", "bmm", "baddbmm")]


@pytest.fixture
def every_kind() -> list[BitFlip]:
    parameters = [BitFlip(WEIGHT, where, 0, 3, 0, sticky=True) for where in ("weight", "gradient", "reduced_gradient")]
    modules = [BitFlip("0", where, 0, 3, 0, sticky=True) for where in ("activation", "activation_gradient", "matmul")]
    return parameters + modules


@flips_products
def test_block_leaves_no_hook_and_no_kernel(every_kind: list[BitFlip]) -> None:
    model = runs.make_model()
    hooks, kernels = everything_hooked(model), registrations()
    with inject_bit_flips(model, every_kind) as faults:
        assert everything_hooked(model) != hooks
        model(torch.ones(1, 4)).sum().backward()
        kept = model(torch.ones(1, 4)).sum()
    count = len(faults.applied)
    assert count >= 6
    assert (everything_hooked(model), registrations()) == (hooks, kernels)
    kept.backward()  # of a graph that was made inside
    assert len(faults.applied) == count
    with pytest.raises(RuntimeError, match="shapes"), inject_bit_flips(model, every_kind):
        model(torch.ones(1, 5))
    assert (everything_hooked(model), registrations()) == (hooks, kernels)


@pytest.mark.slow
@flips_products
def test_other_threads_may_multiply_while_the_module_runs() -> None:
    done = programs.run(["-c", textwrap.dedent(BESIDE)])
    assert (done.returncode, done.stderr) == (0, "")


BESIDE = """
    import threading, time, torch
    from ddpstats.testing import BitFlip, inject_bit_flips
    torch.set_num_threads(1)
    began, over = threading.Event(), threading.Event()

    def multiply():
        began.wait()
        ones = torch.ones(4, 4)
        while not over.is_set():
            ones @ ones

    threads = [threading.Thread(target=multiply) for _ in range(2)]
    for thread in threads:
        thread.start()
    model = torch.nn.Linear(4, 4)
    with inject_bit_flips(model, [BitFlip("", "matmul", 0, 3, 0, sticky=True)]) as faults:
        began.set()
        until = time.monotonic() + 4
        while time.monotonic() < until:
            model(torch.ones(1, 4))
        over.set()
        for thread in threads:
            thread.join()
    assert len(faults.applied) > 100
"""
