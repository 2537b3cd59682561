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

What the gradients of one run of a micro-batch are: per parameter a digest of the bits, and the norm.

Of a rank's own gradients in the step, before the reduce, they are taken while it runs:

1. `LocalGradients.begin` hooks the parameters for this one micro-batch: just before the first gradient is accumulated,
   it looks whether ``.grad`` is empty. What is left there would be added to, and nothing that can be repeated comes
   of it. The program may empty it at any time before, also inside the micro-batch.
2. Every gradient that is complete is digested, before it is reduced (`ddpstats._observe.gradients`).
3. `LocalGradients.end`: was it one backward pass alone?
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from ddpstats._observe.gradient_norms import NO_GRADIENT as NO_NORM, held_values, measure, parts_of
from ddpstats._observe.gradients import GradientWatch, unwrapped
from ddpstats.errors import ConfigError

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


def bucket_digests(buckets: Iterable[Sequence[Tensor]]) -> Tensor:
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


NO_GRADIENT = 0


@dataclass(frozen=True)
class GradientDigests:
    """Of one run of one micro-batch.

    Attributes:
        digests: int64, one per parameter that wants a gradient; `NO_GRADIENT` where none came.
        norms: float64, as `ddpstats._observe.gradient_norms.measure`.
    """

    digests: Tensor
    norms: Tensor

    def to_tree(self) -> dict[str, Tensor]:
        """For `gather_trees`."""
        return {"digests": self.digests, "norms": self.norms}

    @classmethod
    def of(cls, gradients: Sequence[Tensor | None]) -> GradientDigests:
        """One gradient, or None, per parameter."""
        with torch.no_grad():
            found = torch.full((len(gradients),), NO_GRADIENT, dtype=torch.int64, device="cpu")
            places = [place for place, gradient in enumerate(gradients) if gradient is not None]
            if places:
                there = [gradient for gradient in gradients if gradient is not None]
                found[torch.tensor(places, device="cpu")] = gradient_digests(there).cpu()
            return cls(found, measure(gradients))

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> GradientDigests:
        """What `to_tree` made."""
        return cls(tree["digests"], tree["norms"])

    @property
    def is_zero(self) -> bool:
        """Whether no parameter has a gradient other than zero."""
        return not bool((self.norms > 0).logical_or(self.norms.isnan()).any())

    def is_same(self, other: GradientDigests, noise: float) -> bool:
        """Bit for bit where ``noise`` is 0; else norms that differ by no more than that part of the largest one."""
        return not bool(self.differs(other, noise).any())

    def differs(self, other: GradientDigests, noise: float) -> Tensor:
        """bool, one per parameter: in its bits, and where ``noise`` is not 0 its norm also by more than that allows.

        All True where the two are not about the same number of parameters.
        """
        if self.digests.shape != other.digests.shape:
            return torch.ones(max(len(self.digests), len(other.digests)), dtype=torch.bool, device="cpu")
        found = self.digests != other.digests
        if noise > 0.0 and len(found):
            larger = torch.maximum(self.norms, other.norms)
            room = noise * larger.where(larger.isfinite(), 0.0).max().clamp(min=0.0)
            found &= ~((self.norms - other.norms).abs() <= room)
        return found

    def distance(self, other: GradientDigests) -> float:
        """The largest difference of two norms, relative to the largest norm; infinite where one is not finite."""
        if self.norms.shape != other.norms.shape or not len(self.norms):
            return float("inf")
        difference, largest = (self.norms - other.norms).abs().max(), torch.maximum(self.norms, other.norms).max()
        found = float(difference / largest) if float(largest) > 0 else float(difference)
        return found if found == found else float("inf")


def gradient_digests(gradients: Sequence[Tensor]) -> Tensor:
    """int64, one each: of their bits, but that a zero has no sign; of a sparse one's indices, too.

    ``.grad`` that was zeros before holds 0.0 where the gradient is -0.0.
    """
    parts = (parts_of("", gradient.detach()).values() for gradient in gradients)
    return bucket_digests([part + 0 for part in own] for own in parts)  # one at a time: the sum is a copy


