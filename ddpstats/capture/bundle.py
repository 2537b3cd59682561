"""A capture on disk: what a rank's files hold, how they are read without executing anything, and how they are written.

A bundle holds ``rank<rank>.safetensors`` of each rank, a `RankPart`; ``model.safetensors`` with the parameters, a
`ModelPart`, or a ``model-rank<rank>.safetensors`` of each rank whose parameters differ or are shards; and
MANIFEST.json, which is written last. Every file appears complete or not at all.

1. `Bundle` checks of each file that it is no link, its size and its SHA-256; then the codec checks the rest.
2. `PartSource` makes one rank's part of the step, and its parameters or shards, as they were before the step.
3. `BundleWriter`: all ranks say how large their parts are; the lowest one makes a directory; each writes its files; the
   lowest one writes the manifest. Each rank works in a thread and reports in rounds, so that a file system may take
   longer than the timeout of a collective, but not for ever. Whatever fails is in the manifest ("complete": false) and
   in the verdict, which says stop, on all ranks. Where a rank dies before there is a manifest, the lowest one left
   writes it before `RankMissing`.
4. `BundleWriter.write_alone`: a rank that raised in its micro-batch takes these steps without the others.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import msgspec
import torch
from torch import Tensor

from ddpstats._base import config
from ddpstats._base.files import make_private_directory, replace_file
from ddpstats._base.text import count_of, first_line, ranks_text
from ddpstats._base.version import __version__
from ddpstats._observe.gradient_norms import norm_kind, parts_of
from ddpstats._observe.gradients import GradientWatch
from ddpstats._ranks.calls import Channel
from ddpstats._ranks.device import bytes_in
from ddpstats._ranks.gather import gather_trees, is_ordinary
from ddpstats._rerun import codec
from ddpstats._rerun.codec import CannotStore, to_plain
from ddpstats._rerun.record import MicroBatch, Packet, StepRecord, scale_of, tensor_bytes
from ddpstats._rerun.state import Autocast, switches
from ddpstats.capture.manifest import (
    BUNDLE_NAME,
    MANIFEST,
    Manifest,
    RankNumber,
    StepNumber,
    Written,
    bundle_name,
    bundles_in,
    model_file,
    new_directory,
    open_own,
    prune,
    rank_file,
    read_manifest,
    summarize,
    write_manifest,
)
from ddpstats.capture.verdict import CaptureVerdict
from ddpstats.errors import BundleError, RankMissing

T = TypeVar("T")

_log = logging.getLogger("ddpstats")

_ROUND_SEC = 5.0
_MAX_SEC = 1800.0  # that a rank's part of the work on a bundle may take


# -- the content ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CapturedMicroBatch(Packet):
    """One forward and backward pass.

    Attributes:
        batch_missing: why the batch is missing, or None.
        changed: paths of what was changed in place after the batch was taken.
        loss: what was differentiated, without the scale.
        norms: of the gradients accumulated so far, in the order of `RankPart.parameter_names`, -1 without a
            gradient; None if no backward pass ran.
    """

    batch_missing: str | None
    changed: list[str]
    loss: Tensor | None
    norms: Tensor | None


@dataclass(frozen=True)
class RankPart:
    """One rank's step. ``rank`` is its global number, ``world_size`` the number of ranks in the group."""

    rank: RankNumber
    world_size: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    step: StepNumber
    device: str
    micro_batches: tuple[CapturedMicroBatch, ...]
    buffers: dict[str, Tensor]
    eval_modules: list[str]
    frozen: list[str]
    norm: Annotated[str, msgspec.Meta(pattern="^(2|inf)$")]
    gradients: dict[str, Tensor] | None
    parameter_names: list[str]
    scale: float
    error: str | None
    environment: dict[str, str | bool | int]

    def __post_init__(self) -> None:
        count = len(self.parameter_names)
        for micro in self.micro_batches:
            if micro.norms is not None and (micro.norms.dtype, micro.norms.shape) != (torch.float64, (count,)):
                raise ValueError(f"norms: {count} in float64 are expected")


