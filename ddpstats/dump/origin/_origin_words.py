"""What is said of an origin: what happened, in one sentence, and what to do next, in one or two."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ddpstats.dump.format._entries import Leaf
from ddpstats.dump.format._files import RankDump
from ddpstats.dump.origin._candidates import has_nan
from ddpstats.dump.origin._first_nan import Origin

_SHOWN = 8


def verdict(origin: Origin) -> str:
    """What happened, without the rank and the time."""
    name, bad = origin.name, origin.candidate.bad
    what = _what(one.leaf for one in bad)
    paths = ", ".join(one.path for one in bad[:_SHOWN])
    if origin.kind == "collective":
        missing = f"; of rank {', '.join(map(str, origin.undumped))} there is no dump" if origin.undumped else ""
        return f"{name} made the first {what}: finite on all its ranks before, not finite after{missing}"
    if origin.kind == "parameter":
        names = ", ".join(dict.fromkeys(origin.candidate.parameters))
        return f"not finite before the step: parameter {names}, used by {name}, holds {what}"
    if origin.kind == "arrived":
        at_start = origin.candidate.order == 0 or not origin.candidate.before
        when = "not finite before the step: " if at_start else "not finite, and made by nothing that was recorded: "
        perhaps = " (a parameter?)" if any(one.leaf.requires_grad and one.path != "input.0" for one in bad) else ""
        return f"{when}{paths} of {name}{perhaps} holds {what}"
    if origin.kind == "uninitialised":
        return f"{name} is memory that nobody had written to; it holds {what}, which went into gradients"
    if origin.kind == "gradient":
        return f"{name} ({paths}) is the first that holds {what}, and the dump has nothing of how it was computed"
    return f"{name} made the first {what}: its inputs are finite" + (
        ", but for infinities that were put there on purpose (a row that is masked out entirely?)"
        if origin.candidate.masked
        else ""
    )


def _what(leaves: Iterable[Leaf]) -> str:
    held = list(leaves)
    nan = any(has_nan(leaf) for leaf in held)
    inf = any(_has_inf(leaf) for leaf in held)
    return "NaN and infinity" if nan and inf else "NaN" if nan else "infinity"


def _has_inf(leaf: Leaf) -> bool:
    if leaf.inf_count is not None:
        return leaf.inf_count > 0
    return any(value is not None and math.isinf(value) for value in (leaf.max, leaf.min))


def advice(origin: Origin, dump: RankDump) -> str:
    """One sentence or two for somebody who has to go on from here."""
    if origin.grower is not None:
        return (
            f"look at how {origin.grower.operation} is called (arguments, masks, scales): the overflow is only where "
            "the growth ends. Run without it, or with a plain implementation of it, to make sure."
        )
    if origin.kind == "collective":
        return "look at the magnitudes that went in: a sum over ranks overflows where the parts do not; average first."
    if origin.kind == "parameter":
        return "look at the step before this one, or at the checkpoint that was loaded."
    if origin.kind == "arrived":
        return "look at what makes this tensor: the batch, a kernel of your own, or what ran before the dump began."
    if origin.kind == "uninitialised":
        return "write to the whole of it before it is read, or use zeros."
    if origin.candidate.in_backward and _what(one.leaf for one in origin.candidate.bad) == "infinity":
        return (
            "a gradient overflows: lower the loss scale, or look for a division by almost nothing. With a GradScaler "
            "that is how its first steps look, and it skips them."
        )
    if dump.level == "L0":
        return f'dump the step again with level "mix" and list ["{origin.name}"], to see the operation inside it.'
    if dump.task != "tensor":
        return (
            f'dump the step again with task "tensor" and list ["{origin.name}"], to see the elements. If nothing is '
            "found then, timing matters: set async_dump, and suspect memory that is given out too early."
        )
    return f"load its tensors from {dump.directory / 'dump_tensor_data'} and run the operation alone."
