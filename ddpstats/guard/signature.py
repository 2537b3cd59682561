"""A collective in terms that ranks can compare: what must be equal everywhere, and what must add up.

Most of what a rank passes must be the same on all ranks: that is the `Signature`. Some of it legally differs, and must
fit pairwise: what rank i sends to rank j is what rank j expects from rank i (all_to_all, gather, scatter). For these
every rank has a *balance*: the hashes of what it sends, minus those of what it expects, as a sum modulo 2**64. All
pieces fit exactly if the balances of all ranks add up to 0 (short of a collision of 64-bit hashes), so one number of
fixed size per rank is enough to tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ddpstats._base.text import dtype_name
from ddpstats._observe.operators import Collective
from ddpstats.guard.event import MASK, Signature, digest_of, stable_hash

_STRIDED = torch.strided
NO_PIECES = "", 0

Parts = tuple[str, str | None, int | None, tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]
"""Operation, reduce op, root, shapes, dtypes, strides: what must be equal on all ranks, as torch has it."""


def parts_of(call: Collective) -> Parts:
    """Costs next to nothing, and is as good as the `Signature` for telling one call from another."""
    op, compared = call.op, call.operator.compared
    tensors = call.outputs if compared == "out" or not call.inputs else call.inputs
    if compared == "pieces":
        return op, None, call.root, ((),), (tensors[0].dtype,), ()
    if len(tensors) == 1:
        tensor = tensors[0]
        strides = () if tensor.layout is not _STRIDED or tensor.is_contiguous() else (tensor.stride(),)
        return op, call.reduce_op, call.root, (tensor.shape,), (tensor.dtype,), strides
    shapes, dtypes = tuple(tensor.shape for tensor in tensors), tuple(tensor.dtype for tensor in tensors)
    return op, call.reduce_op, call.root, shapes, dtypes, ()


@lru_cache(maxsize=4096)
def signature_of(parts: Parts) -> tuple[Signature, int]:
    """Return the signature, and its digest."""
    op, reduce_op, root, shapes, dtypes, strides = parts
    names = tuple(map(dtype_name, dtypes))
    signature = Signature(op, reduce_op, root, tuple(tuple(map(int, shape)) for shape in shapes), names, strides)
    return signature, digest_of(signature)


def pieces_of(call: Collective) -> tuple[str, int]:
    """(the pieces in words, the balance) of a collective whose ranks pass different things."""
    me = call.view.ranks.index(call.view.rank)
    sent, expected = _sent(call, me), _expected(call, me)
    words = []
    if sent:
        words.append("sends " + _in_words(sent, by_sender=True))
    if expected:
        words.append("expects " + _in_words(expected, by_sender=False))
    return "; ".join(words), (_balance(sent) - _balance(expected)) & MASK


class _Piece(NamedTuple):
    """A tensor, or rows of one, that one rank sends to another. ``sender`` and ``receiver`` are ranks of the group."""

    sender: int
    receiver: int
    dtype: str
    size: int
    words: str


def _sent(call: Collective, me: int) -> list[_Piece]:
    if call.splits is not None:
        return [_rows(me, to, rows, call.inputs[0]) for to, rows in enumerate(call.splits[0])]
    if call.root is not None and call.operator.to_root:
        return [_whole(me, call.root, call.inputs[0])]
    return [_whole(me, to, tensor) for to, tensor in enumerate(call.inputs)]


def _expected(call: Collective, me: int) -> list[_Piece]:
    if call.splits is not None:
        return [_rows(source, me, rows, call.outputs[0]) for source, rows in enumerate(call.splits[1])]
    if call.root is not None and not call.operator.to_root:
        return [_whole(call.root, me, call.outputs[0])]
    return [_whole(source, me, tensor) for source, tensor in enumerate(call.outputs)]


def _whole(sender: int, receiver: int, tensor: Any) -> _Piece:
    dtype = dtype_name(tensor.dtype)
    return _Piece(sender, receiver, dtype, tensor.numel(), f"{dtype}{list(tensor.shape)}")


def _rows(sender: int, receiver: int, rows: int, tensor: Any) -> _Piece:
    dtype, row = dtype_name(tensor.dtype), tuple(tensor.shape[1:])
    words = f"{rows} x {dtype}{list(row) if row else ''}"
    return _Piece(sender, receiver, dtype, rows * math.prod(row), words)


def _balance(pieces: Iterable[_Piece]) -> int:
    return sum(stable_hash(repr(tuple(piece[:4]))) for piece in pieces) & MASK


def _in_words(pieces: Sequence[_Piece], by_sender: bool) -> str:
    words = [piece.words for piece in pieces[:8]]
    if len(pieces) == 1:
        return (
            f"{words[0]} to group rank {pieces[0].receiver}"
            if by_sender
            else f"{words[0]} from group rank {pieces[0].sender}"
        )
    return "[" + ", ".join(words) + (", ...]" if len(pieces) > 8 else "]")
