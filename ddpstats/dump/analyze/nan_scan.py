"""One rank's entries, read once: where its tensors may have stopped being finite, and its collectives.

1. An entry whose inputs were finite and whose outputs are not is a candidate. A tensor that is not finite when it is
   first seen is one, too: something that the dump does not record made it, or it was so before.
2. What is not finite carries its candidate along (`Traces`).
3. Infinities that were put there on purpose (an argument that is an infinity; a mask of minus infinities) are no
   candidates, nor is what they turn into, unless that is a NaN or an infinity of the other sign. A NaN that the
   program wrote is a candidate, for it may be meant to be written over.
4. A candidate stands if a gradient or a collective takes of it, or if the loss ends in it. It falls if all that is seen
   of it becomes finite again outside gradients (the log of a mask of zeros). Where nothing uses it, and there are
   gradients, which are finite, it is mentioned, and not blamed. See `Candidate.settle`.
5. What is computed again (activation checkpointing) does not count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from ddpstats.dump.analyze._candidates import (
    Candidate,
    Kind,
    NonFiniteTensor,
    RankScan,
    Trace,
    Traces,
    bad_ones,
    is_literal_write,
    is_minus_infinity,
    is_on_purpose,
    is_uninitialised,
    is_view,
    keeps_in_place,
    mixes_with_weights,
    overwrites,
)
from ddpstats.dump.analyze._growth import ancestors
from ddpstats.dump.entries import DumpEntry, DumpLeaf
from ddpstats.dump.msprobe import Name, parse_name, read_collective
from ddpstats.dump.reader import RankDump

_MAX_CANDIDATES, _BEFORE = 256, 5
_PARAMETERS = "parameters."
_GRADIENTS = ("backward", "parameters_grad")


def scan_rank(dump: RankDump, also: Callable[[DumpEntry], None] = lambda entry: None) -> RankScan:
    """Read one rank's entries once. Keeps its collectives, its first candidates, and little else.

    ``also`` gets every entry, for who wants to know something else of them.
    """
    walk = _Walk(RankScan(dump))
    for entry in dump.entries():
        also(entry)
        if not entry.is_recompute:
            walk.take(entry)
    walk.settle()
    return walk.found


class _Walk:
    """The state of reading one rank."""

    def __init__(self, found: RankScan) -> None:
        self.found = found
        self._traces = Traces()
        self._before: deque[str] = deque(maxlen=_BEFORE)
        self._gradients = 0  # entries of backward passes so far
        self._is_settled = False  # something reached a gradient: what grows afterwards tells nothing

    def take(self, entry: DumpEntry) -> None:
        name = parse_name(entry.name)
        is_gradient = name.direction in _GRADIENTS
        self._gradients += is_gradient
        if not self._is_settled:
            self.found.growth.take(entry, name)
        self._note_recorded(entry, "backward" if is_gradient else "forward")
        if name.is_collective:
            self._take_collective(entry, name)
        elif name.direction == "parameters_grad":
            self._take_gradient(entry)
        else:
            self._take_call(entry, name)
        self.found.entries += 1
        self._before.append(entry.name)

    def settle(self) -> None:
        self.found.candidates.sort(key=lambda candidate: candidate.order)
        for candidate in self.found.candidates:
            candidate.settle(self._gradients)

    def _note_recorded(self, entry: DumpEntry, direction: str) -> None:
        for part, leaves in (("input", entry.inputs), ("output", entry.outputs)):
            if leaves:
                self.found.recorded.add((direction, part))

    # -- calls --------------------------------------------------------------------------------------------------------

    def _take_call(self, entry: DumpEntry, name: Name) -> None:
        if name.direction == "backward":
            self._traces.backward_of(name.forward)
        made = bad_ones(entry.outputs)
        parameters: list[NonFiniteTensor] = []
        if "parameters" in entry.raw:
            parameters = bad_ones((path, leaf) for path, leaf in entry.leaves() if path.startswith(_PARAMETERS))
        traces = [self._taken(entry, name, bad, made) for bad in [*parameters, *self._inputs(entry, name)]]
        real = [trace.cause for trace in traces if trace.cause is not None]
        self._name_parameters(name, parameters)
        if name.direction == "backward":
            self._reach(real)
        if made:
            self._made(entry, name, made, traces)
        elif any(_is_number(leaf) for _, leaf in entry.outputs):
            for trace in traces:
                trace.close()

    def _inputs(self, entry: DumpEntry, name: Name) -> list[NonFiniteTensor]:
        """Without the content of what is only written to, which is over."""
        found = []
        for bad in bad_ones(entry.inputs):
            if bad.path == "input_kwargs.out" or (bad.path == "input.0" and overwrites(name)):
                trace = self._traces.find(bad.leaf)
                if trace is not None:
                    trace.close()
            else:
                found.append(bad)
        return found

    def _taken(self, entry: DumpEntry, name: Name, bad: NonFiniteTensor, made: list[NonFiniteTensor]) -> Trace:
        """The trace of what goes in; of something never seen before, a new one."""
        trace = self._traces.find(bad.leaf)
        is_weighted = bool(made) and mixes_with_weights(name)
        if trace is None:
            is_parameter = bad.path.startswith(_PARAMETERS)
            arrived = self._candidate("parameter" if is_parameter else "arrived", entry, [bad])
            may_mask = is_minus_infinity(bad.leaf) and name.direction != "backward" and not is_weighted
            if may_mask and not is_parameter and not bad.leaf.requires_grad:
                trace = self._trace(None, entry.name, bad.leaf)
                trace.perhaps = arrived
            else:
                self._keep(arrived)
                direction = "backward" if name.direction == "backward" else "forward"
                counts = (direction, "output") not in self.found.recorded  # this dump has no outputs of such entries
                trace = self._trace(arrived, entry.name, bad.leaf, counts)
        elif trace.perhaps is not None and is_weighted:
            self._keep(trace.perhaps)
            trace = self._trace(trace.perhaps, entry.name, bad.leaf, False)
        return trace

    def _made(self, entry: DumpEntry, name: Name, made: list[NonFiniteTensor], traces: list[Trace]) -> None:
        for trace in traces:
            trace.close()
        real = [trace.cause for trace in traces if trace.cause is not None]
        masked = len(real) < len(traces)
        if real:
            cause = min(real, key=lambda one: (one.kind == "uninitialised", one.order))
            self._carry(entry, name, made, cause, traces)
        elif name.is_module and self._is_from_inside(entry, made):
            return
        elif is_on_purpose(entry, name, made, masked):
            perhaps = next((trace.perhaps for trace in traces if trace.perhaps is not None), None)
            for bad in made:
                self._trace(None, entry.name, bad.leaf).perhaps = perhaps
        else:
            self._blame(entry, name, made, masked)

    def _carry(
        self, entry: DumpEntry, name: Name, made: list[NonFiniteTensor], cause: Candidate, traces: list[Trace]
    ) -> None:
        """What was made is not finite because of ``cause``."""
        is_raw = cause.kind == "uninitialised" and not any(trace.counts for trace in traces)
        unused = is_raw and (is_view(name) or keeps_in_place(name))  # still memory that is being filled
        for bad in made:
            if name.is_module and self._traces.find(bad.leaf) is not None:
                continue  # what is inside it made that
            self._trace(cause, entry.name, bad.leaf, not unused, keeps_in_place(name))

    def _blame(self, entry: DumpEntry, name: Name, made: list[NonFiniteTensor], masked: bool) -> None:
        kind: Kind = "computation"
        if is_uninitialised(name):
            kind = "uninitialised"
        elif is_literal_write(entry, made):
            kind = "given"
        candidate = self._candidate(kind, entry, made)
        candidate.masked = masked
        self._keep(candidate)
        for bad in made:
            trace = self._traces.find(bad.leaf)
            if trace is not None and self._is_around(trace.maker, entry):
                trace.close()  # a module that was written before what is in it has had its output from there
            self._trace(candidate, entry.name, bad.leaf, kind != "uninitialised", keeps_in_place(name))
        if name.direction == "backward":
            self._reach([candidate, *(one for one in self.found.candidates if one.name == name.forward)])

    def _is_from_inside(self, entry: DumpEntry, made: list[NonFiniteTensor]) -> bool:
        """Whether something made it that is written already; a module may also be written before what is in it."""
        for bad in made:
            trace = self._traces.find(bad.leaf)
            if trace is None or self._is_around(trace.maker, entry):
                return False
        return True

    def _is_around(self, outer: str, entry: DumpEntry) -> bool:
        return outer.startswith("Module.") and outer in ancestors(entry.name, self.found.dump)

    def _name_parameters(self, name: Name, parameters: list[NonFiniteTensor]) -> None:
        """A function takes a parameter as one of its arguments; which one that was, its module tells afterwards."""
        for bad in parameters:
            trace = self._traces.find(bad.leaf)
            if trace is not None and trace.cause is not None and trace.cause.kind in ("arrived", "parameter"):
                trace.cause.kind = "parameter"
                module = "" if name.api == "root" else name.api
                trace.cause.parameters += (f"{module}.{bad.path.removeprefix(_PARAMETERS)}".strip("."),)

    # -- gradients and collectives ------------------------------------------------------------------------------------

    def _take_gradient(self, entry: DumpEntry) -> None:
        for bad in bad_ones(entry.leaves()):
            trace = self._traces.find(bad.leaf)
            cause = trace.cause if trace is not None else None
            if cause is None and any(candidate.reached for candidate in self.found.candidates):
                continue  # there is something that it may come from
            cause = cause or self._in_graph()
            if cause is None:
                cause = self._candidate("gradient", entry, [bad])
                self._keep(cause)
            self._reach([cause])

    def _in_graph(self) -> Candidate | None:
        """What a gradient may come from that nothing leads to: what was made where no graph was recorded, if so."""
        held = [one for one in self.found.candidates if one.ends_graph]
        return held[0] if held else next((one for one in self.found.candidates if one.ends_grad), None)

    def _take_collective(self, entry: DumpEntry, name: Name) -> None:
        call = read_collective(entry, name, self.found.rank)
        taken, made = bad_ones(call.taken), bad_ones(call.made)
        traces = [self._taken(entry, name, bad, made) for bad in taken]
        real = [trace.cause for trace in traces if trace.cause is not None]
        for trace in traces:
            trace.close()
        self._reach(real)
        cause = real[0] if real else None
        if made and cause is None:
            cause = self._candidate("collective", entry, made)
            self._keep(cause)
            self._reach([cause])
        for bad in made:
            self._trace(cause, entry.name, bad.leaf, False)
        self.found.collectives.append(replace(call, bad_inputs=bool(taken), bad_outputs=bool(made)))

    # -- bookkeeping --------------------------------------------------------------------------------------------------

    def _reach(self, causes: Iterable[Candidate]) -> None:
        for cause in causes:
            cause.reached = self._is_settled = True

    def _candidate(self, kind: Kind, entry: DumpEntry, bad: list[NonFiniteTensor]) -> Candidate:
        place = len(self.found.collectives), self.found.entries
        return Candidate(kind, entry, tuple(bad), *place, before=tuple(self._before), in_backward=self._gradients > 0)

    def _keep(self, candidate: Candidate) -> None:
        candidates = self.found.candidates
        if candidate in candidates:
            return
        if len(candidates) >= _MAX_CANDIDATES:
            over = next((one for one in candidates if not one.reached and not one.ends), None)
            if over is None:
                return
            candidates.remove(over)
        candidates.append(candidate)

    def _trace(
        self, cause: Candidate | None, maker: str, leaf: DumpLeaf, counts: bool = True, kept: bool = False
    ) -> Trace:
        requires_grad = bool(leaf.requires_grad)
        trace = Trace(cause, maker, leaf.storage_id, counts, requires_grad, self._gradients, kept).opened()
        self._traces.add(leaf, trace)
        return trace


def _is_number(leaf: DumpLeaf) -> bool:
    """Whether a NaN could be in it: what an inspection gives (a bool, an index) tells nothing."""
    return "float" in leaf.dtype or "complex" in leaf.dtype
