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

`GradientDigests`, the gradients of one run of a micro-batch: per parameter a digest of the bits, and the norm. Those of
a rank's own gradients in the step, before the reduce, they are taken while it runs:

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

from ddpstats._observe.gradient_norms import NO_GRADIENT as NO_NORM, held_values, is_sparse, measure
from ddpstats._observe.gradients import GradientWatch
from ddpstats.errors import ConfigError

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
        results = [_digest(flattened(tensor)) for tensor in tensors]
        if not results:
            return torch.zeros(0, dtype=torch.int64, device="cpu")
        return torch.stack([result.to(results[0].device) for result in results])


def flattened(tensor: Tensor) -> Tensor:
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
        folded = _folded(words)
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


def _folded(words: Tensor) -> Tensor:
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
    mixed = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device="cpu") * _signed(0x9E3779B97F4A7C15)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
    return (mixed ^ _shifted(mixed, 31)) | 1


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Return the words shifted to the right, with zeros from the left."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


NO_GRADIENT = 0


@dataclass(frozen=True)
class GradientDigests:
    """The gradients of one run of one micro-batch.

    Attributes:
        digests: int64, one per parameter that wants a gradient; `NO_GRADIENT` where none came.
        norms: float64, as `ddpstats._observe.gradient_norms.measure`.
    """

    digests: Tensor
    norms: Tensor

    def to_tree(self) -> dict[str, Tensor]:
        """Return a tree for `gather_trees`."""
        return {"digests": self.digests, "norms": self.norms}

    @classmethod
    def of(cls, gradients: Sequence[Tensor | None]) -> GradientDigests:
        """Digest one gradient, or None, per parameter."""
        values = torch.full((len(gradients),), NO_GRADIENT, dtype=torch.int64, device="cpu")
        held = {index: gradient for index, gradient in enumerate(gradients) if gradient is not None}
        values[torch.tensor(list(held), dtype=torch.int64, device="cpu")] = gradient_digests(held.values()).cpu()
        return cls(values, measure(gradients))

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> GradientDigests:
        """Read what `to_tree` made."""
        return cls(tree["digests"], tree["norms"])

    @property
    def is_zero(self) -> bool:
        """Return whether no parameter has a gradient other than zero."""
        return not bool((self.norms > 0).logical_or(self.norms.isnan()).any())

    def is_same(self, peer: GradientDigests, room: float) -> bool:
        """Return whether no gradient `differs`."""
        return not bool(self.differs(peer, room).any())

    def differs(self, peer: GradientDigests, room: float) -> Tensor:
        """Return a bool per parameter: it has other bits, and where ``room`` is not 0 also another norm.

        Norms differ by more than that part of the largest one. All True where the numbers of parameters differ.
        """
        if self.digests.shape != peer.digests.shape:
            return torch.ones(max(len(self.digests), len(peer.digests)), dtype=torch.bool, device="cpu")
        differing = self.digests != peer.digests
        if room > 0.0 and len(differing):
            larger = torch.maximum(self.norms, peer.norms)
            most = room * larger.where(larger.isfinite(), 0.0).max().clamp(min=0.0)
            differing &= ~((self.norms - peer.norms).abs() <= most)
        return differing

    def distance(self, peer: GradientDigests) -> float:
        """Return the largest difference of two norms as a part of the largest norm; inf where one is not finite."""
        if self.norms.shape != peer.norms.shape or not len(self.norms):
            return float("inf")
        difference, largest = (self.norms - peer.norms).abs().max(), torch.maximum(self.norms, peer.norms).max()
        distance = float(difference / largest) if float(largest) > 0 else float(difference)
        return distance if distance == distance else float("inf")


def gradient_digests(gradients: Iterable[Tensor]) -> Tensor:
    """Return the `digests` of gradients, of a sparse one's dense form, but that a zero has no sign.

    ``.grad`` that was zeros before holds 0.0 where the gradient is -0.0. The sum is a copy, made of one at a time.
    """
    with torch.no_grad():
        return digests(
            (gradient.to_dense() if is_sparse(gradient) else held_values(gradient)) + 0 for gradient in gradients
        )


class LocalGradients:
    """Watches one micro-batch at a time. Local.

    Args:
        model: as it is trained.

    Attributes:
        problem: why `witness` returns None, in words; empty where it does not.

    Raises:
        ConfigError: the parameters are sharded: no rank has what another one computes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._watch = GradientWatch(model)
        if not self._watch.sees_local:
            raise ConfigError("replay_fn needs replicas: this model is sharded, each rank has parameters of its own")
        self._watch.observer = self._note
        self._wanted: list[Tensor] = []
        self._seen: dict[int, tuple[int, float]] = {}
        self._handle: Any = None
        self.problem = _NOTHING

    def begin(self) -> None:
        """Begin to watch: the micro-batch is about to run."""
        self.discard()
        self._wanted = [parameter for parameter in self._watch.parameters if parameter.requires_grad]
        if self._wanted:
            self._watch.begin()  # before our hooks on tensors, which it would take for the program's
            self._handle = register_multi_grad_hook(self._wanted, self._about_to_arrive, mode="any")

    def end(self) -> None:
        """End it: the micro-batch is through. Idempotent."""
        passes = self._stop()
        if passes > 1:
            self.problem = f"it had {passes} backward passes"
        elif passes and not self._seen:
            self.problem = self.problem or "its gradients were gone before they could be seen"

    def discard(self) -> None:
        """Forget the micro-batch, as where it has raised. Idempotent; also without an `end`."""
        self._stop()
        self._seen, self.problem = {}, _NOTHING

    def witness(self) -> GradientDigests | None:
        """Return the gradients; None where they were not those of one backward pass alone: `problem`."""
        if self.problem:
            return None
        seen = [self._seen.get(id(parameter), (NO_GRADIENT, NO_NORM)) for parameter in self._wanted]
        return GradientDigests(
            torch.tensor([digest for digest, _ in seen], dtype=torch.int64, device="cpu"),
            torch.tensor([norm for _, norm in seen], dtype=torch.float64, device="cpu"),
        )

    def close(self) -> None:
        """Take the hooks away. Idempotent."""
        self._stop()
        self._watch.close()

    def _stop(self) -> int:
        """Stop watching, and return how many backward passes there were."""
        if self._handle is None:
            return 0
        self._handle.remove()
        self._handle = None
        self._watch.end()
        passes = len(self._watch.arrivals[-1].exchanged)
        self._watch.forget()
        return passes

    def _about_to_arrive(self, gradient: Tensor) -> None:
        """Look at ``.grad`` before anything is accumulated. A second pass, and one inside of another, come too late."""
        if self.problem == _NOTHING:
            left = [held_values(wanted.grad.detach()).any() for wanted in self._wanted if wanted.grad is not None]
            self.problem = _LEFT if any(map(bool, left)) else ""

    def _note(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        values, norms = gradient_digests(gradients).tolist(), measure(gradients).tolist()
        self._seen.update(zip(map(id, parameters), zip(values, norms, strict=True), strict=True))


_NOTHING = "no backward pass ran in it"
_LEFT = "something was left in .grad before its backward pass: zero the gradients first"
