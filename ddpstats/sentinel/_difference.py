"""The tensors that replicas hold, and where they differ: from digests of tensors and blocks down to the first element.

Each tensor has a name and a description by which ranks compare it. What differs is found in rounds of small gathers.
Each round is decided on what the one before gathered, which is the same everywhere; so no rank goes on alone.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddpstats._base.text import dtype_name
from ddpstats.sentinel._digest import digests, flattened
from ddpstats.sentinel._divergence import KINDS, Divergence, Element, Kind
from ddpstats.sentinel._verdict import Gathered

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

    start, size, alone = 0, tensor.numel(), True
    while size > _BLOCK_ELEMENTS:
        piece = max(_BLOCK_ELEMENTS, -(-size // _BLOCKS))
        pieces = functools.partial(_pieces, part, start, size, piece)
        held = _digests_of_all(gathered, "replica blocks", pieces)
        differing = [place for place, by_rank in enumerate(held) if differ(by_rank.values())]
        if not differing:
            return _Block()
        alone = alone and len(differing) == 1
        start, size = start + differing[0] * piece, min(piece, size - differing[0] * piece)
    trees = gathered(lambda: {"bytes": part(start, size).view(torch.uint8)}, "replica elements")
    return _block_of(tensor, start, alone, {rank: tree["bytes"].cpu() for rank, tree in trees.items()})


def _pieces(part: Callable[[int, int], Tensor], start: int, size: int, piece: int) -> Sequence[Tensor]:
    return torch.split(part(start, size), piece)


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
        dtype=dtype_name(tensor.dtype),
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
