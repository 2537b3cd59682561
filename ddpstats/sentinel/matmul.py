"""Layer 4, the matmul checksum: every matrix product is checked, forward and backward, on the rank that computes it.

How products are seen. Whatever multiplies matrices in torch (``@``, ``torch.matmul``, ``einsum``, ``nn.Linear``,
attention written out), in the forward or the backward pass, in any thread, under autocast, in inference mode, comes
down to one of four operators of aten: ``mm``, ``addmm``, ``bmm``, ``baddbmm``. While a `ChecksumWindow` is open, each
of them, and its variant with ``out=``, has another kernel at the dispatch key BackendSelect. That is tried below
autograd and before the kernels of all devices, and aten leaves it empty for these operators, so nothing is overridden
and removing ours restores everything. No other operator pays. Our kernel hands the operator on to the kernel of the
tensors' device, which computes what it always computes, and then checks the result. What a check multiplies itself is
not checked.

A kernel may not be removed while another thread is about to enter it, and torch does not say when (`Kernels`). So where
the last window closes our kernels stay parked, hand on, and cost each product some microseconds, until `tidy` finds
them parked for 5 seconds and removes them. The next window takes parked kernels into use again. A forked child has
parked kernels and no window.

Not seen: products inside fused kernels (``scaled_dot_product_attention``, ``_native_multi_head_attention``,
convolutions, recurrent networks), matrix times vector (``mv``, ``dot``), the variants in place (``addmm_``, which lose
an operand) and with ``out_dtype``, results written over an operand or into its storage (``out=``), tensors that are
sparse, nested or quantized, integers and complex numbers, what ``alpha=0`` leaves out, and a CUDA graph while it is
captured or replayed.

A window tries a product of two rows when it installs the kernels, and refuses a torch that does not show it
(``ConfigError``). Run on torch 2.13, CPU. Where torch does not show which kernels it uses, `tidy` removes nothing.

How a product is checked. For C = A @ B the sum of a row of C is also A times the row sums of B, which costs little next
to the product. An element that was computed wrong, or whose bits changed since, breaks that equality. A row is summed
in blocks of 1,024 columns (256 of halves), so that one element counts among few.

1. `doubtful_rows` finds the rows of C where the two sums differ by more than rounding explains in healthy products: a
   few units of the last place of the row's norm. Sums that cancel exceed that without any fault, so where there are
   many such rows they are compared again with the magnitudes of A and B in place of those of C;
2. `faults_in` settles it: it computes the doubtful rows again in float64 and judges each element by itself. An element
   is faulty if it is further from the exact value than any order of summation can bring it, or if the same kernel on
   the same operands now gives other bits that are at least four times closer. A false alarm of step 1 costs time only;
3. a fault that the same kernel does not repeat is called transient, one that it repeats sticky.

Nothing is judged where healthy hardware may give anything: in elements with an operand that is not finite (a mask of
-inf, an overflow in an earlier layer) or whose sum of magnitudes overflows.

What cannot be found: a change that is small beside the rounding of its block of columns; an operand that was wrong
before the product began; what is not seen. Shares of flipped bits that were found, one bit of one element of
(8, 256) @ (256, n) of normally distributed numbers, by field of the number:

===================  =========  =========  =========  =======================================================
columns n                   64       1024       8192  what escapes
===================  =========  =========  =========  =======================================================
float32, exponent         1.00       1.00       1.00
float32, fraction         0.60       0.51       0.51  the lowest 8 of 23 bits; some of bits 8 to 12
bfloat16, exponent        0.95       0.92       0.93  elements small beside their row; bits that lower a number
bfloat16, fraction        0.34       0.20       0.18  the lowest 3 of 7 bits; most of bits 3 to 5
===================  =========  =========  =========  =======================================================

"Exponent" includes the sign. In rows whose elements differ much in size the small ones escape more often.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddpstats._base.text import dtype_name
from ddpstats._observe.torch_compat import (
    Kernels,
    explain_unseen,
    in_backward,
    kernel_at,
    keys_below,
    next_kernel,
    no_dispatch_no_grad,
)
from ddpstats._ranks.device import is_capturing, widest_float
from ddpstats.errors import ConfigError
from ddpstats.sentinel.verdict import Detector, Exam, SentinelFinding, SentinelVerdict, finding_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Product(NamedTuple):
    """One finished matrix product: ``result`` is alpha * left @ right + beta * addend.

    Attributes:
        op: "mm", "addmm", "bmm" or "baddbmm".
        result, left, right: the program's own tensors, (m, n), (m, k) and (k, n); of bmm and baddbmm a batch of them.
        addend: anything that broadcasts to ``result``; None where nothing is added.
        again: computes the result once more, by the same kernel, into a new tensor.
    """

    op: str
    result: Tensor
    left: Tensor
    right: Tensor
    addend: Tensor | None
    beta: float
    alpha: float
    again: Callable[[], Tensor]


# -- kernels ----------------------------------------------------------------------------------------------------------

_OPS = ("mm", "addmm", "bmm", "baddbmm")
_PARKED_SEC = 5.0

_windows: tuple[ChecksumWindow, ...] = ()
_lock = threading.RLock()
_kernels: Kernels | None = None
_parked_at_sec: float | None = None  # since when no window is open, while our kernels are there
_here = threading.local()  # is_checking: this thread is inside of a check


def _set_windows(windows: tuple[ChecksumWindow, ...]) -> None:
    """Check for these from now on. Products under way in other threads may still be checked for those before."""
    global _windows, _kernels, _parked_at_sec
    with _lock:
        if windows and _kernels is None:
            ours = {op: _kernel(op, "default") for op in _OPS} | {f"{op}.out": _kernel(op, "out") for op in _OPS}
            _kernels = Kernels("aten", "BackendSelect", ours, with_keys=True)
        _windows = windows
        _parked_at_sec = None if windows or _kernels is None else time.monotonic()


def _tidy() -> None:
    global _kernels, _parked_at_sec
    with _lock:
        is_due = _parked_at_sec is not None and time.monotonic() - _parked_at_sec >= _PARKED_SEC
        if is_due and kernel_at is not None and _kernels is not None:
            _kernels.remove()
            _kernels = _parked_at_sec = None


def _after_fork() -> None:
    """Close all windows in the child: another thread of the parent may have held the lock."""
    global _lock
    _lock = threading.RLock()
    _set_windows(())


os.register_at_fork(after_in_child=_after_fork)


def _sees_a_product() -> bool:
    window = ChecksumWindow()
    _set_windows((window,))
    try:
        with no_dispatch_no_grad():
            ones = torch.ones(2, 2, device="cpu")
            torch.mm(ones, ones)
    finally:
        _set_windows(())
    return window.checked + window.unchecked > 0


def _kernel(op: str, overload: str) -> Callable[..., Any]:
    packet = getattr(torch.ops.aten, op)
    redispatch, functional = next_kernel(getattr(packet, overload)), next_kernel(packet.default)
    below = keys_below("BackendSelect")

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        keys = keys & below
        result = redispatch(keys, *args, **kwargs)
        if _windows and not getattr(_here, "is_checking", False):
            out = kwargs.pop("out", None)
            product = _product(op, lambda: functional(keys, *args, **kwargs), result, args, out=out, **kwargs)
            if product is not None:
                _here.is_checking = True
                try:
                    _check(product)
                finally:
                    _here.is_checking = False
        return result

    return kernel


def _product(
    op: str,
    again: Callable[[], Tensor],
    result: Tensor,
    args: tuple[Tensor, ...],
    *,
    out: Tensor | None,
    beta: float = 1.0,
    alpha: float = 1.0,
) -> Product | None:
    """Return None where the operands cannot be checked, or nothing is multiplied."""
    *added, left, right = args
    if not all(map(_is_plain, (result, left, right, *added))) or not result.dtype == left.dtype == right.dtype:
        return None
    if alpha == 0 or left.shape[-1] == 0:
        return None
    if not result.is_cpu and is_capturing():
        return None  # a check reads the device, which a capture does not survive
    if out is not None and out.untyped_storage().data_ptr() in [arg.untyped_storage().data_ptr() for arg in args]:
        return None  # an operand may be overwritten
    return Product(op, result, left, right, added[0] if added and beta != 0 else None, beta, alpha, again)


def _is_plain(tensor: Tensor) -> bool:
    plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
    return plain and tensor.dtype in DTYPES


# -- rows whose sums the operands deny --------------------------------------------------------------------------------

# In units of rounding of the norm of a row of C: the checksum's own float32 sums; the rounding of C's elements,
# which only halves have beside that. Products of random numbers stay below 40 nearly always; to settle a row costs
# milliseconds, so lower limits would buy the next bits of the mantissa dearly.
_SUMS, _ELEMENTS = 40.0, 2.0
_MAGNITUDES = 12.0  # the same, of the magnitudes of A and B
_FEW_ROWS = 4  # cost less to settle than to look at again
# Of a row: a wrong element shows less, the more columns are summed with it. Products of halves take so long that
# smaller blocks cost little beside them.
_COLUMNS, _COLUMNS_OF_HALVES = 1024, 256
_LARGEST_NORM = 1e19  # squares beyond that overflow in float32


def doubtful_rows(product: Product) -> Tensor | None:
    """Return which rows of the result break the checksum: bool, the shape without columns; None if none does."""
    result, left, right = product.result, product.left, product.right
    if result.numel() == 0:
        return None
    wide, noise = wide_of(result.dtype), _noise(result.dtype)
    sums = _by_block(right, _sum, wide)
    expected = left.to(wide) @ sums
    if product.alpha != 1:
        expected *= product.alpha
    if product.addend is not None:
        expected.add_(_block_sums(product.addend, result, wide), alpha=product.beta)
    off = _by_block(result, _sum, wide).sub_(expected).abs_()
    norms = _by_block(result, _norm, wide).clamp_(max=_LARGEST_NORM)
    excess = off.sub_(norms, alpha=noise)
    if excess.amax().item() <= 0:  # not so for NaN
        return None
    doubtful = (~(excess <= 0)).any(-1)
    if int(doubtful.sum()) <= _FEW_ROWS:
        return doubtful
    magnitudes = _by_block(right, _norm, wide).add_(sums.abs_())
    scale = (left.to(wide).abs() @ magnitudes).mul_(abs(product.alpha)).clamp_(max=_LARGEST_NORM)
    doubtful = (~(excess <= scale.mul_(_MAGNITUDES * unit(wide) + operand_unit(result)))).any(-1)
    return doubtful if bool(doubtful.any()) else None


def wide_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _by_block(matrix: Tensor, reduced: Callable[[Tensor, torch.dtype], Tensor], wide: torch.dtype) -> Tensor:
    """Reduce each row's blocks of columns: (..., rows, columns) -> (..., rows, blocks). The last may be smaller."""
    width = _COLUMNS_OF_HALVES if matrix.dtype.itemsize == 2 else _COLUMNS
    if matrix.shape[-1] <= width:
        return reduced(matrix, wide).unsqueeze(-1)
    # One by one: torch reduces a dimension between others several times as slowly.
    return torch.stack([reduced(block, wide) for block in torch.split(matrix, width, -1)], -1)


