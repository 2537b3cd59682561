"""``ddpstats lint`` checks files and directories, names what it cannot check, and obeys comments that suppress."""

from __future__ import annotations

import inspect
import json
import os
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch.distributed as dist

from ddpstats import cli
from ddpstats.lint.collectives import _BESIDE_OPERATORS
from ddpstats.lint.lint import RULES, LintResult, as_sarif, lint

FAULTY = """import torch.distributed as dist
def save(rank):
    if rank == 0:
        dist.barrier()
"""
LEGAL = "import torch.distributed as dist\ndist.barrier()\n"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Relative paths are named as they were given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src" / ".hidden").mkdir(parents=True)
    (tmp_path / "src" / "empty").mkdir()
    (tmp_path / "src" / "empty" / "notes.txt").write_text(FAULTY)
    (tmp_path / "src" / "faulty.py").write_text(FAULTY)
    (tmp_path / "src" / "legal.py").write_text(LEGAL)
    (tmp_path / "src" / ".hidden" / "faulty.py").write_text(FAULTY)
    (tmp_path / "src" / "gone.py").symlink_to("nowhere.py")
    (tmp_path / "src" / "notes.txt").write_text(FAULTY)
    return tmp_path


def test_finding_has_location_reason_and_fix(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lint", "src"]) == 1
    first, second, last = capsys.readouterr().out.splitlines()
    assert first == "src/faulty.py:4:9: rank-branch: barrier needs all ranks: `rank` is this rank's own."
    assert second == f"    fix: {RULES['rank-branch']}"
    assert last == "1 finding in 2 files"


def test_an_exit_before_a_match_skips_what_is_in_it(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    branch = "    if rank != 0:\n        return\n    match kind:\n        case 1:\n            dist.barrier()\n"
    Path("src/match.py").write_text(f"import torch.distributed as dist\ndef save(rank, kind):\n{branch}")
    assert cli.main(["lint", "src/match.py"]) == 1
    assert "early-exit: return skips barrier (line 7)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "imported",
    [
        "from torch import nn, distributed as dist",
        "from torch import (\n    nn,\n    distributed as dist,\n)",
    ],
)
def test_a_collective_is_found_however_it_is_imported(tmp_path: Path, imported: str) -> None:
    path = tmp_path / "imported.py"
    path.write_text(f"{imported}\ndef save(x, rank):\n    if rank == 0:\n        dist.reduce(x, 0)\n")
    assert [finding.rule for finding in lint([path]).findings] == ["rank-branch"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has except* since 3.11")
@pytest.mark.parametrize("word", ["except", "except*"])
def test_a_group_of_exceptions_is_handled_like_an_exception(tmp_path: Path, word: str) -> None:
    handler = f"    {word} ValueError:"
    lines = [
        *("import torch.distributed as dist", "def on_error(x):", "    try:", "        x.load()"),
        *(handler, "        dist.barrier()", "def log(x, rank):", "    if rank == 0:", "        on_error(x)"),
        *("def save(x, rank):", "    try:", "        if rank == 0:", "            dist.barrier()", handler),
        *("        raise", "def load(x):", "    try:", "        first = dist.get_rank()", handler, "        first = 0"),
        *("    if first == 0:", "        dist.barrier()"),
    ]
    path = tmp_path / "groups.py"
    path.write_text("\n".join(lines))
    assert [(finding.line, finding.rule) for finding in lint([path]).findings] == [
        (13, "rank-branch"),
        (22, "rank-branch"),
    ]


def test_clean_file_exits_0(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lint", "src/legal.py", "src/legal.py"]) == 0
    assert capsys.readouterr().out == "nothing found in 1 file\n"
    assert cli.main(["lint", "src", "--rule", "dict-order"]) == 0


def test_json_has_findings_and_counts(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lint", "src", "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert (shown["files"], shown["unread"]) == (2, [])
    location = {"path": "src/faulty.py", "line": 4, "column": 9, "rule": "rank-branch"}
    assert shown["findings"][0].items() >= location.items()


def test_unreadable_files_are_named_and_others_checked(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unread = {
        "syntax.py": b"import torch.distributed\nif True print()\n",
        "null.py": b"import torch.distributed\0",
        "coding.py": b"# coding: no-such\nimport torch.distributed\n",
        "bytes.py": b"import torch.distributed\nx = '\xff'\n",
        "deep.py": b"import torch.distributed\nx = " + b"(" * 3000 + b"0" + b")" * 3000,
        "chain.py": b"import torch.distributed\nx = 0" + b" + 1" * 20000,
        "large.py": b"#" * (5 << 20),
    }
    for name, content in unread.items():
        (tree / "src" / name).write_bytes(content)
    os.mkfifo(tree / "pipe.py")
    assert cli.main(["lint", "src", "pipe.py"]) == 1  # the faulty one is found all the same
    shown = capsys.readouterr().out
    assert "src/faulty.py:4:9: rank-branch" in shown
    assert "src/syntax.py: not checked: line 2: " in shown
    for name in [*(f"src/{name}" for name in unread), "pipe.py"]:
        assert f"{name}: not checked: " in shown, shown
    assert cli.main(["lint", "src/syntax.py"]) == 2  # no success of a file that was not checked


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere.py"], "nowhere.py: it does not exist, or cannot be reached."),
        (["x" * 5000], f"{'x' * 5000}: it does not exist, or cannot be reached."),
        (["a\0b.py"], r"a\x00b.py: it does not exist, or cannot be reached."),
        (["src", "src/empty"], "src/empty: there is no Python file in this directory."),
        (["src", "--sarif", "none/x.sarif"], "none/x.sarif: there is no directory none. Make it."),
    ],
)
def test_wrong_path_is_an_error(tree: Path, args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lint", *args]) == 2
    assert capsys.readouterr().err == f"ddpstats lint: error: {message}\n"


def test_sarif_has_rules_locations_and_unread_files(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "src" / "syntax.py").write_text("import torch.distributed\nif True print()\n")
    (tree / "src" / "a b.py").write_text(FAULTY)
    assert cli.main(["lint", "src", "--sarif", "lint.sarif"]) == 1
    log = json.loads((tree / "lint.sarif").read_text())
    assert (log["version"], len(log["runs"])) == ("2.1.0", 1)
    assert log["$schema"].endswith("sarif-2.1.0.json")
    run = log["runs"][0]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == list(RULES)
    assert all(rule["shortDescription"]["text"] and rule["help"]["text"] for rule in rules)
    uris = []
    for result in run["results"]:
        assert result["ruleId"] == "rank-branch"
        assert result["message"]["text"]
        location = result["locations"][0]["physicalLocation"]
        assert location["region"] == {"startLine": 4, "startColumn": 9}
        uris.append(location["artifactLocation"]["uri"])
    assert uris == ["src/a%20b.py", "src/faulty.py"]
    assert run["invocations"][0]["executionSuccessful"] is False
    assert "invalid syntax" in run["invocations"][0]["toolExecutionNotifications"][0]["message"]["text"].lower()


def test_sarif_escapes_name_that_is_no_utf_8(tree: Path) -> None:
    path = tree / os.fsdecode(b"caf\xe9.py")
    path.write_text(FAULTY)
    assert cli.main(["lint", path.name, "--sarif", "lint.sarif"]) == 1
    (result,) = json.loads((tree / "lint.sarif").read_text())["runs"][0]["results"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "caf%E9.py"


def test_comment_suppresses_its_rule_and_is_a_finding_where_unused(tmp_path: Path) -> None:
    lines = [
        "import torch.distributed as dist",
        "def save(rank):",
        "    if rank == 0:",
        "        dist.barrier()  # noqa: S101  # ddpstats: ignore[rank-branch, data-branch]",
        "def log(rank, x):",
        "    if rank == 0:",
        "        text = '# ddpstats: ignore[rank-branch]'",
        "        dist.all_reduce(x)",
    ]
    path = tmp_path / "program.py"
    path.write_text("\n".join(lines))
    findings = [(finding.line, finding.rule) for finding in lint([path]).findings]
    assert findings == [(4, "unused-ignore"), (8, "rank-branch")]


def test_comment_behind_call_of_several_lines_suppresses(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(FAULTY.replace("dist.barrier()", "dist.barrier(\n        )  # ddpstats: ignore[rank-branch]"))
    assert lint([path]).findings == ()


def test_column_of_a_finding_counts_characters_and_not_bytes(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text("import torch.distributed as dist\ndef f(rank):\n    if rank == 0: s = 'é😀'; dist.barrier()\n")
    (finding,) = lint([path]).findings
    assert finding.column == path.read_text().splitlines()[2].index("dist") + 1
    assert as_sarif([finding], [])["runs"][0]["columnKind"] == "unicodeCodePoints"


def test_notebook_is_not_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.ipynb"
    path.write_text('{"cells": ["import torch.distributed"]}')
    assert cli.main(["lint", str(path)]) == 2
    assert "train.ipynb: not checked: its name does not end in .py" in capsys.readouterr().out


@pytest.mark.slow
def test_chained_calls_and_long_functions_are_checked_in_time(tmp_path: Path) -> None:
    """Each function calls the next one twice; and one function has thousands of collectives."""
    calls = "".join(f"def f{i}(x):\n    f{i + 1}(x)\n    f{i + 1}(x)\n" for i in range(60))
    (tmp_path / "calls.py").write_text(f"{FAULTY}{calls}def f60(x):\n    dist.all_reduce(x)\n")
    (tmp_path / "long.py").write_text(FAULTY + "        dist.all_reduce(rank)\n        y = rank + 1\n" * 3000)
    checked = lint([tmp_path])
    assert [finding.line for finding in checked.findings] == [4, 4]
    assert not checked.unread


@pytest.mark.parametrize(("last", "rules"), [("inited = False", ["swallowed-error"]), ("inited = True", [])])
def test_flag_of_a_handler_counts_where_it_differs_from_that_without_an_error(
    last: str, rules: list[str], tmp_path: Path
) -> None:
    handler = "    except Exception:\n        Utils.inited = False\n        return\n"
    text = f"    try:\n        flush()\n        dist.barrier()\n{handler}    destroy()\n    Utils.{last}\n"
    (tmp_path / "utils.py").write_text(f"import torch.distributed as dist\ndef destroy_all():\n{text}")
    assert [finding.rule for finding in lint([tmp_path]).findings] == rules


def test_variables_are_not_copied_at_each_assignment(tmp_path: Path) -> None:
    """A copy at each assignment would take 33 MiB."""
    assignments = "".join(f"    v{number} = x + {number}\n" for number in range(1500))
    (tmp_path / "long.py").write_text(f"{FAULTY}def f(x):\n{assignments}    dist.all_reduce(x)\n")
    tracemalloc.start()
    try:
        assert [finding.line for finding in lint([tmp_path]).findings] == [4]
        assert tracemalloc.get_traced_memory()[1] < 15 << 20
    finally:
        tracemalloc.stop()


def test_assignment_to_no_name_is_read(tmp_path: Path) -> None:
    handler = "    except Exception:\n        print('skipped')\n"
    text = f"def f(x):\n    () = rest()\n    try:\n        load(x)\n        dist.barrier()\n{handler}"
    (tmp_path / "load.py").write_text(f"import torch.distributed as dist\n{text}")
    checked = lint([tmp_path])
    assert checked.unread == ()
    assert [finding.rule for finding in checked.findings] == ["swallowed-error"]


def test_program_is_never_run(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(f"import torch.distributed\nopen({str(tmp_path / 'ran')!r}, 'w')\n")
    assert lint([path]) == LintResult(1, (), ())
    assert not (tmp_path / "ran").exists()
    assert "program" not in sys.modules


def test_index_of_group_parameter_is_that_of_torch() -> None:
    for function, (index, _) in _BESIDE_OPERATORS.items():
        parameters = list(inspect.signature(getattr(dist, function)).parameters)
        assert (parameters.index("group") if index is not None else index) == index, function


@pytest.mark.parametrize(
    "text",
    [
        "import deepspeed\nengine, *_ = deepspeed.initialize()\nif rank == 0:\n    engine.save_checkpoint('x')\n",
        "import lightning\ntrainer = lightning.Trainer()\nif rank == 0:\n    trainer.save_checkpoint('x')\n",
        "import pytorch_lightning as pl\nif rank == 0:\n    trainer.save_checkpoint('x')\n",
    ],
)
def test_file_that_names_a_library_alone_is_parsed(tmp_path: Path, text: str) -> None:
    (tmp_path / "train.py").write_text(text)
    assert [finding.rule for finding in lint([tmp_path]).findings] == ["rank-branch"]
