"""A capture on disk: its names, its manifest, its content, and how it is read without executing anything.

A bundle is a directory ``capture-<UTC>-step<step>``; what a rank that raised writes alone ends in ``-rank<rank>``.
``-2``, ``-3``, ... follow a name that exists: two jobs may write to one directory. It holds:

- ``rank<rank>.safetensors``: one rank's step, a `RankPart`.
- ``model.safetensors``: the parameters, a `ModelPart`; or a ``model-rank<rank>.safetensors`` of each rank whose
  parameters differ or are shards.
- MANIFEST.json, which is written last: a bundle that has one was written to its end.

Nothing that is read is trusted. A file that a manifest names has a plain name, so that no path leads out of the bundle;
it is no link, and has the size and the SHA-256 that the manifest says. Then the codec checks the rest.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, TypeVar

import msgspec
import torch
from torch import Tensor

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
from ddpstats._base.text import count_of, ranks_text
from ddpstats._base.version import __version__
from ddpstats._rerun import codec
from ddpstats._rerun.record import Packet
from ddpstats.errors import BundleError

T = TypeVar("T")

_log = logging.getLogger("ddpstats")

VERSION = 2
MANIFEST = "MANIFEST.json"

# When, in which step, of which rank if it raised, and which of several of that name
BUNDLE_NAME = re.compile(r"capture-(\d{8}T\d{6}Z)-step(\d{8,18})(?:-rank(\d{5,7}))?(?:-(\d{1,4}))?")
_FILE_NAME = re.compile(r"(rank\d{5,7}|model|model-rank\d{5,7})\.safetensors")

_MAX_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
_MAX_SAME_NAMES = 1000

Rank = Annotated[int, msgspec.Meta(ge=0, lt=1_000_000)]
Step = Annotated[int, msgspec.Meta(ge=0, lt=10**18)]


# -- the manifest -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """The size and the hash of a file's content."""

    bytes: Annotated[int, msgspec.Meta(ge=0)]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


def _versions() -> dict[str, str]:
    return {"ddpstats": __version__, "torch": str(torch.__version__), "python": sys.version.split()[0]}


@dataclass(frozen=True)
class Manifest:
    """What happened, and which files hold it.

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
    step: Step
    created_utc: str
    ranks: tuple[Rank, ...]
    complete: bool
    culprit_ranks: tuple[Rank, ...]
    message: str
    files: dict[str, Written]
    ranks_present: tuple[Rank, ...]
    model_files: dict[Rank, str]
    parameters: dict[Rank, list[str]] = field(default_factory=dict)
    missing: dict[Rank, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=_versions)
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


# -- the content ------------------------------------------------------------------------------------------------------


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
    """Where a tensor belongs in its parameter, which has ``shape``."""

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
        others = dict.fromkeys(other for other in self.manifest.model_files.values() if other != name)
        return _joined([part, *(self._load(other, ModelPart) for other in others)], str(self.path))

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


def _incomplete_notes(manifest: Manifest) -> list[str]:
    if manifest.complete:
        return []
    reasons = "; ".join([*(f"rank {rank}: {why}" for rank, why in manifest.missing.items()), *manifest.notes])
    return [f"the bundle is incomplete, what is there is used ({reasons[:1000]})"]


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
    """Remove the oldest complete bundles but ``keep``, and return them. Local.

    What a rank wrote alone counts with what the same rank wrote alone. A directory is removed if it holds nothing but a
    bundle's files; what cannot be removed stays, with a warning.

    Args:
        newest: what was just written. It stays, also where clocks went back and others have later names.
    """
    rank = _rank_of(newest)
    others = [bundle for bundle in bundles_in(dirpath) if _rank_of(bundle[0]) == rank and bundle[0].name != newest.name]
    complete = [path for path, manifest in others if manifest and (manifest.complete or rank)]
    return [path for path in complete[: len(complete) - keep + 1] if _remove(path)]


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
