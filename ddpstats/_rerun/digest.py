"""A 64-bit digest of the bits of tensors: equal bits give equal digests, on every rank and every device.

1. The bytes of a tensor, in row-major order, are words of 64 bits; the last one is filled up with zeros. Neither
   the dtype nor the shape nor the address enters.
2. The upper bits of each word are folded into the lower ones (``w ^ (w >>> 33)``), which keeps words distinct. Without
   it two flipped sign bits would cancel: 2**63 times an odd number is 2**63, and twice that is 0. By 33 and not by 32:
   with 32 the two signs of one word would cancel in the fold, and a tensor times -1 would look like itself.
3. Each word is multiplied by an odd number of its position, and the products are added: all modulo 2**64, so the order
   of the additions does not matter. An odd factor loses nothing: a change within one word always changes the digest.
4. The multipliers repeat after `_CHUNK_WORDS`; each chunk's sum has another odd multiplier.

Certain: any change within one word, so every flipped bit. Unrelated changes in several words are missed with a chance
of 2**-64. The worst are differences in the highest bits only, such as two changed signs of float32: about 2**-32. It
is no protection against collisions that are made on purpose.

Nothing waits for an accelerator, and no random numbers are drawn: the multipliers are splitmix64 of the position.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

_WORD_BYTES = 8
_CHUNK_WORDS = 1 << 15  # with the multipliers it fits into a core's cache
_CHUNKS_AT_ONCE = 256  # on an accelerator: few launches, and 64 MiB of scratch
_FOLD_BITS = 33
_FOLDED = (1 << (64 - _FOLD_BITS)) - 1


def digests(tensors: Iterable[Tensor]) -> Tensor:
    """Return one digest per tensor. Local; does not wait for an accelerator.

    Args:
        tensors: strided ones, of any dtype and shape, on any devices.

    Returns:
        int64[number of tensors] on the device of the first one; on the CPU without any.
    """
    with torch.no_grad():
        results = [_digest(flatten_elements(tensor)) for tensor in tensors]
        if not results:
            return torch.zeros(0, dtype=torch.int64, device="cpu")
        return torch.stack([result.to(results[0].device) for result in results])


def flatten_elements(tensor: Tensor) -> Tensor:
    """Return the elements in row-major order, 1-d and contiguous: a view where it can be."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    # not view(-1): one element may have any stride, which it keeps
    return tensor.as_strided((tensor.numel(),), (1,))


def _digest(flat: Tensor) -> Tensor:
    """Return 0-d int64 on the device of ``flat``, which is 1-d and contiguous."""
    sums = list(_sums(flat, 1 if flat.is_cpu else _CHUNKS_AT_ONCE))
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=flat.device)
    if len(sums) == 1 and not sums[0].dim():
        return sums[0]  # the first chunk's own multiplier is 1
    of_chunks = torch.cat([part.view(-1) for part in sums])
    return (of_chunks * _of_chunks(flat.device, of_chunks.numel())).sum()


def _sums(flat: Tensor, chunks_at_once: int) -> Iterator[Tensor]:
    """Yield a sum per chunk: those of whole chunks together, and that of the rest."""
    multipliers = _of_words(flat.device)
    for words in _words(flat, _CHUNK_WORDS * chunks_at_once):
        folded = _fold(words)
        whole = words.numel() // _CHUNK_WORDS * _CHUNK_WORDS
        if whole:
            yield folded[:whole].view(-1, _CHUNK_WORDS).mul_(multipliers).sum(1)
        if whole < words.numel():
            yield folded[whole:].mul_(multipliers[: words.numel() - whole]).sum()


def _words(flat: Tensor, at_once: int) -> Iterator[Tensor]:
    """Yield the bytes as int64, ``at_once`` words at a time; the last ones filled up with zeros."""
    for piece in torch.split(flat, at_once * _WORD_BYTES // flat.element_size()):
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


def _fold(words: Tensor) -> Tensor:
    folded = words >> _FOLD_BITS
    return folded.bitwise_and_(_FOLDED).bitwise_xor_(words)  # the shift copies the sign


# -- multipliers ------------------------------------------------------------------------------------------------------


@functools.cache
def _of_words(device: torch.device) -> Tensor:
    return _odd_numbers(0, _CHUNK_WORDS).to(device)


def _of_chunks(device: torch.device, count: int) -> Tensor:
    return _many_of_chunks(device, 1 << (count - 1).bit_length())[:count]


@functools.lru_cache(maxsize=64)
def _many_of_chunks(device: torch.device, count: int) -> Tensor:
    """Return a multiplier per chunk: 1 for the first, so that a tensor of one chunk needs no second product."""
    numbers = _odd_numbers(1 << 40, count)
    numbers[0] = 1
    return numbers.to(device)


def _odd_numbers(first: int, count: int) -> Tensor:
    """Return splitmix64 (Steele, Lea, Flood 2014) of ``count`` positions, each made odd."""
    mixed = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device="cpu") * _as_signed(0x9E3779B97F4A7C15)
    mixed = (mixed ^ _shift(mixed, 30)) * _as_signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shift(mixed, 27)) * _as_signed(0x94D049BB133111EB)
    return (mixed ^ _shift(mixed, 31)) | 1


def _shift(words: Tensor, bits: int) -> Tensor:
    """Return the words shifted to the right, with zeros from the left."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _as_signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
