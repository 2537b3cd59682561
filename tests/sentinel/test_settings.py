"""Mode and thresholds come from arguments or the environment, and a warning or error names what cannot be used."""

from __future__ import annotations

from typing import Any

import pytest

from ddpstats import ConfigError
from ddpstats.sentinel.thresholds import SentinelSettings, ThresholdPair, read_settings

NOT_SET = "the sentinel is off: pass mode=1, 2 or 3, or set DDPSTATS_SENTINEL_MODE to one of them"


def read(
    environ: dict[str, str] | None = None,
    *,
    mode: Any = None,
    detector: str = "v2",
    upper: Any = None,
    sigma: Any = None,
) -> tuple[SentinelSettings, list[str]]:
    return read_settings(mode, detector, upper, sigma, environ or {})


def v2(mode: int, upper: ThresholdPair = (1e6, 1e4), sigma: ThresholdPair = (1e5, 5e3)) -> SentinelSettings:
    return SentinelSettings(mode, "v2", upper, sigma, 100)


def test_the_defaults_are_those_of_mindspore_and_torch_npu() -> None:
    assert read(mode=1) == (v2(1), [])
    assert read(mode=1, detector="v3") == (SentinelSettings(1, "v3", (1e6, 100.0), (1e5, 5e3), 10), [])


def test_a_sentinel_without_a_mode_is_off_with_a_warning() -> None:
    assert read()[0].mode == 0
    assert read()[1] == [NOT_SET]
    assert read({"NPU_ASD_ENABLE": " ", "DDPSTATS_SENTINEL_MODE": ""})[1] == [NOT_SET]


@pytest.mark.parametrize("how", [{"mode": 0}, {"environ": {"NPU_ASD_ENABLE": "0"}}])
def test_a_sentinel_that_was_switched_off_is_silent(how: dict[str, Any]) -> None:
    settings, warnings = read(**how)
    assert (settings.mode, warnings) == (0, [])


def test_the_argument_wins_over_our_variable_and_that_over_the_alias() -> None:
    environ = {
        "NPU_ASD_ENABLE": "1",
        "NPU_ASD_UPPER_THRESH": "20,10",
        "NPU_ASD_SIGMA_THRESH": "40,30",
    }
    assert read(environ) == (v2(1, (20.0, 10.0), (40.0, 30.0)), [])
    environ |= {
        "DDPSTATS_SENTINEL_MODE": "2",
        "DDPSTATS_SENTINEL_UPPER_THRESH": "200,100",
        "DDPSTATS_SENTINEL_SIGMA_THRESH": "400,300",
    }
    assert read(environ) == (v2(2, (200.0, 100.0), (400.0, 300.0)), [])
    settings = read(environ, mode=3, upper=(2.5, 1e-3), sigma=[4, 3])
    assert settings == (v2(3, (2.5, 1e-3), (4.0, 3.0)), [])


def test_a_bad_variable_does_not_fall_through_to_its_alias() -> None:
    environ = {"DDPSTATS_SENTINEL_MODE": "on", "NPU_ASD_ENABLE": "2"}
    settings, warnings = read(environ)
    assert settings.mode == 0
    assert warnings == ["DDPSTATS_SENTINEL_MODE='on' is not one of 0, 1, 2, 3: the default is used instead", NOT_SET]


@pytest.mark.parametrize("text", ["4", "-1", "1.5", "true", "٣", "1_0", "9" * 5000])
def test_a_mode_that_is_none_switches_off_with_a_warning(text: str) -> None:
    settings, warnings = read({"NPU_ASD_ENABLE": text})
    assert settings.mode == 0
    assert warnings == [f"NPU_ASD_ENABLE={text!r} is not one of 0, 1, 2, 3: the default is used instead", NOT_SET]


@pytest.mark.parametrize("text", ["100,21", " +100 ,\t021 "])
def test_thresholds_are_written_as_integers_are(text: str) -> None:
    assert read({"NPU_ASD_ENABLE": " 2 ", "NPU_ASD_UPPER_THRESH": text}) == (v2(2, (100.0, 21.0)), [])


RULE = "is not two integers with a comma between them, the first above the second and both at least 3"


@pytest.mark.parametrize(
    "text",
    ["1000", "3000,20,10", "100.5,10", "100,", "nan,inf", "1" * 40 + ",10", "10,100", "10,10", "2,1", "100,-5"],
)
def test_both_thresholds_fall_back_where_one_cannot_be_used(text: str) -> None:
    settings, warnings = read({"NPU_ASD_UPPER_THRESH": text, "NPU_ASD_SIGMA_THRESH": text}, mode=1)
    assert (settings.upper_thresh, settings.sigma_thresh) == ((1e6, 1e4), (1e5, 5e3))
    assert warnings == [
        f"NPU_ASD_UPPER_THRESH={text!r} {RULE}: the default is used instead",
        f"NPU_ASD_SIGMA_THRESH={text!r} {RULE}: the default is used instead",
    ]


def test_for_v3_the_upper_thresholds_are_multiples_and_the_sigma_ones_are_ignored() -> None:
    environ = {"NPU_ASD_UPPER_THRESH": "5000,50", "NPU_ASD_SIGMA_THRESH": "nonsense"}
    assert read(environ, mode=1, detector="v3") == (SentinelSettings(1, "v3", (5000.0, 50.0), (1e5, 5e3), 10), [])
    settings, warnings = read({"NPU_ASD_UPPER_THRESH": "5,50"}, mode=1, detector="v3")
    assert (settings.upper_thresh, len(warnings)) == ((1e6, 100.0), 1)


@pytest.mark.parametrize("mode", [True, 4, -1, 1.0, "1"])
def test_a_bad_mode_argument_is_an_error(mode: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        read(mode=mode)
    assert str(raised.value) == f"mode={mode!r} is not understood; legal values: 0, 1, 2, 3"


@pytest.mark.parametrize(
    "pair",
    [(1, 2), (1, 1), (1, 0), (float("inf"), 1), (2, float("nan")), (1e39, 1), (10**400, 1), (1,), 5, "21", (True, 0.5)],
)
@pytest.mark.parametrize("argument", ["upper", "sigma"])
def test_a_bad_threshold_argument_is_an_error(argument: str, pair: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        read(mode=1, **{argument: pair})
    assert str(raised.value).startswith(f"{argument}_thresh={pair!r} is not understood; legal values: two numbers")
