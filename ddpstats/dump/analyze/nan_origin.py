"""``ddpstats nan-origin DIR``: the first operation of a dumped step, on any rank, that made a NaN or an infinity.

1. Each rank's entries are read once, one at a time (`RankScan`). Every tensor that is not finite is kept, with those
   that went into the entry that made it. Our own dumps identify a tensor by its storage, offset and statistics, others
   by the statistics alone; of two that look the same, the newer one is meant. Entries that activation checkpointing
   computes again do not count.
2. The walk back starts at gradients, at what collectives take and return, and at a tensor that no entry takes: the
   loss. It ends at candidates: an entry whose inputs are finite and whose outputs are not, or one with an input that is
   not finite and that no recorded entry made.
3. Infinities that are meant (`tensor_rules`) lead back to nothing, nor does what they become, unless that is a NaN or
   an infinity of the other sign.
4. Collectives of different ranks are matched by their group, their kind and their number in the group; a send with its
   receive. In an order that fits all ranks they give every rank a clock: what follows a collective is later than what
   precedes it on any of its ranks. The origins are the candidates with the earliest clock: of each rank its first one,
   or a collective whose inputs are finite on all its ranks.
5. The operation that overflows is often not the one at fault: `Growth` has those that made tensors larger before it.

Exit status 0 if nothing was found, 1 if something was (also memory that is shared), 2 if the dumps cannot be read.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ddpstats._base.text import count_of, dtype_name, print_report, printable, ranks_text, shorten
from ddpstats._observe import tensor_rules
from ddpstats.dump.analyze import (
    DumpEntry,
    DumpLeaf,
    RankDump,
    find_ranks,
    notes_of,
    printable_errors,
    rank_of,
    ranks_without_dump,
)
from ddpstats.dump.analyze.stomp import MemoryWalk
from ddpstats.dump.msprobe import GRADIENTS, ROOT, CollectiveEntry, Name, parse_name, read_collective
from ddpstats.dump.statistics import STATISTICS, statistic_keys
from ddpstats.errors import DumpError

EPILOG = """example:
  ddpstats nan-origin dumps/now"""

OriginKind = Literal["computation", "arrived", "parameter", "uninitialised", "given", "gradient", "collective"]
Leaves = list[tuple[str, DumpLeaf]]

_SHOWN, _SHOWN_FRAMES = 8, 4
_PARAMETERS, _BACKWARD = "parameters.", ("backward", GRADIENTS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="a dump with one step, a step's directory, or a rank's")


def run(args: argparse.Namespace) -> int:
    """Raises `DumpError` for a directory without a dump, or a damaged one."""
    with printable_errors():
        findings = examine(find_ranks(args.directory))
        is_bad = findings.origins or any(rank.shared_memory for rank in findings.ranks)
        return print_report(1 if is_bad else 0, args.json, lambda: as_text(findings), lambda: asdict(findings))


# -- findings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GrownEntry:
    """An entry whose output is larger than its input; sizes are those of the largest elements."""

    name: str
    operation: str
    direction: str
    size_in: float
    size_out: float
    ratio: float


@dataclass(frozen=True)
class GrowingOperation:
    """An operation that makes tensors larger in ``times`` of its ``calls``, by the geometric mean ``ratio``."""

    operation: str
    direction: str
    calls: int
    times: int
    ratio: float
    trail: tuple[GrownEntry, ...]


@dataclass(frozen=True)
class NaNOrigin:
    """The origin of the first value that is not finite, on one rank.

    Attributes:
        rank: None for a process without torch.distributed.
        verdict: what happened, in one sentence.
        after, before: the collectives of this rank around it; None at the beginning and at the end.
        modules: the modules' passes around it, innermost first.
        stack: the lines of the call, innermost first.
        growth: the operation that made the values grow until they overflowed.
        entry: what the dump has.
    """

    rank: int | None
    name: str
    kind: OriginKind
    verdict: str
    advice: str
    after: str | None
    before: str | None
    modules: tuple[str, ...]
    stack: tuple[str, ...]
    growth: GrowingOperation | None
    entry: Mapping[str, Any]


@dataclass(frozen=True)
class RankSummary:
    """One rank's dump in numbers.

    Attributes:
        unmeasured: tensors of which it has no numbers; ``dropped``: entries of which it has no tensors.
        shared_memory: its live storages that share memory (`stomp`).
    """

    rank: int | None
    entries: int
    collectives: int
    unmeasured: int
    dropped: int
    shared_memory: tuple[str, ...]


@dataclass(frozen=True)
class OriginFindings:
    """The result for the dumps of one step; ``--json`` prints ``asdict`` of it.

    Attributes:
        unmatched: collectives that some ranks of their group have in their dump, and others not; those that did not
            end; messages without their peer.
        left_out: what the dumps do not hold.
        notes: what could not be read.
    """

    step: int | None
    ranks: list[RankSummary]
    origins: list[NaNOrigin]
    unmatched: list[str]
    left_out: list[str]
    notes: list[str]


def examine(dumps: Sequence[RankDump]) -> OriginFindings:
    """Find the origins in the dumps of all ranks of one step, and memory that is shared."""
    scans = [RankScan(dump) for dump in dumps]
    if not any(scan.entries for scan in scans):
        raise DumpError(f"{dumps[0].path} has no entries. Does its configuration choose any, by scope and list?")
    matches = _match_collectives(scans)
    order = _set_clocks(matches)
    left_out = _describe_left_out(scans)
    left_out += sorted({scan.unknown_memory for scan in scans} - {""})
    ranks, origins = [scan.summary() for scan in scans], [*map(_origin, _pick_earliest(scans, matches))]
    left_out += [f"{name}, which has no dump" for name in ranks_without_dump(dumps[0].directory.absolute().parent)]
    if unmeasured := sum(rank.unmeasured for rank in ranks):
        left_out.append(f"the numbers of {count_of(unmeasured, 'tensors')}")
    if dropped := sum(rank.dropped for rank in ranks):
        left_out.append(f"the tensors of {count_of(dropped, 'entries')}, for which async_max_bytes was too small")
    return OriginFindings(dumps[0].step, ranks, origins, [*_report_unmatched(scans, order)], left_out, notes_of(dumps))


def _pick_earliest(scans: Sequence[RankScan], matches: Mapping[int, Sequence[_MatchedCollective]]) -> list[Candidate]:
    """Return what comes first, one of a rank; what something used goes before what nothing did."""
    by_clock: defaultdict[tuple[bool, int, bool], dict[int, Candidate]] = defaultdict(dict)
    for scan in sorted(scans, key=lambda scan: scan.rank):
        of_rank = matches[scan.rank]
        for candidate in scan.candidates + scan.unused:
            clock = max((match.clock for match in of_rank[: candidate.position]), default=0)
            is_collective = candidate.kind == "collective"
            if is_collective:
                match = of_rank[candidate.position]
                if any(member.has_bad_inputs for member in match.members.values()):
                    continue
                clock = match.clock
                candidate.undumped = tuple(sorted(set(match.ranks) - {scan.rank for scan in scans}))
            by_clock[candidate in scan.unused, clock, not is_collective].setdefault(scan.rank, candidate)
    earliest = [*by_clock[min(by_clock)].values()] if by_clock else []
    # what nothing recorded made may have come from another rank, by a collective whose entry was written later
    return [candidate for candidate in earliest if candidate.kind not in ("arrived", "gradient")] or earliest


# -- one rank ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Candidate:
    """An entry where something finite may have become NaN or infinite.

    Attributes:
        kind: "computation", "collective": this entry made it. "arrived", "parameter": the entry took it in, and nothing
            recorded made it. "uninitialised": memory that was not written to. "given": the program gave this entry a
            NaN to write. "gradient": a parameter's gradient, and the dump has nothing of how it was computed.
        bad: the tensors that are not finite.
        position: the number of collectives of this rank before it.
        order: the number of entries before it.
        in_backward: the backward pass had begun.
        masked: some of its inputs hold infinities that are meant.
        parameters: names in the model of those that were not finite.
        undumped: ranks of a collective of which there is no dump.
    """

    scan: RankScan
    kind: OriginKind
    entry: DumpEntry
    bad: Leaves
    position: int
    order: int
    in_backward: bool
    masked: bool = False
    parameters: tuple[str, ...] = ()
    undumped: tuple[int, ...] = ()

    @property
    def nonfinite_kinds(self) -> str:
        has_nan, has_infinity = (any(getattr(leaf, has) for _, leaf in self.bad) for has in ("has_nan", "has_infinity"))
        return " and ".join(["NaN"] * has_nan + ["infinity"] * has_infinity)


@dataclass(eq=False)
class RankCollective:
    """A collective of one rank, and whether what it took there was not finite."""

    call: CollectiveEntry
    has_bad_inputs: bool


@dataclass(eq=False)
class _NonfiniteTensor:
    """A tensor that is not finite; infinities that are meant have neither ``sources`` nor an ``origin``.

    Attributes:
        sources: what was not finite of that which went into the entry that made it.
        origin: the candidate, where nothing such went in.
        after: the number of entries of backward passes before it.
        is_raw: memory as it was handed out.
    """

    sources: Sequence[_NonfiniteTensor]
    origin: Candidate | None
    requires_grad: bool
    after: int
    is_raw: bool

    @property
    def is_meant(self) -> bool:
        return not self.sources and self.origin is None


class RankScan:
    """Finds the candidates in one rank's dump, of which it keeps what is not finite, collectives and growth.

    Attributes:
        candidates: those that lead to a gradient, a collective or the loss, in the order of their entries.
        unused: where the dump has no gradients, the other ones of which nothing recorded used what was made.
    """

    def __init__(self, dump: RankDump) -> None:
        self.dump = dump
        self.rank = rank_of(dump)
        self.entries = self.unmeasured = self.dropped = 0
        self.gradients = 0  # entries of backward passes
        self.collectives: list[RankCollective] = []
        self.growth = Growth()
        self._tensors: dict[str, _NonfiniteTensor] = {}  # by `_keys`
        self._outputs: dict[str, list[_NonfiniteTensor]] = {}  # by the entry's name
        self._unused: dict[_NonfiniteTensor, None] = {}  # those that no entry took yet
        self._starts: list[_NonfiniteTensor] = []  # of the walk back
        memory = MemoryWalk()
        for entry in dump.entries():
            memory.take(entry)
            self.unmeasured += sum(not leaf.has_numbers for _, leaf in entry.leaves())
            self.dropped += entry.is_dropped
            if not entry.is_recompute:
                self._take(entry)
        ends = [tensor for tensor in self._unused if not tensor.is_raw]
        losses = [tensor for tensor in ends if tensor.requires_grad and tensor.after == self.gradients]
        self.candidates = _walk_back(self._starts + losses)
        unused = _walk_back([] if self.gradients else ends)
        self.unused = [candidate for candidate in unused if candidate not in self.candidates]
        self.overlaps, self.unknown_memory = memory.overlaps(), memory.unknown

    def summary(self) -> RankSummary:
        shared = tuple(map(str, self.overlaps))
        measured = self.unmeasured, self.dropped
        return RankSummary(self.dump.rank, self.entries, len(self.collectives), *measured, shared)

    def _take(self, entry: DumpEntry) -> None:
        name = parse_name(entry.name)
        is_gradient = name.direction in _BACKWARD
        self.gradients += is_gradient
        if not self._starts:
            self.growth.take(entry, name)
        operation = "" if name.is_module or is_gradient else _without_library(name.api)
        call = read_collective(entry, self.rank) if name.is_collective else None
        inputs = self._inputs_of(entry, operation) if call is None else call.inputs
        made = _select_nonfinite(entry.outputs if call is None else call.outputs)
        taken = [self._find_input(entry, name, bad, bool(made)) for bad in _select_nonfinite(inputs)]
        is_sink = is_gradient or call is not None
        if made or is_sink or any("float" in leaf.dtype or "complex" in leaf.dtype for _, leaf in entry.outputs):
            for tensor in taken:  # what only looks, as isnan does, uses nothing
                self._unused.pop(tensor, None)
        outputs = self._take_outputs(entry, name, operation, made, taken) if made else []
        if is_sink:
            losses = [tensor for tensor in self._outputs.get(name.forward, ()) if tensor in self._unused]
            self._starts += [tensor for tensor in (*losses, *taken, *outputs) if not tensor.is_meant]
        if call is not None:
            self.collectives.append(RankCollective(call, bool(taken)))
        self.entries += 1

    def _inputs_of(self, entry: DumpEntry, operation: str) -> Iterator[tuple[str, DumpLeaf]]:
        """Yield what the entry takes, parameters and their gradients too, without what it overwrites."""
        for path, leaf in entry.leaves():
            is_target = path == "input_kwargs.out" or (path == "input.0" and tensor_rules.overwrites_target(operation))
            if is_target and (tensor := self._find(leaf)) is not None:
                self._unused.pop(tensor, None)
            if not is_target and (entry.has_gradients_of_parameters or not path.startswith("output")):
                yield path, leaf

    def _find_input(self, entry: DumpEntry, name: Name, bad: tuple[str, DumpLeaf], has_made: bool) -> _NonfiniteTensor:
        """Return the tensor that goes in; one that was never seen before has arrived."""
        path, leaf = bad
        is_parameter = path.startswith(_PARAMETERS)
        if (tensor := self._find(leaf)) is None:
            kind: OriginKind = "gradient" if name.direction == GRADIENTS else "arrived"
            is_weighted = has_made and tensor_rules.is_weighted_product(name.class_name or _without_library(name.api))
            is_computed = is_weighted or is_parameter or leaf.requires_grad or name.direction in _BACKWARD
            may_mask = tensor_rules.may_be_mask(has_nan=leaf.has_nan, has_positive_infinity=leaf.max == math.inf)
            origin = None if may_mask and not is_computed else self._candidate(kind, entry, [bad])
            tensor = self._add([], origin, leaf)
            if not entry.outputs:
                self._unused[tensor] = None
        for origin in _walk_back([tensor] * is_parameter):
            if origin.kind in ("arrived", "parameter"):
                # a function takes a parameter as an argument; the module around it, which comes later, has its name
                origin.kind = "parameter"
                module = "" if name.api == ROOT else f"{name.api}."
                origin.parameters += (module + path.removeprefix(_PARAMETERS),)
        return tensor

    def _take_outputs(
        self, entry: DumpEntry, name: Name, operation: str, made: Leaves, taken: list[_NonfiniteTensor]
    ) -> list[_NonfiniteTensor]:
        """Return the outputs ``made``; their source is what the entry took or, if that is finite, the entry itself."""
        sources = [tensor for tensor in taken if not tensor.is_meant]
        has_mask = len(sources) < len(taken)
        known = [self._find(leaf) if name.is_module or not sources else None for _, leaf in made]
        is_alias = tensor_rules.writes_in_place(operation) or tensor_rules.is_view(operation)
        is_raw = is_alias and bool(sources) and all(tensor.is_raw for tensor in taken)
        origin = None
        if not (sources or (name.is_module and None not in known) or self._is_meant(entry, operation, made, has_mask)):
            origin = self._candidate(self._kind(entry, name, made), entry, made)
            origin.masked = has_mask
            is_raw = origin.kind == "uninitialised"
            if name.direction == "backward":
                self._starts += self._outputs.get(name.forward, ())  # which are in the graph
                for tensor in known:  # taken before this entry was written, when the backward pass had ended
                    if tensor is not None and tensor.origin is not None and tensor.origin.kind == "arrived":
                        origin.order, origin.position = tensor.origin.order, tensor.origin.position
                        tensor.origin = origin
        sources = [tensor for tensor in sources if not tensor.is_raw] or sources
        outputs = [  # one that is known: the module returns what an entry inside it made, or its input
            tensor if tensor is not None and name.is_module else self._add(sources, origin, leaf, is_raw)
            for (_, leaf), tensor in zip(made, known, strict=True)
        ]
        self._outputs[entry.name] = outputs
        self._unused.update(dict.fromkeys(outputs))
        return outputs

    def _is_meant(self, entry: DumpEntry, operation: str, made: Leaves, has_mask: bool) -> bool:
        """Return whether these are infinities that the program put there, or what is still a mask of them."""
        is_mask = has_mask and all(leaf.max != math.inf for _, leaf in made)
        has_nan = any(leaf.has_nan for _, leaf in made)
        return not has_nan and (is_mask or tensor_rules.puts_infinity(operation, _nonfinite_numbers(entry)))

    def _kind(self, entry: DumpEntry, name: Name, made: Leaves) -> OriginKind:
        if name.is_collective:
            return "collective"
        if tensor_rules.is_uninitialized(_without_library(name.api)) and not name.is_module:
            return "uninitialised"
        is_given = any(leaf.has_nan for _, leaf in made) and any(map(math.isnan, _nonfinite_numbers(entry)))
        return "given" if is_given else "computation"

    def _find(self, leaf: DumpLeaf) -> _NonfiniteTensor | None:
        """Return the tensor that an earlier entry had, by its place in memory or by its statistics."""
        location, statistics = _keys(leaf)
        tensor = self._tensors.get(location)
        if tensor is None:
            tensor = self._tensors.get(statistics)
            if location and tensor not in self._unused:  # that one was taken, and is elsewhere in memory
                return None
        return tensor

    def _add(
        self, sources: Sequence[_NonfiniteTensor], origin: Candidate | None, leaf: DumpLeaf, is_raw: bool = False
    ) -> _NonfiniteTensor:
        tensor = _NonfiniteTensor(sources, origin, bool(leaf.requires_grad), self.gradients, is_raw)
        self._tensors.update(dict.fromkeys(filter(None, _keys(leaf)), tensor))
        return tensor

    def _candidate(self, kind: OriginKind, entry: DumpEntry, bad: Leaves) -> Candidate:
        return Candidate(self, kind, entry, bad, len(self.collectives), self.entries, self.gradients > 0)


def _walk_back(starts: Iterable[_NonfiniteTensor]) -> list[Candidate]:
    """Return the candidates that these tensors lead back to, in the order of their entries."""
    reached = dict.fromkeys(starts)
    queue = deque(reached)
    while queue:
        for source in queue.popleft().sources:
            if source not in reached:
                reached[source] = None
                queue.append(source)
    origins = dict.fromkeys(tensor.origin for tensor in reached if tensor.origin is not None)
    return sorted(origins, key=lambda origin: origin.order)


def _select_nonfinite(leaves: Iterable[tuple[str, DumpLeaf]]) -> Leaves:
    """Return those that are not finite."""
    return [(path, leaf) for path, leaf in leaves if not leaf.is_finite]


def _without_library(api: str) -> str:
    """Return the name of an operator ``liba.fill_`` by itself."""
    return api.rpartition(".")[2]


def _keys(leaf: DumpLeaf) -> tuple[str, str]:
    """Return what identifies a tensor: its place in memory, empty if it is not known, and its statistics."""
    statistics = repr([leaf.raw.get(key) for key in ("shape", *statistic_keys())])
    return "" if leaf.storage_id is None else f"{leaf.storage_id} {leaf.storage_offset} {statistics}", statistics


def _nonfinite_numbers(entry: DumpEntry) -> list[float]:
    """Return the arguments that are numbers, but not finite; a dump may hold words for them."""
    words = [str(leaf.value).lower() for _, leaf in entry.values() if not leaf.is_tensor]
    return [float(word) for word in words if word in ("nan", "inf", "-inf", "infinity", "-infinity")]


def _ancestors(name: str, dump: RankDump) -> list[str]:
    """Return the modules' passes around an entry, innermost first."""
    around: list[str] = []
    while parent := dump.parent_of(around[-1] if around else name):
        outer = parent if isinstance(parent, str) else parent[0]
        if outer in around:
            break
        around.append(outer)
    return around


