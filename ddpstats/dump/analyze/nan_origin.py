"""``ddpstats nan-origin DIR``: the first operation of a dumped step, on any rank, that made a NaN or an infinity.

Reads the dumps of all ranks of one step, also those of a run that was killed in it, one entry at a time. Exit status 0
if nothing was found, 1 if something was (also memory that is shared), 2 if it cannot be read.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from ddpstats._base.text import VerbReport, count_of, dtype_name, printable, ranks_text
from ddpstats.dump.analyze._candidates import RankScan
from ddpstats.dump.analyze._explain import advice, also_words, coverage_of, left_out_words, verdict, what_of
from ddpstats.dump.analyze._first_nan import Findings, NaNOrigin, find_origins
from ddpstats.dump.analyze._growth import Grower, Grown
from ddpstats.dump.analyze.nan_scan import scan_rank
from ddpstats.dump.analyze.stomp import MemoryWalk, Overlap
from ddpstats.dump.entries import DumpLeaf
from ddpstats.dump.msprobe import parse_name
from ddpstats.dump.reader import RankDump, find_ranks, notes_of, sayable_errors
from ddpstats.errors import DumpError

_SHOWN, _SHOWN_FRAMES = 8, 4


EPILOG = """example:
  ddpstats nan-origin dumps/now

exit status: 0 nothing found, 1 something found, 2 it could not run"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="a dump with one step, a step's directory, or a rank's")


def run(args: argparse.Namespace) -> int:
    """Raises `DumpError` for a directory without a dump, or a damaged one."""
    with sayable_errors():
        scans, memory = read(find_ranks(args.directory))
        findings = find_origins(scans)
        return VerbReport(
            1 if findings.origins or any(memory) else 0,
            lambda: as_text(scans, findings, memory),
            lambda: as_json(scans, findings, memory),
        ).show(args.json)


def read(ranks: Sequence[RankDump]) -> tuple[list[RankScan], list[list[Overlap] | None]]:
    """Every rank's entries, once."""
    scans, memory = [], []
    for dump in ranks:
        walk = MemoryWalk(dump.level)
        scans.append(scan_rank(dump, walk.take))
        memory.append(walk.overlaps())
    if not any(scan.entries for scan in scans):
        raise DumpError(f"{ranks[0].path} has no entries. Does its configuration choose any, by scope and list?")
    return scans, memory


# -- in words ---------------------------------------------------------------------------------------------------------


def as_text(scans: Sequence[RankScan], findings: Findings, memory: Sequence[list[Overlap] | None]) -> str:
    by_rank = {scan.rank: scan for scan in scans}
    lines = [_read_words(scans)]
    for scan in scans:
        if not scan.dump.complete:
            lines.append(
                f"{_rank(scan.dump.rank)}: incomplete: the run ended inside this step; "
                "the newest entries may be missing"
            )
    lines += _capped([f"note: {line}" for line in findings.unmatched])
    lines.append("")
    if findings.origins:
        lines += _origins(scans, findings)
    else:
        lines += _nothing(scans, findings, is_all=not any(memory))
    lines += _capped([also_words(_rank(by_rank[rank].dump.rank), one) for rank, one in findings.also])
    lines += _memory_notes(scans, memory)
    lines += [f"note: {note}" for note in notes_of(scan.dump for scan in scans)]
    return printable(lines)


def _nothing(scans: Sequence[RankScan], findings: Findings, *, is_all: bool) -> Iterator[str]:
    left_out = left_out_words([scan.dump for scan in scans], undumped(scans))
    if findings.also:
        yield "No NaN or infinity found that reached a gradient or a collective."
    else:
        every = "every recorded tensor" if left_out else "every tensor"
        what = "Nothing" if is_all else "No NaN or infinity"
        yield f"{what} found: {every} is finite, or was made infinite on purpose and became finite again."
    if left_out:
        yield left_out


