"""What is known of a call by its name and its arguments: what it does to values that are not finite."""

from __future__ import annotations

import math
import re
from typing import Any

from ddpstats.dump.format._entries import DumpEntry, DumpLeaf
from ddpstats.dump.format._names import Name
from ddpstats.dump.origin._candidates import NonFiniteTensor, has_nan

_UNINITIALISED = re.compile(r"(new_)?empty(_|$)")
_ON_PURPOSE = re.compile(r"(new_)?(full|fill|masked_fill|where|triu|tril)(_|$)")
_OVERWRITES = re.compile(
    r"(copy|zero|fill|normal|uniform|random|bernoulli|exponential|cauchy|log_normal|geometric)_$|"
    r"(zeros|ones|constant|trunc_normal|xavier_\w+|kaiming_\w+|orthogonal|eye|dirac|sparse)_$"
)
_VIEWS = re.compile(
    r"view(_as)?$|reshape(_as)?$|__getitem__$|select$|narrow$|slice|transpose$|permute$|[tTH]$|mT$|squeeze$|unsqueeze$|"
    r"expand(_as)?$|split|chunk$|unbind$|flatten$|detach$|contiguous$|as_strided$|data$|requires_grad_$|__get__$"
)
_WEIGHTED = re.compile(r"(linear|matmul|__matmul__|mm|bmm|mv|einsum|bilinear|conv\w*|embedding(_bag)?)$")
_WEIGHTED_CLASSES = re.compile(r"(\w*Linear|Bilinear|Conv\w+|Embedding(Bag)?)$")


def is_uninitialised(name: Name) -> bool:
    """It gives out memory as it is."""
    return not name.is_module and _UNINITIALISED.match(name.api) is not None


def overwrites(name: Name) -> bool:
    """What its first argument held before is lost."""
    return not name.is_module and name.direction == "forward" and _OVERWRITES.match(name.api) is not None


def is_view(name: Name) -> bool:
    """It only looks at the same values."""
    return not name.is_module and _VIEWS.match(name.api) is not None


def keeps_in_place(name: Name) -> bool:
    """It writes into what it takes, as an optimizer does."""
    return (
        not name.is_module
        and name.direction == "forward"
        and (name.api == "__setitem__" or (name.api.endswith("_") and not name.api.endswith("__")))
    )


def mixes_with_weights(name: Name) -> bool:
    """It multiplies and adds up what it takes, or looks it up: nobody gives it a mask."""
    if name.direction != "forward":
        return False
    if name.is_module:
        return _WEIGHTED_CLASSES.match(name.class_name) is not None
    return _WEIGHTED.match(name.api) is not None


def is_minus_infinity(leaf: DumpLeaf) -> bool:
    return not has_nan(leaf) and leaf.max != math.inf


def is_on_purpose(entry: DumpEntry, name: Name, made: list[NonFiniteTensor], masked: bool) -> bool:
    """Infinities that somebody asked for, and what stays minus infinity of them. A NaN never is."""
    if any(has_nan(bad.leaf) for bad in made):
        return False
    if _given(entry) or (not name.is_module and _ON_PURPOSE.match(name.api)):
        return True
    return masked and all(is_minus_infinity(bad.leaf) for bad in made)


def is_literal_write(entry: DumpEntry, made: list[NonFiniteTensor]) -> bool:
    """The program gave it a NaN, and that is what came out."""
    return any(has_nan(bad.leaf) for bad in made) and any(math.isnan(value) for value in _given(entry))


def _given(entry: DumpEntry) -> list[float]:
    """Its arguments that are numbers, and not finite ones."""
    values = (_number(leaf.value) for _, leaf in entry.values() if not leaf.is_tensor)
    return [value for value in values if not math.isfinite(value)]


def _number(value: Any) -> float:
    try:
        return 0.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return 0.0
