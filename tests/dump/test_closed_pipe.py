"""A reader that has gone, as in ``| head``, is the end of the output, and no error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dump.dumps import forward, leaf, write


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_closed_pipe_ends_a_verb_quietly(tmp_path: Path, options: list[str]) -> None:
    step = write(tmp_path, {"Torch.log.0.forward": forward(leaf(), out=leaf(float("nan")))})
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "ddpstats", "nan-origin", str(step), *options],
            stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False,
        )  # fmt: skip
    finally:
        os.close(writer)
    assert ended.stderr == b""
    assert ended.returncode == 141
