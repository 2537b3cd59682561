"""A capture on disk: written by one rank or by many, and read without executing anything.

Written: one ``rank<rank>.safetensors`` per rank; the parameters once (``model.safetensors``), or a file
``model-rank<rank>.safetensors`` for each rank whose parameters differ or are shards; MANIFEST.json last. Every file
appears complete or not at all.

1. `BundleWriter`: all ranks say how large their parts are; the lowest one makes a directory; each writes its files; the
   lowest one writes the manifest. Each rank works in a thread and reports in rounds, so that a file system may take
   longer than the timeout of a collective. Whatever fails is in the manifest ("complete": false) and in the verdict,
   which says stop, on all ranks. Where a rank dies, the lowest one left writes that manifest before `RankMissing`.
2. `AloneBundle`: a rank that raised in its micro-batch writes without the others.
3. `Bundle` checks of each file that it is no link, its size and its SHA-256; then the codec checks the rest.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor

from ddpstats._base import config
from ddpstats._base.files import make_private_directory, replace_file
from ddpstats._base.text import count_of
from ddpstats._base.version import __version__
from ddpstats._ranks.calls import Channel
from ddpstats._ranks.gather import gather_trees
from ddpstats._rerun import codec
from ddpstats.capture.manifest import (
    BUNDLE_NAME,
    MANIFEST,
    Manifest,
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
from ddpstats.capture.parts import ModelPart, PartSource, RankPart, Shard, plain_ranks
from ddpstats.capture.verdict import CaptureVerdict
from ddpstats.errors import BundleError, RankMissing

T = TypeVar("T")

_log = logging.getLogger("ddpstats")

NO_PARAMETERS = "parameters: "
"""How a manifest's note begins that says why there is no file with them."""

_ROUND_SEC = 5.0


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
            present = ", ".join(map(str, self.manifest.ranks_present[:16])) or "none"
            why = self.manifest.missing.get(rank, f"it was not written; ranks that are there: {present}")
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
            raise BundleError(self._why_no_parameters(rank))
        part = self._load(name, ModelPart)
        if not part.shards:
            return part.parameters
        others = dict.fromkeys(other for other in self.manifest.model_files.values() if other != name)
        return _joined([part, *(self._load(other, ModelPart) for other in others)], str(self.path))

    def _why_no_parameters(self, rank: int) -> str:
        why = "".join(f" ({note})" for note in self.manifest.notes if note.startswith(NO_PARAMETERS))
        others = ", ".join(map(str, list(self.manifest.model_files)[:16]))
        advice = f"use one of rank {others}" if others else "it cannot be replayed; its batch and error can be read"
        return f"{self.path} has no file with the parameters of rank {rank}{why}; {advice}"

    def _load(self, name: str, kind: type[T]) -> T:
        path = self.path / name
        with open_own(self.path, name) as file, _unchanged(path, file):
            _check_content(path, file, self.manifest.files[name])
            return codec.read(file, kind, str(path))


def _joined(parts: list[ModelPart], where: str) -> dict[str, Tensor]:
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
        (shape, dtype), *_ = [(shard.shape, tensor.dtype) for shard, tensor in shards.values()]
        if sum(tensor.numel() for _, tensor in shards.values()) != math.prod(shape):
            raise BundleError(f"{where}: the shards of {name} do not make a whole one; some rank's are missing")
        joined[name] = torch.zeros(shape, dtype=dtype)
        for offsets, (_, tensor) in shards.items():
            places = zip(offsets, tensor.shape, strict=False)
            region = joined[name][tuple(slice(start, start + size) for start, size in places)]
            if region.shape != tensor.shape:
                raise BundleError(f"{where}: a shard of {name} lies outside of it; the bundle is damaged or hostile")
            region.copy_(tensor)
    return joined


def _check_content(path: Path, file: BinaryIO, said: Written) -> None:
    size = os.fstat(file.fileno()).st_size
    advice = "copy the bundle again, from where it was written"
    if size != said.bytes:
        raise BundleError(
            f"{path} has {size} bytes and the manifest says {said.bytes}: it is cut, or another; {advice}"
        )
    found = summarize(file)
    if found != said:
        raise BundleError(f"{path} has the SHA-256 {found.sha256}, the manifest says {said.sha256}; {advice}")


@contextlib.contextmanager
def _unchanged(path: Path, file: BinaryIO) -> Iterator[None]:
    """Raise `BundleError` if the file is changed meanwhile: what was checked is what is used."""
    before = os.fstat(file.fileno())
    yield
    after = os.fstat(file.fileno())
    if (after.st_mtime_ns, after.st_ctime_ns) != (before.st_mtime_ns, before.st_ctime_ns):
        raise BundleError(f"{path} was changed while it was read; nothing of it is used. Read it again.")


