"""Ways in which programs run their backward pass and reduce gradients, for `test_backward_passes`: NaN on rank 1."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddpstats import NaNCapture
from ddpstats._observe.gradients import GradientWatch
from ddpstats.capture import CaptureVerdict
from tests.capture.capture_runs import LossOf, captured, planted
from tests.training import Batch, Net, batch_of, loss_of, make_model, rank

Around = Callable[[], contextlib.AbstractContextManager[Any]]


class Checkpointed(Net):
    """A network that computes its norm again in the backward pass, reentrantly."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.norm, self.first(x), use_reentrant=True)
        out: Tensor = self.last(self.drop(torch.tanh(hidden)))
        return out


class Outer(nn.Module):
    """A module with DistributedDataParallel somewhere inside."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inside(x)
        return out


def ddp(kind: type[Net] = Net, **settings: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(kind(), bucket_cap_mb=0.00002, **settings)


# -- losses -----------------------------------------------------------------------------------------------------------


def two_passes(module: nn.Module, batch: Batch) -> Tensor:
    """Run another backward pass first: the second one accumulates onto what that has reduced."""
    loss_of(module, batch).backward()  # type: ignore[no-untyped-call]
    return loss_of(module, batch_of(9))


def two_losses(module: nn.Module, batch: Batch) -> Tensor:
    errors = (module(batch["x"]) - batch["y"]).square()
    errors[:, 2].sum().backward(retain_graph=True)
    return errors[:, :2].sum()  # type: ignore[no-any-return]


def penalized(module: nn.Module, batch: Batch) -> Tensor:
    x = batch["x"].clone().requires_grad_()
    out = module(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return (out - batch["y"]).square().mean() + slope.square().sum()  # type: ignore[no-any-return]


# -- programs that reduce by themselves -------------------------------------------------------------------------------


def mean_of(gradient: Tensor) -> Tensor:
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


def mean_of_copy(gradient: Tensor, group: Any = None) -> Tensor:
    total = gradient.clone()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)


def mean_of_gathered(gradient: Tensor) -> Tensor:
    parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, gradient.contiguous())
    return torch.stack(parts).mean(0)


def hooked(hook: Callable[[Tensor], Any], net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.register_hook(hook)  # type: ignore[no-untyped-call]


def on_two_groups(net: nn.Module) -> None:
    """Reduce on a second group, behind a hook that does not communicate."""
    hooked(lambda gradient: gradient.clamp(-10, 10), net)
    hooked(partial(mean_of_copy, group=dist.new_group()), net)


def asynchronous(net: nn.Module) -> Around:
    """Reduce all gradients at once; the results replace ``.grad`` after the pass."""
    started: list[tuple[nn.Parameter, Tensor, Any]] = []

    def start(parameter: nn.Parameter, gradient: Tensor) -> None:
        total = gradient.clone()
        started.append((parameter, total, dist.all_reduce(total, async_op=True)))

    for parameter in net.parameters():
        parameter.register_hook(partial(start, parameter))  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def finish() -> Iterator[None]:
        yield
        for parameter, total, work in started:
            work.wait()
            parameter.grad = total / dist.get_world_size()
        started.clear()

    return finish


def after_accumulation(net: nn.Module) -> Around:
    """Reduce as Horovod's optimizer does it today."""
    started: list[Any] = []
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda parameter: started.append(dist.all_reduce(parameter.grad, async_op=True))
        )

    @contextlib.contextmanager
    def finish() -> Iterator[None]:
        yield
        for work in started:
            work.wait()
        started.clear()

    return finish


def _accumulating_nodes(net: nn.Module) -> list[tuple[nn.Parameter, Any]]:
    pairs = [(parameter, parameter.expand_as(parameter).grad_fn) for parameter in net.parameters()]
    return [(parameter, view.next_functions[0][0]) for parameter, view in pairs if view is not None]


def on_the_node(net: nn.Module) -> Around:
    """Reduce as Horovod's optimizer did it before: behind the node that accumulates."""
    nodes = _accumulating_nodes(net)
    for parameter, node in nodes:
        node.register_hook(lambda *_, parameter=parameter: dist.all_reduce(parameter.grad))
    return lambda: contextlib.nullcontext(nodes)  # which keeps them


def before_the_node(net: nn.Module) -> Around:
    """Reduce before the node that accumulates, behind all hooks of the tensor."""
    nodes = _accumulating_nodes(net)
    for _, node in nodes:
        node.register_prehook(lambda gradients: (mean_of_copy(gradients[0]),))
    return lambda: contextlib.nullcontext(nodes)


def by_hand(net: nn.Module) -> Around:
    @contextlib.contextmanager
    def reduce() -> Iterator[None]:
        yield
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)

    return reduce


