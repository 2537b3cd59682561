"""What is known of torch's functions: their names, and which are of no interest. Found out once for each."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from ddpstats._observe.torch_compat import NN_FUNCTIONS, OPERATOR_CLASSES, TENSOR_METHODS

_SKIPPED = frozenset((
    "__get__", "__set__", "__delete__", "__repr__", "__str__", "__format__", "__len__", "__bool__", "__int__",
    "__float__", "__index__", "__complex__", "__contains__", "__hash__", "__dir__", "__iter__", "__reduce_ex__",
    "__reduce__", "__setstate__", "__deepcopy__", "__array__", "__dlpack__", "__dlpack_device__",
    "__torch_dispatch__", "size", "dim", "ndimension", "stride", "numel", "nelement", "element_size",
    "storage_offset", "data_ptr", "storage", "untyped_storage", "is_contiguous", "is_floating_point", "is_complex",
    "is_signed", "is_pinned", "is_shared", "is_inference", "is_set_to", "is_same_size", "is_conj", "is_neg",
    "is_coalesced", "is_nonzero", "is_distributed", "get_device", "backward", "requires_grad_", "retain_grad",
    "register_hook", "register_post_accumulate_grad_hook", "share_memory_", "item", "tolist", "numpy", "pin_memory",
    "record_stream", "_set_grad_enabled", "_is_zerotensor", "_version", "_typed_storage", "dense_dim", "sparse_dim",
    "_nnz", "result_type", "can_cast", "equal", "allclose", "has_names", "rename_", "align_to",
    "_make_subclass", "detach_", "dim_order", "names", "refine_names",
    "is_storage", "is_tensor", "get_default_dtype", "set_printoptions", "manual_seed", "seed", "initial_seed",
    "get_rng_state", "set_rng_state", "broadcast_shapes",
))  # fmt: skip
"""Questions, conversions to Python, and what changes no value."""

_WRITING_DUNDERS = frozenset((
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ifloordiv__", "__imod__",
    "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
))  # fmt: skip


class Fact:
    """What is known of a function.

    Attributes:
        what: ``Functional.linear``.
        is_skipped: it is of no interest.
        is_backward: it runs a backward pass.
        may_be_silent: who sees it return no tensor knows that it never does.
        writes: it changes its first argument.
    """

    __slots__ = ("is_backward", "is_skipped", "may_be_silent", "what", "writes")

    def __init__(self, func: Any) -> None:
        name = getattr(func, "__name__", None) or type(func).__name__
        prefix = _prefix(func)
        if prefix == "Aten":
            name = name.partition(".")[0]
        self.what = f"{prefix}.{name}"
        self.is_skipped = name in _SKIPPED
        self.is_backward = False
        # `x == None` is False, and `x == y` a tensor; `x.type()` is a name, and `x.type(torch.half)` a tensor
        self.may_be_silent = not name.startswith("__") and name != "type"
        self.writes = name in _WRITING_DUNDERS or (name.endswith("_") and not name.endswith("__"))


def _prefix(func: Any) -> str:
    if isinstance(func, OPERATOR_CLASSES):
        return "Aten"
    owner = getattr(func, "__objclass__", None)
    module = getattr(func, "__module__", None) or ""
    if (isinstance(owner, type) and issubclass(Tensor, owner)) or module == TENSOR_METHODS:
        return "Tensor"
    # conv2d and others of torch.nn.functional are torch's own; other tools count them as what modules call them by
    name = getattr(func, "__name__", "")
    is_functional = module in ("torch.nn.functional", NN_FUNCTIONS) or getattr(functional, name, None) is func
    return "Functional" if is_functional else "Torch"


facts: dict[Any, Fact] = {}


def fact_of(func: Any) -> Fact | None:
    """None of what cannot even be named."""
    try:
        found = facts.get(func)
        if found is None:
            found = facts[func] = Fact(func)
        return found
    except Exception:  # an object that a program calls may have no hash
        try:
            return Fact(func)
        except Exception:
            return None