def _incomplete_notes(manifest: Manifest) -> list[str]:
    if manifest.complete:
        return []
    missing = [f"rank {rank}: {why}" for rank, why in list(manifest.missing.items())[:8]]
    reasons = "; ".join([*missing, *manifest.notes[:8]]) or "no reason is given"
    return [f"the bundle is incomplete, what is there is used ({reasons})"]


# -- writing ----------------------------------------------------------------------------------------------------------


def write_part(directory: Path, name: str, content: RankPart | ModelPart) -> Written:
    """Write one file of a bundle, atomically. Raises OSError, also for a full disk."""

    def write(file: BinaryIO) -> Written:
        codec.write(file, content)
        return summarize(file)

    return replace_file(directory / name, write, private=True)


def manifest_of(
    reason: Any,
    step: int,
    when: datetime,
    ranks: Iterable[int],
    files: dict[str, Written],
    *,
    culprit_ranks: Iterable[int],
    message: str,
    missing: Mapping[int, str],
    model_files: Mapping[int, str],
    parameters: Mapping[int, Iterable[str]] | None = None,
    notes: Iterable[str] = (),
) -> Manifest:
    """Return the manifest of a bundle with these files."""
    notes = list(notes)
    return Manifest(
        reason=reason,
        step=step,
        created_utc=when.isoformat(),
        ranks=plain_ranks(ranks),
        complete=not missing and not notes,
        culprit_ranks=plain_ranks(culprit_ranks),
        parameters={int(rank): list(names) for rank, names in (parameters or {}).items()},
        message=message,
        files=files,
        ranks_present=plain_ranks(rank for rank in ranks if rank_file(rank) in files),
        missing={int(rank): why for rank, why in missing.items()},
        model_files={int(rank): name for rank, name in model_files.items() if name in files},
        notes=notes,
        versions={"ddpstats": __version__, "torch": str(torch.__version__), "python": sys.version.split()[0]},
    )


def gather_when_done(work: Callable[[], Any], *, name: str, group: Any) -> list[Any]:
    """Return what each rank's ``work`` returned, in the order of group ranks. Collective.

    Ranks report in rounds while some rank is at work: it may take longer than the timeout. ``work`` runs in a thread
    and is at its end when this returns or raises. What it raises becomes `InvalidStats` on every rank.
    """
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    def answer() -> list[Any]:
        if errors:
            raise errors[0]
        return list(results)

    thread = threading.Thread(target=run, name="ddpstats-bundle", daemon=True)
    thread.start()
    round_sec = min(_ROUND_SEC, config.timeout_sec(None) / 4)
    try:
        while True:
            thread.join(round_sec)
            answers = gather_trees([] if thread.is_alive() else answer, name=name, group=group)
            if all(answers):
                return [result for (result,) in answers]
    finally:
        thread.join()


