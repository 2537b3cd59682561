"""Whether the replicas of a data-parallel model are bit-identical; and if not, which rank differs in which element.

`Replicas.compare`, on every rank between the backward pass and the optimizer's step:

1. Parameters, gradients (as reduced) and buffers (as they were when the step began) are cut into at most 32 buckets,
   and a digest of each is gathered, with one of all names, dtypes and shapes. In a sound job that is all.
2. Where names, dtypes or shapes differ, these are gathered in words. Else: the digests of the tensors in the buckets
   that differ.
3. Of the first tensor that differs: the digests of its blocks, again and again until a block is small.
4. The bytes of that block.

Each further round is decided on what was gathered, which is the same everywhere; so no rank goes on alone.

Not compared: what `ignore` names, what DistributedDataParallel was told to ignore, sharded parameters, and the running
statistics of batch norm where nobody broadcasts them. Buffers change within the step, on each rank by itself. So they
are copied when the module's forward pass begins: DistributedDataParallel has broadcast rank 0's by then. After a
forward pass that trained nothing it broadcasts none: then no buffer in it is looked at in this step.

Checked on torch 2.13. Of DistributedDataParallel's internals: ``parameters_to_ignore`` and
``will_sync_module_buffers``; without the first nothing more is ignored, without the second ``broadcast_buffers`` says
whether running statistics count.
"""

from __future__ import annotations

import fnmatch
import hashlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpstats._observe.gradients import ForwardBegins, replicas_in, unwrapped
from ddpstats._observe.torch_compat import buffers_of
from ddpstats._rerun.record import BufferCopies
from ddpstats.sentinel._difference import (
    TensorEntry,
    differ,
    differing_elements,
    differing_structure,
    entry_of,
    gradient_entries,
    tensors_of,
    transposed,
)
from ddpstats.sentinel._digest import bucket_digests
from ddpstats.sentinel._divergence import Divergence
from ddpstats.sentinel._verdict import Gathered

_BUCKETS = 32  # of each part, so that 30 ranks' digests fit into one collective
_BUCKET_BYTES = 1 << 20


class Replicas:
    """Compares ``model`` with its replicas on the other ranks. Changes nothing; draws no random numbers.

    Args:
        model: as it is trained: DistributedDataParallel itself, what has it inside, or a module whose gradients are
            reduced in another way.
        ignore: names of parameters and buffers that may differ between ranks; patterns as in `fnmatch`. The same on
            every rank.

    Attributes:
        warnings: what is not covered, a sentence each.
    """

    def __init__(self, model: nn.Module, ignore: Sequence[str] = ()) -> None:
        self._model, self._ignore = model, tuple(ignore)
        self._inner = unwrapped(model)
        self._units: list[Unit] | None = None
        self.warnings: tuple[str, ...] = _warnings(self._inner)

    def expect(self) -> None:
        """The step that begins will be compared: its first forward pass copies the buffers. Local.

        Without it buffers are left out.
        """
        for unit in self._found_units():
            unit.expect()

    def compare(self, gathered: Gathered) -> Divergence | None:
        """What differs between the ranks; None where all is equal. The same on every rank.

        Collective: every rank must call, after the backward pass that reduces and before the optimizer's step.

        Args:
            gathered: given a function that makes this rank's tree and a name, every rank's tree by global rank.
        """
        with torch.no_grad():
            try:
                return self._compare(gathered)
            finally:
                for unit in self._units or ():
                    unit.forget()

    def close(self) -> None:
        """Take the hooks away. Idempotent."""
        for unit in self._units or ():
            unit.close()
        self._units = None

    def _compare(self, gathered: Gathered) -> Divergence | None:
        parts: dict[str, _Part] = {}

        def summaries() -> dict[str, Any]:
            parts.update(self._parts())
            return {name: part.summary() for name, part in parts.items()}

        trees = gathered(summaries, "replica digests")
        shared = [name for name in parts if all(name in tree for tree in trees.values())]
        if any(differ(tree[name]["signature"] for tree in trees.values()) for name in shared):
            held = [entry for name in shared for entry in parts[name].entries]
            return differing_structure(gathered, held)
        suspects: list[TensorEntry] = []
        for name in shared:
            digests_of = {rank: tree[name]["digests"] for rank, tree in trees.items()}
            for bucket, by_rank in zip(parts[name].buckets, transposed(digests_of), strict=True):
                suspects += bucket if differ(by_rank.values()) else []
        return differing_elements(gathered, suspects) if suspects else None

    def _parts(self) -> dict[str, _Part]:
        """What this rank holds. Buffers are parts by themselves: a rank without a forward pass has no copies."""
        ignored = self._ignored()
        named = [
            (name, parameter)
            for name, parameter in self._inner.named_parameters()
            if id(parameter) not in ignored and not self._is_left_out(name)
        ]
        state = [entry_of("parameter", name, parameter) for name, parameter in named]
        state += [entry for name, parameter in named for entry in gradient_entries(name, parameter)]
        parts = {"state": _Part(state)}
        for number, unit in enumerate(self._found_units()):
            if unit.taken is not None:
                kept = {name: copy for name, copy in unit.taken.items() if not self._is_left_out(name)}
                parts[f"buffers {number}"] = _Part([entry_of("buffer", name, copy) for name, copy in kept.items()])
        return parts

    def _is_left_out(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._ignore)

    def _ignored(self) -> set[int]:
        """Identities of the parameters that are no replicas: sharded, or DDP leaves them alone."""
        ignored = _sharded(self._inner)
        for unit in self._found_units():
            names = unit.ignored()
            ignored.update(id(parameter) for name, parameter in unit.module.named_parameters() if name in names)
        return ignored

    def _found_units(self) -> list[Unit]:
        """Looked for at the first use: DistributedDataParallel may be put around the model after `__init__`."""
        if self._units is None:
            self._units = units_of(self._inner, replicas_in(self._model))
        return self._units


