"""What Lightning's trainers pass together: keys that were logged are combined by name, in one reduction per point.

Imports nothing of Lightning: its classes are found in the module that a collection comes from, so that
``lightning.pytorch`` and its copy ``pytorch_lightning`` are served alike.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ddpstats import _markers
from ddpstats._gather import gather_trees
from ddpstats._ranks import ranks_text
from ddpstats.errors import SchemaConflict
from ddpstats.reduce import reduce_stats

_MARKERS: dict[str, Any] = {
    "mean": _markers.Mean,
    "sum": _markers.Sum,
    "min": _markers.Min,
    "max": _markers.Max,
}
_FLAGS = ("prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx")


@dataclass
class Ledger:
    """Beside one result collection of Lightning: of training, of validation while fitting, of validate, of test."""

    # Of this rank: keys of metrics whose step value waits for the next point.
    pending: dict[str, torch.Tensor] = field(default_factory=dict)
    logs_steps: bool = False
    logs_late: bool = False
    batches: int = 0
    # Agreed: changes only by what a reduction returned, or at points that all ranks pass.
    known: set[tuple[str, str, str]] = field(default_factory=set)
    any_logs_steps: bool = False
    any_logs_late: bool = False
    finished: set[int | None] = field(default_factory=set)

    def has_step_point(self, results: Any) -> bool:
        return results.training or self.any_logs_steps or results.dataloader_idx not in self.finished

    def has_late_point(self, results: Any) -> bool:
        return self.any_logs_late or (self.batches == 0 and results.dataloader_idx not in self.finished)


def combined_later(value: Any, *_: Any, **__: Any) -> Any:
    """In place of the strategy's reduce: the value as it is."""
    return value


def is_ours(metric: Any) -> bool:
    """Whether this entry of a collection waits for a point."""
    return metric.is_tensor and metric.meta.sync.fn is combined_later


def audience_of(group: Any) -> str:
    """Who shares a value: "" for all ranks, else the members of the ``sync_dist_group``."""
    if group is None or group is dist.group.WORLD:
        return ""
    return ",".join(map(str, dist.get_process_group_ranks(group)))


def combine(trainer: Any, results: Any, ledger: Ledger, *, epoch: bool = False) -> bool:
    """Combine what waits. Collective, one reduction. Whether all ranks are at the end of an epoch."""
    tree = _tree(results, ledger, epoch=epoch)
    ledger.pending = {}
    stage = "train" if results.training else "test" if trainer.testing else "validate"
    found = reduce_stats(tree, name=f"lightning/{stage}").values
    ledger.any_logs_steps |= found["logs_steps"]
    ledger.any_logs_late |= found["logs_late"]
    at_end = bool(found["at_end"])
    for audience, fx, name, said in _rows(found, "new"):
        ledger.known.add((audience, fx, name))
        if _key(fx, name) not in results:
            _adopt(trainer, results, audience, fx, name, said)
    _take(trainer, results, _rows(found, "step"), epoch=False)
    if epoch and at_end:
        _take(trainer, results, _rows(found, "epoch"), epoch=True)
        _compute_metrics(results, list(_rows(found, "metric")))
    return at_end


# -- what a rank says -------------------------------------------------------------------------------------------------


def _tree(results: Any, ledger: Ledger, *, epoch: bool) -> dict[str, Any]:
    """Nested by kind and audience, hook, and name."""
    tree: dict[str, Any] = {
        "at_end": _markers.All(epoch),
        "logs_steps": _markers.Any(ledger.logs_steps),
        "logs_late": _markers.Any(ledger.logs_late),
    }

    def put(kind: str, metric: Any, value: Any) -> None:
        audience, meta = getattr(metric, "audience", ""), metric.meta
        tree.setdefault(_section(kind, audience), {}).setdefault(meta.fx, {})[meta.name] = value
        if kind in ("step", "epoch") and (audience, meta.fx, meta.name) not in ledger.known:
            put("new", metric, {flag: _markers.Any(on) for flag, on in _description(meta).items()})

    for key, value in ledger.pending.items():
        put("step", results[key], _MARKERS[results[key].meta.sync.op](value))
    for metric in results.values() if epoch else ():
        meta = metric.meta
        if metric.has_reset or not meta.on_epoch or meta.dataloader_idx != results.dataloader_idx:
            continue
        if is_ours(metric):
            put("epoch", metric, _epoch_part(metric))
        elif not metric.is_tensor and getattr(metric.value, "_to_sync", True):
            put("metric", metric, {"held": _markers.Sum(1), "fresh": _markers.Any(metric._computed is None)})
    return tree


