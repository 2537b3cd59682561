"""``ddpstats run`` runs a script as it is, under the guard.

Under torchrun (``torchrun --nproc-per-node 2 -m ddpstats run train.py``) this process is a rank, and runs the script in
itself: ``sys.argv``, ``__main__``, exit status and traceback are those of ``python train.py``. By itself, with
``--nproc N``, it starts torchrun on this machine. Where ranks failed and none of them has printed why, it finds that in
their records: gloo aborts a process whose peer sends another size, and nothing inside that process can report it. With
``--watch`` it reads the records meanwhile, and prints what the ranks do (`watch`).
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import json
import math
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from ddpstats._base import config
from ddpstats.errors import ConfigError, DdpstatsError
from ddpstats.guard.record import read_records
from ddpstats.guard.record_report import as_json, as_text, diagnose
from ddpstats.guard.summary import TO_RUN
from ddpstats.guard.watch import EVERY_SEC, Lines, Records, picture_of

if TYPE_CHECKING:
    from ddpstats.guard.guard import collective_guard

_MODES = ("strict", "step", "record", "off")
ENDING_SEC = 40.0  # torchrun kills ranks that have not ended 30 s after an interrupt

EPILOG = """examples:
  ddpstats run --nproc 2 train.py --lr 0.1                      two ranks on this machine
  torchrun --nproc-per-node 2 -m ddpstats run train.py --lr 0.1 the same, started by torchrun
  ddpstats run --nproc 2 --guard record --record-dir records train.py; ddpstats report records
  ddpstats run --nproc 2 --watch train.py                       and show what each rank is doing

