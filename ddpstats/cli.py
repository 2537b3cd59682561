"""The ``ddpstats`` command: the table of verbs, and how one is run.

To add a verb, add a line to ``_VERBS``. Its module has ``EPILOG``, the examples below the options of its --help,
``EXIT_STATUS`` where the statuses are not those of `_EXIT_STATUS`, and two functions: ``add_arguments(parser)``, and
``run(args)``, which returns the exit status. The module is imported when its verb is used, so that ``ddpstats --help``
stays quick.

With ``--json`` every verb writes one JSON object to stdout and no more, except ``run``, whose stdout is the script's.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from ddpstats._base import config
from ddpstats._base.version import __version__
from ddpstats.errors import ConfigError, DdpstatsError

_PROG = "ddpstats"
_COULD_NOT_RUN = 2  # argparse's own status for arguments that it cannot use
_REQUIRED = "the following arguments are required: "  # argparse's own words
_EXIT_STATUS = "0 nothing found, 1 something found, 2 it could not run"  # of verbs that do not say another
_RUN = "run"  # its stdout is the script's, and so are its errors


class _Verb(NamedTuple):
    module: str
    help: str
    json: str = "print one JSON object instead of text for people"


class _Parser(argparse.ArgumentParser):
    """Reports missing arguments with an example of the command, not with its usage. Verbs have such a parser, too."""

    def error(self, message: str) -> NoReturn:
        example = re.search(rf"\b{self.prog} .*?(?=;|  |$)", self.epilog or "", re.MULTILINE)  # words follow some
        if not message.startswith(_REQUIRED) or example is None:
            super().error(message)
        missing = message.removeprefix(_REQUIRED).removesuffix(", ARGS")  # of a script, which may have none
        self.exit(_COULD_NOT_RUN, f"{self.prog}: error: missing: {missing}; for example: {example[0]}\n")


_VERBS = {
    _RUN: _Verb(
        "ddpstats.guard.run",
        "a training script under the guard, unchanged",
        json="with --nproc, where ranks failed: the diagnosis as a line of JSON on stderr, where there is one",
    ),
    "watch": _Verb("ddpstats.guard.watch", "what each rank of a running program does, and which rank is waited for"),
    "report": _Verb(
        "ddpstats.report", "where the ranks diverged, from what they recorded: text, JSON, a page to look at"
    ),
    "replay": _Verb("ddpstats.capture.replay", "a captured step, run again in one process, down to the first NaN"),
    "compare": _Verb("ddpstats.dump.analyze.compare", "two dumps, or the ranks of one: where they first differ"),
    "nan-origin": _Verb("ddpstats.dump.analyze.nan_origin", "the operation of a dump that made the first NaN"),
    "lint": _Verb("ddpstats.lint.lint", "collectives of a program that some ranks may not run, found in its text"),
    "doctor": _Verb(
        "ddpstats.doctor", "what differs between the ranks of a job: versions, environment, clocks, directories"
    ),
    "demo": _Verb("ddpstats.demo", "wrong averages, then right ones, on real ranks of this machine"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit status; 2 if it could not run, with the reason on stderr.

    2 also where stdout cannot be written, as on a full disk; 141, without a word, if whoever read its output has gone
    (``| head``).

    Args:
        argv: the words after ``ddpstats``; None takes those of this process.

    Raises:
        SystemExit: after ``--help`` and ``--version`` (0), and for arguments that make no sense (2), as argparse does.
    """
    if "ddpstats.guard.ending" in sys.modules:  # DDPSTATS_GUARD is for programs
        sys.modules["ddpstats.guard.ending"].cancel()
    words = sys.argv[1:] if argv is None else argv
    verb = next((word for word in words if not word.startswith("-")), "")
    if verb != _RUN and isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # characters that its encoding lacks are escaped
    try:
        args = _parser(verb).parse_args(words)
        if verb == _RUN and args.espnet and args.nproc is None:  # this process is a rank
            _patch_espnet()
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        _discard_stdout()
        return 141  # a shell's status for SIGPIPE
    except DdpstatsError as error:
        _print_error(verb, str(error).split("\n"))
        return _COULD_NOT_RUN
    except OSError as error:
        if verb == _RUN:
            raise
        _flush_stdout()
        where = "" if error.filename is None else f"{error.filename}: "
        _print_error(verb, [f"{where}{error.strerror or error}"])
        return _COULD_NOT_RUN
    except KeyboardInterrupt:
        return 130  # and for SIGINT


def _patch_espnet() -> None:
    """Let espnet use ddpstats. Raises `ConfigError` where that is impossible, and not switched off."""
    from ddpstats.integrations import install

    left = install("espnet").left
    if left and not config.is_disabled():
        raise ConfigError(f"--espnet: espnet is left as it is: {left['espnet']}")


def _print_error(verb: str, lines: Sequence[str]) -> None:
    from ddpstats._base.text import printable  # the error may quote an untrusted file

    print(f"{_PROG} {verb}: error: {printable(lines)}", file=sys.stderr)


def _flush_stdout() -> None:
    """Write what was printed before an error, unless the error is that stdout cannot be written."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        _discard_stdout()


def _discard_stdout() -> None:
    """Discard what is still in the buffer of stdout, which would raise once more when Python ends."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _parser(verb: str) -> argparse.ArgumentParser:
    """Return the parser of the command, with the arguments of this verb, if it is one."""
    parser = _Parser(
        prog=_PROG,
        description="The numbers that torch.distributed ranks report: right, or an error that names key and ranks.",
        epilog=f"to see what this is about:\n  {_PROG} demo\n\n{_PROG} VERB --help explains one",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, title="verbs")
    for name, entry in _VERBS.items():
        verb_parser = verbs.add_parser(
            name,
            help=entry.help,
            description=entry.help,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == verb:
            module = importlib.import_module(entry.module)
            status = getattr(module, "EXIT_STATUS", _EXIT_STATUS)
            verb_parser.epilog = f"{module.EPILOG}\n\nexit status: {status}"
            verb_parser.add_argument("--json", action="store_true", help=entry.json)
            module.add_arguments(verb_parser)
            verb_parser.set_defaults(run=module.run)
    return parser
