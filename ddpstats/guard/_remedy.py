"""What to do about a mismatch: a sentence that fits what differs. Pure."""

from __future__ import annotations

_BY_DIFFERENCE = {
    "the operation": "Make all ranks issue the same collectives in the same order.",
    "the reduce op": "Pass the same op= on all ranks.",
    "the root": "Pass the same src= or dst=, a global rank, on all ranks.",
    "the number of tensors": "Pass as many tensors on all ranks: where a rank lacks one, zeros in its place.",
    "the dtype": "Convert to one dtype on all ranks before the call.",
    "the number of dimensions": "Pass tensors of one shape on all ranks: reshape before the call.",
    "the shape": "Pass tensors of one shape on all ranks: pad them to the largest.",
    "the memory format": "Call .contiguous() on the tensor before the call, on all ranks.",
    "the label": (
        "Make all ranks go through the same keys in the same order (sort them, and reduce zeros for a key that a rank "
        "lacks), or use ddpstats.reduce_stats; where the difference is meant, put the calls into `with "
        "ddpstats.label('...')` of one name on all ranks."
    ),
    "the pieces": "Make what each rank sends to another what that one expects: split sizes, shapes and dtypes.",
}
_BY_HAND = (
    "ddpstats.label() gave these names: give the same one on all ranks where they reduce the same thing. Where they do "
    "not, make all ranks go through the same keys in the same order, or use ddpstats.reduce_stats, which aligns them."
)
_ORDER = "Make all ranks issue the same collectives in the same order."


def remedy(difference: str, in_order: bool, by_hand: bool = False) -> str:
    """``difference``: as `_diagnosis.what_differs` says it. Not ``in_order``: calls are swapped, or one is extra.
    ``by_hand``: the program itself gave the names."""
    if by_hand and difference.startswith("the label"):
        return _BY_HAND
    if not in_order and not difference.startswith("the label"):
        return _ORDER
    return next((fix for what, fix in _BY_DIFFERENCE.items() if difference.startswith(what)), _ORDER)