# -- growth -----------------------------------------------------------------------------------------------------------

_FACTOR = 4.0  # below, nothing is called growth
_TRAIL, _KEPT = 12, 4096
_ENOUGH = 1e3  # what all growth of an operation must come to
_LARGEST = {"float16": 65504.0, "bfloat16": 3.39e38, "float32": 3.4e38, "float64": 1.79e308}
_NEAR = 1e3  # what is nearer to the largest number may overflow inside of an operation


class Growth:
    """The entries of one rank that make tensors several times as large: the newest, and the calls of each operation."""

    def __init__(self) -> None:
        self._grown: deque[GrownEntry] = deque(maxlen=_KEPT)
        self._calls: Counter[tuple[str, str]] = Counter()

    def take(self, entry: DumpEntry, name: Name) -> None:
        # the gradient of a weight is a sum over the batch, and no step on the way back
        has_weights = name.prefix == "Functional" and name.direction == "backward"
        size_in = _size(leaf for _, leaf in entry.inputs)
        size_out = _size(leaf for path, leaf in entry.outputs if path == "output.0" or not has_weights)
        operation = f"Module {name.class_name}" if name.is_module else f"{name.prefix}.{name.api}"
        self._calls[operation, name.direction] += 1
        if 0 < size_in < math.inf and _FACTOR * size_in <= size_out < math.inf:
            ratio = size_out / size_in
            self._grown.append(GrownEntry(entry.name, operation, name.direction, size_in, size_out, ratio))

    def find_growing_operation(self, candidate: Candidate) -> GrowingOperation | None:
        """Return the operation that contributed most to an overflow; None where none did repeatedly."""
        direction = "backward" if candidate.in_backward else "forward"
        by_name = {entry.name: entry for entry in self._grown if entry.direction == direction}
        outer = {  # modules that grow because something inside them does
            name
            for entry in by_name.values()
            for name in _ancestors(entry.name, candidate.scan.dump)
            if name in by_name and 2 * math.log(entry.ratio) >= math.log(by_name[name].ratio)
        }
        trail = tuple(entry for entry in by_name.values() if entry.name not in outer)
        by_operation: defaultdict[str, list[float]] = defaultdict(list)
        for entry in trail:
            by_operation[entry.operation].append(math.log(entry.ratio))
        for operation, logs in sorted(by_operation.items(), key=lambda item: -sum(item[1])):
            calls, ratio = self._calls[operation, direction], math.exp(sum(logs) / len(logs))
            if len(logs) >= 2 and 2 * len(logs) >= calls and sum(logs) >= math.log(_ENOUGH):
                grower = GrowingOperation(operation, direction, calls, len(logs), ratio, trail[-_TRAIL:])
                return grower if _is_overflow(candidate, trail[-1].ratio) else None
        return None


