"""`Sentinel`: what users hold. The layers behind it (`_layers`), and all ranks' judgement of a step (`_judge`)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from ddpstats._base import marks
from ddpstats._base.config import check_count
from ddpstats._base.lazy import breaks_graph
from ddpstats._ranks.step import ask_all
from ddpstats._rerun.record import MicroBatch, Running, StepWatch, checked_step
from ddpstats._rerun.state import place_text
from ddpstats.errors import ConfigError, SentinelAlarm
from ddpstats.sentinel._checkpoints import Selector
from ddpstats.sentinel._layers import Layers, Options
from ddpstats.sentinel._settings import read_settings
from ddpstats.sentinel._verdict import SentinelVerdict
from ddpstats.sentinel.judge import Judge
from ddpstats.sentinel.rerun import ReplayFn


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
