"""Programs that reduce their gradients themselves, with a NaN on rank 1 alone: for `test_own_reduction`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpstats import NaNCapture
from ddpstats._observe.gradients import GradientWatch
from ddpstats.capture import CaptureVerdict


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.between: Callable[[Tensor], Tensor] | None = None
        self.behind: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x)
        if self.between is not None and hidden.requires_grad:
            hidden.register_hook(self.between)  # type: ignore[no-untyped-call]
        out: Tensor = self.last(hidden)
        if self.behind is not None and out.requires_grad:
            out.register_hook(self.behind)  # type: ignore[no-untyped-call]
        return out


@dataclass
class Program:
    """What reduces, and when it is set up; ``after`` runs behind ``backward()``."""

    module: nn.Module
    inner: Net
    after: list[Callable[[], object]] = field(default_factory=list)
    around_backward: Callable[[], Iterator[None]] | None = None
    keep: list[Any] = field(default_factory=list)


def mean_of(gradient: Tensor) -> Tensor:
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


def plain(program: Program) -> None:
    for parameter in program.inner.parameters():
        parameter.register_hook(mean_of)  # type: ignore[no-untyped-call]


def of_a_copy(program: Program) -> None:
    for parameter in program.inner.parameters():
        parameter.register_hook(lambda gradient: mean_of(gradient.clone()))  # type: ignore[no-untyped-call]


def gathered(program: Program) -> None:
    def reduced(gradient: Tensor) -> Tensor:
        found = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(found, gradient.contiguous())
        return torch.stack(found).mean(0)

    for parameter in program.inner.parameters():
        parameter.register_hook(reduced)  # type: ignore[no-untyped-call]


def on_two_groups(program: Program) -> None:
    """A group of its own, and one hook that does not communicate before the one that does."""
    group = dist.new_group()
    program.keep.append(group)

    def reduced(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=group)
        total: Tensor = gradient / group.size()
        return total

    for parameter in program.inner.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-10, 10))  # type: ignore[no-untyped-call]
        parameter.register_hook(reduced)  # type: ignore[no-untyped-call]


def asynchronous(program: Program) -> None:
    """All of them on their way at once; the results replace ``.grad`` after the pass."""
    started: list[tuple[nn.Parameter, Tensor, Any]] = []

    def start(parameter: nn.Parameter, gradient: Tensor) -> None:
        own = gradient.clone()
        started.append((parameter, own, dist.all_reduce(own, async_op=True)))

    def finish() -> None:
        for parameter, total, work in started:
            work.wait()
            parameter.grad = total / dist.get_world_size()
        started.clear()

    for parameter in program.inner.parameters():
        parameter.register_hook(lambda gradient, parameter=parameter: start(parameter, gradient))  # type: ignore[no-untyped-call]
    program.after.append(finish)


def each_time(program: Program) -> None:
    """Hooks that are registered for one backward pass only."""

    def around() -> Iterator[None]:
        handles = [one.register_hook(mean_of) for one in program.inner.parameters()]  # type: ignore[no-untyped-call]
        yield
        for handle in handles:
            handle.remove()

    program.around_backward = around


def after_accumulation(program: Program) -> None:
    """As Horovod's optimizer does it today."""
    started: list[tuple[nn.Parameter, Any]] = []

    def start(parameter: nn.Parameter) -> None:
        started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))

    def finish() -> None:
        for parameter, work in started:
            work.wait()
            assert parameter.grad is not None
            parameter.grad /= dist.get_world_size()
        started.clear()

    for parameter in program.inner.parameters():
        parameter.register_post_accumulate_grad_hook(start)  # type: ignore[no-untyped-call]
    program.after.append(finish)


def on_the_node(program: Program) -> None:
    """As Horovod's optimizer did it before: behind the node that accumulates."""
    for parameter in program.inner.parameters():
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        program.keep.append(node)
        node.register_hook(lambda *_, parameter=parameter: dist.all_reduce(parameter.grad))  # type: ignore[union-attr]


def before_the_node(program: Program) -> None:
    """Before the node that accumulates, behind all hooks of the tensor."""
    for parameter in program.inner.parameters():
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        program.keep.append(node)
        node.register_prehook(lambda gradients: (mean_of(gradients[0].clone()),))  # type: ignore[union-attr]


def by_hand(program: Program) -> None:
    program.after.append(lambda: [dist.all_reduce(one.grad) for one in program.inner.parameters()])


def between_layers(program: Program) -> None:
    program.inner.between = lambda gradient: mean_of(gradient.clone())


def behind_the_model(program: Program) -> None:
    """Before the first gradient of a parameter is there."""
    program.inner.behind = lambda gradient: mean_of(gradient.clone())


SETUPS = {
    setup.__name__: setup
    for setup in (
        plain, of_a_copy, gathered, on_two_groups, asynchronous, each_time, after_accumulation, on_the_node,
        before_the_node, by_hand, between_layers, behind_the_model,
    )
}  # fmt: skip