class _Part:
    """Tensors that are compared together."""

    def __init__(self, entries: list[TensorEntry]) -> None:
        self.entries = entries
        self.buckets = _in_buckets([entry for entry in entries if entry.tensor is not None])

    def summary(self) -> dict[str, Any]:
        """Signature and digests, as they are gathered."""
        words = "\n".join(f"{entry.kind} {entry.name} {entry.described}" for entry in self.entries)
        hashed = hashlib.blake2b(words.encode(), digest_size=8).digest()
        found = bucket_digests([tensors_of(bucket) for bucket in self.buckets])
        return {"signature": int.from_bytes(hashed, "little"), "digests": found}


def _in_buckets(entries: Sequence[TensorEntry]) -> list[list[TensorEntry]]:
    """Neighbours, about as many bytes in each. Ranks with one signature cut alike."""
    total_bytes = sum(_size_bytes(entry) for entry in entries)
    full_bytes = max(_BUCKET_BYTES, -(-total_bytes // (_BUCKETS - 1)))
    buckets: list[list[TensorEntry]] = []
    bucket_bytes = full_bytes
    for entry in entries:
        if bucket_bytes >= full_bytes:
            buckets.append([])
            bucket_bytes = 0
        buckets[-1].append(entry)
        bucket_bytes += _size_bytes(entry)
    return buckets


def _size_bytes(entry: TensorEntry) -> int:
    assert entry.tensor is not None
    return entry.tensor.numel() * entry.tensor.element_size()


def _sharded(model: nn.Module) -> set[int]:
    """Identities of the parameters of which each rank holds another part."""
    sharded = {id(one) for one in model.parameters() if hasattr(one, "placements") and hasattr(one, "to_local")}
    # FSDP's first version shards plain tensors. It is there only if the program has loaded it.
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    for module in model.modules():
        if isinstance(module, fsdp):
            sharded.update(map(id, module.parameters()))
    return sharded


def _warnings(model: nn.Module) -> tuple[str, ...]:
    sharded = len(_sharded(model))
    if not sharded:
        return ()
    return (
        f"{sharded} sharded parameter{'s are' if sharded > 1 else ' is'} not covered by the comparison of replicas: "
        "each rank holds another part of them.",
    )


_RUNNING = ("running_mean", "running_var", "num_batches_tracked")


class Unit:
    """A module whose forward pass copies its buffers: the one in a DistributedDataParallel, or the model around them.

    Args:
        prefix: of its names in the model.
        replica: the DistributedDataParallel around it; None where there is none.
        others: what other units see to.

    Attributes:
        taken: name in the model -> copy, of the buffers that must be equal; None where no forward pass came, or no
            broadcast with it.
    """

    def __init__(
        self, prefix: str, module: nn.Module, replica: DistributedDataParallel | None, others: Sequence[nn.Module] = ()
    ) -> None:
        self.module = module
        self._prefix, self._replica, self._others = prefix, replica, others
        self._buffers: BufferCopies | None = None
        self.taken: dict[str, Tensor] | None = None
        self._handle: Any = None

    def ignored(self) -> set[str]:
        """Names in ``module`` that DistributedDataParallel leaves alone."""
        return set(getattr(self._replica, "parameters_to_ignore", None) or ())

    def expect(self) -> None:
        """The next forward pass copies the buffers. Only until then there is a hook: compiled modules mind them."""
        self.forget()
        self._handle = self.module.register_forward_pre_hook(
            ForwardBegins(self.module, self, Unit._about_to_run, self._replica is not None), prepend=True
        )

    def forget(self) -> None:
        self.taken = None
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def close(self) -> None:
        self.forget()
        if self._buffers is not None:
            self._buffers.close()
            self._buffers = None

    def _about_to_run(self) -> None:
        self.forget()
        if any(nn.parameter.is_lazy(buffer) for buffer in self.module.buffers()) or self._misses_its_broadcast():
            return
        if self._buffers is None:
            self._buffers = BufferCopies(self.module)
        left_out = self.ignored() | self._others_names()
        if self._replica is None or not self._replica.broadcast_buffers:
            left_out |= running_names(self.module)
        copies = self._buffers.take()
        self.taken = {self._prefix + name: copy for name, copy in copies.items() if name not in left_out}

    def _misses_its_broadcast(self) -> bool:
        """After a forward pass that trained nothing: each rank has changed its buffers by itself."""
        if self._replica is None or not self._replica.broadcast_buffers:
            return False
        will_sync = getattr(self._replica, "will_sync_module_buffers", None)
        return will_sync is not None and not will_sync()

    def _others_names(self) -> set[str]:
        theirs = {id(buffer) for module in self._others for buffer in module.buffers()}
        return {name for name, buffer in self.module.named_buffers() if id(buffer) in theirs}


def units_of(model: nn.Module, replicas: Sequence[DistributedDataParallel]) -> list[Unit]:
    prefixes = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
    units = [Unit(prefixes.get(id(one.module), ""), one.module, one) for one in replicas]
    if all(unit.module is not model for unit in units):
        units.append(Unit("", model, None, [unit.module for unit in units]))
    return units


def running_names(module: nn.Module) -> set[str]:
    """Batch norm's running statistics, which each rank has of its own data; SyncBatchNorm's are of all ranks'."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, owner in module.named_modules()
        if "running_mean" in buffers_of(owner) and not isinstance(owner, nn.SyncBatchNorm)
        for name in _RUNNING
    }
