"""A dump's configuration is read as msprobe writes it; a key that is wrong is a ConfigError with the legal values."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ddpstats import ConfigError
from ddpstats.dump.config import ALL_MODES, DumpConfig, read_config
from ddpstats.dump.selection import DumpSelection, direction_of, pattern_of

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


def test_only_dump_path_is_needed() -> None:
    config = read_config({"dump_path": Path("d")})
    assert config == DumpConfig("statistics", Path("d"))
    assert config.wants_rank(None)
    assert config.wants_rank(7)
    assert config.wants_step(10**9)


def test_every_key_is_read() -> None:
    config = read_config({
        "task": "tensor", "dump_path": "d", "rank": [0, "2-4"], "step": ["1 - 2", 9], "level": "L0", "async_dump": True,
        "precision": "high", "async_max_bytes": 4096, "enable_dataloader": False,
        "tensor": {"scope": ["a", "b"], "list": ["x"], "data_mode": ["backward"], "file_format": "npy"},
        "statistics": {"tensor_list": ["of the other task"]}, "run_ut": {"white_list": []}, "grad_probe": {},
    })  # fmt: skip
    assert config == DumpConfig(
        "tensor", Path("d"), frozenset({0, 2, 3, 4}), frozenset({1, 2, 9}), "L0", True, "high", ("a", "b"), ("x",), (),
        frozenset({"backward", "input", "output"}), "statistics", 4096,
    )  # fmt: skip
    assert [config.wants_rank(rank) for rank in (None, 0, 1, 2)] == [True, True, False, True]
    assert [config.wants_step(step) for step in (0, 1, 9, 10)] == [False, True, True, False]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], ALL_MODES),
        (["all"], ALL_MODES),
        (["forward"], {"forward", "input", "output"}),
        (["input"], {"forward", "backward", "input"}),
        (["backward", "output"], {"backward", "output"}),
    ],
)
def test_data_mode_without_direction_or_side_means_both(given: list[str], expected: set[str]) -> None:
    assert read_config({"dump_path": "d", "statistics": {"data_mode": given}}).data_mode == expected


KEYS = (
    "task, dump_path, rank, step, level, enable_dataloader, async_dump, async_max_bytes, precision, statistics, tensor"
)
NUMBERS = 'a list of whole numbers from 0 and of ranges such as "2-5"; [] is all'
SCOPE = "[first, last], two full names such as 'Functional.linear.0.forward', or [] for everything"
NAMES = "a list of names, or of parts of names, such as 'Functional.linear.3'"
MODES = "['all'], or a list of some of 'forward', 'backward', 'input', 'output'"
EXAMPLE = '{"task": "statistics", "dump_path": "dump", "step": [0], "level": "mix"}'

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"levle": "L0"}, f"unknown key 'levle': did you mean 'level'? Legal keys: {KEYS}"),
    (
        {"statistics": {"data_mod": []}},
        "unknown key 'statistics.data_mod': did you mean 'statistics.data_mode'? Legal keys: scope, list, tensor_list, "
        "data_mode, summary_mode",
    ),
    ({"task": "tensor", "statistics": {"lst": 3}}, "unknown key 'statistics.lst': did you mean 'statistics.list'?"),
    ({"task": "tensors"}, "'task' is \"tensors\", but must be one of 'statistics', 'tensor'; did you mean 'tensor'?"),
    ({"dump_path": ""}, "'dump_path' is \"\", but must be the path of a directory"),
    (
        {"level": "L2"},
        "'level' is \"L2\", but must be one of 'L0', 'L1', 'mix': L2, kernels, needs the profiler of the device",
    ),
    ({"rank": 0}, f"'rank' is 0, but must be {NUMBERS}"),
    ({"step": [0, "5-"]}, f'\'step\' is [0, "5-"], but must be {NUMBERS}; "5-" is neither'),
    ({"step": ["7-3"]}, "'step' is [\"7-3\"], but must be a range from the smaller to the larger number: write '3-7'"),
    ({"step": ["0-9999999"]}, "'step' is [\"0-9999999\"], but must be a range of at most 1,000,000 numbers; [] is all"),
    (
        {"enable_dataloader": True},
        "'enable_dataloader' is true, but must be false: call step() at the end of every step",
    ),
    ({"async_dump": "True"}, "'async_dump' is \"True\", but must be true or false"),
    ({"async_max_bytes": True}, "'async_max_bytes' is true, but must be a whole number of bytes above 0"),
    ({"statistics": {"scope": ["a"]}}, f"'statistics.scope' is [\"a\"], but must be {SCOPE}; this has 1"),
    ({"statistics": {"list": "linear"}}, f"'statistics.list' is \"linear\", but must be {NAMES}"),
    ({"statistics": {"data_mode": ["all", "input"]}}, f"but must be {MODES}; 'all' stands alone"),
    ({"statistics": {"data_mode": ["fwd"]}}, f'but must be {MODES}; "fwd" is none of them'),
    ({"tensor": {"file_format": "pt"}}, "'tensor.file_format' is \"pt\", but must be 'npy' or 'bin'"),
    (
        {"async_dump": True, "statistics": {"summary_mode": "md5"}},
        "'statistics.summary_mode' is \"md5\", but must be 'statistics' with async_dump: a checksum waits for the",
    ),
    ({"async_dump": True, "task": "tensor"}, "'tensor.list' is [], but must be a list of names that is not empty"),
    (
        {"task": "tensor", "statistics": {"list": ["linear.0"]}},
        "'statistics.list' is [\"linear.0\"], but the task 'tensor' reads the section 'tensor', which chooses nothing",
    ),
]


@pytest.mark.parametrize(("given", "message"), WRONG, ids=str)
def test_wrong_value_is_named_with_the_legal_ones(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps({"dump_path": "d", **given}))
    for source, name in ((path, f"{path}: "), ({"dump_path": "d", **given}, "the configuration given: ")):
        with pytest.raises(ConfigError) as caught:
            read_config(source)
        assert str(caught.value).startswith(name)
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not legal JSON: Expecting property name enclosed in double quotes, at line 1, column 2"),
        ("[1]", f"holds [1], but must hold one JSON object, as in {EXAMPLE}"),
        ("{}", f"'dump_path' is missing: the directory to write to, as in {EXAMPLE}"),
        ('{"step": [0], "step": [1]}', "key 'step' is given twice, as [0] and as [1]; leave one of them out"),
        ("[" * 100_000, "is nested too deep"),
        ('{"dump_path": "d", "step": [' + "9" * 5000 + "]}", "cannot be read"),
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
    with pytest.raises(ConfigError, match="is not a text file in UTF-8"):
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


def test_empty_selection_chooses_everything() -> None:
    assert chosen() == [name for name, _ in RUN]


def test_list_matches_parts_of_names_but_not_of_numbers() -> None:
    assert chosen(list=["linear.1"]) == ["Functional.linear.1.forward", "Functional.linear.1.backward"]
    assert chosen(list=["Tensor.sum.0.forward", "arange"]) == ["Torch.arange.0.forward", "Tensor.sum.0.forward"]
    assert pattern_of("linear.10").search("Functional.linear.10.forward")
    assert not pattern_of("linear.1").search("Functional.linear.10.forward")


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
    assert problems(list=["arange", "Linaer", "Torch.arnage"]) == [
        "list has Linaer, Torch.arnage, which is in no name that came and that scope and data_mode choose"
    ]
    assert problems(scope=["never", LAYER]) == ["scope begins with never, which did not come: nothing was collected"]
    assert problems(scope=["Tensor.sum.0.backward", LAYER]) == [
        f"scope ends with {LAYER}, which did not come after Tensor.sum.0.backward: all that came was collected"
    ]
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
