"""Every DDPSTATS_* environment variable: its name, what it means, and its parsing. Read when used, never at import."""

from __future__ import annotations

import os

from ddpstats.errors import ConfigError

DISABLE = "DDPSTATS_DISABLE"
TIMEOUT_SEC = "DDPSTATS_TIMEOUT_SEC"

DEFAULT_TIMEOUT_SEC = 300.0

_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"", "0", "false", "no", "off"})


def disabled() -> bool:
    """DDPSTATS_DISABLE=1: ``install()`` of every integration leaves its library as it is.

    Explicit calls such as ``reduce_stats`` are not affected: without them the numbers would be one rank's own.
    """
    text = os.environ.get(DISABLE, "").strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ConfigError(f"{DISABLE}={text!r} is not understood; legal values: {sorted(_TRUE)} or {sorted(_FALSE)}")


def timeout_sec(given: float | None) -> float:
    """The timeout of one reduction in seconds: the argument, else DDPSTATS_TIMEOUT_SEC, else 300."""
    source, value = "timeout_sec", given
    if value is None:
        text = os.environ.get(TIMEOUT_SEC, "")
        source = TIMEOUT_SEC
        try:
            value = float(text) if text else DEFAULT_TIMEOUT_SEC
        except ValueError:
            raise ConfigError(f"{TIMEOUT_SEC}={text!r} is not a number of seconds") from None
    if not 0 < value < 1e7:
        raise ConfigError(f"{source}={value!r} must be a number of seconds, above 0 and below 1e7")
    return float(value)
