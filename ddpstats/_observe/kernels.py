"""Kernels that see operators of torch: they are registered, call torch's own, and are removed again.

A kernel at a dispatch key that is tried before a device's own (``BackendSelect``) sees every call of its operator, from
any caller and in any thread, and runs it by `next_kernel`. (To save the kernel that was there and call it holds the
GIL, and deadlocks; to leave the key out while the operator runs breaks what the operator itself calls.)

A kernel may not be removed while another thread is about to enter it, and no function of torch says so. So the kernels
that are removed are kept in memory until the next removal; a caller that cannot be sure that no thread is about to
enter waits first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from ddpstats._base.text import first_line
from ddpstats._observe.torch_compat import close_library, hide_from_dynamo, kernel_at, open_library

Kernel = Callable[..., Any]

_removed: dict[tuple[str, str], Any] = {}  # (operator, key) -> kernels that a thread may still be about to enter


class Kernels:
    """Registered when this is made, until `remove`.

    Args:
        namespace: of the operators: "aten", "c10d".
        key: the dispatch key.
        kernels: name of an operator ("mm", "mm.out") -> what takes its arguments, and returns what it returns.
        with_keys: each is given the dispatch keys of the call as its first argument.
        replaces: something is registered there already, and comes back when ours are removed.

    Raises `ConfigError` on a torch that could not take them away again.
    """

    def __init__(
        self,
        namespace: str,
        key: str,
        kernels: Mapping[str, Kernel],
        *,
        with_keys: bool = False,
        replaces: bool = False,
    ) -> None:
        self._slots = [(f"{namespace}::{name}", key) for name in kernels]
        self._library = open_library(namespace)
        with warnings.catch_warnings():
            if replaces:
                warnings.filterwarnings("ignore", message=r"[\s\S]*verriding a previously registered kernel")
            for name, kernel in kernels.items():
                hide_from_dynamo(kernel)
                self._library.impl(name, kernel, key, with_keyset=with_keys)

    def remove(self) -> None:
        """Restore what was there."""
        if kernel_at is not None:
            _removed.update({slot: kernel_at(*slot) for slot in self._slots})
        close_library(self._library)


def unseen(sees: Callable[[], bool]) -> str | None:
    """Return why kernels do not see their operators on this torch; None where ``sees`` returns True."""
    try:
        return None if sees() else "what was tried was not seen"
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
