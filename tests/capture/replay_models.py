"""Models and steps that the tests of replay name on the command line: each goes wrong in its own way."""

from __future__ import annotations

import ctypes
import math
import os
import random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

CLASSES = 20


class Toy(nn.Module):
    """Batch normalization for buffers, dropout for random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.inner(x))
        return logits


class Compiled(nn.Module):
    """As torch.compile names what it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = Toy()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self._orig_mod(x)
        return logits


def per_class_step(model: nn.Module, batch: Any) -> Tensor:
    """A sum per class, by how often the class occurs: which may be never."""
    logits, y = model(batch["x"]), batch["y"]
    total = torch.zeros(())
    for c in range(CLASSES):
        of_class = y == c
        summed = nn.functional.binary_cross_entropy_with_logits(
            logits[:, c], of_class.to(logits.dtype), reduction="sum"
        )
        total = total + summed / torch.count_nonzero(of_class)
    return total


def mean_step(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch["x"]).square().mean()
    return loss


def random_step(model: nn.Module, batch: Any) -> Tensor:
    """Draws from python's and torch's generators."""
    return mean_step(model, batch) * (random.random() + torch.rand(()))


def flaky_step(model: nn.Module, batch: Any) -> Tensor:
    """Another value each time, as from a race."""
    flaky_calls.append(1)
    return mean_step(model, batch) * (math.nan if len(flaky_calls) % 2 else 1.0)


flaky_calls: list[int] = []


def distributed_step(model: nn.Module, batch: Any) -> Tensor:
    """Run collectives of all kinds on rank 1 of 4, and check that the others hold what this rank holds."""
    world = dist.group.WORLD
    assert world is not None
    assert (dist.get_rank(), dist.get_world_size(), os.environ["RANK"]) == (1, 4, "1")
    loss = mean_step(model, batch)
    for op, factor in ((dist.ReduceOp.SUM, 4), (dist.ReduceOp.AVG, 1), (dist.ReduceOp.MIN, 1), (dist.ReduceOp.MAX, 1)):
        total = loss.detach().clone()
        work = dist.all_reduce(total, op=op, async_op=True)
        assert work is not None
        work.wait()
        assert torch.equal(total, factor * loss.detach())
    numbers, part = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.zeros(1)
    dist.reduce_scatter(part, list(numbers.chunk(4)))
    assert part.item() == 4 * 2
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(part.zero_(), numbers)
    assert part.item() == 4 * 2
    parts = [torch.zeros(1) for _ in range(4)]
    dist.all_to_all(parts, list(numbers.chunk(4)))
    assert torch.cat(parts).tolist() == [2, 2, 2, 2]
    uneven = torch.zeros(8)
    dist.all_to_all_single(uneven, numbers, [2, 2, 2, 2], [0, 2, 1, 1])
    assert uneven.tolist() == [1, 2, 1, 2, 1, 2, 1, 2]
    gathered = [torch.zeros(4) for _ in range(4)]
    dist.all_gather(gathered, numbers)
    dist.broadcast(numbers, 0)
    assert all(torch.equal(tensor, numbers) for tensor in gathered)
    objects: list[object] = [None] * 4
    dist.all_gather_object(objects, {"a": 1})
    assert objects == [{"a": 1}] * 4
    assert torch.equal(functional.all_reduce(numbers, "sum", world) + 0, 4 * numbers)
    pair = dist.new_group([0, 1])
    dist.all_reduce(numbers, group=pair)
    assert (numbers[0].item(), dist.get_rank(pair), dist.get_world_size(pair)) == (2, 1, 2)
    assert dist.new_group([2, 3]) == dist.GroupMember.NON_GROUP_MEMBER
    return loss


def sending_step(model: nn.Module, batch: Any) -> Tensor:
    dist.send(torch.ones(1), 0)
    return mean_step(model, batch)


def raising_step(model: nn.Module, batch: Any) -> Tensor:
    if bool(batch["x"].isnan().any()):
        raise ZeroDivisionError("no class")
    raise KeyError("another")


def exiting_step(model: nn.Module, batch: Any) -> Tensor:
    raise SystemExit(0)


def dict_step(model: nn.Module, batch: Any) -> Any:
    return {"loss": mean_step(model, batch)}


def tuple_step(model: nn.Module, batch: Any) -> Any:
    return mean_step(model, batch), {}


def printing_step(model: nn.Module, batch: Any) -> Tensor:
    """Print through Python, past its stdout by number, and in C's buffer."""
    print("by print")
    os.write(1, b"by number\n")
    ctypes.CDLL(None).printf(b"in C\n")
    return mean_step(model, batch)