def undumped(scans: Sequence[RankScan]) -> list[int]:
    """Ranks that take part in collectives of these, and have no dump here."""
    known = {rank for scan in scans for call in scan.collectives for rank in call.ranks}
    return sorted(known - {scan.rank for scan in scans})


def _read_words(scans: Sequence[RankScan]) -> str:
    entries = sum(scan.entries for scan in scans)
    step = scans[0].dump.step
    where = "" if step is None else f" of step {step}"
    collectives = sum(len(scan.collectives) for scan in scans)
    read_ones = [count_of(len(scans), "ranks") + where, count_of(entries, "entries")]
    return ", ".join([*read_ones, count_of(collectives, "collectives")]) + "."


def _origins(scans: Sequence[RankScan], findings: Findings) -> Iterator[str]:
    groups: dict[tuple[str, str], list[NaNOrigin]] = {}
    for origin in findings.origins:
        groups.setdefault((origin.name, origin.kind), []).append(origin)
    by_rank = {scan.rank: scan for scan in scans}
    for number, origins in enumerate(groups.values()):
        if number:
            yield ""
        yield from _one(by_rank[origins[0].rank], origins, findings.phase)


def _one(scan: RankScan, origins: Sequence[NaNOrigin], phase: str) -> Iterator[str]:
    origin, dump = origins[0], scan.dump
    ranks = ranks_text([one.rank for one in origins]).capitalize() + ": " if dump.rank is not None else ""
    who = ranks + verdict(origin, dump)
    yield f"{who}, {phase}." if phase != "in a collective" and scan.collectives else f"{who}."
    if origin.after or origin.until:
        yield f"  between: {origin.after or 'the beginning'} and {origin.until or 'the end'}"
    for number, line in enumerate(stack_of(dump, origin.name)[:_SHOWN_FRAMES]):
        yield f"  {'at' if number == 0 else '  '} {line}"
    if origin.modules:
        yield "  in " + ", in ".join(origin.modules[:_SHOWN])
    yield from _tensors(origin)
    if origin.candidate.before:
        yield "  just before: " + ", ".join(origin.candidate.before)
    if origin.grower is not None:
        yield from _growth(origin.grower)
    yield "  What to do next: " + advice(origin, dump)


def _tensors(origin: NaNOrigin) -> Iterator[str]:
    entry = origin.candidate.entry
    if origin.kind == "gradient":
        yield from _capped([_tensor(path, leaf) for path, leaf in entry.leaves()])
        return
    parameters = [(path, leaf) for path, leaf in entry.leaves() if path.startswith("parameters.")]
    yield "  inputs:"
    yield from _capped([_tensor(path, leaf) for path, leaf in [*entry.inputs, *parameters]] or ["    none"])
    yield "  outputs:"
    yield from _capped([_tensor(path, leaf) for path, leaf in entry.outputs] or ["    none"])


def _tensor(path: str, leaf: DumpLeaf) -> str:
    numbers = zip(("Max", "Min", "Mean", "Norm"), (leaf.max, leaf.min, leaf.mean, leaf.norm), strict=True)
    words = [f"{name} {_number(value)}" for name, value in numbers if value is not None]
    if not leaf.is_finite:
        words += [f"{leaf.nan_count:,} NaN"] if leaf.nan_count else []
        words += [f"{leaf.inf_count:,} infinite"] if leaf.inf_count else []
        words += [f"first at {list(leaf.first_bad)}"] if leaf.first_bad is not None else []
    return f"    {path}  {dtype_name(leaf.dtype)}{list(leaf.shape)}  " + ", ".join(words)


def _growth(grower: Grower) -> Iterator[str]:
    yield (
        f"  It grew until it overflowed: {grower.operation} ({grower.direction}) makes it larger in {grower.times} of "
        f"{grower.calls} calls, x {_number(grower.ratio)} on average:"
    )
    for one in grower.trail:
        yield f"    {one.name}  {_number(one.size_in)} -> {_number(one.size_out)}  x {_number(one.ratio)}"


