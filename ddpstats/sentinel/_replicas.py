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
are copied when the module's forward pass begins: DistributedDataParallel has broadcast rank 0's by then.
"""

from __future__ import annotations

import fnmatch
import hashlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ddpstats._observe.gradients import replicas_in, unwrapped
from ddpstats.sentinel._buffers import Unit, units_of
from ddpstats.sentinel._difference import differ, differing_elements, differing_structure, transposed
from ddpstats.sentinel._digest import bucket_digests
from ddpstats.sentinel._divergence import Divergence, divergence
from ddpstats.sentinel._entries import TensorEntry, entry_of, gradient_entries, tensors_of
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

    def compare(self, gathered: Gathered, step: int) -> Divergence | None:
        """What differs between the ranks; None where all is equal. The same on every rank.

        Collective: every rank must call, after the backward pass that reduces and before the optimizer's step.

        Args:
            gathered: given a function that makes this rank's tree and a name, every rank's tree by global rank.
            step: for the message.
        """
        with torch.no_grad():
            try:
                return self._compare(gathered, step)
            finally:
                self._forget()

    def close(self) -> None:
        """Take the hooks away. Idempotent."""
        for unit in self._units or ():
            unit.close()
        self._units = None

    def _compare(self, gathered: Gathered, step: int) -> Divergence | None:
        parts: dict[str, _Part] = {}

        def summaries() -> dict[str, Any]:
            parts.update(self._parts())
            return {name: part.summary() for name, part in parts.items()}

        trees = gathered(summaries, "replica digests")
        shared = [name for name in parts if all(name in tree for tree in trees.values())]
        if any(differ(tree[name]["signature"] for tree in trees.values()) for name in shared):
            held = [entry for name in shared for entry in parts[name].entries]
            return divergence(step, differing_structure(gathered, held))
        suspects: list[TensorEntry] = []
        for name in shared:
            digests_of = {rank: tree[name]["digests"] for rank, tree in trees.items()}
            for bucket, by_rank in zip(parts[name].buckets, transposed(digests_of), strict=True):
                suspects += bucket if differ(by_rank.values()) else []
        return divergence(step, differing_elements(gathered, suspects)) if suspects else None

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
            taken = unit.taken()
            if taken is not None:
                kept = [entry_of("buffer", name, copy) for name, copy in taken.items() if not self._is_left_out(name)]
                parts[f"buffers {number}"] = _Part(kept)
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

    def _forget(self) -> None:
        for unit in self._units or ():
            unit.forget()


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
    for module in _fully_sharded(model):
        sharded.update(map(id, module.parameters()))
    return sharded


def _fully_sharded(model: nn.Module) -> Iterator[nn.Module]:
    """FSDP's first version shards plain tensors. It is there only if the program has loaded it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FullyShardedDataParallel", None)
    return (module for module in model.modules() if kind is not None and isinstance(module, kind))


def _warnings(model: nn.Module) -> tuple[str, ...]:
    sharded = len(_sharded(model))
    if not sharded:
        return ()
    return (
        f"{sharded} sharded parameter{'s are' if sharded > 1 else ' is'} not covered by the comparison of replicas: "
        "each rank holds another part of them.",
    )
