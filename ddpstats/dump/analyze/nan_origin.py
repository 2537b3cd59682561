"""``ddpstats nan-origin DIR``: the first operation of a dumped step, on any rank, that made a NaN or an infinity.

1. The entries of each rank are read once, one at a time (`nan_scan`): its candidates and its collectives.
2. Collectives of different ranks are matched by their group, their kind and their number in the group; a send with its
   receive. In an order that fits all ranks they give every rank a clock: what follows a collective is later than what
   precedes it on any of its ranks.
3. The origins are the candidates with the earliest clock: of each rank its first one, or a collective whose inputs are
   finite on all its ranks.

Exit status 0 if nothing was found, 1 if something was (also memory that is shared), 2 if the dumps cannot be read.
"""

from __future__ import annotations

import argparse
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from ddpstats._base.text import VerbReport, count_of, dtype_name, printable, ranks_text, shorten
from ddpstats.dump.analyze.nan_scan import Candidate, Collective, Grower, Kind, RankScan, ancestors
from ddpstats.dump.analyze.stomp import MemoryWalk
from ddpstats.dump.msprobe import CollectiveEntry, parse_name
from ddpstats.dump.reader import DumpEntry, DumpLeaf, RankDump, find_ranks, notes_of, sayable_errors
from ddpstats.dump.statistics import STATISTICS
from ddpstats.errors import DumpError

EPILOG = """example:
  ddpstats nan-origin dumps/now

exit status: 0 nothing found, 1 something found, 2 it could not run"""

_SHOWN, _SHOWN_FRAMES = 8, 4
_VAGUE = ("arrived", "gradient")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="a dump with one step, a step's directory, or a rank's")


def run(args: argparse.Namespace) -> int:
    """Raises `DumpError` for a directory without a dump, or a damaged one."""
    with sayable_errors():
        findings = examine(find_ranks(args.directory))
        is_bad = findings.origins or any(rank.shared_memory for rank in findings.ranks)
        return VerbReport(1 if is_bad else 0, lambda: as_text(findings), lambda: asdict(findings)).show(args.json)


# -- findings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NaNOrigin:
    """The origin of the first value that is not finite, on one rank.

    Attributes:
        rank: None for a process without torch.distributed.
        verdict: what happened, in one sentence.
        bad: the paths of the tensors in question.
        after, until: the collectives of this rank around it; None at the beginning and at the end.
        undumped_ranks: those of a collective of which there is no dump.
        modules: the modules' passes around it, innermost first.
        stack: the lines of the call, innermost first.
        growth: the operation that made the values grow until they overflowed.
        entry: what the dump has.
    """

    rank: int | None
    name: str
    kind: Kind
    verdict: str
    advice: str
    bad: tuple[str, ...]
    after: str | None
    until: str | None
    undumped_ranks: tuple[int, ...]
    modules: tuple[str, ...]
    stack: tuple[str, ...]
    growth: Grower | None
    entry: Mapping[str, Any]


@dataclass(frozen=True)
class RankSummary:
    """One rank's dump in numbers; ``shared_memory``: its live storages that share memory (`stomp`)."""

    rank: int | None
    entries: int
    collectives: int
    complete: bool
    shared_memory: tuple[str, ...]


@dataclass(frozen=True)
class Findings:
    """The result for the dumps of one step; ``--json`` prints ``asdict`` of it.

    Attributes:
        unmatched: collectives that some ranks of their group have in their dump, and others not; those that did not
            end; messages without their peer.
        also: what is not finite, and was used by nothing that was recorded.
        left_out: what the dumps do not hold.
        notes: what could not be read.
    """

    step: int | None
    ranks: list[RankSummary]
    origins: list[NaNOrigin]
    unmatched: list[str]
    also: list[str]
    left_out: list[str]
    notes: list[str]


class _Find(NamedTuple):
    clock: tuple[int, int]
    scan: RankScan
    candidate: Candidate
    undumped: tuple[int, ...] = ()


