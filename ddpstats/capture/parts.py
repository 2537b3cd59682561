"""What one rank puts into a bundle: its part of the step, and the parameters, or its shards, before the step."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from ddpstats._observe.gradient_norms import norm_kind, parts_of
from ddpstats._observe.gradients import GradientWatch
from ddpstats._rerun.codec import CannotStore, to_plain
from ddpstats._rerun.record import MicroBatch, Packet, StepRecord, scale_of, tensor_bytes
from ddpstats._rerun.state import FLOAT_DTYPES, Autocast, switches
from ddpstats.capture.manifest import Rank, Step

_RANDOM_BYTES = 1 << 14  # about what the states of the generators take
_ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS", "NCCL_ALGO", "NCCL_PROTO")


@dataclass(frozen=True)
class CapturedMicroBatch(Packet):
    """One forward and backward pass.

    Attributes:
        batch_missing: why there is none, or None.
        changed: paths of what was changed in place after the batch was taken.
        loss: what was differentiated, without the scale.
        norms: of the gradients accumulated so far, in the order of `RankPart.parameter_names`, -1 where there is none;
            None if no backward pass ran.
    """

    batch_missing: str | None
    changed: list[str]
    loss: Tensor | None
    norms: Tensor | None

    def __post_init__(self) -> None:
        if self.autocast is not None:
            device_type, _, dtype = self.autocast
            if device_type not in ("cpu", "cuda", "xpu", "mps") or dtype not in FLOAT_DTYPES.values():
                raise ValueError("autocast: no such device or dtype")


@dataclass(frozen=True)
class RankPart:
    """One rank's step. ``rank`` is its global number, ``world_size`` the number of ranks in the group."""

    rank: Rank
    world_size: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    step: Step
    device: str
    micro_batches: tuple[CapturedMicroBatch, ...]
    buffers: dict[str, Tensor]
    eval_modules: list[str]
    frozen: list[str]
    norm: str
    gradients: dict[str, Tensor] | None
    parameter_names: list[str]
    scale: float
    error: str | None
    environment: dict[str, str | bool | int]

    def __post_init__(self) -> None:
        try:
            torch.device(self.device)
        except RuntimeError as error:
            raise ValueError(f"device: {error}") from None
        if self.norm not in ("2", "inf"):
            raise ValueError(f"norm: {self.norm[:20]!r} is not a norm")
        for micro in self.micro_batches:
            if micro.norms is not None and (micro.norms.dtype, micro.norms.shape) != (torch.float64, (self._count,)):
                raise ValueError(f"norms: {self._count} in float64 are expected")

    @property
    def _count(self) -> int:
        return len(self.parameter_names)


@dataclass(frozen=True)
class Shard:
    """Where a tensor belongs in its parameter, which has ``shape``."""

    shape: list[int]
    offsets: list[int]


@dataclass(frozen=True)
class ModelPart:
    """Parameters by name. Those in ``shards`` are one rank's shard of the parameter."""

    parameters: dict[str, Tensor]
    shards: dict[str, Shard] = field(default_factory=dict)


