"""How much of a step a dump has: what is not in it cannot be found, and cannot be called finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddpstats._base.rank_names import ranks_text
from ddpstats._base.wording import listed
from ddpstats.dump.format._contents import header
from ddpstats.dump.format._files import RankDump
from ddpstats.errors import DumpError


@dataclass(frozen=True)
class Coverage:
    """What one rank's dump leaves out.

    Attributes:
        is_whole: every operation of the step, with what it took and gave, forward and backward, as far as torch shows
            it. False too where the dump does not say: those of other tools do not.
        left_out: in words, what is not recorded on purpose.
    """

    is_whole: bool
    left_out: tuple[str, ...]


def coverage_of(dump: RankDump) -> Coverage:
    try:
        said = header(dump.path)
    except DumpError:  # it was read before, and is gone: nothing is known
        said = {}
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
    return listed(words, 3) if isinstance(words, list) else str(words)


def left_out_words(dumps: Sequence[RankDump], undumped: Sequence[int]) -> str:
    """One sentence on all ranks; empty where nothing is left out."""
    words = list(dict.fromkeys(word for dump in dumps for word in coverage_of(dump).left_out))
    if undumped:
        words.append(ranks_text(undumped))
    return f"Not recorded: {'; '.join(words)}." if words else ""