def _is_overflow(candidate: Candidate, ratio: float) -> bool:
    """Return whether there are infinities, or whether what went in was close to the largest number."""
    return "infinity" in candidate.nonfinite_kinds or any(
        _size([leaf]) * _NEAR * ratio >= _LARGEST.get(dtype_name(leaf.dtype), math.inf)
        for _, leaf in candidate.entry.inputs
    )


def _size(leaves: Iterable[DumpLeaf]) -> float:
    """Return the size of the largest element; NaN counts as infinite."""
    bounds = [bound for leaf in leaves if "float" in leaf.dtype for bound in (leaf.max, leaf.min) if bound is not None]
    return math.inf if any(map(math.isnan, bounds)) else max(map(abs, bounds), default=0.0)


# -- collectives of different ranks -----------------------------------------------------------------------------------


@dataclass(eq=False)
class _MatchedCollective:
    """One collective, on all ranks that have it; ``ranks`` are those that should."""

    ranks: tuple[int, ...]
    members: dict[int, RankCollective] = field(default_factory=dict)
    clock: int = 0


def _match_collectives(scans: Sequence[RankScan]) -> dict[int, list[_MatchedCollective]]:
    """Return the collectives of every rank in execution order, each as what its ranks share.

    They are matched by their number in the group where all dumps have it, for an entry may be missing; or by counting.
    """
    matches: dict[tuple[Any, ...], _MatchedCollective] = {}
    of_rank = {}
    calls = [member.call for scan in scans for member in scan.collectives]
    has_sequence = all(call.sequence is not None for call in calls if call.peer is not None or not call.is_message)
    for scan in scans:
        counts: Counter[tuple[Any, ...]] = Counter()
        of_member = {}
        for member in sorted(scan.collectives, key=lambda member: member.call.number):  # as begun, not as ended
            key, ranks = _key(scan.rank, member.call)
            key = (*key, member.call.sequence if has_sequence else None)
            match = of_member[member] = matches.setdefault((*key, counts[key]), _MatchedCollective(ranks))
            counts[key] += 1
            match.members[scan.rank] = member
        of_rank[scan.rank] = [of_member[member] for member in scan.collectives]
    return of_rank


