"""The points that every rank's trainer passes, and at which what was logged before is combined."""

from __future__ import annotations

import warnings
from typing import Any

from ddpstats._ranks.step import any_rank
from ddpstats.integrations._lightning_ledger import Ledger, combine, ledger_of


def step_point(trainer: Any) -> None:
    ledger = ledger_of(trainer._results)
    if ledger is not None and ledger.has_step_point(trainer._results):
        combine(trainer, trainer._results, ledger)


def late_point(connector: Any) -> None:
    results = connector.trainer._results
    ledger = ledger_of(results)
    if ledger is None:
        return
    if ledger.has_late_point(results):
        combine(connector.trainer, results, ledger)
    elif ledger.pending and not ledger.has_step_point(results):
        _warn_of_withheld(ledger)


def _warn_of_withheld(ledger: Ledger) -> None:
    warnings.warn(
        f"{', '.join(sorted(ledger.pending))}: logged with on_step=True and sync_dist=True in a later run of this loop "
        "than its first, where no rank did so. The values per step are shown from the next run on (ranks look for them "
        "in the first run, and from then on where they were used); the values on_epoch are right as ever.",
        stacklevel=2,
    )


def epoch_point(trainer: Any, results: Any) -> None:
    ledger = ledger_of(results)
    if ledger is None:
        return
    while not combine(trainer, results, ledger, epoch=True):
        pass  # others still have batches, and each of their points needs all ranks
    ledger.finished.add(results.dataloader_idx)


# A rank may have no batch of one loader, or of all: Lightning then leaves out its end, or the whole run.


def evaluation_starts(loop: Any) -> None:
    ledger = ledger_of(loop._results)
    if ledger is not None:
        ledger.next_loader = 0
        any_rank(True)  # meets those that have nothing to run


def loader_ends(loop: Any) -> None:
    if ledger_of(loop._results) is None:
        return
    if _has_several_loaders(loop):
        _epoch_points_to(loop, (loop._results.dataloader_idx or 0) + 1)
    else:
        epoch_point(loop.trainer, loop._results)


def evaluation_ends(loop: Any) -> None:
    if ledger_of(loop._results) is not None and _has_several_loaders(loop):
        _epoch_points_to(loop, loop.num_dataloaders)
        _epoch_points_of(loop, None)  # what was logged outside of any loader


def _epoch_points_to(loop: Any, end: int) -> None:
    ledger = ledger_of(loop._results)
    assert ledger is not None
    while ledger.next_loader < end:
        _epoch_points_of(loop, ledger.next_loader)
        ledger.next_loader += 1


def _epoch_points_of(loop: Any, index: int | None) -> dict[str, Any]:
    """What all ranks have of one loader, for loggers; also where this rank had no batch of it."""
    results, connector = loop._results, loop.trainer._logger_connector
    before, results.dataloader_idx = results.dataloader_idx, index
    epoch_point(loop.trainer, results)
    found = results.metrics(on_step=False)
    if not loop.trainer.sanity_checking:
        connector._callback_metrics.update(found["callback"])
        connector._logged_metrics.update(found["log"])
        connector._progress_bar_metrics.update(found["pbar"])
    results.dataloader_idx = before
    return dict(found["log"])


def answer_for_no_batches(loop: Any) -> None:
    """Others validate; this rank passes their points, and has their values."""
    connector, results = loop.trainer._logger_connector, loop._results
    ledger = ledger_of(results)
    assert ledger is not None
    ledger.next_loader = 0
    indices = [*range(loop.num_dataloaders), None] if _has_several_loaders(loop) else [None]
    found: dict[str, Any] = {}
    for index in [*indices, None]:  # the last one: after the hooks at the end of the epoch
        found.update(_epoch_points_of(loop, index))
    if not loop.trainer.sanity_checking:
        connector.log_metrics(found)
    results.reset()


def _has_several_loaders(loop: Any) -> bool:
    return bool(loop._is_sequential and loop.num_dataloaders > 1)