class PartSource:
    """Makes the parts. Local: of a sharded parameter each rank has its own shard, and nothing is gathered."""

    def __init__(self, watch: GradientWatch, record: StepRecord, scaler: Any, store_batch: bool) -> None:
        self._watch, self._record = watch, record
        self._scaler, self._store_batch = scaler, store_batch

    def sizes(self) -> dict[str, int]:
        """Return the bytes of this rank's part and of its parameters."""
        batches = [micro.batch for micro in self._record.micro_batches]
        rank = _RANDOM_BYTES * len(self._record.micro_batches)
        rank += tensor_bytes(batches) * self._store_batch
        rank += tensor_bytes([self._record.buffers, self._local_gradients()])
        return {"rank": rank, "model": tensor_bytes(self.model_part().parameters)}

    def digest(self) -> str:
        """Return a hash of every bit of the parameters, which tells replicas from others."""
        part, digest = self.model_part(), hashlib.blake2b(digest_size=16)
        for name, tensor in part.parameters.items():
            digest.update(f"{name} {part.shards.get(name)}".encode())
            host = tensor.cpu().contiguous()
            size = host.numel() * host.element_size()
            if size:
                digest.update((ctypes.c_char * size).from_address(host.data_ptr()))
        return digest.hexdigest()

    @property
    def is_sharded(self) -> bool:
        """Whether this rank alone does not have the parameters."""
        return bool(self.model_part().shards)

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters by name, as this rank has them."""
        return self.model_part().parameters

    def model_part(self) -> ModelPart:
        """Return the parameters themselves, or this rank's shards."""
        part = ModelPart({})
        for name, parameter in zip(self._watch.names, self._watch.parameters, strict=True):
            tensor = parameter.detach()
            if not hasattr(tensor, "to_local"):
                part.parameters[name] = tensor
            elif (local := tensor.to_local()).numel():
                (chunk,) = getattr(tensor, "__create_chunk_list__")()  # noqa: B009  torch's protocol for distributed checkpoints
                part.parameters[name] = local
                part.shards[name] = Shard(list(tensor.shape), list(chunk.offsets))
        return part

    def rank_part(self, rank: int, world_size: int, step: int, error: str | None = None) -> RankPart:
        """Return this rank's batches, random states, buffers and norms of the step."""
        module, device = self._record.module, self._record.device
        norms = [arrivals.norms() for arrivals in self._watch.arrivals]
        norms += [None] * len(self._record.micro_batches)
        return RankPart(
            rank=int(rank),
            world_size=world_size,
            step=step,
            device=str(device),
            parameter_names=list(self._watch.names),
            micro_batches=tuple(map(self._micro_batch, self._record.micro_batches, norms)),
            buffers={name: buffer.cpu().clone() for name, buffer in (self._record.buffers or {}).items()},
            eval_modules=[name for name, inner in module.named_modules() if not inner.training],
            frozen=[name for name, parameter in module.named_parameters() if not parameter.requires_grad],
            norm=norm_kind(device),
            gradients=self._local_gradients(),
            scale=self._scale(),
            error=error,
            environment=_environment(device),
        )

    def _micro_batch(self, micro: MicroBatch, norms: Tensor | None) -> CapturedMicroBatch:
        batch, missing = None, None if self._store_batch else "store_batch=False"
        if missing is None:
            try:
                batch = to_plain(micro.batch)
            except CannotStore as error:
                missing = str(error)
        micro.look_for_changes()
        return CapturedMicroBatch(
            batch=batch,
            random=micro.random.to_plain(),
            autocast=None if micro.autocast is None else Autocast(*micro.autocast),  # a caller may set a tuple
            factor=self._factor(micro),
            batch_missing=missing,
            changed=list(micro.changed),
            loss=None if micro.loss is None else torch.as_tensor(micro.loss).detach().cpu().clone(),
            norms=norms,
        )

    def _scale(self) -> float:
        return scale_of(self._scaler) or 1.0

    def _factor(self, micro: MicroBatch) -> Tensor | None:
        """Without the scale, which replay applies as well; a scale is a power of two, so nothing is lost."""
        if micro.factor is None:
            return None
        factor = micro.factor.detach().cpu() / self._scale()
        return None if bool((factor == 1).all()) else factor

    def _local_gradients(self) -> dict[str, Tensor] | None:
        """Return those of the last micro-batch, before they were reduced, where they could be kept."""
        arrivals = self._watch.arrivals
        local = arrivals[-1].local() if arrivals else None
        if local is None:
            return None
        named = ((self._watch.names[index], gradient) for index, gradient in local.items())
        return {part: tensor for name, gradient in named for part, tensor in parts_of(name, gradient).items()}


def _environment(device: torch.device) -> dict[str, str | bool | int]:
    values: dict[str, str | bool | int] = {
        "host": socket.gethostname(),
        "machine": platform.machine(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        **switches(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        values["device_name"], values["device_uuid"] = properties.name, str(getattr(properties, "uuid", ""))
    return values | {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}


def plain_ranks(ranks: Iterable[int]) -> tuple[int, ...]:
    """Return them ascending, as plain numbers."""
    return tuple(sorted(map(int, ranks)))
