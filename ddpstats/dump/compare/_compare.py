"""``ddpstats compare A B``: two dumps of a step; ``ddpstats compare A``: the ranks of one.

A is the run in question, B the reference. Each is a dump's root, a step's or rank's directory, or a dump.json. What
both have under one name, in one shape, is compared: its elements, its checksum or its statistics, for the whole of the
dumps the first of these that both hold. In a comparison of elements, what neither side saved is compared by statistics.
Of statistics a relative error above the tolerance is a ``Warning``: ``_rules`` says what counts when a value is NaN,
infinite or zero. An entry that one side lacks is a difference too.

Exit status 0 if nothing is different, 1 if something is, 2 if the dumps cannot be read, do not belong together, or
hold nothing that can be compared.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import deque
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from ddpstats._base.text import VerbReport, check_writable, ranks_text
from ddpstats.dump.compare import _between_ranks, _comparison
from ddpstats.dump.compare._comparer import CompareTensors, EntryComparer
from ddpstats.dump.compare._comparison import DumpComparison, RankComparison
from ddpstats.dump.compare._pages import Section, write_page, write_table
from ddpstats.dump.compare._rows import MODES, Mode, table, table_path
from ddpstats.dump.compare._rules import TOLERANCE
from ddpstats.dump.compare._two_dumps import PairedDumps, compare_dumps
from ddpstats.dump.reader import RankDump, find_ranks, rank_of, ranks_without_dump, sayable_errors, steps_in
from ddpstats.errors import DumpError

NOTHING = 2  # the status: a success would be taken for equal dumps


EPILOG = """examples:
  ddpstats compare dumps/now dumps/last_week
  ddpstats compare dumps/now                  the ranks of one run with one another

exit status: 0 nothing found, 1 something found, 2 it could not run"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", type=Path, help="the run in question: a dump, step, rank or dump.json")
    parser.add_argument("b", metavar="B", type=Path, nargs="?", help="the reference; without it A's ranks are compared")
    parser.add_argument("--step", type=int, metavar="N", help="which step of dumps that have several")
    parser.add_argument("--mode", choices=MODES, help="what is compared (default: the first that both dumps hold)")
    parser.add_argument(
        "--tolerance", type=_ratio, metavar="RATIO", help="a relative error above this ratio counts (default: 0.5)"
    )
    parser.add_argument("--exact", action="store_true", help="any inequality counts, however small")
    parser.add_argument("--everything", action="store_true", help="without B: all entries have to be equal")
    parser.add_argument(
        "--tensor",
        nargs="+",
        metavar="NAME.path",
        help="compare one saved tensor, or two of different names, A's with B's (without B: both of A); goes last",
    )
    parser.add_argument("--any-step", action="store_true", help="A and B may be different steps")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write a table; one per rank where there are several")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page for a browser")


def run(args: argparse.Namespace) -> int:
    """Raises `DumpError` for what cannot be read, or does not belong together."""
    check_options(args)
    check_writable(args.csv, args.html)
    args.tolerance = TOLERANCE if args.tolerance is None else args.tolerance
    with sayable_errors():
        if args.tensor:
            return _run_tensor(args)
        return _run_ranks(args) if args.b is None else _run_two(args)


def _ratio(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text}: a ratio of 0 or more is expected, 0.5 for 50 %")
    return value


def _ranks_of(path: Path, step: int | None) -> list[RankDump]:
    if step is None:
        return find_ranks(path)
    steps = steps_in(path)
    if steps and step not in steps:
        listed = ", ".join(map(str, list(steps)[:10]))
        raise DumpError(f"{path} has no step {step}. It has {listed}.", path=str(path))
    dumps = find_ranks(steps[step] if steps else path)
    if dumps[0].step not in (step, None):
        raise DumpError(f"{path} is of step {dumps[0].step}, not {step}: give the dump's root.", path=str(path))
    return dumps


def _run_two(args: argparse.Namespace) -> int:
    ranks_a, ranks_b = _ranks_of(args.a, args.step), _ranks_of(args.b, args.step)
    both = _paired(ranks_a, ranks_b)
    _check_alike(both, args.any_step)
    mode = mode_of([dump for pair in (both if args.mode else both[:1]) for dump in pair], args.mode)
    compared = tuple(_compare(a, b, mode, args, many=len(both) > 1) for a, b in both)
    only = [[rank_of(dump) for dump in dumps if all(dump not in pair for pair in both)] for dumps in (ranks_a, ranks_b)]
    empty = [f"{side}: {name}" for side, path in (("A", args.a), ("B", args.b)) for name in _empty(path, args.step)]
    comparison = DumpComparison(
        mode, args.tolerance, args.exact, compared, tuple(only[0]), tuple(only[1]), tuple(empty)
    )
    status, text = NOTHING if comparison.nothing else int(comparison.differs), _comparison.as_text(comparison)
    report = VerbReport(status, lambda: text, lambda: _comparison.as_json(comparison))
    if args.html is not None:
        write_page(args.html, f"{args.a} compared with {args.b}", report.text(), _comparison.page_sections(comparison))
    return report.show(args.json)


def _empty(path: Path, step: int | None) -> list[str]:
    """Rank directories without a dump, if it is a step that was given."""
    steps = steps_in(path)
    return ranks_without_dump(path if not steps else steps[step] if step is not None else next(iter(steps.values())))


