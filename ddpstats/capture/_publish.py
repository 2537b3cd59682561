"""How a bundle is written: by all ranks together, every rank its part and the manifest last; or by one that raised.

1. From what all ranks said of themselves each rank knows alike: who writes the module (one rank for all replicas that
   agree in every bit), whether all of it fits into ``max_bytes``.
2. The lowest rank makes a directory that nobody else has, and all learn its name.
3. Every rank writes its files, each of them whole or not there, and all tell each other what came of it.
4. The lowest rank writes the manifest, and removes bundles that are too old; all learn whether that worked.

Whatever fails, a disk that is full or a rank that dies, fails on every rank alike: the manifest says "complete": false
and what is missing, the verdict says that all ranks should stop, and older bundles stay as they are. A rank that dies
raises `RankMissing` on the others, after the lowest of them has written that manifest.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ddpstats._base.files import make_private_directory
from ddpstats._ranks.gather import gather_trees
from ddpstats.capture._manifest import Written
from ddpstats.capture._peers import Peers
from ddpstats.capture._verdict import CaptureFinding, CaptureVerdict
from ddpstats.capture.bundle import (
    NO_PARAMETERS,
    Manifest,
    bundle_name,
    new_directory,
    prune,
    rank_file,
    write_manifest,
    write_part,
)
from ddpstats.capture.parts import PartSource, plain_ranks, versions
from ddpstats.errors import RankMissing

_logger = logging.getLogger("ddpstats")


class Bundling:
    """One bundle in the making. Every rank goes through `write_parts` and `finish`.

    Attributes:
        directory: of the bundle, from `write_parts` on; None if it would be too large, or could not be made.
        peers, group: who takes part.
        model_writers: rank -> the rank that writes its parameters, bit for bit.
    """

    def __init__(
        self,
        dirpath: Path,
        keep: int,
        max_bytes: int | None,
        group: Any,
        peers: Peers,
        finding: CaptureFinding,
        details: Mapping[int, Mapping[str, Any]],
    ) -> None:
        self._keep, self.group, self.peers, self._finding = keep, group, peers, finding
        self._dirpath = dirpath
        self._lowest = min(details)
        self._when = datetime.fromtimestamp(details[self._lowest]["when"], timezone.utc)
        self.model_writers = _model_writers({rank: tree["digest"] for rank, tree in details.items()})
        self._with_optimizer, self._needed_bytes = _fitting(details, self.model_writers, max_bytes)
        self._max_bytes = max_bytes
        self._fits = max_bytes is None or self._needed_bytes <= max_bytes
        self.directory: Path | None = None
        self._unmade: str | None = None
        self._results: dict[int, dict[str, Any]] = {}

    def write_parts(self, source: PartSource) -> None:
        """Write this rank's files; learn of the others'. Collective."""
        if self._fits:
            self._make_directory(source)
        if self.directory is None:
            return
        mine = self._written(self.directory, source)
        try:
            found = gather_trees(mine, name="NaNCapture.check: the bundle's parts", group=self.group)
        except RankMissing as error:
            self._finish_without(mine, error)
            raise
        self._results = dict(zip(self.peers.ranks, found, strict=True))

    def notes(self) -> tuple[str, ...]:
        """Lines of the verdict about the bundle."""
        if not self._fits:
            return (
                f"No bundle was written: it would take {self._needed_bytes} bytes, and max_bytes is {self._max_bytes}.",
            )
        if self.directory is None:
            return (
                f"No bundle was written: rank {self._lowest} could not make a directory in {self._dirpath}: "
                f"{self._unmade}. Give NaNCapture a directory that this rank may write to.",
            )
        missing = self._missing()
        if not missing:
            return (
                f"Bundle: {self.directory}",
                f"Replay it: ddpstats replay {self.directory} --model PKG:FACTORY --step PKG:FN --bisect",
            )
        lines = [f"The bundle is incomplete: {self.directory}"]
        return (*lines, *(f"  rank {rank}: {why}" for rank, why in missing.items()))

    def finish(self, verdict: CaptureVerdict) -> CaptureVerdict:
        """Write the manifest, drop old bundles. Collective. An incomplete bundle is a reason to stop."""
        if not self._fits:
            return verdict
        if self.directory is None:
            return _stopping(verdict)
        problem = None
        if self.peers.rank == self._lowest:
            problem = self._write_manifest(self.directory, verdict.message, self._missing())
        told = self._lowest_of(gather_trees(problem, name="NaNCapture.check: the bundle's manifest", group=self.group))
        if told is None and not self._missing():
            return verdict
        return _stopping(verdict, *([] if told is None else [told]))

    def amended(self, verdict: CaptureVerdict) -> CaptureVerdict:
        """``verdict``, after `finish`; the manifest gets its message. Local; where that fails it keeps the old one."""
        if self.directory is not None and self.peers.rank == self._lowest:
            problem = self._write_manifest(self.directory, verdict.message, self._missing())
            if problem is not None:
                _logger.warning("%s: the manifest does not tell the cause: %s", self.directory, problem)
        return verdict

    # -- the directory ------------------------------------------------------------------------------------------------

    def _make_directory(self, source: PartSource) -> None:
        """Collective: all have the same one afterwards, or none, and why."""
        made = self._made() if self.peers.rank == self._lowest else None
        try:
            told = gather_trees(made, name="NaNCapture.check: the bundle's directory", group=self.group)
        except RankMissing as error:
            self._take(made)
            if self.directory is not None:
                self._finish_without(self._written(self.directory, source), error)
            raise
        self._take(self._lowest_of(told))

    def _made(self) -> dict[str, Any]:
        """The directory's name, or why there is none."""
        try:
            path = new_directory(self._dirpath, bundle_name(self._finding.step, self._when))
        except Exception as error:  # whatever it is, the other ranks must hear of it
            return {"name": None, "error": f"{type(error).__name__}: {error}"}
        return {"name": path.name, "error": None}

    def _take(self, made: Mapping[str, Any] | None) -> None:
        if made is not None:
            self.directory = None if made["name"] is None else self._dirpath / made["name"]
            self._unmade = made["error"]

    def _lowest_of(self, told: Sequence[Any]) -> Any:
        """What the lowest rank said, which need not be the first of its group."""
        return told[list(self.peers.ranks).index(self._lowest)]

    # -- the files ----------------------------------------------------------------------------------------------------

    def _written(self, directory: Path, source: PartSource) -> dict[str, Any]:
        """What this rank wrote, or why not."""
        rank, files = self.peers.rank, {}
        try:
            make_private_directory(directory)
            part = source.rank_part(rank, len(self.peers.ranks), self._finding.step)
            files[rank_file(rank)] = asdict(write_part(directory, rank_file(rank), part))
            if self.model_writers[rank] == rank:
                name = self._model_file(rank)
                content = source.model_part(self._with_optimizer)
                files[name] = asdict(write_part(directory, name, content))
        except Exception as error:  # whatever it is, the other ranks must hear of it
            return {"files": files, "error": f"{type(error).__name__}: {error}"}
        return {"files": files, "error": None}

    def _missing(self) -> dict[int, str]:
        """Rank -> why its part is not there."""
        found = {rank: result["error"] for rank, result in self._results.items() if result["error"] is not None}
        for rank in self._results:
            writer = self.model_writers[rank]
            if rank not in found and writer in found:
                found[rank] = f"the module's parameters were to be written by rank {writer}"
        return found

    def _model_file(self, writer: int) -> str:
        return "model.pt" if writer == self._lowest else _model_file(writer)

    # -- the manifest -------------------------------------------------------------------------------------------------

    def _write_manifest(self, directory: Path, message: str, missing: Mapping[int, str]) -> str | None:
        """What is wrong with the bundle as this rank sees it; None if nothing is. Drops old bundles then.

        Never raises: the other ranks wait for the answer.
        """
        try:
            files, elsewhere = self._seen(directory)
            missing = {**elsewhere, **missing}
            write_manifest(directory, self._manifest(message, files, missing))
            if not missing:
                prune(self._dirpath, self._keep, newest=directory)
        except Exception as error:
            return f"The bundle's manifest could not be written: {type(error).__name__}: {error}"
        lines = [f"  rank {rank}: {why}" for rank, why in elsewhere.items()]
        return "\n".join([f"The bundle is incomplete: {directory}", *lines]) if lines else None

    def _seen(self, directory: Path) -> tuple[dict[str, Written], dict[int, str]]:
        """The files that are there, and the ranks whose are not: rank -> why."""
        files, elsewhere = {}, {}
        for rank, result in self._results.items():
            there = {name: Written(**one) for name, one in result["files"].items() if (directory / name).exists()}
            files.update(there)
            if len(there) < len(result["files"]):
                elsewhere[rank] = (
                    f"its files are not in {directory} as rank {self.peers.rank} sees it: all ranks need one file "
                    "system"
                )
        return files, elsewhere

    def _manifest(self, message: str, files: dict[str, Written], missing: Mapping[int, str]) -> Manifest:
        finding = self._finding
        model_files = {rank: self._model_file(writer) for rank, writer in self.model_writers.items()}
        return Manifest(
            reason=finding.kind,
            step=finding.step,
            created_utc=self._when.isoformat(),
            world_size=len(self.peers.ranks),
            ranks=plain_ranks(self.peers.ranks),
            complete=not missing,
            culprit_ranks=plain_ranks(finding.culprit_ranks),
            parameters={int(rank): list(names) for rank, names in finding.by_rank.items()},
            message=message,
            files=files,
            ranks_present=plain_ranks([rank for rank in self._results if rank_file(rank) in files]),
            missing={int(rank): why for rank, why in missing.items()},
            model_files={int(rank): name for rank, name in model_files.items() if name in files},
            notes=[],
            versions=versions(),
        )

    def _finish_without(self, mine: dict[str, Any], error: RankMissing) -> None:
        """A rank died while it wrote. The lowest one left says so in the manifest, with its own files."""
        living = [rank for rank in self.peers.ranks if rank not in error.missing_ranks]
        if self.directory is None or self.peers.rank != min(living, default=None):
            return
        self._results = {self.peers.rank: mine}
        reason = "did not write its part" if error.missing_ranks else "not known: the ranks lost touch"
        missing = {rank: reason for rank in self.peers.ranks if rank != self.peers.rank}
        problem = self._write_manifest(self.directory, f"{error}", missing)
        if problem is not None:
            _logger.warning("%s", problem)


