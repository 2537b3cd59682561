"""What the gradients of one run of a micro-batch are: per parameter a digest of the bits, and the norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddpstats._observe.gradients import measure, parts_of
from ddpstats.sentinel._digest import bucket_digests

NO_GRADIENT = 0


@dataclass(frozen=True)
class GradientDigests:
    """Of one run of one micro-batch.

    Attributes:
        digests: int64, one per parameter that wants a gradient; `NO_GRADIENT` where none came.
        norms: float64, as `ddpstats._observe.gradients.measure`.
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
