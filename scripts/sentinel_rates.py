"""Measure what the sentinel finds: bits that flip in a small transformer, and steps in which none does.

    scripts/launch.sh dev python scripts/sentinel_rates.py [--dtypes NAME...] [--flips N] [--clean N]

In each dtype, which all of the model is in (float16 with a GradScaler):

1. Three gloo ranks train a transformer with every layer looking at every step. In every other step one bit flips, of
   one element, on one rank, in turn in a weight, an activation, its gradient, a parameter's gradient before and after
   the reduce, and inside a matrix product (`ddpstats.testing.inject_bit_flips`). All bits are equally likely.
2. Two ranks train it without any fault.

In float32 layers 2 and 3 also look now and then, as they would: steps from a fault to the alarm that names its rank.

A layer has found a flip if it named that rank, and no other, in that step.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import random
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from bench_rows import aligned
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpstats import Sentinel, SentinelAlarm
from ddpstats.sentinel.matmul import MatmulChecksum
from ddpstats.testing import BitFlip, inject_bit_flips, run_ranks
from ddpstats.testing.flips import Where

KINDS: tuple[Where, ...] = get_args(Where)
REACH: dict[str, Sequence[str]] = {
    "thresholds v2": KINDS,
    "thresholds v3": KINDS,
    "replica digests": ("weight", "reduced_gradient"),
    "peer replay": ("activation", "activation_gradient", "gradient", "matmul"),
    "matmul checksum": ("matmul",),
}
"""Layer -> the kinds of flips that it is there for."""
_BITS: dict[torch.dtype, dict[str, Sequence[int]]] = {
    torch.float32: {
        "0-7": range(8),
        "8-15": range(8, 16),
        "16-22": range(16, 23),
        "23-29": range(23, 30),
        "30": [30],
        "31": [31],
    },
    torch.bfloat16: {"0-6": range(7), "7-13": range(7, 14), "14": [14], "15": [15]},
    torch.float16: {"0-9": range(10), "10-13": range(10, 14), "14": [14], "15": [15]},
}
"""dtype -> its bits: those of the fraction, of the exponent without its highest, that one, and the sign."""
_EVERY = 20  # steps between the exams of layers 2 and 3, where they look now and then
_WARM_UP_STEPS = 130  # the jump test of "v2" begins after 100
_LIMIT_SEC = 7200.0


# -- the model --------------------------------------------------------------------------------------------------------


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
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    """A transformer that predicts the next token."""

    def __init__(self, width: int, blocks: int, heads: int = 2, words: int = 29, length: int = 64) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(words, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def step_fn(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the loss; tokens of shape (sequences, length)."""
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def tokens_of(step: int, sequences: int = 4, length: int = 16) -> Tensor:
    """Return a step's tokens on this rank: they count upwards from random starts, with random strides."""
    generator = torch.Generator().manual_seed(1_000_003 * step + dist.get_rank())
    start, stride = torch.randint(29, (2, sequences, 1), generator=generator)
    return (start + (stride % 3 + 1) * torch.arange(length + 1)) % 29


def logging_off() -> None:
    """Thousands of alarms are expected."""
    logging.getLogger("ddpstats").setLevel(logging.CRITICAL + 1)


