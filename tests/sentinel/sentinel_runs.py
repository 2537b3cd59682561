"""Functions that run on the ranks of the sentinel's tests: a small transformer in the shared loop, with faults."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpstats import ConfigError, InvalidStats, Sentinel, SentinelAlarm
from ddpstats._observe.gradients import unwrap
from ddpstats.sentinel import SentinelFinding, SentinelVerdict, peer_replay, sentinel as sentinel_module
from ddpstats.sentinel.verdict import Detector, Exam
from ddpstats.testing import BitFlip, RankPool, count_collectives, inject_bit_flips
from tests import training


class Block(nn.Module):
    """Attention and a feed-forward part, each after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        mixed = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1) @ v
        x = x + self.dropout(self.out(mixed))
        out: Tensor = x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm2(x)))))
        return out


class Transformer(nn.Module):
    """A classifier of tokens, with a batch norm in it, whose running statistics are each rank's own."""

    def __init__(self, width: int = 16, blocks: int = 2, words: int = 11) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)
        self.batch_norm = nn.BatchNorm1d(width)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.batch_norm(x.flatten(0, 1)).reshape(x.shape) * self.get_buffer("scale")
        logits: Tensor = self.head(self.norm(x))
        return logits


class Holder(nn.Module):
    """A module with DistributedDataParallel inside, as trainers have it; its own forward is never called."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


def step_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss, with noise on it from torch's generator."""
    logits = model(batch["tokens"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()) * (1 + 0.1 * torch.rand(()))


def batch_of(step: int, micro: int = 0, owner: int | None = None) -> dict[str, Tensor]:
    """Return the batch of this rank, or of ``owner``."""
    owner = training.rank() if owner is None else owner
    generator = torch.Generator().manual_seed(10_000 * step + 100 * owner + micro)
    tokens = torch.randint(11, (3, 8), generator=generator)
    return {"tokens": tokens, "targets": tokens.roll(1, -1)}


def counted_batch_of(step: int, micro: int) -> dict[str, Any]:
    return {**batch_of(step, micro), "count": torch.zeros(())}


def unsendable_batch_of(step: int, micro: int) -> dict[str, Any]:
    return {**batch_of(step, micro), "thing": object()}


class ZeroInPlace(torch.optim.SGD):
    """An optimizer that keeps the gradients' tensors."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=False)


class NeverZero(torch.optim.SGD):
    """An optimizer of a loop that forgets ``zero_grad()``."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass


@dataclass
class Plan:
    """Settings of one training run.

    Attributes:
        options: those of the Sentinel.
        wrap: "ddp", "view" (gradients are views of buckets), "static" (graph), "alone" (no DDP), "inside" (the sentinel
            gets the module in DDP), "holder" (it gets a module around DDP), or "eval" (each rank has other running
            statistics, on which the loss depends).
        ddp: further arguments of DistributedDataParallel.
        prepare: is called with the model before that is wrapped.
        idle_rank: a rank that has zeros in place of gradients, and no micro_batch().
        window_steps: for how many steps matmuls are checked from step 1 on.
        patience: the number of alarms after which training ends.
    """

    steps: int = 8
    options: dict[str, Any] = field(default_factory=dict)
    flips: Sequence[BitFlip] = ()
    micro_batches: int = 1
    wrap: str = "ddp"
    ddp: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[nn.Module], Any] = nn.Module.train
    lr: float = 0.05
    has_micro_batch: bool = True
    idle_rank: int | None = None
    window_steps: int = 0
    optimizer: type[torch.optim.SGD] = torch.optim.SGD
    after_backward: Callable[[nn.Module, int], None] | None = None
    patience: int = 1
    step_fn: Callable[[nn.Module, Any], Tensor] = step_fn
    batch_of: Callable[[int, int], Any] = batch_of


