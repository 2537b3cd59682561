"""MANIFEST.json says what a bundle holds, and is written last. Also the names of bundles, and the removal of old ones.

1. A bundle is a directory ``capture-<UTC>-step<step>``; what a rank that raised writes alone ends in ``-rank<rank>``.
   ``-2``, ``-3``, ... follow a name that exists: two jobs may write to one directory.
2. `write_manifest` writes atomically: a bundle that has a manifest was written to its end.
3. `read_manifest` trusts nothing. A file that a manifest names has a plain name: no path leads out of the bundle.
4. `prune` removes old bundles, and nothing that is not certainly one.

This module does not import torch.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import msgspec

from ddpstats._base.files import (
    NO_REGULAR_FILE,
    TEMPORARY_PREFIX,
    explain_version,
    make_private_directory,
    open_regular,
    parse_json,
    read_at_most,
    replace_file,
)
from ddpstats.errors import BundleError

_log = logging.getLogger("ddpstats")

VERSION = 2
MANIFEST = "MANIFEST.json"

# UTC time, step, rank of a bundle that one rank wrote alone, suffix of a repeated name
BUNDLE_NAME = re.compile(r"capture-(\d{8}T\d{6}Z)-step(\d{8,18})(?:-rank(\d{5,7}))?(?:-(\d{1,4}))?")
_FILE_NAME = re.compile(r"(rank\d{5,7}|model|model-rank\d{5,7})\.safetensors")

_MAX_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
_MAX_SAME_NAMES = 1000

RankNumber = Annotated[int, msgspec.Meta(ge=0, lt=1_000_000)]
StepNumber = Annotated[int, msgspec.Meta(ge=0, lt=10**18)]


# -- the manifest -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """The size and the hash of a file's content."""

    bytes: Annotated[int, msgspec.Meta(ge=0)]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class Manifest:
    """A capture's verdict, and the files that hold it.

    Attributes:
        ranks: of the group, by their global numbers: a group need not begin at rank 0.
        complete: False if a rank's part is missing.
        message: the verdict in words.
        files: file name -> its size and hash.
        model_files: rank -> the file with its parameters, or with its shards of them.
        parameters: rank -> names of the parameters whose gradient is not finite on it.
        missing: rank -> why its part is missing.
    """

    reason: Literal["nonfinite", "overflow", "scaler_skips", "exception"]
    step: StepNumber
    created_utc: str
    ranks: Annotated[tuple[RankNumber, ...], msgspec.Meta(min_length=1)]
    complete: bool
    culprit_ranks: tuple[RankNumber, ...]
    message: str
    files: dict[str, Written]
    ranks_present: tuple[RankNumber, ...]
    model_files: dict[RankNumber, str]
    versions: dict[str, str]
    parameters: dict[RankNumber, list[str]] = field(default_factory=dict)
    missing: dict[RankNumber, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    format: Literal["ddpstats-capture"] = "ddpstats-capture"
    version: int = VERSION

    def __post_init__(self) -> None:
        for name in self.files:
            if _FILE_NAME.fullmatch(name) is None:
                raise ValueError(f"files: {name[:80]!r} is not the name of a file of a capture")
        named = [*self.model_files.values(), *map(rank_file, self.ranks_present)]
        if not (set(named) <= self.files.keys() and set(self.ranks_present) <= set(self.ranks)):
            raise ValueError("ranks_present and model_files: not all of them are in files and in ranks")


def bundle_name(step: int, when: datetime, rank: int | None = None) -> str:
    """Return ``capture-20260102T030405Z-step00000012``, with ``-rank00001`` for what one rank writes alone.

    ``when``: with a time zone; without one it is taken for UTC.
    """
    utc = when if when.tzinfo is None else when.astimezone(timezone.utc)
    name = f"capture-{utc:%Y%m%dT%H%M%SZ}-step{step:08d}"
    return name if rank is None else f"{name}-rank{rank:05d}"


def rank_file(rank: int) -> str:
    return f"rank{rank:05d}.safetensors"


def model_file(rank: int) -> str:
    return f"model-rank{rank:05d}.safetensors"


def new_directory(dirpath: Path, name: str) -> Path:
    """Make a directory of that name, or with ``-2``, ``-3``, ... behind it, that did not exist. Raises OSError."""
    for again in range(1, _MAX_SAME_NAMES):
        path = dirpath / (name if again == 1 else f"{name}-{again}")
        try:
            make_private_directory(path, exist_ok=False)
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"{dirpath / name} exists {_MAX_SAME_NAMES - 1} times already; remove some")


