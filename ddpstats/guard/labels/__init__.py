"""The label of a collective: the name that the program gives it (`label`), or under which it reached the tensor.

The second is inferred from the text and the running frames:

1. `source`: the call that a frame is executing, as a node of the parsed source.
2. `trace`: where that call's argument came from, as routes of keys, and what becomes of the result.
3. `read`: keys and containers, read off the running frames without running any code of the program's; the routes,
   followed through the frames of one call.
4. `judge`: whether two ranks' labels that differ are a fault, worth a warning, or each rank's own data.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ddpstats.errors import ConfigError

_current: ContextVar[str | None] = ContextVar("ddpstats_label", default=None)


@contextmanager
def label(name: str) -> Iterator[None]:
    """Name the collectives inside; the guard then compares this name, and infers none. Local, and free without a guard.

    Nested names are joined: ``label("epoch")`` around ``label("loss")`` gives ``epoch/loss``. Holds for this thread and
    what runs in its context.

    Raises:
        ConfigError: the name is no text.

    Example, where ranks legally reduce tensors of different names together::

        with ddpstats.label("experts"):
            dist.all_reduce(my_experts[rank].grad)
    """
    if type(name) is not str or not name:
        raise ConfigError(f"label() takes a name, a non-empty str, not {name!r}")
    outer = _current.get()
    token = _current.set(name if outer is None else f"{outer}/{name}")
    try:
        yield
    finally:
        _current.reset(token)


# The label that is set here, or None.
current_label = _current.get
