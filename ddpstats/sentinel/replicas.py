"""Replicas that are not bit-identical: which ranks, which tensor, which element and bit, and what to suspect. Pure.

1. Ranks that hold the same are a group. Damage does not strike twice alike, so the one largest group of at least two
   ranks is right, and the others are the culprits. Where there is none (two ranks, two against two), nobody is.
2. Of the first tensor that differs, the first element that differs is compared bit by bit.
3. How much differs says what to suspect: one element is hardware, many are software.

The tensors that replicas hold, and where they differ: from digests of tensors and blocks down to the first element.

Each tensor has a name and a description by which ranks compare it. What differs is found in rounds of small gathers.
Each round is decided on what the one before gathered, which is the same everywhere; so no rank goes on alone.

Whether the replicas of a data-parallel model are bit-identical; and if not, which rank differs in which element.

`Replicas.compare`, on every rank between the backward pass and the optimizer's step:

1. Parameters, gradients (as reduced) and buffers (as they were when the step began) are cut into at most 32 buckets,
   and a digest of each is gathered, with one of all names, dtypes and shapes. In a sound job that is all.
2. Where names, dtypes or shapes differ, these are gathered in words. Else: the digests of the tensors in the buckets
   that differ.
3. Of the first tensor that differs: the digests of its blocks, again and again until a block is small.
4. The bytes of that block.

Each further round is decided on what was gathered, which is the same everywhere; so no rank goes on alone.

Not compared: what `ignore` names, what DistributedDataParallel was told to ignore, sharded parameters, and the running
statistics of batch norm where nobody broadcasts them. Buffers change within the step, on each rank by itself. So they
are copied when the module's forward pass begins: DistributedDataParallel has broadcast rank 0's by then. After a
forward pass that trained nothing it broadcasts none: then no buffer in it is looked at in this step.

Checked on torch 2.13. Of DistributedDataParallel's internals: ``parameters_to_ignore`` and
``will_sync_module_buffers``; without the first nothing more is ignored, without the second ``broadcast_buffers`` says
whether running statistics count.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpstats._base.text import count_of, dtype_name, holders_lines, ranks_text, shorten
from ddpstats._observe.gradients import ForwardBegins, replicas_in, unwrapped
from ddpstats._observe.torch_compat import buffers_of
from ddpstats._rerun.digest import bucket_digests, digests, flattened
from ddpstats._rerun.record import BufferCopies
from ddpstats.sentinel.verdict import Detector, Exam, Gathered, SentinelFinding, SentinelVerdict

Kind = Literal["parameter", "gradient", "buffer"]

# By cause: what was there before the backward pass comes first.
KINDS: tuple[Kind, ...] = ("parameter", "buffer", "gradient")

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
        """``by_rank``: what each rank holds: a digest, the bits of an element, a shape in words."""
        ranks_of: dict[object, list[int]] = {}
        for rank in sorted(by_rank):
            ranks_of.setdefault(by_rank[rank], []).append(rank)
        return cls(tuple(sorted(map(tuple, ranks_of.values()), key=lambda ranks: (-len(ranks), ranks[0]))))

    @property
    def majority(self) -> tuple[int, ...]:
        """The one largest group of at least two ranks; empty where there is none."""
        sizes = [len(group) for group in self.groups]
        alone = sizes[:1] != sizes[1:2]
        return self.groups[0] if sizes and sizes[0] > 1 and alone else ()

    @property
    def minority(self) -> tuple[int, ...]:
        """The ranks outside of the majority; empty where there is no majority."""
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
        """The bits, ascending from the lowest one (0), in which any two ranks differ."""
        held = list(self.bits.values())
        differing = 0
        for one in held[1:]:
            differing |= one ^ held[0]
        return tuple(bit for bit in range(self.width) if differing >> bit & 1)

    @property
    def lines(self) -> list[str]:
        digits = (self.width + 3) // 4
        shown = {rank: f"{self.values[rank]}  0x{self.bits[rank]:0{digits}x}" for rank in sorted(self.bits)}
        index = f" [{', '.join(map(str, self.index))}]" if self.index else ""
        bits = shorten(map(str, reversed(self.flipped)), _SHOWN_BITS)
        noun = "bit" if len(self.flipped) == 1 else "bits"
        return [f"First element{index}:", *holders_lines(shown), f"  They differ in {noun} {bits}."]


@dataclass(frozen=True)
class Divergence:
    """Replicas that should be bit-identical and are not. Equal on every rank.

    Attributes:
        kind: of the first tensor that differs: "parameter", "buffer" or "gradient", looked at in that order.
        name: its name, as in ``named_parameters`` or ``named_buffers``; that of its parameter for a gradient.
        held: rank -> what it holds there: a digest, or where ``structural`` is set the dtype and shape in words.
        others: of every other tensor that differs: kind, name, rank -> what it holds.
        structural: ranks do not even hold tensors of one dtype and shape.
        element: the first that differs; None where none was looked for, or a second look found no difference.
        differing_elements: how many differ in the block of ``block_elements`` around it.
        alone: no other block of the tensor differs.
        described: dtype and shape, in words.
    """

    kind: Kind
    name: str
    held: Mapping[int, object]
    others: Sequence[tuple[Kind, str, Mapping[int, object]]] = ()
    structural: bool = False
    element: Element | None = None
    differing_elements: int = 0
    block_elements: int = 0
    alone: bool = False
    described: str = ""

    @property
    def culprit_ranks(self) -> tuple[int, ...]:
        """Global ranks in the minority, in any tensor, ascending; empty where there is no majority."""
        splits = [Split.of(held) for held in (self.held, *(held for _, _, held in self.others))]
        return tuple(sorted({rank for split in splits for rank in split.minority}))

    @property
    def is_single(self) -> bool:
        """Whether one element of the tensor differs, and no other."""
        return self.alone and self.differing_elements == 1

    @property
    def message(self) -> str:
        """All of that for people: what differs, who is to blame for it, and what to suspect."""
        split = Split.of(self.held)
        return "\n".join([_headline(self, split), *_what_lines(self), *_other_lines(self), *_hint(self, split)])


def _headline(divergence: Divergence, split: Split) -> str:
    described = f" ({divergence.described})" if divergence.described else ""
    text = f"replicas differ, first in {divergence.kind} {divergence.name}{described}: "
    groups = (split.minority, split.majority) if split.majority else split.groups[:_SHOWN_NAMES]
    return text + " against ".join(map(ranks_text, groups)) + "."


def _what_lines(divergence: Divergence) -> list[str]:
    if divergence.structural:
        return holders_lines({rank: str(divergence.held[rank]) for rank in sorted(divergence.held)})
    if divergence.element is None:
        return ["A second look at it found no difference."]
    if divergence.is_single:
        return [*divergence.element.lines, "No other element of this tensor differs."]
    beyond = "" if divergence.alone else ", and other blocks differ, too"
    count = f"{divergence.differing_elements} of the {divergence.block_elements} elements"
    return [*divergence.element.lines, f"{count} that were compared around it differ{beyond}."]


def _other_lines(divergence: Divergence) -> list[str]:
    if not divergence.others:
        return ["No other tensor differs."] if not divergence.structural else []
    lines = ["Other tensors that differ:"]
    for kind in KINDS:
        names = [name for other, name, _ in divergence.others if other == kind]
        if names:
            lines.append(f"  {count_of(len(names), f'{kind}s')}: {shorten(names, _SHOWN_NAMES)}")
    return lines


def _hint(divergence: Divergence, split: Split) -> list[str]:
    lines = [_cause_text(divergence)]
    if divergence.kind == "gradient" and not divergence.structural:
        lines.append("All parameters are equal: it happened in this step, in the reduce or after it.")
    if "buffer" in (divergence.kind, *(kind for kind, _, _ in divergence.others)):
        lines.append("A buffer that each rank may have for itself, such as a cache, belongs into `ignore`.")
    if not split.majority:
        lines.append(
            f"There is no majority among {len(split.groups)} sides, so which one is right is not known: a third "
            "replica or replay_every_steps would decide."
        )
    return lines


def _cause_text(divergence: Divergence) -> str:
    if divergence.structural:
        return (
            "The ranks' models or programs differ: every rank must build the same model; look for a backward pass, "
            "zero_grad() or a frozen parameter on some ranks only. The elements were not compared."
        )
    if divergence.element is None:
        return "So a digest was computed wrongly, which is hardware, or something writes into this tensor at any time."
    if not divergence.is_single or divergence.others:
        return f"More than one element: software first. {_SOFTWARE}"
    what = "One flipped bit" if len(divergence.element.flipped) == 1 else "One damaged element"
    whose = ranks_text(divergence.culprit_ranks) if divergence.culprit_ranks else "one of these ranks"
    return f"{what}: the hardware of {whose} is the first suspect."


_PLAIN_TENSOR = Tensor.__torch_dispatch__


@dataclass(frozen=True)
class TensorEntry:
    """One tensor. ``tensor`` is None where there is nothing to compare but its description."""

    kind: Kind
    name: str
    described: str
    tensor: Tensor | None


def entry_of(kind: Kind, name: str, tensor: Tensor | None) -> TensorEntry:
    if tensor is None:
        return TensorEntry(kind, name, "none", None)
    if nn.parameter.is_lazy(tensor):
        return TensorEntry(kind, name, "not initialized yet", None)
    described = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
    ordinary = type(tensor).__torch_dispatch__ is _PLAIN_TENSOR and tensor.layout is torch.strided
    if not ordinary or tensor.is_meta or tensor.is_quantized:
        return TensorEntry(
            kind, name, f"{described}, {type(tensor).__name__}, {tensor.layout}, cannot be compared", None
        )
    return TensorEntry(kind, name, described, tensor)


def gradient_entries(name: str, parameter: Tensor) -> list[TensorEntry]:
    gradient = None if nn.parameter.is_lazy(parameter) else parameter.grad
    if gradient is not None and gradient.layout is torch.sparse_coo:
        gradient = gradient.coalesce()
        indices = entry_of("gradient", f"{name} (indices)", gradient.indices())
        return [indices, entry_of("gradient", f"{name} (values)", gradient.values())]
    return [entry_of("gradient", name, gradient)]


def tensors_of(entries: Sequence[TensorEntry]) -> list[Tensor]:
    return [entry.tensor for entry in entries if entry.tensor is not None]


_BLOCK_ELEMENTS = 256
_BLOCKS = 1024


def differing_structure(gathered: Gathered, entries: Sequence[TensorEntry]) -> Divergence:
    """Ranks that do not hold the same tensors."""
    trees = gathered(lambda: {"held": [[one.kind, one.name, one.described] for one in entries]}, "replica structures")
    tables = {rank: {(kind, name): what for kind, name, what in tree["held"]} for rank, tree in trees.items()}
    keys = dict.fromkeys(key for table in tables.values() for key in table)
    held = {key: {rank: table.get(key, "no such tensor") for rank, table in tables.items()} for key in keys}
    differing = {key: by_rank for key, by_rank in held.items() if differ(by_rank.values())}
    if not differing:  # the same tensors in another order
        return Divergence("parameter", *_reordered(tables), structural=True)
    (kind, name), *others = sorted(differing, key=lambda key: KINDS.index(key[0]))
    return Divergence(kind, name, differing[kind, name], [(*key, differing[key]) for key in others], structural=True)


def _reordered(tables: Mapping[int, Mapping[tuple[Kind, str], str]]) -> tuple[str, dict[int, str]]:
    """The name at the first place at which ranks hold different tensors, and what each has there."""
    for keys in zip(*tables.values(), strict=True):
        if differ(keys):
            by_rank = {rank: f"{kind} {name} at this place" for rank, (kind, name) in zip(tables, keys, strict=True)}
            return keys[0][1], by_rank
    return "(the hash of all names)", dict.fromkeys(tables, "the same names")


def differing_elements(gathered: Gathered, entries: Sequence[TensorEntry]) -> Divergence:
    """The first of these tensors that differs, and its first element."""
    entries = sorted(entries, key=lambda entry: KINDS.index(entry.kind))
    held = _digests_of_all(gathered, "replica tensors", lambda: tensors_of(entries))
    differing = [(entry, by_rank) for entry, by_rank in zip(entries, held, strict=True) if differ(by_rank.values())]
    if not differing:
        return Divergence(entries[0].kind, entries[0].name, held[0], described=entries[0].described)
    (first, by_rank), *others = differing
    assert first.tensor is not None
    block = _differing_block(gathered, first.tensor)
    return Divergence(
        first.kind,
        first.name,
        by_rank,
        [(entry.kind, entry.name, digest) for entry, digest in others],
        element=block.element,
        differing_elements=block.differing,
        block_elements=block.elements,
        alone=block.alone,
        described=first.described,
    )


@dataclass(frozen=True)
class _Block:
    """What was found in the first block of a tensor that differs; ``alone``: no other block differs."""

    element: Element | None = None
    differing: int = 0
    elements: int = 0
    alone: bool = False


def _differing_block(gathered: Gathered, tensor: Tensor) -> _Block:
    """What may fail on one rank, such as a copy for want of memory, happens where `gathered` tells all of it."""

    def part(start: int, size: int) -> Tensor:
        return flattened(tensor)[start : start + size]

    def blocks(start: int, size: int, piece: int) -> Sequence[Tensor]:
        return torch.split(part(start, size), piece)

    start, size, alone = 0, tensor.numel(), True
    while size > _BLOCK_ELEMENTS:
        piece = max(_BLOCK_ELEMENTS, -(-size // _BLOCKS))
        pieces = functools.partial(blocks, start, size, piece)
        held = _digests_of_all(gathered, "replica blocks", pieces)
        differing = [place for place, by_rank in enumerate(held) if differ(by_rank.values())]
        if not differing:
            return _Block()
        alone = alone and len(differing) == 1
        start, size = start + differing[0] * piece, min(piece, size - differing[0] * piece)
    trees = gathered(lambda: {"bytes": part(start, size).view(torch.uint8)}, "replica elements")
    return _block_of(tensor, start, alone, {rank: tree["bytes"].cpu() for rank, tree in trees.items()})


def _block_of(tensor: Tensor, start: int, alone: bool, held: Mapping[int, Tensor]) -> _Block:
    """``held``: rank -> the bytes of the block that begins at element ``start``."""
    rows = {rank: content.view(-1, tensor.element_size()) for rank, content in held.items()}
    first = next(iter(rows.values()))
    differs = torch.stack([(row != first).any(1) for row in rows.values()]).any(0)
    places = differs.nonzero().flatten().tolist()
    if not places:
        return _Block()
    element = Element(
        index=tuple(map(int, torch.unravel_index(torch.tensor(start + places[0], device="cpu"), tensor.shape))),
        values={rank: _value_text(row[places[0]], tensor.dtype) for rank, row in rows.items()},
        bits={rank: int.from_bytes(bytes(row[places[0]].tolist()), sys.byteorder) for rank, row in rows.items()},
        width=8 * tensor.element_size(),
    )
    return _Block(element, len(places), len(differs), alone)


def _value_text(content: Tensor, dtype: torch.dtype) -> str:
    value = content.clone().view(dtype)
    if value.is_floating_point():
        number = value.to(torch.float64).item()
        digits = 17 if dtype is torch.float64 else 9
        return repr(number) if number == 0 or not math.isfinite(number) else f"{number:.{digits}g}"
    return repr(value.item())


def _digests_of_all(gathered: Gathered, what: str, tensors: Callable[[], Sequence[Tensor]]) -> list[dict[int, int]]:
    """For each tensor: rank -> digest. Collective."""
    trees = gathered(lambda: {"digests": digests(tensors())}, what)
    return transposed({rank: tree["digests"] for rank, tree in trees.items()})


def transposed(by_rank: Mapping[int, Tensor]) -> list[dict[int, int]]:
    """For each place of the ranks' digests: rank -> digest."""
    columns = {rank: digests_of.tolist() for rank, digests_of in by_rank.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def differ(held: Any) -> bool:
    return len(set(held)) > 1


_BUCKETS = 32  # of each part, so that 30 ranks' digests fit into one collective
_BUCKET_BYTES = 1 << 20


class Replicas:
    """Compares ``model`` with its replicas on the other ranks. Changes nothing; draws no random numbers.

    Args:
        model: as it is trained: DistributedDataParallel itself, what has it inside, or a module whose gradients are
            reduced in another way.
        ignore: names of parameters and buffers that may differ between ranks; patterns as in `fnmatch`. The same on
            every rank.

    Attributes:
        warnings: what is not covered, a sentence each.
    """

    def __init__(self, model: nn.Module, ignore: Sequence[str] = ()) -> None:
        self._model, self._ignore = model, tuple(ignore)
        self._inner = unwrapped(model)
        self._units: list[Unit] | None = None
        self.warnings: tuple[str, ...] = _warnings(self._inner)

    def expect(self) -> None:
        """The step that begins will be compared: its first forward pass copies the buffers. Local.

        Without it buffers are left out.
        """
        for unit in self._found_units():
            unit.expect()

    def compare(self, gathered: Gathered) -> Divergence | None:
        """What differs between the ranks; None where all is equal. The same on every rank.

        Collective: every rank must call, after the backward pass that reduces and before the optimizer's step.

        Args:
            gathered: given a function that makes this rank's tree and a name, every rank's tree by global rank.
        """
        with torch.no_grad():
            try:
                return self._compare(gathered)
            finally:
                for unit in self._units or ():
                    unit.forget()

    def close(self) -> None:
        """Take the hooks away. Idempotent."""
        for unit in self._units or ():
            unit.close()
        self._units = None

    def _compare(self, gathered: Gathered) -> Divergence | None:
        parts: dict[str, _Part] = {}

        def summaries() -> dict[str, Any]:
            parts.update(self._parts())
            return {name: part.summary() for name, part in parts.items()}

        trees = gathered(summaries, "replica digests")
        shared = [name for name in parts if all(name in tree for tree in trees.values())]
        if any(differ(tree[name]["signature"] for tree in trees.values()) for name in shared):
            held = [entry for name in shared for entry in parts[name].entries]
            return differing_structure(gathered, held)
        suspects: list[TensorEntry] = []
        for name in shared:
            digests_of = {rank: tree[name]["digests"] for rank, tree in trees.items()}
            for bucket, by_rank in zip(parts[name].buckets, transposed(digests_of), strict=True):
                suspects += bucket if differ(by_rank.values()) else []
        return differing_elements(gathered, suspects) if suspects else None

    def _parts(self) -> dict[str, _Part]:
        """What this rank holds. Buffers are parts by themselves: a rank without a forward pass has no copies."""
        ignored = self._ignored()
        named = [
            (name, parameter)
            for name, parameter in self._inner.named_parameters()
            if id(parameter) not in ignored and not self._is_left_out(name)
        ]
        state = [entry_of("parameter", name, parameter) for name, parameter in named]
        state += [entry for name, parameter in named for entry in gradient_entries(name, parameter)]
        parts = {"state": _Part(state)}
        for number, unit in enumerate(self._found_units()):
            if unit.taken is not None:
                kept = {name: copy for name, copy in unit.taken.items() if not self._is_left_out(name)}
                parts[f"buffers {number}"] = _Part([entry_of("buffer", name, copy) for name, copy in kept.items()])
        return parts

    def _is_left_out(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._ignore)

    def _ignored(self) -> set[int]:
        """Identities of the parameters that are no replicas: sharded, or DDP leaves them alone."""
        ignored = _sharded(self._inner)
        for unit in self._found_units():
            names = unit.ignored()
            ignored.update(id(parameter) for name, parameter in unit.module.named_parameters() if name in names)
        return ignored

    def _found_units(self) -> list[Unit]:
        """Looked for at the first use: DistributedDataParallel may be put around the model after `__init__`."""
        if self._units is None:
            self._units = units_of(self._inner, replicas_in(self._model))
        return self._units


class ReplicaDigests(Detector):
    """Layer 2: compares replicas in every ``every_steps``-th step."""

    def __init__(self, model: nn.Module, ignore: Sequence[str], every_steps: int) -> None:
        self._replicas, self._every_steps = Replicas(model, ignore), every_steps
        self.warnings = self._replicas.warnings
        self._steps = 0
        self.conclude(None)

    def findings(self, exam: Exam) -> list[SentinelFinding]:
        if not self._is_due():
            return []
        divergence = self._replicas.compare(exam.gathered)
        if divergence is None:
            return []
        return [SentinelFinding("replica digests", divergence.culprit_ranks, divergence.name, divergence.message)]

    def conclude(self, verdict: SentinelVerdict | None) -> None:
        self._steps += verdict is not None
        if self._is_due():
            self._replicas.expect()

    def close(self) -> None:
        self._replicas.close()

    def _is_due(self) -> bool:
        return (self._steps + 1) % self._every_steps == 0


class _Part:
    """Tensors that are compared together."""

    def __init__(self, entries: list[TensorEntry]) -> None:
        self.entries = entries
        self.buckets = _in_buckets([entry for entry in entries if entry.tensor is not None])

    def summary(self) -> dict[str, Any]:
        """Signature and digests, as they are gathered."""
        words = "\n".join(f"{entry.kind} {entry.name} {entry.described}" for entry in self.entries)
        hashed = hashlib.blake2b(words.encode(), digest_size=8).digest()
        found = bucket_digests([tensors_of(bucket) for bucket in self.buckets])
        return {"signature": int.from_bytes(hashed, "little"), "digests": found}


def _in_buckets(entries: Sequence[TensorEntry]) -> list[list[TensorEntry]]:
    """Neighbours, about as many bytes in each. Ranks with one signature cut alike."""
    total_bytes = sum(_size_bytes(entry) for entry in entries)
    full_bytes = max(_BUCKET_BYTES, -(-total_bytes // (_BUCKETS - 1)))
    buckets: list[list[TensorEntry]] = []
    bucket_bytes = full_bytes
    for entry in entries:
        if bucket_bytes >= full_bytes:
            buckets.append([])
            bucket_bytes = 0
        buckets[-1].append(entry)
        bucket_bytes += _size_bytes(entry)
    return buckets


def _size_bytes(entry: TensorEntry) -> int:
    assert entry.tensor is not None
    return entry.tensor.numel() * entry.tensor.element_size()


def _sharded(model: nn.Module) -> set[int]:
    """Identities of the parameters of which each rank holds another part."""
    sharded = {id(one) for one in model.parameters() if hasattr(one, "placements") and hasattr(one, "to_local")}
    # FSDP's first version shards plain tensors. It is there only if the program has loaded it.
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    for module in model.modules():
        if isinstance(module, fsdp):
            sharded.update(map(id, module.parameters()))
    return sharded


def _warnings(model: nn.Module) -> tuple[str, ...]:
    sharded = len(_sharded(model))
    if not sharded:
        return ()
    return (
        f"{sharded} sharded parameter{'s are' if sharded > 1 else ' is'} not covered by the comparison of replicas: "
        "each rank holds another part of them.",
    )


_RUNNING = ("running_mean", "running_var", "num_batches_tracked")


class Unit:
    """A module whose forward pass copies its buffers: the one in a DistributedDataParallel, or the model around them.

    Args:
        prefix: of its names in the model.
        replica: the DistributedDataParallel around it; None where there is none.
        others: what other units see to.

    Attributes:
        taken: name in the model -> copy, of the buffers that must be equal; None where no forward pass came, or no
            broadcast with it.
    """

    def __init__(
        self, prefix: str, module: nn.Module, replica: DistributedDataParallel | None, others: Sequence[nn.Module] = ()
    ) -> None:
        self.module = module
        self._prefix, self._replica, self._others = prefix, replica, others
        self._buffers: BufferCopies | None = None
        self.taken: dict[str, Tensor] | None = None
        self._handle: Any = None

    def ignored(self) -> set[str]:
        """Names in ``module`` that DistributedDataParallel leaves alone."""
        return set(getattr(self._replica, "parameters_to_ignore", None) or ())

    def expect(self) -> None:
        """The next forward pass copies the buffers. Only until then there is a hook: compiled modules mind them."""
        self.forget()
        self._handle = self.module.register_forward_pre_hook(
            ForwardBegins(self.module, self, Unit._about_to_run, self._replica is not None), prepend=True
        )

    def forget(self) -> None:
        self.taken = None
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def close(self) -> None:
        self.forget()
        if self._buffers is not None:
            self._buffers.close()
            self._buffers = None

    def _about_to_run(self, compiled: bool) -> None:
        self.forget()
        if any(nn.parameter.is_lazy(buffer) for buffer in self.module.buffers()) or self._misses_its_broadcast():
            return
        if self._buffers is None:
            self._buffers = BufferCopies(self.module)
        left_out = self.ignored() | self._others_names()
        if self._replica is None or not self._replica.broadcast_buffers:
            left_out |= running_names(self.module)
        copies = self._buffers.take()
        self.taken = {self._prefix + name: copy for name, copy in copies.items() if name not in left_out}

    def _misses_its_broadcast(self) -> bool:
        """After a forward pass that trained nothing: each rank has changed its buffers by itself."""
        if self._replica is None or not self._replica.broadcast_buffers:
            return False
        will_sync = getattr(self._replica, "will_sync_module_buffers", None)
        return will_sync is not None and not will_sync()

    def _others_names(self) -> set[str]:
        theirs = {id(buffer) for module in self._others for buffer in module.buffers()}
        return {name for name, buffer in self.module.named_buffers() if id(buffer) in theirs}


def units_of(model: nn.Module, replicas: Sequence[DistributedDataParallel]) -> list[Unit]:
    prefixes = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
    units = [Unit(prefixes.get(id(one.module), ""), one.module, one) for one in replicas]
    if all(unit.module is not model for unit in units):
        units.append(Unit("", model, None, [unit.module for unit in units]))
    return units


def running_names(module: nn.Module) -> set[str]:
    """Batch norm's running statistics, which each rank has of its own data; SyncBatchNorm's are of all ranks'."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, owner in module.named_modules()
        if "running_mean" in buffers_of(owner) and not isinstance(owner, nn.SyncBatchNorm)
        for name in _RUNNING
    }
