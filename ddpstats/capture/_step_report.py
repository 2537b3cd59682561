"""What one rank saw of a step, in the form in which it tells the others."""

from __future__ import annotations

from typing import Any

from ddpstats._observe.backward_passes import BackwardNorms
from ddpstats._observe.gradient_norms import measure
from ddpstats._observe.gradients import GradientWatch
from ddpstats.capture._verdict import NonFiniteGradients, Report


def report_of(watch: GradientWatch, scaler: Any, step: int) -> Report:
    """What ``watch`` saw since the step began. Local; waits for the device."""
    bad, exchanged, arrived = [], [], set[int]()
    number = 0
    finite = measure([parameter.grad for parameter in watch.parameters]).isfinite().tolist()
    reduced = [place for place, fine in enumerate(finite) if not fine]
    for micro_batch, arrivals in enumerate(watch.arrivals):
        arrived |= arrivals.places()
        mended = arrivals.early_places() - set(reduced)  # by a hook of the program's, before it reduced
        seen = zip(arrivals.bad_places(), arrivals.exchanged, arrivals.shared_with(), strict=True)
        for found, reduces, shared_with in seen:
            places = [place for place in found if place not in mended]
            if places:
                bad.append(NonFiniteGradients(micro_batch, number, _named(watch, arrivals, places), shared_with))
            if reduces:
                exchanged.append(number)
            number += 1
    return Report(
        micro_batches=len(watch.arrivals),
        bad=tuple(bad),
        reduced=tuple(watch.names[place] for place in reduced),
        sees_local=watch.sees_local,
        scale=float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else None,
        step=step,
        exchanged=tuple(exchanged),
        unseen=tuple(watch.names[place] for place in reduced if place not in arrived),
    )


def _named(watch: GradientWatch, arrivals: BackwardNorms, places: list[int]) -> tuple[tuple[str, str], ...]:
    norms = arrivals.norms()
    assert norms is not None
    return tuple((watch.names[place], "NaN" if norms[place].isnan() else "Inf") for place in places)