def autocast_step(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(batch["x"])
    assert logits.dtype in (torch.bfloat16, torch.float32, torch.float64)
    return logits.float().square().mean() if logits.dtype == torch.bfloat16 else logits.square().mean()  # type: ignore[no-any-return]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def no_module() -> Any:
    return "a module"


def failing_factory() -> nn.Module:
    raise FileNotFoundError("the configuration is not here")


# -- what --bisect has to find ----------------------------------------------------------------------------------------


class LogZero(Small):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(self.layer(x).relu() * 0)


class SqrtOfZero(Small):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(self.layer(x) * 0)


class WhereTrap(Small):
    """Finite forward; the branch that is not taken has no finite gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).relu() * 0
        return torch.where(y > 0, torch.log(y), torch.zeros_like(y))


class Attention(Small):
    """The first row of the mask may be full."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.layer(x) @ self.layer(x).T
        mask = torch.zeros_like(scores, dtype=torch.bool)
        mask[0, 1:] = True  # legal
        mask[1] = bool(x[0, 0] > 100)
        weights = torch.softmax(scores.masked_fill(mask, -math.inf), -1)
        out: Tensor = weights @ self.layer(x)
        return out


class MaskedThenLog(Small):
    """A legal mask first, and a logarithm of zero after it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.layer(x)[:2] @ self.layer(x)[:2].T
        weights = torch.softmax(scores + self.mask, -1)
        return torch.log(weights.sum() - weights.sum())


class HalfMatmul(Small):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x).half()
        return ((y * 0 + 60000) @ (y.T * 0 + 60000)).float()


class Preallocated(Small):
    """A finite row over the non-finite one of a buffer that is used again, and a division by zero in another."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        out = y.new_zeros(2, 3)
        out[0] = torch.log(torch.zeros(3))
        out[0] = y[0]
        out[1] = y[1] / (y[1].detach() * 0)
        return out


def sum_step(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch["x"]).sum()
    return loss


def outside_step(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch["x"]).sum()
    return loss / (loss.detach() * 0)


def numpy_step(model: nn.Module, batch: Any) -> Tensor:
    import numpy

    loss: Tensor = model(batch["x"]).sum()
    return loss * torch.from_numpy(numpy.array([math.nan], dtype="float32"))


def checkpointed_step(model: nn.Module, batch: Any) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    out: Tensor = checkpoint(model, batch["x"], use_reentrant=False)
    return out.sum()


class Reentrant(Small):
    """The second half is run again in the backward pass, and goes wrong as ``spoil`` says, with a layer after it."""

    spoil = staticmethod(torch.relu)

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        out: Tensor = checkpoint(self.second_half, self.layer(x), use_reentrant=True)
        return out

    def second_half(self, y: Tensor) -> Tensor:
        y = self.spoil(y * 2)
        return y.sigmoid() * 3


class ReentrantForward(Reentrant):
    @staticmethod
    def spoil(y: Tensor) -> Tensor:
        return torch.log(y.relu() * 0) * 0


class ReentrantAgain(Reentrant):
    @staticmethod
    def spoil(y: Tensor) -> Tensor:
        return torch.log(y.relu() * 0) * 0 if torch.is_grad_enabled() else y


class ReentrantBackward(Reentrant):
    @staticmethod
    def spoil(y: Tensor) -> Tensor:
        return torch.sqrt(y * 0)


class Pair(NamedTuple):
    x: Tensor
    y: int


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.ModuleList([LogZero()])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.deep[0](x)
        return out


class Float8Cast(Small):
    """A weight that goes through float8, and a NaN that comes after it."""

    def forward(self, x: Tensor) -> Tensor:
        narrow = self.layer.weight.to(torch.float8_e4m3fn).to(x.dtype)
        return torch.log(nn.functional.linear(x, narrow).relu() * 0)


class HalfCast(Small):
    """Fine as it is, and not with a scale of a million."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x).half().float()
        return out


class TimesInfinity(Small):
    """The mask that many write: zero times infinity is no zero."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out + torch.zeros(3) * -math.inf


class MaskArrives(Small):
    """Nothing is left after the mask."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return torch.logsumexp(y.masked_fill(y == y, -math.inf), 1)


class Replicated(nn.Module):
    """A part of the module is a DistributedDataParallel."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = DistributedDataParallel(Toy()) if dist.is_initialized() else nn.ModuleDict({"module": Toy()})

    def forward(self, x: Tensor) -> Tensor:
        inner: Any = self.inner
        out: Tensor = (inner if isinstance(inner, DistributedDataParallel) else inner["module"])(x)
        return out


class Synchronized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return out


def empty_mean_step(model: nn.Module, batch: Any) -> Tensor:
    """A loss that is NaN and gradients that are not: nothing has a part in it."""
    loss: Tensor = model(batch["x"]).sum() * 0 + torch.zeros(0).mean()
    return loss