def _epoch_part(metric: Any) -> Any:
    if metric.meta.sync.op == "mean":  # of batches, over ranks: not the mean of the ranks' means
        return {"sum": _markers.Sum(metric.value), "weight": _markers.Sum(metric.cumulated_batch_size)}
    return _MARKERS[metric.meta.sync.op](metric.value)


def _description(meta: Any) -> dict[str, bool]:
    """What a rank that never logged the key must know of it."""
    return {**{flag: getattr(meta, flag) for flag in _FLAGS}, **{op: op == meta.sync.op for op in _MARKERS}}


def _section(kind: str, audience: str) -> str:
    return f"{kind} of ranks {audience}" if audience else kind


# -- what it hears ----------------------------------------------------------------------------------------------------


def _rows(found: dict[str, Any], kind: str) -> Iterator[tuple[str, str, str, Any]]:
    """(audience, hook, name, value) of one kind, as far as it concerns this rank; the same order on every rank."""
    me = str(dist.get_rank())
    for section, hooks in found.items():
        start, _, audience = section.partition(" of ranks ")
        if start == kind and (not audience or me in audience.split(",")):
            for fx, names in hooks.items():
                for name, value in names.items():
                    yield audience, fx, name, value


def _key(fx: str, name: str) -> str:
    """Lightning's key of a metric in its collection; ``fx`` is ``meta.fx``, which ends in the dataloader's index."""
    hook, _, index = fx.partition(".")
    return f"{hook}.{name}.{index}" if index else f"{hook}.{name}"


def _adopt(trainer: Any, results: Any, audience: str, fx: str, name: str, said: dict[str, bool]) -> None:
    """A place for the values of a key that only other ranks have logged."""
    module: Any = sys.modules[type(results).__module__]
    op = next(op for op in _MARKERS if said[op])
    meta = module._Metadata(
        fx=fx,
        name=name,
        reduce_fx=getattr(torch, op),
        dataloader_idx=results.dataloader_idx,
        **{flag: bool(said[flag]) for flag in _FLAGS},
    )
    meta.sync = module._Sync(_should=True, fn=combined_later)
    metric = module._ResultMetric(meta, True).to(trainer.strategy.root_device)
    metric.audience, metric.adopted, metric.has_reset = audience, True, True
    results[_key(fx, name)] = metric


def _take(trainer: Any, results: Any, rows: Iterator[tuple[str, str, str, Any]], *, epoch: bool) -> None:
    """Put the combined values where Lightning looks for them: one copy to the device, and views of it."""
    targets: list[Any] = []
    values: list[float] = []
    for audience, fx, name, value in rows:
        metric = results.get(_key(fx, name))
        if metric is not None and is_ours(metric) and metric.audience == audience:
            targets.append(metric)
            values.append(_mean(**value) if isinstance(value, dict) else value)
    module: Any = sys.modules[type(results).__module__]
    tensor = torch.tensor(values, dtype=module._get_default_dtype(), device="cpu")
    for metric, combined in zip(targets, tensor.to(trainer.strategy.root_device).unbind(), strict=True):
        metric.has_reset = False
        if epoch:
            metric._computed = combined
        else:
            metric._forward_cache = combined
            if not metric.meta.on_epoch:
                metric.value = combined


def _mean(sum: float, weight: float) -> float:
    return sum / weight if weight else float("nan")


# -- torchmetrics' metrics --------------------------------------------------------------------------------------------


def _compute_metrics(results: Any, rows: list[tuple[str, str, str, dict[str, float]]]) -> None:
    """Their ``compute`` is a collective: all ranks compute the same ones, in the agreed order."""
    if any(said["held"] != dist.get_world_size() for *_, said in rows):
        _refuse_partial(results, [fx + "/" + name for _, fx, name, _ in rows])
    for _, fx, name, said in rows:
        metric = results[_key(fx, name)]
        if said["fresh"]:
            metric._computed = metric.value._computed = None
        results._get_cache(metric, False)


def _refuse_partial(results: Any, names: list[str]) -> None:
    """Raise, on every rank, where only some ranks logged a metric."""
    mine = [name for name in names if _key(*name.split("/", 1)) in results]
    held = gather_trees(mine, name="lightning/metrics")
    for name in names:
        holders = [rank for rank, theirs in enumerate(held) if name in theirs]
        missing = [rank for rank in range(len(held)) if rank not in holders]
        if missing:
            raise SchemaConflict(
                f"self.log({name.split('/', 1)[1]!r}, <torchmetrics metric>) was called in {name.split('/', 1)[0]} by "
                f"{ranks_text(holders)}, not by {ranks_text(missing)}. To compute a metric is a collective of all its "
                "ranks, so all of them must log it; a metric that was not updated may be logged too.",
                ranks=range(len(held)),
                path=name.split("/", 1)[1],
            )
