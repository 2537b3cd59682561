"""What runs on the ranks of the sentinel's tests: a training loop as a user would write it, with faults injected."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpstats import ConfigError, InvalidStats, Sentinel, SentinelAlarm
from ddpstats.sentinel import SentinelVerdict
from ddpstats.testing import BitFlip, RankPool, count_collectives, inject_bit_flips


class Block(nn.Module):
    """Of a small transformer: attention and a feed-forward part, each after a norm."""

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
    """Classifies tokens; with a batch norm in it, whose running statistics are each rank's own."""

    def __init__(self, width: int = 16, blocks: int = 2, words: int = 11) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)
        self.batch_norm = nn.BatchNorm1d(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.batch_norm(x.flatten(0, 1)).reshape(x.shape)
        logits: Tensor = self.head(self.norm(x))
        return logits


def step_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss, with noise on it from torch's generator."""
    logits = model(batch["tokens"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()) * (1 + 0.1 * torch.rand(()))


def batch_of(step: int, rank: int, micro: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + micro)
    tokens = torch.randint(11, (3, 8), generator=generator)
    return {"tokens": tokens, "targets": tokens.roll(1, -1)}


@dataclass
class Plan:
    """How to train. ``options``: of the Sentinel; None: without one."""

    steps: int = 8
    options: dict[str, Any] | None = field(default_factory=dict)
    flips: Sequence[BitFlip] = ()
    micro_batches: int = 1
    wrap: str = "ddp"  # or "view", "static", "alone"
    lr: float = 0.05
    keeps_context: bool = True  # micro_batch() around each
    zero: bool = False  # zero_grad(set_to_none=False)
    after_backward: Callable[[nn.Module, int], None] | None = None
    after_step: Callable[[nn.Module, int], None] | None = None
    patience: int = 1  # alarms to go on after
    step_fn: Callable[[nn.Module, Any], Tensor] = step_fn


def wrapped(wrap: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = Transformer()
    if wrap == "alone" or not dist.is_initialized():
        return model
    return DistributedDataParallel(model, gradient_as_bucket_view=wrap == "view", static_graph=wrap == "static")


@dataclass
class Outcome:
    """Of one rank. ``lines``: (level, text) as logged; ``alarms``: (step, layers, culprit ranks, text) as raised."""

    verdicts: list[SentinelVerdict] = field(default_factory=list)
    alarms: list[tuple[int, tuple[str, ...], tuple[int, ...], str]] = field(default_factory=list)
    lines: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    random: Tensor = field(default_factory=lambda: torch.empty(0))
    collectives: list[int] = field(default_factory=list)
    applied: int = 0
    hooks: int = 0
    error: str = ""


class _Lines(logging.Handler):
    def __init__(self, lines: list[tuple[str, str]]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append((record.levelname, record.getMessage()))


@contextlib.contextmanager
def logged(lines: list[tuple[str, str]]) -> Iterator[None]:
    logger, handler = logging.getLogger("ddpstats"), _Lines(lines)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def train(plan: Plan) -> Outcome:
    """Every rank must call."""
    outcome = Outcome()
    model = wrapped(plan.wrap)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(inner, nn.Module)
    optimizer = torch.optim.SGD(model.parameters(), lr=plan.lr)
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(100 + rank)
    before = hooks_of(inner)
    with contextlib.ExitStack() as stack, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stack.enter_context(logged(outcome.lines))
        sentinel = None if plan.options is None else stack.enter_context(Sentinel(model, **plan.options))
        faults = stack.enter_context(inject_bit_flips(model, plan.flips))
        for step in range(plan.steps):
            loss = _backward(plan, model, sentinel, step, rank)
            outcome.losses.append(loss)
            if plan.after_backward is not None:
                plan.after_backward(inner, step)
            with count_collectives() as seen:
                try:
                    if sentinel is not None:
                        outcome.verdicts.append(sentinel.step())
                except SentinelAlarm as alarm:
                    outcome.alarms.append((alarm.step, alarm.layers, alarm.culprit_ranks, str(alarm)))
                    plan.patience -= 1
            outcome.collectives.append(seen.total)
            if len(outcome.alarms) and plan.patience <= 0:
                break
            if not outcome.alarms or outcome.alarms[-1][0] != step:  # else the step is skipped
                optimizer.step()
            optimizer.zero_grad(set_to_none=not plan.zero)
            if plan.after_step is not None:
                plan.after_step(inner, step)
            faults.step()
        outcome.applied = len(faults.applied)
    outcome.warnings = [str(one.message) for one in caught]
    outcome.parameters = [parameter.detach().clone() for parameter in model.parameters()]
    outcome.parameters += [buffer.detach().clone() for buffer in model.buffers()]
    outcome.random = torch.get_rng_state()
    outcome.hooks = hooks_of(inner) - before
    return outcome


def train_without_group(plan: Plan) -> Outcome:
    """In a process that has compiled nothing, other than that of the tests."""
    dist.destroy_process_group()
    return train(plan)


# -- in the test's own process ----------------------------------------------------------------------------------------


def trained(pool: RankPool, plan: Plan) -> list[Outcome]:
    outcomes: list[Outcome] = pool.run(train, plan).values()
    return outcomes


def alarm_of(outcomes: list[Outcome]) -> tuple[int, tuple[str, ...], tuple[int, ...], str]:
    """The one alarm, which every rank must have raised in the same words."""
    first = outcomes[0].alarms
    assert len(first) == 1
    assert all(one.alarms == first for one in outcomes)
    return first[0]


# -- on the ranks ------------------------------------------------------------------------------------------------------


def _backward(plan: Plan, model: nn.Module, sentinel: Sentinel | None, step: int, rank: int) -> float:
    total = 0.0
    for micro in range(plan.micro_batches):
        batch = batch_of(step, rank, micro)
        last = micro == plan.micro_batches - 1
        no_sync = isinstance(model, DistributedDataParallel) and not last
        with contextlib.ExitStack() as stack:
            if sentinel is not None and plan.keeps_context:
                stack.enter_context(sentinel.micro_batch(batch))
            if no_sync and isinstance(model, DistributedDataParallel):
                stack.enter_context(model.no_sync())
            loss = plan.step_fn(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
    return total


def hooks_of(module: nn.Module) -> int:
    """Forward hooks of all modules, and hooks of parameters."""
    count = sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in module.modules())
    for parameter in module.parameters():
        count += len(parameter._post_accumulate_grad_hooks or ()) + len(parameter._backward_hooks or ())
    return count


def noise_on_rank_3(module: nn.Module, step: int) -> None:
    """As espnet's grad_noise: drawn on each rank, after the reduce."""
    if step == 2 and dist.get_rank() == 3:
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.grad += 1e-3 * torch.randn_like(parameter.grad)


def spoilt_step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Overflows in the batches of step 2 of rank 1."""
    loss = step_fn(model, batch)
    if torch.equal(batch["tokens"], batch_of(2, 1)["tokens"]):
        loss = loss * 1e30
    return loss


def in_a_window(steps: int, flips: Sequence[BitFlip]) -> list[tuple[str, ...]]:
    """Five steps; before the second one the window is opened. The layers that found something, by step."""
    model = wrapped("ddp")
    found: list[tuple[str, ...]] = []
    with Sentinel(model, mode=1) as sentinel, inject_bit_flips(model, flips) as faults:
        for step in range(5):
            if step == 1:
                sentinel.check_matmuls(steps)
            step_fn(model, batch_of(step, dist.get_rank())).backward()  # type: ignore[no-untyped-call]
            found.append(sentinel.step().layers)
            model.zero_grad()
            faults.step()
    return found


def settings_differ(options: dict[str, Any]) -> str:
    """The error that the first step raises."""
    try:
        with Sentinel(wrapped("ddp"), **options) as sentinel:
            sentinel.step()
    except ConfigError as error:
        return str(error)
    return "none"


def settings_of_environment() -> tuple[list[str], int, tuple[float, float], tuple[float, float]]:
    """Warnings, mode and thresholds."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sentinel = Sentinel(wrapped("ddp"))
    settings = sentinel._options.settings
    sentinel.close()
    return [str(one.message) for one in caught], settings.mode, settings.upper, settings.sigma


# -- steps that cannot be repeated, or not exactly --------------------------------------------------------------------


def wrong_on_rank_2_when_repeating(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """On rank 2 wrong for every batch but its own, which is right."""
    loss = step_fn(model, batch)
    own = any(torch.equal(batch["tokens"], batch_of(step, 2)["tokens"]) for step in range(20))
    return loss if own or dist.get_rank() != 2 else loss * 1.5


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
    """As atomic additions make it: in the last bits, another result each time."""
    _Noise.state = (_Noise.state * 48_271 + 11) % 2_147_483_647
    return step_fn(model, batch) * (1 + 1e-6 * (_Noise.state % 1000) / 1000)


def with_an_object(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "thing": object()}


def with_a_count(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "count": torch.zeros(())}


def error_of(
    options: dict[str, Any],
    make_batch: Callable[[dict[str, Any]], Any] | None = None,
    step: Callable[[nn.Module, Any], Tensor] = step_fn,
) -> str:
    """The `ConfigError` of some step of four."""
    model = wrapped("ddp")
    torch.manual_seed(dist.get_rank())
    try:
        with Sentinel(model, **options) as sentinel:
            for number in range(4):
                batch: Any = batch_of(number, dist.get_rank())
                batch = make_batch(batch) if make_batch is not None else batch
                with sentinel.micro_batch(batch):
                    step(model, batch).backward()  # type: ignore[no-untyped-call]
                sentinel.step()
                model.zero_grad()
    except ConfigError as error:
        return str(error)
    return "none"


def one_rank_without_batches(options: dict[str, Any]) -> list[SentinelVerdict]:
    """Rank 1 joins in with gradients of zeros, outside of micro_batch()."""
    model = wrapped("ddp")
    torch.manual_seed(dist.get_rank())
    verdicts = []
    with Sentinel(model, **options) as sentinel:
        for step in range(4):
            batch = batch_of(step, dist.get_rank())
            if dist.get_rank() == 1:
                (0 * step_fn(model, batch)).backward()  # type: ignore[no-untyped-call]
            else:
                with sentinel.micro_batch(batch):
                    step_fn(model, batch).backward()  # type: ignore[no-untyped-call]
            verdicts.append(sentinel.step())
            model.zero_grad()
    return verdicts


def with_little_room(flips: Sequence[BitFlip]) -> list[int]:
    """The steps at which something was found, where one batch fits at a time."""
    from ddpstats.sentinel import _peer_replay

    room, _peer_replay.MOST_BYTES = _peer_replay.MOST_BYTES, 1
    try:
        options = {"mode": 1, "replay_every_steps": 2, "replay_fn": step_fn}
        outcome = train(Plan(options=options, flips=flips, steps=8, lr=0.0))
    finally:
        _peer_replay.MOST_BYTES = room
    return [verdict.step for verdict in outcome.verdicts if not verdict.ok]


def _verdicts_of(model: nn.Module, options: dict[str, Any], *, zero: bool) -> list[SentinelVerdict]:
    """Of four steps; ``zero``: whether gradients are zeroed after each."""
    verdicts = []
    with Sentinel(model, **options) as sentinel:
        for step in range(4):
            batch = batch_of(step, dist.get_rank())
            with sentinel.micro_batch(batch):
                step_fn(model, batch).backward()  # type: ignore[no-untyped-call]
            verdicts.append(sentinel.step())
            if zero:
                model.zero_grad()
    return verdicts


def own_buffers_in_eval(options: dict[str, Any]) -> list[SentinelVerdict]:
    torch.manual_seed(0)
    inner = Transformer()
    inner.eval()
    model = DistributedDataParallel(inner, broadcast_buffers=False)
    assert inner.batch_norm.running_mean is not None
    inner.batch_norm.running_mean += dist.get_rank()
    return _verdicts_of(model, options, zero=True)


def never_zeroed(options: dict[str, Any]) -> list[SentinelVerdict]:
    return _verdicts_of(wrapped("ddp"), options, zero=False)


def around_a_rerun(options: dict[str, Any]) -> dict[str, bool]:
    """What `Sentinel.step` leaves as it was, in a step that is examined for the first time."""
    model = wrapped("ddp")
    with Sentinel(model, **{**options, "replay_every_steps": 1}) as sentinel:
        batch = batch_of(0, dist.get_rank())
        with sentinel.micro_batch(batch):
            step_fn(model, batch).backward()  # type: ignore[no-untyped-call]
        objects = [parameter.grad for parameter in model.parameters()]
        gradients = [one.clone() for one in objects if one is not None]
        buffers, random = [one.clone() for one in model.buffers()], torch.get_rng_state()
        sentinel.step()
        now = [parameter.grad for parameter in model.parameters()]
        return {
            "gradients": all(one is not None and torch.equal(one, g) for one, g in zip(now, gradients, strict=True)),
            "buffers": all(torch.equal(one, other) for one, other in zip(model.buffers(), buffers, strict=True)),
            "random": torch.equal(torch.get_rng_state(), random),
            "identity": all(one is other for one, other in zip(now, objects, strict=True)),
        }


# -- what goes wrong on one rank --------------------------------------------------------------------------------------


def in_a_subgroup() -> str:
    """DDP on ranks 0 and 1, the sentinel on all. What it says; nothing of it stays on the model."""
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
    """Raises when it is read."""

    def items(self) -> Any:
        raise KeyError("not loaded")


def begin_raises_on_rank_1(options: dict[str, Any]) -> str:
    model, said = wrapped("ddp"), ""
    with Sentinel(model, **options) as sentinel:
        for step in range(3):
            batch: Any = batch_of(step, dist.get_rank())
            if step == 1 and dist.get_rank() == 1:
                try:
                    with sentinel.micro_batch(_Lazy(batch)):
                        raise AssertionError
                except KeyError:
                    said = "KeyError, then "
            with sentinel.micro_batch(batch):
                step_fn(model, batch).backward()  # type: ignore[no-untyped-call]
            assert sentinel.step().ok
            model.zero_grad()
    return f"{said}fine"


def one_backward_raises(options: dict[str, Any]) -> list[SentinelVerdict]:
    """On rank 2 the first micro-batch of step 1 runs out of memory, and is left out."""
    model = wrapped("ddp")
    assert isinstance(model, DistributedDataParallel)
    verdicts = []
    with Sentinel(model, **options) as sentinel:
        for step in range(4):
            for micro in range(2):
                batch = batch_of(step, dist.get_rank(), micro)
                with contextlib.ExitStack() as stack:
                    if micro == 0:
                        stack.enter_context(model.no_sync())
                    stack.enter_context(contextlib.suppress(MemoryError))
                    stack.enter_context(sentinel.micro_batch(batch))
                    loss = step_fn(model, batch)
                    if (step, micro, dist.get_rank()) == (1, 0, 2):
                        loss.register_hook(_no_memory)  # type: ignore[no-untyped-call]
                    loss.backward()  # type: ignore[no-untyped-call]
            verdicts.append(sentinel.step())
            model.zero_grad()
    return verdicts


def _no_memory(gradient: Tensor) -> None:
    raise MemoryError("in the middle of the backward pass")


class Positions(nn.Module):
    """Its table returns its own parameter."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 4))

        def forward(self) -> Tensor:
            return self.weight

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = self.Table(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x + self.table())
        return out


class Trainer:
    """Holds the sentinel, which holds its method."""

    def __init__(self, module: nn.Module) -> None:
        self.sentinel = Sentinel(module, mode=2, replay_every_steps=10, replay_fn=self.loss)

    def loss(self, module: nn.Module, batch: Any) -> Tensor:
        return step_fn(module, batch)
