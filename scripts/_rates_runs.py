"""What runs on the ranks of `sentinel_rates`: a small transformer in training, and bits that flip in it."""

from __future__ import annotations

import logging
import random
import warnings
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpstats import Sentinel, SentinelAlarm
from ddpstats.testing import BitFlip, inject_bit_flips
from ddpstats.testing.flips import Where

WARM_UP_STEPS = 130  # the jump test of "v2" begins after 100
KINDS: tuple[Where, ...] = get_args(Where)


class Block(nn.Module):
    """Attention and a feed-forward part, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        size, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(size, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = self.dropout(torch.softmax(q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5, -1))
        x = x + self.dropout(self.out((weights @ v).transpose(1, 2).reshape(size, length, width)))
        found: Tensor = x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm2(x)))))
        return found


class Transformer(nn.Module):
    """Predicts the next token."""

    def __init__(self, width: int, blocks: int, heads: int = 2, words: int = 29, length: int = 64) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(words, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        found: Tensor = self.head(self.norm(self.blocks(x)))
        return found


def step_fn(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss; tokens of shape (sequences, length)."""
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def tokens_of(step: int, sequences: int, length: int) -> Tensor:
    """Counting upwards from random starts, with random strides: something to learn. A function of step and rank."""
    generator = torch.Generator().manual_seed(1_000_003 * step + dist.get_rank())
    start, stride = torch.randint(29, (2, sequences, 1), generator=generator)
    tokens: Tensor = (start + (stride % 3 + 1) * torch.arange(length + 1)) % 29
    return tokens


@dataclass(frozen=True)
class Trial:
    """One flip, and what the layers made of it: layer -> whether it named that rank alone."""

    flip: BitFlip
    found: dict[str, bool]
    before: float
    after: float


@dataclass(frozen=True)
class Flipped:
    """All trials, and alarms in the clean steps between them: layer -> how many."""

    trials: list[Trial]
    false_alarms: dict[str, int]


class Trainer:
    """A model in training, watched by every layer in every step, and by both detectors."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(Transformer(32, 2).to(dtype))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._watched: dict[str, Sentinel] = {
            "v2": Sentinel(
                self.model,
                mode=2,
                digest_every_steps=1,
                replay_every_steps=1,
                replay_fn=step_fn,
                matmul_checksum=True,
                checksum_steps=10**9,
            ),
            "v3": Sentinel(self.model, mode=2, detector="v3"),
        }
        self._watched["v2"].check_matmuls(10**9)
        self.number = 0
        torch.manual_seed(1 + dist.get_rank())

    def step(self) -> dict[str, tuple[int, ...]]:
        """Forward, backward and verdict: layer -> culprit ranks."""
        sentinel, batch = self._watched["v2"], tokens_of(self.number, 4, 16)
        self.number += 1
        with sentinel.micro_batch(batch):
            step_fn(self.model, batch).backward()  # type: ignore[no-untyped-call]
        found: dict[str, tuple[int, ...]] = {}
        for detector, one in self._watched.items():
            try:
                one.step()
            except SentinelAlarm:
                for finding in one.verdict.findings:
                    name = f"thresholds {detector}" if finding.layer == "thresholds" else finding.layer
                    found[name] = finding.culprit_ranks
        return found

    def apply(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def products_checked(self) -> int:
        """By layer 4. Raises where a check failed."""
        setup = self._watched["v2"]._setup
        assert setup is not None
        window = setup.matmul.window
        assert window.problem is None
        return window.checked

    def close(self) -> None:
        for one in self._watched.values():
            one.close()


def _flips(seed: int, count: int, model: nn.Module, bits: int) -> list[BitFlip]:
    """Kinds in turn; all else is drawn, and the same on every rank."""
    drawn = random.Random(seed)
    parameters = [name for name, _ in model.named_parameters()]
    modules = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.LayerNorm))]
    products = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    names = {"activation": modules, "activation_gradient": modules, "matmul": products}
    return [
        BitFlip(
            drawn.choice(names.get(KINDS[place % len(KINDS)], parameters)),
            KINDS[place % len(KINDS)],
            element=drawn.randrange(1 << 30),
            bit=drawn.randrange(bits),
            step=0,
            rank=drawn.randrange(dist.get_world_size()),
        )
        for place in range(count)
    ]


def flip_bits(seed: int, count: int, dtype: torch.dtype = torch.float32) -> Flipped:
    """One flip a step, which is not applied; between two of them one clean step, which is. Rank 0's answer counts."""
    logging_off()
    trainer, flipped = Trainer(dtype), Flipped([], {})
    for _ in range(WARM_UP_STEPS):
        trainer.step()
        trainer.apply()
    inner = trainer.model.module
    for flip in _flips(seed, count, inner, 8 * dtype.itemsize):
        kept = [parameter.detach().clone() for parameter in inner.parameters()]
        with inject_bit_flips(trainer.model, [flip]) as faults:
            found = trainer.step()
        trainer.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(list(inner.parameters()), kept)
        applied = _from_rank(flip.rank, [(one.before, one.after) for one in faults.applied][:1])
        if applied:
            named = {layer: ranks == (flip.rank,) for layer, ranks in found.items()}
            flipped.trials.append(Trial(flip, named, *applied[0]))
        for layer in [*trainer.step(), *([] if applied else found)]:
            flipped.false_alarms[layer] = flipped.false_alarms.get(layer, 0) + 1
        trainer.apply()
    trainer.close()
    return flipped


