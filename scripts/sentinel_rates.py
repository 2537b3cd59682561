"""What the sentinel finds: bits that flip in a small transformer, and steps in which none does.

    scripts/launch.sh dev python scripts/sentinel_rates.py [--flips N] [--clean N] [--json PATH] [--png PATH]

1. Three gloo ranks train a transformer with every layer looking at every step. In every other step one bit flips, of
   one element, on one rank, in turn in a weight, an activation, its gradient, a parameter's gradient before and after
   the reduce, and inside a matrix product (`ddpstats.testing.inject_bit_flips`). All 32 bits are equally likely.
2. Two ranks train it without any fault.
3. Layers 2 and 3 look now and then, as they would: steps from a fault to the alarm.

A layer has found a flip if it named that rank, and no other, in that step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _bench_rows import aligned
from _rates_runs import KINDS, Trial, delays, flip_bits, train_cleanly

from ddpstats.testing import run_ranks

LAYERS = ("thresholds v2", "thresholds v3", "replica digests", "peer replay", "matmul checksum")
EVERY = 20
_GROUPS = {
    "0-7": range(8),
    "8-15": range(8, 16),
    "16-22": range(16, 23),
    "exponent 23-30": range(23, 31),
    "sign": (31,),
}
_LIMIT_SEC = 7200.0


def rates(trials: Sequence[Trial], by: Mapping[str, Any], key: Any) -> list[tuple[str, ...]]:
    """A line per entry of ``by``: how many flips, and which share of them each layer found."""
    lines: list[tuple[str, ...]] = []
    for name, wanted in by.items():
        these = [trial for trial in trials if key(trial) in wanted]
        lines.append((name, str(len(these)), *(_percent(these, layer) for layer in LAYERS), _any_percent(these)))
    return lines


def _percent(trials: Sequence[Trial], layer: str) -> str:
    return _share(sum(trial.found.get(layer, False) for trial in trials), len(trials))


def _any_percent(trials: Sequence[Trial]) -> str:
    return _share(sum(any(trial.found.values()) for trial in trials), len(trials))


def _share(count: int, total: int) -> str:
    return f"{100 * count / total:.1f} %" if total else "-"


def report(trials: Sequence[Trial]) -> str:
    """Tables by place and by bit; and how often an alarm named a wrong rank."""
    head = ("", "flips", *LAYERS, "any")
    places = rates(trials, {kind: (kind,) for kind in KINDS} | {"all": KINDS}, lambda trial: trial.flip.where)
    bits = rates(trials, _GROUPS, lambda trial: trial.flip.bit)
    alarms = [right for trial in trials for right in trial.found.values()]
    named = f"alarms: {len(alarms)}; that named the right rank alone: {_share(sum(alarms), len(alarms))}"
    unseen = sum(trial.before == trial.after for trial in trials)
    return "\n\n".join(
        [aligned([head, *places]), aligned([head, *bits]), f"{named}; flips that changed no value: {unseen}"]
    )


def draw(path: str, trials: Sequence[Trial]) -> None:
    """Share of flips found over the position of the bit, a line per layer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    for layer, style in zip(LAYERS, ("-", "--", "-", "-", "-"), strict=True):
        reach = _reach(layer)
        shares = []
        for bit in range(32):
            these = [trial for trial in trials if trial.flip.bit == bit and trial.flip.where in reach]
            shares.append(100 * statistics.fmean(trial.found.get(layer, False) for trial in these) if these else 0.0)
        axes.plot(range(32), shares, style, marker=".", label=f"{layer} ({', '.join(reach)})")
    axes.set(xlabel="bit of a float32 (31: sign, 30-23: exponent)", ylabel="flips found and named, %", ylim=(-2, 102))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="center left")
    figure.savefig(path, dpi=110)


def _reach(layer: str) -> tuple[str, ...]:
    """The places that a layer is there for."""
    if layer == "replica digests":
        return ("weight", "reduced_gradient")
    if layer == "matmul checksum":
        return ("matmul",)
    before = ("activation", "activation_gradient", "gradient", "matmul")
    return before if layer == "peer replay" else KINDS


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="sentinel_rates", description="What the sentinel finds, and what it does not."
    )
    parser.add_argument("--flips", type=int, default=5400, metavar="N", help="bits to flip (default 5,400)")
    parser.add_argument("--clean", type=int, default=20_000, metavar="N", help="steps without a fault (default 20,000)")
    parser.add_argument("--json", metavar="PATH", help="write every flip and what found it")
    parser.add_argument("--png", metavar="PATH", help="draw the shares over the position of the bit (needs matplotlib)")
    args = parser.parse_args(argv)
    trials: list[Trial] = run_ranks(flip_bits, 3, 0, args.flips, timeout_sec=_LIMIT_SEC).values()[0]
    print(report(trials), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps([dataclasses.asdict(trial) for trial in trials], indent=1) + "\n")
    if args.png:
        draw(args.png, trials)
    for what, kind, sticky in (("weight", "weight", False), ("gradient, sticky", "gradient", True)):
        steps = run_ranks(delays, 3, 0, 20, EVERY, kind, sticky=sticky, timeout_sec=_LIMIT_SEC).values()[0]
        print(f"steps to the alarm, layers 2 and 3 every {EVERY} steps, {what}: {_steps_text(steps)}", flush=True)
    if args.clean:
        alarms = run_ranks(train_cleanly, 2, args.clean, timeout_sec=_LIMIT_SEC).values()[0]
        print(f"false alarms in {args.clean:,} steps: { ({name: alarms.get(name, 0) for name in LAYERS}) }")
    return 0


def _steps_text(steps: Sequence[int]) -> str:
    return f"median {statistics.median(steps):g}, at least {min(steps)}, at most {max(steps)}, of {len(steps)}"


if __name__ == "__main__":
    sys.exit(main())
