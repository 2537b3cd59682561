"""`Sentinel`: a list of detectors, and training steps, judged by all ranks together.

1. Each detector of this rank reports what it suspects.
2. One all_reduce, which is the caller's: does some rank suspect anything? Always, on every rank.
3. Where one does, all ranks gather what they suspect.
4. Each detector, in the order of `DETECTORS`, concludes from that, or examines the step if that is due.
5. The verdict is the same on every rank.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ddpstats._base import marks
from ddpstats._base.config import check_count, check_flag
from ddpstats._base.lazy import breaks_graph
from ddpstats._base.text import ranks_text
from ddpstats._observe.gradients import replicas_in, unwrap
from ddpstats._ranks.comm import group_ranks
from ddpstats._ranks.step import ask_all
from ddpstats._rerun.record import MicroBatch, Running, StepRecord, StepWatch, check_step, scale_of
from ddpstats._rerun.run import Reruns, StepFunction
from ddpstats._rerun.state import place_text
from ddpstats.errors import ConfigError, SentinelAlarm
from ddpstats.sentinel.activations import Selector
from ddpstats.sentinel.matmul import MatmulChecksum
from ddpstats.sentinel.peer_replay import MOST_NOISE, PeerReplay
from ddpstats.sentinel.replicas import ReplicaDigests
from ddpstats.sentinel.thresholds import SentinelSettings, Thresholds, read_settings
from ddpstats.sentinel.verdict import Detector, Exam, SentinelVerdict

_logger = logging.getLogger("ddpstats")
_SHOWN_RANKS = 4


@dataclass(frozen=True)
class Options(SentinelSettings):
    """The arguments of `Sentinel`."""

    checkpoints: Sequence[Selector] | None
    digest_every_steps: int
    replay_every_steps: int
    replay_fn: StepFunction | None
    replay_tolerance: float
    matmul_checksum: bool
    checksum_steps: int
    scaler: Any
    ignore: Sequence[str]

    def check(self, model: Any) -> None:
        """Raise `ConfigError`, which names the argument and what it may be."""
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model={type(model).__name__}: a torch.nn.Module is needed")
        check_count("digest_every_steps", self.digest_every_steps, 0)
        check_count("replay_every_steps", self.replay_every_steps, 0)
        check_count("checksum_steps", self.checksum_steps, 1)
        check_flag("matmul_checksum", self.matmul_checksum)
        if self.replay_fn is not None and not callable(self.replay_fn):
            raise ConfigError(f"replay_fn={self.replay_fn!r} must be a function (module, batch) that returns the loss")
        if self.replay_every_steps and self.replay_fn is None:
            raise ConfigError("replay_every_steps= needs replay_fn=: a function (module, batch) that returns the loss")
        if type(self.replay_tolerance) not in (int, float) or not 0 <= self.replay_tolerance < 1:
            raise ConfigError(f"replay_tolerance={self.replay_tolerance!r} must be a number from 0 to below 1")
        if self.scaler is not None and not (hasattr(self.scaler, "get_scale") and hasattr(self.scaler, "is_enabled")):
            raise ConfigError(f"scaler={self.scaler!r} must be a torch.amp.GradScaler")
        if not isinstance(self.ignore, (list, tuple)) or not all(isinstance(pattern, str) for pattern in self.ignore):
            raise ConfigError(f"ignore={self.ignore!r} must be a list of patterns, such as ['*.running_mean']")
        inner = unwrap(model)
        names = [name for name, _ in (*inner.named_parameters(), *inner.named_buffers())]
        for pattern in self.ignore:
            if not fnmatch.filter(names, pattern):
                raise ConfigError(f"ignore={self.ignore!r}: {pattern!r} fits no parameter or buffer of the model")

    def to_tree(self) -> dict[str, Any]:
        """Return what must be the same on all ranks, for `gather_trees`."""
        return {
            **vars(self),
            "replay_fn": self.replay_fn is not None,
            "scaler": self.scaler is not None,
            "ignore": list(self.ignore),
            "checkpoints": None,  # in `Thresholds.same_on_all_ranks`, by the modules that they choose
        }


class Setup:
    """Objects that detectors are made of. It holds neither the sentinel nor ``replay_fn``, which may hold the sentinel.

    Attributes:
        scale: of the GradScaler, now; None without one, or where it is off.
        record, reruns: the step under way and how to repeat it; None without a ``replay_fn``.
    """

    def __init__(self, model: nn.Module, options: Options, sentinel: Sentinel) -> None:
        self.model, self.options = model, replace(options, replay_fn=None)
        self.ranks, self.rank = sentinel._ranks, sentinel._rank
        self.scale = scale = functools.partial(scale_of, options.scaler)
        self.record: StepRecord | None = None
        self.reruns: Reruns | None = None
        if options.replay_fn is not None:
            self.record = StepRecord(model)
            owner: Any = weakref.proxy(sentinel)
            self.reruns = Reruns(
                self.record, lambda *args: owner._options.replay_fn(*args), "replay_fn", lambda: scale() or 1.0
            )


def _replica_digests(setup: Setup) -> Detector | None:
    every_steps = setup.options.digest_every_steps
    return ReplicaDigests(setup.model, setup.options.ignore, every_steps) if every_steps else None


def _peer_replay(setup: Setup) -> Detector | None:
    return PeerReplay(setup, setup.reruns) if setup.reruns and setup.options.replay_every_steps else None


def _matmul_checksum(setup: Setup) -> Detector:
    return MatmulChecksum(setup.options.checksum_steps if setup.options.matmul_checksum else 0)


# Functions that make the detectors of a sentinel that is on; None for a detector that is not asked for.
DETECTORS: list[Callable[[Setup], Detector | None]] = [
    Thresholds,
    _replica_digests,
    _peer_replay,
    _matmul_checksum,  # the last one: it opens after an alarm of any other
]


def _check_groups(model: nn.Module, ranks: Sequence[int]) -> None:
    """Raise `ConfigError` where DistributedDataParallel reduces over other ranks than the group's."""
    for replica in replicas_in(model):
        theirs = group_ranks(replica.process_group)
        if set(theirs) != set(ranks):
            raise ConfigError(
                f"DistributedDataParallel reduces over {ranks_text(theirs)}, and this sentinel's group has "
                f"{ranks_text(ranks)}: pass group=, the process group that was given to DistributedDataParallel"
            )


