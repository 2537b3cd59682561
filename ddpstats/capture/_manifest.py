"""MANIFEST.json: what a bundle holds, written last. Standard library only.

1. `bundle_name` names the directory, `RANK_FILE` and `MODEL_FILE` say what its files are called.
2. `write_manifest` writes it atomically: a bundle that has one was written to its end.
3. `read_manifest` believes nothing: size of the file, encoding, format, version, and each field's type and limits. A
   file that it names is a plain name of a known pattern, so that no path leads out of the directory.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

from ddpstats._base.files import (
    NO_REGULAR_FILE,
    explain_version,
    open_regular,
    parse_json,
    read_at_most,
    replace_file,
)
from ddpstats.capture._fields import MOST_RANKS, Fields, is_texts
from ddpstats.errors import BundleError

FORMAT = "ddpstats-capture"
VERSION = 1
MANIFEST = "MANIFEST.json"
REASONS = ("nonfinite", "overflow", "scaler_skips", "exception")

# When, in which step, of which rank if it raised, and which of several of that name
BUNDLE_NAME = re.compile(r"capture-(\d{8}T\d{6}Z)-step(\d{8,18})(?:-rank(\d{5,7}))?(?:-(\d{1,4}))?")
RANK_FILE = re.compile(r"rank\d{5,7}\.pt")
MODEL_FILE = re.compile(r"model(-rank\d{5,7})?\.pt")
_SHA256 = re.compile(r"[0-9a-f]{64}")

_MOST_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
_MOST_STEP = 10**18 - 1
_LARGEST_FILE_BYTES = 1 << 50
_OWN_FAULT = "nothing was written; that is a fault of ddpstats itself, please report it"


@dataclass(frozen=True)
class Written:
    """The size and the hash of a file's content."""

    bytes: int
    sha256: str


def summarize(file: BinaryIO) -> Written:
    """Return the size and the hash of an open file, and leave it at its end."""
    file.seek(0)
    digest, size = hashlib.sha256(), 0
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
        size += len(chunk)
    return Written(size, digest.hexdigest())


@dataclass(frozen=True)
class Manifest:
    """What happened, and which files tell of it.

    Attributes:
        world_size: how many ranks the group has.
        ranks: of the group, ascending, by their global numbers: a group need not begin at rank 0. All other ranks are
            some of these.
        reason: ``nonfinite``, ``overflow``, ``scaler_skips`` or ``exception``.
        complete: False if a rank's part is not there that should be.
        parameters: rank -> names of the parameters whose gradient is not finite on it.
        message: the verdict in words.
        files: file name -> its size and hash.
        missing: rank -> why its part is not there.
        model_files: rank -> the file with its parameters.
        versions: of torch, python and ddpstats.
    """

    reason: str
    step: int
    created_utc: str
    world_size: int
    ranks: tuple[int, ...]
    complete: bool
    culprit_ranks: tuple[int, ...]
    parameters: dict[int, list[str]]
    message: str
    files: dict[str, Written]
    ranks_present: tuple[int, ...]
    missing: dict[int, str]
    model_files: dict[int, str]
    notes: list[str]
    versions: dict[str, str]


_FIELDS = tuple(field.name for field in dataclasses.fields(Manifest))


def bundle_name(step: int, when: datetime, rank: int | None = None) -> str:
    """``capture-20260102T030405Z-step00000012``, and ``-rank00001`` behind it for what one rank writes alone.

    ``when``: with a time zone; without one it is taken for UTC.
    """
    utc = when if when.tzinfo is None else when.astimezone(timezone.utc)
    name = f"capture-{utc:%Y%m%dT%H%M%SZ}-step{step:08d}"
    return name if rank is None else f"{name}-rank{rank:05d}"


def rank_file(rank: int) -> str:
    return f"rank{rank:05d}.pt"


def write_manifest(directory: Path, manifest: Manifest) -> Written:
    """The last file of a bundle. Raises OSError, and `BundleError` for a manifest that `read_manifest` would refuse."""
    content = as_json(manifest)
    _checked(Fields(json.loads(json.dumps(content)), str(directory / MANIFEST), _OWN_FAULT))
    text = json.dumps(content, indent=1, allow_nan=False)

    def write(file: BinaryIO) -> Written:
        file.write(text.encode())
        return summarize(file)

    return replace_file(directory / MANIFEST, write, private=True)


def as_json(manifest: Manifest) -> dict[str, Any]:
    """What JSON makes of it: keys that are ranks are texts there."""
    content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(manifest)}
    for name in ("parameters", "missing", "model_files"):
        content[name] = {str(rank): value for rank, value in content[name].items()}
    return content


