"""Matmul checksum: every matrix product inside a window is checked, forward and backward, on the rank that computes it.

For C = A @ B the sum of a row of C is also A times the row sums of B, which costs little next to the product. An
element that was computed wrong, or whose bits changed since, breaks that equality. A row is summed in blocks of 1,024
columns (256 of halves), so that one element counts among few. Of each product that `ddpstats.sentinel._matmul_kernels`
shows,

1. `doubtful_rows` (`_matmul_checksum`) finds the rows of C where the two sums differ by more than rounding explains in
   healthy products: a few units of the last place of the row's norm. Sums that cancel exceed that without any fault, so
   where there are many such rows they are looked at again with the magnitudes of A and B in place of those of C;
2. `faults_in` (`_matmul_checksum`) settles it: it computes the doubtful rows again in float64 and judges each element
   alone. An element is faulty if it is further from the exact value than any order of summation can bring it, or if the
   same kernel on the same operands now gives other bits that lie at least four times closer. So a false alarm of step 1
   costs time only;
3. a fault that the same kernel does not repeat is called transient, one that it repeats sticky.

Nothing is judged where healthy hardware may give anything: in elements with an operand that is not finite (a mask of
-inf, an overflow in an earlier layer) or whose sum of magnitudes overflows. Nor is a product of which another thread
has changed a tensor meanwhile.

What cannot be found: a change that is small beside the rounding of its block of columns; an operand that was wrong
before the product began; what the door does not see. Shares of flipped bits that were found, one bit of one element of
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

import os
import threading

from ddpstats.sentinel import _matmul_kernels as door
from ddpstats.sentinel._matmul_checksum import MatmulFault, doubtful_rows, faults_in
from ddpstats.sentinel._matmul_kernels import Product

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
        self.faults: list[MatmulFault] = []
        self.fault_count = 0
        self.checked = 0
        self.problem: Exception | None = None
        self.unchecked = 0

    @property
    def is_open(self) -> bool:
        """Never in a forked child: there its parent's windows are closed."""
        return self in _windows

    @property
    def has_news(self) -> bool:
        """Whether there are faults or a problem to `take`."""
        return self.fault_count > 0 or self.problem is not None

    def take(self) -> tuple[list[MatmulFault], int, Exception | None, int]:
        """The faults so far, their count, the problem, and how many products went unchecked; all begin anew."""
        with _lock:
            taken = self.faults, self.fault_count, self.problem, self.unchecked
            self.faults, self.fault_count, self.problem, self.unchecked = [], 0, None, 0
        return taken

    def open(self) -> None:
        """Begin to check; what was found before stays. Idempotent.

        Raises:
            ConfigError: this torch does not show its matrix products.
        """
        global _windows
        with _lock:
            if self not in _windows:
                if not _windows:
                    door.install(_check)
                _windows = (*_windows, self)

    def close(self) -> None:
        """Stop checking. Idempotent.

        For some seconds after the last window closed each product still pays some microseconds; then, at the next
        `tidy`, nothing is left behind.
        """
        global _windows
        with _lock:
            if self in _windows:
                _windows = tuple(window for window in _windows if window is not self)
                if not _windows:
                    door.uninstall()

    @staticmethod
    def tidy() -> None:
        """Leave nothing behind, once all windows have been closed for 5 seconds. Cheap: call it often.

        At once would be too soon: another thread may be about to multiply through what is taken away.
        """
        with _lock:
            door.tidy()

    def __enter__(self) -> ChecksumWindow:
        self.open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_windows: tuple[ChecksumWindow, ...] = ()
_lock = threading.RLock()


def _after_fork() -> None:
    """Another thread of the parent may have held the lock."""
    global _windows, _lock
    _windows, _lock = (), threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def _check(product: Product) -> None:
    """What the door shows. Must not raise: the program is in the middle of a step."""
    faults: list[MatmulFault] = []
    count, problem = 0, None
    try:
        rows = doubtful_rows(product)
        if rows is not None:
            for fault in faults_in(product, rows):
                count += 1
                if count <= _MOST_FAULTS:
                    faults.append(fault)
        if count and product.was_changed():
            faults, count = [], 0
    except Exception as error:
        problem = error.with_traceback(None)  # whose frames hold the operands
    with _lock:
        for window in _windows:
            window.checked += problem is None
            window.unchecked += problem is not None
            window.fault_count += count
            window.faults += faults[: _MOST_FAULTS - len(window.faults)]
            window.problem = window.problem or problem
