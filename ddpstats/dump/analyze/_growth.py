"""Which operation makes tensors larger, again and again, until they overflow.

An overflow is the end of a story: the operation that overflows is often not the one at fault. So while a rank's dump is
read, the entries whose output is several times as large as their input are counted per operation, and the newest are
kept. A module grows where something inside it does; then it is the inner one that is named.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from ddpstats._base.text import dtype_name
from ddpstats.dump.entries import DumpEntry, DumpLeaf
from ddpstats.dump.msprobe import Name
from ddpstats.dump.reader import RankDump

FACTOR = 4.0  # below, nothing is called growth
_TRAIL, _KEPT = 12, 4096
_ENOUGH = 1e3  # what all growth of an operation must come to
_HALF = 0.5
_NEAR = 1e3
_LARGEST = {"float16": 65504.0, "bfloat16": 3.39e38, "float32": 3.4e38, "float64": 1.79e308}


@dataclass(frozen=True)
class Grown:
    """An entry whose output is ``ratio`` times as large as its input; sizes are norms, or the largest elements."""

    name: str
    operation: str
    direction: str
    size_in: float
    size_out: float

    @property
    def ratio(self) -> float:
        return self.size_out / self.size_in


@dataclass(frozen=True)
class Grower:
    """An operation that grows repeatedly: in ``times`` of its ``calls``, by ``ratio`` on the (geometric) average."""

    operation: str
    direction: str
    calls: int
    times: int
    ratio: float
    trail: tuple[Grown, ...]


@dataclass
class Growth:
    """What one rank's entries say so far; bounded."""

    grown: deque[Grown] = field(default_factory=lambda: deque(maxlen=_KEPT))
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)

    def take(self, entry: DumpEntry, name: Name) -> None:
        if name.direction not in ("forward", "backward") or name.is_collective:
            return
        size_in = _size(leaf for _, leaf in entry.inputs)
        size_out = _size(leaf for path, leaf in entry.outputs if not _is_weight(name, path))
        operation = f"Module {name.class_name}" if name.is_module else f"{name.prefix}.{name.api}"
        self.calls[operation, name.direction] += 1
        if 0 < size_in < math.inf and FACTOR * size_in <= size_out < math.inf:
            self.grown.append(Grown(entry.name, operation, name.direction, size_in, size_out))

    def grower(self, direction: str, dump: RankDump) -> Grower | None:
        """The operation that contributed most in this direction; None where none did repeatedly."""
        grown = [one for one in self.grown if one.direction == direction]
        outer = _explained(grown, dump)
        sums: defaultdict[str, float] = defaultdict(float)
        for one in grown:
            if one.name not in outer:
                sums[one.operation] += math.log(one.ratio)
        for operation, total in sorted(sums.items(), key=lambda item: -item[1]):
            own = [one for one in grown if one.operation == operation and one.name not in outer]
            calls = self.calls[operation, direction]
            if len(own) >= 2 and 2 * len(own) >= calls and total >= math.log(_ENOUGH):
                trail = tuple(one for one in grown if one.name not in outer)[-_TRAIL:]
                return Grower(operation, direction, calls, len(own), math.exp(total / len(own)), trail)
        return None


def overflowed(entry: DumpEntry, bad: Iterable[DumpLeaf], grower: Grower) -> bool:
    """Whether what is bad is the end of the growth: there are infinities, or what went in was close to the largest."""
    if any(leaf.has_infinity for leaf in bad):
        return True
    near = _NEAR * max(grower.trail[-1].ratio, 1.0)
    for _, leaf in entry.inputs:
        if (largest := _LARGEST.get(dtype_name(leaf.dtype))) and _size([leaf]) * near >= largest:
            return True
    return False


def _is_weight(name: Name, path: str) -> bool:
    """Whether it is likely the gradient of a weight, which is a sum over the batch and no step on the way back."""
    return name.prefix == "Functional" and name.direction == "backward" and path != "output.0"


def _size(leaves: Iterable[DumpLeaf]) -> float:
    """The largest norm; where that overflowed, the largest element. Infinite or NaN counts as infinite."""
    largest = 0.0
    for leaf in leaves:
        if "float" not in leaf.dtype:
            continue
        size = leaf.norm
        if size is None or not math.isfinite(size):
            bounds = [abs(bound) for bound in (leaf.max, leaf.min) if bound is not None]
            size = math.inf if any(math.isnan(bound) for bound in bounds) else max(bounds, default=0.0)
        largest = max(largest, size)
    return largest


def _explained(grown: list[Grown], dump: RankDump) -> set[str]:
    """Names of modules that grow because something inside them does."""
    by_name = {one.name: one for one in grown}
    explained = set()
    for one in grown:
        for outer in ancestors(one.name, dump):
            around = by_name.get(outer)
            if around is not None and math.log(one.ratio) >= _HALF * math.log(around.ratio):
                explained.add(outer)
    return explained


def ancestors(name: str, dump: RankDump) -> list[str]:
    """The modules' passes around an entry, innermost first."""
    found: list[str] = []
    parent = dump.parent_of(name)
    while parent and len(found) < 64:
        outer = parent if isinstance(parent, str) else parent[0]
        if outer in found or not isinstance(outer, str):
            break
        found.append(outer)
        parent = dump.parent_of(outer)
    return found