def wrapped(wrap: str, prepare: Callable[[nn.Module], Any] = nn.Module.train, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Transformer()
    prepare(model)
    if wrap == "alone" or not dist.is_initialized():
        return model
    parallel = DistributedDataParallel(
        model.train(wrap != "eval"),
        gradient_as_bucket_view=wrap == "view",
        static_graph=wrap == "static",
        **{"broadcast_buffers": wrap != "eval", **options},
    )
    if wrap == "eval":  # only now: DDP makes all buffers equal when it is made
        model.batch_norm.get_buffer("running_mean").add_(dist.get_rank() * torch.arange(16.0))
    return parallel


@dataclass
class Outcome:
    """The end of a run on one rank.

    Attributes:
        alarms: step, layers, culprit ranks and text of each `SentinelAlarm`.
        error: the `ConfigError` that ended the run.
        lines: what was logged; ``errors``: those of level ERROR.
        collectives: how many each ``Sentinel.step()`` took.
        applied: how many flips were applied.
    """

    verdicts: list[SentinelVerdict] = field(default_factory=list)
    alarms: list[tuple[int, tuple[str, ...], tuple[int, ...], str]] = field(default_factory=list)
    error: str = ""
    lines: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    collectives: list[int] = field(default_factory=list)
    applied: int = 0


class _Stop(Exception):
    """Training ends here."""


def train(plan: Plan) -> Outcome:
    """Train as planned. Every rank must call."""
    outcome = Outcome()
    model = wrapped(plan.wrap, plan.prepare, **plan.ddp)
    watched = {"inside": unwrap(model), "holder": Holder(model)}.get(plan.wrap, model)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    with contextlib.ExitStack() as stack, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome.lines = stack.enter_context(training.logged(logging.INFO))
        outcome.errors = stack.enter_context(training.logged(logging.ERROR))
        sentinel = stack.enter_context(Sentinel(watched, **plan.options))
        faults = stack.enter_context(inject_bit_flips(model, plan.flips))

        def after_backward(step: int) -> None:
            if plan.after_backward is not None:
                plan.after_backward(inner, step)

        def judge(step: int) -> bool:
            alarms = len(outcome.alarms)
            with count_collectives() as seen:
                try:
                    outcome.verdicts.append(sentinel.step())
                except SentinelAlarm as alarm:
                    outcome.alarms.append((alarm.step, alarm.layers, alarm.culprit_ranks, str(alarm)))
            outcome.collectives.append(seen.total)
            if len(outcome.alarms) >= plan.patience:
                raise _Stop
            return len(outcome.alarms) == alarms

        def after_step(step: int) -> None:
            faults.step()
            if step == 0 and plan.window_steps:
                sentinel.check_matmuls(plan.window_steps)

        is_idle = plan.idle_rank == training.rank()
        hooks = training.Hooks(after_backward=after_backward, judge=judge, after_step=after_step)
        if plan.has_micro_batch and not is_idle:
            hooks.micro_batch = sentinel.micro_batch
        try:
            training.train(
                model,
                plan.steps,
                plan.micro_batches,
                batch_of=plan.batch_of,
                loss_of=_zero_loss if is_idle else plan.step_fn,
                optimizer=plan.optimizer(model.parameters(), lr=plan.lr),
                hooks=hooks,
            )
        except _Stop:
            pass
        except ConfigError as error:
            outcome.error = str(error)
    outcome.applied = len(faults.applied)
    outcome.warnings = [str(warning.message) for warning in caught]
    outcome.parameters = [parameter.detach().clone() for parameter in model.parameters()]
    return outcome


def silent_fault(mode: int) -> tuple[str, list[str], list[str]]:
    """Run the example of the documented scenario; return its end, all lines, and the warnings and errors among them."""
    from examples import silent_fault as example

    with training.logged(logging.INFO) as lines, training.logged() as problems:
        return example.train(mode), lines, problems


def train_without_group(plan: Plan) -> Outcome:
    """Train in a process that has compiled nothing, other than that of the tests."""
    dist.destroy_process_group()
    return train(plan)


def train_with_windows_of_other_lengths(plan: Plan) -> Outcome:
    """Check matmuls for one step on rank 0, and for many on the other ranks."""
    return train(replace(plan, window_steps=1 + 49 * training.rank()))


def _zero_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return 0 * step_fn(model, batch)


class LargeParameter(Detector):
    """A detector of the test's own, in one class, with options: a parameter of some rank is beyond ``limit``."""

    def __init__(self, setup: Any, limit: float) -> None:
        self.parameters, self.limit = dict(unwrap(setup.model).named_parameters()), limit
        self.same_on_all_ranks = {"limit": limit, "mode": "its own"}

    def suspicious(self, step: int) -> str | None:
        is_large = {name: bool((parameter.abs() > self.limit).any()) for name, parameter in self.parameters.items()}
        return next((name for name in is_large if is_large[name]), None)

    def findings(self, exam: Exam) -> list[SentinelFinding]:
        names = {rank: name for rank, name in exam.evidence.items() if name}
        if not names:
            return []
        return [SentinelFinding("large parameter", tuple(names), min(names.values()), f"on {sorted(names)}")]


def train_with_another_detector(plan: Plan, limit: float) -> Outcome:
    sentinel_module.DETECTORS.append(lambda setup: LargeParameter(setup, limit))
    try:
        return train(plan)
    finally:
        sentinel_module.DETECTORS.pop()


def large_on_rank_1(module: nn.Module, step: int) -> None:
    if step == 2 and dist.get_rank() == 1:
        with torch.no_grad():
            module.get_parameter("head.bias")[3] = 100.0


# -- in the test's own process ----------------------------------------------------------------------------------------


def trained(pool: RankPool, plan: Plan) -> list[Outcome]:
    outcomes: list[Outcome] = pool.run(train, plan).values()
    return outcomes


def alarm_of(outcomes: list[Outcome]) -> tuple[int, tuple[str, ...], tuple[int, ...], str]:
    """Return the only alarm, which every rank must have raised in the same words."""
    alarms = outcomes[0].alarms
    assert len(alarms) == 1
    assert all(outcome.alarms == alarms for outcome in outcomes)
    return alarms[0]


def assert_quiet(outcomes: list[Outcome], steps: int) -> None:
    for outcome in outcomes:
        assert [verdict.ok for verdict in outcome.verdicts] == [True] * steps
        assert outcome.error == ""


def hooks_of(module: nn.Module) -> int:
    """Count forward hooks of all modules, and hooks of parameters."""
    count = sum(len(child._forward_hooks) + len(child._forward_pre_hooks) for child in module.modules())
    for parameter in module.parameters():
        count += len(parameter._post_accumulate_grad_hooks or ()) + len(parameter._backward_hooks or ())
    return count


# -- what goes wrong, and steps that cannot be repeated ----------------------------------------------------------------


def noise_on_rank_2(module: nn.Module, step: int) -> None:
    """Draw noise on each rank after the reduce, as espnet's grad_noise does."""
    if step == 2 and dist.get_rank() == 2:
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.grad += 1e-3 * torch.randn_like(parameter.grad)


def spoilt_step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Overflow in the batches of step 2 of rank 1."""
    loss = step_fn(model, batch)
    if torch.equal(batch["tokens"], batch_of(2, owner=1)["tokens"]):
        loss = loss * 1e30
    return loss


def wrong_on_rank_2_when_repeating(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return a wrong loss on rank 2 for every batch but its own."""
    loss = step_fn(model, batch)
    is_own = any(torch.equal(batch["tokens"], batch_of(step, owner=2)["tokens"]) for step in range(20))
    return loss if is_own or dist.get_rank() != 2 else loss * 1.5


def another_step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return 2 * step_fn(model, batch)


def raising_step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    if dist.get_rank() == 1:
        raise ValueError("not on this rank")
    return step_fn(model, batch)


def communicating_step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = step_fn(model, batch)
    dist.all_reduce(loss.detach())
    return loss


def float_step(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return float(step_fn(model, batch).detach())


def detached_step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return step_fn(model, batch).detach()


def changing_step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = step_fn(model, batch)
    batch["count"].add_(1)
    return loss * batch["count"]


def autocast_step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return step_fn(model, batch)


class _Noise:
    state = 0


def noisy_step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return another result each time, in the last bits, as atomic additions make it."""
    _Noise.state = (_Noise.state * 48_271 + 11) % 2_147_483_647
    return step_fn(model, batch) * (1 + 1e-6 * (_Noise.state % 1000) / 1000)


def with_room_for_one_batch(flips: Sequence[BitFlip]) -> list[int]:
    """Return the steps at which something was found."""
    room, peer_replay.MOST_BYTES = peer_replay.MOST_BYTES, 1
    try:
        options = {"mode": 1, "replay_every_steps": 2, "replay_fn": step_fn}
        outcome = train(Plan(options=options, flips=flips, steps=8, lr=0.0))
    finally:
        peer_replay.MOST_BYTES = room
    return [verdict.step for verdict in outcome.verdicts if not verdict.ok]


# -- what goes wrong on one rank --------------------------------------------------------------------------------------


def in_a_subgroup() -> str:
    """Return the error of a sentinel on all ranks for DDP on ranks 0 and 1. It leaves nothing on the model."""
    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return ""
    model = DistributedDataParallel(Transformer(), process_group=group)
    before = hooks_of(model)
    try:
        Sentinel(model, mode=2)
    except ConfigError as error:
        assert hooks_of(model) == before
        with Sentinel(model, mode=2, group=group) as sentinel:
            assert sentinel.step().ok
        return str(error)
    return "none"


def bad_step_on_rank_1() -> str:
    with Sentinel(wrapped("ddp"), mode=2) as sentinel:
        sentinel.step(step=0)
        try:
            sentinel.step(step=3.0 if dist.get_rank() == 1 else 1)  # type: ignore[arg-type]
        except InvalidStats as error:
            assert sentinel.step(step=2).ok
            return str(error)
    return "none"


class _Lazy(dict[str, Tensor]):
    """A batch that raises when it is read."""

    def items(self) -> Any:
        raise KeyError("not loaded")


def unreadable_batch_on_rank_1(options: dict[str, Any]) -> str:
    model, outcome = wrapped("ddp"), ""
    with Sentinel(model, **options) as sentinel:
        for step in range(3):
            batch: Any = batch_of(step)
            if step == 1 and dist.get_rank() == 1:
                try:
                    with sentinel.micro_batch(_Lazy(batch)):
                        raise AssertionError
                except KeyError:
                    outcome = "KeyError, then "
            with sentinel.micro_batch(batch):
                step_fn(model, batch).backward()  # type: ignore[no-untyped-call]
            assert sentinel.step().ok
            model.zero_grad()
    return f"{outcome}fine"


def one_backward_raises(options: dict[str, Any]) -> list[bool]:
    """Leave out the first micro-batch of step 1 on rank 2, which runs out of memory."""
    model = wrapped("ddp")
    verdicts = []
    with Sentinel(model, **options) as sentinel:
        for step in range(4):
            for micro in range(2):
                batch = batch_of(step, micro)
                with (
                    training.syncing(model, micro == 1),
                    contextlib.suppress(MemoryError),
                    sentinel.micro_batch(batch),
                ):
                    loss = step_fn(model, batch)
                    if (step, micro, dist.get_rank()) == (1, 0, 2):
                        loss.register_hook(_no_memory)  # type: ignore[no-untyped-call]
                    loss.backward()  # type: ignore[no-untyped-call]
            verdicts.append(sentinel.step().ok)
            model.zero_grad()
    return verdicts


def _no_memory(gradient: Tensor) -> None:
    raise MemoryError("in the middle of the backward pass")


class Trainer:
    """A trainer that holds the sentinel, which holds its method."""

    def __init__(self, module: nn.Module) -> None:
        self.sentinel = Sentinel(module, mode=2, replay_every_steps=10, replay_fn=self.loss)

    def loss(self, module: nn.Module, batch: Any) -> Tensor:
        return step_fn(module, batch)