def examine(dumps: Sequence[RankDump]) -> Findings:
    """Find the origins in the dumps of all ranks of one step, and memory that is shared."""
    scans, summaries, notes = [], [], []
    for dump in dumps:
        scan, memory = RankScan(dump), MemoryWalk(dump.level)
        for entry in dump.entries():
            memory.take(entry)
            scan.take(entry)
        scan.settle()
        overlaps = memory.overlaps()
        if overlaps is None:
            notes.append(f"{_rank(dump.rank)}: this dump does not record where its tensors are in memory.")
        shared = tuple(map(str, overlaps or ()))
        summaries.append(RankSummary(dump.rank, scan.entries, len(scan.collectives), dump.complete, shared))
        scans.append(scan)
    if not any(scan.entries for scan in scans):
        raise DumpError(f"{dumps[0].path} has no entries. Does its configuration choose any, by scope and list?")
    matches = _match_collectives(scans)
    order = _set_clocks(matches)
    finds = _earliest([*_in_collectives(scans, order), *_between_collectives(scans, matches)])
    origins = [*map(_origin, finds)]
    also = [
        f"{_rank(scan.dump.rank)}: {candidate.name} made {_what(candidate)}; nothing that was recorded used it"
        for scan in scans
        for candidate in scan.candidates
        if candidate.standing in ("weak", "unused") and candidate not in [find.candidate for find in finds]
    ]
    lacking: dict[str, list[int]] = {}
    for scan in scans:
        for words in _left_out(scan.dump):
            lacking.setdefault(words, []).append(scan.rank)
    left_out = [
        words if len(ranks) == len(scans) else f"{words}, of {ranks_text(ranks)}" for words, ranks in lacking.items()
    ]
    members = {rank for scan in scans for member in scan.collectives for rank in member.call.ranks}
    if undumped := members - {scan.rank for scan in scans}:
        left_out.append(ranks_text(undumped))
    unmatched, notes = [*_unmatched(scans, order)], [*notes_of(dumps), *notes]
    return Findings(dumps[0].step, summaries, origins, unmatched, also, left_out, notes)


def _in_collectives(scans: Sequence[RankScan], order: Sequence[_Match]) -> Iterator[_Find]:
    """Yield, for each of its ranks, a collective whose inputs are finite on all of them."""
    by_rank = {scan.rank: scan for scan in scans}
    for match in order:
        if any(member.has_bad_inputs for member in match.members.values()):
            continue
        undumped = tuple(sorted(set(match.ranks) - set(by_rank)))
        for rank, member in match.members.items():
            if member.origin is not None:
                yield _Find((match.clock, 0), by_rank[rank], member.origin, undumped)


def _between_collectives(scans: Sequence[RankScan], matches: Mapping[int, Sequence[_Match]]) -> Iterator[_Find]:
    """Yield each rank's first candidate that something used, or its first one that counts at all."""
    for scan in scans:
        own = [candidate for candidate in scan.candidates if candidate.kind != "collective"]
        used = [candidate for candidate in own if candidate.standing == "strong"]
        for candidate in (used or [candidate for candidate in own if candidate.standing == "weak"])[:1]:
            clocks = [match.clock for match in matches[scan.rank][: candidate.position]]
            yield _Find((max(clocks, default=0), 1), scan, candidate)


def _earliest(finds: list[_Find]) -> list[_Find]:
    """Return what comes first, by ascending rank; what something used goes before what nothing did."""
    finds = [find for find in finds if find.candidate.standing == "strong"] or finds
    clock = min((find.clock for find in finds), default=None)
    earliest = sorted((find for find in finds if find.clock == clock), key=lambda find: find.scan.rank)
    # what nothing recorded made may have come from another rank, by a collective whose entry was written later
    return [find for find in earliest if find.candidate.kind not in _VAGUE] or earliest


def _origin(find: _Find) -> NaNOrigin:
    scan, dump, candidate = find.scan, find.scan.dump, find.candidate
    name, position = candidate.name, candidate.position
    following = scan.collectives[position + (candidate.kind == "collective") :]
    grower = None if candidate.kind == "given" else scan.growth.grower(candidate, dump)
    stack = dump.stack_of(name) or dump.stack_of(parse_name(name).forward)
    return NaNOrigin(
        dump.rank,
        name,
        candidate.kind,
        _verdict(scan, candidate, find),
        _advice(dump, candidate, grower, find.undumped),
        tuple(path for path, _ in candidate.bad),
        scan.collectives[position - 1].call.name if position else None,
        following[0].call.name if following else None,
        find.undumped,
        tuple(ancestors(name, dump)),
        tuple(" ".join(line.split()) for line in stack),
        grower,
        candidate.entry.raw,
    )