def _stopping(verdict: CaptureVerdict, *lines: str) -> CaptureVerdict:
    text = "\n".join(
        [verdict.message, *lines, "A bundle that is not complete stops the run, whatever on_nonfinite says."]
    )
    return replace(verdict, should_stop=True, should_skip=True, message=text)


def _model_writers(digests: Mapping[int, str]) -> dict[int, int]:
    """Rank -> the rank that writes its parameters: the lowest of those whose parameters have the same bits."""
    first: dict[str, int] = {}
    return {rank: first.setdefault(digests[rank], rank) for rank in sorted(digests)}


def _fitting(
    details: Mapping[int, Mapping[str, Any]], writers: Mapping[int, int], max_bytes: int | None
) -> tuple[bool, int]:
    """Whether the optimizer's state goes in as well, and how many bytes the bundle takes then."""
    sizes = {rank: tree["sizes"] for rank, tree in details.items()}
    needed = sum(one["rank"] for one in sizes.values())
    needed += sum(sizes[rank]["model"] for rank in set(writers.values()))
    optimizers = sum(sizes[rank]["optimizer"] for rank in set(writers.values()))
    fits = max_bytes is None or needed + optimizers <= max_bytes
    return fits, needed + optimizers * fits


class AloneBundle:
    """The bundle of a rank that raised in its micro-batch: without the others, who stop meanwhile. Local.

    `write` is quick: batch, random state, buffers. Then the rank tells its peers, and `finish` writes the parameters
    and the manifest. Neither raises: the program's own error must come through.

    Args:
        name: what it should be called: ``dirpath / bundle_name(step, when, rank)``.
        error: what was raised.
        keep, max_bytes: as `NaNCapture` has them.

    Attributes:
        directory: the bundle, from `write` on, with another name if that was there; None if nothing was written.
    """

    def __init__(
        self,
        name: Path,
        source: PartSource,
        error: Exception,
        step: int,
        peers: Peers,
        keep: int = 3,
        max_bytes: int | None = None,
    ) -> None:
        self._name, self._source, self._error, self._step = name, source, error, step
        self._rank, self._ranks = int(peers.rank), plain_ranks(peers.ranks)
        self._keep, self._max_bytes = keep, max_bytes
        self._raised = type(error).__name__
        self._files: dict[str, Written] = {}
        self._problem = ""
        self.directory: Path | None = None

    def write(self) -> None:
        """What this rank saw of the step: the small part."""
        made = None
        try:
            self._raised = f"{self._raised}: {self._error}"
            needed = self._source.sizes()["rank"]
            if self._max_bytes is not None and needed > self._max_bytes:
                self._problem = f"it would take {needed} bytes, and max_bytes is {self._max_bytes}"
                return
            content = self._source.rank_part(self._rank, len(self._ranks), self._step, self._raised)
            made = new_directory(self._name.parent, self._name.name)
            self._files[rank_file(self._rank)] = write_part(made, rank_file(self._rank), content)
            self.directory = made
        except Exception as problem:
            _logger.warning("the state of the step that raised could not be written", exc_info=problem)
            self._problem = f"{type(problem).__name__}: {problem}"
            if made is not None:
                with contextlib.suppress(OSError):
                    made.rmdir()

    def finish(self) -> str:
        """The parameters and the manifest; older bundles of this rank's go. A line about it."""
        if self.directory is None:
            return f"ddpstats: the state of this step could not be written: {self._problem}"
        why = self._write_parameters(self.directory)
        try:
            write_manifest(self.directory, self._manifest([] if why is None else [f"{NO_PARAMETERS}{why}"]))
            prune(self.directory.parent, self._keep, newest=self.directory, rank=self._rank)
        except Exception as problem:
            _logger.warning("the state of the step that raised could not be written", exc_info=problem)
            return f"ddpstats: the state of this step could not be written: {type(problem).__name__}: {problem}"
        if why is not None:
            left_out = f"{self.directory} (left out: {NO_PARAMETERS}{why})"
            return f"ddpstats: the batch and the random state of this step: {left_out}"
        return f"ddpstats: the batch, the random state and the parameters of this step: {self.directory}"

    def _write_parameters(self, directory: Path) -> str | None:
        """Why there is no file with them; None where there is."""
        if self._source.needs_peers:
            return "they are sharded, and one rank alone cannot gather them"
        try:
            sizes, limit = self._source.sizes(), self._max_bytes
            needed = sizes["rank"] + sizes["model"]
            if limit is not None and needed > limit:
                return f"with them it would take {needed} bytes, and max_bytes is {limit}"
            content = self._source.model_part(limit is None or needed + sizes["optimizer"] <= limit)
            self._files[_model_file(self._rank)] = write_part(directory, _model_file(self._rank), content)
        except Exception as problem:  # the part is written already, and can be read without
            _logger.warning("the parameters of the step that raised could not be written", exc_info=problem)
            return f"{type(problem).__name__}: {problem}"
        return None

    def _manifest(self, notes: list[str]) -> Manifest:
        why = f"this bundle is rank {self._rank}'s alone: it raised"
        return Manifest(
            reason="exception",
            step=self._step,
            created_utc=datetime.now(timezone.utc).isoformat(),
            world_size=len(self._ranks),
            ranks=self._ranks,
            complete=len(self._ranks) == 1 and not notes,
            culprit_ranks=(self._rank,),
            parameters={},
            message=f"rank {self._rank} raised in step {self._step}: {self._raised}",
            files=self._files,
            ranks_present=(self._rank,),
            missing={rank: why for rank in self._ranks if rank != self._rank},
            model_files={} if notes else {self._rank: _model_file(self._rank)},
            notes=notes,
            versions=versions(),
        )


def _model_file(rank: int) -> str:
    return f"model-rank{rank:05d}.pt"
