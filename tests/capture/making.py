"""Bundles of steps that were really run in this process: as ranks would write them together, finite or not."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from ddpstats import NaNCapture
from ddpstats._base.version import __version__
from ddpstats._rerun import codec
from ddpstats.capture.bundle import write_part
from ddpstats.capture.manifest import Manifest, Written, bundle_name, read_manifest, summarize, write_manifest

T = TypeVar("T")

CPU = torch.device("cpu")
WHEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
MODELS = "tests.capture.replay_models"
Reason = Literal["nonfinite", "overflow", "scaler_skips", "exception"]


def run_and_keep(
    model: nn.Module,
    step: Callable[[nn.Module, Any], torch.Tensor],
    batches: Sequence[Any],
    *,
    rank: int = 0,
    world_size: int = 1,
    scale: float = 1.0,
    autocast: torch.dtype | None = None,
) -> dict[str, Any]:
    """Run a step here and return a rank's part of it as a capture has it, with the gradients whatever they are."""
    error, scaler = None, torch.amp.GradScaler("cpu", init_scale=scale)
    with NaNCapture("never written", model=model, scaler=scaler) as capture:
        for batch in batches:
            with capture.micro_batch(batch) as micro:
                try:
                    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                        micro.loss = step(model, batch)
                except Exception as raised:
                    error = f"{type(raised).__name__}: {raised}"
                    break
                scaler.scale(micro.loss).backward()  # type: ignore[no-untyped-call]
        part = capture._source.rank_part(rank, world_size, 12, error)
    gradients = {name: tensor.grad.clone() for name, tensor in model.named_parameters() if tensor.grad is not None}
    return stored_and_read(part, dict) | {"gradients": gradients or None}


def parameters_of(model: nn.Module) -> dict[str, Any]:
    tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return {"parameters": tensors, "shards": {}}


def write_bundle(
    dirpath: Path,
    parts: Mapping[int, dict[str, Any]],
    model_part: dict[str, Any],
    *,
    reason: Reason = "nonfinite",
    step: int = 12,
    when: datetime = WHEN,
    complete: bool = True,
    culprits: Sequence[int] = (0,),
    ranks: Sequence[int] | None = None,
) -> Path:
    """Write what the ranks would write together. ``ranks`` are those of their group; None: from 0 on."""
    directory = dirpath / bundle_name(step, when)
    directory.mkdir(parents=True)
    world_size = next(iter(parts.values()))["world_size"]
    ranks = range(world_size) if ranks is None else ranks
    files = {
        f"rank{rank:05d}.safetensors": _write(directory, f"rank{rank:05d}.safetensors", part)
        for rank, part in parts.items()
    }
    files["model.safetensors"] = _write(directory, "model.safetensors", model_part)
    bad = {rank: _bad_names(part) for rank, part in parts.items()}
    manifest = Manifest(
        reason=reason,
        step=step,
        created_utc=when.isoformat(),
        ranks=tuple(ranks),
        complete=complete,
        culprit_ranks=tuple(culprits),
        parameters={rank: names for rank, names in bad.items() if names},
        message="as the test says",
        files=files,
        ranks_present=tuple(sorted(parts)),
        missing={rank: "it did not come" for rank in ranks if rank not in parts},
        model_files=dict.fromkeys(ranks, "model.safetensors"),
        notes=[],
        versions={"torch": str(torch.__version__), "python": "3", "ddpstats": __version__},
    )
    write_manifest(directory, manifest)
    return directory


def _write(directory: Path, name: str, content: Any) -> Written:
    return write_part(directory, name, content)


def _bad_names(part: dict[str, Any]) -> list[str]:
    return [name for name, gradient in (part["gradients"] or {}).items() if not bool(gradient.isfinite().all())]


def captured(
    dirpath: Path,
    factory: Callable[[], nn.Module],
    step: Callable[[nn.Module, Any], torch.Tensor],
    *batches: Any,
    seed: int = 1,
    when: datetime = WHEN,
    reason: Reason = "nonfinite",
    culprits: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    prepare: Callable[[nn.Module], None] | None = None,
    **run: Any,
) -> Path:
    """Make the module, run the step, write the bundle."""
    torch.manual_seed(seed)
    model = factory()
    if prepare is not None:
        prepare(model)
    model_part = parameters_of(model)
    part = run_and_keep(model, step, batches, **run)
    culprits = [part["rank"]] if culprits is None else culprits
    return write_bundle(
        dirpath, {part["rank"]: part}, model_part, reason=reason, when=when, culprits=culprits, ranks=ranks
    )


def stored_and_read(value: Any, kind: type[T]) -> T:
    """Return what comes back from a file in which a value was stored."""
    with tempfile.TemporaryFile() as file:
        codec.write(file, value)
        file.flush()
        return codec.read(file, kind, "a file")


def load(path: Path) -> dict[str, Any]:
    """Return what a file of a bundle holds."""
    with path.open("rb") as file:
        return codec.read(file, dict, str(path))


def rewrite_part(directory: Path, name: str, content: dict[str, Any]) -> None:
    """Write another content, and a manifest that says so, as an attacker would."""
    manifest = read_manifest(directory)
    written = _write(directory, name, content)
    write_manifest(directory, replace(manifest, files={**manifest.files, name: written}))


def rewrite_manifest(directory: Path, name: str) -> None:
    """Write a manifest that says what a file holds now."""
    with (directory / name).open("rb") as file:
        written = summarize(file)
    manifest = read_manifest(directory)
    write_manifest(directory, replace(manifest, files={**manifest.files, name: written}))