def _key(rank: int, call: CollectiveEntry) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Return what two ranks' entries of one collective have in common, and the ranks that take part."""
    ranks = call.ranks
    if call.peer is not None:
        ranks = (rank, call.peer) if call.api.endswith("send") else (call.peer, rank)
    elif call.is_message:
        ranks = (rank,)
    return (call.group, call.ranks, ("message", call.tag) if call.is_message else call.api, ranks), ranks


def _set_clocks(of_rank: Mapping[int, Sequence[_MatchedCollective]]) -> list[_MatchedCollective]:
    """Set every collective's clock; return them in an order that fits all ranks, where there is one."""
    queues = {rank: deque(matches) for rank, matches in of_rank.items()}
    now = dict.fromkeys(queues, 0)
    order: list[_MatchedCollective] = []
    while heads := [queue[0] for queue in queues.values() if queue]:
        ready = (match for match in heads if all(queues[rank][0] is match for rank in match.members))
        match = next(ready, heads[0])  # asynchronous ones may cross: then some order is as good as another
        match.clock = 1 + max(now[rank] for rank in match.members)
        order.append(match)
        for rank in match.members:
            now[rank] = match.clock
            queues[rank].remove(match)
    return order


def _report_unmatched(scans: Sequence[RankScan], order: Sequence[_MatchedCollective]) -> Iterator[str]:
    dumped = {scan.rank for scan in scans}
    receivers = {  # from any rank, of which the dump does not say it
        scan.rank
        for scan in scans
        for member in scan.collectives
        if member.call.is_message and member.call.peer is None
    }
    for match in order:
        rank, member = next(iter(match.members.items()))
        unmatched = (set(match.ranks) & dumped) - set(match.members)
        if missing := sorted(unmatched - receivers if member.call.is_message else unmatched):
            yield f"{member.call.name} of rank {rank} has no counterpart in the dump of {ranks_text(missing)}"
        for rank, member in match.members.items():
            if member.call.incomplete:
                yield f"{member.call.name} of rank {rank} had not ended when the dump did, or it failed"


