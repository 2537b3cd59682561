"""Dumps larger than what is kept of them in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.dump.hand_made import forward, tensor

SIZE_BYTES = 200_000_000
LINES_BYTES = 80_000_000
LIMIT_BYTES = 50_000_000
PROGRAM = """
import os, re, resource, sys
from ddpstats.cli import main
small, big_a, big_b = sys.argv[1:]
def peak(*words):
    status = main(["compare", *words])
    if os.path.exists("/proc/self/status"):  # Linux's ru_maxrss begins with what the test's process had
        return status, 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
    return status, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
_, before = peak(small, small)
status, after = peak(big_a, big_b)
print("RESULT", status, after - before)
"""


def write(path: Path, size_bytes: int, *, last: float) -> Path:
    """A rank's dump; only the last entry depends on ``last``."""
    line = '"Torch.add.@.forward": ' + json.dumps(forward([tensor(1.0, 2.0)] * 4, [tensor(3.0, 4.0)] * 2))
    path.mkdir(parents=True)
    with (path / "dump.json").open("w") as file:
        file.write('{"task": "statistics", "level": "L1", "data": {\n')
        for number in range(size_bytes // len(line)):
            file.write(line.replace("@", str(number)) + ",\n")
        file.write('"Torch.last.0.forward": ' + json.dumps(forward([tensor(last)])) + "\n}}\n")
    return path


def write_lines(path: Path, size_bytes: int, *, last: float) -> Path:
    """The same as a run leaves it that was killed, with stacks."""
    stack = [f"File /home/somebody/project/model/layer{depth}.py, line 12, in forward, x = f(x)" for depth in range(20)]
    entry = forward([tensor(1.0, 2.0)], [tensor(3.0, 4.0)])
    line = json.dumps({"name": "Torch.add.@.forward", "entry": entry, "stack": stack, "parent": None})
    final = {"name": "Torch.last.0.forward", "entry": forward([tensor(last)]), "stack": stack, "parent": None}
    path.mkdir(parents=True)
    with (path / "dump.jsonl").open("w") as file:
        file.write('{"task": "statistics", "level": "L1"}\n')
        for number in range(size_bytes // len(line)):
            file.write(line.replace("@", str(number)) + "\n")
        file.write(json.dumps(final) + "\n")
    return path


def measured(*dumps: Path) -> tuple[str, int, int]:
    """What the comparison of the last two says, its status, and by how many bytes the process has grown in it."""
    words = [sys.executable, "-c", PROGRAM, *map(str, dumps)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    _, status, grown_bytes = done.stdout.splitlines()[-1].split()
    return done.stdout, int(status), int(grown_bytes)


def test_stacks_in_lines_are_not_kept_once_per_entry(tmp_path: Path) -> None:
    small = write_lines(tmp_path / "small" / "rank0", 10_000, last=1.0)
    sides = [write_lines(tmp_path / side / "rank0", LINES_BYTES, last=last) for side, last in (("a", 1.0), ("b", 9.0))]
    text, status, grown_bytes = measured(small, *sides)
    assert "File /home/somebody/project/model/layer0.py" in text
    assert status == 1
    assert grown_bytes < LIMIT_BYTES


def test_a_large_dump_is_not_kept_in_memory(tmp_path: Path) -> None:
    small = write(tmp_path / "small" / "rank0", 10_000, last=1.0)
    big_a = write(tmp_path / "a" / "rank0", SIZE_BYTES, last=1.0)
    big_b = tmp_path / "b" / "rank0"
    big_b.mkdir(parents=True)
    with (big_a / "dump.json").open("rb") as source, (big_b / "dump.json").open("wb") as target:
        while block := source.read(1 << 20):
            target.write(block.replace(b'"Max": 1.0, "Min": 1.0', b'"Max": 1.0, "Min": 9.0'))
    text, status, grown_bytes = measured(small, big_a, big_b)
    assert "first over the tolerance or not comparable: the same" in text
    assert "Torch.last.0.forward  input.0" in text
    assert status == 1
    assert grown_bytes < LIMIT_BYTES
