"""The layers of one rank: what they were told to do, made so, told when a step is examined, and taken away together."""

from __future__ import annotations

import fnmatch
import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ddpstats._base.config import check_count, check_flag
from ddpstats._base.text import ranks_text
from ddpstats._observe.gradients import replicas_in, unwrapped
from ddpstats._ranks.comm import group_ranks
from ddpstats._rerun.record import MicroBatch, StepRecord, scale_of
from ddpstats.errors import ConfigError
from ddpstats.sentinel._checkpoints import Selector
from ddpstats.sentinel._matmul import ChecksumWindow
from ddpstats.sentinel._replicas import Replicas
from ddpstats.sentinel._settings import SentinelSettings
from ddpstats.sentinel._thresholds import Thresholds
from ddpstats.sentinel.peer_replay import PeerReplay
from ddpstats.sentinel.rerun import ReplayFn, Reruns


@dataclass(frozen=True)
class Options:
    """Arguments of `Sentinel`, and the settings of the thresholds."""

    settings: SentinelSettings
    checkpoints: Sequence[Selector] | None
    digest_every_steps: int
    replay_every_steps: int
    replay_fn: ReplayFn | None
    matmul_checksum: bool
    checksum_steps: int
    scaler: Any
    ignore: Sequence[str]

    def check(self, model: Any) -> None:
        """Raises `ConfigError`, which names the argument and what it may be. Thresholds look at their own."""
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model={type(model).__name__}: a torch.nn.Module is needed")
        check_count("digest_every_steps", self.digest_every_steps, 0)
        check_count("replay_every_steps", self.replay_every_steps, 0)
        check_count("checksum_steps", self.checksum_steps, 1)
        if self.replay_fn is not None and not callable(self.replay_fn):
            raise ConfigError(f"replay_fn={self.replay_fn!r} must be a function (module, batch) that returns the loss")
        if self.replay_every_steps and self.replay_fn is None:
            raise ConfigError("replay_every_steps= needs replay_fn=: a function (module, batch) that returns the loss")
        check_flag("matmul_checksum", self.matmul_checksum)
        if self.scaler is not None and not (hasattr(self.scaler, "get_scale") and hasattr(self.scaler, "is_enabled")):
            raise ConfigError(f"scaler={self.scaler!r} must be a torch.amp.GradScaler")
        _check_patterns(model, self.ignore)

    def to_tree(self, names: Sequence[str]) -> dict[str, Any]:
        """What all ranks must have alike. For `gather_trees`. ``names``: of the checkpoints."""
        settings = self.settings
        return {
            "mode": settings.mode,
            "detector": settings.detector,
            "upper_thresh": list(settings.upper),
            "sigma_thresh": list(settings.sigma),
            "digest_every_steps": self.digest_every_steps,
            "replay_every_steps": self.replay_every_steps,
            "replay_fn": None if self.replay_fn is None else "given",
            "matmul_checksum": self.matmul_checksum,
            "checksum_steps": self.checksum_steps,
            "scaler": None if self.scaler is None else "given",
            "ignore": list(self.ignore),
            "checkpoints": f"{len(names)} (CRC-32 of their names {zlib.crc32(repr(names).encode()):08x})",
        }


def _check_patterns(model: nn.Module, ignore: Any) -> None:
    if isinstance(ignore, str) or not isinstance(ignore, Sequence) or not all(isinstance(one, str) for one in ignore):
        raise ConfigError(f"ignore={ignore!r} must be a list of patterns, such as ['*.running_mean']")
    inner = unwrapped(model)
    names = [name for name, _ in (*inner.named_parameters(), *inner.named_buffers())]
    for pattern in ignore:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(f"ignore={list(ignore)!r}: {pattern!r} fits no parameter or buffer of the model")


