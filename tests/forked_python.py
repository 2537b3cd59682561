"""A command that runs what ``python ARGUMENTS`` runs in a fork, for programs that start interpreters by themselves.

A rank of torchrun's is an interpreter that imports torch, which costs seconds of a core. This command takes its place:

1. `path` starts a server, a fork that has torch, and writes the command: a small interpreter without ``site``.
2. The command sends the server its arguments, environment and directory, and all of its open files.
3. The server forks the program. Its end is the command's end, by the same status or signal.
4. Signals that end a program go from the command to the program. The end of the command ends the program.

A fork is no interpreter. At its end exit handlers run, but nothing is finalised. All forks have one seed for the hash
of str, the modules that the server has imported and its ``sys.path``. They are no children of the command's parent, and
a process that they leave behind is killed. A test that is about any of this has ``fresh_children``.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import json
import os
import shlex
import shutil
import signal
import socket
import struct
import sys
import tempfile
from pathlib import Path

from ddpstats.testing import forkserver
from tests import programs

_FD_FLOOR = 100  # above all numbers that a program's files may have
_MOST_FILES = 64

# Options of Python's own are for a real interpreter.
COMMAND = """#!/bin/sh
case "$1" in
  -u | -m* | -c | [!-]*) exec {python} -I -S {client} {address} "$@" ;;
  *) exec {python} "$@" ;;
esac
"""

CLIENT = """
import json, os, signal, socket, struct, sys

server = socket.socket(socket.AF_UNIX)
server.connect(sys.argv[1])
files = [0]
for fd in map(int, os.listdir("/dev/fd")):
    try:
        if fd > 2 and os.get_inheritable(fd):
            files.append(fd)
    except OSError:
        pass  # that of the listing
def pass_on(number, frame):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it has ended, and its status is on the way

theirs, ours = os.pipe()
request = json.dumps([sys.argv[2:], dict(os.environ), os.getcwd(), files]).encode("utf-8", "surrogateescape")
socket.send_fds(server, [struct.pack("q", len(request))], [1, 2, theirs, *files])
server.sendall(request)
for fd in [theirs, *files]:
    os.close(fd)
answers = server.makefile("rb")
pid = int(answers.readline() or sys.exit("the server that forks programs has ended"))
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, pass_on)
status = int(answers.readline() or 1)
if status < 0:
    if -status not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-status])
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@functools.cache
def path() -> str:
    """Return the path of the command, which serves the programs of this process."""
    directory = Path(tempfile.mkdtemp(prefix="ddpstats-python-", dir="/tmp" if os.path.isdir("/tmp") else None))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    address = directory / "server"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen(128)
    client, command = directory / "client.py", directory / "python"
    client.write_text(CLIENT)
    words = {"python": sys.executable, "client": str(client), "address": str(address)}
    command.write_text(COMMAND.format(**{name: shlex.quote(word) for name, word in words.items()}))
    command.chmod(0o700)
    server = forkserver.Fork(_serve, listener, str(command), environ=os.environ, stderr=2)
    server.start()
    atexit.register(server.kill)
    listener.close()
    return str(command)


def _serve(listener: socket.socket, command: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps who waits for a program
    while True:
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            break
        client.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    (size,), received = _received(client)
    request = b""
    while len(request) < size:
        piece = client.recv(size - len(request))
        if not piece:  # the command has been killed
            os._exit(1)
        request += piece
    arguments, environ, directory, numbers = json.loads(request.decode("utf-8", "surrogateescape"))
    pid = os.fork()
    if pid == 0:
        client.close()
        out, err, parent, *others = received
        for fd, number in zip(others, numbers, strict=True):
            os.dup2(fd, number)
            os.close(fd)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        forkserver.begin([out, err], environ, directory, parent)
        paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        programs.become(arguments, [*paths, *sys.path], command)
    for fd in received:
        os.close(fd)
    client.sendall(b"%d\n" % pid)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):  # the command has been killed, and with it the program
        client.sendall(b"%d\n" % status)
    os._exit(0)


def _received(client: socket.socket) -> tuple[tuple[int], list[int]]:
    """Receive the size of a request, and files, which get numbers that no program expects for another file."""
    size, files, _, _ = socket.recv_fds(client, 8, _MOST_FILES)
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FD_FLOOR) for fd in files]
    for fd in files:
        os.close(fd)
    return struct.unpack("q", size), moved
