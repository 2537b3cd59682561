"""The command line: verbs, help, exit statuses. What a verb does is tested where the verb is."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import ddpstats
from ddpstats import cli
from ddpstats._base.marks import Mark
from tests.report import records

LIMIT_SEC = 60


def ddpstats_command(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ddpstats", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SEC, check=False)


def verb(monkeypatch: pytest.MonkeyPatch, run: object, name: str = "greet") -> None:
    """Add a verb as a later release would: a line in the table, and a module."""
    module = types.ModuleType(f"a_module_for_{name}")
    vars(module).update(run=run, add_arguments=lambda parser: parser.add_argument("words", nargs=argparse.REMAINDER))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli._VERBS, name, cli._Verb(module.__name__, "say hello"))


def test_help_names_every_verb_and_what_it_does() -> None:
    done = ddpstats_command("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search("demo +wrong averages, then right ones", done.stdout)
    assert "ddpstats VERB --help" in done.stdout


@pytest.mark.parametrize("args", [["--help"], ["demo", "--help"], ["doctor", "--help"], ["--version"], ["dmeo"]])
def test_no_torch_where_no_rank_is_started(args: list[str]) -> None:
    code = (
        "import contextlib, sys, ddpstats.cli\n"
        f"with contextlib.suppress(SystemExit): ddpstats.cli.main({args})\n"
        "print({'torch', 'numpy'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SEC, check=False)
    assert done.stdout.endswith("set()\n"), done.stdout + done.stderr


def test_version() -> None:
    done = ddpstats_command("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"ddpstats {ddpstats.__version__}\n", "")


@pytest.mark.parametrize("name", cli._VERBS)
def test_every_verb_has_help_and_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: ddpstats {name} ")
    assert cli._VERBS[name].help in shown
    assert "--json" in shown


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "error: a VERB is missing; to begin with: ddpstats demo\n"),
        (["dmeo"], "invalid choice: 'dmeo' (choose from 'run', "),
        (["dmeo"], "; did you mean 'demo'?\n"),
        (["Compare", "a", "b"], "; did you mean 'compare'?\n"),
        (["nan_origin", "dumps"], "; did you mean 'nan-origin'?\n"),
        (["train.py", "--lr", "1"], "; to run a script under the guard: ddpstats run --nproc 2 train.py\n"),
        (["help"], "; see: ddpstats --help\n"),
        (["xyzzy"], "'demo')\n"),
        ([""], "invalid choice: ''"),
        (["--ranks", "2"], "error: "),
        (["demo", "--rank-count", "2"], "unrecognized arguments: --rank-count 2"),
        (["demo", "--ranks"], "--ranks: expected one argument"),
        (["demo", "--ranks", "two"], "--ranks: 'two' is not a number from 1 to 64"),
        (["demo", "--ranks", "0"], "--ranks: '0' is not a number from 1 to 64"),
        (["demo", "--ranks=-1"], "--ranks: '-1' is not a number from 1 to 64"),
        (["demo", "--ranks", "65"], "--ranks: '65' is not a number from 1 to 64"),
    ],
)
def test_arguments_that_make_no_sense(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(args)
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "usage: ddpstats" in shown.err
    assert said in shown.err


@pytest.mark.parametrize(
    ("args", "missing", "example"),
    [
        (["run"], "SCRIPT", "ddpstats run --nproc 2 train.py --lr 0.1"),
        (["run", "--nproc", "2"], "SCRIPT", "ddpstats run --nproc 2 train.py --lr 0.1"),
        (
            ["replay"],
            "BUNDLE, --model, --step",
            "ddpstats replay captures --model my_package:make_model --step my_package:step --bisect",
        ),
        (
            ["replay", "captures"],
            "--model, --step",
            "ddpstats replay captures --model my_package:make_model --step my_package:step --bisect",
        ),
        (["compare"], "A", "ddpstats compare dumps/now dumps/last_week"),
        (["nan-origin"], "DIR", "ddpstats nan-origin dumps/now"),
        (["report"], "DIR", "ddpstats report records"),
        (["watch"], "DIR", "ddpstats watch notes"),
        (["lint"], "PATH", "ddpstats lint train.py"),
    ],
)
def test_what_is_missing_is_a_sentence_and_a_command(
    args: list[str], missing: str, example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(args)
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert shown == ("", f"ddpstats {args[0]}: error: missing: {missing}; for example: {example}\n")
    module = importlib.import_module(cli._VERBS[args[0]].module)
    cli._verb_parser(args[0], module).parse_args(example.split()[2:])


def test_no_verb_shows_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([])
    shown = capsys.readouterr().err
    for name, one in cli._VERBS.items():
        assert re.search(rf"^  {name} +{re.escape(one.help)}$", shown, re.MULTILINE)


@pytest.mark.parametrize("name", cli._VERBS)
def test_help_says_how_a_verb_is_used_and_how_it_ends(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The examples are lines that the verb's own parser takes."""
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    shown = capsys.readouterr().out
    assert "exit status: " in shown
    examples = [line for line in shown.partition("\nexample")[2].splitlines() if line.startswith("  ")]
    assert examples
    for example in examples:
        for command in re.split(";", re.split(r"  +", example.strip())[0]):
            words = command.split()
            words = words[words.index("ddpstats") + 1 :]
            module = importlib.import_module(cli._VERBS[words[0]].module)
            cli._verb_parser(words[0], module).parse_args(words[1:])


