"""``ddpstats run`` runs a script as it is, under the guard.

Under torchrun (``torchrun --nproc-per-node 2 -m ddpstats run train.py``) this process is a rank, and runs the script in
itself: ``sys.argv``, ``__main__``, exit status and traceback are those of ``python train.py``. By itself, with
``--nproc N``, it starts torchrun on this machine. Where ranks failed and none of them has raised why, it finds that in
their records: gloo aborts a process whose peer sends another size, and nothing inside that process can report it. With
``--watch`` it reads the records meanwhile, and prints what the ranks do (`watch`).
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import json
import os
import pkgutil
import runpy
import sys
import tempfile
import threading
import traceback
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ddpstats._base import config
from ddpstats.errors import ConfigError, DdpstatsError
from ddpstats.guard.printing import TO_RUN, errors_behind, strip
from ddpstats.guard.record import diagnose, findings_as_json, read_records
from ddpstats.guard.watch import EVERY_SEC, Lines, Records, picture_of

if TYPE_CHECKING:
    from ddpstats.guard.guard import collective_guard

_MODES = ("strict", "step", "record", "off")  # as `group.MODES`, without torch: the launcher needs none so far

EPILOG = """examples:
  ddpstats run --nproc 2 train.py --lr 0.1                      two ranks on this machine
  torchrun --nproc-per-node 2 -m ddpstats run train.py --lr 0.1 the same, started by torchrun
  ddpstats run --nproc 2 --guard record --record-dir records train.py; ddpstats report records
  ddpstats run --nproc 2 --watch train.py                       and show what each rank is doing"""
EXIT_STATUS = """the script's own, or 1 in place of 0 where the guard finds a mismatch at its end; with --nproc
that of the rank that failed first; 128 + N where signal N ended it, or came to this command"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--guard", choices=_MODES, help="the mode of the guard (default: DDPSTATS_GUARD, or strict)")
    parser.add_argument("--no-labels", action="store_true", help="compare operations and shapes, not keys")
    timeout = "how long a collective waits for other ranks (default: the timeout of its process group)"
    parser.add_argument("--timeout-sec", type=float, metavar="S", help=timeout)
    records = "each rank's flight record, for `ddpstats report` and `watch`"
    parser.add_argument("--record-dir", "--watch-dir", metavar="DIR", help=records)
    parser.add_argument("--watch", action="store_true", help="with --nproc: print on stderr what each rank is doing")
    ranks = "start N ranks on this machine (without: be a rank of torchrun's)"
    parser.add_argument("--nproc", type=int, metavar="N", help=ranks)
    parser.add_argument("--espnet", action="store_true", help="let espnet's trainers use ddpstats")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name, as in python -m")
    parser.add_argument("script", metavar="SCRIPT", help="the program: a file, a directory or a zip file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")


def run(args: argparse.Namespace) -> int:
    """Return the script's own exit status. Raises `ConfigError` for options that make no sense."""
    args.guard = args.guard or config.choice("DDPSTATS_GUARD", "strict", _MODES)
    args.record_dir = args.record_dir or os.environ.get("DDPSTATS_RECORD_DIR") or None
    if not args.module and not os.path.exists(args.script):
        raise ConfigError(f"there is no file {args.script}. Give the path of the program, or -m and a module's name.")
    if args.guard == "record" and args.record_dir is None:
        raise ConfigError("--guard record needs --record-dir DIR, where the records are written")
    if args.watch and (args.nproc is None or args.guard == "off"):
        raise ConfigError("--watch is for --nproc N, and for a guard that is not off. Or run `ddpstats watch DIR`.")
    if args.nproc is not None and (args.nproc < 1 or "TORCHELASTIC_RUN_ID" in os.environ):
        raise ConfigError("--nproc starts N ranks, at least one, and not in a rank of torchrun's. Leave --nproc out.")
    return _run_here(args) if args.nproc is None else _launch(args)


# -- in this process --------------------------------------------------------------------------------------------------


def _run_here(args: argparse.Namespace) -> int:
    from ddpstats.guard.ending import Ending  # imports torch, which `--help` need not
    from ddpstats.guard.guard import collective_guard

    guard = collective_guard(
        args.guard, infer_labels=not args.no_labels, timeout_sec=args.timeout_sec, record_dir=args.record_dir
    )
    ending = Ending(guard, lambda: _print_last_line(guard, ending.error))
    if args.guard != "off":
        ending.begin()
        if args.record_dir is not None:
            _record_steps(guard)
    sys.argv = [args.script, *args.arguments]
    try:
        _run_as_main(args.script, args.module)
    except SystemExit as error:
        if error.code not in (None, 0):
            ending.error = error
        raise
    except BaseException as error:
        ending.error = error
        return _print_error(error)
    return 0


