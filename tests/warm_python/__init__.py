"""A Python that has imported torch before: to import it takes longer than most programs of the tests.

`Server.executable` is for a command in place of `sys.executable`. It is a small program that asks a server for a fork
of itself, hands it descriptors, directory, environment and network, passes signals on, and ends as the fork ended. What
the fork starts with its own `sys.executable` comes from the server, too: torchrun's ranks, say. What a fork cannot be
(an option, or a variable that torch reads when it is imported, or a `sitecustomize`) becomes an interpreter of its own.

A fork ends as an interpreter does: its threads are waited for, its last words said, its exit functions run, its status
told. But it is not taken apart after that, which costs six times what the fork did. A program about that sets
`ENDS_WHOLE`.

Other than for a fresh interpreter, its parent is the server, and /proc has the server's environment of it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ddpstats.testing._rank_server import READ_AT_START

ENDS_WHOLE = "WARM_PYTHON_ENDS_WHOLE"
"""A variable of the environment: the program's interpreter is taken apart at its end, too."""
_HERE = Path(__file__).parent
LIMIT_SEC = 120.0  # until the server has imported torch: minutes on a loaded machine


class Server:
    """The process that forks, and the program that asks it.

    Args:
        preload: modules that a fork finds imported, other than torch. None of ddpstats: programs are also about how it
            is imported.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        self._directory = tempfile.mkdtemp(prefix="ddpstats-python-")
        self.executable = os.path.join(self._directory, "python")
        client = (_HERE / "client.py").read_text()
        Path(self.executable).write_text(f"#!{sys.executable} -ISE\nREAL = {sys.executable!r}\n{client}")
        os.chmod(self.executable, 0o755)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(os.path.join(self._directory, "socket"))
            listener.listen(128)
            environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
            self.process = subprocess.Popen(
                [sys.executable, "-c", _main(listener.fileno(), self.executable, preload, READ_AT_START, ENDS_WHOLE)],
                # Without a RANK it might be a rank of a test that hides what it was started with.
                env={**environ, "OMP_NUM_THREADS": "1", "RANK": "0"},
                stdin=subprocess.PIPE,
                pass_fds=(listener.fileno(),),
                start_new_session=True,  # an interrupt from the keyboard is not for it
            )

    def close(self) -> None:
        """End the server; what it has started ends with it."""
        self.process.kill()
        self.process.communicate()
        shutil.rmtree(self._directory)


def _main(*arguments: object) -> str:
    """Code for `__main__`, which the program of a fork finds empty."""
    server = _HERE / "server.py"
    return (
        "names = {'__name__': 'server'}\n"
        f"exec(compile({server.read_text()!r}, {str(server)!r}, 'exec'), names)\n"
        "with names['End']():\n"
        f"    exec(names['main']{arguments!r})"
    )