# -- collectives of different ranks -----------------------------------------------------------------------------------


@dataclass(eq=False)
class _Match:
    """One collective, on all ranks that have it; ``ranks`` are those that should."""

    ranks: tuple[int, ...]
    members: dict[int, Collective] = field(default_factory=dict)
    clock: int = 0


def _match_collectives(scans: Sequence[RankScan]) -> dict[int, list[_Match]]:
    """Return the collectives of every rank in execution order, each as what its ranks share.

    They are matched by their number in the group where all dumps have it, for an entry may be missing; or by counting.
    """
    matches: dict[tuple[Any, ...], _Match] = {}
    of_rank = {}
    has_sequence = all(member.call.sequence is not None for scan in scans for member in scan.collectives)
    for scan in scans:
        counts: Counter[tuple[Any, ...]] = Counter()
        of_member = {}
        for member in sorted(scan.collectives, key=lambda member: member.call.number):  # as begun, not as ended
            key, ranks = _key(scan.rank, member.call)
            number = member.call.sequence if has_sequence else counts[key]
            counts[key] += 1
            match = of_member[member] = matches.setdefault((*key, number), _Match(ranks))
            match.members[scan.rank] = member
        of_rank[scan.rank] = [of_member[member] for member in scan.collectives]
    return of_rank


def _key(rank: int, call: CollectiveEntry) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Return what two ranks' entries of one collective have in common, and the ranks that take part."""
    if not call.is_message:
        return (call.group, call.ranks, call.api), call.ranks
    if call.peer is None:
        return (call.group, call.ranks, call.api, rank), (rank,)
    pair = (rank, call.peer) if call.api.endswith("send") else (call.peer, rank)
    return (call.group, call.ranks, "message", pair), pair


def _set_clocks(of_rank: Mapping[int, Sequence[_Match]]) -> list[_Match]:
    """Set every collective's clock; return them in an order that fits all ranks, where there is one."""
    queues = {rank: deque(matches) for rank, matches in of_rank.items()}
    now = dict.fromkeys(queues, 0)
    order: list[_Match] = []
    while heads := [queue[0] for queue in queues.values() if queue]:
        ready = (match for match in heads if all(queues[rank][0] is match for rank in match.members))
        match = next(ready, heads[0])  # asynchronous ones may cross: then some order is as good as another
        match.clock = 1 + max(now[rank] for rank in match.members)
        order.append(match)
        for rank in match.members:
            now[rank] = match.clock
            queues[rank].remove(match)
    return order


def _unmatched(scans: Sequence[RankScan], order: Sequence[_Match]) -> Iterator[str]:
    dumped = {scan.rank for scan in scans}
    for match in order:
        rank, member = next(iter(match.members.items()))
        call = member.call
        if call.is_message and call.peer is None:
            yield f"{call.name} of rank {rank} does not say with whom: what it received is not followed back"
            continue
        if missing := sorted((set(match.ranks) & dumped) - set(match.members)):
            yield f"{call.name} of rank {rank} has no counterpart in the dump of {ranks_text(missing)}"
        for rank, member in match.members.items():
            if member.call.incomplete:
                yield f"{member.call.name} of rank {rank} had not ended when the dump did, or it failed"


# -- what the dumps do not hold ---------------------------------------------------------------------------------------


def _left_out(dump: RankDump) -> list[str]:
    """Return in words what a dump does not hold; empty for every operation of the step, as far as torch shows it."""
    head = dump.header
    left_out = [] if dump.level != "L0" else ["operations between modules (level L0)"]
    for key in ("scope", "list", "data_mode"):
        if head.get(key) not in (None, [], ["all"]):
            names = shorten(head[key], 3) if isinstance(head[key], list) else head[key]
            left_out.append(f"what is outside of {key} {names}")
    if not dump.complete:
        left_out.append("the end of the step, in which the run ended")
    if not {"scope", "list", "data_mode"} <= set(head):
        left_out.append("what the configuration left out (the dump does not say)")
    return left_out


