"""What the sentinel finds: bits that flip in a small transformer, and steps in which none does.

    scripts/launch.sh dev python scripts/sentinel_rates.py [--flips N] [--clean N] [--json PATH] [--png PATH]

1. Three gloo ranks train a transformer with every layer looking at every step. In every other step one bit flips, of
   one element, on one rank, in turn in a weight, an activation, its gradient, a parameter's gradient before and after
   the reduce, and inside a matrix product (`ddpstats.testing.inject_bit_flips`). All 32 bits are equally likely.
2. Two ranks train it without any fault.
3. Layers 2 and 3 look now and then, as they would: steps from a fault to the alarm that names its rank.
4. A part of the flips once more in bfloat16.

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

import torch
from _rates_runs import KINDS, Flipped, Trial, delays, flip_bits, train_cleanly
from bench_rows import aligned

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
_HALF_GROUPS = {"bits 0-6": range(7), "exponent, 7-13": range(7, 14), "exponent, 14": (14,), "sign, 15": (15,)}
_HALF_SHARE = 5  # of the flips, one in so many once more in bfloat16
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


def report(trials: Sequence[Trial], groups: Mapping[str, Any]) -> str:
    """Tables by place and by bit; and how often an alarm named a wrong rank."""
    head = ("", "flips", *LAYERS, "any")
    places = rates(trials, {kind: (kind,) for kind in KINDS} | {"all": KINDS}, lambda trial: trial.flip.where)
    bits = rates(trials, groups, lambda trial: trial.flip.bit)
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

    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    for layer, style in zip(LAYERS, ("-", "--", "-", "-", "-"), strict=True):
        reach = _reach(layer)
        shares = []
        for bit in range(32):
            these = [trial for trial in trials if trial.flip.bit == bit and trial.flip.where in reach]
            shares.append(100 * statistics.fmean(trial.found.get(layer, False) for trial in these) if these else 0.0)
        where = "all" if reach == KINDS else ", ".join(reach)
        axes.plot(range(32), shares, style, marker=".", label=f"{layer} (flips in: {where})")
    axes.set(xlabel="bit of a float32 (31: sign, 30-23: exponent)", ylabel="flips found and named, %", ylim=(-2, 102))
    axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=8)
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
    flipped: Flipped = run_ranks(flip_bits, 3, 0, args.flips, timeout_sec=_LIMIT_SEC).values()[0]
    print(report(flipped.trials, _GROUPS), flush=True)
    print(f"false alarms in the {args.flips:,} clean steps between: {flipped.false_alarms or 0}\n", flush=True)
    if args.json:
        text = json.dumps([dataclasses.asdict(trial) for trial in flipped.trials], indent=1)
        Path(args.json).write_text(text + "\n")
    if args.png:
        draw(args.png, flipped.trials)
    _show_delays()
    if args.clean:
        found = run_ranks(train_cleanly, 2, args.clean, timeout_sec=_LIMIT_SEC).values()[0]
        print(f"alarms in {args.clean:,} steps without a fault: { ({name: found.get(name, 0) for name in LAYERS}) };")
        print(f"{found['products']:,} products checked, {found['warnings']} warnings\n", flush=True)
    if args.flips >= _HALF_SHARE:
        half = run_ranks(flip_bits, 3, 1, args.flips // _HALF_SHARE, torch.bfloat16, timeout_sec=_LIMIT_SEC).values()[0]
        print(f"bfloat16\n\n{report(half.trials, _HALF_GROUPS)}")
    return 0


def _show_delays() -> None:
    for what, kind, layer, sticky in (
        ("a weight, layer 2", "weight", "replica digests", False),
        ("a gradient before the reduce, a stuck bit, layer 3", "gradient", "peer replay", True),
    ):
        steps = run_ranks(delays, 3, 0, 20, EVERY, kind, layer, sticky=sticky, timeout_sec=_LIMIT_SEC).values()[0]
        seen = [one for one in steps if one is not None]
        print(
            f"steps to the alarm, layers 2 and 3 every {EVERY} steps, {what}: median {statistics.median(seen):g}, "
            f"{min(seen)} to {max(seen)}; {len(steps) - len(seen)} of {len(steps)} not found in {3 * EVERY} steps",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
