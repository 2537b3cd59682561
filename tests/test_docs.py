"""The programs of the tutorial pages run on two ranks, in order, and print what the page shows."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests import programs

DOCS = Path(__file__).parents[1] / "docs"
LIMIT_SEC = 150

# A notebook's way with a cell, as far as ours need it.
RUN_CELLS = """
import json, pathlib, sys
for cell in json.loads(pathlib.Path(sys.argv[1]).read_text())["cells"]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "code":
        magic, _, rest = source.partition("\\n")
        if magic.startswith("%%writefile "):
            pathlib.Path(magic.split()[1]).write_text(rest)
        else:
            exec(source)
"""


PAGE = (DOCS / "ten-minutes.md").read_text()
FILES = dict(re.findall(r'^```python title="([\w.]+)"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL))
BROKEN = FILES["train.py"]
REPAIRED = "import ddpstats\n" + re.sub(r"^def average.*?\n\n\n", FILES["average"] + "\n\n", BROKEN, flags=re.M | re.S)


@pytest.mark.slow
def test_the_commands_of_ten_minutes_print_what_the_page_shows(tmp_path: Path) -> None:
    shown = re.findall(r"^```console\n\$ (.*)\n((?:.*\n)*?)```$", PAGE, re.MULTILINE)
    assert len(shown) == 3
    error = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[0]
    for program, (command, output), text in zip((BROKEN, BROKEN, REPAIRED), shown, ("", error, ""), strict=True):
        (tmp_path / "train.py").write_text(program)
        verb, *arguments = shlex.split(command)
        if verb == "torchrun":
            assert arguments == ["--nproc-per-node", "2", "train.py"]
            verb, arguments = "torch.distributed.run", ["--standalone", *arguments]
        done = programs.of_torchrun(programs.run(["-m", verb, *arguments], timeout=LIMIT_SEC, cwd=tmp_path))
        assert any(done.statuses) is bool(text), done.stdout + done.stderr
        assert programs.without_gloo(done.stdout) == output, done.stderr
        assert text in done.stderr.replace(f"{tmp_path}/", "").replace("[rank0]: ", ""), done.stderr


@pytest.mark.parametrize(("program", "is_right"), [(BROKEN, False), (REPAIRED, True)], ids=["broken", "repaired"])
def test_the_test_of_ten_minutes_fails_with_the_wrong_average_alone(
    program: str, is_right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("train", program), ("test_train", FILES["test_train.py"])):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    test = importlib.import_module("test_train").test_ranks_that_hold_different_losses
    try:
        with contextlib.nullcontext() if is_right else pytest.raises(AssertionError):
            test()
    finally:
        del sys.modules["train"], sys.modules["test_train"]


def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path) -> None:
    notebook = DOCS / "two-ranks.ipynb"
    cells = json.loads(notebook.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells), "save it without outputs"
    (tmp_path / "run_cells.py").write_text(RUN_CELLS)
    done = programs.run(["run_cells.py", str(notebook)], timeout=LIMIT_SEC, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hold different things under 'acc'" in done.stdout
