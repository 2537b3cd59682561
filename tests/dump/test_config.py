"""A dump's configuration is read as msprobe writes it; a key that is wrong is a ConfigError with the legal values."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ddpstats import ConfigError
from ddpstats.dump.config import ALL_MODES, DumpConfig, DumpSelection, direction_of, pattern_of, read_config

FIRST_STEP = """\
{
    "task": "statistics",
    "dump_path": "/home/data_dump",
    "rank": [],
    "step": [0],
    "level": "mix",
    "enable_dataloader": false,
    "statistics": {
        "scope": [], 
        "list": [],
        "data_mode": ["all"],
        "summary_mode": "statistics"
    }
}
"""  # noqa: W291  # a user's file, to the blank


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    return path


def test_file_of_msprobe_is_read_unchanged(tmp_path: Path) -> None:
    expected = DumpConfig("statistics", Path("/home/data_dump"), None, frozenset({0}), "mix")
    assert read_config(written(tmp_path, FIRST_STEP)) == expected
    assert read_config(str(written(tmp_path, "\ufeff" + FIRST_STEP))) == expected


TEMPLATE = {  # of msprobe 26.2, key by key
    "task": "statistics", "dump_path": "./dump_path", "rank": [], "step": [], "level": "L1", "extra_info": True,
    "async_dump": False, "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
    "tensor": {"scope": [], "list": [], "data_mode": ["all"]},
    "acc_check": {"white_list": [], "black_list": [], "error_data_path": "./"},
}  # fmt: skip


def test_template_of_msprobe_is_read_with_one_warning(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps(TEMPLATE))
    with pytest.warns(UserWarning, match="ignores keys that ddpstats does not have: acc_check, extra_info$") as warned:
        assert read_config(path) == DumpConfig("statistics", Path("dump_path"))
    assert len(warned) == 1


def test_key_that_is_misspelt_is_named_in_the_warning() -> None:
    with pytest.warns(UserWarning, match=r"does not have: levle, statistics\.data_mod$"):
        read_config({"dump_path": "d", "levle": "L0", "statistics": {"data_mod": []}})


def test_other_keys_of_msprobe_are_read() -> None:
    settings = {
        **TEMPLATE, "dump_enable": True, "risk_level": "FOCUS", "custom_op_namespaces": ["a"], "precision": "low",
        "statistics": {"slice": [], "request_id": None, "diff_nums": 1, "list": None, "scope": None},
        "tensor": {"bench_path": "x"}, "rank": None, "step": None, "level": None, "async_dump": None, "load": None,
    }  # fmt: skip
    with pytest.warns(UserWarning, match=r"precision, risk_level, statistics\.diff_nums$"):
        assert read_config(settings) == DumpConfig("statistics", Path("dump_path"))
    with pytest.warns(UserWarning, match=r"risk_level, tensor\.bench_path$"):
        assert read_config({**settings, "task": "tensor"}) == DumpConfig("tensor", Path("dump_path"))


def test_every_key_is_read() -> None:
    config = read_config({
        "task": "tensor", "dump_path": "d", "rank": [0, "2-4"], "step": ["1 - 2", 9], "level": "L0", "async_dump": True,
        "async_max_bytes": 4096, "enable_dataloader": False, "statistics": {"list": ["of the other task"]},
        "tensor": {"scope": ["a", "b"], "list": ["x"], "data_mode": ["backward"], "tensor_list": ["y"]},
    })  # fmt: skip
    assert config == DumpConfig(
        "tensor", Path("d"), frozenset({0, 2, 3, 4}), frozenset({1, 2, 9}), "L0", True, ("a", "b"), ("x",), ("y",),
        frozenset({"backward", "input", "output"}), "statistics", 4096,
    )  # fmt: skip
    assert [config.wants_rank(rank) for rank in (None, 0, 1, 2)] == [True, True, False, True]
    assert [config.wants_step(step) for step in (0, 1, 9, 10)] == [False, True, True, False]


@pytest.mark.parametrize(
    ("modes", "expected"),
    [
        ([], ALL_MODES),
        (["all"], ALL_MODES),
        (["forward"], {"forward", "input", "output"}),
        (["input"], {"forward", "backward", "input"}),
        (["backward", "output"], {"backward", "output"}),
    ],
)
def test_data_mode_without_direction_or_side_means_both(modes: list[str], expected: set[str]) -> None:
    assert read_config({"dump_path": "d", "statistics": {"data_mode": modes}}).data_mode == expected


NUMBERS = 'a list of whole numbers from 0 and of ranges such as "2-5" (of at most 1,000,000); [] is all'
SCOPE = "[first, last], two full names such as 'Functional.linear.0.forward', or [] for everything"
NAMES = "a list of names, of parts of names such as 'Functional.linear.3', or of 'name-regex(...)'"
MODES = "['all'], or a list of some of 'forward', 'backward', 'input', 'output'"
EXAMPLE = '{"task": "statistics", "dump_path": "dump", "step": [0], "level": "mix"}'

WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"task": "nan_check"},
        "'task' is \"nan_check\", but must be one of 'statistics', 'tensor': ddpstats has no other",
    ),
    ({"statistics": []}, "'statistics' is [], but must be an object"),
    ({"dump_path": ""}, "'dump_path' is \"\", but must be the path of a directory"),
    ({"level": "L2"}, "'level' is \"L2\", but must be one of 'L0', 'L1', 'mix': L2 needs the profiler of the device"),
    ({"level": "debug"}, "'level' is \"debug\", but must be one of 'L0', 'L1', 'mix'"),
    ({"rank": 0}, f"'rank' is 0, but must be {NUMBERS}"),
    ({"step": [0, "5-"]}, f"'step' is [0, \"5-\"], but must be {NUMBERS}"),
    ({"step": [True]}, f"'step' is [true], but must be {NUMBERS}"),
    ({"step": ["7-3"]}, f"'step' is [\"7-3\"], but must be {NUMBERS}"),
    ({"step": ["0-9999999"]}, f"'step' is [\"0-9999999\"], but must be {NUMBERS}"),
    (
        {"enable_dataloader": True},
        "'enable_dataloader' is true, but must be false: call step() at the end of every step",
    ),
    ({"dump_enable": False}, "'dump_enable' is false, but must be true or left out"),
    ({"load": {"path": "x"}}, '\'load\' is {"path": "x"}, but must be left out'),
    ({"async_dump": "True"}, "'async_dump' is \"True\", but must be true or false"),
    ({"async_max_bytes": True}, "'async_max_bytes' is true, but must be a whole number of bytes above 0"),
    ({"statistics": {"slice": [{"dim": 0}]}}, "'statistics.slice' is [{\"dim\": 0}], but must be left out"),
    ({"statistics": {"request_id": "7"}}, "'statistics.request_id' is \"7\", but must be left out"),
    ({"statistics": {"scope": ["a"]}}, f"'statistics.scope' is [\"a\"], but must be {SCOPE}"),
    ({"statistics": {"list": "linear"}}, f"'statistics.list' is \"linear\", but must be {NAMES}"),
    ({"statistics": {"list": ["a", "name-regex([)"]}}, f'is ["a", "name-regex([)"], but must be {NAMES}'),
    ({"statistics": {"list": ["name-regex(a"]}}, f'is ["name-regex(a"], but must be {NAMES}'),
    ({"statistics": {"tensor_list": ["name-regex(a{99999999999})"]}}, f"but must be {NAMES}"),
    ({"statistics": {"data_mode": ["all", "input"]}}, f"but must be {MODES}"),
    ({"statistics": {"data_mode": ["fwd"]}}, f"but must be {MODES}"),
    (
        {"statistics": {"summary_mode": "xor"}},
        "'statistics.summary_mode' is \"xor\", but must be one of 'statistics', 'md5': 'md5' adds a checksum",
    ),
    (
        {"async_dump": True, "statistics": {"summary_mode": "md5"}},
        "'statistics.summary_mode' is \"md5\", but must be 'statistics' with async_dump: a checksum waits for the",
    ),
    ({"async_dump": True, "task": "tensor"}, "'tensor.list' is [], but must name something with async_dump"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG, ids=str)
def test_wrong_value_is_named_with_the_legal_ones(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps({"dump_path": "d", **settings}))
    for source, name in ((path, f"{path}: "), ({"dump_path": "d", **settings}, "the configuration given: ")):
        with pytest.raises(ConfigError) as caught:
            read_config(source)
        assert str(caught.value).startswith(name)
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not legal JSON: Expecting property name enclosed in double quotes: line 1 column 2"),
        ("[1]", f"holds [1], but must hold one JSON object, as in {EXAMPLE}"),
        ("{}", f"'dump_path' is missing: it must be the path of a directory, as in {EXAMPLE}"),
        ('{"step": [0], "step": [1]}', "the key 'step' occurs twice"),
        ("[" * 100_000, "is nested too deep"),
        ('{"dump_path": "d", "step": [' + "9" * 5000 + "]}", "is not legal JSON: Exceeds the limit"),
    ],
)
def test_file_that_is_no_configuration_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none.json", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError) as caught:
            read_config(path)
        assert str(caught.value) == f"{path}: cannot be read: {why}. Is this the right path?"
    path = tmp_path / "latin.json"
    path.write_bytes(b'{"dump_path": "\xe9"}')
    with pytest.raises(ConfigError, match="'utf-8' codec can't decode"):
        read_config(path)


# -- selection --------------------------------------------------------------------------------------------------------

LAYER = "Module.layer.Linear.forward.0"
RUN: list[tuple[str, list[str]]] = [
    ("Torch.arange.0.forward", []),
    (LAYER, []),
    ("Functional.linear.1.forward", [LAYER]),
    ("Functional.linear.10.forward", [LAYER]),
    ("Tensor.sum.0.forward", []),
    ("Tensor.sum.0.backward", []),
    ("Module.layer.Linear.backward.0", []),
    ("Functional.linear.1.backward", ["Module.layer.Linear.backward.0"]),
    ("Module.layer.Linear.parameters_grad.0", []),
]


def chosen(level: str = "mix", **section: Any) -> list[str]:
    selection = DumpSelection(read_config({"dump_path": "d", "level": level, "statistics": section}))
    return [name for name, parents in RUN if selection.wants(name, parents)]


def test_list_matches_parts_of_names_but_not_of_numbers() -> None:
    assert chosen(list=["linear.1"]) == ["Functional.linear.1.forward", "Functional.linear.1.backward"]
    assert chosen(list=["Tensor.sum.0.forward", "arange"]) == ["Torch.arange.0.forward", "Tensor.sum.0.forward"]
    assert pattern_of("linear.10").search("Functional.linear.10.forward")
    assert not pattern_of("linear.1").search("Functional.linear.10.forward")


def test_list_may_hold_a_regular_expression() -> None:
    assert chosen(list=[r"name-regex(^Functional\..*forward$)", "arange"]) == [
        "Torch.arange.0.forward",
        "Functional.linear.1.forward",
        "Functional.linear.10.forward",
    ]
    assert chosen(list=[r"name-regex(layer\.Linear\.\w+\.0)"]) == [LAYER, "Module.layer.Linear.backward.0", RUN[-1][0]]


def test_module_in_the_list_chooses_the_calls_inside_it() -> None:
    inside = [LAYER, "Functional.linear.1.forward", "Functional.linear.10.forward"]
    assert chosen(list=[LAYER]) == inside
    assert chosen("L1", list=[LAYER]) == inside[:1]


def test_scope_chooses_from_one_name_to_another() -> None:
    assert chosen(scope=["Functional.linear.10.forward", "Tensor.sum.0.backward"]) == [n for n, _ in RUN[3:6]]
    assert chosen(scope=["Torch.arange.0.forward", LAYER]) == [name for name, _ in RUN[:4]]
    assert chosen(scope=["Tensor.sum.0.forward", "never"]) == [name for name, _ in RUN[4:]]
    assert chosen(scope=["never", LAYER]) == []
    assert chosen(scope=[LAYER, LAYER]) == [name for name, _ in RUN[1:4]]


def test_data_mode_chooses_directions() -> None:
    assert chosen(data_mode=["forward", "input"]) == [name for name, _ in RUN[:5]]
    assert chosen(data_mode=["backward"]) == [name for name, _ in RUN[5:]]
    assert chosen(data_mode=["backward"], scope=[LAYER, "Tensor.sum.0.backward"]) == ["Tensor.sum.0.backward"]
    assert direction_of("Module.forward.Linear.backward.0") == "backward"
    assert direction_of("Module.forward.Linear.parameters_grad") == "backward"


def problems(run: list[tuple[str, list[str]]] = RUN, **section: Any) -> list[str]:
    selection = DumpSelection(read_config({"dump_path": "d", "level": "mix", "statistics": section}))
    for name, parents in run:
        selection.wants(name, parents)
    return selection.problems()


def test_chosen_name_that_did_not_occur_is_reported() -> None:
    assert problems() == []
    assert problems(scope=[LAYER, LAYER], list=["linear"]) == []
    came = "which came in no entry that could be collected"
    assert problems(list=["arange", "Linaer", "Torch.arnage"]) == [f"list has Linaer, Torch.arnage, {came}"]
    assert problems(scope=["never", LAYER]) == [f"scope has never, {LAYER}, {came}"]
    assert problems(scope=["Tensor.sum.0.backward", LAYER]) == [f"scope has {LAYER}, {came}"]
    config = read_config({"dump_path": "d", "rank": [0, "5-6"]})
    assert config.problems(8) == []
    assert config.problems(2) == ["rank chooses 5, 6, and there are 2 ranks, counted from 0"]


def test_pipe_device_and_huge_file_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(ConfigError, match=f"{path}: cannot be read: Not a regular file"):
            read_config(path)
    monkeypatch.setattr("ddpstats.dump.config._MOST_BYTES", 10)
    with pytest.raises(ConfigError, match="more than 10 bytes"):
        read_config(written(tmp_path, '{"dump_path": "d"}'))
