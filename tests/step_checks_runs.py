"""Programs for the ranks of `test_step_checks`: a training loop with the checks by their own calls, or in one."""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import ddpstats
from ddpstats import (
    CollectiveMismatch,
    DdpstatsError,
    NaNCapture,
    Sentinel,
    SentinelAlarm,
    StepChecks,
    collective_guard,
)
from ddpstats.testing import count_collectives
from tests import training
from tests.guard.runs import without_shared_memory
from tests.training import batch_of, rank

EVERY = ("guard", "capture", "sentinel")
FAULTY_STEP, FAULTY_RANK = 2, 1


@dataclass
class Plan:
    """The checks and the faults of a training.

    ``parts``: which checks. ``together``: in one call. ``faults``: what goes wrong in `FAULTY_STEP` on `FAULTY_RANK`.
    ``over_the_store``: the guard without shared memory, as between hosts: it sees other operations at the step only.
    """

    dirpath: str
    parts: tuple[str, ...] = EVERY
    together: bool = True
    faults: tuple[str, ...] = ()
    steps: int = 4
    micro_batches: int = 1
    guard: dict[str, Any] = field(default_factory=dict)
    capture: dict[str, Any] = field(default_factory=lambda: {"on_nonfinite": "skip"})
    sentinel: dict[str, Any] = field(default_factory=lambda: {"mode": 2})
    over_the_store: bool = False
    wrap: str = "ddp"


@dataclass
class Outcome:
    """The outcome on one rank. ``reports``: (step, check, its report) where a check saw something, in this order."""

    reports: list[tuple[int, str, Any]] = field(default_factory=list)
    raised: list[tuple[int, str]] = field(default_factory=list)
    collectives: list[int] = field(default_factory=list)
    seen_by_guard: int = 0
    compared: int = 0
    parameters: list[Tensor] = field(default_factory=list)
    random: Tensor = field(default_factory=lambda: torch.empty(0))


def model_of(wrap: str) -> nn.Module:
    model = training.make_model()
    return model if wrap == "alone" else DistributedDataParallel(model)