class BundleWriter:
    """One bundle of all ranks. Every rank calls `write`, then `finish`.

    Attributes:
        directory: of the bundle, from `write` on; None if it would be too large, or could not be made.
        peers, group: who takes part.
        model_writers: rank -> the rank that writes its parameters, bit for bit.
    """

    def __init__(
        self, dirpath: Path, keep: int, max_bytes: int | None, group: Any, peers: Channel, finding: CaptureVerdict
    ) -> None:
        self._dirpath, self._keep, self._max_bytes = dirpath, keep, max_bytes
        self.group, self.peers, self._finding = group, peers, finding
        self._lowest = min(peers.ranks)
        self._when = datetime.now(timezone.utc)
        self._unwritten = ""  # why there is no bundle
        self._mine: dict[str, Any] = {"files": {}, "error": "did not write its part"}
        self._results: dict[int, dict[str, Any]] = {}
        self.directory: Path | None = None
        self.model_writers: dict[int, int] = {}

    def write(self, source: PartSource) -> None:
        """Write this rank's files, and learn of the others'. Collective."""
        held = self._gathered(lambda: self._held(source), "what each rank holds")
        first: dict[str, int] = {}  # the lowest of the ranks whose parameters have the same bits writes them
        self.model_writers = {rank: first.setdefault(held[rank]["digest"], rank) for rank in sorted(held)}
        needed = sum(answer["rank"] for answer in held.values())
        needed += sum(held[rank]["model"] for rank in set(self.model_writers.values()))
        made = self._gathered(lambda: self._make_directory(needed), "the bundle's directory")[self._lowest]
        if made["name"] is None:
            self._unwritten = made["error"]
            return
        self.directory = self._dirpath / made["name"]
        try:
            self._results = self._gathered(lambda: self._write_files(source), "the bundle's parts")
        except RankMissing as error:
            self._finish_without(error)
            raise

    def notes(self) -> tuple[str, ...]:
        """Return the lines of the verdict about the bundle."""
        if self.directory is None:
            return (f"No bundle was written: {self._unwritten}",)
        missing = self._missing()
        if not missing:
            return (
                f"Bundle: {self.directory}",
                f"Replay it: ddpstats replay {self.directory} --model PKG:FACTORY --step PKG:FN --bisect",
            )
        lines = [f"The bundle is incomplete: {self.directory}"]
        return (*lines, *(f"  rank {rank}: {why}" for rank, why in missing.items()))

    def finish(self, verdict: CaptureVerdict) -> CaptureVerdict:
        """Write the manifest, remove old bundles. Collective. An incomplete bundle is a reason to stop."""
        if self.directory is None:
            return verdict if self._max_bytes is not None and "max_bytes" in self._unwritten else _stopping(verdict)
        problem = self._gathered(lambda: self._write_manifest(verdict.message), "the bundle's manifest")[self._lowest]
        return _stopping(verdict, problem) if problem or self._missing() else verdict

    def amended(self, verdict: CaptureVerdict) -> CaptureVerdict:
        """Return ``verdict``, whose message replaces the one in the manifest. Local."""
        problem = self._write_manifest(verdict.message)
        if problem:
            _log.warning("%s: the manifest does not tell the cause: %s", self.directory, problem)
        return verdict

    def _gathered(self, work: Callable[[], Any], what: str) -> dict[int, Any]:
        answers = gather_when_done(work, name=f"NaNCapture.check: {what}", group=self.group)
        return dict(zip(self.peers.ranks, answers, strict=True))

    def _held(self, source: PartSource) -> dict[str, Any]:
        return {**source.sizes(), "digest": source.digest()}

    def _make_directory(self, needed: int) -> dict[str, Any]:
        if self._max_bytes is not None and needed > self._max_bytes:
            return {"name": None, "error": f"it would take {needed} bytes, and max_bytes is {self._max_bytes}."}
        if self.peers.rank != self._lowest:
            return {}
        try:
            return {"name": new_directory(self._dirpath, bundle_name(self._finding.step, self._when)).name}
        except Exception as error:
            advice = "Give NaNCapture a directory that this rank may write to."
            why = f"rank {self._lowest} could not make a directory in {self._dirpath}: {type(error).__name__}: {error}"
            return {"name": None, "error": f"{why}. {advice}"}

    def _write_files(self, source: PartSource) -> dict[str, Any]:
        """Return what this rank wrote, or why not. Never raises: the others must learn of it."""
        assert self.directory is not None
        rank, files = self.peers.rank, dict[str, Any]()
        self._mine = {"files": files, "error": None}
        try:
            make_private_directory(self.directory)
            part = source.rank_part(rank, len(self.peers.ranks), self._finding.step)
            files[rank_file(rank)] = asdict(write_part(self.directory, rank_file(rank), part))
            if self.model_writers[rank] == rank:
                name = self._model_file(rank)
                files[name] = asdict(write_part(self.directory, name, source.model_part()))
        except Exception as error:
            self._mine["error"] = f"{type(error).__name__}: {error}"
        return self._mine

    def _model_file(self, writer: int) -> str:
        return "model.safetensors" if writer == self._lowest else model_file(writer)

    def _missing(self) -> dict[int, str]:
        """Rank -> why its part is missing."""
        missing = {rank: result["error"] for rank, result in self._results.items() if result["error"] is not None}
        for rank in self._results:
            writer = self.model_writers[rank]
            if rank not in missing and writer in missing:
                missing[rank] = f"the module's parameters were to be written by rank {writer}"
        return missing

    def _write_manifest(self, message: str) -> str:
        """On the lowest rank that is left: return what is wrong with the bundle as it sees it. Never raises."""
        if self.directory is None or self.peers.rank != min(self._results):
            return ""
        try:
            files, missing = dict[str, Written](), self._missing()
            for rank, result in self._results.items():
                written = {name: Written(**entry) for name, entry in result["files"].items()}
                files |= {name: entry for name, entry in written.items() if (self.directory / name).exists()}
                if not written.keys() <= files.keys():
                    missing[rank] = f"rank {self.peers.rank} does not see its files: all ranks need one file system"
            finding, writers = self._finding, self.model_writers
            write_manifest(
                self.directory,
                manifest_of(
                    finding.kind,
                    finding.step,
                    self._when,
                    self.peers.ranks,
                    files,
                    culprit_ranks=finding.culprit_ranks,
                    parameters=finding.by_rank,
                    message=message,
                    missing=missing,
                    model_files={rank: self._model_file(writer) for rank, writer in writers.items()},
                ),
            )
            if not missing:
                prune(self._dirpath, self._keep, self.directory)
        except Exception as error:
            return f"The bundle's manifest could not be written: {type(error).__name__}: {error}"
        lines = [f"  rank {rank}: {why}" for rank, why in missing.items() if rank not in self._missing()]
        return "\n".join([f"The bundle is incomplete: {self.directory}", *lines]) if lines else ""

    def _finish_without(self, error: RankMissing) -> None:
        """A rank died while it wrote. The lowest one left writes the manifest, with its own files."""
        living = [rank for rank in self.peers.ranks if rank not in error.missing_ranks]
        if self.peers.rank != min(living, default=None):
            return
        reason = "did not write its part" if error.missing_ranks else "not known: the ranks lost touch"
        others = {rank: {"files": {}, "error": reason} for rank in self.peers.ranks if rank != self.peers.rank}
        self._results = {self.peers.rank: self._mine} | others
        problem = self._write_manifest(f"{error}")
        if problem:
            _log.warning("%s", problem)


