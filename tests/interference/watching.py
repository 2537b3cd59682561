"""Watchers of a training program: none, or all of ddpstats at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

import ddpstats
from ddpstats import (
    Max,
    NaNCapture,
    Sentinel,
    SentinelAlarm,
    StatsDump,
    StatsReducer,
    StatsWindow,
    StepChecks,
    collective_guard,
)

if TYPE_CHECKING:
    from tests.interference.programs import Part

DUMPED_STEPS = (1, 3)
_FLUSH_EVERY = 4


class Watch:
    """A watcher that does nothing."""

    def begin(self) -> None:
        """A training step begins."""

    def micro_batch(self, part: int, batch: Any) -> contextlib.AbstractContextManager[Any]:
        """Around a forward and a backward pass of that module."""
        return contextlib.nullcontext()

    def judge(self, part: int, number: int) -> None:
        """The optimizer of that module is about to take its step."""

    def end(self, number: int, loss: torch.Tensor) -> None:
        """The training step is over."""


class Everything(Watch):
    """Reductions, also beside backward, a window, a dump, and each module's capture and sentinel; all under the guard.

    ``together``: the checks by `StepChecks`, and not by their own calls. Every rank must make one.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        directory: Path,
        mode: Literal["step", "strict"],
        together: bool,
        stack: contextlib.ExitStack,
    ) -> None:
        self.did = dict.fromkeys(("micro-batches", "judged", "bad verdicts", "stats reduced", "windows flushed"), 0)
        self.guard = stack.enter_context(collective_guard(mode, timeout_sec=60))
        self._checks = [_Checks(part, directory / f"capture{i}", stack) for i, part in enumerate(parts)]
        self._together = (
            [StepChecks(capture=checks.capture, sentinel=checks.sentinel, guard=self.guard) for checks in self._checks]
            if together
            else []
        )
        self._window = stack.enter_context(StatsWindow(name="interference"))
        self._reducer = StatsReducer(name="interference, beside backward")
        stack.callback(self._reducer.close)
        config = {"dump_path": str(directory / "dump"), "level": "mix", "step": [*DUMPED_STEPS], "async_dump": together}
        self._dump = StatsDump(config, model=[part.module for part in parts])

    def begin(self) -> None:
        self._dump.start()

    @contextlib.contextmanager
    def micro_batch(self, part: int, batch: Any) -> Iterator[None]:
        checks = self._checks[part]
        pending = self._reducer.start({"micro-batch": self.did["micro-batches"]})
        with checks.capture.micro_batch(batch), checks.sentinel.micro_batch(batch), self._window.timed("micro-batch"):
            yield
        pending.result()
        self.did["micro-batches"] += 1

    def judge(self, part: int, number: int) -> None:
        if self._together:
            verdict = self._together[part].step().capture
            assert verdict is not None
        else:
            self.guard.step()
            verdict = self._checks[part].capture.check()
            with contextlib.suppress(*([] if verdict.ok else [SentinelAlarm])):
                self._checks[part].sentinel.step()
        self.did["judged"] += 1
        self.did["bad verdicts"] += not verdict.ok

    def end(self, number: int, loss: torch.Tensor) -> None:
        self._dump.stop()
        self._dump.step()
        loss = torch.nan_to_num(loss)
        self._window.add({"loss": loss, "grad": Max(loss), f"of {number % 3}": loss}, weight=6)
        if number % _FLUSH_EVERY == _FLUSH_EVERY - 1:
            self._window.flush(per_rank=True)
            self.did["windows flushed"] += 1
        stats = {"loss": loss, f"new in {number // 2}": float(loss)}
        ddpstats.reduce_stats(stats, weight=6, name="interference", per_rank=bool(number % 2))
        self.did["stats reduced"] += 1
        ddpstats.any_rank(number % 2 == 1)


class _Checks:
    """Capture and sentinel of one module."""

    def __init__(self, part: Part, directory: Path, stack: contextlib.ExitStack) -> None:
        cause: dict[str, Any] = {"attribute": True, "step_fn": part.loss_of} if part.sentinel.get("replay_fn") else {}
        self.capture = stack.enter_context(
            NaNCapture(directory, model=part.module, optimizer=part.optimizers, on_nonfinite="skip", **cause)
        )
        self.sentinel = stack.enter_context(Sentinel(part.module, **{"mode": 2, **part.sentinel}))
        self.sentinel.check_matmuls(2)