@dataclass(frozen=True)
class Shard:
    """The position of a tensor in its parameter, which has ``shape``."""

    shape: list[int]
    offsets: list[int]


@dataclass(frozen=True)
class ModelPart:
    """Parameters by name. Those in ``shards`` are one rank's shard of the parameter."""

    parameters: dict[str, Tensor]
    shards: dict[str, Shard] = field(default_factory=dict)


# -- reading ----------------------------------------------------------------------------------------------------------


class Bundle:
    """A capture that was opened. Only the manifest has been read.

    Attributes:
        path: the bundle's directory.
        manifest: its manifest.
        notes: what its user should know.
    """

    def __init__(self, path: Path, manifest: Manifest, notes: Iterable[str] = ()) -> None:
        self.path = path
        self.manifest = manifest
        self.notes = tuple(notes)

    @classmethod
    def open(cls, path: str | Path) -> Bundle:
        """Open a bundle (or its manifest), or the newest complete one in a directory of bundles. Local.

        Raises `BundleError` for a path that is neither, and for a manifest that is not one.
        """
        path = Path(path)
        if path.name == MANIFEST and not path.is_dir():
            path = path.parent
        is_bundle = os.path.lexists(path / MANIFEST) or BUNDLE_NAME.fullmatch(path.resolve().name) is not None
        if path.is_dir() and not is_bundle:
            return cls._newest(path)
        manifest = read_manifest(path)
        return cls(path, manifest, _incomplete_notes(manifest))

    @classmethod
    def _newest(cls, path: Path) -> Bundle:
        bundles = bundles_in(path)
        complete = [(bundle, manifest) for bundle, manifest in bundles if manifest is not None and manifest.complete]
        if not bundles:
            raise BundleError(
                f"{path} is not a bundle, and holds none: it has no {MANIFEST} and no capture-...-step... Give the "
                "directory that NaNCapture was given; it is filled when a gradient is not finite."
            )
        if not complete:
            names = ", ".join(bundle.name for bundle, _ in bundles[-4:])
            raise BundleError(f"{path} holds no complete bundle; incomplete: {names}. Name one of them to use it.")
        note = f"{path} holds {count_of(len(bundles), 'bundles')}; this is the newest complete one"
        return cls(*complete[-1], [note])

    def rank_part(self, rank: int) -> RankPart:
        """Return one rank's step. Raises `BundleError`."""
        if rank not in self.manifest.ranks_present:
            why = self.manifest.missing.get(rank, f"there are those of {ranks_text(self.manifest.ranks_present)}")
            raise BundleError(f"{self.path} has no part of rank {rank}: {why}")
        part = self._load(rank_file(rank), RankPart)
        if (part.rank, part.world_size) != (rank, len(self.manifest.ranks)):
            raise BundleError(
                f"{self.path / rank_file(rank)} is of rank {part.rank} of {part.world_size}, and the manifest says "
                f"rank {rank} of {len(self.manifest.ranks)}; the bundle is damaged or hostile"
            )
        return part

    def parameters(self, rank: int) -> dict[str, Tensor]:
        """Return the parameters as ``rank`` had them; shards of all ranks are joined. Raises `BundleError`."""
        name = self.manifest.model_files.get(rank)
        if name is None:
            present = ", ".join(map(str, self.manifest.model_files)) or "none"
            why = "; ".join(self.manifest.notes) or "they were not written"
            advice = f"There are those of rank: {present}"
            raise BundleError(f"{self.path} has no parameters of rank {rank}: {why}. {advice}")
        part = self._load(name, ModelPart)
        if not part.shards:
            return part.parameters
        files = dict.fromkeys(file for file in self.manifest.model_files.values() if file != name)
        return _join([part, *(self._load(file, ModelPart) for file in files)], str(self.path))

    def _load(self, name: str, kind: type[T]) -> T:
        path, expected = self.path / name, self.manifest.files[name]
        advice = "copy the bundle again, from where it was written"
        with open_own(self.path, name) as file:
            before = os.fstat(file.fileno())
            if before.st_size != expected.bytes:
                text = f"{before.st_size} bytes and the manifest says {expected.bytes}: it is cut, or another"
                raise BundleError(f"{path} has {text}; {advice}")
            written = summarize(file)
            if written != expected:
                text = f"the SHA-256 {written.sha256}, the manifest says {expected.sha256}"
                raise BundleError(f"{path} has {text}; {advice}")
            content = codec.read(file, kind, str(path))
            after = os.fstat(file.fileno())
        if (after.st_mtime_ns, after.st_ctime_ns) != (before.st_mtime_ns, before.st_ctime_ns):
            raise BundleError(f"{path} was changed while it was read; nothing of it is used. Read it again.")
        return content


