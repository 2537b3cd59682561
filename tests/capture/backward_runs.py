"""Ways to run a backward pass, with a NaN on rank 1 alone: what `test_backward_passes` runs on the ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddpstats import NaNCapture
from ddpstats.capture import CaptureVerdict

Step = Callable[[nn.Module, float], None]


class Net(nn.Module):
    """Three layers, the middle one checkpointed if asked for."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = checkpoint(self.middle, x, use_reentrant=True) if self.checkpoints else self.middle(x)
        out: Tensor = self.last(x)
        return out


class Outer(nn.Module):
    """DistributedDataParallel is somewhere inside."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inside(x)
        return out


def ddp(checkpoints: bool = False, **settings: bool) -> DistributedDataParallel:
    return DistributedDataParallel(Net(checkpoints), bucket_cap_mb=0.00002, **settings)  # type: ignore[arg-type]


def once(module: nn.Module, factor: float) -> None:
    (module(torch.ones(2, 4)).sum() * factor).backward()


def twice(module: nn.Module, factor: float) -> None:
    """The second pass accumulates onto what the first one has reduced."""
    once(module, factor)
    once(module, 1.0)


def two_losses(module: nn.Module, factor: float) -> None:
    out = module(torch.ones(2, 4))
    (out[:, 0].sum() * factor).backward(retain_graph=True)
    out[:, 1].sum().backward()


def penalized(module: nn.Module, factor: float) -> None:
    x = torch.ones(2, 4, requires_grad=True)
    out = module(x).sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    ((out + slope.square().sum()) * factor).backward()


def reducing_hooks(module: nn.Module) -> nn.Module:
    """A program that reduces by itself, in hooks which it registered before the capture was made."""
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: dist.all_reduce(one.grad))  # type: ignore[no-untyped-call]
    return module


CASES: dict[str, tuple[Callable[[], nn.Module], Step]] = {
    "static graph": (lambda: ddp(static_graph=True), once),
    "static graph, bucket view": (lambda: ddp(static_graph=True, gradient_as_bucket_view=True), once),
    "unused parameters": (lambda: ddp(find_unused_parameters=True), once),
    "reentrant checkpoint": (lambda: ddp(True), once),
    "reentrant checkpoint, static graph": (lambda: ddp(True, static_graph=True), once),
    "two passes": (ddp, twice),
    "two passes, bucket view": (lambda: ddp(gradient_as_bucket_view=True), twice),
    "two losses of one graph": (ddp, two_losses),
    "gradient penalty": (ddp, penalized),
    "inside another module": (lambda: Outer(ddp(gradient_as_bucket_view=True)), once),
    "inside another module, two passes": (lambda: Outer(ddp()), twice),
    "hooks that reduce": (lambda: reducing_hooks(Net()), once),
}


def run(name: str, dirpath: str, bad_step: int) -> list[CaptureVerdict]:
    """Three steps, the ``bad_step``-th with a NaN on rank 1."""
    make, step = CASES[name]
    torch.manual_seed(0)
    module = make()
    verdicts = []
    with NaNCapture(dirpath, model=module, on_nonfinite="skip") as capture:
        for number in range(3):
            factor = torch.nan if (number, dist.get_rank()) == (bad_step, 1) else 1.0
            with capture.micro_batch(number):
                step(module, factor)
            verdicts.append(capture.check())
            module.zero_grad()
    return verdicts


def given_the_inner_module(dirpath: str) -> list[CaptureVerdict]:
    """The capture was given what is inside of DistributedDataParallel, which reduces after each micro-batch."""
    module = ddp(gradient_as_bucket_view=True)
    with NaNCapture(dirpath, model=module.module) as capture:
        for micro in range(2):
            with capture.micro_batch(micro):
                once(module, torch.nan if (micro, dist.get_rank()) == (0, 1) else 1.0)
        return [capture.check()]


def outside(dirpath: str) -> list[CaptureVerdict]:
    """``backward()`` stands behind the with block."""
    module = ddp()
    with NaNCapture(dirpath, model=module) as capture:
        with capture.micro_batch(None):
            loss = module(torch.ones(2, 4)).sum() * (torch.nan if dist.get_rank() == 1 else 1.0)
        loss.backward()
        return [capture.check()]


def steps_in_hooks(dirpath: str) -> list[CaptureVerdict]:
    """An optimizer that steps as soon as a gradient is there, and takes it away."""
    module = Net()

    def apply(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(apply)  # type: ignore[no-untyped-call]
    with NaNCapture(dirpath, model=module) as capture:
        with capture.micro_batch(None):
            once(module, torch.nan if dist.get_rank() == 1 else 1.0)
        return [capture.check()]