def _describe_left_out(scans: Sequence[RankScan]) -> list[str]:
    """Return in words what the dumps do not hold of the step, as far as torch shows it."""
    left_out: dict[str, None] = {}
    for scan in scans:
        if scan.dump.level == "L0":
            left_out["operations between modules (level L0)"] = None
        head = scan.dump.header
        chosen = [key for key in ("scope", "list", "data_mode") if head.get(key, "?") not in (None, [], ["all"])]
        if chosen:
            left_out[f"what {', '.join(chosen)} of the configuration may leave out"] = None
        if not scan.dump.complete:
            left_out[f"the end of the step of {_rank(scan.dump.rank)}, in which the run ended or a write failed"] = None
    members = {rank for scan in scans for member in scan.collectives for rank in member.call.ranks}
    if undumped := members - {scan.rank for scan in scans}:
        left_out[ranks_text(undumped)] = None
    return [*left_out]


# -- an origin in words -----------------------------------------------------------------------------------------------


def _origin(candidate: Candidate) -> NaNOrigin:
    scan, dump, name = candidate.scan, candidate.scan.dump, candidate.entry.name
    before = scan.collectives[: candidate.position]
    following = scan.collectives[candidate.position + (candidate.kind == "collective") :]
    grower = None if candidate.kind == "given" else scan.growth.find_growing_operation(candidate)
    stack = dump.stack_of(name) or dump.stack_of(parse_name(name).forward)
    return NaNOrigin(
        dump.rank,
        name,
        candidate.kind,
        _verdict(candidate),
        _advice(candidate, grower),
        before[-1].call.name if before else None,
        following[0].call.name if following else None,
        tuple(_ancestors(name, dump)),
        tuple(" ".join(line.split()) for line in stack),
        grower,
        candidate.entry.raw,
    )


