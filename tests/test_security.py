"""ddpstats opens no port beside gloo's, fetches and unpickles nothing, and loads files as tensors (`SECURITY.md`)."""

from __future__ import annotations

import os
import re
import socket
import struct
from pathlib import Path

import torch
import torch.distributed as dist

import ddpstats
from ddpstats.testing import run_ranks

# -- what runs on the ranks -------------------------------------------------------------------------------------------


_LISTENS = "0A"


def listening() -> list[str]:
    """Return the addresses on which this process listens, one for each socket."""
    sockets = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:  # that of the listing itself
            continue
        sockets |= set(re.findall(r"socket:\[(\d+)\]", target))
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and fields[9] in sockets:
                addresses.append(_address(fields[1].partition(":")[0]))
    return sorted(addresses)


def _address(digits: str) -> str:
    words = struct.pack(f"={len(digits) // 8}I", *(int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)))
    return socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words)


def before_and_after() -> tuple[list[str], list[str]]:
    """Return where this process listens after torch alone has communicated, and while ddpstats does."""
    dist.all_reduce(torch.ones(1))
    before = listening()
    with ddpstats.collective_guard("strict"):
        dist.all_reduce(torch.ones(1))
        ddpstats.reduce_stats({"x": 1.0})
        ddpstats.any_rank(True)
        return before, listening()


# -- tests ------------------------------------------------------------------------------------------------------------


PACKAGE = Path(__file__).parents[1] / "ddpstats"
BESIDE_RUNS = ("testing", "demo")  # they start ranks and talk to them over socket pairs
READS_PICKLES = PACKAGE / "report" / "flight_recorder.py"  # torch's files, by an unpickler that looks up no name
UNPICKLES = r"^\s*(?:import|from) (?:pickle|marshal|shelve|dill|cloudpickle|joblib)\b"
FETCHES = r"^\s*(?:import|from) (?:urllib(?!\.parse)|http|requests|httpx|ftplib|smtplib|xmlrpc)\b"
LISTENS = r"\.listen\(|create_server\(|socketserver"
EXECUTES = r"(?<![.\w])(?:eval|exec)\("
SUSPICIOUS = re.compile("|".join((UNPICKLES, FETCHES, LISTENS, EXECUTES)), re.MULTILINE)


def test_what_listens_besides_torch_is_one_gloo_group_on_the_same_addresses() -> None:
    for before, after in run_ranks(before_and_after, 2).values():
        assert before, "nothing listens, not even gloo"
        assert set(after) == set(before)
        assert len(after) <= len(before) + 1


def test_nothing_that_runs_in_a_training_unpickles_listens_or_fetches() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in BESIDE_RUNS]
    assert len(files) > 100
    suspicious_lines = {path: SUSPICIOUS.findall(path.read_text()) for path in files}
    assert {path: lines for path, lines in suspicious_lines.items() if lines} == {READS_PICKLES: ["import pickle"]}


def test_such_code_would_be_seen() -> None:
    lines = ["import urllib.request", "    from pickle import loads", "x = socket.create_server(a)", "y = eval(text)"]
    assert all(map(SUSPICIOUS.search, lines))
    assert not any(map(SUSPICIOUS.search, ["model.eval()", "import pickletools", "# whoever listens"]))


def test_files_are_loaded_as_tensors_alone() -> None:
    pattern = r"(?<!safetensors\.)torch\.load\(.*\)"
    loads = [call for path in PACKAGE.rglob("*.py") for call in re.findall(pattern, path.read_text())]
    assert loads
    assert all("weights_only=True" in call for call in loads)