def _join(parts: list[ModelPart], where: str) -> dict[str, Tensor]:
    """Return whole parameters. Of shards at the same offsets, as of replicas, the first one counts."""
    pieces: dict[str, dict[tuple[int, ...], tuple[Shard, Tensor]]] = {}
    joined: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.parameters.items():
            shard = part.shards.get(name)
            if shard is None:
                joined.setdefault(name, tensor)
            else:
                pieces.setdefault(name, {}).setdefault(tuple(shard.offsets), (shard, tensor))
    for name, shards in pieces.items():
        try:
            joined[name] = _whole(list(shards.values()))
        except (ValueError, RuntimeError, TypeError, IndexError) as error:
            raise BundleError(f"{where}: the shards of {name} do not fit together: {first_line(error)}") from None
    return joined


def _whole(shards: list[tuple[Shard, Tensor]]) -> Tensor:
    """Return the parameter. Raises one of some errors of Python and torch for shards that no capture wrote."""
    (first, tensor), *_ = shards
    if sum(tensor.numel() for _, tensor in shards) != math.prod(first.shape):
        raise ValueError("shards of some ranks are missing")
    whole = torch.zeros(first.shape, dtype=tensor.dtype)
    for shard, tensor in shards:
        region = whole[
            tuple(slice(start, start + size) for start, size in zip(shard.offsets, tensor.shape, strict=False))
        ]
        if region.shape != tensor.shape:
            raise ValueError("a shard exceeds the parameter's shape; the bundle is damaged or hostile")
        region.copy_(tensor)
    return whole


def _incomplete_notes(manifest: Manifest) -> list[str]:
    if manifest.complete:
        return []
    reasons = "; ".join([*(f"rank {rank}: {why}" for rank, why in manifest.missing.items()), *manifest.notes])
    return [f"the bundle is incomplete, what is there is used ({reasons[:1000]})"]


# -- what is written --------------------------------------------------------------------------------------------------


