"""espnet's trainers with right numbers: ranks may hold different stats, and each key keeps the weight of its own mean.

1. `install` puts our `recursive_average`, `recursive_sum` and `recursive_divide` in the place of espnet's, where they
   are defined and in every espnet module that has imported them by name.
2. For a dict, that average is an `AveragedStats`: it remembers the weight that each key's own mean stands for.
3. `SubReporter.register` gets such a dict from the trainers. The wrapper around it hands espnet's own ``register`` each
   key with that weight, and lists and nested dicts under the names of `Reduced.flat`. Registered with the total weight
   instead, as stock espnet does it, a key that only some ranks hold makes the epoch's average wrong.

Covered, in training and validation: ``trainer``, ``gan_trainer``, ``deepspeed_trainer`` and ``uasr_trainer``, whose
phone error rate is a ratio of totals (its counts are summed over ranks, not averaged); and the loss balancer of
``gan_codec``.

espnet's models fill in NaN for "no such value on this rank", and its Reporter leaves NaN and infinity out. So here a
rank's non-finite value counts as absent (``nonfinite="skip"``); it is NaN only where no rank has a finite one.

Not covered, for it does not go through ``recursive_average``: the spk trainer's own gathering of scores; the Lightning
and speechlm trainers; the vocabulary in ``uasr_trainer``'s weighted_lm_ppl, which each rank takes from its own batches;
the step that the Reporter of a rank counts too many when another rank runs out of batches first.

`capture`, for non-finite gradients, stands beside `install`: use either, or both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import Any

import torch

from ddpstats._base.paths import Step
from ddpstats._reduction.ops import Sum
from ddpstats.integrations._espnet_capture import (
    Capturing as Capturing,
    capture as capture,
    espnet_module,
    step as step,
)
from ddpstats.integrations.patches import Patches
from ddpstats.recursive_op import LeafAverage, average_with_weights, recursive_divide, recursive_sum

__all__ = ["AveragedStats", "Capturing", "capture", "install", "step", "uninstall"]

_PACKAGES = frozenset({"espnet2", "espnet3", "espnetez"})

_RELIED_ON = (
    "espnet2.torch_utils.recursive_op:recursive_average(obj, weight, distributed)",
    "espnet2.torch_utils.recursive_op:recursive_sum(obj, weight, distributed)",
    "espnet2.torch_utils.recursive_op:recursive_divide(a, b)",
    "espnet2.train.reporter:SubReporter.register(self, stats, weight)",
)

# uasr_trainer divides sums of these over an epoch by one another. It asserts the first two, no other trainer has them.
_UASR_NEEDS = frozenset({"batch_num_errors", "batch_num_ref_tokens"})
_UASR_COUNTS = _UASR_NEEDS | {"batch_lm_log_prob", "batch_num_hyp_tokens", "batch_size"}

_patches = Patches("espnet")


def install() -> None:
    """Patch the installed espnet, whether its trainers are imported already or later. Local and idempotent.

    Every rank must call it, or none. Your own modules that imported one of espnet's functions by name before this
    call keep the old one. An espnet that lacks what this relies on, whatever its version, is left unpatched, with a
    warning that names the difference. Does nothing under ``DDPSTATS_DISABLE=1``.

    Raises:
        ConfigError: espnet is not installed, or lacks what it needs itself.

    Example::

        rank 0: stats {"l1_loss": 0.057}   rank 1: stats {"snr_loss": -2.0}
        stock espnet logs l1_loss=-0.9715; after install() every rank's Reporter has l1_loss 0.057, snr_loss -2.0
    """
    if _patches.is_installed or _patches.is_disabled():
        return
    theirs, reporter = espnet_module("espnet2.torch_utils.recursive_op"), espnet_module("espnet2.train.reporter")
    version = str(getattr(espnet_module("espnet2"), "__version__", "of no version"))
    if _patches.should_patch(_RELIED_ON, lambda: _probe(theirs), version):
        for name, ours in _OURS.items():
            for package in _PACKAGES:
                _patches.replace_everywhere(package, getattr(theirs, name), ours)
        _patches.wrap(reporter.SubReporter, "register", _register)


def uninstall() -> None:
    """Put espnet's own objects back, also into modules that were imported since `install`. Local and idempotent."""
    _patches.restore()


class AveragedStats(dict[Any, Any]):
    """What the installed ``recursive_average`` returns for a dict: a plain dict to all but the Reporter.

    A key whose value was replaced, or that was added, since the averaging has no weight of its own.
    """

    def __init__(self, averages: Mapping[Any, Any], leaves: list[LeafAverage]) -> None:
        super().__init__(averages)
        self._averages = dict(averages)
        self._leaves: dict[Step, list[LeafAverage]] = {}
        for leaf in leaves:
            self._leaves.setdefault(leaf.path[0], []).append(leaf)

    def rows(self) -> Iterator[tuple[Any, Any, float | None]]:
        """(name, value, own weight), lists and nested dicts leaf by leaf; weight None where the caller's holds."""
        for key, value in self.items():
            if key in self._averages and self._averages[key] is value:
                for leaf in self._leaves.get(key, ()):
                    # espnet keeps one type of entry per key: None must get a weight where a value of that key has one.
                    yield leaf.name, leaf.value, leaf.weight if leaf.op in ("mean", "none") else None
            else:
                yield key, value, None


# -- in place of espnet's ---------------------------------------------------------------------------------------------


def _recursive_average(obj: Any, weight: torch.Tensor, distributed: bool = False) -> tuple[Any, torch.Tensor]:
    """`ddpstats.recursive_average`, with each key's own weight in a dict's result."""
    if isinstance(obj, dict) and obj.keys() >= _UASR_NEEDS:
        obj = {key: Sum(value) if key in _UASR_COUNTS else value for key, value in obj.items()}
    averages, total, leaves = average_with_weights(obj, weight, distributed, nonfinite="skip")
    return (AveragedStats(averages, leaves) if isinstance(averages, dict) else averages), total


_OURS: dict[str, Callable[..., Any]] = {
    "recursive_average": _recursive_average,
    "recursive_sum": recursive_sum,
    "recursive_divide": recursive_divide,
}


def _register(original: Callable[..., Any], self: Any, stats: Any, weight: Any = None) -> None:
    if not isinstance(stats, AveragedStats) or not stats:
        original(self, stats, weight)
        return
    for own, rows in groupby(stats.rows(), key=lambda row: row[2]):
        original(self, {name: value for name, value, _ in rows}, weight if own is None else own)


def _probe(theirs: Any) -> str | None:
    found = theirs.recursive_average({"a": torch.tensor([2.0, 5.0])}, torch.tensor([2.0, 1.0]), False)
    if found == ({"a": torch.tensor(3.0)}, torch.tensor(3.0)):
        return None
    return f"averages 2 and 5 with weights 2 and 1 to {found}, where 3 with weight 3 is relied on"
