"""Where a non-finite gradient comes from, found out without a restart: the same step once more, here and on a peer.

1. The culprit runs its part of the step again, twice, from the captured state. Finite now: something that does not
   depend on the inputs made it, a race or a transient fault.
2. Otherwise the next replica with the same parameters runs the culprit's part, read from the bundle. Finite there: the
   culprit's device. Not finite there either: software or data.
3. Meanwhile the culprit runs it in float32 and float64, without autocast. Finite in one of them: the numbers overflowed
   or ran out of digits. Not finite either: the mathematics, or the data.

Each run has a copy of the module: parameters, buffers, gradients and random state of the training stay as they are.
A step that communicates cannot be run by one rank: it is stopped before its first collective, and the text says so.
"""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddpstats import _intercept
from ddpstats._gather import gather_trees
from ddpstats._step_record import RandomState, walk
from ddpstats.capture._bundle import rank_file
from ddpstats.capture._parts import Source
from ddpstats.capture._plain import from_plain
from ddpstats.capture._rank_part import RankPart
from ddpstats.capture._rerun import Rerun, Settings
from ddpstats.capture._verdict import Finding
from ddpstats.errors import ConfigError

_NAME = "NaNCapture.check: the step once more"
_RUNS = 2
_SHOWN = 3


def attribute_cause(
    module: nn.Module,
    step_fn: Callable[[nn.Module, Any], Tensor],
    source: Source,
    finding: Finding,
    ranks: tuple[int, ...],
    rank: int,
    model_writers: Mapping[int, int],
    directory: Path | None,
    group: Any,
) -> str | None:
    """The cause in words; None where no rank is the culprit. Collective: two gathers, one where the first one tells."""
    if not finding.culprit_ranks:
        return None
    culprit = finding.culprit_ranks[0]
    runner = _Runner(module, step_fn, source)
    is_culprit = rank == culprit
    first = gather_trees(runner.again(rank, len(ranks), finding.step) if is_culprit else None, name=_NAME, group=group)
    here = first[ranks.index(culprit)]
    if "error" in here:
        return f"Cause not found: rank {culprit} could not run the step again: {here['error']}"
    if not all(here["runs"]):
        return _differs(culprit, here["runs"])
    peer = _peer_of(culprit, ranks, finding.culprit_ranks, model_writers)
    mine = None
    if rank == peer:
        mine = runner.of_a_peer(culprit, directory)
    elif is_culprit:
        mine = runner.in_other_precision(rank, len(ranks), finding.step)
    second = dict(zip(ranks, gather_trees(mine, name=_NAME, group=group), strict=True))
    return _judged(culprit, peer, here, second[culprit], None if peer is None else second[peer])


class _Runner:
    """Runs parts of steps on copies of this rank's module. Local."""

    def __init__(self, module: nn.Module, step_fn: Callable[[nn.Module, Any], Tensor], source: Source) -> None:
        self._module, self._step_fn, self._source = module, step_fn, source

    def again(self, rank: int, world_size: int, step: int) -> dict[str, Any]:
        """This rank's own part, twice: the names of what was not finite, of each run."""
        return _attempt(lambda: self._again(rank, world_size, step))

    def _again(self, rank: int, world_size: int, step: int) -> dict[str, Any]:
        part = self._own_part(rank, world_size, step)
        runs = [self._run(part, "captured") for _ in range(_RUNS)]
        return {"runs": runs, "batch": _nonfinite_inputs(part), "device": self._device_text()}

    def of_a_peer(self, culprit: int, directory: Path | None) -> dict[str, Any]:
        """The culprit's part, on this device."""
        return _attempt(lambda: {"runs": [self._run(_read_part(culprit, directory), "captured")]})

    def in_other_precision(self, rank: int, world_size: int, step: int) -> dict[str, Any]:
        """This rank's part in float32 and float64."""

        def both() -> dict[str, Any]:
            part = self._own_part(rank, world_size, step)
            return {precision: self._run(part, precision) for precision in ("fp32", "fp64")}

        return _attempt(both)

    def _own_part(self, rank: int, world_size: int, step: int) -> RankPart:
        return RankPart.from_content(self._source.rank_part(rank, world_size, step), "the step in memory")

    def _run(self, part: RankPart, precision: str) -> list[str]:
        device = next(self._module.parameters()).device
        before = RandomState.take(device)
        try:
            with _alone():
                model = copy.deepcopy(self._module)
                outcome = Rerun(
                    model, self._step_fn, part, self._source.parameters(), Settings(device, precision)
                ).run()
        finally:
            before.restore()
        if outcome.error is not None:
            raise outcome.error
        return outcome.nonfinite

    def _device_text(self) -> str:
        device = next(self._module.parameters()).device
        name = f", {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
        return f"host {socket.gethostname()}, {device}{name}"


