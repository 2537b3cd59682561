"""``--bisect``: the first operation whose inputs are finite, whose output is not, and whose value arrives.

1. Run the step once more, every operation seen (`tracer`). What was in the batch, the parameters and the buffers
   before is marked as such.
2. The symptom: the first loss that is not finite; else, of the gradients of the parameters that are not, the one whose
   value is the oldest.
3. The symptom's mark names the origin. Values that never arrived (an infinity that a mask or a ``where`` took away) are
   not blamed.
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ddpstats._base.text import dtype_name
from ddpstats._rerun.record import walk
from ddpstats.capture._tensor_stats import TensorStats, nan_and_inf
from ddpstats.capture.rerun import Observer, Outcome, Rerun
from ddpstats.capture.tracer import OPERATION, PUT, SOURCE, Mark, OperationTracer, TracedOrigin
from ddpstats.errors import ConfigError

_SHOWN_STEPS = 4
_LOW_PRECISION = ("torch.float16", "torch.bfloat16")


@dataclass(frozen=True)
class Bisected:
    """What was found.

    Attributes:
        symptom: where the value arrived; None if nothing was not finite.
        mark: what it goes back to; None if no operation that was seen made it.
        error: what the step raised under observation.
    """

    symptom: str | None
    mark: Mark | None
    error: Exception | None

    def as_text(self) -> str:
        raised = [] if self.error is None else [f"  the step raised {type(self.error).__name__}: {self.error}"]
        if self.symptom is None:
            none = "bisect: no loss and no gradient was not finite while every operation was looked at"
            return "\n".join([none, *raised])
        if self.mark is None:
            return f"bisect: {self.symptom} is not finite, and no operation that could be seen made it"
        return "\n".join(
            [_headline(self.mark.origin), *_details(self.mark), f"  it arrived at: {self.symptom}", *raised]
        )

    def as_json(self) -> dict[str, Any]:
        origin = None if self.mark is None else _origin_json(self.mark.origin)
        return {
            "symptom": self.symptom,
            "origin": origin,
            "path": [] if self.mark is None else _capped(self.mark.path()),
            "error": None if self.error is None else f"{type(self.error).__name__}: {self.error}",
        }


def bisect(rerun: Rerun) -> Bisected:
    """Runs the step once, slowly. Local. Raises `ConfigError` where this torch lacks what is needed."""
    observing = _Observing(rerun)
    try:
        outcome: Outcome = rerun.run(observing)
    except AttributeError as error:
        raise ConfigError(f"--bisect does not work with this torch ({error}); checked on torch 2.13") from error
    if isinstance(outcome.error, AttributeError) and "_cdata" in str(outcome.error):
        raise ConfigError(f"--bisect does not work with this torch ({outcome.error}); checked on torch 2.13")
    symptom, mark = observing.found if observing.found is not None else (None, None)
    return Bisected(symptom, mark, outcome.error)


class _Observing(Observer):
    """The observer of a run: tells the tracer what there was before, and looks at what comes out."""

    def __init__(self, rerun: Rerun) -> None:
        self._model = rerun.model
        self._tracer = OperationTracer(rerun.model)
        self.found: tuple[str, Mark | None] | None = None

    def begin(self, place: int, batch: Any) -> None:
        self._tracer.micro_batch = place
        if place == 0:
            for name, parameter in self._model.named_parameters():
                self._tracer.add_source(f"parameter {name}, before the step", parameter)
            for name, buffer in self._model.named_buffers():
                self._tracer.add_source(f"buffer {name}, before the step", buffer)
        for path, leaf in walk(batch):
            if isinstance(leaf, Tensor):
                self._tracer.add_source(path, leaf)

    def watching(self) -> AbstractContextManager[Any]:
        return self._tracer.watching()

    def loss(self, place: int, loss: Tensor) -> None:
        if self.found is None and any(nan_and_inf(loss)):
            self.found = f"the loss of micro-batch {place}", self._tracer.mark_of(loss)

    def gradients(self, place: int, gradients: Mapping[str, Tensor]) -> None:
        bad = [] if self.found is not None else [name for name in gradients if any(nan_and_inf(gradients[name]))]
        if not bad:
            return
        marks = {name: mark for name in bad if (mark := self._tracer.mark_of(gradients[name])) is not None}
        first = min(marks, key=lambda name: marks[name].origin.order, default=bad[0])
        more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
        self.found = f"the gradient of {first}{more}, micro-batch {place}", marks.get(first)


# -- in words ---------------------------------------------------------------------------------------------------------


def _headline(origin: TracedOrigin) -> str:
    if origin.kind == SOURCE:
        stats = origin.outputs[0]
        where = f", element {list(stats.first)}" if stats.first else ""
        what = f"{stats.nans} NaN, {stats.infs} Inf"
        if origin.what.startswith(("parameter ", "buffer ")):
            return f"bisect: the model was not finite before the step: {origin.what} holds {what}{where}"
        return f"bisect: the batch holds {what} at {origin.what}{where} (micro-batch {origin.micro_batch})"
    direction = "the forward pass" if origin.backward is None else f"the backward pass ({origin.backward})"
    where = f"{origin.what} in {direction} of micro-batch {origin.micro_batch}"
    if origin.kind == OPERATION:
        return f"bisect: the first operation whose inputs are finite and whose output is not: {where}"
    if origin.kind == PUT:
        return f"bisect: a NaN or infinity that was put there on purpose, or uninitialized memory, arrives: {where}"
    return f"bisect: a tensor that torch did not make holds a NaN (made by numpy?), first used by {where}"


def _details(mark: Mark) -> list[str]:
    origin = mark.origin
    if origin.kind == SOURCE:
        return _path_lines(mark)
    lines = [f"  in {module_words(origin)}"]
    lines += ["  called at:" if origin.backward is None else "  the forward operation was called at:"]
    lines += _frame_lines(origin) or ["    (no frame of yours)"]
    lines += ["  inputs:", *(f"    {one}" for one in origin.inputs)]
    lines += ["  output:", *(f"    {one}" for one in origin.outputs)]
    if _is_overflow(origin):
        dtype = dtype_name(origin.outputs[0].dtype)
        lines.append(f"  {dtype} may be too narrow: --precision fp32 tells overflow from mathematics")
    return lines + _path_lines(mark)


def module_words(origin: TracedOrigin) -> str:
    """Whose forward pass it was."""
    module = origin.place.module
    if module is None and not origin.place.frames and origin.backward is not None:
        return f"a module that is not known (the node is {origin.backward})"
    if module is None:
        return "the step function, outside the model"
    name, kind = module
    return f"module {name} ({kind})" if name else f"the model itself ({kind})"


def _frame_lines(origin: TracedOrigin) -> list[str]:
    lines = []
    for file, number, function in origin.place.frames:
        lines.append(f'    File "{file}", line {number}, in {function}')
        source = linecache.getline(file, number).strip()
        lines += [f"      {source}"] if source else []
    return lines


def _is_overflow(origin: TracedOrigin) -> bool:
    return any(one.dtype in _LOW_PRECISION and one.infs for one in origin.outputs)


def _path_lines(mark: Mark) -> list[str]:
    steps = _capped(mark.path())
    return [f"  and then passed: {' -> '.join(steps)}"] if steps else []


def _capped(steps: list[str]) -> list[str]:
    """Not more than a line or two: repetitions are counted, and the middle is left out."""
    groups = [(name, len(list(group))) for name, group in itertools.groupby(steps)]
    found = [name if count == 1 else f"{name} ({count} times)" for name, count in groups]
    if len(found) <= 2 * _SHOWN_STEPS:
        return found
    return [*found[:_SHOWN_STEPS], f"({len(found) - 2 * _SHOWN_STEPS} more)", *found[-_SHOWN_STEPS:]]


def _origin_json(origin: TracedOrigin) -> dict[str, Any]:
    module = origin.place.module
    return {
        "kind": origin.kind,
        "what": origin.what,
        "micro_batch": origin.micro_batch,
        "direction": "forward" if origin.backward is None else "backward",
        "autograd_node": origin.backward,
        "module": None if module is None else module[0],
        "module_class": None if module is None else module[1],
        "frames": [
            {"file": file, "line": line, "function": name, "source": linecache.getline(file, line).strip()}
            for file, line, name in origin.place.frames
        ],
        "inputs": [one.as_json() if isinstance(one, TensorStats) else one for one in origin.inputs],
        "outputs": [one.as_json() for one in origin.outputs],
    }
