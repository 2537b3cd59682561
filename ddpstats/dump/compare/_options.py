"""What can be compared: which words of the command go together, and what the dumps hold."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from itertools import islice

from ddpstats.dump.compare._rows import MODES, Mode
from ddpstats.dump.format._files import RankDump
from ddpstats.errors import DumpError

_OF_TWO = "two dumps (A and B)"
_OF_RANKS = "the ranks of one dump (A alone)"
_OF_TENSORS = "single tensors (--tensor)"
_MEANT_FOR = {
    "mode": (_OF_TWO, _OF_RANKS),
    "tolerance": (_OF_TWO,),
    "exact": (_OF_TWO,),
    "everything": (_OF_RANKS,),
    "any_step": (_OF_TWO,),
    "csv": (_OF_TWO, _OF_RANKS),
    "html": (_OF_TWO, _OF_RANKS),
}
_LOOKED_AT = 200  # entries, to see what a dump holds
_SIGNS: dict[Mode, re.Pattern[str]] = {"tensor": re.compile(r'"data_name":\s*"'), "md5": re.compile(r'"md5":\s*"')}
_WHAT: dict[Mode, tuple[str, str]] = {
    "tensor": ("saved tensors", "Dump with task tensor, or name some in statistics.tensor_list"),
    "md5": ("checksums", "Dump with summary_mode md5"),
}


def check_options(args: argparse.Namespace) -> None:
    """Raises `DumpError` for an option that says nothing about this kind of comparison: it would be ignored."""
    kind = _OF_TENSORS if args.tensor else _OF_RANKS if args.b is None else _OF_TWO
    for name, kinds in _MEANT_FOR.items():
        if getattr(args, name) not in (None, False) and kind not in kinds:
            raise DumpError(
                f"--{name.replace('_', '-')} is for comparing {' and '.join(kinds)}, and this compares {kind}. "
                "Leave it out."
            )


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
