"""A kept micro-batch run once more on the module as it stands, on this rank or on a peer.

1. `Reruns.packet` puts a micro-batch into plain data that can go to another rank: batch, random state, autocast, the
   loss's factor, and the switches of torch that change last bits.
2. `Reruns.run` sets all that and the buffers, runs the user's step, differentiates, and puts everything back.

Gradients are taken by ``torch.autograd.grad``: nothing is accumulated into ``.grad``, and no hook on an accumulated
gradient runs: not DistributedDataParallel's, nor that of an optimizer inside the backward pass. The program's own
forward hooks do run. Afterwards the random state, the buffers (the very tensors, and their values) and plain attributes
of modules (numbers, strings, tuples of these) are as they were before the rerun.

`explain_alarm` is what that says of an alarm: hardware, or software and data?

1. The alarm's rank hands out the micro-batch. It and the next rank run it, and tell the gradients and the values at the
   checkpoints.
2. Whether these values are normal only the alarm's rank can say: each rank has a past of its own.
3. What both ranks compute alike is no fault of one of them.

Limits:

- What modules keep in lists, dicts and other objects is not put back, and no attribute is set to what it was before the
  step: a step that acts on a count of its own forward passes is another step when it is run again.
- Reentrant checkpointing cannot be differentiated this way. It says so, unless the segment's inputs want no gradient:
  then its parameters silently get none. ``use_reentrant=False`` is needed there.
- An optimizer inside the backward pass has changed the parameters by now.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddpstats._observe.torch_compat import has_compiled
from ddpstats._rerun.codec import to_plain
from ddpstats._rerun.digest import GradientDigests
from ddpstats._rerun.record import MicroBatch, Packet, StepRecord, plain_packet
from ddpstats._rerun.run import Cause, Runner, RunSettings, alone, attempt, cause_of, from_rank_on
from ddpstats._rerun.state import as_in, put_back, set_buffers, switches
from ddpstats.sentinel.activations import Checkpoints, Values
from ddpstats.sentinel.verdict import Gathered

ReplayFn = Callable[[nn.Module, Any], Tensor]

_NAME = "replay_fn"


@dataclass(frozen=True)
class Repeated:
    """Of one run: the gradients' witness, and (checkpoint, value) as they came."""

    witness: GradientDigests
    values: Values


class Reruns:
    """Packs and runs micro-batches of the step under way. Local: a step that communicates is refused.

    Args:
        record: of the step; its module is what runs.
        replay_fn: ``fn(module, batch)``, returns what ``backward()`` was called on, before a GradScaler's scale.
        checkpoints: of layer 1, whose values must not be mixed with a rerun's; None without.
        scale: of the GradScaler, now; 1.0 without.
    """

    def __init__(
        self, record: StepRecord, replay_fn: ReplayFn, checkpoints: Checkpoints | None, scale: Callable[[], float]
    ) -> None:
        self._record, self._replay_fn, self._checkpoints, self._scale = record, replay_fn, checkpoints, scale

    @property
    def device(self) -> torch.device:
        """Where the module is."""
        return self._record.device

    @property
    def is_compiled(self) -> bool:
        """Whether other programs than the one of before may run at any time: of torch.compile, or of TorchScript."""
        return has_compiled() or any(isinstance(one, torch.jit.ScriptModule) for one in self._record.module.modules())

    @property
    def names(self) -> list[str]:
        """Of the parameters that a `GradientDigests` is about."""
        return [name for name, parameter in self._record.module.named_parameters() if parameter.requires_grad]

    @property
    def buffers(self) -> dict[str, Tensor]:
        """As before the step."""
        return dict(self._record.buffers or {})

    def packet(self, place: int) -> dict[str, Any] | None:
        """A micro-batch as plain data; None without one; {"error": words} where that is not to be had.

        {"changed": path, "error": words} for a batch that was changed in place: from the next one on, copies are kept.
        """
        if len(self._record.micro_batches) <= place:
            return None
        micro = self._record.micro_batches[place]
        if micro.look_for_changes():
            path = next(iter(micro.changed), "the batch")  # it is gone where the program took it out
            return {"changed": path, "error": f"{path} was changed in place during the step"}
        return attempt(lambda: _packed(micro, self._scale()))

    def run(self, travelled: Mapping[str, Any]) -> Repeated:
        """``travelled``: {"plain": a packet, "buffers": those that are not as on this rank}.

        Raises what the user's step raises; ConfigError where it returns no loss, or communicates.
        """
        module, values = self._record.module, Values()
        packet, buffers = travelled["plain"], {**self.buffers, **travelled["buffers"]}
        kept = Packet.from_plain(packet)
        runner = Runner(module, self._replay_fn, _NAME, RunSettings(self.device), "the micro-batch that is run again")
        wanted = [parameter for parameter in module.parameters() if parameter.requires_grad]
        with alone(_NAME, self.device), put_back(module), as_in(packet["switches"]), ExitStack() as stack:
            if self._checkpoints is not None:
                values = stack.enter_context(self._checkpoints.redirected())
            set_buffers(module, buffers)
            batch = runner.batch(kept)
            with runner.as_kept(kept):
                loss = runner.scaled(runner.loss(kept, batch), packet["scale"])
                found = torch.autograd.grad(loss, wanted, allow_unused=True)
            return Repeated(GradientDigests.of(_strided(found, packet.get("strided", ()))), values)


