"""What a rank's own gradients of one micro-batch were, before the reduce: digests taken while it ran."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddpstats._gradients import NO_GRADIENT as NO_NORM, GradientWatch, measure
from ddpstats.errors import ConfigError
from ddpstats.sentinel._witness import NO_GRADIENT, Witness, gradient_digests


class Original:
    """Watches one micro-batch at a time. Local.

    Args:
        model: as it is trained.

    Raises:
        ConfigError: the parameters are sharded: no rank has what another one computes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._watch = GradientWatch(model)
        if not self._watch.sees_local:
            raise ConfigError("replay_fn needs replicas: this model is sharded, each rank has parameters of its own")
        self._watch.observer = self._note
        self._place: dict[int, int] = {}
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}
        self._is_complete = False
        self._watching = False

    def begin(self) -> None:
        """The micro-batch is about to run."""
        wanted = [parameter for parameter in self._watch.parameters if parameter.requires_grad]
        self._place = {id(parameter): place for place, parameter in enumerate(wanted)}
        self._seen = {}
        # What is left in .grad would be added to: then nothing that can be repeated comes of it.
        self._is_complete = not any(one.grad is not None and bool(one.grad.detach().any()) for one in wanted)
        self._watching = True
        self._watch.begin()

    def end(self) -> None:
        """The micro-batch is through. Idempotent."""
        if self._watching:
            self._watching = False
            self._watch.end()
            self._is_complete = self._is_complete and len(self._watch.arrivals[-1].exchanged) == 1
            self._watch.forget()

    def witness(self) -> Witness | None:
        """None where the gradients were not those of one backward pass alone."""
        if not self._is_complete or not self._seen:
            return None
        found = torch.full((len(self._place),), NO_GRADIENT, dtype=torch.int64)
        norms = torch.full((len(self._place),), NO_NORM, dtype=torch.float64)
        for place, (digest, norm) in self._seen.items():
            found[place], norms[place] = digest, norm
        return Witness(found, norms)

    def close(self) -> None:
        """Take the hooks away. Idempotent."""
        self._watch.close()

    def _note(self, parameters: list[Tensor]) -> None:
        with torch.no_grad():
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            found, norms = gradient_digests(gradients).cpu(), measure(gradients)
            for parameter, digest, norm in zip(parameters, found, norms, strict=True):
                self._seen[self._place[id(parameter)]] = digest, norm
