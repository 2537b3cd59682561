"""What the gradients of one run of a micro-batch are: per parameter a digest of the bits, and the norm.

Of a rank's own gradients in the step, before the reduce, they are taken while it runs:

1. `LocalGradients.begin` hooks the parameters for this one micro-batch: just before the first gradient is accumulated,
   it looks whether ``.grad`` is empty. What is left there would be added to, and nothing that can be repeated comes
   of it. The program may empty it at any time before, also inside the micro-batch.
2. Every gradient that is complete is digested, before it is reduced (`ddpstats._observe.gradients`).
3. `LocalGradients.end`: was it one backward pass alone?
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from ddpstats._observe.gradient_norms import NO_GRADIENT as NO_NORM, held_values, measure, parts_of
from ddpstats._observe.gradients import GradientWatch, unwrapped
from ddpstats.errors import ConfigError
from ddpstats.sentinel._digest import bucket_digests

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
    return bucket_digests([[part + 0 for part in parts_of("", one.detach()).values()] for one in gradients])


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
