"""Gradients that pass through a call in the backward pass, seen without changing the graph.

The only file of the dump that touches autograd's nodes.

1. Before the call: which edges of the graph lead to its inputs (`Before`), and the number of the newest node.
2. After it, the gradient of an output is what arrives at the node that made it: a hook before that node.
3. The gradient of an input is what flows along the edges that lead to it. From the outputs' nodes we walk back through
   the nodes that are newer than 1 to those that have such an edge, and hook these: what they hand on along the edge is
   one contribution; several are summed. Each is this call's own share, not what other users of the input add.
4. When the last one has come the entry is written (`_Watch.flush`). What never comes, because nobody needs that output,
   is missing in what is written at the end of the step. A second backward pass over it makes an entry of its own.

Not seen: the gradient of an input that is returned as it is, and of a view that the call changes in place.

Checked on torch 2.13: ``Node.next_functions``, ``Node.register_hook``, ``register_prehook``,
``Tensor.output_nr``. Where torch numbers no nodes, none is taken to be old. Nodes are only
held while the call runs: a hook that holds a node would keep the whole graph alive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from ddpstats._observe.torch_compat import graph_task, is_tracing, next_node_number, no_dispatch_no_grad, node_number
from ddpstats.dump.msprobe import backward_of
from ddpstats.dump.record.arguments import tensors_in
from ddpstats.dump.record.recorder import OpenEntry, Recorder

_MOST_NODES = 20_000
_LEAF = "AccumulateGrad"

_Edge = tuple[int, int]


class Before:
    """Where the inputs of a call are in the graph, before it. Made of all its arguments.

    Attributes:
        count: how many arguments it has, those that are no tensors included.
        places: edge -> positions of the arguments that it leads to.
        first: nodes of the call have this sequence number, or a larger one.
    """

    __slots__ = ("_held", "count", "first", "places")

    def __init__(self, arguments: Iterable[Any]) -> None:
        self.count = 0
        self.places: dict[_Edge, list[int]] = {}
        self.first = next_node_number()
        self._held: list[Any] = []  # nodes and tensors, whose ids are used
        for argument in arguments:
            if isinstance(argument, Tensor) and argument.requires_grad:
                self._add(argument)
            self.count += 1

    def _add(self, tensor: Tensor) -> None:
        node = tensor.grad_fn
        edge = (id(tensor), -1) if node is None else (id(node), tensor.output_nr)
        self._held.append(tensor if node is None else node)
        self.places.setdefault(edge, []).append(self.count)


def watch_backward(
    recorder: Recorder, name: str, before: Before, result: Any, stack: int, parents: Sequence[str]
) -> None:
    """After the call: hook what is to be seen of its backward pass, under ``name``."""
    outputs = list(tensors_in(result))
    roots: dict[Any, list[tuple[int, int]]] = {}
    for place, output in enumerate(outputs):
        node = output.grad_fn if isinstance(output, Tensor) else None
        if node is not None and node_number(node) >= before.first and (id(node), output.output_nr) not in before.places:
            roots.setdefault(node, []).append((place, output.output_nr))
    if not roots:
        return
    consumers = _consumers(list(roots), before)
    if consumers is None:
        recorder.note(name, f"gradients of inputs are left out: more than {_MOST_NODES:,} nodes lead to them")
        consumers = {}
    edges_to = Counter(places[0] for edges in consumers.values() for _, places in edges)
    single = {place for place, count in edges_to.items() if count == 1}
    expected = len(roots) + len(consumers)
    watch = _Watch(recorder, name, stack, list(parents), (len(outputs), before.count), expected, single)
    for node, places in roots.items():
        node.register_prehook(partial(watch.run, watch.outputs, places))
    for node, edges in consumers.items():
        node.register_hook(partial(watch.run, watch.inputs, edges))


_Consumers = dict[Any, list[tuple[int, list[int]]]]
"""Node -> (position of the edge in the node, positions of the arguments that it leads to)."""


def _consumers(roots: list[Any], before: Before) -> _Consumers | None:
    """The nodes of the call that have an edge to an input; None where there are too many nodes to look at."""
    found: _Consumers = {}
    if not before.places:
        return found
    seen = set(roots)
    todo = roots
    while todo:
        node = todo.pop()
        for number, (target, output) in enumerate(node.next_functions):
            if target is None:
                continue
            places = before.places.get((id(target), output))
            is_leaf = places is None and type(target).__name__ == _LEAF
            if is_leaf:
                places = before.places.get((id(target.variable), -1))
            if places is not None:
                found.setdefault(node, []).append((number, places))
            elif not is_leaf and target not in seen and node_number(target) >= before.first:
                if len(seen) >= _MOST_NODES:
                    return None
                seen.add(target)
                todo.append(target)
    return {node: _one_to_one(edges) if len(found) == 1 else edges for node, edges in found.items()}


def _one_to_one(edges: list[tuple[int, list[int]]]) -> list[tuple[int, list[int]]]:
    """``x * x`` has two edges to the same x: the first belongs to the first argument, the second to the second."""
    wanted = Counter(id(places) for _, places in edges)
    turns = {id(places): iter(places) for _, places in edges}
    return [
        (number, [next(turns[id(places)])] if 1 < len(places) == wanted[id(places)] else places)
        for number, places in edges
    ]


@dataclass(slots=True, eq=False)
class _Watch:
    """The backward passes of one call. Hooks hold it; it holds neither nodes nor, for longer than a pass, tensors.

    Attributes:
        counts: of what the call gave and took.
        expected: how many hooks a pass comes to.
        single: the arguments to which one edge alone leads.
        entry: of the pass that runs, in autograd's ``task``; ``left`` of its hooks have not come.
        sums: of the gradients of arguments to which several edges lead.
    """

    recorder: Recorder
    name: str
    stack: int
    parents: list[str]
    counts: tuple[int, int]
    expected: int
    single: set[int]
    passes: int = 0
    entry: OpenEntry | None = None
    is_wanted: bool = False
    task: int = -1
    left: int = 0
    sums: dict[int, Tensor] = field(default_factory=dict)

    def outputs(self, entry: OpenEntry, places: list[tuple[int, int]], gradients: Any) -> None:
        if self.recorder.wants_input:
            for place, number in places:
                self._put(entry, "input", place, gradients[number])

    def inputs(self, entry: OpenEntry, edges: list[tuple[int, list[int]]], gradients: Any) -> None:
        if self.recorder.wants_output:
            for number, places in edges:
                place, gradient = places[0], gradients[number]
                if place in self.single:
                    self._put(entry, "output", place, gradient)
                elif gradient is not None:
                    self.sums[place] = self.sums[place] + gradient if place in self.sums else gradient

    def run(self, what: Callable[[OpenEntry, Any, Any], None], places: Any, gradients: Any, _: Any = None) -> None:
        """The hooks: before a node that made outputs, whose gradients arrive there; and after one that has an edge to
        an input, which hands on there a share of the input's gradient, and is given what arrived at it as well."""
        recorder = self.recorder
        if not recorder.is_active or is_tracing():
            return
        try:
            with recorder.lock, no_dispatch_no_grad():
                recorder.backward_runs()
                entry = self._of_this_pass()
                if self.is_wanted:
                    what(entry, places, gradients)
                self.left -= 1
                if self.left == 0:
                    self.flush()
        except Exception as error:
            recorder.note_error(self.name, error)

    def _of_this_pass(self) -> OpenEntry:
        recorder, task = self.recorder, graph_task()
        if self.entry is not None:
            if self.task == task:
                return self.entry
            self.flush()
        name = f"{self.name}.{self.passes}" if self.passes else self.name
        self.passes += 1
        self.task, self.left = task, self.expected
        self.is_wanted = recorder.wants_backward_now(name, self.parents)
        raw: dict[str, Any] = {
            "input": [None] * (self.counts[0] * recorder.wants_input),
            "output": [None] * (self.counts[1] * recorder.wants_output),
        }
        parent = backward_of(self.parents[-1]) if self.parents else None
        entry = self.entry = OpenEntry(name, raw, self.stack, parent)
        recorder.opened(id(self), self)
        return entry

    def _put(self, entry: OpenEntry, what: str, place: int, gradient: Any) -> None:
        # each at its own moment: nothing is reused between them
        entry.raw[what][place] = self.recorder.leaves_of(entry.name).of(gradient, f"{what}.{place}")

    def flush(self) -> None:
        entry, self.entry = self.entry, None
        self.recorder.closed(id(self))
        if entry is not None and self.is_wanted:
            with no_dispatch_no_grad():
                for place, total in self.sums.items():
                    self._put(entry, "output", place, total)
            self.sums.clear()
            self.recorder.write(entry)