def run(
    name: str,
    order: str,
    bad_step: int,
    dirpath: str,
    wrap: str = "alone",
    micro: int = 1,
    bad_micro: int | None = None,
) -> list[CaptureVerdict]:
    """Three steps of ``micro`` micro-batches, a NaN in one of the ``bad_step``-th (by default its last) on rank 1."""
    bad = micro - 1 if bad_micro is None else bad_micro
    torch.manual_seed(0)
    net = Net()
    module = DistributedDataParallel(net, bucket_cap_mb=0.00002) if wrap == "ddp" else net
    program = Program(module, net)
    if order == "before":
        SETUPS[name](program)
    with NaNCapture(dirpath, model=module, on_nonfinite="skip") as capture:
        if order == "after":
            SETUPS[name](program)
        return [_step(program, capture, bad if bad_step == number else None, micro) for number in range(3)]


def _step(program: Program, capture: NaNCapture, bad_micro: int | None, micro: int = 1) -> CaptureVerdict:
    for place in range(micro):
        factor = torch.nan if place == bad_micro and dist.get_rank() == 1 else 1.0
        with capture.micro_batch({"factor": factor}):
            around = program.around_backward() if program.around_backward else iter([None])
            next(around)
            (program.module(torch.ones(2, 4)).sum() * factor).backward()
            next(around, None)
            for after in program.after:
                after()
    verdict = capture.check()
    program.module.zero_grad()
    return verdict


# -- hooks that do something else -------------------------------------------------------------------------------------


def mended(dirpath: str) -> list[CaptureVerdict]:
    """A hook takes NaN away before it reduces: nothing is wrong with the step."""

    def reduced(gradient: Tensor) -> Tensor:
        return mean_of(gradient.nan_to_num())

    module = Net()
    for parameter in module.parameters():
        parameter.register_hook(reduced)  # type: ignore[no-untyped-call]
    with NaNCapture(dirpath, model=module) as capture:
        return [_step(Program(module, module), capture, 0)]


def made_by_a_hook(dirpath: str) -> list[CaptureVerdict]:
    """A hook without a collective divides zero by zero, on rank 1."""
    module = Net()
    if dist.get_rank() == 1:
        module.last.bias.register_hook(lambda gradient: (gradient - gradient) / 0.0)  # type: ignore[no-untyped-call]
    with NaNCapture(dirpath, model=DistributedDataParallel(module)) as capture:
        with capture.micro_batch(None):
            module(torch.ones(2, 4)).sum().backward()
        return [capture.check()]


def overflowing(dirpath: str) -> list[CaptureVerdict]:
    """Every rank's gradient is finite, and their sum is not."""
    module = Net()
    for parameter in module.parameters():
        parameter.register_hook(mean_of)  # type: ignore[no-untyped-call]
    with NaNCapture(dirpath, model=module) as capture:
        with capture.micro_batch(None):
            (module(torch.ones(1, 4)).sum() * 3e38).backward()
        return [capture.check()]


def both(dirpath: str) -> list[CaptureVerdict]:
    """Each rank has a NaN of its own."""
    module = Net()
    for parameter in module.parameters():
        parameter.register_hook(mean_of)  # type: ignore[no-untyped-call]
    with NaNCapture(dirpath, model=module) as capture:
        with capture.micro_batch(None):
            (module(torch.ones(2, 4)).sum() * torch.nan).backward()
        return [capture.check()]


def of_one_rank_of_four(dirpath: str) -> list[CaptureVerdict]:
    """Ranks 2 and 3 share what is between the layers; rank 3 has a NaN behind it."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[dist.get_rank() // 2]
    module = Net()

    def reduced(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=mine)
        return gradient

    module.behind = reduced
    with NaNCapture(dirpath, model=module) as capture:
        with capture.micro_batch(None):
            (module(torch.ones(2, 4)).sum() * (torch.nan if dist.get_rank() == 3 else 1.0)).backward()
        return [capture.check()]


def looks(communicates: bool) -> list[list[int]]:
    """How many gradients are looked at at a time, in each of two steps."""
    module, found = Net(), list[list[int]]()
    if communicates:
        module.between = lambda gradient: mean_of(gradient.clone())
    watch = GradientWatch(module)
    watch.observer = lambda parameters, _: found[-1].append(len(parameters))
    for _ in range(2):
        found.append([])
        watch.begin()
        module(torch.ones(2, 4)).sum().backward()
        watch.end()
        watch.forget()
    watch.close()
    return found


def untouched(watched: bool, dirpath: str) -> tuple[list[Tensor], list[list[Any]]]:
    """The gradients, and what hooks the parameters have afterwards."""
    torch.manual_seed(0)
    module = Net()
    handles = [one.register_hook(mean_of) for one in module.parameters()]  # type: ignore[no-untyped-call]
    capture = NaNCapture(dirpath, model=module) if watched else None
    for _ in range(2):
        if capture is not None:
            with capture.micro_batch(None):
                module(torch.full((2, 4), 1.0 + dist.get_rank())).square().sum().backward()
            assert capture.check().ok
        else:
            module(torch.full((2, 4), 1.0 + dist.get_rank())).square().sum().backward()
    if capture is not None:
        capture.close()
    hooks = [list((one._backward_hooks or {}).values()) for one in module.parameters()]
    for handle in handles:
        handle.remove()
    gradients = [one.grad for one in module.parameters() if one.grad is not None]
    return gradients, [[hook.__name__ for hook in found] for found in hooks]
