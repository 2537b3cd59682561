"""The layers of one rank: what they were told to do, made so, told when a step is examined, and taken away together.

`Sentinel`: what users hold.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ddpstats._base import marks
from ddpstats._base.config import check_count, check_flag
from ddpstats._base.lazy import breaks_graph
from ddpstats._base.text import ranks_text
from ddpstats._observe.gradients import replicas_in, unwrapped
from ddpstats._ranks.comm import group_ranks
from ddpstats._ranks.step import ask_all
from ddpstats._rerun.record import MicroBatch, Running, StepRecord, StepWatch, checked_step, scale_of
from ddpstats._rerun.state import place_text
from ddpstats.errors import ConfigError, SentinelAlarm
from ddpstats.sentinel.activations import Selector
from ddpstats.sentinel.judge import Judge
from ddpstats.sentinel.matmul import ChecksumWindow
from ddpstats.sentinel.peer_replay import PeerReplay
from ddpstats.sentinel.replicas import Replicas
from ddpstats.sentinel.rerun import ReplayFn, Reruns
from ddpstats.sentinel.thresholds import SentinelSettings, Thresholds, read_settings
from ddpstats.sentinel.verdict import SentinelVerdict


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


class Sentinel(StepWatch):
    """Finds silent data corruption at the rank where it happens, before it reaches the parameters.

    Every rank of ``group`` must make one, alike, and call `step` once per optimizer step. Nothing of the training
    changes: no random number is drawn, and no gradient or parameter touched.

    Args:
        model: the module as it is trained: DistributedDataParallel itself, not what is inside.
        mode: 0 off; 1 log errors and go on; 2 log them, and raise `SentinelAlarm` on every rank; 3 as 2, and log normal
            values, too. None: DDPSTATS_SENTINEL_MODE, else NPU_ASD_ENABLE, else 0, with a warning.
        detector: of layer 1: "v2" compares L2 norms with fixed thresholds, and their jumps with their range so far;
            "v3" compares squares of the largest magnitude with multiples of their moving average.
        upper_thresh: level 1 (an error) and level 2 (a warning). None: DDPSTATS_SENTINEL_UPPER_THRESH, else
            NPU_ASD_UPPER_THRESH, else (1e6, 1e4) for "v2" and (1e6, 100) for "v3".
        sigma_thresh: the same for jumps, of "v2". None: DDPSTATS_SENTINEL_SIGMA_THRESH, else NPU_ASD_SIGMA_THRESH, else
            (1e5, 5e3).
        checkpoints: modules whose output's gradient has a value: names, classes, or functions (name, module) -> bool.
            None: the norm layers.
        digest_every_steps: layer 2, how often the bits of replicas are compared; 0 never.
        replay_every_steps: layer 3, how often micro-batches are run once more on a peer; 0: on an alarm only.
        replay_fn: ``fn(module, batch)``, of the module inside DistributedDataParallel; returns what ``backward()`` was
            called on, before a GradScaler's scale. It may not communicate.
        matmul_checksum: layer 4: check every matmul for ``checksum_steps`` steps after an alarm.
        scaler: the ``torch.amp.GradScaler``: values are divided by its scale. float16 needs it.
        ignore: patterns (as in `fnmatch`) of parameters and buffers that replicas may hold differently.
        group: the data-parallel process group; None is the default one. Without any, this process is alone.

    Attributes:
        verdict: of the last `step`.

    Raises:
        ConfigError: an argument that cannot work; on this rank only. What is wrong with an environment variable is a
            warning, and says what is used instead.

    Example::

        sentinel = Sentinel(ddp, mode=2, digest_every_steps=100)
        for batch in loader:
            loss_fn(ddp(batch["x"]), batch["y"]).backward()
            sentinel.step()             # every rank: SentinelAlarm names rank 2, here and on all others
            optimizer.step()
            optimizer.zero_grad()
    """

    _layers: Layers | None = None

    def __init__(
        self,
        model: nn.Module,
        *,
        mode: int | None = None,
        detector: str = "v2",
        upper_thresh: tuple[float, float] | None = None,
        sigma_thresh: tuple[float, float] | None = None,
        checkpoints: Sequence[Selector] | None = None,
        digest_every_steps: int = 0,
        replay_every_steps: int = 0,
        replay_fn: ReplayFn | None = None,
        matmul_checksum: bool = False,
        checksum_steps: int = 100,
        scaler: Any = None,
        ignore: Sequence[str] = (),
        group: Any = None,
    ) -> None:
        settings, notes = read_settings(mode, detector, upper_thresh, sigma_thresh, os.environ)
        self._options = Options(
            settings,
            checkpoints,
            digest_every_steps=digest_every_steps,
            replay_every_steps=replay_every_steps,
            replay_fn=replay_fn,
            matmul_checksum=matmul_checksum,
            checksum_steps=checksum_steps,
            scaler=scaler,
            ignore=ignore,
        )
        self._options.check(model)
        self.verdict = SentinelVerdict(-1)
        super().__init__("Sentinel.step", group)
        if settings.mode:  # not off
            self._layers = Layers(model, self._options, self._ranks, self._rank)
        self._judge: Judge | None = None
        self._place = f"on {place_text(model)}"
        self._closes(*(self._layers.closing() if self._layers else ()))
        for text in (*notes, *(self._layers.warnings if self._layers else ())):
            warnings.warn(f"Sentinel: {text}", stacklevel=2)

    def micro_batch(self, batch: Any) -> Running[MicroBatch | None]:
        """A context manager around the forward and backward pass of one micro-batch; needed for replay only. Local.

        It gives a `ddpstats.capture.MicroBatch`, whose ``factor`` the caller sets where the loss that ``replay_fn``
        returns is not yet what is differentiated; None where nothing is kept.

        Args:
            batch: what the step works on, in nested dicts, lists, tuples and dataclasses: tensors (kept by reference),
                arrays of numpy, numbers, strings. Enter after it is loaded and, if it is moved, on its device.

        Raises:
            ConfigError: inside another micro-batch, or after `close`.
        """
        return Running(self, batch)

    @breaks_graph
    def step(self, *, step: int | None = None) -> SentinelVerdict:
        """Judge the step: after the last ``backward()``, before ``optimizer.step()`` and ``scaler.update()``.

        Collective: every rank of the group must call, once per optimizer step. One small all_reduce where all is well.

        Args:
            step: the caller's own number of the step; by default steps are counted from 0.

        Raises:
            SentinelAlarm: in modes 2 and 3, where some layer found something; on every rank, with the same text.
            ConfigError: ranks made their sentinels differently, or a micro-batch cannot be run again; on every rank.
            InvalidStats: some rank could not look at its step, or gave a bad ``step=``; on every rank. In mode 0 a bad
                ``step=`` is a ConfigError, on its rank only.
            ProtocolMismatch, RankMissing: as `ddpstats.StatsReducer`.
        """
        self._refuse_to_judge()
        if self._layers is None and self._agreed:
            self._ask(step)
            return self._answer((0.0, 0.0), self._group)
        verdict: SentinelVerdict = ask_all(f"{self._method}()", [self], step, self._group)[0]
        alarm = self._alarm(verdict)
        if alarm is not None:
            raise alarm
        return verdict

    def check_matmuls(self, steps: int) -> None:
        """Open the window of layer 4 now, for so many steps: without an alarm. Every rank must call, or none. Local."""
        check_count("check_matmuls: steps", steps, 1)
        if self._layers is not None:
            self._layers.open_window(steps)

    # -- one micro-batch ----------------------------------------------------------------------------------------------

    def _begin(self, running: Running[MicroBatch | None], batch: Any) -> MicroBatch | None:
        self._refuse_micro_batch()
        found = None if self._layers is None else self._layers.begin(batch)
        self._running = running
        return found

    def _end(self, error: BaseException | None) -> None:
        self._running = None
        if self._layers is not None:
            try:
                self._layers.end() if error is None else self._layers.discard()
            except Exception as problem:  # the program's own error comes first; every rank hears of this one in `step`
                self._problem = problem

    # -- one step, as a question, by itself or among others ------------------------------------------------------------

    def _ask(self, step: int | None) -> tuple[float, float]:
        """(whether settings are still to be agreed on, whether this rank has something to say)"""
        self._refuse_to_judge()
        try:
            self._step = self._step if step is None else checked_step(step, self._method)
        except ConfigError as problem:  # of this rank alone, and the others are about to wait
            self._problem = problem
        seen = False
        if self._layers is not None:
            self._judge = self._judge or Judge(self._layers, self._gathered, self._rank)
            seen = self._judge.look(self._step, self._problem)
        return float(not self._agreed), float(seen)

    def _answer(self, sums: Sequence[float], group: Any) -> SentinelVerdict:
        strangers, seen = sums
        self.verdict = SentinelVerdict(self._step)
        try:
            if strangers:
                self._agree()
            if self._judge is not None:
                self.verdict = self._judge.judge(self._step, bool(seen))
            elif self._problem is not None:  # in mode 0 nothing follows in which the others could hear of it
                raise self._problem
        finally:
            self._problem = None
            if self._layers is not None:
                self._layers.next_step()
        self._step += 1
        if not self.verdict.ok:
            found = self.verdict
            marks.publish("sentinel", found.message, step=found.step, ranks=tuple(map(int, found.culprit_ranks)))
        return self.verdict

    def _drop(self) -> None:
        """The step was not judged, on any rank, also where it was not looked at: it does not count."""
        self._problem = None
        if self._layers is not None:
            self._layers.drop_step()

    def _alarm(self, verdict: SentinelVerdict) -> SentinelAlarm | None:
        """What every rank raises over that verdict, if anything."""
        if verdict.ok or self._options.settings.mode < 2:
            return None
        return SentinelAlarm(
            verdict.message, step=verdict.step, layers=verdict.layers, culprit_ranks=verdict.culprit_ranks
        )

    def _agree(self) -> None:
        """Once, in every mode: a rank that is off would leave the others waiting."""
        names = self._layers.thresholds.checkpoints.names if self._layers else []
        advice = "Every rank must make it alike, and have the same environment variables."
        told = self._agree_on(self._options.to_tree(names), advice, where=self._place)
        if self._judge is not None:
            self._judge.where = {rank: tree["where"] for rank, tree in told.items()}
