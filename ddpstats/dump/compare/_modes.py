"""What can be compared of dumps: what they hold decides."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice

from ddpstats.dump.compare._rows import MODES, Mode
from ddpstats.dump.format._files import RankDump
from ddpstats.errors import DumpError

_LOOKED_AT = 200  # entries, to see what a dump holds
_SIGNS: dict[Mode, re.Pattern[str]] = {"tensor": re.compile(r'"data_name":\s*"'), "md5": re.compile(r'"md5":\s*"')}
_WHAT: dict[Mode, tuple[str, str]] = {
    "tensor": ("saved tensors", "Dump with task tensor, or name some in statistics.tensor_list"),
    "md5": ("checksums", "Dump with summary_mode md5"),
}


def mode_of(dumps: Sequence[RankDump], given: Mode | None) -> Mode:
    """``given``, if one of the dumps holds it; else the most that can be compared of their first entries.

    Raises:
        DumpError: where no dump holds what was asked for: nothing would be compared then.
    """
    if given is None:
        held = [_held(dump) for dump in dumps]
        return next((mode for mode in MODES if all(mode in modes for modes in held)), "statistics")
    if given in _SIGNS and not any(_has(dump, given) for dump in dumps):
        what, advice = _WHAT[given]
        raise DumpError(
            f"--mode {given}: there are no {what} in {dumps[0].path}, nor in {dumps[-1].path}. {advice}, or leave "
            "--mode out.",
            path=str(dumps[0].path),
        )
    return given


def _has(dump: RankDump, mode: Mode) -> bool:
    return any(_SIGNS[mode].search(member.text) for member in dump.members())


def _held(dump: RankDump) -> set[Mode]:
    texts = [member.text for member in islice(dump.members(), _LOOKED_AT)]
    held: set[Mode] = {mode for mode, sign in _SIGNS.items() if any(map(sign.search, texts))}
    if dump.task != "tensor":
        held.discard("tensor")  # a few of statistics.tensor_list
    return held | {"statistics"}