class Layers:
    """What a `Sentinel` that is on has attached to its model. Local.

    Attributes:
        options: what it was told to do.
        thresholds: layer 1, always.
        replicas: layer 2; None where digests are never compared.
        record, reruns: the step under way and how to repeat it; None without a ``replay_fn``.
        peer_replay: layer 3; None where micro-batches are repeated on alarm only.
        window: layer 4, shut at first.
    """

    def __init__(self, model: nn.Module, options: Options, ranks: Sequence[int], rank: int) -> None:
        _check_groups(model, ranks)
        self.options = options
        self._steps = 0
        scale = functools.partial(scale_of, options.scaler)
        self.thresholds = Thresholds(unwrapped(model), options.checkpoints, options.settings, rank, scale)
        self.replicas: Replicas | None = None
        self.record: StepRecord | None = None
        self.reruns: Reruns | None = None
        self.peer_replay: PeerReplay | None = None
        self.window = ChecksumWindow()
        self._window_steps = 0
        try:
            self._add_others(model, lambda: scale() or 1.0, ranks, rank)
        except BaseException:  # nobody will hold them, and hooks stay on a model
            for close in self.closing():
                close()
            raise

    def _add_others(self, model: nn.Module, scale: Callable[[], float], ranks: Sequence[int], rank: int) -> None:
        """Layers 2 and 3, as far as they are asked for."""
        if self.options.digest_every_steps:
            self.replicas = Replicas(model, self.options.ignore)
        if self.options.replay_fn is not None:
            self.record = StepRecord(model)
            self.reruns = Reruns(self.record, self.options.replay_fn, self.thresholds.checkpoints, scale)
            if self.options.replay_every_steps:
                self.peer_replay = PeerReplay(model, self.reruns, ranks, rank)
        self._expect()

    @property
    def warnings(self) -> tuple[str, ...]:
        """For the user, who has just made them."""
        return (*self.thresholds.checkpoints.warnings, *(self.replicas.warnings if self.replicas else ()))

    @property
    def compares_digests(self) -> bool:
        """Whether layer 2 looks at the step under way."""
        return self.replicas is not None and (self._steps + 1) % self.options.digest_every_steps == 0

    @property
    def replays(self) -> bool:
        """Whether layer 3 looks at the step under way; at the first one, so that what cannot work is known at once."""
        if self.peer_replay is None:
            return False
        return self._steps == 0 or (self._steps + 1) % self.options.replay_every_steps == 0

    def begin(self, batch: Any) -> MicroBatch | None:
        """A micro-batch is about to run."""
        self.thresholds.checkpoints.begin()
        if self.record is None:
            return None
        is_first = not self.record.micro_batches
        try:
            found = self.record.begin(batch)
        except BaseException:  # of a batch with a mind of its own
            self.thresholds.checkpoints.discard()
            raise
        if is_first and self.replays and self.peer_replay is not None:
            self.peer_replay.original.begin()
        return found

    def end(self) -> None:
        """It is through."""
        self.thresholds.checkpoints.end()
        if self.peer_replay is not None:
            self.peer_replay.original.end()
        if self.record is not None:
            self.record.end()

    def discard(self) -> None:
        """It has raised, and is no part of the step."""
        self.thresholds.checkpoints.discard()
        if self.record is not None:
            if len(self.record.micro_batches) == 1 and self.peer_replay is not None:
                self.peer_replay.original.end()
                self.peer_replay.original.discard()
            self.record.end()
            self.record.micro_batches.pop()

    def open_window(self, steps: int) -> None:
        """Matmuls are checked from now on, until so many calls of `next_step`, or longer if it is open for longer."""
        self.window.open()
        self._window_steps = max(self._window_steps, steps)

    def next_step(self) -> None:
        """The step is judged: let go of it."""
        self._steps += 1
        if self._window_steps:
            self._window_steps -= 1
            if not self._window_steps:
                self.window.close()
        else:
            self.window.tidy()
        self.drop_step()

    def drop_step(self) -> None:
        """Let go of a step that nobody has judged: the next one is in its place."""
        if self.record is not None:
            self.record.clear()
        self._expect()

    def closing(self) -> list[Callable[[], None]]:
        """What takes hooks and window away; none of it holds what the user gave, which may hold the sentinel."""
        found: list[Callable[[], None]] = [self.window.close, self.thresholds.checkpoints.close]
        found += [one.close for one in (self.replicas, self.record) if one is not None]
        return found if self.peer_replay is None else [*found, self.peer_replay.original.close]

    def _expect(self) -> None:
        if self.compares_digests and self.replicas is not None:
            self.replicas.expect()


def _check_groups(model: nn.Module, ranks: Sequence[int]) -> None:
    """Replicas are the ranks that DistributedDataParallel reduces over."""
    for replica in replicas_in(model):
        theirs = group_ranks(replica.process_group)
        if set(theirs) != set(ranks):
            raise ConfigError(
                f"DistributedDataParallel reduces over {ranks_text(theirs)}, and this sentinel's group has "
                f"{ranks_text(ranks)}: pass group=, the process group that was given to DistributedDataParallel"
            )