def _number(value: float) -> str:
    return f"{value:.4g}"


def _memory_notes(scans: Sequence[RankScan], memory: Sequence[list[Overlap] | None]) -> Iterator[str]:
    for scan, overlaps in zip(scans, memory, strict=True):
        if overlaps is None:
            yield ""
            yield f"note: {_rank(scan.dump.rank)}: this dump does not record where its tensors are in memory."
        elif overlaps:
            yield ""
            yield (
                f"note: {_rank(scan.dump.rank)}: live storages that share memory (a stomp, unless it is meant, as by "
                "from_numpy or dlpack):"
            )
            yield from _capped([f"  {overlap}" for overlap in overlaps])


def stack_of(dump: RankDump, name: str) -> list[str]:
    """The lines of the call, innermost first; of a backward pass, those of the forward pass if it has none."""
    found = dump.stack_of(name) or dump.stack_of(parse_name(name).forward)
    return [" ".join(line.split()) for line in found]


def _rank(rank: int | None) -> str:
    return "this process" if rank is None else f"rank {rank}"


def _capped(lines: list[str]) -> list[str]:
    left = len(lines) - _SHOWN
    return lines if left <= 0 else [*lines[:_SHOWN], f"    ... and {left:,} more"]


# -- as JSON ----------------------------------------------------------------------------------------------------------


def as_json(scans: Sequence[RankScan], findings: Findings, memory: Sequence[list[Overlap] | None]) -> dict[str, Any]:
    by_rank = {scan.rank: scan for scan in scans}
    data: dict[str, Any] = {
        "step": scans[0].dump.step,
        "ranks": [
            {
                "rank": scan.dump.rank,
                "entries": scan.entries,
                "collectives": len(scan.collectives),
                "complete": scan.dump.complete,
                "whole": coverage_of(scan.dump).is_whole,
            }
            for scan in scans
        ],
        "phase": findings.phase,
        "origins": [_origin_json(by_rank[origin.rank].dump, origin) for origin in findings.origins],
        "unmatched": list(findings.unmatched),
        "also": [
            {"rank": by_rank[rank].dump.rank, "name": one.name, "what": what_of(one), "standing": one.standing}
            for rank, one in findings.also
        ],
        "left_out": left_out_words([scan.dump for scan in scans], undumped(scans)),
        "overlaps": [
            {"rank": scan.dump.rank, "known": found is not None, "shared": [str(one) for one in found or ()]}
            for scan, found in zip(scans, memory, strict=True)
        ],
        **_anomalies(by_rank, findings),
    }
    data["notes"] = notes_of(scan.dump for scan in scans)  # of all read above
    return data


def _origin_json(dump: RankDump, origin: NaNOrigin) -> dict[str, Any]:
    grower = origin.grower
    return {
        "rank": dump.rank,
        "name": origin.name,
        "kind": origin.kind,
        "verdict": verdict(origin, dump),
        "bad": [one.path for one in origin.candidate.bad],
        "after": origin.after,
        "until": origin.until,
        "undumped_ranks": list(origin.undumped),
        "before": list(origin.candidate.before),
        "growth": None if grower is None else {**vars(grower), "trail": [_grown_json(one) for one in grower.trail]},
        "advice": advice(origin, dump),
    }


def _grown_json(one: Grown) -> dict[str, Any]:
    return {"name": one.name, "ratio": one.ratio, "norm": one.size_out}


def _anomalies(by_rank: dict[int, RankScan], findings: Findings) -> dict[str, Any]:
    """Per rank, in the words that other tools of this format use."""
    found: dict[str, Any] = {}
    for origin in findings.origins:
        found.setdefault(f"rank_{origin.rank}", []).append(
            {
                "op_name": origin.name,
                "data_info": origin.candidate.entry.raw,
                "construct_info": list(origin.modules),
                "stack_info": stack_of(by_rank[origin.rank].dump, origin.name),
            }
        )
    return found
