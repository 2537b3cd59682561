"""A capture on disk: one directory, ``capture-<UTC>-step<step>``, that executes nothing when it is read.

What a rank that raised writes alone is in ``capture-<UTC>-step<step>-rank<rank>``. ``-2``, ``-3``, ... stand behind a
name that was taken already: two jobs may write to one place.

Written: one ``rank<rank>.pt`` per rank, ``model.pt`` (or ``model-rank<rank>.pt`` for a rank whose parameters differ),
and MANIFEST.json last. Every file appears complete or not at all.

Read, by `Bundle`:

1. the manifest, each field looked at;
2. of a part, the file's size and SHA-256, which the manifest names, before anything in it is looked at;
3. the archive's own table: entries are stored as they are, so that a small file stays small, and no tensor is larger
   than its entry;
4. ``torch.load(weights_only=True)``, which builds tensors and plain containers and calls nothing else;
5. the fields of the part.

`prune` removes old bundles, and nothing that it does not know for one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ddpstats._base.files import (
    TEMPORARY_PREFIX,
    make_private_directory,
    replace_file,
)
from ddpstats._base.text import count_of
from ddpstats._rerun.archive import check_archive
from ddpstats.capture._manifest import (
    BUNDLE_NAME,
    MANIFEST,
    MODEL_FILE,
    RANK_FILE,
    Manifest as Manifest,
    Written,
    bundle_name as bundle_name,
    opened,
    rank_file as rank_file,
    read_manifest as read_manifest,
    summarize,
    write_manifest as write_manifest,
)
from ddpstats.capture._rank_part import RankPart as RankPart, model_content
from ddpstats.errors import BundleError

_log = logging.getLogger("ddpstats")

NO_PARAMETERS = "parameters: "
"""How a manifest's note begins that says why there is no file with them."""

_MOST_OF_ONE_NAME = 1000
_UNDER_WAY_SEC = 3600.0


def new_directory(dirpath: Path, name: str) -> Path:
    """A directory of that name, or with ``-2``, ``-3``, ... behind it, that was not there. Raises OSError."""
    for again in range(1, _MOST_OF_ONE_NAME):
        path = dirpath / (name if again == 1 else f"{name}-{again}")
        try:
            make_private_directory(path, exist_ok=False)
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"{dirpath / name} is there {_MOST_OF_ONE_NAME - 1} times already; remove some")


def write_part(directory: Path, name: str, content: dict[str, Any]) -> Written:
    """One file of a bundle, atomically. Raises OSError, also for a full disk.

    ``content``: plain things and tensors; anything else is found out by whoever reads it.
    """
    if RANK_FILE.fullmatch(name) is None and MODEL_FILE.fullmatch(name) is None:
        raise ValueError(f"{name!r} is not the name of a file of a capture")

    def write(file: BinaryIO) -> Written:
        _save(content, file)
        return summarize(file)

    return replace_file(directory / name, write, private=True)


def _save(content: dict[str, Any], file: BinaryIO) -> None:
    try:
        torch.save(content, file)
    except RuntimeError as error:
        # torch's archive writer notices a failed write twice, and the second time hides the first: a full disk
        cause = error.__context__
        raise cause if isinstance(cause, OSError) else OSError(f"{error}") from None


