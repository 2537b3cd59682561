"""Python programs in processes of their own, forked where that is the same as a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

from ddpstats.testing._rank_main import RankSpec
from ddpstats.testing._rank_process import rank_environ
from ddpstats.testing._rank_server import Forked, RankServer

PRELOADED = ("torch._dynamo", "numpy", "pytest")
"""What optimizers and DDP import at their first use, and the tests' own modules. Nothing of ddpstats: programs are also
about how it is imported."""

server = RankServer(rank_environ(RankSpec(0, 1, 0, 0, 0, 0), {}), PRELOADED)


def start(
    command: Sequence[str], environ: Mapping[str, str], out: IO[Any], err: IO[Any]
) -> subprocess.Popen[bytes] | Forked:
    """``python COMMAND...``, in a session of its own: a path or ``-m`` and a module, and its arguments."""
    if server.serves(environ):
        return server.start_script(command, environ, out.fileno(), err.fileno())
    whole = [sys.executable, *command]
    return subprocess.Popen(whole, env=dict(environ), stdout=out, stderr=err, start_new_session=True)