def _verdict(candidate: Candidate) -> str:
    """Return what happened, without the rank and the time."""
    name, what = candidate.entry.name, candidate.nonfinite_kinds
    paths = shorten((path for path, _ in candidate.bad), _SHOWN)
    before = f"before {'the first entry of this dump' if _describe_left_out([candidate.scan]) else 'the step'}"
    if candidate.kind == "arrived" and candidate.order:
        before = "and made by nothing that was recorded"
    parameters = ", ".join(dict.fromkeys(candidate.parameters))
    verdicts: dict[OriginKind, str] = {
        "parameter": f"not finite {before}: parameter {parameters}, used by {name}, holds {what}",
        "arrived": f"not finite {before}: {paths} of {name} holds {what}",
        "uninitialised": f"{name} returned memory that nothing had written to: it holds {what}, and was used",
        "given": f"the first NaN was written by {name}, which was given NaN",
        "gradient": f"{name} ({paths}) holds the first {what}, and the dump has nothing of how it was computed",
    }
    return verdicts.get(candidate.kind) or f"{name} made the first {what}: {_sources(candidate)}"


def _sources(candidate: Candidate) -> str:
    if candidate.undumped:
        ranks = ranks_text(candidate.undumped)
        return f"finite on the dumped ranks; it came from {ranks}, of which there is no dump, or from the collective"
    if candidate.kind == "collective":
        return "finite on all its ranks before, not finite after"
    if not candidate.entry.inputs:
        return "its inputs are not in this dump"
    meant = ", but for infinities that were put there on purpose (a row that is masked out entirely?)"
    return f"its inputs are finite{meant if candidate.masked else ''}"


