"""What one rank puts into a bundle: its part of the step, and the module as it was before the step."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import socket
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ddpstats._base.version import __version__
from ddpstats._observe.gradient_norms import norm_kind, parts_of
from ddpstats._observe.gradients import GradientWatch
from ddpstats._rerun.codec import CannotStore, to_plain
from ddpstats._rerun.record import MicroBatch, StepRecord, plain_packet, scale_of, tensor_bytes
from ddpstats._rerun.state import switches

_RANDOM_BYTES = 1 << 14  # about what the states of the generators take
_ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS", "NCCL_ALGO", "NCCL_PROTO")


class PartSource:
    """Where the parts come from. Local, but for `summary` where parameters are sharded: that is collective."""

    def __init__(
        self,
        watch: GradientWatch,
        record: StepRecord,
        optimizer: Any,
        scheduler: Any,
        scaler: Any,
        store_batch: bool,
    ) -> None:
        self._watch, self._record = watch, record
        self._states = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        self._store_batch = store_batch
        self._gathered: dict[str, Tensor] | None = None

    def summary(self) -> dict[str, Any]:
        """How large the parts would be, in bytes, and a digest of the parameters that tells replicas apart.

        The one moment at which all ranks are here, and sharded parameters can be gathered.
        """
        parameters = self._gathered = self.parameters()
        return {"sizes": self.sizes(), "digest": _digest(parameters)}

    def sizes(self) -> dict[str, int]:
        """Bytes of this rank's part, of the parameters and of the optimizer's state. Local."""
        batches = [micro.batch for micro in self._record.micro_batches]
        local = self._local_gradients()
        rank = _RANDOM_BYTES * len(self._record.micro_batches)
        rank += tensor_bytes(batches) * self._store_batch + tensor_bytes([self._record.buffers, local])
        parameters = self._watch.parameters if self._gathered is None else self._gathered
        return {"rank": rank, "model": tensor_bytes(parameters), "optimizer": self._optimizer_bytes()}

    def _optimizer_bytes(self) -> int:
        """0 where the state cannot be had: `model_part` leaves it out then, and says why."""
        try:
            return tensor_bytes([one.state_dict() for one in _each(self._states["optimizer"])])
        except Exception:
            return 0

    @property
    def needs_peers(self) -> bool:
        """Whether the parameters are sharded, and not gathered yet: this rank alone does not have them. Local."""
        return self._gathered is None and any(hasattr(one, "full_tensor") for one in self._watch.parameters)

    def forget(self) -> None:
        """The step is over."""
        self._gathered = None

    def parameters(self) -> dict[str, Tensor]:
        """By name, whole."""
        if self._gathered is not None:
            return self._gathered
        with torch.no_grad():
            return {
                name: (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()
                for name, parameter in zip(self._watch.names, self._watch.parameters, strict=True)
            }

    def model_part(self, with_optimizer: bool = True) -> dict[str, Any]:
        """The parameters before the step, and the state of what changes them."""
        left_out = [] if with_optimizer else ["optimizer: the bundle would be larger than max_bytes"]
        part: dict[str, Any] = {"parameters": {name: t.cpu().clone() for name, t in self.parameters().items()}}
        for name, states in self._states.items():
            part[name] = None
            if states is None or (name == "optimizer" and not with_optimizer):
                continue
            try:
                plain = [to_plain(one.state_dict(), name) for one in _each(states)]
                part[name] = plain if isinstance(states, (list, tuple)) else plain[0]
            except CannotStore as error:
                left_out.append(str(error))
            except Exception as error:  # of the user's own state_dict(), as ZeroRedundancyOptimizer's on most ranks
                left_out.append(f"{name}: {type(error).__name__}: {error}")
        return {**part, "left_out": left_out}

    def rank_part(self, rank: int, world_size: int, step: int, error: str | None = None) -> dict[str, Any]:
        """This rank's batches, random states, buffers and norms of the step."""
        module = self._record.module
        norms = [arrivals.norms() for arrivals in self._watch.arrivals]
        local = self._local_gradients()
        return {
            "rank": int(rank),
            "world_size": world_size,
            "step": step,
            "device": str(self._record.device),
            "parameter_names": list(self._watch.names),
            "micro_batches": [
                self._micro_batch(micro, norms[place] if place < len(norms) else None)
                for place, micro in enumerate(self._record.micro_batches)
            ],
            "buffers": {name: buffer.cpu().clone() for name, buffer in (self._record.buffers or {}).items()},
            "eval_modules": [name for name, one in module.named_modules() if not one.training],
            "frozen": [name for name, one in module.named_parameters() if not one.requires_grad],
            "norm": norm_kind(self._record.device),
            "gradients": None if local is None else {name: one.cpu() for name, one in local.items()},
            "scale": self._scale(),
            "error": error,
            "environment": _environment(self._record.device),
        }

    def _micro_batch(self, micro: MicroBatch, norms: Tensor | None) -> dict[str, Any]:
        batch, missing = None, None if self._store_batch else "store_batch=False"
        if missing is None:
            try:
                batch = to_plain(micro.batch)
            except CannotStore as error:
                missing = str(error)
        micro.look_for_changes()
        return {
            **plain_packet(micro, batch, self._factor(micro)),
            "batch_missing": missing,
            "changed": list(micro.changed),
            "loss": None if micro.loss is None else torch.as_tensor(micro.loss).detach().cpu().clone(),
            "norms": norms,
        }

    def _scale(self) -> float:
        return scale_of(self._states["scaler"]) or 1.0

    def _factor(self, micro: MicroBatch) -> Tensor | None:
        """Without the scale, which replay applies as well; a scale is a power of two, so nothing is lost."""
        if micro.factor is None:
            return None
        factor = micro.factor.detach().cpu() / self._scale()
        return None if bool((factor == 1).all()) else factor

    def _local_gradients(self) -> dict[str, Tensor] | None:
        """Of the last micro-batch, before they were reduced, where they could be kept."""
        arrivals = self._watch.arrivals
        local = arrivals[-1].local() if arrivals else None
        if local is None:
            return None
        return {
            part: tensor
            for place, one in local.items()
            for part, tensor in parts_of(self._watch.names[place], one).items()
        }


def _environment(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "machine": platform.machine(),
        "torch": str(torch.__version__),  # a class of its own, which no safe reader takes
        "cuda": torch.version.cuda or "",
        **switches(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device_name"], found["device_uuid"] = properties.name, str(getattr(properties, "uuid", ""))
    return found | {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}


def _each(states: Any) -> Sequence[Any]:
    """One object with a state, or several of them; espnet's schedulers may be None."""
    found = states if isinstance(states, (list, tuple)) else [states]
    return [one for one in found if one is not None]


def _digest(tensors: dict[str, Tensor]) -> str:
    """Of every bit, in order."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors.values():
        here = tensor.cpu().contiguous()
        size = here.numel() * here.element_size()
        if size:
            found.update((ctypes.c_char * size).from_address(here.data_ptr()))
    return found.hexdigest()


def plain_ranks(ranks: Sequence[int]) -> tuple[int, ...]:
    """Ascending, and no more than numbers: ours know more than a file can hold."""
    return tuple(sorted(map(int, ranks)))


def versions() -> dict[str, str]:
    """Of what wrote the bundle."""
    return {"ddpstats": __version__, "torch": str(torch.__version__), "python": sys.version.split()[0]}
