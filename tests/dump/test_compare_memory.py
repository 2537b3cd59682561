"""`ddpstats compare` streams through dumps: two that are larger than the memory it may take are compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import programs
from tests.dump.hand_made import forward, tensor

SIZE_BYTES = 15_000_000
LIMIT_BYTES = 10_000_000
PROGRAM = """
import re, sys
from ddpstats.cli import main
def compare(*words):
    status = main(["compare", *words])
    return status, 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
_, before = compare(*sys.argv[1:3])
status, after = compare(*sys.argv[3:])
print("RESULT", status, after - before)
"""


def dump(path: Path, layout: str, size_bytes: int, *, mean: float) -> str:
    """Write a rank's dump, whole or as a killed run leaves it; ``mean`` is one of the last entry's numbers."""
    path.mkdir(parents=True)
    stack = [f"File /home/somebody/project/model/layer{depth}.py, line 12, in forward, x = f(x)" for depth in range(20)]
    entry = forward(*[tensor(1.0, 2.0)] * 4, out=[tensor(3.0, 4.0)] * 2)
    last = forward({**tensor(1.0, 2.0), "Mean": mean})
    with (path / layout).open("w") as file:
        if layout == "dump.json":
            file.write('{"task": "statistics", "level": "L1", "ddpstats": 1, "data": {\n')
            line = f'"Torch.add.@.forward": {json.dumps(entry)},\n'
            end = f'"Torch.last.0.forward": {json.dumps(last)}\n}}}}\n'
        else:
            file.write('{"task": "statistics", "level": "L1"}\n')
            line, end = (
                json.dumps({"name": f"Torch.{name}.forward", "entry": raw, "stack": stack, "parent": None}) + "\n"
                for name, raw in (("add.@", entry), ("last.0", last))
            )
        for number in range(size_bytes // len(line)):
            file.write(line.replace("@", str(number)))
        file.write(end)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dump.json", "dump.jsonl"])
def test_large_dumps_are_compared_without_being_kept_in_memory(tmp_path: Path, layout: str) -> None:
    small = dump(tmp_path / "small" / "rank0", layout, 10_000, mean=1.5)
    a = dump(tmp_path / "a" / "rank0", layout, SIZE_BYTES, mean=1.5)
    b = dump(tmp_path / "b" / "rank0", layout, SIZE_BYTES, mean=9.0)
    done = programs.run(["-c", PROGRAM, small, small, a, b], fresh=True)
    assert done.returncode == 0, done.stderr
    assert "Torch.last.0.forward  input.0" in done.stdout
    assert ("File /home/somebody/project/model/layer0.py" in done.stdout) == (layout == "dump.jsonl")
    _, status, grown_bytes = done.stdout.splitlines()[-1].split()
    assert int(status) == 1
    assert int(grown_bytes) < LIMIT_BYTES