_ADVICE: dict[OriginKind, str] = {
    "parameter": "look at the step before this one, or at the checkpoint that was loaded.",
    "arrived": "look at what makes this tensor: the batch, a kernel of your own, or what ran before the dump began.",
    "uninitialised": "write to the whole of it before it is read, or use zeros.",
    "given": "write over all of it before it is used, or do not write NaN there.",
    "collective": "look for what writes to these tensors meanwhile (a missing wait, memory given out too early).",
}


def _advice(candidate: Candidate, grower: GrowingOperation | None) -> str:
    """Return one or two sentences on how to go on."""
    if grower is not None:
        return (
            f"look at how {grower.operation} is called (arguments, masks, scales): the overflow is only where "
            "the growth ends. Run without it, or with a plain implementation of it, to make sure."
        )
    if candidate.undumped:
        return f"dump {ranks_text(candidate.undumped)} as well."
    if candidate.scan.dump.level == "L0" and candidate.kind in ("arrived", "computation"):
        return 'operations inside of modules and between them are not in an L0 dump: dump with level "mix".'
    if candidate.kind == "collective" and "reduce" in candidate.entry.name:
        sums = "a sum over ranks overflows where the parts do not: look at the magnitudes that went in. After a NaN, "
        return sums + _ADVICE["collective"]
    if candidate.kind in _ADVICE:
        return _ADVICE[candidate.kind]
    if candidate.in_backward and candidate.nonfinite_kinds == "infinity":
        return (
            "a gradient overflows: lower the loss scale, or look for a division by almost nothing. With a GradScaler "
            "that is how its first steps look, and it skips them."
        )
    return (
        f'run it alone on its tensors (task "tensor", list ["{candidate.entry.name}"]). If nothing is found then, '
        "timing matters: set async_dump, and suspect memory that is given out too early."
    )


