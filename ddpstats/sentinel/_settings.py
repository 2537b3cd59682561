"""Mode, detector and thresholds of the sentinel: from arguments, environment variables and defaults. Pure.

1. Each setting has three places, and the first that holds it wins: the argument, the ``DDPSTATS_SENTINEL_*`` variable,
   the ``NPU_ASD_*`` variable that MindSpore and torch_npu read. An empty variable holds nothing.
2. A bad argument is an error: somebody is there to read it.
3. A bad variable is a warning, as in MindSpore, and says what is used instead: jobs that were started with it there
   start here, too. A bad mode turns the sentinel off; bad thresholds fall back to the default, both of them.
4. Thresholds in a variable are two integers ``first,second``. What is below 3 becomes 3; then the first one has to be
   the larger one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from ddpstats._base.config import SENTINEL_MODE, SENTINEL_SIGMA_THRESH, SENTINEL_UPPER_THRESH, check_choice
from ddpstats.errors import ConfigError

Detector = Literal["v2", "v3"]
Pair = tuple[float, float]

_MODE_NAMES = (SENTINEL_MODE, "NPU_ASD_ENABLE")
_UPPER_NAMES = (SENTINEL_UPPER_THRESH, "NPU_ASD_UPPER_THRESH")
_SIGMA_NAMES = (SENTINEL_SIGMA_THRESH, "NPU_ASD_SIGMA_THRESH")

_MODES = (0, 1, 2, 3)
_UPPER: Mapping[Detector, Pair] = {"v2": (1e6, 1e4), "v3": (1e6, 100.0)}
_SIGMA: Pair = (1e5, 5e3)
_MIN_STEPS: Mapping[Detector, int] = {"v2": 100, "v3": 10}
_SMALLEST = 3.0

_INTEGER = re.compile(r"\s*[+-]?\d+\s*", re.ASCII)


@dataclass(frozen=True)
class SentinelSettings:
    """What `read_settings` found.

    Attributes:
        mode: 0 off; 1 report and go on; 2 report and stop; 3 as 2, and report normal values, too.
        detector: "v2" judges an L2 norm by fixed thresholds, "v3" a squared maximum by multiples of its own average.
        upper: level 1 and level 2. For "v2" in the unit of the value; for "v3" multiples of the average.
        sigma: level 1 and level 2 of a jump, in widths of the range seen so far; of no use to "v3".
        min_steps: the jump test of "v2" begins after so many checks; "v3" judges after so many normal values.
    """

    mode: int
    detector: Detector
    upper: Pair
    sigma: Pair
    min_steps: int = 100


def read_settings(
    mode: int | None,
    detector: str,
    upper_thresh: Pair | None,
    sigma_thresh: Pair | None,
    environ: Mapping[str, str],
) -> tuple[SentinelSettings, tuple[str, ...]]:
    """The settings that count, and a warning for each variable that is not used as it stands. Local.

    Args:
        mode: 0 to 3; None: as the environment says.
        detector: "v2" or "v3".
        upper_thresh: two numbers above 0, the first one larger; None: as the environment says.
        sigma_thresh: likewise; looked at, and then not used, where ``detector`` is "v3".
        environ: ``os.environ``, or what is to stand in its place.

    Raises:
        ConfigError: an argument is none of these.
    """
    check_choice("detector", detector, get_args(Detector))
    kind = cast(Detector, detector)
    warnings: list[str] = []
    sigma_names = _SIGMA_NAMES if kind == "v2" else ()
    settings = SentinelSettings(
        mode=_mode(mode, environ, warnings),
        detector=kind,
        upper=_thresholds("upper_thresh", upper_thresh, _UPPER_NAMES, _UPPER[kind], environ, warnings),
        sigma=_thresholds("sigma_thresh", sigma_thresh, sigma_names, _SIGMA, environ, warnings),
        min_steps=_MIN_STEPS[kind],
    )
    return settings, tuple(warnings)


def _mode(given: object, environ: Mapping[str, str], warnings: list[str]) -> int:
    if given is not None:
        if isinstance(given, bool) or not isinstance(given, int) or given not in _MODES:
            raise ConfigError(f"mode={given!r} is not understood; legal values: {', '.join(map(str, _MODES))}")
        return given
    name, text = _first_set(_MODE_NAMES, environ)
    if name is None:
        warnings.append(
            f"no mode is set: the sentinel is off; pass mode=1, 2 or 3, or set {SENTINEL_MODE} to one of them"
        )
        return 0
    number = float(text) if _INTEGER.fullmatch(text) else math.nan
    if number not in _MODES:
        warnings.append(f"{name}={text!r} is not one of 0, 1, 2 and 3: 0 is used, so the sentinel is off")
        return 0
    return int(number)


def _thresholds(
    argument: str,
    given: object,
    names: tuple[str, ...],
    default: Pair,
    environ: Mapping[str, str],
    warnings: list[str],
) -> Pair:
    if given is not None:
        return _checked(argument, given)
    name, text = _first_set(names, environ)
    if name is None:
        return default
    found, trouble = _parsed(text, default)
    if trouble:
        warnings.append(f"{name}={text!r}: {trouble}; {found[0]:.0f},{found[1]:.0f} is used instead")
    return found


def _first_set(names: tuple[str, ...], environ: Mapping[str, str]) -> tuple[str | None, str]:
    for name in names:
        text = environ.get(name, "").strip()
        if text:
            return name, text
    return None, ""


def _parsed(text: str, default: Pair) -> tuple[Pair, str]:
    """The thresholds, and what is wrong with ``text``; nothing is where that is empty."""
    parts = text.split(",")
    if len(parts) != 2 or not all(_INTEGER.fullmatch(part) for part in parts):
        return default, "these are not two integers with a comma between them"
    written = (float(parts[0]), float(parts[1]))
    if math.inf in written:
        return default, "this is too large"
    first, second = max(written[0], _SMALLEST), max(written[1], _SMALLEST)
    if not first > second:
        return default, f"the first threshold must be above the second one, and both at least {_SMALLEST:.0f}"
    return (first, second), "" if (first, second) == written else f"a threshold is at least {_SMALLEST:.0f}"


def _checked(argument: str, given: Any) -> Pair:
    try:
        first, second = given
        if isinstance(first, (bool, str)) or isinstance(second, (bool, str)):
            raise TypeError
        pair = (float(first), float(second))
    except (TypeError, ValueError, OverflowError):
        pair = (math.nan, math.nan)
    if not math.inf > pair[0] > pair[1] > 0:
        raise ConfigError(
            f"{argument}={given!r} is not understood; legal values: two finite numbers above 0, the first one larger"
        )
    return pair
