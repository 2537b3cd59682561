"""The errors of ddpstats: one root, and a class for each kind of trouble below it.

::

    DdpstatsError
    ├── ConfigError          an argument, a DDPSTATS_* variable or an installation that cannot work
    ├── InvalidStats         a leaf, key, weight or structure that cannot be reduced
    ├── SchemaConflict       ranks hold different kinds of thing under one path
    ├── ProtocolMismatch     ranks paired calls that do not belong together
    ├── RankMissing          a rank died, never called, or came too late
    ├── NonFiniteStat        a NaN or an infinity, where the caller asked for an error
    ├── CollectiveMismatch   ranks are about to combine different things (guard)
    ├── SentinelAlarm        what healthy hardware and equal replicas do not produce (sentinel)
    ├── BundleError          a capture that is incomplete, damaged or hostile (capture)
    └── DumpError            a dump that cannot be written or read (dump)

All ranks that are alive raise the same error, with the same text, for what they find in a call that they make
together. What one rank finds by itself is raised there alone: a `ConfigError`, unless said otherwise, what
`StatsWindow.add` refuses, and what is wrong with a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class DdpstatsError(Exception):
    """Base of all errors of this package.

    Attributes:
        ranks: global ranks the error is about, ascending; empty where no rank can be named.
        path: the path in the stats (``loss/ctc``, ``l1_loss[0]``), or None where no path is at fault.
        group: the process group in words, or None where no group is involved.
    """

    def __init__(
        self, message: str, *, ranks: Iterable[int] = (), path: str | None = None, group: str | None = None
    ) -> None:
        super().__init__(message)
        self.ranks: tuple[int, ...] = tuple(sorted(map(int, ranks)))
        self.path = path
        self.group = group


class ConfigError(DdpstatsError, ValueError):
    """Raised when an argument, an environment variable or an installation cannot work.

    On this rank only, unless said otherwise.
    """


class InvalidStats(DdpstatsError, ValueError):
    """Raised on every rank when some rank's stats or weight cannot be reduced; the reducer goes on working.

    `StatsWindow.add` raises it on this rank only.
    """


class SchemaConflict(DdpstatsError):
    """Raised on every rank when ranks hold a leaf and a container, or two reduce ops, under one path in one call.

    `StatsWindow.add` raises it on this rank only, where an earlier add of the window differs so.
    """


class ProtocolMismatch(DdpstatsError):
    """Raised on every rank when ranks paired calls of different names, policies or library versions."""


class RankMissing(DdpstatsError, RuntimeError):
    """Raised on every living rank when a rank did not take part within the timeout; the reducer is closed.

    It is a RuntimeError, too, as torch's own errors about a lost rank are.

    Attributes:
        missing_ranks: global ranks that did not take part; empty where they are unknown, and the message says why.
    """

    def __init__(self, message: str, *, missing_ranks: Iterable[int] = (), **where: Any) -> None:
        self.missing_ranks: tuple[int, ...] = tuple(sorted(map(int, missing_ranks)))
        super().__init__(message, **{**where, "ranks": self.missing_ranks or where.get("ranks", ())})


class NonFiniteStat(DdpstatsError, ArithmeticError):
    """Raised on every rank under ``nonfinite="raise"`` when some rank holds a NaN or an infinity."""


class CollectiveMismatch(DdpstatsError):
    """Raised on every rank when ranks are about to combine different things.

    Attributes:
        seq: the collective's number in its group; the first is 1.
        by_rank: rank -> what it did: an event with its signature (op, reduce op, shapes, dtypes, root), label and site.
        culprit_ranks: the ranks that differ from a majority; empty without a majority.
        missing_ranks: ranks that never came to this collective.
    """

    def __init__(
        self,
        message: str,
        *,
        seq: int = 0,
        by_rank: Mapping[int, Any] | None = None,
        culprit_ranks: Iterable[int] = (),
        missing_ranks: Iterable[int] = (),
        **where: Any,
    ) -> None:
        self.seq = seq
        self.by_rank: Mapping[int, Any] = dict(by_rank or {})
        self.culprit_ranks: tuple[int, ...] = tuple(sorted(culprit_ranks))
        self.missing_ranks: tuple[int, ...] = tuple(sorted(missing_ranks))
        ranks = {*self.by_rank, *self.missing_ranks} or where.get("ranks", ())
        super().__init__(message, **{**where, "ranks": ranks})


class SentinelAlarm(DdpstatsError):
    """Raised on every rank when the sentinel found what should not be, before the step is applied.

    Attributes:
        step: the training step.
        layers: what found it: "thresholds", "replica digests", "peer replay", "matmul checksum".
        culprit_ranks: where it arose; empty where that is unknown, and the message says why.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int = 0,
        layers: Iterable[str] = (),
        culprit_ranks: Iterable[int] = (),
        **where: Any,
    ) -> None:
        self.step = step
        self.layers: tuple[str, ...] = tuple(layers)
        self.culprit_ranks: tuple[int, ...] = tuple(sorted(map(int, culprit_ranks)))
        super().__init__(message, **{**where, "ranks": self.culprit_ranks or where.get("ranks", ())})


class BundleError(DdpstatsError):
    """Raised when a capture bundle is incomplete, damaged or not of this format."""


class DumpError(DdpstatsError):
    """Raised when a statistics dump cannot be written, read or compared."""