class Sentinel(StepWatch):
    """Finds silent data corruption at the rank where it happens, before it reaches the parameters.

    Every rank of ``group`` must make one with the same arguments, and call `step` once per optimizer step. Nothing of
    the training changes: no random number is drawn, and no gradient or parameter touched.

    Args:
        model: the module as it is trained: DistributedDataParallel itself, not what is inside.
        mode: 0 off; 1 log errors and go on; 2 log them, and raise `SentinelAlarm` on every rank; 3 as 2, and log normal
            values, too. None: DDPSTATS_SENTINEL_MODE, or NPU_ASD_ENABLE, or 0 with a warning.
        detector: of layer 1: "v2" compares L2 norms with fixed thresholds, and their jumps with their range so far;
            "v3" compares squares of the largest magnitude with multiples of their moving average.
        upper_thresh: level 1 (an error) and level 2 (a warning). None: DDPSTATS_SENTINEL_UPPER_THRESH, or
            NPU_ASD_UPPER_THRESH, or (1e6, 1e4) for "v2" and (1e6, 100) for "v3".
        sigma_thresh: the same for jumps, of "v2". None: DDPSTATS_SENTINEL_SIGMA_THRESH, or NPU_ASD_SIGMA_THRESH, or
            (1e5, 5e3).
        checkpoints: modules whose output's gradient has a value: names, classes, or functions (name, module) -> bool.
            None: the norm layers.
        digest_every_steps: layer 2, how often the bits of replicas are compared; 0 never.
        replay_every_steps: layer 3, how often micro-batches are run once more on a peer; 0: on an alarm only.
        replay_fn: ``fn(module, batch)``, of the module inside DistributedDataParallel; returns what ``backward()`` was
            called on, before a GradScaler's scale. It may not communicate.
        replay_tolerance: the most that norms of a repeated step's gradients may differ by, as a fraction of the
            largest, and be taken for noise or rounding.
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

    _detectors: tuple[Detector, ...] = ()  # a copy has none

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
        replay_fn: StepFunction | None = None,
        replay_tolerance: float = MOST_NOISE,
        matmul_checksum: bool = False,
        checksum_steps: int = 100,
        scaler: Any = None,
        ignore: Sequence[str] = (),
        group: Any = None,
    ) -> None:
        settings, notes = read_settings(mode, detector, upper_thresh, sigma_thresh, os.environ)
        self._options = Options(
            **vars(settings),
            checkpoints=checkpoints,
            digest_every_steps=digest_every_steps,
            replay_every_steps=replay_every_steps,
            replay_fn=replay_fn,
            replay_tolerance=replay_tolerance,
            matmul_checksum=matmul_checksum,
            checksum_steps=checksum_steps,
            scaler=scaler,
            ignore=ignore,
        )
        self._options.check(model)
        self.verdict = SentinelVerdict(-1)
        super().__init__("Sentinel.step", group)
        self._where_text = f"on {place_text(model)}"
        self._devices = {parameter.device for parameter in model.parameters()}
        self._where: dict[int, str] = {}
        self._first_alarm: SentinelVerdict | None = None
        self._evidence: list[Any] = []
        self._record: StepRecord | None = None
        with contextlib.ExitStack() as closing:  # hooks stay on a model
            if settings.mode:
                self._attach(model, closing)
            self._closes(closing.pop_all().close)
        for text in (*notes, *(text for detector in self._detectors for text in detector.warnings)):
            warnings.warn(f"Sentinel: {text}", stacklevel=2)

    def _attach(self, model: nn.Module, closing: contextlib.ExitStack) -> None:
        _check_groups(model, self._ranks)
        setup = Setup(model, self._options, self)
        self._record = setup.record
        if setup.record is not None:
            closing.callback(setup.record.close)
        for make in DETECTORS:
            detector = make(setup)
            if detector is not None:
                self._detectors += (detector,)
                closing.callback(detector.close)

    def micro_batch(self, batch: Any) -> Running[MicroBatch | None]:
        """Return a context manager around a micro-batch's forward and backward pass; needed for replay only. Local.

        It gives a record of the micro-batch, whose ``factor`` the caller sets where the loss that ``replay_fn``
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
        if not self._detectors and self._agreed:
            self._ask(step)
            return self._answer((0.0, 0.0), self._group)
        verdict: SentinelVerdict = ask_all(f"{self._method}()", [self], step, self._group)[0]
        alarm = self._alarm(verdict)
        if alarm is not None:
            raise alarm
        return verdict

    def check_matmuls(self, steps: int) -> None:
        """Check every matrix product for so many steps, without an alarm. Local; every rank passes the same number."""
        check_count("check_matmuls: steps", steps, 1)
        for detector in self._detectors:
            if isinstance(detector, MatmulChecksum):
                detector.open_for(steps)

    # -- one micro-batch ----------------------------------------------------------------------------------------------

    def _begin(self, running: Running[MicroBatch | None], batch: Any) -> MicroBatch | None:
        self._refuse_micro_batch()
        micro_batch = None if self._record is None else self._record.begin(batch)
        for detector in self._detectors:
            detector.begin()
        self._running = running
        return micro_batch

    def _end(self, error: BaseException | None) -> None:
        self._running = None
        try:
            for detector in self._detectors:
                detector.end(failed=error is not None)
            if self._record is not None:
                self._record.end()
                if error is not None:
                    self._record.drop_last()
        except Exception as problem:  # the program's own error comes first; `step` raises this one on every rank
            self._problem = problem

    # -- one step, as a question, by itself or among others ------------------------------------------------------------

    def _ask(self, step: int | None) -> tuple[float, float]:
        """Return whether settings are still to be agreed on, and whether this rank suspects anything."""
        self._refuse_to_judge()
        try:
            self._step = self._step if step is None else check_step(step, self._method)
        except ConfigError as problem:  # on this rank alone, and the others are about to wait
            self._problem = problem
        try:
            if self._detectors:
                self._wait_for_devices(self._devices)
            self._evidence = [detector.suspicious(self._step) for detector in self._detectors]
        except Exception as problem:
            self._problem = self._problem or problem
        has_evidence = any(tree is not None for tree in self._evidence)
        return float(not self._agreed), float(bool(self._detectors) and (has_evidence or self._problem is not None))

    def _answer(self, sums: Sequence[float], group: Any) -> SentinelVerdict:
        disagreeing, suspecting = sums
        self.verdict, verdict = SentinelVerdict(self._step), None
        try:
            if disagreeing:
                self._agree()
            self.verdict = verdict = self._judge(bool(suspecting))
        finally:
            self._conclude(verdict)
        self._step += 1
        if not verdict.ok:
            marks.publish("sentinel", verdict.message, step=verdict.step, ranks=tuple(map(int, verdict.culprit_ranks)))
        return verdict

    def _drop(self) -> None:
        """Forget the step, which no rank has judged: it does not count."""
        self._conclude(None)

    def _conclude(self, verdict: SentinelVerdict | None) -> None:
        self._problem, self._evidence = None, []
        for detector in self._detectors:
            detector.conclude(verdict)
        if self._record is not None:
            self._record.clear()

    def _judge(self, is_suspected: bool) -> SentinelVerdict:
        """Return the verdict. Collective, but in mode 0, where the other ranks could not raise this one's problem."""
        if not self._detectors and self._problem is not None:
            raise self._problem

        def suspicions() -> list[Any]:
            if self._problem is not None:
                raise self._problem
            return self._evidence

        trees = self._gather(suspicions, "what each rank saw") if is_suspected else {}
        exam = Exam(self._step, self._gather, self._detectors, is_suspected)
        for index, detector in enumerate(self._detectors):
            exam.evidence = {rank: tree[index] for rank, tree in trees.items()}
            exam.findings += detector.findings(exam)
        if not exam.findings:
            return SentinelVerdict(self._step, (), tuple(exam.notes))
        # Alarms of layer 1 have lines of their own, on their rank.
        says_more = bool(exam.notes) or any(finding.layer != "thresholds" for finding in exam.findings)
        verdict = SentinelVerdict(self._step, tuple(exam.findings), tuple(exam.notes))
        verdict = replace(verdict, notes=(*verdict.notes, *self._advice(verdict, exam.may_be_hardware)))
        if says_more and self._rank == min(self._where):
            _logger.error("%s", verdict.message)
        self._first_alarm = self._first_alarm or verdict
        return verdict

    def _advice(self, verdict: SentinelVerdict, may_be_hardware: bool) -> list[str]:
        mode, culprits, first = self._options.mode, verdict.culprit_ranks, self._first_alarm
        lines = [f"Rank {rank} is {self._where[rank]}." for rank in culprits[:_SHOWN_RANKS]]
        if first is not None and mode == 1:
            where = f" on {ranks_text(first.culprit_ranks)}" if first.culprit_ranks else ""
            lines.append(f"The first alarm was at step {first.step}{where}; this may follow from it.")
        if mode >= 2 and culprits and len(culprits) < len(self._where):
            is_hardware = len(culprits) > 1 or may_be_hardware
            advice = f"Test the device of {ranks_text(culprits)}, or go on without it, from this step or a checkpoint"
            in_data = f"Look at the batch of {ranks_text(culprits)}, and at what the model makes of it"
            lines.append(f"No rank has applied this step. {f'{advice} before it' if is_hardware else in_data}.")
        return lines

    def _alarm(self, verdict: SentinelVerdict) -> SentinelAlarm | None:
        """Return what every rank raises over that verdict, if anything."""
        if verdict.ok or self._options.mode < 2:
            return None
        return SentinelAlarm(
            verdict.message, step=verdict.step, layers=verdict.layers, culprit_ranks=verdict.culprit_ranks
        )

    def _agree(self) -> None:
        """Agree on settings, in every mode: a rank that is off would leave the others waiting. Called once."""
        settings = self._options.to_tree()
        for detector in self._detectors:
            kind, own = type(detector).__name__, detector.same_on_all_ranks
            settings.update({f"{kind}.{name}": value for name, value in own.items()})
        advice = "Every rank must make it with the same arguments, and have the same environment variables."
        trees = self._agree_on(settings, advice, where=self._where_text)
        self._where = {rank: tree["where"] for rank, tree in trees.items()}
