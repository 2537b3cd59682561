"""One rank's entries, read once: where its tensors may have stopped being finite, and its collectives.

1. An entry whose inputs are finite and whose outputs are not is a candidate. So is one with an input that is not
   finite and that no recorded entry made. Entries that activation checkpointing computes again do not count.
2. Every tensor that is not finite leads back to its candidate. Our own dumps identify a tensor by its storage, offset
   and statistics, others by the statistics alone; of two that look the same, the newer one is meant.
3. Infinities that are meant (`tensor_rules`) lead back to nothing, nor does what they become, unless that is a NaN or
   an infinity of the other sign.
4. Which candidates matter is decided at the end (`Candidate.standing`): those that lead to a gradient, to a collective,
   or to a tensor that no entry takes: the loss.

Beside them, it collects which operation makes tensors larger until they overflow (`Growth`): the operation that
overflows is often not the one at fault.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from ddpstats._base.text import dtype_name
from ddpstats._observe import tensor_rules
from ddpstats.dump.msprobe import CollectiveEntry, Name, parse_name, read_collective
from ddpstats.dump.reader import DumpEntry, DumpLeaf, RankDump, rank_of
from ddpstats.dump.statistics import keys

Kind = Literal["computation", "arrived", "parameter", "uninitialised", "given", "gradient", "collective"]
Standing = Literal["strong", "weak", "unused", "finite again"]
Leaves = list[tuple[str, DumpLeaf]]
_T = TypeVar("_T")

_MAX_TENSORS, _MAX_CANDIDATES = 65_536, 256
_PARAMETERS = "parameters."


@dataclass(eq=False)
class Candidate:
    """An entry where something finite may have become NaN or infinite.

    Attributes:
        kind: "computation", "collective": this entry made it. "arrived", "parameter": the entry took it in, and nothing
            recorded made it. "uninitialised": memory that was not written to. "given": the program gave this entry a
            NaN to write. "gradient": a parameter's gradient of which the dump has nothing else.
        bad: the tensors that are not finite.
        position: the number of collectives of this rank before it.
        order: the number of entries before it.
        in_backward: the backward pass had begun.
        masked: some of its inputs hold infinities that are meant.
        parameters: names in the model of those that were not finite.
        standing: "strong": it leads to a gradient, a collective or the loss. "weak": nothing recorded used what it
            made, and the dump has no gradients that could show it. "unused": the gradients are there, and do not show
            it. "finite again": everything made of it became finite.
    """

    kind: Kind
    entry: DumpEntry
    bad: Leaves
    position: int
    order: int
    in_backward: bool
    masked: bool = False
    parameters: tuple[str, ...] = ()
    standing: Standing = "finite again"

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def has_nan(self) -> bool:
        return any(leaf.has_nan for _, leaf in self.bad)

    @property
    def has_infinity(self) -> bool:
        return any(leaf.has_infinity for _, leaf in self.bad)


@dataclass(eq=False)
class Collective:
    """A collective of one rank.

    Attributes:
        origin: the candidate that it is where its inputs on this rank were finite and its outputs were not.
    """

    call: CollectiveEntry
    has_bad_inputs: bool
    origin: Candidate | None


@dataclass(eq=False)
class _Tensor:
    """A tensor that is not finite.

    Attributes:
        cause: the candidate that it leads back to; None: infinities that are meant.
        maker: name of the entry that made it.
        after: the number of entries of backward passes before it.
        in_place: its maker wrote into an existing tensor.
        is_raw: memory as it was handed out.
    """

    cause: Candidate | None
    maker: str
    storage: int | None
    requires_grad: bool
    after: int
    in_place: bool = False
    is_raw: bool = False


class RankScan:
    """The search in one rank's dump, of which only collectives, candidates and growth are kept.

    Attributes:
        entries: the number of entries read.
        has_forward: some of them are of the forward pass.
    """

    def __init__(self, dump: RankDump) -> None:
        self.dump = dump
        self.rank = rank_of(dump)
        self.entries = 0
        self.has_forward = False
        self.candidates: list[Candidate] = []
        self.collectives: list[Collective] = []
        self.growth = Growth()
        # the oldest tensors are forgotten where there are too many
        self._tensors: dict[str, _Tensor] = {}  # by their statistics, and by their place in memory with these
        self._unused: dict[_Tensor, None] = {}  # those that no entry took yet
        self._has_backward: dict[str, bool] = {}  # names of makers -> whether their backward pass came
        self._gradients = 0  # entries of backward passes
        self._lost_gradient = False  # a parameter's gradient is not finite, and no tensor leads there
        self._is_settled = False  # a gradient or a collective is not finite: the growth is over

    def take(self, entry: DumpEntry) -> None:
        """Take the next entry of the dump."""
        if entry.is_recompute:
            return
        name = parse_name(entry.name)
        is_gradient = name.direction in ("backward", "parameters_grad")
        self._gradients += is_gradient
        self.has_forward |= not is_gradient
        if name.is_collective:
            self._take_collective(entry, name)
        elif name.direction == "parameters_grad":
            self._take_gradient(entry)
        else:
            if not self._is_settled:
                self.growth.take(entry, name)
            self._take_call(entry, name)
        self.entries += 1

    def settle(self) -> None:
        """Judge the tensors that no entry took, when all entries have been read."""
        for tensor in self._unused:
            cause, is_newest = tensor.cause, tensor.after == self._gradients
            if cause is None or tensor.is_raw or cause.standing == "strong":
                continue
            is_loss = tensor.requires_grad and (is_newest or self._lost_gradient)
            if is_loss or self._has_backward.get(tensor.maker):
                cause.standing = "strong"
            elif not self._gradients or (is_newest and tensor.in_place):  # a parameter that the optimizer ruined
                cause.standing = "weak"
            elif cause.standing == "finite again":
                cause.standing = "unused"
        self._tensors.clear()
        self._unused.clear()

    # -- entries ------------------------------------------------------------------------------------------------------

    def _take_call(self, entry: DumpEntry, name: Name) -> None:
        if name.direction == "backward" and name.forward in self._has_backward:
            self._has_backward[name.forward] = True
        operation = "" if name.is_module or name.direction == "backward" else name.api
        made = bad_leaves(entry.outputs)
        parameters: Leaves = []
        if "parameters" in entry.raw:
            parameters = bad_leaves(leaf for leaf in entry.leaves() if leaf[0].startswith(_PARAMETERS))
        taken = [self._taken(entry, name, leaf, made) for leaf in (*parameters, *self._read_inputs(entry, operation))]
        self._name_parameters(name, parameters)
        if name.direction == "backward":
            self._reach(tensor.cause for tensor in taken)
        if made or any("float" in leaf.dtype or "complex" in leaf.dtype for _, leaf in entry.outputs):
            for tensor in taken:  # what only looks, as isnan does, uses nothing
                self._unused.pop(tensor, None)
        if made:
            self._take_outputs(entry, name, operation, made, taken)

    def _read_inputs(self, entry: DumpEntry, operation: str) -> Leaves:
        """Return the inputs that are not finite, without what the entry overwrites, which is forgotten."""
        read = []
        for path, leaf in bad_leaves(entry.inputs):
            if path != "input_kwargs.out" and not (path == "input.0" and tensor_rules.overwrites_target(operation)):
                read.append((path, leaf))
            elif (tensor := self._find(leaf)) is not None:
                self._unused.pop(tensor, None)
        return read

    def _taken(self, entry: DumpEntry, name: Name, bad: tuple[str, DumpLeaf], made: Leaves) -> _Tensor:
        """Return the tensor that goes in; one that was never seen before has arrived."""
        path, leaf = bad
        if (tensor := self._find(leaf)) is not None:
            return tensor
        is_weighted = bool(made) and tensor_rules.is_weighted_product(name.class_name or name.api)
        is_parameter = path.startswith(_PARAMETERS)
        may_mask = tensor_rules.may_be_mask(has_nan=leaf.has_nan, has_positive_infinity=leaf.max == math.inf)
        if may_mask and not (name.direction == "backward" or is_weighted or is_parameter or leaf.requires_grad):
            return self._add(None, entry.name, leaf)
        arrived = self._add_candidate("parameter" if is_parameter else "arrived", entry, [bad])
        tensor = self._add(arrived, entry.name, leaf)
        if entry.outputs:
            self._unused.pop(tensor, None)
        return tensor

    def _take_outputs(self, entry: DumpEntry, name: Name, operation: str, made: Leaves, taken: list[_Tensor]) -> None:
        causes = [tensor.cause for tensor in taken if tensor.cause is not None]
        has_mask = len(causes) < len(taken)
        known = [self._find(leaf) if name.is_module else None for _, leaf in made]
        in_place = tensor_rules.writes_in_place(operation)
        is_raw = False
        cause: Candidate | None = None
        if causes:
            cause = min(causes, key=lambda cause: (cause.kind == "uninitialised", cause.order))
            is_raw = all(tensor.is_raw for tensor in taken) and (in_place or tensor_rules.is_view(operation))
        elif None in known and not self._is_meant(entry, operation, made, has_mask):
            cause = self._blame(entry, name, made, has_mask)
            is_raw = cause.kind == "uninitialised"
            known = [None] * len(made)
        for (_, leaf), tensor in zip(made, known, strict=True):
            if tensor is not None:  # the module returns what an entry inside it made, or its input
                self._put(self._unused, tensor, None)
            else:
                self._add(cause, entry.name, leaf, in_place, is_raw)

    def _is_meant(self, entry: DumpEntry, operation: str, made: Leaves, has_mask: bool) -> bool:
        """Return whether these are infinities that the program put there, or what is still a mask of them."""
        if any(leaf.has_nan for _, leaf in made):
            return False
        is_mask = has_mask and all(leaf.max != math.inf for _, leaf in made)
        return is_mask or tensor_rules.puts_infinity(operation, _nonfinite_numbers(entry))

    def _blame(self, entry: DumpEntry, name: Name, made: Leaves, has_mask: bool) -> Candidate:
        kind: Kind = "computation"
        if tensor_rules.is_uninitialized(name.api) and not name.is_module:
            kind = "uninitialised"
        elif any(leaf.has_nan for _, leaf in made) and any(map(math.isnan, _nonfinite_numbers(entry))):
            kind = "given"
        candidate = self._add_candidate(kind, entry, made)
        candidate.masked = has_mask
        if name.direction == "backward":  # what its forward pass made is in the graph
            self._reach([candidate, *(earlier for earlier in self.candidates if earlier.name == name.forward)])
        return candidate

    def _name_parameters(self, name: Name, parameters: Leaves) -> None:
        """A function takes a parameter as an argument; the module around it, which comes later, has its name."""
        for path, leaf in parameters:
            tensor = self._find(leaf)
            if tensor is not None and tensor.cause is not None and tensor.cause.kind in ("arrived", "parameter"):
                tensor.cause.kind = "parameter"
                module = "" if name.api == "root" else name.api
                tensor.cause.parameters += (f"{module}.{path.removeprefix(_PARAMETERS)}".strip("."),)

    def _take_gradient(self, entry: DumpEntry) -> None:
        for bad in bad_leaves(entry.leaves()):
            tensor = self._find(bad[1])
            if tensor is not None and tensor.cause is not None:
                self._reach([tensor.cause])
            elif not any(candidate.standing == "strong" for candidate in self.candidates):
                self._lost_gradient = True
                self._reach([self._add_candidate("gradient", entry, [bad])])

    def _take_collective(self, entry: DumpEntry, name: Name) -> None:
        call = read_collective(entry, name, self.rank)
        made = bad_leaves(call.made)
        taken = [self._taken(entry, name, leaf, made) for leaf in bad_leaves(call.taken)]
        for tensor in taken:
            self._unused.pop(tensor, None)
        cause = next((tensor.cause for tensor in taken if tensor.cause is not None), None)
        self._reach(tensor.cause for tensor in taken)
        origin = None
        if made and cause is None:
            cause = origin = self._add_candidate("collective", entry, made)
            self._reach([origin])
        for _, leaf in made:
            self._unused.pop(self._add(cause, entry.name, leaf), None)
        self.collectives.append(Collective(call, bool(taken), origin))

    # -- bookkeeping --------------------------------------------------------------------------------------------------

    def _find(self, leaf: DumpLeaf) -> _Tensor | None:
        statistics, location = _keys(leaf)
        if location is not None and (tensor := self._tensors.get(location + statistics)) is not None:
            return tensor
        tensor = self._tensors.get(statistics)
        if tensor is not None and None not in (location, tensor.storage) and tensor not in self._unused:
            return None  # that one was taken, and is elsewhere in memory: this is another one
        return tensor

    def _add(
        self, cause: Candidate | None, maker: str, leaf: DumpLeaf, in_place: bool = False, is_raw: bool = False
    ) -> _Tensor:
        requires_grad = bool(leaf.requires_grad)
        tensor = _Tensor(cause, maker, leaf.storage_id, requires_grad, self._gradients, in_place, is_raw)
        statistics, location = _keys(leaf)
        self._put(self._tensors, statistics, tensor)
        if location is not None:
            self._put(self._tensors, location + statistics, tensor)
        self._put(self._has_backward, maker, self._has_backward.get(maker, False))
        self._put(self._unused, tensor, None)
        return tensor

    @staticmethod
    def _put(held: dict[Any, _T], key: Any, value: _T) -> None:
        held.pop(key, None)
        if len(held) >= _MAX_TENSORS:
            del held[next(iter(held))]
        held[key] = value

    def _reach(self, causes: Iterable[Candidate | None]) -> None:
        for cause in causes:
            if cause is not None:
                cause.standing = "strong"
                self._is_settled = True

    def _add_candidate(self, kind: Kind, entry: DumpEntry, bad: Leaves) -> Candidate:
        candidate = Candidate(kind, entry, bad, len(self.collectives), self.entries, in_backward=self._gradients > 0)
        if len(self.candidates) >= _MAX_CANDIDATES:
            alive = {tensor.cause for tensor in self._unused}
            kept = [earlier for earlier in self.candidates if earlier.standing == "strong" or earlier in alive]
            self.candidates = kept[: _MAX_CANDIDATES - 1]
        self.candidates.append(candidate)
        return candidate


def bad_leaves(leaves: Iterable[tuple[str, DumpLeaf]]) -> Leaves:
    """Return those that are not finite."""
    return [(path, leaf) for path, leaf in leaves if not leaf.is_finite]


def _keys(leaf: DumpLeaf) -> tuple[str, str | None]:
    """Return what identifies a tensor as well as statistics can, and its place in memory if it is known."""
    statistics = [leaf.raw.get(key) for key in ("shape", *keys())]
    location = None if leaf.storage_id is None else f"{leaf.storage_id} {leaf.storage_offset} "
    return repr(statistics), location


def _nonfinite_numbers(entry: DumpEntry) -> list[float]:
    """Return the arguments that are numbers, but not finite; a dump may hold words for them."""
    words = [str(leaf.value).lower() for _, leaf in entry.values() if not leaf.is_tensor]
    return [float(word) for word in words if word in ("nan", "inf", "-inf", "infinity", "-infinity")]


def ancestors(name: str, dump: RankDump) -> list[str]:
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
_NEAR = 1e3
_LARGEST = {"float16": 65504.0, "bfloat16": 3.39e38, "float32": 3.4e38, "float64": 1.79e308}


@dataclass(frozen=True)
class GrownEntry:
    """An entry whose output is larger than its input; sizes are norms, or the largest elements."""

    name: str
    size_in: float
    size_out: float
    ratio: float


@dataclass(frozen=True)
class Grower:
    """An operation that makes tensors larger in ``times`` of its ``calls``, by the geometric mean ``ratio``."""

    operation: str
    direction: str
    calls: int
    times: int
    ratio: float
    trail: tuple[GrownEntry, ...]


@dataclass
class Growth:
    """The entries of one rank that make tensors several times as large: the newest, and the calls of each operation."""

    grown: deque[tuple[str, str, GrownEntry]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)

    def take(self, entry: DumpEntry, name: Name) -> None:
        # the gradient of a weight is a sum over the batch, and no step on the way back
        has_weights = name.prefix == "Functional" and name.direction == "backward"
        size_in = _size(leaf for _, leaf in entry.inputs)
        size_out = _size(leaf for path, leaf in entry.outputs if path == "output.0" or not has_weights)
        operation = f"Module {name.class_name}" if name.is_module else f"{name.prefix}.{name.api}"
        self.calls[operation, name.direction] += 1
        if 0 < size_in < math.inf and _FACTOR * size_in <= size_out < math.inf:
            grown = GrownEntry(entry.name, size_in, size_out, size_out / size_in)
            self.grown.append((operation, name.direction, grown))

    def grower(self, candidate: Candidate, dump: RankDump) -> Grower | None:
        """Return the operation that contributed most to an overflow; None where none did repeatedly."""
        direction = "backward" if candidate.in_backward else "forward"
        grown = [(operation, entry) for operation, along, entry in self.grown if along == direction]
        outer = _explained([entry for _, entry in grown], dump)
        by_operation: defaultdict[str, list[float]] = defaultdict(list)
        for operation, entry in grown:
            if entry.name not in outer:
                by_operation[operation].append(math.log(entry.ratio))
        trail = tuple(entry for _, entry in grown if entry.name not in outer)[-_TRAIL:]
        for operation, logs in sorted(by_operation.items(), key=lambda item: -sum(item[1])):
            calls = self.calls[operation, direction]
            if len(logs) >= 2 and 2 * len(logs) >= calls and sum(logs) >= math.log(_ENOUGH):
                grower = Grower(operation, direction, calls, len(logs), math.exp(sum(logs) / len(logs)), trail)
                return grower if _is_overflow(candidate, trail[-1].ratio) else None
        return None


def _is_overflow(candidate: Candidate, ratio: float) -> bool:
    """Return whether there are infinities, or whether what went in was close to the largest number."""
    near = _NEAR * max(ratio, 1.0)
    return candidate.has_infinity or any(
        _size([leaf]) * near >= _LARGEST.get(dtype_name(leaf.dtype), math.inf) for _, leaf in candidate.entry.inputs
    )


def _size(leaves: Iterable[DumpLeaf]) -> float:
    """Return the largest norm; where that overflowed, the largest element. NaN counts as infinite."""
    largest = 0.0
    for leaf in leaves:
        if "float" not in leaf.dtype:
            continue
        size = leaf.norm
        if size is None or not math.isfinite(size):
            bounds = [abs(bound) for bound in (leaf.max, leaf.min) if bound is not None]
            size = math.inf if any(map(math.isnan, bounds)) else max(bounds, default=0.0)
        largest = max(largest, size)
    return largest


def _explained(grown: list[GrownEntry], dump: RankDump) -> set[str]:
    """Return names of modules that grow because something inside them does."""
    by_name = {entry.name: entry for entry in grown}
    return {
        outer
        for entry in grown
        for outer in ancestors(entry.name, dump)
        if outer in by_name and 2 * math.log(entry.ratio) >= math.log(by_name[outer].ratio)
    }
