"""The bundle of a rank that raised in its micro-batch: without the others, who stop meanwhile.

`write_alone_part` is quick: batch, random state, buffers. Then the rank tells its peers, and `finish_alone` writes the
parameters and the manifest. Neither raises: the program's own error must come through.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from ddpstats._base.atomic_files import Written
from ddpstats.capture._bundle import (
    NO_PARAMETERS,
    Manifest,
    new_directory,
    prune,
    rank_file,
    write_manifest,
    write_part,
)
from ddpstats.capture._parts import PartSource, plain_ranks, versions
from ddpstats.capture._peers import Peers

_logger = logging.getLogger("ddpstats")


@dataclass(frozen=True)
class AlonePart:
    """What a rank that raised has written before it tells its peers.

    Attributes:
        directory: of its bundle; None if nothing was written.
        rank, ranks: global numbers, the group's ascending.
        raised: the error in words.
        keep, max_bytes: as `NaNCapture` has them.
        problem: why nothing was written.
    """

    directory: Path | None
    step: int
    rank: int
    ranks: tuple[int, ...]
    raised: str
    keep: int
    max_bytes: int | None
    files: Mapping[str, Written] = field(default_factory=dict)
    problem: str | None = None


def write_alone_part(
    directory: Path,
    source: PartSource,
    error: Exception,
    step: int,
    peers: Peers,
    keep: int = 3,
    max_bytes: int | None = None,
) -> AlonePart:
    """What a rank that raised saw of the step: the small part of its bundle. Local; never raises.

    ``directory``: what the bundle should be called: ``dirpath / bundle_name(step, when, rank)``. If that is there
    already, `AlonePart.directory` has another name.
    """
    part = AlonePart(None, step, int(peers.rank), plain_ranks(peers.ranks), type(error).__name__, keep, max_bytes)
    made = None
    try:
        part = replace(part, raised=f"{part.raised}: {error}")
        needed = source.sizes()["rank"]
        if max_bytes is not None and needed > max_bytes:
            return replace(part, problem=f"it would take {needed} bytes, and max_bytes is {max_bytes}")
        content = source.rank_part(part.rank, len(part.ranks), step, part.raised)
        made = new_directory(directory.parent, directory.name)
        name = rank_file(part.rank)
        return replace(part, directory=made, files={name: write_part(made, name, content)})
    except Exception as problem:
        _logger.warning("the state of the step that raised could not be written", exc_info=problem)
        if made is not None:
            with contextlib.suppress(OSError):
                made.rmdir()
        return replace(part, problem=f"{type(problem).__name__}: {problem}")


def finish_alone(part: AlonePart, source: PartSource) -> str:
    """The parameters and the manifest; older bundles of this rank's go. Local; never raises. A line about it."""
    if part.directory is None:
        return f"ddpstats: the state of this step could not be written: {part.problem}"
    files, notes = _alone_model(part, part.directory, source)
    try:
        write_manifest(part.directory, _alone_manifest(part, files, notes))
        prune(part.directory.parent, part.keep, newest=part.directory, rank=part.rank)
    except Exception as problem:
        _logger.warning("the state of the step that raised could not be written", exc_info=problem)
        return f"ddpstats: the state of this step could not be written: {type(problem).__name__}: {problem}"
    if notes:
        return f"ddpstats: the batch and the random state of this step: {part.directory} (left out: {notes[0]})"
    return f"ddpstats: the batch, the random state and the parameters of this step: {part.directory}"


def _alone_model(part: AlonePart, directory: Path, source: PartSource) -> tuple[dict[str, Written], list[str]]:
    """The file with the parameters; or none, and why."""
    if source.needs_peers:
        return {}, [f"{NO_PARAMETERS}they are sharded, and one rank alone cannot gather them"]
    try:
        sizes, limit = source.sizes(), part.max_bytes
        needed = sizes["rank"] + sizes["model"]
        if limit is not None and needed > limit:
            return {}, [f"{NO_PARAMETERS}with them it would take {needed} bytes, and max_bytes is {limit}"]
        content = source.model_part(limit is None or needed + sizes["optimizer"] <= limit)
        return {_alone_file(part): write_part(directory, _alone_file(part), content)}, []
    except Exception as problem:  # the part is written already, and can be read without
        _logger.warning("the parameters of the step that raised could not be written", exc_info=problem)
        return {}, [f"{NO_PARAMETERS}{type(problem).__name__}: {problem}"]


def _alone_manifest(part: AlonePart, files: Mapping[str, Written], notes: list[str]) -> Manifest:
    why = f"this bundle is rank {part.rank}'s alone: it raised"
    return Manifest(
        reason="exception",
        step=part.step,
        created_utc=datetime.now(timezone.utc).isoformat(),
        world_size=len(part.ranks),
        ranks=part.ranks,
        complete=len(part.ranks) == 1 and not notes,
        culprit_ranks=(part.rank,),
        parameters={},
        message=f"rank {part.rank} raised in step {part.step}: {part.raised}",
        files={**part.files, **files},
        ranks_present=(part.rank,),
        missing={rank: why for rank in part.ranks if rank != part.rank},
        model_files={part.rank: _alone_file(part)} if files else {},
        notes=notes,
        versions=versions(),
    )


def _alone_file(part: AlonePart) -> str:
    return f"model-rank{part.rank:05d}.pt"
