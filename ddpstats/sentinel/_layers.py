"""The layers of one rank: made as the options say, told when a step is examined, and taken away together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ddpstats._base.rank_names import ranks_text
from ddpstats._observe.gradients import replicas_in, unwrapped
from ddpstats._rerun.step_record import MicroBatch, StepRecord
from ddpstats._transport.comm import group_ranks
from ddpstats.errors import ConfigError
from ddpstats.sentinel._checkpoints import Selector
from ddpstats.sentinel._matmul import ChecksumWindow
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
        ranks: Sequence[int],
        rank: int,
    ) -> None:
        _check_groups(model, ranks)
        self._options = options
        self._steps = 0
        scale = _scale_of(scaler)
        self.thresholds = Thresholds(unwrapped(model), selection, options.settings, rank, scale)
        self.replicas: Replicas | None = None
        self.record: StepRecord | None = None
        self.reruns: Reruns | None = None
        self.peer_replay: PeerReplay | None = None
        self.window = ChecksumWindow()
        self._window_steps = 0
        try:
            self._add_others(model, replay_fn, lambda: scale() or 1.0, ranks, rank)
        except BaseException:  # nobody will hold them, and hooks stay on a model
            for close in self.closing():
                close()
            raise

    def _add_others(
        self,
        model: nn.Module,
        replay_fn: ReplayFn | None,
        scale: Callable[[], float],
        ranks: Sequence[int],
        rank: int,
    ) -> None:
        """Layers 2 and 3, as far as they are asked for."""
        if self._options.digest_every_steps:
            self.replicas = Replicas(model, self._options.ignore)
        if replay_fn is not None:
            self.record = StepRecord(unwrapped(model))
            self.reruns = Reruns(self.record, replay_fn, self.thresholds.checkpoints, scale)
            if self._options.replay_every_steps:
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
        """Whether layer 3 looks at the step under way; at the first one, so that what cannot work is known at once."""
        if self.peer_replay is None:
            return False
        return self._steps == 0 or (self._steps + 1) % self._options.replay_every_steps == 0

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
        if self.record is not None:
            self.record.clear()
        if self._window_steps:
            self._window_steps -= 1
            if not self._window_steps:
                self.window.close()
        else:
            self.window.tidy()
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


def _scale_of(scaler: Any) -> Callable[[], float | None]:
    if scaler is None:
        return lambda: None
    return lambda: float(scaler.get_scale()) if scaler.is_enabled() else None