def _from_rank(rank: int | None, value: list[tuple[float, float]]) -> list[tuple[float, float]]:
    told = torch.tensor([*value[0], 1.0] if value else [0.0, 0.0, 0.0], dtype=torch.float64)
    dist.broadcast(told, rank or 0)
    return [(float(told[0]), float(told[1]))] if told[2] else []


def train_cleanly(steps: int) -> dict[str, int]:
    """So many steps without a fault: layer -> alarms; "warnings" of the sentinel; "products" that layer 4 checked."""
    logging_off()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, found = Trainer(), dict[str, int]()
        for _ in range(steps):
            for layer in trainer.step():
                found[layer] = found.get(layer, 0) + 1
            trainer.apply()
        found["products"] = trainer.products_checked
        trainer.close()
    found["warnings"] = len([one for one in caught if "Sentinel" in str(one.message)])
    return found


def delays(seed: int, trials: int, every: int, kind: Where, layer: str, *, sticky: bool) -> list[int | None]:
    """Steps from a fault on rank 1 to ``layer``'s alarm that names it; None where none came in three periods.

    Layers 2 and 3 look at every ``every``-th step. Element and bit are drawn; any other alarm is an error.
    """
    logging_off()
    drawn, found = random.Random(seed), list[int | None]()
    for _ in range(trials):
        torch.manual_seed(0)
        model = DistributedDataParallel(Transformer(32, 1))
        at = drawn.randrange(every, 3 * every)
        element, bit = drawn.randrange(4096), drawn.randrange(8, 24)
        flip = BitFlip("blocks.0.up.weight", kind, element, bit, at, rank=1, sticky=sticky)
        options: dict[str, Any] = {"digest_every_steps": every, "replay_every_steps": every, "replay_fn": step_fn}
        with Sentinel(model, mode=2, **options) as sentinel, inject_bit_flips(model, [flip]) as faults:
            alarm = _first_alarm(model, sentinel, faults, at + 3 * every)
        if alarm is not None and (layer not in alarm.layers or alarm.culprit_ranks != (1,) or alarm.step < at):
            raise RuntimeError(f"another alarm than was to come: {alarm}")
        found.append(None if alarm is None else alarm.step - at)
    return found


def _first_alarm(model: nn.Module, sentinel: Sentinel, faults: Any, steps: int) -> SentinelAlarm | None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        batch = tokens_of(step, 4, 16)
        with sentinel.micro_batch(batch):
            step_fn(model, batch).backward()  # type: ignore[no-untyped-call]
        try:
            sentinel.step()
        except SentinelAlarm as alarm:
            return alarm
        optimizer.step()
        optimizer.zero_grad()
        faults.step()
    return None


def logging_off() -> None:
    """Thousands of alarms are expected."""
    logging.getLogger("ddpstats").setLevel(logging.CRITICAL + 1)