def _run_as_main(script: str, is_module: bool) -> None:
    """Run the script as Python does, in a ``__main__`` that stays: threads and exit handlers pickle what it defines.

    ``runpy``'s public functions restore the module before.
    """
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main)["__builtins__"] = builtins  # the module, as in a script that Python runs
    if is_module:
        runpy._run_module_as_main(script)  # type: ignore[attr-defined]
        return
    script = os.path.abspath(script)
    if os.path.isdir(script) or zipfile.is_zipfile(script):
        sys.path[0] = script
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
        with open(script, "rb") as file:
            code = pkgutil.read_code(file)  # None where the script is not compiled yet
        code = code or compile(Path(script).read_bytes(), script, "exec", dont_inherit=True)
        runpy._run_code(code, vars(main), None, "__main__", script_name=script)  # type: ignore[attr-defined]


def _record_steps(guard: collective_guard) -> None:
    """Let the record say how many steps the optimizer has made."""
    import torch
    from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

    def record_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            guard._watching.recording.step(optimizer)

    register_optimizer_step_post_hook(record_step)


def _print_last_line(guard: collective_guard, error: BaseException | None) -> None:
    """Print it on stderr, whatever the program does with logging, but not below an error of the program."""
    last_line = guard.last_line()
    if last_line is not None and (error is None or isinstance(error, SystemExit)):
        print(f"ddpstats run: {last_line[1]}", file=sys.stderr)


def _print_error(error: BaseException) -> int:
    """Print what the program ended with, as Python does: from its own first line on. Return its status."""
    sys.stdout.flush()
    if isinstance(error, ValueError) and "environment variable" in str(error) and "RANK" not in os.environ:
        print(f"ddpstats run: the program asks for its rank, and has none. {TO_RUN}", file=sys.stderr)
        return 1
    trace = strip(error)
    while trace is not None and trace.tb_frame.f_globals.get("__name__") == "runpy":
        trace = trace.tb_next
    error.__traceback__ = trace
    sys.excepthook(type(error), error, trace)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


# -- as a launcher ----------------------------------------------------------------------------------------------------


def _launch(args: argparse.Namespace) -> int:
    """Be torchrun, but return the status of the rank that failed first; 128 + N where signal N ended it, as in a shell.

    Also where signal N comes to this process: torchrun passes it on to the ranks, and kills those that stay for 30 s.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException, errors

    with tempfile.TemporaryDirectory(prefix="ddpstats-run-") as scratch:
        directory = args.record_dir or scratch
        words = ["--standalone", f"--nproc-per-node={args.nproc}", "-m", "ddpstats", "run"]
        words += ["--guard", args.guard, "--record-dir", directory]
        words += [] if args.timeout_sec is None else ["--timeout-sec", str(args.timeout_sec)]
        flags = {"--no-labels": args.no_labels, "--espnet": args.espnet, "-m": args.module}
        words += [*(flag for flag, is_set in flags.items() if is_set), args.script, *args.arguments]
        try:
            with _watch_records(directory) if args.watch else contextlib.nullcontext():
                torchrun.main(words)
            return 0
        except errors.ChildFailedError as error:
            traceback.print_exception(type(error), error, None)
            if args.guard != "off":
                _explain(directory, args.json)
            status = error.get_first_failure()[1].exitcode
            return status if status >= 0 else 128 - status
        except Exception as error:  # torch's own code may fail where the signal has come in its middle
            came = next((each for each in errors_behind(error) if isinstance(each, SignalException)), None)
            if came is None:
                raise
            print(f"ddpstats run: ended by {came.sigval.name}, and all ranks with it", file=sys.stderr)
            return 128 + came.sigval


@contextlib.contextmanager
def _watch_records(directory: str) -> Iterator[None]:
    """Print on stderr what the ranks do meanwhile, from their records."""
    view, records, has_ended = Lines(sys.stderr), Records(directory), threading.Event()

    def print_states() -> None:
        is_last = False
        while not is_last:
            is_last = has_ended.wait(EVERY_SEC)
            with contextlib.suppress(DdpstatsError, OSError):  # records of another machine, a closed stderr: it goes on
                view.show(picture_of(records.look()))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(print_states)
        try:
            yield
        finally:
            has_ended.set()


def _explain(directory: str, in_json: bool) -> None:
    """Print on stderr, for stdout is the script's, what no rank has raised as a verdict; in JSON in any case."""
    try:
        has_verdict = any("ALARM of guard" in rank.remarks for rank in Records(directory).look())
        records = read_records(directory)
    except (OSError, ValueError, DdpstatsError):
        return  # no rank came as far as its first collective
    findings = diagnose(records)
    if findings and in_json:
        print(json.dumps({"findings": findings_as_json(findings)}), file=sys.stderr)
    elif findings and not has_verdict:
        messages = "\n\n".join(finding.message for finding in findings)
        print(f"\nddpstats run: {messages}", file=sys.stderr)
