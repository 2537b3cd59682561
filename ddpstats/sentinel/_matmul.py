"""Matmul checksum: every matrix product inside a window is checked, forward and backward, on the rank that computes it.

For C = A @ B the sum of a row of C is also A times the row sums of B, which costs little next to the product. An
element that was computed wrong, or whose bits changed since, breaks that equality. Of each product that
`ddpstats.sentinel._matmul_door` shows,

1. `doubtful_rows` (`_matmul_checksum`) finds the rows of C where the two sums differ by more than rounding explains in
   healthy products: a few units of the last place of the row's norm. Sums that cancel exceed that without any fault, so
   where there are many such rows they are looked at again with the magnitudes of A and B in place of those of C;
2. `faults_in` (`_matmul_fault`) settles it: it computes the doubtful rows again in float64 and judges each element
   alone. An element is faulty if it is further from the exact value than any order of summation can bring it, or if the
   same kernel on the same operands now gives other bits that lie at least four times closer. So a false alarm of step 1
   costs time only;
3. a fault that the same kernel does not repeat is called transient, one that it repeats sticky.

Nothing is judged where healthy hardware may give anything: in elements with an operand that is not finite (a mask of
-inf, an overflow in an earlier layer) or whose sum of magnitudes overflows.

What cannot be found: a change below rounding, in float32 the lowest bits of the mantissa and in bfloat16 the lowest two
or three; an operand that was wrong before the product began; what the door does not see.
"""

from __future__ import annotations

import threading
from types import TracebackType

from ddpstats.sentinel import _matmul_door as door
from ddpstats.sentinel._matmul_checksum import doubtful_rows
from ddpstats.sentinel._matmul_door import Product
from ddpstats.sentinel._matmul_fault import MatmulFault, faults_in

_MOST_FAULTS = 16


class ChecksumWindow:
    """Checks every matrix product of this process, in all threads, from `open` to `close`. Local; a context manager.

    Results stay what they are: a fault is noted and neither repaired nor raised. No random state is consumed. On an
    accelerator the program waits for each product. Windows may overlap; a product is checked once for all of them.

    Attributes:
        faults: the first 16 faulty rows, in the order in which they were found.
        fault_count: how many there were.
        checked: products checked.
        cleared: products with a doubtful row in which no element was wrong.
        problem: the first error of a check itself, such as a lack of memory; that product went unchecked.
    """

    def __init__(self) -> None:
        self.faults: list[MatmulFault] = []
        self.fault_count = 0
        self.checked = 0
        self.cleared = 0
        self.problem: Exception | None = None

    @property
    def is_open(self) -> bool:
        return self in _windows

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
        """The last window to close leaves nothing behind. Idempotent."""
        global _windows
        with _lock:
            if self in _windows:
                _windows = tuple(window for window in _windows if window is not self)
                if not _windows:
                    door.uninstall()

    def __enter__(self) -> ChecksumWindow:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_windows: tuple[ChecksumWindow, ...] = ()
_lock = threading.RLock()


def _check(product: Product) -> None:
    """What the door shows. Must not raise: the program is in the middle of a step."""
    faults: list[MatmulFault] = []
    count, doubtful, problem = 0, False, None
    try:
        rows = doubtful_rows(product)
        doubtful = rows is not None
        if rows is not None:
            for fault in faults_in(product, rows):
                count += 1
                if count <= _MOST_FAULTS:
                    faults.append(fault)
    except Exception as error:
        problem = error.with_traceback(None)  # whose frames hold the operands
    with _lock:
        for window in _windows:
            window.checked += problem is None
            window.cleared += doubtful and not count and problem is None
            window.fault_count += count
            window.faults += faults[: _MOST_FAULTS - len(window.faults)]
            window.problem = window.problem or problem
