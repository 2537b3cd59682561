"""The layers of one rank: made as the options say, told when a step is examined, and taken away together."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ddpstats._gradients import unwrapped
from ddpstats._step_record import MicroBatch, StepRecord
from ddpstats.sentinel._checkpoints import Selector
from ddpstats.sentinel._matmul import ChecksumWindow
from ddpstats.sentinel._matmul_fault import MatmulFault
from ddpstats.sentinel._options import Options
from ddpstats.sentinel._peer_replay import PeerReplay
from ddpstats.sentinel._replicas import Replicas
from ddpstats.sentinel._rerun import ReplayFn, Reruns
from ddpstats.sentinel._thresholds import Thresholds


class Layers:
    """What a `Sentinel` that is on has attached to its model. Local.

    Attributes:
        thresholds: layer 1, always.
        replicas: layer 2; None where digests are never compared.
        record, reruns: the step under way and how to repeat it; None without a ``replay_fn``.
        peer_replay: layer 3; None where micro-batches are repeated on alarm only.
        window: layer 4, shut at first.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        selection: Sequence[Selector] | None,
        replay_fn: ReplayFn | None,
        scaler: Any,
        ignore: Sequence[str],
        ranks: Sequence[int],
        rank: int,
    ) -> None:
        self._options = options
        self._steps = 0
        module = unwrapped(model)
        scale = _scale_of(scaler)
        self.thresholds = Thresholds(module, selection, options.settings, rank, scale)
        self.replicas = Replicas(model, ignore) if options.digest_every_steps else None
        self.record: StepRecord | None = None
        self.reruns: Reruns | None = None
        self.peer_replay: PeerReplay | None = None
        self.window = ChecksumWindow()
        self._window_steps = 0
        if replay_fn is not None:
            self.record = StepRecord(module)
            self.reruns = Reruns(self.record, replay_fn, self.thresholds.checkpoints, lambda: scale() or 1.0)
            if options.replay_every_steps:
                self.peer_replay = PeerReplay(model, self.reruns, ranks, rank)
        self._expect()

    @property
    def warnings(self) -> tuple[str, ...]:
        """For the user, who has just made them."""
        return (*self.thresholds.checkpoints.warnings, *(self.replicas.warnings if self.replicas else ()))

    @property
    def compares_digests(self) -> bool:
        """Whether layer 2 looks at the step under way."""
        return self.replicas is not None and (self._steps + 1) % self._options.digest_every_steps == 0

    @property
    def replays(self) -> bool:
        """Whether layer 3 looks at the step under way."""
        return self.peer_replay is not None and (self._steps + 1) % self._options.replay_every_steps == 0

    def begin(self, batch: Any) -> MicroBatch | None:
        """A micro-batch is about to run."""
        self.thresholds.checkpoints.mark()
        if self.record is None:
            return None
        is_first = not self.record.micro_batches
        found = self.record.begin(batch)
        if is_first and self.replays and self.peer_replay is not None:
            self.peer_replay.original.begin()
        return found

    def end(self) -> None:
        """It is through, or has raised."""
        if self.peer_replay is not None:
            self.peer_replay.original.end()
        if self.record is not None:
            self.record.end()

    def open_window(self, steps: int) -> None:
        """Matmuls are checked from now on, until so many calls of `next_step`."""
        self.window.open()
        self._window_steps = steps

    def take_faults(self) -> tuple[list[MatmulFault], int]:
        """Wrong rows of products since the last call: the first ones, and how many there were."""
        found = self.window.faults, self.window.fault_count
        self.window.faults, self.window.fault_count = [], 0
        return found

    def _close_window(self) -> None:
        self.window.close()
        if self.window.problem is not None:
            warnings.warn(f"Sentinel: products went unchecked: {self.window.problem!r}", stacklevel=2)
            self.window.problem = None

    def next_step(self) -> None:
        """The step is judged: let go of it."""
        self._steps += 1
        if self.record is not None:
            self.record.clear()
        if self._window_steps:
            self._window_steps -= 1
            if not self._window_steps:
                self._close_window()
        self._expect()

    def close(self) -> None:
        """Take hooks and window away. Idempotent."""
        self.window.close()
        self.thresholds.close()
        for one in (self.replicas, self.peer_replay, self.record):
            if one is not None:
                one.close()

    def _expect(self) -> None:
        if self.compares_digests and self.replicas is not None:
            self.replicas.expect()


def _scale_of(scaler: Any) -> Callable[[], float | None]:
    if scaler is None:
        return lambda: None
    return lambda: float(scaler.get_scale()) if scaler.is_enabled() else None