class Bundle:
    """A capture that was opened. Nothing but the manifest has been read.

    Attributes:
        path: the bundle's directory.
        manifest: what it says.
        notes: what whoever uses it should be told.
    """

    def __init__(self, path: Path, manifest: Manifest, notes: Iterable[str] = ()) -> None:
        self.path = path
        self.manifest = manifest
        self.notes = tuple(notes)

    @classmethod
    def open(cls, path: str | Path) -> Bundle:
        """A bundle (or its manifest), or the newest complete one in a directory of bundles. Local.

        Raises `BundleError` for a path that is neither, and for a manifest that is not one.
        """
        path = Path(path)
        if path.name == MANIFEST and not path.is_dir():
            path = path.parent
        if (
            path.is_dir()
            and not os.path.lexists(path / MANIFEST)
            and BUNDLE_NAME.fullmatch(path.resolve().name) is None
        ):
            return cls._newest(path)
        manifest = read_manifest(path)
        return cls(path, manifest, _incomplete_notes(manifest))

    @classmethod
    def _newest(cls, path: Path) -> Bundle:
        found = bundles_in(path)
        complete = [one for one, manifest in found if manifest is not None and manifest.complete]
        if not found:
            raise BundleError(
                f"{path} is not a bundle, and holds none: it has no {MANIFEST} and no capture-...-step... Give the "
                "directory that NaNCapture was given; it is filled when a gradient is not finite."
            )
        if not complete:
            names = ", ".join(one.name for one, _ in found[-4:])
            raise BundleError(f"{path} holds no complete bundle; incomplete: {names}. Name one of them to use it.")
        note = f"{path} holds {count_of(len(found), 'bundles')}; this is the newest complete one"
        return cls(complete[-1], read_manifest(complete[-1]), [note])

    def rank_part(self, rank: int) -> RankPart:
        """Raises `BundleError`: not in the bundle, not the file that was written, or not what a capture writes."""
        if rank not in self.manifest.ranks_present:
            raise BundleError(f"{self.path} has no part of rank {rank}: {self._why_missing(rank)}")
        name = rank_file(rank)
        part = RankPart.from_content(self._load(name), str(self.path / name))
        if (part.rank, part.world_size) != (rank, self.manifest.world_size):
            raise BundleError(
                f"{self.path / name} is of rank {part.rank} of {part.world_size}, and the manifest says rank {rank} of "
                f"{self.manifest.world_size}; the bundle is damaged or hostile"
            )
        return part

    def model_part(self, rank: int) -> dict[str, Any]:
        """The parameters as ``rank`` had them. Raises `BundleError`."""
        name = self.manifest.model_files.get(rank)
        if name is None:
            raise BundleError(self._why_no_parameters(rank))
        return model_content(self._load(name), str(self.path / name))

    def _why_no_parameters(self, rank: int) -> str:
        why = [note for note in self.manifest.notes if note.startswith(NO_PARAMETERS)]
        others = ", ".join(map(str, list(self.manifest.model_files)[:16]))
        advice = f"use one of rank {others}" if others else "it cannot be replayed; its batch and error can be read"
        return (
            f"{self.path} has no file with the parameters of rank {rank}"
            + "".join(f" ({one})" for one in why)
            + f"; {advice}"
        )

    def _why_missing(self, rank: int) -> str:
        if rank in self.manifest.missing:
            return self.manifest.missing[rank]
        present = ", ".join(map(str, self.manifest.ranks_present[:16])) or "none"
        return f"it was not written; ranks that are there: {present}"

    def _load(self, name: str) -> Any:
        path = self.path / name
        try:
            with opened(self.path, name) as file, _unchanged(path, file):
                _check_content(path, file, self.manifest.files[name])
                check_archive(file)
                return torch.load(file, weights_only=True, map_location="cpu")
        except BundleError:
            raise
        except Exception as error:  # whatever a damaged or hostile file makes torch raise
            raise BundleError(
                f"{path} is refused: {type(error).__name__}: {_first_line(error)}. Nothing of it was executed. "
                "Unless it is larger than is read, it was not written by ddpstats, or with another version of torch."
            ) from None


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
    """What was checked is what was used: nobody has written to the file in between. Raises `BundleError`."""
    before = _state(file)
    yield
    if _state(file) != before:
        raise BundleError(f"{path} was changed while it was read; nothing of it is used. Read it again.")


def _state(file: BinaryIO) -> tuple[int, int, int]:
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else "no reason given"


def _incomplete_notes(manifest: Manifest) -> list[str]:
    if manifest.complete:
        return []
    missing = [f"rank {rank}: {why}" for rank, why in list(manifest.missing.items())[:8]]
    reasons = "; ".join([*missing, *manifest.notes[:8]]) or "no reason is given"
    return [f"the bundle is incomplete, what is there is used ({reasons})"]


# -- several bundles --------------------------------------------------------------------------------------------------


