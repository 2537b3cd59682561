"""What Lightning's trainers pass together: keys that were logged are combined by name, in one reduction per point.

Imports nothing of Lightning: its classes are found in the module that a collection comes from, so that
``lightning.pytorch`` and its copy ``pytorch_lightning`` are served alike.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ddpstats._base.text import holders_lines, ranks_text
from ddpstats._ranks.gather import gather_trees
from ddpstats._reduction import ops as markers
from ddpstats._reduction.reducer import reduce_stats
from ddpstats.errors import SchemaConflict

_MARKERS: dict[str, Any] = {
    "mean": markers.Mean,
    "sum": markers.Sum,
    "min": markers.Min,
    "max": markers.Max,
}
_SHOWN_ONCE = ("prog_bar", "logger")
"""What one rank asks for is done on all: the rank that shows or writes need not be the one that logs."""
_ALIKE = ("on_step", "on_epoch", "add_dataloader_idx", *_MARKERS)
"""What ranks must agree on: it decides under which names a key stands in ``callback_metrics``."""


class Known(NamedTuple):
    """What all ranks know of a key: its place among the keys, and the values of `_ALIKE`."""

    place: float
    alike: tuple[float, ...]


@dataclass
class Ledger:
    """Beside one result collection of Lightning (training, validation, test), for one run of its trainer."""

    # Of this rank: keys whose step value waits for the next point; keys it has described to the others.
    pending: dict[str, torch.Tensor] = field(default_factory=dict)
    described: set[str] = field(default_factory=set)
    logs_steps: bool = False
    may_log_late: bool = False
    # Agreed: changes only by what a reduction returned, or at points that all ranks pass.
    known: dict[tuple[str, str], Known] = field(default_factory=dict)
    any_logs_steps: bool = False
    any_may_log_late: bool = False
    finished: set[int | None] = field(default_factory=set)
    next_loader: int = 0

    def has_step_point(self, results: Any) -> bool:
        return results.training or self.any_logs_steps or results.dataloader_idx not in self.finished

    def has_late_point(self, results: Any) -> bool:
        return self.any_may_log_late and self.has_step_point(results)


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
    ledger.any_may_log_late |= found["may_log_late"]
    at_end = bool(found["at_end"])
    if any(section.startswith("new") for section in found):
        _learn(trainer, results, ledger, found)
    _take(trainer, results, _rows(found, "step"), epoch=False)
    if epoch and at_end:
        _take(trainer, results, _rows(found, "epoch"), epoch=True)
        _compute_metrics(results, tree.get("metric", {}), list(_rows(found, "metric")))
    return at_end


# -- what a rank says -------------------------------------------------------------------------------------------------


def _tree(results: Any, ledger: Ledger, *, epoch: bool) -> dict[str, Any]:
    """Nested by kind and audience, hook, and name."""
    tree: dict[str, Any] = {
        "at_end": markers.All(epoch),
        "logs_steps": markers.Any(ledger.logs_steps),
        "may_log_late": markers.Any(ledger.may_log_late),
    }

    def put(kind: str, metric: Any, value: Any) -> None:
        audience = getattr(metric, "audience", "")
        section = f"{kind} of ranks {audience}" if audience else kind
        tree.setdefault(section, {}).setdefault(metric.meta.fx, {})[metric.meta.name] = value

    for place, (key, metric) in enumerate(results.items()):
        if is_ours(metric) and key not in ledger.described and not getattr(metric, "adopted", False):
            put("new", metric, {"place": float(place), **_description(metric)})
            ledger.described.add(key)
    for key, value in ledger.pending.items():
        put("step", results[key], _MARKERS[results[key].meta.sync.op](value))
    for metric in results.values() if epoch else ():
        meta = metric.meta
        if metric.has_reset or not meta.on_epoch or meta.dataloader_idx != results.dataloader_idx:
            continue
        if is_ours(metric):
            put("epoch", metric, _epoch_part(metric))
        elif not metric.is_tensor and _is_collective(metric.value):
            put("metric", metric, {"held": markers.Sum(1), "fresh": markers.Any(metric._computed is None)})
    return tree


def _epoch_part(metric: Any) -> Any:
    if metric.meta.sync.op == "mean":  # of batches, over ranks: not the mean of the ranks' means
        return {"sum": markers.Sum(metric.value), "weight": markers.Sum(metric.cumulated_batch_size)}
    return _MARKERS[metric.meta.sync.op](metric.value)


def _description(metric: Any) -> dict[str, float]:
    """What a rank that never logged the key must know of it; averaged, so that a fraction means: ranks differ."""
    meta = metric.meta
    flags = {flag: getattr(meta, flag) for flag in (*_SHOWN_ONCE, *_ALIKE) if flag not in _MARKERS}
    return {**flags, **{op: op == meta.sync.op for op in _MARKERS}, "float64": metric.is_float64}


# -- what it hears ----------------------------------------------------------------------------------------------------

Row = tuple[str, str, str, Any]
"""Audience, hook, name, value."""


def _rows(found: dict[str, Any], kind: str, *, everyones: bool = False) -> Iterator[Row]:
    """The rows of one kind, as far as they concern this rank; in the same order on every rank."""
    me = str(dist.get_rank())
    for section, hooks in found.items():
        start, _, audience = section.partition(" of ranks ")
        if start == kind and (everyones or not audience or me in audience.split(",")):
            for fx, names in hooks.items():
                for name, value in names.items():
                    yield audience, fx, name, value


def _key(fx: str, name: str) -> str:
    """Lightning's key of a metric in its collection; ``fx`` is ``meta.fx``, which ends in the dataloader's index."""
    hook, _, index = fx.partition(".")
    return f"{hook}.{name}.{index}" if index else f"{hook}.{name}"


def _learn(trainer: Any, results: Any, ledger: Ledger, found: dict[str, Any]) -> None:
    """Keys that some rank described: refuse what does not fit together; a place for the values of those it lacks."""
    for audience, fx, name, said in _rows(found, "new", everyones=True):
        alike = tuple(said[flag] for flag in _ALIKE)
        known = ledger.known.setdefault((audience, _key(fx, name)), Known(said["place"], alike))
        if known.alike != alike or set(alike) - {0.0, 1.0}:
            _refuse_description(results, fx, name)
    for audience, fx, name, said in _rows(found, "new"):
        metric = results.get(_key(fx, name))
        if metric is None:
            metric = results[_key(fx, name)] = _adopted(trainer, results, audience, fx, name, said)
        if is_ours(metric) and metric.audience == audience:
            metric.shown = {flag: True for flag in _SHOWN_ONCE if said[flag] or getattr(metric.meta, flag)}
            vars(metric.meta).update(metric.shown)
    _put_in_order(results, ledger)


def _refuse_description(results: Any, fx: str, name: str) -> None:
    """Raise, on every rank, where ranks log one key in different ways. Collective."""
    metric = results.get(_key(fx, name))
    mine = metric is not None and is_ours(metric) and not getattr(metric, "adopted", False)
    flags = [flag for flag, on in _description(metric).items() if on and flag in _ALIKE] if mine else []
    held = gather_trees(flags, name="lightning/descriptions")
    by_rank = {rank: ", ".join(theirs) for rank, theirs in enumerate(held) if theirs}
    lines = [f"ranks log {name!r} in {fx} with different settings of self.log:", *holders_lines(by_rank)]
    lines.append("Give on_step, on_epoch, add_dataloader_idx and reduce_fx alike on all ranks, or use different names.")
    raise SchemaConflict("\n".join(lines), ranks=by_rank, path=name)


def _adopted(trainer: Any, results: Any, audience: str, fx: str, name: str, said: dict[str, float]) -> Any:
    """A place for the values of a key that only other ranks have logged."""
    module: Any = sys.modules[type(results).__module__]
    meta = module._Metadata(
        fx=fx,
        name=name,
        reduce_fx=getattr(torch, next(op for op in _MARKERS if said[op])),
        dataloader_idx=results.dataloader_idx,
        **{flag: bool(said[flag]) for flag in (*_SHOWN_ONCE, *_ALIKE) if flag not in _MARKERS},
    )
    meta.sync = module._Sync(_should=True, fn=combined_later)
    metric = module._ResultMetric(meta, True).to(trainer.strategy.root_device)
    metric.audience, metric.adopted, metric.has_reset = audience, True, True
    metric.is_float64 = said["float64"] > 0
    return metric


def _put_in_order(results: Any, ledger: Ledger) -> None:
    """Where two hooks log one name, the later entry counts: let that be the same one on every rank."""
    place = {key: known.place for (_, key), known in ledger.known.items()}
    here = [key for key in results if key in place]
    ordered = iter(sorted(here, key=lambda key: (place[key], key)))
    arranged = {}
    for key in list(results):
        chosen = next(ordered) if key in place else key
        arranged[chosen] = results[chosen]
    results.clear()
    results.update(arranged)


def _take(trainer: Any, results: Any, rows: Iterator[Row], *, epoch: bool) -> None:
    """Put the combined values where Lightning looks for them: one copy to the device, and views of it."""
    targets: list[Any] = []
    values: list[float] = []
    for audience, fx, name, value in rows:
        metric = results.get(_key(fx, name))
        if metric is not None and is_ours(metric) and metric.audience == audience:
            targets.append(metric)
            values.append(_mean(**value) if isinstance(value, dict) else value)
    if not targets:
        return
    module: Any = sys.modules[type(results).__module__]
    exact = torch.tensor(values, dtype=torch.float64, device="cpu")
    device, narrow = trainer.strategy.root_device, module._get_default_dtype()
    usual = exact.to(narrow).to(device).unbind()
    wide = exact.to(device).unbind() if any(metric.is_float64 for metric in targets) else usual
    for i, metric in enumerate(targets):
        combined = wide[i] if metric.is_float64 else usual[i]
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


def _is_collective(metric: Any) -> bool:
    """Whether its ``compute`` is a collective of all ranks; those of a group of its own are left to Lightning."""
    return bool(getattr(metric, "_to_sync", True)) and getattr(metric, "process_group", None) is None


def _compute_metrics(results: Any, own: dict[str, Any], rows: list[Row]) -> None:
    """All ranks compute the same ones, in the agreed order."""
    for _, fx, name, said in rows:
        if said["held"] != dist.get_world_size():
            _refuse_partial(fx, name, name in own.get(fx, {}))
    for _, fx, name, said in rows:
        metric = results[_key(fx, name)]
        if said["fresh"]:
            metric._computed = metric.value._computed = None
        results._get_cache(metric, False)


def _refuse_partial(fx: str, name: str, is_mine: bool) -> None:
    """Raise, on every rank, where only some ranks logged a metric. Collective."""
    held = gather_trees(is_mine, name="lightning/metrics")
    holders = [rank for rank, has in enumerate(held) if has]
    missing = [rank for rank, has in enumerate(held) if not has]
    raise SchemaConflict(
        f"self.log({name!r}, <torchmetrics metric>) was called in {fx} by {ranks_text(holders)}, not by "
        f"{ranks_text(missing)}. To compute a metric is a collective of all ranks, so all of them must log it; a "
        "metric that was not updated may be logged too.",
        ranks=range(len(held)),
        path=name,
    )


def ledger_of(results: Any) -> Ledger | None:
    """The ledger of a collection; None where Lightning is to do as it does: not ours, or nobody to combine with."""
    return None if results is None else results.__dict__.get("_ddpstats")
