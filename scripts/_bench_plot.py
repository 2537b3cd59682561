"""The two curves of docs/speed.md: keys against time, and world size against time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from _bench_loop import Spread
from bench_reduction import Measured

# Okabe and Ito's colours, told apart with any kind of colour vision; shape and dashes tell them apart in grey.
_CURVES = {
    "espnet": ("one collective per leaf (espnet)", "#D55E00", "s", "--"),
    "tensors": ("ddpstats, 1-element tensors", "#0072B2", "o", "-"),
    "floats": ("ddpstats, Python floats", "#009E73", "^", "-"),
    "bare": ("one bare all_reduce, same bytes", "#000000", "D", ":"),
}


def draw(path: str, timed: Sequence[Measured], by_keys_world: int, by_world_keys: int) -> None:
    """Write the PNG: time over keys at ``by_keys_world`` ranks, time over ranks at ``by_world_keys`` keys."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.8), dpi=130, layout="constrained", sharey=False)
    _panel(left, [one for one in timed if one.world_size == by_keys_world], "keys")
    left.set(xscale="log", xlabel="keys in the dict", title=f"{by_keys_world} ranks (gloo)")
    _panel(
        right, sorted((one for one in timed if one.keys == by_world_keys), key=lambda one: one.world_size), "world_size"
    )
    right.set(xlabel="ranks (gloo, on one machine)", title=f"{by_world_keys} keys")
    right.set_xticks(sorted({one.world_size for one in timed if one.keys == by_world_keys}))
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=len(_CURVES), frameon=False)
    figure.savefig(path)
    plt.close(figure)


def _panel(axes: Any, points: Sequence[Measured], across: str) -> None:
    for variant, (label, colour, marker, dashes) in _CURVES.items():
        found = [(getattr(one, across), spread) for one in points if (spread := _spread(one, variant)) is not None]
        if not found:
            continue
        x = [at for at, _ in found]
        axes.plot(x, [1e3 * s.median for _, s in found], dashes, color=colour, marker=marker, label=label, lw=2, ms=6)
        axes.fill_between(
            x, [1e3 * s.lower for _, s in found], [1e3 * s.upper for _, s in found], color=colour, alpha=0.15, lw=0
        )
    axes.set(yscale="log", ylabel="ms per call (median, quartiles)")
    axes.grid(True, which="major", alpha=0.3)


def _spread(measured: Measured, variant: str) -> Spread | None:
    for timings in (measured.lean, measured.against_leaves):
        if variant in timings.seconds:
            return timings.spread(variant)
    return None