def read_manifest(directory: Path) -> Manifest:
    """Raises `BundleError` that names the file and the field."""
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
    return _checked(Fields(_parsed(directory), str(path)))


def opened(directory: Path, name: str) -> BinaryIO:
    """The file of that name, which is one of this directory itself and no link. Raises `BundleError`."""
    path = directory / name
    try:
        return open_regular(path, follow=False)
    except OSError as error:
        if error.errno == errno.ELOOP or error.strerror == NO_REGULAR_FILE:
            raise BundleError(
                f"{path} is not a file of its own directory but a link or a pipe; it is not read"
            ) from None
        raise BundleError(f"{path} cannot be read: {error}; copy the whole directory, with every file") from None


def _parsed(directory: Path) -> Any:
    with opened(directory, MANIFEST) as file:
        try:
            return parse_json(read_at_most(file, _MOST_BYTES).decode("utf-8"))
        except (OSError, ValueError) as error:
            raise BundleError(
                f"{directory / MANIFEST} cannot be read: {error}; it is damaged, or was not written by ddpstats"
            ) from None


def _checked(fields: Fields) -> Manifest:
    if fields.raw("format") != FORMAT:
        raise fields.wrong("format", f"{FORMAT!r}: this is not a capture of ddpstats")
    refused = explain_version(fields.raw("version"), VERSION)
    if refused is not None:
        raise BundleError(f"{fields.at('version')}: {refused}")
    fields.only(("format", "version", *_FIELDS))
    ranks = _group(fields)
    files = _files(fields)
    return Manifest(
        reason=fields.one_of("reason", REASONS),
        step=fields.integer("step", 0, _MOST_STEP),
        created_utc=fields.text("created_utc"),
        world_size=len(ranks),
        ranks=tuple(ranks),
        complete=fields.flag("complete"),
        culprit_ranks=fields.ranks("culprit_ranks", ranks),
        parameters=_parameters(fields, ranks),
        message=fields.text("message"),
        files=files,
        ranks_present=_present(fields, ranks, files),
        missing=_texts_by_rank(fields, "missing", ranks),
        model_files=_model_files(fields, ranks, files),
        notes=fields.texts("notes"),
        versions=_versions(fields),
    )


def _group(fields: Fields) -> dict[int, None]:
    """Its ranks, in order, and quick to look up."""
    world_size = fields.integer("world_size", 1, MOST_RANKS)
    ranks = fields.ranks("ranks")
    if len(ranks) != world_size:
        raise fields.wrong("ranks", f"as many ranks as 'world_size' says, {world_size}: there are {len(ranks)}")
    return dict.fromkeys(ranks)


def _files(fields: Fields) -> dict[str, Written]:
    files = {}
    for name, described in fields.mapping("files").items():
        if RANK_FILE.fullmatch(name) is None and MODEL_FILE.fullmatch(name) is None:
            raise BundleError(f"{fields.at('files')}: {name[:80]!r} is not the name of a file of a capture; not read")
        inner = fields.inner(described, f"{fields.at('files')}: {name}")
        inner.only(("bytes", "sha256"))
        digest = inner.text("sha256")
        if _SHA256.fullmatch(digest) is None:
            raise inner.wrong("sha256", "64 hexadecimal digits")
        files[name] = Written(inner.integer("bytes", 0, _LARGEST_FILE_BYTES), digest)
    return files


def _parameters(fields: Fields, ranks: Collection[int]) -> dict[int, list[str]]:
    found = fields.by_rank("parameters", ranks)
    if not all(map(is_texts, found.values())):
        raise fields.wrong("parameters", "names of parameters by rank")
    return found


def _present(fields: Fields, ranks: Collection[int], files: Mapping[str, Written]) -> tuple[int, ...]:
    present = fields.ranks("ranks_present", ranks)
    for rank in present:
        if rank_file(rank) not in files:
            raise fields.wrong("ranks_present", f"ranks that have a file: {rank_file(rank)} is not in 'files'")
    return present


def _texts_by_rank(fields: Fields, name: str, ranks: Collection[int]) -> dict[int, str]:
    found = fields.by_rank(name, ranks)
    if not is_texts(list(found.values())):
        raise fields.wrong(name, "a text by rank")
    return found


def _model_files(fields: Fields, ranks: Collection[int], files: Mapping[str, Written]) -> dict[int, str]:
    found = _texts_by_rank(fields, "model_files", ranks)
    for name in found.values():
        if MODEL_FILE.fullmatch(name) is None or name not in files:
            raise fields.wrong("model_files", f"model files that are in 'files': {name[:80]!r} is not")
    return found


def _versions(fields: Fields) -> dict[str, str]:
    found = dict(fields.mapping("versions"))
    if not is_texts(list(found.values())):
        raise fields.wrong("versions", "texts by name")
    return found