# -- an origin in words -----------------------------------------------------------------------------------------------


def _what(candidate: Candidate) -> str:
    return " and ".join(["NaN"] * candidate.has_nan + ["infinity"] * candidate.has_infinity)


def _verdict(scan: RankScan, candidate: Candidate, find: _Find) -> str:
    """Return what happened, without the rank and the time."""
    name, what = candidate.name, _what(candidate)
    paths = shorten((path for path, _ in candidate.bad), _SHOWN)
    before = f"not finite before {'the first entry of this dump' if _left_out(scan.dump) else 'the step'}"
    if candidate.kind == "collective":
        return f"{name} made the first {what}: {_sources(candidate, find)}"
    if candidate.kind == "parameter":
        names = ", ".join(dict.fromkeys(candidate.parameters))
        return f"{before}: parameter {names}, used by {name}, holds {what}"
    if candidate.kind == "arrived":
        when = "not finite, and made by nothing that was recorded" if candidate.order else before
        may_be_parameter = any(leaf.requires_grad and path != "input.0" for path, leaf in candidate.bad)
        return f"{when}: {paths} of {name}{' (a parameter?)' if may_be_parameter else ''} holds {what}"
    if candidate.kind == "uninitialised":
        return f"{name} is memory that had not been written to; it holds {what}, and was computed with"
    if candidate.kind == "given":
        return f"the first NaN was written by {name}, which was given NaN"
    if candidate.kind == "gradient":
        return f"{name} ({paths}) is the first that holds {what}, and the dump has nothing of how it was computed"
    return f"{name} made the first {what}: {_inputs(scan, candidate)}"


def _sources(candidate: Candidate, find: _Find) -> str:
    if not find.undumped:
        return "finite on all its ranks before, not finite after"
    ranks = ranks_text(find.undumped)
    perhaps = " or from the sum" if "reduce" in candidate.name and candidate.has_infinity else ""
    return f"finite on the dumped ranks; it came from {ranks}{perhaps} (of {ranks} there is no dump)"


def _inputs(scan: RankScan, candidate: Candidate) -> str:
    words = "its inputs are finite" if candidate.entry.inputs else "its inputs are not in this dump"
    if parse_name(candidate.name).direction == "backward" and not scan.has_forward:
        words += ", and the forward pass is not in this dump"
    if candidate.masked:
        words += ", but for infinities that were put there on purpose (a row that is masked out entirely?)"
    return words


_ADVICE: dict[Kind, str] = {
    "parameter": "look at the step before this one, or at the checkpoint that was loaded.",
    "arrived": "look at what makes this tensor: the batch, a kernel of your own, or what ran before the dump began.",
    "uninitialised": "write to the whole of it before it is read, or use zeros.",
    "given": "write over all of it before it is used, or do not write NaN there.",
}


def _advice(dump: RankDump, candidate: Candidate, grower: Grower | None, undumped: Sequence[int]) -> str:
    """Return one or two sentences on how to go on."""
    if grower is not None:
        return (
            f"look at how {grower.operation} is called (arguments, masks, scales): the overflow is only where "
            "the growth ends. Run without it, or with a plain implementation of it, to make sure."
        )
    if candidate.kind == "arrived" and dump.level == "L0":
        return 'operations between modules are not in an L0 dump: dump with level "mix".'
    if candidate.kind in _ADVICE:
        return _ADVICE[candidate.kind]
    if candidate.kind == "collective":
        return _collective_advice(candidate, undumped)
    if candidate.in_backward and not candidate.has_nan:
        return (
            "a gradient overflows: lower the loss scale, or look for a division by almost nothing. With a GradScaler "
            "that is how its first steps look, and it skips them."
        )
    if dump.level == "L0":
        return f'dump the step again with level "mix" and list ["{candidate.name}"], to see the operation inside it.'
    if dump.task != "tensor":
        return (
            f'dump the step again with task "tensor" and list ["{candidate.name}"], to see the elements. If nothing is '
            "found then, timing matters: set async_dump, and suspect memory that is given out too early."
        )
    return f"load its tensors from {dump.directory / 'dump_tensor_data'} and run the operation alone."


