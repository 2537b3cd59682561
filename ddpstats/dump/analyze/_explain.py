"""What is said of an origin: what happened, in one sentence, and what to do next, in one or two.

What is not in a dump cannot be found, and cannot be called finite: how much of a step it has is said too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ddpstats._base.text import ranks_text, shorten
from ddpstats.dump.analyze._candidates import Candidate
from ddpstats.dump.analyze._first_nan import NaNOrigin
from ddpstats.dump.msprobe import parse_name
from ddpstats.dump.reader import RankDump


class Coverage(NamedTuple):
    """What one rank's dump leaves out.

    Attributes:
        is_whole: every operation of the step, with what it took and gave, forward and backward, as far as torch shows
            it. False too where the dump does not say: those of other tools do not.
        left_out: in words, what is not recorded on purpose.
    """

    is_whole: bool
    left_out: tuple[str, ...]


def coverage_of(dump: RankDump) -> Coverage:
    said = dump.header
    left_out = [] if dump.level != "L0" else ["operations between modules (level L0)"]
    left_out += [f"what is outside of {key} {_listed(said[key])}" for key in ("scope", "list") if said.get(key)]
    modes = said.get("data_mode")
    if isinstance(modes, list) and modes and "all" not in modes:
        left_out.append(f"anything but {_listed(modes)} (data_mode)")
    if not dump.complete:
        left_out.append("the end of the step (the run ended in it)")
    is_said = all(key in said for key in ("scope", "list", "data_mode"))
    return Coverage(is_said and not left_out, tuple(left_out))


def _listed(words: Any) -> str:
    return shorten(words, 3) if isinstance(words, list) else str(words)


def left_out_words(dumps: Sequence[RankDump], undumped: Sequence[int]) -> str:
    """One sentence on all ranks; empty where nothing is left out."""
    words = list(dict.fromkeys(word for dump in dumps for word in coverage_of(dump).left_out))
    if undumped:
        words.append(ranks_text(undumped))
    return f"Not recorded: {'; '.join(words)}." if words else ""


_SHOWN = 8
_SUMS = ("", "sum", "avg", "premul_sum", "product")


def verdict(origin: NaNOrigin, dump: RankDump) -> str:
    """What happened, without the rank and the time."""
    name, bad = origin.name, origin.candidate.bad
    what = what_of(origin.candidate)
    paths = ", ".join(one.path for one in bad[:_SHOWN])
    if origin.kind == "collective":
        return f"{name} made the first {what}: {_collective(origin)}"
    if origin.kind == "parameter":
        names = ", ".join(dict.fromkeys(origin.candidate.parameters))
        parameter = f"parameter {names}" if names else f"{paths}"
        return f"{_before(dump)}: {parameter}, used by {name}, holds {what}"
    if origin.kind == "arrived":
        at_start = origin.candidate.order == 0 or not origin.candidate.before
        when = _before(dump) if at_start else "not finite, and made by nothing that was recorded"
        perhaps = " (a parameter?)" if any(one.leaf.requires_grad and one.path != "input.0" for one in bad) else ""
        return f"{when}: {paths} of {name}{perhaps} holds {what}"
    if origin.kind == "uninitialised":
        where = "gradients" if origin.candidate.reached else "what was computed with it"
        return f"{name} is memory that nobody had written to; it holds {what}, which went into {where}"
    if origin.kind == "given":
        return f"the first NaN was written by {name}, which was given NaN"
    if origin.kind == "gradient":
        return f"{name} ({paths}) is the first that holds {what}, and the dump has nothing of how it was computed"
    return f"{name} made the first {what}: {_inputs(origin)}"


def _before(dump: RankDump) -> str:
    whole = coverage_of(dump).is_whole
    return "not finite before the step" if whole else "not finite before the first entry of this dump"


def _collective(origin: NaNOrigin) -> str:
    if not origin.undumped:
        return "finite on all its ranks before, not finite after"
    ranks = ranks_text(origin.undumped)
    perhaps = " or from the sum" if origin.op in _SUMS and "infinity" in what_of(origin.candidate) else ""
    return f"finite on the dumped ranks; it came from {ranks}{perhaps} (of {ranks} there is no dump)"


def _inputs(origin: NaNOrigin) -> str:
    candidate = origin.candidate
    direction = "backward" if parse_name(origin.name).direction == "backward" else "forward"
    if (direction, "input") not in origin.recorded:
        words = "its inputs are not in this dump"
    elif not candidate.entry.inputs:
        words = "it takes no tensors"
    else:
        words = "its inputs are finite"
    if direction == "backward" and not any(part[0] == "forward" for part in origin.recorded):
        words += ", and the forward pass is not in this dump"
    if candidate.masked:
        words += ", but for infinities that were put there on purpose (a row that is masked out entirely?)"
    return words


def what_of(candidate: Candidate) -> str:
    nan = any(one.leaf.has_nan for one in candidate.bad)
    inf = any(one.leaf.has_infinity for one in candidate.bad)
    return "NaN and infinity" if nan and inf else "NaN" if nan else "infinity"


def also_words(rank: str, candidate: Candidate) -> str:
    """Of what was not finite, and is not to blame."""
    became = "it became finite again" if candidate.standing == "finite again" else "nothing that was recorded used it"
    verb = "holds" if candidate.kind in ("arrived", "parameter", "uninitialised") else "made"
    return f"also: {rank}: {candidate.name} {verb} {what_of(candidate)}; {became}"


def advice(origin: NaNOrigin, dump: RankDump) -> str:
    """One sentence or two for somebody who has to go on from here."""
    if origin.grower is not None:
        return (
            f"look at how {origin.grower.operation} is called (arguments, masks, scales): the overflow is only where "
            "the growth ends. Run without it, or with a plain implementation of it, to make sure."
        )
    if origin.kind == "collective":
        return _collective_advice(origin)
    if origin.kind == "parameter":
        return "look at the step before this one, or at the checkpoint that was loaded."
    if origin.kind == "arrived" and dump.level == "L0":
        return 'operations between modules are not in an L0 dump: dump with level "mix".'
    if origin.kind == "arrived":
        return "look at what makes this tensor: the batch, a kernel of your own, or what ran before the dump began."
    if origin.kind == "uninitialised":
        return "write to the whole of it before it is read, or use zeros."
    if origin.kind == "given":
        return "write over all of it before it is used, or do not write NaN there."
    if origin.candidate.in_backward and what_of(origin.candidate) == "infinity":
        return (
            "a gradient overflows: lower the loss scale, or look for a division by almost nothing. With a GradScaler "
            "that is how its first steps look, and it skips them."
        )
    return _dump_again(origin, dump)


def _collective_advice(origin: NaNOrigin) -> str:
    if origin.undumped:
        return f"dump {ranks_text(origin.undumped)} as well."
    if "NaN" in what_of(origin.candidate):
        return (
            "finite values do not add up to a NaN: suspect who writes to these tensors meanwhile (a missing wait, "
            "memory that is given out too early), or the backend."
        )
    return "look at the magnitudes that went in: a sum over ranks overflows where the parts do not; average first."


def _dump_again(origin: NaNOrigin, dump: RankDump) -> str:
    if dump.level == "L0":
        return f'dump the step again with level "mix" and list ["{origin.name}"], to see the operation inside it.'
    if dump.task != "tensor":
        return (
            f'dump the step again with task "tensor" and list ["{origin.name}"], to see the elements. If nothing is '
            "found then, timing matters: set async_dump, and suspect memory that is given out too early."
        )
    return f"load its tensors from {dump.directory / 'dump_tensor_data'} and run the operation alone."