def bundles_in(directory: Path) -> list[tuple[Path, Manifest | None]]:
    """Bundles by name, oldest first; None for one without a manifest that can be read. Links are no bundles."""
    found = []
    for path in directory.iterdir():
        match = BUNDLE_NAME.fullmatch(path.name)
        if match is not None and path.is_dir() and not path.is_symlink():
            when, step, rank, again = match.groups()
            found.append((when, int(step), int(rank or -1), int(again or 1), path))
    return [(path, _manifest_or_none(path)) for *_, path in sorted(found)]


def _manifest_or_none(path: Path) -> Manifest | None:
    try:
        return read_manifest(path)
    except (BundleError, OSError):
        return None


def prune(dirpath: Path, keep: int, newest: Path | None = None, rank: int | None = None) -> list[Path]:
    """Remove the oldest complete bundles but ``keep``, and incomplete ones before the newest complete one.

    The newest complete bundle stays, whatever ``keep`` is. A directory is a bundle if its name is one's, its manifest
    is one (or not there yet) and it holds nothing but a bundle's files; anything else stays. An incomplete one that
    changed within the last hour stays: another job may be writing it.

    Args:
        newest: what was just written. It stays, also where clocks went back and others have later names.
        rank: remove what that rank wrote alone, complete or not, but ``keep``. None: what ranks wrote together.

    Returns:
        What was removed. Local; what cannot be removed stays, with a warning to the logger "ddpstats".
    """
    try:
        found = [one for one in bundles_in(dirpath) if _rank_of(one[0]) == rank]
    except OSError as error:
        _log.warning("old captures in %s stay there: %s", dirpath, error)
        return []
    found.sort(key=lambda one: newest is not None and one[0].name == newest.name)
    beyond = _beyond_together(found, max(keep, 1)) if rank is None else _beyond_alone(found, max(keep, 1))
    return [path for path, _ in found if path in beyond and _remove(path)]


def _rank_of(path: Path) -> int | None:
    """Which rank wrote it alone; None for what ranks wrote together."""
    match = BUNDLE_NAME.fullmatch(path.name)
    return None if match is None or match[3] is None else int(match[3])


def _beyond_together(found: list[tuple[Path, Manifest | None]], keep: int) -> set[Path]:
    complete = [path for path, manifest in found if manifest is not None and manifest.complete]
    if not complete:
        return set()
    older = found[: [path for path, _ in found].index(complete[-1])]
    incomplete = [path for path, manifest in older if _is_incomplete(path, manifest)]
    return {*complete[:-keep], *incomplete[:-keep]}


def _beyond_alone(found: list[tuple[Path, Manifest | None]], keep: int) -> set[Path]:
    over = [path for path, manifest in found if manifest is not None or _is_incomplete(path, manifest)]
    return set(over[:-keep])


def _is_incomplete(path: Path, manifest: Manifest | None) -> bool:
    """And nobody is at work on it. A manifest that cannot be read is of something else, or of a later version."""
    try:
        lacks = not os.path.lexists(path / MANIFEST) if manifest is None else not manifest.complete
        return lacks and time.time() - path.stat().st_mtime > _UNDER_WAY_SEC
    except OSError:
        return False


def _remove(path: Path) -> bool:
    try:
        files = list(path.iterdir())
        foreign = [file.name for file in files if not _is_ours(file)]
        if foreign:
            _log.warning("%s stays: %s is not a file of a capture", path, foreign[0])
            return False
        # The manifest first: a bundle that is half gone must not look complete
        for file in sorted(files, key=lambda file: file.name != MANIFEST):
            file.unlink()
        path.rmdir()
    except OSError as error:
        _log.warning("%s cannot be removed: %s", path, error)
        return False
    return True


def _is_ours(file: Path) -> bool:
    name = file.name
    known = name == MANIFEST or name.startswith(TEMPORARY_PREFIX) or RANK_FILE.fullmatch(name) is not None
    return (known or MODEL_FILE.fullmatch(name) is not None) and (file.is_symlink() or file.is_file())