class PartSource:
    """Makes the parts. Local: of a sharded parameter each rank has its own shard, and nothing is gathered."""

    def __init__(self, watch: GradientWatch, record: StepRecord, scaler: Any, store_batch: bool) -> None:
        self._watch, self._record = watch, record
        self._scaler, self._store_batch = scaler, store_batch

    def sizes(self) -> dict[str, int]:
        """Return the bytes of this rank's part and of its parameters."""
        batches = [micro.batch for micro in self._record.micro_batches if self._store_batch]
        rank = tensor_bytes([batches, self._record.buffers, self._local_gradients()])
        return {"rank": rank, "model": tensor_bytes(self.model_part().parameters)}

    def digest(self) -> str:
        """Return a hash of every bit of the parameters, the same on replicas; empty where one has no memory."""
        part = self.model_part()
        if not all(map(is_ordinary, part.parameters.values())):
            return ""
        digest = hashlib.blake2b(digest_size=16)
        for name, tensor in part.parameters.items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {part.shards.get(name)}".encode())
            digest.update(bytes_in(tensor.cpu()))
        return digest.hexdigest()

    def model_part(self) -> ModelPart:
        """Return the parameters themselves, or this rank's shards."""
        part = ModelPart({})
        for name, parameter in zip(self._watch.names, self._watch.parameters, strict=True):
            tensor = parameter.detach()
            if not hasattr(tensor, "to_local"):
                part.parameters[name] = tensor
                continue
            local, offsets = tensor.to_local(), list[int]()
            if local.numel():
                (chunk,) = getattr(tensor, "__create_chunk_list__")()  # noqa: B009  torch's protocol for distributed checkpoints
                part.parameters[name], offsets = local, list(chunk.offsets)
            part.shards[name] = Shard(list(tensor.shape), offsets)  # also of a rank that has no element of it
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
            environment={"host": socket.gethostname(), "torch": str(torch.__version__), **switches()},
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
        """Return the trainer's factor without the scale, which replay applies, and which is a power of two."""
        if micro.factor is None:
            return None
        factor = micro.factor.detach().cpu() / self._scale()
        return None if bool((factor == 1).all()) else factor

    def _local_gradients(self) -> dict[str, Tensor] | None:
        """Return those of the last micro-batch, before they were reduced, where they could be kept."""
        arrivals = self._watch.arrivals
        local = arrivals[-1].own_gradients() if arrivals else None
        if local is None:
            return None
        named = ((self._watch.names[index], gradient) for index, gradient in local.items())
        return {part: tensor for name, gradient in named for part, tensor in parts_of(name, gradient).items()}


def write_part(directory: Path, name: str, content: RankPart | ModelPart) -> Written:
    """Write one file of a bundle, atomically. Raises OSError, also for a full disk."""

    def write(file: BinaryIO) -> Written:
        codec.write(file, content)
        return summarize(file)

    return replace_file(directory / name, write, private=True)


def close_bundle(
    directory: Path,
    keep: int,
    files: dict[str, Written],
    ranks: tuple[int, ...],
    model_files: dict[int, str],
    missing: dict[int, str],
    **verdict: Any,
) -> None:
    """Write the manifest of these files, and remove old bundles. An incomplete bundle removes no older one.

    Args:
        files: what was written; a rank, or a file of parameters, that is not in it is not in the bundle.
        ranks, model_files, missing, verdict: fields of `Manifest`.
    """
    manifest = Manifest(
        ranks=ranks,
        complete=not missing and not verdict.get("notes"),
        files=files,
        ranks_present=tuple(rank for rank in ranks if rank_file(rank) in files),
        model_files={rank: name for rank, name in model_files.items() if name in files},
        missing=missing,
        versions={"ddpstats": __version__, "torch": str(torch.__version__), "python": sys.version.split()[0]},
        **verdict,
    )
    write_manifest(directory, manifest)
    if manifest.complete or manifest.reason == "exception":  # which is one rank's alone, and counts with its others
        prune(directory.parent, keep, directory)


# -- how it is written ------------------------------------------------------------------------------------------------


def gather_when_done(work: Callable[[], Any], late: Any, *, name: str, group: Any) -> list[Any]:
    """Return what each rank's ``work`` returned, in the order of group ranks. Collective.

    Ranks report in rounds while some rank is at work: it may take longer than the timeout. ``work`` runs in a thread;
    of a rank on which it has not ended after half an hour, ``late`` is returned. What it raises becomes `InvalidStats`
    on every rank.
    """
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="ddpstats-bundle", daemon=True)
    thread.start()
    deadline = time.monotonic() + _MAX_SEC
    round_sec = min(_ROUND_SEC, config.timeout_sec(None) / 4)

    def answer() -> list[Any]:
        if thread.is_alive():
            return [late] if time.monotonic() > deadline else []
        if errors:
            raise errors[0]
        return list(results)

    try:
        while True:
            thread.join(round_sec)
            answers = gather_trees(answer, name=name, group=group)
            if all(answers):
                return [result for (result,) in answers]
    except RankMissing:
        thread.join(config.timeout_sec(None))  # what it has written by then counts
        raise


