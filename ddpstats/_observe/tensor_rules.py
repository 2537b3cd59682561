"""Judge by an operation's name what it does to values that are not finite, and which infinities are meant.

One table for whatever follows such values, by ATen's names ("constant_pad_nd") or by those of the Python functions
("pad", "__add__", "kaiming_uniform_"). Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

_UNINITIALIZED = re.compile(r"(new_)?empty(_|$)|resize_$")
_OVERWRITES = re.compile(
    r"((copy|fill|zero|set|normal|uniform|random|bernoulli|exponential|cauchy|log_normal|geometric|zeros|ones|constant"
    r"|trunc_normal|(xavier|kaiming)_(uniform|normal)|orthogonal|eye|dirac|sparse)_|resize_)$"
)
_WRITES_VALUE = re.compile(
    r"(new_|masked_|index_)?(fill|full|where|triu|tril|pad|constant)(_|$)|(new_|as_|scalar_)?tensor$"
)
_ADDS_OR_LIMITS = re.compile(r"_*[ir]?(add|sub(tract)?|clamp|clip|maximum|minimum|setitem)(_|$)")
_VIEWS = re.compile(
    r"view(_as)?$|reshape(_as)?$|__getitem__$|select$|narrow$|slice|transpose$|permute$|[tTH]$|mT$|squeeze$|unsqueeze$|"
    r"expand(_as)?$|split|chunk$|unbind$|flatten$|detach$|contiguous$|as_strided$|data$|requires_grad_$|__get__$"
)
_PRODUCTS = re.compile(
    r"(linear|matmul|__matmul__|mm|bmm|mv|einsum|bilinear|conv\w*|embedding(_bag)?"
    r"|\w*Linear|Bilinear|Conv\w+|Embedding(Bag)?)$"
)


def is_uninitialized(operation: str) -> bool:
    """Return whether the operation hands out memory that has not been written to."""
    return _UNINITIALIZED.match(operation) is not None


def overwrites_target(operation: str) -> bool:
    """Return whether what the operation's first argument held before is lost."""
    return _OVERWRITES.match(operation) is not None


def writes_in_place(operation: str) -> bool:
    """Return whether the operation writes into its first argument: "add_", "__setitem__"."""
    return operation == "__setitem__" or (operation.endswith("_") and not operation.endswith("__"))


def is_view(operation: str) -> bool:
    """Return whether the operation's output shows the same memory as its input."""
    return _VIEWS.match(operation) is not None


def is_weighted_product(operation: str) -> bool:
    """Return whether a function, or a module's class, multiplies its input by weights: no mask goes into it."""
    return _PRODUCTS.match(operation) is not None


def puts_infinity(operation: str, numbers: Iterable[float]) -> bool:
    """Return whether an infinity in the output is meant, as in a mask, where the tensors that go in are finite.

    Args:
        operation: its name.
        numbers: its arguments that are numbers. For what writes a value or takes a part, the name is enough; what adds
            or limits must be given a number that is not finite. All others are arithmetic: ``x * inf``.
    """
    if _WRITES_VALUE.match(operation) is not None:
        return True
    return _ADDS_OR_LIMITS.match(operation) is not None and not all(map(math.isfinite, numbers))


def may_be_mask(*, has_nan: bool, has_positive_infinity: bool) -> bool:
    """Return whether values that are not finite look like a mask: minus infinity alone."""
    return not (has_nan or has_positive_infinity)