def summarize(file: BinaryIO) -> Written:
    """Return the size and the hash of an open file, and leave it at its end."""
    file.seek(0)
    digest, size = hashlib.sha256(), 0
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
        size += len(chunk)
    return Written(size, digest.hexdigest())


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the last file of a bundle. Raises OSError."""
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    replace_file(directory / MANIFEST, lambda file: file.write(text), private=True)


def read_manifest(directory: Path) -> Manifest:
    """Read a bundle's manifest. Raises `BundleError` that names the file and the field."""
    path = directory / MANIFEST
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "is not there"
        raise BundleError(
            f"{directory} {what}. Give a bundle, capture-...-step..., or the directory that NaNCapture was given."
        )
    if not os.path.lexists(path):
        raise BundleError(
            f"{directory} has no {MANIFEST}, which is written last: the writing never ended (the job was killed, or "
            "the disk was full). Use an older bundle, or capture again."
        )
    with open_own(directory, MANIFEST) as file:
        try:
            content = parse_json(read_at_most(file, _MAX_BYTES))
            if isinstance(content, dict) and (refused := explain_version(content.get("version"), VERSION)):
                raise BundleError(f"{path}: {refused}")
            return msgspec.convert(content, Manifest, str_keys=True)
        except (OSError, ValueError) as error:
            raise BundleError(
                f"{path} cannot be read: {error}; it is damaged, hostile, or was not written by ddpstats"
            ) from None


def open_own(directory: Path, name: str) -> BinaryIO:
    """Open a file of the directory itself, which is no link. Raises `BundleError`."""
    path = directory / name
    try:
        return open_regular(path, follow=False)
    except OSError as error:
        if error.errno == errno.ELOOP or error.strerror == NO_REGULAR_FILE:
            raise BundleError(
                f"{path} is not a file of its own directory but a link or a pipe; it is not read"
            ) from None
        raise BundleError(f"{path} cannot be read: {error}; copy the whole directory, with every file") from None


# -- several bundles --------------------------------------------------------------------------------------------------


def bundles_in(directory: Path) -> list[tuple[Path, Manifest | None]]:
    """Return bundles by name, oldest first; None for one whose manifest cannot be read. Links are no bundles."""
    bundles = []
    for path in directory.iterdir():
        match = BUNDLE_NAME.fullmatch(path.name)
        if match is not None and path.is_dir() and not path.is_symlink():
            bundles.append((match[1], [int(number or 0) for number in match.groups()[1:]], path))
    return [(path, _manifest_or_none(path)) for *_, path in sorted(bundles)]


def _manifest_or_none(path: Path) -> Manifest | None:
    try:
        return read_manifest(path)
    except (BundleError, OSError):
        return None


def prune(dirpath: Path, keep: int, newest: Path) -> list[Path]:
    """Remove the oldest complete bundles, so that ``keep`` are left, and return those. Local.

    What a rank wrote alone counts with what the same rank wrote alone. A directory is removed if it holds nothing but a
    bundle's files; what cannot be removed stays, with a warning.

    Args:
        newest: what was just written. It stays, also where clocks went back and others have later names.
    """
    rank = _rank_of(newest)
    others = [bundle for bundle in bundles_in(dirpath) if _rank_of(bundle[0]) == rank and bundle[0].name != newest.name]
    complete = [path for path, manifest in others if manifest and (manifest.complete or rank)]
    return [path for path in complete[: max(0, len(complete) - keep + 1)] if _remove(path)]


def _rank_of(path: Path) -> str | None:
    match = BUNDLE_NAME.fullmatch(path.name)
    return None if match is None else match[3]


def _remove(path: Path) -> bool:
    try:
        files = list(path.iterdir())
        foreign = [file.name for file in files if not _is_of_a_bundle(file)]
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


def _is_of_a_bundle(file: Path) -> bool:
    is_known = file.name == MANIFEST or file.name.startswith(TEMPORARY_PREFIX) or _FILE_NAME.fullmatch(file.name)
    return bool(is_known) and (file.is_symlink() or file.is_file())