def test_a_process_ends_with_the_status() -> None:
    done = ddpstats_command("dmeo")
    assert (done.returncode, done.stdout) == (2, "")
    assert "invalid choice: 'dmeo'" in done.stderr
    assert ddpstats_command().returncode == 2


def test_a_verb_is_a_line_and_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(args: argparse.Namespace) -> int:
        print(json.dumps([args.json, args.words]))
        return 7

    verb(monkeypatch, run)
    assert cli.main(["greet", "--json", "train.py", "--lr", "1", "--json"]) == 7
    assert json.loads(capsys.readouterr().out) == [True, ["train.py", "--lr", "1", "--json"]]


def test_what_a_verb_raises(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize("place", ["nowhere", "nowhere/deeper", "empty", "file", "file/deeper"])
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
def test_a_place_that_holds_nothing_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], next_words: str, place: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    path = str(tmp_path / place)
    for more in ([], ["--json"]):
        assert cli.main([words[0], path, *words[1:], *more]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith(f"ddpstats {words[0]}: error: {path}")
        assert next_words in shown.err
        assert "Traceback" not in shown.err


def test_the_second_place_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for first, second in (("nowhere", "here"), ("here", "nowhere")):
        (tmp_path / "here").mkdir(exist_ok=True)
        assert cli.main(["compare", str(tmp_path / first), str(tmp_path / second)]) == 2
        assert capsys.readouterr().err.startswith("ddpstats compare: error: ")


def test_an_error_that_quotes_a_strangers_file_cannot_command_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise ddpstats.errors.DdpstatsError("it holds \x1b[2J\nand more")

    verb(monkeypatch, run)
    assert cli.main(["greet"]) == 2
    assert capsys.readouterr().err == "ddpstats greet: error: it holds \\x1b[2J\nand more\n"


def test_an_encoding_that_lacks_a_character(tmp_path: Path) -> None:
    records.write_rank(tmp_path, 0, 1, [records.event(1, "loss")], marks=[Mark("nonfinite", "größer — 漢", 1e9)])
    command = [sys.executable, "-m", "ddpstats", "report", str(tmp_path)]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_SEC, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert "gr\\xf6\\xdfer \\u2014 \\u6f22" in done.stdout


_PRINTS_AND_FAILS = """
import sys
from ddpstats import cli
from ddpstats.demo import demo

def run(args):
    print("the first line")
    open("/none/donn\u00e9es\x1b[2J\\nof two")

demo.run = run
sys.exit(cli.main(["demo"]))
"""


def test_what_was_printed_before_a_file_cannot_be_opened_is_there() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PRINTS_AND_FAILS],
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | {"PYTHONUTF8": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=LIMIT_SEC,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "the first line\n")
    said = "ddpstats demo: error: /none/donn\u00e9es\\x1b[2J\\nof two: No such file or directory\n"
    assert done.stderr == said


def test_a_full_disk_is_no_finding() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "ddpstats", "lint", __file__]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=LIMIT_SEC, check=False)
    assert (done.returncode, done.stderr) == (2, "ddpstats lint: error: No space left on device\n")
