"""A collective in terms that ranks can compare: what must be equal everywhere, and what must add up.

Most of what a rank passes must be the same on all ranks: that is the `Signature`. Some of it legally differs, and must
fit pairwise: what rank i sends to rank j is what rank j expects from rank i (all_to_all, gather, scatter). For these
every rank has a *balance*: the hashes of what it sends, minus those of what it expects, as a sum modulo 2**64. All
pieces fit exactly if the balances of all ranks add up to 0 (short of a collision of 64-bit hashes), so one number of
fixed size per rank is enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ddpstats._base.text import dtype_name, shorten
from ddpstats._observe.operators import Collective
from ddpstats.guard.event import MASK, Signature, digest_of, stable_hash

_STRIDED = torch.strided
NO_PIECES = "", 0
_SHOWN_PIECES = 8

# Operation, reduce op, root, shapes, dtypes, strides: what must be equal on all ranks, as torch has it.
Parts = tuple[str, str | None, int | None, tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]


def parts_of(call: Collective) -> Parts:
    """Costs next to nothing, and is as good as the `Signature` for telling one call from another."""
    op, compared = call.operator.op, call.operator.compared
    tensors = call.outputs if compared == "out" or not call.inputs else call.inputs
    if compared == "pieces":
        return op, None, call.root, ((),), (tensors[0].dtype,), ()
    if len(tensors) == 1:
        tensor = tensors[0]
        strides = () if tensor.layout is not _STRIDED or tensor.is_contiguous() else (tensor.stride(),)
        return op, call.reduce_op, call.root, (tensor.shape,), (tensor.dtype,), strides
    shapes, dtypes = tuple(tensor.shape for tensor in tensors), tuple(tensor.dtype for tensor in tensors)
    return op, call.reduce_op, call.root, shapes, dtypes, ()


@lru_cache(maxsize=1024)
def signature_of(parts: Parts) -> tuple[Signature, int]:
    """Return the signature, and its digest: one object for all calls of a kind, whatever their labels and lines are."""
    op, reduce_op, root, shapes, dtypes, strides = parts
    names = tuple(map(dtype_name, dtypes))
    signature = Signature(op, reduce_op, root, tuple(tuple(map(int, shape)) for shape in shapes), names, strides)
    return signature, digest_of(signature)


def pieces_of(call: Collective) -> tuple[str, int]:
    """Return (the pieces in words, the balance) of a collective whose ranks pass different things."""
    rank = call.view.ranks.index(call.view.rank)
    sent, expected = list(_pieces(call, is_sent=True)), list(_pieces(call, is_sent=False))
    words = [
        f"{verb} [{shorten([piece.words for piece in pieces], _SHOWN_PIECES)}]"
        for verb, pieces in (("sends", sent), ("expects", expected))
        if pieces
    ]
    balance = sum(stable_hash(repr((rank, *piece[:3]))) for piece in sent)
    balance -= sum(stable_hash(repr((piece.rank, rank, *piece[1:3]))) for piece in expected)
    return "; ".join(words), balance & MASK


class _Piece(NamedTuple):
    """A tensor, or rows of one, that another ``rank`` of the group gets from this one, or sends to it."""

    rank: int
    dtype: str
    size: int
    words: str


def _pieces(call: Collective, is_sent: bool) -> Iterator[_Piece]:
    tensors = call.inputs if is_sent else call.outputs
    if call.splits is not None:
        dtype, row = dtype_name(tensors[0].dtype), list(tensors[0].shape[1:])
        for rank, rows in enumerate(call.splits[0 if is_sent else 1]):
            yield _Piece(rank, dtype, rows * math.prod(row), f"{rows} x {dtype}{row or ''}")
        return
    root = call.root if call.operator.to_root == is_sent else None
    for index, tensor in enumerate(tensors if root is None else tensors[:1]):
        dtype = dtype_name(tensor.dtype)
        yield _Piece(index if root is None else root, dtype, tensor.numel(), f"{dtype}{list(tensor.shape)}")
