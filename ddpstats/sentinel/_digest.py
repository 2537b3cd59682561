"""A 64-bit digest of the bits of tensors: equal bits give equal digests, on every rank and every device.

1. The bytes of a tensor, in row-major order, are words of 64 bits; the last one is filled up with zeros. Neither the
   dtype nor the shape nor where the tensor lies in memory enters.
2. The upper bits of each word are folded into the lower ones (``w ^ (w >>> 33)``), which keeps words distinct. Without
   it two flipped sign bits would cancel: 2**63 times an odd number is 2**63, and twice that is 0. By 33 and not by 32:
   with 32 the two signs of one word would cancel in the fold, and a tensor times -1 would look like itself.
3. Each word is multiplied by an odd number of its position, and the products are added: all modulo 2**64, so the order
   of the additions does not matter. An odd factor loses nothing: a change within one word always changes the digest.
4. The multipliers repeat after `_CHUNK_WORDS`; each chunk's sum has an odd multiplier of its own.

Certain: any change within one word, so every flipped bit. Unrelated changes in several words are missed with a chance
of 2**-64. The worst are differences in the highest bits only, such as two changed signs of float32: about 2**-32. It
is no protection against somebody who looks for two tensors with one digest.

Nothing waits for an accelerator, and no random numbers are drawn: the multipliers are splitmix64 of the position.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_WORD_BYTES = 8
_CHUNK_WORDS = 1 << 15  # with the multipliers it fits into a core's cache
_CHUNKS_AT_ONCE = 256  # on an accelerator: few launches, and 64 MiB of scratch
_SMALL_BYTES = 1 << 16
_RUN_BYTES = _CHUNK_WORDS * _WORD_BYTES  # a copy that stays in the cache
_FOLD_BITS = 33
_FOLDED = (1 << (64 - _FOLD_BITS)) - 1


def digests(tensors: Sequence[Tensor]) -> Tensor:
    """One digest per tensor. Local; does not wait for an accelerator.

    Args:
        tensors: strided ones, of any dtype and shape, on any devices.

    Returns:
        int64[len(tensors)] on the device of the first one; on the CPU where there are none.
    """
    with torch.no_grad():
        return _stacked([_digest(flattened(tensor)) for tensor in tensors])


def bucket_digests(buckets: Sequence[Sequence[Tensor]]) -> Tensor:
    """One digest per bucket of tensors, over all of its tensors in their order. Local.

    Small neighbours of one dtype are copied together: a digest each would cost more than the copy.

    Returns:
        int64[len(buckets)] on the device of the first tensor.
    """
    with torch.no_grad():
        pieces = [[_digest(piece) for piece in _pieces(bucket)] for bucket in buckets]
        return _stacked([one[0] if len(one) == 1 else _digest(_stacked(one)) for one in pieces])


def _pieces(bucket: Sequence[Tensor]) -> Iterator[Tensor]:
    """1-d tensors: large ones by themselves, runs of small ones as one. Equal shapes and dtypes are cut alike."""
    run: list[Tensor] = []
    run_bytes = 0
    for tensor in map(flattened, bucket):
        size_bytes = tensor.numel() * tensor.element_size()
        small = size_bytes <= _SMALL_BYTES
        if run and not (small and tensor.dtype == run[0].dtype and run_bytes + size_bytes <= _RUN_BYTES):
            yield _joined(run)
            run, run_bytes = [], 0
        if small:
            run.append(tensor)
            run_bytes += size_bytes
        else:
            yield tensor
    if run:
        yield _joined(run)


def _joined(run: list[Tensor]) -> Tensor:
    if len(run) == 1:
        return run[0]
    device = run[0].device
    return torch.cat([tensor if tensor.device == device else tensor.to(device) for tensor in run])


def flattened(tensor: Tensor) -> Tensor:
    """Its elements in row-major order, 1-d and contiguous: a view where it can be."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    # not view(-1): one element may have any stride, which it keeps
    return tensor.as_strided((tensor.numel(),), (1,))