class Trainer:
    """A model in training, watched by every layer in every step, and by both detectors."""

    def __init__(self, dtype: torch.dtype) -> None:
        logging_off()
        torch.manual_seed(0)
        self.model = DistributedDataParallel(Transformer(32, 2).to(dtype))
        # Adam divides the scale out again; squares of small gradients are 0 in float16, so eps has to bound its steps.
        is_scaled = dtype is torch.float16
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=is_scaled)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, eps=1e-2 if is_scaled else 1e-8)
        replays = {"digest_every_steps": 1, "replay_every_steps": 1, "replay_fn": step_fn}
        options: dict[str, Any] = {"mode": 2, "scaler": self.scaler}
        self.all_layers = Sentinel(self.model, matmul_checksum=True, checksum_steps=10**9, **replays, **options)
        self.all_layers.check_matmuls(10**9)
        self.sentinels = {"v2": self.all_layers, "v3": Sentinel(self.model, detector="v3", **options)}
        self.number = 0
        torch.manual_seed(1 + dist.get_rank())

    def step(self) -> dict[str, tuple[int, ...]]:
        """Run forward, backward and verdict, and return layer -> culprit ranks."""
        batch = tokens_of(self.number)
        self.number += 1
        with self.all_layers.micro_batch(batch):
            self.scaler.scale(step_fn(self.model, batch)).backward()  # type: ignore[no-untyped-call]
        culprits: dict[str, tuple[int, ...]] = {}
        for detector, sentinel in self.sentinels.items():
            try:
                sentinel.step()
            except SentinelAlarm:
                for finding in sentinel.verdict.findings:
                    layer = f"thresholds {detector}" if finding.layer == "thresholds" else finding.layer
                    culprits[layer] = finding.culprit_ranks
        return culprits

    def apply(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


# -- on the ranks -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Trial:
    """One flip, and the layers that raised an alarm: layer -> whether it named that rank alone."""

    flip: BitFlip
    alarms: dict[str, bool]


def _flips(seed: int, count: int, model: nn.Module, bits: int) -> list[BitFlip]:
    """Return flips of each kind in turn; the rest is random, and the same on every rank."""
    drawn = random.Random(seed)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.LayerNorm))}
    parameters = [name for name, _ in model.named_parameters()]
    products = [name for name in layers if isinstance(layers[name], nn.Linear)]
    names = {"activation": list(layers), "activation_gradient": list(layers), "matmul": products}
    flips = []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        name, element, bit = drawn.choice(names.get(kind, parameters)), drawn.randrange(1 << 30), drawn.randrange(bits)
        flips.append(BitFlip(name, kind, element, bit, step=0, rank=drawn.randrange(dist.get_world_size())))
    return flips


def flip_bits(seed: int, count: int, dtype: torch.dtype) -> tuple[list[Trial], Counter[str]]:
    """Return trials, and false alarms by layer in the clean steps between them.

    A step with a flip is not applied; each is followed by a clean step, which is.
    """
    trainer, trials, false_alarms = Trainer(dtype), list[Trial](), Counter[str]()
    for _ in range(_WARM_UP_STEPS):
        trainer.step()
        trainer.apply()
    inner = trainer.model.module
    for flip in _flips(seed, count, inner, 8 * dtype.itemsize):
        kept = [parameter.detach().clone() for parameter in inner.parameters()]
        with inject_bit_flips(trainer.model, [flip]) as faults:
            culprits = trainer.step()
        trainer.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(list(inner.parameters()), kept)
        is_applied = torch.tensor(len(faults.applied))
        dist.all_reduce(is_applied)
        if is_applied:
            trials.append(Trial(flip, {layer: ranks == (flip.rank,) for layer, ranks in culprits.items()}))
        else:
            false_alarms.update(culprits.keys())
        false_alarms.update(trainer.step().keys())
        trainer.apply()
    return trials, false_alarms


def train_cleanly(steps: int, dtype: torch.dtype) -> Counter[str]:
    """Train without a fault, and return alarms by layer."""
    trainer, alarms = Trainer(dtype), Counter[str]()
    for _ in range(steps):
        alarms.update(trainer.step().keys())
        trainer.apply()
    (window,) = (layer.window for layer in trainer.all_layers._detectors if isinstance(layer, MatmulChecksum))
    assert (window.checked > 0, window.problem) == (True, None)
    return alarms


def delays_to_alarm(seed: int, trials: int, kind: Where, layer: str, sticky: bool) -> list[int | None]:
    """Return the steps from a fault on rank 1 to ``layer``'s alarm that names it; None without one in three periods.

    Element and bit are random. Any other alarm is an error.
    """
    logging_off()
    drawn, delays = random.Random(seed), list[int | None]()
    for _ in range(trials):
        torch.manual_seed(0)
        model = DistributedDataParallel(Transformer(32, 1))
        at = drawn.randrange(_EVERY, 3 * _EVERY)
        flip = BitFlip("blocks.0.up.weight", kind, drawn.randrange(4096), drawn.randrange(8, 24), at, 1, sticky)
        options: dict[str, Any] = {"digest_every_steps": _EVERY, "replay_every_steps": _EVERY, "replay_fn": step_fn}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Sentinel(model, mode=2, **options) as sentinel, inject_bit_flips(model, [flip]) as faults:
            for step in range(at + 3 * _EVERY):
                with sentinel.micro_batch(tokens_of(step)):
                    step_fn(model, tokens_of(step)).backward()  # type: ignore[no-untyped-call]
                try:
                    sentinel.step()
                except SentinelAlarm as alarm:
                    if layer not in alarm.layers or alarm.culprit_ranks != (1,) or alarm.step < at:
                        raise RuntimeError("this alarm does not belong to the fault") from alarm
                    delays.append(alarm.step - at)
                    break
                optimizer.step()
                optimizer.zero_grad()
                faults.step()
            else:
                delays.append(None)
    return delays


