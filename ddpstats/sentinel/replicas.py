"""Layer 2: whether the replicas of a data-parallel model are bit-identical; if not, which rank differs, and where.

`ReplicaDigests.compare`, on every rank between the backward pass and the optimizer's step:

1. A digest of all parameters, gradients (as reduced) and buffers (as they were when the step began) is gathered, with
   one of their names, dtypes and shapes. In a sound job that is all.
2. Where names, dtypes or shapes differ, these are gathered in words. Otherwise: a digest of each tensor.
3. Of the first tensor that differs: the digests of its blocks, again and again until a block is small.
4. The bytes of that block: its first element that differs is compared bit by bit.

Each round is decided on what the one before gathered, which is the same everywhere; so no rank goes on by itself.

Ranks that hold the same are a group. Damage does not strike twice in the same way, so the one largest group of at least
two ranks is right, and the others are the culprits. Without such a group (two ranks, two against two) no rank is. How
much differs says what to suspect: one element is hardware, many are software.

Not compared: what `ignore` names, what DistributedDataParallel ignores, sharded parameters, the running
statistics of batch norm where no rank broadcasts them, and buffers outside of a DistributedDataParallel that is only a
part of the model. Buffers change within the step, on each rank by itself. So they are copied when the module's forward
pass begins: DistributedDataParallel has broadcast rank 0's by then. After a forward pass that trained nothing it
broadcasts none: then no buffer in it is compared in this step.

Checked on torch 2.13. Of DistributedDataParallel's internals: ``parameters_to_ignore`` and
``will_sync_module_buffers``; without the first nothing more is ignored, without the second ``broadcast_buffers`` says
whether running statistics count.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpstats._base.text import dtype_name, holders_lines, ranks_text, shorten
from ddpstats._observe.gradient_norms import is_sharded, parts_of
from ddpstats._observe.gradients import ForwardBegins, replicas_in, unwrap
from ddpstats._observe.torch_compat import buffers_of
from ddpstats._ranks.exchange import fingerprint
from ddpstats._rerun.blame import Gathered
from ddpstats._rerun.digest import digests, flatten_elements
from ddpstats._rerun.record import BufferCopies
from ddpstats.sentinel.verdict import Detector, Exam, SentinelFinding, SentinelVerdict

ReplicaKind = Literal["parameter", "gradient", "buffer"]

# By cause: what was there before the backward pass comes first.
KINDS: tuple[ReplicaKind, ...] = ("parameter", "buffer", "gradient")

_SOFTWARE = (
    "Look for noise added after the reduce, a learning rate or optimizer state of one rank's own, a step skipped on "
    "one rank, parameters changed outside of the optimizer, replicas of another data-parallel group."
)
_SHOWN_NAMES = 3
_SHOWN_BITS = 4


@dataclass(frozen=True)
class Split:
    """Ranks by what they hold.

    Attributes:
        groups: ranks that hold the same, ascending; the largest group first, then the one with the lowest rank.
    """

    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, by_rank: Mapping[int, object]) -> Split:
        """Group ranks by what each holds: a digest, the bits of an element, a shape in words."""
        ranks_of: dict[object, list[int]] = {}
        for rank in sorted(by_rank):
            ranks_of.setdefault(by_rank[rank], []).append(rank)
        return cls(tuple(sorted(map(tuple, ranks_of.values()), key=lambda ranks: (-len(ranks), ranks[0]))))

    @property
    def majority(self) -> tuple[int, ...]:
        """Return the one largest group of at least two ranks; empty where no group is."""
        sizes = [*map(len, self.groups), 0, 0]
        return self.groups[0] if sizes[0] > max(1, sizes[1]) else ()

    @property
    def minority(self) -> tuple[int, ...]:
        """Return the ranks outside of the majority; empty where there is no majority."""
        return tuple(sorted(rank for group in self.groups[1:] for rank in group)) if self.majority else ()


@dataclass(frozen=True)
class Element:
    """The first element of a tensor that differs.

    Attributes:
        index: into the tensor; () of a 0-d one.
        values: rank -> the number in words.
        bits: rank -> the same as an unsigned integer of ``width`` bits.
        width: bits of one element.
    """

    index: tuple[int, ...]
    values: Mapping[int, str]
    bits: Mapping[int, int]
    width: int

    @property
    def flipped(self) -> tuple[int, ...]:
        """Return the bits, ascending from the lowest one (0), in which any two ranks differ."""
        first, *others = self.bits.values()
        return tuple(bit for bit in range(self.width) if any((first ^ bits) >> bit & 1 for bits in others))

    @property
    def lines(self) -> list[str]:
        """Return the element in words."""
        shown = {rank: f"{self.values[rank]}  0x{bits:0{self.width // 4}x}" for rank, bits in self.bits.items()}
        index = f" {list(self.index)}" if self.index else ""
        bits = shorten(map(str, reversed(self.flipped)), _SHOWN_BITS)
        noun = "bit" if len(self.flipped) == 1 else "bits"
        return [f"First element{index}:", *holders_lines(shown), f"  They differ in {noun} {bits}."]


@dataclass(frozen=True)
class Divergence:
    """Replicas that should be bit-identical and are not. Equal on every rank.

    Attributes:
        kind: of the first tensor that differs: "parameter", "buffer" or "gradient", compared in that order.
        name: its name, as in ``named_parameters`` or ``named_buffers``; that of its parameter for a gradient.
        held: rank -> what it holds there: a digest, or where ``structural`` is set the dtype and shape in words.
        others: of every other tensor that differs: kind, name, rank -> what it holds.
        structural: ranks do not even hold tensors of one dtype and shape.
        element: the first that differs; None where a second comparison found no difference.
        differing_elements: how many differ in the block of ``block_elements`` around it.
        alone: no other block of the tensor differs.
        described: dtype and shape, in words.
    """

    kind: ReplicaKind
    name: str
    held: Mapping[int, object]
    others: Sequence[tuple[ReplicaKind, str, Mapping[int, object]]] = ()
    structural: bool = False
    element: Element | None = None
    differing_elements: int = 0
    block_elements: int = 0
    alone: bool = False
    described: str = ""

    @property
    def culprit_ranks(self) -> tuple[int, ...]:
        """Return the global ranks in the minority, in any tensor, ascending; empty where there is no majority."""
        splits = [Split.of(held) for held in (self.held, *(held for _, _, held in self.others))]
        return tuple(sorted({rank for split in splits for rank in split.minority}))

    @property
    def is_single(self) -> bool:
        """Return whether one element of the tensor differs, and no other."""
        return self.alone and self.differing_elements == 1

    @property
    def message(self) -> str:
        """Return all of that for people: what differs, who is to blame for it, and what to suspect."""
        split = Split.of(self.held)
        described = f" ({self.described})" if self.described else ""
        groups = (split.minority, split.majority) if split.majority else split.groups[:_SHOWN_NAMES]
        head = f"replicas differ, first in {self.kind} {self.name}{described}: "
        lines = [f"{head}{' against '.join(map(ranks_text, groups))}.", *_element_lines(self)]
        others = [f"{kind} {name}" for kind, name, _ in self.others]
        lines.append(
            f"Other tensors that differ ({len(others)}): {shorten(others, _SHOWN_NAMES)}."
            if others
            else "No other tensor differs."
        )
        lines.append(_cause_text(self))
        if "buffer" in (self.kind, *(kind for kind, _, _ in self.others)):
            lines.append("A buffer that each rank may have for itself, such as a cache, belongs into `ignore`.")
        if not split.majority:
            lines.append(
                f"There is no majority among {len(split.groups)} sides, so which one is right is not known: a third "
                "replica would decide, or peer replay (replay_every_steps) where it finds a fault."
            )
        return "\n".join(lines)


def _element_lines(divergence: Divergence) -> list[str]:
    if divergence.structural:
        return holders_lines({rank: str(text) for rank, text in divergence.held.items()})
    if divergence.element is None:
        return ["A second comparison found no difference."]
    if divergence.is_single:
        return [*divergence.element.lines, "No other element of this tensor differs."]
    beyond = "" if divergence.alone else ", and other blocks differ, too"
    count = f"{divergence.differing_elements} of the {divergence.block_elements} elements"
    return [*divergence.element.lines, f"{count} that were compared around it differ{beyond}."]


def _cause_text(divergence: Divergence) -> str:
    if divergence.structural:
        return (
            "The ranks' models or programs differ: every rank must build the same model; look for a backward pass, "
            "zero_grad() or a frozen parameter on some ranks only. The elements were not compared."
        )
    if divergence.element is None:
        return "So a digest was computed wrongly, which is hardware, or something writes into this tensor at any time."
    when = ""
    if divergence.kind == "gradient":
        when = " All parameters are equal: it happened in this step, in the reduce or after it."
    if not divergence.is_single or divergence.others:
        return f"More than one element: software first. {_SOFTWARE}{when}"
    what = "One flipped bit" if len(divergence.element.flipped) == 1 else "One damaged element"
    whose = ranks_text(divergence.culprit_ranks) if divergence.culprit_ranks else "one of these ranks"
    return f"{what}: the hardware of {whose} is the first suspect.{when}"


# -- what ranks hold ------------------------------------------------------------------------------------------------

_PLAIN_TENSOR = Tensor.__torch_dispatch__


@dataclass(frozen=True)
class TensorEntry:
    """One tensor. ``tensor`` is None where there is nothing to compare but its description."""

    kind: ReplicaKind
    name: str
    described: str
    tensor: Tensor | None = None


def entry_of(kind: ReplicaKind, name: str, tensor: Tensor | None) -> TensorEntry:
    """Describe a tensor; what is no plain one cannot be compared."""
    if tensor is None:
        return TensorEntry(kind, name, "none")
    if nn.parameter.is_lazy(tensor):
        return TensorEntry(kind, name, "not initialized yet")
    described = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
    ordinary = type(tensor).__torch_dispatch__ is _PLAIN_TENSOR and tensor.layout is torch.strided
    if not ordinary or tensor.is_meta or tensor.is_quantized:
        return TensorEntry(kind, name, f"{described}, {type(tensor).__name__}, {tensor.layout}, cannot be compared")
    return TensorEntry(kind, name, described, tensor)


def gradient_entries(name: str, parameter: Tensor) -> list[TensorEntry]:
    """Describe a parameter's gradient: indices and values where it is sparse."""
    gradient = None if nn.parameter.is_lazy(parameter) else parameter.grad
    if gradient is None:
        return [entry_of("gradient", name, None)]
    return [entry_of("gradient", part, tensor) for part, tensor in parts_of(name, gradient).items()]