def _digest(flat: Tensor) -> Tensor:
    """0-d int64 on the device of ``flat``, which is 1-d and contiguous."""
    sums = _sums_on_cpu(flat) if flat.is_cpu else _sums(flat)
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=flat.device)
    if len(sums) == 1 and not sums[0].dim():
        return sums[0]  # the first chunk's own multiplier is 1
    found = torch.cat([one.view(-1) for one in sums])
    return (found * _of_chunks(found.device, found.numel())).sum()


def _sums_on_cpu(flat: Tensor) -> list[Tensor]:
    """One per chunk."""
    multipliers = _of_words(flat.device)
    found = []
    scratch = None
    for words in _words(flat, _CHUNK_WORDS):
        count = words.numel()
        if scratch is None:
            scratch = torch.empty_like(words)
        folded = _folded(words, scratch[:count] if count < scratch.numel() else scratch)
        found.append(torch.dot(folded, multipliers[:count] if count < _CHUNK_WORDS else multipliers))
    return found


def _sums(flat: Tensor) -> list[Tensor]:
    """One per chunk, many chunks at once: there is no dot product of integers on an accelerator."""
    multipliers = _of_words(flat.device)
    found = []
    for words in _words(flat, _CHUNK_WORDS * _CHUNKS_AT_ONCE):
        folded = _folded(words, torch.empty_like(words))
        whole = words.numel() // _CHUNK_WORDS * _CHUNK_WORDS
        if whole:
            found.append(folded[:whole].view(-1, _CHUNK_WORDS).mul_(multipliers).sum(1))
        if whole < words.numel():
            found.append(folded[whole:].mul_(multipliers[: words.numel() - whole]).sum())
    return found


def _words(flat: Tensor, at_once: int) -> Iterator[Tensor]:
    """The bytes as int64, ``at_once`` words at a time; the last ones filled up with zeros."""
    per_piece = at_once * _WORD_BYTES // flat.element_size()
    pieces = [flat] if flat.numel() <= per_piece else torch.split(flat, per_piece)
    for piece in pieces:
        if piece.numel():
            yield _as_words(piece)


def _as_words(piece: Tensor) -> Tensor:
    size_bytes = piece.numel() * piece.element_size()
    offset_bytes = piece.storage_offset() * piece.element_size()
    if size_bytes % _WORD_BYTES == 0 and offset_bytes % _WORD_BYTES == 0:
        return piece.view(torch.int64)
    words = torch.empty(-(-size_bytes // _WORD_BYTES), dtype=torch.int64, device=piece.device)
    words[-1] = 0
    words.view(torch.uint8)[:size_bytes].copy_(piece.view(torch.uint8))
    return words


def _folded(words: Tensor, out: Tensor) -> Tensor:
    torch.bitwise_right_shift(words, _FOLD_BITS, out=out)
    return out.bitwise_and_(_FOLDED).bitwise_xor_(words)  # the shift copies the sign


def _stacked(found: list[Tensor]) -> Tensor:
    if not found:
        return torch.zeros(0, dtype=torch.int64, device="cpu")
    device = found[0].device
    return torch.stack([one if one.device == device else one.to(device) for one in found])


# -- multipliers ------------------------------------------------------------------------------------------------------


@functools.cache
def _of_words(device: torch.device) -> Tensor:
    return _odd_numbers(0, _CHUNK_WORDS).to(device)


def _of_chunks(device: torch.device, count: int) -> Tensor:
    return _many_of_chunks(device, 1 << (count - 1).bit_length())[:count]


@functools.lru_cache(maxsize=64)
def _many_of_chunks(device: torch.device, count: int) -> Tensor:
    """One for the first: a tensor of one chunk needs no second product."""
    numbers = _odd_numbers(1 << 40, count)
    numbers[0] = 1
    return numbers.to(device)


def _odd_numbers(first: int, count: int) -> Tensor:
    """splitmix64 (Steele, Lea, Flood 2014) of ``count`` positions, each made odd."""
    mixed = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device="cpu") * _signed(0x9E3779B97F4A7C15)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
    return (mixed ^ _shifted(mixed, 31)) | 1


def _shifted(words: Tensor, bits: int) -> Tensor:
    """To the right, zeros from the left."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
