"""The command line has the verbs, help texts, messages and exit statuses that the documents name."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import types
from pathlib import Path

import pytest

import ddpstats
from ddpstats import cli
from ddpstats._base.marks import Mark
from tests import programs
from tests.report import records


def verb(monkeypatch: pytest.MonkeyPatch, run: object, name: str = "greet") -> None:
    """Add a verb as a later release would: a line in the table, and a module."""
    module = types.ModuleType(f"a_module_for_{name}")
    vars(module).update(
        EPILOG="", run=run, add_arguments=lambda parser: parser.add_argument("words", nargs=argparse.REMAINDER)
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli._VERBS, name, cli._Verb(module.__name__, "say hello"))


_WITHOUT_RANKS = """
import contextlib, sys, ddpstats.cli
for arguments in (["--help"], ["demo", "--help"], ["doctor", "--help"], ["--version"], ["dmeo"]):
    with contextlib.suppress(SystemExit):
        ddpstats.cli.main(arguments)
    print(arguments, {"torch", "numpy"} & set(sys.modules), file=sys.stderr)
"""


def test_torch_is_not_imported_where_no_rank_is_started() -> None:
    done = programs.run(["-c", _WITHOUT_RANKS], fresh=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(" set()\n") == 5, done.stderr
    assert re.search("demo +wrong averages, then right ones", done.stdout)
    assert "ddpstats VERB --help" in done.stdout
    assert f"\nddpstats {ddpstats.__version__}\n" in done.stdout


@pytest.mark.parametrize("name", cli._VERBS)
def test_help_of_verb_has_usage_json_status_and_examples_that_parse(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: ddpstats {name} ")
    assert cli._VERBS[name].help in shown
    assert "--json" in shown
    assert "exit status: " in shown
    examples = [line for line in shown.partition("\nexample")[2].splitlines() if line.startswith("  ")]
    assert examples
    for example in examples:
        for command in re.split(";", re.split(r"  +", example.strip())[0]):
            words = command.split()
            words = words[words.index("ddpstats") + 1 :]
            cli._parser(words[0]).parse_args(words)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["dmeo"], "invalid choice: 'dmeo' (choose from "),
        (["train.py", "--lr", "1"], "invalid choice: 'train.py' (choose from "),
        ([""], "invalid choice: ''"),
        (["--ranks", "2"], "error: "),
        (["demo", "--rank-count", "2"], "unrecognized arguments: --rank-count 2"),
        (["demo", "--ranks"], "--ranks: expected one argument"),
        (["demo", "--ranks", "two"], "--ranks: invalid int value: 'two'"),
        (["demo", "--ranks", "1"], "--ranks: invalid choice: 1 (choose from 2, "),
    ],
)
def test_wrong_arguments_give_usage_and_the_reason(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(args)
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "usage: ddpstats" in shown.err
    assert message in shown.err


@pytest.mark.parametrize(
    ("args", "missing", "example"),
    [
        (["run"], "SCRIPT", "ddpstats run --nproc 2 train.py --lr 0.1"),
        (
            ["replay", "captures"],
            "--model, --step",
            "ddpstats replay captures --model my_package:make_model --step my_package:step --bisect",
        ),
        (["compare"], "A", "ddpstats compare dumps/now dumps/last_week"),
        (["nan-origin"], "DIR", "ddpstats nan-origin dumps/now"),
        (["report"], "DIR", "ddpstats report records"),
        (["watch"], "DIR", "ddpstats watch records"),
        (["lint"], "PATH", "ddpstats lint train.py"),
    ],
)
def test_missing_argument_is_named_with_an_example(
    args: list[str], missing: str, example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(args)
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert shown == ("", f"ddpstats {args[0]}: error: missing: {missing}; for example: {example}\n")
    words = example.split()[1:]
    cli._parser(words[0]).parse_args(words)


def test_command_without_verb_names_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", "ddpstats: error: missing: VERB; for example: ddpstats demo\n")


def test_help_shows_all_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name, verb in cli._VERBS.items():
        assert f" {name} {verb.help} " in shown


def test_process_exits_with_the_status_of_main() -> None:
    done = programs.run(["-m", "ddpstats", "dmeo"], fresh=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "invalid choice: 'dmeo'" in done.stderr


def test_added_verb_takes_arguments_and_returns_its_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        print(json.dumps([args.json, args.words]))
        return 7

    verb(monkeypatch, run)
    assert cli.main(["greet", "--json", "train.py", "--lr", "1", "--json"]) == 7
    assert json.loads(capsys.readouterr().out) == [True, ["train.py", "--lr", "1", "--json"]]


def test_error_of_a_verb_is_one_line_and_interrupt_is_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise ddpstats.BundleError("the bundle is damaged")

    def interrupt(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    verb(monkeypatch, fail)
    assert cli.main(["greet"]) == 2
    assert capsys.readouterr() == ("", "ddpstats greet: error: the bundle is damaged\n")
    verb(monkeypatch, interrupt)
    assert cli.main(["greet"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("path_name", ["nowhere/deeper", "empty", "file"])
@pytest.mark.parametrize(
    ("words", "next_words"),
    [
        (["report"], "ddpstats run --guard record --record-dir DIR"),
        (["watch"], "ddpstats run --watch-dir DIR"),
        (["replay", "--model", "a:b", "--step", "a:b"], "NaNCapture"),
        (["compare"], "dump"),
        (["nan-origin"], "dump"),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_directory_without_files_of_ours_is_named_with_the_next_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], next_words: str, path_name: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    path = str(tmp_path / path_name)
    for more in ([], ["--json"]):
        assert cli.main([words[0], path, *words[1:], *more]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith(f"ddpstats {words[0]}: error: {path}")
        assert next_words in shown.err
        assert "Traceback" not in shown.err


def test_control_characters_in_errors_are_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise ddpstats.errors.DdpstatsError("it holds \x1b[2J\nand more")

    verb(monkeypatch, run)
    assert cli.main(["greet"]) == 2
    assert capsys.readouterr().err == "ddpstats greet: error: it holds \\x1b[2J\nand more\n"


def test_characters_outside_of_the_encoding_are_escaped(tmp_path: Path) -> None:
    records.write_rank(tmp_path, 0, 1, [records.event(1, "loss")], marks=[Mark("nonfinite", "größer — 漢", 1e9)])
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    done = programs.run(["-m", "ddpstats", "report", str(tmp_path)], environ=ascii_only, fresh=True)
    assert (done.returncode, done.stderr) == (1, "")
    assert "gr\\xf6\\xdfer \\u2014 \\u6f22" in done.stdout


_PRINTS_AND_FAILS = """
import sys
from ddpstats import cli, demo

def run(args):
    print("the first line")
    open("/none/donn\u00e9es\x1b[2J\\nof two")

demo.run = run
sys.exit(cli.main(["demo"]))
"""


def test_output_before_an_error_is_kept() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | {"PYTHONUTF8": "1"}
    done = programs.Program(["-c", _PRINTS_AND_FAILS], environ, fresh=True).finish()
    assert (done.returncode, done.stdout) == (2, "the first line\n")
    message = "ddpstats demo: error: /none/donn\u00e9es\\x1b[2J\\nof two: No such file or directory\n"
    assert done.stderr == message


def test_full_disk_is_an_error_and_no_finding() -> None:
    """The program writes to the file that always is full."""
    code = "import os, sys; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); from ddpstats import cli; "
    done = programs.run(["-c", f"{code}sys.exit(cli.main(['lint', {__file__!r}]))"], fresh=True)
    assert (done.returncode, done.stderr) == (2, "ddpstats lint: error: No space left on device\n")