# -- where they differ ------------------------------------------------------------------------------------------------

_BLOCK_ELEMENTS = 256
_BLOCKS = 1024


def find_differing_structure(gathered: Gathered, entries: Sequence[TensorEntry]) -> Divergence:
    """Find the tensors that only some ranks hold, or in another dtype or shape. Collective."""
    trees = gathered(
        lambda: {"held": [[entry.kind, entry.name, entry.described] for entry in entries]}, "replica structures"
    )
    tables = {rank: {(kind, name): what for kind, name, what in tree["held"]} for rank, tree in trees.items()}
    keys = dict.fromkeys(key for table in tables.values() for key in table)
    held = {key: {rank: table.get(key, "no such tensor") for rank, table in tables.items()} for key in keys}
    differing = {key: by_rank for key, by_rank in held.items() if differ(by_rank.values())}
    if not differing:
        names = {rank: f"first {next(iter(table))[1]}" for rank, table in tables.items()}
        return Divergence("parameter", "(the order of all tensors)", names, structural=True)
    (kind, name), *others = sorted(differing, key=lambda key: KINDS.index(key[0]))
    return Divergence(kind, name, differing[kind, name], [(*key, differing[key]) for key in others], structural=True)


def find_differing_elements(gathered: Gathered, entries: Sequence[TensorEntry]) -> Divergence:
    """Find the first of these tensors that differs, and its first element. Collective."""
    entries = [entry for kind in KINDS for entry in entries if entry.kind == kind and entry.tensor is not None]
    held = _digests_of_all(gathered, "replica tensors", lambda: tensors_of(entries))
    differing = [(entry, by_rank) for entry, by_rank in zip(entries, held, strict=True) if differ(by_rank.values())]
    if not differing:
        return Divergence(entries[0].kind, entries[0].name, held[0], described=entries[0].described)
    (first, by_rank), *others = differing
    (tensor,) = tensors_of([first])
    return Divergence(
        first.kind,
        first.name,
        by_rank,
        [(entry.kind, entry.name, digest) for entry, digest in others],
        described=first.described,
        **_find_differing_block(gathered, tensor),
    )


