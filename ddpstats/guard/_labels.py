"""`label`: the name that the program itself gives to its collectives."""

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


def current_label() -> str | None:
    """The label that is set here, or None."""
    return _current.get()
