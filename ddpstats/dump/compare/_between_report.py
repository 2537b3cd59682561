"""What was found between ranks, as text, JSON and a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddpstats._base.rank_names import ranks_text
from ddpstats._base.report import printable
from ddpstats._base.wording import count_of
from ddpstats.dump.compare._between_ranks import BetweenRanks, RankDifference
from ddpstats.dump.compare._rows import Mode
from ddpstats.dump.format._entries import STATISTICS, DumpLeaf
from ddpstats.dump.format._files import notes_of, rank_of, ranks_without_dump


def as_text(found: BetweenRanks) -> str:
    """For people."""
    return printable(_lines(found))


def _lines(found: BetweenRanks) -> list[str]:
    ranks = ranks_text([rank_of(dump) for dump in found.dumps])
    lines = [f"{ranks} of {found.dumps[0].directory.parent}", *_left_out(found)]
    if found.nothing:
        return ["NOTHING TO COMPARE: " + lines[0], *lines[1:], *_NOTHING]
    if not found.divergences:
        equal = f"NOTHING DIFFERENT: {_counted(found)} are equal {_EQUAL[found.mode]} between "
        return [equal + lines[0], *lines[1:], *notes_of(found.dumps)]
    lacking = f"; {count_of(found.lacking, 'entries')} not on every rank" if found.lacking else ""
    lines[0] = f"DIFFERENT: of {_counted(found)}, {found.different:,} differ between {lines[0]}{lacking}"
    first = found.divergences[0]
    lines += ["", "first that differs:", f"  {first.entry}  {first.path}", f"    {first.verdict}"]
    lines += [f"    rank {rank}: {_values(leaf)}" for rank, leaf in list(first.by_rank.items())[:8]]
    lines += _places(found, first)
    if len(found.divergences) > 1:
        count = found.different + found.lacking
        lines += ["", f"in execution order, {min(20, count)} of {count:,}:"]
        lines += [f"  {one.name}  {one.verdict}" for one in found.divergences[:20]]
    return [*lines, *(f"  {note}" for note in notes_of(found.dumps)), "", *_NEXT]


def _counted(found: BetweenRanks) -> str:
    kinds = [(found.parameters, "parameters"), (found.results, "results of collectives")]
    if found.everything:
        kinds.append((found.others, "other tensors"))
    return "{} and {}".format(", ".join(count_of(*kind) for kind in kinds[:-1]), count_of(*kinds[-1]))


def _left_out(found: BetweenRanks) -> Iterator[str]:
    """What was not compared, and why."""
    for dump in found.dumps:
        if not dump.complete:
            yield f"  {dump.path}: incomplete: the run ended inside this step"
    for name in ranks_without_dump(found.dumps[0].directory.parent):
        yield f"  {name} has no dump: it ended before its first entry, or was not copied"
    if found.absent:
        yield f"  groups have ranks of which no dump is here: {ranks_text(found.absent)}"
    if found.sharded:
        many = "s were" if found.sharded != 1 else " was"
        yield f"  {found.sharded:,} sharded tensor{many} not compared: every rank has a part of its own"
    if found.skipped:
        yield (
            f"  {count_of(found.skipped, 'collectives')} left out: without an output on some rank, or of a group that "
            "does not hold the rank"
        )
    if not found.parameters and not found.nothing:
        if {dump.level for dump in found.dumps} == {"L1"}:
            yield "  no parameters in these dumps (level L1): use level L0 or mix"
        elif not found.sharded:
            yield "  no parameters were compared (data_mode, scope or list left them out, or a rank lacks them)"


_EQUAL: dict[Mode, str] = {
    "statistics": "in all their statistics (which does not prove equal tensors)",
    "md5": "in their statistics and checksums",
    "tensor": "in all their statistics, and byte by byte where they were saved,",
}
_NOTHING = (
    "  no entry has parameters, and there are no results of all_reduce, broadcast or all_gather. Dump with level L0 or",
    "  mix; or give --everything, if all ranks were given the same batch.",
)
_NEXT = (
    "Next: compare the rank that differs with another one: ddpstats compare STEP/rankX STEP/rankY. If parameters",
    "differ, look at the step before: whether its gradients were reduced on every rank.",
)


def _places(found: BetweenRanks, one: RankDifference) -> list[str]:
    dump = next(dump for dump in found.dumps if rank_of(dump) == min(one.by_rank))
    return [f"    {line}" for line in dump.place_of(one.entry)]


def _values(leaf: DumpLeaf | None) -> str:
    if leaf is None:
        return "has none"
    shown = [f"{key} {leaf.raw.get(key)!r}" for key in (*STATISTICS, "md5") if leaf.raw.get(key) is not None]
    return f"{leaf.dtype} {list(leaf.shape)} {' '.join(shown)}"


def as_json(found: BetweenRanks) -> dict[str, Any]:
    divergences = [
        {
            "name": one.name,
            "entry": one.entry,
            "path": one.path,
            "index": one.index,
            "verdict": one.verdict,
            "culprit_ranks": list(one.culprits),
            "missing_ranks": list(one.missing),
            "by_rank": {str(rank): None if leaf is None else dict(leaf.raw) for rank, leaf in one.by_rank.items()},
        }
        for one in found.divergences
    ]
    return {
        "verdict": "nothing to compare" if found.nothing else "different" if found.differs else "nothing different",
        "everything": found.everything,
        "mode": found.mode,
        "compared": found.compared,
        "compared_parameters": found.parameters,
        "compared_results": found.results,
        "different": found.different,
        "not_on_every_rank": found.lacking,
        "sharded": found.sharded,
        "skipped": found.skipped,
        "ranks": [rank_of(dump) for dump in found.dumps],
        "ranks_without_dump": ranks_without_dump(found.dumps[0].directory.parent),
        "ranks_of_groups_without_dump": sorted(found.absent),
        "incomplete_ranks": [rank_of(dump) for dump in found.dumps if not dump.complete],
        "first": divergences[0] if divergences else None,
        "divergences": divergences,
        "notes": notes_of(found.dumps),
    }


def table(found: BetweenRanks) -> Iterator[list[Any]]:
    """Rows of a CSV file, its header first: one per tensor and rank."""
    yield ["Name", "Rank", "Dtype", "Tensor Shape", "Max", "Min", "Mean", "L2norm", "MD5", "Differs", "Err_message"]
    for one in found.divergences:
        for rank, leaf in one.by_rank.items():
            shown = ["N/A"] * 7
            if leaf is not None:
                raw = [leaf.raw.get(key) for key in (*STATISTICS, "md5")]
                shown = [leaf.dtype, str(list(leaf.shape)), *("N/A" if value is None else str(value) for value in raw)]
            differs = str(rank in one.culprits) if one.culprits else "N/A"
            yield [one.name, rank, *shown, differs, one.verdict]