def train(plan: Plan) -> Outcome:
    """Every rank must call."""
    outcome = Outcome()
    model = model_of(plan.wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(100 + rank())
    with contextlib.ExitStack() as stack:
        if plan.over_the_store:
            stack.enter_context(without_shared_memory())
        try:
            checks = Checks(plan, model, optimizer, stack)
            for step in range(plan.steps):
                _backward(plan, checks, model, step)
                with count_collectives() as seen:
                    goes_on = checks.step(step, outcome)
                outcome.collectives.append(seen.total)
                if goes_on:
                    optimizer.step()
                optimizer.zero_grad()
        except _Ended:
            pass
        if checks.guard is not None:
            outcome.seen_by_guard = checks.guard.counters.collectives
            outcome.compared = checks.guard.counters.compared
            if outcome.reports and outcome.reports[-1][1] == "guard":
                checks.guard.abandon()  # its last comparison has nothing to add
    outcome.parameters = [parameter.detach().clone() for parameter in model.parameters()]
    outcome.random = torch.get_rng_state()
    return outcome


class _Ended(Exception):
    """Ends the training loop."""


class Checks:
    """The checks of a plan, entered."""

    def __init__(
        self, plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer, stack: contextlib.ExitStack
    ) -> None:
        self.guard: collective_guard | None = None
        self.capture: NaNCapture | None = None
        self.sentinel: Sentinel | None = None
        if "guard" in plan.parts:
            self.guard = stack.enter_context(collective_guard(**{"mode": "step", "timeout_sec": 20, **plan.guard}))
        if "capture" in plan.parts:
            self.capture = stack.enter_context(
                NaNCapture(plan.dirpath, model=model, optimizer=optimizer, **plan.capture)
            )
        if "sentinel" in plan.parts:
            self.sentinel = stack.enter_context(Sentinel(model, **plan.sentinel))
        self.together: StepChecks | None = None
        if plan.together and plan.parts:
            self.together = StepChecks(capture=self.capture, sentinel=self.sentinel, guard=self.guard)

    def step(self, step: int, outcome: Outcome) -> bool:
        """Return whether the optimizer may take the step."""
        try:
            if self.together is None:
                return self._apart(step, outcome)
            verdicts = self.together.step()
        except SentinelAlarm as alarm:
            outcome.raised.append((step, type(alarm).__name__))
            outcome.reports.append((step, "sentinel", str(alarm)))
            return False
        except CollectiveMismatch as error:
            outcome.reports.append((step, "guard", _error(error)))
            raise _Ended from error
        except DdpstatsError as error:
            outcome.reports.append((step, "error", _error(error)))
            raise _Ended from error
        if verdicts.capture is not None and not verdicts.capture.ok:
            outcome.reports.append((step, "capture", _plain(verdicts.capture)))
        if verdicts.sentinel is not None and not verdicts.sentinel.ok:
            outcome.reports.append((step, "sentinel", verdicts.sentinel.message))
        return verdicts.ok

    def _apart(self, step: int, outcome: Outcome) -> bool:
        ok = True
        if self.guard is not None:
            self.guard.step()
        if self.capture is not None:
            verdict = self.capture.check()
            if not verdict.ok:
                outcome.reports.append((step, "capture", _plain(verdict)))
                ok = False
        if self.sentinel is not None:
            ok = self.sentinel.step().ok and ok
        return ok


def _backward(plan: Plan, checks: Checks, model: nn.Module, step: int) -> None:
    is_bad = step == FAULTY_STEP and rank() == FAULTY_RANK
    for micro in range(plan.micro_batches):
        batch = batch_of(step, micro)
        if is_bad and "nan" in plan.faults:
            batch["x"][1, 2] = torch.nan
        with contextlib.ExitStack() as stack:
            for part in (checks.capture, checks.sentinel):
                if part is not None:
                    stack.enter_context(part.micro_batch(batch))
            stack.enter_context(training.syncing(model, micro == plan.micro_batches - 1))
            loss = training.loss_of(model, batch)
            loss = loss * 1e12 if is_bad and "huge" in plan.faults else loss
            loss.backward()  # type: ignore[no-untyped-call]
    if is_bad and "flip" in plan.faults:
        with torch.no_grad():
            next(model.parameters()).view(-1)[3] += 1e-3
    if dist.is_initialized():
        _reduce(plan, is_bad)


def _reduce(plan: Plan, is_bad: bool) -> None:
    """Reduce as the program does by itself."""
    op = dist.ReduceOp.MAX if is_bad and "op" in plan.faults else dist.ReduceOp.SUM
    dist.all_reduce(torch.ones(1), op=op)
    with ddpstats.label("b" if is_bad and "label" in plan.faults else "a"):
        dist.all_reduce(torch.ones(1))


def _error(error: Exception) -> tuple[str, str]:
    return type(error).__name__, str(error)


def _plain(verdict: Any) -> dict[str, Any]:
    """Return a verdict without the time and place of its bundle."""
    fields = asdict(verdict) | {"bundle": verdict.bundle is not None}
    fields["message"] = re.sub(r"\S*/capture-\S+", "...", verdict.message)
    return fields


# -- ranks that do not do the same ------------------------------------------------------------------------------------


def error_of(call: Any) -> tuple[str, str]:
    """Return the class and the text of what a call raises."""
    try:
        call()
    except DdpstatsError as error:
        return _error(error)
    return "nothing", ""


class Unreadable(Tensor):
    """A gradient that refuses whatever is asked of it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if dist.is_initialized() and "grad" not in str(func):
            raise ZeroDivisionError("not this one")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def unlike(dirpath: str, how: str) -> tuple[tuple[str, str], bool]:
    """Return the error of the second step, where rank 1 differs, and whether later steps are judged again."""
    with contextlib.ExitStack() as stack:
        plan = Plan(dirpath, parts=("capture", "sentinel"), sentinel={"mode": 2, "digest_every_steps": 3})
        checks, model = _entered(plan, stack)
        assert checks.capture is not None
        together = checks.together
        assert together is not None
        _backward(plan, checks, model, 0)
        together.step()
        model.zero_grad()
        _backward(plan, checks, model, 1)
        if rank() != FAULTY_RANK:
            error = error_of(together.step)
        elif how == "another part":
            error = error_of(StepChecks(capture=checks.capture).step)
        elif how == "its own call":
            error = error_of(checks.capture.check)
        elif how == "another number of calls":
            error = error_of(lambda: ddpstats.reduce_stats({"loss": 1.0}))
        elif how == "inside of a micro-batch":
            with checks.capture.micro_batch(batch_of(1, 1)):
                error = error_of(together.step)
        elif how == "closed":
            assert checks.sentinel is not None
            checks.sentinel.close()
            error = error_of(together.step)
        else:  # a gradient that cannot be read
            parameter = next(model.parameters())
            assert isinstance(parameter.grad, Tensor)
            parameter.grad = parameter.grad.as_subclass(Unreadable)
            error = error_of(together.step)
            parameter.grad = None
        ok = True
        for step in range(2, 2 if how == "closed" else 5):  # with digests in one of them, on all ranks the same
            model.zero_grad()
            _backward(plan, checks, model, step)
            ok = together.step().ok and ok
        return error, ok


def raises_in_its_micro_batch(dirpath: str) -> tuple[str, str]:
    """Return the error of the second step, where rank 1 raises in its micro-batch."""
    try:
        with contextlib.ExitStack() as stack:
            checks, model = _entered(plan := Plan(dirpath, parts=("capture", "sentinel"), wrap="alone"), stack)
            assert checks.capture is not None
            assert checks.together is not None
            _backward(plan, checks, model, 0)
            checks.together.step()
            with checks.capture.micro_batch(batch_of(1, 0)):
                if rank() == FAULTY_RANK:
                    raise ValueError("label 17 of 3")
            return error_of(checks.together.step)
    except ValueError as error:
        return _error(error)


def scaled(dirpath: str, together: bool) -> list[tuple[str, bool, int]]:
    """Train under a GradScaler whose scale is too large at first; rank 1 has no batch in the last step.

    Returns for each step the verdict of capture, whether the sentinel's is ok, and how many collectives they took.
    """
    model = model_of("alone")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=1000)
    steps: list[tuple[str, bool, int]] = []
    with (
        NaNCapture(dirpath, model=model, optimizer=optimizer, scaler=scaler) as capture,
        Sentinel(model, mode=2, scaler=scaler) as sentinel,
    ):
        checks = StepChecks(capture=capture, sentinel=sentinel)
        for step in range(6):
            batch = batch_of(step, 0)
            if step < 5 or rank() != FAULTY_RANK:
                with capture.micro_batch(batch), sentinel.micro_batch(batch):
                    scaler.scale(model(batch["x"]).square().sum()).backward()
            _reduce_gradients(model)
            scaler.unscale_(optimizer)
            with count_collectives() as seen:
                if together:
                    verdicts = checks.step()
                    verdict, ok = verdicts.capture, verdicts.sentinel is not None and verdicts.sentinel.ok
                else:
                    verdict, ok = capture.check(), sentinel.step().ok
            assert verdict is not None
            steps.append((verdict.kind, ok, seen.total))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return steps


def _reduce_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(parameter.grad)


def other_settings(dirpath: str) -> tuple[str, str]:
    """Return the error of the first step where capture's ``keep`` differs."""
    with contextlib.ExitStack() as stack:
        checks, model = _entered(plan := Plan(dirpath, capture={"keep": 1 + rank()}), stack)
        assert checks.together is not None
        _backward(plan, checks, model, 0)
        return error_of(checks.together.step)


def another_mode() -> tuple[str, str]:
    with collective_guard("step" if rank() else "strict", timeout_sec=5) as guard:
        error = error_of(StepChecks(guard=guard).step)
        guard.abandon()
        return error


def in_a_group_of_some(fault: str) -> list[tuple[str, str]]:
    """Return the error of each step where two of three ranks differ in the second one, in a group of these two."""
    some = dist.new_group([0, 1])
    with collective_guard("step", timeout_sec=3) as guard:
        checks = StepChecks(guard=guard)
        errors = []
        for step in range(3):
            if rank() < 2 and step < 2 and (fault, step, rank()) != ("missing", 1, 1):
                with ddpstats.label("b" if rank() and step and fault == "label" else "a"):
                    dist.all_reduce(torch.ones(1), group=some, async_op=fault == "missing")
            errors.append(error_of(checks.step))
        guard.abandon()
        return errors


def labels_of_a_step_without_an_answer(dirpath: str) -> list[tuple[str, str]]:
    """Return the errors of two calls for one step. Rank 1 reduced another label; the first call gets no answer."""
    with collective_guard("step", timeout_sec=10) as guard, NaNCapture(dirpath, model=model_of("alone")) as capture:
        checks = StepChecks(capture=capture, guard=guard)
        with ddpstats.label("b" if rank() else "a"):
            dist.all_reduce(torch.ones(1))
        with capture.micro_batch(batch_of(0, 0)):
            unanswered = error_of(checks.step)
        errors = [unanswered, error_of(checks.step)]
        guard.abandon()
        return errors


def known_to_others(file: str) -> dict[str, Any]:
    """Return the attributes of the error that two of three ranks raise, and the third, which compares nothing, too."""
    number, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    with collective_guard("strict", timeout_sec=10) as guard:
        dist.init_process_group("gloo", init_method=Path(file).as_uri(), rank=number, world_size=world_size)
        some = dist.new_group([0, 1])
        if number < 2:
            with contextlib.suppress(CollectiveMismatch):
                dist.all_reduce(torch.ones(1 + number), group=some)
        elif guard._watching.comparing is not None:
            raise AssertionError("this rank compares, and would come to the verdict by itself")
        try:
            StepChecks(guard=guard).step()
        except CollectiveMismatch as error:
            guard.abandon()
            by_rank = {index: str(event) for index, event in error.by_rank.items()}
            return {**vars(error), "text": str(error), "by_rank": by_rank}
    raise AssertionError("nothing was raised")


def warned(dirpath: str) -> tuple[list[str], list[int], int]:
    """Return the warnings of on_mismatch="warn", the collectives of each step, and how many were compared."""
    plan = Plan(dirpath, faults=("label",), steps=6, guard={"on_mismatch": "warn"})
    with training.logged() as lines:
        outcome = train(plan)
    return lines, outcome.collectives, outcome.compared


def alternating(dirpath: str) -> tuple[bool, list[int], int, int]:
    """Take steps by the common call and by the own ones in turn.

    Returns whether all common calls were ok, the steps that capture and sentinel counted, how many collectives the
    guard saw, and how many it compared.
    """
    ok, numbers = True, []
    with contextlib.ExitStack() as stack:
        checks, model = _entered(plan := Plan(dirpath, guard={"check_every": 3}), stack)
        assert checks.together is not None
        assert checks.capture is not None
        assert checks.sentinel is not None
        assert checks.guard is not None
        for step in range(8):
            _backward(plan, checks, model, step)
            if step % 4 < 2:
                verdicts = checks.together.step()
                ok = verdicts.ok and ok
                assert verdicts.capture is not None
                assert verdicts.sentinel is not None
                numbers += [verdicts.capture.step, verdicts.sentinel.step]
            else:
                checks.guard.step()
                numbers += [checks.capture.check().step, checks.sentinel.step().step]
            model.zero_grad()
        counters = checks.guard.counters
        return ok, numbers, counters.collectives, counters.compared


def comes_late(gave_up: Path) -> tuple[str, float]:
    """The guard's timeout is the shorter one: return what is raised, and after how long. Rank 1 comes afterwards."""
    with collective_guard("step", timeout_sec=2) as guard:
        checks = StepChecks(guard=guard)
        checks.step()
        deadline = time.monotonic() + 30
        while rank() == FAULTY_RANK and not gave_up.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        started = time.monotonic()
        error, _ = error_of(checks.step)
        gave_up.touch()
        guard.abandon()
        return error, time.monotonic() - started


def refused(dirpath: str) -> list[tuple[str, str]]:
    """Return the errors of what `StepChecks` itself refuses, on rank 0 of two."""
    some, model = dist.new_group([0]), nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    if rank():
        return []
    with NaNCapture(dirpath, model=model, group=some) as capture, Sentinel(model, mode=1) as sentinel:
        guard = collective_guard("step")
        return [
            error_of(lambda: StepChecks(capture=capture, sentinel=sentinel)),
            error_of(lambda: StepChecks(capture=capture, guard=guard)),
            error_of(lambda: StepChecks(capture=sentinel)),  # type: ignore[arg-type]
            error_of(StepChecks),
        ]


def _entered(plan: Plan, stack: contextlib.ExitStack) -> tuple[Checks, nn.Module]:
    model = model_of(plan.wrap)
    return Checks(plan, model, torch.optim.SGD(model.parameters(), lr=0.05), stack), model


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators that run inside; one of them reads a number from a tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def operators(dirpath: str, parts: tuple[str, ...], together: bool) -> tuple[list[str], list[str]]:
    """Return the operators of the checks of the third step: those that compute and read, and collectives."""
    names: list[str] = []
    with contextlib.ExitStack() as stack:
        checks, model = _entered(plan := Plan(dirpath, parts, together), stack)
        for step in range(3):
            _backward(plan, checks, model, step)
            with Operators() as seen:
                assert checks.step(step, Outcome())
            names = sorted(seen.names)
            model.zero_grad()
    ours = [name for name in names if name.startswith("c10d.")]
    return [name for name in names if name not in ours], ours