class BundleWriter:
    """Writes one bundle: of all ranks together, or of one rank alone, which raised in its micro-batch.

    Together, every rank calls `write`, then `finish`, and `amend` where the cause is known later. A rank alone calls
    `write_alone`.

    Args:
        dirpath, keep, max_bytes, group: as `NaNCapture` has them.
        channel: of the group; its ranks have a part each.
        source: this rank's part: its weights, batch and random state.
        finding: the verdict of all ranks; alone, ``step``, ``culprit_ranks`` and ``message`` count.

    Attributes:
        directory: of the bundle; None if it would be too large, or could not be made.
        model_writers: rank -> the rank that writes its parameters, bit for bit.
    """

    def __init__(
        self,
        dirpath: Path,
        keep: int,
        max_bytes: int | None,
        group: Any,
        channel: Channel,
        source: PartSource,
        finding: CaptureVerdict,
    ) -> None:
        self._dirpath, self._keep, self._max_bytes = dirpath, keep, max_bytes
        self._group, self._source, self._finding = group, source, finding
        self._ranks, self._rank, self._lowest = tuple(map(int, channel.ranks)), int(channel.rank), min(channel.ranks)
        self._when = datetime.now(timezone.utc)
        self._fields: dict[str, Any] = {  # of the manifest: what is known before anything is written
            "reason": finding.kind,
            "step": finding.step,
            "created_utc": self._when.isoformat(),
            "culprit_ranks": tuple(map(int, finding.culprit_ranks)),
            "parameters": {int(rank): list(names) for rank, names in finding.by_rank.items()},
        }
        self._unwritten, self._is_too_large = "", False  # why there is no bundle
        self._mine: dict[str, Any] = {"files": {}, "error": None}
        self._results: dict[int, dict[str, Any]] = {}
        self.directory: Path | None = None
        self.model_writers = {self._rank: self._rank}  # until `write` has asked all ranks
        self._model_files = {self._rank: model_file(self._rank)}

    # -- together -----------------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Write this rank's files, and gather what the others wrote. Collective."""
        late_sizes = {"rank": 0, "model": 0, "digest": ""}
        source = self._source
        held = self._gather(lambda: {**source.sizes(), "digest": source.digest()}, "what each rank holds", late_sizes)
        first: dict[str, int] = {}  # the lowest of the ranks whose parameters have the same bits writes them
        self.model_writers = {
            rank: first.setdefault(held[rank]["digest"] or f"rank {rank}", rank) for rank in sorted(held)
        }
        self._model_files = {
            rank: "model.safetensors" if writer == self._lowest else model_file(writer)
            for rank, writer in self.model_writers.items()
        }
        needed = sum(answer["rank"] for answer in held.values()) + sum(held[rank]["model"] for rank in first.values())
        if self._exceeds_max_bytes(needed):
            return
        late = ["", f"the file system did not answer rank {self._lowest} for {_MAX_SEC:.0f} s."]
        work = self._name_directory if self._rank == self._lowest else list
        name, self._unwritten = self._gather(work, "the bundle's directory", late)[self._lowest]
        if not name:
            return
        self.directory = self._dirpath / name
        late_part = {"files": {}, "error": f"its part was not written within {_MAX_SEC:.0f} s"}
        self._results = self._gather(self._write_files, "the bundle's parts", late_part)

    def lines(self) -> tuple[str, ...]:
        """Return the lines of the verdict about the bundle."""
        if self.directory is None:
            return (f"No bundle was written: {self._unwritten}",)
        missing = self._find_missing()
        if not missing:
            return (
                f"Bundle: {self.directory}",
                f"Replay it: ddpstats replay {self.directory} --model PKG:FACTORY --step PKG:FN --bisect",
            )
        return (f"The bundle is incomplete: {self.directory}", *_rank_lines(missing))

    def finish(self, verdict: CaptureVerdict) -> CaptureVerdict:
        """Write the manifest, remove old bundles. Collective. An incomplete bundle is a reason to stop."""
        if self.directory is None:
            return verdict if self._is_too_large else _stop_run(verdict)
        problem = self._manifest_with(verdict.message)
        return _stop_run(verdict, problem) if problem or self._find_missing() else verdict

    def amend(self, verdict: CaptureVerdict) -> CaptureVerdict:
        """Return ``verdict``, whose message replaces the one in the manifest. Collective."""
        problem = "" if self.directory is None else self._manifest_with(verdict.message)
        if problem and self._rank == self._lowest:
            _log.warning("%s: the manifest lacks the cause: %s", self.directory, problem)
        return verdict

    def _manifest_with(self, message: str) -> str:
        """Return what is wrong with the bundle, on every rank. Collective."""
        late = f"The bundle's manifest was not written within {_MAX_SEC:.0f} s."
        work = partial(self._write_manifest, message) if self._rank == self._lowest else str
        problems: dict[int, str] = self._gather(work, "the bundle's manifest", late)
        return problems[self._lowest]

    def _gather(self, work: Callable[[], Any], what: str, late: Any) -> dict[int, Any]:
        try:
            answers = gather_when_done(work, late, name=f"NaNCapture.check: {what}", group=self._group)
        except RankMissing as error:
            self._finish_without(error)
            raise
        return dict(zip(self._ranks, answers, strict=True))

    def _name_directory(self) -> list[str]:
        """Return the new directory's name, and why it could not be made. Never raises."""
        try:
            return [self._make_directory().name, ""]
        except Exception as error:
            advice = "Give NaNCapture a directory that this rank may write to."
            return ["", f"rank {self._rank} could not make a directory in {self._dirpath}: {_words(error)}. {advice}"]

    def _write_files(self) -> dict[str, Any]:
        """Return what this rank wrote, or why not. Never raises: the others must learn of it."""
        assert self.directory is not None
        try:
            make_private_directory(self.directory)
            part = self._source.rank_part(self._rank, len(self._ranks), self._finding.step)
            self._write_file(self.directory, rank_file(self._rank), part)
            if self.model_writers[self._rank] == self._rank:
                self._write_file(self.directory, self._model_files[self._rank], self._source.model_part())
        except Exception as error:
            self._mine["error"] = _words(error)
        return self._mine

    def _finish_without(self, error: RankMissing) -> None:
        """Write a manifest that is not there yet on the lowest rank left, with what it knows: a rank died."""
        living = [rank for rank in self._ranks if rank not in error.missing_ranks]
        if (
            self.directory is None
            or self._rank != min(living, default=None)
            or os.path.lexists(self.directory / MANIFEST)
        ):
            return
        reasons = dict.fromkeys(living, "not known: it could not say any more what it wrote")
        reasons |= dict.fromkeys(error.missing_ranks, "did not write its part")
        unknown = {rank: {"files": {}, "error": reason} for rank, reason in reasons.items()}
        self._results = self._results or {**unknown, self._rank: self._mine}
        problem = self._write_manifest(f"{self._finding.message}\n{error}")
        if problem:
            _log.warning("%s", problem)

    # -- alone --------------------------------------------------------------------------------------------------------

    def write_alone(self, error: Exception, announce: Callable[[Path], object]) -> str:
        """Write what this rank has of the step in which it raised; the others stop meanwhile. Return a line about it.

        Local. Never raises: the program's own error must come through.

        Args:
            error: what was raised.
            announce: names the bundle to the other ranks; called before the parameters are written, which takes long.
        """
        why_not = _attempt(lambda: self._write_step_alone(_words(error)))
        directory = self.directory
        if directory is None:
            return f"ddpstats: the state of this step could not be written: {why_not}"
        announce(directory)
        left_out = _attempt(lambda: self._write_parameters_alone(directory))
        self._fields |= {"reason": "exception", "notes": [left_out] if left_out else []}
        no_part = {"files": {}, "error": f"this bundle is rank {self._rank}'s alone: it raised"}
        self._results = {**dict.fromkeys(self._ranks, no_part), self._rank: self._mine}
        problem = self._write_manifest(self._finding.message)
        if problem:
            _log.warning("%s", problem)
            return f"ddpstats: {problem}"
        without = f" (without parameters: {left_out})" if left_out else ""
        return f"ddpstats: the state of this step: {directory}{without}"

    def _write_step_alone(self, error: str) -> str:
        """Write batch, random state and buffers into a new directory. Return why not, or nothing."""
        if self._exceeds_max_bytes(sum(self._source.sizes().values())):
            return self._unwritten
        part = self._source.rank_part(self._rank, len(self._ranks), self._finding.step, error)
        directory = self._make_directory(self._rank)
        try:
            self._write_file(directory, rank_file(self._rank), part)
        except BaseException:
            directory.rmdir()
            raise
        self.directory = directory
        return ""

    def _write_parameters_alone(self, directory: Path) -> str:
        """Write the parameters into the directory. Return why not, or nothing."""
        part = self._source.model_part()
        if part.shards:
            return "they are sharded, and one rank alone cannot gather them"
        self._write_file(directory, self._model_files[self._rank], part)
        return ""

    # -- steps of both ------------------------------------------------------------------------------------------------

    def _exceeds_max_bytes(self, needed: int) -> bool:
        if self._max_bytes is None or needed <= self._max_bytes:
            return False
        self._unwritten = f"it would take {needed} bytes, and max_bytes is {self._max_bytes}."
        self._is_too_large = True
        return True

    def _make_directory(self, rank: int | None = None) -> Path:
        """Make the bundle's directory, with the name of ``rank`` if it writes alone. Raises OSError."""
        return new_directory(self._dirpath, bundle_name(self._finding.step, self._when, rank))

    def _write_file(self, directory: Path, name: str, content: RankPart | ModelPart) -> None:
        self._mine["files"][name] = asdict(write_part(directory, name, content))

    def _find_missing(self) -> dict[int, str]:
        """Return rank -> why its part is missing."""
        missing = {rank: result["error"] for rank, result in self._results.items() if result["error"] is not None}
        for rank in self._results.keys() - missing.keys():
            writer = self.model_writers[rank]
            if self._results[writer]["error"] is not None:
                missing[rank] = f"the module's parameters were to be written by rank {writer}"
        return missing

    def _write_manifest(self, message: str) -> str:
        """Write the manifest, and return what is wrong with the bundle. Never raises."""
        assert self.directory is not None
        try:
            unseen = self._write_manifest_of(self.directory, message)
        except Exception as error:
            return f"The bundle's manifest could not be written: {_words(error)}"
        return "\n".join([f"The bundle is incomplete: {self.directory}", *_rank_lines(unseen)]) if unseen else ""

    def _write_manifest_of(self, directory: Path, message: str) -> dict[int, str]:
        """Write the manifest, and return why parts are missing that other ranks believe to be there."""
        files, unseen = dict[str, Written](), dict[int, str]()
        for rank, result in self._results.items():
            for name, entry in result["files"].items():
                if (directory / name).exists():
                    files[name] = Written(**entry)
                else:
                    unseen[rank] = f"rank {self._rank} does not see its files: all ranks need one file system"
        missing = {**self._find_missing(), **unseen}
        fields = {**self._fields, "message": message}
        close_bundle(directory, self._keep, files, self._ranks, self._model_files, missing, **fields)
        return unseen


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _rank_lines(by_rank: dict[int, str]) -> list[str]:
    return [f"  rank {rank}: {why}" for rank, why in sorted(by_rank.items())]


def _stop_run(verdict: CaptureVerdict, problem: str = "") -> CaptureVerdict:
    lines = [verdict.message, problem, "A bundle that is not complete stops the run, whatever on_nonfinite says."]
    return replace(verdict, should_stop=True, should_skip=True, message="\n".join(filter(None, lines)))


def _attempt(work: Callable[[], str]) -> str:
    """Return what ``work`` returned, or what it raised, in words."""
    try:
        return work()
    except Exception as error:
        _log.warning("the state of the step that raised could not be written", exc_info=error)
        return _words(error)
