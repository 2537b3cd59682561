"""One rank's entries, read once: where its tensors may have stopped being finite, and its collectives.

1. An entry whose inputs were finite and whose outputs are not is a candidate. A tensor that is not finite when it is
   first seen is one, too: something that the dump does not record made it, or it was so before the step.
2. What is not finite carries its candidate along: by the statistics of a tensor, which tell tensors apart well enough.
3. Infinities that were put there on purpose (an argument that is an infinity; a mask of minus infinities) are no
   candidates, nor is what they turn into, unless that is a NaN or an infinity of the other sign.
4. A candidate that made infinities alone is open: it stands if they become a NaN, reach a gradient or a collective, or
   are never used; it falls if all that is seen of them is how they become finite again (the log of a mask of zeros).
   Uninitialised memory (``empty``) stands only if it reaches a gradient or a collective.
5. What is computed again (activation checkpointing) does not count.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

from ddpstats.dump.format._entries import Entry, Leaf
from ddpstats.dump.format._files import RankDump
from ddpstats.dump.format._names import Name, parse_name
from ddpstats.dump.origin._candidates import Bad, Candidate, Collective, Kind, RankScan, has_nan, is_bad

_MAX_CANDIDATES, _MAX_MARKS, _BEFORE = 256, 65_536, 5
_UNINITIALISED = re.compile(r"(new_)?empty(_|$)")
_ON_PURPOSE = re.compile(r"(new_)?(full|fill|masked_fill|where|triu|tril)(_|$)")
_ANOTHER_PASS = re.compile(r"(.+\.backward(?:\.\d+)?)\.\d+")
_PARAMETERS = "parameters."
_FROM_ROOT, _TO_ROOT = frozenset({"broadcast", "scatter"}), frozenset({"reduce", "gather", "gather_into_tensor"})


def _is_minus_infinity(leaf: Leaf) -> bool:
    return not has_nan(leaf) and leaf.max != math.inf


def scan_rank(dump: RankDump, also: Callable[[Entry], None] = lambda entry: None) -> RankScan:
    """Read one rank's entries once. Keeps its collectives, its first candidates, and little else.

    ``also`` gets every entry, for who wants to know something else of them.
    """
    walk = _Walk(RankScan(dump))
    for read in dump.entries():
        entry = _WalkedOnce(read.name, read.raw, read.source)
        also(entry)
        if not entry.is_recompute:
            walk.take(entry)
    return walk.found


class _WalkedOnce(Entry):
    """An entry whose tensors are asked for by several, and looked for, and checked, once."""

    def inputs(self) -> Iterator[tuple[str, Leaf]]:
        return iter(self._inputs)

    def outputs(self) -> Iterator[tuple[str, Leaf]]:
        return iter(self._outputs)

    @cached_property
    def _inputs(self) -> list[tuple[str, Leaf]]:
        return list(super().inputs())

    @cached_property
    def _outputs(self) -> list[tuple[str, Leaf]]:
        return list(super().outputs())


class _Walk:
    """The state of reading one rank. A mark leads to a candidate, or to None: infinities put there on purpose."""

    def __init__(self, found: RankScan) -> None:
        self.found = found
        self._marks: dict[str, Candidate | None] = {}
        self._before: deque[str] = deque(maxlen=_BEFORE)
        self._in_backward = False

    def take(self, entry: Entry) -> None:
        name = _parsed(entry.name)
        self._in_backward = self._in_backward or name.direction in ("backward", "parameters_grad")
        if not any(candidate.stands for candidate in self.found.candidates):
            self.found.growth.take(entry, name)
        if name.is_collective:
            self._take_collective(entry, name)
        elif name.direction == "parameters_grad":
            self._take_gradient(entry)
        else:
            self._take_call(entry, name)
        self.found.entries += 1
        self._before.append(entry.name)

    # -- calls --------------------------------------------------------------------------------------------------------

    def _take_call(self, entry: Entry, name: Name) -> None:
        parameters: list[Bad] = []
        if "parameters" in entry.raw:
            parameters = self._bad((path, leaf) for path, leaf in entry.leaves() if path.startswith(_PARAMETERS))
        taken = [*parameters, *self._bad(entry.inputs())]
        made = self._bad(entry.outputs())
        real, masked = self._causes(entry, taken)
        self._name_parameters(name.api, parameters)
        if not made:
            for candidate in real:
                candidate.used = True
        elif real:
            self._carry(min(real, key=lambda candidate: candidate.order), made, name.direction == "backward")
        elif self._is_on_purpose(entry, name, made, masked):
            self._mark(made, None)
        else:
            self._add(self._made_by(entry, name, made, masked))

    def _name_parameters(self, module: str, parameters: list[Bad]) -> None:
        """A function takes a parameter as one of its arguments; which one that was, its module tells afterwards."""
        for bad in parameters:
            cause = self._marks.get(bad.mark)
            if cause is not None and cause.kind in ("arrived", "parameter"):
                cause.kind = "parameter"
                cause.parameters += (f"{module}.{bad.path.removeprefix(_PARAMETERS)}".strip("."),)

    def _made_by(self, entry: Entry, name: Name, made: list[Bad], masked: bool) -> Candidate:
        if not name.is_module and _UNINITIALISED.match(name.api):
            return self._candidate("uninitialised", entry, made)
        candidate = self._candidate("computation", entry, made)
        candidate.masked = masked
        if name.direction == "backward" or any(has_nan(bad.leaf) for bad in made):
            candidate.stands = True
        return candidate

    def _is_on_purpose(self, entry: Entry, name: Name, made: list[Bad], masked: bool) -> bool:
        given = [leaf.value for _, leaf in entry.values() if not leaf.is_tensor and _is_infinite(leaf.value)]
        if any(has_nan(bad.leaf) for bad in made):
            return any(math.isnan(float(value)) for value in given)
        if given or (not name.is_module and _ON_PURPOSE.match(name.api)):
            return True
        return masked and all(_is_minus_infinity(bad.leaf) for bad in made)

    def _causes(self, entry: Entry, taken: list[Bad]) -> tuple[list[Candidate], bool]:
        """Where what went in comes from; and whether some of it was put there on purpose."""
        real: list[Candidate] = []
        masked = False
        for bad in taken:
            cause = self._cause(entry, bad)
            real += [] if cause is None else [cause]
            masked = masked or cause is None
        return real, masked

    def _cause(self, entry: Entry, bad: Bad) -> Candidate | None:
        if bad.mark in self._marks:
            return self._marks[bad.mark]
        is_parameter = bad.path.startswith(_PARAMETERS)
        if _is_minus_infinity(bad.leaf) and not is_parameter and "backward" not in entry.name:
            self._mark([bad], None)
            return None
        cause = next((candidate for candidate in self.found.candidates if candidate.holds()), None)
        if cause is None:
            cause = self._candidate("parameter" if is_parameter else "arrived", entry, [bad])
            cause.stands = True
            self._add(cause)
        else:
            self._mark([bad], cause)
        return cause

    # -- gradients and collectives ------------------------------------------------------------------------------------

    def _take_gradient(self, entry: Entry) -> None:
        for bad in self._bad(entry.leaves()):
            cause = self._marks.get(bad.mark) or next((c for c in self.found.candidates if c.holds()), None)
            cause = cause or next((c for c in self.found.candidates if c.kind == "uninitialised"), None)
            if cause is None:
                cause = self._candidate("gradient", entry, [bad])
                self._add(cause)
            cause.stands = True

    def _take_collective(self, entry: Entry, name: Name) -> None:
        held = entry.raw.get("input_kwargs")
        given = held if isinstance(held, dict) else {}
        group = _group_of(entry)
        root = _number(given.get("dst" if name.api in _TO_ROOT else "src"))
        is_message = name.api in ("send", "recv", "isend", "irecv")
        peer = _number(given.get("dst" if name.api.endswith("send") else "src")) if is_message else None
        me = self.found.rank
        taken = [] if name.api in _FROM_ROOT and root not in (None, me) else self._bad(entry.inputs())
        made = [] if name.api in _TO_ROOT and root not in (None, me) else self._bad(entry.outputs())
        real, _ = self._causes(entry, taken)
        for candidate in real:
            candidate.stands = True
        ranks = tuple(rank for rank in group.get("group_ranks") or () if isinstance(rank, int))
        seen = Collective(
            entry, name.api, name.number or 0, ranks, str(group.get("group_id", "")), root, peer,
            tuple(taken), tuple(made),
        )  # fmt: skip
        self.found.collectives.append(seen)
        if made and real:
            self._mark(made, real[0])
        elif made:
            cause = self._candidate("collective", entry, made)
            cause.stands = True
            self._add(cause)

    # -- bookkeeping --------------------------------------------------------------------------------------------------

    def _bad(self, leaves: Iterable[tuple[str, Leaf]]) -> list[Bad]:
        found = []
        for path, leaf in leaves:
            self.found.tensors += 1
            if is_bad(leaf):
                found.append(Bad(path, leaf))
        return found

    def _candidate(self, kind: Kind, entry: Entry, bad: list[Bad]) -> Candidate:
        found = self.found
        place = len(found.collectives), found.entries
        return Candidate(kind, entry, tuple(bad), *place, before=tuple(self._before), in_backward=self._in_backward)

    def _add(self, candidate: Candidate) -> None:
        candidates = self.found.candidates
        if len(candidates) >= _MAX_CANDIDATES:
            fallen = next((one for one in candidates if not one.holds()), None)
            if fallen is None:
                return
            candidates.remove(fallen)
        candidates.append(candidate)
        self._mark(list(candidate.bad), candidate)

    def _carry(self, cause: Candidate, made: list[Bad], is_gradient: bool) -> None:
        became_nan = cause.kind != "uninitialised" and any(has_nan(bad.leaf) for bad in made)
        if cause.stands is None and (is_gradient or became_nan):
            cause.stands = True
        self._mark(made, cause)

    def _mark(self, bad: list[Bad], cause: Candidate | None) -> None:
        for one in bad:
            if len(self._marks) < _MAX_MARKS:
                self._marks.setdefault(one.mark, cause)


def _parsed(full: str) -> Name:
    """A second backward pass over one graph has a number more: ``Torch.log.0.backward.1``."""
    name = parse_name(full)
    if not name.direction and (match := _ANOTHER_PASS.fullmatch(full)):
        return parse_name(match[1])
    return name


def _is_infinite(value: Any) -> bool:
    try:
        return not math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        return False


def _group_of(entry: Entry) -> dict[str, Any]:
    """The process group among the arguments, by name or not."""
    for _, leaf in entry.values():
        if leaf.type.endswith("ProcessGroup"):
            return dict(leaf.raw)
    return {}


def _number(raw: Any) -> int | None:
    value = raw.get("value") if isinstance(raw, dict) else raw
    return value if isinstance(value, int) else None
