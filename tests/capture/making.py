"""Bundles of steps that were really run, in this process: what a capture writes, without a capture."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddpstats._base.atomic_files import summary
from ddpstats._base.version import __version__
from ddpstats._observe.gradient_norms import measure
from ddpstats._rerun.random_state import RandomState
from ddpstats._rerun.serialize import to_plain
from ddpstats.capture._bundle import Manifest, bundle_name, read_manifest, write_manifest, write_part

CPU = torch.device("cpu")
WHEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
MODELS = "tests.capture.replay_models"


def run_and_keep(
    model: nn.Module,
    step: Callable[[nn.Module, Any], torch.Tensor],
    batches: Sequence[Any],
    *,
    rank: int = 0,
    world_size: int = 1,
    scale: float = 1.0,
    autocast: torch.dtype | None = None,
    raises: bool = False,
) -> dict[str, Any]:
    """A rank's part, of a step that is run here."""
    part: dict[str, Any] = {
        "rank": rank,
        "world_size": world_size,
        "step": 12,
        "device": "cpu",
        "micro_batches": [],
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        "eval_modules": [name for name, module in model.named_modules() if not module.training],
        "frozen": [name for name, parameter in model.named_parameters() if not parameter.requires_grad],
        "norm": "2",
        "gradients": None,
        "parameter_names": [name for name, _ in model.named_parameters()],
        "scale": scale,
        "error": None,
        "environment": {"host": "here", "threads": torch.get_num_threads()},
    }
    for batch in batches:
        kept = {
            "batch": to_plain(batch),
            "batch_missing": None,
            "changed": [],
            "loss": None,
            "factor": None,
            "norms": None,
        }
        kept["random"] = RandomState.take(CPU).to_plain()
        kept["autocast"] = {"device_type": "cpu", "enabled": autocast is not None, "dtype": str(torch.bfloat16)}
        part["micro_batches"].append(kept)
        under = contextlib.nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast)
        try:
            with under:
                loss = step(model, batch)
        except Exception as error:
            assert raises
            part["error"] = f"{type(error).__name__}: {error}"
            break
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        kept["loss"] = loss.detach().clone()
        kept["norms"] = measure([parameter.grad for parameter in model.parameters()])
    gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    part["gradients"] = gradients or None
    return part


def parameters_of(model: nn.Module) -> dict[str, Any]:
    tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return {"parameters": tensors, "optimizer": None, "scheduler": None, "scaler": None, "left_out": []}


def write_bundle(
    dirpath: Path,
    parts: Mapping[int, dict[str, Any]],
    model_part: dict[str, Any],
    *,
    reason: str = "nonfinite",
    step: int = 12,
    when: datetime = WHEN,
    complete: bool = True,
    culprits: Sequence[int] = (0,),
    ranks: Sequence[int] | None = None,
) -> Path:
    """As the ranks would write it together. ``ranks``: of their group; None: from 0 on."""
    directory = dirpath / bundle_name(step, when)
    directory.mkdir(parents=True)
    world_size = next(iter(parts.values()))["world_size"]
    ranks = range(world_size) if ranks is None else ranks
    files = {f"rank{rank:05d}.pt": write_part(directory, f"rank{rank:05d}.pt", part) for rank, part in parts.items()}
    files["model.pt"] = write_part(directory, "model.pt", model_part)
    bad = {rank: _bad_names(part) for rank, part in parts.items()}
    manifest = Manifest(
        reason=reason,
        step=step,
        created_utc=when.isoformat(),
        world_size=world_size,
        ranks=tuple(ranks),
        complete=complete,
        culprit_ranks=tuple(culprits),
        parameters={rank: names for rank, names in bad.items() if names},
        message="as the test says",
        files=files,
        ranks_present=tuple(sorted(parts)),
        missing={rank: "it did not come" for rank in ranks if rank not in parts},
        model_files=dict.fromkeys(ranks, "model.pt"),
        notes=[],
        versions={"torch": torch.__version__, "python": "3", "ddpstats": __version__},
    )
    write_manifest(directory, manifest)
    return directory


def _bad_names(part: dict[str, Any]) -> list[str]:
    return [name for name, one in (part["gradients"] or {}).items() if not bool(one.isfinite().all())]


def captured(
    dirpath: Path,
    factory: Callable[[], nn.Module],
    step: Callable[[nn.Module, Any], torch.Tensor],
    *batches: Any,
    seed: int = 1,
    when: datetime = WHEN,
    reason: str = "nonfinite",
    culprits: Sequence[int] | None = None,
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
    return write_bundle(dirpath, {part["rank"]: part}, model_part, reason=reason, when=when, culprits=culprits)


def rewrite_part(directory: Path, name: str, content: dict[str, Any]) -> None:
    """Another content, and a manifest that says so: what somebody with bad intentions would do."""
    manifest = read_manifest(directory)
    written = write_part(directory, name, content)
    write_manifest(directory, replace(manifest, files={**manifest.files, name: written}))


def rewrite_manifest(directory: Path, name: str) -> None:
    """A manifest that says what stands in a file now."""
    with (directory / name).open("rb") as file:
        written = summary(file)
    manifest = read_manifest(directory)
    write_manifest(directory, replace(manifest, files={**manifest.files, name: written}))
