"""`StepChecks`: NaN capture, sentinel and guard judge a step in one all_reduce instead of one each.

Each of them passes a `Question` to all ranks, without knowing the others (`_ranks.step`). While nothing is wrong, one
sum answers all three. Otherwise each makes its own collectives, in this order: the guard, the capture, the sentinel. So
a mismatch is raised before a NaN is reported, and an alarm comes last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ddpstats._base import config
from ddpstats._base.lazy import breaks_graph, refuse_without_values
from ddpstats._base.text import ranks_text
from ddpstats._ranks.calls import Channel, channel_of
from ddpstats._ranks.step import Question, ask_all
from ddpstats.errors import ConfigError

if TYPE_CHECKING:
    from ddpstats.capture import CaptureVerdict, NaNCapture
    from ddpstats.guard import collective_guard
    from ddpstats.sentinel import Sentinel, SentinelVerdict


@dataclass(frozen=True)
class StepVerdicts:
    """The verdicts of `StepChecks.step` on one step, equal on every rank.

    Attributes:
        capture: as `NaNCapture.check` returns it; None without a capture.
        sentinel: as `Sentinel.step` returns it; None without a sentinel.
    """

    capture: CaptureVerdict | None = None
    sentinel: SentinelVerdict | None = None

    @property
    def ok(self) -> bool:
        """Return whether nothing was found."""
        return all(verdict is None or verdict.ok for verdict in (self.capture, self.sentinel))


class StepChecks:
    """NaN capture, sentinel and guard in one all_reduce a step.

    `step` takes the place of ``capture.check()``, ``sentinel.step()`` and ``guard.step()``.
    Every rank must make one, of the same parts, and call `step` once per optimizer step. The parts are made, used
    around micro-batches, and closed as without it. Their own calls go on working, if all ranks make them.

    Args:
        capture: a `NaNCapture`.
        sentinel: a `Sentinel` over the same process group.
        guard: a `collective_guard`, which is entered as usual. It compares all groups of the program, so the group of
            the others must hold all ranks. In mode "strict" what was not compared yet is; "record" and "off" ask
            nothing.

    Raises:
        ConfigError: an argument of another type, none at all, or groups that do not fit; on this rank only.

    Example::

        checks = ddpstats.StepChecks(capture=capture, sentinel=sentinel, guard=guard)
        for batch in loader:
            with capture.micro_batch(batch), sentinel.micro_batch(batch):
                loss_fn(ddp(batch["x"]), batch["y"]).backward()
            verdicts = checks.step()            # every rank: one all_reduce, the same verdicts
            if verdicts.capture.should_stop:    # rank 1 saw the NaN, all ranks are here
                break
            optimizer.step()
            optimizer.zero_grad()
    """

    def __init__(
        self,
        *,
        capture: NaNCapture | None = None,
        sentinel: Sentinel | None = None,
        guard: collective_guard | None = None,
    ) -> None:
        self._capture, self._sentinel, self._guard = capture, sentinel, guard
        _check_parts(capture, sentinel, guard)
        self._watches = [part for part in (capture, sentinel) if part is not None]
        _check_groups([channel_of(part._group) for part in self._watches] or [channel_of(None)], guard is not None)
        guards = [] if guard is None else [f"collective_guard({guard.mode!r})"]
        self._name = f"StepChecks.step() of {', '.join([*guards, *(type(part).__name__ for part in self._watches)])}"

    @breaks_graph
    def step(self, *, step: int | None = None) -> StepVerdicts:
        """Judge the step: after the last ``backward()`` (and ``scaler.unscale_``), before ``optimizer.step()``.

        Collective: every rank of the group must call, once per optimizer step. One small all_reduce where all is well
        and no replicas are to be compared; the first call agrees on settings besides. It waits for as long as the
        parts' shortest timeout.

        Args:
            step: the caller's own number of the step; by default steps are counted from 0.

        Returns:
            The verdicts of capture and sentinel. Where the capture's says stop or skip, an alarm of the sentinel is
            returned in ``.sentinel`` and not raised: the caller already knows not to take the step.

        Raises:
            CollectiveMismatch: as `collective_guard.step`; also on ranks that are not in the group where it is.
            SentinelAlarm: as `Sentinel.step`.
            BundleError, ConfigError: as `NaNCapture.check` and `Sentinel.step`.
            InvalidStats: some rank could not judge its step, or called inside of a micro-batch or after ``close()``; on
                every rank. A process that is alone raises the ConfigError itself.
            ProtocolMismatch: ranks made theirs of different parts, or some of them made another call; on every rank.
            RankMissing: as `ddpstats.StatsReducer`.
        """
        refuse_without_values("StepChecks.step")
        group = self._watches[0]._group if self._watches else None
        questions: list[Question] = [] if self._guard is None else [self._guard._question()]
        answers = iter(ask_all(self._name, [*questions, *self._watches], step, group, self._timeout_sec()))
        if self._guard is not None:
            next(answers)
        verdicts = StepVerdicts(
            None if self._capture is None else next(answers), None if self._sentinel is None else next(answers)
        )
        is_skipped = verdicts.capture is not None and verdicts.capture.should_skip
        if self._sentinel is not None and verdicts.sentinel is not None and not is_skipped:
            alarm = self._sentinel._alarm(verdicts.sentinel)
            if alarm is not None:
                raise alarm
        return verdicts

    def _timeout_sec(self) -> float:
        default = config.timeout_sec(None)
        return default if self._guard is None else min(default, self._guard._timeout_sec)


def _check_parts(capture: Any, sentinel: Any, guard: Any) -> None:
    """Raise `ConfigError` for an argument of another type, without importing wings that may not be used."""
    for name, part, method, wanted in (
        ("capture", capture, "check", "NaNCapture"),
        ("sentinel", sentinel, "check_matmuls", "Sentinel"),
        ("guard", guard, "_question", "collective_guard"),
    ):
        if part is not None and not hasattr(part, method):
            raise ConfigError(f"StepChecks({name}=...): a ddpstats.{wanted} is needed, not a {type(part).__name__}")
    if capture is None and sentinel is None and guard is None:
        raise ConfigError("StepChecks() checks nothing: pass at least one of capture=, sentinel= and guard=")


def _check_groups(channels: list[Channel], has_guard: bool) -> None:
    """Raise `ConfigError` unless one all_reduce can serve all: the same group, of all ranks if there is a guard."""
    first, last = channels[0], channels[-1]
    if last is not first:
        raise ConfigError(
            f"the capture is on {first.group_name} ({ranks_text(first.ranks)}), the sentinel on "
            f"{last.group_name} ({ranks_text(last.ranks)}): one all_reduce cannot be over both. Give both the "
            "same group=, or make a StepChecks of each."
        )
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if has_guard and len(first.ranks) != world_size:
        raise ConfigError(
            f"the guard compares the groups of all {world_size} ranks, and {first.group_name} has only "
            f"{ranks_text(first.ranks)}. Leave guard= out, and call guard.step() on every rank."
        )
