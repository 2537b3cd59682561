"""`Sentinel`: the layers, put together. One optimizer step after the other, judged by all ranks together.

1. During the step each layer takes what it needs (`_layers`): values at the checkpoints, batches, digests of local
   gradients, buffers as replicas have them alike, matmuls while the window is open.
2. `Sentinel.step` makes one small all_reduce: on how many ranks is something amiss? Always, on every rank.
3. Where that says so, all ranks tell what they saw; a batch that can be run again is, on its rank and on a peer.
4. Every so many steps digests of replicas are compared, and micro-batches run on peers.
5. All ranks hold the same verdict now; in modes 2 and 3 all raise it, before any of them applies the step.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ddpstats._channel import channel_of
from ddpstats._gather import gather_trees
from ddpstats._micro_batch import Running, checked_step
from ddpstats._ranks import ranks_text
from ddpstats._step_record import MicroBatch
from ddpstats.errors import ConfigError, SentinelAlarm
from ddpstats.reduce import count_ranks
from ddpstats.sentinel._alarm_replay import explain_alarm
from ddpstats.sentinel._alarms import alarm_tree, fault_tree, matmul_finding, threshold_finding
from ddpstats.sentinel._checkpoints import Selector
from ddpstats.sentinel._detectors import ERROR
from ddpstats.sentinel._layers import Layers
from ddpstats.sentinel._lines import Check
from ddpstats.sentinel._options import check_count, checked_options, refuse_differences
from ddpstats.sentinel._rerun import ReplayFn
from ddpstats.sentinel._verdict import Finding, Verdict

_logger = logging.getLogger("ddpstats")


class Sentinel:
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
        self._options = checked_options(
            model,
            mode,
            detector,
            upper_thresh,
            sigma_thresh,
            digest_every_steps,
            replay_every_steps,
            replay_fn,
            matmul_checksum,
            checksum_steps,
        )
        self.verdict = Verdict(-1)
        channel = channel_of(group)
        self._group, self._ranks, self._rank = group, tuple(channel.ranks), int(channel.rank)
        self._layers: Layers | None = None
        if not self._options.is_off:
            self._layers = Layers(model, self._options, checkpoints, replay_fn, scaler, ignore, self._ranks, self._rank)
        self._step = 0
        self._agreed = False
        self._closed = False
        self._running: Any = None
        self._problem: Exception | None = None
        self._first_alarm: Verdict | None = None
        self._alarmed_before = False  # in the step before this one
        self._finalizer = weakref.finalize(self, _release, self._layers)
        for text in (*self._options.warnings, *(self._layers.warnings if self._layers else ())):
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

    def step(self, *, step: int | None = None) -> Verdict:
        """Judge the step: after the last ``backward()``, before ``optimizer.step()`` and ``scaler.update()``.

        Collective: every rank of the group must call, once per optimizer step. One small all_reduce where all is well.

        Args:
            step: the caller's own number of the step; by default steps are counted from 0.

        Raises:
            SentinelAlarm: in modes 2 and 3, where some layer found something; on every rank, with the same text.
            ConfigError: ranks made their sentinels differently, or a micro-batch cannot be run again; on every rank.
            InvalidStats: some rank could not look at its step; on every rank.
            ProtocolMismatch, RankMissing: as `ddpstats.StatsReducer`.
        """
        if self._closed or self._running is not None:
            raise ConfigError(f"Sentinel.step() {'after close()' if self._closed else 'inside micro_batch()'}")
        if step is not None:
            self._step = checked_step(step, "Sentinel.step")
        if not self._agreed:
            self._agree()
        self.verdict = Verdict(self._step)
        if self._layers is not None:
            try:
                self.verdict = self._judge(self._layers)
            finally:
                self._problem = None
                self._layers.next_step()
        self._step += 1
        if not self.verdict.ok and self._options.settings.mode >= 2:
            verdict = self.verdict
            raise SentinelAlarm(
                verdict.message, step=verdict.step, layers=verdict.layers, culprit_ranks=verdict.culprit_ranks
            )
        return self.verdict

    def check_matmuls(self, steps: int) -> None:
        """Open the window of layer 4 now, for so many steps: without an alarm. Every rank must call, or none. Local."""
        check_count("check_matmuls: steps", steps, 1)
        if self._layers is not None:
            self._layers.open_window(steps)

    def close(self) -> None:
        """Take all hooks away. Local; idempotent."""
        self._closed = True
        self._finalizer()

    def __enter__(self) -> Sentinel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- one micro-batch ----------------------------------------------------------------------------------------------

    def _begin(self, running: Any, batch: Any) -> MicroBatch | None:
        if self._closed or self._running is not None:
            raise ConfigError(f"micro_batch() {'after close()' if self._closed else 'inside another micro_batch()'}")
        self._running = running
        return None if self._layers is None else self._layers.begin(batch)

    def _end(self, error: BaseException | None) -> None:
        self._running = None
        if self._layers is not None:
            try:
                self._layers.end()
            except Exception as problem:  # the program's own error comes first; every rank hears of this one in `step`
                self._problem = problem

    # -- one step -----------------------------------------------------------------------------------------------------

    def _gathered(self, tree: Callable[[], Any], what: str) -> dict[int, Any]:
        """Every rank's tree, by rank. Collective."""
        found = gather_trees(tree, name=f"Sentinel.step: {what}", group=self._group, apart=True)
        return dict(zip(self._ranks, found, strict=True))

    def _agree(self) -> None:
        """Once, in every mode: a rank that is off would leave the others waiting."""
        names = self._layers.thresholds.checkpoints.names if self._layers else []
        refuse_differences(self._gathered(lambda: self._options.to_tree(names), "settings"))
        self._agreed = True

    def _judge(self, layers: Layers) -> Verdict:
        checks = self._look(layers)
        errors = [check for check in checks if check.level == ERROR]
        amiss = self._problem is not None or bool(errors) or layers.window.fault_count > 0
        count, _ = count_ranks("Sentinel.step", amiss, self._group)
        findings, notes = self._settled(layers, errors) if count else ([], [])
        if layers.compares_digests and layers.replicas is not None:
            divergence = layers.replicas.compare(self._gathered, self._step)
            if divergence is not None:
                text = divergence.message.removeprefix(f"step {self._step}: ")
                findings.append(Finding("replica digests", divergence.culprit_ranks, divergence.name, text))
        if layers.replays and layers.peer_replay is not None:
            found = layers.peer_replay.examine(self._gathered)
            findings += [] if found is None else [found]
        if findings and not notes:
            notes = self._open_window(layers)
        return self._concluded(layers, Verdict(self._step, tuple(findings), tuple(notes)))

    def _look(self, layers: Layers) -> list[Check]:
        """This rank's values, logged. What goes wrong while looking is told to all ranks by `_told`."""
        try:
            checks = layers.thresholds.look(self._step)
        except Exception as problem:
            self._problem = self._problem or problem
            return []
        layers.thresholds.log(checks)
        return checks

    def _settled(self, layers: Layers, errors: list[Check]) -> tuple[list[Finding], list[str]]:
        """Some rank saw something: all tell what. Collective."""

        def told() -> dict[str, Any]:
            if self._problem is not None:
                raise self._problem
            return {"alarm": alarm_tree(errors), "fault": fault_tree(*layers.take_faults())}

        trees = self._gathered(told, "what each rank saw")
        alarms = {rank: tree["alarm"] for rank, tree in trees.items()}
        faults = matmul_finding({rank: tree["fault"] for rank, tree in trees.items()})
        alarm = threshold_finding(alarms)
        notes = self._open_window(layers)
        if alarm is not None and layers.reruns is not None and not self._alarmed_before:
            alarm = self._explained(layers, alarm, alarms)
            if layers.window.is_open and faults is None:  # which has seen the reruns
                faults = matmul_finding(self._gathered(lambda: fault_tree(*layers.take_faults()), "faults of reruns"))
        return [one for one in (alarm, faults) if one is not None], notes

    def _open_window(self, layers: Layers) -> list[str]:
        """On every rank alike."""
        steps = self._options.checksum_steps
        if not self._options.matmul_checksum:
            return []
        layers.open_window(steps + 1)  # what is left of this one, too
        return [f"Matmuls are checked in the next {steps} steps."]

    def _explained(self, layers: Layers, finding: Finding, alarms: Mapping[int, Any]) -> Finding:
        """Hardware, or not? Collective."""
        assert layers.reruns is not None
        owner = finding.culprit_ranks[0]
        text = explain_alarm(
            self._gathered,
            layers.reruns,
            self._ranks,
            self._rank,
            owner,
            alarms[owner]["micro_batch"],
            layers.thresholds.is_abnormal,
        )
        return replace(finding, text=f"{finding.text}\n{text}")

    def _concluded(self, layers: Layers, verdict: Verdict) -> Verdict:
        """The same on every rank: what is learnt, what is said."""
        if verdict.ok:
            self._alarmed_before = False
            layers.thresholds.learn()
            return verdict
        first = self._first_alarm
        if first is None:
            self._first_alarm = verdict
        elif self._options.settings.mode == 1:
            where = f" on {ranks_text(first.culprit_ranks)}" if first.culprit_ranks else ""
            verdict = replace(
                verdict,
                notes=(*verdict.notes, f"The first alarm was at step {first.step}{where}; this may follow from it."),
            )
        self._alarmed_before = True
        if self._options.settings.mode == 1:
            layers.thresholds.learn()
        else:
            layers.thresholds.forget()
        if self._rank == min(self._ranks) and verdict.layers != ("thresholds",):  # which have lines of their own
            _logger.error("%s", verdict.message)
        return verdict


def _release(layers: Layers | None) -> None:
    if layers is not None:
        layers.close()
