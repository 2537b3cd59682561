"""What a `Sentinel` was told to do: checked, and the same on every rank."""

from __future__ import annotations

import fnmatch
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ddpstats._base.arguments import check_count
from ddpstats._observe.gradients import unwrapped
from ddpstats.errors import ConfigError
from ddpstats.sentinel._settings import SentinelSettings, read_settings


@dataclass(frozen=True)
class Options:
    """Arguments of `Sentinel`, and the settings of the thresholds."""

    settings: SentinelSettings
    warnings: tuple[str, ...]
    digest_every_steps: int
    replay_every_steps: int
    has_replay_fn: bool
    matmul_checksum: bool
    checksum_steps: int
    has_scaler: bool
    ignore: tuple[str, ...]

    @property
    def is_off(self) -> bool:
        """Mode 0."""
        return self.settings.mode == 0

    def to_tree(self, checkpoints: Sequence[str]) -> dict[str, Any]:
        """What all ranks must have alike. For `gather_trees`."""
        settings = self.settings
        return {
            "mode": settings.mode,
            "detector": settings.detector,
            "upper_thresh": list(settings.upper),
            "sigma_thresh": list(settings.sigma),
            "digest_every_steps": self.digest_every_steps,
            "replay_every_steps": self.replay_every_steps,
            "replay_fn": "given" if self.has_replay_fn else None,
            "matmul_checksum": self.matmul_checksum,
            "checksum_steps": self.checksum_steps,
            "scaler": "given" if self.has_scaler else None,
            "ignore": list(self.ignore),
            "checkpoints": f"{len(checkpoints)} (CRC-32 of their names {zlib.crc32(repr(checkpoints).encode()):08x})",
        }


def checked_options(
    model: Any,
    *,
    mode: int | None,
    detector: str,
    upper_thresh: tuple[float, float] | None,
    sigma_thresh: tuple[float, float] | None,
    digest_every_steps: int,
    replay_every_steps: int,
    replay_fn: Any,
    matmul_checksum: bool,
    checksum_steps: int,
    scaler: Any,
    ignore: Any,
) -> Options:
    """Raises `ConfigError`, which names the argument and what it may be."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model={type(model).__name__}: a torch.nn.Module is needed")
    settings, warnings = read_settings(mode, detector, upper_thresh, sigma_thresh, os.environ)
    check_count("digest_every_steps", digest_every_steps, 0)
    check_count("replay_every_steps", replay_every_steps, 0)
    check_count("checksum_steps", checksum_steps, 1)
    if replay_fn is not None and not callable(replay_fn):
        raise ConfigError(f"replay_fn={replay_fn!r} must be a function (module, batch) that returns the loss")
    if replay_every_steps and replay_fn is None:
        raise ConfigError("replay_every_steps= needs replay_fn=: a function (module, batch) that returns the loss")
    if not isinstance(matmul_checksum, bool):
        raise ConfigError(f"matmul_checksum={matmul_checksum!r} must be True or False")
    if scaler is not None and not (hasattr(scaler, "get_scale") and hasattr(scaler, "is_enabled")):
        raise ConfigError(f"scaler={scaler!r} must be a torch.amp.GradScaler")
    return Options(
        settings,
        warnings,
        digest_every_steps,
        replay_every_steps,
        replay_fn is not None,
        matmul_checksum,
        checksum_steps,
        scaler is not None,
        _checked_patterns(model, ignore),
    )


def _checked_patterns(model: nn.Module, ignore: Any) -> tuple[str, ...]:
    if isinstance(ignore, str) or not isinstance(ignore, Sequence) or not all(isinstance(one, str) for one in ignore):
        raise ConfigError(f"ignore={ignore!r} must be a list of patterns, such as ['*.running_mean']")
    inner = unwrapped(model)
    names = [name for name, _ in (*inner.named_parameters(), *inner.named_buffers())]
    for pattern in ignore:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(f"ignore={list(ignore)!r}: {pattern!r} fits no parameter or buffer of the model")
    return tuple(ignore)
