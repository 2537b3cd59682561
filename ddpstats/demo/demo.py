"""``ddpstats demo``: a per-value all_reduce that reports a negative L1 loss, and `reduce_stats` that does not.

1. Every even rank holds one batch, every odd rank another, with other numbers of values under the same keys.
2. torchrun starts the ranks on this machine's loopback address; each runs `ddpstats.demo.rank`.
3. Each rank writes a `RankReport` into a temporary directory.
4. The true means, computed in plain Python, stand in a table beside what the ranks got.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from ddpstats._base.text import VerbReport
from ddpstats.demo.report import RankReport, as_json, as_text, is_right, report_name
from ddpstats.errors import DdpstatsError

MAX_RANKS = 64

_LIMIT_SEC = 120.0
_LIMIT_PER_RANK_SEC = 3.0  # sixty-four ranks that import torch on two cores take their time
_END_GRACE_SEC = 5.0
_TORCHRUN_GRACE_SEC = 40.0  # on SIGTERM torchrun kills its ranks for good after 30 s
_TAIL_LINES = 20
_MAX_TAILS = 3


EPILOG = """example:
  ddpstats demo --ranks 4

exit status: 0 it ran, 2 it could not"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=_number_of_ranks, default=2, metavar="N", help=f"1 to {MAX_RANKS} processes (default: 2)"
    )


def run(args: argparse.Namespace) -> int:
    """Raises `DdpstatsError` if the ranks could not run, or if ddpstats itself got a number wrong."""
    reports = measure(args.ranks, _LIMIT_SEC + args.ranks * _LIMIT_PER_RANK_SEC)
    text = as_text(reports, colour=_wants_colour())
    VerbReport(0, lambda: text, lambda: as_json(reports), indent=2).show(args.json)
    if not is_right(reports):
        raise DdpstatsError("ddpstats got a number wrong here, which is a bug of ours: please report it")
    return 0


def _number_of_ranks(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MAX_RANKS}")
    return int(text)


def _wants_colour() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


# -- the ranks --------------------------------------------------------------------------------------------------------


def measure(ranks: int, limit_sec: float) -> list[RankReport]:
    """Run the demo on ``ranks`` processes, which are all gone when this returns or raises; the reports in rank order.

    Raises:
        DdpstatsError: a rank failed, or they took longer than ``limit_sec`` seconds; with the end of their stderr.
    """
    with tempfile.TemporaryDirectory(prefix="ddpstats-demo-") as name:
        directory = Path(name)
        with _torchrun(ranks, directory) as torchrun:
            try:
                status = torchrun.wait(limit_sec)
            except subprocess.TimeoutExpired:
                status = None
        if status != 0:
            raise DdpstatsError(_failure(directory, status, limit_sec))
        return [RankReport.from_json((directory / report_name(rank)).read_text()) for rank in range(ranks)]


@contextlib.contextmanager
def _torchrun(ranks: int, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    with open(directory / "torchrun.log", "wb") as log:
        torchrun = subprocess.Popen(
            _command(ranks, directory),
            cwd=directory,
            env=_environ(os.environ),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for us alone; we end torchrun
        )
    try:
        yield torchrun
    finally:
        _end(torchrun)


def _command(ranks: int, directory: Path) -> list[str]:
    here = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "127.0.0.1"]
    logs = ["--log-dir", str(directory / "logs"), "--redirects", "2"]  # each rank's stderr in a file of its own
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(ranks)),
        *(*here, *logs, "-m", "ddpstats.demo.rank", str(directory)),
    ]


def _environ(ours: Mapping[str, str]) -> dict[str, str]:
    """Ours without what an outer torchrun or its user set, and with imports that are found as they are found here.

    Also without DDPSTATS_GUARD: the demo's first half is what the guard is there to stop.
    """
    foreign = ("PET_", "TORCHELASTIC_", "DDPSTATS_GUARD")
    kept = {name: value for name, value in ours.items() if not name.startswith(foreign)}
    return kept | {
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }


def _end(torchrun: subprocess.Popen[bytes]) -> None:
    """Leave nothing behind. Every rank, in a session of its own, ends when the pipe on its stdin closes.

    That also holds where this process is killed. A rank that is stopped cannot: torchrun kills it, when asked to end.
    """
    assert torchrun.stdin is not None
    torchrun.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        torchrun.wait(_END_GRACE_SEC)
    torchrun.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        torchrun.wait(_TORCHRUN_GRACE_SEC)
    torchrun.kill()
    torchrun.wait()


def _failure(directory: Path, status: int | None, limit_sec: float) -> str:
    what = f"took longer than {limit_sec:g} s, and were ended" if status is None else "failed"
    torchrun_said = _tail(directory / "torchrun.log")
    last_words = _last_known_status(directory) or [f"the end of what torchrun said:\n{torchrun_said}"]
    return "\n".join([f"the ranks {what}", *last_words])


def _last_known_status(directory: Path) -> list[str]:
    """The ends of the stderr of the ranks that have no result; tracebacks first, the earliest of them at the top."""
    logs = {int(log.parent.name): log for log in (directory / "logs").glob("**/stderr.log") if log.stat().st_size}
    missing = [rank for rank in logs if not (directory / report_name(rank)).exists()]
    missing.sort(
        key=lambda rank: ("Traceback" not in logs[rank].read_text(errors="replace"), logs[rank].stat().st_mtime_ns)
    )
    return [f"the end of rank {rank}'s stderr:\n{_tail(logs[rank])}" for rank in missing[:_MAX_TAILS]]


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    return "\n".join(f"  {line}" for line in lines)