def _collective_advice(candidate: Candidate, undumped: Sequence[int]) -> str:
    if undumped:
        return f"dump {ranks_text(undumped)} as well."
    if candidate.has_nan:
        return (
            "finite values do not add up to a NaN: suspect who writes to these tensors meanwhile (a missing wait, "
            "memory that is given out too early), or the backend."
        )
    return "look at the magnitudes that went in: a sum over ranks overflows where the parts do not; average first."


# -- the text ---------------------------------------------------------------------------------------------------------


def as_text(findings: Findings) -> str:
    ranks = count_of(len(findings.ranks), "ranks") + ("" if findings.step is None else f" of step {findings.step}")
    entries = count_of(sum(rank.entries for rank in findings.ranks), "entries")
    collectives = count_of(sum(rank.collectives for rank in findings.ranks), "collectives")
    lines = [f"{ranks}, {entries}, {collectives}."]
    if findings.left_out:
        lines.append(f"Not recorded: {'; '.join(findings.left_out)}.")
    lines += [*_capped([f"note: {line}" for line in findings.unmatched]), ""]
    lines += _origins(findings) if findings.origins else _nothing(findings)
    lines += _capped([f"also: {line}" for line in findings.also])
    for rank in findings.ranks:
        if rank.shared_memory:
            stomp = "live storages that share memory (a stomp, unless it is meant, as by from_numpy or dlpack)"
            lines += ["", f"note: {_rank(rank.rank)}: {stomp}:", *_capped([f"  {line}" for line in rank.shared_memory])]
    return printable([*lines, *(f"note: {note}" for note in findings.notes)])


def _nothing(findings: Findings) -> Iterator[str]:
    if findings.also:
        yield "No NaN or infinity found that reached a gradient or a collective."
    else:
        what = "No NaN or infinity" if any(rank.shared_memory for rank in findings.ranks) else "Nothing"
        every = "every recorded tensor" if findings.left_out else "every tensor"
        yield f"{what} found: {every} is finite, was made infinite on purpose, or became finite again."


def _origins(findings: Findings) -> Iterator[str]:
    groups: dict[tuple[str, Kind], list[NaNOrigin]] = {}
    for origin in findings.origins:
        groups.setdefault((origin.name, origin.kind), []).append(origin)
    for index, origins in enumerate(groups.values()):
        if index:
            yield ""
        ranks = [origin.rank for origin in origins if origin.rank is not None]
        who = ranks_text(ranks).capitalize() + ": " if ranks else ""
        yield f"{who}{origins[0].verdict}."
        yield from _details(origins[0])


def _details(origin: NaNOrigin) -> Iterator[str]:
    if origin.after or origin.until:
        yield f"  between: {origin.after or 'the beginning'} and {origin.until or 'the end'}"
    for index, line in enumerate(origin.stack[:_SHOWN_FRAMES]):
        yield f"  {'  ' if index else 'at'} {line}"
    if origin.modules:
        yield "  in " + ", in ".join(origin.modules[:_SHOWN])
    leaves = list(DumpEntry(origin.name, origin.entry).leaves())
    for is_output in (False, True):
        yield from _capped([_tensor(path, leaf) for path, leaf in leaves if path.startswith("output") == is_output])
    if (grower := origin.growth) is not None:
        yield (
            f"  It grew until it overflowed: {grower.operation} ({grower.direction}) makes it larger in {grower.times} "
            f"of {grower.calls} calls, x {grower.ratio:.4g} on average:"
        )
        yield from (
            f"    {one.name}  {one.size_in:.4g} -> {one.size_out:.4g}  x {one.ratio:.4g}" for one in grower.trail
        )
    yield "  What to do next: " + origin.advice


def _tensor(path: str, leaf: DumpLeaf) -> str:
    words = [text for statistic in STATISTICS if (text := statistic.text(leaf.raw))]
    return f"    {path}  {dtype_name(leaf.dtype)}{list(leaf.shape)}  " + ", ".join(words)


def _rank(rank: int | None) -> str:
    return "this process" if rank is None else f"rank {rank}"


def _capped(lines: list[str]) -> list[str]:
    left = len(lines) - _SHOWN
    return lines if left <= 0 else [*lines[:_SHOWN], f"    ... and {left:,} more"]