def _find_differing_block(gathered: Gathered, tensor: Tensor) -> dict[str, Any]:
    """Return the fields of a `Divergence` about the first block of ``tensor`` that differs. Collective.

    What may fail on one rank, such as a copy for want of memory, happens inside of `gathered`.
    """
    start, size, alone = 0, tensor.numel(), True

    def block() -> Tensor:
        return flatten_elements(tensor)[start : start + size]

    while size > _BLOCK_ELEMENTS:
        piece = max(_BLOCK_ELEMENTS, -(-size // _BLOCKS))
        held = _digests_of_all(gathered, "replica blocks", lambda: torch.split(block(), piece))  # noqa: B023
        differing = [index for index, by_rank in enumerate(held) if differ(by_rank.values())]
        if not differing:
            return {}
        alone = alone and len(differing) == 1
        start, size = start + differing[0] * piece, min(piece, size - differing[0] * piece)
    trees = gathered(lambda: {"bytes": block().view(torch.uint8)}, "replica elements")
    rows = {rank: tree["bytes"].cpu().view(-1, tensor.element_size()) for rank, tree in trees.items()}
    first = next(iter(rows.values()))
    differs = torch.stack([(row != first).any(1) for row in rows.values()]).any(0)
    if not bool(differs.any()):
        return {}
    index = int(differs.nonzero()[0])
    element = Element(
        index=tuple(map(int, torch.unravel_index(torch.tensor(start + index, device="cpu"), tensor.shape))),
        values={rank: _value_text(row[index], tensor.dtype) for rank, row in rows.items()},
        bits={rank: int.from_bytes(bytes(row[index].tolist()), sys.byteorder) for rank, row in rows.items()},
        width=8 * tensor.element_size(),
    )
    count = int(differs.sum())
    return {"element": element, "differing_elements": count, "block_elements": len(differs), "alone": alone}


def _value_text(content: Tensor, dtype: torch.dtype) -> str:
    value = content.clone().view(dtype).item()
    return f"{value:.9g}" if isinstance(value, float) else repr(value)


def _digests_of_all(gathered: Gathered, what: str, tensors: Callable[[], Sequence[Tensor]]) -> list[dict[int, int]]:
    """Return for each tensor: rank -> digest. Collective."""
    trees = gathered(lambda: {"digests": digests(tensors())}, what)
    by_rank = [tree["digests"].tolist() for tree in trees.values()]
    return [dict(zip(trees, row, strict=True)) for row in zip(*by_rank, strict=True)]


def tensors_of(entries: Sequence[TensorEntry]) -> list[Tensor]:
    """Return what can be compared."""
    return [entry.tensor for entry in entries if entry.tensor is not None]


def differ(values: Any) -> bool:
    """Return whether not all values are equal."""
    return len(set(values)) > 1


class ReplicaDigests(Detector):
    """Layer 2: compares ``model`` with its replicas on the other ranks. Changes nothing; draws no random numbers.

    Args:
        model: as it is trained: DistributedDataParallel itself, what has it inside, or a module whose gradients are
            reduced in another way.
        ignore: names of parameters and buffers that may differ between ranks; patterns as in `fnmatch`. The same on
            every rank.
        every_steps: how often they are compared: in every ``every_steps``-th step.
    """

    def __init__(self, model: nn.Module, ignore: Sequence[str] = (), every_steps: int = 1) -> None:
        self._model, self._ignore = model, tuple(ignore)
        self._inner = unwrap(model)
        self._units: list[Unit] | None = None
        sharded = len(_find_sharded(self._inner))
        text = f"{sharded} sharded parameters are not compared with replicas: each rank holds another part of them."
        self.warnings = (text,) if sharded else ()
        self._every_steps, self._steps = every_steps, 0
        self.conclude(None)

    def findings(self, exam: Exam) -> list[SentinelFinding]:
        divergence = self.compare(exam.gathered) if self._is_due() else None
        if divergence is None:
            return []
        return [SentinelFinding("replica digests", divergence.culprit_ranks, divergence.name, divergence.message)]

    def conclude(self, verdict: SentinelVerdict | None) -> None:
        self._steps += verdict is not None
        if self._is_due():  # the first forward pass of the step that begins copies the buffers
            for unit in self._find_units():
                unit.expect()

    def _is_due(self) -> bool:
        return (self._steps + 1) % self._every_steps == 0

    def compare(self, gathered: Gathered) -> Divergence | None:
        """Return what differs between the ranks; None where all is equal. The same on every rank.

        Collective: every rank must call, after the backward pass that reduces and before the optimizer's step.

        Args:
            gathered: given a function that makes this rank's tree and a name, every rank's tree by global rank.
        """
        parts: dict[str, list[TensorEntry]] = {}

        def summaries() -> dict[str, Any]:
            parts.update(self._parts())
            return {name: _summary(entries) for name, entries in parts.items()}

        try:
            trees = gathered(summaries, "replica digests")
            shared = {name: part for name, part in parts.items() if all(name in tree for tree in trees.values())}
            entries = [entry for part in shared.values() for entry in part]
            if any(differ(tree[name]["signature"] for tree in trees.values()) for name in shared):
                return find_differing_structure(gathered, entries)
            if any(differ(tree[name]["digest"] for tree in trees.values()) for name in shared):
                return find_differing_elements(gathered, entries)
            return None
        finally:
            for unit in self._units or ():
                unit.forget()

    def close(self) -> None:
        for unit in self._units or ():
            unit.forget()
        self._units = None

    def _parts(self) -> dict[str, list[TensorEntry]]:
        """Return what this rank holds. Buffers are parts by themselves: a rank without a forward pass has no copies."""
        ignored = _find_sharded(self._inner)
        for unit in self._find_units():
            names = unit.ignored_names()
            ignored.update(id(parameter) for name, parameter in unit.module.named_parameters() if name in names)
        named = [
            (name, parameter)
            for name, parameter in self._inner.named_parameters()
            if id(parameter) not in ignored and not self._is_left_out(name)
        ]
        state = [entry_of("parameter", name, parameter) for name, parameter in named]
        parts = {"state": state + [entry for name, parameter in named for entry in gradient_entries(name, parameter)]}
        for number, unit in enumerate(self._find_units()):
            if unit.copies is not None:
                kept = {name: copy for name, copy in unit.copies.items() if not self._is_left_out(name)}
                parts[f"buffers {number}"] = [entry_of("buffer", name, copy) for name, copy in kept.items()]
        return parts

    def _is_left_out(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._ignore)

    def _find_units(self) -> list[Unit]:
        """Return the units, made at the first use: DistributedDataParallel may be put around the model after us."""
        if self._units is None:
            prefixes = {id(module): f"{name}." if name else "" for name, module in self._inner.named_modules()}
            replicas = replicas_in(self._model)
            self._units = [Unit(prefixes.get(id(replica.module), ""), replica.module, replica) for replica in replicas]
            self._units = self._units or [Unit("", self._inner, None)]
        return self._units


def _summary(entries: Sequence[TensorEntry]) -> dict[str, Any]:
    """Return a digest of what the tensors are, and one of their digests, as they are gathered."""
    words = "\n".join(f"{entry.kind} {entry.name} {entry.described}" for entry in entries)
    digest = digests([digests(tensors_of(entries))])
    return {"signature": int.from_bytes(fingerprint(words.encode()), "little"), "digest": int(digest)}


def _find_sharded(model: nn.Module) -> set[int]:
    """Return the identities of the parameters of which each rank holds another part."""
    sharded = {id(parameter) for parameter in model.parameters() if is_sharded(parameter)}
    # FSDP's first version shards plain tensors. It is there only if the program has loaded it.
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    for module in model.modules():
        if isinstance(module, fsdp):
            sharded.update(map(id, module.parameters()))
    return sharded


_RUNNING = ("running_mean", "running_var", "num_batches_tracked")


class Unit:
    """A module whose forward pass copies its buffers: the one in a DistributedDataParallel, or a model without any.

    Args:
        prefix: of its names in the model.
        replica: the DistributedDataParallel around it, if there is one.

    Attributes:
        copies: name in the model -> copy, of the buffers that must be equal; None where no forward pass came, or no
            broadcast with it.
    """

    def __init__(self, prefix: str, module: nn.Module, replica: DistributedDataParallel | None) -> None:
        self.module = module
        self._prefix, self._replica = prefix, replica
        self.copies: dict[str, Tensor] | None = None
        self._handle: Any = None

    def ignored_names(self) -> set[str]:
        """Return the names in ``module`` that DistributedDataParallel leaves out."""
        return set(getattr(self._replica, "parameters_to_ignore", None) or ())

    def expect(self) -> None:
        """Let the next forward pass copy the buffers. Only until then there is a hook: compiled modules mind them."""
        self.forget()
        self._handle = self.module.register_forward_pre_hook(
            ForwardBegins(self.module, self, Unit._about_to_run, self._replica is not None), prepend=True
        )

    def forget(self) -> None:
        """Let go of the copies, and take the hook away."""
        self.copies = None
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _about_to_run(self, compiled: bool) -> None:
        if self._replica is not None and not torch.is_grad_enabled():
            return  # an evaluation: buffers are broadcast before the next pass that trains
        self.forget()
        broadcasts = self._replica is not None and self._replica.broadcast_buffers
        # After a forward pass that trained nothing it does not: each rank has changed its buffers by itself.
        misses = broadcasts and not getattr(self._replica, "will_sync_module_buffers", lambda: True)()
        if misses or any(nn.parameter.is_lazy(buffer) for buffer in self.module.buffers()):
            return
        left_out = self.ignored_names() if broadcasts else self.ignored_names() | running_names(self.module)
        copies = BufferCopies(self.module).take()
        self.copies = {self._prefix + name: copy for name, copy in copies.items() if name not in left_out}


def running_names(module: nn.Module) -> set[str]:
    """Return batch norm's running statistics, which each rank computes from its data; SyncBatchNorm's are of all."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, owner in module.named_modules()
        if "running_mean" in buffers_of(owner) and not isinstance(owner, nn.SyncBatchNorm)
        for name in _RUNNING
    }