def _strided(gradients: Sequence[Tensor | None], places: Collection[int]) -> list[Tensor | None]:
    """Without sparse ones at ``places``: in the step they were added to zeros that are not sparse."""
    return [
        one.to_dense() if one is not None and one.is_sparse and place in places else one
        for place, one in enumerate(gradients)
    ]


def _packed(micro: MicroBatch, scale: float) -> dict[str, Any]:
    factor = None if micro.factor is None else micro.factor.detach().cpu()  # with the scale in it
    packet = plain_packet(micro, to_plain(micro.batch), factor)
    return {**packet, "scale": scale if factor is None else 1.0, "switches": switches()}


_RTOL = 1e-2
_ATOL = 1e-6  # of the largest value: what should cancel to nothing does so up to noise


def explain_alarm(
    gathered: Gathered,
    reruns: Reruns,
    ranks: Sequence[int],
    rank: int,
    owner: int,
    micro_batch: int,
    is_abnormal: Callable[[Values], bool],
    names: Sequence[str],
) -> str:
    """Why rank ``owner``'s micro-batch gave a value that is not normal, in words. Collective: two gathers.

    ``ranks``: of the group; ``rank``: this one; ``is_abnormal``: of the values of a rerun, asked on ``owner`` only;
    ``names``: of the checkpoints, by index.
    """

    def handed_out() -> dict[str, Any] | None:
        return attempt(lambda: _packet(reruns, micro_batch)) if rank == owner else None

    packet = gathered(handed_out, "the micro-batch of the alarm")[owner]
    if "error" in packet:
        return f"The micro-batch could not be run again: {packet['error']}."
    peer = from_rank_on(ranks, owner)[1 % len(ranks)]

    def answer() -> dict[str, Any]:
        if rank not in (owner, peer):
            return {}
        repeated = reruns.run(packet)
        values = [(index, float(value)) for index, value in repeated.values]  # (checkpoint, value)
        bad = is_abnormal(repeated.values) if rank == owner else None
        return {"digests": repeated.witness.digests, "values": values, "bad": bad}

    told = gathered(lambda: attempt(answer), "the micro-batch of the alarm, once more")
    return _explanation(owner, peer, told[owner], told[peer], names)


def _packet(reruns: Reruns, micro_batch: int) -> dict[str, Any]:
    own = reruns.packet(micro_batch)
    if own is None:
        return {"error": "it did not run inside micro_batch()"}
    return own if "error" in own else {"plain": own, "buffers": reruns.buffers}


def _explanation(owner: int, peer: int, here: Mapping[str, Any], there: Mapping[str, Any], names: Sequence[str]) -> str:
    if "error" in here:
        return _failed(owner, here)
    again, differing, wrong_there = f"Run again on rank {owner}, the micro-batch gives ", None, None
    if peer != owner and "error" not in there:
        alike = torch.equal(here["digests"], there["digests"])
        differing = None if alike else _first_difference(here, there)
        wrong_there = differing is None
    cause = cause_of([here["bad"]], wrong_there)
    if cause is Cause.TRANSIENT:
        return again + "normal values: a transient fault of its hardware, or a race."
    again += "such a value again"
    if cause is Cause.UNTOLD and peer == owner:
        return again + "; there is no other rank to tell hardware from software."
    if cause is Cause.UNTOLD:
        return f"{again}. {_failed(peer, there)}"
    if differing is None:
        return f"{again}, and so it does on rank {peer}: software or data, not hardware."
    place, value, other = differing
    return (
        f"{again}, and on rank {peer} it does not: hardware of rank {owner}, or something that only "
        f"it holds. {names[place]} has {value:.4g} on rank {owner} and {other:.4g} on rank {peer}."
    )


def _failed(rank: int, answer: Mapping[str, Any]) -> str:
    return f"Rank {rank} could not run the micro-batch again: {answer['error']}"


def _first_difference(here: Mapping[str, Any], there: Mapping[str, Any]) -> tuple[int, float, float] | None:
    """(checkpoint, the value here, the value there) of the first ones that are not about the same; NaN for none."""
    finite = [abs(value) for _, value in (*here["values"], *there["values"]) if math.isfinite(value)]
    for mine, theirs in itertools.zip_longest(here["values"], there["values"]):
        if mine is None:
            return theirs[0], math.nan, theirs[1]
        if theirs is None or mine[0] != theirs[0]:
            return (*mine, math.nan)
        if not _is_about(mine[1], theirs[1], _ATOL * max(finite, default=0.0)):
            return (*mine, theirs[1])
    return None


def _is_about(one: float, other: float, room: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return not (math.isfinite(one) or math.isfinite(other))
    return math.isclose(one, other, rel_tol=_RTOL, abs_tol=room)