def _attempt(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What fails here is told to the other ranks, who wait."""
    try:
        return run()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


@contextmanager
def _alone() -> Iterator[None]:
    """No collective may run: no other rank takes part."""
    watcher = _Refusing()
    _intercept.subscribe(watcher)
    try:
        yield
    finally:
        _intercept.unsubscribe(watcher)


class _Refusing:
    def before(self, call: _intercept.Collective) -> None:
        raise ConfigError(f"step_fn communicates ({call.op}), and only one rank runs it here")

    def after(self, call: _intercept.Collective, work: Any) -> None:
        pass

    def waiting(self, work: Any, limited: bool) -> bool:
        return False


def _read_part(rank: int, directory: Path | None) -> RankPart:
    if directory is None:
        raise ConfigError("no bundle was written, from which a peer could read the batch")
    path = directory / rank_file(rank)
    return RankPart.from_content(torch.load(path, map_location="cpu", weights_only=True), str(path))


def _peer_of(
    culprit: int, ranks: tuple[int, ...], culprits: tuple[int, ...], model_writers: Mapping[int, int]
) -> int | None:
    """The next rank with the same parameters; one that saw no fault of its own, if there is one."""
    place = ranks.index(culprit)
    others = [rank for rank in (*ranks[place + 1 :], *ranks[:place]) if model_writers[rank] == model_writers[culprit]]
    return next((rank for rank in others if rank not in culprits), others[0] if others else None)


def _nonfinite_inputs(part: RankPart) -> list[str]:
    found = []
    for place, micro in enumerate(part.micro_batches):
        for path, leaf in walk(from_plain(micro.batch)):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(leaf.isfinite().all()):
                found.append(f"{path} of micro-batch {place}")
    return found


def _differs(culprit: int, runs: list[list[str]]) -> str:
    finite = sum(not names for names in runs)
    return (
        f"Cause: a race or a transient fault on rank {culprit}: run again from the same state, its gradients were "
        f"finite in {finite} of {len(runs)} runs."
    )


def _judged(
    culprit: int,
    peer: int | None,
    here: Mapping[str, Any],
    precise: Mapping[str, Any],
    there: Mapping[str, Any] | None,
) -> str:
    again = f"run again from the same state, rank {culprit} gets non-finite gradients again"
    if there is None:
        lines = [f"Cause: {again}; no other rank has the same parameters, to tell its device from its software."]
    elif "error" in there:
        lines = [f"Cause: {again}; rank {peer} could not run it: {there['error']}"]
    elif not there["runs"][0]:
        return (
            f"Cause: hardware of rank {culprit} ({here['device']}): {again}, and rank {peer} gets finite ones from the "
            "same batch, parameters and random state."
        )
    else:
        lines = [f"Cause: software or data: {again}, and so does rank {peer}."]
    return "\n".join([*lines, _precision_text(precise), *_batch_lines(here["batch"])])


def _precision_text(precise: Mapping[str, Any]) -> str:
    if "error" in precise:
        return f"In other precisions it could not be run: {precise['error']}"
    for precision, name in (("fp32", "float32 without autocast"), ("fp64", "float64")):
        if not precise[precision]:
            return f"In {name} the gradients are finite: the numbers overflow, or lack digits, in the precision in use."
    return "Not finite in float32 and float64 either: the mathematics or the data, not the precision."


def _batch_lines(found: list[str]) -> list[str]:
    if not found:
        return []
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return [f"The batch itself is not finite: {', '.join(found[:_SHOWN])}{more}."]