# -- the text ---------------------------------------------------------------------------------------------------------


def as_text(findings: OriginFindings) -> str:
    ranks = count_of(len(findings.ranks), "ranks") + ("" if findings.step is None else f" of step {findings.step}")
    entries = count_of(sum(rank.entries for rank in findings.ranks), "entries")
    collectives = count_of(sum(rank.collectives for rank in findings.ranks), "collectives")
    lines = [f"{ranks}, {entries}, {collectives}."]
    if findings.left_out:
        lines.append(f"Not recorded: {'; '.join(findings.left_out)}.")
    lines += _cap([f"note: {line}" for line in findings.unmatched])
    lines += _origins(findings) if findings.origins else ["", _say_nothing_found(findings)]
    for rank in findings.ranks:
        if rank.shared_memory:
            stomp = "live storages that share memory (a stomp, unless it is meant, as by from_numpy or dlpack)"
            lines += ["", f"note: {_rank(rank.rank)}: {stomp}:", *_cap([f"  {line}" for line in rank.shared_memory])]
    return printable([*lines, *(f"note: {note}" for note in findings.notes)])


def _say_nothing_found(findings: OriginFindings) -> str:
    what = "No NaN or infinity" if any(rank.shared_memory for rank in findings.ranks) else "Nothing"
    measured = " that was measured" * any(rank.unmeasured or rank.dropped for rank in findings.ranks)
    ends = "is finite, was made infinite on purpose, became finite again, or was used by nothing"
    return f"{what} found: every recorded tensor{measured} {ends}."


def _origins(findings: OriginFindings) -> Iterator[str]:
    groups: dict[tuple[str, OriginKind], list[NaNOrigin]] = {}
    for origin in findings.origins:
        groups.setdefault((origin.name, origin.kind), []).append(origin)
    for origins in groups.values():
        yield ""
        ranks = [origin.rank for origin in origins if origin.rank is not None]
        who = ranks_text(ranks).capitalize() + ": " if ranks else ""
        yield f"{who}{origins[0].verdict}."
        yield from _details(origins[0])


def _details(origin: NaNOrigin) -> Iterator[str]:
    if origin.after or origin.before:
        yield f"  between: {origin.after or 'the beginning'} and {origin.before or 'the end'}"
    for index, line in enumerate(origin.stack[:_SHOWN_FRAMES]):
        yield f"  {'  ' if index else 'at'} {line}"
    if origin.modules:
        yield "  in " + ", in ".join(origin.modules[:_SHOWN])
    leaves = list(DumpEntry(origin.name, origin.entry).leaves())
    yield from _cap([_tensor(path, leaf) for path, leaf in leaves if not path.startswith("output")])
    yield from _cap([_tensor(path, leaf) for path, leaf in leaves if path.startswith("output")])
    if (grower := origin.growth) is not None:
        yield (
            f"  It grew until it overflowed: {grower.operation} ({grower.direction}) makes it larger in {grower.times} "
            f"of {grower.calls} calls, x {grower.ratio:.4g} on average:"
        )
        for grown in grower.trail:
            yield f"    {grown.name}  {grown.size_in:.4g} -> {grown.size_out:.4g}  x {grown.ratio:.4g}"
    yield "  What to do next: " + origin.advice


def _tensor(path: str, leaf: DumpLeaf) -> str:
    words = [text for statistic in STATISTICS if (text := statistic.text(leaf.raw))]
    return f"    {path}  {dtype_name(leaf.dtype)}{list(leaf.shape)}  " + ", ".join(words)


def _rank(rank: int | None) -> str:
    return "this process" if rank is None else f"rank {rank}"


def _cap(lines: list[str]) -> list[str]:
    left = len(lines) - _SHOWN
    return lines if left <= 0 else [*lines[:_SHOWN], f"    ... and {left:,} more"]