exit status: the script's own; with --nproc torchrun's: 1 where a rank ended with any other than 0"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    modes = "strict (default), step, record, off"
    parser.add_argument("--guard", choices=_MODES, metavar="MODE", help=f"{modes}; DDPSTATS_GUARD where it is set")
    parser.add_argument("--no-labels", action="store_true", help="compare operations and shapes, not keys")
    parser.add_argument(
        "--timeout-sec",
        type=float,
        metavar="S",
        help="how long a collective waits for other ranks (as long as its process group)",
    )
    parser.add_argument(
        "--record-dir", metavar="DIR", help="each rank's flight record, for `ddpstats report` and `watch`"
    )
    parser.add_argument("--watch", action="store_true", help="with --nproc: print on stderr what each rank is doing")
    parser.add_argument("--watch-dir", metavar="DIR", help="the same as --record-dir")
    parser.add_argument(
        "--nproc", type=int, metavar="N", help="start N ranks on this machine (without: be a rank of torchrun's)"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name, as in python -m")
    parser.add_argument("script", metavar="SCRIPT", help="the program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")


def run(args: argparse.Namespace) -> int:
    """Return the script's own exit status. Raises `ConfigError` for options that make no sense."""
    args.guard = args.guard or (config.guard_mode() if os.environ.get(config.GUARD) else "strict")
    _check(args)
    args.record_dir = args.record_dir or args.watch_dir or config.record_dir()
    if args.guard == "record" and args.record_dir is None:
        raise ConfigError("--guard record needs --record-dir DIR, where the records are written")
    return _run_here(args) if args.nproc is None else _launch(args)


def _check(args: argparse.Namespace) -> None:
    if args.nproc is not None and args.nproc < 1:
        raise ConfigError(f"--nproc {args.nproc}: at least one rank is needed")
    if args.nproc is not None and "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError("--nproc starts ranks, and this is one of torchrun's already. Leave --nproc out.")
    if args.watch and args.nproc is None:
        raise ConfigError(
            "--watch is for --nproc N, which starts the ranks. Where torchrun does, say --watch-dir DIR, and "
            "`ddpstats watch DIR` in another terminal of that machine."
        )
    if args.guard == "off" and (args.watch or args.watch_dir is not None):
        raise ConfigError("with --guard off nothing is seen that could be watched. Choose another mode.")
    if args.watch_dir is not None and args.record_dir not in (None, args.watch_dir):
        raise ConfigError("--record-dir and --watch-dir name one directory, which `watch` and `report` read. Give one.")
    if not args.module:
        _check_script(Path(args.script))


def _check_script(path: Path) -> None:
    if not path.exists():
        raise ConfigError(f"there is no file {path}. Give the path of the program, or -m and a module's name.")
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise ConfigError(f"{path} is a directory without a __main__.py. Give the path of the program.")


# -- in this process --------------------------------------------------------------------------------------------------


def _run_here(args: argparse.Namespace) -> int:
    from ddpstats.guard.ending import Ending  # imports torch, which `--help` need not
    from ddpstats.guard.guard import collective_guard

    guard = collective_guard(
        args.guard,
        infer_labels=not args.no_labels,
        timeout_sec=args.timeout_sec,
        record_dir=args.record_dir,
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
    vars(main)["__builtins__"] = builtins
    if is_module:
        runpy._run_module_as_main(script)  # type: ignore[attr-defined]
        return
    script = os.path.abspath(script)
    if os.path.isdir(script) or zipfile.is_zipfile(script):
        sys.path[0] = script
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
        is_compiled = script.endswith(".pyc")
        loader: Any = (SourcelessFileLoader if is_compiled else SourceFileLoader)("__main__", script)
        code = loader.get_code("__main__") if is_compiled else loader.source_to_code(loader.get_data(script), script)
        runpy._run_code(code, vars(main), None, "__main__", script_name=script)  # type: ignore[attr-defined]


def _record_steps(guard: collective_guard) -> None:
    """Let the record say how many steps the optimizer has made."""
    import torch
    from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

    def record_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            guard._record_step(optimizer)

    register_optimizer_step_post_hook(record_step)


def _print_last_line(guard: collective_guard, error: BaseException | None) -> None:
    """Print it on stderr, whatever the program does with logging, but not below an error of the program."""
    last_line = guard.last_line()
    if last_line is not None and (error is None or isinstance(error, SystemExit)):
        print(f"ddpstats run: {last_line[1]}", file=sys.stderr)


def _print_error(error: BaseException) -> int:
    """Print what the program ended with, and return its status."""
    from ddpstats.guard.printing import tell

    sys.stdout.flush()
    if _lacks_ranks(error):
        print(f"ddpstats run: the program asks for its rank, and has none. {TO_RUN}", file=sys.stderr)
    elif not tell(error, lambda: _print_as_python_does(error, one_rank_prints=True)):
        _print_as_python_does(error)
    sys.stderr.flush()
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _lacks_ranks(error: BaseException) -> bool:
    """Return whether this is how torch says that it was started without torchrun."""
    return isinstance(error, ValueError) and "environment variable" in str(error) and "RANK" not in os.environ


def _print_as_python_does(error: BaseException, one_rank_prints: bool = False) -> None:
    """Print it by the program's own `sys.excepthook`, if it has one, and from the script's first line on.

    Torch's hook, which begins each line with the rank, is left out where one rank prints for all.
    """
    from ddpstats.guard.printing import excepthook_of_program, strip

    trace = strip(error)
    while trace is not None and _is_ours(trace):
        trace = trace.tb_next
    if trace is not None:
        error.__traceback__ = trace
    hook = excepthook_of_program()
    if one_rank_prints and str(getattr(hook, "__module__", "")).startswith("torch."):
        hook = sys.__excepthook__
    hook(type(error), error, error.__traceback__)


def _is_ours(trace: TracebackType) -> bool:
    file = trace.tb_frame.f_code.co_filename
    return file.startswith("<frozen runpy") or file == runpy.__file__


# -- as a launcher ----------------------------------------------------------------------------------------------------


def _launch(args: argparse.Namespace) -> int:
    from ddpstats.guard.printing import was_told  # imports torch, which `--help` need not

    with tempfile.TemporaryDirectory(prefix="ddpstats-run-") as scratch:
        directory = args.record_dir or scratch
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.nproc}"]
        command += ["-m", "ddpstats", "run", "--guard", args.guard, *_options_for_ranks(args, directory)]
        failure = str(Path(scratch) / "failure.json")  # torchrun copies there what it found to have happened first
        environ = {**os.environ, "TORCHELASTIC_ERROR_FILE": failure}
        command += [args.script, *args.arguments]
        status = _run_to_its_end(command, environ, directory if args.watch else None)
        if status != 0 and args.guard != "off" and (args.json or not was_told(failure)):
            _explain(directory, args.json)
        return status


def _run_to_its_end(command: Sequence[str], environ: Mapping[str, str], watched: str | None) -> int:
    """Run the launcher and return its exit status. Print what the ranks do, from the records in ``watched``.

    After an interrupt waits for it to end, for torchrun has got that from a terminal, too, and ends its ranks. One that
    was sent to this process alone has not reached it: then, or at a second one, the launcher gets SIGTERM.
    """
    was_interrupted, ends_at = False, math.inf
    view, records = Lines(sys.stderr), None if watched is None else Records(watched)
    process = subprocess.Popen(command, env=environ)
    with _ending_with_this_process(process):
        while process.returncode is None:
            try:
                if time.monotonic() >= ends_at:
                    ends_at = math.inf
                    process.terminate()  # a torchrun that is killed would leave its ranks behind
                _show(view, records)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(EVERY_SEC)
            except KeyboardInterrupt:
                ends_at = time.monotonic() + (0.0 if was_interrupted else ENDING_SEC)
                was_interrupted = True
    _show(view, records, is_last=True)
    if was_interrupted:
        raise KeyboardInterrupt
    return process.returncode


def _show(view: Lines, records: Records | None, *, is_last: bool = False) -> None:
    with contextlib.suppress(DdpstatsError, OSError):  # another machine's records, a closed stderr: the program goes on
        ranks = [] if records is None else records.look()
        if ranks:
            view.show(picture_of(ranks), is_last=is_last)


@contextlib.contextmanager
def _ending_with_this_process(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass SIGTERM on, for torchrun then ends its ranks. An error of this process ends it as well: no rank is left."""
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        signal.signal(signal.SIGTERM, before)


def _options_for_ranks(args: argparse.Namespace, directory: str) -> list[str]:
    options = [] if args.guard == "off" else ["--record-dir", directory]
    options += ["--no-labels"] if args.no_labels else []
    options += [] if args.timeout_sec is None else ["--timeout-sec", str(args.timeout_sec)]
    return options + (["-m"] if args.module else [])


def _explain(directory: str, in_json: bool) -> None:
    """Print the diagnosis on stderr: stdout is the script's."""
    try:
        records = read_records(directory)
    except (OSError, ValueError):
        return  # no rank came as far as its first collective
    findings = diagnose(records)
    if findings:
        text = json.dumps(as_json(records, findings)) if in_json else f"\nddpstats run: {as_text(records, findings)}"
        print(text, file=sys.stderr)