# -- what is printed --------------------------------------------------------------------------------------------------


def _share(hits: Sequence[bool]) -> str:
    return f"{100 * sum(hits) / len(hits):.1f} %" if hits else "-"


def report(trials: Sequence[Trial], bits: Mapping[str, Sequence[int]]) -> str:
    """Return the shares of flips found, by kind, and by bit of the flips in a layer's reach."""
    kinds = {kind: [trial for trial in trials if trial.flip.where == kind] for kind in KINDS} | {"all": trials}
    by_bit = {name: [trial for trial in trials if trial.flip.bit in bits[name]] for name in bits}
    tables = []
    for head, groups, is_reached in (("", kinds, False), ("in its reach", by_bit, True)):
        lines = [(head, "flips", *REACH, "any")]
        for name, group in groups.items():
            shares = []
            for layer, reach in REACH.items():
                reached = [trial for trial in group if not is_reached or trial.flip.where in reach]
                shares.append(_share([trial.alarms.get(layer, False) for trial in reached]))
            lines.append((name, str(len(group)), *shares, _share([any(trial.alarms.values()) for trial in group])))
        tables.append(aligned(lines))
    alarms = [is_right for trial in trials for is_right in trial.alarms.values()]
    return "\n\n".join([*tables, f"alarms: {len(alarms)}; that named the right rank alone: {_share(alarms)}"])


def on_ranks(function: Any, world_size: int, *args: Any) -> Any:
    return run_ranks(function, world_size, *args, timeout_sec=_LIMIT_SEC).values()[0]


def show_delays(what: str, kind: Where, layer: str, sticky: bool) -> None:
    steps = on_ranks(delays_to_alarm, 3, 0, 20, kind, layer, sticky)
    seen = [step for step in steps if step is not None]
    print(
        f"steps to the alarm, layers 2 and 3 every {_EVERY} steps, {what}: median {statistics.median(seen):g}, "
        f"{min(seen)} to {max(seen)}; {len(steps) - len(seen)} of {len(steps)} not found in {3 * _EVERY} steps"
    )


def main(argv: Sequence[str] | None = None) -> int:
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in _BITS}
    parser = argparse.ArgumentParser(prog="sentinel_rates", description="What the sentinel finds.")
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=list(dtypes), help="default: all of them")
    parser.add_argument("--flips", type=int, default=5400, metavar="N", help="bits to flip (default 5,400)")
    parser.add_argument("--clean", type=int, default=20_000, metavar="N", help="steps without a fault (default 20,000)")
    args = parser.parse_args(argv)
    sys.stdout.reconfigure(line_buffering=True)  # each part takes minutes
    for name in args.dtypes:
        dtype = dtypes[name]
        print(f"{name}\n")
        if args.flips:
            trials, false_alarms = on_ranks(flip_bits, 3, 0, args.flips, dtype)
            print(report(trials, _BITS[dtype]))
            print(f"false alarms in the {args.flips:,} clean steps between: {dict(false_alarms) or 0}\n")
        if args.clean:
            alarms = on_ranks(train_cleanly, 2, args.clean, dtype)
            print(f"alarms in {args.clean:,} steps without a fault: { ({layer: alarms[layer] for layer in REACH}) }\n")
    if "float32" in args.dtypes:
        show_delays("a weight, layer 2", "weight", "replica digests", False)
        show_delays("a gradient before the reduce, a stuck bit, layer 3", "gradient", "peer replay", True)
    return 0


if __name__ == "__main__":
    import sentinel_rates

    sys.exit(sentinel_rates.main())  # ranks import functions by the name of their module