def _sum(matrix: Tensor, wide: torch.dtype) -> Tensor:
    return matrix.sum(-1, dtype=wide)


def _norm(matrix: Tensor, wide: torch.dtype) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(matrix, 2, -1, dtype=wide)
    return norm


def _block_sums(addend: Tensor, result: Tensor, wide: torch.dtype) -> Tensor:
    if addend.dim() == 1 and len(addend) == result.shape[-1]:
        return _by_block(addend, _sum, wide)  # a bias: the same for every row
    return _by_block(addend.expand_as(result), _sum, wide)


def unit(dtype: torch.dtype) -> float:
    """Return the unit of rounding: the largest relative error of rounding a number to ``dtype``."""
    return torch.finfo(dtype).eps / 2


def _noise(dtype: torch.dtype) -> float:
    """Return how far the sum of a healthy row may be off, as a share of the row's norm."""
    noise = _SUMS * unit(wide_of(dtype))
    return noise + _ELEMENTS * unit(dtype) if dtype.itemsize == 2 else noise


def operand_unit(result: Tensor) -> float:
    """Return the unit to which operands may be rounded: users may allow float32 to be multiplied with fewer bits."""
    if result.dtype != torch.float32:
        return 0.0
    backend = torch.backends.mkldnn if result.is_cpu else getattr(torch.backends, result.device.type, None)
    precision = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    if precision is None:  # older torch has one setting for all backends
        precision = {"highest": "ieee", "high": "tf32"}.get(torch.get_float32_matmul_precision())
    return _PRECISIONS.get(str(precision), 2.0**-8)