class LocalGradients:
    """Watches one micro-batch at a time. Local.

    Args:
        model: as it is trained.

    Attributes:
        problem: why there is no witness, in words; empty where there is one.
        strided: places of the gradients that were not sparse.

    Raises:
        ConfigError: the parameters are sharded: no rank has what another one computes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._watch = self._watching_model()
        self._place: dict[int, int] = {}
        self._wanted: list[Tensor] = []
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}
        self._had_looked = False
        self._handle: Any = None
        self._watching = False
        self.problem = _NOTHING
        self.strided: list[int] = []

    def begin(self) -> None:
        """The micro-batch is about to run."""
        self.discard()
        parameters = list(unwrapped(self._model).parameters())
        if list(map(id, parameters)) != list(map(id, self._watch.parameters)):  # a replaced head
            self._watch.close()
            self._watch = self._watching_model()
        self._wanted = [parameter for parameter in parameters if parameter.requires_grad]
        self._place = {id(parameter): place for place, parameter in enumerate(self._wanted)}
        self._had_looked = False
        self._watching = True
        self._watch.begin()  # before our hooks on tensors, which it would take for the program's
        if self._wanted:
            self._handle = register_multi_grad_hook(self._wanted, self._about_to_arrive, mode="any")

    def end(self) -> None:
        """The micro-batch is through. Idempotent."""
        if self._watching:
            self._stop()
            passes = len(self._watch.arrivals[-1].exchanged)
            self._watch.forget()
            if passes > 1:
                self.problem = f"it had {passes} backward passes"
            elif not self._seen:
                self.problem = self.problem or "its gradients were gone before they could be seen"

    def discard(self) -> None:
        """The micro-batch has raised: what was seen of it does not count. Idempotent; also without an `end`."""
        if self._watching:
            self._stop()
            self._watch.forget()
        self._seen, self.problem, self.strided = {}, _NOTHING, []

    def witness(self) -> GradientDigests | None:
        """None where the gradients were not those of one backward pass alone: `problem`."""
        if self.problem:
            return None
        found = torch.full((len(self._place),), NO_GRADIENT, dtype=torch.int64, device="cpu")
        norms = torch.full((len(self._place),), NO_NORM, dtype=torch.float64, device="cpu")
        for place, (digest, norm) in self._seen.items():
            found[place], norms[place] = digest, norm
        return GradientDigests(found, norms)

    def close(self) -> None:
        """Take the hooks away. Idempotent."""
        self._unhook()
        self._watch.close()

    def _watching_model(self) -> GradientWatch:
        watch = GradientWatch(self._model)
        if not watch.sees_local:
            raise ConfigError("replay_fn needs replicas: this model is sharded, each rank has parameters of its own")
        watch.observer = self._note
        return watch

    def _stop(self) -> None:
        self._watching = False
        self._wanted = []
        self._unhook()
        self._watch.end()

    def _unhook(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _about_to_arrive(self, gradient: Tensor) -> None:
        """Before anything is accumulated. A backward pass inside another one, and a second one, come too late."""
        if not self._had_looked:
            self._had_looked = True
            left = [held_values(one.grad.detach()).any() for one in self._wanted if one.grad is not None]
            self.problem = _LEFT if any(map(bool, left)) else ""

    def _note(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        with torch.no_grad():
            found, norms = gradient_digests(gradients).cpu(), measure(gradients)
            for parameter, gradient, digest, norm in zip(parameters, gradients, found, norms, strict=True):
                place = self._place.get(id(parameter))
                if place is not None:  # it wanted a gradient when the micro-batch began
                    self._seen[place] = digest, norm
                    if gradient.layout is torch.strided:
                        self.strided.append(place)


_NOTHING = "no backward pass ran in it"
_LEFT = "something was left in .grad before its backward pass: zero the gradients first"
