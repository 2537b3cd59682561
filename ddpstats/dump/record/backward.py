"""Gradients that pass through a call in the backward pass, seen without changing the graph.

The only file of the dump that touches autograd's nodes.

1. Before the call: which edges of the graph lead to its inputs (`InputEdges`), and the number of the newest node.
2. After it, the gradient of an output is what arrives at the node that made it: a hook before that node.
3. The gradient of an input is what flows along the edges that lead to it. From the outputs' nodes we walk back through
   the nodes that are newer than 1 to those that have such an edge, and hook these: what they hand on along the edge is
   one share; several are summed. Each is this call's own share, not what other users of the input add.
4. When the last hook has come the entry is written. What never comes, because the program does not need that output,
   is missing in what `StatsDump.stop` writes, or in what is written when a second pass over the call begins, which
   makes a second entry: such an entry has ``"incomplete": true``.

Not seen: the gradient of an input that is returned as it is, and of a view that the call changes in place.

Checked on torch 2.13: ``Node.next_functions``, ``Node.register_hook``, ``register_prehook``, ``Tensor.output_nr``.
Where torch numbers no nodes, none is taken to be old. Nodes are only held while the call runs: a hook that holds a node
would keep the whole graph alive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddpstats._observe.torch_compat import graph_task, is_tracing, next_node_number, no_dispatch_no_grad, node_number
from ddpstats.dump.msprobe import backward_of
from ddpstats.dump.record.leaves import tensors_in
from ddpstats.dump.record.recorder import OpenEntry, Recorder

_LEAF = "AccumulateGrad"


@dataclass(kw_only=True, eq=False)
class PassEntries:
    """Entries that hooks of a backward pass fill together: one for each pass, written when the last hook has come.

    Attributes:
        expected: how many hooks a pass comes to.
        entry: of autograd's ``task``; ``left`` of its hooks have not come.
    """

    recorder: Recorder
    name: str
    expected: int
    entry: OpenEntry | None = None
    task: int = -1
    left: int = 0

    def begin(self) -> OpenEntry:
        """Return the entry of a pass that begins."""
        raise NotImplementedError

    def fill(self, entry: OpenEntry, what: Any, gradients: Any) -> None:
        """Put what a hook has brought into the entry."""
        raise NotImplementedError

    def complete(self, entry: OpenEntry) -> None:
        """Put what is known at the end of the pass into the entry."""

    def arrive(self, what: Any, gradients: Any, _: Any = None) -> None:
        """Take what a hook brings; a hook after a node is given what arrived at the node as well."""
        recorder = self.recorder
        if not recorder.is_active or is_tracing():
            return
        recorder.creates_graph = torch.is_grad_enabled()
        with recorder.safely(self.name), recorder.lock, no_dispatch_no_grad():
            if self.entry is None or self.task != graph_task():
                self.flush()
                self.entry, self.task, self.left = self.begin(), graph_task(), self.expected
                recorder.unfinished[self] = None
            if self.entry.is_wanted:
                self.fill(self.entry, what, gradients)
            self.left -= 1
            if self.left == 0:
                self.flush()

    def flush(self) -> None:
        """Write the entry of the last pass, if it has not been written."""
        entry, self.entry = self.entry, None
        self.recorder.unfinished.pop(self, None)
        if entry is not None and entry.is_wanted:
            self.complete(entry)
            self.recorder.write(entry)


# -- a call ------------------------------------------------------------------------------------------------------------


class InputEdges:
    """Records where the inputs of a call are in the graph, before the call; it is made of all arguments.

    Attributes:
        count: how many arguments the call has, those that are no tensors included.
        positions: edge -> positions of the arguments that it leads to.
        first: nodes of the call have this sequence number, or a larger one.
    """

    def __init__(self, arguments: Iterable[Any]) -> None:
        self.count = 0
        self.positions: dict[tuple[int, int], list[int]] = {}
        self.first = next_node_number()
        self._held: list[Any] = []  # nodes and tensors, whose ids are used
        for argument in arguments:
            if isinstance(argument, Tensor) and argument.requires_grad:
                node = argument.grad_fn
                edge = (id(argument), -1) if node is None else (id(node), argument.output_nr)
                self._held.append(argument if node is None else node)
                self.positions.setdefault(edge, []).append(self.count)
            self.count += 1


class _Share(NamedTuple):
    """Assigns one of a hook's gradients to an input or output of the entry."""

    number: int
    section: str
    position: int


