"""Which options fit which kind of comparison: an option that would be ignored is an error."""

from __future__ import annotations

import argparse

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


def check_options(args: argparse.Namespace) -> None:
    """Raises `DumpError` for an option that says nothing about this kind of comparison."""
    kind = _OF_TENSORS if args.tensor else _OF_RANKS if args.b is None else _OF_TWO
    for name, kinds in _MEANT_FOR.items():
        if getattr(args, name) not in (None, False) and kind not in kinds:
            raise DumpError(
                f"--{name.replace('_', '-')} is for comparing {' and '.join(kinds)}, and this compares {kind}. "
                "Leave it out."
            )
