"""Gradients in a dump are those that torch's full backward hooks see, although the graph is not changed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddpstats.dump import StatsDump
from tests.dump.collecting import Block, dumped

Inputs = tuple[Tensor, ...]


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v)


class Views(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)[2:].reshape(-1).view(-1, 2).expand(3, -1, 2)


class Chunks(nn.Module):
    """Several outputs of one node."""

    def forward(self, x: Tensor) -> Any:
        return x.chunk(2)


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y[0] = x[1]
        y.add_(x)
        return nn.functional.relu_(y)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = nn.Linear(4, 4), reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return out.tanh()


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        out: Tensor = 3 * x**2 * gradients[0]
        return out


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Cube.apply(x)  # type: ignore[no-untyped-call]
        return out


class NonLeaf(nn.Module):
    """A module that changes its input in place, which others have made."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(3)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Inputs]]] = {
    "linear": (lambda: nn.Linear(4, 5), lambda: (noise(2, 3, 4),)),
    "attention": (Attention, lambda: (noise(2, 3, 4), noise(2, 3, 4, seed=2), noise(2, 3, 4, seed=3))),
    "block": (lambda: Block(4), lambda: (noise(3, 4),)),
    "views": (Views, lambda: (noise(3, 4),)),
    "outputs of one node": (Chunks, lambda: (noise(4, 2),)),
    "in place": (InPlace, lambda: (noise(3, 4),)),
    "in place on its input": (NonLeaf, lambda: (noise(3, 4) * 2,)),
    "checkpoint": (lambda: Checkpointed(False), lambda: (noise(3, 4),)),
    "reentrant checkpoint": (lambda: Checkpointed(True), lambda: (noise(3, 4),)),
    "a function of one's own": (Own, lambda: (noise(3, 4),)),
    "lstm": (lambda: nn.LSTM(4, 3), lambda: (noise(5, 2, 4),)),
    "a transformer layer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        lambda: (noise(2, 3, 4),),
    ),
}


def backward(module: nn.Module, inputs: Inputs) -> None:
    output = module(*inputs)
    first = output if isinstance(output, Tensor) else output[0]
    torch.manual_seed(7)
    (first * torch.randn_like(first)).sum().backward()


def described(gradients: Any) -> list[Any]:
    """Return maximum, minimum and norm of each gradient."""
    return [
        None if gradient is None else [gradient.max().item(), gradient.min().item(), gradient.norm().item()]
        for gradient in gradients
    ]


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_a_full_backward_hook(tmp_path: Path, case: str) -> None:
    make, make_inputs = CASES[case]
    torch.manual_seed(5)
    module, expected = make(), list[Any]()
    inputs = make_inputs()
    if case != "in place on its input":  # the hook that we compare with does not allow that
        module.register_full_backward_hook(lambda module, grads, outer: expected.append((grads, outer)))
        backward(module, inputs)
    else:
        x = inputs[0]
        y = x * 1
        (y * 3).backward(torch.ones(3, 4))  # type: ignore[no-untyped-call]
        torch.manual_seed(7)
        outer = torch.randn(3, 4)
        expected.append(((outer * 3,), (outer,)))
    torch.manual_seed(5)
    module = make()
    inputs = make_inputs()
    entries = dumped(tmp_path, lambda: backward(module, inputs), module, "L0")
    entry = entries[f"Module.root.{type(module).__name__}.backward.0"]
    for what, gradients in zip(("output", "input"), expected[0], strict=True):
        leaves = entry[what]
        wanted = described(gradients)
        for leaf, numbers in zip(leaves, [*wanted, *[None] * (len(leaves) - len(wanted))], strict=True):
            if numbers is None or leaf is None:
                assert (leaf is None) or not any((leaf["Max"], leaf["Min"])), what
                assert numbers is None or not any(numbers), what
            else:
                assert [leaf["Max"], leaf["Min"], leaf["Norm"]] == pytest.approx(numbers, rel=1e-6), what


def test_tensor_given_twice_has_two_gradients(tmp_path: Path) -> None:
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    entries = dumped(tmp_path, lambda: torch.matmul(x, x).backward())  # type: ignore[no-untyped-call]
    assert [leaf["Max"] for leaf in entries["Torch.matmul.0.backward"]["output"]] == [3.0, 3.0]


def test_gradient_is_the_share_of_the_call(tmp_path: Path) -> None:
    x = torch.ones(2, requires_grad=True)

    def body() -> None:
        y = x * 1
        (y.exp() + 10 * y).sum().backward()  # type: ignore[no-untyped-call]

    entries = dumped(tmp_path, body)
    assert entries["Tensor.mul.1.backward"]["output"][0]["Max"] == 10.0
    assert entries["Tensor.mul.0.backward"]["input"][0]["Max"] == pytest.approx(10 + 2.718282)


def test_graph_is_freed_when_the_program_drops_it(tmp_path: Path) -> None:
    class Mark:
        pass

    model = nn.Linear(4, 4)
    dump = StatsDump({"dump_path": str(tmp_path), "level": "mix"}, model=model)
    dump.start()
    gc.disable()
    try:
        output = model(noise(2, 4)).exp().sum()
        mark = Mark()
        output.grad_fn.metadata["mark"] = mark
        seen = weakref.ref(mark)
        del mark, output
        assert seen() is None
    finally:
        gc.enable()
        dump.stop()