def _stopping(verdict: CaptureVerdict, problem: str = "") -> CaptureVerdict:
    lines = [verdict.message, problem, "A bundle that is not complete stops the run, whatever on_nonfinite says."]
    return replace(verdict, should_stop=True, should_skip=True, message="\n".join(filter(None, lines)))


class AloneBundle:
    """The bundle of a rank that raised in its micro-batch: without the others, who stop meanwhile. Local.

    `write` is quick: batch, random state, buffers. Then the rank tells its peers, and `finish` writes the parameters
    and the manifest. Neither raises: the program's own error must come through.

    Args:
        name: the directory, unless it exists: ``dirpath / bundle_name(step, when, rank)``.
        error: what was raised.
        keep, max_bytes: as `NaNCapture` has them.

    Attributes:
        directory: the bundle, from `write` on; None if nothing was written.
    """

    def __init__(
        self,
        name: Path,
        source: PartSource,
        error: Exception,
        step: int,
        peers: Channel,
        keep: int = 3,
        max_bytes: int | None = None,
    ) -> None:
        self._name, self._source, self._error, self._step = name, source, error, step
        self._rank, self._ranks = int(peers.rank), plain_ranks(peers.ranks)
        self._keep, self._max_bytes = keep, max_bytes
        self._files: dict[str, Written] = {}
        self._problem = ""
        self.directory: Path | None = None

    def write(self) -> None:
        """Write what this rank saw of the step: the small part."""
        with self._noting_problems():
            needed = sum(self._source.sizes().values())
            if self._max_bytes is not None and needed > self._max_bytes:
                self._problem = f"it would take {needed} bytes, and max_bytes is {self._max_bytes}"
                return
            part = self._source.rank_part(self._rank, len(self._ranks), self._step, self._raised())
            directory = new_directory(self._name.parent, self._name.name)
            try:
                self._files[rank_file(self._rank)] = write_part(directory, rank_file(self._rank), part)
                self.directory = directory
            finally:
                if self.directory is None:
                    directory.rmdir()

    def finish(self) -> str:
        """Write the parameters and the manifest, and remove older bundles of this rank. Return a line about it."""
        if self.directory is not None:
            with self._noting_problems():
                if self._source.is_sharded:
                    self._problem = "they are sharded, and one rank alone cannot gather them"
                else:
                    name = model_file(self._rank)
                    self._files[name] = write_part(self.directory, name, self._source.model_part())
            why, self._problem = self._problem, ""
            with self._noting_problems():
                self._write_manifest(self.directory, [f"{NO_PARAMETERS}{why}"] if why else [])
                prune(self.directory.parent, self._keep, self.directory, self._rank)
                left_out = f" (left out: {NO_PARAMETERS}{why})" if why else ""
                return f"ddpstats: the state of this step: {self.directory}{left_out}"
        return f"ddpstats: the state of this step could not be written: {self._problem}"

    def _raised(self) -> str:
        return f"{type(self._error).__name__}: {self._error}"

    @contextlib.contextmanager
    def _noting_problems(self) -> Iterator[None]:
        try:
            yield
        except Exception as problem:
            _log.warning("the state of the step that raised could not be written", exc_info=problem)
            self._problem = f"{type(problem).__name__}: {problem}"

    def _write_manifest(self, directory: Path, notes: list[str]) -> None:
        others = (rank for rank in self._ranks if rank != self._rank)
        manifest = manifest_of(
            "exception",
            self._step,
            datetime.now(timezone.utc),
            self._ranks,
            self._files,
            culprit_ranks=[self._rank],
            message=f"rank {self._rank} raised in step {self._step}: {self._raised()}",
            missing=dict.fromkeys(others, f"this bundle is rank {self._rank}'s alone: it raised"),
            model_files={self._rank: model_file(self._rank)},
            notes=notes,
        )
        write_manifest(directory, manifest)
