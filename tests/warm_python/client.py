# What `Server.executable` runs, below a line that sets REAL. It imports little: it is started for every program.
import json
import os
import signal
import socket
import sys

REAL: str

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
ANSWER_BYTES = 256


def inherited() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.get_inheritable(int(name)):
                found.append(int(name))
        except OSError:  # that of the listing
            pass
    return found


def ask(server: socket.socket, fds: list[int]) -> int | None:
    """The pid of the fork, or None where the program needs an interpreter of its own."""
    asked = {"arguments": sys.argv[1:], "environ": dict(os.environ), "cwd": os.getcwd(), "fds": fds}
    network = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        server.connect(os.path.join(os.path.dirname(__file__), "socket"))
        socket.send_fds(server, [json.dumps(asked).encode()], [network, *fds])
        pid: int | None = json.loads(server.recv(ANSWER_BYTES))["pid"]
        return pid
    except (OSError, ValueError):  # the server is gone
        return None
    finally:
        os.close(network)


def main() -> None:
    fds = inherited()
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until it is known whose they are
    pid = ask(server, fds)
    if pid is not None:
        for number in FORWARDED:
            signal.signal(number, lambda number, frame: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    if pid is None:
        os.execv(REAL, [REAL, *sys.argv[1:]])  # noqa: F821
    for fd in fds:
        os.close(fd)  # the fork's end alone closes what somebody reads
    answer = server.recv(ANSWER_BYTES)
    code = json.loads(answer)["exit_code"] if answer else -signal.SIGKILL
    if code < 0:
        if -code in FORWARDED:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