def behind(hook: Callable[[Tensor], Tensor], module: nn.Module) -> None:
    """Have ``hook`` change the gradient of what this module returns."""

    def register(module: nn.Module, args: Any, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(hook)  # type: ignore[no-untyped-call]

    module.register_forward_hook(register)


@dataclass
class Way:
    """One way to train: the module, the loss, and what the program sets up to reduce gradients."""

    module: Callable[[], nn.Module] = make_model
    loss_of: LossOf = loss_of
    set_up: Callable[[nn.Module], Around | None] = lambda net: None


WAYS = {
    "static graph": Way(lambda: ddp(static_graph=True)),
    "static graph, bucket view": Way(lambda: ddp(static_graph=True, gradient_as_bucket_view=True)),
    "unused parameters": Way(lambda: ddp(find_unused_parameters=True)),
    "reentrant checkpoint": Way(lambda: ddp(Checkpointed)),
    "reentrant checkpoint, static graph": Way(lambda: ddp(Checkpointed, static_graph=True)),
    "two passes": Way(ddp, two_passes),
    "two passes, bucket view": Way(lambda: ddp(gradient_as_bucket_view=True), two_passes),
    "two losses of one graph": Way(ddp, two_losses),
    "gradient penalty": Way(ddp, penalized),
    "DDP inside, bucket view": Way(lambda: Outer(ddp(gradient_as_bucket_view=True))),
    "DDP inside, two passes": Way(lambda: Outer(ddp()), two_passes),
    "hooks": Way(set_up=partial(hooked, mean_of)),
    "hooks on copies": Way(set_up=partial(hooked, mean_of_copy)),
    "hooks that gather": Way(set_up=partial(hooked, mean_of_gathered)),
    "hooks on two groups": Way(set_up=on_two_groups),
    "asynchronous hooks": Way(set_up=asynchronous),
    "hooks after accumulation": Way(set_up=after_accumulation),
    "hooks of the accumulating node": Way(set_up=on_the_node),
    "hooks before the accumulating node": Way(set_up=before_the_node),
    "by hand after the pass": Way(set_up=by_hand),
    "hook between layers": Way(set_up=lambda net: behind(mean_of_copy, net.get_submodule("first"))),
    "hook behind the model": Way(set_up=lambda net: behind(mean_of_copy, net)),
    "hooks, inside of DDP": Way(ddp, set_up=lambda module: hooked(mean_of, module)),
    "hook between layers, inside of DDP": Way(
        ddp, set_up=lambda module: behind(mean_of_copy, module.get_submodule("module.first"))
    ),
    "hook behind the model, inside of DDP": Way(
        ddp, set_up=lambda module: behind(mean_of_copy, module.get_submodule("module"))
    ),
}


def run(
    name: str, dirpath: str, bad_step: int, *, bad_micro: int = 0, micro_batches: int = 1, set_up_late: bool = False
) -> list[CaptureVerdict]:
    """Train three steps, with a NaN on rank 1 in one of them; ``set_up_late``: after the capture was made."""
    way = WAYS[name]
    module = way.module()
    plant = planted({(bad_step, 1, bad_micro): torch.nan}, "y")
    around = [] if set_up_late else [way.set_up(module)]

    def batch_of(step: int, micro: int) -> Batch:
        if not around:  # the capture has been made
            around.append(way.set_up(module))
        return plant(step, micro)

    return captured(
        dirpath,
        module,
        micro_batches=micro_batches,
        batch_of=batch_of,
        loss_of=way.loss_of,
        around=lambda: (around[0] or contextlib.nullcontext)(),
        on_nonfinite="skip",
    ).verdicts


# -- other cases ------------------------------------------------------------------------------------------------------


def outside(dirpath: str) -> CaptureVerdict:
    """Run ``backward()`` behind the with block."""
    module = ddp()
    batch = planted({(0, 1, 0): torch.nan})(0, 0)
    with NaNCapture(dirpath, model=module) as capture:
        with capture.micro_batch(batch):
            loss = loss_of(module, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return capture.check()


def given_the_inner_module(dirpath: str) -> CaptureVerdict:
    """Give the capture what is inside of DistributedDataParallel, which reduces after each micro-batch."""
    module = ddp(gradient_as_bucket_view=True)
    with NaNCapture(dirpath, model=module.module) as capture:
        for micro in range(2):
            with capture.micro_batch(planted({(0, 1, 0): torch.nan})(0, micro)) as running:
                loss_of(module, running.batch).backward()  # type: ignore[no-untyped-call]
        return capture.check()


def steps_in_hooks(dirpath: str) -> CaptureVerdict:
    """Train with hooks that apply each gradient as soon as it is there, and take it away."""
    module = make_model()

    def apply(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(apply)  # type: ignore[no-untyped-call]
    return captured(dirpath, module, 1, batch_of=planted({(0, 1, 0): torch.nan})).verdicts[0]


def with_hooks(dirpath: str, case: str) -> CaptureVerdict:
    """Train one step with a NaN that hooks mend, make, or share.

    ``case``: "mended" before it is reduced; "made" by a hook on rank 1; "on both" ranks;
    "shared" by ranks 1 and 2 of three behind the model.
    """
    module = make_model()
    bad_ranks = {"mended": (1,), "on both": (0, 1), "shared": (2,)}.get(case, ())
    if case == "mended":
        hooked(lambda gradient: mean_of(gradient.nan_to_num()), module)
    elif case == "made":
        if rank() == 1:
            module.last.bias.register_hook(lambda gradient: (gradient - gradient) / 0.0)  # type: ignore[no-untyped-call]
    elif case == "shared":
        groups = [dist.new_group([0]), dist.new_group([1, 2])]
        behind(partial(mean_of_copy, group=groups[rank() > 0]), module)
    else:
        hooked(mean_of, module)
    return captured(
        dirpath,
        DistributedDataParallel(module) if case == "made" else module,
        1,
        batch_of=planted({(0, member, 0): torch.nan for member in bad_ranks}, "y"),
    ).verdicts[0]


def gradients_kept(reduces: bool) -> int | None:
    """Return how many gradients are kept of a pass with a NaN in each; None where they may not be this rank's own."""
    module = make_model()
    hooked(mean_of if reduces else torch.clone, module)
    watch = GradientWatch(module)
    watch.begin()
    (loss_of(module, batch_of(0)) * torch.nan).backward()  # type: ignore[no-untyped-call]
    watch.end()
    watch.close()
    kept = watch.arrivals[-1].own_gradients()
    return None if kept is None else len(kept)