def _paired(ranks_a: Sequence[RankDump], ranks_b: Sequence[RankDump]) -> list[tuple[RankDump, RankDump]]:
    if len(ranks_a) == len(ranks_b) == 1:
        return [(ranks_a[0], ranks_b[0])]  # whatever their numbers: two ranks may well be compared
    by_rank = {rank_of(dump): dump for dump in ranks_b}
    both = [(dump, by_rank[rank_of(dump)]) for dump in ranks_a if rank_of(dump) in by_rank]
    if not both:
        numbers = [ranks_text([rank_of(dump) for dump in dumps]) for dumps in (ranks_a, ranks_b)]
        raise DumpError(f"no rank is in both dumps: A has {numbers[0]}, B has {numbers[1]}. Give one rank of each.")
    return both


def _check_alike(both: Sequence[tuple[RankDump, RankDump]], any_step: bool) -> None:
    for a, b in both:
        if a.level and b.level and a.level != b.level:
            raise DumpError(
                f"{a.path} is of level {a.level} and {b.path} of level {b.level}: their entries have different names. "
                "Dump both with one level.",
                path=str(a.path),
            )
        if not any_step and a.step is not None and b.step is not None and a.step != b.step:
            raise DumpError(
                f"{a.path} is of step {a.step} and {b.path} of step {b.step}. Compare one step: --step N with both "
                "dumps' roots; or --any-step if that is meant.",
                path=str(a.path),
            )


def _compare(a: RankDump, b: RankDump, mode: Mode, args: argparse.Namespace, *, many: bool) -> RankComparison:
    comparer = EntryComparer(mode, args.tolerance, _tensors(a, b) if mode == "tensor" else None)
    found = PairedDumps()
    rows = compare_dumps(a, b, comparer, found, is_short=args.csv is None)
    if args.csv is None:
        deque(rows, maxlen=0)
    else:
        lines = table(rows, mode, lambda name: a.stack_of(name) or b.stack_of(name))
        write_table(table_path(args.csv, rank_of(a), many), lines)
    return RankComparison(a, b, found)


def _tensors(a: RankDump, b: RankDump) -> CompareTensors:
    from ddpstats.dump.compare._tensor_compare import compare_saved  # only this mode needs torch

    return lambda leaf_a, leaf_b: compare_saved(a, leaf_a, b, leaf_b)


def _run_ranks(args: argparse.Namespace) -> int:
    dumps = _ranks_of(args.a, args.step)
    if len(dumps) < 2:
        raise DumpError(
            f"{args.a} is one rank: there is nothing to compare it with. Give a second dump, or a step with its ranks.",
            path=str(args.a),
        )
    _check_alike([(dumps[0], other) for other in dumps[1:]], any_step=False)
    digest: _between_ranks.Digest | None = None
    mode = mode_of(dumps, args.mode)
    if mode == "tensor":
        from ddpstats.dump.compare._tensor_compare import tensor_digest

        digest = tensor_digest
    found = _between_ranks.compare_ranks(dumps, everything=args.everything, mode=mode, digest=digest)
    status, text = NOTHING if found.nothing else int(found.differs), _between_ranks.as_text(found)
    report = VerbReport(status, lambda: text, lambda: _between_ranks.as_json(found))
    if args.csv is not None:
        write_table(args.csv, _between_ranks.table(found))
    if args.html is not None:
        header, *rows = _between_ranks.table(found)
        write_page(args.html, f"ranks of {args.a}", report.text(), [Section(header, [(row, "", "") for row in rows])])
    return report.show(args.json)


def _run_tensor(args: argparse.Namespace) -> int:
    from ddpstats.dump.compare import _tensor_compare as one

    names = args.tensor
    if len(names) > 2 or (len(names) == 1 and args.b is None):
        raise DumpError("--tensor takes one name, of a tensor in A and B, or two: A's and B's (without B: both of A).")
    a, b = _only_rank(args.a, args.step), _only_rank(args.b or args.a, args.step)
    pair = one.compare_pair(a, names[0], b, names[-1])
    status = 0 if pair.close.equal else 1
    return VerbReport(status, lambda: one.as_text(pair), lambda: one.as_json(pair)).show(args.json)


def _only_rank(path: Path, step: int | None) -> RankDump:
    dumps = _ranks_of(path, step)
    if len(dumps) > 1:
        ranks = ranks_text([rank_of(dump) for dump in dumps])
        raise DumpError(f"{path} has {ranks}. Give the directory of one.", path=str(path))
    return dumps[0]


# -- which words go together, and what the dumps hold ------------------------------------------------------------------

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
    texts = (member.text for dump in dumps for member in dump.members())
    if given in _SIGNS and not any(map(_SIGNS[given].search, texts)):
        what, advice = _WHAT[given]
        raise DumpError(
            f"--mode {given}: there are no {what} in {dumps[0].path}, nor in {dumps[-1].path}. {advice}, or leave "
            "--mode out.",
            path=str(dumps[0].path),
        )
    return given


def _held(dump: RankDump) -> set[Mode]:
    texts = [member.text for member in islice(dump.members(), _LOOKED_AT)]
    held: set[Mode] = {mode for mode, sign in _SIGNS.items() if any(map(sign.search, texts))}
    if dump.task != "tensor":
        held.discard("tensor")  # a few of statistics.tensor_list
    return held | {"statistics"}