# By the node that is hooked.
_Shares = dict[Any, list[_Share]]


def watch_backward(recorder: Recorder, forward: OpenEntry, before: InputEdges, result: Any) -> None:
    """Hook what is to be seen of the backward pass of a call that has returned."""
    outputs = list(tensors_in(result))
    producers: _Shares = {}
    for position, output in enumerate(outputs):
        node = output.grad_fn if isinstance(output, Tensor) else None
        is_new = node is not None and node_number(node) >= before.first
        if is_new and (id(node), output.output_nr) not in before.positions:
            producers.setdefault(node, []).append(_Share(output.output_nr, "input", position))
    if not producers:
        return
    consumers = _consumers(list(producers), before)
    counts = Counter(share.position for shares in consumers.values() for share in shares)
    entries = _CallEntries(
        recorder=recorder,
        name=backward_of(forward.name),
        expected=len(producers) + len(consumers),
        forward=forward,
        sections={"input": len(outputs) * recorder.wants_input, "output": before.count * recorder.wants_output},
        summed={position for position, count in counts.items() if count > 1},
    )
    for node, shares in producers.items():
        node.register_prehook(partial(entries.arrive, shares))
    for node, shares in consumers.items():
        node.register_hook(partial(entries.arrive, shares))


def _consumers(todo: list[Any], before: InputEdges) -> _Shares:
    """Return the nodes of the call that have an edge to an input; ``todo`` are those that made its outputs.

    ``x * x`` has two edges to the same x: the first belongs to the first argument, the second to the second. Where a
    node has fewer or more of them than there are such arguments, all belong to the first.
    """
    consumers: _Shares = {}
    seen = set(todo)
    while todo and before.positions:
        node = todo.pop()
        numbers: dict[tuple[int, int], list[int]] = {}
        for number, (target, output) in enumerate(node.next_functions):
            if target is None:
                continue
            is_leaf = type(target).__name__ == _LEAF
            edge = (id(target.variable), -1) if is_leaf else (id(target), output)
            if edge in before.positions:
                numbers.setdefault(edge, []).append(number)
            elif not is_leaf and target not in seen and node_number(target) >= before.first:
                seen.add(target)
                todo.append(target)
        for edge, edges in numbers.items():
            positions = before.positions[edge]
            if len(positions) != len(edges):
                positions = positions[:1] * len(edges)
            shares = [_Share(*share) for share in zip(edges, repeat("output"), positions)]
            consumers[node] = consumers.get(node, []) + shares
    return consumers


@dataclass(kw_only=True, eq=False)
class _CallEntries(PassEntries):
    """The backward passes of one call. Hooks hold it; it holds neither nodes nor, for longer than a pass, tensors.

    Attributes:
        sections: how many gradients an entry has in each.
        summed: positions of the inputs to which several edges lead; ``sums`` has what has come of their gradients.
    """

    forward: OpenEntry
    sections: dict[str, int]
    summed: set[int]
    sums: dict[int, Tensor] = field(default_factory=dict)

    def begin(self) -> OpenEntry:
        number = self.recorder.next_number(self.name)
        name = f"{self.name}.{number}" if number else self.name
        raw: dict[str, Any] = {section: [None] * count for section, count in self.sections.items()}
        parents = [backward_of(parent) for parent in self.forward.parents]
        return self.recorder.open(name, raw, parents, self.forward.stack)

    def fill(self, entry: OpenEntry, shares: list[_Share], gradients: Any) -> None:
        for number, section, position in shares:
            gradient = gradients[number]
            if not entry.raw[section]:
                continue
            if section == "input" or position not in self.summed:
                self._put(entry, section, position, gradient)
            elif gradient is not None:
                self.sums[position] = self.sums[position] + gradient if position in self.sums else gradient

    def complete(self, entry: OpenEntry) -> None:
        if self.left:
            entry.raw["incomplete"] = True
        for position, total in self.sums.items():
            self._put(entry, "output", position, total)
        self.sums.clear()

    def _put(self, entry: OpenEntry, section: str, position: int, gradient: Any) -> None:
        leaves = self.recorder.leaves_of(entry.name)  # each at its own moment: nothing is reused between them
        entry.raw[section][position] = leaves.of(gradient, f"{section}.{position}")