_PRECISIONS = {"ieee": 0.0, "none": 0.0, "tf32": 2.0**-11}


# -- what is wrong in them --------------------------------------------------------------------------------------------

_BLOCK_ROWS = 256
_BLOCK_ELEMENTS = 1 << 22  # of B, in float64 at a time: 32 MiB

# What a healthy kernel stays below nearly always, in units of rounding of the sum of magnitudes.
_USUAL = 8.0


@dataclass(frozen=True)
class MatmulFault:
    """A row of a matrix product, or a block of its columns, that healthy hardware does not compute.

    Attributes:
        op: "mm", "addmm", "bmm" or "baddbmm".
        shape: (m, k, n) of (m, k) @ (k, n).
        dtype: of the product, "float32", "bfloat16", ...
        index: the first wrong element of the row: (row, column), of bmm and baddbmm (batch, row, column).
        got: its value.
        expected: its value computed in float64.
        wrong: how many elements are wrong.
        transient: the same kernel computed the element right when it was asked again; otherwise the fault is sticky.
        backward: it happened in a backward pass.
    """

    op: str
    shape: tuple[int, int, int]
    dtype: str
    index: tuple[int, ...]
    got: float
    expected: float
    wrong: int
    transient: bool
    backward: bool


def faults_in(product: Product, doubtful: Tensor) -> Iterator[MatmulFault]:
    """Yield the faulty rows among the ``doubtful`` ones (as of `doubtful_rows`), each computed again in float64."""
    again = functools.cache(product.again)
    k, n = product.right.shape[-2:]
    rows_at_once = max(1, min(_BLOCK_ROWS, _BLOCK_ELEMENTS // n))
    width = max(1, _BLOCK_ELEMENTS // max(k, 1))
    batched = doubtful if doubtful.dim() == 2 else doubtful.unsqueeze(0)
    for batch in batched.any(-1).nonzero().flatten().tolist():
        at = batch if doubtful.dim() == 2 else ...  # all of a product without a batch
        for rows in torch.split(batched[batch].nonzero().flatten(), rows_at_once):
            for first in range(0, n, width):
                yield from _faults_of_block(product, at, rows, slice(first, first + width), again)


def _faults_of_block(
    product: Product, batch: Any, rows: Tensor, columns: slice, again: Callable[[], Tensor]
) -> Iterator[MatmulFault]:
    """Yield the faults in these rows and columns. ``batch``: indexes all but the last two dimensions."""

    def block_of(result: Tensor) -> Tensor:
        return _in_float64(result[batch][rows, columns])

    left, right = _in_float64(product.left[batch][rows]), _in_float64(product.right[batch][:, columns])
    multiplied = (left @ right) * product.alpha
    magnitude = (left.abs() @ right.abs()) * abs(product.alpha)
    exact = multiplied
    common = _common_error(product, multiplied, magnitude, left, right)
    if product.addend is not None:
        added = block_of(product.addend.expand_as(product.result)) * product.beta
        exact, magnitude = multiplied + added, magnitude + added.abs()
        common += unit(product.result.dtype) * (exact.abs() + 2 * added.abs())  # beta may be rounded, too
    got = block_of(product.result)
    growth = left.shape[-1] + 4  # additions, each of which rounds a partial sum
    rounding = unit(wide_of(product.result.dtype)) * magnitude
    bound = growth * rounding + common
    error = _distance(got, exact)
    unusual = _can_be_judged(product, exact, magnitude) & (error > min(growth, _USUAL) * rounding + common)
    if not bool(unusual.any()):
        return
    repeated = block_of(again())
    changed, drift = repeated != got, _distance(repeated, exact)
    wrong = unusual & ((error > bound) | (changed & (4 * drift <= error)))
    transient = changed & (drift <= bound)
    for row in wrong.any(-1).nonzero().flatten().tolist():
        column = int(wrong[row].nonzero()[0])
        yield MatmulFault(
            op=product.op,
            shape=(product.left.shape[-2], left.shape[-1], product.right.shape[-1]),
            dtype=dtype_name(product.result.dtype),
            index=(*([] if batch is ... else [batch]), int(rows[row]), columns.start + column),
            got=got[row, column].item(),
            expected=exact[row, column].item(),
            wrong=int(wrong[row].sum()),
            transient=bool(transient[row, column]),
            backward=in_backward(),
        )


def _in_float64(tensor: Tensor) -> Tensor:
    """Return it in float64; on the host where its device does not compute so."""
    return (tensor if widest_float(tensor.device) is torch.float64 else tensor.cpu()).double()


def _common_error(product: Product, multiplied: Tensor, magnitude: Tensor, left: Tensor, right: Tensor) -> Tensor:
    dtype = product.result.dtype
    roundings = 1 if product.alpha == 1 else 3  # before alpha, alpha itself, after it
    common = roundings * unit(dtype) * multiplied.abs() + 2 * operand_unit(product.result) * magnitude
    if dtype.itemsize == 2 and not product.result.is_cpu:
        common += 4 * unit(dtype) * magnitude  # torch lets such kernels add parts of the sum in half precision
    # Numbers below the normal range may be rounded coarsely, or taken for zero.
    operands = left.abs().sum(-1, keepdim=True) + right.abs().sum(0)
    factor = max(1.0, abs(product.alpha), abs(product.beta) if product.addend is not None else 0.0)
    common += factor * torch.finfo(wide_of(dtype)).tiny * (operands + left.shape[-1] + 2)
    return common + factor * torch.finfo(dtype).tiny * torch.finfo(dtype).eps


def _can_be_judged(product: Product, exact: Tensor, magnitude: Tensor) -> Tensor:
    """Return False where an operand is not finite, which makes the magnitude so, or the sum may have overflowed."""
    result = product.result
    summed_in = wide_of(result.dtype) if result.is_cpu else result.dtype
    fits = exact.abs() < 0.99 * torch.finfo(result.dtype).max
    before_alpha = max(1.0, 1 / abs(product.alpha))
    return fits & (magnitude * before_alpha < 0.5 * torch.finfo(summed_in).max)


def _distance(first: Tensor, second: Tensor) -> Tensor:
    return (first - second).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)


# -- windows ----------------------------------------------------------------------------------------------------------

_MOST_FAULTS = 16


class ChecksumWindow:
    """Checks every matrix product of this process, in all threads, from `open` to `close`. Local; a context manager.

    Results stay what they are: a fault is noted and neither repaired nor raised. No random state is consumed. On an
    accelerator the program waits for each product. Windows may overlap; a product is checked once for all of them.

    Attributes:
        faults: the first 16 faulty rows, in the order in which they were found.
        fault_count: how many there were.
        checked: products checked.
        problem: the first error of a check itself, such as a lack of memory; that product went unchecked.
        unchecked: products that went unchecked in this way.
    """

    def __init__(self) -> None:
        self.checked = 0
        self._reset()

    def _reset(self) -> None:
        self.faults: list[MatmulFault] = []
        self.fault_count = self.unchecked = 0
        self.problem: Exception | None = None

    @property
    def is_open(self) -> bool:
        """Return whether it checks; never in a forked child, where its parent's windows are closed."""
        return self in _windows

    @property
    def has_news(self) -> bool:
        """Return whether there are faults or a problem to `take`."""
        return self.fault_count > 0 or self.problem is not None

    def take(self) -> tuple[list[MatmulFault], int, Exception | None, int]:
        """Return faults, their count, problem, and how many products went unchecked, since the last call."""
        with _lock:
            taken = self.faults, self.fault_count, self.problem, self.unchecked
            self._reset()
        return taken

    def open(self) -> None:
        """Begin to check; what was found before stays. Idempotent.

        Raises:
            ConfigError: this torch does not show its matrix products.
        """
        with _lock:
            why = None if _windows else explain_unseen(_sees_a_product)
            if why is not None:
                raise ConfigError(
                    f"torch {torch.__version__} does not show its matrix products to the sentinel ({why}). It was "
                    "checked on torch 2.13: install that version, or run without the matmul checksum."
                )
            if not self.is_open:
                _set_windows((*_windows, self))

    def close(self) -> None:
        """Stop checking. Idempotent.

        After the last window closed each product still pays some microseconds, until a `tidy` 5 seconds later or more.
        """
        with _lock:
            if self.is_open:
                _set_windows(tuple(window for window in _windows if window is not self))

    @staticmethod
    def tidy() -> None:
        """Leave nothing behind, once all windows have been closed for 5 seconds. Cheap: call it often.

        At once would be too soon: another thread may be about to multiply through what is taken away.
        """
        _tidy()

    def __enter__(self) -> ChecksumWindow:
        self.open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _check(product: Product) -> None:
    """Check for all windows. It must not raise: the program is in the middle of a step."""
    faults: list[MatmulFault] = []
    count, problem = 0, None
    try:
        rows = doubtful_rows(product)
        for count, fault in enumerate(() if rows is None else faults_in(product, rows), start=1):
            faults += [fault] if count <= _MOST_FAULTS else []
    except Exception as error:
        problem = error.with_traceback(None)  # whose frames hold the operands
    with _lock:
        for window in _windows:
            window.checked += problem is None
            window.unchecked += problem is not None
            window.fault_count += count
            window.faults += faults[: _MOST_FAULTS - len(window.faults)]
            window.problem = window.problem or problem


def fault_tree(faults: Sequence[MatmulFault], count: int) -> dict[str, Any] | None:
    """Return the first wrong row on this rank, and how many there were, for `gather_trees`; None without any."""
    if not faults:
        return None
    first = faults[0]
    m, k, n = first.shape
    where = "backward" if first.backward else "forward"
    often = "it computes the same again: a sticky fault"
    if first.transient:
        often = "computed again, it is right: a transient fault"
    more = f"; {count - 1} more rows" if count > 1 else ""
    text = (
        f"{first.op} of ({m}, {k}) with ({k}, {n}) in {first.dtype}, {where}: "
        f"element {list(first.index)} is {first.got:g} instead of {first.expected:g}; {often}{more}"
    )
    return {"name": first.op, "text": text, "value": first.got}


class MatmulChecksum(Detector):
    """Layer 4: checks every matrix product for some steps after an alarm, or when asked to.

    Args:
        steps: after an alarm; 0 for never.
    """

    def __init__(self, steps: int) -> None:
        self.window = ChecksumWindow()
        self._alarm_steps, self._steps_left = steps, 0
        self._has_opened = self._has_rerun = False

    def open_for(self, steps: int) -> None:
        """Check until so many more steps are judged, or for as long as an open window would have."""
        self.window.open()
        self._steps_left = max(self._steps_left, steps)

    def open_after_alarm(self) -> None:
        """Start checking after an alarm; do not extend an open window."""
        if self._alarm_steps and not self.window.is_open:
            self.open_for(self._alarm_steps + 1)  # what is left of this one, too
            self._has_opened = True

    def before_rerun(self) -> None:
        """Check the products of the micro-batch that runs again: what they show is of this step."""
        self.open_after_alarm()
        self._has_rerun = True  # also where the window of this rank is closed: all ranks gather, or none

    def suspicious(self, step: int) -> Any:
        return self._report() if self.window.has_news else None

    def findings(self, exam: Exam) -> list[SentinelFinding]:
        reports = exam.evidence
        if self._has_rerun and not any(report and report["fault"] for report in reports.values()):
            reports = exam.gathered(self._report, "products of the reruns")
        reports = {rank: report for rank, report in reports.items() if report}
        exam.notes += [f"Rank {rank}: {report['unchecked']}" for rank, report in reports.items() if report["unchecked"]]
        faults = {rank: report["fault"] for rank, report in reports.items() if report["fault"]}
        finding = finding_of("matmul checksum", "a matrix product has a wrong result", faults)
        if finding or exam.findings:
            self.open_after_alarm()
        if self._has_opened:
            exam.notes.append(f"Matmuls are checked in the next {self._alarm_steps} steps.")
        return [] if finding is None else [finding]

    def conclude(self, verdict: SentinelVerdict | None) -> None:
        self._has_opened = self._has_rerun = False
        if verdict is None:
            return
        if self._steps_left:
            self._steps_left -= 1
            if not self._steps_left:
                self.window.close()
        else:
            self.window.tidy()

    def close(self) -> None:
        self.window.close()

    def _report(self) -> dict[str, Any]:
        """Return what the window saw on this rank."""
        faults, count, problem, unchecked = self.window.take()
        text = f"{unchecked} products could not be checked: {type(problem).__name__}: {problem}" if problem else ""
        return {"fault": fault_tree(faults, count), "unchecked": text}
